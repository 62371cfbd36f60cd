"""Inside `sherd.step` all ranks make a step, or all skip it and are as before, whatever fails on one of them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import sherd
from sherd.comm.objects import all_gather_objects
from sherd.engine.moves.gradients import Gradients
from sherd.engine.moves.weights import Weights
from sherd.errors import CommError, GradientError, ModuleError, PolicyError, PolicyTypeError, StateError
from sherd.uneven.coordinator import Coordinator
from tests.divergence.programs import WIDTH, hybrid, joined, num_calls
from tests.support.comparing import assert_same
from tests.support.ranks import RanksFailed
from tests.support.ranks.bodies import on_processes
from tests.support.sharding import FRONTS

NUM_STEPS, FAILS_IN = 4, 2


class Noisy(nn.Module):
    """With batch norm, whose statistics are buffers, and noise, which takes random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).relu() + 0.1 * torch.randn(x.shape) + random.random()


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Noisy() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, fail: Any = None) -> Tensor:
        for number, block in enumerate(self.blocks):
            if fail is not None and number == 1:
                fail()
            x = self.call(block, x)
        return self.head(x)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Recomputed(Failing):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


def net(front: str = "shard", make: Any = Failing, **more: Any) -> Any:
    return joined(front, make(), **more)


MAKERS: dict[str, Any] = {
    **{front: partial(net, front) for front in FRONTS},
    "kept": partial(net, reshard_after_forward=False),
    "DDP": partial(net, placements="ddp"),
    "ZeRO-1": partial(net, placements="zero1"),
    "HSDP": partial(hybrid, net),
    "recomputed": partial(net, make=Recomputed),
    "bfloat16": partial(net, mp_policy=sherd.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
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


class Trouble(Exception):
    """What a body raises."""


def raises() -> None:
    raise Trouble("of this rank alone")


def runs_out() -> None:
    raise torch.OutOfMemoryError("tried to allocate much")


def poison(gradient: Tensor) -> Tensor:
    return gradient * float("nan")


def body(model: Any, optimizer: torch.optim.Optimizer, step: int, where: str | None) -> None:
    """Forward, backward and step, failing at `where`."""
    fail = {"forward": raises, "out of memory": runs_out}.get(where or "")
    if where == "first":
        raises()
    out = model(batch(step, dist.get_rank()), fail)
    if where == "before backward":
        raises()
    if where in ("backward", "nan"):
        out.register_hook(poison if where == "nan" else lambda gradient: raises())
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


Adam = partial(torch.optim.Adam, lr=0.01)
Fails = dict[int, dict[int, str]]
"""`fails[step][rank]` is where that rank fails in that step."""


def made_steps(
    model: Any,
    optimizer: Any,
    steps: Iterable[int],
    fails: Fails,
    body: Callable[..., None] = body,
    before: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> tuple[dict[str, Any], list[tuple[bool, int | None, str | None, int]]]:
    """The state after these steps, which is as before after each one that is skipped; and what each step said."""
    seed()
    said = []
    for step in steps:
        before(step)
        state = state_of(model, optimizer)
        with sherd.step(model, optimizer, **options) as attempt:
            body(model, optimizer, step, fails.get(step, {}).get(dist.get_rank()))
        if attempt.skipped:
            assert_same(state_of(model, optimizer), state)
        optimizer.zero_grad()
        said.append((attempt.skipped, attempt.rank, attempt.reason, attempt.num_skipped))
    return state_of(model, optimizer), said


Made = tuple[Any, torch.optim.Optimizer]


def built(maker: str, **options: Any) -> Made:
    model = MAKERS[maker](**options)
    return model, Adam(model.parameters())


def assert_as_without(make: Callable[[], Made], num_steps: int, fails: Fails, **options: Any) -> list[Any]:
    """On a rank: the steps of `fails` are skipped, and the state is as if they had not been. What each step said."""
    state, said = made_steps(*make(), range(num_steps), fails, **options)
    assert [skipped for skipped, *_ in said] == [step in fails for step in range(num_steps)]
    expected, _ = made_steps(*make(), [step for step in range(num_steps) if step not in fails], {}, **options)
    assert_same(state, expected)
    return said


@functools.cache
def state_without(maker: str, at: int, num_ranks: int, **options: Any) -> dict[str, Any]:
    """On a rank: the state after all steps but one, once for all ways in which that one fails."""
    return made_steps(*built(maker), [step for step in range(NUM_STEPS) if step != at], {}, **options)[0]


WHERE = ["first", "forward", "out of memory", "before backward", "backward", "after backward", "nan"]


def assert_skips(maker: str, where: str, rank: int, at: int, **options: Any) -> None:
    """On a rank: all skip a step that `rank` cannot finish, for one reason, and go on as if it had not been."""
    state, said = made_steps(*built(maker), range(NUM_STEPS), {at: {rank: where}}, **options)
    assert_same(state, state_without(maker, at, dist.get_world_size(), **options))
    assert [skipped for skipped, *_ in said] == [step == at for step in range(NUM_STEPS)]
    assert [total for *_, total in said] == [int(step >= at) for step in range(NUM_STEPS)]
    text = {"nan": "not finite", "out of memory": "OutOfMemoryError: tried to"}.get(where, "Trouble: of this rank")
    _, blamed, reason, _ = said[at]
    assert text in reason
    assert blamed == (rank if where != "nan" else 0)  # all shards have a part of what is poisoned
    assert set(all_gather_objects(reason, "")) == {reason}


@pytest.mark.pairs
@pytest.mark.parametrize("at", [0, FAILS_IN])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("maker", ["shard", "flat wrapper"])
@on_processes(2)
def test_all_skip_a_step_that_one_cannot_finish_and_go_on_as_if_it_had_not_been(maker, where, at):
    assert_skips(maker, where, 1, at)


TWO_RANKS = sorted(MAKERS.keys() - {"shard", "flat wrapper", "HSDP"})


@pytest.mark.values
@pytest.mark.parametrize("where", ["forward", "backward", "after backward", "nan"])
@pytest.mark.parametrize(
    ("maker", "num_ranks"), [*((maker, 2) for maker in TWO_RANKS), ("shard", 4), ("HSDP", 4), ("wrapper", 4)]
)
@on_processes()
def test_under_each_placement_and_front_end_and_on_four_ranks(maker, where):
    assert_skips(maker, where, dist.get_world_size() // 2, FAILS_IN)


@pytest.mark.parametrize("where", ["forward", "backward", "nan"])
@pytest.mark.parametrize("maker", ["shard", "flat wrapper"])
@on_processes(2)
def test_gradients_from_before_are_as_before(maker, where):
    """`made_steps` compares all that a step changes around the one that is skipped, gradients too."""
    model, optimizer = built(maker)

    def accumulate(step):
        model(batch(step + 50, dist.get_rank())).square().sum().backward()

    _, said = made_steps(model, optimizer, range(NUM_STEPS), {FAILS_IN: {1: where}}, before=accumulate)
    assert [skipped for skipped, *_ in said] == [False, False, True, False]


# An optimizer that has stepped


@pytest.mark.pairs
@pytest.mark.parametrize("where", ["optimizer", "end"])
@pytest.mark.parametrize("at", [0, FAILS_IN])
@pytest.mark.parametrize("maker", ["shard", "ZeRO-1", "flat wrapper"])
@on_processes(2)
def test_what_an_optimizer_has_changed_is_undone_if_copies_are_kept(maker, at, where):
    assert_skips(maker, where, 1, at, undo_optimizer=True)


@on_processes(2, at=[0, FAILS_IN])
def test_the_spans_of_a_flattened_optimizer_are_undone(at):
    def make():
        model = net()
        return model, sherd.flatten_optimizer(Adam(model.parameters()))

    assert_as_without(make, 4, {at: {1: "end"}}, undo_optimizer=True)


@pytest.mark.parametrize("where", ["optimizer", "end"])
@on_processes(2)
def test_without_copies_all_raise(where):
    model = net()
    optimizer = Adam(model.parameters())
    with (
        pytest.raises(Trouble if dist.get_rank() == 1 else CommError) as raised,
        sherd.step(model, optimizer) as attempt,
    ):
        body(model, optimizer, 0, where if dist.get_rank() == 1 else None)
    assert not attempt.skipped
    assert "of this rank alone" in str(raised.value)
    if dist.get_rank() == 0:
        assert "rank 1 could not finish a step: Trouble: of this rank alone" in str(raised.value)
        assert "an optimizer has stepped on some ranks" in str(raised.value)
        assert "undo_optimizer=True" in str(raised.value)


# Errors of our own making


class Scaled(Failing):
    """Its units have a group of each of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
            block.register_forward_hook(lambda block, args, out: out * block.scale.float())


@pytest.mark.parametrize("kind", ["gather", "reduce"])
@pytest.mark.parametrize("fails_at", [0, 3, 4])
@on_processes(2)
def test_a_collective_that_could_not_be_started_is_made_up_for(kind, fails_at):
    """On rank 1 the memory for the message of the group `fails_at` is missing in the step in the middle."""
    patched, name = {"gather": (Weights, "_gather_shards"), "reduce": (Gradients, "reduce")}[kind]
    plain, calls = getattr(patched, name), 0

    def short(self, *args):
        nonlocal calls
        calls += 1
        if calls == fails_at + 1:
            runs_out()
        plain(self, *args)

    def short_body(model, optimizer, step, where):
        with mock.patch.object(patched, name, short if where else plain):
            body(model, optimizer, step, None)

    def make():
        model = net(make=Scaled)
        return model, Adam(model.parameters())

    assert_as_without(make, 3, {1: {1: kind}}, body=short_body)


# What users see


@on_processes(3)
def test_skips_are_counted_called_back_and_logged():
    model = net()
    optimizer = Adam(model.parameters())
    seen: list[Any] = []
    note = lambda attempt: seen.append((attempt.rank, attempt.reason, attempt.num_skipped_in_a_row))  # noqa: E731
    handler = mock.Mock(level=logging.WARNING)
    logging.getLogger("sherd").addHandler(handler)
    try:
        for step in range(6):
            fails = dist.get_rank() == 1 and step in (0, 1, 4)
            with sherd.step(model, optimizer, on_skip=note) as attempt:
                body(model, optimizer, step, "forward" if fails else None)
            optimizer.zero_grad()
            seen.append((attempt.skipped, attempt.num_skipped, attempt.num_skipped_in_a_row))
    finally:
        logging.getLogger("sherd").removeHandler(handler)
    text = "Trouble: of this rank alone"
    assert seen == [
        (1, text, 1),
        (True, 1, 1),
        (1, text, 2),
        (True, 2, 2),
        (False, 2, 0),
        (False, 2, 0),
        (1, text, 1),
        (True, 3, 1),
        (False, 3, 0),
    ]
    warned = [call.args[0].getMessage() for call in handler.handle.call_args_list]
    if dist.get_rank() == 2:
        assert warned == []
    else:
        assert len(warned) == 3
        assert "all ranks have skipped a step, since rank 1 could not finish it: Trouble: of this" in warned[0]
        assert "3 steps were skipped so far, 1 in a row" in warned[2]


def skips_too_often(where: str, max_skips: int) -> str:
    """On a rank: the error of the first step that is not skipped, and leaves all as before; the next one is made."""
    model = net()
    optimizer = Adam(model.parameters())

    def is_skipped(fails: bool) -> bool:
        with sherd.step(model, optimizer, max_skips=max_skips) as attempt:
            body(model, optimizer, 0, where if fails else None)
        return attempt.skipped

    fails = dist.get_rank() == 1 or where == "nan"
    assert all(is_skipped(fails) for _ in range(max_skips))
    before = state_of(model, optimizer)
    with pytest.raises((Trouble, CommError, GradientError)) as raised:
        is_skipped(fails)
    assert_same(state_of(model, optimizer), before)
    assert not is_skipped(False)
    return f"{raised.type.__name__}: {raised.value}"


@on_processes(2, max_skips=[0, 2])
def test_after_a_limit_the_error_is_raised_on_all_ranks_which_are_as_before(max_skips):
    said = skips_too_often("forward", max_skips)
    if dist.get_rank() == 1:
        assert said == "Trouble: of this rank alone"
    else:
        assert said.startswith("CommError: ")
        assert f"rank 1 could not finish a step: Trouble: of this rank alone. It is not skipped: {max_skips} " in said


@on_processes(2)
def test_after_a_limit_gradients_that_are_not_finite_are_an_error():
    said = skips_too_often("nan", 1)
    assert said.startswith(["GradientError: ", "CommError: "][dist.get_rank()])
    if dist.get_rank() == 0:
        assert "gradients that are not finite: blocks.0.linear.weight, " in said


@on_processes(2)
def test_what_is_not_finite_may_be_ignored():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sherd.step(model, optimizer, nonfinite="ignore") as attempt:
        body(model, optimizer, 0, "nan")
    assert any(each.to_local().isnan().any() for each in model.parameters())
    assert not attempt.skipped


def interrupted_after(out: Tensor) -> None:
    raise KeyboardInterrupt


def is_interrupted() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if dist.get_rank() == 1:
        with pytest.raises(KeyboardInterrupt), sherd.step(model, optimizer):
            interrupted_after(model(batch(0, 0)))
        os._exit(3)
    with pytest.raises(CommError), sherd.step(model, optimizer):
        body(model, optimizer, 0, None)


def test_a_rank_that_is_interrupted_leaves_and_the_others_raise(world):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(is_interrupted)
    assert failed.value.errors.keys() == {1}


def swallowing_body(model: Any, optimizer: Any, step: int, where: str | None) -> None:
    """Rank 0 catches whatever comes, and goes on."""
    if where:
        raises()
    for _ in range(2):
        try:  # noqa: SIM105
            body(model, optimizer, step, None)
        except BaseException:
            pass


@on_processes(2)
def test_a_body_that_catches_everything_is_skipped_all_the_same():
    _, ((is_skipped, *_),) = made_steps(*built("shard"), [0], {0: {1: "first"}}, swallowing_body)
    assert is_skipped


# With other features


def scaled(fails_in: dict[int, str], steps: list[int]) -> tuple[dict[str, Any], dict[str, Any], list[bool]]:
    model = net()
    optimizer = Adam(model.parameters())
    scaler = sherd.ShardedGradScaler("cpu", init_scale=4.0, growth_interval=2)
    seed()
    said = []
    for step in steps:
        where = fails_in.get(step)
        with sherd.step(model, optimizer, also=[scaler]) as attempt:
            out = model(batch(step, dist.get_rank()))
            if where == "inf":
                out.register_hook(poison)
            scaler.scale(out.square().sum()).backward()
            if where == "after backward" and dist.get_rank() == 1:
                raises()
            attempt.agree()
            if where == "after unscale":
                scaler.unscale_(optimizer)
            if where == "after unscale" and dist.get_rank() == 1:
                raises()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        said.append(attempt.skipped)
    return state_of(model, optimizer), scaler.state_dict(), said


@on_processes(2)
def test_a_scalers_own_skip_is_a_step_that_was_made():
    _, state, said = scaled({1: "inf"}, [0, 1, 2])
    assert said == [False, False, False]
    assert state["scale"] == 2.0


@on_processes(2, where=["after backward", "after unscale"])
def test_a_scaler_is_as_before(where):
    *found, said = scaled({1: where}, [0, 1, 2])
    *expected, _ = scaled({}, [0, 2])
    assert said == [False, True, False]
    assert_same(found, expected)


def micro_batches(model: Any, optimizer: Any, step: int, where: str | None) -> None:
    with sherd.accumulate(model, 2):
        for number in range(2):
            if number and where:
                raises()
            model(batch(10 * step + number, dist.get_rank())).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


@pytest.mark.parametrize(("maker", "num_ranks"), [("shard", 2), ("ZeRO-1", 2), ("HSDP", 4), ("wrapper", 2)])
@on_processes()
def test_a_rank_fails_in_the_middle_of_an_accumulation(maker):
    assert_as_without(partial(built, maker), 3, {1: {0: "between"}}, body=micro_batches)


@on_processes(2)
def test_a_rank_without_batches_skips_with_the_others():
    """Rank 1 has a batch in the first step alone."""

    def run(steps, fails):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with sherd.join(model, optimizer):
            return made_steps(model, optimizer, steps[:1] if dist.get_rank() else steps, fails)

    state, said = run([0, 1, 2], {1: {0: "before backward"}})
    assert [skipped for skipped, *_ in said] == [[False, True, False], [False]][dist.get_rank()]
    assert_same(state, run([0, 2], {})[0])


@on_processes(1)
def test_one_process_skips_by_itself():
    model = net(mesh=init_device_mesh("cpu", (1,)))
    optimizer = Adam(model.parameters())
    fails = {1: {0: "forward"}, 2: {0: "backward"}, 3: {0: "nan"}}
    _, said = made_steps(model, optimizer, range(5), fails)
    with pytest.raises(Trouble), sherd.step(model, optimizer, max_skips=0):
        raises()
    with pytest.raises(GradientError), sherd.step(model, optimizer, max_skips=0):
        body(model, optimizer, 0, "nan")
    with sherd.step(model, optimizer) as attempt:
        sherd.step(model, optimizer).__enter__()
    assert "sherd.step within sherd.step of the same model, FSDPFailing" in (attempt.reason or "")
    assert [skipped for skipped, *_ in said] == [False, True, True, True, False]


# Wrong use


@on_processes(2)
def test_wrong_use_is_named():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def refused(kind: type[Exception], words: str, of: Any, **options: Any) -> None:
        with pytest.raises(kind, match=words), sherd.step(of, optimizer, **options):
            pass

    refused(ModuleError, "step: nothing below Linear is sharded", nn.Linear(2, 2))
    refused(PolicyError, r'comm_policy=CommPolicy\(divergence="join"\)', sherd.fully_shard(nn.Linear(2, 2)))
    refused(PolicyError, "expected 'skip' or 'ignore'", model, nonfinite="raise")
    refused(PolicyError, "expected 0 or more", model, max_skips=-1)
    with pytest.raises(PolicyTypeError):
        sherd.step(model, [model])
    loss = model(batch(0, 0)).sum()
    model.set_requires_gradient_sync(False)
    loss.backward()
    refused(StateError, "around all of its micro-batches", model)
    optimizer.zero_grad()
    model.zero_grad()
    for unit in (*model.blocks, model):
        unit.zero_grad()
    model.set_requires_gradient_sync(True)
    second = net()
    for inner in (model, second):
        with sherd.step(model, optimizer) as attempt:
            sherd.step(inner, torch.optim.SGD(inner.parameters(), lr=0.01)).__enter__()
        assert "sherd.step within sherd.step of models on the same ranks" in (attempt.reason or "")
    with sherd.step(second, optimizer):
        second(batch(0, 0))
    with pytest.raises(StateError, match=r"outside of its sherd\.step"):
        attempt.agree()


# Again and again, and elsewhere


OFTEN: Fails = {
    0: {1: "first"},
    1: {0: "backward", 1: "forward"},
    3: {1: "first"},
    4: {1: "first"},
    5: {0: "nan", 1: "out of memory"},
    6: {0: "after backward", 1: "after backward"},
}


@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "torch"])
@pytest.mark.parametrize("maker", ["shard", "ZeRO-1"])
@on_processes(2)
def test_steps_that_are_skipped_in_a_row_over_each_transport(maker, transport):
    said = assert_as_without(partial(built, maker, transport=transport), 8, OFTEN, max_skips=9)
    assert [rank for skipped, rank, *_ in said if skipped] == [1, 1, 1, 1, 1, 0]


@on_processes(2, undoes=[True, False])
def test_the_second_of_two_models_fails_when_the_first_has_stepped(undoes):
    """Of a generator and a discriminator, as one module."""
    pair: Any = nn.ModuleList([net(), net()])
    optimizers = [Adam(each.parameters()) for each in pair]
    before = [state_of(*each) for each in zip(pair, optimizers, strict=True)]
    kind = [CommError, Trouble][dist.get_rank()]
    words = ["an optimizer has stepped on some ranks", "^of this rank alone$"][dist.get_rank()]
    with contextlib.nullcontext() if undoes else pytest.raises(kind, match=words):  # noqa: SIM117
        with sherd.step(pair, optimizers, undo_optimizer=undoes) as attempt:
            body(pair[0], optimizers[0], 0, None)
            body(pair[1], optimizers[1], 0, "backward" if dist.get_rank() == 1 else None)
    if undoes:
        assert attempt.skipped
        assert_same([state_of(*each) for each in zip(pair, optimizers, strict=True)], before)


@on_processes(2)
def test_a_settled_step_has_one_vote_more_also_after_a_skip():
    model = net()
    optimizer = Adam(model.parameters())

    def one(step: int) -> None:
        with sherd.step(model, optimizer):
            body(model, optimizer, step, "backward" if step == 3 and dist.get_rank() == 1 else None)
        optimizer.zero_grad()

    assert num_calls(Coordinator, "_vote", one, 6)[2:] == [4, 2, 4, 4]


@on_processes(2)
def test_a_rank_that_fails_waits_for_one_that_has_not_begun_the_step():
    """Rank 1 comes late to each step, since it evaluates; rank 0 fails in one before it has come."""

    def run(steps, fails):
        model, optimizer = built("shard")

        def evaluate(step):
            if dist.get_rank() == 1:
                model.eval()
                with torch.no_grad():
                    model(batch(0, 0))
                model.train()
            seed()

        return made_steps(model, optimizer, steps, fails, before=evaluate)

    state, said = run([0, 1, 2], {1: {0: "first"}})
    assert [skipped for skipped, *_ in said] == [False, True, False]
    assert_same(state, run([0, 2], {})[0])
