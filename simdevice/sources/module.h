// What each part gives to Python: functions of the module that `sim.py` loads.
#pragma once

#include <pybind11/pybind11.h>

namespace sim {

/// Collectives: collectives.cpp.
void bind_collectives(pybind11::module& module);

}  // namespace sim
