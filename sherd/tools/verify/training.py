"""A model in training for `verify_equivalence`, plain or sharded, what its steps show, and the expected steps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sherd.api.accumulate import accumulate
from sherd.api.unsharded import unsharded
from sherd.checkpoint.catalog import without_wrappers
from sherd.engine import Unit
from sherd.errors import PolicyError, PolicyTypeError
from sherd.policy import Codec
from sherd.tensor.structures import map_tensors, tensors_in

T = TypeVar("T")
Loss = Callable[[nn.Module, object], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

UPDATED = "updated parameter"
EVERY_PART = -1
STORED = ("buffer", UPDATED)
"""The kinds of values that change little in a step: a parameter that was not updated is almost right.

So a difference is measured against the change.
"""
NUM_DRAWS = 5
"""Disturbed trainings of a model whose values are rounded on their way between ranks."""
WIDTHS = tuple(torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16))
"""The relative errors for which a reference file has the differences that they explain."""


class Key(NamedTuple):
    """The name of a value that a step shows, for one part of the batch or for `EVERY_PART`."""

    kind: str
    name: str
    part: int = EVERY_PART


Shown = dict[Key, Tensor]
"""The values that a step shows, in the order in which the step computes them: full tensors in host memory."""


@dataclass(frozen=True)
class Wire:
    """The roundings of values of one unit's parameters, by plain names, on their way between ranks.

    Weights by the codecs `gathers`, gradients by the codecs, or numbers' relative errors, of `reductions`.
    """

    names: frozenset[str]
    gathers: tuple[Codec, ...]
    reductions: tuple[Codec | float, ...]


@dataclass(frozen=True)
class Recipe:
    """The choices that both trainings share. `watched` names the modules whose outputs are compared.

    With `is_exact` the sharded model adds gradients up in the order of parts, undivided, and so does the plain one.
    """

    loss: Loss
    optimizer: MakeOptimizer
    seed: int
    parts: int
    device: torch.device
    watched: frozenset[str]
    wires: tuple[Wire, ...] = ()
    is_exact: bool = False


class Disturbance:
    """Relative errors of `eps` with random signs, as of rounding, and those of `wires` as large as they may be.

    They are added to weights, to inputs, and to gradients after each part of a batch.
    """

    def __init__(self, eps: float, seed: int, wires: Sequence[Wire] = ()) -> None:
        self._eps, self._signs, self._wires = eps, torch.Generator().manual_seed(seed), wires

    def of(self, tensor: Tensor) -> Tensor:
        """Returns a disturbed copy of `tensor`, or `tensor` itself if it holds whole numbers."""
        if not is_inexact(tensor):
            return tensor
        return tensor * self._signs_for(tensor).mul_(self._eps).add_(1)

    def _signs_for(self, tensor: Tensor) -> Tensor:
        signs = torch.randint(2, tensor.shape, generator=self._signs).mul_(2).sub_(1)
        return signs.to(tensor.device, tensor.dtype)

    def _travels(self, sent: Mapping[str, Tensor], into: Mapping[str, Tensor], of_gradients: bool) -> None:
        """Add to `into` what wires may make of the values that are `sent`, by the names of parameters."""
        for wire in self._wires:
            names = [name for name in wire.names if name in sent and sent[name].is_floating_point()]
            most = max((largest(sent[name]) for name in names), default=0.0)
            for name, rounds in product(sorted(names), wire.reductions if of_gradients else wire.gathers):
                into[name].add_(self._signs_for(sent[name]).mul_(bound_of(rounds, sent[name], most)))

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """A context with disturbed weights in `model`, which leaves disturbed gradients."""
        before = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
        named = plainly_named(model.named_parameters()) if self._wires else {}
        with torch.no_grad():
            sent = {name: each.detach().clone() for name, each in named.items()}
            earlier = {name: each.grad.clone() for name, each in named.items() if each.grad is not None}
            for parameter, value in before:
                parameter.copy_(self.of(value))
            self._travels(sent, named, of_gradients=False)
        yield
        with torch.no_grad():
            gradients = {name: each.grad for name, each in named.items() if each.grad is not None}
            # Each part is sent by itself: its gradient alone, and not the sum with those before.
            sent = {name: each - earlier.get(name, 0) for name, each in gradients.items()}
            self._travels(sent, gradients, of_gradients=True)
            for parameter, value in before:
                parameter.copy_(value)
                if parameter.grad is not None:
                    parameter.grad.copy_(self.of(parameter.grad))


def bound_of(rounds: Codec | float, values: Tensor, most: float) -> Tensor:
    """Returns how far from each of `values` it may arrive, if the largest value in any block with it is `most`."""
    if isinstance(rounds, float):
        return values.abs() * rounds
    flat = values.flatten().to(torch.promote_types(values.dtype, torch.float32))
    # Blocks of the codec go across parameters, and end where shards do. Here the largest value is in each block.
    return rounds.bound(torch.stack((flat, torch.full_like(flat, most)), -1).flatten())[::2].view(values.shape)


class ComparedTraining:
    """`model` in training on the parts `own` of each batch.

    Each part has its own buffers (a batch norm's statistics), and random numbers that depend only on step and part.
    Gradients are the mean over `own`: a sharded model itself averages over its ranks.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, own: Sequence[int], disturbance: Disturbance | None = None
    ) -> None:
        self._model, self._recipe, self._own, self._disturbance = model, recipe, own, disturbance
        self._optimizer = recipe.optimizer([each for each in model.parameters() if each.requires_grad])
        self._buffers = {part: self._copied_buffers() for part in own}
        self._noted: dict[str, Tensor] | None = None
        for name, module in plainly_named(model.named_modules()).items():
            if name in recipe.watched:
                module.register_forward_hook(partial(self._note_output, name))

    def start(self) -> Shown:
        """Returns the parameters and buffers before the first step."""
        shown = {Key("initial parameter", name): value for name, (value, _) in whole_parameters(self._model).items()}
        return shown | {Key("initial buffer", *key[1:]): value for key, value in self._shown_buffers().items()}

    def step(self, number: int, parts: Mapping[int, object]) -> Shown:
        """Run forward and backward of step `number` on this training's part of `parts`. Returns what the step shows."""
        outputs, losses = {}, {}
        is_exact, is_sharded = self._recipe.is_exact, bool(Unit.below(self._model))
        with accumulate(self._model, len(self._own), average=True) if is_exact and is_sharded else nullcontext():
            for part in self._own:
                with torch.no_grad():
                    for name, buffer in self._model.named_buffers() if len(self._own) > 1 else ():
                        buffer.copy_(self._buffers[part].get(name, buffer))
                outputs[part], losses[part] = self._forward_and_backward(number, part, parts[part])
                self._buffers[part] = self._copied_buffers()
        for parameter in self._model.parameters() if is_exact and not is_sharded else ():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / len(self._own))
        names = dict.fromkeys(name for of_part in outputs.values() for name in of_part)
        shown = {
            Key("forward output", name, part): outputs[part][name]
            for name in names
            for part in self._own
            if name in outputs[part]
        }
        shown |= {Key("loss", "loss", part): loss for part, loss in losses.items()}
        # Backward begins at the last module, whose gradient is the first that can be wrong.
        gradients = reversed(whole_parameters(self._model, with_grads=True).items())
        return shown | {Key("gradient", name): gradient for name, (_, gradient) in gradients} | self._shown_buffers()

    def update(self, gradients: Mapping[str, Tensor]) -> Shown:
        """Step with `gradients`, the full gradients of the plain training. Returns the parameters.

        So all trainings begin each step with the same parameters. From its own gradients, Adam would make steps of
        opposite signs out of two roundings of zero.
        """
        with unsharded(self._model, writeback=True, with_grads=True), torch.no_grad():
            for name, parameter in plainly_named(self._model.named_parameters()).items():
                if parameter.grad is not None:
                    parameter.grad.copy_(_placed_as(parameter.grad, gradients[name]))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {Key(UPDATED, name): value for name, (value, _) in whole_parameters(self._model).items()}

    def bare_step(self, parts: Mapping[int, object]) -> Callable[[], None]:
        """Returns a function that makes a step on this training's part of `parts`, and shows nothing."""
        own = [map_tensors(lambda each: each.detach().to(self._recipe.device), parts[part]) for part in self._own]

        def step() -> None:
            for batch in own:
                (self._recipe.loss(self._model, batch) / len(own)).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

        return step

    def _forward_and_backward(self, number: int, part: int, batch: object) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the outputs of the watched modules, and the loss."""
        disturb = self._disturbance
        change = disturb.of if disturb else Tensor.clone
        batch = map_tensors(lambda tensor: change(tensor.detach().to(self._recipe.device)), batch)
        seed_all(self._recipe.seed + 1 + number * self._recipe.parts + part)
        with disturb.around(self._model) if disturb else nullcontext():
            noted: dict[str, Tensor] = {}
            self._noted = noted
            loss = self._recipe.loss(self._model, batch)
            self._noted = None  # outputs of recomputation in backward are not noted
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not is_inexact(loss):
                raise PolicyTypeError(
                    f"verify_equivalence(loss=...): it returned {str(loss)[:80]}; it must return the loss of (model, "
                    "batch), a tensor with one floating-point element"
                )
            (loss if self._recipe.is_exact else loss / len(self._own)).backward()
        return noted, whole(loss)

    def _note_output(self, name: str, module: nn.Module, args: object, output: object) -> None:
        if self._noted is None:
            return
        for place, tensor in enumerate(tensors_in(output)):
            self._noted.setdefault((name or "the model") + (f"[{place}]" if place else ""), whole(tensor))

    def _copied_buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def _shown_buffers(self) -> Shown:
        of_parts = {part: plainly_named(buffers.items()) for part, buffers in self._buffers.items()}
        return {
            Key("buffer", name, part): whole(buffer)
            for part, buffers in of_parts.items()
            for name, buffer in buffers.items()
        }


def whole_parameters(model: nn.Module, with_grads: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns each full parameter of `model` by its plain name, with its full gradient; a collective if sharded.

    A missing gradient is zeros. Without `with_grads`, gradients are empty tensors.
    """
    parameters = {}
    with unsharded(model, writeback=False, with_grads=with_grads), torch.no_grad():
        for name, parameter in plainly_named(model.named_parameters()).items():
            value, gradient = whole(parameter), parameter.grad if with_grads else torch.empty(0)
            parameters[name] = value, torch.zeros_like(value) if gradient is None else whole(gradient)
    return parameters


def whole(tensor: Tensor) -> Tensor:
    """Returns a copy of the full `tensor` in host memory; a collective for a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to("cpu", copy=True)


def _placed_as(like: Tensor, value: Tensor) -> Tensor:
    """Returns `value` on the device of `like`; if `like` is tensor parallel, only this rank's part."""
    value = value.to(like.device, like.dtype)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def plainly_named(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Returns modules or tensors by their names in the plain model. A wrapper comes before the module inside."""
    plainly: dict[str, T] = {}
    for path, value in named:
        plainly.setdefault(without_wrappers(path), value)
    return plainly


def is_inexact(tensor: Tensor) -> bool:
    """Returns whether `tensor` is of a dtype that rounds."""
    return tensor.is_floating_point() or tensor.is_complex()


def seed_all(seed: int) -> None:
    """Seed torch's generators on all devices, and Python's."""
    torch.manual_seed(seed)
    random.seed(seed)


def distances(one: Tensor, other: Tensor) -> Tensor:
    """Returns the absolute differences of two tensors of one shape, in double precision.

    Equal infinities do not differ, and two NaNs do not differ. A number differs infinitely from a NaN.
    """
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    apart = (one - other).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, apart)


def largest(tensor: Tensor) -> float:
    """Returns the largest finite absolute value in `tensor`, or 0."""
    sizes = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).abs()
    return float(torch.where(sizes.isfinite(), sizes, 0.0).max()) if tensor.numel() else 0.0


# The expected steps: of the plain training in one process, or of a file


class Expected(NamedTuple):
    """A tensor of the plain training.

    `size` is its largest absolute value, or the largest change of a stored tensor; `spacing` is the distance between
    neighbouring numbers at its largest value, if it is stored; `drifts` has, by relative errors, the differences that
    an error of this size explains.
    """

    value: Tensor
    size: float
    spacing: float
    drifts: Mapping[float, float]

    def allowed(self, eps: float, margin: float) -> float:
        """Returns the largest difference that computing with a relative precision of `eps` explains."""
        if not self.drifts or not is_inexact(self.value):
            return 0.0
        drift = self.drifts[min((width for width in self.drifts if width >= eps), default=max(self.drifts))]
        return margin * (drift + self.spacing)


ExpectedStep = dict[Key, Expected]


def train_plain(
    build: Callable[[], nn.Module], recipe: Recipe, widths: Sequence[float], batches: Sequence[Mapping[int, object]]
) -> Iterator[ExpectedStep]:
    """Yields what is expected before the first step, and then in each step.

    In addition to the plain training, one training runs for each of `widths`, with a relative error of this size in
    every weight, input and sum of gradients.
    """

    def training(disturbance: Disturbance | None) -> ComparedTraining:
        seed_all(recipe.seed)
        return ComparedTraining(build().to(recipe.device), recipe, range(recipe.parts), disturbance)

    plain = training(None)
    # One number, as a loss is, may by chance hardly change: codecs change it so much that this would be found.
    draws = range(recipe.seed, recipe.seed + (NUM_DRAWS if recipe.wires else 1))
    disturbed = {(eps, seed): training(Disturbance(eps, seed, recipe.wires)) for eps, seed in product(widths, draws)}
    before = plain.start()
    yield {key: Expected(value, largest(value), 0.0, {}) for key, value in before.items()}
    before = {Key(STORED["parameter" in key.kind], *key[1:]): value for key, value in before.items()}
    for number, parts in enumerate(batches, 1):
        shown, others = plain.step(number, parts), {key: other.step(number, parts) for key, other in disturbed.items()}
        gradients = {key.name: value for key, value in shown.items() if key.kind == "gradient"}
        shown |= plain.update(gradients)
        for other in disturbed.values():
            other.update(gradients)
        yield {
            key: _expected(key, value, before.get(key), [(eps, other.get(key)) for (eps, _), other in others.items()])
            for key, value in shown.items()
        }
        before = {key: value for key, value in shown.items() if key.kind in STORED}


def _expected(
    key: Key, value: Tensor, before: Tensor | None, others: Sequence[tuple[float, Tensor | None]]
) -> Expected:
    """Returns the expected `value`. A stored tensor has a value `before` the step."""
    if not is_inexact(value):
        return Expected(value, largest(value), 0.0, {})
    stored_eps = torch.finfo(value.dtype).eps
    size = largest(value) if before is None else largest(value - before)
    spacing = 0.0 if before is None else stored_eps * largest(value)
    if key.kind == UPDATED:  # gradients are equal, so only the optimizer rounds
        return Expected(value, size, spacing, dict.fromkeys(dict(others), stored_eps * size))
    drifts = {eps: eps * size for eps, _ in others}
    for eps, other in others:
        drifts[eps] = max(drifts[eps], 0.0 if other is None else largest(distances(value, other)))
    return Expected(value, size, spacing, drifts)


def stored_steps(path: Path, made_with: Mapping[str, object]) -> Iterator[ExpectedStep]:
    """Yields the expected steps in a file, which must have been `made_with` the same arguments.

    Raises:
        PolicyError: the file cannot be read, or was made with other arguments.
    """
    where = f"verify_equivalence(reference={str(path)!r})"
    try:
        read = torch.load(path, map_location="cpu", weights_only=True)
        differing = [name for name, value in made_with.items() if read["made_with"][name] != value]
    except Exception as error:
        raise PolicyError(f"{where}: it cannot be read ({error}); write it with save_reference=") from error
    if differing:
        raise PolicyError(f"{where}: it was made with other {' and '.join(differing)}; give the same, or save again")
    for step in read["steps"]:
        yield {Key(*key): Expected(*expected) for key, expected in step}


def save(path: Path, made_with: Mapping[str, object], steps: Sequence[ExpectedStep]) -> None:
    """Write a file for `stored_steps`."""
    plain = [[(tuple(key), tuple(expected)) for key, expected in step.items()] for step in steps]
    torch.save({"made_with": dict(made_with), "steps": plain}, path)
