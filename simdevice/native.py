"""The compiled part of the simulated device, loaded into this process when it is first asked for."""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import importlib.util
from types import ModuleType

from simdevice.build import build


@functools.cache
def native() -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("sim_native", str(build()))
    spec = importlib.util.spec_from_loader("sim_native", loader)
    assert spec is not None, "a spec for this loader is always found"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    # A worker that still computes while torch is torn down would bring the process down with it.
    atexit.register(module.stop_workers)
    return module
