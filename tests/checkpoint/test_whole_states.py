"""Full state dicts go out of every layout and into it, from all ranks and from rank 0 alone."""

import copy
import itertools

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
from torch.distributed.tensor import DTensor

from sherd import RaggedDTensor
from tests.checkpoint.layouts import (
    PLACEMENTS,
    RUNS,
    assert_held,
    built,
    model_in,
    optimizer_of,
    state_of,
    train,
    trained_in,
)
from tests.support.comparing import assert_same, whole
from tests.support.ranks.bodies import on_processes, on_threads

AFTER = range(1, 2)


def trained_plain():
    """A plain model after a step: what it is, what torch says it is, and the losses that follow."""
    model, optimizer = trained_in("plain")
    options = StateDictOptions(full_state_dict=True)
    expected = whole(state_of(model, optimizer))
    values = whole(get_model_state_dict(model, options=options))
    states = get_optimizer_state_dict(model, optimizer, options=options)
    states["state"] = whole(states["state"])
    return expected, values, states, train(model, optimizer, AFTER)


def trained_from(plain, layout, options, to_empty=False):
    """A model of other weights that was given whole states holds them, and goes on with the same losses."""
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
    assert_held(state_of(model, optimizer), expected, case)
    assert_same(train(model, optimizer, AFTER), losses, case, rtol=1e-4)


CHUNKS, HALVES = ("rows", "columns"), (RUNS[:2], RUNS[2:])


@pytest.mark.parametrize(
    ("num_ranks", "onto_meta", "layouts"),
    [
        *((2, "all", half) for half in HALVES),
        *((4, "rank 0", half) for half in HALVES),
        *((1, "all", CHUNKS), (3, "rank 0", CHUNKS), (3, "all", CHUNKS)),
    ],
)
@on_processes()
def test_whole_states_load_from_all_ranks_and_from_rank_0_alone(onto_meta, layouts):
    """Into models on meta from the source that is named."""
    plain = trained_plain()
    for layout, source in itertools.product(layouts, ("all", "rank 0")):
        to_empty, from_first = source == onto_meta, source == "rank 0"
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first, cpu_offload=to_empty)
        trained_from(plain, layout, options, to_empty)


@pytest.mark.parametrize("num_ranks", [1, 3])
@on_threads()
def test_state_dicts_come_out_of_every_layout():
    """Whole ones are to the bit what gathering each tensor gives, on every rank or on rank 0 alone; sharded ones hold
    ragged tensors where the parameters are."""
    for layout in PLACEMENTS:
        model, optimizer = trained_in(layout)
        if layout in RUNS:
            values, states = get_state_dict(model, optimizer)
            assert {type(each) for name, each in values.items() if name != "seen"} == {RaggedDTensor}
            assert {type(each["exp_avg"]) for each in states["state"].values()} == {RaggedDTensor}
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
            assert_same({"model": values, "optimizer": states["state"]}, expected, layout)


@pytest.mark.parametrize("number", range(len(PLACEMENTS)))
@on_threads(2)
def test_flattened_optimizer_states_go_from_layout_to_layout(tmp_path, number):
    """With `flatten_optimizer_state_dict`, as pipelines need it."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    names, kept = list(PLACEMENTS), []
    for name, seed in ((names[number], 0), (names[number - 1], 1)):
        model, optimizer = trained_in(name, seed)
        kept.append((model, optimizer, *get_state_dict(model, optimizer, options=options)))
    (model, optimizer, values, states), (other, others_optimizer, others_values, others_states) = kept
    dcp.save({"model": values, "optimizer": states}, checkpoint_id=str(tmp_path))
    dcp.load({"model": others_values, "optimizer": others_states}, checkpoint_id=str(tmp_path))
    set_model_state_dict(other, others_values, options=options)
    set_optimizer_state_dict(other, others_optimizer, others_states, options=options)
    assert_held(state_of(other, others_optimizer), whole(state_of(model, optimizer)), names[number])
