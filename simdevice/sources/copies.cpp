// Copies: within a device, between devices, and from and to the host, which waits where it would wait for a GPU.
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include "pinned.h"
#include "settings.h"
#include "tensors.h"

namespace sim {

namespace {

constexpr size_t SMALL = 1 << 16;

void copy_on_devices(const at::Tensor& from, const at::Tensor& to, const Accesses& accesses) {
  const auto source = stream_for(from), target = stream_for(to);
  const bool is_same_device = source.device() == target.device();
  // Between devices the source's stream copies, once the target's has come so far; and the target's goes on behind it.
  if (!is_same_device) stream_wait(source, record(target));
  const Cost cost = is_same_device ? copy_on_device(2.0 * to.nbytes()) : collective_cost("send", to.nbytes(), 2, 2, -1);
  const bool keeps = is_kept(from) && is_kept(to);
  enqueue_copy(source, "copy", accesses, cost, keeps, [x = on_host(from), y = on_host(to)] { y.copy_(x); });
  if (!is_same_device) stream_wait(target, record(source));
}

/// Whether the device may reach the host's tensor by itself, while the host goes on.
bool is_direct(const at::Tensor& on_the_host, const at::Tensor& on_the_device) {
  return on_the_host.dtype() == on_the_device.dtype() && on_the_host.is_contiguous() && on_the_device.is_contiguous() &&
         on_the_host.sizes() == on_the_device.sizes() && is_pinned(on_the_host.const_data_ptr());
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking, Accesses accesses) {
  const auto stream = stream_for(to);
  at::Tensor source;
  if (is_direct(from, to)) {
    accesses.push_back(bytes_of(from, false));
    note_pinned_use(from.const_data_ptr(), stream);
    source = on_host(from);
  } else if (settings().computes || is_kept(to)) {
    source = from.clone();  // pageable memory is staged: the host may write it once we return
  }
  const Cost cost = copy_by_link(to.nbytes());
  enqueue_copy(stream, "copy to device", accesses, cost, is_kept(to), [x = source, y = on_host(to)] { y.copy_(x); });
  if (!non_blocking) synchronize_stream(stream, "copy to device, blocking");
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking, Accesses accesses) {
  // The host may look at small ones, and finds zeros where nothing is computed or kept.
  if (!settings().computes && to.nbytes() <= SMALL) to.zero_();
  const auto stream = stream_for(from);
  const bool direct = is_direct(to, from);
  if (direct) {
    accesses.push_back(bytes_of(to, true));
    note_pinned_use(to.const_data_ptr(), stream);
  }
  const Cost cost = copy_by_link(to.nbytes());
  const bool keeps = is_kept(from);
  enqueue_copy(stream, "copy to host", accesses, cost, keeps, [x = on_host(from), y = on_host(to)] { y.copy_(x); });
  if (!non_blocking) return synchronize_stream(stream, "copy to host, blocking");
  if (!direct) synchronize_stream(stream, "copy to host, not to pinned memory as it lies on the device");
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  Accesses accesses;
  access_of(from, false, accesses);
  access_of(to, true, accesses);
  if (is_on_sim(from) && is_on_sim(to)) {
    copy_on_devices(from, to, accesses);
  } else if (is_on_sim(to)) {
    TORCH_CHECK(from.device().is_cpu(), "sim: no copy from ", from.device());
    copy_to_device(from, to, non_blocking, std::move(accesses));
  } else {
    TORCH_CHECK(to.device().is_cpu(), "sim: no copy to ", to.device());
    copy_to_host(from, to, non_blocking, std::move(accesses));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

/// The zero of a dtype: what the host reads where nothing is computed or kept.
at::Scalar nothing_of(at::ScalarType dtype) {
  if (at::isComplexType(dtype)) return c10::complex<double>(0);
  if (dtype == at::kBool) return false;
  return at::isFloatingType(dtype) ? at::Scalar(0.0) : at::Scalar(0);
}

at::Scalar item(const at::Tensor& tensor) {
  const auto stream = stream_for(tensor);
  Accesses accesses;
  access_of(tensor, false, accesses);
  const auto value = std::make_shared<at::Scalar>(nothing_of(tensor.scalar_type()));
  const Cost cost = copy_by_link(tensor.itemsize());
  enqueue_copy(stream, "item", accesses, cost, is_kept(tensor), [value, x = on_host(tensor)] { *value = x.item(); });
  synchronize_stream(stream, "item");
  return *value;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
}

// A copy reads a conjugated or negated view as what it stands for, so nothing has to make a copy of that first: which
// would be made by a copy, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

}  // namespace sim
