// All that a part of the device needs which queues work: streams, events, tensors on the host.
#pragma once

#include "module.h"
#include "settings.h"
#include "streams.h"
#include "tensors.h"
