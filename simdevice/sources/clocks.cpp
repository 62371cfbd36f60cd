#include "clocks.h"

#include <algorithm>
#include <utility>

namespace sim {

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t lane = 0; lane < from.size(); lane++) into[lane] = std::max(into[lane], from[lane]);
}

namespace {

std::vector<std::string>& lane_names() {
  static auto& names = *new std::vector<std::string>{"the host"};
  return names;
}

std::string described(const Use& use) {
  std::string text = std::string(use.what) + " on " + name_of_lane(use.lane);
  if (*use.where) text += std::string(" at ") + use.where;
  return text;
}

std::string race(const char* kind, const Use& first, const Use& second) {
  return std::string(kind) + ": " + described(first) + ", and unordered with it " + described(second);
}

}  // namespace

int new_lane(const std::string& name) {
  lane_names().push_back(name);
  return static_cast<int>(lane_names().size()) - 1;
}

const std::string& name_of_lane(int lane) { return lane_names().at(lane); }

std::vector<std::string> RaceDetector::note(const Access& access, const Use& use, const Clock& clock) {
  std::vector<std::string> found;
  if (access.begin >= access.end) return found;
  split_at(access.begin);
  split_at(access.end);
  std::vector<std::pair<char*, char*>> unknown;  // bytes that nobody has used yet
  char* covered = access.begin;
  const auto first = ranges_.lower_bound(access.begin), last = ranges_.lower_bound(access.end);
  for (auto it = first; it != last; ++it) {
    Range& range = it->second;
    if (range.last_write.lane >= 0 && !range.last_write.happened_before(clock)) {
      found.push_back(race(access.write ? "write-write" : "write-read", range.last_write, use));
    }
    if (access.write) {
      for (const Use& read : range.reads) {
        if (!read.happened_before(clock)) found.push_back(race("read-write", read, use));
      }
    } else {
      note_read(range, use);
    }
    if (covered < it->first) unknown.emplace_back(covered, it->first);
    covered = range.end;
  }
  if (access.write) {
    // Uses before this write need no memory: who is ordered behind the write is behind them too, or a race was found.
    ranges_.erase(first, last);
    ranges_[access.begin] = Range{access.end, use, {}};
  } else {
    if (covered < access.end) unknown.emplace_back(covered, access.end);
    for (const auto& [begin, end] : unknown) ranges_[begin] = Range{end, Use{}, {use}};
  }
  return found;
}

void RaceDetector::note_read(Range& range, const Use& use) {
  for (Use& read : range.reads) {
    if (read.lane == use.lane) {
      read = use;  // a lane's later read is ordered behind its earlier ones
      return;
    }
  }
  range.reads.push_back(use);
}

void RaceDetector::forget_before(char* begin, char* end, const Clock& clock) {
  split_at(begin);
  split_at(end);
  for (auto it = ranges_.lower_bound(begin); it != ranges_.end() && it->first < end; ++it) {
    Range& range = it->second;
    if (range.last_write.happened_before(clock)) range.last_write = Use{};
    auto& reads = range.reads;
    const auto is_before = [&](const Use& read) { return read.happened_before(clock); };
    reads.erase(std::remove_if(reads.begin(), reads.end(), is_before), reads.end());
  }
}

void RaceDetector::forget(char* begin, char* end) {
  split_at(begin);
  split_at(end);
  ranges_.erase(ranges_.lower_bound(begin), ranges_.lower_bound(end));
}

void RaceDetector::split_at(char* where) {
  auto it = ranges_.upper_bound(where);
  if (it == ranges_.begin()) return;
  --it;
  if (it->first == where || it->second.end <= where) return;
  Range right = it->second;
  it->second.end = where;
  ranges_.emplace(where, std::move(right));
}

}  // namespace sim
