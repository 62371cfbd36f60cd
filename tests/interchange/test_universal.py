"""Does a universal checkpoint that sherd has written hold what it was made of, and is what it cannot hold refused?

That DeepSpeed loads it and trains on is shown by fixtures/load_universal.py.
"""

import contextlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

import sherd
from sherd.errors import CheckpointError
from sherd.interchange import of_universal
from sherd.interchange.converting import convert
from sherd.interchange.formats import open_source
from sherd.interchange.mapping import rules_of
from sherd.interchange.state_trees import tree_of
from sherd.layout.boxes import Grid
from sherd.train import cli
from tests.interchange.checkpoints import bytes_of, put, trained
from tests.interchange.test_deepspeed import FIXTURES

ZERO3 = "under ZeRO-3 DeepSpeed takes the settings of the first group for all: docs/interchange.md"


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


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "universal2", "universal3"])
@pytest.mark.parametrize("most", [12, 1 << 20])
def test_what_deepspeed_has_saved_comes_back_with_the_same_bits(tmp_path, name, most):
    source = open_source(FIXTURES / name)
    back, notes = written(source, tmp_path / "out", most_bytes=most)
    assert bytes_of(back) == bytes_of(source)
    assert (back.contents.values, back.contents.step, notes) == (source.contents.values, 3, [ZERO3])


def test_files_are_those_that_deepspeed_writes_and_torch_loads(tmp_path):
    written(open_source(FIXTURES / "zero2"), tmp_path / "out")
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
    for name, value in model.state_dict().items():  # a tied weight and buffers, too
        assert torch.equal(again.state_dict()[name], value)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert all(torch.equal(optimizer.state[a][key], other.state[b][key]) for key in optimizer.state[a])
    assert [group["weight_decay"] for group in other.param_groups] == [0.1, 0.0]


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
@pytest.mark.parametrize("most", [2, 8, 1 << 20])
def test_narrower_tensors_are_widened_without_loss(tmp_path, dtype, most):
    source = checkpoint(tmp_path / "in", {"w": adam(dtype), "b": adam(dtype)}, dtype)
    back, notes = written(source, tmp_path / "out", most_bytes=most)
    assert notes == []
    found, expected = bytes_of(back), bytes_of(source)
    assert found.keys() == expected.keys()
    for name, (_, shape, raw) in expected.items():
        widened = torch.frombuffer(bytearray(raw), dtype=dtype).float()
        assert found[name] == ("F32", shape, bytes(widened.view(torch.uint8).tolist())), name


INFINITE = {"$float": "inf"}
REFUSED = {
    "rows": (
        {"w": adam(exp_avg_row=torch.rand(3)), "b": adam(exp_avg_row=torch.rand(3))},
        "exp_avg_row of w has",
    ),
    "dtype": ({"w": adam(torch.float64), "b": adam(torch.float64)}, "exp_avg of w is of F64"),
    "number": ({"w": adam(ema=0.5), "b": adam(ema=0.5)}, "ema of w is 0.5"),
    "list": ({"w": adam(history=[1, 2]), "b": adam(history=[1, 2])}, r"history of w is \[1, 2\]"),
    "keys": (
        {"w": adam(), "b": adam(max_exp_avg_sq=torch.rand(3, 2))},
        "keeps exp_avg, exp_avg_sq, max_exp",
    ),
    "steps": ({"w": adam(), "b": adam(step=1.0)}, "made 3 steps of w, and 1 of b"),
    "infinite": ({"w": adam(step=INFINITE), "b": adam(step=INFINITE)}, "step of w is no number"),
    "fp32": ({"w": adam(fp32=torch.rand(3, 2)), "b": adam()}, "has a state fp32 of w"),
    "no state": ({}, "has no state of any parameter"),
    "unknown": ({"w": adam(), "b": adam(), "c": adam()}, "in none of its groups: c"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_state_that_it_cannot_hold_is_refused_by_name(tmp_path, what):
    states, message = REFUSED[what]
    source = checkpoint(tmp_path / "in", states)
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "out", "universal")
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_parameters_that_fp32_cannot_hold_are_refused_by_name(tmp_path, dtype):
    with pytest.raises(CheckpointError, match=r"fp32 of w is of [FI]64"):
        convert(checkpoint(tmp_path / "in", {"w": adam(), "b": adam()}, dtype), tmp_path / "out", "universal")


@pytest.mark.parametrize("name", ["universal2", "universal3"])
def test_a_broken_file_is_an_error_of_ours(tmp_path, name):
    shutil.copytree(FIXTURES / name, tmp_path / "x")
    random.seed(1)
    for file in sorted((tmp_path / "x").rglob("*.pt")):
        whole = file.read_bytes()
        for _ in range(30):
            broken = bytearray(whole)
            broken[random.randrange(len(whole))] = random.randrange(256)
            file.write_bytes(broken)
            with contextlib.suppress(CheckpointError):
                bytes_of(open_source(tmp_path / "x"))
        file.write_bytes(whole)


def test_a_model_alone_is_refused(tmp_path):
    source = checkpoint(tmp_path / "in", {"w": adam(), "b": adam()})
    with pytest.raises(CheckpointError, match=r"here are 1 and 0: .* write a model alone as hf or torch"):
        convert(source, tmp_path / "out", "universal", model_only=True)


@pytest.mark.parametrize("name", ["../../w", "..", "a\0b"])
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    source = checkpoint(tmp_path / "in", {"w": adam(), "b": adam()})
    (tmp_path / "rules.json").write_text(json.dumps({"rules": [{"rename": "w", "to": name}]}))
    with pytest.raises(CheckpointError, match="is the name of a folder or file here"):
        convert(source, tmp_path / "out", "universal", rules_of(str(tmp_path / "rules.json"), {}))


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


@pytest.mark.parametrize("step", [None, 8])
def test_steps_that_groups_count_and_the_step_of_the_checkpoint_are_kept(tmp_path, step):
    states = {name: {key: each for key, each in adam().items() if key != "step"} for name in ("w", "b")}
    source = checkpoint(tmp_path / "in", states, settings={"step": 5})
    back, notes = written(source, tmp_path / "out", step=step)
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


@pytest.mark.parametrize("named", ["", "..", "a/b", "gone"])
def test_a_name_in_latest_that_leads_elsewhere_is_no_checkpoint(tmp_path, named):
    (tmp_path / "latest_universal").write_text(named)
    assert not of_universal.is_at(tmp_path)
    with pytest.raises(CheckpointError, match="holds no universal checkpoint"):
        open_source(tmp_path, "universal")
