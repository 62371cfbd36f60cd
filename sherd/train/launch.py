"""How `sherd train` starts its ranks on this machine."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sherd.train.codes import BAD_INPUT, STOPPED
from sherd.train.config import Config
from sherd.train.device import default_ranks, require_ranks
from sherd.train.folder import claim

__all__ = ["launch", "start"]


def launch(args: argparse.Namespace, words: list[str], config: Config) -> int:
    """Start the ranks of `config`, each of which reads `words` anew. Returns the exit code, as `start` does.

    Raises:
        InputError: too few or too many ranks, or a folder that cannot be written.
    """
    num_ranks: int = args.nproc if args.nproc is not None else config.run.ranks or default_ranks(config)
    require_ranks(num_ranks, config)
    out = claim(config)
    if not args.quiet:
        print(f"starting {num_ranks} rank{'s' if num_ranks > 1 else ''} ...", flush=True)
    return start(num_ranks, "sherd", [*words, "--out", str(out)])


def start(num_ranks: int, module: str, words: list[str]) -> int:
    """Run `python -m module words` on `num_ranks` ranks of this machine, through torchrun's own agent.

    Returns:
        0 when all went well; BAD_INPUT or STOPPED when ranks left with it or we were told to stop; else the
        exit code of the rank that failed first, whose traceback is on stderr.
    """
    _set_environment(num_ranks)
    config = LaunchConfig(
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    try:
        with _quiet():
            elastic_launch(config, sys.executable)("-m", module, *words)
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
        code = failure.exitcode
        if code not in (BAD_INPUT, STOPPED):
            how = f"with exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
            print(f"sherd train: rank {rank} ended, {how}", file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException:
        return STOPPED
    return 0


@contextmanager
def _quiet() -> Iterator[None]:
    """No log lines from the agent: it tells at length that a rank left with 2, which has itself said why."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _set_environment(num_ranks: int) -> None:
    """What the agent and the ranks read from the environment, where the user has not set it himself."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    # Asked for by name, loopback works where gloo's own search does not: on a laptop without a network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # At SIGTERM a rank finishes its step and saves, which with a large model takes more than the usual 30 s.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
