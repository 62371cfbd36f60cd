"""The work of one rank in one micro-batch, as it was read from a model: operations, and tensors that come and go.

It says nothing about sharding: a `Sharded` model says which modules are units. Modules and parameters are named by
index, tensors by a number that is used once. The events of a step stand in their order:

    forward     Enter module   Use parameter   Op ...   Collective   Allocate   Save   Release   Leave module
    EndForward
    backward    Reached module   Read   Op ...   Collective   Gradient parameter   Allocate   Release   Passed module
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import count, starmap
from math import prod


class OpKind(str, Enum):
    """The kinds of operations, by the bound of their speed."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    """Norms, softmax, sums, losses."""
    LOOKUP = "lookup"
    """Embeddings, and other reads by an index."""
    COPY = "copy"


class TensorKind(str, Enum):
    """The purpose of a tensor outside of the engine. The value is the purpose's name in tables."""

    INPUT = "inputs"
    ACTIVATION = "activations"
    """Tensors that forward makes and backward reads."""
    LOGITS = "logits"
    """Activations with the size of the vocabulary for each token, and the tensors that the loss makes of them."""
    TEMPORARY = "temporaries"
    """Tensors that are made and freed in the same pass, forward or backward."""


@dataclass(frozen=True, slots=True)
class Enter:
    """The forward of a module begins with `inputs`. `again`: activation checkpointing runs it again, in backward."""

    module: int
    again: bool = False
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Leave:
    """The forward of a module ends. `outputs`: the tensors that the module returns."""

    module: int
    again: bool = False
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Use:
    """Forward reads a parameter."""

    parameter: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of torch.

    Attributes:
        name: torch's name of the operation, without overload: `aten.mm`.
        flops: floating-point operations; a multiply and an add are two.
        nbytes: bytes of reads and writes, each tensor once.
        dtype: the dtype of the result, by torch's name: `bfloat16`.
        depth: the length of the sums in a matrix product or convolution; in attention the width of a head; else 0.
        computed: the share of `flops` that the kernel computes: causal attention leaves out tokens that are not seen.
    """

    kind: OpKind
    name: str
    flops: int
    nbytes: int
    dtype: str
    depth: int = 0
    computed: float = 1.0


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of a process group: `size` ranks, each about `stride` ranks from the next."""

    size: int
    stride: int = 1


ALONE = RankGroup(1)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that forward or backward calls, as on the axes of tensor, context and expert parallelism.

    Attributes:
        kind: all-gather, reduce-scatter, all-reduce, broadcast, all-to-all or send.
        nbytes: the bytes of the full tensor; see `costs.collective_seconds`.
        group: the ranks that take part.
    """

    kind: str
    nbytes: int
    group: RankGroup


@dataclass(frozen=True, slots=True)
class Wait:
    """Compute goes on once the collective of this number is over: one that an optimizer's step has begun."""

    collective: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """A tensor gets memory. Views get none; a gradient is a temporary until `Gradient`."""

    tensor: int
    nbytes: int
    kind: TensorKind


@dataclass(frozen=True, slots=True)
class Release:
    """The last reference to a tensor is gone."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Save:
    """Autograd saves a tensor for backward. `mark` is a number of its own, by which backward reads the tensor."""

    tensor: int
    mark: int


@dataclass(frozen=True, slots=True)
class Alone:
    """Nothing but autograd keeps a saved tensor any more."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Read:
    """Backward is about to read what was saved."""

    mark: int


@dataclass(frozen=True, slots=True)
class BackwardBegins:
    """The loss is computed; backward begins."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Backward has reached the outputs of a module."""

    module: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """Autograd hands over the full gradient of a parameter.

    From now on its memory belongs to the receiver. The temporary that it was until now is released just before.
    """

    parameter: int


@dataclass(frozen=True, slots=True)
class Passed:
    """Backward is past the inputs of a module."""

    module: int


Calls = Enter | Leave | Use | Reached | Passed | BackwardBegins
Event = Calls | Op | Collective | Wait | Allocate | Save | Alone | Release | Read | Gradient


@dataclass(frozen=True, slots=True)
class Module:
    """A module: its name in `named_modules`, its class, and the module around it, None for the root."""

    name: str
    kind: str
    parent: int | None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, or this rank's part of one that is cut over ranks that read the same samples.

    `module` is the module that holds it, `dtype` torch's name of its dtype. Its gradient comes `widened` times as wide.
    """

    name: str
    module: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    is_trainable: bool = True
    widened: int = 1

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Work:
    """A micro-batch of a model on one rank. Modules and parameters stand in the order of registration, the root first.

    Attributes:
        tokens: samples times length, also if ranks share the tokens of a sample; 0 if the model reads no tokens.
    """

    modules: tuple[Module, ...]
    parameters: tuple[Parameter, ...]
    events: tuple[Event, ...]
    samples: int
    tokens: int

    @cached_property
    def flops(self) -> int:
        """The floating-point operations of forward and backward, without those of recomputation."""
        flops, num_again = 0, 0
        for event in self.events:
            match event:
                case Enter(again=True):
                    num_again += 1
                case Leave(again=True):
                    num_again -= 1
                case Op() if not num_again:
                    flops += event.flops
                case _:
                    pass
        return flops

    @cached_property
    def dtype(self) -> str:
        """The dtype of most of the FLOP in matrix products."""
        flops: Counter[str] = Counter()
        for event in self.events:
            if isinstance(event, Op) and event.kind in (OpKind.MATMUL, OpKind.ATTENTION):
                flops[event.dtype] += event.flops
        return flops.most_common(1)[0][0] if flops else "float32"


# Transformations of work that was read: activation checkpointing, and another number of samples


_KEPT = (TensorKind.ACTIVATION, TensorKind.LOGITS)

Keeper = Callable[[str], bool]
"""Returns True for an operation whose results are kept. It is asked about one operation after the other, by name."""


def checkpointed(work: Work, modules: Collection[int], keeper: Callable[[], Keeper] | None = None) -> Work:
    """Returns `work` with activation checkpointing of `modules`, like `torch.utils.checkpoint` without reentry.

    The inputs of a checkpointed module stay. The tensors that its forward keeps for backward are freed at the end of
    forward, except its outputs. Backward runs the forward again when it reaches the module's first operation. Like
    torch, it stops early: once all tensors for backward are there, before the next operation that makes a tensor.
    Modules inside of one of `modules` are not checkpointed once more.

    Selective checkpointing keeps the results of some operations, and does not compute these again. `keeper` is called
    for each forward of a module.

    torch frees the tensors of a checkpointed forward one by one, not at its end. That does not change the peak of a
    step: backward has all these tensors again, and gradients. torch also makes an output again that the module itself
    saves, as ReLU does; here the readers of outputs are taken to save them.
    """
    numbers = count(1 + max((event.tensor for event in work.events if isinstance(event, Allocate)), default=-1))
    events = list[Event | None](work.events)
    inserted: dict[int, list[Event]] = {}  # in front of the event at a position
    renamed: dict[int, int] = {}
    prolonged: dict[int, int] = {}  # tensors that live longer -> the position at which they are released
    moved: set[int] = set()  # tensors that the forward releases when it runs again
    for span in _spans(work.events, frozenset(modules), keeper):
        again, new = span.again(numbers)
        # Of what a checkpointed forward saves, its inputs alone are autograd's.
        for at in range(span.end - len(span.events), span.end):
            events[at] = None if isinstance(events[at], Save) else events[at]
        marks = {tensor: next(numbers) for tensor in span.inputs}
        inserted.setdefault(span.end - len(span.events) + 1, []).extend(starmap(Save, marks.items()))
        inserted.setdefault(span.reached, []).extend(map(Read, marks.values()))
        inserted.setdefault(span.end, []).extend(Release(tensor) for tensor in span.freed)
        inserted.setdefault(span.reached, []).extend(again)
        renamed |= new
        only_kept = {tensor for tensor in span.kept if span.released[tensor] < span.reached}  # backward reads the rest
        moved |= only_kept.intersection(event.tensor for event in again if isinstance(event, Release))
        prolonged |= dict.fromkeys(only_kept - moved, span.is_over)
        for tensor in span.inputs:
            if span.released[tensor] < span.is_over:
                prolonged[tensor] = max(prolonged.get(tensor, 0), span.is_over)
    for tensor, position in prolonged.items():
        inserted.setdefault(position, []).append(Release(tensor))
    return replace(work, events=tuple(_rewritten(events, inserted, renamed, moved.union(prolonged))))


def _rewritten(
    events: Sequence[Event | None],
    inserted: dict[int, list[Event]],
    renamed: dict[int, int],
    prolonged: Collection[int],
) -> Iterator[Event]:
    """Yields `events` with the inserted ones, which release `prolonged` tensors. Releases get the new names."""
    for position, event in enumerate(events):
        yield from inserted.get(position, ())
        if isinstance(event, Release):
            # An input that lives longer is left to autograd where the forward left it.
            number = renamed.get(event.tensor, event.tensor)
            yield Alone(number) if event.tensor in prolonged else Release(number)
        elif isinstance(event, Allocate) and event.tensor in prolonged and event.kind is TensorKind.TEMPORARY:
            yield replace(event, kind=TensorKind.ACTIVATION)
        elif event is not None:
            yield event


@dataclass
class _Span:
    """A forward of a checkpointed module.

    Attributes:
        events: the events of the forward.
        end: the position behind its `Leave`.
        reached: the position of the first event of its backward.
        saved: the tensors that the forward keeps for backward, and does not return.
        kept: the tensors that are not made again.
        skipped: the positions, within `events`, of the operations that made the kept tensors.
        inputs: the inputs of the module.
        released: the position at which each tensor of the step is released.
    """

    events: Sequence[Event]
    end: int
    reached: int
    saved: list[int]
    kept: frozenset[int]
    skipped: frozenset[int]
    inputs: tuple[int, ...]
    released: dict[int, int]

    @property
    def freed(self) -> list[int]:
        """The tensors that are freed after the forward, and made again."""
        return [tensor for tensor in self.saved if tensor not in self.kept]

    @property
    def is_over(self) -> int:
        """The position at which backward releases the last saved tensor."""
        return max((self.released[tensor] for tensor in self.saved), default=self.reached)

    def again(self, numbers: Iterator[int]) -> tuple[list[Event], dict[int, int]]:
        """Returns the events of recomputation, up to the last saved tensor, and the new numbers of freed tensors."""
        again, new, alive, calls = list[Event](), dict[int, int](), set[int](), list[int]()
        missing, freed = set(self.saved), self.freed
        for at, event in enumerate(self.events):
            if isinstance(event, Allocate) and not missing:
                break
            match event:
                case Allocate(tensor) if tensor in self.kept:
                    missing.discard(tensor)
                case Allocate(tensor):
                    new[tensor] = next(numbers)
                    alive.add(tensor)
                    missing.discard(tensor)
                    again.append(replace(event, tensor=new[tensor]))
                case Release(tensor):
                    if tensor in alive:
                        alive.remove(tensor)
                        again.append(Release(new[tensor]))
                    elif tensor in self.kept:
                        again.append(event)
                case Enter(module, _, inputs):
                    calls.append(module)
                    again.append(Enter(module, True, tuple(new.get(each, each) for each in inputs)))
                case Leave(module, _, outputs):
                    calls.pop()
                    again.append(Leave(module, True, tuple(new.get(each, each) for each in outputs)))
                case Save() | Alone():
                    pass
                case _ if at not in self.skipped:
                    again.append(event)
        again += [Release(new[tensor]) for tensor in alive.difference(freed)]
        again += [Leave(module, again=True) for module in reversed(calls)]
        return again, {tensor: new[tensor] for tensor in freed}


def _spans(events: Sequence[Event], modules: Collection[int], keeper: Callable[[], Keeper] | None) -> Iterator[_Span]:
    """Yields the forwards of `modules` that are not inside of another one of `modules`."""
    released = {event.tensor: at for at, event in enumerate(events) if isinstance(event, Release)}
    end_forward = next(at for at, event in enumerate(events) if isinstance(event, BackwardBegins))
    backwards = _backwards(events, end_forward, modules)
    start, inside = 0, None
    for at, event in enumerate(events[:end_forward]):
        if inside is None and isinstance(event, Enter) and event.module in modules:
            start, inside = at, event.module
        elif isinstance(event, Leave) and event.module == inside:
            inside = None
            if not backwards.get(event.module):
                continue  # backward does not reach this call
            reached = backwards[event.module].pop()  # the last call comes first in backward
            enter, forward = events[start], events[start : at + 1]
            assert isinstance(enter, Enter)
            skipped = _kept(forward, keeper()) if keeper else {}
            kept = frozenset(tensor for tensors in skipped.values() for tensor in tensors)
            saved = [
                each.tensor
                for each in forward
                if isinstance(each, Allocate)
                and each.kind in _KEPT
                and at < released[each.tensor]
                and each.tensor not in event.outputs
            ]
            yield _Span(forward, at + 1, reached, saved, kept, frozenset(skipped), enter.inputs, released)


def _kept(events: Sequence[Event], keeps: Keeper) -> dict[int, list[int]]:
    """Returns the results that are kept, by the positions of their operations."""
    kept: dict[int, list[int]] = {}
    results: list[int] = []  # the allocations of an operation stand just in front of it
    for at, event in enumerate(events):
        if isinstance(event, Op) and keeps(event.name):
            kept[at] = results
        results = [*results, event.tensor] if isinstance(event, Allocate) else []
    return kept


def _backwards(events: Sequence[Event], end_forward: int, modules: Collection[int]) -> dict[int, list[int]]:
    """Returns for each of `modules` the positions at which its backwards begin to compute."""
    positions: dict[int, list[int]] = {}
    waiting: list[int] = []
    for at, event in enumerate(events[end_forward:], end_forward):
        if isinstance(event, Reached) and event.module in modules:
            waiting.append(event.module)
        elif isinstance(event, (Allocate, Op, Gradient, Passed)):
            for module in waiting:
                positions.setdefault(module, []).append(at)
            waiting.clear()
    return positions


def scaled(work: Work, factor: float) -> Work:
    """Returns `work` for `factor` times as many samples, by a rule of three.

    Everything scales, except gradients of parameters and other temporaries of backward of the size of a parameter. So
    the bytes of operations that read mostly weights are too many: to read the model again is exact.
    """
    sizes = {parameter.nbytes for parameter in work.parameters if parameter.is_trainable}
    in_backward, events = False, list[Event]()
    for event in work.events:
        in_backward = in_backward or isinstance(event, BackwardBegins)
        if isinstance(event, Op):
            event = replace(event, flops=round(event.flops * factor), nbytes=round(event.nbytes * factor))
        elif isinstance(event, Allocate) and not (
            in_backward and event.kind is TensorKind.TEMPORARY and event.nbytes in sizes
        ):
            event = replace(event, nbytes=round(event.nbytes * factor))
        events.append(event)
    return replace(work, events=tuple(events), samples=round(work.samples * factor), tokens=round(work.tokens * factor))
