// Which kernel scaled_dot_product_attention takes. Where times are counted it is the one that keeps no scores in memory,
// as on a GPU; else the products and the softmax, whose values are those of the CPU to the bit.
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

#include "streams.h"

namespace sim {

namespace {

int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>& mask, double dropout, bool, std::optional<double>, bool shares_keys) {
  const bool mask_learns = mask && mask->defined() && mask->requires_grad();
  const bool fits = query.dim() == 4 && query.size(-1) == value.size(-1) && query.size(-3) == key.size(-3);
  HostLock lock(host_mutex());
  const bool fused = clock_runs() && fits && dropout == 0 && !mask_learns && !shares_keys;
  return static_cast<int64_t>(fused ? sdp::SDPBackend::flash_attention : sdp::SDPBackend::math);
}

}  // namespace

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose)
}
