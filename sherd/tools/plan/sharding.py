"""A sharded model in numbers, for the simulator. Of many equal blocks only one is sharded, and copied in numbers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from sherd.api.blocks import evenly_spread, in_groups, registrations, repeated_blocks
from sherd.comm.mesh import DataMesh
from sherd.engine import Group, ShardedParameter, Unit, sizes_of
from sherd.memory.report import batch_bytes_of, state_for
from sherd.policy import Codec, OffloadPolicy, Reduction
from sherd.schedule.moments import Arrival, GroupSizes
from sherd.schedule.state import UnitSpec
from sherd.tensor.ragged import local_part
from sherd.tools.plan.operations import Accesses, group_of
from sherd.tools.simulate.sharded import UNTOUCHED, Optimizer, Sharded, SteppedPart, Touched, Traffic
from sherd.tools.simulate.sharded import SimulatedUnit as PlayedUnit
from sherd.tools.simulate.work import Work
from sherd.wrap.names import plain_name

# Reading a sharded model


def sharded_of(model: nn.Module, work: Work, optimizer: Optimizer, matrices: Collection[str] = ()) -> Sharded:
    """Returns what the simulator knows of `model`, the root that `fully_shard` was called on last.

    Args:
        model: sharded over ranks that need not exist, on any device.
        work: a micro-batch of the same model before it was sharded.
        optimizer: steps all trainable parameters.
        matrices: the names of parameters that it steps as wholes.
    """
    units = Unit.below(model)
    state = state_for(model, units)
    names = {id(module): plain_name(name) for name, module in model.named_modules(remove_duplicate=False)}
    modules = {module.name: number for number, module in enumerate(work.modules)}
    parameters = {parameter.name: number for number, parameter in enumerate(work.parameters)}
    places: dict[int, Arrival] = {}
    for number, unit in enumerate(units):
        for group, weights in enumerate(unit.weights):
            for index, parameter in enumerate(weights.group.trained):
                places[parameters[_name_in(names, parameter)]] = Arrival(number, group, index)
    widened = {parameter.name: parameter.widened for parameter in work.parameters}
    return Sharded(
        tuple(_played(unit, names, modules, matrices, widened) for unit in units),
        state.specs,
        state.limits,
        batch_bytes_of(units),
        places,
        optimizer,
    )


def most_loaded(model: nn.Module) -> int:
    """Returns the rank that has the most elements of the shards of `model`; the first of several."""
    numel: Counter[int] = Counter({dist.get_rank(): 0})
    for weights in (weights for unit in Unit.below(model) for weights in unit.weights):
        mesh, numels = weights.group.mesh, weights.group.packing.shard_numels
        for shard, rank in enumerate(mesh.shard_ranks if mesh.shard_group is not None else ()):
            numel[rank] += sum(numels[piece] for piece in mesh.pieces_of(shard))
    return max(sorted(numel), key=numel.__getitem__)


def _played(
    unit: Unit, names: dict[int, str], modules: dict[str, int], matrices: Collection[str], widened: Mapping[str, int]
) -> PlayedUnit:
    groups = [weights.group for weights in unit.weights if weights.group.trained]
    own = [each for group in groups for each in group.parameters if _name_in(names, each) in matrices]
    by_param = [
        (group, each, [group.parameters[member] for member in each.members if group.parameters[member] in own])
        for group in groups
        for each in group.optimizer_params
    ]
    return PlayedUnit(
        name_of(unit, names),
        unit.class_name,
        sum(parameter.shape.numel() for parameter in unit.parameters),
        tuple(modules[names[id(module)]] for module in unit.modules),
        tuple(
            _arriving(names, each, weights.group, widened)
            for each, weights in zip(sizes_of(unit), unit.weights, strict=True)
        ),
        tuple(traffic_of(unit)),
        tuple(
            stepped_bytes(each.parameter, group) - sum(record.local.nbytes for record in inside)
            for group, each, inside in by_param
            if len(inside) < len(each.members)
        ),
        tuple(record.gradient_cut.local_numel(record.mesh.piece) * record.dtype.itemsize for record in own),
        tuple(
            SteppedPart(each.shard_numel, sum(stepped_bytes(of.parameter, each) for of in each.optimizer_params))
            for each in groups
        ),
        sum(parameter.shape.numel() * parameter.dtype.itemsize for parameter in unit.parameters),
        _policy_of(unit),
    )


def stepped_bytes(parameter: nn.Parameter, group: Group) -> int:
    """Returns the bytes that the optimizer steps of a shard: of its float32 masters, if it has any."""
    local = local_part(parameter)
    return int(local.nbytes if group.masters is None else 4 * local.numel())


def _policy_of(unit: Unit) -> OffloadPolicy:
    """Returns where the state of `unit` rests: on the device, if that is the host."""
    place, own = unit.place, OffloadPolicy(activations="device" if unit.backward.offload is None else "host")
    if place.is_elsewhere:
        return replace(own, parameters=place.parameters, gradients="host", optimizer=place.state, masters=place.masters)
    masters = "device" if place.masters == "host" and unit.mesh.device.type == "cpu" else place.masters
    return replace(own, optimizer=place.state if place.brings_state else None, masters=masters)


def _arriving(names: Mapping[int, str], sizes: GroupSizes, group: Group, widened: Mapping[str, int]) -> GroupSizes:
    """Returns `sizes` with gradients as wide as autograd makes them, where the engine lets them."""
    times = [widened[_name_in(names, each)] if None in group.arriving else 1 for each in group.trained]
    return replace(sizes, arriving=tuple(nbytes * by for nbytes, by in zip(sizes.arriving, times, strict=True)))


def _name_in(names: Mapping[int, str], parameter: ShardedParameter) -> str:
    """Returns the name of a parameter in the model whose modules have `names` by their ids."""
    place = parameter.places[0]
    module = names[place.module_id]
    return f"{module}.{place.attribute}" if module else place.attribute


def name_of(unit: Unit, names: dict[int, str]) -> str:
    """Returns the name of `unit`, where modules have `names` by their ids."""
    return ", ".join(names[id(module)] for module in unit.modules if id(module) in names) or unit.class_name


def traffic_of(unit: Unit) -> Iterator[Traffic]:
    """Yields the bytes of the collectives of each group of `unit`, and the operations of their formats."""
    for weights in unit.weights:
        group, plan = weights.group, weights.plan
        mesh, dtype = group.mesh, group.reduce_dtype
        sent = plan.reduced_by_piece if group.trained else ()
        of_shards, of_replicas = mesh.comm.reductions
        codec = None if plan.is_never_gathered else plan.codec
        encoding, _ = _coding(codec, group.compute_dtype, 1, group.shard_numel)
        _, decoding = _coding(codec, group.compute_dtype, mesh.num_shards, sum(group.shard_sizes))
        if codec is not None and not plan.may_be_rows:  # each rank's part is copied into place
            copied = 2 * group.compute_dtype.itemsize * sum(group.shard_sizes)
            decoding = Touched.together(decoding, Touched(copied, mesh.num_shards * len(group.parameters)))
        gathered = group.packing.gathered_numel * group.compute_dtype.itemsize
        gathered = gathered if codec is None else sum(map(codec.num_bytes, group.shard_sizes))
        by_replica = sum(sent) // mesh.num_shards
        yield Traffic(
            gathered=0 if plan.is_never_gathered or mesh.only_sums else gathered,
            reduced=_reduced(of_shards, sent, dtype) if mesh.num_shards > 1 else 0,
            all_reduced=_reduced(of_replicas, sent, dtype) // mesh.num_shards * (mesh.num_replicas > 1),
            owned=group.shard_buffer.nbytes,
            copied=group.shard_numel * group.compute_dtype.itemsize,
            shard=group_of(mesh.shard_group),
            replicate=group_of(mesh.replicate_group),
            encoding=encoding,
            decoding=decoding,
            reducing=_summing(of_shards, mesh, mesh.shard_group, dtype, sum(sent)),
            all_reducing=_summing(of_replicas, mesh, mesh.replicate_group, dtype, by_replica, goes_back=True),
        )


def _reduced(reduction: Reduction | None, sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Returns the bytes of a reduction of parts of `sizes` elements."""
    if reduction is None:
        return sum(sizes) * dtype.itemsize
    from sherd.comm.owner_sums import num_bytes  # of few policies, so loaded late

    return num_bytes(reduction, sizes, dtype)


def _summing(
    reduction: Reduction | None,
    mesh: DataMesh,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype,
    numel: int,
    goes_back: bool = False,
) -> Touched:
    """Returns the operations of a rank to have `numel` elements added up by their owners, and the sums sent back.

    There are none where the transport adds up by itself in the dtype of the sum.
    """
    if reduction is None or group is None or group.size() == 1 or not numel:
        return UNTOUCHED
    from sherd.codecs import codec_of  # of few policies, so loaded late

    num_ranks, wire, codec = group.size(), reduction.wire_dtype(dtype), codec_of(reduction.wire)
    codec = codec if dtype.is_floating_point else None
    total = reduction.sum_dtype(wire)
    adds_alone = codec is None and not reduction.is_in_order
    if adds_alone and mesh.transport_of(group).sum_dtype(wire) is total:
        return UNTOUCHED
    rounded = Touched((dtype.itemsize + wire.itemsize) * numel, 1) if wire is not dtype else UNTOUCHED
    encoding, decoding = (rounded, UNTOUCHED) if codec is None else _coding(codec, dtype, num_ranks, numel)
    # A rank receives as many elements, of all ranks together, as it sends.
    adding = Touched((2 * total.itemsize + (wire if codec is None else total).itemsize) * numel, num_ranks)
    parts = [encoding, decoding, adding]
    if goes_back:
        parts += [rounded] if codec is None else [_coding(codec, dtype, 1, numel // num_ranks)[0], decoding]
    return Touched.together(*parts)


@cache
def _coding(codec: Codec | None, dtype: torch.dtype, num_parts: int, numel: int) -> tuple[Touched, Touched]:
    """Returns the operations that encode, and that decode, `numel` elements in so many parts; none without a codec."""
    if codec is None:
        return UNTOUCHED, UNTOUCHED
    from sherd.codecs import parts_at_once  # of few policies, so loaded late

    of_part = numel // num_parts
    num_calls = -(-num_parts // parts_at_once(codec, [of_part]))
    values = torch.empty(of_part, dtype=dtype, device="meta")
    encoded = torch.empty(codec.num_bytes(of_part), dtype=torch.uint8, device="meta")
    with Accesses() as encoding:
        codec.encode(values, encoded)
    with Accesses() as decoding:
        codec.decode(encoded, values)
    encodes, decodes = (Touched(num_parts * each.nbytes, num_calls * each.num_ops) for each in (encoding, decoding))
    return encodes, decodes


# Equal blocks

Run = tuple[str, ...]
"""The names of neighbouring blocks whose units are made together: one block, or two blocks of one unit."""


def block_lists(model: nn.Module) -> list[list[nn.Module]]:
    return list(repeated_blocks(model).values())


def spread(lists: Iterable[Sequence[nn.Module]], share: float) -> list[nn.Module]:
    """Returns a share of the blocks of each list, by `evenly_spread`."""
    return [block for blocks in lists for block in evenly_spread(blocks, share)]


def shares_of_blocks(model: nn.Module, shares: Iterable[float]) -> tuple[float, ...]:
    """Returns one of `shares` for each number of repeated blocks that the shares stand for: the closest one."""
    lists = block_lists(model)
    whole, of_number = len(spread(lists, 1.0)), dict[int, list[float]]()
    for share in shares:
        of_number.setdefault(len(spread(lists, share)), []).append(share)
    return tuple(min(alike, key=lambda share: abs(share * whole - number)) for number, alike in of_number.items())


def with_fewer_blocks(model: nn.Module, num_blocks: int) -> tuple[nn.Module, int] | None:
    """Returns a copy of `model` with only its first `num_blocks` blocks, and the number of blocks of `model`.

    `model` is on the meta device, and its copy runs as it does. None if `model` has not more blocks, blocks of several
    kinds or in several lists, or blocks that share parameters.
    """
    lists = block_lists(model)
    if len(lists) != 1 or len(lists[0]) <= num_blocks or len({_kind(block) for block in lists[0]}) > 1:
        return None
    places = registrations(model)
    if any(places[id(parameter)] > 1 for block in lists[0][1:] for parameter in block.parameters()):
        return None
    ((name, blocks),) = repeated_blocks(model).items()
    around = model.get_submodule(name)
    every = around._modules
    # The other blocks are taken out for a moment, so that they are not copied.
    around._modules = dict(list(every.items())[:num_blocks])
    try:
        return copy.deepcopy(model), len(blocks)
    finally:
        around._modules = every


def thin_out(model: nn.Module, together: int = 1) -> dict[Run, Run]:
    """Remove from `model` all runs of `together` blocks but the first run of each kind.

    Blocks are of one kind if their modules and parameters have the same names, classes, shapes and dtypes. A run that
    shares a parameter with another module stays. The model that is left is not to be run.

    Returns:
        By the names of each removed run, the names of the run of its kind that is left.
    """
    places = registrations(model)
    names = {id(module): name for name, module in model.named_modules()}
    lists = {id(block): parent for parent in model.modules() for block in parent.children()}
    like: dict[Run, Run] = {}
    for blocks in repeated_blocks(model).values():
        first: dict[tuple[object, ...], Sequence[nn.Module]] = {}
        for run in in_groups(blocks, together):
            kept = first.setdefault(tuple(map(_kind, run)), run)
            is_alone = all(places[id(parameter)] == 1 for block in run for parameter in block.parameters())
            if kept is not run and is_alone:
                removed = tuple(names[id(block)] for block in run)
                like[removed] = tuple(names[id(block)] for block in kept)
                parent = lists[id(run[0])]
                parent._modules = {key: block for key, block in parent._modules.items() if block not in run}
    return like


def _kind(block: nn.Module) -> tuple[object, ...]:
    modules = ((name, type(module)) for name, module in block.named_modules())
    parameters = (
        (name, parameter.shape, parameter.dtype, parameter.requires_grad)
        for name, parameter in block.named_parameters(remove_duplicate=False)
    )
    return (*modules, *parameters)


def with_blocks(sharded: Sharded, like: Mapping[Run, Run], work: Work) -> Sharded | None:
    """Returns `sharded`, read from a model that was thinned out, with the blocks that were removed.

    None if parameters of blocks belong to units around the blocks: such a unit is larger in the full model.

    Args:
        sharded: of the model that is left; its modules and parameters are numbered as in `work`.
        like: what `thin_out` returned.
        work: of the full model.
    """
    kept = {block: run for run in like.values() for block in run}
    numbers = {module.name: number for number, module in enumerate(work.modules)}
    run_of_unit = [_run_of([work.modules[at].name for at in unit.modules], kept) for unit in sharded.units]
    names = {parameter.name: number for number, parameter in enumerate(work.parameters)}
    for number, place in sharded.places.items():
        if _run_of([work.parameters[number].name], kept) != run_of_unit[place.unit]:
            return None

    # By the old number of a unit, and the run that its copy is in.
    units = {(at, run_of_unit[at]): unit for at, unit in enumerate(sharded.units)}
    for run, before in like.items():
        for at, unit in enumerate(sharded.units):
            if run_of_unit[at] == before:
                modules = [_renamed(work.modules[number].name, before, run) for number in unit.modules]
                numbered = tuple(numbers[name] for name in modules)
                units[at, run] = replace(unit, name=", ".join(modules), modules=numbered)
    order = sorted(units, key=lambda key: min(units[key].modules))
    moved = {key: number for number, key in enumerate(order)}
    of_kept = [moved[at, run_of_unit[at]] for at in range(len(sharded.units))]
    removed = {block: run for run in like for block in run}
    places = {}
    for name, number in names.items():
        run = _run_of([name], removed)
        arrival = sharded.places.get(names[_renamed(name, run, like[run]) if run else name])
        if arrival is not None:
            places[number] = replace(arrival, unit=moved[arrival.unit, run or run_of_unit[arrival.unit]])
    return replace(
        sharded,
        units=tuple(units[key] for key in order),
        specs=tuple(_moved(sharded.specs[at], of_kept) for at, _ in order),
        places=places,
    )


def renumbered(sharded: Sharded, before: Work, after: Work) -> Sharded:
    """Returns `sharded` with modules and parameters numbered as in `after` instead of as in `before`."""
    modules = {module.name: number for number, module in enumerate(after.modules)}
    parameters = {parameter.name: number for number, parameter in enumerate(after.parameters)}
    units = tuple(
        replace(unit, modules=tuple(modules[before.modules[number].name] for number in unit.modules))
        for unit in sharded.units
    )
    places = {parameters[before.parameters[number].name]: place for number, place in sharded.places.items()}
    return replace(sharded, units=units, places=places)


def with_replicas(sharded: Sharded, number: int) -> Sharded:
    """Returns `sharded` with `number` replicas in place of several."""

    def with_them(traffic: Traffic) -> Traffic:
        group = traffic.replicate
        return replace(traffic, replicate=replace(group, size=number)) if group.size > 1 else traffic

    units = (replace(unit, traffic=tuple(map(with_them, unit.traffic))) for unit in sharded.units)
    return replace(sharded, units=tuple(units))


def _run_of(names: Iterable[str], runs: Mapping[str, Run]) -> Run:
    """Returns the one of `runs`, by their blocks' names, that holds all these modules or parameters; () for none."""
    holding = {next((run for block, run in runs.items() if _is_in(name, block)), ()) for name in names}
    return holding.pop() if len(holding) == 1 else ()


def _is_in(name: str, block: str) -> bool:
    return name == block or name.startswith(block + ".")


def _renamed(name: str, before: Run, after: Run) -> str:
    """Returns the name in the blocks `after` of what has `name` in the blocks `before`."""
    return next(new + name.removeprefix(old) for old, new in zip(before, after, strict=True) if _is_in(name, old))


def _moved(spec: UnitSpec, numbers: Sequence[int]) -> UnitSpec:
    """Returns `spec` with the new numbers of the units in it."""
    ahead, behind = (
        None if units is None else tuple(numbers[unit] for unit in units)
        for units in (spec.forward_prefetch, spec.backward_prefetch)
    )
    tied_owners = tuple(numbers[unit] for unit in spec.tied_owners)
    return replace(spec, tied_owners=tied_owners, forward_prefetch=ahead, backward_prefetch=behind)
