// Vector clocks, and the detector that compares them: which accesses to the same bytes has nothing put in an order?
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace sim {

/// How many tasks of each stream have happened before: one number per lane, a stream's place in every clock.
using Clock = std::vector<uint64_t>;

/// Raises every entry of `into` to that of `from`.
void merge(Clock& into, const Clock& from);

/// The bytes from `begin` up to `end`, read or written: all of them, or `bytes` that lie among them.
struct Access {
  char* begin;
  char* end;
  bool write;
  double bytes;  // of the elements: a view with strides has gaps between its begin and its end
};
using Accesses = std::vector<Access>;

/// What a report says of one side: the operator, its stream, and the line of Python that asked for it, or "".
/// Interned texts: a use outlives its task.
struct Use {
  int lane = -1;
  uint64_t time = 0;  // the lane's own entry when the task was queued
  const char* what = "";
  const char* where = "";

  bool happened_before(const Clock& clock) const {
    return static_cast<size_t>(lane) < clock.size() && clock[lane] >= time;
  }
};

/// The last uses of every byte. Callers hold the host's lock.
class RaceDetector {
 public:
  /// Notes an access by `use`, whose stream has seen all of `clock`. Returns the texts of the races found.
  std::vector<std::string> note(const Access& access, const Use& use, const Clock& clock);

  /// Drops the uses of these bytes that happened before `clock`: whoever gets the bytes now is ordered behind them.
  void forget_before(char* begin, char* end, const Clock& clock);

  /// Drops all that is known of these bytes: they are given back to the system.
  void forget(char* begin, char* end);

  void clear() { ranges_.clear(); }

 private:
  /// Uses shared by all bytes from the key of the map up to `end`.
  struct Range {
    char* end;
    Use last_write;          // lane -1: never written
    std::vector<Use> reads;  // since the last write, the last one of each lane
  };
  using Ranges = std::map<char*, Range>;

  void split_at(char* where);
  static void note_read(Range& range, const Use& use);

  Ranges ranges_;
};

/// Names a lane in reports: "sim:0 stream 3". The host, which no stream is, has the lane HOST_LANE.
constexpr int HOST_LANE = 0;
int new_lane(const std::string& name);
const std::string& name_of_lane(int lane);

}  // namespace sim
