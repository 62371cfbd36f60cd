"""sherd.load takes what was converted, and what sherd.save has written is converted."""

import pytest
import torch

import sherd
from sherd.tools.convert.formats import convert, open_source
from tests.interchange.checkpoints import assert_same_training, trained
from tests.interchange.test_torch_files import save


@pytest.mark.parametrize("way", ["torch", "dcp"])
def test_sherd_loads_what_was_converted(tmp_path, way):
    model, optimizer = save(tmp_path / "x.pt", "param_names")
    path = tmp_path / "x.pt"
    if way == "dcp":
        convert(open_source(path), tmp_path / "dcp", "dcp")
        path = tmp_path / "dcp"
    convert(open_source(path), tmp_path / "sherd", "sherd")
    again, other = trained(seed=9)
    restored = sherd.load(tmp_path / "sherd", {"model": again, "optimizer": other})
    assert restored.step == 2
    assert_same_training(again, other, model, optimizer)


def test_torch_loads_what_sherd_has_saved(tmp_path):
    model, optimizer = trained()
    sherd.save(tmp_path / "sherd", {"model": model, "optimizer": optimizer}, step=4)
    (note,) = convert(open_source(tmp_path / "sherd"), tmp_path / "x.pt", "torch")
    assert note.startswith("per_rank is left out: ")
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    again, other = trained(seed=9)
    again.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    assert state["step"] == 4
    assert_same_training(again, other, model, optimizer)
