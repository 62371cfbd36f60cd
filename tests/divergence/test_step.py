"""Inside `sherd.step` all ranks make a step, or all skip it and are as before, whatever fails on one of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sherd

JOIN = sherd.CommPolicy(divergence="join")
WIDTH, NUM_STEPS, FAILS_IN = 8, 4, 2

pytestmark = pytest.mark.filterwarnings("ignore:all ranks have skipped a step:RuntimeWarning")


class Block(nn.Module):
    """With batch norm, whose statistics are buffers, and noise, which takes random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).relu() + 0.1 * torch.randn(x.shape) + random.random()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, fail: Any = None) -> Tensor:
        for number, block in enumerate(self.blocks):
            if fail is not None and number == 1:
                fail()
            x = block(x)
        return self.head(x)


def sharded(mesh: Any = None, **more: Any) -> Any:
    model: Any = Net()
    for block in model.blocks:
        sherd.fully_shard(block, mesh=mesh, comm_policy=JOIN, **more)
    return sherd.fully_shard(model, mesh=mesh, comm_policy=JOIN, **more)


def hybrid() -> Any:
    size = (dist.get_world_size() // 2, 2)
    return sharded(init_device_mesh("cpu", size, mesh_dim_names=("replicas", "shards")))


def wrapped(use_orig_params: bool = True) -> Any:
    model: Any = Net()
    options: Any = {"use_orig_params": use_orig_params, "comm_policy": JOIN}
    for number, block in enumerate(model.blocks):
        model.blocks[number] = sherd.FullyShardedDataParallel(block, **options)
    return sherd.FullyShardedDataParallel(model, **options)


MAKERS: dict[str, Any] = {
    "fully_shard": sharded,
    "Flat": lambda: sharded(placement=sherd.Flat()),
    "Blocks": lambda: sharded(placement=sherd.Blocks(2)),
    "Owned": lambda: sharded(placement=sherd.Owned()),
    "kept": lambda: sharded(reshard_after_forward=False),
    "DDP": lambda: sharded(placements=sherd.Placements.ddp()),
    "ZeRO-1": lambda: sharded(placements=sherd.Placements.zero1()),
    "HSDP": hybrid,
    "bfloat16": lambda: sharded(mp_policy=sherd.MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "wrapper": wrapped,
    "flat parameters": lambda: wrapped(use_orig_params=False),
}


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def seed() -> None:
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a step changes on this rank."""
    held = lambda each: each.to_local() if hasattr(each, "to_local") else each  # noqa: E731
    found: dict[str, Any] = {}
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        found[name] = held(each.detach()).clone()
        if each.grad is not None:
            found[f"{name}.grad"] = held(each.grad).clone()
    for at, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{at}.{key}"] = held(value).clone() if torch.is_tensor(value) else value
    for at, group in enumerate(optimizer.param_groups):
        found[f"group {at}"] = {key: value for key, value in group.items() if key != "params"}
    return found | {"cpu": torch.get_rng_state(), "python": random.getstate()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if torch.is_tensor(value):
            assert torch.equal(value, expected[name]), name
        else:
            assert value == expected[name], name


class Trouble(Exception):
    """What a body raises."""


def raises() -> None:
    raise Trouble("of this rank alone")


def runs_out() -> None:
    raise torch.OutOfMemoryError("tried to allocate much")


def poison(gradient: Tensor) -> Tensor:
    return gradient * float("nan")


def hook_that_raises(gradient: Tensor) -> None:
    raises()


def body(model: Any, optimizer: torch.optim.Optimizer, step: int, where: str | None) -> None:
    """Forward, backward and step, failing at `where`; twice, with the first one not reduced, if that is "accumulated"."""
    fail = {"forward": raises, "out of memory": runs_out}.get(where or "")
    if where == "first":
        raises()
    out = model(batch(step, dist.get_rank()), fail)
    if where == "before backward":
        raises()
    if where in ("backward", "nan"):
        out.register_hook(poison if where == "nan" else hook_that_raises)
    if where == "backward":
        out = out * 1.0
    loss = out.square().sum()
    loss.backward()
    if where == "after backward":
        raises()
    if where == "optimizer":
        handle = optimizer.register_step_pre_hook(lambda *_: raises())
        try:
            optimizer.step()
        finally:
            handle.remove()
    optimizer.step()
    if where == "end":
        raises()


def trained(
    maker: str, steps: list[int], fails_in: dict[int, tuple[int, str]], accumulates: bool = False, **options: Any
) -> tuple[dict[str, Any], list[tuple[bool, int | None, str | None, int]]]:
    """The state after these steps, in some of which a rank fails: `fails_in[step] == (rank, where)`. And what each
    said."""
    model = MAKERS[maker]()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seed()
    said = []
    for step in steps:
        if accumulates:
            model(batch(step + 50, dist.get_rank())).square().sum().backward()
        rank, where = fails_in.get(step, (-1, None))
        before = state_of(model, optimizer)
        with sherd.step(model, optimizer, **options) as attempt:
            body(model, optimizer, step, where if rank == dist.get_rank() else None)
        if attempt.skipped:
            assert_same(state_of(model, optimizer), before)
        optimizer.zero_grad()
        said.append((attempt.skipped, attempt.rank, attempt.reason, attempt.num_skipped))
    return state_of(model, optimizer), said


WHERE = ["first", "forward", "out of memory", "before backward", "backward", "after backward", "nan"]


def check_skips(found: list[Any], without: list[Any], where: str, rank: int, at: int) -> None:
    for (state, said), (expected, _) in zip(found, without, strict=True):
        assert_same(state, expected)
        assert [skipped for skipped, *_ in said] == [step == at for step in range(NUM_STEPS)]
        assert said[at] == said[at][:2] + found[0][1][at][2:]
        assert [total for *_, total in said] == [int(step >= at) for step in range(NUM_STEPS)]
        text = {"nan": "not finite", "out of memory": "OutOfMemoryError: tried to"}.get(where, "Trouble: of this rank")
        assert text in said[at][2]
        assert said[at][1] == (rank if where != "nan" else 0)  # all shards have a part of what is poisoned


@pytest.mark.parametrize("at", [0, FAILS_IN])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("maker", ["fully_shard", "flat parameters"])
def test_all_skip_a_step_that_one_cannot_finish_and_go_on_as_if_it_had_not_been(world, maker, where, at):
    steps = list(range(NUM_STEPS))
    found = world(2).run(trained, maker, steps, {at: (1, where)})
    without = world(2).run(trained, maker, [step for step in steps if step != at], {})
    check_skips(found, without, where, 1, at)


@pytest.mark.parametrize("where", ["forward", "backward", "nan"])
@pytest.mark.parametrize("maker", sorted(MAKERS.keys() - {"fully_shard", "flat parameters", "HSDP"}))
def test_under_each_placement_and_front_end(world, maker, where):
    steps = list(range(NUM_STEPS))
    found = world(2).run(trained, maker, steps, {FAILS_IN: (1, where)})
    without = world(2).run(trained, maker, [0, 1, 3], {})
    check_skips(found, without, where, 1, FAILS_IN)


@pytest.mark.parametrize("where", ["forward", "backward", "after backward", "nan"])
@pytest.mark.parametrize("maker", ["fully_shard", "HSDP", "wrapper"])
def test_on_four_ranks(world, maker, where):
    steps = list(range(NUM_STEPS))
    found = world(4).run(trained, maker, steps, {FAILS_IN: (2, where)})
    without = world(4).run(trained, maker, [0, 1, 3], {})
    check_skips(found, without, where, 2, FAILS_IN)


@pytest.mark.parametrize("where", ["forward", "backward", "nan"])
@pytest.mark.parametrize("maker", ["fully_shard", "flat parameters"])
def test_gradients_from_before_are_as_before(world, maker, where):
    """`trained` compares all that a step changes around the one that is skipped, gradients too."""
    found = world(2).run(trained, maker, list(range(NUM_STEPS)), {FAILS_IN: (1, where)}, accumulates=True)
    assert [[skipped for skipped, *_ in said] for _, said in found] == [[False, False, True, False]] * 2
