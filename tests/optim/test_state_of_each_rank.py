"""State that is not one tensor: codes and scales that each rank has of its own are saved per rank, or refused."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

import sherd
from sherd import Blocks, Flat, Owned, fully_shard
from sherd.errors import OptimStateError
from tests.support.comparing import assert_same, whole_params
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import refusal
from tests.support.training import made


class EightBit(Optimizer):
    """Momentum in codes of 8 bits, one scale for each two elements: plain tensors of this rank's part."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                local, gradient = parameter.to_local(), parameter.grad.to_local().flatten()
                state = self.state[parameter]
                if not state:
                    blocks = (gradient.numel() + 1) // 2
                    state["codes"], state["scales"] = (
                        gradient.new_zeros(blocks, 2, dtype=torch.int8),
                        [gradient.new_zeros(blocks)],
                    )
                padded = nn.functional.pad(gradient, (0, gradient.numel() % 2)).view(-1, 2)
                momentum = state["codes"] * state["scales"][0][:, None] * 0.5 + padded
                state["scales"][0] = momentum.abs().amax(1) / 127 + 1e-12
                state["codes"].copy_((momentum / state["scales"][0][:, None]).round())
                local.sub_(momentum.flatten()[: local.numel()].view(local.shape), alpha=group["lr"])


def net():
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))


def trained(model, optimizer, number):
    for _ in range(number):
        model(torch.linspace(-1, 1, 12).view(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_threads(2)
def test_codes_and_scales_go_on_on_as_many_ranks(tmp_path):
    for name, placement in (("shard", None), ("flat", Flat()), ("blocks", Blocks(2))):
        models = [fully_shard(made(net), placement=placement) for _ in range(2)]
        (model, optimizer), (other, again) = [(each, EightBit(each.parameters())) for each in models]
        trained(model, optimizer, 2)
        sherd.save(tmp_path / name, {"model": model, "optimizer": optimizer}, step=2)
        sherd.load(tmp_path / name, {"model": other, "optimizer": again})
        for each, its in ((model, optimizer), (other, again)):
            trained(each, its, 2)
        assert_same(whole_params(other), whole_params(model), name)


@on_threads(2)
def test_another_layout_is_refused_by_name(tmp_path):
    model = fully_shard(made(net))
    optimizer = EightBit(model.parameters())
    trained(model, optimizer, 1)
    sherd.save(tmp_path, {"model": model, "optimizer": optimizer}, step=1)
    other = fully_shard(made(net), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    said = refusal(OptimStateError, sherd.load, tmp_path, {"model": other, "optimizer": EightBit(other.parameters())})
    assert "0.weight: its state codes, scales is each rank's own" in said, said
    plain = made(net)
    sherd.load(tmp_path, {"model": plain})
    assert_same(whole_params(plain), whole_params(model))


@on_threads(2)
def test_a_state_dict_of_whole_tensors_refuses_such_state():
    model = sherd.FullyShardedDataParallel(made(net), use_orig_params=True)
    optimizer = EightBit(model.parameters())
    trained(model, optimizer, 1)
    said = refusal(OptimStateError, sherd.FullyShardedDataParallel.optim_state_dict, model, optimizer)
    assert "is each rank's own" in said, said
    assert "sherd.save" in said, said


class Prodigal(Optimizer):
    """A step size in the group, which grows with the gradients of the parameters that are stepped."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "d": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] += sum(float(each.grad.abs().sum()) for each in group["params"] if each.grad is not None)
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad * group["d"] * group["lr"])


def prodigal(number=0):
    model = fully_shard(made(net), placement=Owned())
    optimizer = Prodigal(model.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Prodigal computes")  # which is said in the first steps
        trained(model, optimizer, number)
    return model, optimizer


@on_processes(2)
def test_options_that_each_rank_computes_go_on_on_as_many_ranks(tmp_path):
    model, optimizer = prodigal(2)
    sherd.save(tmp_path, {"model": model, "optimizer": optimizer}, step=2)
    other, again = prodigal()
    sherd.load(tmp_path, {"model": other, "optimizer": again})
    options = [each.param_groups[0]["d"] for each in (optimizer, again)]
    assert options[0] == options[1] != 1
    plain = made(net)
    alone = Prodigal(plain.parameters())
    solo = dist.new_subgroups(1)[0]
    with pytest.warns(UserWarning, match="d of Prodigal's groups were each rank's own, which only as many"):
        sherd.load(tmp_path, {"model": plain, "optimizer": alone}, group=solo)
    assert alone.param_groups[0]["d"] != 1
