"""The words of the command `sherd`, and the run that they ask for. Loads no torch: a refusal takes no second."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sherd.train.axes import axes_of
from sherd.train.config import Config, InputError, Tree, assigned, describe, read_tree
from sherd.train.folder import last_run
from sherd.train.manifest import Checkpoint, NoCheckpoint, newest
from sherd.train.text import Corpus, read_corpus
from sherd.train.uses import add_uses

__all__ = ["configure", "corpus_of", "parse", "require_fit"]

MANY_MACHINES = (
    "torchrun --nnodes 2 --node-rank 0_OR_1 --nproc-per-node 8 --master-addr FIRST_HOST --master-port 29500\n"
    "    -m sherd train --out FOLDER_THAT_ALL_SHARE"
)


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line, like every other."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    top = _Parser(prog="sherd", description="Train models that do not fit one device.")
    commands = top.add_subparsers(required=True, metavar="command")
    add_uses(commands)
    p = commands.add_parser(
        "train",
        help="train a language model, sharded over ranks",
        description=f"Train a language model, sharded over ranks.\n\nOn each of several machines:\n  {MANY_MACHINES}",
        epilog="fields, in the TOML of --config or as section.field=value here:\n\n" + describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--config", metavar="FILE", help="TOML, or JSON, with any of the fields below")
    p.add_argument("--data", metavar="PATH", help="data.path: a file or a folder of text")
    p.add_argument("--out", metavar="PATH", help="run.out: a new or empty folder; with --resume, a run's")
    p.add_argument("--steps", type=int, metavar="N", help="run.steps")
    p.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out, or of the last run")
    p.add_argument("--resume-or-start", action="store_true", help="the same, or start in --out where nothing was saved")
    p.add_argument("--mesh", metavar="AXES", help="run.mesh: how ranks share the work, as in dp=2,tp=2")
    p.add_argument("--nproc", type=int, metavar="N", help="processes to start: 2, or one per GPU, unless told")
    p.add_argument("--quiet", action="store_true", help="nothing on the screen but what goes wrong")
    p.add_argument("fields", nargs="*", metavar="section.field=value", help="any other field")
    return top


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Returns what the words say.

    Raises:
        InputError: a word that means nothing.
    """
    return _parser().parse_args(words)


def configure(args: argparse.Namespace) -> tuple[Config, Checkpoint | None]:
    """What to run, and what it goes on from. Reads, and writes nothing.

    Raises:
        InputError: the words, the config file or the folder cannot be used.
    """
    options = {"data": {"path": args.data}, "run": {"out": args.out, "steps": args.steps, "mesh": args.mesh}}
    given = {section: {k: v for k, v in values.items() if v is not None} for section, values in options.items()}
    trees = [read_tree(args.config) if args.config else {}, assigned(args.fields), given]
    checkpoint = _to_resume(args, trees)
    if checkpoint is None:
        config = Config.of(*trees)
        out = Path(config.run.out)
        is_free = args.resume_or_start or not out.exists() or (out.is_dir() and not any(out.iterdir()))
        if config.run.out and not is_free:
            raise InputError(
                f"{out} is not an empty folder; --resume goes on with the run in it, another --out starts one"
            )
        return config, None
    folder = str(checkpoint.path.parent.parent)
    # The saved run decides what the words leave open; but how many ranks there are is today's matter.
    config = Config.of(checkpoint.manifest.config, {"run": {"ranks": 0}}, *trees, {"run": {"out": folder}})
    checkpoint.check_model(config)
    return config, checkpoint


def _to_resume(args: argparse.Namespace, trees: Sequence[Tree]) -> Checkpoint | None:
    """What the run goes on from; None for one that starts."""
    if not (args.resume or args.resume_or_start):
        return None
    named = Config.of(*({"run": tree["run"]} for tree in trees if "run" in tree)).run.out
    if args.resume_or_start and not named:
        raise InputError("--resume-or-start needs the --out that it is to look in")
    try:
        return newest(Path(named or last_run()))
    except NoCheckpoint:
        if not args.resume_or_start:
            raise
        return None


def require_fit(args: argparse.Namespace, config: Config) -> None:
    """Refuse a number of ranks, where the words or the config name one, that the batch or the mesh does not fit.

    Raises:
        InputError: they do not fit.
    """
    num_ranks = args.nproc if args.nproc is not None else config.run.ranks
    if args.nproc is not None and num_ranks < 1:
        raise InputError(f"--nproc {num_ranks} is too few; a run needs at least one process")
    if num_ranks:
        config.accumulation(axes_of(config, num_ranks).num_data)


def corpus_of(config: Config, resumed: Checkpoint | None) -> Corpus:
    """Returns the text of a run. Raises InputError where it cannot be used, or is not that of the run resumed."""
    corpus = read_corpus(config.data)
    if resumed:
        resumed.check_text(corpus.digest, corpus.source)
    return corpus
