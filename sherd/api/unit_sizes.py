"""Units that are larger or smaller than usual: two blocks together, or parts of blocks and what lies beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, get_args

from torch import nn

from sherd.api.blocks import numel_of, registrations
from sherd.wrap import Kwargs, is_container

T = TypeVar("T")

Wrapping: TypeAlias = Literal["auto", "pairs", "parts", "ends"]
"""A word for the units of a model:

auto    what a model describes, or else the blocks that it repeats
pairs   as auto, but two blocks that follow one another are one unit: half as many collectives, of twice the bytes
parts   as auto, and large modules within blocks, as attention and feed-forward: more collectives, less memory
ends    as auto, and large modules beside the blocks, as an embedding and a head: they are freed while blocks run
"""
WRAPPINGS: tuple[Wrapping, ...] = get_args(Wrapping)

LARGE = 10
"""A module is large if the largest block has at most this many times its parameters."""


@dataclass
class UnitCall:
    """One call of `fully_shard`: its modules and the arguments."""

    modules: list[nn.Module]
    arguments: Kwargs


def rewrapped(
    model: nn.Module, units: Sequence[UnitCall], lists: Iterable[Sequence[nn.Module]], wrapping: Wrapping
) -> list[UnitCall]:
    """Returns the units of `model` besides the root, children before their parents, as `wrapping` says.

    Args:
        model: the root.
        units: those of "auto", in this order too.
        lists: the blocks of `model` that follow one another. Those that are no unit do not count.
        wrapping: what becomes of `units`.
    """
    unit_of = {unit.modules[0]: unit for unit in units if len(unit.modules) == 1}
    lists = [[block for block in blocks if block in unit_of] for blocks in lists]
    if wrapping == "auto" or not any(lists):
        return list(units)
    if wrapping == "pairs":
        return _paired(units, [pair for blocks in lists for pair in in_groups(blocks, 2)])
    blocks = {block for each in lists for block in each}
    taken = frozenset(module for unit in units for module in unit.modules)
    large = _Large(max(numel_of([each]) for each in blocks) / LARGE, taken, registrations(model))
    if wrapping == "ends":
        usual = unit_of[lists[0][0]].arguments
        return [*(UnitCall([module], dict(usual)) for module in large.within(model)), *units]
    made = []
    for unit in units:
        for module in large.within(unit.modules[0]) if unit.modules[0] in blocks else ():
            made.append(UnitCall([module], dict(unit.arguments)))
        made.append(unit)
    return made


def in_groups(items: Sequence[T], number: int) -> Iterator[Sequence[T]]:
    """Yields `items` so many at a time, maybe fewer at last."""
    return (items[at : at + number] for at in range(0, len(items), number))


def _paired(units: Sequence[UnitCall], pairs: Iterable[Sequence[nn.Module]]) -> list[UnitCall]:
    """Returns `units` with each pair of modules as one, at the place of its last."""
    by_last = {pair[-1]: list(pair) for pair in pairs}
    firsts = {pair[0] for pair in by_last.values() if len(pair) > 1}
    kept = (unit for unit in units if unit.modules[0] not in firsts)
    return [UnitCall(by_last.get(unit.modules[0], unit.modules), unit.arguments) for unit in kept]


@dataclass(frozen=True)
class _Large:
    """The modules that are large enough to be units.

    Attributes:
        least: the parameters that one has.
        taken: modules of units that there are already.
        places: of the whole model, how often each parameter is registered, by its id.
    """

    least: float
    taken: AbstractSet[nn.Module]
    places: Counter[int]

    def within(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yields the outermost ones below `module` that contain no other unit, not all of its parameters, and none
        that is registered outside too."""
        return self._below(module, numel_of([module]))

    def _below(self, module: nn.Module, numel: int) -> Iterator[nn.Module]:
        for child in module.children():
            if child in self.taken:
                continue
            own = numel_of([child])
            if is_container(child) or own == numel or not self.taken.isdisjoint(child.modules()):
                yield from self._below(child, numel)
            elif own >= self.least and all(self.places[key] == num for key, num in registrations(child).items()):
                yield child
