"""Losses and layers in parts of a sequence: the activations of one part are in memory at a time.

No sharding makes these smaller: the logits of a large vocabulary, and what an MLP holds of a long sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from sherd.engine import BoundForward, Unit
from sherd.errors import PolicyError, ShardedAccessError, UnsupportedError
from sherd.requirements import require_int, require_number, require_type

# An MLP, or any other layer of tokens


def tiled(module: Callable[[Tensor], Tensor], x: Tensor, *, tiles: int, dim: int = 1) -> Tensor:
    """Returns `module(x)`, computed in parts of `x` along `dim`, each of which backward computes again.

    Of what `module` computes, backward then holds one part at a time. `module` must treat each token alone, as an MLP,
    a norm or an activation does, and attention does not. A unit of sherd is gathered once for all parts in forward and
    once in backward, and its gradients are reduced once; units inside of it are gathered for each part.

    The output is that of `module(x)`, to the last bit where kernels compute a token in one way wherever it is: matrix
    products, and vectorized functions as GELU on a CPU, may round in another way. The gradient of a parameter is summed
    over the parts in the parameter's dtype. Dropout draws other masks. Within `torch.no_grad()` nothing is kept.

    The idea is DeepSpeed's, of its TiledMLP (Bekman et al., "Arctic Long Sequence Training", 2025).

    Args:
        module: a module, sharded or not, or a function, of one tensor. The result has the argument's size in `dim`.
        x: of any shape, as (batch, sequence, width).
        tiles: the most parts, which are equal but for the last.
        dim: the dim of the tokens.

    Raises:
        PolicyError: `tiles` is below 1, `x` lacks the dim, or the result of a part has another size in `dim`;
            `PolicyTypeError` for other types.
    """
    require_int("tiled(tiles={})", tiles, 1)
    require_type("tiled(x=...): expected a tensor", x, Tensor)
    if type(dim) is not int or not -x.dim() <= dim < x.dim():
        raise PolicyError(f"tiled(dim={dim}): x has the shape {tuple(x.shape)}")
    of_tiles = partial(_of_tiles, module, tiles, dim)
    # The attribute is looked for by itself, because Dynamo does not trace `Unit.of`.
    if isinstance(module, nn.Module) and hasattr(module, Unit.ATTRIBUTES[0]) and (unit := Unit.of(module)) is not None:
        output: Tensor = BoundForward(unit, module, of_tiles)(x)
        return output
    return of_tiles(x)


def _of_tiles(module: Callable[[Tensor], Tensor], tiles: int, dim: int, x: Tensor) -> Tensor:
    outputs: list[Tensor] = []
    for tile in x.chunk(tiles, dim):
        output = checkpoint(module, tile, use_reentrant=False)
        if not isinstance(output, Tensor) or output.dim() != x.dim() or output.shape[dim] != tile.shape[dim]:
            gave = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise PolicyError(
                f"tiled: a part of the shape {tuple(tile.shape)} gave {gave}; expected the same size in "
                f"dim {dim}, from a module that treats each token alone"
            )
        outputs.append(output)
    return torch.cat(outputs, dim)


# The loss of a large vocabulary

Reduction = Literal["mean", "sum", "none"]


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int = 1024,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Returns the cross entropy of the logits `hidden @ weight.T + bias`, of which `chunk_tokens` rows exist at a time.

    Backward computes the logits again: a third more of the head's work, for the memory of the logits. A loss for each
    token is computed as `F.cross_entropy` does. The sums over tokens are in another order: that of the losses, and
    those of the gradients of `weight` and `bias`, which are summed over chunks in one buffer, in float32 at least.

    `weight` may be a parameter of a sharded model where it is unsharded: inside of the forward of its unit, so of a
    module of the head that returns the loss, or of the root where the head is no unit by itself. Autocast, compilation
    and checkpoints hold as for `F.linear`. There are no gradients of gradients.

    The idea is Liger Kernel's (Hsu et al., 2024), which computes gradients in forward, before a loss scale is known.

    Args:
        hidden: what the head gets, of the shape (..., width).
        weight: of the head, of the shape (vocabulary, width) and the dtype of `hidden`.
        target: the classes, int64 of the shape (...). Probabilities of classes are refused.
        bias: of the head, of the shape (vocabulary,).
        chunk_tokens: the most rows of logits at a time, which take `4 * chunk_tokens * vocabulary` bytes two or three
            times.
        ignore_index: the target of tokens that do not count. If none counts, the mean is nan, as in torch.
        reduction: one of mean, sum, none; with none the losses have the shape of `target`.
        label_smoothing: from 0.0 to 1.0, as for `F.cross_entropy`.

    Returns:
        The loss, in float32 where `hidden` is float16 or bfloat16, else in its dtype.

    Raises:
        UnsupportedError: `target` holds probabilities.
        ShardedAccessError: an argument is a shard, or another DTensor.
        PolicyError: shapes that do not fit, a target of another dtype, another reduction, a number outside of its
            limits; `PolicyTypeError` for other types.
    """
    require_int("chunked_cross_entropy(chunk_tokens={})", chunk_tokens, 1)
    require_number("chunked_cross_entropy(label_smoothing={})", label_smoothing, 0.0, 1.0)
    if reduction not in ("mean", "sum", "none"):
        raise PolicyError(f"chunked_cross_entropy(reduction={reduction!r}): expected one of mean, sum, none")
    _require_classes(hidden, weight, bias, target)
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = _as_in_autocast(hidden, dtype), _as_in_autocast(weight, dtype)
        bias = None if bias is None else _as_in_autocast(bias, dtype)
    rows, classes = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    arguments = (rows, weight, bias, classes, chunk_tokens, ignore_index, float(label_smoothing))
    losses: Tensor = (
        _opaque_losses(*arguments) if torch.compiler.is_compiling() else _TokenLosses.apply(*arguments)  # type: ignore[no-untyped-call]  # of torch
    )
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (classes != ignore_index).sum()


def _require_classes(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> None:
    for name, tensor in {"hidden": hidden, "weight": weight, "bias": bias, "target": target}.items():
        if tensor is not None or name != "bias":
            require_type(f"chunked_cross_entropy({name}=...): expected a tensor", tensor, Tensor)
        if isinstance(tensor, DTensor):
            raise ShardedAccessError(
                f"chunked_cross_entropy: {name} is a DTensor, {tuple(tensor.shape)}. A parameter is unsharded inside "
                "of the forward of its unit: call it there, in a module of the head that returns the loss; or leave "
                "the head to the root. Of a tensor-parallel one pass full_tensor()"
            )
    if target.is_floating_point():
        raise UnsupportedError(
            f"chunked_cross_entropy: target is {target.dtype}, probabilities; expected classes, int64 of the shape "
            f"{tuple(hidden.shape[:-1])}; F.cross_entropy takes probabilities"
        )
    if target.dtype != torch.int64:
        raise PolicyError(f"chunked_cross_entropy: target is {target.dtype}; expected classes, int64: target.long()")
    shapes = [None if each is None else tuple(each.shape) for each in (hidden, weight, target, bias)]
    fits = hidden.dim() > 0 and weight.dim() == 2 and hidden.shape[-1] == weight.shape[1]
    if not fits or hidden.shape[:-1] != target.shape or (bias is not None and bias.shape != weight.shape[:1]):
        raise PolicyError(
            f"chunked_cross_entropy: hidden, weight, target and bias have the shapes {shapes}; expected (..., width), "
            "(vocabulary, width), (...) and (vocabulary,)"
        )


def _as_in_autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def _losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],  # noqa: UP045  torch reads the types of an operation
    target: Tensor,
    chunk_tokens: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    losses = hidden.new_empty(target.shape, dtype=_wide(hidden.dtype))
    for part in _parts(len(target), chunk_tokens):
        logits = F.linear(hidden[part], weight, bias).to(losses.dtype)
        losses[part] = F.cross_entropy(
            logits, target[part], ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )
    return losses


def _gradients(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],  # noqa: UP045
    target: Tensor,
    chunk_tokens: int,
    ignore_index: int,
    label_smoothing: float,
    is_needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `hidden`, `weight` and `bias`, empty where they are not needed.

    Of a token with the class c and the factor g, those of the logits are g (softmax - smoothing / vocabulary), and at c
    less g (1 - smoothing).
    """
    wide, sizes = _wide(weight.dtype), (hidden.shape, weight.shape, weight.shape[:1])
    d_hidden, d_weight, d_bias = (
        hidden.new_zeros(size if needed else 0, dtype=dtype)
        for size, needed, dtype in zip(sizes, is_needed, (hidden.dtype, wide, wide), strict=True)
    )
    is_ignored = target == ignore_index
    factors, classes = grad.masked_fill(is_ignored, 0).unsqueeze(1), target.masked_fill(is_ignored, 0).unsqueeze(1)
    with _without_autocast(hidden.device.type):
        for part in _parts(len(target), chunk_tokens):
            wanted = torch.softmax(F.linear(hidden[part], weight, bias).to(wide), 1)
            if label_smoothing:
                wanted -= label_smoothing / len(weight)
            wanted.scatter_add_(1, classes[part], wanted.new_full((1, 1), label_smoothing - 1).expand_as(classes[part]))
            wanted *= factors[part]
            if is_needed[2]:
                d_bias += wanted.sum(0)
            wanted = wanted.to(weight.dtype)
            if is_needed[0]:
                torch.mm(wanted, weight, out=d_hidden[part])
            if is_needed[1] and wide == weight.dtype:
                d_weight.addmm_(wanted.T, hidden[part])
            elif is_needed[1]:
                d_weight += wanted.T @ hidden[part]
    return d_hidden, d_weight.to(weight.dtype), d_bias.to(weight.dtype)


def _parts(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _without_autocast(kind: str) -> AbstractContextManager[object]:
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.rule = inputs[4:]


def _backward(gradients: Callable[..., tuple[Tensor, ...]], ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Returns gradients for the arguments of `_losses`. `grad` has a factor of each token, the loss scale included."""
    is_needed = list(ctx.needs_input_grad[:3])
    found = gradients(grad, *ctx.saved_tensors, *ctx.rule, is_needed)
    return *(each if needed else None for each, needed in zip(found, is_needed, strict=True)), *4 * (None,)


class _TokenLosses(torch.autograd.Function):
    forward = staticmethod(_losses)
    setup_context = staticmethod(_save)
    backward = staticmethod(once_differentiable(partial(_backward, _gradients)))  # type: ignore[assignment]


# Compilers see an operation each: of the loops they would compute the logits of backward in forward, and keep all.
_opaque_losses = torch.library.custom_op("sherd::token_losses", _losses, mutates_args=())
_opaque_gradients = torch.library.custom_op("sherd::token_loss_gradients", _gradients, mutates_args=())
_opaque_losses.register_autograd(partial(_backward, _opaque_gradients), setup_context=_save)


@_opaque_losses.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rule: object) -> Tensor:
    return hidden.new_empty(target.shape, dtype=_wide(hidden.dtype))


@_opaque_gradients.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rule: Any
) -> tuple[Tensor, Tensor, Tensor]:
    is_needed, sizes = rule[-1], (hidden.shape, weight.shape, weight.shape[:1])
    sized = [size if needed else (0,) for size, needed in zip(sizes, is_needed, strict=True)]
    return hidden.new_empty(sized[0]), weight.new_empty(sized[1]), weight.new_empty(sized[2])
