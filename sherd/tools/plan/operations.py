"""Operations of torch as a plan sees them: what one costs, which collective one is, and what one returns on meta."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from sherd._torch import SHARES_ONE_HEAD, TorchDispatchMode, composed_on_meta, group_among
from sherd.tools.simulate.work import ALONE, Collective, Op, OpKind, RankGroup

__all__ = [
    "WITHOUT_VALUES",
    "Accesses",
    "KnownResults",
    "collective_of",
    "group_of",
    "is_communication",
    "kernels_of",
    "op_of",
    "tensors_among",
]

# What an operation costs

_ATEN = torch.ops.aten
_KINDS = {
    OpKind.ATTENTION: "attention",
    OpKind.MATMUL: "mm conv linear dot mv",
    OpKind.LOOKUP: "embedding index gather scatter take",
    OpKind.REDUCTION: "norm softmax loss sum mean var std max min pool topk sort prod any all bincount",
    OpKind.COPY: "clone copy cat stack pad slice select repeat zero ones fill full arange split roll flip",
}
"""Parts of names by kind. The first kind with a part in an operation's name is its kind; the default is POINTWISE."""
_RECURRENT = ("rnn_relu", "rnn_tanh", "lstm", "gru")
_FUSED = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")


def _fused_flops(of_keys: int, of_values: int, first: int, *args: Any, **_: Any) -> int:
    query, key, value = args[first : first + 3]
    return int(2 * query.shape[:-1].numel() * key.shape[-2] * (of_keys * query.shape[-1] + of_values * value.shape[-1]))


_COUNTS = {
    **flop_registry,
    **{getattr(_ATEN, f"_scaled_dot_product_{name}"): partial(_fused_flops, 1, 1, 0) for name in _FUSED},
    **{getattr(_ATEN, f"_scaled_dot_product_{name}_backward"): partial(_fused_flops, 3, 2, 1) for name in _FUSED},
    _ATEN._grouped_mm: lambda rows, matrices, *_, **__: 2 * rows.numel() * matrices.shape[-1],
}
"""Torch's table of floating-point operations, with grouped experts and fused attention (2.11 refuses few key heads)."""


def op_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Op | None:
    """Returns the costs of a call of `func`, or None for a view and for memory that is only allocated."""
    inputs, outputs = list(tensors_among((*args, *kwargs.values()))), list(tensors_among((result,)))
    kind, name = _kind_and_name(func)
    if "empty" in name or _is_view(inputs, outputs):
        return None
    written = _num_bytes(outputs)
    if kind is OpKind.LOOKUP and not name.endswith("backward"):  # a lookup reads as much of the table as it writes
        nbytes = written + sum(min(_num_bytes([tensor]), max(written, 1)) for tensor in inputs)
    else:
        nbytes = _num_bytes([*inputs, *outputs])
    dtype = (outputs or inputs)[0].dtype if outputs or inputs else torch.float32
    flops = count(*args, **kwargs, out_val=result) if (count := _COUNTS.get(func.overloadpacket)) else 0
    depth = _depth(name, inputs) if flops else 0
    computed = 0.5 if kind is OpKind.ATTENTION and _is_causal(func, args, kwargs) else 1.0
    return Op(kind, name, int(flops), nbytes, str(dtype).removeprefix("torch."), depth, computed)


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether attention skips half of the scores: causal, with as many queries as keys."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return bool(given.get("is_causal")) and given["query"].shape[-2] == given["key"].shape[-2]


def _depth(name: str, inputs: Sequence[Tensor]) -> int:
    """Returns `Op.depth` of an operation that has FLOP."""
    if "convolution" in name:
        weight = inputs[2 if name.endswith("backward") else 1]
        return weight.numel() // max(1, len(weight))
    return inputs[1 if name.endswith("addmm") else 0].shape[-1]


def tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors in an operation's arguments or results, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_among(value)


@cache
def _kind_and_name(func: Any) -> tuple[OpKind, str]:
    name = str(func.overloadpacket)
    fitting = (kind for kind, parts in _KINDS.items() if any(part in name for part in parts.split()))
    return next(fitting, OpKind.POINTWISE), name


def _is_view(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Returns whether all outputs are new views of inputs. An operation in place returns the input itself."""
    if not outputs or any(output is tensor for output in outputs for tensor in inputs):
        return False
    sources = {id(tensor.untyped_storage()) for tensor in inputs}
    return all(id(output.untyped_storage()) in sources for output in outputs)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of all tensors, each counted once; an expanded tensor has no more than its storage."""
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in distinct)


class Accesses(TorchDispatchMode):
    """Counts the operations inside, and the bytes that they read and write: those in place do both."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_ops = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if op_of(func, args, kwargs or {}, result) is not None:
            read = args[1:] if func.overloadpacket is _ATEN.copy_ else args
            self.num_ops += 1
            self.nbytes += sum(each.nbytes for each in tensors_among((*read, result)))
        return result


# Which collective an operation is

# By the operation's name: the kind, and which argument is the full tensor, None for the result.
_C10D: dict[str, tuple[str, int | None]] = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "allgather_": ("all-gather", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "reduce_scatter_": ("reduce-scatter", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_": ("all-to-all", 1),
    "alltoall_base_": ("all-to-all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("broadcast", 0),
    "send": ("send", 0),
}
_FUNCTIONAL: dict[str, tuple[str, int | None]] = {
    "all_reduce": ("all-reduce", 0),
    "all_reduce_": ("all-reduce", 0),
    "all_reduce_coalesced": ("all-reduce", 0),
    "all_gather_into_tensor": ("all-gather", None),
    "all_gather_into_tensor_coalesced": ("all-gather", None),
    "reduce_scatter_tensor": ("reduce-scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", 0),
    "all_to_all_single": ("all-to-all", 0),
    "broadcast": ("broadcast", 0),
}


def is_communication(func: Any) -> bool:
    """Returns whether an operation of torch is a collective, or waits for one."""
    return func.namespace in ("c10d", "_c10d_functional")


def collective_of(func: Any, args: tuple[Any, ...], result: Any) -> Collective | None:
    """Returns the collective that `func`, a communication, starts: None for a wait, a receive, or a group of one."""
    known = _C10D if func.namespace == "c10d" else _FUNCTIONAL
    kind, whole = known.get(func.overloadpacket.__name__, ("", None))
    group = group_of(group_among(args)) if kind else ALONE
    if group.size == 1:
        return None
    tensors = tensors_among((result if whole is None else args[whole],))
    return Collective(kind, sum(tensor.nbytes for tensor in tensors), group)


def group_of(group: dist.ProcessGroup | None) -> RankGroup:
    """Returns the ranks of a process group; None is a rank alone."""
    if group is None or group.size() == 1:
        return ALONE
    ranks = dist.get_process_group_ranks(group)
    return RankGroup(len(ranks), max(1, (max(ranks) - min(ranks)) // (len(ranks) - 1)))


# Results on meta, remembered

_EMPTY = torch.ops.aten.empty_strided.default
_AS_THEY_ARE = (type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format)

MOST_KNOWN = 10_000
"""With more results than this, all are forgotten."""

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor on meta."""


class KnownResults:
    """Calls operations on meta, and remembers the shapes, strides and dtypes of new results.

    Torch computes most of these in Python, and a model of many equal blocks asks for the same ones over and over.
    """

    def __init__(self) -> None:
        self._forms: dict[Hashable, tuple[_Form, ...]] = {}
        """By operation and arguments. An empty tuple marks an operation to call each time, such as a view."""

    def of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns what `func` returns for these arguments."""
        try:
            key = (func, *_keys(args), *kwargs, *_keys(kwargs.values())) if _makes_new(func) else None
        except _NoKey:
            key = None
        forms = self._forms.get(key)
        if forms:
            remade = tuple(map(_made, forms))
            return remade if len(func._schema.returns) > 1 else remade[0]
        result = func(*args, **kwargs)
        if key is not None and forms is None:
            if len(self._forms) >= MOST_KNOWN:
                self._forms.clear()
            outputs = result if isinstance(result, tuple) else (result,)
            self._forms[key] = tuple(map(_form, outputs)) if _are_new(outputs, (*args, *kwargs.values())) else ()
        return result


class _NoKey(Exception):
    """An argument cannot be part of a key."""


def _keys(values: Iterable[Any]) -> Iterator[Hashable]:
    for value in values:
        cls = type(value)
        if cls in (Tensor, nn.Parameter) and value.is_meta and value.layout is torch.strided:
            yield value.shape, value.stride(), value.dtype
        elif cls in (bool, int, float):
            yield cls, value  # 1, 1.0 and True are equal
        elif cls in _AS_THEY_ARE:
            yield value
        elif cls in (list, tuple):
            yield tuple(_keys(value))
        else:
            raise _NoKey


@cache
def _makes_new(func: Any) -> bool:
    """Returns whether the schema of `func` declares no argument as changed, and no result as a view."""
    schema = func._schema
    return not schema.is_mutable and all(result.alias_info is None for result in schema.returns)


def _are_new(outputs: tuple[Any, ...], inputs: tuple[Any, ...]) -> bool:
    """Returns whether all outputs are tensors on meta that fill storages of their own.

    Schemas do not say so of every operation: `_unsafe_view` declares no alias.
    """
    if not all(type(output) is Tensor and output.is_meta and output.layout is torch.strided for output in outputs):
        return False
    storages = [output.untyped_storage() for output in outputs]
    ids = {*map(id, storages)}
    if len(ids) < len(outputs) or any(id(tensor.untyped_storage()) in ids for tensor in tensors_among(inputs)):
        return False
    sizes = (_made(_form(output)).untyped_storage().nbytes() for output in outputs)
    return all(storage.nbytes() == nbytes for storage, nbytes in zip(storages, sizes, strict=True))


def _form(tensor: Tensor) -> _Form:
    return tensor.shape, tensor.stride(), tensor.dtype


def _made(form: _Form) -> Tensor:
    shape, strides, dtype = form
    tensor: Tensor = _EMPTY(shape, strides, dtype=dtype, device="meta")
    return tensor


# The kernels that a device runs where the meta device runs others


def kernels_of(device_type: str) -> AbstractContextManager[None]:
    """Returns a context in which operations on meta tensors are those that a device of this type would run.

    Attention is fused, and on an accelerator dropout and RMSNorm too. Recurrent layers raise NotImplementedError.

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
    """Attention by the device's fused kernel where there is one, else composed of other operations."""
    out = None
    takes_fewer_heads = others.get("enable_gqa", False) or (
        SHARES_ONE_HEAD and fused is _attention_on_cpu and key.shape[1] == 1
    )
    has_all_heads = query.shape[0] == key.shape[0] and (query.shape[1] == key.shape[1] or takes_fewer_heads)
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
    """FlashAttention in half precision without a mask, else the memory-efficient kernel.

    The memory-efficient kernel needs as many heads of keys as of queries, and knows no float64.
    """
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
    """Returns the bias of the scores in the query's dtype that torch makes of a boolean mask."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, never = (torch.scalar_tensor(number, dtype=query.dtype) for number in (0.0, float("-inf")))
    return torch.where(mask, zero, never)


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """By the kernel of LayerNorm, since CUDA's own has none on meta. LayerNorm saves one number more of each row."""
    return torch.layer_norm(x, shape, weight, None, eps or 1e-6)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if train and p else x


# Results that depend on values


def _mse_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """As on a device, where a scalar loss keeps the memory of the differences that it is the mean or sum of."""
    out: Tensor = _ATEN.mse_loss.default(x, target, 0)
    return out.resize_(()) if reduction else out


def _rand(size: Sequence[int], **options: Any) -> Tensor:
    if size:
        return torch.empty(size, **options)
    return torch.ones((), dtype=options.get("dtype"), device="cpu")


WITHOUT_VALUES: dict[Any, Callable[..., Any]] = {
    _ATEN.mse_loss.default: _mse_loss,
    # transformers asks `all` before it leaves out a mask, and `any` for what is unusual, as padding.
    _ATEN.all.default: lambda mask: torch.ones((), dtype=torch.bool, device="cpu"),
    _ATEN.any.default: lambda mask: torch.zeros((), dtype=torch.bool, device="cpu"),
    # Layers are left out where a single random number is below a rate; 1 is below none.
    _ATEN.rand.default: _rand,
    _ATEN.bincount.default: lambda x, weights=None, minlength=0: x.new_empty(minlength),
}
"""Answers for operations whose result depends on values, or differs on meta. A histogram has its least length."""
