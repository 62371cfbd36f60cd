"""The command `sherd`: it starts ranks, or is one of them where RANK is set, as torchrun does; or uses what is trained.

It loads torch only for words that can be used: that takes seconds, a refusal takes none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sherd.train.codes import BAD_INPUT
from sherd.train.config import InputError
from sherd.train.loggers import require_loggers
from sherd.train.uses import NAMES, use
from sherd.train.words import configure, corpus_of, parse, require_fit

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """`sherd` with these words; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parse(words)
        if "use" in args:
            return use(args, words)
        if "RANK" in os.environ:
            from sherd.train.rank import be_rank

            return be_rank(args)
        config, resumed = configure(args)
        require_fit(args, config)
        require_loggers(config)
        corpus_of(config, resumed)
        from sherd.train.launch import launch

        return launch(args, words, config)
    except InputError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"sherd {_command(words)}: {error}", file=sys.stderr)
        return BAD_INPUT


def _command(words: Sequence[str]) -> str:
    """Which command a refusal is of."""
    return words[0] if words and words[0] in NAMES else "train"


if __name__ == "__main__":  # the name by which older scripts start ranks; today's is `-m sherd`
    sys.exit(main())
