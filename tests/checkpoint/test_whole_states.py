"""Full state dicts go out of every layout and into it, from all ranks and from rank 0 alone."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from sherd import RaggedDTensor
from tests.checkpoint.layouts import (
    PLACEMENTS,
    RUNS,
    built,
    differences,
    model_in,
    optimizer_of,
    state_of,
    train,
    whole,
)

BEFORE, AFTER = range(1), range(1, 2)


def trained_plain():
    """A plain model after a step: what it is, what torch says it is, and the losses that follow."""
    model = built()
    optimizer = optimizer_of(model)
    train(model, optimizer, BEFORE)
    options = StateDictOptions(full_state_dict=True)
    expected = whole(state_of(model, optimizer))
    values = whole(get_model_state_dict(model, options=options))
    states = get_optimizer_state_dict(model, optimizer, options=options)
    states["state"] = whole(states["state"])
    return expected, values, states, train(model, optimizer, AFTER)


def trained_from(plain, layout, options, to_empty=False):
    """A model of other weights that was given whole states: how it differs, and its losses."""
    expected, values, states, losses = plain
    values, states = copy.deepcopy((values, states))
    if options.broadcast_from_rank0 and dist.get_rank():
        values, states = {}, {}
    if to_empty:
        with torch.device("meta"):
            model = model_in(layout, model=built(1))
        model.to_empty(device="cpu")
    else:
        model = model_in(layout, seed=1)
    optimizer = optimizer_of(model)
    set_model_state_dict(model, values, options=options)
    set_optimizer_state_dict(model, optimizer, states, options=options)
    case = f"{layout} on {dist.get_world_size()}, {options}"
    wrong = differences(state_of(model, optimizer), expected, case)
    found = torch.tensor(train(model, optimizer, AFTER))
    return wrong if torch.allclose(found, torch.tensor(losses), rtol=1e-4) else [*wrong, f"{case}: {found}, {losses}"]


def load_whole_states(layouts, onto_meta):
    """From all ranks, then from rank 0 alone; into models on meta from the source that is named."""
    wrong, plain = [], trained_plain()
    for layout in layouts:
        for source in ("all", "rank 0"):
            to_empty = source == onto_meta
            options = StateDictOptions(
                full_state_dict=True, broadcast_from_rank0=source == "rank 0", cpu_offload=to_empty
            )
            wrong += trained_from(plain, layout, options, to_empty)
    return wrong


@pytest.mark.parametrize(("num_ranks", "onto_meta"), [(2, "all"), (4, "rank 0")])
def test_whole_states_load_from_all_ranks_and_from_rank_0_alone(world, num_ranks, onto_meta):
    assert world(num_ranks).run(load_whole_states, RUNS, onto_meta, timeout=120) == [[]] * num_ranks


@pytest.mark.parametrize(("num_ranks", "onto_meta"), [(1, "all"), (3, "rank 0"), (3, "all")])
def test_whole_states_load_into_chunks_too(world, num_ranks, onto_meta):
    assert world(num_ranks).run(load_whole_states, ("rows", "columns"), onto_meta) == [[]] * num_ranks


def whole_states_out():
    """They are to the bit what gathering each tensor gives, on every rank or on rank 0 alone."""
    for layout in PLACEMENTS:
        model = model_in(layout)
        optimizer = optimizer_of(model)
        train(model, optimizer, BEFORE)
        expected = whole(state_of(model, optimizer))
        for offload in (False, True):
            options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
            values = get_model_state_dict(model, options=options)
            states = get_optimizer_state_dict(model, optimizer, options=options)
            if offload and dist.get_rank():
                assert (values, states) == ({}, {})
                continue
            assert not any(isinstance(each, DTensor) for each in values.values())
            # Tied weights stand under both names in a state dict, once among parameters.
            assert differences({"model": values, "optimizer": states["state"]}, expected, layout) == []


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_whole_states_come_out_of_every_layout(world, num_ranks):
    world(num_ranks).run(whole_states_out)


def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])


def save_replicated(folder, shape):
    """All layouts on a mesh with replicas; rank 0 notes what they hold."""
    mesh = mesh_of(shape)
    trained = {layout: model_in(layout, mesh=mesh) for layout in PLACEMENTS}
    optimizers = {layout: optimizer_of(model) for layout, model in trained.items()}
    for layout, model in trained.items():
        train(model, optimizers[layout], BEFORE)
    states = {layout: dcp_state_of(model, optimizers[layout]) for layout, model in trained.items()}
    dcp.save(states, checkpoint_id=folder)
    expected = {layout: whole(state_of(model, optimizers[layout])) for layout, model in trained.items()}
    if dist.get_rank() == 0:
        torch.save(expected, f"{folder}/expected.pt")


def load_replicated(folder, shape):
    """Each layout takes what the one before it has saved."""
    expected, names = torch.load(f"{folder}/expected.pt"), list(PLACEMENTS)
    mesh = mesh_of(shape)
    models = [model_in(names[index - 1], seed=1, mesh=mesh) for index in range(len(names))]
    kept = {name: (model, optimizer_of(model)) for name, model in zip(names, models, strict=True)}
    states = {name: dcp_state_of(*each) for name, each in kept.items()}
    dcp.load(states, checkpoint_id=folder)
    for name, (model, optimizer) in kept.items():
        set_model_state_dict(model, states[name]["model"])
        set_optimizer_state_dict(model, optimizer, states[name]["optimizer"])
        assert differences(state_of(model, optimizer), expected[name], name) == []


def dcp_state_of(model, optimizer):
    values, states = get_state_dict(model, optimizer)
    return {"model": values, "optimizer": states}


def test_replicas_save_once_and_load(world, tmp_path):
    world(4).run(save_replicated, str(tmp_path / "replicated"), (2, 2))
    world(3).run(load_replicated, str(tmp_path / "replicated"), (3,))
    world(3).run(save_replicated, str(tmp_path / "line"), (3,))
    world(4).run(load_replicated, str(tmp_path / "line"), (2, 2))


def flattened_states(folder):
    """With `flatten_optimizer_state_dict`, as pipelines need it, from each layout into another."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    names = list(PLACEMENTS)
    for index, layout in enumerate(names):
        kept = []
        for name, seed in ((layout, 0), (names[index - 1], 1)):
            model = model_in(name, seed)
            optimizer = optimizer_of(model)
            train(model, optimizer, BEFORE)
            kept.append((model, optimizer, *get_state_dict(model, optimizer, options=options)))
        (model, optimizer, values, states), (other, others_optimizer, others_values, others_states) = kept
        dcp.save({"model": values, "optimizer": states}, checkpoint_id=f"{folder}/{index}")
        dcp.load({"model": others_values, "optimizer": others_states}, checkpoint_id=f"{folder}/{index}")
        set_model_state_dict(other, others_values, options=options)
        set_optimizer_state_dict(other, others_optimizer, others_states, options=options)
        assert differences(state_of(other, others_optimizer), whole(state_of(model, optimizer)), layout) == []


def test_flattened_optimizer_states_go_from_layout_to_layout(world, tmp_path):
    world(2).run(flattened_states, str(tmp_path))


def kinds_in_state_dicts():
    for layout in RUNS:
        model = model_in(layout)
        optimizer = optimizer_of(model)
        train(model, optimizer, BEFORE)
        values, states = get_state_dict(model, optimizer)
        assert {type(each) for name, each in values.items() if name != "seen"} == {RaggedDTensor}
        assert {type(each["exp_avg"]) for each in states["state"].values()} == {RaggedDTensor}


def test_a_sharded_state_dict_holds_ragged_tensors(world):
    world(2).run(kinds_in_state_dicts)
