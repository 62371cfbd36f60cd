"""How an optimizer steps few long vectors instead of many short tensors: views of the buffers that hold the shards.

An element-wise optimizer (Adam, SGD with momentum, ...) does the same to every element, so it may as well run over a
shard buffer, or a run of one, as over the shards in it: one call in the place of hundreds.

    shard buffer     | w1 | w2 | w3 | . | b1 | b2 | n |      what the optimizer is built from: the seven shards
    what is stepped |     run 0    |   |    run 1    |      two hyper-parameter classes (weight decay, none)

The optimizer keeps its class, its parameter groups and its per-parameter state, as views of the runs' states, so that
schedulers, `GradScaler`, `state_dict` and checkpoints see what they always saw. Only while it computes a step does it
see runs in the place of shards.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import hooked_step
from sherd.engine.run.unit import Unit
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import record_of
from sherd.engine.state.span import Home, Run, Seat, States
from sherd.errors import OptimizerError, PolicyTypeError
from sherd.tensor.state_kind import copy_of

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers known to treat every element alike; AdamW is an Adam."""

NOT_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adafactor,
    torch.optim.LBFGS,
    torch.optim.SparseAdam,
    *((torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()),
)


def flatten_optimizer(optimizer: Optimizer, *, elementwise: bool = False) -> Optimizer:
    """Let `optimizer` step runs of the shard buffers, one per group of parameters and hyper-parameter class.

    Call it once, before a scheduler is built around the optimizer, which may have stepped before, or have loaded a
    state. Parameters that are not sharded are stepped as before. In a step where some gradients are missing, the runs
    are split so that only what has a gradient is stepped. State may be loaded, cleared, and written in place; an entry
    that is replaced by hand (`optimizer.state[p]["exp_avg"] = ...`) is not looked at. A copy of the optimizer, or what
    a pickle brings back, is of its original class and steps tensor by tensor.

    Args:
        optimizer: of a class that treats every element alike: torch's Adam, AdamW, SGD, Adagrad, RMSprop and others.
        elementwise: yours is such a class, although sherd does not know it. What its step does may depend on a
            parameter's elements, gradient and state, one by one, but not on its shape.

    Returns:
        `optimizer`, changed in place: its class becomes a subclass of its own.

    Raises:
        OptimizerError: it is not element-wise (Adafactor, Muon), not known to be, flattened already, differentiable, or
            its `step` was replaced by a scheduler.
        PolicyTypeError: it is not an optimizer of torch.
    """
    if not isinstance(optimizer, Optimizer):
        raise PolicyTypeError(f"flatten_optimizer expects a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    kind = type(optimizer)
    _require_flat_form(optimizer, kind, elementwise)
    runs = _Runs(kind)
    optimizer.__class__ = _flat_class(kind)  # type: ignore[arg-type]  # classes are hashable
    assert isinstance(optimizer, FlatStep), "its class has just become a FlatStep"
    optimizer._sherd_runs = runs
    return optimizer


def _require_flat_form(optimizer: Optimizer, kind: type[Optimizer], elementwise: bool) -> None:
    if isinstance(optimizer, FlatStep):
        raise OptimizerError(f"this {kind.__name__} is flattened already; call flatten_optimizer once")
    if isinstance(optimizer, NOT_ELEMENTWISE):
        raise OptimizerError(
            f"{kind.__name__} looks at whole tensors, rows or indices, and would compute something else on a flat "
            "buffer; leave it as it is (under placement=Owned() each tensor has one owner)"
        )
    if not (elementwise or _is_known(kind)):
        raise OptimizerError(
            f"{kind.__name__} is not known to treat every element alike, and might compute something else on a flat "
            "buffer; leave it as it is, or pass elementwise=True for a class of your own that does"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerError(
            f"{kind.__name__}(differentiable=True) is to be differentiated through, which a flat buffer does not "
            "allow; build it with differentiable=False, or leave it as it is"
        )
    if "step" in vars(optimizer):
        raise OptimizerError(
            f"{kind.__name__}.step was replaced on this object (by a learning-rate scheduler?); call flatten_optimizer "
            "before building the scheduler"
        )


def _is_known(kind: type[Optimizer]) -> bool:
    """Whether it is one of `ELEMENTWISE`, or a child of one that has not written a step of its own."""
    return any(
        issubclass(kind, each) and inspect.unwrap(kind.step) is inspect.unwrap(each.step) for each in ELEMENTWISE
    )


class FlatStep:
    """What `flatten_optimizer` adds to an optimizer's class."""

    _sherd_runs: _Runs

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's own; what the shards of a run share, such as the count of steps, is there for each."""
        found: dict[str, Any] = super().state_dict()  # type: ignore[misc]  # of the optimizer
        return {**found, "state": _unshared(found["state"])}

    def __reduce__(self) -> tuple[Any, ...]:
        kind: Any = self._sherd_runs.kind
        found = kind.__getstate__(self)
        return object.__new__, (kind,), {**found, "state": _unshared(found["state"])}


@functools.cache
def _flat_class(kind: type[Optimizer]) -> type[Optimizer]:
    return type(f"Flat{kind.__name__}", (FlatStep, kind), {"step": hooked_step(_step)})


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """One step over the runs; `closure` computes the loss again, as in torch."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    self._sherd_runs.step(self)
    return loss


class _Runs:
    """The runs of one optimizer, which is given to each step, for it holds us."""

    def __init__(self, kind: type[Optimizer]) -> None:
        self.kind = kind
        self._plain_step: Callable[[Any], Any] = kind.step.__wrapped__  # type: ignore[attr-defined]  # torch has hooked it
        self._knows_forms = _is_known(kind)
        self._runs: list[Run] = []
        self._homes: dict[int, Home] = {}
        self._idle: list[nn.Parameter] = []
        self._groups: list[list[nn.Parameter]] | None = None
        self._stepped: list[list[nn.Parameter]] = []
        self._alone: list[list[nn.Parameter]] = []
        self._buffers: list[tuple[weakref.ref[Unit], list[Group]]] = []

    def step(self, optimizer: Any) -> None:
        """Step everything that has a gradient."""
        if not (self._is_current(optimizer) and self._take_gradients()):
            self._build(optimizer)
        num_states = len(optimizer.state)
        self._step_with(optimizer, self._stepped)
        if any(self._alone):
            # DTensors cannot be in one call with plain tensors.
            self._step_with(optimizer, self._alone)
        if len(optimizer.state) != num_states:
            _put_in_order(optimizer)

    def _step_with(self, optimizer: Any, stepped: list[list[nn.Parameter]]) -> None:
        """Step as if the optimizer had been built from these parameters, and find it as it was afterwards."""
        groups, state_of = optimizer.param_groups, optimizer.state
        theirs = [(group, group["params"]) for group in groups]
        # Going through one tensor as a list takes longer than going through it by itself.
        singles = [
            group
            for group, parameters in zip(groups, stepped, strict=True)
            if len(parameters) == 1 and self._knows_forms and group.get("foreach")
        ]
        for group, parameters in zip(groups, stepped, strict=True):
            group["params"] = parameters
        for group in singles:
            group["foreach"] = False
        for run in self._runs:
            run.lend_state(state_of)
        try:
            self._plain_step(optimizer)
        finally:
            for group, parameters in theirs:
                group["params"] = parameters
            for group in singles:
                group["foreach"] = True
            for run in self._runs:
                run.take_back(state_of)
                run.flat.grad = None

    def _is_current(self, optimizer: Any) -> bool:
        """Whether parameters, shards and state are where they were when the runs were made."""
        groups = optimizer.param_groups
        if self._groups is None or len(groups) != len(self._groups):
            return False
        for group, then in zip(groups, self._groups, strict=True):
            now = group["params"]
            if len(now) != len(then) or not all(map(is_, now, then)):
                return False
        for unit, groups_then in self._buffers:
            if _groups_of(unit()) != groups_then:
                return False
        return all(run.has_its_state(optimizer.state) for run in self._runs)

    def _take_gradients(self) -> bool:
        return all(run.take_gradient() for run in self._runs) and all(shard.grad is None for shard in self._idle)

    def _build(self, optimizer: Any) -> None:
        """Put neighbours of one class, with gradients and with the same count of steps, into runs."""
        state_of = optimizer.state
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        place_of = {id(each): place for place, group in enumerate(self._groups) for each in group}
        self._remember_homes(state_of)
        units = _units_of(each for group in self._groups for each in group)
        self._buffers = [(weakref.ref(unit), _groups_of(unit)) for unit in units]
        seats = [_seats(group, place_of) for _, groups in self._buffers for group in groups]
        self._runs = [Run(run) for some in seats for run in _neighbours(some, state_of)]
        in_runs = {id(shard) for run in self._runs for shard in run.shards}
        others = [[each for each in group if id(each) not in in_runs] for group in self._groups]
        self._idle = [each for group in others for each in group if each.grad is None and isinstance(each, DTensor)]
        self._stepped = [[each for each in group if not isinstance(each, DTensor)] for group in others]
        self._alone = [
            [each for each in group if isinstance(each, DTensor) and each.grad is not None] for group in others
        ]
        for each in (each for group in self._alone for each in group if id(each) in self._homes):
            # It was in a run, with which it must not share its count of steps.
            own = {key: copy_of(value) for key, value in state_of[each].items() if not isinstance(value, DTensor)}
            state_of[each].update(own)
            del self._homes[id(each)]
        for run in self._runs:
            self._stepped[run.seats[0].place].append(run.flat)
            run.take_state(state_of, self._homes)
            taken = run.take_gradient()
            assert taken, "only what has a gradient is in a run"

    def _remember_homes(self, state_of: States) -> None:
        """Of the runs so far, and of those before them for what is idle; unless the state was loaded since."""
        homes = [*self._homes.values(), *(home for run in self._runs for home in run.homes())]
        self._homes = {id(home.shard): home for home in homes if state_of.get(home.shard) is home.part}


def _put_in_order(optimizer: Any) -> None:
    """States in the order of parameters: each rank has runs of its own, but what it gathers, it gathers with others."""
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if parameter in optimizer.state:
            optimizer.state[parameter] = optimizer.state.pop(parameter)


def _units_of(parameters: Iterable[nn.Parameter]) -> list[Unit]:
    """The units whose shards these are, as far as they are shards."""
    owners = [record.owner for each in parameters if (record := record_of(each)) is not None]
    return list({owner.id: owner for owner in owners if isinstance(owner, Unit)}.values())


def _groups_of(unit: Unit | None) -> list[Group]:
    """The groups that have the unit's shards in a shard buffer."""
    return [] if unit is None else [each.group for each in unit.weights if not each.group.gathers_itself]


def _seats(group: Group, place_of: dict[int, int]) -> list[Seat]:
    """All of a group's shards, in the order they lie in; those that this rank holds nothing of come last."""
    held = [slot.held(group.mesh.piece) for slot in group.packing.slots]
    seats = [
        Seat(record, group, extent, place_of.get(id(record.shard), -1))
        for record, extent in zip(group.parameters, held, strict=True)
    ]
    return sorted(seats, key=lambda seat: (not seat.is_filled, seat.extent.start))


def _neighbours(seats: Sequence[Seat], state_of: States) -> list[list[Seat]]:
    """Seats that may be stepped as one: one behind the other, and alike in everything but their elements."""
    numbers: dict[int, Any] = {}
    runs: list[tuple[Any, list[Seat]]] = []
    for sort, run in groupby((s for s in seats if s.is_filled), key=lambda seat: _sort(seat, state_of, numbers)):
        if sort is not None:
            runs.append((sort, list(run)))
    for seat in seats:
        sort = None if seat.is_filled else _sort(seat, state_of, numbers)
        if sort is not None:
            run_of_sort = next((run for other, run in runs if other == sort), None)
            if run_of_sort is None:
                runs.append((sort, [seat]))
            else:
                run_of_sort.append(seat)
    return [run for _, run in runs]


def _sort(seat: Seat, state_of: States, numbers: dict[int, Any]) -> tuple[Any, ...] | None:
    """What shards of one run have in common: the parameter group, and what state tells besides its elements.

    None for one that is in no run: not this optimizer's, without a gradient, or moved. `numbers` are those read so far.
    """
    if seat.place < 0 or not seat.fits(seat.shard.grad) or not seat.is_taken:
        return None
    signs: list[Any] = [seat.place]
    for key, value in (state_of.get(seat.shard) or {}).items():
        if seat.has_elements(key, value):
            signs.append((key, value.dtype))
        elif isinstance(value, torch.Tensor):
            # Reading it waits for the device; the shards of an earlier run share it.
            if id(value) not in numbers:
                numbers[id(value)] = value.tolist()
            signs.append((key, numbers[id(value)]))
        else:
            signs.append((key, value))
    return tuple(signs)


def _unshared(states: States) -> dict[Any, Any]:
    """The same states, but that each has its own of what several share: else one step would count several times."""
    seen: set[int] = set()
    own: dict[Any, Any] = {}
    for key, state in states.items():
        own[key] = (
            {
                name: value.clone() if id(value) in seen and isinstance(value, torch.Tensor) else value
                for name, value in state.items()
            }
            if isinstance(state, dict)
            else state
        )
        seen.update(map(id, own[key].values()) if isinstance(state, dict) else ())
    return own
