"""Ranks that skip units, run others, or have fewer batches train as one, with zero for what they skip."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import sherd
from sherd.errors import CommError, ModuleError, PolicyError
from tests.divergence.programs import NUM_BLOCKS, WIDTH, Chain
from tests.support.ranks import RanksFailed
from tests.support.suites import share

JOIN = sherd.CommPolicy(divergence="join")
ALL = tuple(range(NUM_BLOCKS))
Way = tuple[int, ...]


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def reference(
    of_ranks: list[list[Way]], make: Any = torch.optim.SGD, lr: float = 0.1, model: nn.Module | None = None
) -> dict[str, Tensor]:
    """The parameters of a plain model that each step gets the mean over ranks, of which a rank without a batch gives
    zero. A parameter that no rank has used keeps no gradient."""
    model = Chain() if model is None else model
    optimizer = make(model.parameters(), lr=lr)
    for step in range(max(len(ways) for ways in of_ranks)):
        for rank, ways in enumerate(of_ranks):
            if step < len(ways):
                (model(batch(rank, step), ways[step]).square().sum() / len(of_ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach() for name, each in model.named_parameters()}


def sharded(placement: Any = None, mesh: Any = None, **more: Any) -> Any:
    model: Any = Chain()
    more |= {} if placement is None else {"placement": placement}
    for block in model.blocks:
        sherd.fully_shard(block, mesh=mesh, comm_policy=JOIN, **more)
    return sherd.fully_shard(model, mesh=mesh, comm_policy=JOIN, **more)


def wrapped(use_orig_params: bool = True) -> Any:
    model: Any = Chain()
    options: Any = {"use_orig_params": use_orig_params, "comm_policy": JOIN}
    for number, block in enumerate(model.blocks):
        model.blocks[number] = sherd.FullyShardedDataParallel(block, **options)
    return sherd.FullyShardedDataParallel(model, **options)


def whole(model: Any) -> dict[str, Tensor]:
    with sherd.unsharded(model):
        return {
            name.replace("_fsdp_wrapped_module.", ""): each.detach().clone() for name, each in model.named_parameters()
        }


def trained(make: Any, of_ranks: list[list[Way]], optimizer_of: Any = torch.optim.SGD) -> dict[str, Tensor]:
    """The parameters after this rank's ways, one a step; with `join` if ranks have different numbers."""
    model = make()
    rank = dist.get_rank()
    optimizer = optimizer_of(model.parameters(), lr=0.1)
    with sherd.join(model, optimizer):
        for step, way in enumerate(of_ranks[rank]):
            model(batch(rank, step), way).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


def assert_as_reference(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for of_rank in found:
        assert of_rank.keys() == expected.keys()
        for name, value in of_rank.items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-5, atol=1e-6, msg=lambda said, n=name: f"{n} {said}"
            )


SKIPS = {
    "never alike": [[(0, 1), (0, 1), (0, 1)], [(1, 2), (1, 2), (1, 2)]],
    "in the first step": [[ALL, ALL, ALL], [(0, 2), ALL, ALL]],
    "in a later step": [[ALL, ALL, ALL, ALL], [ALL, ALL, (1,), ALL]],
    "each another one": [[(0,), (1,), (2,), (0,)], [(1,), (2,), (0,), (0,)]],
    "none of them": [[ALL, ALL, ALL], [ALL, (), ()]],
    "in another order": [[(0, 1, 2)] * 4, [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)]],
    "more than once": [[(0, 1, 2)] * 3, [(0, 0, 1), (1, 2, 1), (0, 1, 2)]],
    "fewer batches": [[ALL] * 4, [ALL] * 2],
    "no batch": [[ALL] * 3, []],
    "fewer and others": [[(0, 1), (1, 2), ALL, (2,)], [(1, 2), (0,)]],
}

MAKERS: dict[str, Any] = {
    "fully_shard": sharded,
    "Flat": lambda: sharded(sherd.Flat()),
    "Blocks": lambda: sharded(sherd.Blocks(2)),
    "Owned": lambda: sharded(sherd.Owned()),
    "kept": lambda: sharded(reshard_after_forward=False),
    "ZeRO-1": lambda: sharded(placements="zero1"),
    "wrapper": wrapped,
    "flat parameters": lambda: wrapped(use_orig_params=False),
}


def made(maker: str, of_ranks: list[list[Way]], optimizer_of: Any = torch.optim.SGD) -> dict[str, Tensor]:
    return trained(MAKERS[maker], of_ranks, optimizer_of)


@pytest.mark.values
@pytest.mark.parametrize("skips", SKIPS)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_rank_that_skips_counts_as_zero(world, maker, skips):
    assert_as_reference(world(2).run(made, maker, SKIPS[skips]), reference(SKIPS[skips]))


def test_adam_steps_the_same_parts_on_all_ranks(world):
    skips = SKIPS["fewer and others"]
    found = world(2).run(made, "fully_shard", skips, torch.optim.Adam)
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])
    assert_as_reference(found, reference(skips, torch.optim.Adam))


# Everything else that a step may have


def on_four(kind: str, of_ranks: list[list[Way]]) -> dict[str, Tensor]:
    if kind == "HSDP":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        return trained(lambda: sharded(mesh=mesh), of_ranks)
    return trained(MAKERS[kind], of_ranks)


FOUR = [[(0, 1), (0, 1), ALL], [(1, 2)], [(0,), (2,), (2, 0)], [ALL, (), (1,), (1, 0)]]


@pytest.mark.parametrize("kind", ["fully_shard", "HSDP", "Flat", "flat parameters"])
def test_four_ranks_that_all_go_their_own_ways_train_as_one(world, kind):
    assert_as_reference(world(4).run(on_four, kind, FOUR), reference(FOUR))


class Recomputed(Chain):
    """Its blocks are checkpointed."""

    def forward(self, x: Tensor, order: Way = ALL) -> Tensor:
        for number in order:
            x = checkpoint(self.blocks[number], x, use_reentrant=False)
        return self.head(x)


class Large(Chain):
    """With a parameter that is alone in its message, and that only some ranks use, and one that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.full((WIDTH, 1 << 17), 1e-3))
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, x: Tensor, order: Way = ALL) -> Tensor:
        x = super().forward(x, order)
        return x + self.large.mean() if 1 in order else x


def of_kind(kind: str, transport: str, of_ranks: list[list[Way]]) -> dict[str, Tensor]:
    model: Any = {"recomputed": Recomputed, "large": Large}[kind]()
    policy = sherd.CommPolicy(transport=transport, divergence="join")
    for block in model.blocks:
        sherd.fully_shard(block, comm_policy=policy, prefetch_policy=sherd.PrefetchPolicy(forward_depth=2))
    sherd.fully_shard(model, comm_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with sherd.join(model, optimizer):
        for step, way in enumerate(of_ranks[dist.get_rank()]):
            model(batch(dist.get_rank(), step), way).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "torch"])
@pytest.mark.parametrize(("kind", "model"), [("recomputed", Recomputed), ("large", Large)], ids=["recomputed", "large"])
def test_recomputation_ties_and_large_tensors_join_over_each_transport(world, kind, model, transport):
    ways = [[(0, 2), (0, 1), (2,), (0, 2)], [(0,), (1,), (0, 2), (2,)]]
    assert_as_reference(world(2).run(of_kind, kind, transport, ways), reference(ways, torch.optim.Adam, 0.01, model()))


def accumulated(of_ranks: list[list[Way]]) -> dict[str, Tensor]:
    """All ways of a rank are micro-batches of one step, the last of which reduces; two steps."""
    model = sharded()
    rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for number, way in enumerate(of_ranks[rank]):
            model.set_requires_gradient_sync(number == len(of_ranks[rank]) - 1)
            model(batch(rank, 10 * step + number), way).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def test_ranks_may_have_different_numbers_of_micro_batches(world):
    of_ranks: list[list[Way]] = [[ALL, (0,), (2,), ALL], [(0, 2), ALL], [(1,)]]
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for rank, ways in enumerate(of_ranks):
            for number, way in enumerate(ways):
                (model(batch(rank, 10 * step + number), way).square().sum() / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: each.detach() for name, each in model.named_parameters()}
    assert_as_reference(world(3).run(accumulated, of_ranks), expected)


def clipped(numbers: list[int]) -> tuple[dict[str, Tensor], int]:
    """With everything in the loop that only the loop knows of: clipping, a schedule, a scaler."""
    model = sharded()
    rank, optimizer = dist.get_rank(), torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    num_seen = 0
    with sherd.join(model, optimizer) as ranks:
        for x in ranks.batches(batch(rank, step) for step in range(numbers[rank])):
            model(x).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            num_seen += 1
    return whole(model), num_seen


def test_a_loop_that_clips_asks_for_its_batches(world):
    found = world(2).run(clipped, [4, 2])
    assert [num_seen for _, num_seen in found] == [4, 4]
    model = Chain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        for rank, number in enumerate([4, 2]):
            if step < number:
                (model(batch(rank, step)).square().sum() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    expected = {name: each.detach() for name, each in model.named_parameters()}
    assert_as_reference([values for values, _ in found], expected)


def with_a_schedule() -> tuple[dict[str, Tensor], float]:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with sherd.join(model):
        for step in range(3 if dist.get_rank() == 0 else 1):
            model(batch(dist.get_rank(), step)).square().sum().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return whole(model), optimizer.param_groups[0]["lr"]


def test_a_rank_without_batches_steps_with_the_others_learning_rate(world):
    (first, _), (second, rate) = world(2).run(with_a_schedule)
    assert rate == 0.25
    for name, value in first.items():
        torch.testing.assert_close(value, second[name])


def in_epochs(numbers: list[list[int]]) -> dict[str, Tensor]:
    model = sharded()
    rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch, of_ranks in enumerate(numbers):
        with sherd.join(model, optimizer):
            for step in range(of_ranks[rank]):
                model(batch(rank, 10 * epoch + step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            model(batch(rank, 0))
    return whole(model)


def test_each_epoch_may_have_its_own_numbers_of_batches(world):
    numbers = [[3, 1], [1, 2], [0, 2], [2, 2]]
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch, of_ranks in enumerate(numbers):
        for step in range(max(of_ranks)):
            for rank, number in enumerate(of_ranks):
                if step < number:
                    (model(batch(rank, 10 * epoch + step)).square().sum() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = {name: each.detach() for name, each in model.named_parameters()}
    assert_as_reference(world(2).run(in_epochs, numbers), expected)


def evaluated_alone() -> dict[str, Tensor]:
    model = sharded()
    rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if rank == 1 and step % 2:
            with torch.no_grad():
                model(batch(rank, step), (0, 2))
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def test_a_rank_may_evaluate_alone(world):
    assert_as_reference(world(2).run(evaluated_alone), reference([[ALL] * 4] * 2))


def gradients_that_nobody_has() -> list[str]:
    model = sharded()
    for _ in range(3):
        model(batch(dist.get_rank(), 0), (0,) if dist.get_rank() else (0, 2)).square().sum().backward()
    return [name for name, each in model.named_parameters() if each.grad is None]


def test_what_no_rank_uses_has_no_gradient(world):
    assert world(2).run(gradients_that_nobody_has) == [["blocks.1.weight", "blocks.1.bias"]] * 2


def two_models() -> list[dict[str, Tensor]]:
    """Rank 1 does not train the second one in each step."""
    models = [sharded(), sharded()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(4):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if number == 0 or dist.get_rank() == 0 or step % 2 == 0:
                model(batch(dist.get_rank(), step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [whole(model) for model in models]


def test_a_rank_may_skip_a_whole_model(world):
    found = world(2).run(two_models)
    assert_as_reference([models[0] for models in found], reference([[ALL] * 4] * 2))
    second, optimizer = Chain(), torch.optim.SGD
    steps = optimizer(second.parameters(), lr=0.1)
    for step in range(4):
        for rank in range(2 if step % 2 == 0 else 1):
            (second(batch(rank, step)).square().sum() / 2).backward()
        steps.step()
        steps.zero_grad()
    assert_as_reference([models[1] for models in found], {n: p.detach() for n, p in second.named_parameters()})


# A settled step


def votes_of_each_step() -> list[int]:
    from sherd.engine.run.coordinator import Coordinator

    counts, vote = [0], Coordinator._vote

    def counted(self: Coordinator, wish: Any) -> Any:
        counts[-1] += 1
        return vote(self, wish)

    Coordinator._vote = counted  # type: ignore[method-assign]
    try:
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            model(batch(dist.get_rank(), step), (0, 2) if dist.get_rank() else (1, 2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(0)
    finally:
        Coordinator._vote = vote  # type: ignore[method-assign]
    return counts[:-1]


def test_a_settled_step_votes_where_it_begins_where_backward_ends_and_before_the_optimizer(world):
    for counts in world(2).run(votes_of_each_step):
        assert counts[2:] == [3, 3, 3]


# What cannot be joined


def steps_one_optimizer_less() -> None:
    model = sharded()
    halves = [torch.optim.SGD(model.blocks.parameters(), lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.1)]
    for step in range(2):
        model(batch(dist.get_rank(), step)).square().sum().backward()
        for number, optimizer in enumerate(halves):
            if not (dist.get_rank() and step and number == 0):
                optimizer.step()


def test_a_rank_that_does_not_step_is_named_on_all_ranks(world):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(steps_one_optimizer_less)
    for rank in range(2):
        kind, text = failed.value.errors[rank]
        assert kind == "CommError"
        assert "ranks [0] step an optimizer (SGD, " in text
        assert "that ranks [1] skip" in text


def has_no_batch_and_does_not_know_the_optimizer() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sherd.join(model):
        if dist.get_rank() == 0:
            model(batch(0, 0)).square().sum().backward()
            optimizer.step()


def test_a_rank_without_any_batch_is_told_to_pass_its_optimizer(world):
    with pytest.raises(RanksFailed, match=r"pass it: sherd.join\(model, optimizer\)"):
        world(2).run(has_no_batch_and_does_not_know_the_optimizer)


def changes_its_gradients(how: str) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with sherd.join(model, optimizer):
        for step in range(1 if dist.get_rank() else 3):
            model(batch(dist.get_rank(), step)).square().sum().backward()
            for parameter in model.parameters():
                if how == "in place":
                    parameter.grad.mul_(0.5)
                elif how == "anew":
                    parameter.grad = parameter.grad * 0.5
            if how == "clipped":
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("how", ["in place", "anew", "clipped"])
def test_gradients_that_a_rank_without_batches_cannot_change_likewise_are_an_error_on_all(world, how):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(changes_its_gradients, how)
    for rank in range(2):
        kind, text = failed.value.errors[rank]
        assert kind == "CommError"
        assert "rank 0 has changed its gradients" in text
        assert "ranks.batches(loader)" in text


def refused(kind: str) -> str:
    model: Any = Chain()
    if kind == "plain":
        expected: type[Exception] = ModuleError
    elif kind == "error":
        sherd.fully_shard(model)
        expected = PolicyError
    else:
        sherd.fully_shard(model.blocks[0])
        sherd.fully_shard(model, comm_policy=JOIN)
        expected = PolicyError
    with pytest.raises(expected) as raised, sherd.join(model):
        pass
    if kind == "mixed":
        with pytest.raises(PolicyError):
            model(batch(0, 0))
    return str(raised.value)


def test_join_is_refused_where_not_all_units_ask_for_it(world):
    assert "call fully_shard first" in world(2).run(refused, "plain")[0]
    assert "divergence='error'" in world(2).run(refused, "error")[0]
    assert "divergence='error'" in world(2).run(refused, "mixed")[0]


def dies_before_its_second_step() -> str:
    import os

    model = sharded()
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            os._exit(3)
        try:
            model(batch(dist.get_rank(), step)).square().sum().backward()
        except CommError as error:
            return str(error)
    return ""


def test_a_rank_that_dies_ends_the_vote_of_the_others(world):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(dies_before_its_second_step)
    assert 1 in failed.value.errors


# Beside other parallelism


def beside_tensor_parallelism(of_ranks: list[list[Way]]) -> dict[str, Tensor]:
    """The two ranks of a tensor-parallel pair go one way."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = Chain()
    parallelize_module(model.blocks[1], mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    for block in model.blocks:
        sherd.fully_shard(block, mesh=mesh["dp"], comm_policy=JOIN)
    sherd.fully_shard(model, mesh=mesh["dp"], comm_policy=JOIN)
    rank, optimizer = mesh["dp"].get_local_rank(), torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with sherd.join(model, optimizer):
        for step, way in enumerate(of_ranks[rank]):
            model(batch(rank, step), way).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {
        name: each.full_tensor().detach() if isinstance(each, DTensor) else each.detach()
        for name, each in model.named_parameters()
    }


def test_ranks_join_beside_tensor_parallelism(world):
    skips = SKIPS["each another one"]
    assert_as_reference(world(4).run(beside_tensor_parallelism, skips), reference(skips))


def of_experts(of_ranks: list[list[Way]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The middle block is sharded over pairs of ranks, as an expert of which each pair has one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("within", "pair"))
    model: Any = Chain()
    sherd.fully_shard(model.blocks[1], mesh=mesh["within"], comm_policy=JOIN)
    sherd.fully_shard(model, mesh=mesh._flatten("all"), comm_policy=JOIN)
    rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with sherd.join(model, optimizer):
        for step, way in enumerate(of_ranks[rank]):
            model(batch(rank, step), way).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = {name: each.full_tensor().detach() for name, each in model.named_parameters()}
    expert = {name: value for name, value in found.items() if "blocks.1." in name}
    return {name: value for name, value in found.items() if name not in expert}, expert


def test_ranks_join_where_experts_have_meshes_of_their_own(world):
    of_ranks: list[list[Way]] = [[(0, 1), (0,), ALL], [(0, 2), (1,)], [(1,)], [ALL, (2,), (0, 2)]]
    found = world(4).run(of_experts, of_ranks)
    pairs = [Chain(), Chain()]  # each with the expert of one pair; what they share has the mean of both
    shared = [name for name, _ in pairs[0].named_parameters() if "blocks.1." not in name]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pairs]
    for step in range(3):
        for rank, ways in enumerate(of_ranks):
            if step < len(ways):
                pairs[rank % 2](batch(rank, step), ways[step]).square().sum().backward()
        of_pairs = [dict(model.named_parameters()) for model in pairs]
        for name, parameter in of_pairs[0].items():
            other = of_pairs[1][name]
            grads = [each.grad for each in (parameter, other) if each.grad is not None]
            if name in shared and grads:
                parameter.grad = torch.stack(grads).sum(0) / 4
                other.grad = parameter.grad.clone()
            else:
                for each in grads:
                    each.div_(2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for rank, (of_all, of_pair) in enumerate(found):
        expected = {name: each.detach() for name, each in pairs[rank % 2].named_parameters()}
        assert_as_reference([{**of_all, **of_pair}], expected)


# Any program


def drawn(seed: int, num_ranks: int) -> list[list[list[Way]]]:
    """By step and rank: the ways of its micro-batches, the last of which reduces. () runs no block."""
    draw = random.Random(seed)
    ways: list[Way] = [
        tuple(draw.choices(range(NUM_BLOCKS), k=draw.randrange(4))) if draw.random() < 0.5 else ALL for _ in range(6)
    ]
    return [
        [[draw.choice(ways) for _ in range(draw.choice((1, 1, 2, 3)))] for _ in range(num_ranks)]
        for _ in range(draw.randrange(2, 6))
    ]


# Not Adam, which makes a large step of a small difference. Decay tells no gradient from one of zeros.
STEPPED_BY: dict[str, float] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


def of_seed(seed: int) -> dict[str, Tensor]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    draw = random.Random(seed)
    make = MAKERS[draw.choice(list(MAKERS))]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), **STEPPED_BY)
    own = random.Random(f"{seed} {rank}")
    for step, of_ranks in enumerate(drawn(seed, num_ranks)):
        for number, way in enumerate(of_ranks[rank]):
            if own.random() < 0.2:
                with torch.no_grad():
                    model(batch(rank, step), way)
            if own.random() < 0.1:
                model(batch(rank, step), way)  # nobody comes back for it
            model.set_requires_gradient_sync(number == len(of_ranks[rank]) - 1)
            model(batch(rank, 10 * step + number), way).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def reference_of_seed(seed: int, num_ranks: int) -> dict[str, Tensor]:
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), **STEPPED_BY)
    for step, of_ranks in enumerate(drawn(seed, num_ranks)):
        for rank, ways in enumerate(of_ranks):
            for number, way in enumerate(ways):
                (model(batch(rank, 10 * step + number), way).square().sum() / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach() for name, each in model.named_parameters()}


NUM_SEEDS = int(os.environ.get("SHERD_JOIN_SEEDS", share(5, 12)))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_any_program_trains_as_the_plain_model(world, num_ranks):
    for seed in range(NUM_SEEDS):
        try:
            assert_as_reference(world(num_ranks).run(of_seed, seed), reference_of_seed(seed, num_ranks))
        except (RanksFailed, AssertionError) as error:
            raise AssertionError(f"seed {seed}") from error


# A batch that a loop gives up


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ArithmeticError("in backward")


def gives_up_a_backward(ranks: tuple[int, ...], use: str) -> dict[str, Tensor]:
    model = sharded()
    rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 2 and rank in ranks:
            handle = model.blocks[1].register_forward_hook(lambda module, args, output: Fails.apply(output))
        try:
            model(batch(rank, step)).square().sum().backward()
            optimizer.step()
        except ArithmeticError:
            handle.remove()
            if use == "reset":
                model.reset_iter_state()
        optimizer.zero_grad()
    return whole(model)


@pytest.mark.parametrize("use", ["forward", "reset"])
def test_a_rank_that_alone_gives_up_a_backward_and_goes_on_is_an_error_on_all(world, use):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(gives_up_a_backward, (1,), use)
    for rank in range(2):
        kind, text = failed.value.errors[rank]
        assert kind == "CommError"
        assert "ranks [1] gave up a backward in its middle" in text
        assert "sherd.step" in text


def test_ranks_that_all_give_up_a_backward_go_on(world):
    found = world(2).run(gives_up_a_backward, (0, 1), "forward")
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (0, 1, 3):
        for rank in range(2):
            (model(batch(rank, step)).square().sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_as_reference(found, {name: each.detach() for name, each in model.named_parameters()})
