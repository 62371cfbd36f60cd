// Every operator that no other file registers. The meta kernel says which shapes come out, so that the host can
// allocate them and go on; the CPU kernel computes them on the stream, on the same memory.
#include "fallback.h"

#include <ATen/ops/_copy_from.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "costs.h"
#include "generator.h"
#include "settings.h"
#include "shapes.h"
#include "tensors.h"

namespace sim {

namespace {

using torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

at::Tensor as_kernel_argument(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (is_on_sim(tensor)) return with_promotion_of(on_host(tensor), tensor);
  return with_promotion_of(tensor.clone(), tensor);  // the host may write it before the kernel has read it
}

at::Tensor new_like(const at::Tensor& tensor, c10::Device device) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()).device(device));
}

/// An `out` argument as the worker sees it, and what the kernel is given.
struct Out {
  at::Tensor view;
  at::Tensor resizable;
};

/// One call of one operator, on the host.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack)
      : op_(op),
        signature_(signature_of(op)),
        stack_(stack),
        arguments_(stack.end() - signature_.writes.size(), stack.end()) {
    torch::jit::drop(stack_, arguments_.size());
    device_ = c10::Device(SIM, static_cast<c10::DeviceIndex>(find_device()));
  }

  void run() {
    const c10::DeviceGuard guard(device_);
    const auto shapes = infer_results(op_, signature_, arguments_);
    if (!shapes) return run_waiting();
    note_accesses();
    if (!settings().computes) return note_only(*shapes);
    prepare_kernel();
    const std::vector<Out> outs = prepare_outs();
    std::vector<Tensors> targets;  // for each new result, its tensors as the worker sees them
    Values fresh;
    for (const c10::IValue& shape : *shapes) {
      targets.emplace_back();
      fresh.push_back(mapped(shape, device_, [&](const at::Tensor& meta) {
        if (!meta.defined()) return targets.back().emplace_back(), at::Tensor();
        at::Tensor made = new_like(meta, device_);
        access_of(made, true, accesses_);
        targets.back().push_back(on_host(made));
        return made;
      }));
    }
    auto work = [call = kernel_call_, op = op_, &signature = signature_, outs, targets] {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), call.get());
      store(outs);
      store(*call, signature, targets);
    };
    enqueue(current_stream(device_.index()), signature_.name, accesses_, cost_of(signature_, arguments_, accesses_),
            std::move(work));
    push_results(fresh);
  }

 private:
  /// What `run` does where nothing is computed: allocates the results, and notes the task.
  void note_only(const Values& shapes) {
    Values fresh;
    for (const c10::IValue& shape : shapes) {
      fresh.push_back(mapped(shape, device_, [&](const at::Tensor& meta) {
        if (!meta.defined()) return meta;
        at::Tensor made = new_like(meta, device_);
        access_of(made, true, accesses_);
        return made;
      }));
    }
    const Cost cost = cost_of(signature_, arguments_, accesses_);
    enqueue(current_stream(device_.index()), signature_.name, accesses_, cost, {});
    // The generators go on as if it had drawn.
    for (const size_t i : signature_.generators) {
      const auto& given = arguments_[i];
      generator_for_operator(given.isNone() ? default_generator(device_.index()) : given.toGenerator());
    }
    push_results(fresh);
  }

  int find_device() const {
    std::optional<int> found;
    for (const auto& argument : arguments_) {
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        if (!found && is_on_sim(tensor)) found = tensor.device().index();
      });
      if (!found && argument.isDevice() && argument.toDevice().has_index()) found = argument.toDevice().index();
    }
    return found.value_or(current_device());
  }

  void note_accesses() {
    for (size_t i = 0; i < arguments_.size(); i++) {
      const bool writes = signature_.writes[i];
      for_each_tensor(arguments_[i], [&](const at::Tensor& tensor) { access_of(tensor, writes, accesses_); });
    }
  }

  void prepare_kernel() {
    for (size_t i = 0; i < arguments_.size(); i++) {
      kernel_call_->push_back(mapped(arguments_[i], at::kCPU, as_kernel_argument));
    }
    for (const size_t i : signature_.generators) {
      const auto& given = arguments_[i];
      const auto generator = given.isNone() ? default_generator(device_.index()) : given.toGenerator();
      (*kernel_call_)[i] = generator_for_operator(generator);
    }
  }

  /// Has the kernel fill views of the `out` arguments that it may resize: some kernels do, and resize them back.
  std::vector<Out> prepare_outs() {
    std::vector<Out> outs;
    for (const size_t i : signature_.outs) {
      auto& argument = (*kernel_call_)[i];
      argument = mapped(argument, at::kCPU, [&](const at::Tensor& view) {
        outs.push_back({view, on_host_resizable(view)});
        return outs.back().resizable;
      });
    }
    return outs;
  }

  static void store(const std::vector<Out>& outs) {
    for (const auto& [view, filled] : outs) {
      // torch warns of an `out` of a wrong shape, and resizes it. Here the tensor is the host's, who has gone on.
      TORCH_CHECK(view.sizes() == filled.sizes(), "`out` has shape ", view.sizes(), ", the result ", filled.sizes());
      if (view.data_ptr() != filled.data_ptr()) view.copy_(filled);
    }
  }

  static void store(const Stack& computed, const Signature& signature, const std::vector<Tensors>& targets) {
    auto target = targets.begin();
    for (size_t i = 0; i < computed.size(); i++) {
      if (signature.results[i] != Signature::NEW) continue;
      auto into = target++->begin();
      for_each_tensor(computed[i], [&](const at::Tensor& result) {
        if (into->defined() && result.defined()) into->copy_(result);
        ++into;
      });
    }
  }

  /// Computes first and allocates then: the host waits, as it does on a GPU for shapes that follow from values.
  void run_waiting() {
    note_accesses();
    prepare_kernel();
    std::vector<std::pair<at::Tensor, at::Tensor>> outs;  // the tensor of the device, and what the kernel fills
    for (const size_t i : signature_.outs) {
      const auto out = arguments_[i].toTensor();
      outs.emplace_back(out, at::empty({0}, at::TensorOptions().dtype(out.dtype())));
      (*kernel_call_)[i] = outs.back().second;
    }
    const auto error = std::make_shared<std::exception_ptr>();
    const auto stream = current_stream(device_.index());
    const Cost cost = cost_of(signature_, arguments_, accesses_);
    if (!settings().computes) {
      enqueue(stream, signature_.name, accesses_, cost, {});
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), kernel_call_.get());
    } else {
      enqueue(stream, signature_.name, accesses_, cost, [call = kernel_call_, op = op_, error] {
      try {
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), call.get());
      } catch (...) {
        *error = std::current_exception();  // raised below, as it is: the host is there to take it
      }
    });
    }
    synchronize_stream(stream, signature_.name + std::string(signature_.has_meta_kernel ? "" : ", no meta kernel"));
    if (*error) std::rethrow_exception(*error);
    for (auto& [out, filled] : outs) {
      resize_to(out, filled);
      at::_copy_from(filled, out, /*non_blocking=*/true);
    }
    Values fresh;
    for (size_t i = 0; i < kernel_call_->size(); i++) {
      if (signature_.results[i] != Signature::NEW) continue;
      fresh.push_back(mapped((*kernel_call_)[i], device_, [&](const at::Tensor& computed) {
        if (!computed.defined()) return computed;
        at::Tensor made = new_like(computed, device_);
        at::_copy_from(computed, made, /*non_blocking=*/true);
        return made;
      }));
    }
    push_results(fresh);
  }

  void push_results(const Values& fresh) {
    auto next = fresh.begin();
    for (const size_t source : signature_.results) {
      torch::jit::push(stack_, source == Signature::NEW ? *next++ : arguments_[source]);
    }
  }

  const c10::OperatorHandle& op_;
  const Signature& signature_;
  Stack& stack_;
  Values arguments_;
  c10::Device device_{SIM, 0};
  Accesses accesses_;
  // Shared with the task, and with nobody who has a Python object: see `enqueue`.
  std::shared_ptr<Stack> kernel_call_ = std::make_shared<Stack>();
};

}  // namespace

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView kernels_alone;
  Call(op, *stack).run();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace sim
