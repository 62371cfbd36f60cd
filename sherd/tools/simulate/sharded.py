"""A sharded model as the simulator sees it: the buffers and traffic of units, and the optimizer on their shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import NamedTuple

from sherd.policy import Disk, OffloadPolicy, Place
from sherd.schedule.moments import CHUNK_NUMEL, Arrival, GroupSizes, MemoryKind
from sherd.schedule.state import Limits, UnitSpec
from sherd.tools.simulate.work import ALONE, RankGroup, TensorKind

OF_MASTERS = 46
"""The bytes that are read and written for each element to join and split masters."""
SPLITTING = 6
"""Bytes of temporaries for each element while masters are split."""
AND_BACK = "all-to-all and back"
"""The collective of sums that owners make for all ranks: an all-to-all, and an all-gather of the sums."""
PINNED = "rounding of pinned memory"


class Touched(NamedTuple):
    """Element-wise operations of a device: the bytes that they read and write, and their number."""

    nbytes: int = 0
    num_ops: int = 0

    @classmethod
    def together(cls, *parts: Touched) -> Touched:
        return cls(sum(each.nbytes for each in parts), sum(each.num_ops for each in parts))


UNTOUCHED = Touched()


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one group's collectives, 0 for a collective that the group does without.

    `gathered` is the result of the all-gather, `reduced` and `all_reduced` are the inputs of the reduce-scatter and the
    all-reduce over replicas, `owned` are this rank's shards, `copied` these in compute's dtype. `shard` and `replicate`
    are the ranks of the collectives.

    The operations of formats (`sherd.codecs`): `encoding` of this rank's shard, once a step, and `decoding` of what was
    gathered; `reducing` and `all_reducing` where owners add gradients up, which they get by an all-to-all.
    """

    gathered: int
    reduced: int
    all_reduced: int = 0
    owned: int = 0
    copied: int = 0
    shard: RankGroup = ALONE
    replicate: RankGroup = ALONE
    encoding: Touched = UNTOUCHED
    decoding: Touched = UNTOUCHED
    reducing: Touched = UNTOUCHED
    all_reducing: Touched = UNTOUCHED

    @property
    def reduced_by(self) -> str:
        return "all-to-all" if self.reducing.nbytes else "reduce-scatter"

    @property
    def all_reduced_by(self) -> str:
        return AND_BACK if self.all_reducing.nbytes else "all-reduce"


@dataclass(frozen=True, slots=True)
class SteppedPart:
    """A part of a step: its elements, and the bytes that the optimizer steps of them."""

    numel: int
    nbytes: int

    @property
    def masters(self) -> tuple[int, int]:
        """The bytes of low bits and of carries."""
        return 2 * self.numel, -(-self.numel // 8)

    def parts(self) -> Iterator[SteppedPart]:
        for start in range(0, self.numel, CHUNK_NUMEL):
            numel = min(CHUNK_NUMEL, self.numel - start)
            yield SteppedPart(numel, self.nbytes * numel // self.numel)


@dataclass(frozen=True, slots=True)
class SimulatedUnit:
    """A unit of the simulated model.

    Attributes:
        modules: the indices of the unit's modules in `Work.modules`, in the order of their calls.
        groups: the buffers of the unit's groups.
        traffic: the collectives of the unit's groups.
        stepped: the bytes of each shard that the optimizer steps element by element.
        matrices: the bytes of each shard of a matrix that it steps as one.
        spans: what is stepped of each trained group's shard buffer.
        nbytes: the bytes of the unsharded parameters in their own dtypes.
        offload: where the unit's state rests.
    """

    name: str
    kind: str
    numel: int
    modules: tuple[int, ...]
    groups: tuple[GroupSizes, ...]
    traffic: tuple[Traffic, ...]
    stepped: tuple[int, ...]
    matrices: tuple[int, ...] = ()
    spans: tuple[SteppedPart, ...] = ()
    nbytes: int = 0
    offload: OffloadPolicy = OffloadPolicy()

    @property
    def steps_on_host(self) -> bool:
        return self.offload.step_place == "host"

    @property
    def keeps_copies(self) -> bool:
        """True if the device keeps a copy of shards that rest on the host."""
        return self.steps_on_host and self.offload.parameters == "device"

    @property
    def is_chunked(self) -> bool:
        """True if the device steps the unit in chunks."""
        return not self.steps_on_host and (self.offload.state_place != "device" or self.offload.masters is not None)

    def chunks(self) -> Iterator[SteppedPart]:
        """Yields the parts of the unit that are stepped one after another."""
        return (part for each in self.spans for part in each.parts())

    def offloaded(self, policy: OffloadPolicy) -> SimulatedUnit:
        """Returns the unit, of which all is on the device, under `policy`."""
        unit = replace(self, offload=policy)
        if not unit.steps_on_host:
            return unit
        # The device has streams: an all-gather sends from rows in the memory of the device, so no buffer is added.
        groups = (
            replace(
                sizes,
                shards=each.copied if unit.keeps_copies else 0,
                is_offloaded=True,
                stores_at_once=each.replicate.size == 1,
            )
            for sizes, each in zip(self.groups, self.traffic, strict=True)
        )
        return replace(unit, groups=tuple(groups))


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

    def vector_bytes(self, unit: SimulatedUnit) -> int:
        """Returns the bytes of state of `unit`, without scalars."""
        return self.states * sum(unit.stepped) + sum(unit.matrices)

    def near_bytes(self, chunk: SteppedPart, policy: OffloadPolicy) -> int:
        """Returns the bytes of weights, state and masters that come to the step of `chunk`."""
        brings_masters = policy.masters not in (None, policy.step_place)
        state = self.states * chunk.nbytes if policy.state_place != policy.step_place else 0
        weights = chunk.nbytes if policy.masters is None else 2 * chunk.numel  # bfloat16
        weights *= isinstance(policy.parameters, Disk)
        return state + weights + (sum(chunk.masters) if brings_masters else 0)

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
    """

    units: tuple[SimulatedUnit, ...]
    specs: tuple[UnitSpec, ...]
    limits: Limits
    batch_bytes: int
    places: Mapping[int, Arrival]
    optimizer: Optimizer

    def offloaded(self, policy: OffloadPolicy) -> Sharded:
        """Returns the model, of which all is on the device, under `policy`: its share, unit by unit."""
        units, taken, total = list(self.units), 0, 0
        for number in (*range(1, len(units)), 0):  # as they are made: the root last
            unit = units[number]
            total += unit.nbytes
            # As `policy_of_next` (sherd/engine/state/loads.py) chooses.
            is_next = policy.share == 1.0 or taken + unit.nbytes / 2 <= policy.share * total
            taken += unit.nbytes * is_next
            stays = OffloadPolicy(masters=None if policy.masters is None else "device")
            units[number] = unit.offloaded(policy if is_next else stays)
        return replace(self, units=tuple(units))

    def elsewhere(
        self, num_reductions: int, steps_in_backward: bool = False, saved: Sequence[int] = ()
    ) -> tuple[dict[str, int], int]:
        """Returns the bytes that a rank takes of its host's memory by kind, and of disks.

        Shards, their gradients and what comes to the device are pinned, a buffer for each group; what the host itself
        steps with is not. A further reduction of a step, of `num_reductions`, lands next to the gradients before it is
        added to them: all of it or, if each unit is stepped within backward, that of one unit after the other. `saved`
        are the bytes of each tensor that forward saves there.
        """
        held: Counter[str] = Counter()
        of_units: list[list[int]] = []
        on_disk, read = 0, list[int]()

        def pin(kind: MemoryKind, *sizes: int, place: Place = "host") -> None:
            nonlocal on_disk
            if isinstance(place, Disk):
                on_disk += sum(sizes)
            else:
                held[kind.value] += sum(sizes)
                held[PINNED] += sum(_pinned(each) - each for each in sizes)

        for unit in self.units:
            policy = unit.offload
            if unit.steps_on_host:
                of_disk = isinstance(policy.parameters, Disk)
                shards = [each.owned for each in unit.traffic]
                pin(MemoryKind.SHARDS, *shards, place=policy.parameters if of_disk else "host")
                read += shards * of_disk
                trained = [each.gradients for each in unit.groups if each.arriving]
                of_units.append(trained)
            if unit.steps_on_host and policy.state_place == "host":
                held[MemoryKind.OPTIMIZER.value] += sum(self.optimizer.state_sizes(unit))
            elif policy.state_place != "device":
                states = [each.nbytes for each in unit.spans] * self.optimizer.states
                if self.optimizer.is_muon:  # a vector for each parameter
                    states = [*unit.matrices, *unit.stepped * self.optimizer.states]
                pin(MemoryKind.OPTIMIZER, *states, place=policy.state_place)
            if policy.masters not in (None, "device"):
                pin(MemoryKind.MASTERS, *(part for each in unit.spans for part in each.masters), place=policy.masters)
        num_kept = min(2, num_reductions) - steps_in_backward
        pin(MemoryKind.GRADIENTS, *(size for sizes in of_units for size in sizes * num_kept))
        if steps_in_backward:
            blocks = reduce(or_, (Counter(map(_pinned, sizes)) for sizes in of_units), Counter[int]())
            most = max(map(sum, of_units), default=0)
            held[MemoryKind.GRADIENTS.value] += most
            held[PINNED] += sum(size * num for size, num in blocks.items()) - most
        # What is gathered, and what is read meanwhile (sherd/on_disk.py).
        pin(MemoryKind.IN_FLIGHT, *sorted(read)[-2:])
        held[TensorKind.ACTIVATION.value] += sum(saved)
        held[PINNED] += sum(_pinned(each) - each for each in saved)
        # On a CPU torch steps one parameter after the other.
        on_host = [unit for unit in self.units if unit.steps_on_host]
        held["temporaries"] += replace(self.optimizer, is_foreach=False).temporary_bytes(on_host)
        return {kind: nbytes for kind, nbytes in held.items() if nbytes}, on_disk

    @property
    def cuts(self) -> Hashable:
        """A key of the parts of a micro-batch: models with the same key have the same parts."""
        groups = (tuple(each.is_all_trainable for each in unit.groups) for unit in self.units)
        saves = tuple(unit.offload.activations for unit in self.units)
        return tuple(unit.modules for unit in self.units), tuple(groups), tuple(self.places.items()), saves

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
