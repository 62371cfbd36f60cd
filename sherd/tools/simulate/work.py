"""The work of one rank in one micro-batch, as it was read from a model: operations, and tensors that come and go.

It says nothing about sharding: a `Sharded` model says which modules are units. Modules and parameters are named by
index, tensors by a number that is used once. The events of a step stand in their order:

    forward     Enter module   Use parameter   Op ...   Collective   Allocate   Release   Leave module
    EndForward
    backward    Reached module   Op ...   Collective   Gradient parameter   Allocate   Release   Passed module
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
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
        nbytes: the bytes of the whole tensor; see `costs.collective_seconds`.
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
class BackwardBegins:
    """The loss is computed; backward begins."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Backward has reached the outputs of a module."""

    module: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """Autograd hands over the whole gradient of a parameter.

    From now on its memory belongs to the receiver. The temporary that it was until now is released just before.
    """

    parameter: int


@dataclass(frozen=True, slots=True)
class Passed:
    """Backward is past the inputs of a module."""

    module: int


Event = Enter | Leave | Use | Op | Collective | Wait | Allocate | Release | BackwardBegins | Reached | Gradient | Passed


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
        """The number of elements."""
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
