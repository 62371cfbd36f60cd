"""The words of the command `sherd`, and the run that they ask for. Loads no torch: a refusal takes no second."""

from __future__ import annotations

import argparse
import functools
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn, get_type_hints

from sherd import __version__
from sherd.cli.compare import add_compare
from sherd.cli.convert_words import add_interchange
from sherd.cli.doctor_words import add_doctor
from sherd.cli.plan import add_plan
from sherd.cli.report import add_report
from sherd.cli.uses import add_uses
from sherd.errors import InputError, did_you_mean
from sherd.train.axes import axes_of
from sherd.train.config import NO_HF_CONFIG, SECTIONS, Config, Tree, assigned, read_tree, whole_number
from sherd.train.fields import describe
from sherd.train.folder import is_free, last_run
from sherd.train.saved import Checkpoint, NoCheckpoint, newest, newest_in, place_in

__all__ = ["command_of", "configure", "parse", "require_fit"]


THIRD = 0
"""In the place of the step to record: the third from where the run starts, when the order of units is long learnt."""
MANY_MACHINES = (
    "torchrun --nnodes 2 --node-rank 0_OR_1 --nproc-per-node 8 --master-addr FIRST_HOST --master-port 29500\n"
    "    -m sherd train --out FOLDER_THAT_ALL_SHARE"
)


EXAMPLE = "for example: sherd train --data my_texts/ --steps 200, then sherd generate"


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line, like every other."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


@functools.cache
def _parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="sherd", description="Train models that do not fit one device.", epilog=EXAMPLE, allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=_versions())
    commands = top.add_subparsers(required=True, metavar="command")
    p = commands.add_parser(
        "train",
        usage="sherd train [options] [section.field=value ...], in any order",
        help="train a language model, sharded over ranks",
        description=f"Train a language model, sharded over ranks.\n\nOn each of several machines:\n  {MANY_MACHINES}",
        epilog="fields, in the TOML of --config or as section.field=value here:\n\n" + describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.set_defaults(fields=[])  # whatever is no option, see parse
    p.add_argument("--config", metavar="FILE", help="TOML, or JSON, with any of the fields below")
    p.add_argument("--data", metavar="PATH", help="data.path: a file or a folder of text")
    p.add_argument("--out", metavar="PATH", help="run.out: a new or empty folder; with --resume, a run's")
    p.add_argument("--steps", type=_whole, metavar="N", help="run.steps")
    p.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out, or of the last run")
    p.add_argument("--resume-or-start", action="store_true", help="the same, or start in --out where nothing was saved")
    p.add_argument("--mesh", metavar="AXES", help="run.mesh: how ranks share the work, as in dp=2,tp=2")
    p.add_argument("--nproc", type=_whole, metavar="N", help="processes to start: 2, or one per device, unless told")
    p.add_argument("--dry-run", action="store_true", help="say what a step takes on each rank, and start nothing")
    p.add_argument(
        "--print-config", action="store_true", help="print all fields as TOML for --config, and start nothing"
    )
    p.add_argument(
        "--trace",
        nargs="?",
        const=THIRD,
        type=_step,
        metavar="STEP",
        help="record this step, the third from here unless told, as timeline.json in --out, for sherd report",
    )
    p.add_argument("--quiet", action="store_true", help="nothing on the screen but what goes wrong")
    for add in (add_uses, add_plan, add_interchange, add_doctor, add_report, add_compare):
        add(commands)
    return top


def _versions() -> str:
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return f"sherd {__version__}, torch {torch}, Python {platform.python_version()}"


def _whole(text: str) -> int:
    try:
        return whole_number(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def _step(text: str) -> int | str:
    """Returns the number of a step. What is meant as a field is left for `parse`."""
    if "=" in text:
        return text
    if (number := _whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no step; the first is 1")
    return number


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Returns what the words say. Options and fields may stand in any order.

    Raises:
        InputError: a word that means nothing.
    """
    _require_command(words)
    args, others = _parser().parse_known_args(words)
    others = [word for word in others if word != "--"]
    if "path" in args and args.run is None and len(others) == 1 and not others[0].startswith("-"):
        args.run, args.path = args.path, others.pop()  # an option stood between the two
    if isinstance(getattr(args, "trace", None), str) and "fields" in args:  # a field that has followed the option
        others.insert(0, args.trace)
        args.trace = THIRD
    for word in others:
        if word.startswith("-"):
            raise InputError(_unknown(word, words[0]))
        if "fields" not in args:
            raise InputError(f"{word!r} is one word too many; see {command_of(words)} --help")
    args.fields = others
    return args


def command_of(words: Sequence[str]) -> str:
    """The command that was given, as messages name it: `sherd train`, or `sherd` where there is none."""
    return f"sherd {words[0]}" if words and words[0] in _commands() else "sherd"


def _commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (each.choices for each in _parser()._actions if isinstance(each.choices, dict))
    return found


def _require_command(words: Sequence[str]) -> None:
    first = words[0] if words else ""
    if first in _commands() or first in _parser()._option_string_actions:
        return
    if not first or first.startswith("-"):
        raise InputError("which command? sherd train trains a model; sherd --help says more")
    raise InputError(f"unknown command {first}; {did_you_mean(first, _commands(), 'sherd --help lists all')}")


def _unknown(word: str, command: str) -> str:
    """Returns what is wrong with `word`, which looks like an option of `command` and is none."""
    parser = _commands().get(command, _parser())
    name, equals, value = word.lstrip("-").partition("=")
    value = value if equals else "VALUE"
    field = name.replace("-", "_")
    homes = [section for section, fields in SECTIONS.items() if field in get_type_hints(fields)]
    hint = did_you_mean(name, [option.lstrip("-") for option in parser._option_string_actions], prefix="--")
    if parser.get_default("fields") is not None:
        if "." in name:
            return f"{word} is no option; write a field without dashes: {name}={value}"
        hint = f"did you mean {homes[0]}.{field}={value}?" if homes else hint
    return f"unknown option {word}; {hint + ' ' if hint else ''}{parser.prog} --help lists all"


def configure(args: argparse.Namespace) -> tuple[Config, Checkpoint | None]:
    """Returns what to run, and what it goes on from. Reads, and writes nothing.

    Raises:
        InputError: the words, the config file or the folder cannot be used.
    """
    options = {"data": {"path": args.data}, "run": {"out": args.out, "steps": args.steps, "mesh": args.mesh}}
    given = {section: {k: v for k, v in values.items() if v is not None} for section, values in options.items()}
    trees = [read_tree(args.config) if args.config else {}, assigned(args.fields), given]
    out, checkpoint = _to_resume(args, trees)
    if checkpoint is None:
        config = Config.of(*trees)
        out = Path(config.run.out)
        if config.run.out and not args.resume_or_start and not is_free(out):
            raise InputError(
                f"{out} is not an empty folder; --resume goes on with the run in it, another --out starts one"
            )
        if config.run.checkpoints and (found := newest_in(place_in(out, config.run.checkpoints))[0]):
            raise InputError(
                f"run.checkpoints = {config.run.checkpoints!r} holds step {found.step} of a run; --resume goes on with "
                "it, another run.checkpoints starts one"
            )
        _require_step(args, config, 0)
        return config, None
    # The saved run decides what the words leave open; but where it lies, and on how many ranks, is today's matter.
    elsewhere = "" if str(checkpoint.folder) == str(place_in(out, "")) else str(checkpoint.folder)
    today = {"run": {"ranks": 0, "checkpoints": elsewhere}}
    config = Config.of(checkpoint.config, today, *trees, {"run": {"out": str(out)}})
    checkpoint.check_model(config)
    steps, done = config.run.steps, checkpoint.step
    if 0 < steps < done:
        raise InputError(f"run.steps = {steps}, but {out} is past that: step {done} is saved; give more --steps")
    _require_step(args, config, done)
    return config, checkpoint


def _require_step(args: argparse.Namespace, config: Config, done: int) -> None:
    """Refuse to record a step that the run does not make. Raises InputError."""
    if args.trace is not None and config.run.memory_limit:
        raise InputError("--trace and run.memory_limit both follow all tensors; leave one of them out")
    if args.trace and not done < args.trace <= (config.run.steps or args.trace):
        last = f" and ends with step {config.run.steps}" if config.run.steps else ""
        raise InputError(f"--trace {args.trace}, but the run begins with step {done + 1}{last}")


def _to_resume(args: argparse.Namespace, trees: Sequence[Tree]) -> tuple[Path, Checkpoint | None]:
    """Returns the run's folder as far as it is named, and what it goes on from; None for one that starts."""
    run = Config.of(*({"run": tree["run"]} for tree in trees if "run" in tree)).run
    if not (args.resume or args.resume_or_start):
        return Path(run.out), None
    if not run.out and (args.resume_or_start or run.checkpoints):
        raise InputError(f"--resume{'-or-start' if args.resume_or_start else ''} needs the --out that it is to look in")
    out = Path(run.out or last_run())
    place = place_in(out, run.checkpoints or None)
    try:
        return out, newest(out, place)
    except NoCheckpoint:
        found, _ = newest_in(place_in(out))
        if found:  # nobody wants to begin anew beside it
            raise InputError(
                f"{place} holds no checkpoint, but {found} is one; copy that folder there, or leave out run.checkpoints"
            ) from None
        if not args.resume_or_start:
            raise
        return out, None


def require_fit(args: argparse.Namespace, config: Config) -> None:
    """Check that the config of a model is a file, and that batch and mesh fit the number of ranks, if one is named.

    Raises:
        InputError: the file is missing, or the batch or the mesh does not fit.
    """
    num_ranks = args.nproc if args.nproc is not None else config.run.ranks
    if args.nproc is not None and num_ranks < 1:
        raise InputError(f"--nproc {num_ranks} is too few; a run needs at least one process")
    if config.model.hf and not Path(config.model.hf).is_file():
        raise InputError(NO_HF_CONFIG.format(config.model.hf))
    if num_ranks:
        axes = axes_of(config, num_ranks)
        config.split(axes.num_data, axes.pp)
