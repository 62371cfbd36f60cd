// What a task needs to know of a tensor of the device: which bytes it covers, and how the host's kernels get at them.
#pragma once

#include <ATen/core/Tensor.h>

#include "streams.h"

namespace sim {

inline bool is_on_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == SIM; }

/// The bytes from the tensor's first element to its last, wherever it lies. It has elements.
Access bytes_of(const at::Tensor& tensor, bool write);

/// Adds the bytes from the tensor's first element to its last; nothing for a tensor that is not of the device.
/// Raises for one whose storage was freed, or is too short.
void access_of(const at::Tensor& tensor, bool write, Accesses& into);

/// A CPU tensor on the memory of a tensor of the device, or of the host. It does not own it and keeps nothing alive:
/// who frees the memory orders what comes next behind the tasks that use it, or there is a race.
at::Tensor on_host(const at::Tensor& tensor);

/// As `on_host`; a kernel that resizes it moves it to memory of its own.
at::Tensor on_host_resizable(const at::Tensor& tensor);

/// Whether the tensor's values are kept where nothing is computed: a few integers, by which ranks compare what they
/// have. Copies and gathers of them run nevertheless, at once. A new one is zero, and kernels leave it as it is.
bool is_kept(const at::Tensor& tensor);

/// As `enqueue`, for a copy. Where nothing is computed it is made at once if `keeps`, and else only noted.
void enqueue_copy(c10::Stream stream, std::string_view what, const Accesses& accesses, const Cost& cost, bool keeps,
                  Work work);

/// The current stream of the tensor's device.
inline c10::Stream stream_for(const at::Tensor& tensor) { return current_stream(tensor.device().index()); }

}  // namespace sim
