"""The cases: jobs that save into one folder, what happens to one of them, and what happens to its files afterwards."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from tests.support.sharding import FRONTS


class Act(Enum):
    """What happens at the moment."""

    KILL = "SIGKILL of one rank"
    KILL_ALL = "SIGKILL of all ranks"
    STOP = "SIGSTOP of one rank, then SIGKILL"
    FULL = "full disk"
    READ_ONLY = "read-only folder"
    BROKEN = "one input/output error"
    CUT_OFF = "a rank that is told that another one has died"
    NOTHING = "nothing"


KILLS = (Act.KILL, Act.KILL_ALL, Act.STOP)
ANY = "any call"
GATHER = "gather"
OF_OTHERS = {ANY: 12, "open": 3.5, "write": 3, "fsync": 2.5, "replace": 1, "flock": 2}
OF_FIRST = OF_OTHERS | {ANY: 45, "open": 14, "write": 5, "fsync": 6, "replace": 3, "flock": 4}
OF_FIRST |= {"mkdir": 1, "scandir": 4, "preadv": 2}
REMOVING = {"unlink": 2, "rmdir": 0.7}
"""About how many calls of a kind to the system a save makes into the folder."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The `number`th `call` into the folder by `rank` (None: each rank's own), `half` done if it is a write that kills;
    or so many `seconds` after the begin."""

    rank: int | None
    call: str = ANY
    number: int = 0
    is_after: bool = False
    seconds: float | None = None


class Target(Enum):
    """Whose file is damaged when the jobs have ended."""

    NEWEST = "the newest checkpoint"
    HALF = "a half-written checkpoint"
    LATEST = "the file latest"


class Harm(Enum):
    """How a file is damaged."""

    FLIP = "a bit flipped"
    CUT = "truncated"
    GROW = "extended"
    DELETE = "deleted"
    TORN = "a torn manifest put there"


@dataclass(frozen=True, slots=True)
class Damage:
    """A `harm` to a random file of `target`, drawn from `seed`."""

    target: Target
    harm: Harm
    seed: int


@dataclass(frozen=True, slots=True)
class Job:
    """Ranks that save `steps`, one after the other."""

    num_ranks: int
    layout: str
    steps: tuple[int, ...]
    is_async: bool = False
    staging_bytes: int | None = None
    keep_last: int | None = None
    keep_every: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One folder: the `jobs` that save there at the same time, the `act` at a moment of the first of them, whether
    somebody loads meanwhile, the `damages` afterwards, and who loads and saves then. For each of the `moments` the jobs
    are started once, one start after the other."""

    jobs: tuple[Job, ...]
    act: Act
    moments: tuple[Moment, ...]
    num_weights: int
    has_loader: bool
    damages: tuple[Damage, ...]
    judge: Job
    has_short_timeout: bool = False
    """Whether a stopped rank is found by the timeout, not by its death."""
    is_cold: bool = False
    """Whether the first save has to make the process group that ranks save with."""


LAYOUTS = (*FRONTS, "plain")
WEIGHTS = (7, 7, 40, 700)
"""Rows of the large weight: of some bytes, or of several chunks."""


def drawn(seed: int) -> Case:
    """Returns the case of `seed`. Acts take turns; all else is drawn."""
    draw = random.Random(seed)
    acts = (Act.KILL, Act.KILL_ALL, Act.KILL, Act.KILL_ALL, Act.STOP, Act.FULL, Act.READ_ONLY, Act.BROKEN, Act.CUT_OFF)
    act = Act.NOTHING if seed % 40 == 39 else acts[seed % len(acts)]
    first = _job(draw, draw.choice((1, 2, 2, 3)))
    jobs = [first]
    if draw.random() < 0.2:
        other = _job(draw, draw.choice((1, 1, 2)))
        jobs.append(other)
    num_damages = draw.choice((0, 0, 1, 1, 2))
    damages = tuple(
        Damage(draw.choice((Target.NEWEST, *Target)), draw.choice(tuple(Harm)), draw.randrange(1 << 30))
        for _ in range(num_damages)
    )
    judge = _job(draw, draw.choice([n for n in (1, 2, 3) if n != first.num_ranks]))
    return Case(
        tuple(jobs),
        act,
        tuple(_moment(draw, act, first) for _ in range(draw.choice((1, 1, 1, 2, 3)))),
        draw.choice(WEIGHTS),
        draw.random() < 0.2,
        damages,
        judge,
        draw.random() < 0.3,
        draw.random() < 0.04,
    )


def _job(draw: random.Random, num_ranks: int) -> Job:
    steps, step = [], draw.choice((0, 5))
    for _ in range(draw.choice((1, 2, 3, 4))):
        step = draw.choice((step + 1, step + 1, step + 3, step, max(step - 1, 0)))
        steps.append(step)
    is_async = draw.random() < 0.4
    return Job(
        num_ranks,
        draw.choice(LAYOUTS),
        tuple(steps),
        is_async,
        draw.choice((None, 1, 2000)) if is_async else None,
        draw.choice((None, 1, 1, 2, 3)),
        draw.choice((None, None, 3)),
    )


def _moment(draw: random.Random, act: Act, job: Job) -> Moment:
    rank: int | None = draw.randrange(job.num_ranks)
    if act is Act.CUT_OFF:
        return Moment(rank, GATHER, 1 + draw.randrange(8 * len(job.steps)))
    if act in KILLS and draw.random() < 0.3:
        return Moment(rank, seconds=draw.random() * 0.08 * len(job.steps))
    if act is Act.KILL and rank != 0 and draw.random() < 0.4:
        rank = 0  # which does the most
    if act not in KILLS and draw.random() < 0.4:
        rank = None
    calls = dict(OF_FIRST if rank in (0, None) else OF_OTHERS)
    if rank == 0 and job.keep_last is not None:
        calls |= REMOVING
    call = draw.choice((ANY, ANY, *calls))
    number = 1 + int(draw.random() * calls[call] * len(job.steps))
    return Moment(rank, call, number, draw.random() < 0.5)
