"""A model in training for `verify_equivalence`, plain or sharded, and all that a step of it shows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sherd.api.unsharded import unsharded
from sherd.errors import PolicyTypeError
from sherd.tensor.structures import map_tensors, tensors_in
from sherd.wrap.names import plain_name

T = TypeVar("T")
Loss = Callable[[nn.Module, object], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

UPDATED = "updated parameter"
EVERY_PART = -1
WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod"}
"""The parts of names that activation checkpointing and `torch.compile` put in."""


class Key(NamedTuple):
    """One thing that a step shows: of one part of the batch, or of `EVERY_PART`."""

    kind: str
    name: str
    part: int = EVERY_PART


Shown = dict[Key, Tensor]
"""The values that a step shows, in the order in which it came about: whole tensors in host memory."""


@dataclass(frozen=True)
class Recipe:
    """The choices that both trainings share. `watched` are the modules whose outputs are compared."""

    loss: Loss
    optimizer: MakeOptimizer
    seed: int
    parts: int
    device: torch.device
    watched: frozenset[str]


class Disturbance:
    """Relative errors of `eps` with random signs, as rounding makes them: in weights, in inputs, and in gradients each
    time that those of a part were added."""

    def __init__(self, eps: float, seed: int) -> None:
        self._eps, self._signs = eps, torch.Generator().manual_seed(seed)

    def of(self, tensor: Tensor) -> Tensor:
        """Returns a disturbed copy of `tensor`; the tensor itself if it holds whole numbers."""
        if not is_inexact(tensor):
            return tensor
        signs = torch.randint(2, tensor.shape, generator=self._signs).mul_(2).sub_(1)
        return tensor * signs.to(tensor.device, tensor.dtype).mul_(self._eps).add_(1)

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """A forward and backward inside sees disturbed weights, and leaves disturbed gradients."""
        before = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(self.of(value))
        yield
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value)
                if parameter.grad is not None:
                    parameter.grad.copy_(self.of(parameter.grad))


class Training:
    """`model` in training on the parts `own` of each batch.

    Each part has buffers of its own (a batch norm's statistics), and random numbers that depend on step and part alone.
    Gradients are the mean over the parts: a sharded model averages over its ranks by itself.
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
        """Go forward and backward in step `number`, on its own ones of `parts`; returns all that this shows."""
        outputs, losses = {}, {}
        for part in self._own:
            with torch.no_grad():
                for name, buffer in self._model.named_buffers() if len(self._own) > 1 else ():
                    buffer.copy_(self._buffers[part].get(name, buffer))
            outputs[part], losses[part] = self._forward_and_backward(number, part, parts[part])
            self._buffers[part] = self._copied_buffers()
        names = dict.fromkeys(name for each in outputs.values() for name in each)
        shown = {
            Key("forward output", name, part): outputs[part][name]
            for name in names
            for part in self._own
            if name in outputs[part]
        }
        shown |= {Key("loss", "loss", part): loss for part, loss in losses.items()}
        # Backward begins at the end: the first gradient that is wrong is that of the last module.
        gradients = reversed(whole_parameters(self._model, with_grads=True).items())
        return shown | {Key("gradient", name): gradient for name, (_, gradient) in gradients} | self._shown_buffers()

    def update(self, gradients: Mapping[str, Tensor]) -> Shown:
        """Step with these `gradients`, the whole ones of the plain training; returns the parameters.

        So all trainings begin each step at the same point. With gradients of their own, Adam would make steps of
        opposite sign out of two roundings of zero.
        """
        with unsharded(self._model, writeback=True, with_grads=True), torch.no_grad():
            for name, parameter in plainly_named(self._model.named_parameters()).items():
                if parameter.grad is not None:
                    parameter.grad.copy_(_placed_as(parameter.grad, gradients[name]))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {Key(UPDATED, name): value for name, (value, _) in whole_parameters(self._model).items()}

    def _forward_and_backward(self, number: int, part: int, batch: object) -> tuple[dict[str, Tensor], Tensor]:
        """Returns what the watched modules have put out, and the loss."""
        disturb = self._disturbance
        change = disturb.of if disturb else Tensor.clone
        batch = map_tensors(lambda tensor: change(tensor.detach().to(self._recipe.device)), batch)
        seed_all(self._recipe.seed + 1 + number * self._recipe.parts + part)
        with disturb.around(self._model) if disturb else nullcontext():
            noted: dict[str, Tensor] = {}
            self._noted = noted
            loss = self._recipe.loss(self._model, batch)
            self._noted = None  # what recomputation runs in backward is not noted again
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not is_inexact(loss):
                raise PolicyTypeError(
                    f"verify_equivalence(loss=...): it returned {str(loss)[:80]}; it must return the loss of (model, "
                    "batch), a tensor with one floating-point element"
                )
            (loss / len(self._own)).backward()
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
        return {Key("buffer", name, part): whole(each) for part in of_parts for name, each in of_parts[part].items()}


def whole_parameters(model: nn.Module, with_grads: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns each parameter of `model` by its plain name, whole, and its gradient, zero where there is none (empty
    without `with_grads`). A collective for a sharded model."""
    found = {}
    with unsharded(model, writeback=False, with_grads=with_grads), torch.no_grad():
        for name, parameter in plainly_named(model.named_parameters()).items():
            value, gradient = whole(parameter), parameter.grad if with_grads else torch.empty(0)
            found[name] = value, torch.zeros_like(value) if gradient is None else whole(gradient)
    return found


def whole(tensor: Tensor) -> Tensor:
    """Returns a copy of all of `tensor`, in host memory; a collective for a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to("cpu", copy=True)


def _placed_as(like: Tensor, value: Tensor) -> Tensor:
    """Returns this rank's part of the whole `value` if `like` is tensor parallel."""
    value = value.to(like.device, like.dtype)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def plainly_named(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Returns modules or tensors by their names in the plain model; of several with one name the outermost."""
    found: dict[str, T] = {}
    for path, each in named:
        found.setdefault(".".join(part for part in plain_name(path).split(".") if part not in WRAPPERS), each)
    return found


def is_inexact(tensor: Tensor) -> bool:
    """Returns whether `tensor` holds numbers that were rounded."""
    return tensor.is_floating_point() or tensor.is_complex()


def seed_all(seed: int) -> None:
    """Seed torch's generators on all devices, and Python's."""
    torch.manual_seed(seed)
    random.seed(seed)
