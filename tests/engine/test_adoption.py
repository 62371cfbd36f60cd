"""What becomes of an optimizer that was built before its parameters were sharded?"""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

from sherd import fully_shard
from sherd.errors import OptimizerError
from tests.support.comparing import whole_params


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        model.zero_grad()


def trained_plain() -> dict:
    model = model_of()
    train(model, torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-3))
    return whole_params(model)


def trained_with_an_early_optimizer(in_two_groups: bool = False) -> tuple[dict, bool]:
    """The unsharded parameters, and whether the optimizer holds exactly the model's."""
    model = model_of()
    if in_two_groups:
        optimizer = torch.optim.Adam(model[0].parameters(), lr=0.1, eps=1e-3)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-3)
    fully_shard(model[0])
    fully_shard(model)
    if in_two_groups:
        optimizer.add_param_group({"params": list(model[2].parameters())})
    train(model, optimizer)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return whole_params(model), held == {id(parameter) for parameter in model.parameters()}


@pytest.mark.parametrize("in_two_groups", [False, True])
def test_an_optimizer_built_before_sharding_trains_the_shards(world, in_two_groups):
    for params, holds_the_shards in world(2).run(trained_with_an_early_optimizer, in_two_groups):
        assert holds_the_shards
        for name, expected in trained_plain().items():
            torch.testing.assert_close(params[name], expected)


def trained_after_a_shard_was_replaced(device: str, as_shard: bool) -> tuple[dict, bool]:
    """Another Parameter is put in a shard's place, before the first forward, and the optimizer is built of that."""
    value = torch.arange(20.0).view(5, 4) / 20
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 3))
    fully_shard(model)
    place = model[0].weight.device_mesh, model[0].weight.placements
    model[1].to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model[1].parameters():
            parameter.to_local().fill_(0.1)
    model[0].weight = nn.Parameter(distribute_tensor(value, *place) if as_shard else value)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-3)
    train(model, optimizer)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return whole_params(model), held == {id(parameter) for parameter in model.parameters()}


def test_an_optimizer_built_of_what_was_put_in_a_shards_place_trains_the_shard(threads):
    plain = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 3))
    with torch.no_grad():
        plain[0].weight.copy_(torch.arange(20.0).view(5, 4) / 20)
        for parameter in plain[1].parameters():
            parameter.fill_(0.1)
    train(plain, torch.optim.Adam(plain.parameters(), lr=0.1, eps=1e-3))
    for device, as_shard in itertools.product(("cpu", "meta"), (True, False)):
        for params, holds_the_shards in threads(2).run(trained_after_a_shard_was_replaced, device, as_shard):
            assert holds_the_shards, (device, as_shard)
            for name, expected in whole_params(plain).items():
                torch.testing.assert_close(params[name], expected)


def trained_with_an_optimizer_adopted_twice() -> tuple[dict, int]:
    """Sharded in two goes, with a step in between."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model[0])
    optimizer.zero_grad()
    optimizer.step()
    fully_shard(model)
    train(model, optimizer)
    return whole_params(model), len(optimizer.param_groups[0]["params"])


def test_an_optimizer_is_looked_at_again_after_more_was_sharded(world):
    model = model_of()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for params, held in world(2).run(trained_with_an_optimizer_adopted_twice):
        assert held == 4
        for name, expected in whole_params(model).items():
            torch.testing.assert_close(params[name], expected)


def error_of_an_optimizer_with_state() -> str:
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps=1)
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(OptimizerError) as raised:
        optimizer.step()
    return str(raised.value)


def test_an_optimizer_that_holds_state_for_a_replaced_parameter_raises_at_its_step(world):
    for said in world(2).run(error_of_an_optimizer_with_state):
        assert "Adam holds state for 0.weight" in said
        assert "Build the optimizer after sharding" in said
        assert "set_optimizer_state_dict" in said


def error_of_a_weight_tied_to_a_module_outside() -> str:
    model = Tied()
    fully_shard(model.embed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptimizerError) as raised:
        optimizer.step()
    return str(raised.value)


def test_a_weight_that_a_module_outside_every_unit_still_shows_raises_at_the_step(world):
    for said in world(2).run(error_of_a_weight_tied_to_a_module_outside):
        assert "SGD holds weight twice" in said
        assert "tied weights?" in said
        assert "a module that contains both" in said


def stepped_beside_a_sharded_model() -> list[float]:
    fully_shard(model_of())
    alone = nn.Parameter(torch.ones(2))
    alone.grad = torch.ones(2)
    torch.optim.SGD([alone], lr=0.5).step()
    return alone.tolist()


def test_an_optimizer_that_has_nothing_to_do_with_the_model_is_left_alone(world):
    assert world(2).run(stepped_beside_a_sharded_model) == [[0.5, 0.5]] * 2
