// Pinned memory of the host: the copies of the device may read and write it while the host goes on.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include "streams.h"

namespace sim {

at::HostAllocator& pinned_allocator();
bool is_pinned(const void* pointer);

/// Notes that a copy queued on the stream uses this memory: once freed, it is not handed out again until that has run.
void note_pinned_use(const void* pointer, c10::Stream stream);

}  // namespace sim
