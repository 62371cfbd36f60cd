#include "tensors.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>

namespace sim {

Access bytes_of(const at::Tensor& tensor, bool write) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto item = static_cast<int64_t>(tensor.element_size());
  char* const begin = static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * item;
  const int64_t range = (last + 1) * item;
  return {begin, begin + range, write, static_cast<size_t>(std::min<int64_t>(range, tensor.nbytes()))};
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

at::Tensor on_host_resizable(const at::Tensor& tensor) {
  at::Tensor alias = on_host(tensor);
  auto& storage = *alias.storage().unsafeGetStorageImpl();
  storage.set_allocator(c10::GetAllocator(c10::kCPU));
  storage.set_resizable(true);
  return alias;
}

}  // namespace sim
