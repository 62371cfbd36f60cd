#include "allocator.h"

#include <cstring>

#include "python_hooks.h"
#include "settings.h"

namespace sim {

namespace {

/// Queues a write of all the block's bytes on its stream: from here on they belong to whoever that stream works for.
/// The write makes a race of every use by another stream that nothing has put before it, or behind it.
void overwrite(const Block& block, int device, const char* what, const char* where, bool spoils) {
  char* const begin = block.begin;
  const size_t size = block.size;
  const Accesses accesses{{begin, begin + size, true}};
  // 0xFF in every byte: NaN in all floating point types, -1 in integers.
  enqueue_locked(stream_of(device, block.stream), what, where, accesses, Cost{}, [=] {
    if (spoils) std::memset(begin, 0xFF, size);
  });
}

class Allocator final : public c10::DeviceAllocator {
 public:
  Allocator() {
    for (int device = 0; device < num_devices(); device++) memories_.push_back(std::make_unique<DeviceMemory>(device));
  }

  c10::DataPtr allocate(size_t size) override {
    const int device = current_device();
    const c10::Device place(SIM, static_cast<c10::DeviceIndex>(device));
    if (size == 0) return {nullptr, nullptr, &deleter, place};
    const char* holder = label_from(allocation_label_hook());
    const char* where = label_from(task_label_hook());
    void* begin = take(device, size, holder, where);
    return {begin, begin, &deleter, place};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &deleter; }

  void copy_data(void* to, const void* from, size_t size) const override {
    auto* target = static_cast<char*>(to);
    auto* source = const_cast<char*>(static_cast<const char*>(from));
    enqueue(current_stream(), "copy_data", {{source, source + size, false}, {target, target + size, true}},
            copy_on_device(2.0 * size), [=] { std::memcpy(target, source, size); });
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < num_devices(); device++) {
      if (!getDeviceStats(static_cast<c10::DeviceIndex>(device)).reserved_bytes[0].current) continue;
      synchronize_device(device, "empty_cache");
      HostLock lock(host_mutex());
      memory(device).collect_passed();
      memory(device).release_free_segments();
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    HostLock lock(host_mutex());
    const auto it = used_.find(pointer.get());
    if (it == used_.end()) return;
    Block& block = *it->second.block;
    if (block.stream != stream.id()) block.other_streams.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    HostLock lock(host_mutex());
    return memory(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    HostLock lock(host_mutex());
    memory(device).reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    HostLock lock(host_mutex());
    memory(device).reset_peaks();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    HostLock lock(host_mutex());
    constexpr size_t UNLIMITED = size_t(16) << 30;
    const size_t total = std::min(memory_limit(), UNLIMITED);
    const auto reserved = static_cast<size_t>(memory(device).stats.reserved_bytes[0].current);
    return {total - std::min(total, reserved), total};
  }

  int device_of(const void* pointer) {
    HostLock lock(host_mutex());
    auto it = used_.upper_bound(pointer);
    TORCH_CHECK(it != used_.begin(), "sim: a pointer to no memory of the device");
    const auto [block, device] = (--it)->second;
    TORCH_CHECK(pointer < block->end(), "sim: a pointer to no memory of the device");
    return device;
  }

  DeviceMemory& memory(int device) { return *memories_.at(device); }

 private:
  struct Owned {
    Block* block;
    int device;
  };

  void* take(int device, size_t size, const char* holder, const char* where) {
    if (void* begin = try_to_take(device, size, holder, where)) return begin;
    synchronize_device(device, "out of memory: free segments are given back");
    {
      HostLock lock(host_mutex());
      memory(device).stats.num_alloc_retries++;
      memory(device).collect_passed();
      memory(device).release_free_segments();
    }
    if (void* begin = try_to_take(device, size, holder, where)) return begin;
    HostLock lock(host_mutex());
    auto& stats = memory(device).stats;
    stats.num_ooms++;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "sim:", device, " is out of memory: tried to allocate ", size,
                     " bytes, with ", stats.reserved_bytes[0].current, " of ", memory_limit(),
                     " bytes reserved (SIM_MEMORY_MIB), ", stats.allocated_bytes[0].current, " of these allocated");
  }

  void* try_to_take(int device, size_t size, const char* holder, const char* where) {
    HostLock lock(host_mutex());
    Block* block = memory(device).take(size, current_stream(device).id(), holder);
    if (!block) return nullptr;
    try {
      overwrite(*block, device, "malloc", where, settings().spoil != Spoil::no);
    } catch (...) {  // a race, where races raise
      memory(device).give_back(block);
      throw;
    }
    used_[block->begin] = {block, device};
    return block->begin;
  }

  void give_back(void* begin) {
    HostLock lock(host_mutex());
    const auto it = used_.find(begin);
    const auto [block, device] = it->second;
    used_.erase(it);
    // Where record_stream named other streams, those may still read: the next owner's "malloc" comes behind them.
    const bool spoils = settings().spoil == Spoil::freed && block->other_streams.empty();
    const Block freed = *block;  // it may become part of another one
    memory(device).give_back(block);
    if (spoils) overwrite(freed, device, "free", "", true);
  }

  static void deleter(void* begin);

  std::vector<std::unique_ptr<DeviceMemory>> memories_;
  std::map<const void*, Owned> used_;  // by where they begin
};

Allocator& the_allocator() {
  static auto& allocator = *new Allocator;
  return allocator;
}

void Allocator::deleter(void* begin) {
  // In a forked child nothing is given back: its workers are gone.
  if (!begin || is_forked()) return;
  try {
    the_allocator().give_back(begin);
  } catch (const std::exception&) {
    // A race, where races raise: it is noted, and a destructor must not throw.
  }
}

}  // namespace

REGISTER_ALLOCATOR(SIM, &the_allocator());

c10::DeviceAllocator& allocator() { return the_allocator(); }
int device_of_pointer(const void* pointer) { return the_allocator().device_of(pointer); }
DeviceMemory& memory_of(int device) { return the_allocator().memory(device); }

}  // namespace sim
