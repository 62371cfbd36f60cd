"""Which tensors does a forward leave on its modules, beside what it returns? A loss that is read off `module.aux`
later leads backward into a unit without passing any of its outputs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from sherd.engine.structures import tensors_in

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Parameters, buffers, hooks: nothing that a forward has left."""


class LeftBehind:
    """The attributes of a unit's modules in which forward leaves tensors of autograd's.

    They are looked for once, after a module's first forward that is to be differentiated: to look at all modules would
    cost too much in every step.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [weakref.ref(each) for each in modules]
        self._looked_after: set[int] = set()
        self._places: dict[tuple[int, str], weakref.ref[nn.Module]] = {}

    def by(self, module: nn.Module) -> list[torch.Tensor]:
        """What is there after a forward of `module`, one of the unit's own."""
        if id(module) not in self._looked_after:
            self._looked_after.add(id(module))
            self._places.update(self._found())
        if not self._places:
            return []
        holders = ((ref(), attribute) for (_, attribute), ref in self._places.items())
        return [
            tensor
            for holder, attribute in holders
            if holder is not None
            for tensor in tensors_in(vars(holder).get(attribute))
        ]

    def _found(self) -> Iterator[tuple[tuple[int, str], weakref.ref[nn.Module]]]:
        for ref in self._modules:
            holder = ref()
            left = {} if holder is None else vars(holder)
            for attribute, value in left.items():
                if attribute not in _OF_EVERY_MODULE and any(each.grad_fn is not None for each in tensors_in(value)):
                    yield (id(holder), attribute), ref
