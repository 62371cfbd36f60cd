"""The work of one rank in one micro-batch, as it was read from a model: operations, and tensors that come and go.

It says nothing of sharding: whoever plays it decides which modules are units. Modules and parameters are named by their
index, tensors by a number that is used once. The events of a step stand in the order in which they happen:

    forward     Enter module   Use parameter   Op ...   Collective   Allocate   Release   Leave module
    EndForward
    backward    Reached module   Op ...   Collective   Gradient parameter   Allocate   Release   Passed module
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class OpKind(str, Enum):
    """The kinds of operations that are told apart by what bounds their speed."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    """Norms, softmax, sums, losses."""
    LOOKUP = "lookup"
    """Embeddings, and other reading by an index."""
    COPY = "copy"


class TensorKind(str, Enum):
    """The purpose of a tensor that is no buffer of the engine. The value is its name in tables."""

    INPUT = "inputs"
    ACTIVATION = "activations"
    """Made in forward, and read in backward."""
    LOGITS = "logits"
    """An activation that has the size of the vocabulary for each token, and what the loss makes of it."""
    TEMPORARY = "temporaries"
    """Made and freed in the same pass, forward or backward."""


@dataclass(frozen=True, slots=True)
class Enter:
    """The forward of a module begins. `again`: activation checkpointing runs it once more, within backward.

    `inputs`: the tensors that it was given, as far as they were allocated.
    """

    module: int
    again: bool = False
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Leave:
    """The forward of a module ends. `outputs`: the tensors that it returns."""

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
        name: as torch calls it, without overload: `aten.mm`.
        flops: floating-point operations; a multiply and an add are two.
        nbytes: bytes that it reads and writes, each tensor once.
        dtype: of its result, by torch's name: `bfloat16`.
        depth: the length of the sums in a matrix product or convolution; in attention the width of a head; else 0.
        computed: the share of `flops` that its kernel computes: causal attention leaves out what no token may see.
    """

    kind: OpKind
    name: str
    flops: int
    nbytes: int
    dtype: str
    depth: int = 0
    computed: float = 1.0


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a process group: so many, and from one to the next a number of ranks apart, about."""

    size: int
    stride: int = 1


ALONE = Group(1)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that forward or backward itself calls, as on the axes of tensor, context and expert parallelism.

    Attributes:
        kind: all-gather, reduce-scatter, all-reduce, broadcast, all-to-all or send.
        nbytes: of the whole tensor; see `costs.collective_seconds`.
    """

    kind: str
    nbytes: int
    group: Group


@dataclass(frozen=True, slots=True)
class Allocate:
    """Memory is taken for a tensor. Views take none; a gradient is a temporary until `Gradient`."""

    tensor: int
    nbytes: int
    kind: TensorKind


@dataclass(frozen=True, slots=True)
class Release:
    """The last reference to a tensor is gone."""

    tensor: int


@dataclass(frozen=True, slots=True)
class EndForward:
    """The loss is computed; backward begins."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Backward has reached the outputs of a module."""

    module: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """Autograd has made the gradient of a parameter, whole, and hands it over.

    From now on its memory is whoever's this is handed to. Until now it was a temporary's, which was released just
    before.
    """

    parameter: int


@dataclass(frozen=True, slots=True)
class Passed:
    """Backward is past the inputs of a module."""

    module: int


Event = Enter | Leave | Use | Op | Collective | Allocate | Release | EndForward | Reached | Gradient | Passed


@dataclass(frozen=True, slots=True)
class Module:
    """A module: its name as `named_modules` gives it, its class, and the module around it, None for the root."""

    name: str
    kind: str
    parent: int | None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, or this rank's part if it is cut over ranks that read the same samples: its name, the module that
    holds it, its shape, its dtype by torch's name, and its bytes."""

    name: str
    module: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    is_trainable: bool = True

    @property
    def numel(self) -> int:
        """The number of elements."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel


@dataclass(frozen=True)
class Work:
    """A micro-batch of a model on one rank. Modules and parameters stand in the order of registration, the root first.

    Attributes:
        tokens: of the micro-batch: samples times length, also where ranks share them; 0 if the model reads none.
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
        """The dtype in which most of the matrix products are computed."""
        flops: Counter[str] = Counter()
        for event in self.events:
            if isinstance(event, Op) and event.kind in (OpKind.MATMUL, OpKind.ATTENTION):
                flops[event.dtype] += event.flops
        return flops.most_common(1)[0][0] if flops else "float32"
