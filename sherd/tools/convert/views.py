"""Tensors made of others: transposed, permuted, joined and cut, and read by parts like these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sherd.checkpoint.tensor_bytes import DTYPES
from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, whole
from sherd.layout.extent import Extent
from sherd.tools.convert.contents import Lazy, Spec


def _read(of: Lazy, part: Box, most_bytes: int) -> torch.Tensor:
    read = torch.empty(part.sizes, dtype=DTYPES[of.spec.dtype])
    of.read_into(part, read, most_bytes)
    return read


@dataclass(frozen=True)
class Transposed:
    """A matrix, transposed."""

    of: Lazy

    @property
    def spec(self) -> Spec:
        """Its dtype and shape."""
        return replace(self.of.spec, shape=self.of.spec.shape[::-1])

    def read_into(self, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part`."""
        below = Box(part.offsets[::-1], part.sizes[::-1])
        target.copy_(_read(self.of, below, most_bytes).t())


@dataclass(frozen=True)
class Permuted:
    """A matrix whose rows are of `heads`; those of the two halves of each head take turns, or `apart` come apart."""

    of: Lazy
    heads: int
    apart: bool

    @property
    def spec(self) -> Spec:
        """Its dtype and shape."""
        return self.of.spec

    def read_into(self, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part`. All rows of the heads that it has rows of are read, one head at a time."""
        width = self.spec.shape[0] // self.heads
        for head in range(part.offsets[0] // width, -(-(part.offsets[0] + part.sizes[0]) // width)):
            rows = Box((head * width, *part.offsets[1:]), (width, *part.sizes[1:]))
            shared = rows.intersect(part)
            if shared is not None:
                parted = (width // 2, 2) if self.apart else (2, width // 2)
                read = _read(self.of, rows, most_bytes).view(*parted, *part.sizes[1:]).transpose(0, 1)
                target[shared.within(part)] = read.reshape(rows.sizes)[shared.within(rows)]


@dataclass(frozen=True)
class Joined:
    """Tensors one behind the other along `dim`."""

    parts: tuple[Lazy, ...]
    dim: int

    @property
    def spec(self) -> Spec:
        """Its dtype and shape."""
        first = self.parts[0].spec
        shape = list(first.shape)
        shape[self.dim] = sum(part.spec.shape[self.dim] for part in self.parts)
        return replace(first, shape=tuple(shape))

    def read_into(self, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part`."""
        everything, start = whole(self.spec.shape), 0
        for of in self.parts:
            size = of.spec.shape[self.dim]
            shared = everything.narrowed(self.dim, Extent(start, size)).intersect(part)
            if shared is not None:
                offsets = list(shared.offsets)
                offsets[self.dim] -= start
                of.read_into(Box(tuple(offsets), shared.sizes), target[shared.within(part)], most_bytes)
            start += size


@dataclass(frozen=True)
class Cut:
    """The part `box` of a tensor."""

    of: Lazy
    box: Box

    @property
    def spec(self) -> Spec:
        """Its dtype and shape."""
        return replace(self.of.spec, shape=self.box.sizes)

    def read_into(self, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part`."""
        offsets = tuple(a + b for a, b in zip(self.box.offsets, part.offsets, strict=True))
        self.of.read_into(Box(offsets, part.sizes), target, most_bytes)


@dataclass(frozen=True)
class Stacked:
    """Tensors of one shape, along a new first dim."""

    parts: tuple[Lazy, ...]

    @property
    def spec(self) -> Spec:
        """Its dtype and shape."""
        first = self.parts[0].spec
        return replace(first, shape=(len(self.parts), *first.shape))

    def read_into(self, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part`."""
        below = Box(part.offsets[1:], part.sizes[1:])
        for number in range(part.sizes[0]):
            self.parts[part.offsets[0] + number].read_into(below, target[number], most_bytes)


@dataclass(frozen=True)
class Row:
    """Element `number` of the first dim of a tensor."""

    of: Lazy
    number: int

    @property
    def spec(self) -> Spec:
        """Its dtype and shape."""
        return replace(self.of.spec, shape=self.of.spec.shape[1:])

    def read_into(self, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part`."""
        below = Box((self.number, *part.offsets), (1, *part.sizes))
        self.of.read_into(below, target.unsqueeze(0), most_bytes)


def transposed(of: Lazy, name: str) -> Lazy:
    """Returns `of` transposed. Raises CheckpointError if it is no matrix."""
    if len(of.spec.shape) != 2:
        raise CheckpointError(f"{name} of shape {of.spec.shape} is no matrix, so it cannot be transposed")
    return of.of if isinstance(of, Transposed) else Transposed(of)


def permuted(of: Lazy, heads: int, apart: bool, name: str) -> Lazy:
    """Returns `of` with the rows of its heads in another order. Raises CheckpointError if they do not divide."""
    shape = of.spec.shape
    if not shape or shape[0] % (2 * heads):
        raise CheckpointError(f"{name} of shape {shape} has no even number of rows for each of {heads} heads")
    return Permuted(of, heads, apart)


def joined(parts: Sequence[Lazy], dim: int, ratio: Sequence[int], name: str) -> Lazy:
    """Returns `parts` one behind the other. Raises CheckpointError if they do not fit, or are not in `ratio`."""
    shapes = [part.spec.shape for part in parts]
    others = {(part.spec.dtype, *(n for at, n in enumerate(part.spec.shape) if at != dim)) for part in parts}
    if any(dim >= len(shape) for shape in shapes) or len(others) > 1:
        raise CheckpointError(f"{name}: tensors of shapes {shapes} cannot be joined along dim {dim}")
    sizes = [shape[dim] for shape in shapes]
    if list(sizes) != _sizes(sum(sizes), ratio or [1] * len(sizes), name):
        raise CheckpointError(f"{name}: its parts have sizes {sizes}, so the rule needs ratio, as in {sizes}")
    return Joined(tuple(parts), dim)


def cut(of: Lazy, dim: int, ratio: Sequence[int], name: str) -> list[Lazy]:
    """Returns the parts of `of` along `dim`. Raises CheckpointError if it does not divide."""
    shape = of.spec.shape
    if dim >= len(shape):
        raise CheckpointError(f"{name} of shape {shape} has no dim {dim}")
    found: list[Lazy] = []
    start = 0
    for size in _sizes(shape[dim], ratio, name):
        found.append(Cut(of, whole(shape).narrowed(dim, Extent(start, size))))
        start += size
    return found


def _sizes(size: int, ratio: Sequence[int], name: str) -> list[int]:
    if not sum(ratio) or size % sum(ratio):
        raise CheckpointError(f"{name}: {size} does not divide into parts of ratio {list(ratio)}")
    return [size // sum(ratio) * each for each in ratio]


def stacked(parts: Sequence[Lazy], name: str) -> Lazy:
    """Returns `parts` along a new first dim. Raises CheckpointError if their shapes or dtypes differ."""
    if len({part.spec for part in parts}) > 1:
        raise CheckpointError(f"{name}: tensors of other shapes or dtypes cannot be stacked")
    return Stacked(tuple(parts))
