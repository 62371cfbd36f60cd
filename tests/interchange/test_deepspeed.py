"""What DeepSpeed 0.19.8 saved on two ranks is read by name. fixtures/make_deepspeed.py has saved it."""

import shutil
from pathlib import Path

import pytest
import torch

from sherd.errors import CheckpointError
from sherd.layout.boxes import Box
from sherd.tools.convert.contents import NamedTensor
from sherd.tools.convert.formats import convert, open_source
from sherd.tools.convert.state_trees import in_memory
from tests.interchange.checkpoints import bytes_of, model_tensor, require_read_or_refused
from tests.support.refusals import refusal

FIXTURES = Path(__file__).parent / "fixtures" / "deepspeed"
STAGES = ("zero1", "zero2", "zero3")


def truth(name):
    held = torch.load(FIXTURES / name.replace("universal", "zero") / "truth.pt")
    states = torch.load(FIXTURES / "zero3" / "truth.pt")  # the same in all stages
    return {parameter: {**states[parameter], **each} for parameter, each in held.items()}


@pytest.mark.parametrize("name", [*STAGES, "universal2", "universal3"])
def test_parameters_and_states_are_those_that_deepspeed_gathers(name):
    source = open_source(FIXTURES / name)
    assert source.format == ("universal" if "universal" in name else "deepspeed")
    assert source.contents.step == 3
    for parameter, held in truth(name).items():
        if "frozen" in parameter and (name == "universal3" or "fp32" not in held):
            continue  # DeepSpeed's own conversion leaves them out
        for key, expected in held.items():
            found = in_memory(
                NamedTensor(source, f"model/{parameter}" if key == "fp32" else f"optimizer/{parameter}/{key}")
            )
            assert torch.equal(found.float(), expected.view(found.shape)), (parameter, key)
            assert found.shape == {"a.weight": (7, 5), "b.weight": (3, 7)}.get(parameter, found.shape)
    assert torch.equal(in_memory(NamedTensor(source, "model/seen")), torch.zeros(2))


@pytest.mark.parametrize("name", STAGES)
def test_groups_and_steps_are_by_name(name):
    optimizer = open_source(FIXTURES / name).contents.values["optimizer"]
    decayed, other = optimizer["param_groups"]
    assert (decayed["params"], decayed["weight_decay"]) == (["a.weight", "b.weight"], 0.1)
    assert (other["params"], other["weight_decay"], other["lr"]) == (["a.bias"], 0.0, 0.01)
    state = {name: {"step": kept["step"]} for name, kept in optimizer["state"].items()}
    assert state == {each: {"step": {"$scalar": ["F32", 3.0]}} for each in ("a.weight", "b.weight", "a.bias")}


@pytest.mark.parametrize("name", STAGES)
def test_any_part_is_read(name):
    source = open_source(FIXTURES / name)
    whole = model_tensor(source, "a.weight")
    for most in (1, 8, 64, 1 << 20):
        for box in (Box((2, 1), (4, 3)), Box((0, 0), (7, 5)), Box((6, 4), (1, 1)), Box((1, 0), (0, 5))):
            read = torch.empty(box.sizes)
            source.read_into("model/a.weight", box, read, most)
            assert torch.equal(read, whole[box.within(Box((0, 0), (7, 5)))]), (most, box)


def test_it_becomes_a_checkpoint_of_sherd_and_is_not_written(tmp_path):
    source = open_source(FIXTURES / "zero3")
    convert(source, tmp_path / "out", "sherd")
    back = open_source(tmp_path / "out")
    assert bytes_of(back) == bytes_of(source)
    assert back.contents.values == source.contents.values
    with pytest.raises(CheckpointError, match="is read alone"):
        convert(source, tmp_path / "other", "deepspeed")


def test_a_rank_whose_file_is_missing_is_named(tmp_path):
    for name in STAGES:
        for rank, said in ((0, "files of the ranks [1]"), (1, "was saved by 2 ranks, and has files of 1")):
            folder = tmp_path / f"{name} {rank}"
            shutil.copytree(FIXTURES / name, folder)
            next(folder.glob(f"global_step3/*rank_{rank}_mp_rank_00_optim_states.pt")).unlink()
            assert said in refusal(CheckpointError, open_source, folder), (name, rank)


@pytest.mark.parametrize("name", STAGES)
def test_a_broken_file_is_an_error_of_ours(tmp_path, name):
    shutil.copytree(FIXTURES / name, tmp_path / "x")
    require_read_or_refused(tmp_path / "x", sorted((tmp_path / "x" / "global_step3").iterdir()), 60)
