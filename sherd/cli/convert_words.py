"""The arguments of the commands for checkpoints: convert, inspect, verify, diff and prune.

Loads no torch, so that wrong arguments are refused at once.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from sherd.cli.options import add_command
from sherd.train.codes import BAD_INPUT, NO_ROOM

FORMATS = ("sherd", "dcp", "universal", "hf", "torch")
"""The formats, by name. They are tried in this order where none is named."""
PRESETS = ("llama", "qwen", "mixtral", "gpt2", "llama-torchtitan")

CODES = f"exit code: 0, done; {BAD_INPUT}, it cannot be read or written; {NO_ROOM}, the disk is full or gone"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_interchange(commands: Any) -> None:
    """Add the parsers of these commands to `commands`, the sub-parsers of `sherd`."""
    about = "write a checkpoint in another format, by parts: a model need not fit in memory"
    p = _command(commands, "convert", about, CODES, "SRC")
    p.add_argument("target", metavar="DST", help="a file or folder that is not there yet")
    _format(p, "--from", "SRC")
    p.add_argument(
        "--to", choices=FORMATS, metavar="FORMAT", help="the format of DST; by its name's end, or else sherd"
    )
    p.add_argument("--mapping", metavar="NAME", help=f"rules for names: a JSON file, or one of {', '.join(PRESETS)}")
    p.add_argument("--reverse", action="store_true", help="follow the rules of --mapping backwards")
    p.add_argument("--set", action="append", default=[], metavar="KEY=N", help="a number that the rules name: heads=32")
    p.add_argument("--step", type=int, metavar="N", help="the step that DST is of, where SRC does not say")
    p.add_argument("--model-only", action="store_true", help="leave out all but the model")
    p.add_argument("--shard-bytes", type=_nbytes, metavar="N", help="the most bytes of a file of hf, as in 5G")
    p.add_argument(
        "--memory", type=_nbytes, default="64M", metavar="N", help="bytes in memory at once; 64M unless told"
    )

    p = _command(commands, "inspect", "show what a checkpoint of any format holds", CODES, "PATH")
    _format(p, "--from", "PATH")

    codes = f"exit code: 0, it is intact; 1, it is damaged; {BAD_INPUT}, it cannot be opened"
    p = _command(commands, "verify", "read all of a checkpoint, and compare it with its checksums", codes, "PATH")
    _format(p, "--from", "PATH")

    codes = f"exit code: 0, they are the same; 1, they differ; {BAD_INPUT}, one cannot be read"
    p = _command(commands, "diff", "compare two checkpoints of any formats, tensor by tensor", codes, "A")
    p.add_argument("other", metavar="B", help="a file or folder")
    _format(p, "--from", "A")
    _format(p, "--other-from", "B")
    p.add_argument(
        "--rtol", type=float, default=0.0, metavar="R", help="elements may differ by R times B's; 0 unless told"
    )
    p.add_argument("--atol", type=float, default=0.0, metavar="T", help="and by T; 0 unless told")
    p.add_argument("--model-only", action="store_true", help="compare the models alone")

    codes = f"exit code: 0, done; {BAD_INPUT}, there is no such folder"
    what = "the folder that sherd.save was given, or a run's"
    p = _command(commands, "prune", "remove old checkpoints of sherd from a folder", codes, "FOLDER", what)
    p.add_argument("--keep-last", type=int, required=True, metavar="N", help="how many of the newest are kept")
    p.add_argument("--keep-every", type=int, metavar="N", help="those whose step is a multiple of N are kept, too")
    p.add_argument("--sweep", action="store_true", help="remove what saves have left that were never finished, too")


def _command(
    commands: Any, name: str, about: str, codes: str, of: str, what: str = "a file or folder, or a run's folder"
) -> argparse.ArgumentParser:
    p = add_command(commands, name, about, codes, interchange=name)
    p.add_argument("--json", action="store_true", help="print one line of JSON")
    p.add_argument("source", metavar=of, help=what)
    return p


def _format(p: argparse.ArgumentParser, option: str, of: str) -> None:
    said = f"the format of {of}, one of {', '.join(FORMATS)}; unless told, it is looked at"
    p.add_argument(
        option, dest=option.strip("-").replace("-", "_") + "_format", choices=FORMATS, metavar="FORMAT", help=said
    )


def _nbytes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,15})([KMG]?)", text.upper())
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, as 64M is")
    return int(found[1]) * _UNITS[found[2]]
