"""The words of the commands that use what was trained: generate, eval and export. Loads no torch before it must."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sherd.cli.terminal import say
from sherd.errors import InputError
from sherd.train.axes import axes_of, usual_ranks
from sherd.train.config import Config
from sherd.train.folder import pick
from sherd.train.saved import Checkpoint
from sherd.train.stop import is_rank
from sherd.train.text import read_corpus, read_whole

__all__ = ["Asked", "add_uses", "asked", "at_least", "require_target", "use"]

Number = TypeVar("Number", int, float)

OF_USE = ("seed", "precision", "prompt", "sample", "temperature", "timeout")  # fields of [run]
SAMPLES = 8  # windows in one forward of one rank
TORCH_FILES = (".pt", ".pth", ".bin")
FORMS = ("torch", "safetensors", "hf", "sherd")


def add_uses(commands: Any) -> None:
    """Add the parsers of these commands to `commands`, the sub-parsers of `sherd`."""
    p = _command(commands, "generate", "let a trained model write; stdout gets the text, and nothing else")
    _ranks(p)
    p.add_argument("--prompt", metavar="TEXT", help="how the text begins; unless told, the run's run.prompt")
    length = "tokens, which are bytes, after the prompt; run.sample"
    p.add_argument("--tokens", "--length", dest="length", type=at_least(0), metavar="N", help=length)
    p.add_argument("--temperature", type=at_least(0.0), metavar="T", help="0: the likeliest byte; run.temperature")
    p.add_argument("--top-k", type=at_least(1), metavar="K", help="draw from the K likeliest bytes only")
    p.add_argument("--seed", type=at_least(0), metavar="N", help="decides what is drawn; run.seed")
    p.add_argument("--num", type=at_least(1), default=1, metavar="N", help="samples, with a line of dashes between")

    p = _command(commands, "eval", "tell how well a trained model predicts a text, by default the run's held-out one")
    _ranks(p)
    p.add_argument("--data", metavar="PATH", help="another text, a file or a folder: all of it")
    p.add_argument("--json", action="store_true", help="print one line of JSON")

    p = _command(commands, "export", "write a trained model's weights for use without sherd, or without the optimizer")
    p.add_argument("path", metavar="PATH", help="what is written: x.pt, x.safetensors, or a new folder")
    p.add_argument(
        "--to",
        choices=FORMS,
        help="hf: a folder for transformers; sherd: a checkpoint without the optimizer; unless told, as PATH ends",
    )


def _command(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    p: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    p.set_defaults(use=name)
    p.add_argument(
        "run",
        nargs="?",
        metavar="CHECKPOINT",
        help="a run's folder, its checkpoints' folder or URL, or one checkpoint; unless told the last run's",
    )
    p.add_argument("--best", action="store_true", help="the run's best checkpoint, not its newest")
    return p


def _ranks(p: argparse.ArgumentParser) -> None:
    p.add_argument("--nproc", type=at_least(1), metavar="N", help="processes to shard the model over; 1 unless told")
    p.add_argument("--mesh", default="", metavar="AXES", help="how they share it, as in dp=2,tp=2")
    p.add_argument("--device", default="auto", metavar="TYPE", help="auto, cpu, cuda, ...: as run.device of training")


def at_least(low: Number) -> Callable[[str], Number]:
    """Returns a function that reads a number of the type of `low` that is not below it."""

    def read(text: str) -> Number:
        value = type(low)(text)
        if not low <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is out of its limits; it must be at least {low}")
        return value

    read.__name__ = type(low).__name__  # argparse names it where `text` is no number at all
    return read


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
    ask = asked(args, pick(args.run, args.best))
    for note in ask.checkpoint.notes:
        say(f"note   {note}; passed over", sys.stderr)
    if args.use == "export":
        form = require_target(Path(args.path), args.to, ask.config)
        from sherd.train.plain import export

        export(ask.checkpoint, ask.config, Path(args.path), form)
        print(f"{ask.checkpoint} is exported to {args.path}", file=sys.stderr)
        return 0
    if ask.num_ranks > 1:
        from sherd.train.launch import start

        return start(ask.num_ranks, "sherd", words)
    from sherd.cli.using import be_alone

    return be_alone(args, ask)


def asked(args: argparse.Namespace, checkpoint: Checkpoint) -> Asked:
    """Returns what `args` ask for of `checkpoint`. Reads the text, if one is to be judged.

    Raises:
        InputError: the mesh does not fit, or the text cannot be used.
    """
    config = _trained(checkpoint)
    if args.use == "export":
        return Asked(checkpoint, config, 1)
    config = Config.of(config.tree(), {"run": {"mesh": args.mesh, "device": args.device}})
    num_ranks = args.nproc or usual_ranks(config, 1)
    # The batch of training means nothing here, but must fit the ranks, and have a micro-batch for each stage.
    axes = axes_of(config, num_ranks)
    batch = SAMPLES * axes.num_data * axes.pp
    config = Config.of(config.tree(), {"optimizer": {"micro_batch": SAMPLES, "batch": batch}})
    text, source = _text(args, checkpoint, config) if args.use == "eval" else (b"", "")
    return Asked(checkpoint, config, num_ranks, text, source)


def _trained(checkpoint: Checkpoint) -> Config:
    """Returns the config of the run, without how the model was trained and on which ranks and devices."""
    saved = checkpoint.config
    run = {name: value for name, value in saved["run"].items() if name in OF_USE}
    return Config.of({"model": saved["model"], "data": saved["data"], "run": run})


def _text(args: argparse.Namespace, checkpoint: Checkpoint, config: Config) -> tuple[bytes, str]:
    """Returns the text that is to be judged, and where it is from."""
    if args.data:
        return read_whole(args.data), args.data
    corpus = read_corpus(config.data)
    if corpus.digest != checkpoint.text:
        raise InputError(
            f"{corpus.source} no longer holds the text that {checkpoint} was trained on, so what was held out of "
            "it is not known; --data judges all of any text"
        )
    return corpus.held_out, f"the held-out part of {corpus.source}"


def require_target(target: Path, form: str | None, config: Config) -> str:
    """Returns the form of an export to `target`: `form`, or what the name says.

    Raises:
        InputError: `target` is there already, its folder is not, its name says no form, the model does not go into that
            form, or a package is missing.
    """
    if target.exists():
        raise InputError(f"{target} is there already, and nothing is overwritten; choose another name")
    if not target.absolute().parent.is_dir():
        raise InputError(f"{target.parent} is no folder; make it first, or choose another name")
    if form is None:
        form = "torch" if target.suffix in TORCH_FILES else "safetensors" if target.suffix == ".safetensors" else ""
        form = form or ("hf" if config.model.hf else "")
    if not form:
        raise InputError(
            f"{target} ends in no known form; choose a name that ends in .pt or in .safetensors, or say --to"
        )
    if form == "hf" and config.model.experts and not config.model.hf:
        raise InputError(
            "transformers has no model like sherd train's mixture of experts; export --to safetensors or torch, or "
            "load it with sherd.train.plain.load_model"
        )
    if form == "hf" and importlib.util.find_spec("transformers") is None:
        raise InputError(f"{target} is written by the package transformers: pip install transformers safetensors")
    return form
