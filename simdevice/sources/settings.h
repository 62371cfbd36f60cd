// What `sim.configure` sets, at run time. Callers hold the host's lock.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sim {

enum class Spoil { no, handed_out, freed };
enum class Races { off, collect, raise };

struct Settings {
  int64_t pause_us = 0;    // the longest pause before a task of a stream of usual speed
  int pause_percent = 10;  // of the tasks pause
  uint64_t seed = 0;       // of the pauses, and of which streams are slow
  Spoil spoil = Spoil::handed_out;
  Races races = Races::collect;
  bool computes = true;  // whether tasks run, or are only noted
};

const Settings& settings();
void configure(const Settings& settings);

/// The devices of this process: environment SIM_DEVICES, 2 if it is not set.
int num_devices();

/// The bytes of one device: environment SIM_MEMORY_MIB; without it, no limit.
size_t memory_limit();

}  // namespace sim
