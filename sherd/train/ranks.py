"""How ranks are started, how they agree, and how they are stopped."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import TypeVar

import torch
from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sherd.comm.objects import all_gather_objects, broadcast_object, do_without_numpy
from sherd.train.config import InputError
from sherd.train.machines import apart, lost_touch, take_the_way_to_the_others

__all__ = ["BAD_INPUT", "STOPPED", "Stop", "group", "on_rank_0", "start", "together"]

T = TypeVar("T")
BAD_INPUT, STOPPED = 2, 128 + signal.SIGTERM
STARTING = timedelta(minutes=10)  # by which one rank may be ready later than another


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


@contextmanager
def group() -> Iterator[None]:
    """The default process group. A crash leaves it as it is: waiting for other ranks could take for ever.

    Raises:
        CommError: the ranks cannot reach one another, or, from inside, a collective could not be finished.
    """
    take_the_way_to_the_others()
    do_without_numpy()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=STARTING)
    except RuntimeError as error:
        raise apart(error) from error
    try:
        yield
    except InputError:
        dist.destroy_process_group()  # all ranks are here: `together` saw to it
        raise
    except RuntimeError as error:
        named = lost_touch(error)
        if named is None:
            raise
        raise named from error
    dist.destroy_process_group()


def together(action: Callable[[], T]) -> T:
    """What `action` returns on this rank.

    Raises:
        InputError: on every rank alike, when any rank raised it.
    """
    value, refusal = None, None
    try:
        value = action()
    except InputError as error:
        refusal = str(error)
    for told in all_gather_objects(refusal, "the meeting of all ranks"):
        if told is not None:
            raise InputError(told)
    return value  # type: ignore[return-value]


def on_rank_0(action: Callable[[], T]) -> T:
    """What `action` returned on rank 0, the only one to do it. Raises as `together` does."""
    value = together(action) if dist.get_rank() == 0 else together(lambda: None)
    return broadcast_object(value, "the broadcast of what rank 0 has done")  # type: ignore[no-any-return]


class Stop:
    """Call it to know whether SIGTERM or Ctrl-C has come; neither ends the process by itself any more."""

    def __init__(self) -> None:
        self._told = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def __call__(self) -> bool:
        return self._told
