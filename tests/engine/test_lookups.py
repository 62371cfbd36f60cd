"""An embedding's weight is gone between forward and backward, and is there for whoever reads it all the same."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sherd import CommPolicy
from sherd.engine.run.seal import unit_of
from sherd.memory.watch import watched
from sherd.schedule.state import Live
from tests.engine.gradients import assert_as_plain, gradients
from tests.support.comparing import Named, assert_same, whole
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import FRONTS, sharded

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

    def units(self) -> list[nn.Module]:
        return [self.block, self]

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


def made(way: str = "", front: str = "shard", **options: Any) -> Any:
    """On a rank: the model, sharded; the fronts "join" and "replicated" are `fully_shard`'s with such options."""
    if front == "join":
        options["comm_policy"] = CommPolicy(divergence="join")
    if front == "replicated":
        options["mesh"] = mesh_of((2, 2))
    model = built(way)
    return sharded(model, front if front in FRONTS else "shard", model.units(), **options)


@pytest.fixture
def run_with(threads: Any, world: Any) -> Callable[..., Any]:
    """`run_with(front)(fn, ...)` runs fn on the ranks for that front: threads, but for joining, which needs gloo."""
    return lambda front: (world if front == "join" else threads)(4 if front == "replicated" else 2).run


def plain_gradients(way: str = "") -> Named:
    model = built(way)
    return gradients(model, model(TOKENS))


def live_of(model: nn.Module) -> dict[str, bool]:
    """Of the root's parameters: whether their memory is there."""
    return {
        parameter.name: weights.live is Live.UNSHARDED and weights.made.buffer.tensor.untyped_storage().nbytes() > 0
        for weights in unit_of(model).weights
        for parameter in weights.group.parameters
    }


def three_steps(front: str) -> list[Named]:
    model, found = made(front=front), []
    for step in range(3):
        loss = model(TOKENS)
        gone = {name for name, is_there in live_of(model).items() if not is_there}
        assert gone == ({"embed.weight"} if step else set()), "who has not seen a backward keeps all"
        found.append(gradients(model, loss))
    return found


@pytest.mark.parametrize("front", ["shard", "flat", "blocks", "wrapper", "join", "replicated"])
def test_an_embedding_is_gone_between_forward_and_backward_from_the_second_step_on(run_with, front):
    for found in run_with(front)(three_steps, front):
        assert_as_plain(found, plain_gradients())


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
@on_threads(2)
def test_what_else_reads_the_weight_in_backward_keeps_it_there(way):
    model, plain, gathers = made(way), plain_gradients(way), set()
    for _ in range(4):
        with counted_gathers(model) as count:
            loss = model(TOKENS)
            assert live_of(model)["embed.weight"]
            loss.backward()
        gathers.add(len(count))
        assert_as_plain([gradients(model)], plain)
    assert len(gathers) == 1


@pytest.mark.parametrize("first", [0, 1])
@on_threads(2)
def test_a_hook_in_backward_reads_the_right_values_and_has_the_weight_kept_from_then_on(first):
    """The hook begins to read in the `first` step of 4."""
    model, plain, rows, weights, found, gathers = made(), built(), [], [], [], []

    @torch.no_grad()
    def look() -> None:
        weights.append(whole(model.embed.weight))
        rows.append(model.embed(TOKENS))

    for step in range(4):
        model.look = look if step >= first else lambda: None
        with counted_gathers(model) as count:
            model(TOKENS).backward()
        gathers.append(len(count))
        found.append(gradients(model))
    assert_same(rows, [plain.embed(TOKENS)] * (4 - first))
    assert_same(weights, [whole(plain.embed.weight)] * (4 - first))
    # The head goes before the hook, and comes along.
    assert gathers[1] == gathers[0] + (2 if first == 1 else 0)
    assert gathers[2:] == [gathers[0]] * 2
    assert_as_plain(found, plain_gradients())


def penalized(model: nn.Module) -> Named:
    """The gradients of a loss that has a gradient in it."""
    seen = []
    handle = model.embed.register_forward_hook(lambda module, args, output: seen.append(output))
    loss = model(TOKENS)
    handle.remove()
    (inner,) = torch.autograd.grad(loss, seen[0], create_graph=True)
    (loss + inner.square().sum()).backward()
    return gradients(model)


@on_threads(2)
def test_a_gradient_of_a_gradient_is_right():
    model = made()
    assert_as_plain([penalized(model) for _ in range(3)], penalized(built()))


@pytest.mark.parametrize("keeps", [False, True])
@on_threads(2)
def test_a_second_forward_gathers_the_weight_again_once_and_keeps_it_then(keeps):
    """Steps with two forwards before their two backwards, after one of one forward."""
    model, found, gathers, there = made(), [], [], []
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
    assert there[2:] == [True] * 2
    assert gathers[1] - gathers[2] == (0 if keeps else 1)
    assert gathers[2] == gathers[3]
    assert_as_plain(found, plain_gradients())


@on_threads(2)
def test_a_state_dict_between_forward_and_backward_has_all_values():
    model = made()
    for _ in range(2):
        gradients(model, model(TOKENS))
    with torch.no_grad():
        model(TOKENS)
    assert not live_of(model)["embed.weight"]
    model(TOKENS)  # which no backward follows
    assert_same(whole(model.state_dict()), whole(built().state_dict()))
    assert_as_plain([gradients(model, model(TOKENS))], plain_gradients())


@on_threads(2)
def test_a_recorded_step_says_which_groups_backward_does_not_read():
    model = made()
    for _ in range(2):
        gradients(model, model(TOKENS))
    with watched(model, unit_of(model)) as watch:
        model(TOKENS).backward()
    (unread,) = [each.unread for each in watch.step if getattr(each, "unread", ())]
    assert len(unread) == 1
