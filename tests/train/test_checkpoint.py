"""A checkpoint is whole or none, and the wrong one is refused."""

import contextlib
import errno
from functools import partial
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from sherd.layout.boxes import Grid
from sherd.storage.files import Content, write_file
from sherd.storage.folder import Folder, file_name
from sherd.storage.manifest import MANIFEST, Entry, Manifest, signed
from sherd.storage.places import DiskPlace
from sherd.train import checkpoint, rank, saved
from sherd.train.checkpoint import NotSaved, Saver
from sherd.train.config import Config, InputError
from sherd.train.folder import sweep
from sherd.train.report import Report
from sherd.train.saved import Checkpoint, folder_in
from tests.support.refusals import one_line, refusal

DATA = file_name("0a", 0)


def newest(out):
    return saved.newest(folder_in(out))


def manifest(step=3, files=(), **changed):
    user = {"config": Config().tree(), "text": "abc", **changed}
    of = {"model/w": Entry("U8", (4,), Grid(0))} if files else {}
    return Manifest(step, "0a", "2026-01-01T00:00:00Z", 2, files, of, user=user)


def put(out, step, **changed):
    """A checkpoint as `save` leaves it."""
    folder = Folder(DiskPlace(out / "checkpoints"))
    file = write_file(folder.folder_of(step), DATA, {"model/w": Content("U8", (4,), lambda: [memoryview(b"1234")])})
    folder.finish(step, manifest(step, (file,), **changed))
    return out / "checkpoints" / f"step-{step:08}"


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    put(tmp_path, 90)
    path = put(tmp_path, 100)
    found = newest(tmp_path)
    assert (str(found), found.step, found.notes) == (str(path), 100, ())
    assert (found.config, found.text) == (Config().tree(), "abc")


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
        ends = "start over in another folder" if is_damaged else f"{why})"
        assert isinstance(raised.value, saved.NoCheckpoint) is not is_damaged, how
        assert str(raised.value).endswith(ends), how
        assert why in str(raised.value), how
        new, old = out / "checkpoints" / "step-00000002", put(out, 1)
        found = newest(out)
        assert str(found) == str(old), how
        assert len(found.notes) == 1, how
        assert str(new) in found.notes[0], how
        assert why in found.notes[0], how
        put(out, 2)
        assert newest(out).step == 2, how
        sweep(out)
        assert sorted(path.name for path in new.iterdir()) == [DATA, MANIFEST], how


def test_a_checkpoint_of_another_format_or_program_is_refused_and_no_older_one_taken_in_its_place(tmp_path):
    assert refused(newest, tmp_path).endswith("holds no checkpoint")
    put(tmp_path, 1)
    later = put(tmp_path, 2) / MANIFEST
    raw = later.read_bytes()
    later.write_bytes(signed(raw[: raw.rindex(b',\n"sha256"')].replace(b"sherd/1", b"sherd/2")))
    with pytest.raises(InputError, match="has format 'sherd/2'; this version reads 'sherd/1'") as caught:
        newest(tmp_path)
    assert not isinstance(caught.value, saved.NoCheckpoint), "--resume-or-start would begin anew"
    folder = Folder(DiskPlace(tmp_path / "other" / "checkpoints"))
    file = write_file(folder.folder_of(1), DATA, {})
    folder.finish(1, Manifest(1, "0a", "2026-01-01T00:00:00Z", 1, (file,), {}, user={"config": {}}))
    said = refused(newest, tmp_path / "other")
    assert "is no checkpoint of `sherd train`: another program has saved it" in said


def test_a_checkpoint_of_another_model_or_text_is_refused_and_changes_that_reach_the_losses_are_told(tmp_path):
    found = Checkpoint(DiskPlace(tmp_path), manifest())
    found.check_model(Config())
    said = "another model, with width: 128 -> 64, tied: True -> False; use another --out"
    assert said in refused(found.check_model, Config(width=64, tied=False))
    found.check_text("abc", "here")
    assert "another text than here holds now" in refused(found.check_text, "xyz", "here")
    assert found.changes(Config(every=9, mesh="dp=2", micro_batch=1)) == []
    assert found.changes(Config(seed=1, lr=0.5)) == ["lr: 0.002 -> 0.5", "seed: 0 -> 1"]


def names(out):
    return sorted(path.name for path in (out / "checkpoints").iterdir() if path.name not in (".lock", "latest"))


# On two ranks


def small():
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def saver(out, model, optimizer):
    return Saver(out, model, optimizer, "abc", Report())


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
        saving.save(1, Config())
        first = model.weight.detach().clone()
        torch.nn.init.zeros_(model.weight)
        saving.save(2, Config())
    dist.barrier()
    if dist.get_rank() == 0:
        flip_in(out / "checkpoints" / "step-00000002", flip)
    dist.barrier()
    loaded = checkpoint.load(newest(out), model, optimizer)
    first_again = torch.equal(model.weight, first) or dist.get_rank() > 0
    dist.barrier()
    if dist.get_rank() == 0:
        flip_in(out / "checkpoints" / "step-00000001", "-00000.safetensors")
    dist.barrier()
    said = refused(lambda: checkpoint.load(newest(out), model, optimizer))
    return loaded.step, loaded.notes, first_again, said


@pytest.mark.parametrize("flip", [MANIFEST, "-00000.safetensors"])
def test_a_single_bit_changed_is_found_and_the_older_one_taken_while_it_is_whole(world, tmp_path, flip):
    for step, notes, is_first, said in world(2).run(damaged, tmp_path, flip):
        assert step == 1
        (note,) = notes
        assert f"{tmp_path}/checkpoints/step-00000002" in note
        assert flip in note
        assert is_first
        assert "holds no complete checkpoint (step " in said
        assert "step 1: " in said
        assert said.endswith("name another --out")


def refused_on(number, what, out):
    model, optimizer = small()
    real = DiskPlace.write

    def write(self, name, chunks):
        if name.endswith(what) and "step-00000008" in str(self):
            for _ in chunks():
                raise OSError(errno.ENOSPC, "No space left on device", name)
        real(self, name, chunks)

    with mock.patch.object(DiskPlace, "write", write) if dist.get_rank() == number else contextlib.nullcontext():
        return refusal(NotSaved, save_twice, saver(out, model, optimizer), Config())


def save_twice(saver, config):
    with saver as saving:
        saving.save(4, config)
        saving.save(8, config)


@pytest.mark.parametrize(("number", "what"), [(0, ".safetensors"), (1, ".safetensors"), (0, MANIFEST)])
def test_a_disk_full_for_one_rank_is_told_by_all_in_one_line_and_gets_its_space_back(world, tmp_path, number, what):
    for said in world(2).run(refused_on, number, what, tmp_path):
        assert said.startswith(f"the save of step 8 to {tmp_path}/checkpoints/step-00000008 failed on rank {number}: ")
        assert said.endswith(": No space left on device; step 4 is complete, --resume goes on from it")
        assert "\n" not in said
    assert newest(tmp_path).step == 4
    left = list((tmp_path / "checkpoints").glob("step-00000008/*"))
    assert what == MANIFEST or not left
    sweep(tmp_path)
    assert names(tmp_path) == ["step-00000004"]


class Listening(Report):
    def __init__(self):
        super().__init__()
        self.told = []

    def write(self, event, **record):
        self.told.append((event, record["step"]))


def one_save_under_way(out):
    model, optimizer = small()
    report, seen = Listening(), []
    with Saver(out, model, optimizer, "abc", report) as saving:
        saving.save(1, Config())
        seen.append(list(report.told))  # it is told of when it is whole, not before
        torch.nn.init.zeros_(model.weight)
        saving.save(2, Config())
        seen.append(list(report.told))
        saving.settle()
        seen.append(list(report.told))
        saving.save(3, Config())
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
    said = f"cannot write to {tmp_path}: No space left on device; step 4 is complete, --resume goes on from it"
    assert threads(1).run(refusal, NotSaved, metrics_refused, tmp_path) == [said]
