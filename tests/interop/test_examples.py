"""The examples for other packages run; that for Ray: tests/interop/test_ray.py."""

import re

import pytest

from tests.test_examples import losses, run


@pytest.mark.slow
def test_a_trainer_of_lightning_goes_on_from_a_folder_of_shards(tmp_path):
    first, second = run("lightning_trainer.py", tmp_path)
    trained, went_on = losses(first)
    assert went_on == pytest.approx(trained, rel=1e-4)
    held = [int(re.search(r"holds (\d+) of", text)[1]) for text in (first, second)]
    assert sum(held) == int(re.search(r"of (\d+) parameters", first)[1])
