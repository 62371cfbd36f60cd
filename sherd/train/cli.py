"""The command `sherd`: it starts ranks, or is one of them where RANK is set, as torchrun does.

It loads torch only for words that can be used: that takes seconds, a refusal takes none.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from sherd.train.codes import BAD_INPUT
from sherd.train.config import InputError
from sherd.train.fields import toml
from sherd.train.words import command_of, configure, corpus_of, parse, require_fit

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """`sherd` with these words; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parse(words)
        if args.print_config or args.dry_run:
            return _say(args)
        if "RANK" in os.environ:
            from sherd.train.rank import be_rank

            return be_rank(args)
        config, resumed = configure(args)
        require_fit(args, config)
        corpus_of(config, resumed)
        from sherd.train.launch import launch

        return launch(args, words, config)
    except InputError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{command_of(words)}: {error}", file=sys.stderr)
        return BAD_INPUT


def _say(args: argparse.Namespace) -> int:
    """What was asked about a run that is not started. Raises InputError."""
    config, _ = configure(args)
    if args.print_config:
        said = toml(config)
    else:
        require_fit(args, config)
        from sherd.train.plan import plan

        said = plan(config, args.nproc)
    if os.environ.get("RANK", "0") == "0":
        print(said, end="")
    return 0


if __name__ == "__main__":  # the name by which older scripts start ranks; today's is `-m sherd`
    sys.exit(main())
