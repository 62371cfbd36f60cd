"""A run's best checkpoint is kept and found again, whatever crashes, and never mistaken for another."""

import errno
import json
import math
import shutil
from unittest import mock

import pytest

from sherd.cli.uses import pick
from sherd.train import loop
from sherd.train.config import Config, InputError
from sherd.train.judging import Score
from sherd.train.saved import Best, newest, place_in, read_best, write_best
from tests.train.test_checkpoint import break_it, finish, names, put
from tests.train.test_loop import TREE, config, run


def best(step, bits=2.0, judged="a"):
    return Best(step, bits, judged)


def test_the_best_outlives_those_that_come_after_it(tmp_path):
    for step in range(1, 6):
        finish(tmp_path, step, keep=2)
        if step == 2:
            assert write_best(place_in(tmp_path), best(2)) is None
    assert names(tmp_path) == ["best.json", "step-00000002", "step-00000004", "step-00000005"]
    assert pick(str(tmp_path), best=True).step == 2
    assert pick(str(tmp_path), best=False).step == 5
    write_best(place_in(tmp_path), best(5))
    finish(tmp_path, 6, keep=2)
    assert names(tmp_path) == ["best.json", "step-00000005", "step-00000006"]


def test_one_that_is_gone_half_written_or_judged_by_other_text_is_beaten_by_any(tmp_path):
    path = put(tmp_path, 2)
    assert best(4, 1.9).beats(best(2), place_in(tmp_path))
    assert not best(4, 2.0).beats(best(2), place_in(tmp_path))
    assert not best(4, 2.1).beats(best(2), place_in(tmp_path))
    assert best(4, 2.1, judged="b").beats(best(2), place_in(tmp_path))
    assert best(4, 2.1).beats(best(3), place_in(tmp_path))
    assert best(4, 2.1).beats(None, place_in(tmp_path))
    assert not best(4, math.nan).beats(None, place_in(tmp_path))
    break_it(path, "short file")
    assert best(4, 2.1).beats(best(2), place_in(tmp_path))


def test_a_damaged_note_is_as_none_and_one_that_cannot_be_written_leaves_the_one_before(tmp_path):
    put(tmp_path, 2)
    for damaged in ("", "[1]", '{"step": 3}', "null"):
        (tmp_path / "checkpoints" / "best.json").write_text(damaged)
        assert read_best(place_in(tmp_path)) is None, damaged
        with pytest.raises(InputError, match="has kept no best checkpoint"):
            pick(str(tmp_path), best=True)
    write_best(place_in(tmp_path), best(2))
    with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        assert write_best(place_in(tmp_path), best(3)) == "No space left on device"
    assert read_best(place_in(tmp_path)) == best(2)


SCORES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0, 5: 6.0, 6: 7.0, 7: 8.0}


def run_judged(config, out, **how):
    """A run whose evaluations come out as in SCORES."""
    trainer = loop.Trainer
    judged = mock.patch.object(trainer, "judge", lambda self, num=None: Score(SCORES[self.done]))
    with judged, mock.patch.object(loop, "lzma_bits", return_value=None):
        run(config, out, **how)
    return names(out)


EACH = {"steps": 7, "eval_every": 1, "save_every": 5, "keep": 1}
KEPT = ["best.json", "step-00000004", "step-00000007"]


def test_what_no_evaluation_before_was_better_than_is_saved_and_kept(world, text, tmp_path):
    assert world(2).run(run_judged, config(text, **EACH), tmp_path)[0] == KEPT
    assert read_best(place_in(tmp_path)).bits == pytest.approx(2.0 / math.log(2))


@pytest.mark.parametrize("off", [{"keep_best": False}, {"save_every": 0}], ids=["keep_best", "save_every"])
def test_without_keep_best_or_saves_between_only_the_last_is_there(world, text, tmp_path, off):
    assert Config.of(TREE).run.keep_best
    assert world(2).run(run_judged, config(text, **{**EACH, **off}), tmp_path)[0] == ["step-00000007"]


@pytest.mark.parametrize("stop_after", [2, 4, 6])
def test_a_run_that_was_stopped_and_went_on_keeps_the_same_best(world, text, tmp_path, stop_after):
    world(2).run(run_judged, config(text, **EACH), tmp_path, stop_after=stop_after)
    assert newest(tmp_path).step == stop_after
    # 2 and 4 are the best so far, but were stopped before they were judged.
    assert world(2).run(run_judged, config(text, **EACH), tmp_path, resume=True)[0] == KEPT


def test_a_crash_between_the_save_and_its_note_loses_nothing(world, text, tmp_path):
    world(2).run(run_judged, config(text, **EACH), tmp_path, stop_after=5)
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder / "step-00000005")
    (folder / "best.json").write_text(json.dumps({"step": 2, "bits": 3.0 / math.log(2), "judged": "gone"}))
    assert newest(tmp_path).step == 4
    assert world(2).run(run_judged, config(text, **EACH), tmp_path, resume=True)[0] == KEPT
    assert read_best(place_in(tmp_path)).step == 4
