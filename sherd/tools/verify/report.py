"""The report of `verify_equivalence`, and the difference of each tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sherd.errors import EquivalenceError
from sherd.tools.verify.capture import CaptureReport
from sherd.tools.verify.training import Key, distances

KINDS = ("initial parameter", "initial buffer", "forward output", "loss", "gradient", "buffer", "updated parameter")
"""In the order in which a step computes them."""

MOST_LINES = 12


@dataclass(frozen=True)
class Difference:
    """How far one tensor is from the same tensor of the plain training.

    Attributes:
        kind: "initial parameter", "initial buffer", "forward output", "loss", "gradient", "buffer" or "updated
            parameter".
        name: of the parameter, the buffer, or the module with this output, in the plain model.
        step: counted from 1; 0 is before the first step.
        rank: the rank with this tensor; parameters, gradients and buffers were gathered from all ranks.
        index: of the element that differs most.
        found: its value.
        expected: its value in the plain training.
        absolute: the largest difference.
        relative: the same over the largest absolute value of the tensor; for updated parameters and buffers, over the
            largest change in the step.
        allowed: the largest absolute difference that the dtype explains.
        problem: what is wrong with the tensor altogether, such as another shape; else empty.
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
        """The difference over the allowed one. Above 1, the dtype does not explain it."""
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
    """The findings of `verify_equivalence`, the same on every rank. `str()` is a table.

    Attributes:
        differences: all unexplained differences of the first step that has any, in the order of the step: forward
            outputs, losses, gradients from the last module to the first, buffers, parameters.
        closest: by kind, the tensor with the largest share of the allowed difference.
        counts: by kind, the number of compared tensors, over all ranks and steps.
        steps: the number of compared steps.
        setting: what was compared, in words.
        capture: what `capturable` says of a step of the sharded model, where `verify_equivalence` was asked to ask it.
    """

    differences: tuple[Difference, ...]
    closest: Mapping[str, Difference]
    counts: Mapping[str, int]
    steps: int
    setting: str
    capture: CaptureReport | None = None

    @property
    def ok(self) -> bool:
        """True if the dtype explains all differences."""
        return not self.differences

    @property
    def first_difference(self) -> Difference | None:
        """The first of `differences`, or None if the trainings are equivalent."""
        return self.differences[0] if self.differences else None

    def require(self) -> None:
        """Raise `EquivalenceError`, with the table, unless the trainings are equivalent."""
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
        lines += [f"  {line}" for line in str(self.capture).splitlines()] if self.capture is not None else []
        return "\n".join(lines)


def difference(
    key: Key, step: int, rank: int, found: Tensor | None, expected: Tensor | None, size: float, allowed: float
) -> Difference:
    """Returns how far `found` is from `expected`, two full tensors. A missing tensor is None."""
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
    index = tuple(int(place) for place in torch.unravel_index(torch.tensor(at), found.shape))
    elements = (tensor.flatten()[at] for tensor in (found, expected))
    value, expected_value = (float(element.abs() if element.is_complex() else element) for element in elements)
    relative = absolute / size if size else math.inf if absolute else 0.0
    return Difference(*key[:2], step, rank, index, value, expected_value, absolute, relative, allowed)
