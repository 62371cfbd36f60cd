"""The commands `sherd convert`, `inspect`, `verify`, `diff` and `prune`."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sherd.cli.terminal import say
from sherd.errors import CheckpointError, InputError, PolicyError
from sherd.storage.folder import Folder
from sherd.storage.places import mode_of, place_of
from sherd.tools.convert import inspecting, of_hf
from sherd.tools.convert.contents import Source
from sherd.tools.convert.formats import FORMATS, convert, open_source
from sherd.tools.convert.inspecting import damages, differences
from sherd.tools.convert.mapping import numbers_of, rules_of
from sherd.tools.convert.of_sherd import SherdSource
from sherd.train.codes import NO_ROOM
from sherd.train.saved import CHECKPOINTS

Progress = Callable[[str, int], None]


def run(args: argparse.Namespace) -> int:
    """Do what one of these commands says; returns the exit code. Raises InputError: it cannot be done."""
    commands = {"convert": _convert, "inspect": _inspect, "verify": _verify, "diff": _diff, "prune": _prune}
    command = commands[args.interchange]
    try:
        for name in vars(args).keys() & {"source", "other"}:
            setattr(args, name, _meant(getattr(args, name)))
        code = command(args)
        sys.stdout.flush()
        return code
    except (CheckpointError, PolicyError) as error:
        raise InputError(str(error)) from error
    except BrokenPipeError:  # who reads stdout has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        say(f"sherd {args.interchange}: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return NO_ROOM


def _meant(named: str) -> str:
    """Returns the path of the checkpoints of the run in the folder `named`; if it is no run's, `named`."""
    path = Path(named)
    if not mode_of(path / CHECKPOINTS) or any(format.is_at(path) for format in FORMATS.values()):
        return named
    return str(path / CHECKPOINTS)


def _convert(args: argparse.Namespace) -> int:
    source_path, target = Path(args.source), Path(args.target)
    to = args.to or _format_by_name(target)
    if args.reverse and not args.mapping:
        raise InputError("--reverse is about the rules of --mapping; name these, too")
    rules = []
    if args.mapping:
        rules = rules_of(args.mapping, numbers_of(source_path) | _numbers(args.set), args.reverse)
    shard_bytes = args.shard_bytes or of_hf.SHARD_BYTES
    with _opened(source_path, args.from_format) as source, _progress("convert", source.contents.nbytes) as progress:
        left_out = convert(source, target, to, rules, progress, args.memory, args.step, args.model_only, shard_bytes)
        told = {"from": source.format, "to": to, "path": str(target), "tensors": len(source.contents.tensors)}
    beside: list[str] = []
    if source.format == to == of_hf.FORMAT and source_path.is_dir() and target.is_dir():
        beside = of_hf.copy_beside(source_path, target)
    if to == of_hf.FORMAT and target.is_dir() and not (target / "config.json").exists():
        left_out.append(f"config.json is left out: the source has none; from_pretrained needs the model's in {target}")
    if args.json:
        print(json.dumps(told | {"left_out": left_out, "copied": beside}))
        return 0
    for note in left_out:
        say(f"note   {note}", file=sys.stderr)
    if beside:
        say(f"note   {', '.join(beside)} copied", file=sys.stderr)
    say(f"{source_path} ({source.format}) is written to {target} ({to})", file=sys.stderr)
    return 0


def _format_by_name(target: Path) -> str:
    if target.suffix == ".safetensors":
        return "hf"
    return "torch" if target.suffix in (".pt", ".pth", ".bin", ".ckpt") else "sherd"


def _numbers(given: list[str]) -> dict[str, int]:
    found = [re.fullmatch(r"(\w+)=(\d{1,9})", each) for each in given]
    wrong = [each for each, match in zip(given, found, strict=True) if match is None]
    if wrong:
        raise InputError(f"--set {wrong[0]} is no KEY=N, as heads=32 is")
    return {match[1]: int(match[2]) for match in found if match is not None}


def _inspect(args: argparse.Namespace) -> int:
    with _opened(Path(args.source), args.from_format) as source:
        say(json.dumps(inspecting.as_json(source)) if args.json else inspecting.as_text(source, args.source))
    return 0


def _verify(args: argparse.Namespace) -> int:
    with (
        _opened(Path(args.source), args.from_format) as source,
        _progress("verify", source.contents.nbytes) as progress,
    ):
        found = list(damages(source, progress))
    checked, step, others = source.format == "sherd", source.contents.step, {}
    what = args.source
    if isinstance(source, SherdSource) and source.folder != Path(what):
        folder = Folder(place_of(what))
        others = {each.step: each.why for each in map(folder.found, folder.steps()) if each.why and each.step != step}
        what = f"step {step} of {what}"
    if args.json:
        told = {"path": args.source, "format": source.format, "checksums": checked, "step": step, "not_whole": others}
        print(json.dumps(told | {"damages": [asdict(each) for each in found]}))
    else:
        for each in found:
            say(f"{each.file}: {each.what}")
        for number, why in others.items():
            say(f"step {number} is not complete: {why}")
        how = "" if checked else f"; the format {source.format} has no checksums, so changed bytes are not noticed"
        say(f"{what} is damaged" if found else f"{what} is intact{how}")
    return 1 if found else 0


def _diff(args: argparse.Namespace) -> int:
    if not (0 <= args.rtol < math.inf and 0 <= args.atol < math.inf):
        raise InputError("--rtol and --atol are numbers from 0 on")
    with (
        _opened(Path(args.source), args.from_format) as a,
        _opened(Path(args.other), args.other_from_format) as b,
        _progress("diff", a.contents.nbytes) as progress,
    ):
        found = list(differences(a, b, args.rtol, args.atol, args.model_only, progress))
        models = {item for each in (a, b) for item in each.contents.of_kind("module")}
    if args.json:
        print(json.dumps({"a": args.source, "b": args.other, "differences": [_finite(asdict(each)) for each in found]}))
        return 1 if found else 0
    for each in found:
        most = "" if each.max_abs is None else f", at most by {each.max_abs:.6g} (relative {each.max_rel:.6g})"
        say(f"{each.name}: {each.what}{most}")
    is_same_model = models and not any(each.name.partition("/")[0] in models for each in found)
    prefix = "the models are the same; apart from them " if is_same_model else ""
    many = f"{len(found)} difference{'s' * (len(found) > 1)}"
    say(f"{prefix}{many}" if found else f"{args.source} and {args.other} are the same")
    return 1 if found else 0


def _prune(args: argparse.Namespace) -> int:
    folder = Folder(place_of(args.source))
    if not folder.steps():
        raise InputError(f"{args.source} holds no checkpoint of sherd: no step-00000000")
    removed = folder.prune(args.keep_last, args.keep_every)
    swept = folder.sweep(by_hand=True) if args.sweep else []
    if args.json:
        print(json.dumps({"removed": removed, "swept": swept, "left": folder.steps()}))
        return 0
    for step in removed:
        say(f"step {step} is removed")
    for path in swept:
        say(f"{path} is removed")
    say(f"{len(folder.steps())} checkpoints are left in {args.source}")
    return 0


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields as JSON has them, which knows no infinity."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in fields.items()
    }


def _opened(path: Path, format: str | None) -> closing[Source]:
    try:
        return closing(open_source(path, format))
    except OSError as error:
        raise InputError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error


@contextmanager
def _progress(what: str, total: int) -> Iterator[Progress]:
    """Yields what shows a bar, where a terminal and the package rich are there, or nothing."""
    if not sys.stderr.isatty():
        yield lambda name, nbytes: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda name, nbytes: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda name, nbytes: bar.update(task, advance=nbytes)
