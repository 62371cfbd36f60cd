"""Is a checkpoint whole or none, and is the wrong one refused?"""

import dataclasses
import errno
import json
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from sherd.train import checkpoint, rank
from sherd.train.config import Config, InputError
from sherd.train.manifest import Checkpoint, Manifest, newest


def manifest(step=3, **fields):
    values = {"step": step, "ranks": 2, "config": Config().tree(), "text": "abc", "parameters": "def"}
    return Manifest(**{**values, "files": {"data": 4}, **fields})


def put(out, step, **fields):
    """A checkpoint as `save` leaves it."""
    path = out / "checkpoints" / f"step-{step:08}"
    path.mkdir(parents=True)
    (path / "data").write_bytes(b"1234")
    (path / "manifest.json").write_text(json.dumps(dataclasses.asdict(manifest(step, **fields))))
    return path


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    put(tmp_path, 90)
    path = put(tmp_path, 100)
    found = newest(tmp_path)
    assert (found.path, found.manifest, found.notes) == (path, manifest(100), ())


def break_it(path, how):
    if how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "cut manifest":
        (path / "manifest.json").write_text('{"step": ')
    elif how == "empty manifest":
        (path / "manifest.json").write_text("{}")
    elif how == "missing file":
        (path / "data").unlink()
    elif how == "short file":
        (path / "data").write_bytes(b"12")
    else:
        path.rename(path.with_suffix(".part"))


BREAKS = {
    "no manifest": "manifest.json is missing",
    "cut manifest": "manifest.json is damaged",
    "empty manifest": "manifest.json is damaged",
    "missing file": "data is missing",
    "short file": "data has 2 of 4 bytes",
    "never renamed": "it was never finished",
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_half_written_checkpoint_is_passed_over_with_a_note_for_an_older_whole_one(tmp_path, how):
    old, new = put(tmp_path, 1), put(tmp_path, 2)
    break_it(new, how)
    found = newest(tmp_path)
    assert found.path == old
    assert len(found.notes) == 1
    assert f"half-written ({BREAKS[how]})" in found.notes[0]


@pytest.mark.parametrize("how", BREAKS)
def test_a_half_written_checkpoint_with_nothing_older_is_refused_in_one_line(tmp_path, how):
    break_it(put(tmp_path, 2), how)
    with pytest.raises(InputError, match="no older whole checkpoint; start anew with another --out") as caught:
        newest(tmp_path)
    assert BREAKS[how] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no checkpoint to resume from"):
        newest(tmp_path)


def test_a_checkpoint_of_a_later_format_is_refused(tmp_path):
    put(tmp_path, 1, format=2)
    with pytest.raises(InputError, match="has format 2; this version reads format 1"):
        newest(tmp_path)


def test_a_checkpoint_of_another_model_is_refused_with_the_fields_that_differ(tmp_path):
    found = Checkpoint(tmp_path, manifest())
    found.check_model(Config())
    with pytest.raises(InputError, match=r"another model: model.width is 128 there and 64 here, model.tied is True"):
        found.check_model(Config.of({"model": {"width": 64, "tied": False}}))


def test_a_checkpoint_trained_on_another_text_is_refused(tmp_path):
    found = Checkpoint(tmp_path, manifest())
    found.check_text("abc", "here")
    with pytest.raises(InputError, match="another text than here holds now"):
        found.check_text("xyz", "here")


def test_only_changes_that_reach_the_losses_are_told(tmp_path):
    found = Checkpoint(tmp_path, manifest())
    free = {"out": "elsewhere", "keep": 9, "save_every": 1, "ranks": 2, "sample": 3}
    assert found.changes(Config.of({"run": free})) == []
    assert found.changes(Config.of({"run": {"seed": 1}, "optimizer": {"lr": 0.5}})) == [
        "optimizer.lr: 0.002 -> 0.5",
        "run.seed: 0 -> 1",
    ]


def finish(out, step, keep):
    """What rank 0 does at the end of a save, with `data` in the place of the shards."""
    part = out / "checkpoints" / f"step-{step:08}.part"
    checkpoint._make_room(part)
    (part / "data").write_bytes(b"1234")
    config = Config.of({"run": {"keep": keep}})
    checkpoint._finish(part, manifest(step, config=config.tree()))


def names(out):
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_only_the_last_checkpoints_are_kept(tmp_path):
    for step in range(1, 6):
        finish(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert newest(tmp_path).manifest.step == 5


def test_a_later_half_written_checkpoint_does_not_push_out_a_whole_one(tmp_path):
    put(tmp_path, 1)
    break_it(put(tmp_path, 3), "no manifest")
    finish(tmp_path, 2, keep=1)
    assert newest(tmp_path).manifest.step == 2


def test_a_half_written_checkpoint_in_the_way_is_moved_aside_and_not_overwritten(tmp_path):
    break_it(put(tmp_path, 2), "no manifest")
    finish(tmp_path, 2, keep=1)
    aside = [name for name in names(tmp_path) if ".half-" in name]
    assert len(aside) == 1
    assert (tmp_path / "checkpoints" / aside[0] / "data").read_bytes() == b"1234"
    assert newest(tmp_path).manifest.step == 2


def test_what_an_interrupted_save_left_is_cleared_by_the_next_of_that_step(tmp_path):
    (tmp_path / "checkpoints" / "step-00000001.part").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001.part" / "left over").write_text("x")
    finish(tmp_path, 1, keep=1)
    assert newest(tmp_path).manifest.files == {"data": 4}


def test_a_checkpoint_from_before_there_were_checksums_is_read(tmp_path):
    path = put(tmp_path, 3)
    values = json.loads((path / "manifest.json").read_text())
    del values["sums"]
    (path / "manifest.json").write_text(json.dumps(values))
    assert newest(tmp_path).manifest == manifest(3)


# On two ranks


def small():
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def save(out, step):
    return checkpoint.save(out, *small(), step, Config(), "abc")


def found_damage(out, flip):
    save(out, 1)
    path = save(out, 2)
    sound = checkpoint.damage(newest(out))
    if dist.get_rank() == 0:
        damaged = bytearray((path / flip).read_bytes())
        damaged[len(damaged) // 2] ^= 1
        (path / flip).write_bytes(damaged)
    dist.barrier()
    reason = checkpoint.damage(newest(out))
    return sound, reason, newest(out, {path: reason})


@pytest.mark.parametrize("flip", [".metadata", "__0_0.distcp"])
def test_a_single_bit_changed_since_it_was_written_is_found_and_the_older_one_taken(world, tmp_path, flip):
    for sound, reason, found in world(2).run(found_damage, tmp_path, flip):
        assert sound == ""
        assert reason == f"{flip} is not what was written"
        assert found.manifest.step == 1
        assert found.notes == (f"{tmp_path}/checkpoints/step-00000002 is damaged ({reason})",)


def full(*args):
    """As torch does it: the file cannot take the bytes, and the zip archive complains of that."""
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    finally:
        raise RuntimeError("unexpected pos 704 vs 598")


def refused_on(number, what, out):
    save(out, 4)
    place = {"shards": (checkpoint.FileSystemWriter, "write_data"), "manifest": (checkpoint.json, "dump")}[what]
    raises = full if what == "shards" else mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    patched = mock.patch.object(*place, raises) if dist.get_rank() == number else mock.MagicMock()
    with pytest.raises(checkpoint.NotSaved) as caught, patched:
        save(out, 8)
    return str(caught.value)


@pytest.mark.parametrize(("number", "what"), [(0, "shards"), (1, "shards"), (0, "manifest")])
def test_a_disk_that_is_full_for_one_rank_is_told_by_all_in_one_line_and_gets_its_space_back(
    world, tmp_path, number, what
):
    for said in world(2).run(refused_on, number, what, tmp_path):
        assert said == (
            f"cannot save step 8 to {tmp_path}: No space left on device; step 4 is whole, --resume goes on from it"
        )
    assert names(tmp_path) == ["step-00000004"]


def metrics_refused(out):
    put(out, 4)
    with pytest.raises(checkpoint.NotSaved) as caught, rank._report(out, None, quiet=False):
        raise OSError(errno.ENOSPC, "No space left on device")
    return str(caught.value)


def test_a_disk_that_takes_no_more_metrics_is_told_in_one_line_too(world, tmp_path):
    said = world(1).run(metrics_refused, tmp_path)
    assert said == [f"cannot write to {tmp_path}: No space left on device; step 4 is whole, --resume goes on from it"]
