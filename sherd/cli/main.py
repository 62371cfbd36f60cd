"""The command `sherd`: it starts ranks, is one of them (where RANK and LOCAL_RANK are set), or uses what was trained.

It loads torch only for words that can be used: that takes seconds, a refusal takes none.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial

from sherd.cli.doctor_words import tell
from sherd.cli.terminal import outlive_the_terminal, say
from sherd.cli.uses import use
from sherd.cli.words import command_of, configure, parse, require_fit
from sherd.errors import ClusterError, InputError
from sherd.train.codes import BAD_INPUT
from sherd.train.config import toml
from sherd.train.loggers import require_logger
from sherd.train.stop import Stop, is_rank
from sherd.train.text import corpus_of


def main(argv: Sequence[str] | None = None) -> int:
    """`sherd` with these words; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # torch says so whenever it is loaded; nothing here needs numpy.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    try:
        args = parse(words)
        if "use" in args:
            return use(args, words)
        if "interchange" in args:
            from sherd.cli.convert import run

            return run(args)
        if "do" in args:  # a command that brings its own function
            code: int = args.do(args)
            return code
        if "doctor" in args and args.files:
            return tell(args)
        if "doctor" in args:
            from sherd.cli.doctor import doctor

            return doctor(args, words)
        with Stop() as stop:
            return _train(args, words, stop)
    except (InputError, ClusterError) as error:
        if _speaks():
            say(f"{command_of(words)}: {error}", sys.stderr)
        return BAD_INPUT


def _train(args: argparse.Namespace, words: list[str], stop: Stop) -> int:
    """Be a launcher or a rank. Raises InputError."""
    if args.print_config or args.dry_run:
        return _say(args)
    if is_rank():
        from sherd.train.rank import be_rank

        outlive_the_terminal()
        be_rank(partial(configure, args), stop)
    asked = configure(args)
    config = asked.config
    require_fit(args, config)
    require_logger(config)
    corpus_of(config, asked.resumed)
    from sherd.train.device import default_ranks, require_ranks
    from sherd.train.launch import start

    num_ranks = args.nproc or default_ranks(config)
    require_ranks(num_ranks, config)
    stop()  # from here on we wait for ranks
    if not args.quiet:
        print(f"starting {num_ranks} rank{'s' if num_ranks > 1 else ''} ...", flush=True)
    return start(num_ranks, words, stop)


def _say(args: argparse.Namespace) -> int:
    """Print the config or the plan of a run, and start nothing. Raises InputError."""
    config = configure(args).config
    if args.print_config:
        said = toml(config)
    else:
        require_fit(args, config)
        from sherd.cli.dry_run import plan

        said = plan(config, args.nproc)
    if _speaks():
        print(said, end="")
    return 0


def _speaks() -> bool:
    """Returns whether this process is no rank, or the first of them."""
    return not is_rank() or os.environ["RANK"] == "0"
