"""A cluster: what one device computes and holds, and how fast bytes travel between devices. Read from a TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sherd.tools.simulate.work import OpKind


@dataclass(frozen=True, slots=True)
class Link:
    """A way between devices.

    Attributes:
        latency: seconds of one message.
        bandwidth: bytes per second that one device sends through it while all others do the same, as achieved.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Timed:
    """An operation that was timed in a training: its size, as `Op` has it, and the seconds that it took."""

    flops: int
    nbytes: int
    depth: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one rank on CPU cores. All figures as achieved, not as printed by the maker.

    Attributes:
        memory: bytes that there are.
        library_bytes: bytes that the driver and libraries (context, NCCL, cuBLAS) take beside tensors.
        peak_flops: per second, by the dtype's name: the maker's figure, that MFU is a share of.
        flops: per second achieved by large matrix products, by the dtype's name.
        attention_share: of `flops` that fused attention achieves.
        bandwidth: bytes per second of its memory, achieved by large pointwise operations.
        shares: of `bandwidth` achieved by operations of other kinds.
        launch: seconds that the shortest operation takes on the device.
        host: seconds that the host needs to queue one operation, when it runs ahead of the device; for a CPU 0.
        overlaps: collectives run beside compute, as on an accelerator with streams.
        beside: the share of its speed that compute keeps while they do.
        skew: seconds by which the slowest rank is later than the mean one, after each has computed for 1 ms. Only of
            devices without `overlaps`: others have theirs in what collectives take.
        timed: operations of several sizes, by the operation's name without "aten." and its dtype: `mm.float32`.
    """

    name: str
    memory: int
    library_bytes: int
    peak_flops: dict[str, float]
    flops: dict[str, float]
    attention_share: float
    bandwidth: float
    shares: dict[OpKind, float]
    launch: float
    host: float
    overlaps: bool
    beside: float = 1.0
    skew: float = 0.0
    timed: Mapping[str, tuple[Timed, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal devices.

    Attributes:
        within: between devices of a node.
        across: between nodes, per device.
        to_host: between a device and its host's memory.
        price_per_hour: of one device, in `currency`; None if it is not known.
        sources: where each figure comes from, by its name.
        optimizer: seconds for each time that its step reads or writes a shard, and bytes per second besides; None:
            those of a copy.
    """

    name: str
    device: Device
    devices_per_node: int
    within: Link
    across: Link
    to_host: Link
    price_per_hour: float | None
    currency: str
    sources: dict[str, str]
    optimizer: Link | None = None
