"""Is a unit whole for each of its calls, when one call's output is the next call's input?"""

import pytest
import torch
from torch import Tensor, nn

from sherd import fully_shard
from tests.support.comparing import assert_named_close, whole_grads


class Loop(nn.Module):
    """One block, called again and again on its own output."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.before, self.block = nn.Linear(8, 8), block

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for _ in range(3):
            x = self.block(x)
        return x


class Wrapping(nn.Module):
    """Its output is, untouched, that of the module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inside = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x * self.scale)


class Recursive(nn.Module):
    """A module that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return self.up(self(self.down(x).relu(), depth - 1)) if depth else x


class Thin(nn.Module):
    """Two calls of one unit with nothing in between, the first as the output of a unit around it."""

    def __init__(self) -> None:
        super().__init__()
        self.around = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.around[0](self.around(x))


MODELS = {
    "one unit": (lambda: Loop(nn.Linear(8, 8)), ["block"]),
    "a unit in a unit": (lambda: Loop(Wrapping()), ["block.inside", "block"]),
    "recursion below a root": (Recursive, ["down", "up"]),
    "a call inside and a call outside": (Thin, ["around.0", "around"]),
}


def gradients(kind: str, sharded: bool) -> dict:
    build, units = MODELS[kind]
    torch.manual_seed(5)
    model = build()
    if sharded:
        for name in units:
            fully_shard(model.get_submodule(name))
        fully_shard(model)
    model(torch.ones(2, 8, requires_grad=True)).square().sum().backward()
    return whole_grads(model)


@pytest.mark.parametrize("kind", MODELS)
def test_a_unit_called_on_its_own_output_gets_the_gradients_of_plain_training(world, kind):
    expected = gradients(kind, sharded=False)
    for found in world(2).run(gradients, kind, True):
        assert_named_close(found, expected, "gradient", rtol=1e-5, atol=1e-6)
