// The simulated clock: when each task of each stream begins and ends on a machine that a record describes.
//
// Times follow from the host's calls and their order alone. They are the same whatever the load, and whether tasks
// compute or not. A task begins when its stream has ended the last one, the host has queued it, the events that the
// stream waits for have come, and, for a collective, its communicator is free. All times are in microseconds.
// Callers hold the host's lock.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace sim {

enum class Engine { none, compute, copy, communication };

/// What a task takes of the device, and of whom.
struct Cost {
  Engine engine = Engine::none;  // none: it takes no time, and is not shown
  double us = 0;
  int communicator = -1;
};

/// When an event comes, and whether that is when communication has ended.
struct Moment {
  double at = 0;
  bool by_communication = false;
  uint64_t epoch = 0;  // moments of before a reset are over
};

/// One stream's times.
struct Timeline {
  double end = 0;      // of the last task
  Moment awaited;      // the latest event that the next task waits for
  double computing = 0, copying = 0, communicating = 0;
  double exposed = 0;  // how long tasks have waited for communication of other streams

  /// Waiting for such a stream is waiting for communication, also where a short task follows the collective.
  bool mainly_communicates() const { return communicating > computing + copying; }
};

/// One task, as it ran.
struct Span {
  int lane;
  const char* what;
  Engine engine;
  double start, end;
};

struct Link {
  double latency = 0, bytes_per_us = 1;
  double us(double bytes) const { return latency + bytes / bytes_per_us; }
};

struct Machine {
  double launch = 0;        // the shortest task
  double host = 0;          // of the host, to queue a task
  double python = 0;        // of the host, for each call of a Python function
  double bytes_per_us = 1;  // of the device's memory
  double attention = 1, reduction = 1, lookup = 1, copy = 1;  // shares of the full rate
  std::map<c10::ScalarType, double> flops_per_us;
  double flops_per_us_tf32 = 1;
  Link within, across, to_host;
  int ranks_per_node = 8;
};

bool clock_runs();
const Machine& machine();
void start_clock(const std::map<std::string, double>& record);  // an empty one stops it

/// Sets all times to zero: those of the host here, those of streams when they are next used.
void reset_clock();

/// The host's time, and what makes it go on.
double host_time();
void host_works(double us);
void host_reaches(const Moment& moment);

/// Begins a stream's times anew if they are from before a reset.
void refresh(Timeline& line);
bool has_come(const Moment& moment);
Moment moment_of(Timeline& line);
void wait_for(Timeline& line, const Moment& moment);
void place(Timeline& line, int lane, const char* what, const Cost& cost);

const std::vector<Span>& spans();
int new_communicator();

Cost copy_on_device(double bytes);
Cost copy_by_link(double bytes);

/// A collective of `bytes`, those of the full tensor, among `size` ranks of which `per_node` share a node.
Cost collective_cost(const std::string& kind, double bytes, int size, int per_node, int communicator);

/// Counts a call of a Python function, for which the host takes `Machine::python`; may be called without the lock.
void count_python_call();

}  // namespace sim
