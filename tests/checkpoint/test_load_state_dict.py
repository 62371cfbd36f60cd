"""`load_state_dict` takes unsharded tensors and tensors of any other layout, and files of one rank come back."""

import io
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from sherd import FullyShardedDataParallel, fully_shard
from sherd.errors import SherdError, WriteBackError
from tests.checkpoint.layouts import (
    LAYOUTS,
    PLACEMENTS,
    RUNS,
    WIDTH,
    Odd,
    Stack,
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
from tests.support.refusals import refusal

FIRST, LATER = range(1), range(1, 2)


@pytest.mark.parametrize(("num_ranks", "assign"), [(3, False), (2, True)], ids=["copy", "assign"])
@on_threads()
def test_a_state_dict_of_any_layout_loads_into_any(assign):
    """Each state to models in each layout after a step, but for those of the same layout, which are new; some train on
    as the model that it was of."""
    used = {layout: trained_in(layout, seed=1)[0] for layout in PLACEMENTS}
    for at, source in enumerate(LAYOUTS):
        model, _ = trained_in(source)
        expected, state = whole(model.state_dict()), model.state_dict()
        losses = {}
        for turn, layout in enumerate(PLACEMENTS):
            case = f"{source} -> {layout}"
            target = model_in(layout, seed=1) if layout == source else used[layout]
            result = target.load_state_dict(state, assign=assign)
            assert (result.missing_keys, result.unexpected_keys) == ([], []), case
            assert_held(target.state_dict(), expected, case)
            assert all(isinstance(each, DTensor) for each in target.parameters()), case
            assert target.head.weight is target.embed.weight, case
            # Training takes most of the time: each layout goes on from two others, and into each go two.
            if (at - turn) % len(LAYOUTS) in (0, 1):
                losses[case] = train(target, optimizer_of(target), LATER)
        assert_same(losses, dict.fromkeys(losses, train(model, optimizer_of(model), LATER)), rtol=1e-4)


@on_threads(2)
def test_missing_names_keep_their_values_and_are_told_and_another_shape_is_refused_by_name():
    for layout, assign in itertools.product(RUNS, (False, True)):
        model = model_in(layout)
        before = whole(model.state_dict())
        values = whole(built(1).state_dict())
        for wrong in (torch.zeros(3, 4), torch.zeros(()), model_in(layout).blocks[0].cube.detach()):
            with pytest.raises((RuntimeError, ValueError), match=r"blocks\.0\.thin"):
                model.load_state_dict(before | {"blocks.0.thin": wrong})
        assert_held(model.state_dict(), before, layout)
        values["stranger"] = values.pop("blocks.0.cube")
        values.pop("blocks.0.gain")
        with pytest.raises(RuntimeError, match=r"blocks\.0\.cube"):
            model_in(layout).load_state_dict(values)
        result = model.load_state_dict(values, strict=False, assign=assign)
        assert sorted(result.missing_keys) == ["blocks.0.cube", "blocks.0.gain"]
        assert result.unexpected_keys == ["stranger"]
        kept = {name: before[name] for name in result.missing_keys}
        del values["stranger"]
        assert_held(model.state_dict(), values | kept, layout)
        train(model, optimizer_of(model), FIRST)


@on_processes(2)  # which rank 0 sends to; without the refusal, some take rows of others and some wait
def test_values_of_another_shape_from_rank_0_are_refused_on_all_ranks_by_name():
    wrong = {"blocks.0.cube": (5, 2, 2), "blocks.0.thin": (1,), "embed.weight": (12, 6)}
    wrapped = FullyShardedDataParallel(built(), device_id=torch.device("cpu"), use_orig_params=True)
    for model in (*map(model_in, PLACEMENTS), wrapped):
        before = whole(model.state_dict())
        for strict, (name, shape) in itertools.product((True, False), wrong.items()):
            given = {**built(1).state_dict(), name: torch.zeros(shape)} if dist.get_rank() == 0 else {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
            said = refusal(WriteBackError, set_model_state_dict, model, given, options=options)
            assert f"{name}: rank 0 sends a tensor of shape {shape}" in said, (strict, said)
        assert_same(whole(model.state_dict())["blocks.0.cube"], before["blocks.0.cube"])


@on_processes(2)
def test_optimizer_state_of_another_shape_is_refused_on_all_ranks_however_it_comes():
    ways = {way: dict.fromkeys(way.split(), True) for way in (FULL, f"{FULL} broadcast_from_rank0", FLATTENED, "")}
    plain = Stack(nn.Linear(WIDTH, WIDTH))
    wrapped = FullyShardedDataParallel(plain, device_id=torch.device("cpu"), use_orig_params=False)
    for model, (way, chosen) in itertools.product((*map(model_in, PLACEMENTS), wrapped), ways.items()):
        optimizer, options = torch.optim.Adam(model.parameters()), StateDictOptions(**chosen)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        wrong = torch.zeros(12, WIDTH) if FULL in way else model_of_12().embed.weight.detach()
        if FLATTENED in way:
            state["state.embed.weight.exp_avg"] = wrong
        else:
            state["state"]["embed.weight"] = {**state["state"]["embed.weight"], "exp_avg": wrong}
        given = {} if "rank0" in way and dist.get_rank() else state
        said = refusal(SherdError, set_optimizer_state_dict, model, optimizer, given, options=options)
        assert "embed.weight" in said, (way, said)
        assert "(12, 6)" in said, (way, said)


FULL, FLATTENED = "full_state_dict", "flatten_optimizer_state_dict"


def model_of_12():
    model = built()
    model.embed = model.head = nn.Embedding(12, WIDTH)
    return fully_shard(model)


@pytest.mark.filterwarnings("ignore:a sharded tensor is pickled")
@pytest.mark.parametrize("weights_only", [True, False], ids="weights_only_{}".format)
@on_threads(3)
def test_shards_survive_a_file_of_their_own_on_each_rank(tmp_path, weights_only):
    """Each rank saves its shards with `torch.save`, and a model of the same layout takes them."""
    for layout in RUNS:
        model, optimizer = trained_in(layout)
        path = f"{tmp_path}/{layout}.{dist.get_rank()}.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        expected = whole(state_of(model, optimizer))
        losses = train(model, optimizer, LATER)
        found, other = torch.load(path, weights_only=weights_only), model_in(layout, seed=1)
        others = optimizer_of(other)
        other.load_state_dict(found["model"])
        others.load_state_dict(found["optimizer"])
        assert_held(state_of(other, others), expected, layout)
        torch.testing.assert_close(train(other, others, LATER), losses, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:a sharded tensor is pickled")
@on_threads(2)
def test_a_saved_shard_takes_no_neighbours_along():
    """A shard's file holds that shard and not the buffer that it is a view of."""
    for layout in ("flat", "blocks", "whole"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        fully_shard(model, **PLACEMENTS[layout])
        file = io.BytesIO()
        torch.save(model[0].weight, file)
        assert 0 < file.tell() - model[0].weight.to_local().numel() * 4 < 6000, layout


@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
@on_processes(3)
def test_a_model_without_memory_takes_whole_values(assign):
    plain = built(3)
    expected = whole(plain.state_dict())
    for layout in PLACEMENTS:
        with torch.device("meta"):
            model = built()
        model_in(layout, model=model)
        if not assign:
            model.to_empty(device="cpu")
        model.load_state_dict(plain.state_dict(), assign=assign)
        assert_held(model.state_dict(), expected, layout)
        losses = train(model, optimizer_of(model), FIRST)
        reference = built(3)
        torch.testing.assert_close(losses, train(reference, optimizer_of(reference), FIRST), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")  # which torch raises at what it calls itself
@on_processes(2)
def test_a_model_without_memory_takes_what_rank_0_sends():
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for layout in RUNS:
        with torch.device("meta"):
            model = Odd()
        sharded = fully_shard(model, **PLACEMENTS[layout])
        expected = Odd().state_dict() if dist.get_rank() == 0 else {}
        set_model_state_dict(sharded, dict(expected), options=options)
        sent = [expected]
        dist.broadcast_object_list(sent)
        assert_held(sharded.state_dict(), sent[0], layout)
