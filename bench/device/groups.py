"""Processes that are the ranks of one group, and stay to answer one question after another."""

from __future__ import annotations

import contextlib
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..ranks import Place, joined

START_SECONDS = 60
"""Importing torch and starting a device takes seconds; this is when to give up."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group to measure on, of a `kind` as `Place` has it. Of a fake group rank 0 alone runs."""

    kind: str
    num_ranks: int

    @property
    def num_processes(self) -> int:
        return 1 if self.kind == "fake" else self.num_ranks


class Failed(Exception):
    """A question that was not answered by all ranks; the message says why, in a line."""


class Ranks:
    """The processes of one group. `work(mesh, question)` is called in each; after `Failed` they are not used again."""

    def __init__(self, group: Group, device: str, load: str, work: Callable[[DeviceMesh, Any], Any]) -> None:
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        meeting = (Path(self._folder.name) / "meeting").as_uri()
        self._pipes: list[Connection] = []
        self._processes = []
        self._are_new = True
        for rank in range(group.num_processes):
            ours, theirs = context.Pipe()
            place = Place(device, group.kind, group.num_ranks, rank, meeting, load)
            process = context.Process(target=_serve, args=(theirs, place, work), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, question: Any, seconds: float, silent: Collection[int] = ()) -> list[Any]:
        """Returns the answers in rank order, of all but the ranks of which none is expected: `silent`.

        Raises:
            Failed: a rank raised, died, or did not answer within `seconds`.
        """
        until = time.monotonic() + seconds + (START_SECONDS if self._are_new else 0)
        self._are_new = False
        try:
            for pipe in self._pipes:
                pipe.send(question)
            # A rank that waits for one that failed does not answer, so the first failure to arrive is the cause.
            answers: dict[int, Any] = {}
            asked = {rank: pipe for rank, pipe in enumerate(self._pipes) if rank not in silent}
            while len(answers) < len(asked):
                for rank, pipe in asked.items():
                    if rank not in answers and pipe.poll(0.01):
                        answers[rank] = _checked(pipe.recv())
                if time.monotonic() > until:
                    raise Failed(f"no answer within {seconds:.0f} s")
        except (EOFError, OSError):
            raise Failed("the process died") from None
        return [answers[rank] for rank in asked]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Processes end when their pipe does; one that hangs is killed."""
        for pipe in self._pipes:
            pipe.close()
        until = time.monotonic() + 5
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _checked(answer: tuple[bool, Any]) -> Any:
    is_result, value = answer
    if not is_result:
        raise Failed(value)
    return value


def _serve(pipe: Connection, place: Place, work: Callable[[DeviceMesh, Any], Any]) -> None:
    """On a rank: answer until the pipe ends."""
    try:
        with joined(place) as mesh:
            while (question := _next(pipe)) is not None:
                pipe.send(_answer(work, mesh, question))
    except Exception as error:
        with contextlib.suppress(OSError):  # the asker may be gone
            pipe.send((False, f"the group was not made or not ended: {in_a_line(error)}"))


def _next(pipe: Connection) -> Any:
    """The next question, or None when the asker has what it wanted or is gone."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _answer(work: Callable[[DeviceMesh, Any], Any], mesh: DeviceMesh, question: Any) -> tuple[bool, Any]:
    try:
        return True, work(mesh, question)
    except Exception as error:
        return False, in_a_line(error)


def in_a_line(error: Exception, most: int = 160) -> str:
    """The kind of the error, the first line of what it says, and where it was raised."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return (text if len(text) <= most else f"{text[: most - 3]}...") + place
