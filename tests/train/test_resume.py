"""A run that goes on repeats what one never stopped does, to the last bit; and its checkpoints may be elsewhere."""

import errno
import os
from unittest import mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from torch import distributed as dist

from sherd.cli.uses import pick
from sherd.cli.words import configure, parse
from sherd.storage.folder import Folder
from sherd.storage.places import Disk
from sherd.train.checkpoint import NotSaved
from sherd.train.config import Config, InputError, assigned
from sherd.train.folder import is_free, sweep
from sherd.train.loop import train
from sherd.train.saved import CHECKPOINTS, newest, place_in, point
from tests.support.refusals import one_line, refusal
from tests.support.suites import part
from tests.train.test_checkpoint import put
from tests.train.test_loop import Recorded, config, trainer_of

FIGURES = ("step", "loss", "gradient_norm", "learning_rate")


def figures(config, out, resume=False, stop_after=None):
    """The figures of each step and each evaluation, as metrics.jsonl has them, without those of time and memory."""
    report, trainer = Recorded(), trainer_of(config)
    if resume:
        trainer.resume(newest(out))
    train(trainer, out, report, lambda: trainer.done + 1 == stop_after)
    steps = [tuple(record[name] for name in FIGURES) for event, record in report.records if event == "step"]
    judged = [(record["step"], record["bits"]) for event, record in report.records if event == "evaluation"]
    return steps, judged


def once_and_again(configs, out):
    found = []
    for number, each in enumerate(configs):
        folder = out / str(number)
        whole = figures(each, folder / "whole")
        first = figures(each, folder / "cut", stop_after=3)
        rest = figures(each, folder / "cut", resume=True)
        found.append((whole, tuple(before + after for before, after in zip(first, rest, strict=True))))
    return found


SHARDED = [
    "",
    "run.async_save=false",
    "shard.placement=flat optimizer.flatten=true run.precision=bf16",
    "shard.strategy=zero1",
    "optimizer.name=muon shard.placement=flat",
]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_is_stopped_goes_on_to_the_last_bit_as_one_that_is_not(world, text, tmp_path, num_ranks):
    usual = {"steps": 6, "save_every": 2, "eval_every": 4, "keep": 1, "sample": 0}
    sharded = part(SHARDED, num_ranks, 2)
    chosen = [Config.of(config(text, **usual).tree(), assigned(words.split())) for words in sharded]
    for found in world(num_ranks).run(once_and_again, chosen, tmp_path):
        for words, (whole, cut) in zip(sharded, found, strict=True):
            assert [step for step, *_ in cut[0]] == list(range(1, 7))
            assert cut == whole, words


def not_written(config, out):
    """What a run says whose rank 1 cannot write the checkpoint of step 4; and how many steps it did."""
    real = Disk.write

    def write(self, name, chunks):
        if "step-00000004" in str(self) and dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, name, chunks)

    report, trainer = Recorded(), trainer_of(config)
    with mock.patch.object(Disk, "write", write), pytest.raises(NotSaved) as caught:
        train(trainer, out, report)
    saved = [record["step"] for event, record in report.records if event == "checkpoint"]
    return str(caught.value), saved, trainer.done


@pytest.mark.parametrize("async_save", [True, False])
def test_a_save_that_fails_ends_the_run_on_all_ranks_and_the_one_before_is_whole(world, text, tmp_path, async_save):
    chosen = config(text, steps=40, save_every=4, async_save=async_save)
    put_before = config(text, steps=2, save_every=2)
    world(2).run(figures, put_before, tmp_path)
    for said, saved, done in world(2).run(not_written, chosen, tmp_path):
        assert said.endswith("rank 1: No space left on device; step 2 is whole, --resume goes on from it")
        assert (saved, 4 <= done <= 8) == ([], True)


# Elsewhere


def elsewhere(config, out):
    """A run whose checkpoints are in an object store, stopped and gone on with."""
    MemoryFileSystem.store.clear()
    if dist.get_rank() == 0:
        point(out, config.run.checkpoints)
    dist.barrier()
    found = figures(config, out, stop_after=3)
    stopped_at = newest(out).step
    rest = figures(config, out, resume=True)
    place = place_in(out)
    answers = [pick(of, best=False).step for of in (str(out), str(place), f"{place}/step-00000006")]
    return found[0] + rest[0], stopped_at, Folder(place).steps(), answers, pick(str(out), best=True).step


def test_checkpoints_go_to_an_object_store_and_the_run_finds_them_there(world, text, tmp_path):
    whole = world(1).run(figures, config(text), tmp_path / "whole")[0]
    out = tmp_path / "run"
    out.mkdir()
    chosen = config(text, checkpoints="memory://bucket/run", keep=2, eval_every=2)
    (found,) = world(1).run(elsewhere, chosen, out)
    steps, stopped_at, kept, answers, best = found
    assert steps == whole[0]
    assert (stopped_at, kept, answers, best) == (3, [6, 4], [6, 6, 6], 6)
    assert sorted(path.name for path in out.iterdir()) == [CHECKPOINTS]
    assert (out / CHECKPOINTS).read_text() == "memory://bucket/run\n"


def test_a_file_url_is_a_folder_that_several_ranks_write_to(world, text, tmp_path):
    url = f"file://{tmp_path}/far"
    world(2).run(figures, config(text, checkpoints=url), tmp_path / "run")
    assert newest(tmp_path / "run", place_in(tmp_path, url)).step == 6
    assert pick(f"{tmp_path}/far", best=False).step == 6
    assert not (tmp_path / "run" / CHECKPOINTS).exists()


@pytest.fixture
def asked(elsewhere):
    return lambda *words: configure(parse(["train", "--data", "text.txt", "--out", "run", *words]))


def moved(tmp_path, step):
    """A checkpoint of a run in `far`, to which `run` points."""
    put(tmp_path / "other", step)
    os.rename(tmp_path / "other" / "checkpoints", tmp_path / "far")
    (tmp_path / "run").mkdir(exist_ok=True)
    point(tmp_path / "run", "far")


def test_a_run_that_goes_on_finds_its_checkpoints_by_the_file_in_its_folder(asked, tmp_path):
    moved(tmp_path, 3)
    chosen, resumed = asked("--resume")
    assert (resumed.step, chosen.run.checkpoints, chosen.run.out) == (3, "far", "run")
    assert chosen.from_anywhere().run.checkpoints == str(tmp_path / "far")
    chosen, resumed = asked("--resume", "run.checkpoints=file://" + str(tmp_path / "far"))
    assert resumed.step == 3
    assert is_free(tmp_path / "run")
    assert sweep(tmp_path / "run") == []


def test_a_new_run_does_not_write_among_the_checkpoints_of_another_one_nor_where_no_package_is_for(asked, tmp_path):
    moved(tmp_path, 3)
    held = "run.checkpoints = 'far' holds step 3 of a run; --resume goes on with it"
    assert held in refusal(InputError, asked, "run.checkpoints=far")
    assert asked("run.checkpoints=farther")[1] is None
    said = "run.checkpoints = 'nowhere://x' cannot be used"
    assert said in one_line(InputError, asked, "run.checkpoints=nowhere://x")


def test_a_run_does_not_begin_anew_beside_its_own_checkpoints(asked, tmp_path):
    put(tmp_path / "run", 3)
    for how in ("--resume", "--resume-or-start"):
        said = refusal(InputError, asked, how, "run.checkpoints=far")
        assert "far holds no checkpoint, but run/checkpoints/step-00000003 is one" in said, how
    said = refusal(InputError, point, tmp_path / "run", "far")
    assert "it is a folder, with checkpoints of before; choose another --out" in said
    # Without run.checkpoints a run that begins anew keeps its own.
    point(tmp_path, "far")
    point(tmp_path, "")
    assert str(place_in(tmp_path)) == str(tmp_path / CHECKPOINTS)
