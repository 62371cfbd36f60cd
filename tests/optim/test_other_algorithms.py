"""A training goes on with another algorithm: what fits of its state is taken, the rest is dropped, and named once."""

import copy

import pytest
import torch

import sherd
from sherd import MatrixOptimizer, Muon
from tests.optim.test_muon import EXACT, assert_as_plain, batches, stack, trained
from tests.support.ranks.bodies import on_processes
from tests.support.sharding import sharded

DROPPED = "{} drops {} of {}.*: another algorithm left them"


def adamw(model):
    weights, vectors = ([pair for pair in model.named_parameters() if pair[1].ndim == ndim] for ndim in (2, 1))
    return torch.optim.AdamW([{"params": weights, "lr": 0.05, "eps": 1e-3}, {"params": vectors, "lr": 0.03}])


def muon(model):
    return Muon(model, lr=0.02, adamw={"lr": 0.01}, **EXACT)


MOMENTS = "exp_avg, exp_avg_sq, step"


@pytest.mark.parametrize("form", ["torch", "sherd"])
@on_processes(2, front=["shard", "flat", "owned"])
def test_muon_drops_the_moments_of_matrices_and_keeps_those_of_the_rest(form, front, tmp_path):
    plain, model = stack(), sharded(stack(), front)
    of_plain, of_model = adamw(plain), adamw(model)
    for each, optimizer in ((plain, of_plain), (model, of_model)):
        trained(each, optimizer, batches(2))
    first, second = muon(plain), muon(model)
    with pytest.warns(UserWarning, match=DROPPED.format("Muon", MOMENTS, r".*\.weight")) as warned:
        first.load_state_dict(copy.deepcopy(of_plain.state_dict()))
    sherd.save(tmp_path / front, {"optimizer": of_model, "model": model}, step=2)
    state = copy.deepcopy(of_model.state_dict())
    load = {
        "torch": lambda: second.load_state_dict(state),
        "sherd": lambda: sherd.load(tmp_path / front, {"optimizer": second, "model": model}),
    }
    with pytest.warns(UserWarning, match=DROPPED.format("Muon", MOMENTS, "0.weight, 2.weight")):
        load[form]()
    assert len(warned) == 1
    for optimizer in (first, second):
        matrices, rest = optimizer.param_groups
        assert (matrices["lr"], matrices["eps"], rest["lr"]) == (0.02, 1e-7, 0.03)
        assert "betas" not in matrices
        assert not any(optimizer.state.get(each) for each in matrices["params"])
        assert all(set(optimizer.state[each]) == {"step", "exp_avg", "exp_avg_sq"} for each in rest["params"])
    for each, optimizer in ((plain, first), (model, second)):
        trained(each, optimizer, batches(4)[2:])
    assert_as_plain(model, plain)


@on_processes(2, front=["shard", "flat"])
def test_adamw_drops_the_momentum_of_muon(front, tmp_path):
    plain, model = stack(), sharded(stack(), front)
    before = muon(plain), muon(model)
    for each, optimizer in zip((plain, model), before, strict=True):
        trained(each, optimizer, batches(2))
    of_plain, saved = adamw(plain), before[0].state_dict()
    state = of_plain.state_dict()
    state["state"] = {key: each for key, each in saved["state"].items() if "exp_avg" in each}
    state["param_groups"][1] = {**saved["param_groups"][1], "params": state["param_groups"][1]["params"]}
    of_plain.load_state_dict(state)

    sherd.save(tmp_path / front, {"optimizer": before[1], "model": model}, step=2)
    loaded = sharded(stack(), front)
    optimizer = adamw(loaded)
    with pytest.warns(UserWarning, match=DROPPED.format("AdamW", "momentum_buffer", "0.weight, 2.weight")):
        sherd.load(tmp_path / front, {"optimizer": optimizer, "model": loaded})
    assert [(group["lr"], group["eps"]) for group in optimizer.param_groups] == [(0.05, 1e-3), (0.01, 1e-8)]
    for each, stepping in ((plain, of_plain), (loaded, optimizer)):
        trained(each, stepping, batches(4)[2:])
    assert_as_plain(loaded, plain)


def test_a_parameter_that_changes_hands_within_muon_begins_anew():
    model = stack()
    trained(model, before := muon(model), batches(2))
    weights, vectors = before.param_groups
    named = [list(zip(each["param_names"], each["params"], strict=True)) for each in (weights, vectors)]
    turned = [{"params": each, "algorithm": "adamw"} for each in named]
    optimizer = Muon(turned, lr=0.02, **EXACT)
    with pytest.warns(UserWarning, match=DROPPED.format("Muon", "momentum_buffer", "0.weight, 2.weight")):
        optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    assert [group["algorithm"] for group in optimizer.param_groups] == ["adamw", "adamw"]
    assert [len(optimizer.state.get(group["params"][0], {})) for group in optimizer.param_groups] == [0, 3]
    trained(model, optimizer, batches(2))


def test_a_function_that_keeps_what_is_called_as_adams_moments_gets_it():
    weight = torch.nn.Parameter(torch.eye(3))
    optimizers = [
        MatrixOptimizer([weight], lambda given, kept: given, state=lambda rows, columns: {"exp_avg": (rows, rows)})
        for _ in range(2)
    ]
    weight.grad = torch.ones(3, 3)
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert set(optimizers[1].state[weight]) == {"exp_avg"}
