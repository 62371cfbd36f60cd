"""Private and renamed names of `torch.distributed`: collectives, process groups, their backends and timeouts."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, SupportsInt

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed import distributed_c10d

from sherd._torch.writes import write_into

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

# torch 2.13 renamed the two single-tensor collectives and warns about the old names; 2.11 and 2.12 know only those.
all_gather_single: Callable[..., dist.Work | None] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


SingleCollective = Callable[[torch.Tensor, torch.Tensor], dist.Work | None]


def bound_all_gather(group: dist.ProcessGroup) -> dict[bool, SingleCollective]:
    """Returns, by `async_op`, the method of `group` behind `all_gather_single`, bound with its options.

    Bound once, it spares two dozen calls of Python, which ask what does not change. Complex tensors are to be passed as
    real ones, and what it returns, if anything, is waited for without `async_op`, too: some backends leave that to the
    caller. `_allgather_base` and `_reduce_scatter_base` have no public names before 2.13 (2.11, 2.12).
    """
    return _bound(getattr(group, "all_gather_single", None) or group._allgather_base, AllgatherOptions)


def bound_reduce_scatter(group: dist.ProcessGroup) -> dict[bool, SingleCollective]:
    """Returns the method behind `reduce_scatter_single`, which sums, in the same way."""
    return _bound(getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base, ReduceScatterOptions)


def _bound(
    method: Callable[..., dist.Work | None], kind: type[AllgatherOptions] | type[ReduceScatterOptions]
) -> dict[bool, SingleCollective]:
    bound: dict[bool, SingleCollective] = {}
    for async_op in (False, True):
        options = kind()
        options.asyncOp = async_op
        bound[async_op] = functools.partial(method, opts=options)
    return bound


def all_gather_coalesced(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup, async_op: bool
) -> distributed_c10d._CoalescingManager | None:
    """Run several all-gathers as one, on NCCL one launch. Returns an object with `wait()`, or None without `async_op`.

    The context has no public name (2.1 to 2.13). Gloo takes outputs of 1 dimension only.
    """
    with distributed_c10d._coalescing_manager(group=group, async_ops=async_op) as pending:
        for output, given in zip(outputs, inputs, strict=True):
            all_gather_single(output, given, group=group, async_op=async_op)
    return pending if async_op else None


def symmetric_memory() -> ModuleType:
    """Returns the module of symmetric memory (`empty`, `rendezvous`); private since 2.6, imported on the first call."""
    import torch.distributed._symmetric_memory as module

    return module


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Backend:
    """Returns the backend of `group` for `device`; NCCL's has an allocator. `_get_backend` has no public name (2.11 to
    2.13)."""
    return group._get_backend(device)


def named_group(
    name: str, ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a process group by a call of its own ranks alone, which all pass the same `name`, one not yet taken.

    `dist.new_group(use_local_synchronization=True)` will not do, for three reasons:

    - It derives the name from the number of groups that a rank knows. One earlier group with only some of the ranks in
      it is enough for the others to wait under another name, for ever.
    - It gives a name again after its group was destroyed.
    - Where the default group is bound to a device, NCCL makes a group by splitting that one, which all ranks have to do
      together. Stages of a pipeline, which wait for each other's tensors, would hang.

    `_new_process_group_helper`, `_world` and `_get_default_timeout` have no public names, and no public call takes a
    name or leaves the default group unsplit (2.11 to 2.13).
    """
    world, default = distributed_c10d._world, dist.group.WORLD
    assert default is not None, "no group is made before the default one"
    default_backend, store = world.pg_map[default]
    backend = dist.Backend(backend or default_backend)
    timeout = timeout or distributed_c10d._get_default_timeout(backend)
    ranks, key = list(ranks), distributed_c10d.GroupName(name)
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks), ranks.index(dist.get_rank()), ranks, backend, store, key, timeout=timeout, group_desc=name
        )
    finally:
        default.bound_device_id = bound
    assert isinstance(group, dist.ProcessGroup), "this rank is one of them"
    world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


@functools.cache
def gloo_on_demand() -> str:
    """Returns the name of a backend that is gloo but for its connections: two ranks connect when they first send each
    other something, where gloo connects all of them with each other at once. Its start waits for the two ranks beside.

    `_Options` and its fields have no public names; torch's own way is an environment variable, TORCH_GLOO_LAZY_INIT,
    for all groups of the process (2.11 to 2.13).
    """

    def make(
        store: torch._C._distributed_c10d.Store, rank: int, size: int, timeout: timedelta
    ) -> dist.ProcessGroupGloo:
        gloo, interface = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        lazy = {"lazy_init": True}
        options = gloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [
            gloo.create_device(interface=interface, **lazy) if interface else gloo.create_default_device(**lazy)
        ]
        made = gloo(store, rank, size, options)
        # Its start waits for as long as the store does, whatever the timeout of the group.
        store.set(f"here/{rank}", "")
        store.wait([f"here/{(rank + step) % size}" for step in (1, -1)], timeout)
        return made

    dist.Backend.register_backend("gloo_on_demand", make, devices=["cpu"])
    return "gloo_on_demand"


def has_ended(work: dist.Work, seconds: float) -> bool:
    """Wait at most that long, at least a millisecond. Returns whether `work` has ended; raises what it has ended with.

    `is_completed()` will not do: it keeps the interpreter's lock while it waits for that of the work, whose holder may
    wait for the interpreter's. While a profiler runs, gloo's thread restores there what the thread of the call had,
    hooks on saved tensors too (2.11 to 2.13).
    """
    try:
        work.wait(timedelta(seconds=max(seconds, 1e-3)))
    except RuntimeError as error:
        if str(error).startswith("Operation timed out"):
            return False
        raise
    return True


def wait_on_host(work: dist.Work) -> None:
    """Wait for a collective of gloo, and come back to the interpreter each second, for another thread may have raised
    an error here. Not for sends and receives: a wait of theirs that times out breaks their connections."""
    while not has_ended(work, 1.0):
        pass


_CONNECTS_WITHIN = timedelta(seconds=60)


class Store(Protocol):
    """The calls of a store, in which processes leave values for each other. torch's have no public type (2.11 to
    2.13)."""

    def set(self, key: str, value: str, /) -> None:
        """Leave `value`."""

    def get(self, key: str, /) -> bytes:
        """Returns what was left, and waits for it."""

    def add(self, key: str, amount: int, /) -> int:
        """Returns the number that was left, increased."""

    def check(self, keys: list[str], /) -> bool:
        """Returns whether something was left under all of `keys`."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Leave `desired` if `expected` was there, or if nothing was and that is ""; returns what is there now."""


def store_beside(group: dist.ProcessGroup, prefix: str, connects: bool = True) -> Store | None:
    """Returns a store of the processes of `group`, whose keys begin with `prefix`; None if `group` was not made over
    one that connects processes. Raises RuntimeError if it is gone.

    One that `connects` has a connection of its own; else its calls wait for those of the group's store to end.

    `_world` has no public name (2.11 to 2.13).
    """
    _, store = distributed_c10d._world.pg_map[group]
    below = store
    while isinstance(below, distributed_c10d.PrefixStore):
        below = below.underlying_store
    if isinstance(below, dist.FileStore):  # type: ignore[attr-defined]
        return distributed_c10d.PrefixStore(prefix, below.clone())  # type: ignore[attr-defined]
    if not isinstance(below, dist.TCPStore):  # type: ignore[attr-defined]
        return None
    if connects:
        host, port = below.host, below.port
        try:
            socket.create_connection((host, port), 1.0).close()
        except ConnectionRefusedError as error:  # torch would go on trying, as it is to where a link is down
            raise RuntimeError(f"the store of the process group at {host}:{port}: {error}") from error
        except OSError:
            pass
        below = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECTS_WITHIN)  # type: ignore[attr-defined]
    return distributed_c10d.PrefixStore(prefix, below)


def read_objects_with(read: Callable[[torch.Tensor], object]) -> None:
    """Have torch's object collectives (`gather_object` and its kin) unpickle by `read` from now on.

    `read` gets the bytes that have arrived, a 1-D uint8 tensor. torch's checkpointing makes these calls; torch's own
    way needs numpy, and nothing public exchanges it (2.11 to 2.13).
    """

    def to_object(tensor: torch.Tensor, numel: SupportsInt, *_: object) -> object:
        return read(tensor[: int(numel)])

    write_into(distributed_c10d, "_tensor_to_object", to_object)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Returns the timeout that `group` was made with, or None where its backend does not say (2.11 to 2.13)."""
    try:
        backend = backend_of(group, device)
    except RuntimeError:  # a group of threads has none
        return None
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def set_timeout(timeout: timedelta) -> None:
    """Set how long collectives wait for other ranks: in the default group, and in groups made later without a timeout.

    A mesh makes its groups without one, and torch gives those 30 minutes (10 with NCCL) whatever the default group has.
    `_set_pg_timeout` and the two defaults have no public setter (2.11 to 2.13).
    """
    distributed_c10d._set_pg_timeout(timeout)
    write_into(distributed_c10d, "default_pg_timeout", timeout)
    write_into(distributed_c10d, "default_pg_nccl_timeout", timeout)


def adopt_timeout(group: dist.ProcessGroup) -> None:
    """Have a gloo group that was made without a timeout wait no longer than the default group does.

    torch gives such a group, and those of a mesh are such, 30 minutes whatever `init_process_group` was told.
    `_set_default_timeout` has no public name (2.11 to 2.13).
    """
    world = dist.group.WORLD
    assert world is not None, "no group is made before the default one"
    try:
        ours, default = (backend_of(either, torch.device("cpu")) for either in (group, world))
    except RuntimeError:
        return  # the default group has nothing for a CPU
    if not all(isinstance(backend, dist.ProcessGroupGloo) for backend in (ours, default)):
        return
    if default.options._timeout < ours.options._timeout == dist.default_pg_timeout:
        ours._set_default_timeout(default.options._timeout)


def abort_groups() -> None:
    """Break off what the groups of this process do on accelerators; those of the host, gloo's, go on.

    `dist.distributed_c10d._abort_process_group` will not do: it forgets the groups too, so that the user's
    `destroy_process_group()` in a `finally` would raise, and hide what came before. As it does, communicators of NCCL
    are aborted as one, or they wait for each other. `_world`, `_device_types`, `_get_backend` and `_group_start` have
    no public names (2.11 to 2.13).
    """
    groups = list(distributed_c10d._world.pg_map)
    served = [backend_of(group, device) for group in groups for device in group._device_types if device.type != "cpu"]
    backends = [backend for backend in served if backend.name() != "gloo"]  # the host's, which serves devices too
    first = next(iter(backends), None)
    is_grouped = hasattr(first, "_group_start")
    if is_grouped:
        first._group_start()  # type: ignore[union-attr]
    for backend in backends:
        backend.abort()
    if is_grouped:
        first._group_end()  # type: ignore[union-attr]


def group_among(args: Sequence[object]) -> dist.ProcessGroup:
    """Returns the process group among the arguments of an operation: boxed in those of `torch.distributed`, by its name
    as the last one in functional ones. Boxed objects and the look-up of names are private (2.1 to 2.13)."""
    for each in args:
        if isinstance(each, torch.ScriptObject) and each._type().name() == "ProcessGroup":  # type: ignore[attr-defined]
            return dist.ProcessGroup.unbox(each)
    return distributed_c10d._resolve_process_group(args[-1])  # type: ignore[arg-type,attr-defined]


@contextlib.contextmanager
def imagined_ranks(number: int, rank: int = 0) -> Iterator[None]:
    """A context with a default process group of `number` ranks, of which this process is `rank` and the others do not
    exist: collectives return at once. torch has the backend for its own tests only (2.1 to 2.13).

    DTensor remembers results of its dispatch with their meshes, and takes meshes of equal ranks for the same, also when
    their process groups are gone and others have got their names. So it is made to forget (2.11 to 2.13).
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # which torch replaces by one that begins each line with the rank
    dist.init_process_group("fake", rank=rank, world_size=number, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
        sys.excepthook = hook
