"""The words of the commands that use what was trained: generate, eval and export. Loads no torch before it must."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sherd.train.axes import axes_of, usual_ranks
from sherd.train.best import read_best
from sherd.train.config import Config, InputError
from sherd.train.extras import install
from sherd.train.folder import last_run
from sherd.train.manifest import MANIFEST, Checkpoint, NoCheckpoint, newest, whole
from sherd.train.stop import is_rank
from sherd.train.text import read_corpus, read_whole

__all__ = ["Asked", "add_uses", "asked", "pick", "require_target", "use"]

OF_USE = ("seed", "precision", "prompt", "sample", "temperature", "timeout")  # fields of [run]
SAMPLES = 8  # windows in one forward of one rank
TORCH_FILES = (".pt", ".pth", ".bin")


def add_uses(commands: Any) -> None:
    """Add the parsers of these commands to `commands`, the sub-parsers of `sherd`."""
    p = _command(commands, "generate", "let a trained model write; stdout gets the text, and nothing else")
    _ranks(p)
    p.add_argument("--prompt", metavar="TEXT", help="how the text begins; unless told, the run's run.prompt")
    p.add_argument("--length", type=_at_least(0), metavar="N", help="bytes after the prompt; run.sample")
    p.add_argument("--temperature", type=_at_least(0.0), metavar="T", help="0: the likeliest byte; run.temperature")
    p.add_argument("--top-k", type=_at_least(1), metavar="K", help="draw from the K likeliest bytes only")
    p.add_argument("--seed", type=_at_least(0), metavar="N", help="decides what is drawn; run.seed")
    p.add_argument("--num", type=_at_least(1), default=1, metavar="N", help="samples, with a line of dashes between")

    p = _command(commands, "eval", "tell how well a trained model predicts a text, by default the run's held-out one")
    _ranks(p)
    p.add_argument("--data", metavar="PATH", help="another text, a file or a folder: all of it")
    p.add_argument("--json", action="store_true", help="print one line of JSON")

    p = _command(commands, "export", "write a trained model's weights to one file, without shards")
    p.add_argument("file", metavar="FILE", help="x.pt for torch.load, x.safetensors; of a model.hf a new folder too")


def _command(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    p: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    p.set_defaults(use=name)
    p.add_argument("run", nargs="?", metavar="RUN", help="a run's folder or a checkpoint's; unless told the last run's")
    p.add_argument("--best", action="store_true", help="the run's best checkpoint, not its newest")
    return p


def _ranks(p: argparse.ArgumentParser) -> None:
    p.add_argument("--nproc", type=_at_least(1), metavar="N", help="processes to shard the model over; 1 unless told")
    p.add_argument("--mesh", default="", metavar="AXES", help="how they share it, as in dp=2,tp=2")
    p.add_argument("--device", default="auto", metavar="TYPE", help="auto, cpu, cuda, ...: as run.device of training")


def _at_least(low: float) -> Callable[[str], float]:
    """Returns a function that reads a number of the type of `low` that is not below it."""

    def read(text: str) -> float:
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
        from sherd.train.using import be_rank

        return be_rank(args)
    ask = asked(args, pick(args.run, args.best))
    for note in ask.checkpoint.notes:
        print(f"note   {note}; passed over", file=sys.stderr)
    if args.use == "export":
        require_target(Path(args.file), ask.config)
        from sherd.train.plain import export

        export(ask.checkpoint, ask.config, Path(args.file))
        print(f"{ask.checkpoint.path} is exported to {args.file}", file=sys.stderr)
        return 0
    if ask.num_ranks > 1:
        from sherd.train.launch import start

        return start(ask.num_ranks, "sherd", words)
    from sherd.train.using import be_alone

    return be_alone(args, ask)


def pick(run: str | None, best: bool) -> Checkpoint:
    """The checkpoint meant by `run`: a run's folder, or a checkpoint's, or None, the last run of all.

    Raises:
        InputError: there is none.
    """
    folder = _last() if run is None else Path(run)
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; name a run's, as in runs/1, or a checkpoint's")
    if folder.name.startswith("step-") or (folder / MANIFEST).exists():
        if best:
            raise InputError(f"--best chooses among a run's checkpoints, but {folder} is one; name the run's folder")
        return whole(folder)
    if not best:
        try:
            return newest(folder)
        except NoCheckpoint as error:
            if not (folder / "checkpoints").is_dir():
                raise InputError(f"{folder} holds no checkpoint; name a run's folder, or a checkpoint's") from error
            raise InputError(f"{folder} holds no whole checkpoint: {error}") from error
    found = read_best(folder)
    if found is None:
        raise InputError(
            f"{folder} has kept no best checkpoint: run.keep_best or run.save_every was off, or nothing was judged "
            "yet; leave out --best"
        )
    return whole(found.path(folder))


def _last() -> Path:
    try:
        return last_run()
    except InputError as error:
        raise InputError(f"there is no run under {Path('runs').absolute()}; name a run's folder") from error


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
    """Returns what was trained, by the config of its run; how it was trained, on which ranks and devices, is left
    out."""
    saved = checkpoint.manifest.config
    run = {name: value for name, value in saved["run"].items() if name in OF_USE}
    return Config.of({"model": saved["model"], "data": saved["data"], "run": run})


def _text(args: argparse.Namespace, checkpoint: Checkpoint, config: Config) -> tuple[bytes, str]:
    """Returns the text that is to be judged, and where it is from."""
    if args.data:
        return read_whole(args.data), args.data
    corpus = read_corpus(config.data)
    if corpus.digest != checkpoint.manifest.text:
        raise InputError(
            f"{corpus.source} no longer holds the text that {checkpoint.path} was trained on, so what was held out of "
            "it is not known; --data judges all of any text"
        )
    return corpus.held_out, f"the held-out part of {corpus.source}"


def require_target(target: Path, config: Config) -> None:
    """Refuse a file that an export cannot be written to.

    Raises:
        InputError: it is there already, its folder is not, its name says no form, or a package is missing.
    """
    if target.exists():
        raise InputError(f"{target} is there already, and nothing is overwritten; choose another name")
    if not target.absolute().parent.is_dir():
        raise InputError(f"{target.parent} is no folder; make it first, or choose another name")
    if target.suffix in TORCH_FILES:
        return
    package = "safetensors" if target.suffix == ".safetensors" else "transformers" if config.model.hf else None
    if package is None:
        raise InputError(f"{target} ends in no known form; choose a name that ends in .pt or in .safetensors")
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{target} is written by the package {package}: {install('hf')}")
