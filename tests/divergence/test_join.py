"""Ranks that skip units, run others, or have fewer batches train as one, with zero for what they skip."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import sherd
from sherd._torch import imagined_ranks
from sherd.errors import CommError, ModuleError, PolicyError, SherdError
from sherd.uneven.coordinator import Coordinator
from tests.divergence.programs import NUM_BLOCKS, WIDTH, Chain, comm_errors, hybrid, joined, num_calls, sharded
from tests.support.comparing import assert_same, whole, whole_params
from tests.support.ranks import RanksFailed
from tests.support.ranks.bodies import on_processes
from tests.support.sharding import FRONTS
from tests.support.suites import share

JOIN = sherd.CommPolicy(divergence="join")
ALL = tuple(range(NUM_BLOCKS))
Way = tuple[int, ...]


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def reference_of(
    num_ranks: int,
    steps: Iterable[list[tuple[Tensor, Way]]],
    make: Any = torch.optim.SGD,
    model: nn.Module | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The parameters of a plain model that in each step gets the sum of these batches of all ranks, divided by their
    number: a rank without a batch gives zero. A parameter that no rank has used keeps no gradient."""
    model = Chain() if model is None else model
    optimizer = make(model.parameters(), **({"lr": 0.1} | options))
    for batches in steps:
        for x, way in batches:
            (model(x, way).square().sum() / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_params(model)


def reference(of_ranks: list[list[Way]], make: Any = torch.optim.SGD, **options: Any) -> dict[str, Tensor]:
    """The same of each rank's ways, one a step."""
    steps = (
        [(batch(rank, step), ways[step]) for rank, ways in enumerate(of_ranks) if step < len(ways)]
        for step in range(max(map(len, of_ranks)))
    )
    return reference_of(len(of_ranks), steps, make, **options)


def steps_joined(
    model: Any,
    of_ranks: list[list[Way]],
    make: Any = torch.optim.SGD,
    rank: int | None = None,
    before: Callable[[int], object] = lambda step: None,
) -> dict[str, Tensor]:
    """The parameters after this rank's ways, one a step; with `join` if ranks have different numbers."""
    rank = dist.get_rank() if rank is None else rank
    optimizer = make(model.parameters(), lr=0.1)
    with sherd.join(model, optimizer):
        for step, way in enumerate(of_ranks[rank]):
            before(step)
            take_step(model, optimizer, batch(rank, step), way)
    return whole_params(model)


def take_step(model: Any, optimizer: Any, x: Tensor, way: Way = ALL) -> None:
    model(x, way).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_as_reference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """On a rank."""
    assert_same(found, expected, f"rank {dist.get_rank()}", rtol=1e-5, atol=1e-6)


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
    **{front: partial(joined, front) for front in FRONTS},
    "kept": partial(joined, reshard_after_forward=False),
    "ZeRO-1": partial(joined, placements="zero1"),
    "HSDP": partial(hybrid, joined),
    "replicated": partial(joined, replicate_below=100),
}


@pytest.mark.front("Ranks that differ")
@pytest.mark.values
@pytest.mark.parametrize("skips", SKIPS)
@pytest.mark.parametrize("maker", [maker for maker in MAKERS if maker != "HSDP"])
@on_processes(2)
def test_a_rank_that_skips_counts_as_zero(maker, skips):
    assert_as_reference(steps_joined(MAKERS[maker](), SKIPS[skips]), reference(SKIPS[skips]))


@on_processes(2)
def test_adam_steps_the_same_parts_on_all_ranks():
    ways, adam = SKIPS["fewer and others"], torch.optim.Adam
    assert_as_reference(steps_joined(joined(), ways, adam), reference(ways, adam))


# Everything else that a step may have


FOUR = [[(0, 1), (0, 1), ALL], [(1, 2)], [(0,), (2,), (2, 0)], [ALL, (), (1,), (1, 0)]]


@pytest.mark.parametrize("maker", ["shard", "HSDP", "flat", "flat wrapper"])
@on_processes(4)
def test_four_ranks_that_all_go_their_own_ways_train_as_one(maker):
    assert_as_reference(steps_joined(MAKERS[maker](), FOUR), reference(FOUR))


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


@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "torch"])
@pytest.mark.parametrize("kind", [Recomputed, Large])
@on_processes(2)
def test_recomputation_ties_and_large_tensors_join_over_each_transport(kind, transport):
    ways = [[(0, 2), (0, 1), (2,), (0, 2)], [(0,), (1,), (0, 2), (2,)]]
    expected = reference(ways, torch.optim.Adam, model=kind(), eps=1e-3)
    model = sharded(transport, "join", model=kind(), prefetch_policy=sherd.PrefetchPolicy(forward_depth=2))
    assert_as_reference(steps_joined(model, ways, partial(torch.optim.Adam, eps=1e-3)), expected)


def in_micro_batches(of_steps: list[list[list[Way]]]) -> Iterator[list[tuple[Tensor, Way]]]:
    """The batches of each step, for `reference_of`, from the ways of each rank's micro-batches."""
    for step, of_ranks in enumerate(of_steps):
        yield [(batch(rank, 10 * step + at), way) for rank, ways in enumerate(of_ranks) for at, way in enumerate(ways)]


@on_processes(3)
def test_ranks_may_have_different_numbers_of_micro_batches():
    """All ways of a rank are micro-batches of one step, the last of which reduces; two steps."""
    of_ranks = [[ALL, (0,), (2,), ALL], [(0, 2), ALL], [(1,)]]
    model = joined()
    rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for number, way in enumerate(of_ranks[rank]):
            model.set_requires_gradient_sync(number == len(of_ranks[rank]) - 1)
            model(batch(rank, 10 * step + number), way).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_as_reference(whole_params(model), reference_of(3, in_micro_batches([of_ranks, of_ranks])))


def clipping_adam(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """What the loop does around its steps, for a plain model."""
    parameters = list(parameters)
    optimizer = torch.optim.Adam(parameters, lr=lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


@on_processes(2)
def test_a_loop_that_clips_asks_for_its_batches():
    """With everything in the loop that only the loop knows of: clipping, a schedule, a scaler."""
    model = joined()
    rank, optimizer = dist.get_rank(), torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    num_seen = 0
    with sherd.join(model, optimizer) as ranks:
        for x in ranks.batches(batch(rank, step) for step in range([4, 2][rank])):
            model(x).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            num_seen += 1
    assert num_seen == 4
    assert_as_reference(whole_params(model), reference([[ALL] * 4, [ALL] * 2], clipping_adam))


def with_a_schedule() -> tuple[dict[str, Tensor], float]:
    model = joined()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with sherd.join(model):
        for step in range(3 if dist.get_rank() == 0 else 1):
            model(batch(dist.get_rank(), step)).square().sum().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return whole_params(model), optimizer.param_groups[0]["lr"]


def test_a_rank_without_batches_steps_with_the_others_learning_rate(world):
    (first, _), (second, rate) = world(2).run(with_a_schedule)
    assert rate == 0.25
    assert_same(first, second, rtol=None, atol=None)


@on_processes(2)
def test_each_epoch_may_have_its_own_numbers_of_batches():
    numbers = [[3, 1], [1, 2], [0, 2], [2, 2]]
    model = joined()
    rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch, of_ranks in enumerate(numbers):
        with sherd.join(model, optimizer):
            for step in range(of_ranks[rank]):
                take_step(model, optimizer, batch(rank, 10 * epoch + step))
        with torch.no_grad():
            model(batch(rank, 0))
    steps = (
        [(batch(rank, 10 * epoch + step), ALL) for rank, number in enumerate(of_ranks) if step < number]
        for epoch, of_ranks in enumerate(numbers)
        for step in range(max(of_ranks))
    )
    assert_as_reference(whole_params(model), reference_of(2, steps))


@on_processes(2)
def test_a_rank_may_evaluate_alone():
    model = joined()

    def evaluate(step: int) -> None:
        if dist.get_rank() == 1 and step % 2:
            with torch.no_grad():
                model(batch(1, step), (0, 2))

    assert_as_reference(steps_joined(model, [[ALL] * 4] * 2, before=evaluate), reference([[ALL] * 4] * 2))


@on_processes(2)
def test_what_no_rank_uses_has_no_gradient():
    model = joined()
    for _ in range(3):
        model(batch(dist.get_rank(), 0), (0,) if dist.get_rank() else (0, 2)).square().sum().backward()
    assert [name for name, each in model.named_parameters() if each.grad is None] == [
        "blocks.1.weight",
        "blocks.1.bias",
    ]


@on_processes(2)
def test_a_rank_may_skip_a_whole_model():
    """Rank 1 does not train the second one in each step."""
    models = [joined(), joined()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(4):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if number == 0 or dist.get_rank() == 0 or step % 2 == 0:
                model(batch(dist.get_rank(), step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_as_reference(whole_params(models[0]), reference([[ALL] * 4] * 2))
    steps = ([(batch(rank, step), ALL) for rank in range(2 if step % 2 == 0 else 1)] for step in range(4))
    assert_as_reference(whole_params(models[1]), reference_of(2, steps))


# A settled step


@on_processes(2)
def test_a_settled_step_votes_where_it_begins_where_backward_ends_and_before_the_optimizer():
    model = joined()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def one(step: int) -> None:
        take_step(model, optimizer, batch(dist.get_rank(), step), (0, 2) if dist.get_rank() else (1, 2))

    assert num_calls(Coordinator, "_vote", one, 5)[2:] == [3, 3, 3]


# What cannot be joined


def steps_one_optimizer_less() -> None:
    model = joined()
    halves = [torch.optim.SGD(model.blocks.parameters(), lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.1)]
    for step in range(2):
        model(batch(dist.get_rank(), step)).square().sum().backward()
        for number, optimizer in enumerate(halves):
            if not (dist.get_rank() and step and number == 0):
                optimizer.step()


def test_a_rank_that_does_not_step_is_named_on_all_ranks(world):
    for text in comm_errors(world(2), steps_one_optimizer_less):
        assert "ranks [0] step an optimizer (SGD, " in text
        assert "that ranks [1] skip" in text


def has_no_batch_and_does_not_know_the_optimizer() -> None:
    model = joined()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if dist.get_rank() == 1:
        with pytest.raises(SherdError, match=r"pass it: sherd.join\(model, optimizer\)"), sherd.join(model):
            pass
        os._exit(3)  # the other one waits for it
    with sherd.join(model):
        model(batch(0, 0)).square().sum().backward()
        optimizer.step()


def test_a_rank_without_any_batch_is_told_to_pass_its_optimizer(world):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(has_no_batch_and_does_not_know_the_optimizer)
    assert failed.value.errors[1][0] == "Died"


def changes_its_gradients(how: str) -> None:
    model = joined()
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
    for text in comm_errors(world(2), changes_its_gradients, how):
        assert "rank 0 has changed its gradients" in text
        assert "ranks.batches(loader)" in text


def test_join_is_refused_where_not_all_units_ask_for_it():
    with imagined_ranks(2):
        plain, error, mixed = Chain(), sherd.fully_shard(Chain()), Chain()
        sherd.fully_shard(mixed.blocks[0])
        sherd.fully_shard(mixed, comm_policy=JOIN)
        for model, kind, words in (
            (plain, ModuleError, "call fully_shard first"),
            (error, PolicyError, "divergence='error'"),
            (mixed, PolicyError, "divergence='error'"),
        ):
            with pytest.raises(kind, match=words), sherd.join(model):
                pass
        with pytest.raises(PolicyError):
            mixed(batch(0, 0))


def dies_before_its_second_step() -> str:
    model = joined()
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


@on_processes(4)
def test_ranks_join_beside_tensor_parallelism():
    """The two ranks of a tensor-parallel pair go one way."""
    of_ranks = SKIPS["each another one"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = Chain()
    parallelize_module(model.blocks[1], mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    joined(model=model, mesh=mesh["dp"])
    steps_joined(model, of_ranks, partial(torch.optim.SGD, foreach=False), mesh["dp"].get_local_rank())
    assert_as_reference(whole(dict(model.named_parameters())), reference(of_ranks))


@on_processes(4)
def test_ranks_join_where_experts_have_meshes_of_their_own():
    """The middle block is sharded over pairs of ranks, as an expert of which each pair has one."""
    of_ranks: list[list[Way]] = [[(0, 1), (0,), ALL], [(0, 2), (1,)], [(1,)], [ALL, (2,), (0, 2)]]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("within", "pair"))
    model: Any = Chain()
    sherd.fully_shard(model.blocks[1], mesh=mesh["within"], comm_policy=JOIN)
    sherd.fully_shard(model, mesh=mesh._flatten("all"), comm_policy=JOIN)
    steps_joined(model, of_ranks, partial(torch.optim.SGD, foreach=False))
    # Each with the expert of one pair of ranks, which has the mean of two; what they share has that of four.
    pairs = nn.ModuleList([Chain(), Chain()])
    pairs[1].blocks[0], pairs[1].blocks[2], pairs[1].head = pairs[0].blocks[0], pairs[0].blocks[2], pairs[0].head
    for each in (*pairs[0].blocks[1].parameters(), *pairs[1].blocks[1].parameters()):
        each.register_hook(lambda gradient: 2 * gradient)
    pairs.forward = lambda x, way: pairs[way[0]](x, way[1])
    steps = (
        [(batch(rank, step), (rank % 2, ways[step])) for rank, ways in enumerate(of_ranks) if step < len(ways)]
        for step in range(3)
    )
    reference_of(4, steps, model=pairs)
    expected = whole_params(pairs[dist.get_rank() % 2])
    assert_as_reference(whole(dict(model.named_parameters())), expected)


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
    model = MAKERS[draw.choice([maker for maker in MAKERS if maker != "HSDP"])]()
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
    return whole_params(model)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@on_processes(seed=range(share(5, 12)))
def test_any_program_trains_as_the_plain_model(seed):
    expected = reference_of(dist.get_world_size(), in_micro_batches(drawn(seed, dist.get_world_size())), **STEPPED_BY)
    assert_as_reference(of_seed(seed), expected)


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
    model = joined()
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
    return whole_params(model)


@pytest.mark.parametrize("use", ["forward", "reset"])
def test_a_rank_that_alone_gives_up_a_backward_and_goes_on_is_an_error_on_all(world, use):
    for text in comm_errors(world(2), gives_up_a_backward, (1,), use):
        assert "ranks [1] gave up a backward in its middle" in text
        assert "sherd.step" in text


@on_processes(2)
def test_ranks_that_all_give_up_a_backward_go_on():
    steps = ([(batch(rank, step), ALL) for rank in range(2)] for step in (0, 1, 3))
    assert_as_reference(gives_up_a_backward((0, 1), "forward"), reference_of(2, steps))
