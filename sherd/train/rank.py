"""One rank of `sherd train`: it is to agree with the others on the run, and train."""

from __future__ import annotations

import os
import secrets
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import distributed as dist

from sherd import explain_memory
from sherd._torch import set_timeout
from sherd.errors import CommError, MemoryLimitError
from sherd.train.axes import axes_of
from sherd.train.checkpoint import NO_SPACE, NotSaved
from sherd.train.codes import BAD_INPUT, NO_ROOM, NOT_SAVED, STOPPED
from sherd.train.config import Config, InputError
from sherd.train.device import device_type, require_ranks
from sherd.train.fields import write_config
from sherd.train.folder import claim, sweep
from sherd.train.loggers import Loggers
from sherd.train.loop import Trainer, introduce, train
from sherd.train.mesh import RankGrid
from sherd.train.ranks import group, on_rank_0, together
from sherd.train.report import RunReport, Silent
from sherd.train.saved import Checkpoint, going_on, place_in, point
from sherd.train.stop import Stop, by_hand, leave, say
from sherd.train.text import Corpus, corpus_of

__all__ = ["Request", "be_rank", "grid_of"]


@dataclass(frozen=True, slots=True)
class Request:
    """The work of a rank: the run, and how it is shown.

    Attributes:
        configure: returns what to run, and the checkpoint that it goes on from, if any. Raises InputError.
        quiet: nothing is printed but what goes wrong.
        trace: the step to record, as `train` takes it.
    """

    configure: Callable[[], tuple[Config, Checkpoint | None]]
    quiet: bool
    trace: int | None


def be_rank(request: Request, stop: Stop) -> NoReturn:
    """One of the ranks a launcher started, here or on another machine: agree with the others, train, and leave."""
    leave(_code(request, stop))


def _code(request: Request, stop: Stop) -> int:
    """Be the rank; returns its exit code, once the reason is said."""
    try:
        with group():
            finished = _train(request, stop)
        return 0 if finished else STOPPED
    except (InputError, NotSaved) as refusal:  # on all ranks alike
        if dist.get_rank() == 0 if dist.is_initialized() else os.environ["RANK"] == "0":
            say(str(refusal))
        return NO_ROOM if isinstance(refusal, NotSaved) else BAD_INPUT
    except CommError as error:
        if stop.heard:
            if by_hand():
                say(f"stopped without saving: {error}")
            return NOT_SAVED  # others have left before they could save
        # One line: where this rank stood when it noticed does not help. The rank that ended first says why.
        return _crash(error)
    except (torch.OutOfMemoryError, MemoryLimitError) as error:
        return _crash(error)  # with the note of explain_memory
    except BaseException:
        traceback.print_exc()
        return 1


def _crash(error: BaseException) -> int:
    text = "".join(traceback.format_exception_only(error)).strip()
    print(f"{text}\n", end="", file=sys.stderr, flush=True)  # at once, as other ranks write too
    return 1


def _train(request: Request, stop: Stop) -> bool:
    """Returns False for a run that was stopped before its last step."""
    config, resumed = _configured(request)
    together(lambda: require_ranks(dist.get_world_size(), config))
    tell = print if dist.get_rank() == 0 and not request.quiet else _tell_nobody
    tell("reading the text ...", flush=True)
    corpus = together(lambda: corpus_of(config, resumed))
    together(lambda: _same(corpus))
    config = config.from_anywhere()
    out = on_rank_0(lambda: _claimed(config, stop))
    together(lambda: _seen_by_all(out))
    swept = sweep(out) if dist.get_rank() == 0 else []
    tell("building the model ...", flush=True)
    grid = grid_of(config)
    trainer = together(lambda: Trainer(config, corpus, grid))
    if resumed:
        resumed = together(partial(trainer.resume, resumed))
    # A model that was refused has left the folder empty, to be tried anew, and no run with any logger.
    loggers = together(lambda: Loggers(config, out) if dist.get_rank() == 0 else None)
    on_rank_0(lambda: point(out, config.run.checkpoints))
    on_rank_0(lambda: write_config(config, out))
    with _report(out, loggers, request.quiet) as report:
        introduce(trainer, out, resumed, report)
        for line in swept:
            report.say(f"note   {line}")
        limit = int(config.run.memory_limit * 2**30) or None
        with explain_memory(trainer.model, trainer.optimizer, limit=limit):
            return train(trainer, out, report, stop, request.trace)


def _configured(request: Request) -> tuple[Config, Checkpoint | None]:
    """Returns the config to run, and the newest whole checkpoint if it goes on from one."""
    config, resumed = together(request.configure)
    set_timeout(timedelta(seconds=config.run.timeout))
    together(partial(_same_start, resumed))
    return config, resumed


def _claimed(config: Config, stop: Stop) -> Path:
    """The run's folder, locked by this process for as long as it lives."""
    folder = claim(config)
    stop.before_leaving(folder.drop_if_empty)
    return folder.path


@contextmanager
def _report(out: Path, loggers: Loggers | None, quiet: bool) -> Iterator[Silent]:
    """The report of this rank. A disk that takes no more is told as one that takes no checkpoint.

    Raises:
        NotSaved: what rank 0 reports could not be written.
    """
    try:
        with RunReport(out, loggers, quiet) if dist.get_rank() == 0 else Silent() as report:
            yield report
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise NotSaved(f"cannot write to {out}: {error.strerror}{going_on(place_in(out))}") from error


def _same_start(resumed: Checkpoint | None) -> None:
    """Refuse ranks that would go on from different steps, for the folder of one is not that of the other."""
    step = resumed.step if resumed else 0
    first = on_rank_0(lambda: step)
    if step != first:
        raise InputError(
            f"rank {dist.get_rank()} would go on after step {step}, but rank 0 after step {first}; --out must be one "
            "folder that all machines share"
        )


def _seen_by_all(out: Path) -> None:
    """Refuse a folder that is not the same on all machines: a checkpoint would lie in parts here and there."""
    mark = out / on_rank_0(lambda: f".seen-{secrets.token_hex(8)}")
    on_rank_0(mark.touch)
    try:
        together(lambda: _find(mark))
    finally:
        if dist.get_rank() == 0:
            mark.unlink()


def _find(mark: Path) -> None:
    if not mark.exists():
        raise InputError(
            f"rank {dist.get_rank()} does not see what rank 0 has written to {mark.parent}; --out must be one folder "
            "that all machines share"
        )


def _same(corpus: Corpus) -> None:
    """Refuse ranks that read different texts, as two machines may."""
    digest = on_rank_0(lambda: corpus.digest)
    if digest != corpus.digest:
        raise InputError(f"rank {dist.get_rank()} found another text in {corpus.source} than rank 0; give all the same")


def _tell_nobody(text: str, flush: bool) -> None:
    """In the place of `print`, on all ranks but the first."""


def grid_of(config: Config) -> RankGrid:
    """All ranks on their axes, and this one on its device. All make it together.

    Raises:
        InputError: the mesh of the config does not fit the number of ranks.
    """
    device = device_type(config)
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    return RankGrid(axes_of(config, dist.get_world_size()), device)
