"""Results of operations on the meta device, whose shapes are remembered: torch computes most of them in Python, and a
model of many equal blocks asks for the same ones over and over."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sherd.tools.plan.operations import tensors_among

__all__ = ["KnownResults"]

_EMPTY = torch.ops.aten.empty_strided.default
_AS_THEY_ARE = (type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format)

MOST_KNOWN = 10_000
"""All is forgotten beyond so many."""

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor on meta."""


class KnownResults:
    """Calls operations. Of those that make new tensors it remembers the shapes, strides and dtypes of these, by the
    same of the arguments."""

    def __init__(self) -> None:
        self._forms: dict[Hashable, tuple[_Form, ...]] = {}
        """Of one tensor in a tuple of one; () for what is called each time, as views are."""

    def of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns what `func` returns for these arguments."""
        try:
            key = (func, *_keys(args), *kwargs, *_keys(kwargs.values())) if _makes_new(func) else None
        except _NoKey:
            key = None
        forms = self._forms.get(key)
        if forms:
            made = tuple(map(_made, forms))
            return made if len(func._schema.returns) > 1 else made[0]
        result = func(*args, **kwargs)
        if key is not None and forms is None:
            if len(self._forms) >= MOST_KNOWN:
                self._forms.clear()
            made = result if isinstance(result, tuple) else (result,)
            self._forms[key] = tuple(map(_form, made)) if _are_new(made, (*args, *kwargs.values())) else ()
        return result


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
def _makes_new(func: Any) -> bool:
    """Returns whether, by its schema, `func` changes nothing that it is given, and returns no view of it."""
    schema = func._schema
    return not schema.is_mutable and all(each.alias_info is None for each in schema.returns)


def _are_new(made: tuple[Any, ...], given: tuple[Any, ...]) -> bool:
    """Returns whether all results are tensors on meta, each of which fills memory of its own. Schemas do not tell it of
    operations as `_unsafe_view`."""
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
