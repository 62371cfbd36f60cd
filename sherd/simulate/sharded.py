"""A sharded model as the simulator sees it: its units' buffers, what they send, and the optimizer on their shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sherd.schedule.moments import Arrival, GroupSizes
from sherd.schedule.state import Limits, UnitSpec


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one group's collectives: of what all ranks have after the all-gather, of what each rank hands to the
    reduce-scatter, and to the all-reduce over replicas. A collective that there is not takes 0."""

    gathered: int
    reduced: int
    all_reduced: int = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit.

    Attributes:
        modules: the indices, in `Work.modules`, of its modules in the order of their calls.
        groups: the buffers of its groups.
        traffic: the collectives of its groups.
        optimizer_bytes: the optimizer's state for its shards.
    """

    name: str
    kind: str
    numel: int
    modules: tuple[int, ...]
    groups: tuple[GroupSizes, ...]
    traffic: tuple[Traffic, ...]
    optimizer_bytes: int


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What an optimizer's step takes of one rank.

    Attributes:
        touched: bytes that it reads and writes.
        temporary: bytes that it takes for a moment.
    """

    touched: int
    temporary: int


@dataclass(frozen=True)
class Sharded:
    """A model under `fully_shard`, on one rank.

    Attributes:
        units: in the order of the schedule: the root first.
        specs, limits: what the schedule knows of them.
        batch_bytes: small gradients wait until so many bytes have come.
        places: by index in `Work.parameters`: the place of a trainable parameter in its unit.
        is_offloaded: shards and optimizer are in host memory.
    """

    units: tuple[Unit, ...]
    specs: tuple[UnitSpec, ...]
    limits: Limits
    batch_bytes: int
    places: Mapping[int, Arrival]
    optimizer: OptimizerStep
    is_offloaded: bool = False
