#include "settings.h"

#include <c10/util/Exception.h>

#include <cstdlib>

namespace sim {

namespace {

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoll(value) : otherwise;
}

Settings& current() {
  static Settings settings;
  return settings;
}

constexpr int MOST_DEVICES = 64;

}  // namespace

const Settings& settings() { return current(); }

void configure(const Settings& settings) {
  TORCH_CHECK(settings.pause_us >= 0, "pause_us is ", settings.pause_us, ", and must not be negative");
  TORCH_CHECK(settings.pause_percent >= 0 && settings.pause_percent <= 100,
              "pause_percent is ", settings.pause_percent, ", and must be from 0 to 100");
  current() = settings;
}

int num_devices() {
  static const int num = [] {
    const auto wanted = from_environment("SIM_DEVICES", 2);
    TORCH_CHECK(wanted >= 1 && wanted <= MOST_DEVICES, "SIM_DEVICES is ", wanted, ", and must be from 1 to ",
                MOST_DEVICES);
    return static_cast<int>(wanted);
  }();
  return num;
}

size_t memory_limit() {
  // Read each time: a test sets a limit for a few allocations only.
  const auto mib = from_environment("SIM_MEMORY_MIB", 0);
  return mib > 0 ? static_cast<size_t>(mib) << 20 : SIZE_MAX;
}

}  // namespace sim
