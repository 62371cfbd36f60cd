"""What Megatron-FSDP 0.6.1 saved on two ranks is read by name, and loaded into a plain model. fixtures/make_megatron.py
has saved it, and says what of it is Megatron's own code. That Megatron-FSDP loads what is written here is shown by
fixtures/load_megatron.py."""

from pathlib import Path

import pytest
import torch

import sherd
from sherd.tools.convert.formats import convert, open_source
from sherd.tools.convert.mapped import Mapped
from sherd.tools.convert.state_trees import in_memory
from tests.interchange.checkpoints import rules_in
from tests.support.comparing import assert_same

FIXTURES = Path(__file__).parent / "fixtures"
FORMS = ("numbered", "named", "core")
WRAPPER = "module."


class AsSaved(torch.nn.Module):
    def __init__(self, form):
        super().__init__()
        self.a, self.b = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False)
        self.last = torch.nn.Linear(3, 3).requires_grad_(form == "numbered")
        if form != "numbered":
            self.register_buffer("seen", torch.ones(2))


def truth(form):
    held = torch.load(FIXTURES / "fsdp_dtensor" / form / "truth.pt")
    return held["model"], held["optimizer"]


def opened(form):
    return open_source(FIXTURES / "fsdp_dtensor" / form)


@pytest.mark.parametrize("form", FORMS)
def test_parameters_states_groups_and_steps_are_those_of_a_plain_run_by_name(form):
    source = opened(form)
    values, states = truth(form)
    assert (source.format, source.contents.step) == ("dcp", 2)
    assert not source.notes()
    expected = {f"model/{WRAPPER}{name}": value for name, value in values.items()}
    for name, state in states.items():
        expected |= {f"optimizer/{WRAPPER}{name}/{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}
    found = {name: in_memory(source.tensor(name)) for name in source.contents.tensors}
    assert_same(found, expected, rtol=1e-5, atol=1e-8)
    optimizer = source.contents.values["optimizer"]
    groups = [
        ([each.removeprefix(WRAPPER) for each in g["params"]], g["weight_decay"]) for g in optimizer["param_groups"]
    ]
    if form == "numbered":
        assert groups == [(["a.weight", "a.bias", "b.weight", "last.weight", "last.bias"], 0.01)]
    else:
        assert groups == [(["a.weight", "b.weight"], 0.1), (["a.bias"], 0.0)]
    assert all(state["step"] == {"$scalar": ["F32", 3.0]} for state in optimizer["state"].values())
    assert {group["lr"] for group in optimizer["param_groups"]} == {0.01}


@pytest.mark.parametrize("form", FORMS)
def test_a_plain_model_loads_it(form, tmp_path):
    rules = rules_in(tmp_path, {"rename": "module.{*rest}", "to": "{*rest}"})
    convert(Mapped(opened(form), rules), tmp_path / "out", "sherd")
    model = AsSaved(form)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights, biases = ([p for name, p in trained.items() if name.endswith(end)] for end in ("weight", "bias"))
    groups = [{"params": list(trained.values())}] if form == "numbered" else [{"params": weights}, {"params": biases}]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    assert sherd.load(tmp_path / "out", {"model": model, "optimizer": optimizer}).step == 2
    values, states = truth(form)
    found = model.state_dict()
    assert_same({name: found[name] for name in values}, values, rtol=1e-5, atol=1e-8)
    for name, parameter in trained.items():
        found = {key: optimizer.state[parameter][key] for key in states[name]}
        assert_same(found, states[name], name, rtol=1e-5, atol=1e-8)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01] * len(groups)
