// Which tensors an operator will return, found on the host before any of them is computed.
#pragma once

#include "signature.h"

namespace sim {

/// Returns the new results as meta tensors; nothing if only the kernel can tell. Gives `out` arguments that are empty
/// their shapes.
std::optional<Values> infer_results(const c10::OperatorHandle& op, const Signature& signature,
                                    const Values& arguments);

/// Returns `made`, marked as a number of Python's if `tensor` is one: it takes no part in type promotion, as a tensor
/// would.
at::Tensor with_promotion_of(at::Tensor made, const at::Tensor& tensor);

}  // namespace sim
