"""Is an embedding's weight gone between forward and backward, and is it there for whoever reads it all the same?"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from sherd import Blocks, CommPolicy, Flat, FullyShardedDataParallel, fully_shard
from sherd.engine.run.seal import unit_of
from sherd.memory.watch import watched
from sherd.schedule.actions import FreeGroup
from sherd.schedule.state import Live
from tests.support.comparing import assert_named_close, whole_grads

WIDTH = 64
VOCABULARY = 16384  # of 4 MiB: it has a group to itself
TOKENS = torch.arange(6).view(2, 3) * 7


class Keeping(torch.autograd.Function):
    """A linear layer that keeps its weight as an attribute."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (x,) = ctx.saved_tensors
        return grads[0] @ ctx.weight, grads[0].flatten(0, 1).t() @ x.flatten(0, 1)


class Model(nn.Module):
    """An embedding, a block and a head; `way` is what else reads the embedding's weight."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.way, self.look = way, lambda: None
        if way == "tied":
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.looked_up(tokens)
        if x.requires_grad:
            x.register_hook(lambda _: self.look())
        x = checkpoint(self.block, x, use_reentrant=False).tanh()
        return self.as_logits(x).square().mean() + self.extra(x)

    def looked_up(self, tokens: Tensor) -> Tensor:
        if self.way == "recomputed":
            return checkpoint(self.embed, tokens, use_reentrant=False).sin()
        if self.way == "recomputed inline":
            return checkpoint(lambda ids: F.embedding(ids, self.embed.weight).sin(), tokens, use_reentrant=False)
        return self.embed(tokens)

    def as_logits(self, x: Tensor) -> Tensor:
        weight = self.embed.weight
        match self.way:
            case "read by a function":
                return F.linear(x, weight)
            case "read by a reentrant checkpoint":
                return checkpoint(lambda h: F.linear(h.sin(), self.embed.weight), x, use_reentrant=True)
            case "read by a checkpoint":
                return checkpoint(lambda h: F.linear(h.sin(), self.embed.weight), x, use_reentrant=False)
            case "kept as an attribute":
                return Keeping.apply(x, weight)
        return self.head(x)

    def extra(self, x: Tensor) -> Tensor:
        return (x * self.embed.weight[:3]).sum() if self.way == "read in slices" else x.sum() * 0


WAYS = (
    "tied",
    "recomputed",
    "recomputed inline",
    "read by a function",
    "read by a reentrant checkpoint",
    "read by a checkpoint",
    "kept as an attribute",
    "read in slices",
)


def built(way: str = "") -> Model:
    torch.manual_seed(5)
    return Model(way)


def sharded(way: str = "", front: str = "") -> nn.Module:
    model = built(way)
    if front == "wrapper":
        model.block = FullyShardedDataParallel(model.block, use_orig_params=True)
        return FullyShardedDataParallel(model, use_orig_params=True)
    options: dict[str, Any] = {
        "flat": {"placement": Flat()},
        "blocks": {"placement": Blocks(2)},
        "join": {"comm_policy": CommPolicy(divergence="join")},
    }.get(front, {})
    if front == "replicated":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(model.block, **options)
    return fully_shard(model, **options)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = whole_grads(model)
    model.zero_grad(set_to_none=True)
    return found


def assert_as_plain(found: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert_named_close(found, plain, "gradient", rtol=1e-4, atol=1e-7)


def plain_gradients(way: str = "") -> dict[str, Tensor]:
    model = built(way)
    model(TOKENS).backward()
    return gradients(model)


def live_of(model: nn.Module) -> dict[str, bool]:
    """Of the root's parameters: whether their memory is there."""
    return {
        parameter.name: weights.live is Live.UNSHARDED and weights._made.buffer.tensor.untyped_storage().nbytes() > 0
        for weights in unit_of(model).weights
        for parameter in weights.group.parameters
    }


def between_forward_and_backward(front: str) -> tuple[list[dict], list[dict]]:
    """Which of the root's parameters are there, in each of three steps; and the gradients."""
    model, seen, found = sharded(front=front), [], []
    for _ in range(3):
        loss = model(TOKENS)
        seen.append(live_of(model))
        loss.backward()
        found.append(gradients(model))
    return seen, found


@pytest.mark.parametrize("front", ["shard", "flat", "blocks", "wrapper", "join", "replicated"])
def test_an_embedding_is_gone_between_forward_and_backward_from_the_second_step_on(world, front):
    plain = plain_gradients()
    for seen, found in world(4 if front == "replicated" else 2).run(between_forward_and_backward, front):
        assert set(seen[0].values()) == {True}, "who has not seen a backward keeps all"
        for later in seen[1:]:
            assert {name for name, is_there in later.items() if not is_there} == {"embed.weight"}
        for each in found:
            assert_as_plain(each, plain)


def in_steps(way: str) -> tuple[list[dict], list[bool], list[int]]:
    """The gradients of four steps, whether the embedding was there between forward and backward, and the gathers."""
    model, found, there, gathers = sharded(way), [], [], []
    for _ in range(4):
        with counted_gathers(model) as count:
            loss = model(TOKENS)
            there.append(live_of(model)["embed.weight"])
            loss.backward()
        gathers.append(len(count))
        found.append(gradients(model))
    return found, there, gathers


@contextmanager
def counted_gathers(model: nn.Module) -> Iterator[list[str]]:
    """Has the gathers of the root's groups noted inside the context, one by one."""
    seen: list[str] = []
    with ExitStack() as stack:
        for weights in unit_of(model).weights:

            def gather(*args: Any, weights: Any = weights, gather: Any = weights.gather) -> None:
                seen.append(weights.group.name)
                gather(*args)

            stack.enter_context(mock.patch.object(weights, "gather", gather))
        yield seen


@pytest.mark.parametrize("way", WAYS)
def test_what_else_reads_the_weight_in_backward_keeps_it_there(world, way):
    plain = plain_gradients(way)
    for found, there, gathers in world(2).run(in_steps, way):
        for each in found:
            assert_as_plain(each, plain)
        assert there == [True] * 4
        assert len(set(gathers)) == 1


def read_in_hooks(first: int) -> tuple[list[Tensor], list[Tensor], list[dict], list[int]]:
    """What a hook in backward makes of the embedding and of its weight from the `first` of 4 steps on; the gradients;
    the gathers of each step."""
    model, rows, weights, found, gathers = sharded(), [], [], [], []

    def look() -> None:
        with torch.no_grad():
            weights.append(model.embed.weight.detach().clone())
            rows.append(model.embed(TOKENS))

    for step in range(4):
        model.look = look if step >= first else lambda: None
        with counted_gathers(model) as count:
            model(TOKENS).backward()
        gathers.append(len(count))
        found.append(gradients(model))
    return rows, weights, found, gathers


@pytest.mark.parametrize("first", [0, 1])
def test_a_hook_in_backward_reads_the_right_values_and_has_the_weight_kept_from_then_on(world, first):
    plain = built()
    for rows, weights, found, gathers in world(2).run(read_in_hooks, first):
        assert len(rows) == 4 - first
        assert all(torch.equal(each, plain.embed(TOKENS)) for each in rows)
        assert all(torch.equal(each, plain.embed.weight) for each in weights)
        # The head goes before the hook, and comes along.
        assert gathers[1] == gathers[0] + (2 if first == 1 else 0)
        assert gathers[2:] == [gathers[0]] * 2
        for each in found:
            assert_as_plain(each, plain_gradients())


def twice_differentiated() -> list[dict]:
    model, found = sharded(), []
    for _ in range(3):
        penalized(model)
        found.append(gradients(model))
    return found


def penalized(model: nn.Module) -> None:
    seen = []
    handle = model.embed.register_forward_hook(lambda module, args, output: seen.append(output))
    loss = model(TOKENS)
    handle.remove()
    (inner,) = torch.autograd.grad(loss, seen[0], create_graph=True)
    (loss + inner.square().sum()).backward()


def test_a_gradient_of_a_gradient_is_right(world):
    plain = built()
    penalized(plain)
    expected = gradients(plain)
    for found in world(2).run(twice_differentiated):
        for each in found:
            assert_as_plain(each, expected)


def two_forwards(keeps: bool) -> tuple[list[dict], list[int], list[bool]]:
    """Of steps with two forwards before their two backwards, after one of one forward."""
    model, found, gathers, there = sharded(), [], [], []
    model.set_reshard_after_backward(not keeps)
    for num_forwards in (1, 2, 2, 2):
        with counted_gathers(model) as count:
            losses = [model(TOKENS) for _ in range(num_forwards)]
            there.append(live_of(model)["embed.weight"])
            for loss in losses:
                (loss / num_forwards).backward()
        gathers.append(len(count))
        model.block.reshard()
        model.reshard()
        found.append(gradients(model))
    return found, gathers, there


@pytest.mark.parametrize("keeps", [False, True])
def test_a_second_forward_gathers_the_weight_again_once_and_keeps_it_then(world, keeps):
    plain = plain_gradients()
    for found, gathers, there in world(2).run(two_forwards, keeps):
        assert there[2:] == [True] * 2
        assert gathers[1] - gathers[2] == (0 if keeps else 1)
        assert gathers[2] == gathers[3]
        for each in found:
            assert_as_plain(each, plain)


def forwards_that_no_backward_follows() -> tuple[list[bool], dict]:
    model, there = sharded(), []
    for _ in range(2):
        model(TOKENS).backward()
        model.zero_grad(set_to_none=True)
    with torch.no_grad():
        model(TOKENS)
    there.append(live_of(model)["embed.weight"])
    model(TOKENS)
    state = {name: each.full_tensor() for name, each in model.state_dict().items()}
    model(TOKENS).backward()
    found = gradients(model)
    return [*there, all(torch.equal(state[name], each) for name, each in built().state_dict().items())], found


def test_a_state_dict_between_forward_and_backward_has_all_values(world):
    for (there, is_right), found in world(2).run(forwards_that_no_backward_follows):
        assert not there
        assert is_right
        assert_as_plain(found, plain_gradients())


def actions_of_a_step() -> list[FreeGroup]:
    model = sharded()
    for _ in range(2):
        model(TOKENS).backward()
        model.zero_grad(set_to_none=True)
    with watched(model, unit_of(model)) as watch:
        model(TOKENS).backward()
    return [getattr(each, "unread", ()) for each in watch.step if getattr(each, "unread", ())]


def test_a_recorded_step_says_which_groups_backward_does_not_read(world):
    for found in world(2).run(actions_of_a_step):
        assert len(found) == 1
        assert len(found[0]) == 1
