// Random numbers. A worker draws long after the host asked for them, and streams draw at once; so each operator that
// draws gets a CPU generator of its own, seeded when the host calls it. The numbers follow from the seed and the order
// of calls.
#pragma once

#include <ATen/core/Generator.h>

namespace sim {

const at::Generator& default_generator(int device = -1);
at::Generator new_generator(int device = -1);

/// Returns a CPU generator for one operator, and moves the device's on.
at::Generator generator_for_operator(const at::Generator& generator);

}  // namespace sim
