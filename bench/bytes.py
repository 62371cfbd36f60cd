"""How many bytes does a step move? Written in memory and sent over the wire, counted by operation."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sherd.comm import transport
from sherd.comm.host import gloo, shared_memory, sums

from .models import num_bytes
from .ranks import Conditions, on_fake_ranks, on_ranks
from .steps import workloads
from .systems import FLAT, PLAIN, WRAPPERS, Trainee, contenders
from .table import Aim, Aims, Figure, Row, row_of_counts

NUM_FAKE_RANKS = 16

# What a rank sends, at least, for one collective over W ranks: which argument's bytes (the unsharded buffer, all
# ranks' parts), times which multiple of (W - 1) / W. What a broadcast, a gather or a scatter costs is shared out over
# the ranks.
WIRE = {
    "c10d::_allgather_base_": (0, 1),
    "c10d::allgather_": (0, 1),
    "c10d::allgather_into_tensor_coalesced_": (0, 1),
    "c10d::_reduce_scatter_base_": (1, 1),
    "c10d::reduce_scatter_": (1, 1),
    "c10d::reduce_scatter_tensor_coalesced_": (1, 1),
    "c10d::alltoall_base_": (1, 1),  # where it is told no sizes
    "c10d::alltoall_": (1, 1),
    "c10d::allreduce_": (0, 2),
    "c10d::allreduce_coalesced_": (0, 2),
    "c10d::broadcast_": (0, 1),
    "c10d::gather_": (1, 1),
    "c10d::scatter_": (0, 1),
    "c10d::barrier": (0, 0),
    # DTensor's own: the first argument is the result.
    "_c10d_functional::all_gather_into_tensor": (0, 1),
    "_c10d_functional::reduce_scatter_tensor": (1, 1),
    "_c10d_functional::all_reduce": (1, 2),
}

COLLECTIVE = ("c10d", "_c10d_functional")
SENDS_NOTHING = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}

# Between two ranks: which argument's bytes are sent.
SENDS = {"c10d::send": 0}
RECEIVES = {"c10d::recv_", "c10d::recv_any_source_"}

SIZES_SENT = 4  # the argument of an all-to-all that says how much each rank is sent

# Where sherd's transports move bytes themselves, beside or in the place of torch's collectives.
TRANSPORT_FILES = {module.__file__ for module in (gloo, shared_memory, sums, transport)}

# FSDP2's copy-in writes all of its first argument, though its schema declares no write.
WRITES_UNDECLARED = {"fsdp::all_gather_copy_in": 0}

# Declared as writes, or returning fresh storage, these move nothing.
MOVES_NOTHING = {"resize_", "set_", "detach_", "record_stream", "wait_tensor", "_wrap_tensor_autograd"}


class MovedBytes(TorchDispatchMode):
    """Counts bytes per operation: `written` to memory, and `sent` by collectives over `num_ranks` ranks.

    Beside them `calls`, how often each collective is called, and `flops` of products, two for a multiplication and its
    addition.

    Written is what an operation's schema says it changes, and what it returns in fresh storage. Views and
    bare allocations write nothing. Inside a collective of torch's nothing is seen: its cost is `WIRE`'s. What sherd's
    transports write is `carried`, apart from the rest: over shared memory that is the wire.
    """

    def __init__(self, num_ranks: int, rank: int = 0) -> None:
        super().__init__()
        self.num_ranks = num_ranks
        self.rank = rank
        self.written: Counter[str] = Counter()
        self.carried: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own dispatch then runs on the local tensors, which come back here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if func.namespace in COLLECTIVE and name not in SENDS_NOTHING:
            given = args if func.namespace == "c10d" else (result, *args)
            self.sent[name] += bytes_sent(name, given, *self._ranks_of(args))
            self.calls[name] += 1
        else:
            if product := flop_registry.get(func._overloadpacket):
                self.flops += product(*args, **kwargs, out_val=result)
            by_whom = self.carried if called_by_transport() else self.written
            by_whom[name] += bytes_written(func, args, kwargs, result)
        return result

    def _ranks_of(self, args: tuple[Any, ...]) -> tuple[int, int]:
        """Between how many ranks a collective is, and which of them this is."""
        group = _group_in(args)
        return (self.num_ranks, self.rank) if group is None else (group.size(), group.rank())


def _group_in(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """The process group among the arguments of a collective."""
    for each in args:
        if isinstance(each, torch.ScriptObject):
            with suppress(RuntimeError):
                return dist.ProcessGroup.unbox(each)
    return None


def called_by_transport() -> bool:
    """Whether one of sherd's transports is at work, be it through a function that the engine has handed to it.

    `land` puts a rank's part of a gather into place: the others' for the transport, this rank's own a little later.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in TRANSPORT_FILES or frame.f_code.co_name == "land":
            return True
        frame = frame.f_back
    return False


def bytes_sent(name: str, args: tuple[Any, ...], num_ranks: int, rank: int) -> int:
    """What `rank` sends for the collective `name`, by the algorithm that sends least; or to one other rank."""
    if name == "c10d::alltoall_base_" and args[SIZES_SENT]:
        _, given, *_ = args
        to_others = sum(args[SIZES_SENT]) - args[SIZES_SENT][rank]
        return to_others * bytes_of(given[:1])  # rows of the first dim
    if name in SENDS:
        return bytes_of(args[SENDS[name]])
    if name in RECEIVES:
        return 0
    if name not in WIRE:
        raise NotImplementedError(f"{name}: say in bench/bytes.py, WIRE, how many bytes it sends")
    which, times = WIRE[name]
    return times * bytes_of(args[which]) * (num_ranks - 1) // num_ranks


def bytes_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes `func` changed in its arguments, plus bytes it returned in storage no argument has."""
    schema = func._schema
    name = schema.name.split("::")[1]
    if schema.name in WRITES_UNDECLARED:
        return bytes_of(args[WRITES_UNDECLARED[schema.name]])
    if name in MOVES_NOTHING or "empty" in name:
        return 0
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    changed = [
        given.get(argument.name)
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    known = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
    fresh = [tensor for tensor in tensors_in(result) if tensor.untyped_storage()._cdata not in known]
    return bytes_of(changed) + bytes_of(fresh)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def bytes_of(tree: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(tree))


def measure(conditions: Conditions) -> Figure:
    real = on_ranks(conditions, traffic, conditions.quick)[0]
    fake = on_fake_ranks(conditions, NUM_FAKE_RANKS, traffic, conditions.quick)
    kind = "ranks" if conditions.group_is_real else "fake ranks"
    aims = [Aim(1.0, of=system.name) for system in (FLAT, *WRAPPERS)] if conditions.num_ranks == 2 else None
    return Figure(
        [
            *_rows(real, f"{conditions.num_ranks} {kind}", conditions.num_ranks, aims),
            *_rows(fake, f"{NUM_FAKE_RANKS} fake ranks", NUM_FAKE_RANKS, None),
        ],
        {"real": real, "fake": fake},
    )


Moved = dict[str, dict[str, dict[str, float]]]


def _rows(moved: Moved, where: str, num_ranks: int, aims: Aims) -> Iterator[Row]:
    """Copies less those of the plain module, and the wire, all in units of N."""
    total = {name: {kind: sum(by_op.values()) for kind, by_op in kinds.items()} for name, kinds in moved.items()}
    plain = total.pop(PLAIN.name)["written"]
    copied = {name: kinds["written"] - plain for name, kinds in total.items()}
    carried = {name: kinds["carried"] for name, kinds in total.items() if kinds["carried"]}
    sent = {name: kinds["sent"] for name, kinds in total.items()}
    usual = 3 * (num_ranks - 1) / num_ranks
    yield row_of_counts(f"bytes copied, {where}", "N", copied, aims, "forward and backward")
    if carried:
        yield row_of_counts(
            f"bytes copied by a transport, {where}", "N", carried, None, "shared memory: the wire itself"
        )
    yield row_of_counts(f"bytes on the wire, {where}", "N", sent, None, f"2 gathers, 1 reduction: {usual:.3g}")


def traffic(mesh: DeviceMesh, quick: bool) -> Moved:
    """On a rank: bytes per system, kind and operation, in units of N, the bytes of the GPT's parameters."""
    workload = workloads(quick)[0]
    unit = num_bytes(workload.build())
    moved: Moved = {}
    for system in contenders(mesh):
        count = count_second_step(Trainee(system, workload, mesh), mesh.size())
        moved[system.name] = {
            kind: {name: size / unit for name, size in by_op.most_common() if size}
            for kind, by_op in (("written", count.written), ("carried", count.carried), ("sent", count.sent))
        }
    return moved


def count_second_step(trainee: Trainee, num_ranks: int) -> MovedBytes:
    """Forward and backward, once all that is made once is made; the optimizer copies nothing."""
    trainee.forward_backward(trainee.batch(0))
    trainee.drop_gradients()
    batch = trainee.batch(1)
    with MovedBytes(num_ranks, dist.get_rank()) as count:
        trainee.forward_backward(batch)
    return count
