"""The blocks that a model repeats, and the units that consist of blocks, pairs of blocks, or parts of blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, get_args

from torch import nn

from sherd.wrap import Kwargs, is_container

T = TypeVar("T")

WORTH = 10
"""A list counts if the largest list has at most this many times its parameters."""

Blocks = dict[str, list[nn.Module]]
"""The modules of each list, by the list's name."""


def repeated_blocks(model: nn.Module) -> Blocks:
    """Returns the largest list of blocks below `model`, and the lists that are not much smaller.

    A list is an `nn.ModuleList` or `nn.Sequential` of modules of one class, with parameters and a forward. Lists within
    blocks do not count.
    """
    lists = dict(_lists(model, ""))
    sizes = {name: numel_of(blocks) for name, blocks in lists.items()}
    largest = max(sizes.values(), default=0)
    return {name: blocks for name, blocks in lists.items() if sizes[name] * WORTH >= largest}


def in_words(blocks: Blocks) -> str:
    """Returns the blocks in words: "3 Layer of encoder.layers, 2 Block of head"."""
    return ", ".join(f"{len(each)} {type(each[0]).__name__} of {name or 'the model'}" for name, each in blocks.items())


def evenly_spread(blocks: Sequence[nn.Module], share: float) -> list[nn.Module]:
    """Returns a share of `blocks`, 0 to 1, as far apart from each other as possible."""
    number, total = round(share * len(blocks)), len(blocks)
    return [block for at, block in enumerate(blocks) if (at + 1) * number // total > at * number // total]


def registrations(model: nn.Module) -> Counter[int]:
    return Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))


def _lists(module: nn.Module, name: str) -> Iterator[tuple[str, list[nn.Module]]]:
    children = list(module.children())
    is_one_class = len({type(child) for child in children}) == 1
    is_list = isinstance(module, nn.ModuleList | nn.Sequential) and is_one_class and not is_container(children[0])
    if is_list and all(numel_of([child]) for child in children):
        yield name, children
        return
    for key, child in module.named_children():
        yield from _lists(child, f"{name}.{key}" if name else key)


def numel_of(modules: list[nn.Module]) -> int:
    return sum(each.numel() for each in {each for module in modules for each in module.parameters()})


# Units

Wrapping: TypeAlias = Literal["auto", "pairs", "parts", "ends"]
"""A word for the units of a model, of plans and of `sherd train`:

auto    the units that the model describes, or else the blocks that it repeats
pairs   as auto, but two successive blocks are one unit: half as many collectives, of twice the bytes
parts   as auto, and large modules within blocks, as attention and feed-forward: more collectives, less memory
ends    as auto, and large modules outside of the blocks, as an embedding and a head: they are freed while blocks run
"""
WRAPPINGS: tuple[Wrapping, ...] = get_args(Wrapping)

LARGE = 10
"""A module is large if the largest block has at most this many times the parameters of the module."""


@dataclass
class UnitCall:
    """The modules and the arguments of one call of `fully_shard`."""

    modules: list[nn.Module]
    arguments: Kwargs


def rewrapped(
    model: nn.Module, units: Sequence[UnitCall], lists: Iterable[Sequence[nn.Module]], wrapping: Wrapping
) -> list[UnitCall]:
    """Returns the units of `model` without the root, children before their parents, as `wrapping` says.

    Args:
        model: the root.
        units: the units of "auto", children before their parents.
        lists: lists of successive blocks of `model`. A block that is no unit does not count.
        wrapping: the word for the change of `units`.
    """
    unit_of = {unit.modules[0]: unit for unit in units if len(unit.modules) == 1}
    lists = [in_units for blocks in lists if (in_units := [block for block in blocks if block in unit_of])]
    if wrapping == "auto" or not lists:
        return list(units)
    if wrapping == "pairs":
        # The second block of a pair comes later than the first, so that the pair stands at the place of the second.
        by_last = {pair[-1]: list(pair) for blocks in lists for pair in in_groups(blocks, 2)}
        firsts = {pair[0] for pair in by_last.values() if len(pair) > 1}
        others = (unit for unit in units if unit.modules[0] not in firsts)
        return [UnitCall(by_last.get(unit.modules[0], unit.modules), unit.arguments) for unit in others]
    blocks = {block for each in lists for block in each}
    taken = frozenset(module for unit in units for module in unit.modules)
    least, places = max(numel_of([block]) for block in blocks) / LARGE, registrations(model)

    def large_below(module: nn.Module, numel: int) -> Iterator[nn.Module]:
        """Yields the outermost large modules below `module`, a part of a module with `numel` elements.

        A large module contains no unit, fewer than `numel` elements, and no parameter that is registered outside too.
        """
        # No recursion: a function that refers to itself would keep the model alive until a garbage collection.
        stack = list(module.children())[::-1]
        while stack:
            child = stack.pop()
            if child in taken:
                continue
            own = numel_of([child])
            if is_container(child) or own == numel or not taken.isdisjoint(child.modules()):
                stack += list(child.children())[::-1]
            elif own >= least and all(places[key] == number for key, number in registrations(child).items()):
                yield child

    if wrapping == "ends":
        usual = unit_of[lists[0][0]].arguments
        return [*(UnitCall([module], dict(usual)) for module in large_below(model, numel_of([model]))), *units]
    with_parts = []
    for unit in units:
        block = unit.modules[0]
        for module in large_below(block, numel_of([block])) if block in blocks else ():
            with_parts.append(UnitCall([module], dict(unit.arguments)))
        with_parts.append(unit)
    return with_parts


def in_groups(items: Sequence[T], number: int) -> Iterator[Sequence[T]]:
    """Yields groups of `number` neighbours in `items`; the last group may be smaller."""
    return (items[at : at + number] for at in range(0, len(items), number))
