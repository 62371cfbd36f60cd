// What this device does and a GPU does not, so the clock is not to charge the host for it.
#pragma once

namespace sim {

/// While it lives, what this thread queues is one kernel: one launch for every few tasks, and the bytes of all.
class OneKernel {
 public:
  OneKernel();
  ~OneKernel();
  OneKernel(const OneKernel&) = delete;
  OneKernel& operator=(const OneKernel&) = delete;
};

/// While it lives, this thread's calls of Python functions are not counted: a GPU asks no meta kernel in Python.
class Uncounted {
 public:
  Uncounted();
  ~Uncounted();
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
};

}  // namespace sim
