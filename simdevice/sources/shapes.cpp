#include "shapes.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/hash.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

#include "fallback.h"
#include "uncharged.h"

namespace sim {

at::Tensor with_promotion_of(at::Tensor made, const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

namespace {

at::Tensor as_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || (tensor.device().is_cpu() && tensor.dim() == 0)) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kMeta);
  return with_promotion_of(at::empty_strided(tensor.sizes(), tensor.strides(), options), tensor);
}

// What meta kernels said is remembered: many are written in Python, and take a hundred times as long as the rest of a
// call.

/// All that a meta kernel sees of a call, as numbers. Two calls with the same key have results of the same shapes.
class Key {
 public:
  Key(const Signature& signature, const Values& arguments) {
    add(reinterpret_cast<intptr_t>(signature.name));  // interned: one address for each operator
    add(static_cast<int64_t>(c10::get_default_dtype_as_scalartype()));
    for (const auto& argument : arguments) add_value(argument);
  }

  /// Whether there was nothing a key cannot hold.
  bool is_complete() const { return is_complete_; }

  bool operator==(const Key& other) const { return numbers_ == other.numbers_; }
  size_t hash() const { return c10::hash<std::vector<int64_t>>()(numbers_); }

 private:
  void add(int64_t number) { numbers_.push_back(number); }
  void add_all(c10::IntArrayRef numbers) {
    add(static_cast<int64_t>(numbers.size()));
    numbers_.insert(numbers_.end(), numbers.begin(), numbers.end());
  }
  void add_double(double number) {
    int64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    add(bits);
  }

  void add_tensor(const at::Tensor& tensor) {
    add(tensor.defined());
    if (!tensor.defined()) return;
    // A meta kernel may look at the value of a number that is a CPU tensor.
    if (tensor.device().is_cpu() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) is_complete_ = false;
    add(static_cast<int64_t>(tensor.scalar_type()) * 2 + tensor.unsafeGetTensorImpl()->is_wrapped_number());
    add_all(tensor.sizes());
    add_all(tensor.strides());
  }

  void add_value(const c10::IValue& value) {
    add(static_cast<int64_t>(value.isTensorList()) * 4 + value.isOptionalTensorList() * 2 + value.isNone());
    if (value.isNone() || value.isGenerator() || value.isDevice()) return;
    if (value.isTensor()) return add_tensor(value.toTensor());
    if (value.isTensorList()) {
      const auto tensors = value.toTensorList();
      add(static_cast<int64_t>(tensors.size()));
      for (at::Tensor tensor : tensors) add_tensor(tensor);
    } else if (value.isOptionalTensorList()) {
      const auto tensors = value.toOptionalTensorList();
      add(static_cast<int64_t>(tensors.size()));
      for (std::optional<at::Tensor> tensor : tensors) add_tensor(tensor.value_or(at::Tensor()));
    } else if (value.isInt()) {
      add('i'), add(value.toInt());
    } else if (value.isBool()) {
      add('b'), add(value.toBool());
    } else if (value.isDouble()) {
      add('d'), add_double(value.toDouble());
    } else if (value.isIntList()) {
      add('I'), add_all(value.toIntVector());
    } else if (value.isString()) {
      add('s'), add(static_cast<int64_t>(value.toStringRef().size()));
      for (const char letter : value.toStringRef()) add(letter);
    } else {
      is_complete_ = false;
    }
  }

  std::vector<int64_t> numbers_;
  bool is_complete_ = true;
};

struct KeyHash {
  size_t operator()(const Key& key) const { return key.hash(); }
};

class Memory {
 public:
  std::optional<Values> find(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = known_.find(key);
    return it == known_.end() ? std::nullopt : std::optional<Values>(it->second);
  }
  void keep(const Key& key, const Values& results) {
    constexpr size_t MOST = 10000;
    std::lock_guard<std::mutex> lock(mutex_);
    if (known_.size() >= MOST) known_.clear();
    Values copies;
    // Copies that Python has never seen: they are dropped by whichever thread comes by.
    for (const auto& result : results) copies.push_back(mapped(result, at::kMeta, as_meta));
    known_[key] = std::move(copies);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Key, Values, KeyHash> known_;
};

Memory& memory() {
  static auto& memory = *new Memory;
  return memory;
}

// The meta kernel is written for GPUs, which keep mean and deviation in float32. CPU kernels keep them in the dtype of
// the weights, and their backward kernels want them so.
void match_statistics(const Values& arguments, Values& results) {
  auto dtype = arguments[0].toTensor().scalar_type();
  for (const size_t i : {1, 2}) {
    if (arguments[i].isTensor() && arguments[i].toTensor().defined()) dtype = arguments[i].toTensor().scalar_type();
  }
  for (const size_t i : {1, 2}) results[i] = results[i].toTensor().to(dtype);
}

void resize_outs(const c10::IValue& out, const c10::IValue& meta) {
  std::vector<at::Tensor> shapes;
  for_each_tensor(meta, [&](const at::Tensor& tensor) { shapes.push_back(tensor); });
  auto shape = shapes.begin();
  for_each_tensor(out, [&](const at::Tensor& tensor) { resize_to(tensor, *shape++); });
}

/// Whether every `out` has its shape. Where torch made the tensor for a structured operator it has; and where the user
/// gave one of another shape, not empty, the task fails.
bool outs_are_ready(const Signature& signature, const Values& arguments) {
  bool ready = true;
  for (const size_t i : signature.outs) {
    for_each_tensor(arguments[i], [&](const at::Tensor& out) { ready = ready && out.numel() > 0; });
  }
  return ready;
}

std::optional<Values> ask_meta_kernel(const c10::OperatorHandle& op, const Signature& signature,
                                      const Values& arguments) {
  torch::jit::Stack stack;
  for (const auto& argument : arguments) stack.push_back(mapped(argument, at::kMeta, as_meta));
  Values outs;
  for (const size_t i : signature.outs) outs.push_back(stack[i]);
  try {
    const Uncounted uncounted;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const std::exception&) {
    return std::nullopt;  // a shape that follows from values; or an error, which the kernel will raise too
  }
  for (size_t i = 0; i < outs.size(); i++) resize_outs(arguments[signature.outs[i]], outs[i]);
  Values fresh;
  for (size_t i = 0; i < stack.size(); i++) {
    if (signature.results[i] == Signature::NEW) fresh.push_back(stack[i]);
  }
  if (signature.keeps_statistics) match_statistics(arguments, fresh);
  return fresh;
}

}  // namespace

std::optional<Values> infer_results(const c10::OperatorHandle& op, const Signature& signature,
                                    const Values& arguments) {
  if (signature.returns_arguments && outs_are_ready(signature, arguments)) return Values{};
  if (!signature.returns_tensors || !signature.has_meta_kernel) return std::nullopt;
  if (!signature.outs.empty()) return ask_meta_kernel(op, signature, arguments);
  const Key key(signature, arguments);
  if (!key.is_complete()) return ask_meta_kernel(op, signature, arguments);
  if (auto known = memory().find(key)) return known;
  auto results = ask_meta_kernel(op, signature, arguments);
  if (results) memory().keep(key, *results);
  return results;
}

}  // namespace sim
