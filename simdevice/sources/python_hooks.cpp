#include "python_hooks.h"

#include "streams.h"

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

}  // namespace sim
