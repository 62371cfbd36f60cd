"""Files of torch.save are read as torch reads them, whatever the strides, and optimizers get their names."""

import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sherd.errors import CheckpointError
from sherd.layout.boxes import Grid, whole
from sherd.tools.convert.formats import convert, open_source
from sherd.tools.convert.of_torch import opened
from sherd.tools.convert.state_trees import in_memory
from tests.interchange.checkpoints import CLASSES, assert_same_training, boxes_in, bytes_of, put, random_tensor, trained
from tests.support.refusals import refusal
from tests.support.suites import examples


@settings(max_examples=examples(60))
@given(st.data())
def test_any_part_of_any_view_is_read(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    tensor = random_tensor(tuple(shape), data.draw(st.sampled_from(CLASSES)))
    order = data.draw(st.permutations(range(len(shape))))
    tensor = tensor.permute(order)
    for dim in range(tensor.dim()):
        start = data.draw(st.integers(0, tensor.shape[dim] - 1))
        tensor = tensor.narrow(dim, start, data.draw(st.integers(1, tensor.shape[dim] - start)))
    if data.draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    path = tmp_path_factory.mktemp("view") / "x.pt"
    torch.save({"w": tensor}, path)
    box = data.draw(boxes_in(tensor.shape))
    read = torch.empty(box.sizes, dtype=tensor.dtype)
    opened(path).tree["w"].read_into(box, read, data.draw(st.sampled_from([1, 20, 1 << 20])))
    expected = tensor[box.within(whole(tuple(tensor.shape)))].clone(memory_format=torch.contiguous_format)
    if expected.numel():
        assert torch.equal(read.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


def save(path, form):
    model, optimizer = trained()
    state = optimizer.state_dict()
    names = {parameter: name for name, parameter in model.named_parameters()}
    if form == "named":
        by_number = [names[p] for group in optimizer.param_groups for p in group["params"]]
        groups = [{**g, "params": [by_number[n] for n in g["params"]]} for g in state["param_groups"]]
        state = {"state": {by_number[n]: each for n, each in state["state"].items()}, "param_groups": groups}
    if form == "param_names":
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
            saved["param_names"] = [names[p] for p in group["params"]]
    torch.save({"model": model.state_dict(), "optimizer": state, "step": 2}, path)
    return model, optimizer


@pytest.mark.parametrize("form", ["named", "param_names"])
def test_named_optimizer_states_are_read_and_load_again(tmp_path, form):
    model, optimizer = save(tmp_path / "x.pt", form)
    source = open_source(tmp_path / "x.pt")
    assert source.contents.step == 2
    assert source.contents.aliases == {"model/out.weight": "model/inner.weight"}
    convert(source, tmp_path / "sherd", "sherd")
    convert(open_source(tmp_path / "sherd"), tmp_path / "y.pt", "torch")
    assert bytes_of(open_source(tmp_path / "y.pt")) == bytes_of(source)
    state = torch.load(tmp_path / "y.pt", weights_only=True, mmap=True)
    again, other = trained(seed=9)
    again.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    assert_same_training(again, other, model, optimizer)
    assert state["model"]["out.weight"].data_ptr() == state["model"]["inner.weight"].data_ptr()


def save_numbered(path, words, order):
    """A model and an optimizer whose states have numbers, of the parameters in that order."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(order(list(model.parameters())))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(dict(zip(words, (model.state_dict(), optimizer.state_dict()), strict=True)), path)
    return model, optimizer


def test_numbers_are_the_models_order_and_refused_where_that_cannot_be(tmp_path):
    path = tmp_path / "x.pt"
    model, optimizer = save_numbered(path, ("state_dict", "optim"), list)
    source = open_source(path)
    for name, parameter in model.named_parameters():
        found = in_memory(source.tensor(f"optimizer/{name}/exp_avg"))
        assert torch.equal(found, optimizer.state[parameter]["exp_avg"])
    save_numbered(path, ("model", "optimizer"), reversed)
    assert "in another order" in refusal(CheckpointError, open_source, path), "shapes do not fit"
    save(path, "numbered")
    said = "which number is which cannot be known; save the optimizer's state by name"
    assert said in refusal(CheckpointError, open_source, path), "of two groups"


def test_a_bare_state_dict_is_a_model_and_a_file_without_one_or_of_the_old_form_is_refused(tmp_path):
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "x.pt")
    source = open_source(tmp_path / "x.pt")
    assert {*source.contents.tensors, *source.contents.aliases} == {f"model/{name}" for name in model.state_dict()}
    assert source.contents.values == {"model": {"kind": "module"}}
    for state in (3, {}, {"a": 1}, [torch.ones(2)]):
        torch.save(state, tmp_path / "x.pt")
        assert "x.pt holds" in refusal(CheckpointError, open_source, tmp_path / "x.pt"), state
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert "save it again" in refusal(CheckpointError, open_source, tmp_path / "x.pt")


def test_tensors_lie_where_they_can_be_mapped(tmp_path):
    named = {f"model/{name}": (torch.ones(size), Grid(0)) for name, size in {"a": 1, "b": 70, "long" * 20: 3}.items()}
    put(tmp_path / "in", named)
    convert(open_source(tmp_path / "in"), tmp_path / "x.pt", "torch")
    tree = opened(tmp_path / "x.pt").tree
    assert [tensor.memory[1] % 64 for tensor in tree["model"].values()] == [0, 0, 0]
    assert zipfile.ZipFile(tmp_path / "x.pt").testzip() is None
