// The caching allocator, by the rules of CUDA's: how much is reserved, where a block lies and when it is used again are
// the same, so peaks are too.
//
//   segment (from the system)   | block, used | block, free | block, used |     blocks of one stream, side by side
//
// A size is rounded up to 512 bytes. Sizes up to 1 MiB are cut from segments of 2 MiB, larger ones from segments of
// 20 MiB, and from 10 MiB on from a segment of their own, rounded up to 2 MiB. The smallest free block of the same
// stream that is large enough is taken, and split if enough remains. A block that is freed is used again at once by its
// stream; where `record_stream` named others, only once events on those have passed.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <set>
#include <tuple>
#include <unordered_map>

#include "held.h"

namespace sim {

struct Block {
  char* begin = nullptr;
  size_t size = 0;
  int64_t stream = 0;
  bool is_small = false;
  Block* previous = nullptr;  // its neighbours in the segment
  Block* next = nullptr;
  bool is_used = false;
  size_t requested = 0;
  const char* holder = "";         // the label of who asked for it
  std::set<int64_t> other_streams;  // named by record_stream

  bool is_split() const { return previous || next; }
  char* end() const { return begin + size; }
};

/// The memory of one device. Callers hold the host's lock.
class DeviceMemory {
 public:
  explicit DeviceMemory(int device) : device_(device) {}

  /// Returns a block of at least `size` bytes for the stream, or null if the device's limit is reached.
  Block* take(size_t size, int64_t stream, const char* holder);
  void give_back(Block* block);

  /// Gives all free segments back to the system. All streams must be idle.
  void release_free_segments();

  /// Makes blocks free whose other streams have passed them.
  void collect_passed();

  void reset_peaks();
  void reset_accumulated();
  std::map<std::string, int64_t> holders_at_peak() const;

  c10::CachingDeviceAllocator::DeviceStats stats;

 private:
  struct BySize {
    bool operator()(const Block* a, const Block* b) const {
      return std::tie(a->stream, a->size, a->begin) < std::tie(b->stream, b->size, b->begin);
    }
  };
  using Pool = std::set<Block*, BySize>;
  using Stats = c10::CachingAllocator::StatArray;

  Block* find_free(size_t size, int64_t stream);
  Block* new_segment(size_t size, int64_t stream);
  void split(Block* block, size_t size);
  void make_free(Block* block);
  void merge_with(Block* block, Block* neighbour);
  void add_free(Block* block);
  void remove_free(Block* block);
  std::vector<Stats*> all_stats();
  void note_used(const Block& block, int sign);
  void change(Stats& stats, const Block& block, int64_t by);

  const int device_;
  Pool small_, large_;
  Held<Block*> held_;
  size_t reserved_ = 0;
  std::unordered_map<const char*, int64_t> holders_, holders_at_peak_;  // allocated bytes by label; labels are interned
};

/// The allocator that torch knows.
c10::DeviceAllocator& allocator();

/// The device whose allocated memory the pointer lies in; raises if there is none.
int device_of_pointer(const void* pointer);
DeviceMemory& memory_of(int device);

}  // namespace sim
