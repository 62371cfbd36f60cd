// Operators that are not one CPU kernel: they make tensors, view them, and change their shape or storage.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "allocator.h"
#include "fallback.h"
#include "settings.h"
#include "tensors.h"

namespace sim {

namespace {

using c10::SymIntArrayRef;

c10::IntArrayRef ints(SymIntArrayRef values) { return C10_AS_INTARRAYREF_SLOW(values); }

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

/// Returns a tensor that is new, with zeros if nothing will compute it and the host may read it.
at::Tensor with_zeros_if_kept(at::Tensor made) {
  if (!settings().computes && made.numel() && is_kept(made)) {
    std::memset(made.storage().mutable_data(), 0, made.storage().nbytes());
  }
  return made;
}

// Made

at::Tensor empty(SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "sim: only strided tensors, not ", *layout);
  const c10::OptionalDeviceGuard guard(device);
  return with_zeros_if_kept(
      at::detail::empty_generic(ints(size), &allocator(), KEYS, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return with_zeros_if_kept(
      at::detail::empty_strided_generic(ints(size), ints(stride), &allocator(), KEYS, c10::dtype_or_default(dtype)));
}

// Viewed

at::Tensor view(const at::Tensor& tensor, SymIntArrayRef size) { return at::native::view(tensor, ints(size)); }

at::Tensor as_strided(const at::Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  const auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(tensor, ints(size), ints(stride), start);
}

at::Tensor reshape_alias(const at::Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, ints(size), ints(stride));
}

at::Tensor unfold(const at::Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(tensor, dim, size, step);
}

// Changed in shape, or storage

void grow_storage(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const size_t bytes = (last + 1) * tensor.element_size();
  if (bytes <= tensor.storage().nbytes()) return;
  at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
}

const at::Tensor& resize(const at::Tensor& tensor, SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (tensor.sizes() == ints(size)) return tensor;
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(ints(size));
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  grow_storage(tensor);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source, c10::SymInt offset, SymIntArrayRef size,
                        SymIntArrayRef stride) {
  TORCH_CHECK(source.device() == tensor.device() || tensor.storage().nbytes() == 0, "sim: set_ of a tensor on ",
              tensor.device(), " with a storage on ", source.device());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(ints(size), ints(stride));
  } else {
    impl->set_sizes_contiguous(ints(size));
  }
  grow_storage(tensor);
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage source) {
  const c10::SymInt numel(static_cast<int64_t>(source.nbytes() / tensor.element_size()));
  return set_storage(tensor, std::move(source), 0, numel, {});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  const c10::DeviceGuard guard(tensor.device());
  return set_storage(tensor, c10::Storage(c10::Storage::use_byte_size_t(), 0, &allocator(), /*resizable=*/true), 0,
                     c10::SymInt(0), {});
}

// Others

void record_stream(at::Tensor& tensor, at::Stream stream) {
  allocator().recordStream(tensor.storage().data_ptr(), stream);
}

/// Whether `tensor.data = source` may be. As for CUDA: dense tensors of the host and of the device take each other's.
bool has_compatible_data(const at::Tensor& tensor, const at::Tensor& source) {
  const auto is_dense = [](c10::DispatchKeySet keys) {
    constexpr c10::DispatchKeySet BACKENDS({c10::BackendComponent::CPUBit, c10::BackendComponent::PrivateUse1Bit});
    return keys.has_any(c10::DispatchKeySet(c10::DispatchKey::Dense)) && keys.has_any(BACKENDS);
  };
  const c10::DispatchKeySet given = source.key_set();
  return tensor.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(given) ||
         (is_dense(tensor.key_set()) && is_dense(given));
}

// The CPU kernel takes no generator: it would draw from the host's.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& tensor, double p, std::optional<bool> train) {
  at::Tensor mask = at::empty_like(tensor, tensor.options().dtype(at::kBool));
  if (!train.value_or(true)) return {tensor.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {at::mul(tensor, mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("view", &view);
  library.impl("as_strided", &as_strided);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("resize_", &resize);
  library.impl("set_", &set_nothing);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("record_stream", &record_stream);
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_data);
  library.impl("native_dropout", &native_dropout);
  // torch has kernels of these for any device. Those of the norms compute statistics that CPU's backward kernels do not
  // take, and that of convolutions asks for an operator that each device is to have.
  library.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// As a composite operator, which it is in torch: subclasses are not to see it.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_data);
}

}  // namespace

void resize_to(const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.sizes() == like.sizes()) return;
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  grow_storage(tensor);
}

}  // namespace sim
