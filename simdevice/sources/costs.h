// What an operator takes on the simulated clock: a roofline of its FLOP and of the bytes that it reads and writes.
#pragma once

#include "clock.h"
#include "clocks.h"
#include "signature.h"

namespace sim {

Cost cost_of(const Signature& signature, const Values& arguments, const Accesses& accesses);

}  // namespace sim
