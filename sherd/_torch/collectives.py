"""Private and renamed names of `torch.distributed`: collectives, process groups, their backends and timeouts."""

from __future__ import annotations

import contextlib
import functools
import io
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

from sherd._torch.tensors import write_into

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

    The public function makes two dozen Python calls whose answers never change. The caller passes complex tensors as
    real ones, and waits for the result also without `async_op`, because some backends leave that to the caller.
    `_allgather_base` and `_reduce_scatter_base` have no public names before 2.13 (2.11, 2.12).
    """
    return _bound(getattr(group, "all_gather_single", None) or group._allgather_base, AllgatherOptions)


def bound_reduce_scatter(group: dist.ProcessGroup) -> dict[bool, SingleCollective]:
    """Returns, in the same way, the method of `group` behind `reduce_scatter_single`, which sums."""
    return _bound(getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base, ReduceScatterOptions)


def _bound(
    method: Callable[..., dist.Work | None], make_options: type[AllgatherOptions] | type[ReduceScatterOptions]
) -> dict[bool, SingleCollective]:
    bound: dict[bool, SingleCollective] = {}
    for async_op in (False, True):
        options = make_options()
        options.asyncOp = async_op
        bound[async_op] = functools.partial(method, opts=options)
    return bound


def all_gather_coalesced(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup, async_op: bool
) -> distributed_c10d._CoalescingManager | None:
    """Run several all-gathers as one, on NCCL in one launch. Returns an object with `wait()`; None without `async_op`.

    The context has no public name (2.1 to 2.15). Gloo takes outputs of 1 dimension only.
    """
    with distributed_c10d._coalescing_manager(group=group, async_ops=async_op) as pending:
        for output, given in zip(outputs, inputs, strict=True):
            all_gather_single(output, given, group=group, async_op=async_op)
    return pending if async_op else None


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether `group` runs several collectives on `device` as one. `_device_types` is private (to 2.15)."""
    is_served = device.type in {each.type for each in group._device_types}
    return is_served and bool(backend_of(group, device).supports_coalescing)


def symmetric_memory() -> ModuleType:
    """Returns the module of symmetric memory (`empty`, `rendezvous`); private since 2.6, imported on the first call."""
    import torch.distributed._symmetric_memory as module

    return module


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Backend:
    """Returns the backend of `group` for `device`. `_get_backend` has no public name (2.11 to 2.15)."""
    return group._get_backend(device)


def named_group(
    name: str, ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a process group by a call of its own ranks alone, which all pass the same unused `name`.

    `dist.new_group(use_local_synchronization=True)` will not do, for three reasons:

    - It derives the name from the number of groups that a rank knows. After one group of only some of the ranks, the
      others wait under another name forever.
    - It reuses the name of a destroyed group.
    - Where the default group is bound to a device, NCCL makes a group by splitting the default one, which all ranks
      must do together. Stages of a pipeline, which wait for each other's tensors, would hang.

    `_new_process_group_helper`, `_world` and `_get_default_timeout` have no public names, and no public call takes a
    name or leaves the default group unsplit (2.11 to 2.15).
    """
    world, default = distributed_c10d._world, dist.group.WORLD
    assert default is not None, "no group is made before the default one"
    default_backend, store = world.pg_map[default]
    backend = dist.Backend(backend or default_backend)
    timeout = timeout or distributed_c10d._get_default_timeout(backend)
    ranks, key = list(ranks), distributed_c10d.GroupName(name)
    bound, default.bound_device_id = default.bound_device_id, None  # unbound, NCCL does not split the default group
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
    """Returns the name of a gloo backend that connects two ranks when they first send each other something.

    gloo itself connects all ranks with each other at the start. The start of this one waits for its two
    neighbours only. `_Options` and its fields have no public names; torch's own switch is an environment variable,
    TORCH_GLOO_LAZY_INIT, for all groups of the process (2.11 to 2.15).
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
        backend = gloo(store, rank, size, options)
        # gloo's start waits as long as the store's own timeout, whatever the timeout of the group.
        store.set(f"here/{rank}", "")
        store.wait([f"here/{(rank + step) % size}" for step in (1, -1)], timeout)
        return backend

    dist.Backend.register_backend("gloo_on_demand", make, devices=["cpu"])
    return "gloo_on_demand"


def has_ended(work: dist.Work, seconds: float) -> bool:
    """Wait for `work`, `seconds` at most and a millisecond at least. Returns whether it has ended.

    `is_completed()` will not do: it keeps the GIL while it waits for the lock of the work, and the thread that holds
    that lock may wait for the GIL. While a profiler runs, gloo's thread does so: it restores the caller's thread state,
    hooks on saved tensors included (2.11 to 2.15).

    Raises:
        RuntimeError: `work` has failed.
    """
    try:
        work.wait(timedelta(seconds=max(seconds, 1e-3)))
    except RuntimeError as error:
        if str(error).startswith("Operation timed out"):
            return False
        raise
    return True


def wait_on_host(work: dist.Work) -> None:
    """Wait for a collective of gloo, and return to the interpreter each second: another thread may raise an error here.

    It is not for sends and receives: a wait of theirs that times out breaks their connections.
    """
    while not has_ended(work, 1.0):
        pass


_CONNECTS_WITHIN = timedelta(seconds=60)


class Store(Protocol):
    """A store that processes share. torch's stores have no public type (2.11 to 2.15)."""

    def set(self, key: str, value: str, /) -> None:
        """Set the value of `key`."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value of `key`. Returns it."""

    def add(self, key: str, amount: int, /) -> int:
        """Add `amount` to the number under `key`. Returns the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Returns whether all of `keys` have values."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set `desired` if the value is `expected` (without a value: if that is ""). Returns the value from then on."""


def store_beside(group: dist.ProcessGroup, prefix: str, connects: bool = True) -> Store | None:
    """Returns the store of `group` under keys that begin with `prefix`; None if that store connects no processes.

    `_world` has no public name (2.11 to 2.15).

    Args:
        group: the group whose processes share the store.
        prefix: the beginning of all keys.
        connects: open a connection of its own; else its calls wait for those of the group's own store to end.

    Raises:
        RuntimeError: the process that has the store is gone.
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
        except ConnectionRefusedError as error:  # torch would retry until its timeout, as for a link that is down
            raise RuntimeError(f"the store of the process group at {host}:{port}: {error}") from error
        except OSError:
            pass
        below = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECTS_WITHIN)  # type: ignore[attr-defined]
    return distributed_c10d.PrefixStore(prefix, below)


def read_objects_with(read: Callable[[torch.Tensor], object]) -> None:
    """Have torch's object collectives (`gather_object` and its kin) unpickle by `read` from now on.

    `read` gets the received bytes, a 1-D uint8 tensor. torch's own function needs numpy, and nothing public replaces
    it; torch's checkpointing makes these calls (2.11 to 2.15).
    """

    def to_object(tensor: torch.Tensor, numel: SupportsInt, group: object = None, weights_only: bool = False) -> object:
        received = tensor[: int(numel)]
        if weights_only:  # may be asked for since 2.14: then `torch.save` has written the bytes
            return torch.load(io.BytesIO(bytes(received.tolist())), weights_only=True)
        return read(received)

    write_into(distributed_c10d, "_tensor_to_object", to_object)


def connection_of(group: dist.ProcessGroup) -> str | None:
    """Returns a name of the present connections of `group`, "" before the first; None if its members do not change.

    Those of a group that `init_process_group(enable_reconfigure=True)` has made do. The handle that `_reconfigure`
    takes has the id of the connections: gloo's is `gloo:RANK:ID:...`, with -1 for none. `supports_reconfigure` will not
    do, as all groups on gloo do. Nothing public says either (2.14, 2.15).
    """
    try:
        backends = [backend_of(group, device) for device in group._device_types]
    except RuntimeError:  # a group of threads has no backend
        return None
    if not any(getattr(getattr(each, "options", None), "enable_reconfigure", False) for each in backends):
        return None
    handle: str = group.get_reconfigure_handle()  # type: ignore[attr-defined]
    return "" if handle.split(":")[2:3] == ["-1"] else handle


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Returns the timeout of `group`; None if its backend does not say (2.11 to 2.15)."""
    try:
        backend = backend_of(group, device)
    except RuntimeError:  # a group of threads has no backend
        return None
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def adopt_timeout(group: dist.ProcessGroup) -> None:
    """Have a gloo group that was made without a timeout wait no longer than the default group does.

    torch gives such a group, for example a mesh's, 30 minutes whatever timeout `init_process_group` has.
    `_set_default_timeout` has no public name (2.11 to 2.15).
    """
    world = dist.group.WORLD
    assert world is not None, "no group is made before the default one"
    try:
        ours, default = (backend_of(either, torch.device("cpu")) for either in (group, world))
    except RuntimeError:
        return  # the default group has no backend for the CPU
    if not all(isinstance(backend, dist.ProcessGroupGloo) for backend in (ours, default)):
        return
    if default.options._timeout < ours.options._timeout == dist.default_pg_timeout:
        ours._set_default_timeout(default.options._timeout)


def abort_groups() -> None:
    """Abort the collectives of all groups of this process on accelerators; gloo's groups on the host go on.

    `dist.distributed_c10d._abort_process_group` will not do: it forgets the groups too, so that the user's
    `destroy_process_group()` in a `finally` would raise and hide the error before. `_world`, `_device_types`,
    `_get_backend` and `_group_start` have no public names (2.11 to 2.15).
    """
    groups = list(distributed_c10d._world.pg_map)
    served = [backend_of(group, device) for group in groups for device in group._device_types if device.type != "cpu"]
    backends = [backend for backend in served if backend.name() != "gloo"]  # gloo may serve devices, too
    # NCCL's communicators are aborted as one, as torch does it, or they wait for each other.
    first = next((backend for backend in backends if hasattr(backend, "_group_start")), None)
    if first is not None:
        first._group_start()
    for backend in backends:
        backend.abort()
    if first is not None:
        first._group_end()  # type: ignore[attr-defined]


def group_among(args: Sequence[object]) -> dist.ProcessGroup:
    """Returns the process group among the arguments of a collective operation.

    `torch.distributed` passes it boxed; functional collectives pass its name last. Boxed objects and the look-up of
    names are private (2.1 to 2.15).
    """
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and argument._type().name() == "ProcessGroup":  # type: ignore[attr-defined]
            return dist.ProcessGroup.unbox(argument)
    return distributed_c10d._resolve_process_group(args[-1])  # type: ignore[arg-type,attr-defined]


@contextlib.contextmanager
def imagined_ranks(number: int, rank: int = 0) -> Iterator[None]:
    """A context with a default process group of `number` ranks, of which only this process, `rank`, exists.

    Collectives return at once. torch has the backend for its own tests only (2.1 to 2.15).
    """
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch replaces it by one that begins each line with the rank
    dist.init_process_group("fake", rank=rank, world_size=number, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor caches results of its dispatch by mesh, and takes meshes of equal ranks for the same one, also when
        # their process groups are gone and other groups have their names (2.11 to 2.15). The two calls are those of
        # `_clear_sharding_prop_cache` in torch.distributed.tensor.debug, which needs numpy.
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
        sys.excepthook = hook
