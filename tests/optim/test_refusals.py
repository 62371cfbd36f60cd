"""What torch's optimizers cannot step, and those without a flat form, are refused by name, with what to do."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sherd import Flat, Owned, fully_shard, replicate
from sherd.errors import OptimizerError, SherdError
from sherd.optim import flatten_optimizer
from tests.support.comparing import assert_refused, assert_same, whole_params
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_threads
from tests.support.training import made

# Not of DTensors of torch, which have no rule for their operations.
STEPPED = {
    "SGD": functools.partial(optim.SGD, lr=0.1, fused=True),
    "Adagrad": functools.partial(optim.Adagrad, fused=True),
    "Rprop": functools.partial(optim.Rprop, foreach=True),
    "Rprop for-loop": functools.partial(optim.Rprop, foreach=False),
}

# By name: the optimizer, and the placement that it steps; None: it takes only unsharded parameters.
REFUSED = {
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


@pytest.mark.parametrize("name", REFUSED)
@on_threads(2)
def test_what_cannot_be_stepped_is_named_and_the_remedy_works(name):
    make, works = REFUSED[name]
    kind = name.partition(" ")[0]
    with pytest.raises(OptimizerError, match=f"{kind}.* cannot step 0.weight, of shape .5, 4.*shard"):
        trained(fully_shard(made(odd)), make)
    remedied = fully_shard(made(odd), placement=works) if works else replicate(made(odd))
    assert trained(remedied, make) == pytest.approx(trained(made(odd), make), rel=1e-4)


@pytest.mark.parametrize("name", [name for name, (_, works) in REFUSED.items() if works])
@on_threads(4)
def test_each_replica_has_owners_that_step_whole_matrices(name):
    make, works = REFUSED[name]
    model = fully_shard(made(odd), mesh=mesh_of((2, 2)), placement=works)
    assert trained(model, make) == pytest.approx(trained(made(odd), make), rel=1e-4)


@pytest.mark.parametrize("name", STEPPED)
@on_threads(2)
def test_what_torch_has_no_rule_for_is_stepped_chunk_by_chunk(name):
    make = STEPPED[name]
    for placement in (None, Flat()):
        found = trained(fully_shard(made(odd), placement=placement), make)
        assert found == pytest.approx(trained(made(odd), make), rel=1e-4)


@pytest.mark.parametrize("name", REFUSED)
@on_threads(2)
def test_what_is_refused_torch_cannot_step(name):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = [nn.Parameter(distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])) for _ in range(2)]
    for each in parameters:
        each.grad = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])
    optimizer = REFUSED[name][0](parameters)
    with pytest.raises((RuntimeError, NotImplementedError)):
        optimizer.step(lambda: torch.ones(()))


def even():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


@on_threads(2)
def test_lbfgs_steps_what_divides_evenly():
    expected = trained(made(even), optim.LBFGS)
    assert trained(fully_shard(made(even)), optim.LBFGS) == pytest.approx(expected, rel=1e-3)
    for placement in (Flat(), Owned()):
        with pytest.raises(OptimizerError, match=r"LBFGS cannot step 0\.weight"):
            trained(fully_shard(made(even), placement=placement), optim.LBFGS)


# Without a flat form


def parameters():
    return [nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(2, 2))]


class Own(optim.Optimizer):
    """Sign descent."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class Trusting(optim.AdamW):
    """A step of its own, which may look at norms."""

    def step(self, closure=None):
        return super().step(closure)


class Named(optim.AdamW):
    """Only other defaults."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.5)


def test_an_optimizer_that_looks_at_whole_tensors_is_refused():
    for kind in (optim.Adafactor, optim.LBFGS, optim.Muon, optim.SparseAdam):
        for elementwise in (False, True):
            with pytest.raises(OptimizerError, match=rf"{kind.__name__} looks at full tensors.*placement=Owned\(\)"):
                flatten_optimizer(kind(parameters()), elementwise=elementwise)


def test_an_unknown_class_must_be_said_to_be_elementwise_and_one_with_the_step_of_a_known_class_is_known():
    for kind in (Own, Trusting):
        with pytest.raises(OptimizerError, match=rf"{kind.__name__} is not known .* elementwise=True"):
            flatten_optimizer(kind(parameters()))
        assert isinstance(flatten_optimizer(kind(parameters()), elementwise=True), kind)
    assert isinstance(flatten_optimizer(Named(parameters())), Named)


def test_flattening_twice_after_a_scheduler_or_of_a_differentiable_step_is_refused():
    optimizer = flatten_optimizer(optim.SGD(parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match="is flattened already; call flatten_optimizer once"):
        flatten_optimizer(optimizer)
    optimizer = optim.SGD(parameters(), lr=0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(OptimizerError, match="call flatten_optimizer before building the scheduler"):
        flatten_optimizer(optimizer)
    optimizer = optim.SGD(parameters(), lr=0.1, differentiable=True)
    with pytest.raises(OptimizerError, match="differentiable=False"):
        flatten_optimizer(optimizer)
    assert type(optimizer) is optim.SGD, "it is as it was"


def test_what_is_no_optimizer_is_named():
    for given in (None, [], nn.Linear(2, 2)):
        named = f"expects a torch.optim.Optimizer, got a {type(given).__name__}"
        assert_refused(lambda given=given: flatten_optimizer(given), SherdError, TypeError, named)


@on_threads(2)
def test_shards_and_plain_parameters_are_stepped_and_clipped_in_one_list():
    for (form, kind), placement in itertools.product(
        {"foreach": optim.SGD, "fused": optim.Adam}.items(), (None, Flat())
    ):
        plain, model = made(odd), made(odd)
        fully_shard(model, ignored_params={model[2].bias}, placement=placement)
        for each in (plain, model):
            each(torch.ones(3, 4)).sum().backward()
            norm = nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            kind(each.parameters(), lr=0.1, **{form: True}).step()
        assert norm.full_tensor() > 0.5
        assert_same(whole_params(model), whole_params(plain))
