"""The words of the commands that use what was trained: generate and eval. Loads no torch before it must."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sherd.cli.options import add_command, reader
from sherd.cli.terminal import say
from sherd.errors import CheckpointError, InputError
from sherd.storage.folder import Folder, checked
from sherd.storage.manifest import MANIFEST
from sherd.storage.places import DiskPlace
from sherd.tools.simulate.values import at_least
from sherd.train.axes import axes_of, usual_ranks
from sherd.train.config import MODEL, Config
from sherd.train.folder import last_run
from sherd.train.saved import Checkpoint, folder_in, newest
from sherd.train.stop import is_rank
from sherd.train.text import read_corpus, read_whole

OF_USE = (*MODEL, "data", "context", "seed", "precision")  # fields of the run
SAMPLES = 8  # windows in one forward of one rank


def add_uses(commands: Any) -> None:
    p = _command(commands, "generate", "let a trained model write; stdout gets the text, and nothing else")
    p.add_argument("--prompt", default="", metavar="TEXT", help="how the text begins")
    length, count = "tokens, which are bytes, after the prompt; 200 unless told", reader(at_least(0))
    p.add_argument("--tokens", "--length", dest="length", type=count, default=200, metavar="N", help=length)
    heat = reader(at_least(0.0))
    p.add_argument("--temperature", type=heat, default=0.6, metavar="T", help="0: the likeliest byte; 0.6")
    p.add_argument("--seed", type=count, metavar="N", help="decides what is drawn; the run's seed")

    p = _command(commands, "eval", "tell how well a trained model predicts a text, by default the run's held-out one")
    p.add_argument("--data", metavar="PATH", help="another text, a file or a folder: all of it")
    p.add_argument("--json", action="store_true", help="print one line of JSON")


def _command(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    p = add_command(commands, name, about, use=name)
    p.add_argument(
        "run",
        nargs="?",
        metavar="CHECKPOINT",
        help="a run's folder, its checkpoints' folder, or one checkpoint; unless told the last run's",
    )
    num_ranks = reader(at_least(1))
    p.add_argument("--nproc", type=num_ranks, metavar="N", help="processes to shard the model over; 1 unless told")
    p.add_argument("--mesh", default="", metavar="AXES", help="how they share it, as in dp=2,tp=2")
    p.add_argument("--device", default="auto", metavar="TYPE", help="auto, cpu, cuda, ...: as device of training")
    return p


@dataclass(frozen=True)
class Asked:
    """A request of the command line, with all that can be known of it without torch.

    Attributes:
        text: what is to be judged; empty for other commands.
        source: where that text is from, in words.
    """

    checkpoint: Checkpoint
    config: Config
    num_ranks: int
    text: bytes = b""
    source: str = ""


def use(args: argparse.Namespace, words: list[str]) -> int:
    """Do what one of these commands says; returns the exit code.

    Raises:
        InputError: it cannot be done.
    """
    if is_rank():
        from sherd.cli.using import be_rank

        return be_rank(args)
    ask = asked(args, pick(args.run))
    for note in ask.checkpoint.notes:
        say(f"note   {note}; passed over", sys.stderr)
    if ask.num_ranks > 1:
        from sherd.train.launch import start

        return start(ask.num_ranks, words)
    from sherd.cli.using import be_alone

    return be_alone(args, ask)


def pick(run: str | None) -> Checkpoint:
    """Returns the checkpoint that a user names by a run's folder, that of its checkpoints, or one checkpoint's.

    None is the last run of all. Raises InputError where there is none.
    """
    path = last_run() if run is None else Path(run)
    if not path.is_dir():
        raise InputError(f"{path} is no folder; name a run's, as in runs/1, or a checkpoint's")
    if not path.name.startswith("step-") and not (path / MANIFEST).exists():
        return newest(Folder(DiskPlace(path)) if any(path.glob("step-*")) else folder_in(path))
    try:
        return Checkpoint(place := DiskPlace(path), checked(place))
    except CheckpointError as error:
        raise InputError(Exception.__str__(error)) from error


def asked(args: argparse.Namespace, checkpoint: Checkpoint) -> Asked:
    """Returns what `args` ask for of `checkpoint`. Reads the text, if one is to be judged.

    Raises:
        InputError: the mesh does not fit, or the text cannot be used.
    """
    # The config of the run, without how the model was trained and on which ranks and devices.
    saved = {name: value for name, value in checkpoint.config.items() if name in OF_USE}
    config = Config.of(saved, {"mesh": args.mesh, "device": args.device})
    num_ranks = args.nproc or usual_ranks(config, 1)
    # The batch of training means nothing here, but must fit the ranks.
    batch = SAMPLES * axes_of(config, num_ranks).num_data
    config = Config.of(config.tree(), {"micro_batch": SAMPLES, "batch": batch})
    text, source = _text(args, checkpoint, config) if args.use == "eval" else (b"", "")
    return Asked(checkpoint, config, num_ranks, text, source)


def _text(args: argparse.Namespace, checkpoint: Checkpoint, config: Config) -> tuple[bytes, str]:
    """Returns the text that is to be judged, and where it is from."""
    if args.data:
        return read_whole(args.data), args.data
    corpus = read_corpus(config.data, config.context)
    if corpus.digest != checkpoint.text:
        raise InputError(
            f"{corpus.source} no longer holds the text that {checkpoint} was trained on, so what was held out of "
            "it is not known; --data judges all of any text"
        )
    return corpus.held_out, f"the held-out part of {corpus.source}"
