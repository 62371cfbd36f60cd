"""The choices a user makes, as frozen records. No torch at run time: the schedule and the layout may read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sherd.errors import PolicyError, PolicyTypeError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a unit computes and reduces; shards, and so the optimizer, keep the dtype they came with.

    Args:
        param_dtype: dtype of the gathered parameters and so of compute; None keeps each parameter's own.
        reduce_dtype: dtype in which gradients are reduced and accumulated; None takes `param_dtype`, else the
            parameter's own.
        output_dtype: floating-point outputs of the unit's forward are cast to it; None leaves them.
        cast_forward_inputs: cast floating-point inputs of the unit's forward to `param_dtype`, where that is given.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards rest on the mesh's device: no offloading. The base of those that do offload."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and so the optimizer's state rest in host memory; whole parameters on the mesh's device.

    On a CPU mesh that is where everything is anyway.

    Args:
        pin_memory: rest in page-locked memory, so that copies overlap with compute. Ignored without an accelerator.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class PrefetchPolicy:
    """How far all-gathers run ahead of compute. The order is learnt in the first step.

    Args:
        forward_depth: units gathered ahead in forward.
        backward_depth: units gathered ahead in backward.
        bytes_in_flight: start no prefetch that brings the bytes of gathers in flight above this; None sets no bound.
    """

    forward_depth: int = 1
    backward_depth: int = 1
    bytes_in_flight: int | None = None

    def __post_init__(self) -> None:
        for name in ("forward_depth", "backward_depth", "bytes_in_flight"):
            value = getattr(self, name)
            if value is None and name == "bytes_in_flight":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise PolicyTypeError(f"PrefetchPolicy({name}={value!r}): expected an int")
            if value < 0:
                raise PolicyError(f"PrefetchPolicy({name}={value}): expected 0 or more")


TRANSPORTS = ("auto", "torch", "gloo", "shared_memory")


@dataclass(frozen=True)
class CommPolicy:
    """How bytes travel between ranks.

    Args:
        transport: "auto" takes shared memory for gloo ranks that are all on one host, the calls that are fast on gloo
            for other gloo ranks, and torch's single calls for every other backend; "torch", "gloo" and
            "shared_memory" ask for one of them. All units of a mesh should ask for the same.

    Raises:
        PolicyError: no such transport.
    """

    transport: str = "auto"

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise PolicyError(f"CommPolicy(transport={self.transport!r}): expected one of {', '.join(TRANSPORTS)}")


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which named axes of a larger device mesh are data parallel; several names are flattened into one axis.

    Args:
        shard: axis name(s) that parameters are sharded over.
        replicate: axis name(s) over which the sharded parameters are replicated.

    Raises:
        PolicyError: neither is given, or a name is given twice.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        names = self.shard_names + self.replicate_names
        if not names:
            raise PolicyError("DataParallelMeshDims needs at least one axis name in shard or in replicate")
        if len(set(names)) < len(names):
            raise PolicyError(f"DataParallelMeshDims names an axis twice: {names}")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """`shard` as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """`replicate` as a tuple."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


class Comm(ABC):
    """A collective of the user's own: it also chooses the memory it runs on."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of shape `size` that the collective will write or read; called on the collective's stream."""


class AllGather(Comm):
    """An all-gather for `set_custom_all_gather`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` (`[W * n]`) with every rank's `input_tensor` (`[n]`), in rank order."""


class ReduceScatter(Comm):
    """A reduce-scatter for `set_custom_reduce_scatter`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` (`[n]`) with this rank's part of the reduction of every rank's `input_tensor` (`[W *
        n]`)."""


@dataclass(frozen=True)
class UnitPolicy:
    """Everything that can be chosen per unit after it was made; `FSDPModule`'s setters replace one field each.

    `reshard_after_forward` is None for "the root keeps its parameters for backward, others do not". The prefetch lists
    hold the units' ids (`Unit.id`). `divide_factor` None means the number of data-parallel ranks. `reduce_buffers` None
    means 1 with streams; without, 0: a reduction is settled at once, as it would take its time from compute anyway.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    reduce_gradients: bool = True
    all_reduce_gradients: bool = True
    reduce_unused: bool = False
    reduce_buffers: int | None = None
    divide_factor: float | None = None
    forward_prefetch: tuple[int, ...] | None = None
    backward_prefetch: tuple[int, ...] | None = None
    prefetch: PrefetchPolicy = PrefetchPolicy()
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    separate_reduce_group: bool = False
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: Any = None
