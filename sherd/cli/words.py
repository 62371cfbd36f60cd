"""The words of the command `sherd`, and the run that they ask for. Loads no torch: a refusal takes no second."""

from __future__ import annotations

import argparse
import functools
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from sherd import __version__
from sherd.cli.convert_words import add_interchange
from sherd.cli.doctor_words import add_doctor
from sherd.cli.options import reader
from sherd.cli.plan import add_plan
from sherd.cli.report import add_compare, add_report
from sherd.cli.uses import add_uses
from sherd.errors import InputError, did_you_mean
from sherd.tools.simulate.values import at_least
from sherd.train.axes import axes_of
from sherd.train.config import FIELDS, KINDS, NO_HF_CONFIG, Config, assigned, describe, read_tree
from sherd.train.folder import is_free, last_run
from sherd.train.saved import Checkpoint, NoCheckpoint, Start, folder_in, newest

THIRD = 0
"""In the place of the step to record: the third from where the run starts, when the order of units is long learnt."""
MANY_MACHINES = (
    "torchrun --nnodes 2 --node-rank 0_OR_1 --nproc-per-node 8 --master-addr FIRST_HOST --master-port 29500\n"
    "    -m sherd train --out FOLDER_THAT_ALL_SHARE"
)


COUNT = reader(at_least(1))
CONFIGS = (".toml", ".json", ".yaml", ".yml")
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
        usage="sherd train [CONFIG] [options] [field=value ...], in any order",
        help="train a language model, sharded over ranks",
        description=f"Train a language model, sharded over ranks.\n\nOn each of several machines:\n  {MANY_MACHINES}",
        epilog="fields, in the TOML of --config or as field=value here:\n\n" + describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.set_defaults(fields=[])  # whatever is no option, see parse
    p.add_argument("--config", metavar="FILE", help="TOML, or JSON, with any of the fields below")
    p.add_argument("--data", metavar="PATH", help="data: a file or a folder of text")
    p.add_argument("--out", metavar="PATH", help="the folder of the run, a new or empty one; with --resume, a run's")
    p.add_argument("--steps", type=reader(KINDS["steps"]), metavar="N", help="steps")
    p.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out, or of the last run")
    p.add_argument("--resume-or-start", action="store_true", help="the same, or start in --out where nothing was saved")
    p.add_argument("--mesh", metavar="AXES", help="mesh: how ranks share the work, as in dp=2,tp=2")
    p.add_argument("--nproc", type=COUNT, metavar="N", help="processes to start: 2, or one per device, unless told")
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


def _step(text: str) -> int | str:
    """Returns the number of a step. What is meant as a field is left for `parse`."""
    number: int | str = text if "=" in text else COUNT(text)
    return number


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Returns what the words say. Options and fields may stand in any order.

    Raises:
        InputError: a word that means nothing.
    """
    _require_command(words)
    args, others = _parser().parse_known_args(words)
    others = [word for word in others if word != "--"]
    if isinstance(getattr(args, "trace", None), str) and "fields" in args:  # a field that has followed the option
        others.insert(0, args.trace)
        args.trace = THIRD
    if getattr(args, "config", "") is None and others and "=" not in others[0] and others[0].endswith(CONFIGS):
        args.config = others.pop(0)
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
    hint = did_you_mean(name, [option.lstrip("-") for option in parser._option_string_actions], prefix="--")
    if parser.get_default("fields") is not None:
        hint = f"did you mean {field}={value}?" if field in FIELDS else hint
    return f"unknown option {word}; {hint + ' ' if hint else ''}{parser.prog} --help lists all"


def configure(args: argparse.Namespace) -> Start:
    """Returns what to run, and what it goes on from. Reads, and writes nothing.

    Raises:
        InputError: the words, the config file or the folder cannot be used.
    """
    given = {"data": args.data, "steps": args.steps, "mesh": args.mesh}
    trees = [read_tree(args.config) if args.config else {}, assigned(args.fields)]
    trees.append({name: value for name, value in given.items() if value is not None})
    config, out = Config.of(*trees), Path(args.out or "")
    checkpoint = None
    if args.resume or args.resume_or_start:
        out, checkpoint = _to_resume(args)
        if checkpoint is not None:  # the saved run decides what the words leave open
            config = Config.of(checkpoint.config, *trees)
            checkpoint.check_model(config)
            if 0 < config.steps < checkpoint.step:
                past = f"{out} is past that: step {checkpoint.step} is saved; give more --steps"
                raise InputError(f"steps = {config.steps}, but {past}")
    elif args.out and not is_free(out):
        raise InputError(f"{out} is not an empty folder; --resume goes on with the run in it, another --out starts one")
    done = checkpoint.step if checkpoint else 0
    if args.trace and not done < args.trace <= (config.steps or args.trace):
        last = f" and ends with step {config.steps}" if config.steps else ""
        raise InputError(f"--trace {args.trace}, but the run begins with step {done + 1}{last}")
    return Start(config, str(out) if args.out or checkpoint else "", checkpoint, args.quiet, args.trace)


def _to_resume(args: argparse.Namespace) -> tuple[Path, Checkpoint | None]:
    """Returns the run's folder, and what it goes on from; None for one that starts, by --resume-or-start."""
    if not args.out and args.resume_or_start:
        raise InputError("--resume-or-start needs the --out that it is to look in")
    out = Path(args.out or last_run())
    try:
        return out, newest(folder_in(out))
    except NoCheckpoint as error:
        if args.resume_or_start:
            return out, None
        raise InputError(f"{error}; --resume-or-start starts a new run, --out names another run") from error


def require_fit(args: argparse.Namespace, config: Config) -> None:
    """Check that the config of a model is a file, and that batch and mesh fit the number of ranks, if one is named.

    Raises:
        InputError: the file is missing, or the batch or the mesh does not fit.
    """
    if config.hf and not Path(config.hf).is_file():
        raise InputError(NO_HF_CONFIG.format(config.hf))
    if args.nproc:
        config.split(axes_of(config, args.nproc).num_data)
