"""What a rank's process does between the session's start and its end."""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from sherd.comm import groups as beside
from sherd.comm import transports
from sherd.comm.groups import forget_destroyed
from tests.support.ranks.caches import forget_redistributions
from tests.support.ranks.failures import failure_of, last_lines


@dataclass(frozen=True, slots=True)
class Success:
    """What a rank's function returned."""

    value: Any
    loops: int = 0
    """How many threads of gloo's the process had before, when all was dropped that earlier tasks have left."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How ranks begin: with `prepare(rank)`, a function at module level, if given; then with a group on `backend`.

    `timeout` is the group's, None for torch's own.
    """

    backend: str = "gloo"
    prepare: Callable[[int], None] | None = None
    timeout: timedelta | None = None


def forget_the_server() -> None:
    """Start processes as the program of a user does. Locks of the fork server's kind outlive a process that is killed,
    which Python tells at the end of the tests."""
    multiprocessing.set_start_method(None, force=True)


_said: IO[str] | None = None
"""Where this process and those that it starts print, since `be_quiet`."""


def be_quiet(name: str | None = None) -> None:
    """Print into the file `name`, or one without a name; its last lines are shown by a failure."""
    global _said
    made = tempfile.TemporaryFile if name is None else functools.partial(open, name)
    _said = made(mode="a+", errors="replace")  # open as long as we live
    for number in (1, 2):
        os.dup2(_said.fileno(), number)


def serve(
    rank: int, num_ranks: int, port: int, pipe: Connection, stack_file: str, setup: Setup, said_file: str | None
) -> None:
    """A rank's life: join the group, then answer one task after another until the test session ends."""
    forget_the_server()
    if said_file is not None:
        be_quiet(said_file)
    gc.freeze()  # before any collection, which would touch, and so copy, all that is shared with the fork server
    die_with_the_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session handles it, and then ends us
    stacks = open(stack_file, "w")  # noqa: SIM115  open for as long as we live
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)  # for a crash, too
    try:
        _join(rank, num_ranks, port, setup)
        known = 0
        while True:
            task = pipe.recv_bytes()
            if known != len(sys.modules):
                # What is imported stays. Frozen, it costs the collections between tests nothing. Not so what the last
                # task has left: frozen, its groups would live for ever, and their threads, which wake all the time.
                known = len(sys.modules)
                _tidy()
                gc.freeze()
            pipe.send_bytes(answer(task))
    except EOFError:
        os._exit(0)
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(failure_of(error)))
        os._exit(1)


def die_with_the_parent() -> None:
    """On Linux the kernel kills us with it: a rank with the fork server, which ends with pytest however that ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _join(rank: int, num_ranks: int, port: int, setup: Setup) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if setup.prepare is not None:
        setup.prepare(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(setup.backend, store=store, rank=rank, world_size=num_ranks, timeout=setup.timeout)


def answer(task: bytes) -> bytes:
    """What became of a task, a Success or a Failure, pickled."""
    try:
        with warnings.catch_warnings(), surroundings_kept():
            _tidy()
            loops = _loops()
            if _said is not None:
                _said.truncate(0)
            return _dumps(Success(_perform(task), loops))
    except BaseException as error:
        return pickle.dumps(failure_of(error, _last_said()))


@contextlib.contextmanager
def surroundings_kept() -> Iterator[None]:
    """Variables of the environment and the working directory are afterwards as before."""
    folder = os.getcwd()
    with mock.patch.dict(os.environ):
        try:
            yield
        finally:
            os.chdir(folder)


def _last_said() -> str:
    """The last lines that the task has printed."""
    if _said is None:
        return ""
    sys.stdout.flush()
    sys.stderr.flush()
    _said.seek(0)
    return last_lines(_said.read())


def _perform(task: bytes) -> Any:
    sys.path[:], os.environ["PYTEST_CURRENT_TEST"], filters, call = pickle.loads(task)
    warnings.resetwarnings()
    for action, text, category, module, line in reversed(filters):
        warnings.filterwarnings(action, text, category, module, line)
    fn, args, kwargs = pickle.loads(call)
    torch.manual_seed(0)
    return fn(*args, **kwargs)


def _tidy() -> None:
    """Drop what the last task left.

    At the start of the next one, because by now every rank has finished it: a group taken down earlier would
    cut off a peer that is still reading.
    """
    gc.collect()
    groups = [
        (group, name) for group, name in dist.distributed_c10d._world.pg_names.items() if _is_of_a_test(group, name)
    ]
    for group, _ in groups:
        dist.destroy_process_group(group)
    if groups:
        _forget_groups()
        forget_meshes()
    compilations = torch._dynamo.utils.counters
    if compilations:
        # Else those of many tests add up to the limit that one code object has.
        torch._dynamo.reset()
        compilations.clear()


def _loops() -> int:
    """The threads of gloo's groups that wait for others; 0 where the system does not tell."""
    return sum(path.read_text() == "gloo_tcp_loop\n" for path in Path("/proc/self/task").glob("*/comm"))


def _is_of_a_test(group: dist.ProcessGroup, name: str) -> bool:
    """Not the default group, nor what sherd has made beside it: those stay for the next test."""
    default = dist.group.WORLD
    return group is not default and not name.startswith(f"sherd/{default.group_name}/")


def _forget_groups() -> None:
    """Let go of the groups that are destroyed now, and of their threads, as sherd does when it makes the next mesh and
    transport."""
    forget_destroyed(transports._known)
    for known in list(beside._meshes.values()):
        forget_destroyed(known)


def forget_meshes() -> None:
    """Empty what DTensor remembers by mesh, and let go of the meshes.

    A mesh that is remembered keeps its groups, and each of gloo's has a thread that wakes a hundred times a second: a
    few hundred of them take a core.
    """
    forget_redistributions()
    gc.collect()


class _Pickler(pickle.Pickler):
    """Tensors by value: no shared memory, no storage larger than the tensor, no gradient, no device mesh."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            if isinstance(value, DTensor):
                raise TypeError("a DTensor cannot leave its rank; return its to_local() or full_tensor()")
            return NotImplemented
        if value.is_meta or value.is_sparse or value.is_quantized:
            return NotImplemented
        # Their bytes: torch's own way writes a zip file for each tensor, which takes longer than the rank's work.
        plain = value.detach().cpu().contiguous()
        data = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return _tensor_of, (data, plain.dtype, tuple(plain.shape))


def _tensor_of(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()
