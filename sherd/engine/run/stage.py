"""The units of one pipeline stage in one step of a schedule: many micro-batches, one gather, one reduction.

    begin ─▶ forward and backward, any number of times and in any order ─▶ (last_backward) ─▶ reduce
      └──▶ forward, any number of times ─▶ end

In between, units keep their unsharded parameters until the schedule frees them, and add up unsharded gradients. For the
last backward, which then reduces unit by unit, or else at the end, each unit gets the user's policy back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sherd.engine.run.runtime import Runtime
from sherd.engine.run.unit import Unit
from sherd.errors import ModuleError, OwnershipError, StateError
from sherd.schedule.actions import GradientsReady
from sherd.schedule.state import Live

DURING_A_STEP = {
    "reshard_after_forward": False,
    "reshard_after_backward": False,
    "reduce_gradients": False,
    "renews_copies": False,
}
"""Fields of a unit's policy, and their values between micro-batches."""

CHANGED = (*DURING_A_STEP, "all_reduce_gradients", "finalizes_by_hand")
"""Fields that a step changes; torch's stage sets the last two."""


class StageUnits:
    """The units at and below `module`, the module of one pipeline stage."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self._user_policies: list[tuple[Unit, dict[str, Any]]] = []
        self._has_begun = False

    @property
    def units(self) -> list[Unit]:
        """Returns each unit once, outermost first."""
        return Unit.below(self.module)

    @property
    def runtimes(self) -> list[tuple[Runtime, Unit]]:
        """Returns every unit with its runtime. A unit without a runtime is sealed into one."""
        return [(Runtime.of(unit, unit.modules[0]), unit) for unit in self.units]

    def check(self) -> None:
        """Check that the units belong to this stage alone.

        Raises:
            ModuleError: a unit has modules outside of the stage.
            OwnershipError: a unit uses a parameter that a unit of another stage owns.
            StateError: the units belong to a larger model that has run as one, or `accumulate` counts their backwards,
                or `step_in_backward` steps them.
        """
        inside = {id(module) for module in self.module.modules()}
        units = {unit.id: unit for unit in self.units}
        for unit in units.values():
            away = [type(module).__name__ for module in unit.modules if id(module) not in inside]
            if away:
                raise ModuleError(
                    f"{self.name}: unit {unit.name} also has modules that are not in the stage's module "
                    f"({', '.join(away)}); call fully_shard for each stage by itself"
                )
            owner = next((companion for companion in unit.tied_owners if companion.id not in units), None)
            if owner is not None:
                raise OwnershipError(
                    f"{self.name}: unit {unit.name} uses a parameter that unit {owner.name} owns, which is not in this "
                    "stage, and each stage gathers and reduces by itself; give each stage a parameter of its own"
                )
            if unit.steps_in_backward:
                raise StateError(
                    f"{self.name}: step_in_backward steps unit {unit.name}, and a schedule divides gradients "
                    "later, by the number of micro-batches; call remove() on what it returned, and step after that"
                )
            if unit.policy.accumulation is not None:
                raise StateError(
                    f"{self.name}: a schedule runs inside accumulate(), which counts the backward of each micro-batch; "
                    "leave it out, as a step of a schedule reduces once by itself, and to add several steps up call "
                    "set_requires_gradient_sync(False) before all but the last"
                )
            runtime = Runtime.over(unit)
            if runtime is not None and runtime.root.id not in units:
                raise StateError(
                    f"{self.name}: unit {unit.name} has run below {runtime.root.name}, which is not in the stage; "
                    "build the stages before the full model is run, or call fully_shard for each stage by itself"
                )

    # A step

    def begin(self) -> None:
        """Begin a step. An earlier step that raised is given up with its gradients."""
        if self._has_begun:
            for runtime in self._each_runtime():
                runtime.reset()
            self._restore_policies()
            self._has_begun = False  # also if `check` raises
        self.check()
        self._has_begun = True
        for unit in self.units:
            if unit.keeps_copies:
                unit.may_be_written()  # once for all micro-batches
            self._user_policies.append((unit, {name: getattr(unit.policy, name) for name in CHANGED}))
            unit.change(**DURING_A_STEP)

    def gather(self) -> None:
        """Gather all units: start every gather, then wait."""
        missing = [(runtime, unit) for runtime, unit in self.runtimes if unit.live is not Live.UNSHARDED]
        for wait in (False, True):
            for runtime, unit in missing:
                runtime.unshard(unit, wait)

    def free(self) -> None:
        for runtime, unit in self.runtimes:
            runtime.reshard(unit)

    def end(self) -> None:
        """End a step without gradients: free unsharded parameters, and restore the user's policies."""
        self.free()
        self._restore_policies()
        self._has_begun = False

    def last_backward(self) -> None:
        """Let the next backward, the last one, reduce all gradients and free parameters unit by unit.

        Not for a backward in two parts, whose second part brings gradients after the first has passed the units.
        """
        self._restore_policies()

    def start_reductions(self) -> None:
        """Free unsharded parameters, and start the reductions in backward order, where the user's policies reduce."""
        self._restore_policies()
        self.free()
        for runtime in self._each_runtime():
            runtime.revise()
            for index, unit in reversed(list(enumerate(runtime.units))):
                if unit.backward.has_unreduced:
                    runtime.tape.play(GradientsReady, index)

    def finish_reductions(self) -> None:
        """End a step: the gradients of all micro-batches have been added to the shards' afterwards."""
        for runtime in self._each_runtime():
            runtime.expect_last_backward(True)
            runtime.end_backwards()
        self._has_begun = False

    def _each_runtime(self) -> list[Runtime]:
        return list({id(runtime): runtime for runtime, _ in self.runtimes}.values())

    def _restore_policies(self) -> None:
        for unit, fields in self._user_policies:
            unit.change(**fields)
        self._user_policies.clear()

    # A backward in two parts

    @contextmanager
    def split_backward(self) -> Iterator[None]:
        """Show unsharded parameters during one half of a backward, for the inputs or for the parameters.

        torch walks through `module.parameters()` and writes to each parameter's `.grad` itself. So all parameters, also
        those of a flat parameter, are unsharded and registered, and gradients that torch wrote are reduced like
        gradients from autograd.
        """
        self.gather()
        with Unit.members_shown(self.units):
            yield
            shown = (record.places[0].shown for unit in self.units for record in unit.parameters)
            written = [tensor for tensor in shown if tensor is not None and tensor.is_leaf and tensor.grad is not None]
            gradients = [tensor.grad for tensor in written]
            for tensor in written:
                tensor.grad = None
            if written:
                torch.autograd.backward(written, gradients)  # whose hooks take all gradients
