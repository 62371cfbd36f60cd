"""A sharded model as the simulator sees it: its units' buffers, what they send, and the optimizer on their shards."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sherd.schedule.moments import Arrival, GroupSizes
from sherd.schedule.state import Limits, UnitSpec
from sherd.tools.simulate.work import ALONE, Group


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one group's collectives: of what all ranks have after the all-gather, of what each rank hands to the
    reduce-scatter, and to the all-reduce over replicas. A collective that there is not takes 0. `owned`: bytes of this
    rank's shards. `shard` and `replicate`: the ranks of the collectives."""

    gathered: int
    reduced: int
    all_reduced: int = 0
    owned: int = 0
    shard: Group = ALONE
    replicate: Group = ALONE


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit.

    Attributes:
        modules: the indices, in `Work.modules`, of its modules in the order of their calls.
        groups: the buffers of its groups.
        traffic: the collectives of its groups.
        stepped: the bytes of each of its shards that the optimizer steps.
    """

    name: str
    kind: str
    numel: int
    modules: tuple[int, ...]
    groups: tuple[GroupSizes, ...]
    traffic: tuple[Traffic, ...]
    stepped: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer whose step goes through each element by itself.

    Attributes:
        states: tensors of state for each parameter, of its shape and dtype.
        accesses: times that a step reads or writes a tensor of a parameter's shape.
        scalars: bytes of state for each parameter besides, as of its step count.
        temporaries: tensors of a parameter's shape that exist while it is stepped.
        is_foreach: all parameters are stepped together, so that the temporaries of all exist at once.
    """

    states: int
    accesses: int
    scalars: int = 0
    temporaries: int = 0
    is_foreach: bool = False

    def state_sizes(self, unit: Unit) -> Iterator[int]:
        """Yields the bytes of each tensor of its state for the shards of `unit`."""
        for nbytes in unit.stepped:
            yield from (self.scalars, *[nbytes] * self.states)

    def touched(self, units: Sequence[Unit]) -> int:
        """Returns the bytes that a step reads and writes."""
        return self.accesses * sum(sum(unit.stepped) for unit in units)

    def temporary_bytes(self, units: Sequence[Unit]) -> int:
        """Returns the bytes that a step takes for a moment."""
        stepped = [nbytes for unit in units for nbytes in unit.stepped]
        return self.temporaries * (sum(stepped) if self.is_foreach else max(stepped, default=0))


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
    optimizer: Optimizer
    is_offloaded: bool = False

    def offloaded(self) -> Sharded:
        """Returns it with shards, gradients and optimizer state in host memory (`CPUOffloadPolicy`), on a device with
        streams. An all-gather sends from rows in the memory of the device, so no buffer is added."""
        units = tuple(
            replace(unit, groups=tuple(replace(sizes, shards=0, is_offloaded=True) for sizes in unit.groups))
            for unit in self.units
        )
        return replace(self, units=units, is_offloaded=True)

    @property
    def cuts(self) -> Hashable:
        """A key of the places where a micro-batch is cut into parts: the modules of units, the places of parameters,
        and the gradients that groups wait for. Sharded models with the same key have the same parts."""
        groups = (tuple(each.is_all_trainable for each in unit.groups) for unit in self.units)
        return tuple(unit.modules for unit in self.units), tuple(groups), tuple(self.places.items())

    @property
    def unit_of(self) -> dict[int, int]:
        """The unit of each module that is one of a unit's own, by their indices."""
        return {module: number for number, unit in enumerate(self.units) for module in unit.modules}


# multiply, lerp, addcmul, sqrt, div and addcdiv are kernels of their own, unless fused.
OPTIMIZERS = {
    "adamw": Optimizer(states=2, accesses=20, scalars=4, temporaries=1, is_foreach=True),
    "adamw-fused": Optimizer(states=2, accesses=7, scalars=4),
    "sgd": Optimizer(states=0, accesses=3),
    "sgd-momentum": Optimizer(states=1, accesses=5),
}
"""By name: torch's optimizers with their defaults on an accelerator."""
