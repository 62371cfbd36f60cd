"""Private names of checkpointing: functions behind state dicts, `ShardedTensor`, and what files name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
import torch.distributed._state_dict_utils as _utilities

from sherd._torch.tensors import write_into

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard

_originals: dict[str, Callable[..., object]] = {}
"""The functions that `answer_checkpointing` has replaced, by name."""


def answer_checkpointing(answers: dict[str, Callable[..., object]]) -> None:
    """Have functions of torch's state dicts run as `answer(original, *args)` from now on, by name.

    They are those of `torch.distributed.checkpoint.state_dict`, which is imported by now, and of the file that sends
    and cuts full states for it. The first learns the names of an optimizer's parameters from `named_parameters()` and
    from instances of torch's FSDP only; no public function tells it. The second compares no shapes (2.2 to 2.15), and
    sends the padding of tensors that are views (2.11).
    """
    modules = _utilities, sys.modules.get("torch.distributed.checkpoint.state_dict")
    for name, answer in answers.items():
        if name not in _originals:
            module = next(candidate for candidate in modules if hasattr(candidate, name))
            original = _originals[name] = getattr(module, name)
            write_into(module, name, functools.wraps(original)(functools.partial(answer, original)))


def is_sharded_tensor(value: object) -> TypeGuard[ShardedTensor]:
    """Returns whether `value` is a `ShardedTensor`, whose package has no public name (1.10 to 2.15)."""
    # Without the package no ShardedTensor exists, so asking does not import it.
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(value, module.ShardedTensor)


def sharded_tensor_of_rows(unsharded: torch.Tensor, group: dist.ProcessGroup) -> ShardedTensor:
    """Returns `unsharded`, which every rank of `group` has, as a `ShardedTensor` of rows in memory of its own.

    DTensor replaces `ShardedTensor`, but programs written for FSDP1 expect one (private from 1.10 to 2.15).
    """
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard

    shards, described, first = [], [], 0
    for rank, rows in enumerate(unsharded.chunk(group.size())):
        where = f"rank:{dist.get_global_rank(group, rank)}/{unsharded.device}"
        offsets = [first] + [0] * (unsharded.dim() - 1)
        described.append(ShardMetadata(offsets, list(rows.shape), where))
        if rank == group.rank():
            shards.append(Shard(rows.clone(), described[-1]))
        first += len(rows)
    properties = TensorProperties(dtype=unsharded.dtype, layout=unsharded.layout, requires_grad=False)
    metadata = ShardedTensorMetadata(described, unsharded.shape, properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata, process_group=group)


def full_of_sharded_tensor(
    value: object, device: torch.device, shards: Sequence[Shard] | None = None
) -> torch.Tensor | None:
    """Returns the full tensor of a `ShardedTensor`; None for any other value. All ranks of its group must call.

    Args:
        value: any object.
        device: a device on which the group has collectives.
        shards: this rank's shards; None takes `value.local_shards()`.
    """
    if not is_sharded_tensor(value):
        return None
    group, metadata = value._process_group, value.metadata()
    full = torch.empty(metadata.size, dtype=metadata.tensor_properties.dtype, device=device)
    own = value.local_shards() if shards is None else shards
    mine = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in own}
    for shard in metadata.shards_metadata:
        place = full
        for dim, (start, size) in enumerate(zip(shard.shard_offsets, shard.shard_sizes, strict=True)):
            place = place.narrow(dim, start, size)
        sent = torch.empty(shard.shard_sizes, dtype=full.dtype, device=device)
        if tuple(shard.shard_offsets) in mine:
            sent.copy_(mine[tuple(shard.shard_offsets)])
        assert shard.placement is not None, "a shard of a ShardedTensor has a rank"
        dist.broadcast(sent, src=shard.placement.rank(), group=group)
        place.copy_(sent)
    return full


# Names inside of files


def rebuild_tensor() -> Callable[..., object]:
    """Returns the function that files of `torch.save` name for a tensor of a typed storage, since torch 0.4."""
    rebuild: Callable[..., object] = torch._utils._rebuild_tensor_v2
    return rebuild


def rebuild_tensor_of_bytes() -> Callable[..., object]:
    """Returns the function for a dtype without a typed storage (float8, unsigned integers), since torch 2.1."""
    rebuild: Callable[..., object] = torch._utils._rebuild_tensor_v3
    return rebuild


def storage_info(path: str, offset: int, length: int) -> object:
    """Returns the record in `.metadata` of where a file of `torch.distributed.checkpoint` has an item, since 2.0."""
    from torch.distributed.checkpoint import filesystem  # takes long to load

    return filesystem._StorageInfo(path, offset, length)
