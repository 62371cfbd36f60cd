"""The coordinator: all ranks issue the same collectives, even those that want others (`divergence="join"`).

The `AgreedOrder` says what all ranks take next. The coordinator asks the other ranks where the order says so, and takes
part in collectives that this rank does not want: it gathers a unit and frees it, it reduces a unit's gradients with
none of its own. This rank's shards still get what the other ranks contribute, so the result is the mean in which this
rank counts as zero.

A rank without a batch also steps the optimizers, with the settings of the ranks that train. It has its part of the same
gradients, but cannot know what the others' loop does with gradients before the step. So the others check that theirs
are still as they were reduced.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from sherd._torch import in_backward, wait_on_host
from sherd.comm.failures import named
from sherd.comm.groups import host_group_beside
from sherd.comm.objects import exchange_objects, start_all_gather
from sherd.engine import Runtime, ShardedParameter, Unit, watcher
from sherd.errors import CommError, StateError, in_short
from sherd.guard.flight import CollectiveLog
from sherd.guard.order_check import PlannedCollective, differently_made, model_number
from sherd.schedule.actions import Action, Await, FinishReduce, Gather, Reduce
from sherd.schedule.state import Live
from sherd.tensor.ragged import local_part
from sherd.uneven.agreed import AgreedOrder, AgreedStep, Proposal, StepKind, choose
from sherd.uneven.attempt import Attempt, Failure, StepAborted

VOTE = struct.Struct("<6q")
"""The wanted step's kind, which and detail, the rank's flags and number of units, `model_number` of a `BEGIN` or 0."""
IN_BACKWARD, IN_ATTEMPT, HAS_ABANDONED = 1, 2, 4  # flags of a vote
LEAVE = AgreedStep(StepKind.LEAVE)
IS_TRAINING, RECORDS_GRADIENTS, GOES_ON = 1, 2, 4
"""Flags in the detail of a `BEGIN`. `GOES_ON`: not the first forward of an accumulation, so kept copies are current."""

Settings = list[dict[str, Any]]
"""For each parameter group of an optimizer, its learning rate and all other settings."""


class Coordinator:
    """The ranks of one mesh, as one of them sees them; for all models whose roots are on that mesh.

    Units and optimizers have numbers in the order of their first use, which is the same on all ranks. Every method that
    waits for the other ranks raises CommError if a rank has died, does not come before the timeout, or wants what
    cannot be joined; and GivenUp inside an attempt that all ranks give up.
    """

    def __init__(
        self, parent: dist.ProcessGroup, ranks: tuple[int, ...], device: torch.device, log: CollectiveLog
    ) -> None:
        self._parent, self._ranks, self._device, self._log = weakref.ref(parent), ranks, device, log
        self._order = AgreedOrder()
        self._units: list[weakref.ref[Unit]] = []
        self._numbers: dict[int, int] = {}
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._is_away = self._has_abandoned = False
        self._attempt: Attempt | None = None
        self._failure: Failure | None = None
        """Why all ranks gave up the present attempt."""
        self._reduced = _ReducedGradients(())
        self._owed: Callable[[], None] | None = None
        """Starts the collectives that this rank has taken and could not start, for which the others wait."""
        watcher.listen(self)

    # What this rank wants

    def watch(self, unit: Unit) -> None:
        if unit.id not in self._numbers:
            self._numbers[unit.id] = len(self._units)
            self._units.append(weakref.ref(unit))
            self._log.units[unit.id] = unit

    def begin(self, unit: Unit) -> None:
        """Begin a forward of `unit`, a root, on all ranks that have a batch left."""
        is_training = any(module.training for module in unit.modules)
        accumulation = unit.policy.accumulation
        goes_on = accumulation is not None and not accumulation.is_in_first_forward
        mode = GOES_ON * goes_on + RECORDS_GRADIENTS * torch.is_grad_enabled() + IS_TRAINING * is_training
        self._reach(AgreedStep(StepKind.BEGIN, self._numbers[unit.id], mode))

    def end_backward(self, unit: Unit) -> None:
        """End a backward of the model of `unit`, a root, once all ranks have reduced their gradients."""
        if unit.policy.reduce_gradients:
            self._reach(AgreedStep(StepKind.END, self._numbers[unit.id]))

    def abandon_backward(self, unit: Unit) -> None:
        """Note that a backward of the model of `unit`, a root, raised in its middle, and the program goes on.

        Some of its gradients are in the sums of all ranks, others are not. So all ranks raise at the next vote, unless
        all of them abandoned that backward.
        """
        self._has_abandoned = self._attempt is None

    def starts(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, a collective of `unit`, when it is its turn on all ranks."""
        number, is_in_backward = self._numbers[unit.id], in_backward()
        if action is Gather:
            step = AgreedStep(StepKind.GATHER, number, int(unit.in_full_precision))
            self._reach(step, is_in_backward)
            if unit.live is not Live.SHARDED:
                unit.free()  # other ranks gather all groups, and from shards
        else:
            step = AgreedStep(StepKind.REDUCE, number, int(unit.policy.all_reduce_gradients))
            self._reach(step, is_in_backward)
        self._start(step, unit, carry_out)

    def waits(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, which may wait for the other ranks."""
        self._log.run(action, unit, carry_out)

    def calls(self, what: str, purpose: str, is_rare: bool) -> AbstractContextManager[None]:
        """Returns a context for a collective of all ranks outside of units, which is not compared."""
        return nullcontext() if self._log.is_entered else self._log.waiting(PlannedCollective(what, ()))

    def agrees(self, what: str, terms: Sequence[str], units: Sequence[Unit]) -> None:
        """Do nothing: ranks may differ."""

    def before_step(self, optimizer: Optimizer, unit_ids: Sequence[int]) -> None:
        """Return when all ranks with a batch are about to step `optimizer`, which steps the shards of these units."""
        attempt = self._attempt
        if self._is_away or not any(unit_id in self._numbers for unit_id in unit_ids):
            return
        if in_backward():
            # A step inside backward comes without a vote, and without a copy to undo it by.
            if attempt is not None:
                attempt.steps(for_good=True)
            return
        if attempt is not None and (reason := attempt.refuses(optimizer)) is not None:
            self.fail(reason)
        wishes = self._reach(AgreedStep(StepKind.STEP, self.know(optimizer)))
        is_any_away = any(wish.step == LEAVE for wish in wishes)
        if attempt is not None:
            attempt.steps(for_good=is_any_away)
        if is_any_away:
            self._exchange_settings(self._reduced.refusal() or _settings_of(optimizer))

    def after_step(self, optimizer: Optimizer) -> None:
        """Do nothing: all ranks step with the settings of one."""

    def gave_up(self, optimizer: Optimizer) -> None:
        """Do nothing: all ranks step with the settings of one."""

    def noted(self, what: str, values: Sequence[object], unit_ids: Sequence[int]) -> None:
        """Do nothing: ranks may differ."""

    def know(self, optimizer: Optimizer) -> int:
        """Returns the number of `optimizer`, which gets the next one if it is new."""
        for number, known in enumerate(self._optimizers):
            if known() is optimizer:
                return number
        self._optimizers.append(weakref.ref(optimizer))
        return len(self._optimizers) - 1

    def agree_on_batch(self, has_one: bool) -> bool:
        """Returns whether any rank has a batch left, once all ranks that have not left ask."""
        wishes = self._reach(AgreedStep(StepKind.BATCH, detail=int(not has_one)))
        return any(wish.step == AgreedStep(StepKind.BATCH) for wish in wishes)

    def leave(self) -> None:
        """Take part in what the other ranks do, and want nothing, until no rank wants anything."""
        self._is_away = True
        try:
            self._reach(LEAVE)
        finally:
            self._is_away = False

    # Attempts

    def begin_attempt(self, attempt: Attempt) -> None:
        """Raise `StepAborted` wherever this rank is when a rank fails, until `end_attempt`. No attempt is under way."""
        if self._attempt is not None:
            raise StateError("sherd.step within sherd.step of models on the same ranks; leave the outer one first")
        self._attempt = attempt

    def end_attempt(self) -> None:
        self._attempt = self._failure = self._owed = None

    def done(self, with_all: bool = True) -> None:
        """Return when all ranks that began an attempt have finished it.

        Without `with_all`, return when they have finished the part before the program's own collectives.
        """
        self._reach(AgreedStep(StepKind.DONE, detail=int(not with_all)))

    def fail(self, reason: str) -> NoReturn:
        """Have all ranks give up the attempt, which this rank cannot finish. It must have nothing in flight."""
        assert self._attempt is not None, "only an attempt fails"
        self._attempt.fail(reason)
        owed, self._owed = self._owed, None
        if owed is not None and self._failure is None:
            owed()  # the other ranks wait in these collectives, and vote only after them
        self._reach(AgreedStep(StepKind.FAIL))
        raise AssertionError("no rank goes on when one has failed")

    def _give_up(self) -> None:
        """Leave the attempt of this rank, if it has one, since a rank has failed. All ranks must call this."""
        attempt = self._attempt
        mine = None if attempt is None else attempt.report()
        reports = exchange_objects(mine, "the reports of ranks on a step that one of them cannot finish", self._group())
        if attempt is not None:
            self._failure = Failure.of(self._ranks, reports)
            raise StepAborted(self._failure)
        # A rank outside of the attempt has the gradients that the others have reduced and now drop.
        for unit in self._living_units():
            unit.zero_grad(True, {id(module) for module in unit.modules})

    # What all ranks do

    def _living_units(self) -> list[Unit]:
        return [unit for ref in self._units if (unit := ref()) is not None]

    def _reach(self, wanted: AgreedStep, is_in_backward: bool = False) -> Sequence[Proposal]:
        """Go along with the others until it is the turn of `wanted`. Returns what all ranks wanted at the last vote."""
        if self._failure is not None:
            raise StepAborted(self._failure)
        wishes: Sequence[Proposal] = ()
        while True:
            step = self._order.expected()
            if step is None:
                wishes = self._vote(Proposal(wanted, is_in_backward, self._attempt is not None))
                step = choose(wishes)
                self._require_possible(step, wishes)
            self._order.take(step)
            if step.kind is StepKind.END:
                # Copies cost memory, and only a rank without a batch steps as if gradients were as reduced.
                is_any_away = any(wish.step == LEAVE for wish in wishes)
                self._reduced = _ReducedGradients(self._living_units() if is_any_away else ())
            if step.kind is StepKind.FAIL:
                self._give_up()
            elif wanted.is_served_by(step):
                return wishes
            else:
                self._go_along(step)

    def _vote(self, wish: Proposal) -> list[Proposal]:
        """Returns what all ranks want. All ranks must call this."""
        flags = IN_BACKWARD * wish.in_backward + IN_ATTEMPT * wish.in_attempt + HAS_ABANDONED * self._has_abandoned
        root = self._units[wish.step.which]() if wish.step.kind is StepKind.BEGIN else None
        own = VOTE.pack(*wish.step, flags, len(self._units), model_number(root) if root else 0)
        packed = [bytearray(VOTE.size) for _ in self._ranks]
        words = self._in_words(wish.step)
        asking = named(f"the vote of ranks, of which rank {dist.get_rank()} {words},", self._group())
        with self._log.waiting(PlannedCollective(words, ())), asking:
            wait_on_host(start_all_gather(own, packed, self._group()))
        votes = [VOTE.unpack(vote) for vote in packed]
        self._fewest_units = min(num_units for *_, num_units, _ in votes)
        abandoned = [rank for rank, vote in zip(self._ranks, votes, strict=True) if vote[3] & HAS_ABANDONED]
        if len(abandoned) == len(self._ranks):
            self._has_abandoned = False
        elif abandoned:
            raise CommError(
                f"ranks {abandoned} gave up a backward in its middle, and went on: some of its gradients were reduced, "
                "and others were not. Let the error end the program, or make the step inside sherd.step, which all "
                "ranks skip then; go on from a checkpoint"
            )
        wishes = [
            Proposal(AgreedStep(StepKind(kind), which, detail), bool(flags & IN_BACKWARD), bool(flags & IN_ATTEMPT))
            for kind, which, detail, flags, _, _ in votes
        ]
        if root and len({wish.step[:2] for wish in wishes}) == 1 and len({number for *_, number in votes}) > 1:
            raise CommError(differently_made(root, self._ranks, self._group()))
        return wishes

    def _group(self) -> dist.ProcessGroup:
        parent = self._parent()
        assert parent is not None, "the mesh of a unit holds it"
        return host_group_beside(parent, "votes", self._ranks, self._device)

    def _require_possible(self, step: AgreedStep, wishes: Sequence[Proposal]) -> None:
        """Raise, on all ranks alike, if some of them cannot go along with `step`."""
        wanting = [rank for rank, wish in zip(self._ranks, wishes, strict=True) if wish.step == step]
        if step.kind is not StepKind.FAIL and step.kind <= StepKind.END and step.which >= self._fewest_units:
            raise CommError(
                f"ranks {wanting} run a model whose forward other ranks have not begun yet; under "
                "divergence='join' all ranks must run each model once before any of them may skip it"
            )
        if step.kind is StepKind.STEP and any(wish.step not in (step, LEAVE) for wish in wishes):
            others = [rank for rank, wish in zip(self._ranks, wishes, strict=True) if wish.step not in (step, LEAVE)]
            optimizer = self._optimizer(step.which)
            optimizer_class = "not seen on this rank" if optimizer is None else type(optimizer).__name__
            raise CommError(
                f"ranks {wanting} step an optimizer ({optimizer_class}, number "
                f"{step.which} in the order of their first steps) that ranks {others} skip; under divergence='join' "
                "all ranks must step the same optimizers, also those that have skipped all of its parameters"
            )

    def _optimizer(self, number: int) -> Optimizer | None:
        return self._optimizers[number]() if number < len(self._optimizers) else None

    def _in_words(self, step: AgreedStep) -> str:
        unit = self._units[step.which]() if step.kind <= StepKind.END and step.which < len(self._units) else None
        name = unit.name if unit is not None else ""
        return {
            StepKind.GATHER: f"gathers unit {name}",
            StepKind.REDUCE: f"reduces the gradients of unit {name}",
            StepKind.FAIL: "cannot finish its step",
            StepKind.BEGIN: f"begins a forward of {name}",
            StepKind.END: f"has ended a backward of {name}",
            StepKind.STEP: f"steps optimizer {step.which}",
            StepKind.DONE: "has finished its step",
            StepKind.BATCH: "asks for its next batch",
            StepKind.LEAVE: "has no batch left",
        }[step.kind]

    def _go_along(self, step: AgreedStep) -> None:
        """Take part in a step that this rank does not want."""
        if step.kind is StepKind.STEP:
            self._step_along(step.which)
        is_forward = step.kind is StepKind.BEGIN and step.detail < GOES_ON
        if step.kind > StepKind.REDUCE and not is_forward:
            return
        unit = self._units[step.which]()
        if unit is None:
            raise CommError(
                f"rank {dist.get_rank()} has deleted a model that other ranks still run ({self._in_words(step)}); "
                "delete it on all ranks"
            )
        if is_forward:
            runtime = Runtime.over(unit)
            for other in runtime.units if runtime is not None else ():
                if other.keeps_copies:
                    other.may_be_written()  # the ranks whose forward begins gather its copies again
            return
        live = unit.live
        with torch.no_grad():
            self._start(step, unit, partial(_start_for_others, step, unit))
            if step.kind is StepKind.GATHER:
                self._log.run(Await, unit, partial(_bring_back, unit, live))
            else:
                self._log.run(FinishReduce, unit, partial(_finish_reduce_for_others, unit))

    def _start(self, step: AgreedStep, unit: Unit, run: Callable[[], None]) -> None:
        """Call `run`, which starts the collectives of `step`. If it raises, remember those that it did not start."""
        is_gather = step.kind is StepKind.GATHER
        action: type[Action] = Gather if is_gather else Reduce
        try:
            self._log.start(action, unit, step.detail if is_gather else 0, run)
        except Exception:
            # There was no memory, for example. The other ranks wait for what was not started.
            if is_gather:
                started = [at for at, weights in enumerate(unit.weights) if weights.is_in_flight]
            else:
                started = [at for at, gradients in enumerate(unit.gradients) if gradients.is_in_flight]
            self._owed = partial(_pay, step, unit, started)
            raise

    def _step_along(self, number: int) -> None:
        """Step the optimizer with the settings of the ranks that train; then drop its gradients."""
        settings = self._exchange_settings(None)
        optimizer = self._optimizer(number)
        if optimizer is None:
            raise CommError(
                f"rank {dist.get_rank()} has no batch left, and does not know optimizer {number}, which the other "
                "ranks step; pass it: sherd.join(model, optimizer)"
            )
        for group, chosen in zip(optimizer.param_groups, settings, strict=True):
            group.update(chosen)
        optimizer.step()
        optimizer.zero_grad()

    def _exchange_settings(self, mine: Settings | str | None) -> Settings:
        """Returns the settings of the first rank that steps. All ranks must call this.

        `mine` are the settings of this rank's optimizer; None without a batch; or the error that all ranks raise.
        """
        by_rank = exchange_objects(mine, "the optimizers' settings, for ranks without a batch", self._group())
        for answer in by_rank:
            if isinstance(answer, str):
                raise CommError(answer)
        return next(settings for settings in by_rank if isinstance(settings, list))


# What other ranks want of a unit, and this rank does not


def _start_for_others(step: AgreedStep, unit: Unit, but: Collection[int] = ()) -> None:
    """Start the collectives of `step`, for all groups of `unit` except those with the numbers `but`."""
    if step.kind is StepKind.GATHER:
        in_full_precision = bool(step.detail)
        if unit.live is not Live.SHARDED and in_full_precision != unit.in_full_precision:
            raise StateError(
                f"another rank gathers unit {unit.name} in {'full' if in_full_precision else 'low'} precision while it "
                "is unsharded on this rank in the other one; call train() and eval() at the same places on all ranks"
            )
        unit.free()
        unit.streams.begin_step()  # an optimizer may have stepped since the last forward began
        unit.gather(in_full_precision, but)
    else:
        # With the gradients that this rank has collected, if any.
        for gradients in unit.gradients:
            gradients.finish_reduce(unit.policy)
        policy = replace(unit.policy, reduce_gradients=True, all_reduce_gradients=bool(step.detail))
        with unit.backward.reducing_for_others(policy):
            unit.reduce(policy, but)


def _bring_back(unit: Unit, live: Live) -> None:
    """Return the parameters of `unit`, which other ranks have gathered, to the state `live` that they had before."""
    if live is Live.SHARDED:
        unit.free()
    elif live is not Live.GATHERING:
        unit.wait()
        if live is Live.SHRUNK:
            unit.shrink()


def _finish_reduce_for_others(unit: Unit) -> None:
    unit.finish_reduce()
    unit.land_gradients()  # also those for host memory, which no backward of this rank lands


@torch.no_grad()
def _pay(step: AgreedStep, unit: Unit, but: Collection[int]) -> None:
    """Start the collectives of `step` for all groups of `unit` except `but`, and drop their results."""
    _start_for_others(step, unit, but)
    if step.kind is StepKind.GATHER:
        unit.free()
    else:
        _finish_reduce_for_others(unit)


# Optimizer steps of ranks without a batch


def _settings_of(optimizer: Optimizer) -> Settings:
    return [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


class _ReducedGradients:
    """Copies of the gradients of `units` as the last backward left them."""

    def __init__(self, units: Sequence[Unit]) -> None:
        # Weak, because a unit holds its mesh, the mesh its group, and the group, by way of the monitors, this object.
        self._units = [weakref.ref(unit) for unit in units]
        self._copies = {id(parameter): gradient.clone() for parameter, gradient in _gradients_of(units)}

    def refusal(self) -> str:
        """Returns the text of the error for gradients that were changed since; "" if none was. The host waits."""
        alive = (unit for ref in self._units if (unit := ref()) is not None)
        changed = [
            ShardedParameter.name_of(each)
            for each, gradient in _gradients_of(alive)
            if not self._is_as_before(each, gradient)
        ]
        if not changed:
            return ""
        return (
            f"rank {dist.get_rank()} has changed its gradients between backward and the optimizer's step (clipped or "
            f"scaled them: {in_short(changed)}), and ranks that have no batch left would step without that; have the "
            "loop ask for its batches: with sherd.join(model) as ranks: for batch in ranks.batches(loader)"
        )

    def _is_as_before(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        before = self._copies.get(id(parameter))
        return before is not None and torch.equal(gradient.nan_to_num(), before.nan_to_num())  # nan is not equal to nan


def _gradients_of(units: Iterable[Unit]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    for unit in units:
        for parameter in unit.shards.optimizer_params:
            if parameter.grad is not None:
                yield parameter, local_part(parameter.grad).detach()
