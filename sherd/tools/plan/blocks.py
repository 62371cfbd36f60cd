"""Models of many equal blocks: one block of each kind is sharded, and the others are taken to be like it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from sherd.api.blocks import evenly_spread, in_groups, registrations, repeated_blocks
from sherd.schedule.state import UnitSpec
from sherd.tools.simulate.sharded import Sharded, Traffic
from sherd.tools.simulate.sharded import Unit as PlayedUnit
from sherd.tools.simulate.work import Work

Run = tuple[str, ...]
"""The names of blocks that follow one another and whose units are made together: one block, or two that are a unit."""


def thin_out(model: nn.Module, together: int = 1) -> dict[Run, Run]:
    """Remove from `model` all runs of `together` blocks but the first of each kind. Returns the removed ones' names,
    each with the names of the run that is like it. What is left is not to be run.

    Blocks are of one kind if their modules and parameters have the same names, classes, shapes and dtypes. A run that
    shares a parameter with another module stays.
    """
    places = registrations(model)
    names = {id(module): name for name, module in model.named_modules()}
    lists = {id(block): each for each in model.modules() for block in each.children()}
    like: dict[Run, Run] = {}
    for blocks in repeated_blocks(model).values():
        first: dict[tuple[object, ...], Sequence[nn.Module]] = {}
        for run in in_groups(blocks, together):
            kept = first.setdefault(tuple(map(_kind, run)), run)
            if kept is not run and all(places[id(each)] == 1 for block in run for each in block.parameters()):
                like[_names(run, names)] = _names(kept, names)
                parent = lists[id(run[0])]
                parent._modules = {key: each for key, each in parent._modules.items() if each not in run}
    return like


def shares_of_blocks(model: nn.Module, shares: Iterable[float]) -> tuple[float, ...]:
    """Returns those of `shares` that are different numbers of the blocks that `model` repeats; of several that are the
    same number the one that is closest to it."""
    lists = block_lists(model)
    whole, of_number = len(spread(lists, 1.0)), dict[int, list[float]]()
    for share in shares:
        of_number.setdefault(len(spread(lists, share)), []).append(share)
    return tuple(min(each, key=lambda share: abs(share * whole - number)) for number, each in of_number.items())


def block_lists(model: nn.Module) -> list[list[nn.Module]]:
    """Returns the lists of blocks that `model` repeats."""
    return list(repeated_blocks(model).values())


def spread(lists: Iterable[Sequence[nn.Module]], share: float) -> list[nn.Module]:
    """Returns the blocks that are a share of each list, by `evenly_spread`."""
    return [block for blocks in lists for block in evenly_spread(blocks, share)]


def _names(run: Sequence[nn.Module], names: Mapping[int, str]) -> Run:
    return tuple(names[id(block)] for block in run)


def _kind(block: nn.Module) -> tuple[object, ...]:
    modules = ((name, type(each)) for name, each in block.named_modules())
    parameters = (
        (name, each.shape, each.dtype, each.requires_grad)
        for name, each in block.named_parameters(remove_duplicate=False)
    )
    return (*modules, *parameters)


def with_blocks(sharded: Sharded, like: Mapping[Run, Run], work: Work) -> Sharded | None:
    """Returns `sharded`, of a model that was thinned out, with the blocks that were removed. None if parameters of
    blocks belong to units around them, which would be larger than they are in `sharded`.

    Args:
        sharded: of the model that is left; its modules and parameters are numbered as in `work`.
        like: what `thin_out` has returned.
        work: of the whole model.
    """
    kept = {block: run for run in like.values() for block in run}
    numbers = {module.name: number for number, module in enumerate(work.modules)}
    run_of_unit = [_run_of([work.modules[at].name for at in unit.modules], kept) for unit in sharded.units]
    names = {parameter.name: number for number, parameter in enumerate(work.parameters)}
    for number, place in sharded.places.items():
        if _run_of([work.parameters[number].name], kept) != run_of_unit[place.unit]:
            return None

    def in_run(unit: PlayedUnit, run: Run, before: Run) -> PlayedUnit:
        own = [_renamed(work.modules[at].name, before, run) for at in unit.modules]
        return replace(unit, name=", ".join(own), modules=tuple(numbers[name] for name in own))

    # By the old number of a unit and the run that it is in now.
    units = {(at, run_of_unit[at]): unit for at, unit in enumerate(sharded.units)}
    for run, before in like.items():
        for at, unit in enumerate(sharded.units):
            if run_of_unit[at] == before:
                units[at, run] = in_run(unit, run, before)
    order = sorted(units, key=lambda each: min(units[each].modules))
    moved = {each: number for number, each in enumerate(order)}
    of_kept = [moved[at, run_of_unit[at]] for at in range(len(sharded.units))]
    removed = {block: run for run in like for block in run}
    places = {}
    for name, number in names.items():
        run = _run_of([name], removed)
        found = sharded.places.get(names[_renamed(name, run, like[run]) if run else name])
        if found is not None:
            places[number] = replace(found, unit=moved[found.unit, run or run_of_unit[found.unit]])
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


def _run_of(names: Iterable[str], runs: Mapping[str, Run]) -> Run:
    """Returns the run, by its blocks' names, that all of these modules or parameters are in; () for none."""
    found = {next((run for block, run in runs.items() if _is_in(name, block)), ()) for name in names}
    return found.pop() if len(found) == 1 else ()


def _is_in(name: str, block: str) -> bool:
    return name == block or name.startswith(block + ".")


def _renamed(name: str, before: Run, after: Run) -> str:
    """Returns the name in the blocks `after` of what `name` is in the blocks `before`."""
    return next(new + name.removeprefix(old) for old, new in zip(before, after, strict=True) if _is_in(name, old))


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
    lists = block_lists(model)
    if len(lists) != 1 or len(lists[0]) <= num_blocks or len({_kind(block) for block in lists[0]}) > 1:
        return None
    places = registrations(model)
    if any(places[id(each)] > 1 for block in lists[0][1:] for each in block.parameters()):
        return None
    ((name, blocks),) = repeated_blocks(model).items()
    around = model.get_submodule(name)
    every = around._modules
    around._modules = dict(list(every.items())[:num_blocks])
    try:
        return copy.deepcopy(model), len(blocks)
    finally:
        around._modules = every
