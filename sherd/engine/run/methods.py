"""A method of a module that is run as the module's forward."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from sherd.engine.run.hooks import as_forward
from sherd.engine.run.unit import Unit


class BoundForward:
    """A method run as a forward. It finds its module weakly: the module holds it. A function that is not bound to the
    module, a static method say, is called without it.

    Dynamo must not trace the call: the user's method has this object's place on the module, and Dynamo, which knows
    methods by their places, would call this one again (`test_a_method_run_as_a_forward_may_be_compiled`).
    """

    def __init__(self, unit: Unit, module: nn.Module, method: Callable[..., Any]) -> None:
        self._unit = unit
        self._module = weakref.ref(module)
        self._takes_module = inspect.ismethod(method) and method.__self__ is module
        self._function: Any = getattr(method, "__func__", method) if self._takes_module else method
        functools.update_wrapper(self, self._function)

    def of_copy(self, unit: Unit, module: nn.Module) -> BoundForward:
        """Returns the same for `module`, a copy of this one's module, and its `unit`."""
        return BoundForward(unit, module, self._function.__get__(module) if self._takes_module else self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the method returns. The unit is unsharded while it runs."""
        module = self._module()
        assert module is not None, "called through the module"
        method = self._function.__get__(module) if self._takes_module else self._function
        return as_forward(self._unit, module, method)(*args, **kwargs)
