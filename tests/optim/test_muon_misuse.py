"""What Muon and MatrixOptimizer refuse, by the name of the parameter; their copies, added groups and loaded states."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sherd import MatrixOptimizer, Muon
from sherd.errors import GradientError, OptimizerError, PolicyError, PolicyTypeError
from sherd.optim.faults import header_of
from tests.optim.test_muon import stack
from tests.support.comparing import whole_params
from tests.support.ranks.bodies import on_threads
from tests.support.refusals import one_line
from tests.support.sharding import sharded


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return with_gradients(nn.Linear(4, 6))


def with_gradients(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def test_options_without_meaning_are_named():
    model = linear()
    weight = model.weight
    for error, words, action in (
        (OptimizerError, "w is given twice", lambda: Muon([{"params": [("v", weight)]}, {"params": [("w", weight)]}])),
        (OptimizerError, "w is given twice", lambda: Muon([("w", weight), ("w", weight)])),
        (PolicyError, "Muon(lr=tensor([1., 1.])): expected a number", lambda: Muon(model, lr=torch.ones(2))),
        (PolicyError, "Muon(lr='a'): expected a number", lambda: Muon(model, lr="a")),
        (PolicyError, "Muon(eps=-1): expected a number", lambda: Muon(model, eps=-1)),
        (PolicyError, "MatrixOptimizer(lr=-1)", lambda: MatrixOptimizer([weight], torch.sign, lr=-1)),
        (PolicyError, "Muon(momentum=-1)", lambda: Muon([{"params": [weight], "momentum": -1}])),
        (PolicyError, "ns_steps=0", lambda: Muon([{"params": [weight], "ns_steps": 0}])),
        (PolicyError, "adjust_lr_fn='x'", lambda: Muon([{"params": [weight], "adjust_lr_fn": "x"}])),
        (PolicyError, "algorithm='sgd': expected 'muon'", lambda: Muon([{"params": [weight], "algorithm": "sgd"}])),
        (PolicyError, "rows=-2", lambda: Muon([{"params": [weight], "rows": -2}])),
        (PolicyError, "rows=1.5", lambda: MatrixOptimizer([weight], torch.sign, rows=1.5)),
        (PolicyError, "'weight' has 0 heads", lambda: Muon(model, heads={"weight": 0})),
        (PolicyError, "'weight' has -2 heads", lambda: Muon(model, heads={"weight": -2})),
        (PolicyError, "no parameter's name ends with 'q'", lambda: Muon(model, heads={"q": 2})),
        (PolicyError, "heads go by names in a model", lambda: Muon([weight], heads={"weight": 2})),
        (PolicyTypeError, "heads=[2]): expected a mapping", lambda: Muon(model, heads=[2])),
        (PolicyTypeError, "rule='x'): expected a function", lambda: Muon(model, rule="x")),
        (PolicyTypeError, "returned None for weight: expected a reason", lambda: Muon(model, rule=lambda *_: None)),
        (PolicyError, "Invalid beta parameter at index 0: 2", lambda: Muon(model, adamw={"betas": (2, 3)})),
        (PolicyError, "Muon(adamw=...): too many values", lambda: Muon(model, adamw={"betas": (0.9, 0.9, 0.9)})),
        (PolicyError, "unexpected keyword argument 'beta'", lambda: Muon(model, adamw={"beta": 0.9})),
        (PolicyTypeError, "Muon(adamw=3): expected a mapping", lambda: Muon(model, adamw=3)),
        (PolicyError, "Muon(ns_dtype=torch.int32)", lambda: Muon(model, ns_dtype=torch.int32)),
        (PolicyError, "Muon(momentum_dtype='x')", lambda: Muon(model, momentum_dtype="x")),
        (PolicyError, "wire_dtype=torch.int8", lambda: MatrixOptimizer([weight], torch.sign, wire_dtype=torch.int8)),
        (PolicyError, "ns_coefficients=(('a', 1, 1),)", lambda: Muon(model, ns_coefficients=(("a", 1, 1),))),
    ):
        assert words in one_line(error, action), words


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda m: None, "returned NoneType for matrices of shape (1, 6, 4), of w"),
        (lambda m: m.int(), "returned a tensor of torch.int32"),
        (lambda m: m.to(torch.complex64), "returned a tensor of torch.complex64"),
        (lambda m: m.to("meta"), "returned a tensor on meta"),
        (lambda m: m.mul_(2), "changed its input in place, matrices of shape (1, 6, 4), of w"),
    ],
)
def test_what_a_function_may_not_return_changes_no_parameter(function, words):
    weight = nn.Parameter(torch.ones(6, 4))
    weight.grad = torch.ones(6, 4)
    assert words in one_line(OptimizerError, MatrixOptimizer([("w", weight)], function).step)
    assert (weight == 1).all()


def test_groups_can_be_added_after_the_first_step():
    model, matrix, vector = linear(), nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
    matrix.grad, vector.grad = torch.ones(3, 3), torch.ones(3)
    optimizer = Muon([model.weight], lr=0.1, adamw={"lr": 0.2})
    optimizer.step()
    refused = one_line(OptimizerError, optimizer.add_param_group, {"params": [vector]})
    assert "has shape (3,), and is no matrix" in refused
    optimizer.add_param_group({"params": matrix})
    optimizer.add_param_group({"params": [vector], "algorithm": "adamw", "weight_decay": 0.0})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1, 0.2]
    optimizer.step()
    torch.testing.assert_close(vector.detach(), torch.full((3,), 0.8))
    assert (matrix != 1).all()
    assert [list(optimizer.state[p]) for p in (matrix, vector)] == [
        ["momentum_buffer"],
        ["step", "exp_avg", "exp_avg_sq"],
    ]


def test_options_of_a_group_go_before_those_of_all():
    model = linear()
    groups = [
        {"params": [model.weight]},
        {"params": [model.bias], "algorithm": "adamw", "lr": 0.5, "betas": (0.5, 0.6)},
    ]
    other = Muon(groups, lr=0.1, adamw={"lr": 0.2, "betas": (0.1, 0.2)}).param_groups[1]
    assert (other["lr"], other["betas"], other["eps"]) == (0.5, (0.5, 0.6), 1e-8)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_of_model_and_optimizer_trains_as_they_do(copied):
    model = linear()
    optimizer = Muon(model, lr=0.02)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.step()
    schedule.step()
    other, its = copied((model, optimizer))
    assert repr(its) == repr(optimizer)
    for each, stepped in ((model, optimizer), (other, its)):
        with_gradients(each)
        stepped.step()
    torch.testing.assert_close(list(other.parameters()), list(model.parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("steps", [0, 1])
def test_its_state_and_that_of_torchs_muon_are_one(steps):
    weight = linear().weight
    optimizers = [torch.optim.Muon([weight]), Muon([{"params": [weight], "rows": 3}])]
    for source, target in (optimizers, optimizers[::-1]):
        for _ in range(steps):
            source.step()
        target.load_state_dict(source.state_dict())
        if steps:
            momenta = [each.state[weight]["momentum_buffer"] for each in (source, target)]
            torch.testing.assert_close(*momenta, rtol=0, atol=0)
        target.step()
    assert optimizers[1].param_groups[0]["rows"] == 3


def test_a_step_in_inference_mode_is_one():
    weights = [linear().weight for _ in range(2)]
    Muon(weights[:1]).step()
    with torch.inference_mode():
        Muon(weights[1:]).step()
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_no_elements_and_odd_strides_are_stepped():
    for shape in ((0, 4), (4, 0), (0, 4, 4), (1, 5), (5, 1)):
        parameter = nn.Parameter(torch.ones(shape))
        parameter.grad = torch.ones(shape)
        Muon([parameter]).step()
    across, along = nn.Parameter(torch.ones(6, 4).t()), nn.Parameter(torch.ones(4, 6))
    across.grad, along.grad = torch.ones(6, 4).t(), torch.ones(4, 6)
    Muon([across, along]).step()
    torch.testing.assert_close(across.detach(), along.detach())


def _missing_on_rank_1(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> tuple[str, bool]:
    """Returns what is said where rank 1 has no gradient of one matrix, and whether all parameters stayed."""
    model(torch.ones(2, 5)).square().mean().backward()
    if dist.get_rank() == 1:
        [parameter for parameter in model.parameters() if parameter.ndim == 2][number].grad = None
    before = whole_params(model)
    said = one_line(GradientError, optimizer.step)
    optimizer.zero_grad()
    return said, all(torch.equal(before[name], now) for name, now in whole_params(model).items())


@on_threads(2, 3, front=["shard", "flat", "wrapper"])
def test_a_gradient_missing_on_one_rank_is_named_on_all_before_a_parameter_changes(front):
    model = sharded(stack(), front)
    optimizer = Muon(model, lr=0.02)
    # Under other layouts the other matrices may lie on one rank as a whole, which alone steps them.
    for number, name in ((1, "2.weight"), (0, "0.weight"), (3, "5.weight"))[: 3 if front == "shard" else 1]:
        said, is_unchanged = _missing_on_rank_1(model, optimizer, number)
        assert said.startswith("rank 1 has no gradient of "), said
        assert name.split(".")[0] in said, said
        assert is_unchanged
    for missing_everywhere in (2, 3):  # that is no mistake
        model(torch.ones(2, 5)).square().mean().backward()
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        matrices[missing_everywhere].grad = None
        before = whole_params(model)
        optimizer.step()
        assert sum(torch.equal(before[name], now) for name, now in whole_params(model).items()) == 1


def test_headers_tell_sets_of_missing_parameters_apart():
    assert header_of([]) == [0, 0, 0, 0]
    assert header_of([0])[:3] == [0, 0, 1]
    assert header_of([700, 701])[:3] == [0, 2, 189]
    assert header_of([700])[3] != header_of([700, 701])[3]
