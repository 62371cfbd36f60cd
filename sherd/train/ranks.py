"""The ranks of a run meet and agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from torch import distributed as dist

from sherd.comm.accelerator import backend
from sherd.comm.objects import all_gather_objects, broadcast_object, do_without_numpy
from sherd.train.config import InputError
from sherd.train.machines import apart, lost_touch, take_the_way_to_the_others

__all__ = ["group", "on_rank_0", "together"]

T = TypeVar("T")
STARTING = timedelta(minutes=10)  # by which one rank may be ready later than another


@contextmanager
def group() -> Iterator[None]:
    """The default process group. A crash leaves it as it is: waiting for other ranks could take for ever.

    Raises:
        CommError: the ranks cannot reach one another, or, from inside, a collective could not be finished.
    """
    take_the_way_to_the_others()
    do_without_numpy()
    try:
        dist.init_process_group(backend(), timeout=STARTING)
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
    """Returns what `action` returns on this rank.

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
    """Returns what `action` returned on rank 0, the only one to do it. Raises as `together` does."""
    value = together(action) if dist.get_rank() == 0 else together(lambda: None)
    return broadcast_object(value, "the broadcast of what rank 0 has done")  # type: ignore[no-any-return]
