"""The comparison of what the ranks of a mesh are about to do, in words that a user reads.

A comparison is a sum over the ranks of a hash of the collective that each rank is about to start. The sum is zero if
all hashes are equal. Only a sum that is not zero makes the ranks exchange words.

The words hold a unit's terms, too. A rank that cuts a parameter otherwise, or computes in another dtype, sends as many
bytes as the others, in another order. So a rank whose terms have changed compares its next collective
(`DivergenceChecker`).
"""

from __future__ import annotations

import hashlib
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from sherd._torch import backend_of, timeout_of
from sherd.comm.failures import ranks_in_short, unfinished
from sherd.comm.groups import host_group_beside
from sherd.comm.mesh import DataMesh
from sherd.comm.objects import exchange_objects
from sherd.comm.streams import wait_for_steps
from sherd.engine import Runtime, ShardedParameter, Unit
from sherd.errors import CommError, in_short
from sherd.guard.deeds import STEPPED, Deed
from sherd.policy import MixedPrecisionPolicy
from sherd.schedule.actions import Action, Gather

ALONE = (
    "All ranks of the mesh must make such a call, in the same order: take it out of the branch on the rank or on the "
    "data (`if rank == 0:`), and let rank 0 alone print or write what the call returns; then restart all ranks"
)
REMEDY = (
    "All ranks must run the same units, made alike, in the same order: look for a branch on the rank or on the data, "
    "in forward or around it (if ranks use other parameters of a unit around units, call its "
    "set_reduce_scatter_unused_params(True)); then restart all ranks"
)

HASH_BYTES = 8
PLACED = " placed "
"""The word between a parameter and its placement, in a term of a unit."""
_LONGEST = 60  # characters of placements in a message
_ROW = 1024  # elements that are summed before their row is weighted by its number


# What a rank is about to do


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """The collective that a rank is about to start, in words: operation and unit, parameters, terms of the unit.

    A collective outside of units has neither; `call` is the function that starts it, and what for. `line` is the
    user's, "file:number"; `ignored` are the names of parameters below the unit that no unit shards.
    """

    what: str
    parameters: tuple[str, ...]
    terms: tuple[str, ...] = ()
    line: str = field(default="", compare=False)
    ignored: tuple[str, ...] = field(default=(), compare=False)
    call: str = field(default="", compare=False)

    def digest(self, issued: int) -> bytes:
        """Returns a hash, equal on any host for equal collectives and equal numbers of `issued` ones before."""
        return _hash("\n".join((str(issued), self.what, *self.parameters, *self.terms)))

    def after(self, deeds: Sequence[Deed]) -> PlannedCollective:
        """Returns the collective with what the rank has done before it, as further terms."""
        if not deeds:
            return self
        lines = [f"after {deed.line}" for deed in deeds if deed.line]
        terms = (*self.terms, *(term for deed in deeds for term in deed.terms()))
        return replace(self, terms=terms, line=", ".join(filter(None, [self.line, *dict.fromkeys(lines)])))

    def describe(self, known: set[str]) -> str:
        """Returns the collective in words: with parameters that are not in `known`, else such terms, else all."""
        what = f"is in {self.call}, which {self.what}" if self.call else self.what
        parameters, terms = ([word for word in words if word not in known] for words in (self.parameters, self.terms))
        words = parameters or terms or self.parameters if known else self.parameters
        return f"{what} ({in_short(words, 8)})" if words else what


MOST_STEPS = 4
"""A `variant` of a unit's collective is this, times its form, plus the optimizer steps since the last one, below this.

The form of a `Gather` is 1 in full precision, else 0. The form of a `Reduce` is the mask that `Backward.lacking` takes.
"""


def planned(action: type[Action], unit: Unit, variant: int, line: str = "") -> PlannedCollective:
    """Returns the collective that `action`, a `Gather` or a `Reduce`, starts for `unit` in this `variant`."""
    form, num_steps = divmod(variant, MOST_STEPS)
    parameters = tuple(map(_parameter_in_words, unit.parameters))
    terms = (*_terms_of(unit), f"shards stepped {num_steps} times since the last gather")
    if action is Gather:
        what = f"gathers unit {unit.name}{' in full precision' if form else ''}"
    else:
        lacking = unit.backward.lacking(form)
        what = f"reduces the gradients of unit {unit.name}{f' without {in_short(lacking)}' if lacking else ''}"
    if unit.compared.replicas_may_differ:
        terms += ("values that replicas have not compared",)
    return PlannedCollective(what, parameters, terms, line, unit.ignored_names)


def _parameter_in_words(parameter: ShardedParameter) -> str:
    shape = "x".join(map(str, parameter.shape)) or "scalar"
    dtype = str(parameter.resting.dtype).removeprefix("torch.")
    return f"{parameter.name} {shape} {dtype}" + ("" if parameter.requires_grad else " frozen")


def _terms_of(unit: Unit) -> tuple[str, ...]:
    """Returns how the unit is cut, computes, sends and divides, in words. Equal layers have equal terms."""
    policy, precision, comm = unit.policy, unit.precision, unit.mesh.comm
    divisor = unit.mesh.num_shards * unit.mesh.num_replicas if policy.divide_factor is None else policy.divide_factor
    terms = [f"gradients divided by {divisor:g}", f"transport {comm.transport!r}, parts of {comm.part_bytes} bytes"]
    if comm.reduce is not None or comm.reduce_replicas is not None:
        terms.append("gradients summed by {}, between replicas by {}".format(*comm.reductions))
    if comm.gather is not None:
        terms.append(f"parameters encoded by {comm.gather}")
    if comm.error_limit is not None:
        ways = (way for mesh in unit.meshes for way, errors in mesh.wire_errors.items() if errors.is_unencoded)
        stopped = "".join(f", not encoded any more: {phase} over {axis}" for phase, axis in ways)
        terms.append(f"errors up to {comm.error_limit:g}, or {comm.above_limit}{stopped}")
    if precision != MixedPrecisionPolicy():
        terms.append(str(precision))
    if unit.mesh.keeps_unsharded or unit.mesh.shards_replicas:
        terms.append("replicas own parts of shards" if unit.mesh.shards_replicas else "gathered parameters are kept")
    for name in ("all_gather", "reduce_scatter", "all_reduce_hook", "all_reduce"):
        call = getattr(policy, name)
        if call is not None:
            terms.append(f"{name} by {getattr(call, '__qualname__', type(call).__qualname__)}")
    if policy.reduce_unused:
        terms.append("unused parameters are reduced")
    prefix = f"{unit.name}."
    placed = (
        f"{parameter.name.removeprefix(prefix)}{PLACED}{_placements_of(parameter)}" for parameter in unit.parameters
    )
    return (*terms, *placed)


def _placements_of(parameter: ShardedParameter) -> str:
    # A subclass of Shard may have terms of its own, which only its repr says.
    placed = [f"Shard({each.dim})" if type(each) is Shard else repr(each) for each in parameter.shard_spec.placements]
    words = placed[0] if len(placed) == 1 else f"[{', '.join(placed)}]"
    return words if len(words) <= _LONGEST else f"{words[: _LONGEST - 16]}... ({_hash(words).hex()})"


# Hashes, which rank compare before words


def digest_of(unit: Unit) -> int:
    """Returns a number for the terms of `unit`, which the unit keeps until they change."""
    return unit.compared.know(lambda: _number("\n".join(_terms_of(unit))))


def model_number(root: Unit) -> int:
    """Returns a number that is equal on ranks whose units of a model are made alike, with the same ones frozen."""
    units = _units_of(root)
    words = [str(digest_of(unit)) for unit in units]
    words += ["".join("01"[parameter.requires_grad] for parameter in unit.parameters) for unit in units]
    return _number(" ".join(words))


def _units_of(root: Unit) -> Sequence[Unit]:
    runtime = Runtime.over(root)
    return (root,) if runtime is None else runtime.units


Copied = tuple[bytes, tuple[int, ...]]
"""A hash of shards, as `HASH_BYTES` bytes, and the ranks that hold copies of them, for which it must be equal."""


def copied_by(unit: Unit) -> list[Copied]:
    """Returns hashes of the shards of `unit`, and of masters, that other ranks hold, too, by mesh. The host waits."""
    sums: dict[DataMesh, list[int]] = {}
    for group in (weights.group for weights in unit.weights):
        if group.mesh.holds_copies and not group.gathers_itself:
            wait_for_steps()  # forward does not wait for those of `step_on_thread(delay=1)`
            bits = () if group.masters is None else group.masters.bits()
            sums.setdefault(group.mesh, []).extend(map(_sum, (group.shard_buffer.detach(), *bits)))
    hashes = (_hash(struct.pack(f"<{len(each)}q", *each).hex()) for each in sums.values())
    replicas = (tuple(mesh.copies_of_shards()[mesh.shard_rank]) for mesh in sums)
    return list(zip(hashes, replicas, strict=True))


@torch.no_grad()
def _sum(vector: torch.Tensor) -> int:
    """Returns a sum over the bits of a vector, modulo 2**64, that depends on the order of rows."""
    bits = vector.view(torch.int16 if vector.dtype.itemsize % 2 == 0 else torch.uint8)
    full = bits.numel() // _ROW * _ROW
    rows = torch.cat((bits[:full].view(-1, _ROW).sum(1, dtype=torch.int64), bits[full:].sum(dtype=torch.int64).view(1)))
    # Weighted by their numbers, rows that have changed places do not add up to the same.
    return int((rows * torch.arange(1, rows.numel() + 1, device=rows.device)).sum())


def _number(words: str) -> int:
    return int.from_bytes(_hash(words), "little", signed=True)


def _hash(words: str) -> bytes:
    return hashlib.blake2b(words.encode(), digest_size=HASH_BYTES).digest()


# A sum over all ranks

BLOCK = 4


@dataclass(frozen=True, slots=True)
class Tree:
    """One rank's place in a tree over `ranks`, in which a sum takes a rank few connections and few messages.

    Ranks stand in blocks of `BLOCK`, the first ranks of four blocks in a block again, and so on. Each block has a group
    of the host, whose ranks connect to their two neighbours.

    Attributes:
        blocks: the groups of this rank's blocks, from below. In all but the last it is the first rank.
        is_top: the last block is the top of the tree.
        whole: makes the group of all ranks, which must call it together.
        timeout_s: how long the groups wait for other ranks.
    """

    ranks: Sequence[int]
    blocks: Sequence[dist.ProcessGroup]
    is_top: bool
    whole: Callable[[], dist.ProcessGroup]
    timeout_s: float

    def add_up(self, own: Sequence[int], wait: Callable[[dist.Work], None]) -> tuple[int, ...]:
        """Returns the sums over all ranks of their `own` numbers, in 64 bits. All ranks must call this.

        `wait` waits for one collective.
        """
        packed = bytearray(struct.pack(f"={len(own)}q", *own))
        numbers = torch.frombuffer(packed, dtype=torch.int64)
        for block in self.blocks:
            wait(_all_reduce(numbers, block))
        if not self.is_top:
            numbers.zero_()  # the first rank of the block has the sum, and will add it on the way down
        for block in reversed(self.blocks[: -1 if self.is_top else None]):
            wait(_all_reduce(numbers, block))
        return struct.unpack(f"={len(own)}q", packed)


def _all_reduce(numbers: torch.Tensor, block: dist.ProcessGroup) -> dist.Work:
    # Past the dispatcher, where users count collectives.
    work: dist.Work = backend_of(block, numbers.device).allreduce([numbers])  # type: ignore[attr-defined]
    return work


def tree_beside(parent: dist.ProcessGroup, purpose: str, ranks: Sequence[int], device: torch.device) -> Tree:
    """Returns this rank's place in the tree of `ranks`; for the arguments and errors see `group_beside`."""
    group = partial(host_group_beside, parent, purpose, device=device)
    blocks, level, this_rank = [], list(ranks), dist.get_rank()
    while this_rank in level and len(level) > 1:
        first = level.index(this_rank) // BLOCK * BLOCK
        block, level = level[first : first + BLOCK], level[::BLOCK]
        if len(block) > 1:
            blocks.append(group(ranks=block))
    timeout = timeout_of(parent, device) or dist.default_pg_timeout
    return Tree(ranks, blocks, len(level) == 1, partial(group, ranks=ranks), timeout.total_seconds())


# The comparison


def agree(
    tree: Tree,
    collective: PlannedCollective,
    issued: int,
    wait: Callable[[dist.Work], None],
    copies: Sequence[Copied],
) -> str:
    """Returns "" if all ranks of `tree` are about to start `collective`; else, on all of them, the error's text.

    All ranks must call this. It raises CommError if a rank has died, or does not come before the timeout.

    Args:
        tree: the ranks.
        collective: what this rank is about to start.
        issued: how many collectives this rank has started since the last comparison; it is compared, too.
        wait: waits for one collective of the comparison.
        copies: what `copied_by` returns, or nothing without a comparison of values.
    """
    ranks = tree.ranks
    own = 1, _zero_if_alike((collective.digest(issued), ranks)), _zero_if_alike(*copies)
    try:
        num_ranks, *sums = tree.add_up(own, wait)
        if not any(sums) or num_ranks < len(ranks):  # imagined ranks, of a fake group, add nothing
            return ""
        reports = exchange_objects((collective, issued, copies), "the comparison of what ranks do", tree.whole())
    except CommError:
        raise
    except RuntimeError as error:
        waiting = f"rank {dist.get_rank()} {collective.describe(set())} and waits for ranks {ranks_in_short(ranks)}"
        raise unfinished(f"{waiting} to say what they do; this comparison", ranks, error) from error
    collectives, numbers, copies_by_rank = zip(*reports, strict=True)
    if len(set(collectives)) > 1:
        if not _differ_in_names(collectives):
            return different(ranks, collectives)
        names = _by_rank(ranks, [replace(each, what="has") for each in collectives])
        warnings.warn(
            f"ranks name parameters of one unit differently: {names}. They are taken for the same, as they are alike "
            "in all else. If they belong to different layers, the gradients of these are added up: build the unit, and "
            "ignore parameters, alike on all ranks",
            stacklevel=2,
        )
    if len(set(numbers)) > 1:
        counts = ", ".join(f"rank {rank} {number}" for rank, number in zip(ranks, numbers, strict=True))
        return (
            f"ranks have started different numbers of collectives before each {collective.describe(set())}: {counts}. "
            f"One of them left a forward or backward early, or began one again. {REMEDY}"
        )
    return _unlike(collective, dict(zip(ranks, copies_by_rank, strict=True)))


def _zero_if_alike(*hashes: tuple[bytes, Sequence[int]]) -> int:
    """Returns this rank's summand of a 64-bit sum that is zero if each hash is equal on its ranks."""
    # The last rank takes away what the others add. Of hashes that differ, one sum in about 2**47 is zero, too.
    summand = sum(
        int.from_bytes(each, "little") * (1 - len(ranks) if dist.get_rank() == ranks[-1] else 1)
        for each, ranks in hashes
    )
    return (summand + 2**63) % 2**64 - 2**63


def _unlike(collective: PlannedCollective, copies_by_rank: Mapping[int, Sequence[Copied]]) -> str:
    """Returns the text of the error of replicas with different hashes of their values; "" if all are equal."""
    by_ranks: dict[tuple[int, tuple[int, ...]], dict[bytes, list[int]]] = {}
    for rank, copies in copies_by_rank.items():
        for number, (values, ranks) in enumerate(copies):
            by_ranks.setdefault((number, ranks), {}).setdefault(values, []).append(rank)
    for by_values in by_ranks.values():
        if len(by_values) > 1:
            differ = " and ".join(f"ranks {equal_ranks}" for equal_ranks in by_values.values())
            return (
                f"replicas hold different values: {differ} differ in what each {collective.describe(set())}. All must "
                "begin alike: seed all ranks alike before the model is built, load on all of them, or broadcast the "
                "weights of rank 0 before it is sharded, as the wrapper's sync_module_states=True does"
            )
    return ""


def differently_made(root: Unit, ranks: Sequence[int], group: dist.ProcessGroup) -> str:
    """Returns the text of the error of ranks that have made the model of `root` differently. All must call this."""
    mine = [planned(Gather, unit, 0) for unit in _units_of(root)]
    by_rank = exchange_objects(mine, "the comparison of how units are made", group)
    return different(ranks, next(units for units in zip(*by_rank, strict=False) if len({*units}) > 1))


def _differ_in_names(collectives: Sequence[PlannedCollective]) -> bool:
    """Returns True if the parameters of one unit are alike, one by one, and differ in their names alone.

    Ranks that ignore different layers, or have layers in different order, took different parameters: at some place they
    have different names that all of them know, or a name is at two places.
    """
    names = [tuple(words.partition(" ")[0] for words in each.parameters) for each in collectives]
    shapes = [tuple(words.partition(" ")[2] for words in each.parameters) for each in collectives]
    terms = [sorted(words.rpartition(PLACED)[2].rpartition(STEPPED)[2] for words in each.terms) for each in collectives]
    if len(set(zip((each.what for each in collectives), shapes, map(tuple, terms), strict=True))) > 1:
        return False
    known = set.intersection(*({*own, *each.ignored} for own, each in zip(names, collectives, strict=True)))
    places = [set(place) for place in zip(*names, strict=True)]
    at_one_place = len(set().union(*places)) == sum(map(len, places))
    return at_one_place and not any(len(place) > 1 and place <= known for place in places)


def different(ranks: Sequence[int], collectives: Sequence[PlannedCollective]) -> str:
    """Returns the text of the error of `ranks` that start different `collectives`."""
    lines = [f"rank {rank} at {each.line}" for rank, each in zip(ranks, collectives, strict=True) if each.line]
    where = f" In your code: {', '.join(lines)}." if lines else ""
    remedy = REMEDY if all(each.parameters for each in collectives) else ALONE
    return f"ranks are about to start different collectives: {_by_rank(ranks, collectives)}.{where} {remedy}"


def _by_rank(ranks: Sequence[int], collectives: Sequence[PlannedCollective]) -> str:
    """Returns each of the different `collectives` once, in words, with its ranks."""
    in_all = set.intersection(*({*collective.parameters, *collective.terms} for collective in collectives))
    described = []
    for collective in dict.fromkeys(collectives):
        by = [str(rank) for rank, started in zip(ranks, collectives, strict=True) if started == collective]
        described.append(f"rank{'s' * (len(by) > 1)} {', '.join(by)} {collective.describe(in_all)}")
    return "; ".join(described)
