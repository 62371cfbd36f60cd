"""The reference of a sharded training: the plain training in one process, or a file that one has written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sherd.errors import PolicyError
from sherd.tools.verify.report import distances, largest
from sherd.tools.verify.training import UPDATED, Disturbance, Key, Recipe, Training, is_inexact, seed_all

WIDTHS = tuple(torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16))
"""The spacing of numbers in the dtypes that a file serves."""

STORED = ("buffer", UPDATED)
"""The kinds of values that change little in a step. A difference is measured against the change: a parameter that was
not updated at all is still almost right."""


class Expected(NamedTuple):
    """A tensor of the plain training.

    `size` is its largest absolute value, or that of its change; `spacing` how far neighbours of that value are apart
    where it is stored; `drifts` the difference that one error of a given relative size explains.
    """

    value: Tensor
    size: float
    spacing: float
    drifts: Mapping[float, float]

    def allowed(self, eps: float, margin: float) -> float:
        """Returns the largest difference that computing with numbers `eps` apart explains."""
        if not self.drifts or not is_inexact(self.value):
            return 0.0
        drift = self.drifts[min((width for width in self.drifts if width >= eps), default=max(self.drifts))]
        return margin * (drift + self.spacing)


ExpectedStep = dict[Key, Expected]


def train_plain(
    build: Callable[[], nn.Module], recipe: Recipe, widths: Sequence[float], batches: Sequence[Mapping[int, object]]
) -> Iterator[ExpectedStep]:
    """Yields what is there before the first step, and then what each step shows.

    Beside the plain training runs one for each of `widths` in which every weight, input and sum is off by that much.
    """

    def training(disturbance: Disturbance | None) -> Training:
        seed_all(recipe.seed)
        return Training(build().to(recipe.device), recipe, range(recipe.parts), disturbance)

    plain, disturbed = training(None), {eps: training(Disturbance(eps, recipe.seed)) for eps in widths}
    before = plain.start()
    yield {key: Expected(value, largest(value), 0.0, {}) for key, value in before.items()}
    before = {Key(STORED["parameter" in key.kind], *key[1:]): value for key, value in before.items()}
    for number, parts in enumerate(batches, 1):
        shown, others = plain.step(number, parts), {eps: each.step(number, parts) for eps, each in disturbed.items()}
        gradients = {key.name: value for key, value in shown.items() if key.kind == "gradient"}
        shown |= plain.update(gradients)
        for each in disturbed.values():
            each.update(gradients)
        yield {
            key: _expected(key, value, before.get(key), {eps: other.get(key) for eps, other in others.items()})
            for key, value in shown.items()
        }
        before = {key: value for key, value in shown.items() if key.kind in STORED}


def _expected(key: Key, value: Tensor, before: Tensor | None, others: Mapping[float, Tensor | None]) -> Expected:
    """`before` is the value before the step, of what is stored."""
    if not is_inexact(value):
        return Expected(value, largest(value), 0.0, {})
    stored_eps = torch.finfo(value.dtype).eps
    size = largest(value) if before is None else largest(value - before)
    spacing = 0.0 if before is None else stored_eps * largest(value)
    if key.kind == UPDATED:  # by equal gradients, in the optimizer's precision
        return Expected(value, size, spacing, dict.fromkeys(others, stored_eps * size))
    measured = {eps: 0.0 if other is None else largest(distances(value, other)) for eps, other in others.items()}
    return Expected(value, size, spacing, {eps: max(drift, eps * size) for eps, drift in measured.items()})


def stored_steps(path: Path, made_with: Mapping[str, object]) -> Iterator[ExpectedStep]:
    """Yields what a file holds, which must have been `made_with` the same.

    Raises:
        PolicyError: it was not, or cannot be read.
    """
    where = f"verify_equivalence(reference={str(path)!r})"
    try:
        read = torch.load(path, map_location="cpu", weights_only=True)
        differing = [name for name, value in made_with.items() if read["made_with"][name] != value]
    except Exception as error:
        raise PolicyError(f"{where}: it cannot be read ({error}); write it with save_reference=") from error
    if differing:
        raise PolicyError(f"{where}: it was made with other {' and '.join(differing)}; give the same, or write it anew")
    for step in read["steps"]:
        yield {Key(*key): Expected(*expected) for key, expected in step}


def save(path: Path, made_with: Mapping[str, object], steps: Sequence[ExpectedStep]) -> None:
    """Write a file for `stored_steps`."""
    plain = [[(tuple(key), tuple(expected)) for key, expected in step.items()] for step in steps]
    torch.save({"made_with": dict(made_with), "steps": plain}, path)
