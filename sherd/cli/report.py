"""The command `sherd report`: a timeline that was kept as JSON, as a page, a trace or a picture. Loads no torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sherd.errors import InputError
from sherd.tools.plan.files import TIMELINE, from_json
from sherd.tools.report.exports import perfetto, picture
from sherd.tools.report.page import page
from sherd.tools.simulate.timeline import Timeline
from sherd.train.codes import BAD_INPUT, NO_ROOM

__all__ = ["add_report", "timeline_in"]

ABOUT = "show a training step that was recorded or predicted: memory and work over time, as a page of HTML"
CODES = f"exit code: 0, written; {BAD_INPUT}, it cannot be read, or not be drawn; {NO_ROOM}, not written"


def add_report(commands: Any) -> None:
    """Add the command to `commands`, the sub-parsers of `sherd`."""
    p = commands.add_parser("report", help=ABOUT, description=ABOUT, epilog=CODES, allow_abbrev=False)
    p.set_defaults(do=report)
    p.add_argument("source", type=Path, metavar="RUN", help=f"a timeline's JSON, or a run's folder with {TIMELINE}")
    p.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page; report.html beside the timeline unless told, or another is asked",
    )
    p.add_argument("--perfetto", type=Path, metavar="FILE", help="a trace for ui.perfetto.dev and Chrome")
    p.add_argument("--png", type=Path, metavar="FILE", help="a picture; by the end of its name PNG, SVG or PDF")


def timeline_in(source: Path) -> Timeline:
    """Returns the timeline in a file, or in a run's folder. Raises InputError."""
    source = source / TIMELINE if source.is_dir() else source
    try:
        return from_json(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{source}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{source}: {error}") from None


def report(args: argparse.Namespace) -> int:
    """Write what is asked for; returns the exit code.

    Raises:
        InputError: the timeline cannot be read, or what is asked for cannot be drawn.
    """
    timeline = timeline_in(args.source)
    folder = args.source if args.source.is_dir() else args.source.parent
    out = args.out or (None if args.perfetto or args.png else folder / "report.html")
    try:
        if args.png:
            picture(timeline, args.png)
        if args.perfetto:
            args.perfetto.write_text(json.dumps(perfetto(timeline)), encoding="utf-8")
        if out:
            out.write_text(page([timeline]), encoding="utf-8")
    except ImportError:
        raise InputError("a picture needs matplotlib: pip install matplotlib") from None
    except OSError as error:
        print(f"sherd report: {error.filename}: {error.strerror}", file=sys.stderr)
        return NO_ROOM
    print("written ", *(each for each in (out, args.perfetto, args.png) if each))
    return 0
