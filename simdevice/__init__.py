"""A simulated accelerator: torch's device "sim". Its streams are asynchronous, its races are named, and it has a clock.

See README.md."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from simdevice.build import CannotBuild
from simdevice.clock import StreamTimes, Task, Times, times_of, write_chrome_trace
from simdevice.machines import record
from simdevice.native import native

__all__ = [
    "CannotBuild",
    "StreamTimes",
    "Task",
    "Times",
    "calling_line",
    "closed_gate",
    "configure",
    "holders_at_peak",
    "host_reads",
    "host_waits",
    "host_works",
    "host_writes",
    "imagine_ranks",
    "label_allocations",
    "label_tasks",
    "load",
    "on_host_wait",
    "races",
    "reset_times",
    "sleep",
    "times",
    "trace",
    "write_chrome_trace",
]

_is_registered = False
# Kept: groups that are made later find it below the prefixes of their own, as this object only while it is alive.
_store_of_imagined: dist.Store | None = None


def load() -> torch.device:
    """Build the device if it is not built, and register "sim" and "simccl" with torch. Returns the device "sim:0".

    Once loaded, it is the accelerator of this process for good: `torch.accelerator` answers for it. A process that was
    forked from this one has no workers, and cannot use it.

    Raises:
        CannotBuild: there is no compiler, or it fails.

    """
    global _is_registered
    module = native()
    if module.is_forked():
        raise RuntimeError(
            "the simulated device was loaded before this process was forked; load it in each child instead"
        )
    if not _is_registered:
        from simdevice import backend

        torch.utils.rename_privateuse1_backend("sim")
        torch._register_device_module("sim", backend)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        dist.Backend.register_backend("simccl", _backend_of_a_group, extended_api=True, devices=["sim"])
        _is_registered = True
    return torch.device("sim", 0)


def _backend_of_a_group(options: Any, _: object) -> Any:
    ranks, name = list(options.global_ranks_in_group), str(options.group_id)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = options.store
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    imagined = isinstance(store, FakeStore)
    return native().Collectives(
        options.store, options.group_rank, options.group_size, options.timeout, name, ranks, imagined
    )


def imagine_ranks(num_ranks: int, rank: int = 0) -> None:
    """Make the default group one of `num_ranks` ranks of which only this process is there, as `rank`.

    Collectives on the device take their time on the clock. As with torch's "fake" backend, which answers for the CPU,
    what is gathered is this rank's own, once for each rank, and other results stay what they were.
    """
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    global _store_of_imagined
    _store_of_imagined = FakeStore()
    dist.init_process_group("simccl", rank=rank, world_size=num_ranks, store=_store_of_imagined)
    group = dist.group.WORLD
    assert group is not None, "just made"
    # A group takes one backend of each kind, and torch counts its own fake one as of the kind that simccl is of.
    fake = FakeProcessGroup._create_internal(rank, num_ranks, FakeProcessGroup.Options())
    name = group.group_name  # which a backend that has none takes away
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, fake)
    group._set_group_name(name)


def configure(
    *,
    pause_us: int = 0,
    pause_percent: int = 10,
    seed: int = 0,
    spoil: str = "handed out",
    races: str = "collect",
    machine: str | Mapping[str, Any] | None = None,
    ranks_per_node: int | None = None,
    compute: bool = True,
) -> None:
    """Set how the device behaves from now on; what is not given gets its default.

    Args:
        pause_us: the longest pause before a task, in microseconds. Streams differ: some pause 10 times shorter, some
            4 times longer.
        pause_percent: how many of the tasks pause.
        seed: of the pauses. They follow from it and the order of the host's calls.
        spoil: when memory is filled with NaN: "no", when it is "handed out", or also when it is "freed".
        races: "off"; "collect" them for `races`; "raise" at the host's call that makes one.
        machine: what the clock goes by: "a100", "h100", "h200", "mi300x", or a record as those of
            `simdevice.machines`. None stops the clock. The times begin at zero.
        ranks_per_node: how many ranks share a node; None: as many as the machine has.
        compute: false: no kernel, copy or collective runs, and memory is reserved but not touched, so a model may be
            larger than this machine. Values are garbage and `item()` is 0; times, bytes, races and host waits are not.
            Integers of up to 1 MiB keep what copies and gathers bring; new ones are 0, and kernels leave them as they
            are.

    """
    figures = {} if machine is None else record(machine)
    if figures and ranks_per_node is not None:
        figures["ranks_per_node"] = ranks_per_node
    native().configure(pause_us, pause_percent, seed, spoil, races, compute, figures)


def times() -> Times:
    """Returns what streams and the host did on the clock since it was reset, by the machine's record."""
    return times_of(native().times())


def trace() -> list[Task]:
    """Returns every task since the clock was reset, in the order of the host's calls; see `write_chrome_trace`."""
    return [Task(*each) for each in native().trace()]


def reset_times() -> None:
    """Set the clock to zero, as `configure` does. Say `torch.accelerator.synchronize()` before."""
    native().reset_times()


def host_works(microseconds: float) -> None:
    """Say that the host now works for so long at what the clock does not see, as loading a batch."""
    native().host_works(microseconds)


def races(reset: bool = True) -> dict[str, int]:
    """Returns how often which two accesses to the same bytes were unordered, by a text that names both."""
    return native().races(reset)


def host_waits(reset: bool = True) -> dict[str, int]:
    """Returns how often the host waited for the device, by cause."""
    return native().host_waits(reset)


def on_host_wait(function: Callable[[str], object] | None) -> None:
    """Have `function` called with the cause whenever the host is about to wait."""
    native().on_host_wait(function)


def label_tasks(function: Callable[[], str] | None) -> None:
    """Have `function` called for each task that is queued: races name both sides with what it returned then."""
    native().label_tasks(function)


def label_allocations(function: Callable[[], str] | None) -> None:
    """Have `function` called for each allocation: `holders_at_peak` names it with what it returned then."""
    native().label_allocations(function)


def holders_at_peak(device: int = 0) -> dict[str, int]:
    """Returns the bytes that were allocated when most were, since the peak was last reset, by label."""
    return {label: size for label, size in native().holders_at_peak(device).items() if size}


def calling_line() -> str:
    """Returns the innermost file and line outside of torch: a label for `label_tasks`.

    On a thread of torch's own, which has no such line, "backward".
    """
    frame = sys._getframe(0).f_back  # none on a thread of autograd
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "backward"


_TORCH = str(Path(torch.__file__).parent)


def host_reads(tensor: torch.Tensor) -> None:
    """Say that the host reads a pinned tensor now. It is a race if a copy into it was not waited for.

    Operators on CPU tensors are not the device's, so it sees none of them by itself.
    """
    native().host_access(tensor, False)


def host_writes(tensor: torch.Tensor) -> None:
    """Say that the host writes a pinned tensor now. It is a race if a copy from or into it was not waited for."""
    native().host_access(tensor, True)


class Gate(Protocol):
    """What keeps a stream busy."""

    def open(self) -> None:
        """Let the stream go on."""


def closed_gate() -> Gate:
    """Keep the current stream busy until the gate is opened, or dropped: with `sleep`, a slow host may come too late.

    Whoever waits for the stream before that waits forever.
    """
    gate: Gate = native().Gate()
    return gate


def sleep(microseconds: int) -> None:
    """Keep the current stream busy. The host does not wait."""
    native().sleep(microseconds)
