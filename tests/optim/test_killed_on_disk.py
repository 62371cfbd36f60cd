"""Ranks killed at a random moment, with state and masters on a disk: nothing of the scratch files is left, nothing of
them is taken for a checkpoint, and the next start goes on from the last checkpoint as if nothing was.

In each moment SIGKILL comes to both ranks, or to one and then to the other: in an optimizer's step, in a save, between.
"""

import contextlib
import hashlib
import os
import random
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import optim

import sherd
from sherd import Disk, OffloadPolicy
from sherd.errors import NoCheckpointError
from tests.optim.test_masters import made, masters_of, sharded, steps
from tests.support.ranks.forked import start

STEPS, SAVE_EVERY, NUM_RANKS, AT_ONCE = 4, 2, 2, 5
PATIENCE_S = 120.0
WHO = ((0,), (1,), (0, 1))
KEPT = (STEPS - SAVE_EVERY, STEPS)
OF_CHECKPOINTS = re.compile(r"\.lock|latest|step-\d{8}.*")
"""Names in a folder of checkpoints, complete or not."""


def trained(folder, rank):
    """Go on to the last step, and say what has been done, and a digest of all values."""
    torch.set_num_threads(1)
    os.fsync = lambda number: None  # what the system has taken outlives a process, and disks are slow
    store = dist.FileStore(f"{folder}.store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=PATIENCE_S))
    disk = Disk(folder)  # among the checkpoints, where a scratch file would do the most harm
    model = sharded(OffloadPolicy(optimizer=disk, masters=disk), torch.bfloat16)
    optimizer = made(optim.AdamW, model)
    items, done = {"model": model, "optimizer": optimizer}, 0
    with contextlib.suppress(NoCheckpointError):
        done = sherd.load(folder, items).step
    print(f"begins after {done}", flush=True)
    for number in range(done, STEPS):
        steps(model, optimizer, range(number, number + 1))
        print(f"step {number + 1}", flush=True)
        if (number + 1) % SAVE_EVERY == 0:
            sherd.save(folder, items, step=number + 1, keep_last=2)
            print(f"saved {number + 1}", flush=True)
    with torch.no_grad():
        model(torch.ones(1, 24, dtype=torch.bfloat16))  # a model that has not run has its groups in another order
    digest = hashlib.sha256()
    for each in masters_of(model).values():
        digest.update(each.numpy().tobytes())
    for state in optimizer.state.values():
        for _, each in sorted(state.items()):
            digest.update(getattr(each, "_local_tensor", each).numpy().tobytes())
    print(f"ends with {digest.hexdigest()}", flush=True)
    os._exit(0)  # the other rank may be gone


class Run:
    """The ranks of a training, forked from a process that has torch imported."""

    def __init__(self, folder):
        self.folder = folder
        Path(f"{folder}.store").unlink(missing_ok=True)
        self._said = [folder.with_name(f"said {rank}") for rank in range(NUM_RANKS)]
        for path in self._said:
            path.unlink(missing_ok=True)
        ranks = range(NUM_RANKS)
        self._ranks = [
            start(trained, str(folder), rank, folder=folder.parent, output=self._said[rank]) for rank in ranks
        ]

    def found(self, pattern, rank=0):
        """Everything that the rank said and that matches."""
        path = self._said[rank]
        return re.findall(pattern, path.read_text()) if path.exists() else []

    def until(self, condition):
        deadline = time.monotonic() + PATIENCE_S
        while all(each.is_alive() for each in self._ranks) and not condition():
            assert time.monotonic() < deadline, "nothing happens"
            time.sleep(0.001)

    def num_scratch_files(self):
        """How many files without a name the ranks have open in the folder."""
        links = []
        for each in self._ranks:
            with contextlib.suppress(OSError):
                links += [os.readlink(link) for link in Path(f"/proc/{each.pid}/fd").iterdir() if link.is_symlink()]
        return sum(link.startswith(f"{self.folder}/") and link.endswith(" (deleted)") for link in links)

    def kill(self, who):
        for rank in who:
            self._ranks[rank].kill()
            self._ranks[rank].join()

    def end(self):
        for each in self._ranks:
            each.join(PATIENCE_S)
            assert each.exitcode is not None, "a rank is left"

    def text(self):
        paths = [*self._said, *(path.with_suffix(".err") for path in self._said)]
        return "\n".join(path.read_text() for path in paths if path.exists())


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    """The digests of a run that is not killed, and the seconds of one of its steps."""
    run = Run(folder_in(tmp_path_factory.mktemp("never killed")))
    run.until(lambda: run.found("step 1"))
    begun = time.monotonic()
    run.until(lambda: run.found(f"step {STEPS}"))
    seconds = (time.monotonic() - begun) / (STEPS - 1)
    run.end()
    digests = [run.found("ends with (.*)", rank) for rank in range(NUM_RANKS)]
    assert all(digests), run.text()
    return digests, seconds


def folder_in(place):
    folder = place / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="it looks for open files in /proc")
@pytest.mark.parametrize("first", range(0, 100, AT_ONCE))
def test_a_run_killed_at_a_random_moment_leaves_no_scratch_and_goes_on_as_if_nothing_was(first, never_killed, tmp_path):
    digests, seconds = never_killed
    for seed in range(first, first + AT_ONCE):
        dice = random.Random(seed)
        step, delay, who = dice.randrange(STEPS), dice.random(), dice.choice(WHO)
        run = Run(folder_in(tmp_path / str(seed)))
        run.until(lambda: run.found(f"step {step}\n" if step else "begins"))  # noqa: B023
        time.sleep(delay * seconds)
        assert not step or run.num_scratch_files() or run.found("ends"), seed
        run.kill(who)
        time.sleep(delay * seconds)
        run.kill(range(NUM_RANKS))  # as a launcher does that sees one gone
        saved = [int(each) for each in run.found(r"saved (\d+)")]
        killed = run.text()
        assert all(map(OF_CHECKPOINTS.fullmatch, os.listdir(run.folder))), os.listdir(run.folder)
        run = Run(run.folder)
        run.end()
        (begun,) = run.found(r"begins after (\d+)")
        assert max(saved, default=0) <= int(begun), (seed, killed, run.text())
        assert [run.found("ends with (.*)", rank) for rank in range(NUM_RANKS)] == digests, (seed, killed, run.text())
        assert sorted(os.listdir(run.folder)) == [".lock", "latest", *(f"step-{number:08}" for number in KEPT)], seed
