"""What operations make on the meta device, made again without torch's rules where these were followed before: torch has
most of them in Python, and a model of many equal blocks asks for the same ones over and over."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sherd.planning.operations import tensors_among

__all__ = ["KnownResults"]

_EMPTY = torch.ops.aten.empty_strided.default
_AS_THEY_ARE = (type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format)

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor on meta."""


class KnownResults:
    """Calls operations. Of those that make new tensors it remembers the shapes, strides and dtypes of these, by the
    same of the arguments."""

    def __init__(self) -> None:
        self._forms: dict[Hashable, _Form | tuple[_Form, ...]] = {}

    def of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns what `func` returns for these arguments."""
        try:
            key = (func, *_keys(args), *kwargs, *_keys(kwargs.values())) if _is_pure(func) else None
        except _NoKey:
            key = None
        forms = self._forms.get(key)
        if forms is None:
            result = func(*args, **kwargs)
            if key is not None and _is_new(result, (*args, *kwargs.values())):
                self._forms[key] = _form(result) if isinstance(result, Tensor) else tuple(map(_form, result))
            return result
        return _made(forms) if isinstance(forms[0], torch.Size) else tuple(map(_made, forms))


class _NoKey(Exception):
    """A value that is no part of a key."""


def _keys(values: Iterable[Any]) -> Iterator[Hashable]:
    for each in values:
        kind = type(each)
        if kind in (Tensor, nn.Parameter) and each.is_meta and each.layout is torch.strided:
            yield each.shape, each.stride(), each.dtype
        elif kind in (bool, int, float):
            yield kind, each  # 1, 1.0 and True are equal
        elif kind in _AS_THEY_ARE:
            yield each
        elif kind in (list, tuple):
            yield tuple(_keys(each))
        else:
            raise _NoKey


@cache
def _is_pure(func: Any) -> bool:
    """Returns whether `func` changes nothing that it is given."""
    return not func._schema.is_mutable


def _is_new(result: Any, given: tuple[Any, ...]) -> bool:
    """Returns whether `result` is a tensor, or a tuple of them, on meta, each of which fills memory of its own. Torch's
    schemas tell nothing of operations as `_unsafe_view`."""
    made = result if isinstance(result, tuple) else (result,)
    if any(type(each) is not Tensor or not each.is_meta or each.layout is not torch.strided for each in made):
        return False
    storages = [each.untyped_storage() for each in made]
    ids = {*map(id, storages)}
    if len(ids) < len(made) or any(id(each.untyped_storage()) in ids for each in tensors_among(given)):
        return False
    sizes = (_made(_form(each)).untyped_storage().nbytes() for each in made)
    return all(storage.nbytes() == nbytes for storage, nbytes in zip(storages, sizes, strict=True))


def _form(tensor: Tensor) -> _Form:
    return tensor.shape, tensor.stride(), tensor.dtype


def _made(form: _Form) -> Tensor:
    shape, strides, dtype = form
    made: Tensor = _EMPTY(shape, strides, dtype=dtype, device="meta")
    return made
