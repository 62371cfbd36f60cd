"""A program reads an embedding's weight between forward and backward: it finds what it finds in plain PyTorch."""

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import sherd
from sherd import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from sherd.engine.run import lookups
from tests.engine.test_lookups import (
    TOKENS,
    WIDTH,
    Model,
    assert_as_plain,
    built,
    counted_gathers,
    gradients,
    live_of,
    sharded,
)

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


def in_steps(model: nn.Module, reader: str, when: str) -> tuple[list[dict], list[float], list[bool]]:
    """Gradients, losses, and whether the weight was there when forward had ended, of each step."""
    found, losses, there = [], [], []
    for step in range(NUM_STEPS):
        loss = model(TOKENS)
        there.append((isinstance(model, Model) and not hasattr(model, "unshard")) or live_of(model)["embed.weight"])
        if step in WHEN[when]:
            loss = loss + READERS[reader](model)
        loss.backward()
        found.append(gradients(model))
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    return found, losses, there


def sharded_steps(reader: str, when: str, front: str) -> Any:
    return in_steps(sharded(front=front), reader, when)


@pytest.mark.values
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_the_weight_between_finds_it_whole_and_gives_it_gradients(world, reader, when):
    check(world, reader, when, "")


@pytest.mark.values
@pytest.mark.parametrize("when", ["always", "later"])
@pytest.mark.parametrize("front", ["wrapper", "flat", "blocks", "join", "replicated"])
def test_the_weight_is_found_whole_under_every_front_end_and_layout(world, front, when):
    check(world, "as logits", when, front)


def check(world: Any, reader: str, when: str, front: str) -> None:
    plain, plain_losses, _ = in_steps(built(), reader, when)
    for found, losses, there in world(4 if front == "replicated" else 2).run(sharded_steps, reader, when, front):
        assert losses == pytest.approx(plain_losses, rel=1e-5)
        for each, expected in zip(found, plain, strict=True):
            assert_as_plain(each, expected)
        is_kept = {"always": [True] * NUM_STEPS, "first": [True] * NUM_STEPS, "later": [True] + [False] * 3 + [True]}
        assert there == is_kept.get(when, [True, False, False, True, True])


def gathers_of_late_reads() -> list[int]:
    model, gathers = sharded(), []
    for step in range(NUM_STEPS):
        with counted_gathers(model) as count:
            loss = model(TOKENS)
            if step >= 2:
                loss = loss + READERS["as logits"](model)
            loss.backward()
        gathers.append(len(count))
        model.zero_grad()
    return gathers


def test_a_late_reader_has_the_weight_gathered_once_more_and_then_kept(world):
    for gathers in world(2).run(gathers_of_late_reads):
        assert gathers == [2, 2, 3, 2, 2]


OPTIONS: dict[str, dict[str, Any]] = {
    "half": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "gathers touched": {"on_touch": "unshard"},
    "ignores touched": {"on_touch": "ignore"},
    "kept": {"reshard_after_forward": False},
    "freed": {"reshard_after_forward": True},
}


def with_options(options: str, is_off: bool) -> list[dict]:
    with mock.patch.object(lookups, "_is_embedding", (lambda module: False) if is_off else lookups._is_embedding):
        model = built()
        fully_shard(model.block, **OPTIONS[options])
        fully_shard(model, **OPTIONS[options])
    found = []
    for step in range(4):
        loss = model(TOKENS)
        if step != 1 and options != "freed":
            loss = loss + READERS["by the module"](model) + READERS["in sum"](model)
        loss.backward()
        found.append(gradients(model))
    return found


@pytest.mark.parametrize("options", OPTIONS)
def test_every_policy_gives_the_gradients_that_it_gives_where_nothing_is_freed(world, options):
    found, kept = world(2).run(with_options, options, False), world(2).run(with_options, options, True)
    for on, off in zip(found, kept, strict=True):
        for each, expected in zip(on, off, strict=True):
            assert all(torch.equal(each[name], expected[name]) for name in expected)


KEPT: list[Tensor] = []
"""Not on a model, which is searched for views."""


def held_since_forward(way: str) -> tuple[list[dict], list[bool]]:
    """Of a program that keeps the Parameter that its forward has read, from the third step on."""
    model, found, there, kept = sharded(), [], [], KEPT
    as_ever, step = model.as_logits, 0

    def as_logits(x: Tensor) -> Tensor:
        if step >= 2:
            weight = model.embed.weight
            KEPT.append({"itself": weight, "view": weight[3:], "detached": weight.detach()}[way])
        return as_ever(x)

    model.as_logits = as_logits
    for step in range(4):  # noqa: B007
        loss = model(TOKENS)
        there.append(live_of(model)["embed.weight"])
        loss = loss + (kept[0].square().sum() if kept else 0)
        loss.backward()
        kept.clear()
        found.append(gradients(model))
    return found, there


@pytest.mark.parametrize("way", ["itself", "view", "detached"])
def test_what_a_program_has_kept_of_the_weight_from_its_forward_on_stays_there(world, way):
    plain = built()
    weight = plain.embed.weight
    extra = {"itself": weight, "view": weight[3:], "detached": weight.detach()}[way].square().sum()
    loss = plain(TOKENS)
    expected = [gradients_of(plain, loss + more) for more in (0, extra)]
    for found, there in world(2).run(held_since_forward, way):
        assert there == [True, False, True, True]
        for each, plain_one in zip(found, [expected[0], expected[0], expected[1], expected[1]], strict=True):
            assert_as_plain(each, plain_one)


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward(retain_graph=True)
    return gradients(model)


def held_on_one_rank() -> tuple[list[dict], list[bool]]:
    """Only rank 0 keeps the weight, as garbage might; then all gather again."""
    model, found, there, kept = sharded(), [], [], []
    model.look = lambda: kept.append(model.embed(TOKENS).sum())
    as_ever = model.as_logits

    def as_logits(x: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            kept.append(model.embed.weight)
        return as_ever(x)

    model.as_logits = as_logits
    for step in range(5):
        model.look = (lambda: kept.append(model.embed(TOKENS).sum())) if step == 2 else lambda: None
        losses = [model(TOKENS) for _ in range(2 if step == 3 else 1)]
        there.append(live_of(model)["embed.weight"])
        sum(losses).backward()
        found.append(gradients(model))
        kept.clear()
    return found, there


def test_a_rank_that_alone_holds_the_weight_gathers_it_again_with_the_others(world):
    plain = built()
    loss = plain(TOKENS)
    once = gradients_of(plain, loss)
    expected = [once, once, once, gradients_of(plain, loss + loss), once]
    for rank, (found, there) in enumerate(world(2).run(held_on_one_rank)):
        assert there[:3] == [True, rank == 0, rank == 0]
        for each, plain_one in zip(found, expected, strict=True):
            assert_as_plain(each, plain_one)


def read_on_one_rank() -> list[dict]:
    """Only rank 0 reads the weight, from the first step on, for a statistic."""
    model, found = sharded(), []
    for _ in range(4):
        loss = model(TOKENS)
        if dist.get_rank() == 0:
            assert torch.isfinite(model.embed.weight.detach().norm())
        sum(each.numel() for each in model.parameters() if dist.get_rank() == 0)
        loss.backward()
        found.append(gradients(model))
    losses = [model(TOKENS) for _ in range(2)]
    sum(losses).backward()
    return [*found, gradients(model)]


def test_a_rank_that_alone_has_read_the_weight_from_the_first_step_on_hangs_nobody(world):
    plain = built()
    loss = plain(TOKENS)
    once, twice = gradients_of(plain, loss), gradients_of(plain, loss + loss)
    for found in world(2).run(read_on_one_rank):
        for each, expected in zip(found, [once] * 4 + [twice], strict=True):
            assert_as_plain(each, expected)


def between(doing: str) -> tuple[list[dict], Any]:
    """The gradients of four steps, in the third of which something else happens between forward and backward."""
    model, found, result = sharded(), [], None
    for step in range(4):
        loss = model(TOKENS)
        if step == 2:
            result = DOINGS[doing](model)
        loss.backward()
        found.append(gradients(model))
    return found, result


def values_of(shown: Any) -> Tensor:
    return shown.full_tensor() if isinstance(shown, DTensor) else shown.detach().clone()


def lent(model: nn.Module) -> Tensor:
    with sherd.unsharded(model):
        return values_of(model.embed.weight)


DOINGS: dict[str, Callable[[Any], Any]] = {
    "named_parameters": lambda model: values_of(dict(model.named_parameters())["embed.weight"]),
    "state_dict": lambda model: values_of(model.state_dict()["embed.weight"]),
    "state_dict of the module": lambda model: values_of(model.embed.state_dict()["weight"]),
    "deepcopy of the module": lambda model: values_of(copy.deepcopy(model.embed).weight),
    "copy of the module": lambda model: values_of(copy.copy(model.embed).weight),
    "unsharded": lent,
    "to": lambda model: values_of(model.to("cpu").embed.weight),
    "to of the module": lambda model: values_of(model.embed.to("cpu").weight),
    "zero_grad": lambda model: model.zero_grad() or values_of(model.embed.weight),
    "unshard": lambda model: model.unshard() or values_of(model.embed.weight),
    "reshard": lambda model: model.reshard() or values_of(model.embed.weight),
    "refresh": lambda model: (sherd.refresh(model), values_of(model.embed.weight))[1],
    "functional_call": lambda model: torch.func.functional_call(
        model.embed, {"weight": values_of(model.embed.weight) + 1}, (torch.arange(2),)
    ).sub(1),
    "compiled": lambda model: torch.compile(lambda: model.embed.weight * 2, backend="eager")().detach() / 2,
}


@pytest.mark.parametrize("doing", DOINGS)
def test_what_else_a_program_does_between_finds_the_values_and_changes_no_gradient(world, doing):
    plain = built()
    expected = gradients_of(plain, plain(TOKENS))
    for found, result in world(2).run(between, doing):
        whole = plain.embed.weight
        assert torch.allclose(result, whole[: len(result)], atol=1e-6)
        for each in found:
            assert_as_plain(each, expected)


def compiled(which: str) -> tuple[list[dict], list[bool]]:
    model, found, there = built(), [], []
    if which == "model":  # without a checkpoint, at which Dynamo breaks the graph
        model.forward = lambda tokens: model.head(model.embed(tokens)).square().mean()
    fully_shard(model.block)
    fully_shard(model)

    def loss_of(x: Tensor) -> Tensor:
        return x + F.linear(torch.ones(2, WIDTH), model.embed.weight).square().mean()

    run = torch.compile(model, backend="eager") if which == "model" else model
    outside = torch.compile(loss_of, backend="eager") if which != "model" else loss_of
    first = {"late loss": 2, "loss": 0, "model": 9}[which]
    for step in range(4):
        loss = run(TOKENS)
        there.append(live_of(model)["embed.weight"])
        (outside(loss) if step >= first else loss).backward()
        found.append(gradients(model))
    return found, there


@pytest.mark.parametrize("which", ["model", "loss", "late loss"])
def test_a_compiled_model_and_a_compiled_loss_give_the_right_gradients(world, which):
    plain = built()
    loss = plain.head(plain.embed(TOKENS)).square().mean() if which == "model" else plain(TOKENS)
    without = gradients_of(plain, loss)
    with_logits = gradients_of(plain, loss + READERS["as logits"](plain))
    first = {"late loss": 2, "loss": 0, "model": 9}[which]
    for found, there in world(2).run(compiled, which):
        assert there == {"late loss": [True, False, False, True], "loss": [True] * 4}.get(which, [True] + [False] * 3)
        for step, each in enumerate(found):
            assert_as_plain(each, with_logits if step >= first else without)


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


def replaced(new: str) -> str:
    """What becomes of a program that puts another weight there between forward and backward, in its third step."""
    model = sharded()
    for _ in range(2):
        model(TOKENS).backward()
        model.zero_grad()
    loss = model(TOKENS)
    model.embed.weight = nn.Parameter(torch.zeros_like(built().embed.weight))
    try:
        loss.backward()
    except Exception as error:
        return type(error).__name__ + str(error)[:60]
    return "fine"


def replaced_where_nothing_is_freed(new: str) -> str:
    with mock.patch.object(lookups, "_is_embedding", return_value=False):
        return replaced(new)


def test_a_weight_put_there_between_is_treated_as_where_nothing_is_freed(world):
    assert world(2).run(replaced, "") == world(2).run(replaced_where_nothing_is_freed, "")


def of_a_flat_parameter() -> list[dict]:
    model = built()
    model.block = FullyShardedDataParallel(model.block)
    model = FullyShardedDataParallel(model)
    found = []
    for _ in range(3):
        (model(TOKENS) + READERS["as logits"](model)).backward()
        with sherd.unsharded(model, with_grads=True, writeback=False):
            grads = {name.replace("_fsdp_wrapped_module.", ""): each.grad for name, each in model.named_parameters()}
            found.append({name: grad.clone() for name, grad in grads.items()})
        model.zero_grad()
    return found


def test_a_weight_that_is_a_part_of_a_flat_parameter_is_found_whole(world):
    plain = built()
    expected = gradients_of(plain, plain(TOKENS) + READERS["as logits"](plain))
    for found in world(2).run(of_a_flat_parameter):
        for each in found:
            assert_as_plain(each, expected)
