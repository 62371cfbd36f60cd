"""Many programs on live ranks: which fail, and the smallest program that fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.random_programs.programs import Program, simpler
from tests.random_programs.training import judged
from tests.support.ranks import Processes, RanksFailed
from tests.support.ranks.each import each_on

World = Callable[[int], Processes]


@dataclass(frozen=True)
class Failing:
    """A program and what came of it. `kind` is the same for failures that look alike."""

    program: Program
    kind: str
    said: str


def failing(world: World, programs: Sequence[Program], timeout: float = 60.0) -> Iterator[Failing]:
    """Those of `programs`, all on equally many ranks, that fail; all together first, for speed, but those in which all
    ranks are to raise."""
    for program in programs:
        if program.otherwise and (said := _unnoticed(world, program, timeout)):
            yield Failing(program, "invalid" if "invalid" in said else "unnoticed", said)
    alike = [each for each in programs if not each.otherwise]
    for program, found in each_on(world(programs[0].num_ranks), alike, judged, timeout):
        if isinstance(found, RanksFailed):
            yield Failing(program, _kind_of(found), str(found))
            continue
        invalid = next((each.invalid for each in found if each.invalid), "")
        wrong = [said for each in found for said in each.wrong]
        if invalid or wrong:
            yield Failing(program, "invalid" if invalid else "wrong", invalid or "\n".join(wrong[:6]))


def _unnoticed(world: World, program: Program, timeout: float) -> str:
    """Returns what is wrong if not all ranks raise a CommError; nothing if they do."""
    try:
        found = world(program.num_ranks).run(judged, (program,), timeout=timeout)
    except RanksFailed as error:
        return "" if {kind for kind, _ in error.errors.values()} == {"CommError"} else str(error)
    invalid = next((each.invalid for (each,) in found if each.invalid), "")
    return f"invalid: {invalid}" if invalid else "no rank has raised"


def _kind_of(error: RanksFailed) -> str:
    """By the first error that is not only another rank's echo."""
    kinds = sorted({kind for kind, _ in error.errors.values()})
    return "Died" if "Died" in kinds else "TimeoutError" if kinds == ["TimeoutError"] else "raised"


def shrunk(world: World, found: Failing, seconds: float = 60.0) -> Failing:
    """The smallest program that can be reached from this one, one feature fewer at a time, and that fails alike."""
    until = time.monotonic() + seconds
    smallest = found
    while True:
        for candidate in simpler(smallest.program):
            if time.monotonic() > until:
                return smallest
            again = next(failing(world, [candidate], timeout=6.0), None)
            if again is not None and again.kind == found.kind:
                smallest = again
                break
        else:
            return smallest
