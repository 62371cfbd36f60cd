#include "signature.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "streams.h"

namespace sim {

namespace {

bool is_one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::any_of(names.begin(), names.end(), [&](const char* each) { return name == each; });
}

Signature read_signature(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& name = schema.operator_name();
  const std::string plain = name.name.rfind("aten::", 0) == 0 ? name.name.substr(6) : name.name;
  Signature signature;
  signature.name = interned(name.overload_name.empty() ? plain : plain + "." + name.overload_name);
  signature.has_meta_kernel = op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
  signature.keeps_statistics = is_one_of(plain, {"native_layer_norm", "native_group_norm"});
  // Written in training, and not declared so.
  const bool hides_writes = is_one_of(plain, {"native_batch_norm", "_batch_norm_with_update"});
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    const bool is_declared = argument.alias_info() && argument.alias_info()->isWrite();
    signature.writes.push_back(is_declared || (hides_writes && argument.name().rfind("running_", 0) == 0));
    if (is_declared && argument.is_out()) signature.outs.push_back(i);
    if (argument.type()->str().find("Generator") != std::string::npos) signature.generators.push_back(i);
  }
  // Attention draws for dropout alone, with which `attention.cpp` chooses another kernel.
  const bool draws = op.hasTag(at::Tag::nondeterministic_seeded) && plain.find("scaled_dot_product") == std::string::npos;
  TORCH_CHECK(!signature.generators.empty() || !draws, "sim: ", name,
              " draws random numbers from no generator, and no kernel is registered for it");
  for (const auto& result : schema.returns()) {
    size_t source = Signature::NEW;
    if (const auto* alias = result.alias_info()) {
      TORCH_CHECK(alias->isWrite(), "sim: ", name, " returns a view, and no kernel is registered for it");
      for (size_t i = 0; i < schema.arguments().size() && source == Signature::NEW; i++) {
        const auto* of_argument = schema.arguments()[i].alias_info();
        if (of_argument && of_argument->beforeSets() == alias->beforeSets()) source = i;
      }
    }
    const bool is_argument = source != Signature::NEW;
    const bool is_tensor = result.type()->kind() == c10::TypeKind::TensorType || result.type()->str() == "Tensor[]";
    signature.results.push_back(source);
    signature.returns_arguments = signature.returns_arguments && is_argument;
    signature.returns_tensors = signature.returns_tensors && (is_argument || is_tensor);
  }
  return signature;
}

}  // namespace

const Signature& signature_of(const c10::OperatorHandle& op) {
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::unordered_map<c10::OperatorName, Signature>;
  std::lock_guard<std::mutex> lock(mutex);
  const auto it = known.find(op.operator_name());
  return it != known.end() ? it->second : known.emplace(op.operator_name(), read_signature(op)).first->second;
}

}  // namespace sim
