"""A run that goes on repeats what one never stopped does, to the last bit."""

import errno
from unittest import mock

import pytest
from torch import distributed as dist

from sherd.storage.places import DiskPlace
from sherd.train.checkpoint import NotSaved
from sherd.train.config import Config, assigned
from sherd.train.loop import train
from sherd.train.saved import folder_in, newest
from tests.support.suites import part
from tests.train.test_loop import Recorded, config, trainer_of

FIGURES = ("step", "loss", "gradient_norm", "learning_rate")


def figures(config, out, resume=False, stop_after=None):
    """The figures of each step and each evaluation, as metrics.jsonl has them, without those of time and memory."""
    report, trainer = Recorded(), trainer_of(config)
    if resume:
        trainer.resume(newest(folder_in(out)))
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


SHARDED = ["", "placement=flat precision=bf16", "strategy=zero1", "optimizer=muon placement=flat"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_is_stopped_goes_on_to_the_last_bit_as_one_that_is_not(world, text, tmp_path, num_ranks):
    sharded = part(SHARDED, num_ranks, 2)
    chosen = [Config.of(config(text).tree(), assigned(words.split())) for words in sharded]
    for found in world(num_ranks).run(once_and_again, chosen, tmp_path):
        for words, (whole, cut) in zip(sharded, found, strict=True):
            assert [step for step, *_ in cut[0]] == list(range(1, 7))
            assert cut == whole, words


def not_written(config, out):
    """What a run says whose rank 1 cannot write the checkpoint of step 4; and how many steps it did."""
    real = DiskPlace.write

    def write(self, name, chunks):
        if "step-00000004" in str(self) and dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, name, chunks)

    report, trainer = Recorded(), trainer_of(config)
    with mock.patch.object(DiskPlace, "write", write), pytest.raises(NotSaved) as caught:
        train(trainer, out, report)
    saved = [record["step"] for event, record in report.records if event == "checkpoint"]
    return str(caught.value), saved, trainer.done


def test_a_save_that_fails_ends_the_run_on_all_ranks_and_the_one_before_is_whole(world, text, tmp_path):
    chosen = config(text, steps=40, every=4)
    put_before = config(text, steps=2)
    world(2).run(figures, put_before, tmp_path)
    for said, saved, done in world(2).run(not_written, chosen, tmp_path):
        assert said.endswith("rank 1: No space left on device; step 2 is complete, --resume goes on from it")
        assert (saved, 4 <= done <= 8) == ([], True)


REPRODUCIBLE = ["", "placement=flat precision=bf16", "strategy=zero1 micro_batch=1", "optimizer=muon"]


@pytest.mark.values
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize("words", REPRODUCIBLE)
def test_reproducible_figures_are_those_of_any_number_of_ranks_also_after_a_resume(
    world, text, tmp_path, words, before, after
):
    """Losses, norms and bits of the held-out text, to the last bit."""
    chosen = Config.of(config(text).tree(), assigned(["batch=24", *words.split(), "reproducible=true"]))
    expected = world(1).run(figures, chosen, tmp_path / "one")[0]
    first = world(before).run(figures, chosen, tmp_path / "cut", stop_after=3)[0]
    for rest in world(after).run(figures, chosen, tmp_path / "cut", resume=True):
        assert tuple(begun + others for begun, others in zip(first, rest, strict=True)) == expected
