#include "python_hooks.h"

#include <pybind11/pybind11.h>

#include <atomic>

#include "streams.h"
#include "uncharged.h"

namespace sim {

// Never destroyed: what Python set may not be dropped once the interpreter is gone.
Hook<void(const std::string&)>& host_wait_hook() {
  static auto& hook = *new Hook<void(const std::string&)>;
  return hook;
}

Hook<std::string()>& task_label_hook() {
  static auto& hook = *new Hook<std::string()>;
  return hook;
}

Hook<std::string()>& allocation_label_hook() {
  static auto& hook = *new Hook<std::string()>;
  return hook;
}

const char* label_from(Hook<std::string()>& hook) {
  const auto function = hook.get();
  return function ? interned((*function)()) : "";
}

static std::atomic<bool> counting{false};
static thread_local bool is_uncounted = false;

Uncounted::Uncounted() { is_uncounted = true; }
Uncounted::~Uncounted() { is_uncounted = false; }

static int count_call(PyObject*, PyFrameObject*, int what, PyObject*) {
  if (!is_uncounted && (what == PyTrace_CALL || what == PyTrace_C_CALL)) count_python_call();
  return 0;
}

void count_calls(bool counts) {
  counting = counts;
  count_calls_of_this_thread();
}

void count_calls_of_this_thread() {
  thread_local bool counts = false;
  if (counts == counting || !Py_IsInitialized()) return;
  counts = counting;
  pybind11::gil_scoped_acquire gil;
  PyEval_SetProfile(counts ? &count_call : nullptr, nullptr);
}

}  // namespace sim
