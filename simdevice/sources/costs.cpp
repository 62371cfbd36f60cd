#include "costs.h"

#include <ATen/Context.h>

#include <algorithm>
#include <string_view>

namespace sim {

namespace {

enum class Kind { pointwise, reduction, lookup, copy, matmul, convolution, attention };

bool begins(std::string_view name, std::string_view with) { return name.substr(0, with.size()) == with; }
bool has(std::string_view name, std::string_view part) { return name.find(part) != std::string_view::npos; }

Kind kind_of(std::string_view name) {
  name = name.substr(0, name.find('.'));
  if (has(name, "scaled_dot_product") || has(name, "flash_attention")) return Kind::attention;
  if (has(name, "convolution")) return Kind::convolution;
  for (const char* each : {"mm", "addmm", "bmm", "baddbmm", "addbmm", "_grouped_mm", "_scaled_mm", "_int_mm", "mv"}) {
    if (name == each) return Kind::matmul;
  }
  for (const char* each : {"embedding", "index", "gather", "scatter", "take"}) {
    if (has(name, each)) return Kind::lookup;
  }
  if (begins(name, "copy") || begins(name, "_foreach_copy") || begins(name, "split_with_sizes_copy") ||
      begins(name, "cat") || name == "clone") {
    return Kind::copy;
  }
  for (const char* each : {"softmax", "norm", "sum", "mean", "var", "amax", "max", "nll_loss", "cumsum", "argmax"}) {
    if (has(name, each)) return Kind::reduction;
  }
  return Kind::pointwise;
}

at::Tensor tensor(const Values& arguments, size_t index) {
  return index < arguments.size() && arguments[index].isTensor() ? arguments[index].toTensor() : at::Tensor();
}

double rate(c10::ScalarType dtype) {
  const Machine& of = machine();
  if (dtype == c10::ScalarType::Float &&
      at::globalContext().float32MatmulPrecision() != at::Float32MatmulPrecision::HIGHEST) {
    return of.flops_per_us_tf32;
  }
  const auto it = of.flops_per_us.find(dtype);
  return it == of.flops_per_us.end() ? of.flops_per_us.at(c10::ScalarType::Float) : it->second;
}

/// The factors are the last two matrices among the leading tensors: `addmm` has a third one before them.
double matmul_us(std::string_view name, const Values& arguments) {
  const size_t first = begins(name, "addmm") || begins(name, "baddbmm") || begins(name, "addbmm") ? 1 : 0;
  const auto a = tensor(arguments, first), b = tensor(arguments, first + 1);
  if (!a.defined() || !b.defined() || a.dim() == 0 || b.dim() == 0) return 0;
  // Each element of the first factor meets a row of the second one.
  const double columns = b.dim() > 1 ? static_cast<double>(b.size(-1)) : 1;
  return 2.0 * static_cast<double>(a.numel()) * columns / rate(a.scalar_type());
}

double convolution_us(std::string_view name, const Values& arguments) {
  const bool is_backward = has(name, "backward");
  // Backward takes the gradient of the output first. Forward's output is not there yet: it has about the input's
  // positions, over the stride.
  const auto grad = tensor(arguments, 0), weight = tensor(arguments, is_backward ? 2 : 1);
  if (!grad.defined() || !weight.defined()) return 0;
  double positions = static_cast<double>(grad.numel()) / static_cast<double>(std::max<int64_t>(1, grad.size(1)));
  if (!is_backward && arguments.size() > 3 && arguments[3].isIntList()) {
    for (const int64_t stride : arguments[3].toIntVector()) positions /= static_cast<double>(stride);
  }
  return (is_backward ? 4.0 : 2.0) * positions * static_cast<double>(weight.numel()) / rate(weight.scalar_type());
}

double attention_us(std::string_view name, const Values& arguments) {
  const bool is_backward = has(name, "backward");
  const auto q = tensor(arguments, is_backward ? 1 : 0), k = tensor(arguments, is_backward ? 2 : 1);
  if (!q.defined() || !k.defined() || q.dim() < 3) return 0;
  double flops = 4.0 * static_cast<double>(q.numel()) * static_cast<double>(k.size(-2));
  const auto flag = std::find_if(arguments.begin(), arguments.end(), [](const auto& each) { return each.isBool(); });
  if (flag != arguments.end() && flag->toBool()) flops /= 2;  // causal
  return (is_backward ? 2.5 : 1.0) * flops / (rate(q.scalar_type()) * machine().attention);
}

}  // namespace

Cost cost_of(const Signature& signature, const Values& arguments, const Accesses& accesses) {
  if (!clock_runs()) return {};
  const Machine& of = machine();
  const std::string_view name = signature.name;
  const Kind kind = kind_of(name);
  double read = 0, written = 0;
  for (const Access& each : accesses) (each.write ? written : read) += static_cast<double>(each.bytes);
  // What an operator changes in place it also reads.
  const bool fills = begins(name, "fill_") || begins(name, "zero_") || kind == Kind::copy || !signature.generators.empty();
  if (signature.returns_arguments && signature.outs.empty() && !fills) written *= 2;
  const double share = kind == Kind::reduction ? of.reduction
                       : kind == Kind::lookup  ? of.lookup
                       : kind == Kind::copy    ? of.copy
                                               : 1;
  // A lookup reads what it returns, and not the table.
  const double bytes = kind == Kind::lookup ? written + std::min(read, written) : read + written;
  const double moving = bytes / (of.bytes_per_us * share);
  double computing = 0;
  if (kind == Kind::matmul) computing = matmul_us(name, arguments);
  if (kind == Kind::convolution) computing = convolution_us(name, arguments);
  if (kind == Kind::attention) computing = attention_us(name, arguments);
  return {Engine::compute, of.launch + std::max(moving, computing)};
}

}  // namespace sim
