// What is one kernel on a GPU, and several operators here: operators on lists of tensors, and the RMS norm.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "settings.h"
#include "streams.h"
#include "tensors.h"
#include "uncharged.h"

namespace sim {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

/// torch's kernel of an operator on lists, for any device: tensor by tensor.
void on_each(const c10::OperatorHandle& op, Stack* stack) {
  const OneKernel one;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void read_and_write(const char* name, const variable_list& read, const variable_list& written) {
  Accesses accesses;
  for (const auto& each : read) access_of(each, false, accesses);
  for (const auto& each : written) access_of(each, true, accesses);
  double bytes = 0;
  for (const Access& each : accesses) bytes += each.bytes;
  Cost cost;
  if (clock_runs()) cost = {Engine::compute, machine().launch + bytes / (machine().bytes_per_us * machine().reduction)};
  enqueue(stream_for(read.front()), name, accesses, cost, {});
}

/// The norm where nothing is computed, with the memory and the tasks of CUDA's kernels.
struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, int64_t dims) {
    auto sizes = x.sizes().vec();
    std::fill(sizes.end() - dims, sizes.end(), 1);
    const auto y = at::empty_like(x), deviation = at::empty(sizes, x.options().dtype(at::kFloat));
    read_and_write("_fused_rms_norm", {x, weight}, {y, deviation});
    context->save_for_backward({x, weight, deviation});
    context->mark_non_differentiable({deviation});
    return {y, deviation};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1];
    at::Tensor of_x, of_weight;
    if (context->needs_input_grad(0)) {
      of_x = at::empty_like(x);
      read_and_write("_fused_rms_norm_backward", {gradients[0], x, saved[2], weight}, {of_x});
    }
    if (weight.defined() && context->needs_input_grad(1)) {
      of_weight = at::empty_like(weight);
      read_and_write("_fused_rms_norm_backward", {gradients[0], x, saved[2]}, {of_weight});
    }
    return {of_x, of_weight, at::Tensor()};
  }
};

void rms_norm(const c10::OperatorHandle& op, Stack* stack) {
  // torch's composite kernel is the same for all devices, and each of its operators has its own backward.
  if (settings().computes) return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), stack);
  torch::jit::pop(*stack);  // epsilon
  const auto weight = torch::jit::pop(*stack).to<std::optional<at::Tensor>>();
  const auto dims = static_cast<int64_t>(torch::jit::pop(*stack).toIntVector().size());
  for (const auto& each : RmsNorm::apply(torch::jit::pop(*stack).toTensor(), weight.value_or(at::Tensor()), dims)) {
    torch::jit::push(*stack, each);
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const auto& [name, overload] : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.rfind("aten::_foreach_", 0) != 0) continue;
    const std::string full = overload.empty() ? name : name + "." + overload;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_each>());
  }
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_fused_rms_norm", torch::CppFunction::makeFromBoxedFunction<&rms_norm>());
}

}  // namespace

}  // namespace sim
