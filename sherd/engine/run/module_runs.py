"""A unit of several modules runs from the first of their forwards until all have run once."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn


class ModuleRuns:
    """The modules of a unit of several that have yet to run in the present run."""

    def __init__(self, modules: Sequence[weakref.ref[nn.Module]]) -> None:
        self._modules = modules
        self._to_run: set[int] = set()

    def begin(self) -> bool:
        """Note that a module begins a forward. Returns True if that begins a run of the unit."""
        begins = not self._to_run
        if begins:
            self._to_run = {id(module) for ref in self._modules if (module := ref()) is not None}
        return begins

    def end(self, module: nn.Module) -> bool:
        """Note that `module` has ended a forward. Returns True if that ends the unit's run."""
        was_running = id(module) in self._to_run
        self._to_run.discard(id(module))
        return was_running and not self._to_run

    def give_up(self) -> bool:
        """Note that the outermost forward is over. Returns True if a run was still going on."""
        was_running = bool(self._to_run)
        self._to_run.clear()
        return was_running
