"""What one rank alone does to shards between two collectives is an error on all ranks; what all do alike is none."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sherd
from sherd import Owned
from sherd.engine import Unit, watcher
from sherd.errors import GradientError
from sherd.guard import checker, deeds
from tests.divergence.programs import batch, comm_errors, num_calls, sharded
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_processes

NOBODY, AT = 9, 4  # ranks; and the number, from 0 on, of the step that is another one


def optimizer_of(model: nn.Module, odd: str) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if odd == "class":
        return torch.optim.SGD(parameters, lr=0.02)
    if odd == "fewer parameters":
        return torch.optim.AdamW(parameters[1:], lr=0.02)
    if odd == "groups":
        decays = [{"params": parameters[:1], "weight_decay": 0.3}, {"params": parameters[1:]}]
        return torch.optim.AdamW(decays, lr=0.02)
    return torch.optim.AdamW(parameters, lr=0.02, **({"betas": (0.8, 0.9)} if odd == "betas" else {}))


def meddle(what: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Do this between backward and the optimizer's step."""
    group, first = optimizer.param_groups[0], next(model.parameters())
    if what in ("lr", "weight_decay", "maximize"):
        group[what] = 0.5
    elif what == "gradient dropped":
        first.grad = None
    elif what == "gradient not finite":
        first.grad.to_local().fill_(float("inf"))
    elif what == "two steps":
        optimizer.step()
    elif what == "state cleared":
        optimizer.state.clear()
    elif what == "state of one cleared":
        del optimizer.state[first]
    elif what == "state loaded":
        optimizer.load_state_dict(optimizer.state_dict())
    elif what == "counts":
        for state in optimizer.state.values():
            state["step"] += 3
    elif what == "shards loaded":
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def train(what: str, odd: int, at: int = AT, steps: int = 9, front: str = "shard", all_do: bool = False) -> None:
    model = sharded(front=front)
    is_odd = all_do or dist.get_rank() == odd
    optimizer = optimizer_of(model, what if is_odd else "")
    for number in range(steps):
        model(batch()).square().mean().backward()
        if number >= at and is_odd:
            meddle(what, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


MADE = {
    "class": ("blocks.0.weight is stepped by AdamW", "blocks.0.weight is stepped by SGD"),
    "fewer parameters": ("blocks.0.weight is stepped by AdamW",),
    "groups": ("blocks.0.bias is stepped by AdamW in group 1", "AdamW steps group 0 with weight_decay=0.3"),
    "betas": ("AdamW steps group 0 with betas=(0.9, 0.999)", "AdamW steps group 0 with betas=(0.8, 0.9)"),
}
DONE = {
    "lr": ("AdamW steps group 0 with lr=0.02", "AdamW steps group 0 with lr=0.5"),
    "weight_decay": ("AdamW steps group 0 with weight_decay=0.01", "AdamW steps group 0 with weight_decay=0.5"),
    "gradient dropped": ("blocks.0.weight is stepped by AdamW in group 0 without a gradient",),
    "two steps": ("stepped 1 times", "stepped 2 times"),
    "state cleared": ("the state of AdamW was loaded, cleared or exchanged",),
    "state of one cleared": ("the state of AdamW was loaded, cleared or exchanged",),
    "state loaded": ("the state of AdamW was loaded, cleared or exchanged",),
    "shards loaded": ("shards were loaded since the last collective",),
}
IN_TIME = {
    "gradient not finite": ("AdamW has left inf or nan in blocks.0.weight",),
    "counts": ("the state of AdamW has counted 7.0 steps", "counted 10.0 steps"),
}


def check(world: Any, what: str, words: tuple[str, ...], *arguments: Any) -> None:
    for text in comm_errors(world(2), train, what, 1, *arguments):
        assert all(word in text for word in words), f"{what}: {text}"
        assert "test_deeds.py:" in text, text


@pytest.mark.values
@pytest.mark.parametrize("what", MADE)
def test_an_optimizer_that_one_rank_makes_otherwise_is_named(world, what):
    check(world, what, MADE[what])


@pytest.mark.values
@pytest.mark.parametrize("what", DONE)
def test_what_one_rank_alone_does_before_a_step_is_named_at_the_next_collective(world, what):
    check(world, what, DONE[what], AT, AT + 2)


@pytest.mark.values
@pytest.mark.parametrize("what", IN_TIME)
def test_what_only_values_show_is_named_in_a_step_in_which_ranks_compare_values(world, what):
    check(world, what, IN_TIME[what], 7, 9)


@pytest.mark.values
@pytest.mark.parametrize("what", [*MADE, *DONE])
def test_what_all_ranks_do_alike_is_no_error(world, what):
    world(2).run(train, what, NOBODY, AT, 7, "shard", True)


# Clips, scalers, averages, calls


def between_steps(what: str, alike: bool) -> None:
    """Of six steps the odd rank does this otherwise from the fourth on."""
    model = sharded(front="wrapper" if what == "summon_full_params" else "shard")
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    scaler = sherd.ShardedGradScaler("cpu", init_scale=8.0)
    ema = sherd.Ema(model, lambda number: 0.9 if number < 3 or alike or not dist.get_rank() else 0.5)
    for number in range(6):
        odd = number >= 3 and not alike and dist.get_rank() == 1
        loss = model(batch()).square().mean()
        (scaler.scale(loss) if what == "scaler" else loss).backward()
        if what.startswith("max_norm"):
            # Some limits go by earlier norms, and change in each step.
            limit = 1.0 + number * (what == "max_norm by step")
            sherd.clip_grad_norm_(
                parameters[: 3 if what == "max_norm of some" and odd else None], 0.5 if odd else limit
            )
        if what == "scaler":
            if odd:
                scaler.set_growth_interval(5)
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        if what == "ema":
            ema.update()
        if what in ("unsharded", "summon_full_params") and number >= 2:
            shown = sherd.unsharded if what == "unsharded" else sherd.FullyShardedDataParallel.summon_full_params
            with shown(model, writeback=not odd):
                pass
        if what == "reads out":
            for _ in sherd.iter_full_parameters(model, dtype=torch.bfloat16 if odd else None):
                pass


BETWEEN = {
    "max_norm": ("gradients are clipped to 1.0 by", "gradients are clipped to 0.5 by"),
    "max_norm of some": ("gradients are clipped to 1.0 by the norm of order 2.0 of 6 tensors", "of 3 tensors"),
    "scaler": ("growth_interval=2000", "growth_interval=5"),
    "ema": ("an Ema averages with decay=0.9", "an Ema averages with decay=0.5"),
    "unsharded": ("which enters unsharded of", "(writeback=True)", "(writeback=False)"),
    "summon_full_params": ("which enters unsharded of", "(writeback=True)", "(writeback=False)"),
    "reads out": ("dtype=None, bucket_bytes", "dtype=torch.bfloat16, bucket_bytes"),
}


@pytest.mark.values
@pytest.mark.parametrize("what", BETWEEN)
def test_what_one_rank_does_otherwise_between_steps_is_named(world, what):
    for text in comm_errors(world(2), between_steps, what, False):
        assert all(word in text for word in BETWEEN[what]), f"{what}: {text}"


@pytest.mark.values
@pytest.mark.parametrize("what", [*BETWEEN, "max_norm by step"])
def test_what_all_ranks_do_alike_between_steps_is_no_error(world, what):
    world(2).run(between_steps, what, True)


# Replicas


def drift(odd: int, saves: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    sherd.fully_shard(model, mesh=mesh_of((2, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(4):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 2 and dist.get_rank() == odd:
            with torch.no_grad():
                model.weight.to_local().mul_(2)
        if number == 2 and saves is not None:
            sherd.save(saves, {"model": model}, step=3)
    model(batch()).sum().backward()


@pytest.mark.parametrize("saves", [False, True])
def test_replicas_that_have_drifted_are_named_in_time_and_at_a_save(world, tmp_path, saves):
    for text in comm_errors(world(2), drift, 1, str(tmp_path) if saves else None):
        assert "replicas hold different values: ranks [0] and ranks [1] differ" in text
        assert ("saves step 3" in text) is saves
    world(2).run(drift, NOBODY, str(tmp_path) if saves else None)


def drift_of_masters(odd: int, folder: str) -> None:
    """One replica's masters are others within the rounding of the weights, which are the same."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(torch.bfloat16)
    sherd.fully_shard(model, mesh=mesh_of((2, 1)), offload_policy=sherd.OffloadPolicy(masters="device"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(batch().to(torch.bfloat16)).square().mean().backward()
    optimizer.step()
    if dist.get_rank() == odd:
        [group] = [weights.group for weights in Unit.of(model).weights]
        group.masters.low[3] ^= 1
    sherd.save(folder, {"model": model}, step=1)


def test_replicas_whose_masters_differ_are_named_at_a_save(world, tmp_path):
    for text in comm_errors(world(2), drift_of_masters, 1, str(tmp_path)):
        assert "replicas hold different values: ranks [0] and ranks [1] differ" in text
    world(2).run(drift_of_masters, NOBODY, str(tmp_path))


# What is no error


def step_by_step(model: nn.Module, optimizer: torch.optim.Optimizer, before_step: Any, steps: int = 9) -> None:
    for number in range(steps):
        model(batch()).square().mean().backward()
        before_step(number)
        optimizer.step()
        optimizer.zero_grad()


@on_processes(2)
def test_a_parameter_with_one_owner_is_stepped_as_its_owner_likes():
    model = sharded(placement=Owned())
    own = [each for each in model.parameters() if each.to_local().numel()]
    optimizer = torch.optim.AdamW(own, lr=0.1 * (1 + dist.get_rank()))

    def drop_one(number: int) -> None:
        if number == 3 + dist.get_rank():
            own[0].grad = None
        if number == 5 + dist.get_rank():
            optimizer.state.clear()

    step_by_step(model, optimizer, drop_one)


class Adaptive(torch.optim.SGD):
    """As Prodigy, it keeps a number of its own in its groups, which goes by the rank's shards."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.defaults["d"] = 1.0
        for group in self.param_groups:
            group["d"] = 1.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["d"] *= 1.1 + dist.get_rank()
        result = super().step(closure)  # has hooks of its own, once an SGD was made
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + dist.get_rank()
        return result


@on_processes(2)
def test_numbers_that_an_optimizer_keeps_in_its_groups_may_differ():
    model = sharded()
    torch.optim.SGD(model.parameters(), lr=0.01)
    step_by_step(model, Adaptive(model.parameters()), lambda number: None)


@on_processes(2)
def test_integers_and_flags_among_what_an_optimizer_holds_are_finite():
    model = nn.Linear(4, 4)
    model.counts, model.flags = (
        nn.Parameter(each, requires_grad=False) for each in (torch.ones(4).long(), torch.ones(4) > 0)
    )
    sherd.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(9):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_processes(2)
def test_a_step_that_raises_on_all_ranks_leaves_nothing_to_compare():
    model = sharded()
    optimizer = sherd.Muon(model, lr=0.1)
    for number in range(4):
        model(batch()).square().mean().backward()
        if number == 1 and dist.get_rank() == 1:
            next(model.parameters()).grad = None
        fails = pytest.raises(GradientError, match="rank 1 has no gradient")
        with fails if number == 1 else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()


@on_processes(2)
def test_a_schedule_is_compared_seldom_and_settled_steps_not_at_all():
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def one(number: int) -> None:
        step_by_step(model, optimizer, lambda number: None, steps=1)
        schedule.step()

    counts = num_calls(checker, "agree", one, 12)
    # Ranks compare before the first forward that follows step 1, 2, 4 and 8; the first two know nothing yet.
    assert [number for number in range(3, 12) if counts[number]] == [4, 8], counts
    assert counts[4] == 1, counts


@on_processes(2)
def test_steps_without_a_collective_between_them_do_not_pile_up():
    model = sharded()
    optimizer = optimizer_of(model, "")
    model(batch()).square().mean().backward()
    with mock.patch.object(deeds, "MOST_AT_ONCE", 20):
        for _ in range(50):
            optimizer.step()
    assert max(len(each.pending) for each in watcher._listeners if isinstance(each, deeds.Deeds)) == 20
    model(batch()).square().mean().backward()
