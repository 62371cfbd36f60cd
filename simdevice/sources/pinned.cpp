#include "pinned.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "held.h"

namespace sim {

namespace {

/// Blocks of powers of two, kept once they were asked for; CUDA's host allocator does the same.
class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &deleter, c10::Device(c10::kCPU)};
    HostLock lock(host_mutex());
    collect_passed();
    size_t rounded = 4096;
    while (rounded < size) rounded *= 2;
    char* begin = nullptr;
    if (auto& spare = spare_[rounded]; !spare.empty()) {
      begin = spare.back();
      spare.pop_back();
    } else {
      void* mapped = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK(mapped != MAP_FAILED, "sim: no pinned memory of ", rounded, " bytes");
      begin = static_cast<char*>(mapped);
      blocks_[begin].size = rounded;
    }
    return {begin, begin, &deleter, c10::Device(c10::kCPU)};
  }

  bool record_event(void* pointer, void*, c10::Stream stream) override {
    HostLock lock(host_mutex());
    const auto it = block_of(pointer);
    if (it == blocks_.end()) return false;
    auto& streams = it->second.streams;
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
    return true;
  }

  bool contains(const void* pointer) {
    HostLock lock(host_mutex());
    return block_of(pointer) != blocks_.end();
  }

  c10::DeleterFnPtr raw_deleter() const override { return &deleter; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  struct Block {
    size_t size = 0;
    std::vector<c10::Stream> streams;  // whose copies used it since it was handed out
  };

  static void deleter(void* begin);

  void give_back(char* begin) {
    HostLock lock(host_mutex());
    Block& block = blocks_.at(begin);
    std::vector<EventPtr> last_uses;
    for (const auto& stream : block.streams) last_uses.push_back(record(stream));
    block.streams.clear();
    held_.add(begin, std::move(last_uses));
  }

  void collect_passed() {
    held_.release_passed([this](char* begin) { return std::pair(begin, begin + blocks_.at(begin).size); },
                         [this](char* begin) { spare_[blocks_.at(begin).size].push_back(begin); });
  }

  std::map<char*, Block>::iterator block_of(const void* pointer) {
    auto* const inside = static_cast<char*>(const_cast<void*>(pointer));
    auto it = blocks_.upper_bound(inside);
    if (it == blocks_.begin()) return blocks_.end();
    --it;
    return inside < it->first + it->second.size ? it : blocks_.end();
  }

  std::map<char*, Block> blocks_;  // all there ever were: never unmapped
  std::map<size_t, std::vector<char*>> spare_;
  Held<char*> held_;
};

PinnedAllocator& the_allocator() {
  static auto& allocator = *new PinnedAllocator;
  return allocator;
}

void PinnedAllocator::deleter(void* begin) {
  if (!begin || is_forked()) return;
  the_allocator().give_back(static_cast<char*>(begin));
}

const bool is_registered = (at::setHostAllocator(SIM, &the_allocator()), true);

}  // namespace

at::HostAllocator& pinned_allocator() { return the_allocator(); }
bool is_pinned(const void* pointer) { return the_allocator().contains(pointer); }
void note_pinned_use(const void* pointer, c10::Stream stream) {
  the_allocator().record_event(const_cast<void*>(pointer), nullptr, stream);
}

}  // namespace sim
