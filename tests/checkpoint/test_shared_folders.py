"""Folders that ranks do not share, that other jobs save into meanwhile, or that are full at the wrong moment."""

import errno
import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import sherd
from sherd.checkpoint import restoring, writing
from sherd.checkpoint.ranks import Ranks
from sherd.errors import CheckpointError, CommError
from sherd.storage import folder as storage_folder
from sherd.storage.folder import Folder
from sherd.storage.places import DiskPlace
from tests.checkpoint.layouts import filled, value
from tests.support.ranks.bodies import on_processes


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.*") if path.name != ".lock")


@on_processes(3, is_async=[False, True])
def test_ranks_that_do_not_share_the_folder_are_named_on_all_of_them(is_async):
    folder = tempfile.mkdtemp()
    large = {"x": torch.zeros(2, 3), "per": [1, 2]}
    with pytest.raises(CheckpointError) as raised:
        sherd.async_save(folder, large, step=1).wait() if is_async else sherd.save(folder, large, step=1)
    left = files_in(folder)
    shutil.rmtree(folder)
    assert "rank 0 does not see what rank 1, 2 has written" in str(raised.value)
    assert "all ranks need to share the folder" in str(raised.value)
    assert left == []


@on_processes(2)
def test_a_load_from_a_folder_that_one_rank_lacks_fails_on_all(tmp_path):
    sherd.save(tmp_path, filled(1), step=1)
    own = tempfile.mkdtemp()
    if dist.get_rank() == 0:
        shutil.copytree(tmp_path, own, dirs_exist_ok=True)
    with pytest.raises(CheckpointError) as raised:
        sherd.load(own, filled(0))
    shutil.rmtree(own)
    assert str(raised.value).count("manifest.json is missing") == 1


def test_a_copy_whose_writer_has_failed_does_not_wait_for_room(tmp_path):
    (tmp_path / "step-00000001").write_text("a file")
    items = {f"x{number}": torch.ones(100) for number in range(5)}
    for staging_bytes in (None, 1):
        saving = sherd.async_save(tmp_path, items, step=1, staging_bytes=staging_bytes)
        with pytest.raises(CheckpointError, match="the save of step 1"):
            saving.wait()


def test_no_rank_removes_a_file_that_the_manifest_may_name(tmp_path, monkeypatch):
    """A rank is told at any exchange that another one has died, which the first rank may not have been."""
    sherd.save(tmp_path, filled(1), step=1)
    gather, count = Ranks.gather, 0

    def dies_at(last):
        def found(self, mine, what):
            nonlocal count
            count += 1
            told = gather(self, mine, what)
            if count == last:
                raise CommError("another rank has died")
            return told

        return found

    for last in range(1, 30):
        count = 0
        monkeypatch.setattr(Ranks, "gather", dies_at(last))
        try:
            sherd.save(tmp_path, filled(2), step=1)
        except CommError:
            pass
        else:
            break
        finally:
            monkeypatch.setattr(Ranks, "gather", gather)
        restored = sherd.load(tmp_path, filled(0))
        assert (restored.step, restored.passed_over) == (1, ())
        assert value() in (1, 2)
        sherd.save(tmp_path, filled(1), step=1)
        assert len(files_in(tmp_path / "step-00000001")) == 2
    assert 8 < last < 29


def test_a_file_stays_where_a_rank_has_died_and_goes_where_all_ranks_have_refused(tmp_path, monkeypatch):
    for number, error in enumerate((CommError("a rank has died"), CheckpointError("a rank cannot write"))):
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(writing, "_require_readable", Mock(side_effect=error))
            with pytest.raises(type(error)):
                sherd.save(folder, filled(1), step=1)
        assert len(files_in(folder)) == isinstance(error, CommError)
        sherd.save(folder, filled(1), step=1)
        assert len(files_in(folder / "step-00000001")) == 2


def test_another_job_saves_the_step_while_it_is_looked_at_or_opened(tmp_path, monkeypatch):
    for (module, name), step in itertools.product(((storage_folder, "faults"), (restoring, "Opened")), (None, 1)):
        sherd.save(tmp_path, filled(1), step=1)
        original, is_first = getattr(module, name), True

        def late(*args, original=original, **kwargs):
            nonlocal is_first
            if is_first:
                is_first = False
                sherd.save(tmp_path, filled(2), step=1)
                filled(0)
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, late)
            restored = sherd.load(tmp_path, filled(0), step=step)
        assert (restored.step, restored.passed_over, value()) == (1, (), 2)


def load_while_replaced(old, new):
    """The last rank finds another save of the step, which is there since the first rank has chosen."""
    original, is_first = restoring.Opened, True

    def late(place):
        nonlocal is_first
        if is_first and dist.get_rank() == 1:
            for path in sorted(Path(new).iterdir(), reverse=True):
                shutil.copy(path, Path(old) / f"{path.name}.new")
                os.replace(Path(old) / f"{path.name}.new", Path(old) / path.name)
        is_first = False
        return original(place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restoring, "Opened", late)
        restored = sherd.load(Path(old).parent, filled(0))
    return restored.step, restored.passed_over, value()


def save_two(folder):
    return [sherd.save(f"{folder}/{number}", filled(number), step=1) for number in (1, 2)]


def test_all_ranks_load_one_save(world, tmp_path):
    old, new = world(2).run(save_two, str(tmp_path))[0]
    assert world(2).run(load_while_replaced, old, new) == [(1, (), 2.0)] * 2


def full_at(monkeypatch, name):
    """Writing a file of this name fails."""
    write = DiskPlace.write

    def refused(self, given, chunks):
        if given == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, given, chunks)

    monkeypatch.setattr(DiskPlace, "write", refused)


def test_a_manifest_that_cannot_be_written_leaves_nothing_of_the_save(tmp_path, monkeypatch):
    sherd.save(tmp_path, filled(1), step=1)
    before = files_in(tmp_path)
    full_at(monkeypatch, "manifest.json")
    for step in (1, 2):
        with pytest.raises(CheckpointError, match="No space left"):
            sherd.save(tmp_path, filled(2), step=step)
    assert files_in(tmp_path) == before
    assert sherd.load(tmp_path, filled(0)).step == 1
    assert value() == 1


def test_a_hint_that_cannot_be_written_is_no_error_and_a_full_disk_is_read_though_no_lock_can_be_made(
    tmp_path, monkeypatch
):
    full_at(monkeypatch, "latest")
    sherd.save(tmp_path, filled(1), step=1)
    assert sherd.load(tmp_path, filled(0)).step == 1
    (tmp_path / ".lock").unlink()
    opened = os.open

    def full(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", full)
    assert sherd.load(tmp_path, filled(0)).step == 1


def test_a_checkpoint_that_is_loaded_by_its_path_is_guarded_and_removed_as_a_whole(tmp_path, monkeypatch):
    paths = [sherd.save(tmp_path, filled(step), step=step) for step in (1, 2)]
    original = restoring.Opened

    def prunes(place):
        assert Folder(DiskPlace(tmp_path)).prune(1) == []  # somebody loads here
        return original(place)

    with monkeypatch.context() as patch:
        patch.setattr(restoring, "Opened", prunes)
        assert sherd.load(paths[0], filled(0)).step == 1
    assert Folder(DiskPlace(tmp_path)).prune(1) == [1]
    assert not Path(paths[0]).exists()
    shutil.copytree(paths[1], tmp_path / "best")
    assert sherd.load(tmp_path / "best", filled(0)).step == 2
    assert not (tmp_path / "best" / ".lock").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB, where the tests may mount one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def save_on_small_disk(folder, step, numel, is_async):
    items = {name: torch.full((numel,), float(step)) for name in "xy"}
    try:
        if is_async:
            sherd.async_save(folder, items, step=step, random=False, staging_bytes=1).wait()
        else:
            sherd.save(folder, items, step=step, random=False)
    except CheckpointError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_disk_that_is_full_keeps_what_it_has(world, small_disk, is_async):
    run = world(2).run
    assert run(save_on_small_disk, str(small_disk), 1, 5000, is_async) == ["done"] * 2
    before = files_in(small_disk)
    for numel in (60_000, 45_000, 29_000, 28_000, 27_000, 26_500, 26_000):  # full behind more and more
        told = set(run(save_on_small_disk, str(small_disk), 2, numel, is_async))
        if told == {"done"}:
            break
        (text,) = told
        assert "No space left on device" in text
        assert files_in(small_disk) == before
        values = sherd.load(small_disk, {"x": 0}).values
        assert torch.equal(values["x"], torch.ones(5000))
    assert run(save_on_small_disk, str(small_disk), 2, 5000, is_async) == ["done"] * 2
    assert sherd.load(small_disk, {"x": 0}).step == 2
