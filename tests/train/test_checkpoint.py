"""A checkpoint is whole or none, and the wrong one is refused."""

import contextlib
import errno
import json
from functools import partial
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from sherd.layout.boxes import Grid
from sherd.storage.files import Content, write_file
from sherd.storage.folder import Folder, file_name
from sherd.storage.manifest import MANIFEST, Entry, Manifest
from sherd.storage.places import Disk
from sherd.train import checkpoint, rank, saved
from sherd.train.checkpoint import NotSaved, Saver, facts
from sherd.train.config import Config, InputError
from sherd.train.folder import sweep
from sherd.train.report import Silent
from sherd.train.saved import Best, Checkpoint, newest, place_in, read_best, write_best
from tests.support.refusals import one_line, refusal

DATA = file_name("0a", 0)


def manifest(step=3, files=(), **changed):
    user = {**facts(Config(), "abc", "def", 0), **changed}
    of = {"model/w": Entry("U8", (4,), Grid(0))} if files else {}
    return Manifest(step, "0a", "2026-01-01T00:00:00Z", 2, files, of, user=user)


def put(out, step, **changed):
    """A checkpoint as `save` leaves it."""
    folder = Folder(Disk(out / "checkpoints"))
    file = write_file(folder.folder_of(step), DATA, {"model/w": Content("U8", (4,), lambda: [memoryview(b"1234")])})
    folder.finish(step, manifest(step, (file,), **changed))
    return out / "checkpoints" / f"step-{step:08}"


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    put(tmp_path, 90)
    path = put(tmp_path, 100)
    found = newest(tmp_path)
    assert (str(found), found.step, found.notes) == (str(path), 100, ())
    assert (found.config, found.text, found.parameters) == (Config().tree(), "abc", "def")


def break_it(path, how):
    if how == "no manifest":
        (path / MANIFEST).unlink()
    elif how == "cut manifest":
        (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes()[:-20])
    elif how == "empty manifest":
        (path / MANIFEST).write_text("{}")
    elif how == "missing file":
        (path / DATA).unlink()
    elif how == "short file":
        (path / DATA).write_bytes(b"12")
    else:
        (path / MANIFEST).unlink()
        (path / DATA).rename(path / f"{DATA}.0a.part")


refused = partial(one_line, InputError)
BREAKS = {
    "no manifest": "manifest.json is missing",
    "cut manifest": "manifest.json is torn: it does not end with its checksum",
    "empty manifest": "manifest.json is torn",
    "missing file": f"{DATA} cannot be read: No such file or directory",
    "short file": f"{DATA} has 2 of 76 bytes",
    "never finished": "manifest.json is missing",
}


def test_a_checkpoint_that_is_not_whole_is_passed_over_with_a_note_or_refused_with_nothing_older_and_replaced(tmp_path):
    for how, why in BREAKS.items():
        out = tmp_path / how
        break_it(put(out, 2), how)
        with pytest.raises(InputError) as raised:
            newest(out)
        is_damaged = why != BREAKS["never finished"]
        ends = "begin anew in another folder" if is_damaged else "--resume-or-start begins anew"
        assert isinstance(raised.value, saved.NoCheckpoint) is not is_damaged, how
        assert str(raised.value).endswith(ends), how
        assert why in str(raised.value), how
        new, old = out / "checkpoints" / "step-00000002", put(out, 1)
        found = newest(out)
        assert str(found) == str(old), how
        assert len(found.notes) == 1, how
        assert str(new) in found.notes[0], how
        assert why in found.notes[0], how
        finish(out, 2, keep=1)
        assert newest(out).step == 2, how
        sweep(out)
        assert sorted(path.name for path in new.iterdir()) == [DATA, MANIFEST], how


EARLIER = "was written by an earlier sherd train, by torch.distributed.checkpoint"
OTHERS = [
    ({"format": "sherd/2"}, "has format 'sherd/2'; this version reads 'sherd/1'"),
    ({"format": 1, "step": 2, "files": {}}, EARLIER),
]


def test_a_checkpoint_of_another_format_or_program_is_refused_and_no_older_one_taken_in_its_place(tmp_path):
    assert "holds no checkpoint to resume from" in refused(newest, tmp_path)
    for written, said in OTHERS:
        put(tmp_path, 1)
        path = put(tmp_path, 2)
        (path / MANIFEST).write_text(json.dumps(written))
        assert said in refused(newest, tmp_path), written
        with pytest.raises(InputError) as caught:
            newest(tmp_path)
        assert not isinstance(caught.value, saved.NoCheckpoint), "--resume-or-start would begin anew"
    folder = Folder(Disk(tmp_path / "other" / "checkpoints"))
    file = write_file(folder.folder_of(1), DATA, {})
    folder.finish(1, Manifest(1, "0a", "2026-01-01T00:00:00Z", 1, (file,), {}, user={"config": {}}))
    said = refused(newest, tmp_path / "other")
    assert "is no checkpoint of `sherd train`: another program has saved it" in said


def test_a_checkpoint_of_another_model_or_text_is_refused_and_changes_that_reach_the_losses_are_told(tmp_path):
    found = Checkpoint(Disk(tmp_path), manifest())
    found.check_model(Config())
    other = Config.of({"model": {"width": 64, "tied": False}})
    said = "another model: model.width is 128 there and 64 here, model.tied is True"
    assert said in refused(found.check_model, other)
    found.check_text("abc", "here")
    assert "another text than here holds now" in refused(found.check_text, "xyz", "here")
    free = {"out": "elsewhere", "keep": 9, "save_every": 1, "ranks": 2, "sample": 3}
    assert found.changes(Config.of({"run": free})) == []
    assert found.changes(Config.of({"run": {"seed": 1}, "optimizer": {"lr": 0.5}})) == [
        "optimizer.lr: 0.002 -> 0.5",
        "run.seed: 0 -> 1",
    ]


def finish(out, step, keep):
    """What rank 0 does when a save is whole."""
    put(out, step)
    checkpoint.clear(place_in(out), keep, step)


def names(out):
    return sorted(path.name for path in (out / "checkpoints").iterdir() if path.name not in (".lock", "latest"))


def test_only_the_last_whole_checkpoints_are_kept(tmp_path):
    for step in range(1, 6):
        finish(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert newest(tmp_path).step == 5
    break_it(put(tmp_path, 7), "no manifest")
    finish(tmp_path, 6, keep=1)
    assert newest(tmp_path).step == 6, "a later half-written one has pushed out a whole one"


def test_the_best_checkpoint_stays_and_stays_the_best_while_its_name_cannot_be_read(threads, tmp_path, monkeypatch):
    for step in range(1, 4):
        put(tmp_path, step)
    place, best, judged_later = place_in(tmp_path), Best(1, 0.5, "j"), Best(3, 0.9, "j")
    assert write_best(place, best) is None
    read = Disk.read

    def fails(place, name):
        if name == "best.json":
            raise OSError(errno.EIO, "Input/output error")
        return read(place, name)

    def keep():
        saver(tmp_path, *small()).keep_best(judged_later, choice())

    with monkeypatch.context() as broken:
        broken.setattr(Disk, "read", fails)
        checkpoint.clear(place, 1, 3)
        threads(1).run(keep)
    assert read_best(place) == best
    checkpoint.clear(place, 1, 3)
    assert names(tmp_path) == ["best.json", "step-00000001", "step-00000003"]


# On two ranks


def small():
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def saver(out, model, optimizer):
    return Saver(place_in(out), model, optimizer, "abc", Silent())


def choice(**run):
    return Config.of({"run": run})


def flip_in(folder, end):
    """Change one bit in the middle of the file whose name ends so."""
    (file,) = folder.glob(f"*{end}")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def damaged(out, flip):
    """What two ranks load whose newest checkpoint, or only one, is damaged in the file that ends in `flip`."""
    model, optimizer = small()
    with saver(out, model, optimizer) as saving:
        saving.save(1, choice())
        first = model.weight.detach().clone()
        torch.nn.init.zeros_(model.weight)
        saving.save(2, choice())
    dist.barrier()
    if dist.get_rank() == 0:
        flip_in(out / "checkpoints" / "step-00000002", flip)
    dist.barrier()
    loaded = checkpoint.load(place_in(out), newest(out), model, optimizer)
    first_again = torch.equal(model.weight, first) or dist.get_rank() > 0
    dist.barrier()
    if dist.get_rank() == 0:
        flip_in(out / "checkpoints" / "step-00000001", "-00000.safetensors")
    dist.barrier()
    said = refused(lambda: checkpoint.load(place_in(out), newest(out), model, optimizer))
    return loaded.step, loaded.notes, first_again, said


@pytest.mark.parametrize("flip", [MANIFEST, "-00000.safetensors"])
def test_a_single_bit_changed_is_found_and_the_older_one_taken_while_it_is_whole(world, tmp_path, flip):
    for step, notes, is_first, said in world(2).run(damaged, tmp_path, flip):
        assert step == 1
        (note,) = notes
        assert f"{tmp_path}/checkpoints/step-00000002" in note
        assert flip in note
        assert is_first
        assert "holds no whole checkpoint (step " in said
        assert "step 1: " in said
        assert said.endswith("name another --out")


def refused_on(number, what, run, out):
    model, optimizer = small()
    real = Disk.write

    def write(self, name, chunks):
        if name.endswith(what) and "step-00000008" in str(self):
            for _ in chunks():
                raise OSError(errno.ENOSPC, "No space left on device", name)
        real(self, name, chunks)

    with mock.patch.object(Disk, "write", write) if dist.get_rank() == number else contextlib.nullcontext():
        return refusal(NotSaved, save_twice, saver(out, model, optimizer), choice(**run))


def save_twice(saver, config):
    with saver as saving:
        saving.save(4, config)
        saving.save(8, config)


@pytest.mark.parametrize("run", [{"async_save": True}, {"async_save": False}], ids=["async", "sync"])
@pytest.mark.parametrize(("number", "what"), [(0, ".safetensors"), (1, ".safetensors"), (0, MANIFEST)])
def test_a_disk_full_for_one_rank_is_told_by_all_in_one_line_and_gets_its_space_back(
    world, tmp_path, number, what, run
):
    for said in world(2).run(refused_on, number, what, run, tmp_path):
        assert said.startswith(f"the save of step 8 to {tmp_path}/checkpoints/step-00000008 failed on rank {number}: ")
        assert said.endswith(": No space left on device; step 4 is whole, --resume goes on from it")
        assert "\n" not in said
    assert newest(tmp_path).step == 4
    left = list((tmp_path / "checkpoints").glob("step-00000008/*"))
    assert what == MANIFEST or not left
    sweep(tmp_path)
    assert names(tmp_path) == ["step-00000004"]


class Listening(Silent):
    def __init__(self):
        self.told = []

    def write(self, event, **record):
        self.told.append((event, record["step"]))


def one_save_under_way(out):
    model, optimizer = small()
    report, seen = Listening(), []
    with Saver(place_in(out), model, optimizer, "abc", report) as saving:
        saving.save(1, choice())
        seen.append(list(report.told))  # it is told of when it is whole, not before
        torch.nn.init.zeros_(model.weight)
        saving.save(2, choice())
        seen.append(list(report.told))
        saving.settle()
        seen.append(list(report.told))
        saving.save(3, choice())
        with contextlib.suppress(ZeroDivisionError), saving:
            raise ZeroDivisionError
        seen.append(list(report.told))
    return seen


def test_a_save_is_told_of_when_it_is_whole_and_the_end_waits_for_it_also_after_an_error(world, tmp_path):
    told = [("checkpoint", step) for step in (1, 2, 3)]
    for seen in world(2).run(one_save_under_way, tmp_path):
        assert seen == [[], told[:1], told[:2], told]
    assert newest(tmp_path).step == 3


def metrics_refused(out):
    put(out, 4)
    with rank._report(out, None, quiet=False):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_takes_no_more_metrics_is_told_in_one_line_too(threads, tmp_path):
    said = f"cannot write to {tmp_path}: No space left on device; step 4 is whole, --resume goes on from it"
    assert threads(1).run(refusal, NotSaved, metrics_refused, tmp_path) == [said]
