"""Optimizer state, and masters, in scratch files: the values of state in memory, and one error on all ranks."""

import ctypes
import errno
import gc
import mmap
import os
import pathlib
import weakref
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn, optim

import sherd
from sherd import CPUOffloadPolicy, Disk, OffloadPolicy, fully_shard
from sherd.engine import Unit
from sherd.errors import PolicyError, PolicyTypeError, ScratchError
from sherd.on_disk import DiskVectors, vectors_on
from sherd.optim import chunks
from tests.optim.test_masters import KINDS, made, masters_of, steps
from tests.support.models import chain
from tests.support.ranks import RanksFailed
from tests.support.ranks.bodies import on_threads
from tests.support.refusals import one_line


def sharded(policy, placement=None):
    torch.manual_seed(0)
    model = chain(2, 24).append(nn.Linear(24, 5)).to(torch.bfloat16)
    for unit in (*model[:2], model):
        fully_shard(unit, offload_policy=policy, placement=placement)
    return model


def trained(kind, placement, flattens, folder):
    near, disk = OffloadPolicy(masters="device"), Disk(folder)
    models = [sharded(policy, placement) for policy in (near, OffloadPolicy(optimizer=disk, masters=disk))]
    optimizers = [made(kind, model, flattens) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer, range(5))
    one, other = map(masters_of, models)
    assert all(torch.equal(one[name], other[name]) for name in one)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for key, state in states[0].items():
        for name, value in state.items():
            there = states[1][key][name]
            assert torch.equal(*(getattr(each, "_local_tensor", each) for each in (value, there))), name


@pytest.mark.values
@pytest.mark.parametrize(("kind", "placement", "flattens"), KINDS)
def test_values_are_those_of_state_in_memory(kind, placement, flattens, tmp_path, threads):
    with mock.patch.object(chunks, "CHUNK_NUMEL", 64):
        threads(2).run(trained, kind, placement, flattens, str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_files_go_with_the_optimizer(tmp_path, threads):
    def open_files():
        gc.collect()
        return sum(str(tmp_path) in os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")
                   if os.path.islink(f"/proc/self/fd/{each}"))  # fmt: skip

    threads(2).run(trained, optim.AdamW, None, False, str(tmp_path))
    assert open_files() == 0


def fails(folder):
    model = sharded(OffloadPolicy(optimizer=Disk(folder)))
    optimizer = made(optim.AdamW, model)
    steps(model, optimizer, range(2))
    with mock.patch.object(os, "pwritev", full) if torch.distributed.get_rank() else nullcontext():
        steps(model, optimizer, range(2, 3))


def test_a_disk_that_fails_on_one_rank_is_one_error_on_all(tmp_path, world):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(fails, str(tmp_path))
    assert [kind for kind, _ in failed.value.errors.values()] == [ScratchError.__name__] * 2
    assert len({text.partition("]")[2] for _, text in failed.value.errors.values()}) == 1
    assert all("free space" in text for _, text in failed.value.errors.values())


def cannot_be_made(how, folder):
    path, full_disk = folder, nullcontext()
    if torch.distributed.get_rank() and how == "no folder":
        path = f"{folder}/missing/one"
    elif torch.distributed.get_rank():
        full_disk = mock.patch.object(os, "posix_fallocate", full)
    with full_disk:
        sharded(OffloadPolicy(parameters=Disk(path)))


@pytest.mark.parametrize("how", ["no folder", "no space"])
def test_a_unit_that_cannot_rest_there_on_one_rank_is_one_error_on_all(how, tmp_path, world):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(cannot_be_made, how, str(tmp_path), timeout=60.0)
    assert all(kind == "ScratchError" and "on rank 1: " in text for kind, text in failed.value.errors.values())
    assert len(failed.value.errors) == 2


def has_no_space_for_masters(folder):
    model = sharded(OffloadPolicy(masters=Disk(folder)))
    optimizer = made(optim.AdamW, model)
    with mock.patch.object(os, "posix_fallocate", full) if torch.distributed.get_rank() else nullcontext():
        steps(model, optimizer, range(1))


def full(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_masters_without_space_on_one_rank_are_one_error_on_all(tmp_path, world):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(has_no_space_for_masters, str(tmp_path), timeout=60.0)
    assert [kind for kind, _ in failed.value.errors.values()] == [ScratchError.__name__] * 2


@on_threads(2, kind=[optim.AdamW, sherd.Muon])
def test_masters_rest_on_the_disk_under_every_optimizer(kind, tmp_path):
    disk = Disk(str(tmp_path))
    model = sharded(OffloadPolicy(masters=disk))
    steps(model, made(kind, model), range(2))
    groups = [weights.group for unit in Unit.below(model) for weights in unit.weights]
    assert all(vectors_on(disk).has(group.masters.low) for group in groups)


@pytest.mark.parametrize("kind", [optim.AdamW, sherd.Muon])
def test_a_disk_that_is_too_small_is_known_before_the_first_step(kind, tmp_path, threads, monkeypatch):
    class Small:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    with pytest.raises(RanksFailed) as failed:
        threads(2).run(trained, kind, None, False, str(tmp_path))
    assert {kind for kind, _ in failed.value.errors.values()} == {ScratchError.__name__}
    assert all("KiB, and has 4.00 KiB free" in text for _, text in failed.value.errors.values())


def test_so_is_one_that_is_too_small_for_masters_alone_or_with_state(tmp_path, threads, monkeypatch):
    disk = Disk(str(tmp_path))
    for policy in (OffloadPolicy(masters=disk), OffloadPolicy(masters=disk, optimizer=disk)):
        needed = []
        monkeypatch.setattr(DiskVectors, "require", lambda self, nbytes: needed.append(nbytes))  # noqa: B023
        threads(2).run(first_steps, policy)
        numel = sum(each.numel() for each in chain(2, 24).append(nn.Linear(24, 5)).parameters())
        of_state = 0 if policy.optimizer is None else 8
        assert sum(needed) == pytest.approx((of_state + 2.125) * numel, rel=0.1)


@on_threads(1)
def test_folders_of_one_file_system_must_fit_together(tmp_path, monkeypatch):
    needed = []
    monkeypatch.setattr(DiskVectors, "require", lambda self, nbytes: needed.append(nbytes))
    disks = {name: Disk(str(tmp_path / name)) for name in ("optimizer", "masters")}
    first_steps(OffloadPolicy(**disks))
    numel = sum(each.numel() for each in chain(2, 24).append(nn.Linear(24, 5)).parameters())
    assert max(needed) == pytest.approx(10.125 * numel, rel=0.1)


@on_threads(1)
def test_the_warning_of_a_folder_in_memory_names_the_users_line(tmp_path, monkeypatch):
    monkeypatch.setattr("sherd.storage.scratch.file_system_of", lambda path: "tmpfs")
    with pytest.warns(UserWarning, match="is on tmpfs, memory of the host") as caught:
        first_steps(OffloadPolicy(optimizer=Disk(str(tmp_path))))
    assert [pathlib.Path(each.filename).parent for each in caught] == [pathlib.Path(__file__).parent], "once"


def first_steps(policy):
    model = sharded(policy)
    steps(model, made(optim.AdamW, model), range(2))


def grown(policy):
    """The anonymous memory that a process holds after steps, in bytes above that before the model."""

    def held():
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])

    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: freed vectors go back to the system
    before = held()
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    for unit in (*model, model):
        fully_shard(unit, offload_policy=policy)
    optimizer = optim.AdamW(model.parameters())
    with mock.patch.object(chunks, "CHUNK_NUMEL", 1 << 18):
        for _ in range(2):
            model(torch.ones(2, 1024)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return held() - before


def test_what_is_on_a_disk_takes_no_memory_of_the_host(tmp_path, world):
    disk = Disk(str(tmp_path))
    policies = OffloadPolicy(), OffloadPolicy(optimizer=disk), OffloadPolicy(parameters=disk, optimizer=disk)
    near, far, farther = (world(1).run(grown, policy)[0] for policy in policies)
    parameters, state, chunk = 4 * 8 * 1024**2, 2 * 4 * 8 * 1024**2, 2 * 4 << 18
    assert near - far >= 0.9 * state
    assert far - farther >= 0.8 * parameters, "a unit that was read ahead is in memory"
    assert far <= 1.1 * (parameters + 4 * chunk), "between steps"


@on_threads(1)
def test_at_most_ten_vectors_of_a_chunk_are_under_way(tmp_path):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    for unit in (*model, model):
        fully_shard(unit, offload_policy=OffloadPolicy(optimizer=Disk(str(tmp_path))))
    optimizer, made, most = optim.AdamW(model.parameters()), weakref.WeakSet(), [0]

    class Counted(mmap.mmap):
        def __init__(self, fileno, *args, **kwargs):
            if fileno == -1:
                made.add(self)
                most[0] = max(most[0], len(made))

    with mock.patch.object(chunks, "CHUNK_NUMEL", 512), mock.patch.object(mmap, "mmap", Counted):
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert 4 < most[0] <= 10
    assert not made, "between steps there are none"


@on_threads(2)
def test_a_folder_that_cannot_be_used_is_refused_when_units_are_made(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path, why in ((str(file), "Not a directory"), (str(tmp_path / "no" / "folder"), "make the folder above it")):
        model = nn.Linear(4, 4)
        assert why in one_line(ScratchError, fully_shard, model, offload_policy=OffloadPolicy(optimizer=Disk(path)))
        assert type(model.weight) is nn.Parameter, "nothing was changed"
    for policy in ({"share": 1.5}, {"optimizer": "disk"}, {"parameters": "host", "gradients": "device"}):
        one_line(PolicyError, partial(OffloadPolicy, **policy))
    one_line(PolicyError, partial(OffloadPolicy, gradients="host", optimizer="device"))
    one_line(PolicyError, partial(OffloadPolicy, optimizer=torch.zeros(2).numpy()))
    for path in ("", "a\0b", tmp_path):
        assert "a str" in one_line(PolicyTypeError, Disk, path)
    assert "no such user" in one_line(PolicyError, Disk, "~a user of another host/scratch")
    for given in ("host", Disk("/scratch")):
        for policy in (OffloadPolicy, CPUOffloadPolicy):
            assert "name what rests there" in one_line(PolicyTypeError, policy, given)
    for share in ("half", None, True):
        one_line(PolicyTypeError, partial(OffloadPolicy, share=share))
    one_line(PolicyError, partial(OffloadPolicy, share=float("nan")))


@on_threads(2)
def test_a_report_has_what_is_on_a_disk_in_a_table_of_its_own(tmp_path):
    disk = Disk(str(tmp_path))
    model = sharded(OffloadPolicy(optimizer=disk, masters=disk))
    optimizer = made(optim.AdamW, model)
    steps(model, optimizer, range(1))
    report = sherd.memory_report(model, optimizer)
    numel = sum(weights.group.shard_numel for unit in Unit.below(model) for weights in unit.weights)
    assert sum(row.now for row in report.disk) == pytest.approx((8 + 2.125) * numel, rel=0.05)
    assert {row.kind for row in report.disk} == {"optimizer state", "masters"}
    assert {row.kind for row in report.disk}.isdisjoint(row.kind for row in report.rows)
