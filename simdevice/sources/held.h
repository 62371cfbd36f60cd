// Memory that was given back while streams still use it.
#pragma once

#include <algorithm>
#include <deque>

#include "streams.h"

namespace sim {

/// Callers hold the host's lock.
template <class Memory>
class Held {
 public:
  void add(Memory memory, std::vector<EventPtr> last_uses) { all_.push_back({memory, std::move(last_uses)}); }

  /// Calls `release` with each memory whose last uses are over; `bounds` gives its begin and end.
  ///
  /// Who gets the memory is behind these uses of it, as far as races go; of anything else it need not be.
  template <class Bounds, class Release>
  void release_passed(const Bounds& bounds, const Release& release) {
    for (auto it = all_.begin(); it != all_.end();) {
      const auto& uses = it->last_uses;
      if (!std::all_of(uses.begin(), uses.end(), [](const EventPtr& event) { return has_passed(*event); })) {
        ++it;
        continue;
      }
      const auto [begin, end] = bounds(it->memory);
      for (const auto& event : uses) race_detector().forget_before(begin, end, event->clock());
      release(it->memory);
      it = all_.erase(it);
    }
  }

 private:
  struct Each {
    Memory memory;
    std::vector<EventPtr> last_uses;
  };
  std::deque<Each> all_;
};

}  // namespace sim
