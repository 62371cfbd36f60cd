"""Read the work of a training step from a model: one forward and backward on the meta device, in which nothing is
allocated and nothing computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sherd.engine.run.structures import tensors_in
from sherd.planning.operations import kernels_of
from sherd.planning.recording import Recording
from sherd.simulate.work import Module, Parameter, Work
from sherd.train.config import InputError
from sherd.verify.equivalence import own_loss

__all__ = ["Loss", "read_work"]

Loss = Callable[[nn.Module, Any], Tensor]
"""Of a model and a batch, a scalar: the loss."""


def read_work(model: nn.Module, batch: Any, loss: Loss = own_loss, device_type: str = "cuda") -> Work:
    """Returns the work of one micro-batch: what forward and backward of `loss(model, batch)` do, in order.

    Memory is exact up to what a kernel takes for itself while it runs, which no operation of torch shows.

    Args:
        model: plain, on the meta device, its floating-point parameters in the dtype that forward computes in.
        batch: tensors on the meta device, in whatever containers.
        loss: the loss of (model, batch). By default the `loss` in the model's output, else the mean square of the
            output; a batch that is a tuple, list or dict is given as arguments.
        device_type: the type of device whose kernels are taken: "cpu", or any other for CUDA's.

    Raises:
        InputError: a parameter, buffer or tensor of the batch has values, or forward or backward needs them.
    """
    modules = list(model.named_modules())
    _require_meta(model, batch)
    given = tensors_in(batch)
    recording = Recording(list(model.parameters()), list(model.buffers()), given)
    numbers = {module: number for number, (_, module) in enumerate(modules)}
    handles = [handle for module in numbers for handle in _call_hooks(module, numbers[module], recording)]
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(partial(_hand_over, recording, number)))
    try:
        with torch.device("meta"), kernels_of(device_type), recording:
            with torch.enable_grad():
                value = loss(model, batch)
            recording.end_forward(value)
            with torch.no_grad():  # what runs with gradients in backward is a forward that runs again
                value.backward()
            del value
    except Exception as error:
        where = recording.failed_in
        place = "the loss" if where is None else modules[where][0] or "the model"
        kind = "" if where is None else f" ({type(modules[where][1]).__name__})"
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(f"{place}{kind} does not run without values: {said}") from error
    finally:
        for handle in handles:
            handle.remove()
    whole_numbers = [each for each in given if not each.is_floating_point() and each.dim() > 1]
    return Work(
        _modules(model),
        _parameters(model, numbers),
        tuple(recording.finished()),
        samples=given[0].shape[0] if given and given[0].dim() else 1,
        tokens=whole_numbers[0].numel() if whole_numbers else 0,
    )


def _require_meta(model: nn.Module, batch: Any) -> None:
    named = [*model.named_parameters(), *model.named_buffers(), *(("the batch", each) for each in tensors_in(batch))]
    for name, tensor in named:
        if not tensor.is_meta:
            raise InputError(f"{name} is on {tensor.device}, and not on meta; make it under torch.device('meta')")


def _modules(model: nn.Module) -> tuple[Module, ...]:
    numbers = {name: number for number, (name, _) in enumerate(model.named_modules())}

    def parent(name: str) -> int | None:
        around = name.rpartition(".")[0]
        return numbers.get(around, 0) if name else None

    return tuple(Module(name, type(module).__name__, parent(name)) for name, module in model.named_modules())


def _parameters(model: nn.Module, numbers: dict[nn.Module, int]) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(
            name,
            numbers[model.get_submodule(name.rpartition(".")[0])],
            tuple(each.shape),
            str(each.dtype).removeprefix("torch."),
            each.nbytes,
            each.requires_grad,
        )
        for name, each in model.named_parameters()
    )


def _call_hooks(module: nn.Module, number: int, recording: Recording) -> tuple[Any, Any]:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        recording.enter(number, tensors_in((args, kwargs)))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        recording.leave(tensors_in(output, in_any_object=True))

    # A forward that recomputation breaks off early ends too.
    return (
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        module.register_forward_hook(leave, always_call=True),
    )


def _hand_over(recording: Recording, number: int, parameter: Tensor) -> None:
    assert parameter.grad is not None, "autograd has just accumulated it"
    recording.hand_over(number, parameter.grad)
    parameter.grad = None
