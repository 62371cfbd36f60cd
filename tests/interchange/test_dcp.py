"""Folders that torch's own FSDP and DDP save are read by name, and torch reads those that are written here."""

import argparse
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from sherd.errors import CheckpointError
from sherd.tools.convert.formats import convert, open_source
from sherd.tools.convert.mapped import Mapped
from sherd.tools.convert.state_trees import in_memory
from tests.interchange.checkpoints import model_tensor, rules_in
from tests.support import checkpoints
from tests.support.comparing import assert_same, whole

pytestmark = pytest.mark.filterwarnings("ignore")


def make(kind):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if kind == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer):
    torch.manual_seed(5)
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(kind, folder, flat, nested):
    model, optimizer = make(kind)
    step(model, optimizer)
    values, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    state = {"model": values, "optimizer": states} if nested else {**values, "optimizer": states}
    dcp.save(state, checkpoint_id=folder)
    if kind == "fsdp1":  # torch crashes where it makes whole states of it on a CPU
        model, optimizer = make("plain")
        step(model, optimizer)
    whole = get_state_dict(model, optimizer, options=WHOLE)
    return whole if dist.get_rank() == 0 else None


def require_same(source, values, states):
    for name, tensor in values.items():
        torch.testing.assert_close(model_tensor(source, name), tensor)
    held = source.contents.values["optimizer"]
    for name, state in states["state"].items():
        for key, tensor in state.items():
            if tensor.dim():
                torch.testing.assert_close(in_memory(source.tensor(f"optimizer/{name}/{key}")), tensor)
            else:
                assert held["state"][name][key] == {"$scalar": ["F32", 1.0]}
    (group,) = held["param_groups"]
    assert group["lr"] == 0.01
    assert sorted(group["params"]) == sorted(states["param_groups"][0]["params"])


@pytest.mark.pairs
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "as torchtitan"])
@pytest.mark.parametrize("flat", [False, True], ids=["nested optimizer", "flattened optimizer"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "ddp"])
def test_what_torch_saves_on_two_ranks_is_read_by_name(world, tmp_path, kind, flat, nested):
    values, states = world(2).run(save, kind, tmp_path / "dcp", flat, nested)[0]
    source = open_source(tmp_path / "dcp")
    assert source.format == "dcp"
    require_same(source, values, states)
    if kind != "ddp":
        assert source.pieces()["model/0.weight"] == 2
    convert(source, tmp_path / "sherd", "sherd", most_bytes=16)
    require_same(open_source(tmp_path / "sherd"), values, states)


def load(kind, folder):
    model, optimizer = make(kind)
    checkpoints.load(model, optimizer, folder)
    whole = get_state_dict(model, optimizer, options=WHOLE)
    return whole if dist.get_rank() == 0 else None


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_written_loads_with_torch_into_fsdp2(world, tmp_path, num_ranks):
    values, states = world(2).run(save, "fsdp2", tmp_path / "a", False, True)[0]
    convert(open_source(tmp_path / "a"), tmp_path / "sherd", "sherd")
    convert(open_source(tmp_path / "sherd"), tmp_path / "b", "dcp")
    found, found_states = world(num_ranks).run(load, "fsdp2", tmp_path / "b")[0]
    assert_same(found, dict(values))
    assert_same(found_states["state"], states["state"])


def test_what_is_written_is_read_by_torchs_own_conversion_to_a_file(tmp_path):
    state = {"model": {"w": torch.arange(6.0)}, "optimizer": {"state": {"w": {"step": 3}}, "param_groups": [{"lr": 1}]}}
    torch.save(state, tmp_path / "x.pt")
    convert(open_source(tmp_path / "x.pt"), tmp_path / "dcp", "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "y.pt")
    assert_same(torch.load(tmp_path / "y.pt"), state)


def test_values_of_classes_that_are_not_known_are_left_out_and_named(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=1), "iteration": 40}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = open_source(tmp_path / "dcp")
    (note,) = convert(source, tmp_path / "out", "sherd")
    assert note.startswith("args is left out: ")
    assert "names argparse.Namespace, which is not among the names" in note
    assert (source.contents.step, list(source.contents.values)) == (40, ["model"])


def test_numbers_are_of_the_order_of_the_state_dict_whatever_the_metadata_begins_with(tmp_path):
    """Ranks save parts of it, and `.metadata` lists what rank 0 has saved first. All shapes are the same here."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "untrained", no_dist=True)
    untrained = open_source(tmp_path / "untrained").contents.values["optimizer"]
    names = [f"{i}.weight" for i in range(4)]
    assert untrained["state"] == {}
    assert [(group["params"], group["lr"]) for group in untrained["param_groups"]] == [(names, 0.1)]
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    dcp.save({**state, "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata = dict(reversed(metadata.state_dict_metadata.items()))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    source = open_source(tmp_path)
    assert source.contents.values["optimizer"]["param_groups"][0]["params"] == names
    for name, parameter in model.named_parameters():
        assert torch.equal(in_memory(source.tensor(f"optimizer/{name}/exp_avg")), optimizer.state[parameter]["exp_avg"])


def test_megatron_fsdp_has_settings_by_parameter_and_wrappers_in_names(tmp_path):
    """The form that Megatron-LM's documents and tests give for `--ckpt-format fsdp_dtensor`, with its own wrappers, for
    which it needs a GPU; test_megatron.py reads what was saved without them."""
    names = [f"module.module.decoder.layers.{i}.linear.weight" for i in range(3)]
    settings = [{"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.1, "weight_decay": 0.1}]
    state = {
        "model": {name: torch.full((2,), float(i)) for i, name in enumerate(names)},
        "optimizer": {
            "state": {name: {"exp_avg": torch.full((2,), i + 10.0)} for i, name in enumerate(names)},
            "param_to_group_meta": dict(zip(names, settings, strict=True)),
        },
        "iteration": 25,
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    rules = rules_in(tmp_path, {"rename": "module.module.{*rest}", "to": "{*rest}"})
    source = Mapped(open_source(tmp_path / "dcp"), rules)
    short = [name.removeprefix("module.module.") for name in names]
    assert source.contents.step == 25
    for i, name in enumerate(short):
        assert model_tensor(source, name).tolist() == [i, i]
        assert in_memory(source.tensor(f"optimizer/{name}/exp_avg")).tolist() == [i + 10, i + 10]
    assert source.contents.values["optimizer"]["param_groups"] == [
        {"lr": 0.1, "weight_decay": 0.1, "params": [short[0], short[2]]},
        {"lr": 0.1, "weight_decay": 0.0, "params": [short[1]]},
    ]


def save_safetensors(folder):
    model, _ = make("fsdp2")
    dcp.save(model.state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))
    return whole(dict(model.state_dict()))


def test_pieces_in_safetensors_files_of_ranks_are_joined(world, tmp_path):
    expected = world(2).run(save_safetensors, tmp_path / "hf")[0]
    source = open_source(tmp_path / "hf")
    assert source.format == "hf"
    assert source.pieces()["model/0.weight"] == 2
    assert set(source.contents.tensors) == {f"model/{name}" for name in expected}
    assert_same({name: model_tensor(source, name) for name in expected}, expected)
    next(iter((tmp_path / "hf").glob("shard-00001*"))).unlink()
    with pytest.raises(CheckpointError, match=r"elements of"):
        open_source(tmp_path / "hf")
