// The few places where the device meets Python: functions of the user that it calls, and the GIL it must not hold.
#pragma once

#include <Python.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace sim {

/// Gives the GIL back while the host waits, if this thread holds it.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

/// A function that Python may set, or unset, while others call it.
template <class Signature>
class Hook {
 public:
  using Function = std::function<Signature>;

  void set(Function function) {
    auto shared = function ? std::make_shared<Function>(std::move(function)) : nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    function_ = std::move(shared);
  }
  std::shared_ptr<Function> get() {
    std::lock_guard<std::mutex> lock(mutex_);
    return function_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Function> function_;
};

// Called without the host's lock: they take the GIL.
Hook<void(const std::string& cause)>& host_wait_hook();
Hook<std::string()>& task_label_hook();
Hook<std::string()>& allocation_label_hook();

/// The interned text of a label hook, or "" if none is set.
const char* label_from(Hook<std::string()>& hook);

/// Whether calls of Python functions are counted, for the host's time; each thread that queues work counts its own.
void count_calls(bool counts);
void count_calls_of_this_thread();

}  // namespace sim
