"""`load_state_dict` takes unsharded tensors and tensors of any other layout, and files of one rank come back."""

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sherd import fully_shard
from tests.checkpoint.layouts import (
    LAYOUTS,
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

FIRST, LATER = range(1), range(1, 2)


def trained(layout, seed=0):
    model = model_in(layout, seed)
    optimizer = optimizer_of(model)
    train(model, optimizer, FIRST)
    return model, optimizer


def moved(source, targets, assign, case):
    """State of one model given to another in each layout; how they differ, and whether they train on as the first."""
    wrong, found = [], {}
    expected = whole(source.state_dict())
    for layout, target in targets.items():
        result = target.load_state_dict(source.state_dict(), assign=assign)
        assert (result.missing_keys, result.unexpected_keys) == ([], []), case
        wrong += differences(target.state_dict(), expected, f"{case} -> {layout}")
        assert all(isinstance(each, DTensor) for each in target.parameters()), case
        assert target.head.weight is target.embed.weight, case
        # Training takes most of the time: each layout goes on from two others, and into each go two.
        if (LAYOUTS.index(case) - LAYOUTS.index(layout)) % len(LAYOUTS) in (0, 1):
            found[layout] = train(target, optimizer_of(target), LATER)
    losses = train(source, optimizer_of(source), LATER)
    wrong += [
        f"{case} -> {layout}: {each} is not {losses}"
        for layout, each in found.items()
        if not torch.allclose(torch.tensor(each), torch.tensor(losses), rtol=1e-4)
    ]
    return wrong


def move_all(assign):
    """Into models after a step, but for those of the same layout, which are new."""
    used = {layout: trained(layout, seed=1)[0] for layout in PLACEMENTS}
    return [
        line
        for layout in LAYOUTS
        for line in moved(
            trained(layout)[0],
            {other: model_in(other, seed=1) if other == layout else used[other] for other in PLACEMENTS},
            assign,
            layout,
        )
    ]


@pytest.mark.parametrize(("num_ranks", "assign"), [(3, False), (2, True)], ids=["copy", "assign"])
def test_a_state_dict_of_any_layout_loads_into_any(world, num_ranks, assign):
    assert world(num_ranks).run(move_all, assign, timeout=120) == [[]] * num_ranks


def with_wrong_keys():
    for layout in RUNS:
        for assign in (False, True):
            model = model_in(layout)
            before = whole(model.state_dict())
            values = whole(model_in("plain", seed=1).state_dict())
            values["stranger"] = values.pop("blocks.0.cube")
            values.pop("blocks.0.gain")
            with pytest.raises(RuntimeError, match=r"blocks\.0\.cube"):
                model_in(layout).load_state_dict(values)
            result = model.load_state_dict(values, strict=False, assign=assign)
            assert sorted(result.missing_keys) == ["blocks.0.cube", "blocks.0.gain"]
            assert result.unexpected_keys == ["stranger"]
            kept = {name: before[name] for name in result.missing_keys}
            del values["stranger"]
            assert differences(model.state_dict(), values | kept, layout) == []
            train(model, optimizer_of(model), range(1))


def test_missing_names_keep_their_values_and_are_told(world):
    world(2).run(with_wrong_keys)


def with_a_wrong_shape():
    for layout in RUNS:
        model = model_in(layout)
        before = whole(model.state_dict())
        for wrong in (torch.zeros(3, 4), torch.zeros(()), model_in(layout).blocks[0].cube.detach()):
            values = model_in("plain").state_dict()
            values["blocks.0.thin"] = wrong
            with pytest.raises((RuntimeError, ValueError), match=r"blocks\.0\.thin"):
                model.load_state_dict(values)
        assert differences(model.state_dict(), before, layout) == []
        train(model, optimizer_of(model), range(1))


def test_a_tensor_of_another_shape_is_refused_by_name(world):
    world(2).run(with_a_wrong_shape)


def through_files(folder, weights_only):
    """Each rank saves its shards with `torch.save`, and a model of the same layout takes them."""
    for layout in RUNS:
        model, optimizer = trained(layout)
        path = f"{folder}/{layout}.{dist.get_rank()}.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        expected = whole(state_of(model, optimizer))
        losses = train(model, optimizer, LATER)
        found = torch.load(path, weights_only=weights_only)
        other = model_in(layout, seed=1)
        other.load_state_dict(found["model"])
        others = optimizer_of(other)
        others.load_state_dict(found["optimizer"])
        assert differences(state_of(other, others), expected, layout) == []
        torch.testing.assert_close(train(other, others, LATER), losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights_only", [True, False], ids="weights_only_{}".format)
def test_shards_survive_a_file_of_their_own_on_each_rank(world, tmp_path, weights_only):
    world(3).run(through_files, str(tmp_path), weights_only)


def size_of_a_file():
    """A shard's file holds that shard and not the buffer that it is a view of."""
    sizes = []
    for layout in ("flat", "blocks", "whole"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        fully_shard(model, **PLACEMENTS[layout])
        file = io.BytesIO()
        torch.save(model[0].weight, file)
        held = model[0].weight.to_local().numel() * 4
        sizes.append((file.tell() - held, layout))
    return sizes


def test_a_saved_shard_takes_no_neighbours_along(world):
    for sizes in world(2).run(size_of_a_file):
        for surplus, layout in sizes:
            assert 0 < surplus < 6000, layout


def loaded_onto_meta(assign):
    """Built without memory; whole values come in by `load_state_dict`."""
    plain = built(3)
    expected = whole(plain.state_dict())
    for layout in PLACEMENTS:
        with torch.device("meta"):
            model = built()
        model_in(layout, model=model)
        if not assign:
            model.to_empty(device="cpu")
        model.load_state_dict(plain.state_dict(), assign=assign)
        assert differences(model.state_dict(), expected, layout) == []
        losses = train(model, optimizer_of(model), FIRST)
        reference = built(3)
        torch.testing.assert_close(losses, train(reference, optimizer_of(reference), FIRST), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
def test_a_model_without_memory_takes_whole_values(world, assign):
    world(3).run(loaded_onto_meta, assign)
