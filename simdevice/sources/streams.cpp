#include "streams.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <random>
#include <thread>
#include <unordered_set>

#include "python_hooks.h"
#include "settings.h"

namespace sim {

namespace {

// Of a host that looks whether something is done: else one that looks until it is would never see it.
constexpr double POLL_US = 1;

double now_in_milliseconds() {
  const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since_start).count();
}

struct Task {
  Work run;
  const char* what = "";  // "" for what the device does on its own: events
  int64_t pause_us = 0;
};

std::atomic<bool> stopping{false};
std::atomic<bool> forked{false};
std::atomic<int> num_running{0};

void note_failure(const Task& task, int lane, const std::exception& error);

/// A queue of tasks, and the thread that runs them. Lives as long as the process.
class Queue {
 public:
  Queue(int device, int64_t id)
      : device(device), id(id), lane(new_lane("sim:" + std::to_string(device) + " stream " + std::to_string(id))) {
    std::thread([this] { run(); }).detach();
  }

  void put(Task task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty() && !is_running_;
  }

  // Drawn when the host queues a task, so that the pauses follow from the seed and the order of the host's calls.
  int64_t draw_pause() {
    const Settings& now = settings();
    if (!now.pause_us) return 0;
    if (drawn_for_ != now.seed || !has_drawn_) {
      constexpr std::array<double, 3> SLOWNESS{0.1, 1, 4};
      random_.seed(now.seed * 1000003 + device * 131 + id);
      slowness_ = SLOWNESS[random_() % SLOWNESS.size()];
      drawn_for_ = now.seed;
      has_drawn_ = true;
    }
    if (static_cast<int>(random_() % 100) >= now.pause_percent) return 0;
    return static_cast<int64_t>(std::uniform_real_distribution<>(0, now.pause_us * slowness_)(random_));
  }
  void restart_pauses() { has_drawn_ = false; }

  const int device;
  const int64_t id;
  const int lane;
  Clock clock;  // what has happened before the next task; guarded by the host's lock
  Timeline line;  // likewise

 private:
  void run() {
    at::set_num_threads(1);
    // A worker runs kernels alone: nothing it does is recorded for backward.
    c10::impl::ExcludeDispatchKeyGuard kernels_alone(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    for (;;) {
      Task task = next();
      if (task.pause_us) std::this_thread::sleep_for(std::chrono::microseconds(task.pause_us));
      num_running++;
      try {
        if (!stopping) task.run();
      } catch (const std::exception& error) {
        note_failure(task, lane, error);
      }
      num_running--;
      task = Task{};  // drops what the closure holds before the stream counts as idle
      std::lock_guard<std::mutex> lock(mutex_);
      is_running_ = false;
    }
  }

  Task next() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !tasks_.empty() && !stopping; });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    is_running_ = true;
    return task;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool is_running_ = false;
  std::mt19937_64 random_;
  double slowness_ = 1;
  uint64_t drawn_for_ = 0;
  bool has_drawn_ = false;
};

/// What the host has decided so far. Never destroyed: detached workers may outlive main().
struct Host {
  std::recursive_mutex mutex;
  std::vector<std::map<int64_t, Queue*>> queues = std::vector<std::map<int64_t, Queue*>>(num_devices());
  Clock clock;  // what the host has waited for. One for all its threads: it may miss a race among them, not invent one
  std::string failure;
  std::map<std::string, int64_t> races, waits;
  RaceDetector detector;
  std::array<uint64_t, 2> streams_made{};
};

Host& host() {
  static auto& host = *new Host;
  return host;
}

thread_local int device_of_thread = 0;
// A thread that only looks at events orders nothing: what it has seen counts from its own first task on.
thread_local bool has_queued = false;
thread_local Clock seen_by_thread;
thread_local std::map<int, int64_t> stream_of_thread;  // device: its current stream, where it is not the default one

Queue& queue_of(c10::Stream stream) {
  TORCH_CHECK(!forked, "sim: this process was forked from one that had loaded the device; load it in each child");
  auto& queue = host().queues.at(stream.device_index())[stream.id()];
  if (!queue) queue = new Queue(stream.device_index(), stream.id());
  return *queue;
}

/// Gives the stream's next task its time: behind all that the stream has seen, and all that the host has waited for.
void advance(Queue& queue) {
  if (!has_queued) merge(host().clock, seen_by_thread);
  has_queued = true;
  merge(queue.clock, host().clock);
  if (queue.clock.size() <= static_cast<size_t>(queue.lane)) queue.clock.resize(queue.lane + 1);
  queue.clock[queue.lane]++;
}

void note_failure(const Task& task, int lane, const std::exception& error) {
  HostLock lock(host().mutex);
  if (!host().failure.empty()) return;  // the first one: later ones often follow from it
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  const char* text = of_torch ? of_torch->what_without_backtrace() : error.what();
  host().failure = c10::str("sim: ", task.what, " on ", name_of_lane(lane), " failed: ", text);
}

void note_races(const std::vector<std::string>& found) {
  for (const std::string& text : found) host().races[text]++;
  TORCH_CHECK(found.empty() || settings().races != Races::raise, "sim: ", found.front());
}

}  // namespace

// Events

void Event::set() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    milliseconds_ = now_in_milliseconds();
  }
  changed_.notify_all();
}

void Event::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}

bool Event::is_done() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

double Event::milliseconds() {
  std::lock_guard<std::mutex> lock(mutex_);
  return milliseconds_;
}

EventPtr record(c10::Stream stream) {
  HostLock lock(host().mutex);
  Queue& queue = queue_of(stream);
  advance(queue);
  auto event = std::make_shared<Event>(queue.clock, moment_of(queue.line));
  if (settings().computes) {
    queue.put({[event] { event->set(); }});
  } else {
    event->set();
  }
  return event;
}

std::vector<EventPtr> record_all(int device) {
  std::vector<EventPtr> events;
  for (const auto& [id, queue] : host().queues.at(device)) events.push_back(record(stream_of(device, id)));
  return events;
}

void stream_wait(c10::Stream stream, const EventPtr& event) {
  HostLock lock(host().mutex);
  Queue& queue = queue_of(stream);
  merge(queue.clock, event->clock());
  wait_for(queue.line, event->moment());
  if (settings().computes) queue.put({[event] { event->wait(); }});
}

// Current device and streams

int current_device() { return device_of_thread; }

void set_device(int device) {
  TORCH_CHECK(device >= 0 && device < num_devices(), "sim has ", num_devices(), " devices, and no sim:", device);
  device_of_thread = device;
}

c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(SIM, static_cast<c10::DeviceIndex>(device)), id);
}

c10::Stream current_stream(int device) {
  if (device < 0) device = device_of_thread;
  const auto it = stream_of_thread.find(device);
  return stream_of(device, it == stream_of_thread.end() ? 0 : it->second);
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto before = current_stream(stream.device_index());
  stream_of_thread[stream.device_index()] = stream.id();
  return before;
}

c10::Stream new_stream(int device, int priority) {
  constexpr int64_t POOL = 32;  // the 33rd stream is the first one again
  HostLock lock(host().mutex);
  const bool is_urgent = priority < 0;
  const int64_t place = host().streams_made[is_urgent]++ % POOL;
  return stream_of(device < 0 ? device_of_thread : device, 1 + place + is_urgent * POOL);
}

// Tasks

void enqueue(c10::Stream stream, std::string_view what, const Accesses& accesses, const Cost& cost, Work work) {
  raise_failure();
  count_calls_of_this_thread();
  const char* where = label_from(task_label_hook());
  HostLock lock(host().mutex);
  enqueue_locked(stream, interned(what), where, accesses, cost, std::move(work));
}

void enqueue_locked(c10::Stream stream, const char* what, const char* where, const Accesses& accesses, const Cost& cost,
                    Work work) {
  Queue& queue = queue_of(stream);
  advance(queue);
  if (settings().races != Races::off) {
    const Use use{queue.lane, queue.clock[queue.lane], what, where};
    for (const Access& access : accesses) note_races(host().detector.note(access, use, queue.clock));
  }
  place(queue.line, queue.lane, what, cost);
  if (settings().computes) queue.put({std::move(work), what, queue.draw_pause()});
}

// The host waits

bool has_passed(Event& event) { return has_come(event.moment()) && event.is_done(); }

bool query(const EventPtr& event) {
  HostLock lock(host().mutex);
  if (has_queued) host_works(POLL_US);
  if (!has_passed(*event)) return false;
  merge(has_queued ? host().clock : seen_by_thread, event->clock());
  return true;
}

bool query(c10::Stream stream) {
  HostLock lock(host().mutex);
  Queue& queue = queue_of(stream);
  if (has_queued) host_works(POLL_US);
  if (!has_come(Moment{queue.line.end, false, queue.line.awaited.epoch}) || !queue.is_idle()) return false;
  merge(host().clock, queue.clock);
  return true;
}

void host_wait(const EventPtr& event) {
  {
    WithoutGil without_gil;  // a worker may need it: to destroy what only a task still holds
    event->wait();
  }
  HostLock lock(host().mutex);
  merge(host().clock, event->clock());
  host_reaches(event->moment());
}

void count_host_wait(const std::string& cause) {
  {
    HostLock lock(host().mutex);
    host().waits[cause]++;
  }
  if (auto hook = host_wait_hook().get()) (*hook)(cause);
}

/// Counts a wait, and waits. What the hook raises comes out when the wait is over: the caller then frees what the tasks
/// write, as the result of a copy to the host.
template <class Wait>
void count_and_wait(const std::string& cause, const Wait& wait) {
  try {
    count_host_wait(cause);
  } catch (...) {
    wait();
    throw;
  }
  wait();
  raise_failure();
}

void synchronize_stream(c10::Stream stream, const std::string& cause) {
  count_and_wait(cause, [&] { host_wait(record(stream)); });
}

void synchronize_device(int device, const std::string& cause) {
  count_and_wait(cause, [&] {
    std::vector<EventPtr> events;
    {
      HostLock lock(host().mutex);
      events = record_all(device);
    }
    for (const auto& event : events) host_wait(event);
  });
}

void raise_failure() {
  std::string failure;
  {
    HostLock lock(host().mutex);
    failure.swap(host().failure);
  }
  TORCH_CHECK(failure.empty(), failure);
}

void host_access(const Access& access, const char* what) {
  const char* where = label_from(task_label_hook());
  HostLock lock(host().mutex);
  if (settings().races == Races::off) return;
  auto& clock = host().clock;
  if (clock.empty()) clock.resize(HOST_LANE + 1);
  // Tasks queued from now on have this access behind them: they begin with the host's clock.
  const Use use{HOST_LANE, ++clock[HOST_LANE], what, where};
  note_races(host().detector.note(access, use, clock));
}

std::recursive_mutex& host_mutex() { return host().mutex; }
RaceDetector& race_detector() { return host().detector; }

std::map<std::string, int64_t> take_races(bool reset) {
  HostLock lock(host().mutex);
  auto races = host().races;
  if (reset) host().races.clear();
  return races;
}

std::map<std::string, int64_t> take_host_waits(bool reset) {
  HostLock lock(host().mutex);
  auto waits = host().waits;
  if (reset) host().waits.clear();
  return waits;
}

std::map<int64_t, Timeline> timelines(int device) {
  std::map<int64_t, Timeline> lines;
  for (const auto& [id, queue] : host().queues.at(device)) {
    refresh(queue->line);
    lines[id] = queue->line;
  }
  return lines;
}

void restart_pauses() {
  for (auto& queues : host().queues) {
    for (auto& [id, queue] : queues) queue->restart_pauses();
  }
}

const char* interned(std::string_view text) {
  static auto& mutex = *new std::mutex;
  static auto& texts = *new std::unordered_set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  return texts.emplace(text).first->c_str();
}

// The process ends, or forks

void stop_workers() {
  stopping = true;
  WithoutGil without_gil;
  // A worker inside a kernel would find torch half destroyed. One that waits for a lost peer is not worth waiting for.
  for (int i = 0; num_running > 0 && i < 200; i++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

bool is_forked() { return forked; }

static const int fork_is_noticed = pthread_atfork(nullptr, nullptr, [] { forked = true; });

}  // namespace sim
