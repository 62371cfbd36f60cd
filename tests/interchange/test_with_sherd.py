"""Does sherd.load take what was converted, and is what sherd.save has written converted?"""

import pytest
import torch

import sherd
from sherd.interchange.converting import convert
from sherd.interchange.formats import open_source
from tests.interchange.checkpoints import trained
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
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert all(
            torch.equal(optimizer.state[a][key], other.state[b][key]) for key in ("exp_avg", "exp_avg_sq", "step")
        )
    assert [group["weight_decay"] for group in other.param_groups] == [0.1, 0.0]


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
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["exp_avg"], other.state[b]["exp_avg"])
