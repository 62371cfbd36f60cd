"""Python objects sent from rank to rank: pickled, and moved as the bytes of a tensor.

torch's own calls for objects (`all_gather_object` and its kin) need numpy, which torch does not bring along.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from sherd._torch import backend_of, read_objects_with
from sherd.comm.failures import announced, named


def all_gather_objects(mine: object, what: str, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the objects of all ranks of `group`, in rank order. All ranks must call this.

    Args:
        mine: this rank's object, which pickle must take.
        what: the purpose of the exchange, for the error's text.
        group: a group of any backend; None means the default group.

    Raises:
        CommError: a rank has died, or did not come before the group's timeout.
    """
    with _announced(what, group):
        return exchange_objects(mine, what, group)


def exchange_objects(mine: object, what: str, group: dist.ProcessGroup | None = None) -> list[Any]:
    """As `all_gather_objects`, for ranks that compare what they do, and so come from different calls."""
    sent = _bytes_of(mine, device_of(group))
    with named(what, group):
        # An all-gather takes tensors of one length, so shorter ones are padded.
        lengths = _all_gather(torch.tensor([sent.numel()], device=sent.device), group)
        longest = max(int(length) for length in lengths)
        padded = torch.cat((sent, sent.new_zeros(longest - sent.numel())))
        arrived = _all_gather(padded, group)
    return [_object_of(pickled[: int(length)]) for pickled, length in zip(arrived, lengths, strict=True)]


def start_all_gather(own: bytes, into: Sequence[bytearray], group: dist.ProcessGroup) -> dist.Work:
    """Returns the all-gather of `own` into `into`, under way: equally many bytes from each rank of a host's `group`."""
    received = [torch.frombuffer(bytes_of_rank, dtype=torch.uint8) for bytes_of_rank in into]
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    # Past the dispatcher, where users count collectives.
    work: dist.Work = backend_of(group, sent.device).allgather([received], [sent])  # type: ignore[attr-defined]
    return work


def broadcast_object(value: object, what: str, group: dist.ProcessGroup | None = None) -> Any:
    """Returns the `value` of rank 0 of `group`, or of the default group, on all its ranks. All ranks must call this.

    Raises:
        CommError: a rank has died, or did not come before the group's timeout.
    """
    device, is_source = device_of(group), dist.get_rank(group) == 0
    sent = _bytes_of(value if is_source else None, device)
    # On the other ranks the source's length takes the place of this one, and says how much to allocate.
    length = torch.tensor([sent.numel()], device=device)
    with _announced(what, group), named(what, group):
        dist.broadcast(length, group=group, group_src=0)
        arrived = sent if is_source else sent.new_empty(int(length))
        dist.broadcast(arrived, group=group, group_src=0)
    return value if is_source else _object_of(arrived)


def _announced(what: str, group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
    # Each purpose has a group of its own, so its name tells calls apart.
    name = "all ranks" if group is None else group.group_name.rpartition("/")[0] or group.group_name
    return announced((group,), f"exchanges objects ({name})", what, is_rare=True)


def do_without_numpy() -> None:
    """Have torch's own calls for objects, which its checkpointing makes, do without numpy if numpy is missing.

    This changes torch for the entire process, so only a program that owns the process calls it.
    """
    try:
        torch.empty(0).numpy()
    except RuntimeError:
        read_objects_with(_object_of)


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    arrived = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(arrived, tensor, group=group)
    return arrived


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device on which `group` moves bytes: the CPU if the group can, as the bytes are in host memory."""
    devices = {backend.partition(":")[0] for backend in dist.get_backend_config(group).split(",")}
    if "cpu" in devices or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "there is one"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _bytes_of(value: object, device: torch.device) -> torch.Tensor:
    # A bytearray, because torch warns of memory that cannot be written.
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)


def _object_of(tensor: torch.Tensor) -> Any:
    return pickle.loads(raw_bytes(tensor))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    # `tensor.numpy()` needs numpy, and reading a storage is slow.
    copied = bytearray(tensor.numel())
    if copied:
        torch.frombuffer(copied, dtype=torch.uint8).copy_(tensor)
    return bytes(copied)
