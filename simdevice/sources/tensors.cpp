#include "tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include "settings.h"

namespace sim {

Access bytes_of(const at::Tensor& tensor, bool write) {
  int64_t last = 0, elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
    if (tensor.stride(dim)) elements *= tensor.size(dim);
  }
  const auto item = static_cast<int64_t>(tensor.element_size());
  char* const begin = static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * item;
  return {begin, begin + (last + 1) * item, write, static_cast<double>(elements * item)};
}

void access_of(const at::Tensor& tensor, bool write, Accesses& into) {
  if (!is_on_sim(tensor) || tensor.numel() == 0) return;
  const auto& storage = tensor.storage();
  TORCH_CHECK(storage.data(), "sim: a tensor of shape ", tensor.sizes(), " is used whose memory was freed");
  const Access access = bytes_of(tensor, write);
  TORCH_CHECK(access.end <= static_cast<const char*>(storage.data()) + storage.nbytes(), "sim: a tensor of shape ",
              tensor.sizes(), " reaches beyond its storage of ", storage.nbytes(), " bytes");
  into.push_back(access);
}

at::Tensor on_host(const at::Tensor& tensor) {
  auto* begin = static_cast<char*>(tensor.storage().mutable_data());
  if (begin) begin += tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  at::Tensor alias = at::from_blob(begin, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

bool is_kept(const at::Tensor& tensor) {
  constexpr size_t FEW = 1 << 20;  // bytes: sizes and strides of 20,000 parameters
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) && tensor.storage().nbytes() <= FEW;
}

void enqueue_copy(c10::Stream stream, std::string_view what, const Accesses& accesses, const Cost& cost, bool keeps,
                  Work work) {
  if (keeps && !settings().computes) {
    at::AutoDispatchBelowADInplaceOrView kernels_alone;
    work();
  }
  enqueue(stream, what, accesses, cost, std::move(work));
}

at::Tensor on_host_resizable(const at::Tensor& tensor) {
  at::Tensor alias = on_host(tensor);
  auto& storage = *alias.storage().unsafeGetStorageImpl();
  storage.set_allocator(c10::GetAllocator(c10::kCPU));
  storage.set_resizable(true);
  return alias;
}

}  // namespace sim
