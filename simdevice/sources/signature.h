// What the fallback asks of an operator, and of the values it is called with.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

namespace sim {

using Values = std::vector<c10::IValue>;

/// What the fallback asks of an operator's schema. Found once for each operator.
struct Signature {
  static constexpr size_t NEW = SIZE_MAX;

  const char* name = "";            // "add.Tensor"
  std::vector<bool> writes;         // for each argument
  std::vector<size_t> results;      // for each result: the argument that it is, or NEW
  std::vector<size_t> outs;         // the arguments called `out`
  std::vector<size_t> generators;   // the arguments that are generators
  bool has_meta_kernel = false;
  bool returns_tensors = true;      // and nothing else
  bool returns_arguments = true;    // and nothing else: shapes are known
  bool keeps_statistics = false;    // layer norm's kind: see `meta_results`
};

const Signature& signature_of(const c10::OperatorHandle& op);

template <class Function>
void for_each_tensor(const c10::IValue& value, Function&& function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isTensorList()) {
    for (at::Tensor tensor : value.toTensorList()) function(tensor);
  } else if (value.isOptionalTensorList()) {
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      if (tensor) function(*tensor);
    }
  }
}

/// Returns the value with `function` applied to its tensors, and `device` in place of its device.
template <class Function>
c10::IValue mapped(const c10::IValue& value, c10::Device device, Function&& function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isDevice()) return device;
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (at::Tensor tensor : value.toTensorList()) tensors.push_back(function(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      tensors.push_back(tensor ? std::optional<at::Tensor>(function(*tensor)) : std::nullopt);
    }
    return tensors;
  }
  return value;
}

}  // namespace sim
