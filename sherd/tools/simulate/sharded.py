"""A sharded model as the simulator sees it: the buffers and traffic of units, and the optimizer on their shards."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sherd.schedule.moments import Arrival, GroupSizes
from sherd.schedule.state import Limits, UnitSpec
from sherd.tools.simulate.work import ALONE, RankGroup


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one group's collectives, 0 for a collective that the group does without.

    `gathered` is the result of the all-gather, `reduced` and `all_reduced` are the inputs of the reduce-scatter and the
    all-reduce over replicas, `owned` are this rank's shards. `shard` and `replicate` are the ranks of the collectives.
    """

    gathered: int
    reduced: int
    all_reduced: int = 0
    owned: int = 0
    shard: RankGroup = ALONE
    replicate: RankGroup = ALONE


@dataclass(frozen=True, slots=True)
class SimulatedUnit:
    """A unit of the simulated model.

    Attributes:
        modules: the indices of the unit's modules in `Work.modules`, in the order of their calls.
        groups: the buffers of the unit's groups.
        traffic: the collectives of the unit's groups.
        stepped: the bytes of each shard that the optimizer steps element by element.
        matrices: the bytes of each shard of a matrix that it steps as one.
    """

    name: str
    kind: str
    numel: int
    modules: tuple[int, ...]
    groups: tuple[GroupSizes, ...]
    traffic: tuple[Traffic, ...]
    stepped: tuple[int, ...]
    matrices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer that steps each element by itself, or all but hidden matrices.

    Attributes:
        states: the number of state tensors with the shape and dtype of a parameter, for each parameter.
        accesses: the number of times that a step reads or writes a tensor of a parameter's shape.
        scalars: bytes of further state for each parameter, such as a count of steps.
        temporaries: the number of temporary tensors of a parameter's shape in a step.
        is_foreach: all parameters are stepped together, so that the temporaries of all exist at once.
        is_muon: hidden matrices are stepped as `sherd.Muon` does; the other fields are those of all other parameters.
    """

    states: int
    accesses: int
    scalars: int = 0
    temporaries: int = 0
    is_foreach: bool = False
    is_muon: bool = False

    def state_sizes(self, unit: SimulatedUnit) -> Iterator[int]:
        """Yields the bytes of each state tensor for the shards of `unit`."""
        for nbytes in unit.stepped:
            yield from (self.scalars, *[nbytes] * self.states)
        yield from unit.matrices  # the momentum

    def touched(self, units: Sequence[SimulatedUnit]) -> int:
        """Returns the bytes that a step reads and writes."""
        return self.accesses * sum(sum(unit.stepped) for unit in units)

    def temporary_bytes(self, units: Sequence[SimulatedUnit]) -> int:
        """Returns the bytes of temporaries in a step."""
        stepped = [nbytes for unit in units for nbytes in unit.stepped]
        return self.temporaries * (sum(stepped) if self.is_foreach else max(stepped, default=0))


@dataclass(frozen=True)
class Sharded:
    """A model under `fully_shard`, on one rank.

    Attributes:
        units: the units in the order of the schedule: the root first.
        specs: the units' policies, as the schedule has them.
        limits: the limits of the schedule.
        batch_bytes: small gradients are copied together once they have this many bytes.
        places: the place of each trainable parameter in its unit, by the index in `Work.parameters`.
        is_offloaded: shards and optimizer are in host memory.
    """

    units: tuple[SimulatedUnit, ...]
    specs: tuple[UnitSpec, ...]
    limits: Limits
    batch_bytes: int
    places: Mapping[int, Arrival]
    optimizer: Optimizer
    is_offloaded: bool = False

    def offloaded(self) -> Sharded:
        """Returns the model with shards, gradients and optimizer state in host memory (`CPUOffloadPolicy`)."""
        # The device has streams: an all-gather sends from rows in the memory of the device, so no buffer is added.
        units = tuple(
            replace(unit, groups=tuple(replace(sizes, shards=0, is_offloaded=True) for sizes in unit.groups))
            for unit in self.units
        )
        return replace(self, units=units, is_offloaded=True)

    def host_bytes(self, num_reductions: int) -> int:
        """Returns the bytes that a rank takes of its host's memory; 0 unless it is offloaded.

        Shards and their gradients are pinned, a buffer for each group; the optimizer's state is not. A further
        reduction of a step, of `num_reductions`, lands next to the gradients before it is added to them.
        """
        if not self.is_offloaded:
            return 0
        pinned, optimizer = 0, self.optimizer
        for unit in self.units:
            pinned += sum(_pinned(each.owned) for each in unit.traffic)
            trained = (each for each in unit.groups if each.arriving)
            pinned += min(2, num_reductions) * sum(_pinned(each.gradients) for each in trained)
        states = sum(nbytes for unit in self.units for nbytes in optimizer.state_sizes(unit))
        # On a CPU torch steps one parameter after the other.
        return pinned + states + replace(optimizer, is_foreach=False).temporary_bytes(self.units)

    @property
    def cuts(self) -> Hashable:
        """A key of the parts of a micro-batch: models with the same key have the same parts."""
        groups = (tuple(each.is_all_trainable for each in unit.groups) for unit in self.units)
        return tuple(unit.modules for unit in self.units), tuple(groups), tuple(self.places.items())

    @property
    def unit_of(self) -> dict[int, int]:
        """The unit of each module in `SimulatedUnit.modules`, both by index."""
        return {module: number for number, unit in enumerate(self.units) for module in unit.modules}


def _pinned(nbytes: int) -> int:
    """Returns the bytes that torch's allocator of pinned memory takes: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


# multiply, lerp, addcmul, sqrt, div and addcdiv are separate kernels, except in fused optimizers.
OPTIMIZERS = {
    "adamw": Optimizer(states=2, accesses=20, scalars=4, temporaries=1, is_foreach=True),
    "adamw-fused": Optimizer(states=2, accesses=7, scalars=4),
    "sgd": Optimizer(states=0, accesses=3),
    "sgd-momentum": Optimizer(states=1, accesses=5),
    "muon": Optimizer(states=2, accesses=20, scalars=4, temporaries=1, is_foreach=True, is_muon=True),
}
"""torch's optimizers and `sherd.Muon`, with their defaults on an accelerator, by name."""
