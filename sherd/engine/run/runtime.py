"""The runtime of a model: the units below a root with their schedule, whose actions it has carried out.

Units are sealed into a runtime when the root's first forward begins. A unit whose forward runs before has a runtime of
its own, which the root's one replaces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import at_end_of_backward, in_backward, outside_transforms, splitting_stage, write_into
from sherd.comm.agreement import in_short
from sherd.engine.moves.arrivals import GradientObserver
from sherd.engine.moves.saved import begin_watching, end_watching
from sherd.engine.moves.selfgather import require_can_gather_itself
from sherd.engine.moves.weights import IS_TRAINED, STAND
from sherd.engine.run.call_stack import Call, UnderWay
from sherd.engine.run.overseer import overseers_of
from sherd.engine.run.tape import Observer, Tape
from sherd.engine.run.unit import Unit
from sherd.engine.run.unmanaged import Unmanaged, registrations
from sherd.engine.state.loads import forget_loads
from sherd.engine.state.ownership import require_not_torchs
from sherd.engine.state.parameter import ShardedParameter
from sherd.errors import OwnershipError, StateError, WrapperStateError
from sherd.policy import UnitPolicy
from sherd.schedule import actions as do
from sherd.schedule.schedule import Schedule
from sherd.schedule.state import Keep, Limits, Live, UnitSpec
from sherd.wrap.names import plain_name

UNIT_OF = attrgetter("unit")


class Runtime:
    """The units of one model, in the order of `named_modules`, the first being the root's, and last the `guests` (ids),
    which are not below the root, but own parameters that are used there.

    It belongs to the root module and holds no module. `in_backward`: one has begun and not ended, be it because it
    raised. `num_backwards` have begun. `is_in_last_backward`: the newest one is the last before a step.
    `_brings_gradients`: whether it does for any unit; None until somebody has asked.
    """

    over: Callable[[Unit], Runtime | None] = staticmethod(methodcaller("sealed_into"))
    """Returns the runtime that a unit is sealed into, if that still exists. All in C, as every hook asks."""

    def __init__(self, root: nn.Module, units: Sequence[Unit], guests: Collection[int] = ()) -> None:
        self.units = tuple(units)
        self.unmanaged, self.guests = Unmanaged(root, units), frozenset(guests)
        self.in_backward = False
        self.num_backwards, self.is_in_last_backward, self._is_last_backward = 0, True, True
        self._brings_gradients: bool | None = None
        self._num_forwards = self._usual_forwards = 0  # before the next backward, and before the last one
        self._calls: list[Call] = []
        self._step_event: Any = None
        self._index = {unit.id: index for index, unit in enumerate(self.units)}
        self._policies: list[UnitPolicy] = []
        overseers = overseers_of(self.units)
        self.overseers = set(overseers.values())
        self.schedule = Schedule(())
        self.tape = Tape(self.schedule, self.units, overseers)
        self.revise()

    @staticmethod
    def of(unit: Unit, module: nn.Module) -> Runtime:
        """Returns the runtime that `unit` is sealed into. If there is none yet, `module` becomes a root, or the unit's
        first module where `module` is not one of the unit's."""
        runtime = Runtime.over(unit)
        if runtime is not None and not (runtime.is_idle and unit.id in runtime.guests):
            return runtime
        # A module inside of the unit's may be called by itself (`engine/run/touch.py`).
        root = module if Unit.of(module) is unit else unit.modules[0]
        with outside_transforms():  # buffers that are made anew would be of the transform's level
            return seal(root)

    @property
    def root(self) -> Unit:
        """The outermost unit."""
        return self.units[0]

    @property
    def is_idle(self) -> bool:
        """Whether no forward, backward or reduction is under way."""
        return not self._calls and not self.in_backward and not self.schedule.state.reducing

    # Events

    def enter(self, unit: Unit, module: nn.Module) -> Call:
        """A forward of `module`, one of `unit`'s, begins: make it whole.

        Inside our own backward it is a recomputation (activation checkpointing), inside another model's it is not.
        """
        if unit.lent is not None or unit.companions:
            _require_not_lent(unit, "forward")
        if self._calls and unit is self.root:
            self._give_up_interrupted()
        recomputing = self.in_backward and in_backward()
        outermost = not self._calls and not recomputing
        if outermost:
            self._begin_forward(unit)
        under_way = None if self._calls else UnderWay()
        if unit.policy.on_touch == "unshard":
            for hooks, key, _ in unit.touch_hooks:  # there also if it rests unsharded
                hooks.pop(key, None)
        handling, opens_run = sys.exc_info()[1], unit.runs is None or unit.runs.begin()
        watches = begin_watching(unit.backward)
        call = Call(unit, id(module), outermost, opens_run, recomputing, handling, under_way, watches)
        self._calls.append(call)
        if recomputing:
            unit.backward.recompute_begins()
            self._expect_gradients(unit)
        self.tape.play(do.BeforeForward, self._index[unit.id], recomputing)
        return call

    def leave(self, module: nn.Module, differentiable: bool, in_use: bool = False) -> bool:
        """Note that a forward of `module` has ended. Returns whether it ended by returning: it may have raised, or
        never have begun because `enter` did.

        `in_use`: a view of its unit's parameters is still there.
        """
        if not self._calls or self._calls[-1].module != id(module):
            return False
        call = self._pop_call()
        unit, raised = call.unit, sys.exc_info()[1] is not call.handling
        ends = unit.runs is None or unit.runs.end(module) or raised
        if ends and unit not in map(UNIT_OF, self._calls):  # not from inside its own other method
            self.tape.play(do.AfterForward, self._index[unit.id], call.recomputing, in_use)
        if call.outermost:
            self._end_forward(differentiable and not raised)
        return not raised

    def _pop_call(self) -> Call:
        call = self._calls.pop()
        end_watching(call.watches)
        return call

    def _begin_forward(self, unit: Unit) -> None:
        if self.in_backward or self.tape.is_astray:
            self._recover(unit)
        stage = splitting_stage()
        if stage is not None:
            raise StateError(
                f"unit {unit.name} runs in torch's PipelineStage (stage {stage.stage_index}), under a schedule that "
                "splits backward in two and would look for unsharded parameters where there are shards; use "
                "sherd.interop.pipelining.PipelineStage; or fully_shard the stage's module itself, and call "
                "sherd.interop.torch_fsdp_identity() first"
            )
        self._look_for_unmanaged(in_backward=False)
        counted = self.root.policy.accumulation
        is_first = counted is None or counted.begin_forward(self.root.id)
        # First, as ranks that go along with others in there may gather what is kept, before it is stale once more:
        # test_any_program_trains_as_the_plain_model.
        for overseer in self.overseers:
            overseer.begin(self.root)
        if is_first:
            for member in self.units:
                # Most units keep no copies and find their shards where they were, so nothing more is called for them.
                if member.keeps_copies or member.shards.have_moved:
                    member.may_be_written()
            kept = [unit for unit in self.units for each in unit.weights if each.live is not Live.SHARDED]
            for member in outdated(kept) if kept else ():
                self.shards_written(member)
        self.revise()
        event, self._step_event = self._step_event, None
        for streams in {id(member.streams): member.streams for member in self.units}.values():
            streams.begin_step(event)

    def _look_for_unmanaged(self, in_backward: bool) -> None:
        if self.unmanaged.seen != registrations.count or any(each.requires_grad for each in self.unmanaged.frozen):
            self.unmanaged.look(in_backward)

    def _end_forward(self, differentiable: bool) -> None:
        for index, unit in enumerate(self.units):
            if unit.policy.on_touch == "unshard":
                unit.watch_touch()
            if unit.runs is not None and unit.runs.give_up():  # a list unit of which the forward ran only some modules
                self.tape.play(do.AfterForward, index)
        self.tape.play(do.EndForward, differentiable)
        self._num_forwards += differentiable

    def gathers_follow(self, event: Any) -> None:
        """The next forward's gathers wait for `event`, the optimizer's, instead of for all of compute."""
        self._step_event = event

    def before_backward(self, unit: Unit) -> None:
        """Autograd has reached an output of `unit`."""
        if unit.lent is not None or unit.companions:
            _require_not_lent(unit, "backward")
        if not self.in_backward:
            self._look_for_unmanaged(in_backward=True)
            self.is_in_last_backward = self._is_last_backward
            if (counted := self.root.policy.accumulation) is not None:
                self.is_in_last_backward = counted.begin_backward(self.root.id, self.root.name)
                for member in self.units:
                    member.reduce_fully(self.is_in_last_backward)
            self.in_backward = True
            self.num_backwards += 1
            self.revise()
            at_end_of_backward(self._end_backward)
        self._expect_gradients(unit)
        self.tape.play(do.BeforeBackward, self._index[unit.id])

    def _expect_gradients(self, unit: Unit) -> None:
        unit.backward.expect(unit.policy, partial(self._gradients_complete, self._index[unit.id]))

    def after_backward(self, unit: Unit) -> None:
        """Autograd is past the inputs of `unit`."""
        if self.in_backward:
            unreduced = unit.backward.awaits_reduction(unit.policy, self._has_gradients)
            self.tape.play(do.AfterBackward, self._index[unit.id], unreduced)
            unit.backward.leave()

    def _has_gradients(self) -> bool:
        """Returns whether the present backward brings gradients for any unit, as `torch.autograd.grad` need not."""
        if self._brings_gradients is None:
            backwards = [unit.backward for unit in self.units]
            self._brings_gradients = any(each.has_received or each.awaits_gradients for each in backwards)
        return self._brings_gradients

    def _gradients_complete(self, index: int, group: int | None, is_done: bool) -> None:
        unit = self.units[index]
        if unit.surrounds and unit.policy.reduce_unused:
            return  # ranks that lack some reduce it behind the units inside, and so does this one
        # What was learnt of one forward says nothing of more: each may be run again, by a checkpoint.
        is_done = is_done and self._num_forwards <= self._usual_forwards
        if group is None:
            # Autograd may pass the unit's inputs much later (they may be many units' inputs): free it as soon as that
            # is safe.
            if is_done:
                self.tape.play(do.AfterBackward, index, True)
            else:
                self.tape.play(do.GradientsReady, index)
        elif is_done:
            self.tape.play(do.GroupPassed, index, group)

    def _end_backward(self) -> None:
        """Autograd is done: whatever is left over is reduced and freed."""
        if not self.in_backward:
            return
        for index, unit in enumerate(self.units):
            if unit.backward.awaits_reduction(unit.policy, self._has_gradients):
                self.tape.play(do.AfterBackward, index, True)
        if (counted := self.root.policy.accumulation) is not None:
            has_received = any(unit.backward.has_received for unit in self.units)
            counted.end_backward(self.root.id, has_received or self.unmanaged.has_gradients)
        for unit in self.units:
            unit.backward.end()
            if unit.policy.on_touch == "unshard":
                unit.watch_touch()
        self.tape.play(do.EndBackward, self._is_last_backward)
        for unit in self.units:
            if unit.place.is_elsewhere:
                unit.land_gradients()
        for overseer in self.overseers:
            overseer.end_backward(self.root)
        self.in_backward, self._brings_gradients = False, None
        if self._num_forwards:  # else the forward goes on, or another backward went before
            self._usual_forwards, self._num_forwards = self._num_forwards, 0
        if self.unmanaged.replicated and self.root.policy.reduce_gradients:
            self.unmanaged.average_gradients()

    def expect_last_backward(self, is_last: bool) -> None:
        """Set whether the next backward is the last one before a step. Reductions stay in flight till then."""
        self._is_last_backward = is_last

    # The user's own moves

    def unshard(self, unit: Unit, wait: bool) -> None:
        """Start `unit`'s all-gather, and wait for it if told so."""
        if unit.keeps_copies or unit.shards.have_moved or outdated((unit,)):
            unit.may_be_written()
        self.revise()
        if not self._calls and not self.in_backward:  # else no optimizer has stepped since the forward began
            unit.streams.begin_step()
        self.tape.play(do.Unshard, self._index[unit.id], wait)

    def finish_unshard(self, unit: Unit) -> None:
        """Wait for `unit`'s all-gather, if one is in flight."""
        if unit.live is Live.GATHERING:
            self.tape.play(do.Unshard, self._index[unit.id], True)

    def reshard(self, unit: Unit) -> None:
        """Free `unit`'s unsharded parameters."""
        self.tape.play(do.Reshard, self._index[unit.id])

    def show_shards(self, unit: Unit) -> None:
        """As `reshard`, for somebody who will read or write shards; refused while they are needed whole."""
        self._give_up_interrupted()
        if self._calls or (self.in_backward and in_backward()):
            during = "backward" if self.in_backward else "forward"
            raise StateError(
                f"the shards of unit {unit.name} were asked for (state_dict, load_state_dict or .to()) in the middle "
                f"of a {during} that needs its unsharded parameters; do it before or after"
            )
        self.reshard(unit)

    def shards_written(self, unit: Unit) -> None:
        """Free `unit`'s unsharded parameters, as its shards have new values. Not if they are being read, as where an
        optimizer steps inside backward: the next forward sees that they are outdated."""
        if not (self.in_backward or any(unit in (call.unit, *call.unit.companions) for call in self._calls)):
            self.reshard(unit)

    @contextmanager
    def observed(
        self,
        observer: Observer,
        observer_of_gradients: Callable[[int, int, Sequence[ShardedParameter]], GradientObserver],
    ) -> Iterator[None]:
        """Have `observer` see all events and actions inside the context.

        Args:
            observer: sees the events and actions.
            observer_of_gradients: called for each group with the numbers of its unit and of the group, and the group's
                parameters; returns the object that sees the group's gradients.

        Raises:
            StateError: the model is observed already.
        """
        if self.tape.observer is not None:
            raise StateError(f"the memory of {self.root.name} is tracked already; leave that `with` block first")
        with ExitStack() as observers:
            observers.enter_context(self.tape.observed(observer))
            for number, unit in enumerate(self.units):
                for group, gradients in enumerate(unit.gradients):
                    observer_of_group = observer_of_gradients(number, group, gradients.group.parameters)
                    observers.enter_context(gradients.arrivals.observed(observer_of_group))
            yield

    # When things go wrong

    def reset(self, gradients: bool = True) -> None:
        """Back to shards with nothing in flight; `gradients`: what has not reached the shards is lost."""
        for overseer in self.overseers if self.in_backward else ():
            overseer.abandon_backward(self.root)
        with torch.no_grad():
            for unit in self.units if self.tape.is_astray else ():
                unit.free()
        self.tape.play(do.Reset, gradients)
        self.tape.recovered()
        while self._calls:
            self._pop_call()
        self.in_backward, self._brings_gradients = False, None
        for unit in self.units:
            unit.backward.end()
            if unit.runs is not None:
                unit.runs.give_up()

    def _give_up_interrupted(self) -> None:
        """Back to shards if a forward has ended and nobody said so."""
        if self._calls and (first := self._calls[0].under_way) is not None and first.is_over:
            self.reset(gradients=self.in_backward)

    def _recover(self, unit: Unit) -> None:
        """Reset after a backward that has raised, so that its final callback never ran, or an action that has."""
        if self.in_backward and unit is not self.root:
            raise StateError(
                f"forward of unit {unit.name} after a backward of {self.root.name} that has raised, and left gradients "
                f"half reduced; run {self.root.name}'s forward, or call its reset_iter_state(), first"
            )
        self.reset(gradients=self.in_backward)

    # Choices

    def revise(self) -> None:
        """Look at the units' policies again, if any has changed."""
        policies = [unit.policy for unit in self.units]
        if policies == self._policies:
            return
        self._policies = policies
        specs = tuple(self._spec(unit) for unit in self.units)
        state = self.schedule.state
        live = state.live if state.specs else tuple(unit.live for unit in self.units)
        ahead = self.root.policy.prefetch
        buffers = max(unit.reduce_buffers for unit in self.units)
        limits = Limits(ahead.forward_depth, ahead.backward_depth, ahead.bytes_in_flight, buffers, ahead.after_backward)
        self.schedule.move_to(replace(state, specs=specs, limits=limits, live=live))

    def _spec(self, unit: Unit) -> UnitSpec:
        policy = unit.policy
        return UnitSpec(
            unsharded_bytes=unit.unsharded_bytes,
            after_forward=Keep.under(policy.reshard_after_forward, unit is self.root, unit.mesh.num_shards),
            reshard_after_backward=policy.reshard_after_backward,
            unshard_in_backward=policy.unshard_in_backward,
            reduces=policy.reduce_gradients,
            companions=tuple(self._index[owner.id] for owner in unit.companions if owner.id in self._index),
            forward_prefetch=self._indices(policy.forward_prefetch),
            backward_prefetch=self._indices(policy.backward_prefetch),
        )

    def _indices(self, ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if ids is None else tuple(self._index[unit_id] for unit_id in ids if unit_id in self._index)


def outdated(units: Sequence[Unit]) -> list[Unit]:
    """Returns those of `units` that are kept as of other shards than they have now, which were written in place since,
    or of which one form was told to be trained, or not to be. One call for all units, as a step may keep each."""
    found = []
    for unit in units:
        for weights in unit.weights:
            made = weights.made
            if weights.live is Live.SHARDED or made is None:
                continue
            now = list(map(STAND, weights.group.shard_memory.versioned))
            is_told = weights.live is Live.UNSHARDED and made.trained != list(map(IS_TRAINED, made.parameters))
            if is_told or now != weights.as_of:
                found.append(unit)
    return found


def _require_not_lent(unit: Unit, call: str) -> None:
    """Raise if parameters that `unit` uses are lent: a forward would gather over them, gradients would be lost."""
    lender = next((owner for owner in (unit, *unit.companions) if owner.lent is not None), None)
    if lender is not None:
        own = lender is unit and call == "forward"
        raise WrapperStateError(
            f"{call} of unit {unit.name} inside an unshard context (unsharded, summon_full_params) that lends "
            f"{'its parameters' if own else f'the parameters of unit {lender.name}'}; leave the context first, or "
            "enter it with recurse=False on a unit above; backward comes before or after it"
        )


# Sealing


def seal(root: nn.Module) -> Runtime:
    """Take every unit at and below `root` into one runtime, with names as seen from there; also those elsewhere that
    own a parameter which one of them uses, where a part of a model runs before its root ever has.

    Raises:
        ModuleError: torch's own FSDP has a module below `root`.
        StateError: a unit is at work in another runtime, or parameters still have no data (meta device).
        OwnershipError: a unit belongs to another root, or a parameter was made tensor parallel after it was sharded.
    """
    below = Unit.below(root)
    ids = {unit.id for unit in below}
    owners = {owner.id: owner for unit in below for owner in unit.companions if owner.id not in ids}
    units = [*below, *owners.values()]
    for unit in units:
        earlier = Runtime.over(unit)
        if earlier is not None and unit in below and earlier.root not in below and unit.id not in earlier.guests:
            raise OwnershipError(
                f"unit {unit.name} has run below the root {earlier.root.name}, and cannot be taken under a second one, "
                f"{type(root).__name__}: fully_shard a module that has both, and run its forward first; or delete the "
                "first root, if it is used no more"
            )
        if earlier is not None and not earlier.is_idle:
            raise StateError(
                f"unit {unit.name} is still at work below {earlier.root.name}, so it cannot be taken under a new root "
                f"{type(root).__name__}; finish that forward or backward first, or call reset_iter_state() on it"
            )
    name_units(root)
    for unit in units:
        if unit.shards.on_meta:
            unit.notice_replaced()
            unit.rebind()  # `to_empty` may have been called on each module by itself
    _require_data(units)
    _require_own_meshes(units)
    _require_shards_can_gather_themselves(units)
    runtime = Runtime(root, units, guests=owners)
    for unit in units:
        unit.notice_moved()
        if not unit.shards.are_in_buffer:
            unit.regroup()
        unit.join(runtime)
        forget_loads(unit.mesh)
    write_into(root, Unit.RUNTIME, runtime)
    return runtime


def name_units(root: nn.Module) -> list[Unit]:
    """Give every unit below `root`, and the parameters that are used there, names as seen from there. Returns the
    units, each once.

    Raises:
        ModuleError: torch's own FSDP has a module below `root`.
    """
    names: dict[int, tuple[Unit, list[str]]] = {}
    module_names: dict[int, str] = {}
    for path, module in root.named_modules():
        name = plain_name(path)
        unit = Unit.of(module)
        if unit is None:
            require_not_torchs(path, module)
        else:
            names.setdefault(unit.id, (unit, []))[1].append(name or unit.class_name)
        module_names[id(module)] = name
    for unit, unit_names in names.values():
        unit.rename(", ".join(unit_names), module_names)
    below = [unit for unit, _ in names.values()]
    for owner in {owner for unit in below for owner in unit.companions}.difference(below):
        owner.rename(owner.name, module_names)
    return below


def _require_data(units: list[Unit]) -> None:
    missing = [f"{name} (unit {unit.name})" for unit in units for name in unit.shards.on_meta]
    if missing:
        raise StateError(
            f"parameters are still on the meta device: {in_short(missing)}. Give them memory and values before the "
            "first forward: model.to_empty(device=...), then each module's reset_parameters(), or load a state dict"
        )


def _require_shards_can_gather_themselves(units: list[Unit]) -> None:
    """Raise if a shard was given an all-gather of its own, after it was cut in a way that does not allow for one."""
    for record in (each for unit in units for each in unit.parameters):
        require_can_gather_itself(record.name, record.resting, record.cut, record.mesh)


def _require_own_meshes(units: list[Unit]) -> None:
    """Raise if a DTensor on another mesh hangs where a shard was: what is gathered would take its place again, without
    a word, and the module computes for tensor parallelism."""
    for unit in units:
        for record in unit.parameters:
            for place in record.places:
                shown = place.shown
                if isinstance(shown, DTensor) and shown.device_mesh != record.shard_spec.mesh:
                    raise OwnershipError(
                        f"{record.name} (unit {unit.name}): a DTensor on {shown.device_mesh} was put in its place "
                        f"after it was sharded over {record.shard_spec.mesh}; make modules tensor parallel first "
                        "(parallelize_module), then fully_shard: build the model anew, in that order"
                    )
