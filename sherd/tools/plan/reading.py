"""The work of a training step, read from a model by one forward and backward on the meta device, without values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from sherd.errors import InputError, reason_of
from sherd.tensor.ragged import local_part
from sherd.tensor.structures import tensors_in
from sherd.tools.plan.operations import kernels_of
from sherd.tools.plan.recording import Recording
from sherd.tools.simulate.work import Module, Parameter, Work
from sherd.tools.verify.equivalence import loss_in, output_of, own_loss

__all__ = ["Loss", "own_or_usual_loss", "read_work"]

Loss = Callable[[nn.Module, Any], Tensor]
"""Returns the loss, a scalar, of a model and a batch."""


def read_work(model: nn.Module, batch: Any, loss: Loss = own_loss, device_type: str = "cuda") -> Work:
    """Returns the work of one micro-batch: what forward and backward of `loss(model, batch)` do, in order.

    Memory is exact, apart from memory that a kernel allocates for itself, which no operation of torch shows.

    Args:
        model: plain, on the meta device, its floating-point parameters in the dtype that forward computes in.
        batch: tensors on the meta device, in any containers.
        loss: the loss of (model, batch). By default the `loss` in the model's output, else the mean square of the
            output; a batch that is a tuple, list or dict is passed as arguments.
        device_type: the type of device whose kernels run: "cpu", or any other for CUDA's.

    Raises:
        InputError: a parameter, buffer or tensor of the batch has values, or forward or backward needs values; or
            `loss` returns no loss.
    """
    inputs = tensors_in(batch)
    of_batch = (("the batch", tensor) for tensor in inputs)
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *of_batch):
        if not tensor.is_meta:
            raise InputError(f"{name} is on {tensor.device}, and not on meta; make it under torch.device('meta')")
    modules = list(model.named_modules())
    recording = Recording(list(model.parameters()), list(model.buffers()), inputs)
    handles = [*_call_hooks(modules, recording), *_gradient_hooks(model, recording)]
    try:
        with torch.device("meta"), kernels_of(device_type), recording:
            with torch.enable_grad():
                value = loss(model, batch)
            _require_loss(value, model)
            recording.end_forward(value)
            with torch.no_grad():  # so operations with gradients on are a forward that runs again
                value.backward()
            nodes = _nodes_behind(value)
            del value
            while nodes:
                nodes.popleft()
    except InputError:
        raise
    except Exception as error:
        where = "the loss"
        if recording.failed_in is not None:
            name, module = modules[recording.failed_in]
            where = f"{name or 'the model'} ({type(module).__name__})"
        reason = reason_of(error)
        # of torch's grouped matrix product, for experts: before 2.14, and since
        if "Expected inputs of BF16 type" in reason or "Expected mat_a to be BFloat16" in reason:
            hint = "compute in bfloat16: compute_dtype=torch.bfloat16, or --precision bf16"
            reason = f"{reason.rstrip('.')}; {hint}"
        raise InputError(f"{where} does not run without values: {reason}") from error
    finally:
        for handle in handles:
            handle.remove()
    tokens = [tensor.numel() for tensor in inputs if not tensor.is_floating_point() and tensor.dim() > 1]
    return Work(
        *_parts(model, recording.widths),
        tuple(recording.finished()),
        samples=inputs[0].shape[0] if inputs and inputs[0].dim() else 1,
        tokens=tokens[0] if tokens else 0,
    )


def _nodes_behind(loss: Tensor) -> deque[Node]:
    """Returns the nodes of autograd's graph from the loss on, to be freed one by one in this order.

    Freeing only the loss would free the nodes by recursion: for a thousand layers the stack is too small.
    """
    waiting = [] if loss.grad_fn is None else [loss.grad_fn]  # a loss that is itself a parameter has no node
    nodes, seen = deque(waiting), {*waiting}
    while waiting:
        before = dict.fromkeys(node for after in waiting for node, _ in after.next_functions if node is not None)
        waiting = [node for node in before if node not in seen]
        seen.update(waiting)
        nodes.extend(waiting)
    return nodes


def _require_loss(value: object, model: nn.Module) -> None:
    """Raise InputError if backward cannot begin with `value`."""
    if not isinstance(value, Tensor):
        raise InputError(f"the loss is {value!r:.80}; expected a tensor of one number, from which backward begins")
    if value.numel() != 1:
        raise InputError(f"the loss has the shape {tuple(value.shape)}; expected one number, as its mean or sum")
    if not value.requires_grad:
        is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
        why = "no parameter of the model is trainable" if is_frozen else "it does not depend on a trainable parameter"
        raise InputError(f"the loss has no gradient: {why} (requires_grad), so that there is no backward to plan")


def own_or_usual_loss(model: nn.Module, batch: Any) -> Tensor:
    """Returns the `loss` in the model's output; without one, a loss of the outputs in float32.

    For tokens it is the cross-entropy of the logits, as in `sherd train`, else the sum of the outputs.
    """
    output = output_of(model, batch)
    loss = loss_in(output)
    if loss is not None:
        return loss
    tokens, *_ = tensors_in(batch)
    outputs = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    del output  # so that nothing but `outputs` keeps the logits alive
    if not outputs:
        raise InputError("the model returns no tensor of floating-point numbers; give a loss of (model, batch)")
    if tokens.is_floating_point() or outputs[0].dim() <= tokens.dim():
        return torch.stack([tensor.float().sum() for tensor in outputs]).sum()
    logits = outputs.pop(0).float().flatten(0, -2)
    return F.cross_entropy(logits, tokens.flatten(), reduction="none").mean()


def _parts(model: nn.Module, widths: Mapping[int, int]) -> tuple[tuple[Module, ...], tuple[Parameter, ...]]:
    """Returns the model's modules and parameters, as in `Work`. `widths` are those of gradients, in bytes."""
    number = {name: at for at, (name, _) in enumerate(model.named_modules())}
    modules = tuple(
        Module(name, type(module).__name__, number[name.rpartition(".")[0]] if name else None)
        for name, module in model.named_modules()
    )
    parameters = tuple(
        Parameter(
            name,
            number[name.rpartition(".")[0]],
            tuple(local_part(parameter).shape),
            str(parameter.dtype).removeprefix("torch."),
            local_part(parameter).nbytes,
            parameter.requires_grad,
            max(1, widths.get(at, 0) // parameter.dtype.itemsize),
        )
        for at, (name, parameter) in enumerate(model.named_parameters())
    )
    return modules, parameters


def _call_hooks(modules: Sequence[tuple[str, nn.Module]], recording: Recording) -> Iterator[RemovableHandle]:
    def enter(number: int, module: nn.Module, args: object, kwargs: object) -> None:
        recording.enter(number, tensors_in((args, kwargs)))

    def leave(module: nn.Module, args: object, output: object) -> None:
        recording.leave(tensors_in(output, in_any_object=True))

    for number, (_, module) in enumerate(modules):
        yield module.register_forward_pre_hook(partial(enter, number), prepend=True, with_kwargs=True)
        # always_call: a recomputed forward stops early by an exception, and that ends it, too.
        yield module.register_forward_hook(leave, always_call=True)


def _gradient_hooks(model: nn.Module, recording: Recording) -> Iterator[RemovableHandle]:
    def hand_over(number: int, parameter: Tensor) -> None:
        assert parameter.grad is not None, "autograd has just accumulated it"
        gradient, parameter.grad = parameter.grad, None
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):  # as the engine does it
            gradient = gradient.redistribute(placements=parameter.placements)
        recording.hand_over(number, gradient)

    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            yield parameter.register_post_accumulate_grad_hook(partial(hand_over, number))
