"""Ranks whose units are not made alike, or do not stay alike, all raise, and the text says in what they differ."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import sherd
from tests.divergence.programs import Chain, comm_errors, step
from tests.support.meshes import mesh_of

FLOAT16, BFLOAT16 = (sherd.MixedPrecisionPolicy(param_dtype=each) for each in (torch.float16, torch.bfloat16))

TORCH, COALESCED = sherd.CommPolicy("torch"), sherd.CommPolicy("coalesced")

MADE = {  # what rank 0 and rank 1 give `fully_shard`, and words of the error
    "placement": ({}, {"placement": sherd.Flat()}, "RaggedShard"),
    "dimension": ({}, {"shard_placement_fn": lambda each: Shard(1) if each.ndim == 2 else None}, r"Shard\(1\)"),
    "precision": ({"mp_policy": FLOAT16}, {"mp_policy": BFLOAT16}, "param_dtype=torch.bfloat16"),
    "reduced in": ({}, {"mp_policy": sherd.MixedPrecisionPolicy(reduce_dtype=torch.float64)}, "reduce_dtype"),
    "transport": (
        {"comm_policy": sherd.CommPolicy("torch")},
        {"comm_policy": sherd.CommPolicy("coalesced")},
        "coalesced",
    ),
}
CHANGED = {  # what rank 1 does to its model after some steps
    "divide factor": (lambda model: model.blocks[1].set_gradient_divide_factor(1.0), "gradients divided by 1"),
    "frozen": (lambda model: model.blocks[1].weight.requires_grad_(False), "blocks.1.weight 8x8 float32 frozen"),
    "reduce unused": (lambda model: model.set_reduce_scatter_unused_params(True), "unused parameters are reduced"),
    "hook": (lambda model: model.set_all_reduce_hook(lambda each: None), "all_reduce_hook by"),
}


def sharded(transport: str = "auto", **given: object) -> Chain:
    model = Chain()
    given.setdefault("comm_policy", sherd.CommPolicy(transport))
    for unit in (*model.blocks, model):
        sherd.fully_shard(unit, **given)
    return model


def made_otherwise(name: str, divergence: str) -> None:
    given = MADE[name][dist.get_rank()]
    policy = replace(given.get("comm_policy", sherd.CommPolicy()), divergence=divergence)
    step(sharded(**{**given, "comm_policy": policy}))


@pytest.mark.parametrize("divergence", ["error", "join"])
def test_ranks_that_make_their_units_otherwise_say_in_what(world, divergence):
    for name, (*_, words) in MADE.items():
        for text in comm_errors(world(2), made_otherwise, name, divergence):
            assert re.search(words, text), f"{name}: {text}"


def changed_otherwise(name: str, transport: str) -> None:
    model = sharded(transport)
    for number in range(6):
        if number == 3 and dist.get_rank() == 1:
            CHANGED[name][0](model)
        step(model)


@pytest.mark.values
@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "torch"])
@pytest.mark.parametrize("name", CHANGED)
def test_a_rank_that_changes_its_units_alone_says_in_what(world, name, transport):
    for text in comm_errors(world(2), changed_otherwise, name, transport):
        assert re.search(CHANGED[name][1], text), text


def changed_alike() -> None:
    model = sharded()
    for number in range(8):
        if number % 4 == 3:
            for change, _ in CHANGED.values():
                change(model)
        step(model)


def test_ranks_that_change_their_units_alike_go_on(world):
    world(2).run(changed_alike)


def leaves_out(*numbers: int, of: int) -> None:
    """Layers of `of` are left out of the unit around them."""
    model = nn.Sequential(nn.Sequential(*(nn.Linear(8, 8) for _ in range(of))))
    sherd.fully_shard(model[0], ignored_params={each for number in numbers for each in model[0][number].parameters()})
    sherd.fully_shard(model)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()


def names_its_last_layer_otherwise() -> None:
    with pytest.warns(UserWarning, match=r"rank 0 has \(0\.2\.weight 8x8 float32, .*rank 1 has \(0\.3\.weight"):
        leaves_out(*([1, 2] if dist.get_rank() else [1]), of=3 + dist.get_rank())


def leaves_out_another_layer() -> None:
    leaves_out(dist.get_rank(), of=4)


def test_ranks_may_name_layers_of_a_unit_differently_but_not_take_different_ones(world):
    world(2).run(names_its_last_layer_otherwise)
    for text in comm_errors(world(2), leaves_out_another_layer):
        assert "different collectives" in text


# Optimizer steps


def steps_left_out(front: str, odd: int) -> None:
    model = sharded() if front == "fully_shard" else sherd.FullyShardedDataParallel(Chain(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(6):
        model(torch.ones(2, 8)).sum().backward()
        if not (number == 3 and dist.get_rank() == odd):
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("front", ["fully_shard", "wrapper"])
def test_an_optimizer_step_that_one_rank_leaves_out_is_noticed(world, front):
    for text in comm_errors(world(2), steps_left_out, front, 1):
        assert "rank 0 gathers" in text
        assert "shards stepped 1 times since the last gather" in text
        assert "shards stepped 0 times since the last gather" in text


def test_a_step_that_all_leave_out_or_take_twice_is_none(world):
    world(2).run(steps_left_out, "fully_shard", 7)
    world(2).run(step_at_will)


def step_at_will() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for times in (1, 0, 2, 1, 1, 5, 0, 0, 1):
        step(model)
        model(torch.ones(2, 8)).sum().backward()
        for _ in range(times):
            optimizer.step()


# Replicas


def replicas_of_seeds(form: str, alike: bool) -> None:
    torch.manual_seed(0 if alike else dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    given = {"mesh": mesh_of((2, 1))} if form == "hsdp" else {"placements": "ddp"}
    for unit in (*model, model):
        sherd.fully_shard(unit, **given)
    model(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("form", ["ddp", "hsdp"])
def test_replicas_that_begin_with_other_weights_raise_at_the_first_forward(world, form):
    for text in comm_errors(world(2), replicas_of_seeds, form, False):
        assert "replicas hold different values: ranks [0] and ranks [1] differ" in text
        assert "seed all ranks alike" in text
    world(2).run(replicas_of_seeds, form, True)


def load_on_rank_0(odd: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    other = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for unit in (*model, model):
        sherd.fully_shard(unit, placements="ddp")
    for number in range(4):
        if number == 2 and not (odd and dist.get_rank()):
            model.load_state_dict(other)
        model(torch.ones(2, 8)).sum().backward()


def test_replicas_are_compared_again_after_a_load(world):
    for text in comm_errors(world(2), load_on_rank_0, True):
        assert "values that replicas have not compared" in text
    world(2).run(load_on_rank_0, False)
