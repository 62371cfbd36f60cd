"""The words of `sherd doctor`, and `sherd doctor FILE...`, which reads what ranks wrote. Loads no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sherd.cli.options import add_command, reader
from sherd.cli.terminal import say
from sherd.tools.doctor.findings import as_json, as_table, exit_code
from sherd.tools.simulate.values import at_least
from sherd.train.codes import BAD_INPUT

ABOUT = "tell what this machine and its ranks are like, what is wrong with them, and what to do about it"
MEASURE = "measure compute, memory and links instead, and write them to FILE (cluster.toml), for sherd plan"
GPUS = "in a clone: try this machine's GPUs for ten minutes, compare with FSDP2, and write what to send"
CODES = f"exit code: 0, all is well; 1, with --strict, there is a warning; {BAD_INPUT}, there is a failure"


def add_doctor(commands: Any) -> None:
    p = add_command(commands, "doctor", ABOUT, CODES, doctor=True)
    p.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="flight records, or folders of them: read these, and start no ranks",
    )
    p.add_argument("--ranks", type=reader(at_least(1)), metavar="N", help="processes to start: 2, or one per device")
    p.add_argument("--bandwidth", nargs="?", const="cluster.toml", default="", metavar="FILE", help=MEASURE)
    p.add_argument("--scratch", default="", metavar="FOLDER", help="of --bandwidth: measure its disk too")
    p.add_argument("--gpus", action="store_true", help=GPUS)
    p.add_argument("--out", default="gpus", metavar="FOLDER", help="of --gpus: for the file and the page to send")
    p.add_argument("--json", action="store_true", help="print one line of JSON")
    p.add_argument("--strict", action="store_true", help="exit with 1 after a warning")
    p.add_argument("--quick", action="store_true", help="of --gpus: one short turn")
    p.add_argument("--into", default="", help=argparse.SUPPRESS)  # the folder in which the started ranks leave findings


def tell(args: argparse.Namespace) -> int:
    """Print what the records in `args.files` say; returns the exit code. Raises InputError where there are none."""
    from sherd.tools.doctor.flight import judged, read

    findings = list(judged(read([Path(name) for name in args.files])))
    say(as_json(findings) if args.json else as_table(findings))
    return exit_code(findings, args.strict)
