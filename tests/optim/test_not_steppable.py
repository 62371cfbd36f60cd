"""What torch's optimizers cannot step is refused by name, and nothing that they can."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sherd import Flat, Owned, fully_shard, replicate
from sherd.errors import OptimizerError
from tests.support.training import made

# By name: the optimizer, and the placement that it steps; None: it takes only unsharded parameters.
REFUSED = {
    "SGD": (functools.partial(optim.SGD, lr=0.1, fused=True), Flat()),
    "Adagrad": (functools.partial(optim.Adagrad, fused=True), Flat()),
    "Rprop": (functools.partial(optim.Rprop, foreach=True), Flat()),
    "Rprop for-loop": (functools.partial(optim.Rprop, foreach=False), Flat()),
    "Adafactor": (functools.partial(optim.Adafactor, foreach=True), Owned()),
    "Adafactor for-loop": (functools.partial(optim.Adafactor, foreach=False), Owned()),
    "LBFGS": (optim.LBFGS, None),
}


def odd():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def trained(model, make):
    optimizer = make(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 12).view(3, 4)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return closure().item()


def refuse_by_name(name):
    make, works = REFUSED[name]
    kind = name.partition(" ")[0]
    with pytest.raises(OptimizerError, match=f"{kind}.* cannot step 0.weight, of shape .5, 4.*shard"):
        trained(fully_shard(made(odd)), make)
    remedied = fully_shard(made(odd), placement=works) if works else replicate(made(odd))
    assert trained(remedied, make) == pytest.approx(trained(made(odd), make), rel=1e-4)


def torch_cannot_step(name):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = [nn.Parameter(distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])) for _ in range(2)]
    for each in parameters:
        each.grad = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])
    optimizer = REFUSED[name][0](parameters)
    with pytest.raises((RuntimeError, NotImplementedError)):
        optimizer.step(lambda: torch.ones(()))


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_cannot_step_is_refused_by_name_and_the_remedy_works(threads, name):
    threads(2).run(refuse_by_name, name)
    threads(2).run(torch_cannot_step, name)


def even():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def step_even():
    expected = trained(made(even), optim.LBFGS)
    assert trained(fully_shard(made(even)), optim.LBFGS) == pytest.approx(expected, rel=1e-3)
    for placement in (Flat(), Owned()):
        with pytest.raises(OptimizerError, match=r"LBFGS cannot step 0\.weight"):
            trained(fully_shard(made(even), placement=placement), optim.LBFGS)


def test_lbfgs_steps_what_divides_evenly(threads):
    threads(2).run(step_even)
