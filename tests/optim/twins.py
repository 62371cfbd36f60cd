"""The same model stepped with a flat optimizer, with the plain optimizer on shards, and unsharded.

The loss pulls every parameter to a target of its own, so that a test says which parameters have a gradient, step by
step and rank by rank, and what it is without sharding.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd import Blocks, Flat, Owned, fully_shard
from sherd.optim import flatten_optimizer
from tests.support.comparing import is_close

PLACEMENTS = {
    "shard": {},
    "flat": {"placement": Flat()},
    "rows": {"placement": Blocks(1)},
    "whole": {"placement": Owned()},
}
WORLDS = [("shard", 1), ("shard", 2), ("shard", 3), ("flat", 2), ("flat", 3), ("flat", 4), ("rows", 2), ("whole", 3)]

FIRST = {"w": (6, 4), "b": (6,), "v": (5, 3), "one": (1,), "u": (1, 7), "n": (9,)}
SECOND = {"m": (7, 5), "scalar": (), "k": (3, 2, 2), "a": (2,)}
NAMES = [f"first.{name}" for name in FIRST] + [f"second.{name}" for name in SECOND]


class Pulled(nn.Module):
    """Parameters that are pulled to targets, which change from step to step."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        for index, (name, shape) in enumerate(shapes.items()):
            value = torch.sin(torch.arange(torch.Size(shape).numel()) + index).view(shape)
            self.register_parameter(name, nn.Parameter(value.to(dtype)))

    def forward(self, step, names, scale):
        loss = torch.zeros(())
        for name, parameter in self.named_parameters():
            if name in names:
                target = torch.cos(torch.arange(parameter.numel()) * (step + 1.0)).view(parameter.shape)
                loss = loss + scale * (parameter.float() - target).square().sum()
        return loss


class Pair(nn.Module):
    """Two units and a root. `dtypes`: of the first and of the second."""

    def __init__(self, dtypes=(torch.float32, torch.float32)):
        super().__init__()
        self.first = Pulled(FIRST, dtypes[0])
        self.second = Pulled(SECOND, dtypes[1])

    def forward(self, step, names, scale=1.0):
        short = {name.partition(".")[2] for name in names}
        return self.first(step, short, scale) + self.second(step, short, scale)


def pair(**given):
    """An unsharded model, the same on all ranks."""
    return Pair(**given)


def shard(model, placement="flat", **given):
    """Its two parts and itself, sharded."""
    for unit in (model.first, model.second, model):
        fully_shard(unit, **PLACEMENTS[placement], **given)
    return model


def groups(model):
    """Two hyper-parameter classes: matrices, and vectors with another learning rate and without weight decay."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim <= 1]
    return [{"params": matrices}, {"params": vectors, "lr": 0.02, "weight_decay": 0.0}]


def whole(tensor):
    """A plain copy, gathered if it is sharded."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def backward(model, step, names=NAMES, scale=1.0):
    """One backward in which only `names` have gradients."""
    if names:
        model(step, names, scale).backward()


def run(model, optimizer, steps, names_of=None, **given):
    """Some steps. `names_of(step)` says which parameters have gradients."""
    for step in steps:
        backward(model, step, NAMES if names_of is None else names_of(step), **given)
        optimizer.step()
        optimizer.zero_grad()


def parameters_of(model):
    """Every parameter, whole."""
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def state_of(model, optimizer):
    """The optimizer's state by the parameter's name, tensors whole."""
    return {
        name: {
            key: whole(value) if isinstance(value, torch.Tensor) else value
            for key, value in optimizer.state[parameter].items()
        }
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def held(tensor):
    """What this rank holds of it, and how it is cut: compares tensors that are cut alike without a collective."""
    tensor = tensor.detach()
    return {"placements": tensor.placements, "local": tensor.to_local()} if isinstance(tensor, DTensor) else tensor


def held_by(model, optimizer):
    """Every parameter by its name, and its state: of shards, what this rank holds of them."""
    state = {
        name: {
            key: held(value) if isinstance(value, torch.Tensor) else value
            for key, value in optimizer.state[parameter].items()
        }
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }
    return {"parameters": {name: held(each) for name, each in model.named_parameters()}, "state": state}


def assert_same(found, expected, where="", **tolerance):
    """Nested dicts with the same keys and values; bit by bit if no tolerance is given. `where` begins what is said."""
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    assert list(found) == list(expected), f"{where}: {list(found)} is not {list(expected)}"
    for key, value in expected.items():
        place = f"{where} {key}"
        if isinstance(value, dict):
            assert_same(found[key], value, place, **tolerance)
        elif isinstance(value, torch.Tensor) and not is_close(found[key], value, **tolerance):
            torch.testing.assert_close(found[key], value, **tolerance, msg=lambda text, place=place: f"{place}: {text}")
        elif not isinstance(value, torch.Tensor):
            assert found[key] == value, place


def same_training(
    make, placement, steps=range(2), names_of=None, dtypes=(torch.float32,) * 2, make_plain=None, **given
):
    """Train flat, on shards (`make_plain` makes that optimizer; False: torch has none), and unsharded."""
    model = shard(pair(dtypes=dtypes), placement, **given)
    flat = flatten_optimizer(make(groups(model)))
    run(model, flat, steps, names_of)
    if make_plain is not False:
        other = shard(pair(dtypes=dtypes), placement, **given)
        plain = (make_plain or make)(groups(other))
        run(other, plain, steps, names_of)
        assert_same(held_by(model, flat), held_by(other, plain), **CLOSE)
    lone = pair(dtypes=dtypes)
    optimizer = make(groups(lone))
    run(lone, optimizer, steps, names_of)
    loose = {"rtol": 1e-4, "atol": 1e-5} if dtypes[0] is torch.float32 else {"rtol": 0.05, "atol": 0.02}
    assert_same(parameters_of(model), parameters_of(lone), **loose)
    return flat


# The vector form of a kernel and its scalar form, which takes the last few elements, differ in the last bit.
CLOSE = {"rtol": 3e-6, "atol": 3e-7}


def spans_of(optimizer):
    """The vectors that a flat optimizer stepped last."""
    return optimizer._sherd_stepper.spans
