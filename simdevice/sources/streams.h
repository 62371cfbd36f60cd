// Streams, each with a worker thread of its own, and events.
//
// The host queues a task and goes on; the stream's worker runs its tasks one by one. What orders tasks of two streams
// is an event alone, as on a GPU. Every function here may be called with or without the GIL.
#pragma once

#include <c10/core/Stream.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "clock.h"
#include "clocks.h"

namespace sim {

constexpr auto SIM = c10::DeviceType::PrivateUse1;

using Work = std::function<void()>;

/// One recording of an event: done once the stream has come to it.
class Event {
 public:
  Event(Clock clock, Moment moment) : clock_(std::move(clock)), moment_(moment) {}

  void set();
  void wait();
  bool is_done();
  double milliseconds();               // when it was done
  const Clock& clock() const { return clock_; }  // what has happened before it
  const Moment& moment() const { return moment_; }  // when it comes on the simulated clock

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  double milliseconds_ = 0;
  const Clock clock_;
  const Moment moment_;
};
using EventPtr = std::shared_ptr<Event>;

// The current device and the current streams belong to the calling thread, as CUDA's do.
int current_device();
void set_device(int device);
c10::Stream stream_of(int device, int64_t id);  // id 0: the default stream
c10::Stream current_stream(int device = -1);    // -1: of the current device
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(int device = -1, int priority = 0);  // from pools of 32, as CUDA's

/// Queues `work`, which reads and writes `accesses`. The host does not wait. `work` must hold no tensor that Python has
/// seen: a Python object that dies on a worker would want the GIL. Take `on_host(tensor)` instead.
/// `cost` is what it takes on the simulated clock. A task that does not compute is only noted: `sim.configure`.
void enqueue(c10::Stream stream, std::string_view what, const Accesses& accesses, const Cost& cost, Work work);

/// As `enqueue`, for callers that hold the host's lock; `where` is the text for reports, interned.
void enqueue_locked(c10::Stream stream, const char* what, const char* where, const Accesses& accesses, const Cost& cost,
                    Work work);

EventPtr record(c10::Stream stream);
void stream_wait(c10::Stream stream, const EventPtr& event);

/// Whether the event is done, and has come on the simulated clock. Callers hold the host's lock.
bool has_passed(Event& event);

/// Whether the event has passed. If so, what the host queues from now on is ordered behind it.
bool query(const EventPtr& event);

/// Whether all that was queued on the stream has run.
bool query(c10::Stream stream);

/// Waits on the host, without the GIL. Not counted: say `count_host_wait` first where a user would want to know.
void host_wait(const EventPtr& event);
void count_host_wait(const std::string& cause);

// Counted under `cause`. They raise what failed on a worker.
void synchronize_stream(c10::Stream stream, const std::string& cause);
void synchronize_device(int device, const std::string& cause);

/// One event for each stream of the device that was ever used. Callers hold the host's lock.
std::vector<EventPtr> record_all(int device);

/// Raises the first failure of a task that no call has raised yet.
void raise_failure();

/// Checks an access by the host itself, which queues nothing; see `sim.host_reads`.
void host_access(const Access& access, const char* what);

/// Guards everything the host decides: queues, clocks, memory. Nobody calls Python, or waits, while holding it.
std::recursive_mutex& host_mutex();
using HostLock = std::lock_guard<std::recursive_mutex>;

/// Ends all workers' work before the process does: they stop behind the task they run.
void stop_workers();

/// Whether this process was forked from one that had loaded the device: the workers did not come along.
bool is_forked();

/// Begins the sequences of pauses anew, from the seed. Callers hold the host's lock.
void restart_pauses();

/// The times of the device's streams, by id. Callers hold the host's lock.
std::map<int64_t, Timeline> timelines(int device);

RaceDetector& race_detector();
std::map<std::string, int64_t> take_races(bool reset);
std::map<std::string, int64_t> take_host_waits(bool reset);

/// One copy of each text, for as long as the process lives.
const char* interned(std::string_view text);

}  // namespace sim
