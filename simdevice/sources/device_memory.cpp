#include <sys/mman.h>

#include <algorithm>

#include "allocator.h"
#include "settings.h"

namespace sim {

namespace {

constexpr size_t MIB = 1 << 20;
constexpr size_t GRAIN = 512;                // sizes are multiples of it
constexpr size_t LARGEST_SMALL = MIB;        // the largest size that is cut from a small segment
constexpr size_t SMALL_SEGMENT = 2 * MIB;
constexpr size_t LARGE_SEGMENT = 20 * MIB;
constexpr size_t OWN_SEGMENT_FROM = 10 * MIB;

size_t rounded_up(size_t size, size_t to) { return (size + to - 1) / to * to; }

size_t segment_for(size_t size) {
  if (size <= LARGEST_SMALL) return SMALL_SEGMENT;
  return size < OWN_SEGMENT_FROM ? LARGE_SEGMENT : rounded_up(size, SMALL_SEGMENT);
}

}  // namespace

Block* DeviceMemory::take(size_t size, int64_t stream, const char* holder) {
  collect_passed();
  const size_t requested = size;
  size = std::max(GRAIN, rounded_up(size, GRAIN));
  Block* block = find_free(size, stream);
  if (!block) block = new_segment(size, stream);
  if (!block) return nullptr;
  const size_t rest = block->size - size;
  if (block->is_small ? rest >= GRAIN : rest > LARGEST_SMALL) split(block, size);
  block->is_used = true;
  block->requested = requested;
  block->holder = holder;
  note_used(*block, 1);
  change(stats.active, *block, 1);
  change(stats.active_bytes, *block, block->size);
  const auto& allocated = stats.allocated_bytes[0];
  // Copied only while labels are collected: until then there is one holder, "".
  if (allocated.current == allocated.peak && holders_.size() > 1) holders_at_peak_ = holders_;
  return block;
}

void DeviceMemory::give_back(Block* block) {
  note_used(*block, -1);
  if (block->other_streams.empty()) return make_free(block);
  std::vector<EventPtr> last_uses;
  for (const int64_t stream : block->other_streams) last_uses.push_back(record(stream_of(device_, stream)));
  block->other_streams.clear();
  held_.add(block, std::move(last_uses));
}

void DeviceMemory::collect_passed() {
  held_.release_passed([](const Block* block) { return std::pair(block->begin, block->end()); },
                       [this](Block* block) { make_free(block); });
}

Block* DeviceMemory::find_free(size_t size, int64_t stream) {
  Pool& pool = size <= LARGEST_SMALL ? small_ : large_;
  Block wanted;
  wanted.size = size;
  wanted.stream = stream;
  const auto it = pool.lower_bound(&wanted);
  if (it == pool.end() || (*it)->stream != stream) return nullptr;
  Block* block = *it;
  remove_free(block);
  return block;
}

Block* DeviceMemory::new_segment(size_t size, int64_t stream) {
  const size_t bytes = segment_for(size);
  if (bytes > memory_limit() || reserved_ > memory_limit() - bytes) return nullptr;
  void* begin = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) return nullptr;
  auto* block = new Block;
  block->begin = static_cast<char*>(begin);
  block->size = bytes;
  block->stream = stream;
  block->is_small = size <= LARGEST_SMALL;
  reserved_ += bytes;
  change(stats.reserved_bytes, *block, bytes);
  change(stats.segment, *block, 1);
  stats.num_device_alloc++;
  return block;
}

void DeviceMemory::split(Block* block, size_t size) {
  auto* rest = new Block;
  rest->begin = block->begin + size;
  rest->size = block->size - size;
  rest->stream = block->stream;
  rest->is_small = block->is_small;
  rest->previous = block;
  rest->next = block->next;
  if (rest->next) rest->next->previous = rest;
  block->next = rest;
  block->size = size;
  add_free(rest);
}

void DeviceMemory::make_free(Block* block) {
  change(stats.active, *block, -1);
  change(stats.active_bytes, *block, -static_cast<int64_t>(block->size));
  block->is_used = false;
  if (block->previous && !block->previous->is_used) merge_with(block, block->previous);
  if (block->next && !block->next->is_used) merge_with(block, block->next);
  add_free(block);
}

void DeviceMemory::merge_with(Block* block, Block* neighbour) {
  remove_free(neighbour);
  if (neighbour == block->previous) {
    block->begin = neighbour->begin;
    block->previous = neighbour->previous;
    if (block->previous) block->previous->next = block;
  } else {
    block->next = neighbour->next;
    if (block->next) block->next->previous = block;
  }
  block->size += neighbour->size;
  delete neighbour;
}

void DeviceMemory::release_free_segments() {
  for (Pool* pool : {&small_, &large_}) {
    for (auto it = pool->begin(); it != pool->end();) {
      Block* block = *it++;
      if (block->is_split()) continue;
      remove_free(block);
      race_detector().forget(block->begin, block->end());
      munmap(block->begin, block->size);
      reserved_ -= block->size;
      change(stats.reserved_bytes, *block, -static_cast<int64_t>(block->size));
      change(stats.segment, *block, -1);
      stats.num_device_free++;
      delete block;
    }
  }
}

// A free part of a segment in use: memory that no other stream can have.
void DeviceMemory::add_free(Block* block) {
  (block->is_small ? small_ : large_).insert(block);
  if (!block->is_split()) return;
  change(stats.inactive_split, *block, 1);
  change(stats.inactive_split_bytes, *block, block->size);
}

void DeviceMemory::remove_free(Block* block) {
  (block->is_small ? small_ : large_).erase(block);
  if (!block->is_split()) return;
  change(stats.inactive_split, *block, -1);
  change(stats.inactive_split_bytes, *block, -static_cast<int64_t>(block->size));
}

void DeviceMemory::note_used(const Block& block, int sign) {
  change(stats.allocation, block, sign);
  change(stats.allocated_bytes, block, sign * static_cast<int64_t>(block.size));
  change(stats.requested_bytes, block, sign * static_cast<int64_t>(block.requested));
  const auto holder = holders_.emplace(block.holder, 0).first;
  holder->second += sign * static_cast<int64_t>(block.size);
  if (!holder->second && *block.holder) holders_.erase(holder);
}

void DeviceMemory::change(Stats& stats, const Block& block, int64_t by) {
  using c10::CachingAllocator::StatType;
  const auto pool = block.is_small ? StatType::SMALL_POOL : StatType::LARGE_POOL;
  for (const auto type : {StatType::AGGREGATE, pool}) {
    auto& stat = stats[static_cast<size_t>(type)];
    by > 0 ? stat.increase(by) : stat.decrease(-by);
  }
}

std::vector<c10::CachingAllocator::StatArray*> DeviceMemory::all_stats() {
  return {&stats.allocation,     &stats.allocated_bytes, &stats.requested_bytes,
          &stats.active,         &stats.active_bytes,    &stats.inactive_split,
          &stats.segment,        &stats.reserved_bytes,  &stats.inactive_split_bytes};
}

void DeviceMemory::reset_peaks() {
  for (Stats* each : all_stats()) {
    for (auto& stat : *each) stat.reset_peak();
  }
  holders_at_peak_ = holders_;
}

void DeviceMemory::reset_accumulated() {
  for (Stats* each : all_stats()) {
    for (auto& stat : *each) stat.reset_accumulated();
  }
}

std::map<std::string, int64_t> DeviceMemory::holders_at_peak() const {
  std::map<std::string, int64_t> holders;
  for (const auto& [holder, bytes] : holders_at_peak_) {
    if (bytes) holders[*holder ? holder : "unlabelled"] += bytes;
  }
  return holders;
}

}  // namespace sim
