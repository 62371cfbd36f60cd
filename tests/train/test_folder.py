"""One run at a time has a folder, the right one is resumed, and nothing is left that nobody can go on from."""

import contextlib
import errno
import multiprocessing
import os
from pathlib import Path

import pytest

import sherd
from sherd.cli.uses import pick
from sherd.errors import StorageError
from sherd.train.config import InputError
from sherd.train.folder import claimed, drop_if_empty, is_free, last_run, sweep
from sherd.train.saved import NoCheckpoint
from tests.support.commands import refusal
from tests.train.test_checkpoint import DATA, break_it, names, newest, put

forks = multiprocessing.get_context("fork")
pytestmark = pytest.mark.usefixtures("elsewhere")


@contextlib.contextmanager
def claim(named):
    """The run's folder, locked, and whether it is new."""
    with contextlib.ExitStack() as held:
        yield claimed(str(named), held)


def test_a_folder_in_use_is_refused_until_its_run_ends():
    with claim("run") as (out, is_new):
        assert (out, is_new) == (Path("run"), True)
        with pytest.raises(InputError, match=r"^run is in use by another run; wait for its end, or choose another"):
            claimed("run", contextlib.ExitStack())
    with claim("run") as (out, is_new):
        assert not is_new


def number(barrier, numbers):
    barrier.wait()
    numbers.put(claimed("", contextlib.ExitStack())[0].name)
    barrier.wait()


def test_three_starts_at_once_have_three_folders(tmp_path):
    barrier, numbers = forks.Barrier(3), forks.Queue()
    starts = [forks.Process(target=number, args=(barrier, numbers)) for _ in range(3)]
    for start in starts:
        start.start()
    assert sorted(numbers.get(timeout=60) for _ in starts) == ["1", "2", "3"]
    for start in starts:
        start.join()


def test_a_folder_that_cannot_be_written_is_refused():
    Path("file").touch()
    with pytest.raises(InputError, match="cannot write to file/run: File exists; choose another --out"):
        claimed("file/run", contextlib.ExitStack())


# What a start leaves


def start_left(out):
    part = out / "checkpoints" / "step-00000002" / f"{DATA}.1b.part"
    part.parent.mkdir(parents=True)
    part.touch()
    (out / ".lock").touch()
    (out / ".seen-12").touch()


def test_a_folder_with_only_what_a_killed_start_left_is_free_and_one_with_a_file_is_not(tmp_path):
    assert is_free(tmp_path / "absent")
    (tmp_path / "run").mkdir()
    for name in (".lock", ".seen-12"):
        (tmp_path / "run" / name).touch()
    assert is_free(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").touch()
    assert not is_free(tmp_path / "run")
    put(tmp_path / "other", 3)
    assert not is_free(tmp_path / "other")


def test_a_run_that_was_stopped_in_its_start_drops_its_folder_unless_it_holds_anything():
    with claim("run") as (out, _):
        drop_if_empty(out)
    assert not Path("run").exists()
    with claim("") as (out, _):
        put(out, 2)
        drop_if_empty(out)
    assert newest(Path("runs/1")).step == 2


def test_resuming_takes_the_newest_run_that_has_a_checkpoint_and_where_none_has_that_is_said():
    start_left(Path("runs/2"))
    with pytest.raises(InputError, match="there is no run with a checkpoint under"):
        last_run()
    put(Path("runs/1"), 3)
    break_it(put(Path("runs/3"), 4), "never finished")
    assert last_run() == Path("runs/1")
    break_it(put(Path("runs/4"), 4), "missing file")
    with pytest.raises(InputError, match="runs/4/checkpoints holds no complete checkpoint"):
        last_run()


# What is swept


def test_what_was_never_finished_is_swept_and_what_is_damaged_once_a_whole_one_of_its_step_is_there(tmp_path):
    start_left(tmp_path)
    put(tmp_path, 1)
    part = f"{tmp_path}/checkpoints/step-00000002/{DATA}.1b.part"
    assert sweep(tmp_path) == [f"{part} is removed: no checkpoint needs it"]
    assert names(tmp_path) == ["step-00000001"]
    assert not list(tmp_path.glob(".seen-*"))
    aside = put(tmp_path, 4)
    file = (aside / DATA).rename(aside / "1b-00000.safetensors")
    break_it(aside, "cut manifest")
    assert sweep(tmp_path) == []
    assert file.exists()
    put(tmp_path, 4)
    assert sweep(tmp_path) == [f"{file} is removed: no checkpoint needs it"]
    assert newest(tmp_path).step == 4


def test_a_run_that_leaves_nothing_leaves_no_folder_of_runs(capsys):
    with claim("") as (out, _):
        drop_if_empty(out)
    assert not Path("runs").exists()
    assert "hf = 'absent.json' is no file" in refusal(capsys, "train", "hf=absent.json")
    assert not Path("runs").exists()


# Storage that fails


def fails_at(monkeypatch, name):
    """Let all calls for files called `name` fail, as on storage that does not answer."""
    for function in ("stat", "open"):
        real = getattr(os, function)

        def failing(path, *args, real=real, **options):
            if not isinstance(path, int) and Path(path).name == name:
                raise OSError(errno.EIO, "Input/output error", str(path))
            return real(path, *args, **options)

        monkeypatch.setattr(os, function, failing)


def test_a_run_whose_files_cannot_be_read_is_neither_begun_anew_nor_removed(monkeypatch):
    put(Path("runs/1"), 3)
    with monkeypatch.context() as broken:
        fails_at(broken, "manifest.json")
        with pytest.raises(InputError, match=r"runs/1/checkpoints cannot be read: .*Input/output error"):
            pick(None)
        drop_if_empty(Path("runs/1"))
    assert newest(Path("runs/1")).step == 3


def test_a_place_of_checkpoints_that_is_not_to_be_had_now_is_no_empty_one():
    kept = put(Path("run"), 3).parent
    kept.rename("unmounted")
    kept.symlink_to("elsewhere")
    with pytest.raises(InputError, match=r"run/checkpoints cannot be read: .*this link leads to nothing") as raised:
        newest(Path("run"))
    assert not isinstance(raised.value, NoCheckpoint), "--resume-or-start would begin anew"
    with pytest.raises(StorageError, match="link leads to nothing"):
        sherd.load("run/checkpoints/of_mine", {"value": 0})
