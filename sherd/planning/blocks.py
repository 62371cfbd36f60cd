"""Models of many equal blocks: one block of each kind is sharded, and the others are taken to be like it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from sherd.api.blocks import repeated_blocks
from sherd.schedule.state import UnitSpec
from sherd.simulate.sharded import Sharded, Traffic
from sherd.simulate.sharded import Unit as PlayedUnit
from sherd.simulate.work import Work


def thin_out(model: nn.Module) -> dict[str, str]:
    """Remove from `model` all blocks but the first of each kind. Returns the removed ones' names, each with the name of
    the block that is like it. What is left is not to be run.

    Blocks are of one kind if their modules and parameters have the same names, classes, shapes and dtypes. A block that
    shares a parameter with another module stays.
    """
    places = _places(model)
    names = {id(module): name for name, module in model.named_modules()}
    lists = {id(block): each for each in model.modules() for block in each.children()}
    like: dict[str, str] = {}
    for blocks in repeated_blocks(model).values():
        first: dict[tuple[object, ...], nn.Module] = {}
        for block in blocks:
            kept = first.setdefault(_kind(block), block)
            if kept is not block and all(places[id(each)] == 1 for each in block.parameters()):
                like[names[id(block)]] = names[id(kept)]
                parent = lists[id(block)]
                parent._modules = {key: each for key, each in parent._modules.items() if each is not block}
    return like


def _places(model: nn.Module) -> Counter[int]:
    """Returns how often each parameter is registered, by its id."""
    return Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))


def _kind(block: nn.Module) -> tuple[object, ...]:
    modules = ((name, type(each)) for name, each in block.named_modules())
    parameters = (
        (name, each.shape, each.dtype, each.requires_grad)
        for name, each in block.named_parameters(remove_duplicate=False)
    )
    return (*modules, *parameters)


def with_blocks(sharded: Sharded, like: Mapping[str, str], work: Work) -> Sharded | None:
    """Returns `sharded`, of a model that was thinned out, with the blocks that were removed. None if parameters of
    blocks belong to units around them, which would be larger than they are in `sharded`.

    Args:
        sharded: of the model that is left; its modules and parameters are numbered as in `work`.
        like: what `thin_out` has returned.
        work: of the whole model.
    """
    kept = set(like.values())
    numbers = {module.name: number for number, module in enumerate(work.modules)}
    block_of_unit = [_block_of([work.modules[at].name for at in unit.modules], kept) for unit in sharded.units]
    names = {parameter.name: number for number, parameter in enumerate(work.parameters)}
    for number, place in sharded.places.items():
        if _block_of([work.parameters[number].name], kept) != block_of_unit[place.unit]:
            return None

    def in_block(unit: PlayedUnit, before: str, block: str) -> PlayedUnit:
        own = [block + work.modules[at].name.removeprefix(before) for at in unit.modules]
        return replace(unit, name=", ".join(own), modules=tuple(numbers[name] for name in own))

    # By the old number of a unit and the block that it is in now.
    units = {(at, block_of_unit[at]): unit for at, unit in enumerate(sharded.units)}
    for block, before in like.items():
        for at, unit in enumerate(sharded.units):
            if block_of_unit[at] == before:
                units[at, block] = in_block(unit, before, block)
    order = sorted(units, key=lambda each: min(units[each].modules))
    moved = {each: number for number, each in enumerate(order)}
    of_kept = [moved[at, block_of_unit[at]] for at in range(len(sharded.units))]
    places = {}
    for name, number in names.items():
        block = _block_of([name], like)
        before = like.get(block, "")
        found = sharded.places.get(names[before + name.removeprefix(block)])
        if found is not None:
            places[number] = replace(found, unit=moved[found.unit, block or block_of_unit[found.unit]])
    return replace(
        sharded,
        units=tuple(units[each] for each in order),
        specs=tuple(_moved(sharded.specs[at], of_kept) for at, _ in order),
        places=places,
    )


def renumbered(sharded: Sharded, before: Work, after: Work) -> Sharded:
    """Returns `sharded`, whose modules and parameters are numbered as in `before`, with their numbers in `after`."""
    modules = {each.name: number for number, each in enumerate(after.modules)}
    parameters = {each.name: number for number, each in enumerate(after.parameters)}
    units = tuple(
        replace(unit, modules=tuple(modules[before.modules[number].name] for number in unit.modules))
        for unit in sharded.units
    )
    places = {parameters[before.parameters[number].name]: place for number, place in sharded.places.items()}
    return replace(sharded, units=units, places=places)


def with_replicas(sharded: Sharded, number: int) -> Sharded:
    """Returns `sharded` with so many replicas, if there were several."""

    def with_them(traffic: Traffic) -> Traffic:
        group = traffic.replicate
        return replace(traffic, replicate=replace(group, size=number)) if group.size > 1 else traffic

    units = (replace(unit, traffic=tuple(map(with_them, unit.traffic))) for unit in sharded.units)
    return replace(sharded, units=tuple(units))


def _block_of(names: Iterable[str], blocks: Iterable[str]) -> str:
    """Returns the block that all of these modules or parameters are in, "" for none."""
    for block in blocks:
        if all(name == block or name.startswith(block + ".") for name in names):
            return block
    return ""


def _moved(spec: UnitSpec, numbers: Sequence[int]) -> UnitSpec:
    """Returns `spec` with the new numbers of the units that it names."""
    ahead, behind = (
        None if each is None else tuple(numbers[unit] for unit in each)
        for each in (spec.forward_prefetch, spec.backward_prefetch)
    )
    companions = tuple(numbers[unit] for unit in spec.companions)
    return replace(spec, companions=companions, forward_prefetch=ahead, backward_prefetch=behind)


def with_fewer_blocks(model: nn.Module, num_blocks: int) -> tuple[nn.Module, int] | None:
    """Returns a copy of `model` on the meta device that has only the first `num_blocks` of its blocks and runs as it
    does, and how many blocks `model` has. None unless they are one list of one kind, more,
    and share no parameters."""
    lists = list(repeated_blocks(model).values())
    if len(lists) != 1 or len(lists[0]) <= num_blocks or len({_kind(block) for block in lists[0]}) > 1:
        return None
    places = _places(model)
    if any(places[id(each)] > 1 for block in lists[0][1:] for each in block.parameters()):
        return None
    short = copy.deepcopy(model)
    ((name, blocks),) = repeated_blocks(short).items()
    around = short.get_submodule(name)
    around._modules = dict(list(around._modules.items())[:num_blocks])
    return short, len(blocks)
