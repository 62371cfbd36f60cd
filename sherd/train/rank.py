"""What one rank of `sherd train` does: agree with the others on the run, and train."""

from __future__ import annotations

import argparse
import os
import secrets
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from sherd._torch import set_timeout
from sherd.train.axes import axes_of
from sherd.train.codes import STOPPED
from sherd.train.config import Config, InputError
from sherd.train.device import device_type, require_ranks
from sherd.train.folder import claim
from sherd.train.loggers import Loggers
from sherd.train.loop import Trainer, introduce, train
from sherd.train.manifest import Checkpoint
from sherd.train.mesh import Grid
from sherd.train.ranks import Stop, group, on_rank_0, together
from sherd.train.report import Report, Silent
from sherd.train.text import Corpus
from sherd.train.words import configure, corpus_of

__all__ = ["be_rank", "grid_of"]


def be_rank(args: argparse.Namespace) -> int:
    """One of the ranks torchrun started, here or on another machine: agree with the others, and train."""
    stop = Stop()
    with group():
        finished = _train(args, stop)
    return 0 if finished else STOPPED


def _train(args: argparse.Namespace, stop: Stop) -> bool:
    """Returns False for a run that was stopped before its last step."""
    config, resumed = together(lambda: configure(args))
    set_timeout(timedelta(seconds=config.run.timeout))
    together(lambda: _same_start(resumed))
    together(lambda: require_ranks(dist.get_world_size(), config))
    tell = print if dist.get_rank() == 0 and not args.quiet else _tell_nobody
    tell("reading the text ...", flush=True)
    corpus = together(lambda: corpus_of(config, resumed))
    together(lambda: _same(corpus))
    out = on_rank_0(lambda: claim(config))
    together(lambda: _seen_by_all(out))
    loggers = together(lambda: Loggers(config, out) if dist.get_rank() == 0 else None)
    tell("building the model ...", flush=True)
    grid = grid_of(config)
    trainer = together(lambda: Trainer(config, corpus, grid))
    with Report(out, loggers, args.quiet) if dist.get_rank() == 0 else Silent() as report:
        introduce(trainer, out, resumed, report)
        return train(trainer, out, resumed, report, stop)


def _same_start(resumed: Checkpoint | None) -> None:
    """Refuse ranks that would go on from different steps, for the folder of one is not that of the other."""
    step = resumed.manifest.step if resumed else 0
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


def grid_of(config: Config) -> Grid:
    """All ranks on their axes, and this one on its device. All make it together.

    Raises:
        InputError: the mesh of the config does not fit the number of ranks.
    """
    device = device_type(config)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return Grid(axes_of(config, dist.get_world_size()), device)
