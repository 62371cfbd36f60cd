"""One run at a time has a folder, the right one is resumed, and nothing is left that nobody can go on from."""

import errno
import json
import multiprocessing
import os
from pathlib import Path

import pytest

import sherd
from sherd.errors import StorageError
from sherd.train import folder
from sherd.train.config import Config, InputError
from sherd.train.folder import HELD, claim, is_free, last_run, sweep
from sherd.train.saved import NoCheckpoint, newest
from sherd.train.text import read_corpus
from tests.support.commands import refusal
from tests.train.test_checkpoint import DATA, break_it, names, put

forks = multiprocessing.get_context("fork")


def of(out):
    return Config.of({"run": {"out": str(out)}})


def hold(out, held, done):
    claim(of(out))
    held.set()
    done.wait()


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def other(elsewhere):
    """Another process, which writes into `run`."""
    held, done = forks.Event(), forks.Event()
    process = forks.Process(target=hold, args=("run", held, done))
    process.start()
    assert held.wait(60)
    yield process
    process.kill()
    process.join()


def test_a_folder_in_use_is_refused_with_who_uses_it_until_that_process_ends(other, refused):
    with pytest.raises(InputError, match=rf"^run is in use by process {other.pid} on \S+ since 2.*--out$"):
        claim(of("run"))
    config = Config.of({"data": {"path": "text.txt"}})
    put(Path("run"), 3, config=config.tree(), text=read_corpus(config.data).digest)
    said = refused("train", "--out", "run", "--resume", "--nproc", "2", "run.device=cpu")
    assert said.startswith(f"sherd train: run is in use by process {other.pid} on ")
    other.kill()
    other.join()
    with claim(of("run")) as found:
        assert not found.made


def test_a_rank_has_the_lock_of_its_launcher_and_its_own_number_in_it(monkeypatch):
    with claim(of("run")) as launchers:
        monkeypatch.setenv(HELD, str(launchers.lock))
        assert claim(of("run")).lock == launchers.lock
        assert json.loads(Path("run/.lock").read_text())["process"] == os.getpid()
        monkeypatch.delenv(HELD)
        with pytest.raises(InputError, match="in use"):
            claim(of("run"))


def number(barrier, numbers):
    barrier.wait()
    numbers.put(claim(Config()).path.name)
    barrier.wait()


def test_three_starts_at_once_have_three_folders(tmp_path):
    barrier, numbers = forks.Barrier(3), forks.Queue()
    starts = [forks.Process(target=number, args=(barrier, numbers)) for _ in range(3)]
    for start in starts:
        start.start()
    assert sorted(numbers.get(timeout=60) for _ in starts) == ["1", "2", "3"]
    for start in starts:
        start.join()


def test_a_folder_removed_by_its_holder_meanwhile_is_made_anew(monkeypatch):
    """Both have opened the lock file; one holds it, and removes the folder."""
    real, first = folder.fcntl.flock, claim(Config())

    def slow(lock, how):
        monkeypatch.setattr(folder.fcntl, "flock", real)
        first.drop_if_empty()
        first.close()
        return real(lock, how)

    monkeypatch.setattr(folder.fcntl, "flock", slow)
    second = claim(of("runs/1"))
    assert Path("runs/1/.lock").exists()
    with pytest.raises(InputError, match="in use"):
        claim(of("runs/1"))
    second.close()


def test_where_a_file_system_has_no_flock_runs_go_on_without(monkeypatch):
    def refuses(lock, how):
        raise OSError(folder.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder.fcntl, "flock", refuses)
    with claim(of("run")) as found:
        assert found.path == Path("run")


# What a start leaves


def start_left(out):
    part = out / "checkpoints" / "step-00000002" / f"{DATA}.1b.part"
    part.parent.mkdir(parents=True)
    part.touch()
    (out / "checkpoints" / ".lock").touch()
    (out / ".lock").touch()
    (out / ".seen-12").touch()
    (out / "metrics.jsonl").write_text('{"event": "start", "step": 0}\n')


def test_a_folder_with_only_what_a_killed_start_left_is_free_and_one_with_a_step_or_a_file_is_not(tmp_path):
    assert is_free(tmp_path / "absent")
    start_left(tmp_path / "run")
    assert is_free(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").touch()
    assert not is_free(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").unlink()
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"event": "step", "step": 1}\n')
    assert not is_free(tmp_path / "run")
    put(tmp_path / "other", 3)
    assert not is_free(tmp_path / "other")


def test_a_new_run_drops_the_numbered_folders_that_killed_starts_left_and_no_others():
    put(Path("runs/1"), 3)
    start_left(Path("runs/2"))
    Path("runs/3").mkdir()  # not ours: it has no lock
    with claim(of("runs/4")), claim(Config()) as found:
        assert found.path == Path("runs/5")
        assert sorted(path.name for path in Path("runs").iterdir()) == ["1", "3", "4", "5"]


def test_a_run_that_was_stopped_in_its_start_drops_its_folder_unless_it_was_there_or_holds_anything():
    for made_before, kept in ((False, False), (True, True)):
        if made_before:
            Path("run").mkdir()
        with claim(of("run")) as found:
            found.drop_if_empty()
        assert Path("run").exists() == kept
    with claim(Config()) as found:
        put(found.path, 2)
        found.drop_if_empty()
    assert newest(Path("runs/1")).manifest.step == 2


def test_resuming_takes_the_newest_run_that_has_a_checkpoint_and_where_none_has_that_is_said():
    start_left(Path("runs/2"))
    with pytest.raises(InputError, match="there is no run with a checkpoint under"):
        last_run()
    put(Path("runs/1"), 3)
    break_it(put(Path("runs/3"), 4), "never finished")
    assert last_run() == Path("runs/1")
    break_it(put(Path("runs/4"), 4), "missing file")
    with pytest.raises(InputError, match="runs/4/checkpoints holds no whole checkpoint"):
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
    with claim(Config()) as left:
        left.drop_if_empty()
    assert not Path("runs").exists()
    assert "model.hf = 'absent.json' is no file" in refusal(capsys, "train", "model.hf=absent.json")
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
    (put(Path("runs/1"), 3).parent / "latest").unlink()
    Path("runs/1/.lock").touch()
    with monkeypatch.context() as broken:
        fails_at(broken, "manifest.json")
        with pytest.raises(InputError, match=r"runs/1 cannot be read: .*Input/output error"):
            is_free(Path("runs/1"))
        with pytest.raises(InputError, match=r"runs/1/checkpoints cannot be read: .*Input/output error"):
            folder.pick(None, best=False)
        claim(Config()).close()
        folder.RunFolder(Path("runs/1"), 0, made=True).drop_if_empty()
    assert newest(Path("runs/1")).step == 3


def test_a_place_of_checkpoints_that_is_not_to_be_had_now_is_no_empty_one(monkeypatch):
    kept = put(Path("run"), 3).parent
    kept.rename("unmounted")
    kept.symlink_to("elsewhere")
    wrong = [(kept, "run/checkpoints cannot be read: .*this link leads to nothing")]
    for name, text in (("empty", ""), ("failing", "unmounted\n")):
        Path(name).mkdir()
        (Path(name) / "checkpoints").write_text(text)
        wrong.append((Path(name) / "checkpoints", f"{name}/checkpoints (is damaged|cannot be read)"))
    for path, why in wrong:
        with monkeypatch.context() as broken:
            if path.parent.name == "failing":
                fails_at(broken, "checkpoints")
            with pytest.raises(InputError, match=why) as raised:
                newest(path.parent)
        assert not isinstance(raised.value, NoCheckpoint), "--resume-or-start would begin anew"
    assert newest(Path("failing")).step == 3
    with pytest.raises(StorageError, match="link leads to nothing"):
        sherd.load("run/checkpoints/of_mine", {"value": 0})
