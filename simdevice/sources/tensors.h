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

/// The current stream of the tensor's device.
inline c10::Stream stream_for(const at::Tensor& tensor) { return current_stream(tensor.device().index()); }

}  // namespace sim
