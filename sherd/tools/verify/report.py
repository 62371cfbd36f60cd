"""The report of `verify_equivalence`, and the difference of each tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sherd.errors import EquivalenceError
from sherd.tools.verify.training import Key

__all__ = ["Difference", "EquivalenceReport"]

KINDS = ("initial parameter", "initial buffer", "forward output", "loss", "gradient", "buffer", "updated parameter")
"""In the order in which a step comes to them."""

MOST_LINES = 12


@dataclass(frozen=True)
class Difference:
    """How far one tensor is from that of the plain training.

    Attributes:
        kind: "initial parameter", "initial buffer", "forward output", "loss", "gradient", "buffer" or "updated
            parameter".
        name: the parameter or buffer, or the module that put it out, by its name in the plain model.
        step: counted from 1; 0 is before the first step.
        rank: the rank that has it; of parameters, gradients and buffers, one that has gathered it from all.
        index: the element that differs most, which is `found` and should be `expected`.
        absolute: the largest difference.
        relative: that over the largest absolute value of the tensor; of updated parameters and buffers, over the
            largest change in the step.
        allowed: the largest absolute difference that the dtype explains.
        problem: what is wrong with the whole tensor, such as another shape; else empty.
    """

    kind: str
    name: str
    step: int
    rank: int
    index: tuple[int, ...] = ()
    found: float = math.nan
    expected: float = math.nan
    absolute: float = math.inf
    relative: float = math.inf
    allowed: float = 0.0
    problem: str = ""

    @property
    def share(self) -> float:
        """The difference over what is allowed: above 1 the dtype does not explain it."""
        return 0.0 if self.absolute == 0 else self.absolute / self.allowed if self.allowed else math.inf

    def __str__(self) -> str:
        holder = "on" if self.kind in ("forward output", "loss") else "as gathered by"
        where = f"step {self.step}, {self.kind} of {self.name} {holder} rank {self.rank}"
        return f"{where}: " + (
            self.problem
            or f"{self.found:.9g} at {list(self.index)}, expected {self.expected:.9g}; off by {self.absolute:.3g} "
            f"(relative {self.relative:.2g}), allowed is {self.allowed:.2g}"
        )


@dataclass(frozen=True)
class EquivalenceReport:
    """The findings of `verify_equivalence`. Every rank gets the same; `str()` is a table.

    Attributes:
        differences: all tensors of the first step with a difference that the dtype does not explain, the first one
            first: forward outputs, losses, gradients from the last module to the first, buffers, parameters.
        closest: for each kind, the tensor that came nearest to what is allowed, or went too far.
        counts: for each kind, how many tensors were compared, over all ranks and steps.
        steps: how many steps were compared.
        setting: what was compared with what, in words.
    """

    differences: tuple[Difference, ...]
    closest: Mapping[str, Difference]
    counts: Mapping[str, int]
    steps: int
    setting: str

    @property
    def ok(self) -> bool:
        """Whether nothing differs by more than the dtype explains."""
        return not self.differences

    @property
    def first_difference(self) -> Difference | None:
        """The first of `differences`; None if the trainings are equivalent."""
        return self.differences[0] if self.differences else None

    def require(self) -> None:
        """Raise an `EquivalenceError`, with the table, unless the trainings are equivalent."""
        if not self.ok:
            raise EquivalenceError(f"the sharded model does not train as the plain one.\n{self}")

    def __str__(self) -> str:
        lines = [f"{'equivalent' if self.ok else 'NOT equivalent'}, {self.steps} steps: {self.setting}"]
        lines += [f"  {'then' if at else 'first'}: {each}" for at, each in enumerate(self.differences[:MOST_LINES])]
        if len(self.differences) > MOST_LINES:
            lines.append(f"  and {len(self.differences) - MOST_LINES} more in this step")
        lines.append("  compared             number  off by   allowed  share  closest to its limit")
        for kind in (kind for kind in KINDS if kind in self.closest):
            at = self.closest[kind]
            share = f"{at.share:.0%}" if at.share < 10 else ">10x"
            figures = f"{self.counts[kind]:>6}  {at.absolute:7.1e}  {at.allowed:7.1e}  {share:>5}"
            lines.append(f"  {kind:20} {figures}  {at.name}, step {at.step}, rank {at.rank}")
        return "\n".join(lines)


def difference(
    key: Key, step: int, rank: int, found: Tensor | None, expected: Tensor | None, size: float, allowed: float
) -> Difference:
    """Returns how far `found` is from `expected`, two whole tensors; None stands for one that is not there."""
    if found is None or expected is None:
        return Difference(
            *key[:2], step, rank, problem=f"the {'plain' if found is None else 'sharded'} model alone has it"
        )
    if found.shape != expected.shape:
        problem = f"its shape is {list(found.shape)}, expected {list(expected.shape)}"
        return Difference(*key[:2], step, rank, problem=problem)
    if not found.numel():
        return Difference(*key[:2], step, rank, (), 0.0, 0.0, 0.0, 0.0, allowed)
    apart = distances(found, expected).flatten()
    at = int(apart.argmax())
    absolute = float(apart[at])
    index = tuple(int(each) for each in torch.unravel_index(torch.tensor(at), found.shape))
    is_there, should_be = (each.flatten()[at] for each in (found, expected))
    relative = absolute / size if size else math.inf if absolute else 0.0
    return Difference(*key[:2], step, rank, index, _number(is_there), _number(should_be), absolute, relative, allowed)


def _number(element: Tensor) -> float:
    return float(element.abs() if element.is_complex() else element)


def distances(one: Tensor, other: Tensor) -> Tensor:
    """Returns the absolute differences of two tensors of one shape in double precision. Equal infinities, and two
    values that are no numbers, do not differ; a number is infinitely far from what is none."""
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    apart = (one - other).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, apart)


def largest(tensor: Tensor) -> float:
    """Returns the largest finite absolute value in `tensor`; 0 if there is none."""
    sizes = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).abs()
    return float(torch.where(sizes.isfinite(), sizes, 0.0).max()) if tensor.numel() else 0.0
