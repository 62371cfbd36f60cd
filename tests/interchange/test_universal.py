"""A universal checkpoint that sherd has written holds what it was made of, and what it cannot hold is refused.

That DeepSpeed loads it and trains on is shown by fixtures/load_universal.py.
"""

import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch

import sherd
from sherd.cli import main as cli
from sherd.errors import CheckpointError
from sherd.layout.boxes import Grid
from sherd.tools.convert import of_universal
from sherd.tools.convert.formats import convert, open_source
from sherd.tools.convert.state_trees import in_memory, tree_of
from tests.interchange.checkpoints import (
    assert_same_training,
    bytes_of,
    put,
    require_read_or_refused,
    rules_in,
    trained,
)
from tests.support.refusals import refusal

FIXTURES = Path(__file__).parent / "fixtures" / "deepspeed"
ZERO3 = "under ZeRO-3 DeepSpeed takes the settings of the first group for all: docs/do/convert.md"


def written(source, folder, **options):
    notes = convert(source, folder, "universal", **options)
    return open_source(folder), notes


def sherd_train(rank_folder, layout):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    model[2].requires_grad_(False)
    sherd.fully_shard(model, placement=layout)
    groups = [{"params": [model[0].weight], "weight_decay": 0.1}, {"params": [model[0].bias, *model[1].parameters()]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(3):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sherd.save(rank_folder, {"model": model, "optimizer": optimizer}, step=3)


@pytest.mark.parametrize("layout", [None, sherd.Flat()], ids=["Shard(0)", "Flat"])
def test_what_two_ranks_have_saved_comes_back_with_the_same_bits(world, tmp_path, layout):
    world(2).run(sherd_train, tmp_path / "in", layout)
    source = open_source(tmp_path / "in")
    back, notes = written(source, tmp_path / "out")
    assert [note.split()[0] for note in notes] == ["per_rank", "under"]
    expected = bytes_of(source)
    assert bytes_of(back) == {name: each for name, each in expected.items() if not name.startswith("per_rank/")}
    found, held = tree_of(back.contents), tree_of(source.contents)
    assert {name: found[name] for name in ("optimizer", "step")} == {name: held[name] for name in ("optimizer", "step")}
    untrained = {"1.running_mean", "1.running_var", "1.num_batches_tracked", "2.weight", "2.bias"}
    folder = tmp_path / "out" / "global_step3_universal"
    assert set(torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)["module"]) == untrained
    assert {each.name for each in (folder / "zero").iterdir() if each.is_dir()}.isdisjoint(untrained)


@pytest.mark.parametrize("name", ["universal2", "universal3"])
def test_parameters_and_states_are_those_that_deepspeed_gathers(name):
    """What DeepSpeed 0.19.8 saved on two ranks, and has made of it. fixtures/make_deepspeed.py did that."""
    source = open_source(FIXTURES / name)
    assert (source.format, source.contents.step) == ("universal", 3)
    held, states = (torch.load(FIXTURES / f"truth{stage}.pt") for stage in (name[-1], "3"))
    for parameter, fp32 in held.items():
        if "frozen" in parameter and (name == "universal3" or "fp32" not in fp32):
            continue  # DeepSpeed's own conversion leaves them out
        for key, expected in (states[parameter] | fp32).items():
            where = f"model/{parameter}" if key == "fp32" else f"optimizer/{parameter}/{key}"
            found = in_memory(source.tensor(where))
            assert torch.equal(found.float(), expected.view(found.shape)), (parameter, key)
            assert found.shape == {"a.weight": (7, 5), "b.weight": (3, 7)}.get(parameter, found.shape)
    assert torch.equal(in_memory(source.tensor("model/seen")), torch.zeros(2))


def test_what_ranks_of_deepspeed_save_is_refused_with_the_script_that_makes_it_universal(tmp_path):
    for names in (
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"),
    ):
        folder = tmp_path / names[0] / "global_step3"
        folder.mkdir(parents=True)
        (folder.parent / "latest").write_text("global_step3")
        for name in names:
            torch.save({}, folder / name)
        for path, format in itertools.product((folder, folder.parent), (None, "universal")):
            said = refusal(CheckpointError, open_source, path, format)
            script = f"python -m deepspeed.checkpoint.ds_to_universal --input_folder {folder} --output_folder"
            assert script in said, (path, format)


@pytest.mark.parametrize("name", ["universal2", "universal3"])
def test_what_deepspeed_has_saved_comes_back_with_the_same_bits(tmp_path, name):
    source = open_source(FIXTURES / name)
    for most in (12, 1 << 20):
        back, notes = written(source, tmp_path / str(most), most_bytes=most)
        assert bytes_of(back) == bytes_of(source)
        assert (back.contents.values, back.contents.step, notes) == (source.contents.values, 3, [ZERO3])


def test_files_are_those_that_deepspeed_writes_and_torch_loads(tmp_path):
    written(open_source(FIXTURES / "universal2"), tmp_path / "out")
    assert (tmp_path / "out" / "latest_universal").read_text() == "global_step3_universal"
    ours, theirs = tmp_path / "out" / "global_step3_universal", FIXTURES / "universal2"
    for name in ("a.weight", "a.bias", "b.weight"):
        for file in sorted((theirs / "zero" / name).iterdir()):
            expected, found = (torch.load(each / "zero" / name / file.name) for each in (theirs, ours))
            if file.name != "step.pt":
                assert found.keys() == expected.keys()
                expected, found = expected["param"], found["param"]
            assert torch.equal(found, expected)
            assert found.dtype == expected.dtype
    common = torch.load(ours / "zero" / "optimizer_state.pt", weights_only=True)
    assert [group["params"] for group in common["param_groups"]] == [[0], [1]]
    assert common["optimizer_state_dict"] == {"state": {0: {"step": 3.0}}, "param_groups": common["param_groups"]}
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        states = torch.load(ours / file, weights_only=True)
        assert [list(group) for group in states["param_shapes"]] == [["a.weight", "b.weight"], ["a.bias"]]
        assert (states["global_steps"], states["skipped_steps"], states["mp_world_size"]) == (3, 0, 1)


def test_the_command_writes_it_and_reads_it(tmp_path):
    model, optimizer = trained()
    sherd.save(tmp_path / "in", {"model": model, "optimizer": optimizer}, step=2)
    for target, to in (("universal", "universal"), ("back", "sherd")):
        source = tmp_path / ("in" if to == "universal" else "universal")
        assert cli.main(["convert", str(source), str(tmp_path / target), "--to", to]) == 0
    again, other = trained(seed=9)
    assert sherd.load(tmp_path / "back", {"model": again, "optimizer": other}).step == 2
    assert_same_training(again, other, model, optimizer)


def checkpoint(folder, states, dtype=torch.float32, settings=None, item="optimizer", shape=(3, 2)):
    """A checkpoint with the parameters "w" and "b" in one group, and with `states`: {parameter: {key: value}}."""
    named = {f"model/{name}": (torch.randn(shape).to(dtype), Grid(0)) for name in ("w", "b")}
    kept = {}
    for name, held in states.items():
        kept[name] = {}
        for key, value in held.items():
            tensor = isinstance(value, torch.Tensor) and value.dim()
            if tensor:
                named[f"{item}/{name}/{key}"] = (value, Grid(0))
            scalar = {"$scalar": ["F32", value]} if key == "step" else value
            kept[name][key] = {"$tensor": f"{item}/{name}/{key}"} if tensor else scalar
    groups = [{"lr": 0.1, "params": ["w", "b"], **(settings or {})}]
    values = {"model": {"kind": "module"}, item: {"kind": "optimizer", "param_groups": groups, "state": kept}}
    return open_source(put(folder, named, values=values))


def adam(dtype=torch.float32, step=3.0, **others):
    return {"step": step, "exp_avg": torch.randn(3, 2).to(dtype), "exp_avg_sq": torch.rand(3, 2).to(dtype), **others}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_narrower_tensors_are_widened_without_loss(tmp_path, dtype):
    source = checkpoint(tmp_path / "in", {"w": adam(dtype), "b": adam(dtype)}, dtype)
    expected = bytes_of(source)
    for most in (2, 8, 1 << 20):
        back, notes = written(source, tmp_path / str(most), most_bytes=most)
        assert notes == []
        found = bytes_of(back)
        assert found.keys() == expected.keys()
        for name, (_, shape, raw) in expected.items():
            widened = torch.frombuffer(bytearray(raw), dtype=dtype).float()
            assert found[name] == ("F32", shape, bytes(widened.view(torch.uint8).tolist())), (name, most)


INFINITE = {"$float": "inf"}


def both(**others):
    """The states of two parameters of Adam, each with these others."""
    return {"w": adam(**others), "b": adam(**others)}


REFUSED = {
    "rows": (both(exp_avg_row=torch.rand(3)), "exp_avg_row of w has"),
    "dtype": (both(dtype=torch.float64), "exp_avg of w is of F64"),
    "number": (both(ema=0.5), "ema of w is 0.5"),
    "list": (both(history=[1, 2]), "history of w is [1, 2]"),
    "keys": ({"w": adam(), "b": adam(max_exp_avg_sq=torch.rand(3, 2))}, "keeps exp_avg, exp_avg_sq, max_exp"),
    "steps": ({"w": adam(), "b": adam(step=1.0)}, "made 3 steps of w, and 1 of b"),
    "infinite": (both(step=INFINITE), "step of w is no number"),
    "fp32": ({"w": adam(fp32=torch.rand(3, 2)), "b": adam()}, "has a state fp32 of w"),
    "no state": ({}, "has no state of any parameter"),
    "unknown": ({**both(), "c": adam()}, "in none of its groups: c"),
}


def test_state_that_it_cannot_hold_is_refused_by_name(tmp_path):
    for what, (states, said) in REFUSED.items():
        source = checkpoint(tmp_path / what, states)
        assert said in refusal(CheckpointError, convert, source, tmp_path / "out", "universal"), what
    for dtype, said in ((torch.float64, "fp32 of w is of F64"), (torch.int64, "fp32 of w is of I64")):
        source = checkpoint(tmp_path / said, both(), dtype)
        assert said in refusal(CheckpointError, convert, source, tmp_path / "out", "universal")
    source = checkpoint(tmp_path / "alone", both())
    said = refusal(CheckpointError, convert, source, tmp_path / "out", "universal", model_only=True)
    assert "here are 1 and 0: " in said
    assert " write a model alone as hf or torch" in said
    for name in ("../../w", "..", "a\0b"):
        rules = rules_in(tmp_path, {"rename": "w", "to": name})
        said = refusal(CheckpointError, convert, source, tmp_path / "out", "universal", rules)
        assert "is the name of a folder or file here" in said, name
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["universal2", "universal3"])
def test_a_broken_file_is_an_error_of_ours(tmp_path, name):
    shutil.copytree(FIXTURES / name, tmp_path / "x")
    require_read_or_refused(tmp_path / "x", sorted((tmp_path / "x").rglob("*.pt")), 30)


def test_states_of_other_optimizers_are_for_zero_1_and_2(tmp_path):
    states = {name: {"momentum_buffer": torch.randn(3, 2)} for name in ("w", "b")}
    source = checkpoint(tmp_path / "in", states)
    back, notes = written(source, tmp_path / "out")
    assert notes == ["it is for ZeRO-1 and 2 alone: under ZeRO-3 DeepSpeed loads Adam's states, not momentum_buffer"]
    assert not list((tmp_path / "out").rglob("zero_pp_rank_0*"))
    assert bytes_of(back) == bytes_of(source)
    assert back.contents.values == source.contents.values


def test_a_parameter_without_state_is_written_as_one_that_is_not_trained(tmp_path):
    source = checkpoint(tmp_path / "in", {"w": adam()})
    back, notes = written(source, tmp_path / "out")
    assert notes == ["b: without state, so DeepSpeed cannot train them from here"]
    assert bytes_of(back) == bytes_of(source)
    assert back.contents.values["optimizer"]["param_groups"] == [{"lr": 0.1, "params": ["w"]}]


def test_steps_that_groups_count_and_the_step_of_the_checkpoint_are_kept(tmp_path):
    states = {name: {key: each for key, each in adam().items() if key != "step"} for name in ("w", "b")}
    source = checkpoint(tmp_path / "in", states, settings={"step": 5})
    for step in (None, 8):
        back, notes = written(source, tmp_path / str(step), step=step)
        assert (notes, back.contents.step) == ([], step or 7)
        assert {kept["step"] for kept in back.contents.values["optimizer"]["state"].values()} == {5}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux lists open files")
def test_a_file_is_open_only_while_it_is_read(tmp_path):
    """Of a large model there are more files than a process may hold open."""
    shutil.copytree(FIXTURES / "universal2", tmp_path / "in")
    source = open_source(tmp_path / "in")
    held = [(Path("/proc/self/fd") / each).resolve() for each in os.listdir("/proc/self/fd")]
    assert [each.name for each in held if each.is_relative_to(tmp_path)] == ["mp_rank_00_model_states.pt"]
    source.close()


def test_a_name_in_latest_that_leads_elsewhere_is_no_checkpoint(tmp_path):
    for named in ("", "..", "a/b", "gone"):
        (tmp_path / "latest_universal").write_text(named)
        assert not of_universal.is_at(tmp_path), named
        said = refusal(CheckpointError, open_source, tmp_path, "universal")
        assert "holds no universal checkpoint" in said, named
