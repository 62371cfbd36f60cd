"""The same model stepped with a flat optimizer, with the plain optimizer on shards, and unsharded.

The loss pulls every parameter to a target of its own, so that a test says which parameters have a gradient, step by
step and rank by rank, and what it is without sharding.
"""

import functools

import torch
from torch import nn, optim

from sherd.optim import flatten_optimizer
from tests.support.comparing import assert_same, whole_params, whole_values
from tests.support.sharding import sharded

WORLDS = [
    ("shard", 1), ("shard", 2), ("shard", 3), ("flat", 2), ("flat", 3), ("flat", 4), ("blocks", 2), ("owned", 3)
]  # fmt: skip
# The vector form of a kernel and its scalar form, which takes the last few elements, differ in the last bit.
CLOSE = {"rtol": 3e-6, "atol": 3e-7}

adamw = functools.partial(optim.AdamW, lr=0.1, foreach=True)
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
    """Two units and a root, the same on all ranks. `dtypes`: of the first and of the second."""

    def __init__(self, dtypes=(torch.float32, torch.float32)):
        super().__init__()
        self.first = Pulled(FIRST, dtypes[0])
        self.second = Pulled(SECOND, dtypes[1])

    def forward(self, step, names, scale=1.0):
        short = {name.partition(".")[2] for name in names}
        return self.first(step, short, scale) + self.second(step, short, scale)


def groups(model):
    """Two hyper-parameter classes: matrices, and vectors with another learning rate and without weight decay."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim <= 1]
    return [{"params": matrices}, {"params": vectors, "lr": 0.02, "weight_decay": 0.0}]


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


def state_of(model, optimizer):
    """The optimizer's state by the names of the parameter and of the value, tensors whole."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values = {
        f"{names[id(each)]} {key}": value for each, state in optimizer.state.items() for key, value in state.items()
    }
    return values | whole_values({key: value for key, value in values.items() if isinstance(value, torch.Tensor)})


def three(placement, make=adamw, make_plain=None, *, build=Pair, groups=groups, elementwise=False, **given):
    """Models with their optimizers: flat, plain on shards (`make_plain` makes it; False: torch has none), unsharded."""
    flat, plain, lone = sharded(build(), placement, **given), sharded(build(), placement, **given), build()
    trained = [(flat, flatten_optimizer(make(groups(flat)), elementwise=elementwise))]
    if make_plain is not False:
        trained.append((plain, (make_plain or make)(groups(plain))))
    return [*trained, (lone, make(groups(lone)))]


def assert_alike(trained, **loose):
    """What `three` has made is still the same: of shards to the last bits, and close to the unsharded one."""
    (model, flat), *others, (lone, _) = trained
    for other, plain in others:
        assert_same(whole_params(model), whole_params(other), "parameters", **CLOSE)
        assert_same(state_of(model, flat), state_of(other, plain), "state", **CLOSE)
    is_single = next(lone.parameters()).dtype is torch.float32
    loose = loose or ({"rtol": 1e-4, "atol": 1e-5} if is_single else {"rtol": 0.05, "atol": 0.02})
    assert_same(whole_params(model), whole_params(lone), "unsharded", **loose)


def same_training(make, placement, steps=range(2), names_of=None, **given):
    """Train each of `three`."""
    trained = three(placement, make, **given)
    for model, optimizer in trained:
        run(model, optimizer, steps, names_of)
    assert_alike(trained)


def spans_of(optimizer):
    """The vectors that a flat optimizer stepped last."""
    return optimizer._sherd_stepper.spans
