"""What goes wrong on one rank in a step of whole matrices raises on all ranks, before a parameter changes."""

import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from sherd import CommPolicy, MatrixOptimizer, Muon, OnMesh, fully_shard, step
from sherd.errors import CommError, GradientError, OptimizerError
from tests.comm.test_shared_memory_deaths import ends
from tests.optim.test_muon import stack
from tests.support.comparing import whole_params
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import NOTHING, one_line
from tests.support.sharding import sharded

SHAPE = (7, 5)
"""Of the matrix that something is wrong with: one of its kind in `stack`."""


def raising(matrices):
    raise ValueError("no {such} matrix")


def not_finite(matrices):
    return matrices / 0


WRONG = {
    "raised ValueError for matrices of shape (1, 7, 5), of ": raising,
    "returned a tensor of shape (1, 5, 7) for ": lambda matrices: matrices.mT,
    "has elements that are inf or nan": not_finite,
}


def cut(model: nn.Module) -> nn.Module:
    """Returns the model, sharded so that gradients are cut as parameters are."""
    return sharded(model, placement=Shard(0))


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 5)).square().mean().backward()


def all_said(said: str) -> list[str]:
    everybody = [""] * dist.get_world_size()
    dist.all_gather_object(everybody, said)
    return everybody


def assert_all_refuse(model: nn.Module, optimizer: torch.optim.Optimizer, error: type[Exception]) -> list[str]:
    """Returns what each rank said to a step that changed nothing."""
    before = whole_params(model)
    said = all_said(one_line(error, optimizer.step))
    for name, now in whole_params(model).items():
        assert torch.equal(before[name], now), name
    return said


@on_threads(1, 2, 3, front=["shard", "cut", "flat", "blocks", "wrapper"])
@pytest.mark.parametrize("words", WRONG)
def test_a_function_that_fails_on_an_owner_raises_on_all_ranks_and_changes_nothing(front, words):
    model, ends = (cut(stack()) if front == "cut" else sharded(stack(), front)), []

    def function(matrices):
        if matrices.shape[1:] == SHAPE and not ends:
            ends.append(True)
            return WRONG[words](matrices)
        return matrices

    optimizer = MatrixOptimizer(matrices_of(model), function, lr=0.1)
    backward(model)
    said = assert_all_refuse(model, optimizer, OptimizerError)
    owner = next(rank for rank, each in enumerate(said) if words in each)
    assert all("0.weight" in each or "parameter of shape (7, 5)" in each for each in said), said
    assert all(each == said[owner] or f"on rank {owner}" in each for each in said), said
    before = whole_params(model)
    optimizer.step()  # the function works again
    assert sum(not torch.equal(before[name], now) for name, now in whole_params(model).items()) == 4


@on_threads(2, 3)
def test_a_gradient_that_one_rank_cannot_step_raises_on_all():
    model = cut(stack())
    matrices = matrices_of(model)
    optimizer = Muon(matrices, lr=0.1)
    backward(model)
    if dist.get_rank() == 1:
        matrices[1].grad = torch.ones(7, 7)
    said = assert_all_refuse(model, optimizer, GradientError)
    assert "leave gradients as backward places them" in said[1]
    assert all("the gradient of 2.weight cannot be stepped on rank 1" in each for each in (said[0], *said[2:])), said


@on_threads(2)
def test_directions_that_fail_on_one_rank_raise_on_all():
    class Failing(MatrixOptimizer):
        def directions(self, group, parameters, gradients):
            if dist.get_rank() == 1:
                raise ValueError("no direction")
            return gradients

    model = sharded(stack())
    optimizer = Failing(matrices_of(model), torch.sign)
    backward(model)
    said = all_said(one_line(Exception, optimizer.step))
    assert said == [
        "the gradient of 0.weight cannot be stepped on rank 1; its error is in the log of that rank",
        "no direction",
    ]


@on_threads(2, 3, front=["shard", "flat"])
def test_a_gradient_that_is_not_finite_is_named_with_its_rank(front):
    model = sharded(stack(), front)
    optimizer = Muon(model, lr=0.1)
    backward(model)
    last = matrices_of(model)[3]
    local = last.grad.to_local()
    if local.numel():
        local.view(-1)[0] = float("nan")
    said = assert_all_refuse(model, optimizer, OptimizerError)
    assert len(set(said)) == 1, said
    assert said[0].startswith("the update of 5.weight, computed on rank "), said


@on_threads(2, 3)
def test_what_adamw_steps_raises_on_all_ranks_if_one_lacks_its_gradient_or_has_one_that_is_not_finite():
    for wrong, words in (
        ("missing", "rank 1 has no gradient of "),
        ("not finite", ", which Muon leaves to AdamW, has elements that are inf or nan on rank 1"),
    ):
        model = sharded(stack())
        optimizer = Muon(model, lr=0.1)
        backward(model)
        vector = next(each for each in model.parameters() if each.ndim == 1)
        if dist.get_rank() == 1 and wrong == "missing":
            vector.grad = None
        elif dist.get_rank() == 1:
            vector.grad.to_local()[0] = float("inf")
        said = assert_all_refuse(model, optimizer, GradientError)
        assert len(set(said)) == 1, said
        assert words in said[0], said
        assert optimizer._name_of(vector) in said[0], said


@on_threads(2)
def test_where_nothing_travels_the_owner_alone_raises():
    model = sharded(stack(), "owned")

    def function(matrices):
        return not_finite(matrices) if matrices.shape[1:] == SHAPE else matrices

    optimizer = MatrixOptimizer(matrices_of(model), function)
    backward(model)
    said = all_said(one_line(OptimizerError, optimizer.step))
    assert sorted(each == NOTHING for each in said) == [False, True]


def dies_in_the_step(tell: Callable[[str], None]) -> None:
    model = sharded(stack())

    def function(matrices):
        if dist.get_rank() == 1:
            tell("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        return matrices

    optimizer = MatrixOptimizer(matrices_of(model), function)
    backward(model)
    tell(one_line(CommError, optimizer.step))


def test_a_rank_that_is_killed_in_the_step_is_named():
    survivor, killed = ends(2, dies_in_the_step)
    assert killed.said == "killed"
    assert "the exchange of matrices among ranks [0, 1] failed on rank 0 with rank 1" in survivor.said


@on_processes(2)
def test_a_guarded_step_is_skipped_by_all_where_the_owner_alone_raises():
    model = sharded(stack(), "owned", comm_policy=CommPolicy(divergence="join"))
    ends = []

    def function(matrices):
        if matrices.shape[1:] == SHAPE and not ends:
            ends.append(True)
            return raising(matrices)
        return matrices

    optimizer, before, skipped = MatrixOptimizer(matrices_of(model), function, lr=0.1), whole_params(model), []
    for _ in range(2):
        with step(model, optimizer, undo_optimizer=True) as attempt:
            backward(model)
            optimizer.step()
        optimizer.zero_grad()
        skipped.append(attempt.skipped)
        if attempt.skipped:
            for name, now in whole_params(model).items():
                assert torch.equal(before[name], now), name
    assert skipped == [True, False]


def test_numbers_whose_sum_is_too_large_are_finite():
    for dtype, size in ((torch.float32, 2e38), (torch.float16, 6e4)):
        weight = nn.Parameter(torch.zeros(4, 4, dtype=dtype))
        weight.grad = torch.full((4, 4), size, dtype=dtype)
        MatrixOptimizer([weight], lambda matrices: matrices.clone(), lr=1.0).step()
        assert (weight == -weight.grad).all()


@on_threads(4)
def test_a_fault_among_the_ranks_of_some_experts_raises_on_all_ranks():
    """A rank of the small ring tells those that share only the large one."""
    full = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    flat = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    model = nn.Linear(6, 8, bias=False)
    model.experts = nn.Parameter(torch.randn(3, 4, 4))
    experts = model.experts
    fully_shard(
        model, mesh=flat, shard_placement_fn=lambda each: OnMesh(full["edp"], Shard(1)) if each is experts else Shard(0)
    )

    def function(matrices):
        return matrices / 0 if matrices.shape[1:] == (4, 4) and dist.get_rank() < 2 else matrices

    optimizer = MatrixOptimizer([model.weight, model.experts], function)
    for parameter in (model.weight, model.experts):
        parameter.grad = torch.ones_like(parameter)
    said = all_said(one_line(OptimizerError, optimizer.step))
    assert all("the update of experts, computed on rank " in each for each in said), said
