"""`sherd doctor FILE...`: which rank's collectives differ first, by the records that ranks wrote. Loads no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from sherd.errors import CheckpointError, InputError
from sherd.storage.places import read_file
from sherd.tools.doctor.findings import FAILURE, Finding

PATTERN, FOLDER = "sherd-flight-*.json", "sherd-flights"
BRANCH = (
    "all ranks must run the same units in the same order: look for a branch on the rank or on the data at this line, "
    "or before it"
)
ELSEWHERE = "find out why this rank is there while the others wait for it: its own data, a lock, a collective of yours"
GONE = (
    "look at the end of this rank's log: a crash, or killed for want of memory? If it ran on another machine, copy its "
    "record next to these"
)


@dataclass(frozen=True)
class StartedCollective:
    """A collective that a rank started. `what` it does is in words. Ranks that agree give it the same `number`."""

    number: int
    time: float
    phase: str
    unit: str
    what: str
    bytes: int
    state: str


@dataclass(frozen=True)
class MeshLog:
    """A rank's collectives in one `mesh` of `ranks`. `wants` is the collective that it waits to start, or ""."""

    mesh: str
    ranks: tuple[int, ...]
    waits_s: float
    wants: str
    collectives: dict[int, StartedCollective]

    @property
    def newest(self) -> int:
        """The number of the last collective, or 0."""
        return max(self.collectives, default=0)


@dataclass(frozen=True)
class Record:
    """The record that one rank wrote."""

    job: str
    rank: int
    num_ranks: int
    host: str
    time: float
    why: str
    line: str
    stack: str
    failed: bool
    meshes: list[MeshLog]

    @property
    def place(self) -> str:
        """The user's line, in words."""
        return f"at {self.line}" if self.line else "at no line of yours"


def read(paths: Sequence[Path]) -> list[Record]:
    """Returns the records of the newest job in these files and folders, in the order of ranks. Raises InputError."""
    files = [
        file
        for path in paths
        for file in (sorted((*path.glob(PATTERN), *path.glob(f"{FOLDER}/{PATTERN}"))) if path.is_dir() else [path])
    ]
    if not files:
        raise InputError(f"no {PATTERN} in {', '.join(map(str, paths))}")
    records = [_record_of(file) for file in files]
    newest = max(records, key=lambda record: record.time).job
    by_rank = {record.rank: record for record in records if record.job == newest}
    return [record for _, record in sorted(by_rank.items())]


def _record_of(file: Path) -> Record:
    try:
        said = json.loads(read_file(file))
        meshes = [
            _made(MeshLog, {**mesh, "ranks": tuple(mesh["ranks"]), "collectives": _started(mesh["collectives"])})
            for mesh in said["meshes"]
        ]
        return _made(Record, {**said, "meshes": meshes})
    except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
        raise InputError(f"{file} is no flight record: {type(error).__name__} {error}") from error


def _started(said: Sequence[Mapping[str, Any]]) -> dict[int, StartedCollective]:
    return {started["number"]: _made(StartedCollective, started) for started in said}


Made = TypeVar("Made", StartedCollective, MeshLog, Record)


def _made(kind: type[Made], said: Mapping[str, Any]) -> Made:
    return kind(**{field.name: said[field.name] for field in fields(kind)})


def judged(records: Sequence[Record]) -> Iterator[Finding]:
    first = min(records, key=lambda record: record.time)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.time))
    yield Finding("record", "job", f"{first.job}, {when}: {len(records)} of {first.num_ranks} ranks have a record")
    cause = next((record for record in sorted(records, key=lambda record: record.time) if record.failed), first)
    yield Finding("record", f"rank {cause.rank} says", cause.why)
    for rank in sorted(set(range(first.num_ranks)) - {record.rank for record in records}):
        yield Finding("record", f"rank {rank}", "it has left no record: it has died, or is elsewhere", FAILURE, GONE)
    meshes = {mesh.mesh: mesh.ranks for record in records for mesh in record.meshes if mesh.collectives or mesh.wants}
    for key, ranks in meshes.items():
        section = f"collectives of ranks {', '.join(map(str, ranks))}"
        theirs = {record.rank: (record, mesh) for record in records for mesh in record.meshes if mesh.mesh == key}
        yield from _of_mesh(section, theirs)


def _of_mesh(section: str, theirs: Mapping[int, tuple[Record, MeshLog]]) -> Iterator[Finding]:
    number = parting({rank: mesh for rank, (_, mesh) in theirs.items()})
    common = number - 1 if number else min(mesh.newest for _, mesh in theirs.values())
    yield Finding(section, "in common", f"all collectives up to number {common}")
    said = {rank: _at(number, record, mesh) for rank, (record, mesh) in theirs.items()} if number else {}
    odd = _odd(number, said, theirs)
    for rank, (record, mesh) in theirs.items():
        if rank not in odd:
            yield Finding(section, f"rank {rank}", _doing(record, mesh))
        elif said[rank]:
            text = f"left the common way at collective {number}, {record.place}: it {said[rank]}"
            yield Finding(section, f"rank {rank}", text, FAILURE, BRANCH)
        else:
            text = f"has not come to collective {number}; it is {record.place}: {_in_short(record.stack)}"
            yield Finding(section, f"rank {rank}", text, FAILURE, ELSEWHERE)


def parting(meshes: Mapping[int, MeshLog]) -> int:
    """Returns the number of the first collective that differs between ranks, or that a rank did not start; else 0."""
    oldest = max((min(mesh.collectives, default=1) for mesh in meshes.values()), default=1)
    for number in range(oldest, max(mesh.newest for mesh in meshes.values()) + 2):
        started = [mesh.collectives.get(number) for mesh in meshes.values()]
        if len({collective and collective.what for collective in started}) > 1:
            return number
        if started[0] is None:
            waits = [bool(mesh.waits_s) for mesh in meshes.values()]
            return number if any(waits) and not (all(waits) and not any(mesh.wants for mesh in meshes.values())) else 0
    return 0


def _at(number: int, record: Record, mesh: MeshLog) -> str | None:
    """Returns what a rank does at collective `number`, in words; "" if it has not reached this collective.

    None if it cannot reach the collective: it waits for an earlier one, or knows that ranks failed.
    """
    if number in mesh.collectives:
        return mesh.collectives[number].what
    if mesh.wants:
        return mesh.wants
    return None if mesh.waits_s or record.failed else ""


def _odd(number: int, said: Mapping[int, str | None], theirs: Mapping[int, tuple[Record, MeshLog]]) -> list[int]:
    """Returns the ranks whose collective `number` is the odd one.

    They are the ranks that have not reached it, else the ranks that wait while others started theirs, else a minority.
    """
    absent = [rank for rank, what in said.items() if what == ""]
    started = {rank: what for rank, what in said.items() if number in theirs[rank][1].collectives}
    wanting = {rank: what for rank, what in said.items() if what and rank not in started}
    if absent or (started and wanting):
        return absent or [*wanting]
    whats = [*(started or wanting).values()]
    most = max(map(whats.count, whats), default=0)
    fewer = [rank for rank, what in (started or wanting).items() if whats.count(what) < most]
    return fewer or (list(started or wanting) if len({*whats}) > 1 else [])


def _doing(record: Record, mesh: MeshLog) -> str:
    last = mesh.collectives.get(mesh.newest)
    if mesh.wants:
        return f"wants collective {mesh.newest + 1}, {record.place}: it {mesh.wants}"
    if last is None:
        return f"has started none; it is {record.place}"
    waits = f"has been waiting for {mesh.waits_s:.1f} s" if mesh.waits_s else "does not wait"
    started = f"{last.what} ({last.phase}, {last.bytes:,} bytes, {last.state})"
    return f"{waits} {record.place}; its last is collective {last.number}: it {started}"


def _in_short(stack: str) -> str:
    """Returns the four innermost lines of code of a stack, outermost first."""
    lines = [line.strip() for line in stack.splitlines()]
    code = [line for line in lines if line and not line.startswith(("File ", "^", "~"))]
    return " > ".join(code[-4:])
