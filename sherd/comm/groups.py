"""Process groups that sherd makes in addition to the user's, so that neither waits for the other; and their end."""

from __future__ import annotations

import atexit
import hashlib
import os
import resource
import threading
import time
import weakref
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sherd._torch import adopt_timeout, connection_of, gloo_on_demand, named_group, timeout_of
from sherd.comm.failures import named
from sherd.errors import MeshError

_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""By parent, then by purpose and ranks. An entry goes with its parent, so a later group of that name starts empty."""

_makers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""By parent: the thread that made its first further group. Ranks may be threads, which know their own groups only."""

# Groups whose parents were collected. A finalizer, which may run at any moment, only notes them; the next call that
# makes a group destroys them.
_orphans: list[weakref.ref[dist.ProcessGroup]] = []

_Meshes = dict[tuple[dist.ProcessGroup | None, str], DeviceMesh]
"""By replicate group and device type. The group itself is the key, because another group could get its id."""

_meshes: weakref.WeakKeyDictionary[threading.Thread, dict[dist.ProcessGroup, _Meshes]] = weakref.WeakKeyDictionary()
"""By thread, because ranks may be threads, which do not know each other's groups; then by shard group."""


_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
"""By group whose members can change: the connections that it had when sherd first used it."""


def group_beside(
    parent: dist.ProcessGroup, purpose: str, ranks: Sequence[int], device: torch.device, backend: str | None = None
) -> dist.ProcessGroup:
    """Returns the group of `ranks` for `purpose`, and makes it on the first call.

    All of `ranks` must make that call; other ranks of `parent` need not. The group has the timeout that `parent` has
    for `device`.

    Args:
        parent: a group that holds all of `ranks`.
        purpose: one word; each purpose has a group of its own.
        ranks: global ranks, this rank among them.
        device: the device whose timeout is taken.
        backend: the backend; None means the default group's.

    Raises:
        CommError: not all of `ranks` make the first call.
        MeshError: this process cannot open as many files as the group takes.
    """
    if parent not in _beside:
        _beside[parent], _makers[parent] = {}, threading.get_ident()
    groups = _beside[parent]
    key = (purpose, tuple(ranks))
    if key not in groups:
        _destroy_orphans()
        _require_descriptors(_OF_A_GROUP, f"the group for {purpose}")
        # The parent's name is the same on all of its ranks, and no other living group has it.
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()  # a list of thousands of ranks is long
        name = f"sherd/{parent.group_name}/{purpose}/{digest}"
        with named(f"the start of the group for {purpose}", parent):
            group = groups[key] = named_group(name, ranks, timeout_of(parent, device), backend)
        # Not at the end of the process, when no later call would destroy what was noted.
        weakref.finalize(parent, _orphans.append, weakref.ref(group)).atexit = False
    return groups[key]


def _destroy_orphans() -> None:
    """Destroy the further groups of parents that are gone: each group has sockets and threads."""
    mine = [parent for parent, thread in list(_makers.items()) if thread == threading.get_ident()]
    for parent in filter(is_destroyed, mine):
        del _makers[parent]
        _orphans.extend(map(weakref.ref, _beside.pop(parent, {}).values()))
    while _orphans:
        group = _orphans.pop()()
        if group is not None and not is_destroyed(group):
            dist.destroy_process_group(group)


def host_group_beside(
    parent: dist.ProcessGroup, purpose: str, ranks: Sequence[int], device: torch.device
) -> dist.ProcessGroup:
    """Returns a group of the host for `ranks` that work on `device`; for the arguments and errors see `group_beside`.

    It is over `gloo_on_demand` if `device` is an accelerator or `parent` is on gloo.
    """
    is_host = device.type == "cpu"
    if is_host:
        adopt_timeout(parent)
    on_gloo = not is_host or "cpu:gloo" in dist.get_backend_config(parent).split(",")
    return group_beside(parent, purpose, ranks, device, gloo_on_demand() if on_gloo else None)


_OF_A_GROUP = 16
"""The most descriptors of a group on demand: for listening, for waiting, and for connections."""


def _require_descriptors(number: int, what: str) -> None:
    """Raise MeshError if this process cannot open the `number` files more that `what` needs."""
    may_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        is_open = len(os.listdir("/proc/self/fd"))
    except OSError:
        return  # not Linux
    if 0 <= may_open < is_open + number:
        raise MeshError(
            f"this process may have {may_open} files and sockets open, and has {is_open}; {what} needs up to {number} "
            "more: raise the limit where the ranks are started (ulimit -n 4096, LimitNOFILE= of a service)"
        )


def default_group() -> dist.ProcessGroup:
    """Returns the default process group, and makes it from the environment of torchrun if there is none yet.

    Raises:
        MeshError: there is no such environment either.
    """
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise MeshError(
                "no process group: start with torchrun --nproc-per-node N, or call "
                "torch.distributed.init_process_group() before the model is sharded, and destroy_process_group() after "
                f"its last use (of what torchrun sets, the environment lacks {', '.join(missing)})"
            )
        size = int(os.environ["WORLD_SIZE"])
        _require_descriptors(2 * size + _OF_A_GROUP, f"a process group in which {size} ranks connect to each other")
        dist.init_process_group()
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup), "it is initialized"
    return group


def is_destroyed(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return True
    return False


def forget_destroyed(known: MutableMapping[dist.ProcessGroup, Any]) -> None:
    """Drop the entries of destroyed groups from `known`, which would keep the groups' threads alive."""
    for group in tuple(known):  # a snapshot: ranks may be threads
        if is_destroyed(group):
            known.pop(group, None)


def meshes_of(shard: dist.ProcessGroup) -> _Meshes:
    """Returns the meshes that this thread made for `shard`, by replicate group and device type.

    Meshes hold their groups, so the meshes of destroyed groups are dropped here.
    """
    by_shard = _meshes.setdefault(threading.current_thread(), {})
    forget_destroyed(by_shard)
    meshes = by_shard.setdefault(shard, {})
    for replicate, device_type in tuple(meshes):
        if replicate is not None and is_destroyed(replicate):
            del meshes[replicate, device_type]
    return meshes


def is_debugging_in_detail() -> bool:
    """Returns whether TORCH_DISTRIBUTED_DEBUG=DETAIL, under which torch compares the calls of all ranks by itself."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]


def network_namespace() -> str:
    """Returns the network namespace of this process, or "": hosts of one name may be namespaces of one machine."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def require_alive(group: dist.ProcessGroup, whose: str) -> None:
    """Raise MeshError if `group`, the group of `whose`, was destroyed, is not connected yet, or was remade."""
    if is_destroyed(group):
        raise MeshError(_DESTROYED.format(whose=whose))
    connection = connection_of(group)
    if connection is None:
        return
    if not connection:
        raise MeshError(
            f"the process group of {whose} was made with enable_reconfigure=True and is not connected: call "
            "torch.distributed._reconfigure(...) and wait for it before the model is sharded"
        )
    known = len(dist.get_process_group_ranks(group))  # torch keeps the ranks of init_process_group
    # What was made for the group (other groups, shared memory, agreed layouts) still has the ranks of before.
    if _connections.setdefault(group, connection) != connection or group.size() != known:
        raise MeshError(
            f"the process group of {whose} was remade by torch.distributed._reconfigure: it began with {known} ranks, "
            f"has {group.size()}, and this process is its rank {group.rank()} now. Shards, and the groups made for it, "
            "are those of the ranks of before: call destroy_process_group() and init_process_group(...) on the ranks "
            "that are left, shard a new model and load the last checkpoint, or start all ranks again"
        )


def group_of(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """Returns the process group of one axis of `mesh`.

    Raises:
        MeshError: the group was destroyed.
    """
    try:
        return mesh.get_group(axis)
    except (KeyError, ValueError, RuntimeError) as error:
        raise MeshError(_DESTROYED.format(whose=f"the mesh {mesh}")) from error


_DESTROYED = (
    "no process group: that of {whose} was destroyed (destroy_process_group()); destroy it after the last use of the "
    "model, or make group, mesh and model again"
)


def one_rank_group() -> dist.ProcessGroup:
    return group_beside(default_group(), "alone", [dist.get_rank()], torch.device("cpu"))


# The end of a process
#
# A Python that is being finalized ends any thread that asks for the GIL. In C++ code, such as a call of a store, this
# says "terminate called without an active exception" and raises SIGABRT. A thread of gloo asks for the GIL too, a
# moment after it reports a collective as done: it drops the last references to tensors (with torch 2.13, under its own
# FSDP2 too, in 2 of 50 processes on a busy machine).

_MOST_WAIT_S = 10.0  # on a crowded machine threads may be ready to run for seconds


@atexit.register
def _wait_for_gloo() -> None:
    latest = time.monotonic() + _MOST_WAIT_S
    while time.monotonic() < latest:
        time.sleep(0.002)  # releases the GIL, for which such a thread may be waiting
        if not is_at_work("pt_gloo_runloop"):  # torch's name
            return


def is_at_work(name: str) -> bool:
    """Returns whether a thread called `name` of this process is running or ready to run; on Linux only."""
    try:
        threads = [(thread / "stat").read_text() for thread in Path("/proc/self/task").iterdir()]
    except OSError:  # no such folder, or a thread has ended meanwhile
        return False
    # 1234 (name) S ...
    return any(
        name == text.partition("(")[2].rpartition(")")[0] and text.rpartition(")")[2][1] == "R" for text in threads
    )
