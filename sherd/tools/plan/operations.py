"""The costs of an operation of torch: its kind, its floating-point operations and its bytes; and the kernels that a
device would take where the meta device takes others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from sherd._torch import composed_on_meta
from sherd.tools.simulate.work import Op, OpKind

__all__ = ["WITHOUT_VALUES", "kernels_of", "op_of", "tensors_among"]

_ATEN = torch.ops.aten
_KINDS = {
    OpKind.ATTENTION: "attention",
    OpKind.MATMUL: "mm conv linear dot mv",
    OpKind.LOOKUP: "embedding index gather scatter take",
    OpKind.REDUCTION: "norm softmax loss sum mean var std max min pool topk sort prod any all bincount",
    OpKind.COPY: "clone copy cat stack pad slice select repeat zero ones fill full arange split roll flip",
}
"""Parts of names that tell an operation's kind, of which the first that fits does; any other one is POINTWISE."""
_RECURRENT = ("rnn_relu", "rnn_tanh", "lstm", "gru")
_COUNTS = {
    **flop_registry,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
    _ATEN._grouped_mm: lambda rows, matrices, *_, **__: 2 * rows.numel() * matrices.shape[-1],
}
"""Torch's table of floating-point operations, and what it leaves out: experts side by side, and attention on a CPU."""


def op_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Op | None:
    """Returns the operation that `func` was, called with these; None for a view, and for memory that is only taken."""
    read, made = list(tensors_among((*args, *kwargs.values()))), list(tensors_among((result,)))
    kind, name = _kind_and_name(func)
    if "empty" in name or _is_view(read, made):
        return None
    count = _COUNTS.get(func.overloadpacket)
    written = _num_bytes(made)
    if kind is OpKind.LOOKUP and not name.endswith("backward"):  # of the table, as much as is looked up
        nbytes = written + sum(min(_num_bytes([each]), max(written, 1)) for each in read)
    else:
        nbytes = _num_bytes([*read, *made])
    dtype = (made or read)[0].dtype if made or read else torch.float32
    flops = count(*args, **kwargs, out_val=result) if count else 0
    depth = _depth(kind, name, read) if flops else 0
    computed = 0.5 if kind is OpKind.ATTENTION and _is_causal(func, args, kwargs) else 1.0
    return Op(kind, name, int(flops), nbytes, str(dtype).removeprefix("torch."), depth, computed)


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether attention, of as many queries as keys, leaves out what is behind each token."""
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return bool(given.get("is_causal")) and given["query"].shape[-2] == given["key"].shape[-2]


def _depth(kind: OpKind, name: str, read: Sequence[Tensor]) -> int:
    """Returns `Op.depth` of an operation with FLOP that reads these."""
    if "convolution" in name:
        weight = read[2 if name.endswith("backward") else 1]
        return weight.numel() // max(1, len(weight))
    return read[1 if name.endswith("addmm") else 0].shape[-1]


def tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields each tensor of an operation's arguments or results, also those in lists of them."""
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from tensors_among(each)


@cache
def _kind_and_name(func: Any) -> tuple[OpKind, str]:
    name = str(func.overloadpacket)
    fitting = (kind for kind, parts in _KINDS.items() if any(part in name for part in parts.split()))
    return next(fitting, OpKind.POINTWISE), name


def _is_view(read: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Returns whether all results are new windows on memory of the arguments. What works in place returns an argument
    itself."""
    if not made or any(each is other for each in made for other in read):
        return False
    sources = {id(each.untyped_storage()) for each in read}
    return all(id(each.untyped_storage()) in sources for each in made)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of each tensor once; of one that shows elements several times, no more than there are in its memory."""
    each_once = {id(each): each for each in tensors}.values()
    return sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in each_once)


def kernels_of(device_type: str) -> AbstractContextManager[None]:
    """A context in which operations on meta tensors are those that a device of this type would run: fused attention;
    on an accelerator, fused dropout and RMSNorm too. Recurrent layers raise NotImplementedError.

    Args:
        device_type: "cpu", or an accelerator: any is taken for CUDA.
    """
    fused = _attention_on_cpu if device_type == "cpu" else _attention_on_cuda
    functions: dict[str, Callable[..., object]] = {
        **{f"{name}.{form}": _recurrent for name in _RECURRENT for form in ("input", "data")},
        "scaled_dot_product_attention": partial(_attention, fused),
    }
    if device_type != "cpu":
        functions |= {"dropout": _dropout, "rms_norm": _rms_norm}
    return composed_on_meta(functions)


def _recurrent(*_: Any) -> NoReturn:
    raise NotImplementedError("recurrent layers (nn.RNN, nn.LSTM, nn.GRU) are not planned")


def _attention(
    fused: Callable[..., Tensor | None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> Tensor:
    """Attention by the kernel that the device has for it, else composed of other operations."""
    out = None
    has_all_heads = query.shape[:2] == key.shape[:2] or others.get("enable_gqa", False)
    if query.dim() == 4 and query.shape[-1] == value.shape[-1] and has_all_heads:
        out = fused(query, key, value, attn_mask, dropout_p, is_causal, others.get("scale"))
    if out is None:
        mask = _as_bias(attn_mask, query)
        out = _ATEN._scaled_dot_product_attention_math(query, key, value, mask, dropout_p, is_causal, **others)[0]
    return out


def _attention_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor | None:
    if dropout or (mask is not None and mask.requires_grad):
        return None
    kernel = _ATEN._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = kernel(query, key, value, dropout, causal, attn_mask=_as_bias(mask, query), scale=scale)[0]
    return out


def _attention_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor | None:
    """FlashAttention in half precision; the memory-efficient kernel with a mask or in float32, which wants as many
    heads of keys as of queries."""
    outputs: tuple[Tensor, ...]
    if mask is None and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256:
        outputs = _ATEN._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)
    elif query.shape[1] != key.shape[1] or query.dtype == torch.float64:
        return None
    else:
        bias = _as_bias(mask, query)
        bias = bias if bias is None else bias.expand(*query.shape[:3], key.shape[2])
        kernel = _ATEN._scaled_dot_product_efficient_attention
        outputs = kernel(query, key, value, bias, query.requires_grad, dropout, causal, scale=scale)
    return outputs[0]


def _as_bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Returns what is added to the scores, of the query's dtype, as torch makes it of a mask."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, never = (torch.scalar_tensor(each, dtype=query.dtype) for each in (0.0, float("-inf")))
    return torch.where(mask, zero, never)


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """By the kernel of LayerNorm, for CUDA's own has none on meta. It keeps one number more of each row."""
    return torch.layer_norm(x, shape, weight, None, eps or 1e-6)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if train and p else x


def _mse_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """As a device makes it, a scalar loss keeps the memory of the differences that it is the mean or sum of."""
    out: Tensor = _ATEN.mse_loss.default(x, target, 0)
    return out.resize_(()) if reduction else out


def _rand(size: Sequence[int], **options: Any) -> Tensor:
    if size:
        return torch.empty(size, **options)
    return torch.ones((), dtype=options.get("dtype"), device="cpu")


WITHOUT_VALUES: dict[Any, Callable[..., Any]] = {
    _ATEN.mse_loss.default: _mse_loss,
    _ATEN.all.default: lambda mask: torch.ones((), dtype=torch.bool, device="cpu"),
    _ATEN.any.default: lambda mask: torch.zeros((), dtype=torch.bool, device="cpu"),
    _ATEN.rand.default: _rand,
    _ATEN.bincount.default: lambda x, weights=None, minlength=0: x.new_empty(minlength),
}
"""The answers for operations whose result depends on values, or is another one on meta. All of a mask is true:
transformers asks, before it leaves a mask out; and of what would be unusual, as padding, there is not any. A single
random number is 1, which is drawn to leave a layer out if it is below a rate. A histogram has its least length."""
