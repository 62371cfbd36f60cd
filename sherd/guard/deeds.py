"""What a rank does to shards between two collectives, in terms that ranks compare: steps, clips, averages, loads.

A rank remembers what it did the last time, and compares nothing while it does the same again. Its next collective is
compared (`checker.py`) where it does something else: another option of an optimizer, a gradient that is missing, state
that was loaded or cleared. A value that changes each time, such as a scheduled learning rate, is compared the 1st, 2nd,
4th, ... time, and every 1,024th. So are counts in the state, whether shards are finite, and the values of replicas.

A parameter of which one rank holds all elements (`Owned()`) is that rank's business, and is left out.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import not_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from sherd._torch import gradients_of, in_backward, users_line
from sherd.comm.streams import wait_for_steps
from sherd.engine import ShardedParameter, Unit
from sherd.errors import in_short
from sherd.tensor.local_step import are_same
from sherd.tensor.ragged import local_part

STEPPED = " is stepped by "
"""The word between a parameter and its optimizer, in a term."""
SELDOM = 1_024
"""From here on values that may change each time are compared once in so many times."""
NO_MATTER = {"foreach", "fused", "capturable"}
"""Options that do not change what a step computes."""
MOST_PENDING = 8
"""What was done to models that run no more is kept for so long."""
MOST_AT_ONCE = 1_000
"""So much is kept of what was done since the last collective: replays of a captured step have none between them."""
Option = tuple[int, str]
"""The number of a parameter group, and the key of an option in it."""


@dataclass(frozen=True, slots=True)
class Deed:
    """What a rank has done to some units, by their ids: `terms` says it in words.

    `line` is the user's, and `who` is the number of an optimizer.
    """

    terms: Callable[[], Sequence[str]]
    line: str = ""
    who: int = 0
    units: Sequence[int] = ()


@dataclass(slots=True)
class _Values:
    """Values of something that a rank does again and again: which changed the last time, and how often it came."""

    last: Mapping[Any, object] = field(default_factory=dict)
    changed: set[object] = field(default_factory=set)
    times: int = 0

    @property
    def is_due(self) -> bool:
        """Whether all ranks compare this time."""
        return self.times & (self.times - 1) == 0 if self.times < SELDOM else self.times % SELDOM == 0

    def take(self, values: Mapping[Any, object]) -> bool:
        """Take the values of this time. Returns whether to compare them: others have changed than the last time."""
        changed = set[object]()
        if values != self.last:
            changed = {key for key in {**values, **self.last} if values.get(key) != self.last.get(key)}
        is_odd, self.last, self.changed, self.times = changed != self.changed, values, changed, self.times + 1
        return is_odd or self.is_due


class Deeds:
    """What one rank does to the shards of `units`, which are those of one mesh, by their ids.

    Attributes:
        pending: what the rank has done since the last collective, in order.
        doubts: some of it is not as the last time, but for how often optimizers stepped.
    """

    def __init__(self, units: Mapping[int, Unit]) -> None:
        self.pending: list[Deed] = []
        self.doubts = False
        self._units = units
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()
        self._noted: dict[str, _Values] = {}
        self._usual: dict[int, int] = {}
        """How often optimizers stepped between the last two collectives that they stepped between, by number."""

    def take(self, unit_ids: Container[int]) -> tuple[tuple[Deed, ...], bool]:
        """Returns what is pending of one model's units, and whether some is not as the last time.

        A collective of the model begins. What was done to another one waits for that one's, which may never come.
        """
        of_model = [not deed.units or any(each in unit_ids for each in deed.units) for deed in self.pending]
        taken = tuple(itertools.compress(self.pending, of_model))
        doubts = self.doubts and bool(taken)
        rest = list(itertools.compress(self.pending, map(not_, of_model)))[-MOST_PENDING:]
        for who, times in Counter(deed.who for deed in taken if deed.who).items():
            doubts |= times != self._usual.get(who, 1)
            self._usual[who] = times
        self.pending[:] = rest
        self.doubts &= not taken
        for steps in self._optimizers.values() if taken else ():
            steps.forget_calls()  # of a step that was interrupted
        return taken, doubts

    def _add(self, deed: Deed) -> None:
        self.pending.append(deed)
        if len(self.pending) > MOST_AT_ONCE:
            del self.pending[0]

    def _are_ours(self, unit_ids: Sequence[int]) -> bool:
        return any(unit_id in self._units for unit_id in unit_ids)

    def before_step(self, optimizer: Optimizer, unit_ids: Sequence[int]) -> None:
        """Note that `optimizer` is about to step shards. Of steps within backward nothing is noted."""
        if in_backward() or not self._are_ours(unit_ids):
            return
        steps = self._optimizers.setdefault(optimizer, _Steps())
        if not steps.enter():
            return
        steps.find(optimizer, self._units)
        if not steps.names:
            return
        self.doubts |= steps.begin(optimizer)
        self._add(Deed(steps.words, users_line(sys._getframe()), steps.number, unit_ids))
        for unit_id in unit_ids if steps.values.is_due else ():
            if unit_id in self._units:
                self._units[unit_id].compared.doubt_replicas()

    def after_step(self, optimizer: Optimizer) -> None:
        if (steps := self._optimizers.get(optimizer)) is not None and steps.leave() and steps.names:
            steps.end(optimizer)

    def gave_up(self, optimizer: Optimizer) -> None:
        """Forget the step of `optimizer` that has raised, on all ranks if they do the same."""
        if (steps := self._optimizers.get(optimizer)) is not None:
            steps.forget_calls()
            self.pending[:] = [deed for deed in self.pending if deed.who != steps.number]

    def noted(self, what: str, values: Sequence[object], unit_ids: Sequence[int]) -> None:
        """Note something else that is done to shards: `what` has a place {} for each of the `values`."""
        if self._are_ours(unit_ids):
            self.doubts |= self._noted.setdefault(what, _Values()).take(dict(enumerate(values)))
            self._add(Deed(lambda: [what.format(*values)], users_line(sys._getframe()), 0, unit_ids))


_numbers = itertools.count(1)


class _Steps:
    """The steps of one optimizer: what is compared of them, as it was in the last one."""

    def __init__(self) -> None:
        self.values, self.number = _Values(), next(_numbers)
        self.names: list[str] = []
        self._depth = 0
        """How many calls of `step` are under way, each within the one before."""
        self._all: list[torch.Tensor] = []
        self._own: set[str] = set()
        """Options that the optimizer changes itself, as it does its state."""
        self._groups: object = None
        self._num_entries = 0
        self._has_gradient: list[bool] = []

    def enter(self) -> bool:
        """Enter a call of `step`. False: it is within another, as a class calls the step of its base class."""
        self._depth += 1
        return self._depth == 1

    def leave(self) -> bool:
        """Leave a call of `step`. Returns whether it was the outermost."""
        was, self._depth = self._depth, max(self._depth - 1, 0)
        return was == 1

    def forget_calls(self) -> None:
        self._depth = 0

    def find(self, optimizer: Optimizer, units: Mapping[int, Unit]) -> None:
        """Find the parameters of `units` of which several ranks hold elements, unless they are the same."""
        grouped = [(at, each) for at, group in enumerate(optimizer.param_groups) for each in group["params"]]
        present = [each for _, each in grouped]
        if are_same(present, self._all):
            return
        self._all = present
        found = [(at, each, record) for at, each in grouped if (record := ShardedParameter.of(each)) is not None]
        ours = [each for each in found if (owner := each[2].owner) is not None and owner.id in units]
        ours = [each for each in ours if each[2].is_on_several_ranks]
        self._parameters, self.names = [each for _, each, _ in ours], [record.name for _, _, record in ours]
        self._group_of = [at for at, _, _ in ours]
        self._are_everywhere = [record.is_on_all_ranks for _, _, record in ours]

    def begin(self, optimizer: Optimizer) -> bool:
        """Begin a step. Returns whether it is not as the last one."""
        self._options, self._more, name = self._options_of(optimizer), list[str](), type(optimizer).__name__
        has_gradient = [gradient is not None for gradient in gradients_of(self._parameters)]
        doubts = self.values.take(self._options) or has_gradient != self._has_gradient
        is_same = self._groups is optimizer.param_groups and self._num_entries == self._num_entries_of(optimizer)
        if self._groups is not None and not is_same:
            doubts = True
            self._more.append(f"the state of {name} was loaded, cleared or exchanged since its last step")
        if self.values.is_due:
            wait_for_steps()
            counts = {_plain(state.get("step")) for state in self._states_of(optimizer)} - {_NOT_PLAIN}
            self._more.append(f"the state of {name} has counted {in_short(sorted(map(str, counts))) or 'no'} steps")
        self._has_gradient = has_gradient
        # Of texts and numbers: a deed may outlive the optimizer.
        self.words = partial(_terms, name, self.names, self._group_of, self._options, has_gradient, self._more)
        return doubts

    def end(self, optimizer: Optimizer) -> None:
        self._groups, self._num_entries = optimizer.param_groups, self._num_entries_of(optimizer)
        if (now := self._options_of(optimizer)) != self._options:
            for key in [key for key, value in self._options.items() if now.get(key) != value]:
                self._own.add(key[1])
                del self._options[key]
        if self.values.is_due:
            pieces = zip(self._parameters, map(local_part, self._parameters), self._are_everywhere, strict=True)
            # On an accelerator the host would wait for the step.
            looked_at = [(each, part) for each, part, everywhere in pieces if everywhere and part.device.type == "cpu"]
            if wrong := not_finite(looked_at):
                self._more.append(f"{type(optimizer).__name__} has left inf or nan in {in_short(wrong)}")

    def _states_of(self, optimizer: Optimizer) -> list[dict[str, object]]:
        states = map(optimizer.state.get, self._parameters)
        return [state for state in states if isinstance(state, dict)]

    def _num_entries_of(self, optimizer: Optimizer) -> int:
        return sum(map(len, self._states_of(optimizer)))

    def _options_of(self, optimizer: Optimizer) -> dict[Option, object]:
        """Returns the options of the groups that are compared: what the optimizer was made with."""
        keys = optimizer.defaults.keys() - NO_MATTER - self._own
        groups = ((at, optimizer.param_groups[at]) for at in dict.fromkeys(self._group_of))
        found = {(at, key): _plain(group[key]) for at, group in groups for key in keys if key in group}
        return {key: value for key, value in found.items() if value is not _NOT_PLAIN}


def _terms(
    optimizer: str,
    names: Sequence[str],
    group_of: Sequence[int],
    options: Mapping[Option, object],
    has_gradient: Sequence[bool],
    more: Sequence[str],
) -> list[str]:
    """Returns one step of an optimizer in words."""
    numbers = {at: number for number, at in enumerate(dict.fromkeys(group_of))}
    stepped = (
        f"{name}{STEPPED}{optimizer} in group {numbers[at]}{'' if has else ' without a gradient'}"
        for name, at, has in zip(names, group_of, has_gradient, strict=True)
    )
    chosen = (f"{optimizer} steps group {numbers[at]} with {key}={value!r}" for (at, key), value in options.items())
    return [*more, *sorted(stepped), *sorted(chosen)]


_NOT_PLAIN = object()


def _plain(value: object) -> object:
    """Returns a number or text, a tuple of such, or `_NOT_PLAIN`. A tensor on a device is none: the host would wait."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, tuple | list):
        items = tuple(map(_plain, value))
        return _NOT_PLAIN if _NOT_PLAIN in items else items
    if type(value) is torch.Tensor and value.numel() == 1 and value.device.type == "cpu":
        return value.item()
    return _NOT_PLAIN


def not_finite(pieces: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> list[str]:
    """Returns the names of parameters whose shards, of themselves or of their gradients, hold an inf or a nan."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for _, piece in pieces:
        if piece.numel() and (piece.is_floating_point() or piece.is_complex()):  # of others there is no norm
            by_device.setdefault(piece.device, []).append(piece)
    # One norm for all shards of a device, so that the host waits once per device where all are finite.
    with contextlib.suppress(NotImplementedError):  # a kind of tensor may have no norm, as torchao's int8 weights
        norms = (torch._foreach_norm(on_device, math.inf) for on_device in by_device.values())
        if all(bool(torch.stack([norm.float() for norm in on_device]).isfinite().all()) for on_device in norms):
            return []
    return [ShardedParameter.name_of(parameter) for parameter, piece in pieces if not _is_finite(piece)]


def _is_finite(piece: torch.Tensor) -> bool:
    """Returns whether all elements are finite; True if this kind of tensor does not tell."""
    try:
        return bool(piece.isfinite().all())
    except NotImplementedError:
        return True
