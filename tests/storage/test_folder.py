"""Which checkpoints of a folder are whole, which one is chosen, and that nothing is removed that somebody needs."""

import contextlib
import errno
import json
import os
import signal
from threading import Thread

import pytest

from sherd.errors import PolicyError
from sherd.storage.folder import Folder, faults, file_name
from sherd.storage.places import DiskPlace, Lock
from tests.storage.writing import SMALL, read_all, save, save_into, tensors_of


@pytest.fixture
def folder(tmp_path):
    return Folder(DiskPlace(tmp_path / "checkpoints"))


def names(folder, step):
    return sorted(folder.folder_of(step).names())


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_the_newest_is_the_one_that_was_saved_last_and_reads_back_whatever_latest_says(folder, tmp_path):
    assert folder.newest() == (None, [])
    save_into(folder, 1, seed=1)
    tensors = save_into(folder, 20, seed=2)
    found, passed_over = folder.newest()
    assert (found.step, passed_over) == (20, [])
    assert read_all(found.place) == tensors
    assert folder.steps() == [each.step for each in folder.whole()] == [20, 1]
    latest = tmp_path / "checkpoints" / "latest"
    assert json.loads(latest.read_text()) == {"format": "sherd/1", "folder": "step-00000020", "step": 20}
    latest.write_text('{"step": 99}')
    assert folder.newest()[0].step == 20
    latest.unlink()
    assert folder.newest()[0].step == 20
    (tmp_path / "empty").mkdir()
    assert Folder(DiskPlace(tmp_path / "empty")).newest() == (None, [])


SPOILS = [
    (lambda at: (at / "manifest.json").unlink(), "manifest.json is missing"),
    (lambda at: (at / "manifest.json").write_bytes((at / "manifest.json").read_bytes()[:-9]), "torn"),
    (lambda at: flip(at / "manifest.json", 40), "not what was written"),
    (lambda at: next(at.glob("*-00001.*")).unlink(), "00001.safetensors cannot be read"),
    (lambda at: os.truncate(next(at.glob("*-00001.*")), 50), "has 50 of"),
    (lambda at: os.truncate(next(at.glob("*-00001.*")), 5000), "has 5000 of"),
    (lambda at: flip(next(at.glob("*-00001.*")), -1), "the checksum of bytes"),
    (lambda at: at.rename(at.with_name("step-00000007")), "a manifest of step 2"),
]


def test_a_spoiled_checkpoint_is_passed_over_and_the_reason_told(tmp_path):
    for number, (spoil, why) in enumerate(SPOILS):
        folder = Folder(DiskPlace(tmp_path / str(number)))
        tensors = save_into(folder, 1, seed=1)
        save_into(folder, 2, seed=2)
        spoil(folder.folder_of(2).path)
        if why == "the checksum of bytes":  # which nobody reads to find the newest
            found, _ = folder.newest()
            assert found.step == 2
            assert why in faults(found.place, found.manifest.files, found.manifest.block_bytes, verify=True)[1]
            continue
        found, (passed,) = folder.newest()
        assert (found.step, passed.step) == (1, 7 if why.endswith("of step 2") else 2)
        assert why in passed.why
        assert read_all(found.place) == tensors


def test_a_second_save_of_a_step_replaces_the_first_and_two_at_once_leave_a_whole_checkpoint(folder):
    save_into(folder, 5, seed=1, save_id="aa")
    tensors = save_into(folder, 5, seed=2, save_id="bb")
    assert names(folder, 5) == ["bb-00000.safetensors", "bb-00001.safetensors", "manifest.json"]
    assert read_all(folder.folder_of(5)) == tensors
    jobs = {name: tensors_of(SMALL, name) for name in ("aa", "bb")}
    held = [save(folder.folder_of(6), SMALL, one, 6, num_files=2, save_id=name) for name, one in jobs.items()]
    for one, manifest in zip(jobs.values(), held, strict=True):
        folder.finish(6, manifest)
        assert read_all(folder.newest()[0].place) == one


def test_pruning_keeps_the_last_whole_ones_those_of_the_rule_those_named_and_those_above_the_step_saved(folder):
    for step in range(10, 110, 10):
        save_into(folder, step)
    assert folder.prune(2, 30, keep=[40]) == [80, 70, 50, 20, 10]
    assert [each.step for each in folder.whole()] == folder.steps() == [100, 90, 60, 40, 30]
    assert folder.prune(1, upto=60) == [40, 30]
    assert folder.steps() == [100, 90, 60]
    (folder.folder_of(100).path / "manifest.json").unlink()
    assert folder.prune(1) == [60]
    assert folder.newest()[0].step == 90
    for everything in ({"keep_last": 0}, {"keep_last": -1}, {"keep_last": 1, "keep_every": 0}):
        with pytest.raises(PolicyError, match="at least 1"):
            folder.prune(**everything)
    assert folder.newest()[0].step == 90


def test_nothing_is_removed_while_another_saves_or_loads_and_the_lock_ends_with_an_exception(folder, tmp_path):
    with folder.locked() as lock:
        assert lock is Lock.NONE
    assert not (tmp_path / "checkpoints").exists(), "made unasked"
    with contextlib.suppress(KeyError), folder.locked(make=True) as lock:
        assert lock is Lock.HELD
        raise KeyError
    with folder.locked(shared=False) as lock:
        assert lock is Lock.HELD
    for step in (1, 2):
        save_into(folder, step)
    save(folder.folder_of(3), SMALL, tensors_of(SMALL), 3, num_files=2)
    with folder.locked() as lock, Folder(folder.place).locked() as other:
        assert lock is other is Lock.HELD
        assert folder.prune(1) == folder.sweep() == []
        with folder.locked(shared=False) as alone:
            assert alone is Lock.BUSY
    assert folder.prune(1) == [1]
    assert len(folder.sweep()) == 2
    assert folder.steps() == [2]


def test_without_flock_checkpoints_are_pruned_and_nothing_is_swept(folder, monkeypatch):
    def none(fd, how):
        raise OSError(38, "not implemented")

    monkeypatch.setattr("fcntl.flock", none)
    for step in (1, 2):
        save_into(folder, step)
    save(folder.folder_of(3), SMALL, tensors_of(SMALL), 3, num_files=2, save_id="aa")
    assert folder.prune(1) == [1]
    assert folder.sweep() == []
    assert folder.steps() == [3, 2]
    assert len(folder.sweep(by_hand=True)) == 2
    assert folder.steps() == [2]


def test_sweeping_removes_what_was_never_finished_and_nothing_else(folder, tmp_path):
    kept = save_into(folder, 1, save_id="aa")
    base = tmp_path / "checkpoints"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "cc-00000.safetensors").write_text("mine")
    one = base / "step-00000001"
    ours = [
        one / "bb-00000.safetensors",
        one / "aa-00002.safetensors.0123abcd.part",
        one / "manifest.json.0123abcd.part",
        base / "latest.0123abcd.part",
        base / "step-00000002" / "bb-00000.safetensors",
    ]
    theirs = [
        base / "notes.txt",
        base / "x.part",
        base / "cc-00000.safetensors",
        base / "step-100" / "cc-00000.safetensors",
        base / "step-000000001" / "cc-00000.safetensors",
        base / "other" / "manifest.json",
        base / "step-00000003",
        one / "notes.txt",
        one / "model.safetensors",
        one / "deep" / "cc-00000.safetensors",
        base / "step-00000004" / "notes.txt",
    ]
    for path in (*ours, *theirs):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    (base / "step-00000005").symlink_to(outside)
    (one / "dd-00000.safetensors").symlink_to(outside / "cc-00000.safetensors")
    assert sorted(folder.sweep()) == sorted(map(str, ours))
    assert all(path.exists() for path in theirs)
    assert (base / "step-00000005").is_symlink()
    assert (one / "dd-00000.safetensors").is_symlink()
    assert (outside / "cc-00000.safetensors").read_text() == "mine"
    assert not (base / "step-00000002").exists()
    assert folder.newest()[0].step == 1
    assert read_all(folder.folder_of(1)) == kept


def test_a_linked_checkpoint_is_neither_chosen_nor_removed(folder, tmp_path):
    save_into(folder, 9)
    folder.folder_of(9).path.rename(tmp_path / "step-00000009")
    folder.folder_of(9).path.symlink_to(tmp_path / "step-00000009")
    save_into(folder, 1)
    save_into(folder, 2)
    assert folder.newest()[0].step == 2
    assert folder.prune(1) == [1]
    assert read_all(DiskPlace(tmp_path / "step-00000009"))


def test_a_damaged_checkpoint_and_what_is_not_named_as_ours_are_left_for_a_person(folder):
    for step in (1, 2, 3):
        save_into(folder, step)
    flip(folder.folder_of(1).path / "manifest.json", 40)
    notes = folder.folder_of(2).path / "notes.txt"
    notes.write_text("mine")
    before = names(folder, 1)
    assert folder.prune(1) == [2]
    assert folder.sweep() == []
    assert names(folder, 1) == before
    assert names(folder, 2) == ["notes.txt"]
    assert notes.read_text() == "mine"


def test_a_step_of_more_than_eight_digits_has_its_place_and_files_of_ranks_are_numbered(folder):
    save_into(folder, 123456789)
    save_into(folder, 99999999)
    assert folder.steps() == [123456789, 99999999]
    assert folder.folder_of(123456789).path.name == "step-123456789"
    assert file_name("5f3a9c21", 7) == "5f3a9c21-00007.safetensors"


def test_a_folder_on_a_medium_that_cannot_be_written_is_read_and_nothing_of_it_is_lost(folder, monkeypatch):
    tensors = save_into(folder, 1)
    save_into(folder, 2)
    files = {step: names(folder, step) for step in (1, 2)}

    opened = os.open

    def refusing(function):
        def refuse(*args, **kwargs):
            if function is opened and not args[1] & (os.O_RDWR | os.O_CREAT):
                return function(*args, **kwargs)
            raise OSError(errno.EROFS, "Read-only file system")

        return refuse

    for name in ("open", "mkdir", "unlink", "replace", "rmdir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    monkeypatch.setattr("sherd.storage.places.open", refusing(open), raising=False)
    with folder.locked() as lock:
        assert lock is Lock.NONE
    with pytest.raises(OSError, match="Read-only"):
        save_into(folder, 3)
    assert folder.prune(1) == folder.sweep(by_hand=True) == []
    assert {step: names(folder, step) for step in folder.steps()} == files
    assert folder.newest()[0].step == 2
    assert read_all(folder.folder_of(1)) == tensors


def test_files_whose_manifest_could_not_be_written_go_unless_nobody_can_tell_whether_it_was_taken(folder, monkeypatch):
    manifest = save(folder.folder_of(1), SMALL, tensors_of(SMALL), 1, num_files=2, save_id="aa")
    files = names(folder, 1)

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(DiskPlace, "write", broken)
    with monkeypatch.context() as unreadable:
        unreadable.setattr(DiskPlace, "names", broken)
        with pytest.raises(OSError, match="Input/output"):
            folder.finish(1, manifest)
    assert names(folder, 1) == files
    with pytest.raises(OSError, match="Input/output"):
        folder.finish(1, manifest)
    assert names(folder, 1) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_read(folder, tmp_path):
    tensors = save_into(folder, 1)
    (tmp_path / "checkpoints").chmod(0o555)
    with folder.locked() as lock:
        assert lock is not Lock.BUSY
        assert read_all(folder.newest()[0].place) == tensors
    with pytest.raises(PermissionError):
        save_into(folder, 2)


def test_who_saves_waits_for_who_removes(folder):
    said = []

    def save_soon():
        with folder.locked(make=True) as lock:
            said.append(lock)

    saver = Thread(target=save_soon)
    with folder.locked(shared=False, make=True) as lock:
        assert lock is Lock.HELD
        saver.start()
        saver.join(0.2)
        assert said == []
    saver.join()
    assert said == [Lock.HELD]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of the threads of other tests
def test_a_forked_process_does_not_hold_the_lock_on(folder):
    with folder.locked(make=True):
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
    try:
        with folder.locked(shared=False) as lock:
            assert lock is Lock.HELD
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
