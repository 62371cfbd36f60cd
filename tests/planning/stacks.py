"""Work that is written by hand: a stack of equal blocks, and costs in round numbers."""

from __future__ import annotations

from sherd.policy import OffloadPolicy
from sherd.schedule.moments import Arrival, GroupSizes
from sherd.schedule.state import Keep, Limits, UnitSpec
from sherd.tools.simulate.costs import ClusterCosts
from sherd.tools.simulate.sharded import Optimizer, Sharded, SimulatedUnit, SteppedPart, Traffic
from sherd.tools.simulate.work import (
    Allocate,
    BackwardBegins,
    Enter,
    Event,
    Gradient,
    Leave,
    Module,
    Op,
    OpKind,
    Parameter,
    Passed,
    RankGroup,
    Reached,
    Release,
    TensorKind,
    Use,
    Work,
)

WEIGHT, SHARD, KEPT = 800, 100, 50
"""Bytes of a block's weight, of this rank's eighth of it, and of what the block keeps for backward."""
FORWARD, BACKWARD = Op(OpKind.MATMUL, "forward", 1, 1, "float32"), Op(OpKind.MATMUL, "backward", 2, 1, "float32")


def stack(num_blocks: int) -> Work:
    """A root without parameters, and blocks with one weight each."""
    blocks = range(1, num_blocks + 1)
    events: list[Event] = [Enter(0)]
    for block in blocks:
        kept = Allocate(block, KEPT, TensorKind.ACTIVATION)
        events += [Enter(block), Use(block - 1), kept, FORWARD, Leave(block)]
    events += [Leave(0), BackwardBegins(), Reached(0)]
    for block in reversed(blocks):
        events += [Reached(block), BACKWARD, Gradient(block - 1), Release(block), Passed(block)]
    events += [Passed(0)]
    modules = (Module("", "Stack", None), *(Module(f"blocks.{block - 1}", "Block", 0) for block in blocks))
    parameters = tuple(Parameter(f"blocks.{block - 1}.weight", block, (200,), "float32", WEIGHT) for block in blocks)
    return Work(modules, parameters, tuple(events), samples=1, tokens=1)


def sharded_stack(
    num_blocks: int, limits: Limits = Limits(), ranks: int = 8, offload: OffloadPolicy = OffloadPolicy()
) -> Sharded:
    """The stack over 8 ranks, or so many in its collectives, each block and the root a unit."""
    traffic = Traffic(WEIGHT, WEIGHT, owned=SHARD, copied=SHARD, shard=RankGroup(ranks))
    sizes = GroupSizes(
        shards=SHARD, unsharded=WEIGHT, arriving=(WEIGHT,), gradient_rows=WEIGHT, reduced=SHARD, gradients=SHARD
    )
    root = SimulatedUnit("", "Stack", 0, (0,), (), (), ())
    blocks = tuple(
        SimulatedUnit(
            *(f"blocks.{number}", "Block", 200, (number + 1,), (sizes,), (traffic,), (SHARD,)),
            spans=(SteppedPart(SHARD // 4, SHARD),),
            nbytes=WEIGHT,
        )
        for number in range(num_blocks)
    )
    specs = (UnitSpec(0, Keep.FOR_BACKWARD), *(UnitSpec(WEIGHT) for _ in blocks))
    places = {number: Arrival(number + 1, 0, 0) for number in range(num_blocks)}
    whole = Sharded((root, *blocks), specs, limits, 0, places, Optimizer(states=2, accesses=7))
    return whole.offloaded(offload)


class RoundCosts(ClusterCosts):
    """Seconds that can be added up by hand: of an operation as many as it has FLOPs."""

    def __init__(self, gather: float, reduce: float, overlaps=True, host=0.0, copy: float = 0.0, beside: float = 1.0):
        self.gather, self.reduce, self.overlaps, self.host, self.copy = gather, reduce, overlaps, host, copy
        self.beside = beside

    def op(self, op: Op) -> float:
        return float(op.flops)

    def copied(self, nbytes: int) -> float:
        return 0.0

    def collective(self, kind: str, nbytes: int, group: RankGroup) -> float:
        return {"all-gather": self.gather, "reduce-scatter": self.reduce}.get(kind, 10.0)

    def waited(self, computed: float) -> float:
        return 0.0

    def to_host(self, nbytes: int, on_disk: bool = False) -> float:
        return self.copy

    from_host = to_host

    def optimizer(self, nbytes: int, num_tensors: int, on_host: bool) -> float:
        return 1.0
