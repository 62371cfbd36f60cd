"""The command `sherd doctor FILE...`: what the records that ranks wrote say. Loads no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from sherd.cli.terminal import say
from sherd.tools.doctor.findings import as_json, as_table, exit_code
from sherd.tools.doctor.flight import judged, read

__all__ = ["tell"]


def tell(args: argparse.Namespace) -> int:
    """Print what the records say; returns the exit code. Raises InputError where there are none."""
    findings = list(judged(read([Path(name) for name in args.files])))
    say(as_json(findings) if args.json else as_table(findings))
    return exit_code(findings, args.strict)
