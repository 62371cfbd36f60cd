"""A pretraining goes on where it stopped, sample by sample, also on another number of ranks."""

import pytest

from tests.recipes.pages import assert_shows_memory_of_one_rank, losses, on_a_rank, printed_as_shown

RECIPE, SMALL = "recipes/pretrain.py", ("--width", "16", "--heads", "2", "--context", "16", "--batch", "4")


def test_it_prints_what_its_page_shows(run, tmp_path):
    found = losses(printed_as_shown("pretrain", tmp_path, run))
    assert found[-1] < found[0]
    one = tmp_path / "one"
    one.mkdir()
    assert_shows_memory_of_one_rank("pretrain", run(RECIPE, one, "--steps", "2", num_ranks=1)[0])


def trained(run, folder, *words, num_ranks=2):
    folder.mkdir(exist_ok=True)
    return losses(run(RECIPE, folder, *SMALL, "--save-every", "10", *words, num_ranks=num_ranks)[0])


def test_it_goes_on_as_if_it_had_not_stopped_in_another_epoch_and_on_one_rank(run, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    tokens = bytes(number % 7 for number in range(2 * 17 * 30))
    (data / "a.bin").write_bytes(tokens)
    (data / "b.bin").write_bytes(tokens[:500])  # with a rest that is no window
    words = "--data", str(data), "--words", "2000"
    unbroken = trained(run, tmp_path / "whole", "--steps", "40", *words)
    assert trained(run, tmp_path / "parts", "--steps", "20", *words) == unbroken[:2]
    assert trained(run, tmp_path / "parts", "--steps", "30", *words) == unbroken[2:3]
    ended = trained(run, tmp_path / "parts", "--steps", "40", *words, num_ranks=1)
    assert ended == pytest.approx(unbroken[3:], abs=2e-3)


def refusal(folder):
    with pytest.raises(SystemExit) as raised:
        on_a_rank(RECIPE, folder, ("--data", folder))
    return str(raised.value)


def test_a_folder_without_tokens_is_refused_in_one_line(world, tmp_path):
    (tmp_path / "short.bin").write_bytes(bytes(2 * 64))
    (said,) = world(1).run(refusal, str(tmp_path))
    assert said.endswith(f"--data {tmp_path}: no *.bin there has 65 tokens; write them from your texts\n")
