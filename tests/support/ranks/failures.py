"""What a test sees of the ranks that failed: what each says, and its places in our code, on one screen."""

import os
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

ROOT = f"{Path(__file__).parents[3]}{os.sep}"
HERE = os.path.dirname(__file__)
MOST_PLACES, MOST_VARIABLES, MOST_LINES, MOST_SAID = 12, 8, 30, 10


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's end: the type's name, its message, and what to show of both and of the places."""

    kind: str
    message: str
    shown: str


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not finish; `errors[rank]` is (type name, message)."""

    __module__ = "builtins"  # so that a report names it by its name alone

    def __init__(self, task: str, failures: dict[int, Failure], stuck: dict[int, str]) -> None:
        self.errors = {rank: (failure.kind, failure.message) for rank, failure in sorted(failures.items())}
        shown: dict[str, list[int]] = {}
        for rank, failure in sorted(failures.items()):
            shown.setdefault(failure.shown.rstrip(), []).append(rank)
        whose = [f"{_ranks(who)} failed: {text}" for text, who in shown.items()]
        parts = [f"{task}: {whose[0]}"] if len(whose) == 1 else [f"{task}: {_ranks(failures)} failed", *whose]
        parts += [f"rank {rank} had not finished:\n{stack.rstrip()}" for rank, stack in stuck.items()]
        super().__init__("\n".join(parts))


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def failure_of(error: BaseException, said: str = "") -> Failure:
    """What the session shows of `error`: its words, its places from the test's own code on, and what it `said`."""
    shown = _words(error) + places(traceback.walk_tb(error.__traceback__))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        shown += f"  after {_words(cause)}" + places(traceback.walk_tb(cause.__traceback__))
    if isinstance(error, AssertionError):
        shown += _locals(error.__traceback__)
    return Failure(type(error).__name__, str(error), shown + said)


def last_lines(text: str) -> str:
    """What a rank has printed, for its failure."""
    return "".join(f"  said: {line[:200]}\n" for line in text.splitlines()[-MOST_SAID:])


def _words(error: BaseException) -> str:
    """The error's type and message, as a traceback ends."""
    lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    return "\n".join(lines if len(lines) <= MOST_LINES else [*lines[:MOST_LINES], "  ..."]) + "\n"


def places(frames: Iterable[tuple[FrameType, int]], others_too: bool = False) -> str:
    """A line for each frame of the repository, but of the ranks themselves, for what it calls of other packages, and
    for the last; with `others_too` for all of these packages."""
    found = [each for each in traceback.StackSummary.extract(iter(frames)) if not each.filename.startswith(HERE)]
    ours = [False, *(each.filename.startswith(ROOT) for each in found)]
    kept = [
        f"  {_short_path(each.filename)}:{each.lineno} in {each.name}: {each.line}\n"
        for place, each in enumerate(found, 1)
        if ours[place] or ours[place - 1] or place == len(found) or (others_too and any(ours[:place]))
    ]
    if len(kept) > MOST_PLACES:
        kept[4 : 4 - MOST_PLACES] = ["  ...\n"]
    return "".join(kept)


def of_stack(dump: str) -> str:
    """What Python's fault handler wrote of a process, without what starts each rank."""
    lines = [
        line for line in dump.splitlines() if not re.search(r"tests/support/ranks/|/multiprocessing/|<string>", line)
    ]
    return "\n".join(
        re.sub(r'File "(.*)", line (\d+)', lambda at: f"{_short_path(at[1])}:{at[2]}", line) for line in lines
    )


def _short_path(file: str) -> str:
    return file.removeprefix(ROOT).rpartition("site-packages/")[2]


def _locals(trace: TracebackType | None) -> str:
    """The variables of the last frame in our code: a bare assert says nothing where pytest has not rewritten it."""
    frames = [frame for frame, _ in traceback.walk_tb(trace) if frame.f_code.co_filename.startswith(ROOT)]
    found = [(name, value) for name, value in frames[-1].f_locals.items() if name[0] not in "@_"] if frames else []
    return "".join(f"    {name} = {_short(value)}\n" for name, value in found[:MOST_VARIABLES])


def _short(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # a repr that raises, or one that needs the other ranks
        text = f"<{type(value).__name__}: repr raised {type(error).__name__}>"
    return text if len(text) <= 120 else text[:117] + "..."


def name_of(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", repr(fn)))
