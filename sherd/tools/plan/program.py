"""The lines of a program that trains as it was planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import nn

from sherd.api.blocks import repeated_blocks
from sherd.tools.plan.planner import fully_shard_args
from sherd.tools.simulate.settings import AXES, Settings


def program_of(settings: Settings, dtype: torch.dtype | None, model: nn.Module, device_type: str) -> Iterator[str]:
    """Yields lines: the mesh on `device_type`, checkpointing of the blocks of `model`, `auto_shard`, micro-batches."""
    sizes = {name: getattr(settings.mesh, field) for name, field in AXES.items() if name != "ep"}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "dp"}
    yield f'mesh = init_device_mesh("{device_type}", {(*sizes.values(),)}, mesh_dim_names={(*sizes,)})'
    yield from (f'# lay the model over mesh["{name}"]' for name in ("cp", "tp") if name in sizes)
    selective = ", context_fn=sherd.selective_contexts" if settings.recompute == "selective" else ""
    for name, blocks in repeated_blocks(model).items() if settings.checkpointing else ():
        count, number = len(blocks), round(settings.checkpointing * len(blocks))
        yield f"for at, block in enumerate(model{'.' * bool(name)}{name}):"
        yield f"    if (at + 1) * {number} // {count} > at * {number} // {count}:  # {number} of {count}, evenly spread"
        yield f"        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False{selective})"
    data = [name for name in ("replicate", "dp", "cp") if name in sizes]
    yield f"sherd.auto_shard(\n    model,\n    mesh=mesh[{', '.join(map(repr, data))}],"
    if "cp" in sizes:
        yield f"    dp_mesh_dims=sherd.DataParallelMeshDims({('dp', 'cp')}, {'replicate' if data[2:] else None!r}),"
    yield from (f"    {name}={_written(value)}," for name, value in fully_shard_args(settings, dtype).items())
    yield ")"
    if settings.micro_batches > 1:
        yield f"with sherd.accumulate(model, {settings.micro_batches}):\n    ...  # forward and backward of each"


def _written(value: object) -> str:
    """Returns a policy with the fields that are not the default ones."""
    if not is_dataclass(value):
        return repr(value)
    told = {each.name: getattr(value, each.name) for each in fields(value) if getattr(value, each.name) != each.default}
    return f"sherd.{type(value).__name__}({', '.join(f'{name}={each!r}' for name, each in told.items())})"
