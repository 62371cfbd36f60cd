"""A program's model, sharded as the program says, by either front end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from random import Random
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import sherd
from sherd.wrap import CustomPolicy
from tests.random_programs.models import Made, Root
from tests.random_programs.programs import Layer, Program
from tests.support.meshes import mesh_of
from tests.support.sharding import replace

Group = list[nn.Module]

_CUTS: dict[str, Any] = {
    "shard": None,
    "flat": sherd.Flat(),
    "blocks": sherd.Blocks(2),
    "whole": sherd.Owned(),
}


def sharded(program: Program, model: Root) -> Any:
    """`model` with all its units, changed in place; the wrapper is another module."""
    if program.front == "fully_shard":
        for group, layer in _in_some_order(program, units_of(model)):
            _shard(program, group, layer)
        _shard(program, [model], None)
        _set(program, model)
        return model
    return _wrapped(program, model)


# Which modules are units


def units_of(model: Root) -> dict[int, tuple[Group, Layer | None]]:
    """The modules of each unit below the root, and the layer that says how it is made."""
    groups: dict[int, tuple[Group, Layer | None]] = {}
    if model.program.stem == "unit":
        groups[id(model.stem)] = [model.stem], None
    taken: set[int] = set()
    for below in _lists_of(model):
        before: Group | None = None
        for module in below:
            if id(module) in taken:
                before = None
                continue
            if before is not None and module.layer.beside and _are_apart(module, before):
                before.append(module)
                taken.add(id(module))
            elif module.layer.unit or module.layer.beside:
                before = [module]
                groups[id(module)] = before, module.layer
                taken.add(id(module))
            else:
                before = None
    return groups


def _lists_of(model: Root) -> Iterator[list[Made]]:
    yield list(model.layers)
    for each in model.made:
        yield list(each.below)


def _are_apart(module: nn.Module, others: Group) -> bool:
    return all(module not in set(other.modules()) and other not in set(module.modules()) for other in others)


def _in_some_order(
    program: Program, groups: dict[int, tuple[Group, Layer | None]]
) -> Iterator[tuple[Group, Layer | None]]:
    """Units, each after all that are within it; otherwise drawn at random."""
    dice, left = Random(program.order), list(groups.values())
    while left:
        ready = [each for each in left if not any(_is_within(other[0], each[0]) for other in left if other is not each)]
        chosen = dice.choice(ready or left)
        left.remove(chosen)
        yield chosen


def _is_within(inner: Group, outer: Group) -> bool:
    around = {id(below) for module in outer for below in module.modules()}
    return any(id(module) in around for module in inner)


# fully_shard


def _shard(program: Program, group: Group, layer: Layer | None) -> None:
    placement = program.placement if layer is None or not layer.placement else layer.placement
    is_otherwise = dist.get_rank() == program.num_ranks - 1
    if is_otherwise and program.otherwise == "placement":
        placement = "whole" if placement == "flat" else "flat"
    is_root = isinstance(group[0], Root)
    options: dict[str, Any] = {
        "mesh": mesh_of({"": None, "1d": (program.num_ranks,), "2d": (2, 2)}[program.mesh]),
        "reshard_after_forward": program.root_reshard if is_root else None if layer is None else layer.reshard,
        "comm_policy": sherd.CommPolicy(program.transport),
        "prefetch_policy": sherd.PrefetchPolicy(*program.prefetch),
    }
    if placement == "shard1":
        options["shard_placement_fn"] = _last_dim
    else:
        options["placement"] = _CUTS[placement]
    if is_otherwise and program.otherwise == "parts":
        options["comm_policy"] = sherd.CommPolicy(program.transport, part_bytes=1 << 16)
    if program.strategy:
        options["placements"] = program.strategy
    if program.offload:
        options["offload_policy"] = sherd.CPUOffloadPolicy(pin_memory=False)
    if program.on_disk:
        options["offload_policy"] = _state_on_disk(program)
    sherd.fully_shard(group if len(group) > 1 else group[0], **options)


def _last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(max(parameter.dim() - 1, 0)) if parameter.dim() else None  # type: ignore[return-value]


_OF_THE_ROOT = {
    "reshard_after_backward": False,
    "separate_reduce_scatter_group": True,
    "reduce_scatter_max_input_buffers": 3,
    "reduce_scatter_unused_params": True,
}


def _set(program: Program, model: Any) -> None:
    for name, value in _OF_THE_ROOT.items():
        if name in program.setters:
            getattr(model, f"set_{name}")(value)
    units = [each for each in model.modules() if isinstance(each, sherd.FSDPModule)]
    if "divide_factor" in program.setters:
        for each in units:
            each.set_gradient_divide_factor(float(program.num_ranks))
    if program.otherwise == "divisor" and dist.get_rank() == program.num_ranks - 1:
        for each in units:
            each.set_gradient_divide_factor(program.num_ranks + 3.0)
    if program.lists:
        dice = Random(program.seed)
        for each in units:
            each.set_modules_to_forward_prefetch(dice.sample(units, dice.randint(0, min(2, len(units)))))
            each.set_modules_to_backward_prefetch(dice.sample(units, dice.randint(0, min(2, len(units)))))


def _state_on_disk(program: Program) -> sherd.OffloadPolicy:
    return sherd.OffloadPolicy(optimizer=sherd.Disk(gettempdir()), share=program.on_disk)


# The wrapper


def _wrapped(program: Program, model: Root) -> Any:
    groups = units_of(model)
    options = _wrapper_options(program)
    if program.policy:
        chosen = {id(module) for group, _ in groups.values() for module in group}
        policy = CustomPolicy(lambda module: id(module) in chosen)
        return sherd.FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    for (module,), _ in _in_some_order(program, groups):
        replace(model, module, sherd.FullyShardedDataParallel(module, **options))
    return sherd.FullyShardedDataParallel(model, **options)


def _wrapper_options(program: Program) -> dict[str, Any]:
    options: dict[str, Any] = {
        "device_mesh": mesh_of({"2d": (2, 2)}.get(program.mesh, (program.num_ranks,))),
        "use_orig_params": program.front == "wrapper",
        "forward_prefetch": program.prefetch[0] > 0,
        "backward_prefetch": (None, sherd.BackwardPrefetch.BACKWARD_PRE, sherd.BackwardPrefetch.BACKWARD_POST)[
            min(program.prefetch[1], 2)
        ],
        "cpu_offload": _state_on_disk(program) if program.on_disk else sherd.CPUOffload(program.offload),
    }
    strategies, keeps = sherd.ShardingStrategy, program.root_reshard is False
    if program.strategy:
        cut = _CUTS[program.placement]
        preset = sherd.Placements.preset(program.strategy, cut)
        if len(preset.levels) == 1 and program.mesh == "2d":
            preset = sherd.Placements(*(kind * 2 for kind in (preset.parameter, preset.gradient, preset.optimizer)))
        options["sharding_strategy"] = preset
    elif program.mesh == "2d":
        options["sharding_strategy"] = strategies._HYBRID_SHARD_ZERO2 if keeps else strategies.HYBRID_SHARD
    else:
        options["sharding_strategy"] = strategies.SHARD_GRAD_OP if keeps else strategies.FULL_SHARD
    return options


def without_sync(program: Program, model: Any, is_last: bool) -> AbstractContextManager[None]:
    """Around one of several backwards, of which only the last one reduces."""
    if program.front == "fully_shard":
        model.set_requires_gradient_sync(is_last)
        return nullcontext()
    return nullcontext() if is_last else model.no_sync()  # type: ignore[no-any-return]


def optimizer_of(model: nn.Module, of_matrices: bool = False, momentum: float = 0.0) -> torch.optim.Optimizer:
    """Plain gradient descent in large steps. `of_matrices`: by a function of whole matrices, where there are any."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return _Descent(trained) if of_matrices else torch.optim.SGD(trained, lr=0.3, momentum=momentum)


def _cloned(matrices: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Counts the steps of each matrix, row by row: all rows have seen as many wherever they have lain."""
    state["steps"] += 1
    assert torch.equal(state["steps"].amin(1), state["steps"].amax(1))
    return matrices.clone()


class _Descent(sherd.MatrixOptimizer):
    """Steps matrices as a function of them says, which changes nothing, and all else beside."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        matrices = [each for each in parameters if each.dim() > 1 and each.is_floating_point()]
        super().__init__(matrices, _cloned, state=lambda rows, columns: {"steps": (rows,)}, lr=0.3)
        others = [each for each in parameters if each.dim() < 2 or not each.is_floating_point()]
        self._others = torch.optim.SGD(others, lr=0.3) if others else None

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self._others is not None:
            self._others.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._others is not None:
            self._others.zero_grad(set_to_none)
