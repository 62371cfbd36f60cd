"""Optimizers that know no DTensors: under `Owned()` they get whole tensors, elsewhere they are told so by name."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

import sherd
from sherd import Flat, Owned, fully_shard, replicate
from sherd.errors import OptimizerError, OptimStateError
from tests.support.comparing import assert_same, whole_params
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import refusal
from tests.support.training import made


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


class Other(Optimizer):
    """The steps of the classes below: `update(parameter, gradient, state)` says what is subtracted."""

    def __init__(self, parameters, lr=0.1, **options):
        super().__init__(parameters, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self.update(parameter, parameter.grad, self.state[parameter])
                    parameter.sub_(update, alpha=group["lr"])
        return loss


class Factored(Other):
    """Second moments of rows and columns, as Adafactor's and CAME's, made lazily and without a look at the class."""

    def update(self, parameter, gradient, state):
        if not state:
            state["step"] = 0
            for name, size in zip(("row", "column"), gradient.shape, strict=False):
                state[name] = torch.zeros(size)
        state["step"] += 1
        if gradient.ndim < 2:
            return gradient
        state["row"].lerp_(gradient.square().mean(1), 0.5)
        state["column"].lerp_(gradient.square().mean(0), 0.5)
        return gradient / (torch.outer(state["row"], state["column"]) / state["row"].mean() + 1e-6).sqrt()


class Preconditioned(Other):
    """Lists of matrices for each parameter, as Shampoo's, SOAP's and Kron's."""

    def update(self, parameter, gradient, state):
        assert type(gradient) is torch.Tensor
        if not state:
            state["step"], state["sides"] = torch.tensor(0.0), [torch.eye(size) for size in gradient.shape]
        state["step"] += 1
        for at in range(gradient.ndim if gradient.ndim == 2 else 0):
            side = gradient @ gradient.mT if at == 0 else gradient.mT @ gradient
            state["sides"][at] = state["sides"][at] + side
            inverse = torch.linalg.inv(state["sides"][at])
            gradient = inverse @ gradient if at == 0 else gradient @ inverse
        return gradient


class Clipped(Other):
    """An update is divided by its own root mean square, as StableAdamW's, and momentum is reset, as SPAM's."""

    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        return super().step(closure)

    def update(self, parameter, gradient, state):
        state["step"] = state.get("step", 0) + 1
        if state["step"] % 2 or "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].add_(gradient)
        rms = float(state["momentum"].square().mean().sqrt())
        return state["momentum"] / max(1.0, rms / 0.01)


class Adapted(Other):
    """A rate from a sum over all parameters, as D-Adapt's and Prodigy's."""

    def step(self, closure=None):
        (group,) = self.param_groups
        group["seen"] = group.get("seen", 0.0) + sum(float(each.grad.abs().sum()) for each in group["params"])
        group["lr"] = 1 / group["seen"]
        return super().step(closure)

    def update(self, parameter, gradient, state):
        return gradient


KINDS = (Factored, Preconditioned, Clipped)


def steps(model, optimizer, number=3, with_closure=False):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 12).view(3, 4)).square().mean()
        loss.backward()
        return loss

    for _ in range(number):
        if with_closure:
            assert optimizer.step(closure) is not None
        else:
            closure()
            optimizer.step()


def owned(placement=None):
    model = made(net)
    return fully_shard(model, placement=placement or Owned())


@on_threads(2)
def test_under_owned_every_class_trains_as_in_one_process():
    for kind in KINDS:
        for with_closure in (False, True):
            plain, model = made(net), owned()
            its, optimizer = kind(plain.parameters()), kind(model.parameters())
            own = list(model.parameters())
            steps(plain, its, 3, with_closure)
            steps(model, optimizer, 3, with_closure)
            assert_same(whole_params(model), whole_params(plain), kind.__name__)
            assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, own))
            assert all(isinstance(each, nn.Parameter) for each in optimizer.state)


@on_threads(2)
def test_what_a_step_writes_on_the_optimizer_stays_there():
    model = owned()
    optimizer = Clipped(model.parameters())
    steps(model, optimizer, 3)
    assert vars(optimizer)["num_steps"] == 3
    for each in (each for each in model.parameters() if each.to_local().numel()):
        assert optimizer.state[each]["momentum"].shape == each.shape
        assert optimizer.state[each]["momentum"].placements == each.placements


@on_threads(2)
def test_elsewhere_a_step_that_is_not_written_for_shards_names_the_layout_that_serves_it():
    for kind in (Factored, Preconditioned):
        for placement in (None, Flat()):
            model = made(net)
            fully_shard(model, placement=placement)
            said = refusal(OptimizerError, steps, model, kind(model.parameters()))
            assert said.startswith(f"{kind.__name__} cannot step 0.weight"), said
            assert "placement=Owned()" in said, said


@on_processes(2)
def test_a_number_that_a_rank_computes_from_what_it_owns_is_told_on_all_ranks():
    model = owned()
    with pytest.warns(UserWarning, match=r"Adapted computes .*'seen'.*on rank 0.*on rank 1.*replicate"):
        steps(model, Adapted(model.parameters()), 1)
    plain, model = made(net), made(net)
    replicate(model)
    steps(plain, Adapted(plain.parameters()))
    steps(model, Adapted(model.parameters()))
    assert_same(whole_params(model), whole_params(plain))


class Broken(Other):
    """Fails where the matrix is."""

    def update(self, parameter, gradient, state):
        if parameter.shape == (6, 4):
            raise ValueError("not of this shape")
        return gradient


@on_threads(2)
def test_what_fails_on_one_rank_is_told_on_all_ranks():
    model = owned()
    said = refusal(OptimizerError, steps, model, Broken(model.parameters()))
    assert said.startswith("Broken cannot step the parameters that ranks ["), said
    assert "ValueError: not of this shape" in said, said


@on_threads(2)
def test_a_checkpoint_goes_on_as_without(tmp_path):
    for kind in KINDS:
        plain, model, other = made(net), owned(), owned()
        its, optimizer, again = (kind(each.parameters()) for each in (plain, model, other))
        steps(plain, its, 5)
        steps(model, optimizer, 3)
        steps(other, again, 1)
        sherd.save(tmp_path / kind.__name__, {"model": model, "optimizer": optimizer}, step=3)
        sherd.load(tmp_path / kind.__name__, {"model": other, "optimizer": again})
        steps(other, again, 2)
        assert_same(whole_params(other), whole_params(plain), kind.__name__)


@on_processes(2)
def test_torchs_state_dicts_have_the_whole_state_on_all_ranks():
    model = owned()
    for kind in (Factored, Clipped):
        plain = made(net)
        its, optimizer = kind(plain.parameters()), kind(model.parameters())
        steps(plain, its, 2)
        steps(model, optimizer, 2)
        options = StateDictOptions(full_state_dict=True)
        found = get_optimizer_state_dict(model, optimizer, options=options)["state"]
        for name, parameter in plain.named_parameters():
            assert found.get(name, {}).keys() == its.state[parameter].keys() or torch.distributed.get_rank()
        steps(model, optimizer, 1)
    said = refusal(OptimStateError, lambda: states_of_lists(model))
    assert "keeps no 'sides'" in said, said


def states_of_lists(model):
    optimizer = Preconditioned(model.parameters())
    steps(model, optimizer, 1)
    return get_optimizer_state_dict(model, optimizer)


@on_processes(2)
def test_a_rank_that_owns_nothing_takes_part():
    for kind in (Clipped, Factored):
        plain, model = made(lambda: nn.Linear(4, 6, bias=False)), made(lambda: nn.Linear(4, 6, bias=False))
        fully_shard(model, placement=Owned())
        its, optimizer = kind(plain.parameters()), kind(model.parameters())
        steps(plain, its, 3)
        steps(model, optimizer, 3)
        assert_same(whole_params(model), whole_params(plain))
        options = StateDictOptions(full_state_dict=True)
        assert get_optimizer_state_dict(model, optimizer, options=options)["param_groups"]
        steps(plain, its, 1)
        steps(model, optimizer, 1)
        assert_same(whole_params(model), whole_params(plain))


class OfChunks(Other):
    """Reads a DTensor, and writes its rows as those of equal chunks, as HeavyBall's do."""

    def update(self, parameter, gradient, state):
        if not isinstance(gradient, DTensor):
            return gradient
        mesh, local = gradient.device_mesh, gradient.to_local().clone()
        chunks = gradient.full_tensor().chunk(mesh.size())
        local.copy_(chunks[mesh.get_local_rank()])
        return DTensor.from_local(local, mesh, [Shard(0)]) if gradient.placements == (Shard(0),) else local


@on_threads(2)
def test_what_reads_chunks_trains_by_default_and_says_so_elsewhere():
    plain, model = made(net), fully_shard(made(net))
    steps(plain, OfChunks(plain.parameters()))
    steps(model, OfChunks(model.parameters()))
    assert_same(whole_params(model), whole_params(plain), atol=1e-6)
    for placement in (Owned(), Flat()):
        other = owned(placement)
        said = refusal(OptimizerError, steps, other, OfChunks(other.parameters()))
        assert "OfChunks cannot step 0.weight" in said, said
        assert "equal chunks, so shard with the default placement" in said, said
