"""The check that all ranks start the same collectives in the same order. At torch's debug level DETAIL they compare
before each.

    TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun ... train.py

Otherwise ranks that gather different units read each other's bytes as their own, or wait until a timeout. A comparison
is one number from each rank, a hash of what it is about to do; only where those differ do the ranks exchange words.
Below DETAIL nothing is compared, and the runtime's table of actions is what it always is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sherd.comm.groups import group_beside
from sherd.comm.mesh import DataMesh
from sherd.comm.objects import all_gather_objects
from sherd.engine.run.unit import Unit
from sherd.engine.state.parameter import ShardedParameter
from sherd.errors import CommError
from sherd.schedule.actions import Action, Gather, Reduce

Carry = Callable[[Unit], None]
"""Carries out an action on a unit."""

MOST_SHOWN = 8
"""Parameters that a message names."""


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """The collective that a rank is about to start: `what` it does, in words, and to which `parameters`. A parameter is
    given by name, shape and dtype, and "frozen" if it is."""

    what: str
    parameters: tuple[str, ...]

    @property
    def digest(self) -> int:
        """64 bits that differ for different collectives and are the same for equal ones on any host."""
        said = "\n".join((self.what, *self.parameters))
        return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "little", signed=True)

    def describe(self, known: set[str]) -> str:
        """Returns it in words, with its parameters. Those that are `known` are left out, unless all are."""
        named = [parameter for parameter in self.parameters if parameter not in known] or self.parameters
        more = f" and {len(named) - MOST_SHOWN} more" if len(named) > MOST_SHOWN else ""
        return f"{self.what} ({', '.join(named[:MOST_SHOWN])}{more})"


def with_agreement(do: dict[type[Action], Carry]) -> dict[type[Action], Carry]:
    """Returns `do`, the table by which a runtime carries out its actions. At debug level DETAIL its actions that
    communicate are compared between ranks first."""
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:  # type: ignore[attr-defined]
        return do
    return {**do, Gather: _agreed(_gathering, do[Gather]), Reduce: _agreed(_reducing, do[Reduce])}


def _agreed(collective_of: Callable[[Unit], PlannedCollective | None], carry_out: Carry) -> Carry:
    def run(unit: Unit) -> None:
        collective = collective_of(unit)
        if collective is not None:
            agree(unit.mesh, collective)
        carry_out(unit)

    return run


def _gathering(unit: Unit) -> PlannedCollective | None:
    if unit.mesh.num_shards == 1 or not unit.parameters:
        return None
    precisely = " in full precision" if unit.in_full_precision else ""
    return PlannedCollective(f"gathers unit {unit.name}{precisely}", _described(unit))


def _reducing(unit: Unit) -> PlannedCollective | None:
    return PlannedCollective(f"reduces the gradients of unit {unit.name}", _described(unit))


def _described(unit: Unit) -> tuple[str, ...]:
    return tuple(_description(parameter) for parameter in unit.parameters)


def _description(parameter: ShardedParameter) -> str:
    shape = "x".join(map(str, parameter.shape)) or "scalar"
    dtype = str(parameter.resting.dtype).removeprefix("torch.")
    return f"{parameter.name} {shape} {dtype}" + ("" if parameter.requires_grad else " frozen")


def agree(mesh: DataMesh, collective: PlannedCollective) -> None:
    """Go on only if all ranks of `mesh` are about to start `collective`. All must call this, and it blocks the host.

    Raises:
        CommError: they are not (it is raised on all ranks), or a rank does not come before the timeout (on the others).
    """
    ranks: list[int] = mesh.mesh.mesh.flatten().tolist()
    if len(ranks) == 1:
        return
    try:
        collectives = _exchange(_group_of(mesh, ranks), collective)
    except RuntimeError as error:
        raise CommError(
            f"rank {dist.get_rank()} {collective.describe(set())} and waits for ranks {ranks} to say what they do, but "
            f"one of them has died, or has not come in time: {error}. Look there for another error, for a collective "
            "that only some ranks call, or for a loop that ends earlier"
        ) from error
    if any(other != collective for other in collectives):
        raise CommError(
            f"ranks are about to start different collectives: {_compared(ranks, collectives)}. All ranks must "
            "run the same units, made alike, in the same order: look for a branch on the rank or on the data, in "
            "forward or around it; then restart all ranks"
        )


def _exchange(group: dist.ProcessGroup, collective: PlannedCollective) -> list[PlannedCollective]:
    """Returns the collective that each rank is about to start. Only hashes are sent, unless they differ."""
    own = torch.tensor([collective.digest], device="cpu")
    digests = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(digests, own, group=group)
    if all(digest.item() == collective.digest for digest in digests):
        return [collective] * len(digests)
    return all_gather_objects(collective, "the comparison of what ranks do", group)


def _compared(ranks: Sequence[int], collectives: Sequence[PlannedCollective]) -> str:
    """Returns the collectives in words, each once, with the ranks that are about to start it."""
    in_all = set.intersection(*(set(collective.parameters) for collective in collectives))
    described = []
    for collective in dict.fromkeys(collectives):
        by = [str(rank) for rank, started in zip(ranks, collectives, strict=True) if started == collective]
        described.append(f"rank{'s' * (len(by) > 1)} {', '.join(by)} {collective.describe(in_all)}")
    return "; ".join(described)


def _group_of(mesh: DataMesh, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Returns the group that ranks compare over. It is used for nothing else, so that a comparison meets only other
    comparisons, and it is one of the host, which is what waits."""
    default = dist.group.WORLD
    assert isinstance(default, dist.ProcessGroup), "there is a mesh, so it was initialized"
    return group_beside(default, "order", ranks, mesh.device, None if mesh.device.type == "cpu" else "gloo")
