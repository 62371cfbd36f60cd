"""What a test sees of the ranks that failed."""

import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's end: the type's name, its message, and the traceback or stack to show."""

    kind: str
    message: str
    shown: str


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not finish; `errors[rank]` is (type name, message)."""

    def __init__(self, task: str, failures: dict[int, Failure], stuck: dict[int, str]) -> None:
        self.errors = {rank: (failure.kind, failure.message) for rank, failure in sorted(failures.items())}
        shown: dict[str, list[int]] = {}
        for rank, failure in sorted(failures.items()):
            shown.setdefault(failure.shown.rstrip(), []).append(rank)
        parts = [f"{task}: {_ranks(failures)} failed"]
        parts += [f"--- {_ranks(who)} ---\n{text}" for text, who in shown.items()]
        parts += [f"--- rank {rank} had not finished ---\n{stack.rstrip()}" for rank, stack in stuck.items()]
        super().__init__("\n\n".join(parts))


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def failure_of(error: BaseException) -> Failure:
    """What the session shows of `error`: the traceback from the test's own code on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    shown = "".join(traceback.format_exception(type(error), error, trace))
    if isinstance(error, AssertionError):
        shown += _locals(trace)
    return Failure(type(error).__name__, str(error), shown)


def _is_ours(file: str) -> bool:
    return os.path.dirname(file) == os.path.dirname(__file__)


def _locals(trace: TracebackType | None) -> str:
    """The failing frame's variables: a bare assert says nothing where pytest has not rewritten it."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    found = trace.tb_frame.f_locals if trace is not None else {}
    return "".join(f"    {name} = {_short(value)}\n" for name, value in found.items())


def _short(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # a repr that raises, or one that needs the other ranks
        text = f"<{type(value).__name__}: repr raised {type(error).__name__}>"
    return text if len(text) <= 200 else text[:197] + "..."


def name_of(fn: Callable[..., Any]) -> str:
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"
