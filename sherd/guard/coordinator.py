"""The coordinator: all ranks issue the same collectives, also those that want others (`divergence="join"`).

What all take next is the `AgreedOrder`'s to say. This file asks the other ranks where that says so, and takes part in
what this rank did not want: it gathers a unit and frees it, it reduces a unit's gradients with none of its own. Its
shards still get what the other ranks have, so the result is the mean in which this rank counts as zero.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from sherd._torch import in_backward, wait_on_host
from sherd.comm.failures import named
from sherd.comm.groups import host_group_beside
from sherd.comm.objects import all_gather_objects, start_all_gather
from sherd.engine import Unit, watcher
from sherd.errors import CommError, StateError
from sherd.guard.attempt import Attempt, Failure, GivenUp
from sherd.guard.away import ReducedGradients, Settings, refusal, settings_of, take_settings
from sherd.guard.for_others import finish_for_others, have_again, pay, start_for_others
from sherd.guard.ledger import Ledger
from sherd.guard.likeness import made_as
from sherd.guard.order_check import PlannedCollective, differently_made
from sherd.schedule.actions import Action, Await, FinishReduce, Gather, Reduce
from sherd.schedule.agreed import AgreedOrder, Kind, Step, Wish, choose
from sherd.schedule.state import Live


class _Flight(Protocol):
    @property
    def is_in_flight(self) -> bool:
        """Whether its collective was started, and has not been waited for."""


VOTE = struct.Struct("<6q")
"""The kind of the step that a rank wants, of what, its detail, where it stands, how many units the rank has, and at the
begin of a forward a number for how the model's units are made."""
LEAVE = Step(Kind.LEAVE)
GOES_ON = 4
"""In the detail of a `BEGIN`: of an accumulation it is not the first, so that what is kept unsharded is up to date."""


class Coordinator:
    """The ranks of one mesh as one of them sees them; for all models whose roots are on that mesh.

    Units and optimizers are known by numbers, in the order in which they were first used; that is the same on all
    ranks.
    """

    def __init__(self, parent: dist.ProcessGroup, ranks: tuple[int, ...], device: torch.device, ledger: Ledger) -> None:
        self._parent, self._ranks, self._device, self._ledger = weakref.ref(parent), ranks, device, ledger
        self._order = AgreedOrder()
        self._units: list[weakref.ref[Unit]] = []
        self._numbers: dict[int, int] = {}
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._is_away = self._has_abandoned = False
        self._attempt: Attempt | None = None
        self._failure: Failure | None = None
        """Why the present attempt was given up."""
        self._reduced = ReducedGradients(())
        self._owed: Callable[[], None] | None = None
        """Starts what this rank has taken and could not start, for which the others wait."""
        watcher.listen(self)

    # What this rank wants

    def watch(self, unit: Unit) -> None:
        """Know `unit`, one of the mesh's."""
        if unit.id not in self._numbers:
            self._numbers[unit.id] = len(self._units)
            self._units.append(weakref.ref(unit))
            self._ledger.units[unit.id] = unit

    def begin(self, unit: Unit) -> None:
        """A forward of `unit`, a root, begins, on all ranks that have a batch left.

        Raises:
            CommError: a rank has died, does not come before the timeout, or wants what cannot be joined.
        """
        is_training = any(module.training for module in unit.modules)
        accumulation = unit.policy.accumulation
        goes_on = accumulation is not None and not accumulation.is_in_first_forward
        mode = GOES_ON * goes_on + 2 * torch.is_grad_enabled() + is_training
        self._reach(Step(Kind.BEGIN, self._numbers[unit.id], mode))

    def end_backward(self, unit: Unit) -> None:
        """A backward of the model of `unit`, a root, has ended: go on when all ranks have reduced what they have.

        Raises:
            CommError: as `begin`.
        """
        if unit.policy.reduce_gradients:
            self._reach(Step(Kind.END, self._numbers[unit.id]))

    def abandon_backward(self, unit: Unit) -> None:
        """A backward of the model of `unit`, a root, has raised in its middle, and the program goes on: some of its
        gradients are in the sums of all ranks, others are not. All raise at the next vote, unless all have done so."""
        self._has_abandoned = self._attempt is None

    def starts(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, a collective of `unit`, when it is its turn on all ranks.

        Raises:
            CommError: as `begin`.
        """
        number, is_in_backward = self._numbers[unit.id], in_backward()
        if action is Gather:
            step = Step(Kind.GATHER, number, int(unit.in_full_precision))
            self._reach(step, is_in_backward)
            if unit.live is not Live.SHARDED:
                unit.free()  # other ranks gather all of it, and from shards
        else:
            step = Step(Kind.REDUCE, number, int(unit.policy.all_reduce_gradients))
            self._reach(step, is_in_backward)
        self._start(step, unit, carry_out)

    def waits(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action`. Raises CommError as `begin`."""
        self._ledger.run(action, unit, carry_out)

    def before_step(self, optimizer: Optimizer, unit_ids: Sequence[int]) -> None:
        """`optimizer` is about to step the shards of these units: go on when all ranks that are not away do.

        Raises:
            CommError: as `begin`; or ranks step different optimizers, or only some of them do.
        """
        attempt = self._attempt
        if self._is_away or not any(each in self._numbers for each in unit_ids):
            return
        if in_backward():
            if attempt is not None:
                attempt.steps(for_good=True)
            return
        if attempt is not None and (reason := attempt.refuses(optimizer)) is not None:
            self.fail(reason)
        wishes = self._reach(Step(Kind.STEP, self.know(optimizer)))
        is_any_away = any(wish.step == LEAVE for wish in wishes)
        if attempt is not None:
            attempt.steps(for_good=is_any_away)
        if is_any_away:
            changed = self._reduced.changed()
            self._exchange_settings(refusal(changed) if changed else settings_of(optimizer))

    def know(self, optimizer: Optimizer) -> int:
        """Returns the number of `optimizer`, and gives it one if it has none."""
        for number, known in enumerate(self._optimizers):
            if known() is optimizer:
                return number
        self._optimizers.append(weakref.ref(optimizer))
        return len(self._optimizers) - 1

    def agree_on_batch(self, has_one: bool) -> bool:
        """Returns whether any rank has a batch left, this one or another, once all that have not left ask.

        Raises:
            CommError: as `begin`.
        """
        wishes = self._reach(Step(Kind.BATCH, detail=int(not has_one)))
        return any(wish.step == Step(Kind.BATCH) for wish in wishes)

    def leave(self) -> None:
        """Take part in what the other ranks do, and want nothing, until none of them wants anything.

        Raises:
            CommError: as `begin`; or the others step an optimizer that this rank has never seen.
        """
        self._is_away = True
        try:
            self._reach(LEAVE)
        finally:
            self._is_away = False

    # Attempts

    def begin_attempt(self, attempt: Attempt) -> None:
        """Have `GivenUp` raised wherever this rank is when a rank fails, until `end_attempt`.

        Raises:
            StateError: another attempt has not ended.
        """
        if self._attempt is not None:
            raise StateError("sherd.step within sherd.step of models on the same ranks; leave the outer one first")
        self._attempt = attempt

    def end_attempt(self) -> None:
        """This rank's attempt has ended, in whichever way."""
        self._attempt = self._failure = self._owed = None

    def done(self, with_all: bool = True) -> None:
        """This rank has finished its attempt, or the part of it before collectives that are not ours if not `with_all`:
        go on when all have that began one.

        Raises:
            GivenUp: another rank has failed.
            CommError: as `begin`.
        """
        self._reach(Step(Kind.DONE, detail=int(not with_all)))

    def fail(self, reason: str) -> NoReturn:
        """This rank cannot finish its attempt, and has nothing in flight: have all ranks give it up.

        Raises:
            GivenUp: when all know.
            CommError: as `begin`.
        """
        assert self._attempt is not None, "only an attempt fails"
        self._attempt.fail(reason)
        owed, self._owed = self._owed, None
        if owed is not None and self._failure is None:
            owed()
        self._reach(Step(Kind.FAIL))
        raise AssertionError("no rank goes on when one has failed")

    def _give_up(self) -> None:
        """A rank has failed. All ranks must call this; those that have an attempt leave it."""
        attempt = self._attempt
        mine = None if attempt is None else attempt.report()
        reports = all_gather_objects(
            mine, "the reports of ranks on a step that one of them cannot finish", self._group()
        )
        if attempt is not None:
            self._failure = Failure.of(self._ranks, reports)
            raise GivenUp(self._failure)
        # What the others have reduced is here, too.
        for unit in self._alive():
            unit.zero_grad(True, {id(module) for module in unit.modules})

    # What all do

    def _alive(self) -> list[Unit]:
        return [unit for ref in self._units if (unit := ref()) is not None]

    def _reach(self, wanted: Step, is_in_backward: bool = False) -> Sequence[Wish]:
        """Go along with the others until it is the turn of `wanted`. Returns what all ranks wanted at the last vote."""
        if self._failure is not None:
            raise GivenUp(self._failure)
        wishes: Sequence[Wish] = ()
        while True:
            step = self._order.expected()
            if step is None:
                wishes = self._vote(Wish(wanted, is_in_backward, self._attempt is not None))
                step = choose(wishes)
                self._require_possible(step, wishes)
            self._order.take(step)
            if step.kind is Kind.END:
                is_any_away = any(wish.step == LEAVE for wish in wishes)
                self._reduced = ReducedGradients(self._alive() if is_any_away else ())
            if step.kind is Kind.FAIL:
                self._give_up()
            elif wanted.is_served_by(step):
                return wishes
            else:
                self._go_along(step)

    def _vote(self, wish: Wish) -> list[Wish]:
        """Returns what all ranks want. All of them must call this."""
        stands = wish.in_backward + 2 * wish.in_attempt + 4 * self._has_abandoned
        root = self._units[wish.step.which]() if wish.step.kind is Kind.BEGIN else None
        own = VOTE.pack(*wish.step, stands, len(self._units), made_as(root) if root else 0)
        votes = [bytearray(VOTE.size) for _ in self._ranks]
        words = self._in_words(wish.step)
        asking = named(f"the vote of ranks, of which rank {dist.get_rank()} {words},", self._group())
        with self._ledger.waiting(PlannedCollective(words, ())), asking:
            wait_on_host(start_all_gather(own, votes, self._group()))
        unpacked = [VOTE.unpack(vote) for vote in votes]
        self._fewest_units = min(units for *_, units, _ in unpacked)
        abandoned = [rank for rank, (*_, at, _, _) in zip(self._ranks, unpacked, strict=True) if at & 4]
        if len(abandoned) == len(self._ranks):
            self._has_abandoned = False
        elif abandoned:
            raise CommError(
                f"ranks {abandoned} gave up a backward in its middle, and went on: some of its gradients were reduced, "
                "and others were not. Let the error end the program, or make the step inside sherd.step, which all "
                "ranks skip then; go on from a checkpoint"
            )
        wishes = [Wish(Step(Kind(kind), *which), bool(at & 1), bool(at & 2)) for kind, *which, at, _, _ in unpacked]
        if root and len({wish.step[:2] for wish in wishes}) == 1 and len({made for *_, made in unpacked}) > 1:
            raise CommError(differently_made(root, self._ranks, self._group()))
        return wishes

    def _group(self) -> dist.ProcessGroup:
        parent = self._parent()
        assert parent is not None, "the mesh of a unit holds it"
        return host_group_beside(parent, "votes", self._ranks, self._device)

    def _require_possible(self, step: Step, wishes: Sequence[Wish]) -> None:
        """Raise, on all ranks alike, if some of them cannot go along with `step`."""
        if step.kind is not Kind.FAIL and step.kind <= Kind.END and step.which >= self._fewest_units:
            raise CommError(
                f"ranks {self._wanting(step, wishes)} run a model whose forward other ranks have not begun yet; under "
                "divergence='join' all ranks must run each model once before any of them may skip it"
            )
        if step.kind is Kind.STEP and any(wish.step not in (step, LEAVE) for wish in wishes):
            others = [rank for rank, wish in zip(self._ranks, wishes, strict=True) if wish.step not in (step, LEAVE)]
            raise CommError(
                f"ranks {self._wanting(step, wishes)} step an optimizer ({self._kind_of(step.which)}, number "
                f"{step.which} in the order of their first steps) that ranks {others} skip; under divergence='join' "
                "all ranks must step the same optimizers, also those that have skipped all of its parameters"
            )

    def _kind_of(self, number: int) -> str:
        optimizer = self._optimizers[number]() if number < len(self._optimizers) else None
        return "not seen on this rank" if optimizer is None else type(optimizer).__name__

    def _wanting(self, step: Step, wishes: Sequence[Wish]) -> list[int]:
        return [rank for rank, wish in zip(self._ranks, wishes, strict=True) if wish.step == step]

    def _in_words(self, step: Step) -> str:
        unit = self._units[step.which]() if step.kind <= Kind.END and step.which < len(self._units) else None
        name = unit.name if unit is not None else ""
        return {
            Kind.GATHER: f"gathers unit {name}",
            Kind.REDUCE: f"reduces the gradients of unit {name}",
            Kind.FAIL: "cannot finish its step",
            Kind.BEGIN: f"begins a forward of {name}",
            Kind.END: f"has ended a backward of {name}",
            Kind.STEP: f"steps optimizer {step.which}",
            Kind.DONE: "has finished its step",
            Kind.BATCH: "asks for its next batch",
            Kind.LEAVE: "has no batch left",
        }[step.kind]

    def _go_along(self, step: Step) -> None:
        """Take part in what this rank did not want."""
        if step.kind is Kind.STEP:
            self._step_along(step.which)
        is_forward = step.kind is Kind.BEGIN and step.detail < GOES_ON
        if step.kind > Kind.REDUCE and not is_forward:
            return
        unit = self._units[step.which]()
        if unit is None:
            raise CommError(
                f"rank {dist.get_rank()} has deleted a model that other ranks still run ({self._in_words(step)}); "
                "delete it on all ranks"
            )
        if is_forward:
            conductor = unit.sealed_into()
            for each in conductor.units if conductor is not None else ():
                if each.keeps_copies:
                    each.may_be_written()  # as on the ranks whose forward begins, which gather it anew
            return
        live = unit.live
        with torch.no_grad():
            self._start(step, unit, partial(start_for_others, step, unit))
            if step.kind is Kind.GATHER:
                self._ledger.run(Await, unit, partial(have_again, unit, live))
            else:
                self._ledger.run(FinishReduce, unit, partial(finish_for_others, unit))

    def _start(self, step: Step, unit: Unit, run: Callable[[], None]) -> None:
        """Call `run`, which starts the collectives of `step`. If it raises (there was no memory for what is to come),
        remember those that were not started: the other ranks wait for them."""
        is_gather = step.kind is Kind.GATHER
        action: type[Action] = Gather if is_gather else Reduce
        try:
            self._ledger.start(action, unit, step.detail if is_gather else 0, run)
        except Exception:
            flights: Sequence[_Flight] = unit.weights if is_gather else unit.gradients
            self._owed = partial(pay, step, unit, {at for at, each in enumerate(flights) if each.is_in_flight})
            raise

    def _step_along(self, number: int) -> None:
        """Step the optimizer as the ranks do that still train, with their learning rates; then drop its gradients."""
        settings = self._exchange_settings(None)
        optimizer = self._optimizers[number]() if number < len(self._optimizers) else None
        if optimizer is None:
            raise CommError(
                f"rank {dist.get_rank()} has no batch left, and does not know optimizer {number}, which the other "
                "ranks step; pass it: sherd.join(model, optimizer)"
            )
        take_settings(optimizer, settings)
        optimizer.step()
        optimizer.zero_grad()

    def _exchange_settings(self, mine: Settings | str | None) -> Settings:
        """Returns the settings that the first rank has which steps. All ranks must call this; all raise CommError if
        one has a reason not to step, in words."""
        found = all_gather_objects(mine, "the optimizers' settings, for ranks without a batch", self._group())
        for each in found:
            if isinstance(each, str):
                raise CommError(each)
        return next(settings for settings in found if isinstance(settings, list))
