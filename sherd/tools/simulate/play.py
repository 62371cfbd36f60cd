"""A simulated step of a sharded model: the schedule answers each moment, a clock and a memory meter carry out actions.

    action            clock                                                              memory
    Gather(More)      an all-gather is queued on its lane                                `schedule/forecast.py`
    Await             compute waits for it, and copies out of rows if there are any
    Free, Shrink      later all-gathers follow what compute has queued until now
    Reduce            gradients are copied into rows; a reduce-scatter is queued,
                      over replicas an all-reduce behind it
    FinishReduce      compute waits for it

Collectives that forward and backward call are queued behind compute, which waits for them.

A stage of a pipeline takes one forward, one backward in turn (1F1B): PipeDream-Flush of Narayanan et al.,
Memory-Efficient Pipeline-Parallel DNN Training, 2021.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sherd.policy import Disk
from sherd.schedule import actions as do
from sherd.schedule.forecast import SchedulePlayer
from sherd.schedule.moments import IN_FLIGHT, Arrival, MemoryKind, Moment, in_words
from sherd.schedule.state import Keep
from sherd.tools.simulate.costs import ClusterCosts
from sherd.tools.simulate.reserved import Reserved
from sherd.tools.simulate.saved import CopyWait, SavedCopy
from sherd.tools.simulate.segments import OPTIMIZER_TEMPORARY, ModelCollective, OptimizerPart, Part, StepSegment
from sherd.tools.simulate.sharded import OF_MASTERS, SPLITTING, UNTOUCHED, Sharded, SimulatedUnit, Touched, Traffic
from sherd.tools.simulate.timeline import Lane, LaneSpan, Meter, Timeline, TimelineUnit
from sherd.tools.simulate.work import ALONE, Collective, RankGroup, TensorKind, Wait

FOLLOWED = 3
"""The number of micro-batches whose tensors get blocks of the allocator."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
        number: the number of the stage, of `num_stages`.
        sent: bytes that go from one stage to the next, and back.
        pair: a rank of a stage, and the rank of the next stage that it sends to.
        output: bytes of the last stage's output, which its schedule keeps until the next one is there.
        keeps_buffers: the stage has memory for all gradients that it will receive, and keeps its outputs until then.
        begins: the seconds at which each pass may begin, in `order`; None: at once.
    """

    number: int
    num_stages: int
    sent: int = 0
    pair: RankGroup = ALONE
    output: int = 0
    keeps_buffers: bool = True
    begins: tuple[float, ...] | None = None

    def order(self, micro_batches: int) -> list[bool]:
        """Returns the passes of the stage: True for a forward, False for a backward."""
        ahead = min(self.num_stages - self.number - 1, micro_batches)
        return [True] * ahead + [True, False] * (micro_batches - ahead) + [False] * ahead


def play(
    parts: Sequence[Part],
    sharded: Sharded,
    costs: ClusterCosts,
    *,
    matrices: Sequence[OptimizerPart] = (),
    micro_batches: int = 1,
    reduces_each: bool = True,
    stage: Stage | None = None,
    reserved: Reserved | None = None,
    title: str = "",
    steps_in_backward: bool = False,
) -> Timeline:
    """Returns a step whose order is learnt, from shards without gradients to the end of the optimizer's step.

    Args:
        parts: one micro-batch of the model, by `parts_of`.
        sharded: the model on its mesh.
        costs: the seconds of operations and collectives.
        matrices: the optimizer's step of matrices that are stepped as wholes, by `parts_of_step`.
        micro_batches: forwards and backwards of the step.
        reduces_each: each backward reduces its gradients; otherwise only the last backward of the step does.
        stage: the stage of a pipeline. It keeps unsharded parameters and gradients until its last backward.
        reserved: gets all changes of memory, from the first step on.
        title: the title of the timeline.
        steps_in_backward: each unit is stepped once its gradients are there (`step_in_backward`).
    """
    player = _Player(parts, sharded, costs, reserved, matrices, steps_in_backward)
    learns_apart = stage is None and reserved is None
    if learns_apart:
        player.learn()
    for num in (micro_batches,) if learns_apart else (1, micro_batches):  # the first of two steps learns the order
        player.begin_step()
        if stage is not None:
            player.pipeline(stage, num)
        for number in range(num if stage is None else 0):
            player.micro_batch(number, reduces_each or number == num - 1, number == num - 1)
        player.optimizer_step()
    units = tuple(TimelineUnit.of(unit.name, unit.kind, unit.numel, unit.groups) for unit in sharded.units)
    clock, meter = player.clock, player.meter
    exposed = {lane.value: seconds for lane, seconds in clock.exposed.items() if seconds}
    return Timeline(
        title, True, units, tuple(clock.spans), tuple(meter.changes), meter.peak, clock.now, exposed=exposed
    )


def pass_seconds(parts: Sequence[Part], sharded: Sharded, costs: ClusterCosts, stage: Stage) -> tuple[float, float]:
    """Returns the seconds of a forward and of a backward of a pipeline stage that waits for no other stage."""
    player = _Player(parts, sharded, costs)
    player.begin_step()
    ends = player.pipeline(Stage(stage.num_stages - 1, stage.num_stages), 3)
    return ends[2] - ends[1], ends[3] - ends[2]


class _Player:
    """Plays steps, one after the other. `clock` and `meter` are those of the last step."""

    def __init__(
        self,
        parts: Sequence[Part],
        sharded: Sharded,
        costs: ClusterCosts,
        reserved: Reserved | None = None,
        matrices: Sequence[OptimizerPart] = (),
        steps_in_backward: bool = False,
    ) -> None:
        self._reserved, self._is_followed = reserved, True
        self._steps_in_backward, self._steps_now = steps_in_backward, False
        self._matrices = matrices
        self._has_stepped = False
        self._sharded = sharded
        self._costs = costs
        self._parts = parts
        self._names = [unit.name for unit in sharded.units]
        sizes = [unit.groups for unit in sharded.units]
        self._buffers = SchedulePlayer(sharded.specs, sharded.limits, sizes, sharded.batch_bytes)
        self._num_seen = 0
        self._uncopied: Counter[int] = Counter()
        self._moment = "at rest"
        self.clock = Clock(costs)
        self.meter = Meter()
        self._see_buffers()

    def begin_step(self) -> None:
        """Begin a step after the optimizer's step, which dropped the gradients."""
        self._buffers.begin_step()
        self._see_buffers()
        self.clock = Clock(self._costs)
        self.meter.begin_step()
        self._gathered = [0.0] * len(self._sharded.units)
        self._num_begun = [0] * len(self._sharded.units)
        """The groups of a unit of which a gather in parts has begun."""
        self._reduced = [0.0] * len(self._sharded.units)
        self._copied: dict[int, tuple[Lane, float]] = {}
        self._last_copied = 0.0
        """The time when each copy of saved tensors is done, and the last one."""
        self._stepped: set[int] = set()
        """The units that were stepped within backward."""
        self._host_done = 0.0
        """The time when the host has stepped them."""
        self._landed = [0.0] * len(self._sharded.units)
        """The time when the last reduced gradient of a unit is in host memory."""
        self._fetched: set[int] = set()
        """The units of which the device has a copy of the shards that were stepped on the host."""
        self._encoded: set[int] = set()
        """The units whose shards are encoded."""

    def learn(self) -> None:
        """Take a first step for its order alone. Only buffers and optimizer state remain of it."""
        self.begin_step()
        for part in self._parts:
            if isinstance(part, tuple):
                for moment in part:
                    self._buffers.live_through(moment)
        self._see_buffers()
        self.optimizer_step()

    def micro_batch(self, number: int, reduces: bool, is_last: bool) -> None:
        # All micro-batches leave the same memory behind, so the first ones suffice for what is reserved.
        self._is_followed = number < FOLLOWED
        self._steps_now = self._steps_in_backward and is_last
        self._buffers.change(replace(spec, reduces=spec.reduces and reduces) for spec in self._sharded.specs)
        self._go_through(self._parts)

    def pipeline(self, stage: Stage, micro_batches: int) -> list[float]:
        """Play the passes of a stage in their order. Returns the time when each pass ends.

        As in torch's stages, every micro-batch has memory for the tensors that it will receive; a pass has its own.
        Without `keeps_buffers` only the last stage's has, where the losses keep what was received. It also has the
        last output, and the last gradient that it sent.
        """
        usual, forward = self._sharded.specs, 1 + self._parts.index((do.EndForward(),))
        keeping = tuple(
            replace(each, after_forward=Keep.ALWAYS, reshard_after_backward=False, reduces=False) for each in usual
        )
        order, ends = stage.order(micro_batches), []
        is_first, is_last_stage = stage.number == 0, stage.number == stage.num_stages - 1
        keeps = stage.keeps_buffers or is_last_stage
        received = stage.sent * (micro_batches * (not is_last_stage) + (micro_batches - 1) * (not is_first)) * keeps
        received += (stage.sent + stage.output) * is_last_stage
        self._come(TensorKind.INPUT.value, -1, received)
        for number, is_forward in enumerate(order):
            if stage.begins is not None and len(stage.begins) == len(order):
                self.clock.wait(Lane.MODEL, -1, stage.begins[number])
            is_last = number == len(order) - 1
            self._buffers.change(usual if is_last else keeping)
            gradient = 0 if is_forward or keeps else stage.sent
            self._come(TensorKind.INPUT.value, -1, gradient)
            self._go_through(self._parts[:forward] if is_forward else self._parts[forward:])
            self._come(TensorKind.INPUT.value, -1, -gradient)
            ends.append(self.clock.now)
            if keeps and not is_last_stage:  # outputs are kept until their gradients come
                self._come(TensorKind.ACTIVATION.value, -1, stage.sent if is_forward else -stage.sent)
            if not (is_last_stage if is_forward else is_first):
                seconds = self._costs.collective("send", stage.sent, stage.pair)
                self.clock.start(Lane.MODEL, "send", -1, seconds, stage.sent, after=self.clock.now)
        self._come(TensorKind.INPUT.value, -1, -received)
        return ends

    def _go_through(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, StepSegment):
                self._compute(part)
            elif isinstance(part, ModelCollective):
                self._call(part)
            elif isinstance(part, SavedCopy):
                self._copy_saved(part)
            elif isinstance(part, CopyWait):
                lane, done = self._copied[part.number]
                self.clock.wait(lane, part.unit, done)
            else:
                for moment in part:
                    self._live_through(moment)

    def _copy_saved(self, copy: SavedCopy) -> None:
        lane, nbytes = Lane.BACK if copy.to_host else Lane.COPY, sum(copy.sizes)
        seconds = self._costs.to_host(nbytes) if copy.to_host else self._costs.from_host(nbytes)
        # Copies to the host and back share a stream.
        after = max(self.clock.now, self._last_copied)
        self._last_copied = self.clock.start(lane, "copy", copy.unit, seconds, nbytes, after=after)
        self._copied[copy.number] = lane, self._last_copied

    def optimizer_step(self) -> None:
        self._moment, self._is_followed = "when the optimizer steps", True
        done = self._step([number for number in range(len(self._sharded.units)) if number not in self._stepped])
        self.clock.wait(Lane.HOST, -1, max(done, self._host_done))
        self._has_stepped = True

    def _step(self, numbers: Sequence[int]) -> float:
        """Step the units `numbers`, all after backward or one within it. Returns the time when the host is done."""
        optimizer, units = self._sharded.optimizer, [self._sharded.units[number] for number in numbers]
        for number, unit in zip(numbers, units, strict=True) if not self._has_stepped else ():
            for nbytes in optimizer.state_sizes(unit) if unit.offload.state_place == "device" else ():
                self._come(MemoryKind.OPTIMIZER.value, number, nbytes)
            if unit.offload.masters == "device":
                self._come(MemoryKind.MASTERS.value, number, sum(sum(each.masters) for each in unit.spans))
        stepped = self._step_on_host(numbers)
        brought = self._bring_all(units) if optimizer.is_muon else []
        self._step_matrices()
        if not optimizer.is_muon:
            self._step_in_chunks(numbers)
        near = [unit for unit in units if not (unit.steps_on_host or (unit.is_chunked and not optimizer.is_muon))]
        temporary = optimizer.temporary_bytes(near)
        self._come(OPTIMIZER_TEMPORARY, -1, temporary)
        touched, num_touched = optimizer.touched(near), optimizer.accesses * sum(len(each.stepped) for each in near)
        if near:
            self.clock.compute("optimizer", -1, self._costs.optimizer(touched, num_touched, False))
        self._come(OPTIMIZER_TEMPORARY, -1, -temporary)
        for number, nbytes, on_disk in brought:
            seconds = self._costs.to_host(nbytes, on_disk)
            self.clock.start(Lane.BACK, "copy", number, seconds, nbytes, after=self.clock.now)
            self._come(MemoryKind.IN_FLIGHT.value, number, -nbytes)
        return stepped

    def _step_on_host(self, numbers: Sequence[int]) -> float:
        """Step on the host what landed there, after all of it. Returns the time when it is done."""
        optimizer, units, stepped = self._sharded.optimizer, self._sharded.units, 0.0
        landed = max((self._landed[number] for number in numbers), default=0.0)
        order = sorted(numbers, key=self._landed.__getitem__)
        for number in (number for number in order if units[number].steps_on_host and units[number].stepped):
            unit, policy = units[number], units[number].offload
            seconds = self._costs.optimizer(optimizer.touched([unit]), optimizer.accesses * len(unit.stepped), True)
            if policy.state_place != "host":  # it comes and goes while others are stepped
                near = sum(optimizer.near_bytes(each, policy) for each in unit.spans)
                seconds = max(seconds, self._costs.to_host(2 * near, on_disk=True))
            stepped = self.clock.start(Lane.HOST, "optimizer", number, seconds, 0, after=landed)
        return stepped

    def _bring_all(self, units: Sequence[SimulatedUnit]) -> list[tuple[int, int, bool]]:
        """Bring all state that rests elsewhere. Returns each unit that has some, the bytes, and whether from a disk."""
        brought, came = [], 0.0
        self.clock.follow_compute(Lane.COPY)
        for number, unit in enumerate(units):
            if unit.is_chunked and (nbytes := self._sharded.optimizer.vector_bytes(unit)):
                brought.append((number, nbytes, isinstance(unit.offload.state_place, Disk)))
                self._come(MemoryKind.IN_FLIGHT.value, number, nbytes)
                seconds = self._costs.from_host(nbytes, brought[-1][-1])
                came = self.clock.start(Lane.COPY, "copy", number, seconds, nbytes)
        self.clock.wait(Lane.COPY, -1, came)
        return brought

    def _step_in_chunks(self, numbers: Sequence[int]) -> None:
        """Step on the device what comes for it and goes, as sherd/optim/chunks.py does."""
        optimizer, clock, costs, units = self._sharded.optimizer, self.clock, self._costs, self._sharded.units
        chunks = [(at, each) for at in numbers if units[at].is_chunked for each in units[at].chunks()]
        near = [optimizer.near_bytes(chunk, units[unit].offload) for unit, chunk in chunks]
        disk = [isinstance(units[unit].offload.state_place, Disk) for unit, _ in chunks]
        came: list[float] = []
        gone: list[float] = []

        def drop(at: int) -> float:
            self._come(MemoryKind.IN_FLIGHT.value, chunks[at][0], -near[at])
            return gone[at]

        def fetch(at: int) -> None:
            if at < len(chunks):
                unit, free = chunks[at][0], drop(at - IN_FLIGHT) if at >= IN_FLIGHT else 0.0
                self._come(MemoryKind.IN_FLIGHT.value, unit, near[at])
                seconds = costs.from_host(near[at], disk[at]) if near[at] else 0.0
                came.append(clock.start(Lane.COPY, "copy", unit, seconds, near[at], after=free))

        clock.follow_compute(Lane.COPY)
        for at in range(IN_FLIGHT - 1):
            fetch(at)
        for at, (unit, chunk) in enumerate(chunks):
            touched, temporary = optimizer.accesses * chunk.nbytes, optimizer.temporaries * chunk.nbytes
            if units[unit].offload.masters is not None:
                touched += OF_MASTERS * chunk.numel
                temporary = chunk.nbytes + max(temporary, SPLITTING * chunk.numel)
            clock.wait(Lane.COPY, unit, came[at])
            self._come(OPTIMIZER_TEMPORARY, unit, temporary)
            clock.compute("optimizer", unit, costs.optimizer(touched, optimizer.accesses, False))
            self._come(OPTIMIZER_TEMPORARY, unit, -temporary)
            seconds = costs.to_host(near[at], disk[at]) if near[at] else 0.0
            lane = Lane.COPY if disk[at] else Lane.BACK  # a disk reads and writes in turn
            gone.append(clock.start(lane, "copy", unit, seconds, near[at], after=clock.now))
            fetch(at + IN_FLIGHT - 1)
        for at in range(max(0, len(chunks) - IN_FLIGHT), len(chunks)):
            drop(at)

    def _step_matrices(self) -> None:
        """Compute updates of matrices, while others are on their way."""
        ends: list[float] = []
        for part in self._matrices:
            match part:
                case StepSegment():
                    self._compute(part)
                case Collective(kind, nbytes, group):
                    seconds = self._seconds(kind, nbytes, group)
                    if self._costs.overlaps:
                        end = self.clock.start(Lane.MATRICES, kind, -1, seconds, nbytes, after=self.clock.now)
                        ends.append(end)
                    else:
                        self.clock.do_beside(Lane.MATRICES, kind, -1, seconds, nbytes)
                case Wait(collective) if ends:
                    self.clock.wait(Lane.MATRICES, -1, ends[collective])
                case Wait():
                    pass

    def _compute(self, stretch: StepSegment) -> None:
        self.clock.compute(stretch.phase, stretch.unit, stretch.seconds, stretch.num_ops)
        for kind, unit, nbytes in stretch.changes:
            self.meter.add(self.clock.now, kind, unit, nbytes, self._moment)
        if self._reserved is not None and self._is_followed:
            self._reserved.follow(stretch.tensors)

    def _call(self, called: ModelCollective) -> None:
        call, unit, lane = called.collective, called.unit, Lane.MODEL
        seconds = self._costs.collective(call.kind, call.nbytes, call.group)
        if self._costs.overlaps:
            end = self.clock.start(lane, call.kind, unit, seconds, call.nbytes, after=self.clock.now)
            self.clock.wait(lane, unit, end)
        else:
            self.clock.do_beside(lane, call.kind, unit, seconds, call.nbytes)

    def _come(self, kind: str, unit: int, nbytes: int) -> None:
        self.meter.add(self.clock.now, kind, unit, nbytes, self._moment)
        if self._reserved is not None:
            self._reserved.change(kind, unit, nbytes)

    # The schedule's answers

    def _live_through(self, moment: Moment) -> None:
        self._moment = in_words(moment, self._names)
        if isinstance(moment, Arrival):
            group = self._sharded.units[moment.unit].groups[moment.group]
            if not group.borrows:
                self._uncopied[moment.unit] += group.arriving[moment.index]
        for action in self._buffers.acting(moment):
            self._carry_out(action)
            if self._steps_in_backward and isinstance(action, do.FinishReduce):
                self._see_buffers()
                self._step_in_backward(action.unit)
        self._see_buffers()

    def _step_in_backward(self, unit: int) -> None:
        """Step a unit whose gradients are there, as sherd/backward_steps.py does, and drop them."""
        if self._sharded.units[unit].steps_on_host:
            self.clock.wait_on_host(self._landed[unit])
        if self._steps_now:
            self._stepped.add(unit)
            self._host_done = max(self._host_done, self._step([unit]))
            self.clock.wait_on_host(self._host_done)
            self._buffers.drop_gradients(unit)

    def _see_buffers(self) -> None:
        """Note the new changes of the engine's buffers on the meter."""
        for (unit, kind), nbytes in self._buffers.ledger.changes[self._num_seen :]:
            self._come(kind.value, unit, nbytes)
        self._num_seen = len(self._buffers.ledger.changes)

    def _carry_out(self, action: do.Action) -> None:
        match action:
            case do.Gather(unit, left):
                self._gather(unit, 0, left)
            case do.GatherMore(unit, left):
                self._gather(unit, self._num_begun[unit], left)
            case do.Await(unit):
                self._await(unit)
            case do.Free() | do.FreeGroup() | do.Shrink():
                self.clock.follow_compute(Lane.GATHER)
            case do.Reduce(unit):
                self._reduce(unit)
            case do.FinishReduce(unit):
                if self._costs.overlaps:
                    is_summed = any(each.all_reduced for each in self._sharded.units[unit].traffic)
                    lane = Lane.ALL_REDUCE if is_summed else Lane.REDUCE
                    self.clock.wait(lane, unit, self._reduced[unit])
            case do.Discard():
                pass

    def _gather(self, unit: int, first: int, left: int) -> None:
        """Gather the groups of `unit` from number `first` on, but the last `left`."""
        if not self._costs.overlaps:
            return
        of_unit = self._sharded.units[unit]
        self._num_begun[unit] = max(first, len(of_unit.traffic) - left)
        for traffic in of_unit.traffic[first : self._num_begun[unit]]:
            fetched = 0.0
            if of_unit.steps_on_host and unit not in self._fetched:
                seconds = self._costs.from_host(traffic.owned, isinstance(of_unit.offload.parameters, Disk))
                fetched = self.clock.start(Lane.COPY, "copy", unit, seconds, traffic.owned)
            seconds = self._touch(self._encoding(unit, traffic))
            seconds += self._seconds("all-gather", traffic.gathered, traffic.shard)
            self._gathered[unit] = self.clock.start(
                Lane.GATHER, "gather", unit, seconds, traffic.gathered, after=fetched
            )
        if not left:
            self._fetched |= {unit} if of_unit.keeps_copies else set()
            self._encoded.add(unit)

    def _encoding(self, unit: int, traffic: Traffic) -> Touched:
        return UNTOUCHED if unit in self._encoded else traffic.encoding

    def _touch(self, operations: Touched) -> float:
        """Queue `operations`; returns their seconds."""
        self.clock.queue(operations.num_ops)
        return self._costs.touched(operations) if operations.num_ops else 0.0

    def _compute_in_formats(self, name: str, unit: int, *operations: Touched) -> None:
        if seconds := sum(map(self._touch, operations)):
            self.clock.compute(name, unit, seconds, 0)

    def _await(self, unit: int) -> None:
        if self._costs.overlaps:
            self.clock.wait(Lane.GATHER, unit, self._gathered[unit])
        else:
            of_groups = self._sharded.units[unit].traffic
            self._compute_in_formats("encode", unit, *(self._encoding(unit, each) for each in of_groups))
            self._encoded.add(unit)
            gathered = [(each.shard, each.gathered, "all-gather") for each in of_groups]
            self._do_together(Lane.GATHER, "gather", unit, gathered)
        for traffic, sizes in zip(self._sharded.units[unit].traffic, self._sharded.units[unit].groups, strict=True):
            if traffic.decoding.num_ops:
                self._compute_in_formats("decode", unit, traffic.decoding)
            elif sizes.rows:
                self.clock.compute("copy out", unit, self._costs.copied(sizes.rows + sizes.unsharded))

    def _reduce(self, unit: int) -> None:
        nbytes = self._uncopied.pop(unit, 0)
        if nbytes:
            self.clock.compute("copy in", unit, self._costs.copied(2 * nbytes))
        if not self._costs.overlaps:
            of_groups = self._sharded.units[unit].traffic
            over_shards = [(each.shard, each.reduced, each.reduced_by) for each in of_groups]
            over_replicas = [(each.replicate, each.all_reduced, each.all_reduced_by) for each in of_groups]
            self._do_together(Lane.REDUCE, "reduce", unit, over_shards)
            self._do_together(Lane.ALL_REDUCE, "all-reduce", unit, over_replicas)
            summing = (each for of_group in of_groups for each in (of_group.reducing, of_group.all_reducing))
            self._compute_in_formats("add up", unit, *summing)
            return
        for traffic, sizes in zip(self._sharded.units[unit].traffic, self._sharded.units[unit].groups, strict=True):
            scattered = self._seconds(traffic.reduced_by, traffic.reduced, traffic.shard)
            scattered += self._touch(traffic.reducing)
            summed = self._seconds(traffic.all_reduced_by, traffic.all_reduced, traffic.replicate)
            summed += self._touch(traffic.all_reducing)
            end = self.clock.start(Lane.REDUCE, "reduce", unit, scattered, traffic.reduced, after=self.clock.now)
            end = self.clock.start(Lane.ALL_REDUCE, "all-reduce", unit, summed, traffic.all_reduced, after=end)
            self._reduced[unit] = end
            if self._sharded.units[unit].steps_on_host:
                seconds = self._costs.to_host(sizes.gradients)
                self._landed[unit] = self.clock.start(Lane.BACK, "copy", unit, seconds, sizes.gradients, after=end)

    def _do_together(self, lane: Lane, name: str, unit: int, parts: Sequence[tuple[RankGroup, int, str]]) -> None:
        """Do the collectives of a unit's groups without streams: the ranks, bytes and kind of each."""
        # They are queued and waited for together, so those of the same ranks take as long as one of all their bytes.
        total: Counter[tuple[RankGroup, str]] = Counter()
        for group, nbytes, kind in parts:
            total[group, kind] += nbytes
        for (group, kind), nbytes in total.items():
            self.clock.do_beside(lane, name, unit, self._seconds(kind, nbytes, group), nbytes)

    def _seconds(self, kind: str, nbytes: int, group: RankGroup) -> float:
        return self._costs.collective(kind, nbytes, group) if nbytes else 0.0


# The clock

SHARING = (Lane.GATHER, Lane.REDUCE, Lane.ALL_REDUCE, Lane.MATRICES)
"""The lanes whose work takes processors of the device. Copies to the host have engines of their own."""


class Clock:
    """Times of one rank's lanes, in seconds. Lanes of work run concurrently, as in `sherd/comm/streams.py`.

    The host queues work, one thing after the other. On a device with streams, compute and each kind of collective have
    a lane of their own, and queued work runs as soon as its inputs are there. Without streams the host itself computes,
    and a collective takes its time while compute waits for it.

    Attributes:
        spans: the work, in the order of queueing.
        exposed: seconds for which compute waited, by lane.
    """

    def __init__(self, costs: ClusterCosts) -> None:
        self._costs = costs
        self._free = dict.fromkeys(Lane, 0.0)
        self._follows = dict.fromkeys(Lane, 0.0)
        self._host = 0.0
        self._met = 0.0
        """The time when the ranks last waited for one another, without streams."""
        self._busy: list[tuple[float, float]] = []
        """The start and end of each collective that takes a part of the device from compute."""
        self.spans: list[LaneSpan] = []
        self.exposed = dict.fromkeys(Lane, 0.0)

    @property
    def now(self) -> float:
        """The time when compute is done with all queued work."""
        return self._free[Lane.COMPUTE]

    def compute(self, name: str, unit: int, seconds: float, num_queued: int = 1) -> None:
        """Queue operations on compute that take `seconds` together.

        The device begins once the first operation is queued, and ends after the last one is. Work of the same name and
        unit without a gap is one span.
        """
        start = max(self.now, self._host + min(1, num_queued) * self._costs.host)
        self._host += num_queued * self._costs.host
        end = self._free[Lane.COMPUTE] = max(self._end_beside_collectives(start, seconds), self._host)
        last = self.spans[-1] if self.spans else None
        if last and (last.lane, last.name, last.unit, last.end) == (Lane.COMPUTE, name, unit, start):
            self.spans[-1] = LaneSpan(Lane.COMPUTE, name, unit, last.start, end)
        elif end > start:
            self.spans.append(LaneSpan(Lane.COMPUTE, name, unit, start, end))

    def _end_beside_collectives(self, now: float, seconds: float) -> float:
        """Returns the end of compute that begins `now` and takes `seconds` without concurrent collectives."""
        self._busy = sorted(each for each in self._busy if each[1] > now)
        for begin, end in self._busy:
            alone = max(0.0, begin - now)
            if seconds <= alone:
                break
            now, seconds = now + alone, seconds - alone
            done = max(0.0, end - now) * self._costs.beside
            if seconds <= done:
                return now + seconds / self._costs.beside
            now, seconds = max(now, end), seconds - done
        return now + seconds

    def start(self, lane: Lane, name: str, unit: int, seconds: float, nbytes: int, after: float = 0.0) -> float:
        """Queue work on `lane` that begins at the time `after` or later. Returns the time when it is done."""
        self._host += self._costs.host
        if not seconds:
            return max(after, self._host)
        start = max(self._free[lane], self._follows[lane], self._host, after)
        end = self._free[lane] = start + seconds
        if lane in SHARING and self._costs.beside < 1.0:
            self._busy.append((start, end))
        self.spans.append(LaneSpan(lane, name, unit, start, end, nbytes))
        return end

    def queue(self, num: int) -> None:
        """Queue so many more operations, whose seconds are counted elsewhere."""
        self._host += num * self._costs.host

    def follow_compute(self, lane: Lane) -> None:
        """Have later work of `lane` wait for the work that is queued on compute."""
        self._follows[lane] = self.now

    def wait(self, lane: Lane, unit: int, until: float) -> None:
        """Have compute wait for `lane` until the time `until`."""
        # The host itself may be what compute waits for.
        start = self.now if lane is Lane.HOST else max(self.now, self._host)
        if until > start:
            self.exposed[lane] += until - start
            self.spans.append(LaneSpan(Lane.COMPUTE, "wait", unit, start, until))
            self._free[Lane.COMPUTE] = until

    def wait_on_host(self, until: float) -> None:
        """Have the host wait until the time `until`; it queues nothing meanwhile."""
        self._host = max(self._host, until)

    def do_beside(self, lane: Lane, name: str, unit: int, seconds: float, nbytes: int) -> None:
        """Do work of `lane` with the other ranks while compute waits, as devices without streams do."""
        if seconds:
            start = max(self.now, self._host)
            seconds += self._costs.waited(start - self._met)
            self._free[lane] = start
            self.wait(lane, unit, self.start(lane, name, unit, seconds, nbytes))
            self._met = self.now


# A pipeline


def begins(seconds: Sequence[tuple[float, float]], micro_batches: int, send: float) -> list[tuple[float, ...]]:
    """Returns for each stage the seconds at which its passes may begin.

    A forward waits for the forward of the stage before, a backward for the backward of the stage behind, and both for
    the sending of the tensors.

    Args:
        seconds: the seconds of a forward and of a backward, for each stage.
        micro_batches: the micro-batches of a step.
        send: the seconds of sending from one stage to the next.
    """
    stages = range(len(seconds))
    orders = [Stage(number, len(seconds)).order(micro_batches) for number in stages]
    ends: dict[tuple[int, bool, int], float] = {}  # by stage, `is_forward`, and micro-batch
    starts: list[list[float]] = [[] for _ in stages]
    free, done = [0.0] * len(seconds), [[0, 0] for _ in stages]
    while any(len(each) < len(order) for each, order in zip(starts, orders, strict=True)):
        for stage in stages:
            while len(starts[stage]) < len(orders[stage]):
                forward = orders[stage][len(starts[stage])]
                number, other = done[stage][forward], stage - 1 if forward else stage + 1
                ready = ends.get((other, forward, number)) if other in stages else 0.0
                if ready is None:
                    break
                start = max(free[stage], ready + send if other in stages else 0.0)
                starts[stage].append(start)
                free[stage] = ends[stage, forward, number] = start + seconds[stage][not forward]
                done[stage][forward] += 1
    return [tuple(each) for each in starts]
