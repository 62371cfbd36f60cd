"""The runtime of a model: it turns module calls and backward into events of the schedule, and carries out the answers.

Units are sealed into a runtime when the root's first forward begins. A unit that runs before then gets a runtime of its
own, which the root's runtime replaces.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import (
    MODULE_CALL,
    at_end_of_backward,
    connection_of,
    frames_from,
    in_backward,
    outside_transforms,
    splitting_stage,
    write_into,
)
from sherd.comm.groups import default_group, require_alive
from sherd.engine.moves.gradients import GradientObserver
from sherd.engine.moves.saved import begin_watching, end_watching
from sherd.engine.moves.selfgather import Phase, require_can_gather_itself
from sherd.engine.moves.weights import IS_TRAINED, STAND
from sherd.engine.run.monitor import agree_on_call, monitors_of
from sherd.engine.run.tape import Observer, Tape
from sherd.engine.run.unit import Unit, UnitRuntime
from sherd.engine.run.unmanaged import Unmanaged, registrations
from sherd.engine.state.loads import forget_loads
from sherd.engine.state.ownership import require_not_torchs
from sherd.engine.state.parameter import ShardedParameter
from sherd.errors import OwnershipError, StateError, WrapperStateError, in_short
from sherd.policy import UnitPolicy
from sherd.schedule import actions as do
from sherd.schedule.schedule import Schedule
from sherd.schedule.state import Keep, Limits, Live, UnitSpec
from sherd.tensor.spmd_types import unchecked
from sherd.wrap.names import plain_name

if TYPE_CHECKING:
    from sherd.engine.run.error_limits import ErrorLimits

UNIT_OF = attrgetter("unit")


class UnderWay:
    """The module call that is being made now, to be looked for later on the stack of its thread.

    An exception that is no `Exception` (Ctrl-C) skips torch's forward hooks, also those that are always called. So no
    hook says that such a forward has ended, but the stack does.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not MODULE_CALL:
            frame = frame.f_back
        self._call = frame  # the frame itself: another frame may get the same address later

    @property
    def is_over(self) -> bool:
        """Whether the call has certainly ended. Nothing is known of a call on another thread."""
        if self._call is None or self._thread != threading.get_ident():
            return False
        return all(frame is not self._call for frame in frames_from(sys._getframe()))


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """A forward under way.

    Attributes:
        module: the id of the module.
        opens_run: the first forward of the unit's modules in this run.
        handling: the exception that was being handled when the call began, to tell a new one from.
        under_way: tells if the call is still on the stack; for the first of the calls under way only.
        watches: what `end_watching` takes.
    """

    unit: Unit
    module: int
    outermost: bool
    opens_run: bool
    recomputing: bool
    handling: BaseException | None
    under_way: UnderWay | None
    watches: bool


class Runtime(UnitRuntime):
    """The runtime of one model. The root module holds it, and it holds no module.

    Attributes:
        units: the units in the order of `named_modules`, the root's first, and the `external_units` last.
        external_units: the ids of units that are not below the root, but own parameters that modules below it use.
        in_backward: True between the start and the end of backward, and after a backward that raised.
        num_backwards: the number of backwards that have begun.
        is_in_last_backward: the newest backward is the last one before a step.
        by_hand: the user ends the step's backwards (`finalize_backward`); None before its first backward.
        reduction: what the handle of an unfinished `finalize_backward` holds, if there is one.
    """

    agree_on_call = staticmethod(agree_on_call)

    def __init__(self, root: nn.Module, units: Sequence[Unit], external_units: Collection[int] = ()) -> None:
        self.units = tuple(units)
        self.unmanaged, self.external_units = Unmanaged(root, units), frozenset(external_units)
        self.in_backward = False
        self.num_backwards, self.is_in_last_backward, self._is_last_backward = 0, True, True
        self.by_hand: bool | None = None
        self.reduction: object = None
        self._unreduced: set[int] = set()
        """Units by number of which a backward of this step has reduced no gradients."""
        self._brings_gradients: bool | None = None
        """Whether the present backward brings gradients for any unit; None until it is asked for."""
        self._num_forwards = self._usual_forwards = 0  # before the next backward, and before the last one
        self._calls: list[ForwardCall] = []
        self._handed_over = False
        self._step_event: Any = None
        self._index = {unit.id: index for index, unit in enumerate(self.units)}
        self._policies: list[UnitPolicy] = []
        # A group whose members can change is asked at each forward; other models pay no call for that.
        self._may_be_remade = connection_of(default_group()) is not None
        monitors = monitors_of(self.units)
        self.monitors = set(monitors.values())
        self.schedule = Schedule(())
        self.tape = Tape(self.schedule, self.units, monitors)
        self._limits: ErrorLimits | None = None
        if any(unit.mesh.comm.error_limit is not None for unit in self.units):
            from sherd.engine.run.error_limits import ErrorLimits  # of few policies, so loaded late

            self._limits = ErrorLimits(self.units)
        self.revise()

    @staticmethod
    def over(unit: Unit) -> Runtime | None:
        """Returns the runtime that `unit` is sealed into, or None."""
        runtime: Runtime | None = unit.sealed_into()
        return runtime

    @staticmethod
    def of(unit: Unit, module: nn.Module) -> Runtime:
        """Returns the runtime of `unit`. If it has none, `module` or else its first module becomes a root."""
        runtime = Runtime.over(unit)
        if runtime is not None and not (runtime.is_idle and unit.id in runtime.external_units):
            return runtime
        # `module` may be one inside of the unit's modules, called by itself (`engine/run/touch.py`).
        root = module if Unit.of(module) is unit else unit.modules[0]
        with outside_transforms():  # new buffers would belong to the transform's level, and be gone after it
            return unchecked(seal)(root)

    @property
    def root(self) -> Unit:
        return self.units[0]

    @property
    def is_idle(self) -> bool:
        return not self._calls and not self.in_backward and not self.schedule.state.reducing

    def is_running(self, unit: Unit) -> bool:
        return unit in map(UNIT_OF, self._calls)

    # Units that several roots use in turn

    def require_idle(self, unit: Unit, root_name: str) -> None:
        """Raise `StateError` if a forward or backward is under way, and the root `root_name` is to have `unit`."""
        if self.in_backward and not (in_backward() or self._calls or self.by_hand):
            self.reset()  # that backward has raised, and the program goes on with another root
        if not self.is_idle:
            raise StateError(
                f"unit {unit.name} is still at work below {self.root.name}, so it cannot be taken under the root "
                f"{root_name}; finish that forward or backward first, or call reset_iter_state() on it. If one "
                "backward goes through both roots, fully_shard a module that has both, and run its forward"
            )

    def hand_over(self, unit: Unit) -> None:
        """Let another root have `unit`, until a forward or backward of this one begins."""
        self.reshard(unit)
        self._handed_over = True

    def _take_back(self) -> None:
        for unit in self.units if self._handed_over else ():
            holder = Runtime.over(unit)
            if holder is self or unit.id in self.external_units:
                continue
            if holder is not None:
                holder.require_idle(unit, self.root.name)
                holder.hand_over(unit)
            unit.join(self)
        self._handed_over = False

    # Events

    def enter(self, unit: Unit, module: nn.Module) -> ForwardCall:
        """Unshard `unit`, because a forward of `module` begins.

        A forward inside this model's backward is a recomputation (activation checkpointing).
        """
        if unit.lent is not None or unit.tied_owners:
            _require_not_lent(unit, "forward")
        # Calls are left over if Ctrl-C ended the last forward.
        if self._calls and unit is self.root:
            self._give_up_interrupted()
        # The flag alone is True also after a backward that raised.
        recomputing = self.in_backward and in_backward()
        outermost = not self._calls and not recomputing
        if outermost:
            self._begin_forward(unit)
        under_way = None if self._calls else UnderWay()
        if unit.policy.on_touch == "unshard":
            for hooks, key, _ in unit.touch_hooks:  # they remain also while the unit rests unsharded
                hooks.pop(key, None)
        handling, opens_run = sys.exc_info()[1], unit.runs is None or unit.runs.begin()
        watches = begin_watching(unit.backward)
        # Noted before the gather, which may raise: torch runs our forward hook then, too, and `leave` ends the call.
        call = ForwardCall(unit, id(module), outermost, opens_run, recomputing, handling, under_way, watches)
        self._calls.append(call)
        if unit.self_gathered or unit.tied_owners:
            self._read_in(unit, "forward")
        if recomputing:
            unit.backward.recompute_begins()
            self._expect_gradients(unit)
        self.tape.play(do.BeforeForward, self._index[unit.id], recomputing)
        return call

    def leave(self, module: nn.Module, differentiable: bool, in_use: bool = False) -> bool:
        """Note that a forward of `module` has ended. Returns False if the forward or `enter` raised.

        Args:
            module: the module.
            differentiable: a backward may follow.
            in_use: a view of the unit's parameters is still alive.
        """
        if not self._calls or self._calls[-1].module != id(module):
            return False
        call = self._pop_call()
        unit, raised = call.unit, sys.exc_info()[1] is not call.handling
        ends = unit.runs is None or unit.runs.end(module) or raised
        if ends and unit not in map(UNIT_OF, self._calls):  # else another method of the unit, around this one, runs on
            self.tape.play(do.AfterForward, self._index[unit.id], call.recomputing, in_use)
        if call.outermost:
            self._end_forward(differentiable and not raised)
        return not raised

    def _pop_call(self) -> ForwardCall:
        call = self._calls.pop()
        end_watching(call.watches)
        return call

    def _begin_forward(self, unit: Unit) -> None:
        if self._may_be_remade:
            require_alive(default_group(), f"the model of unit {self.root.name}")
        if self.reduction is not None:
            raise StateError(
                f"forward of {unit.name} before the gradient reduction that finalize_backward(async_op=True) started "
                "is waited for; call wait() on its handle first"
            )
        if self.in_backward or self.tape.is_astray:
            self._recover(unit)
        self._take_back()
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
        # Monitors come first: in `begin` a rank that joins others may gather kept parameters, which are stale again
        # after that: test_any_program_trains_as_the_plain_model.
        for monitor in self.monitors:
            monitor.begin(self.root)
        if is_first:
            for member in self.units:
                # Most units keep no copies, and their shards are where they were: they cost no call.
                if (member.keeps_copies and member.policy.renews_copies) or member.shards.have_moved:
                    member.may_be_written()
            for member in outdated(self.units):
                self.shards_written(member)
        self.revise()
        # For one forward only. Later writes to the shards come after the event, and gathers would not wait for them.
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
            if unit.runs is not None and unit.runs.give_up():  # the forward ran only some modules of the unit
                self.tape.play(do.AfterForward, index)
        self.tape.play(do.EndForward, differentiable)
        self._num_forwards += differentiable

    def gathers_follow(self, event: Any) -> None:
        """Let the gathers of the next forward wait for `event`, the optimizer's, and not for all of compute."""
        self._step_event = event

    def before_backward(self, unit: Unit) -> None:
        """Unshard `unit`, because autograd reaches one of its outputs."""
        if unit.lent is not None or unit.tied_owners:
            _require_not_lent(unit, "backward")
        if not self.in_backward:
            self._take_back()
            self._look_for_unmanaged(in_backward=True)
            self.is_in_last_backward = self._is_last_backward
            if (counted := self.root.policy.accumulation) is not None:
                self.is_in_last_backward = counted.begin_backward(self.root.id, self.root.name)
                for member in self.units:
                    member.reduce_fully(self.is_in_last_backward)
            self.in_backward = True
            self.by_hand = self.root.policy.finalizes_by_hand if self.by_hand is None else self.by_hand
            self.num_backwards += 1
            self.revise()  # the user may have set policies since the forward
            # torch takes such a callback only inside of a backward, so the first event of the backward queues it.
            at_end_of_backward(self._end_backward)
        self._expect_gradients(unit)
        if unit.self_gathered or unit.tied_owners:
            self._read_in(unit, "backward")
        self.tape.play(do.BeforeBackward, self._index[unit.id])

    def phase_of(self, unit: Unit) -> Phase:
        """Returns the phase that reads what is gathered of `unit` now.

        It is both where the unit is kept between the two, where the user unshards it, and in a backward that runs its
        forward again: with a checkpoint around it, or around a part of it.
        """
        spec = self.schedule.state.specs[self._index[unit.id]]
        if spec.after_forward is not Keep.NOTHING or not spec.reshard_after_backward:
            return "both"
        phase: Phase = "both"
        if not (self.in_backward and in_backward()):
            phase = "forward" if self._calls else "both"
        elif not (unit.backward.is_under_other_hooks or self._is_used(unit)):
            phase = "backward"
        return "both" if phase in unit.reread else phase

    def _is_used(self, unit: Unit) -> bool:
        """Returns whether a forward is under way that uses parameters of `unit`."""
        return any(unit in (call.unit, *call.unit.tied_owners) for call in self._calls)

    def _read_in(self, unit: Unit, phase: Phase) -> None:
        """Have `unit` gathered again, for both, if what is gathered of it is for the other phase than `phase` alone."""
        for each in (unit, *unit.tied_owners):
            lacking = [w for w in each.self_gathered if w.live is not Live.SHARDED and w.brought not in (phase, "both")]
            if lacking:
                each.reread.add(lacking[0].brought)
                self.tape.play(do.Reshard, self._index[each.id])

    def _expect_gradients(self, unit: Unit) -> None:
        when_complete = partial(self._gradients_complete, self._index[unit.id])
        unit.backward.expect(unit.policy, when_complete, is_alone=len(self.units) == 1)

    def after_backward(self, unit: Unit) -> None:
        """Reduce and free `unit`, because autograd is past its inputs."""
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
        # The last backward taught about as many forwards as it had: any further one may be run again by a checkpoint.
        is_done = is_done and self._num_forwards <= self._usual_forwards
        if group is None:
            # Free the unit as soon as that is safe: autograd may pass its inputs much later, if they are the inputs of
            # many units.
            if is_done:
                self.tape.play(do.AfterBackward, index, True)
            else:
                self.tape.play(do.GradientsReady, index)
        elif is_done:
            self.tape.play(do.GroupPassed, index, group)

    def _end_backward(self) -> None:
        """Reduce and free everything that is left, at the end of backward."""
        # A reset may have come before this call: a callback that is queued cannot be taken back.
        if not self.in_backward:
            return
        # In an order that all ranks share, since most of these events start collectives, and that is backward's: on
        # another rank autograd may have passed some of them.
        for index, unit in reversed(list(enumerate(self.units))):
            if unit.backward.awaits_reduction(unit.policy, self._has_gradients):
                self.tape.play(do.AfterBackward, index, True)
        if (counted := self.root.policy.accumulation) is not None:
            has_received = any(unit.backward.has_received for unit in self.units)
            counted.end_backward(self.root.id, has_received or self.unmanaged.has_gradients)
        for index, unit in enumerate(self.units):
            unit.backward.end()
            if not unit.policy.reduce_gradients:
                self._unreduced.add(index)
            if unit.policy.on_touch == "unshard":
                unit.watch_touch()
        self.end_backwards(self._is_last_backward and not self.by_hand)
        for monitor in self.monitors:
            monitor.end_backward(self.root)
        self.in_backward, self._brings_gradients = False, None
        if self._num_forwards:  # else the forward goes on, or another backward went before
            self._usual_forwards, self._num_forwards = self._num_forwards, 0
        if self.unmanaged.replicated and self.root.policy.reduce_gradients:
            self.unmanaged.average_gradients()

    def end_backwards(self, is_last: bool = True) -> None:
        """Free parameters after a backward, and after the last one of a step finish its reductions."""
        # What steps units in the last backward could take an earlier one's reduction for the last one's.
        self.tape.play(do.EndBackward, is_last or any(unit.steps_in_backward for unit in self.units))
        # Last, because the host waits here: all reductions are queued by now.
        for unit in self.units:
            if unit.place.is_elsewhere:
                unit.land_gradients()
        if is_last:
            self.by_hand, self.reduction = None, None
            self._unreduced.clear()
            if self._limits is not None:
                self._limits.compare()

    def finalize_backward(self, wait: bool) -> object:
        """Reduce gradients that no backward has reduced, and free parameters, where the policies say so.

        Returns:
            None if the reductions are finished, as `wait` asks; else what `finish_reductions` takes.

        Raises:
            StateError: the user does not end backwards by hand, one is under way, or gradients wait for the second half
                of a reduction.
        """
        self._require_may_finalize()
        self.revise()
        for index, unit in reversed(list(enumerate(self.units))):
            if unit.policy.reshard_after_backward:
                self.tape.play(do.Reshard, index)
            with unit.backward.reducing_for_others(unit.policy):
                # A rank without gradients takes part, too: others may have some.
                if unit.backward.has_unreduced or (index in self._unreduced and unit.may_lack):
                    self.tape.play(do.GradientsReady, index)
        if self.unmanaged.replicated and self.root.policy.reduce_gradients and 0 in self._unreduced:
            self.unmanaged.average_gradients()
        if wait:
            self.end_backwards()
        else:
            self.reduction = object()
        return self.reduction

    def _require_may_finalize(self) -> None:
        if self.reduction is not None:
            raise StateError("finalize_backward: the last one has returned a handle; call wait() on that first")
        if not (self.root.policy.finalizes_by_hand if self.by_hand is None else self.by_hand):
            raise StateError(
                f"finalize_backward: {self.root.name} ends its backwards itself; call "
                "set_manual_backward_finalization(True) before the forward"
            )
        if self.in_backward or in_backward():
            raise StateError(f"finalize_backward inside of a backward of {self.root.name}, or after one that raised")
        for unit in self.units:
            waits = any(each.partial is not None for each in unit.gradients)
            if waits or (unit.waits_for_replicas and unit.backward.has_unreduced):
                raise StateError(
                    f"finalize_backward: gradients of unit {unit.name} are to be summed over its shard axis and not "
                    "over its replicas; call set_requires_all_reduce(True) before the backward"
                )

    def finish_reductions(self, reduction: object) -> None:
        """Finish the reductions of a `finalize_backward`, which returned `reduction`.

        Raises:
            StateError: a reset has given them up.
        """
        if self.reduction is not reduction:
            raise StateError(
                f"this gradient reduction of {self.root.name} was given up by reset_iter_state(), or by a forward "
                "after an error; its gradients are lost, so run the step again"
            )
        self.end_backwards()

    def expect_last_backward(self, is_last: bool) -> None:
        """Note whether the next backward is the last one before a step. Reductions stay in flight until the last."""
        self._is_last_backward = is_last

    # The user's own moves

    def unshard(self, unit: Unit, wait: bool) -> None:
        if unit.keeps_copies or unit.shards.have_moved or outdated((unit,)):
            unit.may_be_written()
        self.revise()
        if not self._calls and not self.in_backward:  # an optimizer may have stepped
            unit.streams.begin_step()
        self.tape.play(do.Unshard, self._index[unit.id], wait)

    def finish_unshard(self, unit: Unit) -> None:
        """Wait for `unit`'s all-gather, if one is in flight."""
        if unit.live is Live.GATHERING:
            self.tape.play(do.Unshard, self._index[unit.id], True)

    def reshard(self, unit: Unit) -> None:
        self.tape.play(do.Reshard, self._index[unit.id])

    def show_shards(self, unit: Unit) -> None:
        """Free the unsharded parameters of `unit`, for a caller that reads or writes shards.

        Raises:
            StateError: a forward or backward needs the unsharded parameters.
        """
        self._give_up_interrupted()
        if self._calls or (self.in_backward and in_backward()):
            during = "backward" if self.in_backward else "forward"
            raise StateError(
                f"the shards of unit {unit.name} were asked for (state_dict, load_state_dict or .to()) in the middle "
                f"of a {during} that needs its unsharded parameters; do it before or after"
            )
        self.reshard(unit)

    def shards_written(self, unit: Unit) -> None:
        """Free the unsharded parameters of `unit`, because its shards have new values.

        Parameters in use stay, as when an optimizer steps inside backward: the next forward sees that they are stale.
        """
        if not (self.in_backward or self._is_used(unit)):
            self.reshard(unit)

    @contextmanager
    def observed(
        self,
        observer: Observer,
        observer_of_gradients: Callable[[int, int, Sequence[ShardedParameter]], GradientObserver] | None = None,
    ) -> Iterator[None]:
        """Have `observer` see all events and actions inside the context.

        Args:
            observer: sees the events and actions.
            observer_of_gradients: called for each group with the numbers of its unit and of the group, and the group's
                parameters; returns the object that sees the group's gradients. None: gradients are not observed.

        Raises:
            StateError: the model is observed already.
        """
        if self.tape.observer is not None:
            raise StateError(f"the memory of {self.root.name} is tracked already; leave that `with` block first")
        with ExitStack() as observers:
            observers.enter_context(self.tape.observed(observer))
            if observer_of_gradients is not None:
                for number, unit in enumerate(self.units):
                    for group, gradients in enumerate(unit.gradients):
                        observer_of_group = observer_of_gradients(number, group, gradients.group.parameters)
                        observers.enter_context(gradients.observed(observer_of_group))
            yield

    # When things go wrong

    def reset(self, gradients: bool = True) -> None:
        """Free all units, with nothing in flight. `gradients`: drop gradients that have not reached the shards, too."""
        for monitor in self.monitors if self.in_backward else ():
            monitor.abandon_backward(self.root)
        # After an action that raised, the units are not in the forms of the schedule's state, which answers `Reset`.
        with torch.no_grad():
            for unit in self.units if self.tape.is_astray else ():
                unit.free()
        self.tape.play(do.Reset, gradients)
        self.tape.recovered()
        while self._calls:
            self._pop_call()
        self.in_backward, self._brings_gradients = False, None
        if gradients:
            self.by_hand, self.reduction = None, None
            self._unreduced.clear()
        for unit in self.units:
            unit.backward.end()
            if unit.runs is not None:
                unit.runs.give_up()

    def _give_up_interrupted(self) -> None:
        """Reset if the outermost forward has ended without its hooks, as by Ctrl-C."""
        if self._calls and (first := self._calls[0].under_way) is not None and first.is_over:
            self.reset(gradients=self.in_backward)

    def _recover(self, unit: Unit) -> None:
        """Reset after a backward or an action that raised: the callback at the end of backward did not run then."""
        if self.in_backward and unit is not self.root:
            raise StateError(
                f"forward of unit {unit.name} after a backward of {self.root.name} that has raised, and left gradients "
                f"half reduced; run {self.root.name}'s forward, or call its reset_iter_state(), first"
            )
        self.reset(gradients=self.in_backward)

    # Choices

    def revise(self) -> None:
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
            tied_owners=tuple(self._index[owner.id] for owner in unit.tied_owners if owner.id in self._index),
            forward_prefetch=self._indices(policy.forward_prefetch),
            backward_prefetch=self._indices(policy.backward_prefetch),
            num_parts=unit.num_parts,
        )

    def _indices(self, ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if ids is None else tuple(self._index[unit_id] for unit_id in ids if unit_id in self._index)


_IN_HOOKS = ("enter", "leave", "before_backward", "after_backward", "_gradients_complete", "_end_backward")
_CALLED = ("unshard", "finish_unshard", "reshard", "show_shards", "finalize_backward", "finish_reductions", "reset")
UncheckedRuntime = type(
    "UncheckedRuntime", (Runtime,), {name: unchecked(getattr(Runtime, name)) for name in _IN_HOOKS + _CALLED}
)
"""The runtime of a model with typed parameters: what it does itself is not checked while the user's forward is."""


def outdated(units: Sequence[Unit]) -> list[Unit]:
    """Returns those of `units` whose unsharded parameters are stale: made of shards that were written in place since.

    Also units of which one form got another `requires_grad` than the other form has. One call for all units, because
    each unit of a model may be kept unsharded over a step.
    """
    stale: dict[Unit, None] = {}
    for unit in units:
        for weights in unit.weights:
            if (live := weights.live) is Live.SHARDED or (made := weights.made) is None:
                continue
            versions = list(map(STAND, weights.group.shard_memory.versioned))
            is_switched = live is Live.UNSHARDED and made.trained != list(map(IS_TRAINED, made.parameters))
            if is_switched or versions != weights.as_of:
                stale[unit] = None
    return list(stale)


def _require_not_lent(unit: Unit, call: str) -> None:
    """Raise if parameters of `unit` are lent: gradients of the copies would be lost, and some are on rank 0 alone."""
    lender = next((owner for owner in (unit, *unit.tied_owners) if owner.lent is not None), None)
    if lender is not None:
        own = lender is unit and call == "forward"
        raise WrapperStateError(
            f"{call} of unit {unit.name} inside an unshard context (unsharded, summon_full_params) that lends "
            f"{'its parameters' if own else f'the parameters of unit {lender.name}'}; leave the context first, or "
            "enter it with recurse=False on a unit above; a forward under torch.no_grad() computes with what is lent, "
            "on ranks that see it; backward comes before or after the context"
        )


# Sealing


def seal(root: nn.Module) -> Runtime:
    """Returns a new runtime of all units at and below `root`, with names as seen from `root`.

    Where a part of a model runs before its root, the runtime also gets units elsewhere that own a parameter which the
    part uses.

    Raises:
        ModuleError: torch's own FSDP has a module below `root`.
        StateError: a unit is at work in another runtime, or parameters still have no data (meta device).
        OwnershipError: a parameter was made tensor parallel after it was sharded.
    """
    below = Unit.below(root)
    ids = {unit.id for unit in below}
    owners = {owner.id: owner for unit in below for owner in unit.tied_owners if owner.id not in ids}
    units = [*below, *owners.values()]
    for unit in units:
        earlier = Runtime.over(unit)
        if earlier is not None:
            earlier.require_idle(unit, type(root).__name__)
            if unit in below and earlier.root not in below and unit.id not in earlier.external_units:
                earlier.hand_over(unit)
    name_units(root)
    by_hand = [unit.name for unit in units if unit.policy.finalizes_by_hand and Unit.of(root) is not unit]
    if by_hand:
        raise StateError(
            f"set_manual_backward_finalization was called on {in_short(by_hand)}, below the root "
            f"{type(root).__name__}; call it on the root"
        )
    for unit in units:
        if unit.shards.on_meta:
            unit.notice_replaced()
            unit.rebind()  # the user may have called `to_empty` on each module by itself
    missing = [f"{name} (unit {unit.name})" for unit in units for name in unit.shards.on_meta]
    if missing:
        raise StateError(
            f"parameters are still on the meta device: {in_short(missing)}. Give them memory and values before the "
            "first forward: model.to_empty(device=...), then each module's reset_parameters(), or load a state dict"
        )
    _require_own_meshes(units)
    # A user may have given a shard an all-gather of its own after it was cut in a way that does not allow one.
    for record in (parameter for unit in units for parameter in unit.parameters):
        require_can_gather_itself(record.name, record.resting, record.cut, record.mesh)
    is_typed = any(record.types is not None for unit in units for record in unit.parameters)
    runtime: Runtime = (UncheckedRuntime if is_typed else Runtime)(root, units, external_units=owners)
    for unit in units:
        unit.notice_moved()
        if unit.keep_grad_dtypes() or not unit.shards.are_in_buffer:
            unit.regroup()
        unit.join(runtime)
        forget_loads(unit.mesh)  # the model is complete, so the next unit on the mesh is the first of another model
    # The root holds the runtime and units hold it weakly, so that it goes with the root:
    # test_they_keep_nothing_alive.
    write_into(root, Unit.RUNTIME, runtime)
    return runtime


def name_units(root: nn.Module) -> list[Unit]:
    """Name the units below `root`, and the parameters that they use, as seen from `root`. Returns the units, each once.

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
    for owner in {owner for unit in below for owner in unit.tied_owners}.difference(below):
        owner.rename(owner.name, module_names)
    return below


def _require_own_meshes(units: list[Unit]) -> None:
    """Raise if the place of a shard shows a DTensor on another mesh.

    The next gather would silently replace it, while the module computes for tensor parallelism.
    """
    for unit in units:
        for record in unit.parameters:
            for place in record.places:
                shown = place.shown
                if isinstance(shown, DTensor) and shown.device_mesh != record.shard_spec.mesh:
                    raise OwnershipError(
                        f"{record.name} (unit {unit.name}): a DTensor on {shown.device_mesh} was put in its place "
                        f"after it was sharded over {record.shard_spec.mesh}; make modules tensor parallel first "
                        "(parallelize_module), then fully_shard: build the model again, in that order"
                    )
