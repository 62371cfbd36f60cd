"""When is the whole of a large tensor freed in backward, and is it there for whoever reads it again?"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sherd import fully_shard
from sherd.engine.run.seal import unit_of
from sherd.memory.watch import watched
from sherd.schedule.actions import AfterBackward, GradientsReady, GroupPassed
from sherd.schedule.state import Live
from tests.support.comparing import assert_named_close, whole_grads

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


class Shared(nn.Module):
    """One large layer in two reentrant checkpoints; `first` has its gradient only after both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True).relu()
        return x


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


class Listed(nn.Module):
    """Two checkpointed layers that are one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.left, x, use_reentrant=False).relu()
        return checkpoint(self.right, x, use_reentrant=False)


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def backward(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradients of one step, which are dropped."""
    model(INPUTS).square().mean().backward()
    found = whole_grads(model)
    model.zero_grad(set_to_none=True)
    return found


def assert_as_plain(found: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert_named_close(found, plain, "gradient", rtol=1e-4, atol=1e-7)


def held_in_three_backwards() -> tuple[list[dict], list[dict]]:
    """Where each parameter is when autograd has come to the first layer, and the gradients."""
    model = fully_shard(built(Layers))
    unit = unit_of(model)
    seen = []
    model.look = lambda: seen.append(
        {each.name: weights.live for weights in unit.weights for each in weights.group.parameters}
    )
    return seen, [backward(model) for _ in range(3)]


def test_a_large_weight_is_freed_as_soon_as_its_gradient_has_come_from_the_second_backward_on(world):
    plain = backward(built(Layers))
    for seen, found in world(2).run(held_in_three_backwards):
        assert set(seen[0].values()) == {Live.UNSHARDED}, "who has not seen a backward keeps all until it ends"
        for later in seen[1:]:
            freed = {name for name, live in later.items() if live is Live.SHARDED}
            assert freed == {"second.weight", "third.weight"}
        for each in found:
            assert_as_plain(each, plain)


def groups_of_a_unit_that_is_kept() -> tuple[list[set], list[dict]]:
    """Where its groups are after each of three backwards, and the gradients."""
    model = fully_shard(built(Layers))
    model.set_reshard_after_backward(False)
    seen, found = [], []
    for _ in range(3):
        model(INPUTS).square().mean().backward()
        seen.append({weights.live for weights in unit_of(model).weights})
        model.reshard()  # gradients are the shards'
        found.append(whole_grads(model))
        model.zero_grad(set_to_none=True)
    return seen, found


def test_a_unit_that_stays_whole_after_backward_stays_so_in_all_its_groups(world):
    plain = backward(built(Layers))
    for seen, found in world(2).run(groups_of_a_unit_that_is_kept):
        assert seen == [{Live.UNSHARDED}] * 3
        for each in found:
            assert_as_plain(each, plain)


def sharded(kind: type[nn.Module]) -> nn.Module:
    model = built(kind)
    if kind is Calls:
        fully_shard(model.block)
    if kind is Listed:
        fully_shard([model.left, model.right])
    return fully_shard(model)


def in_turn(model: nn.Module, times: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """The gradients of one backward for each of `times`."""
    found = []
    for model.times in times:
        found.append(backward(model))
    return found


def gradients_and_freed(kind: type[nn.Module], times: tuple[int, ...]) -> tuple[list[dict], set[int]]:
    """Of sharded training; and the units that were freed by groups in the last two backwards."""
    model = sharded(kind)
    found = in_turn(model, times[:-2])
    with watched(model, unit_of(model)) as watch:
        found += in_turn(model, times[-2:-1])
        freed = {each.unit for each in watch.step if isinstance(each, GroupPassed)}
        found += in_turn(model, times[-1:])
    return found, freed | {each.unit for each in watch.step if isinstance(each, GroupPassed)}


@pytest.mark.parametrize(
    ("kind", "times", "units"),
    [(Shared, (1, 1, 1), set()), (Listed, (1, 1, 1), set()), (Calls, (1, 1, 1), {1}), (Calls, (1, 1, 2, 1, 1), {1})],
    ids=["read again, as always", "recomputed twice, as always", "read once", "read twice at times"],
)
def test_a_weight_that_is_read_again_after_its_gradient_has_come_is_there_again(world, kind, times, units):
    plain = in_turn(built(kind), times)
    for found, freed in world(2).run(gradients_and_freed, kind, times):
        assert freed == units
        for each, expected in zip(found, plain, strict=True):
            assert_as_plain(each, expected)


class Recomputed(nn.Module):
    """A large weight and a bias, of which a checkpoint inside of the unit also reads what needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False)

    def run(self, x: Tensor) -> Tensor:
        mean = (self.bias.detach() + torch.ones(WIDTH)).mean()
        return torch.tanh(x @ self.weight) * mean + self.bias


def steps_of_recomputed(is_sharded: bool) -> list[dict[str, Tensor]]:
    model, found = nn.Sequential(Recomputed(), Recomputed()), []
    for block in model if is_sharded else ():
        fully_shard(block)
    if is_sharded:
        fully_shard(model)
    for _ in range(3):
        model(INPUTS).square().mean().backward()
        found.append(whole_grads(model))
        model.zero_grad(set_to_none=True)
    return found


def test_a_group_whose_gradients_came_first_stays_for_a_checkpoint_that_reads_it_again(world):
    expected = steps_of_recomputed(False)
    for found in world(2).run(steps_of_recomputed, True):
        for each, plain in zip(found, expected, strict=True):
            assert_named_close(each, plain, "gradient", rtol=1e-4, atol=1e-7)


class Nested(nn.Module):
    """A block under a checkpoint; its layers are units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x[:, :8], use_reentrant=False)


def events_of_the_third_backward() -> tuple[list[dict], list[object]]:
    model = built(Nested)
    for number in (0, 2):
        fully_shard(model.block[number])
    fully_shard(model)
    found = [backward(model) for _ in range(2)]
    with watched(model, unit_of(model)) as watch:
        return [*found, backward(model)], list(watch.step)


def test_a_unit_inside_of_a_checkpoint_is_freed_before_its_reduction(world):
    plain = backward(built(Nested))
    for found, events in world(2).run(events_of_the_third_backward):
        for each in found:
            assert_as_plain(each, plain)
        complete = [each for each in events if isinstance(each, AfterBackward | GradientsReady)]
        assert AfterBackward(1, unreduced=True) in complete, complete
        assert AfterBackward(2, unreduced=True) in complete, complete
        assert not any(isinstance(each, GradientsReady) for each in complete)
