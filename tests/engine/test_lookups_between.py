"""A program that reads an embedding's weight between forward and backward finds what it finds in plain PyTorch."""

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import sherd
from sherd import CPUOffloadPolicy, MixedPrecisionPolicy
from sherd.engine.run import lookups
from tests.engine.gradients import assert_as_plain, gradients
from tests.engine.test_lookups import (
    TOKENS,
    WIDTH,
    Model,
    built,
    counted_gathers,
    live_of,
    made,
    plain_gradients,
    run_with,
)
from tests.support.comparing import Named, assert_same, plain_name, whole
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded

__all__ = ["run_with"]  # a fixture
NUM_STEPS = 5
READERS: dict[str, Callable[[nn.Module], Tensor]] = {
    "as logits": lambda model: F.linear(torch.ones(2, WIDTH), model.embed.weight).square().mean(),
    "in sum": lambda model: 1e-4 * model.embed.weight.sum(),
    "detached": lambda model: model.embed.weight.detach().square().mean(),
    "looked up": lambda model: F.embedding(TOKENS, model.embed.weight).square().sum(),
    "by the module": lambda model: model.embed(TOKENS).square().sum(),
    "by name": lambda model: model.get_parameter("embed.weight")[5].sum(),
    "by getattr": lambda model: getattr(model.embed, "weight", None)[:4].exp().sum(),
    "in chunks": lambda model: sum(F.linear(torch.ones(1, WIDTH), each).sum() for each in model.embed.weight.chunk(3)),
    "as saved": lambda model: (model.embed.weight.half().float() ** 2).sum(),
}
WHEN = {"always": range(NUM_STEPS), "later": range(3, NUM_STEPS), "first": range(1), "once": range(2, 3)}
"""In which steps."""


def in_steps(model: nn.Module, reader: str, when: str) -> tuple[list[Named], list[float], list[bool]]:
    """Gradients, losses, and whether the weight was there when forward had ended, of each step."""
    found, losses, there = [], [], []
    for step in range(NUM_STEPS):
        loss = model(TOKENS)
        there.append(type(model) is Model or live_of(model)["embed.weight"])
        if step in WHEN[when]:
            loss = loss + READERS[reader](model)
        losses.append(loss.item())
        found.append(gradients(model, loss))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    return found, losses, there


def sharded_steps(reader: str, when: str, front: str) -> Any:
    return in_steps(made(front=front), reader, when)


def check(run_with: Any, reader: str, when: str, front: str) -> None:
    plain, plain_losses, _ = in_steps(built(), reader, when)
    for found, losses, there in run_with(front)(sharded_steps, reader, when, front):
        assert losses == pytest.approx(plain_losses, rel=1e-5)
        assert_as_plain(found, *plain)
        is_kept = {"always": [True] * NUM_STEPS, "first": [True] * NUM_STEPS, "later": [True] + [False] * 3 + [True]}
        assert there == is_kept.get(when, [True, False, False, True, True])


@pytest.mark.values
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_the_weight_between_finds_it_whole_and_gives_it_gradients(run_with, reader, when):
    check(run_with, reader, when, "shard")


@pytest.mark.values
@pytest.mark.parametrize("when", ["always", "later"])
@pytest.mark.parametrize("front", ["wrapper", "flat", "blocks", "join", "replicated"])
def test_the_weight_is_found_whole_under_every_front_end_and_layout(run_with, front, when):
    check(run_with, "as logits", when, front)


@on_threads(2)
def test_a_late_reader_has_the_weight_gathered_once_more_and_then_kept():
    model, gathers = made(), []
    for step in range(NUM_STEPS):
        with counted_gathers(model) as count:
            loss = model(TOKENS)
            (loss + READERS["as logits"](model) if step >= 2 else loss).backward()
        gathers.append(len(count))
        model.zero_grad()
    assert gathers == [2, 2, 3, 2, 2]


OPTIONS: dict[str, dict[str, Any]] = {
    "half": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "gathers touched": {"on_touch": "unshard"},
    "ignores touched": {"on_touch": "ignore"},
    "kept": {"reshard_after_forward": False},
    "freed": {"reshard_after_forward": True},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_every_policy_gives_the_gradients_that_it_gives_where_nothing_is_freed(threads, options):
    def steps() -> list[Named]:
        model, found = made(**OPTIONS[options]), []
        for step in range(4):
            loss = model(TOKENS)
            if step != 1 and options != "freed":
                loss = loss + READERS["by the module"](model) + READERS["in sum"](model)
            found.append(gradients(model, loss))
        return found

    found = threads(2).run(steps)
    with mock.patch.object(lookups, "_is_embedding", return_value=False):
        assert_same(found, threads(2).run(steps))


KEPT: dict[int, list[Tensor]] = defaultdict(list)
"""Of each rank; not on a model, which is searched for views."""
HELD: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda weight: weight,
    "view": lambda weight: weight[3:],
    "detached": lambda weight: weight.detach(),
}


@pytest.mark.parametrize("way", HELD)
def test_what_a_program_has_kept_of_the_weight_from_its_forward_on_stays_there(threads, way):
    def steps_that_keep_it() -> list[Named]:
        """From the third step on."""
        model, found, there, rank = made(), [], [], dist.get_rank()
        as_ever, step = model.as_logits, 0

        def as_logits(x: Tensor) -> Tensor:
            if step >= 2:
                KEPT[rank].append(HELD[way](model.embed.weight))
            return as_ever(x)

        model.as_logits = as_logits
        for step in range(4):  # noqa: B007
            loss = model(TOKENS)
            there.append(live_of(model)["embed.weight"])
            found.append(gradients(model, loss + (KEPT[rank][0].square().sum() if KEPT[rank] else 0)))
            KEPT[rank].clear()
        assert there == [True, False, True, True]
        return found

    plain = built()
    loss, extra = plain(TOKENS), HELD[way](plain.embed.weight).square().sum()
    without, with_extra = (gradients(plain, loss + more) for more in (0, extra))
    for found in threads(2).run(steps_that_keep_it):
        assert_as_plain(found, without, without, with_extra, with_extra)


def test_a_rank_that_alone_holds_the_weight_gathers_it_again_with_the_others(threads):
    def held_on_one_rank() -> list[Named]:
        """Only rank 0 keeps the weight, as garbage might; then all gather again."""
        model, rank, found, there, kept = made(), dist.get_rank(), [], [], []
        as_ever = model.as_logits

        def as_logits(x: Tensor) -> Tensor:
            if rank == 0:
                kept.append(model.embed.weight)
            return as_ever(x)

        model.as_logits = as_logits
        for step in range(5):
            model.look = (lambda: kept.append(model.embed(TOKENS).sum())) if step == 2 else lambda: None
            losses = [model(TOKENS) for _ in range(2 if step == 3 else 1)]
            there.append(live_of(model)["embed.weight"])
            found.append(gradients(model, sum(losses)))
            kept.clear()
        assert there[:3] == [True, rank == 0, rank == 0]
        return found

    once, twice = once_and_twice()
    for found in threads(2).run(held_on_one_rank):
        assert_as_plain(found, once, once, once, twice, once)


def once_and_twice() -> tuple[Named, Named]:
    """The plain gradients of a forward, and of two."""
    plain = built()
    loss = plain(TOKENS)
    return gradients(plain, loss), gradients(plain, loss + loss)


def test_a_rank_that_alone_has_read_the_weight_from_the_first_step_on_hangs_nobody(threads):
    def read_on_one_rank() -> list[Named]:
        """For a statistic."""
        model, found = made(), []
        for _ in range(4):
            loss = model(TOKENS)
            if dist.get_rank() == 0:
                assert torch.isfinite(model.embed.weight.detach().norm())
            sum(each.numel() for each in model.parameters() if dist.get_rank() == 0)
            found.append(gradients(model, loss))
        return [*found, gradients(model, sum(model(TOKENS) for _ in range(2)))]

    once, twice = once_and_twice()
    for found in threads(2).run(read_on_one_rank):
        assert_as_plain(found, *[once] * 4, twice)


def lent(model: nn.Module) -> Tensor:
    with sherd.unsharded(model):
        return whole(model.embed.weight)


DOINGS: dict[str, Callable[[Any], Any]] = {
    "named_parameters": lambda model: dict(model.named_parameters())["embed.weight"],
    "state_dict": lambda model: model.state_dict()["embed.weight"],
    "state_dict of the module": lambda model: model.embed.state_dict()["weight"],
    "deepcopy of the module": lambda model: copy.deepcopy(model.embed).weight,
    "copy of the module": lambda model: copy.copy(model.embed).weight,
    "unsharded": lent,
    "to": lambda model: model.to("cpu").embed.weight,
    "to of the module": lambda model: model.embed.to("cpu").weight,
    "zero_grad": lambda model: model.zero_grad() or model.embed.weight,
    "unshard": lambda model: model.unshard() or model.embed.weight,
    "reshard": lambda model: model.reshard() or model.embed.weight,
    "refresh": lambda model: (sherd.refresh(model), model.embed.weight)[1],
    "functional_call": lambda model: torch.func.functional_call(
        model.embed, {"weight": whole(model.embed.weight) + 1}, (torch.arange(2),)
    ).sub(1),
    "compiled": lambda model: torch.compile(lambda: model.embed.weight * 2, backend="eager")() / 2,
}


def between(doing: str) -> tuple[list[Named], Any]:
    """The gradients of four steps, in the third of which something else happens between forward and backward."""
    model, found, result = made(), [], None
    for step in range(4):
        loss = model(TOKENS)
        if step == 2:
            result = whole(DOINGS[doing](model))
        loss.backward()
        found.append(gradients(model))
    return found, result


@pytest.mark.parametrize("doing", DOINGS)
def test_what_else_a_program_does_between_finds_the_values_and_changes_no_gradient(threads, world, doing):
    weight = built().embed.weight
    for found, result in (world if doing == "compiled" else threads)(2).run(between, doing):
        assert torch.allclose(result, weight[: len(result)], atol=1e-6)
        assert_as_plain(found, plain_gradients())


FIRST = {"late loss": 2, "loss": 0, "model": 9}
"""The step from which on a loss outside of the model, which is compiled, reads the weight."""


def compiled(which: str) -> tuple[list[Named], list[bool]]:
    model, found, there = built(), [], []
    if which == "model":  # without a checkpoint, at which Dynamo breaks the graph
        model.forward = lambda tokens: model.head(model.embed(tokens)).square().mean()
    sharded(model)

    def loss_of(x: Tensor) -> Tensor:
        return x + F.linear(torch.ones(2, WIDTH), model.embed.weight).square().mean()

    run = torch.compile(model, backend="eager") if which == "model" else model
    outside = torch.compile(loss_of, backend="eager") if which != "model" else loss_of
    for step in range(4):
        loss = run(TOKENS)
        there.append(live_of(model)["embed.weight"])
        (outside(loss) if step >= FIRST[which] else loss).backward()
        found.append(gradients(model))
    return found, there


@pytest.mark.parametrize("which", FIRST)
def test_a_compiled_model_and_a_compiled_loss_give_the_right_gradients(world, which):
    plain = built()
    loss = plain.head(plain.embed(TOKENS)).square().mean() if which == "model" else plain(TOKENS)
    without, with_logits = (gradients(plain, loss + more) for more in (0, READERS["as logits"](plain)))
    for found, there in world(2).run(compiled, which):
        assert there == {"late loss": [True, False, False, True], "loss": [True] * 4}.get(which, [True] + [False] * 3)
        assert_as_plain(found, *(with_logits if step >= FIRST[which] else without for step in range(4)))


def test_a_watched_dict_is_pickled_and_copied_as_the_plain_one_that_it_stands_for() -> None:
    touched: list[int] = []
    plain: dict[str, Any] = {"weight": nn.Parameter(torch.ones(2))}
    watched = lookups.Watched(plain, lambda: touched.append(1))
    for each in (pickle.loads(pickle.dumps(watched)), copy.deepcopy(watched)):
        assert type(each) is dict
        assert torch.equal(each["weight"], plain["weight"])
    assert list(watched) == ["weight"]
    assert next(iter(watched.values())) is plain["weight"]
    assert not touched
    watched["bias"] = None
    assert list(plain) == ["weight", "bias"]
    assert watched.pop("bias") is None
    assert watched.get("weight") is watched["weight"]
    assert len(touched) == 4
    assert list(plain) == ["weight"]


def test_a_weight_put_there_between_is_treated_as_where_nothing_is_freed(threads):
    def replaced() -> str:
        """What becomes of a program that puts another weight there between forward and backward, in its third step."""
        model = made()
        for _ in range(2):
            gradients(model, model(TOKENS))
        loss = model(TOKENS)
        model.embed.weight = nn.Parameter(torch.zeros_like(built().embed.weight))
        try:
            loss.backward()
        except Exception as error:
            return type(error).__name__ + str(error)[:60]
        return "fine"

    found = threads(2).run(replaced)
    with mock.patch.object(lookups, "_is_embedding", return_value=False):
        assert found == threads(2).run(replaced)


def test_a_weight_that_is_a_part_of_a_flat_parameter_is_found_whole(threads):
    def steps() -> list[Named]:
        model, found = made(front="flat wrapper"), []
        for _ in range(3):
            (model(TOKENS) + READERS["as logits"](model)).backward()
            with sherd.unsharded(model, with_grads=True, writeback=False):
                found.append({plain_name(name): whole(each.grad) for name, each in model.named_parameters()})
            model.zero_grad()
        return found

    plain = built()
    expected = gradients(plain, plain(TOKENS) + READERS["as logits"](plain))
    for found in threads(2).run(steps):
        assert_as_plain(found, expected)
