"""One rank of `sherd train`: it is to agree with the others on the run, and train."""

from __future__ import annotations

import os
import secrets
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import distributed as dist

from sherd import explain_memory
from sherd.errors import CommError
from sherd.train.axes import axes_of
from sherd.train.checkpoint import NO_SPACE, NotSaved
from sherd.train.codes import BAD_INPUT, NO_ROOM, NOT_SAVED, STOPPED
from sherd.train.config import Config, InputError, toml
from sherd.train.device import device_type, require_ranks
from sherd.train.folder import MARK, claimed, drop_if_empty, sweep
from sherd.train.loggers import Logger
from sherd.train.loop import Trainer, finish, introduce, train
from sherd.train.mesh import RankGrid
from sherd.train.ranks import group, on_rank_0, together
from sherd.train.report import Report
from sherd.train.saved import Start, going_on
from sherd.train.stop import Stop, by_hand, leave, say
from sherd.train.text import corpus_of

ONE_FOLDER = "--out must be one folder that all machines share"


def be_rank(configure: Callable[[], Start], stop: Stop) -> NoReturn:
    """Be one of the ranks of a launcher: agree with the others, train, and leave. `configure` may raise InputError."""
    leave(_code(configure, stop))


def _code(configure: Callable[[], Start], stop: Stop) -> int:
    """Be the rank; returns its exit code, once the reason is said."""
    try:
        with group():
            finished = _train(configure, stop)
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
        return _crash(error)
    except torch.OutOfMemoryError as error:
        return _crash(error)  # with the note of explain_memory
    except BaseException:
        traceback.print_exc()
        return 1


def _crash(error: BaseException) -> int:
    """Say what the error says. Where this rank stood does not help: the rank that ended first says why."""
    text = "".join(traceback.format_exception_only(error)).strip()
    print(f"{text}\n", end="", file=sys.stderr, flush=True)  # at once, as other ranks write too
    return 1


def _train(configure: Callable[[], Start], stop: Stop) -> bool:
    """Returns False for a run that was stopped before its last step."""
    start = together(configure)
    config, resumed = start.config, start.resumed
    together(lambda: _require_alike("a checkpoint of step", resumed and resumed.step, ONE_FOLDER))
    together(lambda: require_ranks(dist.get_world_size(), config))
    _tell("reading the text ...", start)
    corpus = together(lambda: corpus_of(config, resumed))
    together(lambda: _require_alike(f"in {corpus.source} a text of digest", corpus.digest, "give all the same"))
    config = config.from_anywhere()
    with _claimed(start.out, stop) as out:
        _require_seen(out)
        swept = sweep(out) if dist.get_rank() == 0 else []
        _tell("building the model ...", start)
        grid = grid_of(config)
        trainer = together(lambda: Trainer(config, corpus, grid))
        if resumed:
            resumed = together(partial(trainer.resume, resumed))
        # A model that was refused has left the folder empty, to be tried again, and no run of a logger.
        logger = together(lambda: Logger(config, out) if dist.get_rank() == 0 else None)
        on_rank_0(lambda: _keep(config, out))
        with _report(out, logger, start.quiet) as report, explain_memory(trainer.model, trainer.optimizer):
            introduce(trainer, out, resumed, report)
            for line in swept:
                report.say(f"note   {line}")
            finished = train(trainer, out, report, stop, start.trace)
            if finished:
                finish(trainer, out, report)
            return finished


def _tell(text: str, start: Start) -> None:
    if dist.get_rank() == 0 and not start.quiet:
        print(text, flush=True)


@contextmanager
def _claimed(named: str, stop: Stop) -> Iterator[Path]:
    """The run's folder, locked by rank 0. A start that is refused or stopped leaves none that it has made."""

    def claim() -> Path:
        out, is_new = claimed(named, held)
        if is_new:
            held.callback(drop_if_empty, out)
            stop.before_leaving.append(partial(drop_if_empty, out))
        return out

    with ExitStack() as held:
        yield on_rank_0(claim)


def _keep(config: Config, out: Path) -> None:
    """Write down the config of the run. Raises InputError where that cannot be done."""
    about = "# The config of this run: `sherd train --config` with this file starts another one like it.\n\n"
    try:
        (out / "config.toml").write_text(about + toml(config), encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}; choose another --out") from error


@contextmanager
def _report(out: Path, logger: Logger | None, quiet: bool) -> Iterator[Report]:
    """The report of this rank. A disk that takes no more is told as one that takes no checkpoint.

    Raises:
        NotSaved: what rank 0 reports could not be written.
    """
    try:
        with Report(out if dist.get_rank() == 0 else None, logger, quiet) as report:
            yield report
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise NotSaved(f"cannot write to {out}: {error.strerror}{going_on(out)}") from error


def _require_alike(what: str, mine: object, remedy: str) -> None:
    """Refuse ranks that differ, as the folders or texts of two machines may."""
    first = on_rank_0(lambda: mine)
    if mine != first:
        raise InputError(f"rank {dist.get_rank()} has {what} {mine}, but rank 0 {first}; {remedy}")


def _require_mark(mark: Path) -> None:
    if not mark.exists():
        raise InputError(f"rank {dist.get_rank()} does not see the folder of rank 0; {ONE_FOLDER}")


def _require_seen(out: Path) -> None:
    """Refuse a folder that is not the same on all machines: a checkpoint would be in parts on several of them."""
    mark = out / on_rank_0(lambda: f"{MARK}{secrets.token_hex(8)}")
    on_rank_0(mark.touch)
    try:
        together(lambda: _require_mark(mark))
    finally:
        if dist.get_rank() == 0:
            mark.unlink()


def grid_of(config: Config) -> RankGrid:
    """All ranks on their axes, and this one on its device. All make it together.

    Raises:
        InputError: the mesh of the config does not fit the number of ranks.
    """
    device = device_type(config)
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    return RankGrid(axes_of(config, dist.get_world_size()), device)
