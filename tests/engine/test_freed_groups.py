"""The whole of a large tensor is freed in backward once it was read, and is there for whoever reads it again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sherd import fully_shard
from sherd.engine.run.unit import Unit
from sherd.memory.watch import watched
from sherd.schedule.actions import AfterBackward, GradientsReady, GroupPassed
from sherd.schedule.state import Live
from tests.engine.gradients import assert_as_plain, gradients
from tests.support import training
from tests.support.comparing import Named, assert_named_close, whole_grads
from tests.support.models import Wired
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded

WIDTH = 1024  # a square weight of 4 MiB has a group to itself
INPUTS = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


class Layers(nn.Module):
    """Three linear layers of which the last is called first in backward; `look` is called between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.look = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.look())
        return self.third(self.second(x).relu())


def shared() -> nn.Module:
    """One large layer in two reentrant checkpoints; `first` has its gradient only after both."""

    def run(self: Any, x: Tensor) -> Tensor:
        x = checkpoint(self.shared, self.first(x), use_reentrant=True).relu()
        return checkpoint(self.shared, x, use_reentrant=True).relu()

    return Wired(run, first=nn.Linear(WIDTH, WIDTH), shared=nn.Linear(WIDTH, WIDTH))


class Calls(nn.Module):
    """A block under a reentrant checkpoint, called `times` times. Its `unused` never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block.unused = nn.Parameter(torch.zeros(1))
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x[:, :8])
        for _ in range(self.times):
            x = checkpoint(self.block, x, use_reentrant=True).relu()
        return x


def listed() -> nn.Module:
    """Two checkpointed layers that are one unit."""

    def run(self: Any, x: Tensor) -> Tensor:
        return checkpoint(self.right, checkpoint(self.left, x, use_reentrant=False).relu(), use_reentrant=False)

    return Wired(run, left=nn.Linear(WIDTH, WIDTH), right=nn.Linear(WIDTH, WIDTH))


class ReadTwice(nn.Module):
    """A large weight and a bias, of which a checkpoint inside of the unit also reads what needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False)

    def run(self, x: Tensor) -> Tensor:
        mean = (self.bias.detach() + torch.ones(WIDTH)).mean()
        return torch.tanh(x @ self.weight) * mean + self.bias


def nested() -> nn.Module:
    """A block under a checkpoint; its layers are units of their own."""
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    return Wired(lambda self, x: checkpoint(self.block, x[:, :8], use_reentrant=False), block=block)


def recomputed() -> nn.Sequential:
    return nn.Sequential(ReadTwice(), ReadTwice())


def built(make: Callable[[], nn.Module]) -> nn.Module:
    return training.made(make, seed=3)


UNITS: dict[Any, Callable[[Any], list[Any]]] = {
    Calls: lambda model: [model.block],
    listed: lambda model: [[model.left, model.right]],
    nested: lambda model: [model.block[0], model.block[2]],
    recomputed: list,
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    model = built(make)
    return sharded(model, units=[*UNITS.get(make, lambda model: [])(model), model])


def backward(model: nn.Module) -> Named:
    return gradients(model, model(INPUTS).square().mean())


@on_threads(2)
def test_a_large_weight_is_freed_as_soon_as_its_gradient_has_come_from_the_second_backward_on():
    model, seen = made(Layers), []
    model.look = lambda: seen.append(
        {each.name: weights.live for weights in Unit.of(model).weights for each in weights.group.parameters}
    )
    assert_as_plain([backward(model) for _ in range(3)], backward(built(Layers)))
    assert set(seen[0].values()) == {Live.UNSHARDED}, "who has not seen a backward keeps all until it ends"
    for later in seen[1:]:
        assert {name for name, live in later.items() if live is Live.SHARDED} == {"second.weight", "third.weight"}


@on_threads(2)
def test_a_unit_that_stays_whole_after_backward_stays_so_in_all_its_groups():
    model, found = made(Layers), []
    model.set_reshard_after_backward(False)
    for _ in range(3):
        model(INPUTS).square().mean().backward()
        assert {weights.live for weights in Unit.of(model).weights} == {Live.UNSHARDED}
        model.reshard()  # gradients are the shards'
        found.append(gradients(model))
    assert_as_plain(found, backward(built(Layers)))


def in_turn(model: nn.Module, times: tuple[int, ...]) -> list[Named]:
    """The gradients of one backward for each of `times`."""
    found = []
    for model.times in times:
        found.append(backward(model))
    return found


@pytest.mark.parametrize(
    ("kind", "times", "units"),
    [
        (shared, (1, 1, 1), set()),
        (listed, (1, 1, 1), set()),
        (recomputed, (1, 1, 1), set()),
        (Calls, (1, 1, 1), {1}),
        (Calls, (1, 1, 2, 1, 1), {1}),
    ],
    ids=["read again, as always", "recomputed twice, as always", "gradients first", "read once", "read twice at times"],
)
@on_threads(2)
def test_a_weight_that_is_read_again_after_its_gradient_has_come_is_there_again(kind, times, units):
    """And these units are freed by groups in the last two backwards."""
    model, freed = made(kind), set()
    found = in_turn(model, times[:-2])
    with watched(model, Unit.of(model)) as watch:
        for each in times[-2:]:
            found += in_turn(model, (each,))
            freed |= {action.unit for action in watch.step if isinstance(action, GroupPassed)}
    assert_as_plain(found, *in_turn(built(kind), times))
    assert freed == units


@on_threads(2)
def test_a_unit_inside_of_a_checkpoint_is_freed_before_its_reduction():
    model, plain = made(nested), backward(built(nested))
    assert_as_plain([backward(model) for _ in range(2)], plain)
    with watched(model, Unit.of(model)) as watch:
        assert_as_plain([backward(model)], plain)
    complete = [each for each in watch.step if isinstance(each, AfterBackward | GradientsReady)]
    assert AfterBackward(1, unreduced=True) in complete, complete
    assert AfterBackward(2, unreduced=True) in complete, complete
    assert not any(isinstance(each, GradientsReady) for each in complete)


def under_a_checkpoint() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.large, self.first(x), use_reentrant=True).tanh())

    return Wired(run, first=nn.Linear(8, WIDTH), large=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, 2))


@on_threads(2)
def test_more_forwards_before_a_backward_than_before_may_each_be_run_again():
    model, plain = fully_shard(training.made(under_a_checkpoint)), training.made(under_a_checkpoint)
    for num_forwards in (1, 2, 1, 2):
        for each in (model, plain):
            sum(each(torch.ones(2, 8)).square().mean() for _ in range(num_forwards)).backward()
    assert_named_close(whole_grads(model), whole_grads(plain), "gradient", rtol=1e-5, atol=1e-6)
