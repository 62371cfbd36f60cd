// The kernel of all operators that have none of their own here, and what it shares with those.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/stack.h>

namespace at {
class Tensor;
}

namespace sim {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Gives the tensor the shape and strides of another one, and its storage the bytes for it. Keeps both if the shape is
/// its own already.
void resize_to(const at::Tensor& tensor, const at::Tensor& like);

}  // namespace sim
