// How torch reaches the device: the guard (streams, events, the current device) and the hooks (generators, pinned
// memory).
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "allocator.h"
#include "generator.h"
#include "pinned.h"
#include "settings.h"

namespace sim {

namespace {

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return SIM; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_devices()); }

  c10::Device getDevice() const override { return {SIM, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override { set_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_device(index_of(device)); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return new_stream(index_of(device), priority);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_urgent) const override {
    return new_stream(index_of(device), is_urgent ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    // Nothing dereferences it; it only tells streams apart.
    return reinterpret_cast<void*>(static_cast<uintptr_t>(stream.hash()));
  }
  bool queryStream(const c10::Stream& stream) const override { return query(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(stream, "Stream.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device, "synchronize");
  }

  // torch keeps one pointer for each of its events; ours is to the latest recording, which may be shared.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new EventPtr;
    *static_cast<EventPtr*>(*event) = sim::record(stream);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) stream_wait(stream, *static_cast<EventPtr*>(event));
  }
  bool queryEvent(void* event) const override { return !event || query(*static_cast<EventPtr*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    count_host_wait("Event.synchronize");
    host_wait(*static_cast<EventPtr*>(event));
    raise_failure();
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "sim: elapsed_time of an event that was never recorded");
    const auto &start = *static_cast<EventPtr*>(first), &end = *static_cast<EventPtr*>(second);
    TORCH_CHECK(start->is_done() && end->is_done(), "sim: elapsed_time of an event that is not done");
    if (clock_runs()) return (end->moment().at - start->moment().at) / 1000;
    return end->milliseconds() - start->milliseconds();
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator().recordStream(pointer, stream);
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(num_devices()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  at::Device getDeviceFromPtr(void* pointer) const override {
    return {SIM, static_cast<c10::DeviceIndex>(device_of_pointer(pointer))};
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }

  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }

  /// What `storage.resize_()` does: new memory, and what fits of the old one's contents.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "sim: this storage cannot be resized");
    c10::DeviceGuard guard(impl->device());
    auto fresh = allocator().allocate(size);
    if (const size_t kept = std::min(size, impl->nbytes())) {
      auto *from = static_cast<char*>(impl->mutable_data()), *to = static_cast<char*>(fresh.get());
      enqueue(current_stream(), "resize", {{from, from + kept, false}, {to, to + kept, true}},
              copy_on_device(2.0 * kept), [=] { std::memcpy(to, from, kept); });
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
  }
};

const bool hooks_are_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace sim
