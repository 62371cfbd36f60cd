"""How `sherd train` is called, how it starts its ranks, and what it exits with.

Exit codes: 0, done; 2, bad input, told in one line; 143, stopped by SIGTERM or Ctrl-C and saved, so that a
scheduler knows there is more to do; anything else, a crash, with the rank's traceback.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
from torch import distributed as dist

from sherd._torch import set_timeout
from sherd.train.checkpoint import Checkpoint, NoCheckpoint, newest
from sherd.train.config import Config, InputError, Tree, assigned, describe, read_tree
from sherd.train.data import Corpus, read_corpus
from sherd.train.loop import Trainer, introduce, train
from sherd.train.mesh import Grid, axes_of, usual_ranks
from sherd.train.ranks import BAD_INPUT, STOPPED, Stop, group, on_rank_0, start, together
from sherd.train.report import Report, Silent

__all__ = ["configure", "main"]

RUNS = Path("runs")
MANY_MACHINES = (
    "torchrun --nnodes 2 --node-rank 0_OR_1 --nproc-per-node 8 --master-addr FIRST_HOST --master-port 29500\n"
    "    -m sherd.train.cli train --out FOLDER_THAT_ALL_SHARE"
)


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line, like every other."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    top = _Parser(prog="sherd", description="Train models that do not fit one device.")
    commands = top.add_subparsers(required=True, metavar="train")
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
    p.add_argument("fields", nargs="*", metavar="section.field=value", help="any other field")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """`sherd` with these words; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser().parse_args(words)
        return _be_rank(args) if "RANK" in os.environ else _launch(args, words)
    except InputError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"sherd train: {error}", file=sys.stderr)
        return BAD_INPUT


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
        return newest(Path(named or _last_run()))
    except NoCheckpoint:
        if not args.resume_or_start:
            raise
        return None


def _runs() -> list[int]:
    return sorted(int(path.name) for path in RUNS.glob("*") if path.name.isdigit())


def _last_run() -> Path:
    if not _runs():
        raise InputError(f"there is no run under {RUNS.absolute()} to resume; name one with --out")
    return RUNS / str(_runs()[-1])


def _claim(config: Config) -> Path:
    """The run's folder, made if need be, and surely writable."""
    out = Path(config.run.out or RUNS / str((_runs() or [0])[-1] + 1))
    try:
        out.mkdir(parents=True, exist_ok=bool(config.run.out))
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}; choose another --out") from error
    return out


def _launch(args: argparse.Namespace, words: list[str]) -> int:
    """Check all that one process can check, then start the ranks."""
    config, resumed = configure(args)
    num_ranks: int = args.nproc if args.nproc is not None else config.run.ranks or _usual_ranks(config)
    _enough(num_ranks, config)
    _text(config, resumed)
    return start(num_ranks, "sherd.train.cli", [*words, "--out", str(_claim(config))])


def _device(config: Config) -> str:
    cuda = torch.cuda.is_available()
    if config.run.device == "cuda" and not cuda:
        raise InputError("run.device = 'cuda', but torch sees no GPU here; set run.device = 'cpu'")
    return config.run.device if config.run.device != "auto" else "cuda" if cuda else "cpu"


def _usual_ranks(config: Config) -> int:
    return usual_ranks(config, torch.cuda.device_count() if _device(config) == "cuda" else 2)


def _enough(num_ranks: int, config: Config) -> None:
    """Refuse a number of ranks that the config, or this machine, has no use for."""
    if num_ranks < 1:
        raise InputError(f"--nproc {num_ranks} is too few; a run needs at least one process")
    config.accumulation(axes_of(config, num_ranks).num_data)
    local, num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)), torch.cuda.device_count()
    if _device(config) == "cuda" and local > num_gpus:
        raise InputError(f"{local} ranks on a machine of {num_gpus} GPUs; start one per GPU, or set run.device")


def _text(config: Config, resumed: Checkpoint | None) -> Corpus:
    corpus = read_corpus(config.data)
    if resumed:
        resumed.check_text(corpus.digest, corpus.source)
    return corpus


def _be_rank(args: argparse.Namespace) -> int:
    """One of the ranks torchrun started, here or on another machine: agree with the others, and train."""
    stop = Stop()
    with group():
        config, resumed = together(lambda: configure(args))
        set_timeout(timedelta(seconds=config.run.timeout))
        together(lambda: _same_start(resumed))
        together(lambda: _enough(dist.get_world_size(), config))
        corpus = together(lambda: _text(config, resumed))
        together(lambda: _same(corpus))
        out = on_rank_0(lambda: _claim(config))
        together(lambda: _seen_by_all(out))
        grid = _grid(config)
        trainer = together(lambda: Trainer(config, corpus, grid))
        with Report(out) if dist.get_rank() == 0 else Silent() as report:
            introduce(trainer, out, resumed, report)
            finished = train(trainer, out, resumed, report, stop)
    return 0 if finished else STOPPED


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


def _grid(config: Config) -> Grid:
    device = _device(config)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return Grid(axes_of(config, dist.get_world_size()), device)


if __name__ == "__main__":
    sys.exit(main())
