"""The comparison of what the ranks of a mesh are about to do, in words that a user reads.

A comparison is a sum over the ranks of a hash of the collective that each is about to start, which is zero if the
hashes are the same. Only where it is not do the ranks exchange words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from sherd.comm import failures
from sherd.comm.agreement import in_short
from sherd.comm.objects import all_gather_objects
from sherd.engine import Unit
from sherd.errors import CommError
from sherd.guard.likeness import HASH_BYTES, model_of, parameter_in_words, terms_of
from sherd.guard.tree import Tree
from sherd.schedule.actions import Action, Gather

REMEDY = (
    "All ranks must run the same units, made alike, in the same order: look for a branch on the rank or on the data, "
    "in forward or around it (if ranks use other parameters of a unit around units, call its "
    "set_reduce_scatter_unused_params(True)); then restart all ranks"
)


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """The collective that a rank is about to start: `what` it does, in words, to which `parameters`, and on which
    `terms`, both as in `likeness`. `line` is the user's, "file:number"."""

    what: str
    parameters: tuple[str, ...]
    terms: tuple[str, ...] = ()
    line: str = field(default="", compare=False)

    def digest(self, issued: int) -> bytes:
        """Returns `HASH_BYTES` that differ for different collectives and are the same for equal ones on any host;
        `issued` is how many the rank has started since ranks compared last."""
        said = "\n".join((str(issued), self.what, *self.parameters, *self.terms))
        return hashlib.blake2b(said.encode(), digest_size=HASH_BYTES).digest()

    def describe(self, known: set[str]) -> str:
        """Returns it in words: with those parameters that are not `known`, else such terms, else all parameters."""
        if not known:
            return f"{self.what} ({in_short(self.parameters)})"
        named, terms = ([each for each in of if each not in known] for of in (self.parameters, self.terms))
        return f"{self.what} ({in_short(named or terms or self.parameters)})"


MOST_STEPS = 4
"""Which of a unit's collectives: this times its kind, 1 for a `Gather` in full precision and for a `Reduce` what
`Backward.lacking` reads, plus the optimizer steps since the last one, fewer than this."""


def planned(action: type[Action], unit: Unit, which: int, line: str = "") -> PlannedCollective:
    """Returns the collective that `action`, a `Gather` or a `Reduce`, starts for `unit`: `which` of them."""
    parameters = tuple(parameter_in_words(parameter) for parameter in unit.parameters)
    terms = (*terms_of(unit), f"shards stepped {which % MOST_STEPS} times since the last gather")
    kind = which // MOST_STEPS
    if action is Gather:
        what = f"gathers unit {unit.name}{' in full precision' if kind else ''}"
    else:
        lacking = unit.backward.lacking(kind)
        what = f"reduces the gradients of unit {unit.name}{f' without {in_short(lacking)}' if lacking else ''}"
    if unit.compared.replicas_may_differ:
        terms += ("values that replicas have not compared",)
    return PlannedCollective(what, parameters, terms, line)


def agree(
    tree: Tree,
    collective: PlannedCollective,
    issued: int,
    wait: Callable[[dist.Work], None],
    values: bytes,
    copies: Sequence[Sequence[int]],
) -> str:
    """Returns "" if all ranks of `tree` are about to start `collective`, and have started as many since they compared
    last; else, on all of them, the text of the error. All must call this; `wait` waits for the exchange.

    `values` is `likeness.values_hash`, or zeros for no comparison of values; `copies` are the ranks that have the same
    values.

    Raises:
        CommError: a rank has died, or does not come before the timeout.
    """
    ranks = tree.ranks
    alike = next((each for each in copies if dist.get_rank() in each), ())
    own = 1, _zero_if_alike(collective.digest(issued), ranks), _zero_if_alike(values, alike)
    try:
        num_ranks, *sums = tree.add_up(own, wait)
        if not any(sums) or num_ranks < len(ranks):  # imagined ranks, of a fake group, add nothing
            return ""
        found = all_gather_objects((collective, issued, values), "the comparison of what ranks do", tree.whole())
    except CommError:
        raise
    except RuntimeError as error:
        waiting = f"rank {dist.get_rank()} {collective.describe(set())} and waits for ranks {failures.in_short(ranks)}"
        raise failures.unfinished(f"{waiting} to say what they do; this comparison", ranks, error) from error
    if len({each for each, *_ in found}) > 1:
        return different(ranks, [each for each, *_ in found])
    if len({number for _, number, _ in found}) > 1:
        counts = ", ".join(f"rank {rank} {number}" for rank, (_, number, _) in zip(ranks, found, strict=True))
        return (
            f"ranks have started different numbers of collectives before each {collective.describe(set())}: {counts}. "
            f"One of them left a forward or backward early, or began one again. {REMEDY}"
        )
    return _unlike(collective, {rank: said for rank, (*_, said) in zip(ranks, found, strict=True)}, copies)


def _zero_if_alike(said: bytes, ranks: Sequence[int]) -> int:
    """Returns this rank's summand of a sum over `ranks` in 64 bits that is zero if all have `said` the same: the last
    one takes away what the others add. Of hashes that differ, one sum in about 2**47 is zero, too."""
    summand = int.from_bytes(said, "little") * (1 - len(ranks) if dist.get_rank() in ranks[-1:] else 1)
    return (summand * bool(ranks) + 2**63) % 2**64 - 2**63


def _unlike(collective: PlannedCollective, found: Mapping[int, bytes], copies: Sequence[Sequence[int]]) -> str:
    """Returns "" if the ranks of each of `copies` have found the same; else the text of the error."""
    for ranks in copies:
        by_values: dict[bytes, list[int]] = {}
        for rank in ranks:
            by_values.setdefault(found[rank], []).append(rank)
        if len(by_values) > 1:
            differ = " and ".join(f"ranks {each}" for each in by_values.values())
            return (
                f"replicas hold different values: {differ} differ in what each {collective.describe(set())}. All must "
                "begin alike: seed all ranks alike before the model is built, load on all of them, or broadcast the "
                "weights of rank 0 before it is sharded, as the wrapper's sync_module_states=True does"
            )
    return ""


def differently_made(root: Unit, ranks: Sequence[int], group: dist.ProcessGroup) -> str:
    """Returns the text of the error of ranks that have made the model of `root` differently. All must call this."""
    mine = [planned(Gather, unit, 0) for unit in model_of(root)]
    found = all_gather_objects(mine, "the comparison of how units are made", group)
    return different(ranks, next(each for each in zip(*found, strict=False) if len({*each}) > 1))


def different(ranks: Sequence[int], collectives: Sequence[PlannedCollective]) -> str:
    """Returns the text of the error of `ranks` that start different `collectives`: each once, with its ranks."""
    in_all = set.intersection(*({*collective.parameters, *collective.terms} for collective in collectives))
    described = []
    for collective in dict.fromkeys(collectives):
        by = [str(rank) for rank, started in zip(ranks, collectives, strict=True) if started == collective]
        described.append(f"rank{'s' * (len(by) > 1)} {', '.join(by)} {collective.describe(in_all)}")
    lines = [f"rank {rank} at {each.line}" for rank, each in zip(ranks, collectives, strict=True) if each.line]
    where = f" In your code: {', '.join(lines)}." if lines else ""
    if len({(each.what, *(of.partition(" ")[2] for of in each.parameters)) for each in collectives}) == 1:
        where += ' If ranks only name the same layers differently, CommPolicy(divergence="trust") lets them.'
    return f"ranks are about to start different collectives: {'; '.join(described)}.{where} {REMEDY}"
