"""Muon under every strategy of the wrapper, uneven shards, several dtypes and meshes, and with what steps it."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import sherd
from sherd import CommPolicy, MatrixOptimizer, Muon, ShardingStrategy
from sherd._torch import imagined_ranks
from sherd.errors import GradientError
from tests.optim.test_muon import EXACT, assert_as_plain, batches, stack, trained, trained_at_second_try
from tests.support.checkpoints import load, save
from tests.support.comparing import whole_params
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import refusal
from tests.support.sharding import sharded


def deep() -> nn.Sequential:
    """More matrices of one shape than there are ranks."""
    return nn.Sequential(*stack()[:2], *(nn.Linear(7, 7) for _ in range(7)))


def narrow() -> nn.Sequential:
    """Matrices with fewer rows than there are ranks."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in ((5, 1), (1, 2), (2, 3))))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(5, 5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bd,edh->beh", x, self.experts)


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).double())


def assert_trains_as_plain(make, front="shard", **options) -> None:
    plain, model = make(), sharded(make(), front, **options)
    for each in (plain, model):
        trained(each, Muon(each, lr=0.02, **EXACT), batches(4))
    assert_as_plain(model, plain)


@on_threads(4, strategy=list(ShardingStrategy))
def test_every_strategy_of_the_wrapper(strategy):
    mesh = {"device_mesh": mesh_of((2, 2))} if "HYBRID" in strategy.name else {}
    assert_trains_as_plain(stack, "wrapper", sharding_strategy=strategy, **mesh)


@on_threads(2, 4, make=[narrow, Experts, TwoDtypes], front=["shard", "flat", "owned", "wrapper", "flat wrapper"])
def test_uneven_and_empty_shards_and_two_dtypes(make, front):
    assert_trains_as_plain(make, front)


@on_threads(2, front=["shard", "owned"])
def test_a_copy_of_a_sharded_model_and_its_optimizer_trains_as_they_do(front):
    model = sharded(stack(), front)
    optimizer = Muon(model, lr=0.02, **EXACT)
    trained(model, optimizer, batches(2))
    copies = copy.deepcopy((model, optimizer))
    assert repr(copies[1]) == repr(optimizer)
    for each, stepped in ((model, optimizer), copies):
        trained(each, stepped, batches(2))
    torch.testing.assert_close(whole_params(copies[0]), whole_params(model))


@on_threads(2, front=["shard", "owned"])
def test_it_goes_on_after_a_change_of_dtype_and_of_what_is_frozen(front):
    model = sharded(narrow(), front)
    optimizer = Muon(model, lr=0.3)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model.to(dtype)
        for is_trained in (True, False, True):
            model[1].weight.requires_grad_(is_trained)
            before = whole_params(model)["1.weight"]
            trained(model, optimizer, [batch.to(dtype) for batch in batches(1)])
            assert torch.equal(whole_params(model)["1.weight"], before) is not is_trained


@pytest.mark.parametrize("form", ["sherd", "dcp"])
@on_threads(2, front=["shard", "owned", "flat wrapper"])
def test_an_optimizer_that_has_not_stepped_loads_the_whole_state(form, front, tmp_path):
    folder = tmp_path / front
    models = [sharded(stack(), front) for _ in range(2)]
    optimizers = [Muon(model, lr=0.02, **EXACT) for model in models]
    trained(models[0], optimizers[0], batches(2))
    if form == "dcp":
        save(models[0], optimizers[0], folder)
        load(models[1], optimizers[1], folder)
    else:
        sherd.save(folder, {"model": models[0], "optimizer": optimizers[0]}, step=2)
        sherd.load(folder, {"model": models[1], "optimizer": optimizers[1]})
    for model, optimizer in zip(models, optimizers, strict=True):
        trained(model, optimizer, batches(4)[2:])
    torch.testing.assert_close(whole_params(models[1]), whole_params(models[0]))


@on_threads(2, front=["shard", "owned", "flat wrapper"])
def test_it_steps_in_backward(front):
    plain, model = stack(), sharded(stack(), front)
    trained(plain, Muon(plain, lr=0.02, **EXACT), batches(3))
    sherd.step_in_backward(model, Muon(model, lr=0.02, **EXACT))
    for batch in batches(3):
        model(batch).square().mean().backward()
    assert_as_plain(model, plain)


@on_processes(2)
def test_a_step_that_is_skipped_or_undone_leaves_nothing_behind():
    plain, model = stack(), sharded(stack(), comm_policy=CommPolicy(divergence="join"))
    trained(plain, Muon(plain, lr=0.02, **EXACT), batches(2))
    optimizer = Muon(model, lr=0.02, **EXACT)
    trained_at_second_try(model, optimizer, batches(2))
    assert_as_plain(model, plain)


@on_processes(4)
def test_models_on_different_meshes_share_an_optimizer():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pairs = [stack(), stack()], [sharded(stack()), sharded(stack(), "flat", mesh=mesh)]
    for pair in pairs:
        matrices = [parameter for model in pair for parameter in model.parameters() if parameter.ndim == 2]
        optimizer = Muon(matrices, lr=0.02, **EXACT)
        for batch in batches(3):
            sum(model(batch) for model in pair).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for plain, model in zip(*pairs, strict=True):
        for parameter in plain.parameters():
            parameter.requires_grad_(False)
        assert_as_plain(model, plain)


def test_every_rank_computes_in_every_bucket_but_the_last(monkeypatch):
    monkeypatch.setattr("sherd.optim.matrix_plan.BUCKET_BYTES", 16)
    for front in ("shard", "flat"):
        computed = []
        for rank in range(4):
            with imagined_ranks(4, rank):
                model = sharded(nn.Sequential(*(block for _ in range(4) for block in deep())), front)
                optimizer = Muon(model, lr=0.02)
                plan = optimizer._plan_of(optimizer.matrix_groups())
                assert not plan.local
                of_bucket = [[*each.own, *(item for item, _ in each.local)] for each in plan.buckets]
                computed.append([sum(item.flops for item in items) for items in of_bucket])
        by_bucket = list(zip(*computed, strict=True))
        assert len(by_bucket) > 5
        for flops in by_bucket[:-1]:
            assert 2 * min(flops) > max(flops) > 0, front


@on_threads(2, 3, front=["shard", "flat"])
def test_matrices_travel_in_several_buckets(front, monkeypatch):
    monkeypatch.setattr("sherd.optim.matrix_plan.BUCKET_BYTES", 16)
    assert_trains_as_plain(deep, front)
    model = sharded(deep(), front)
    optimizer = Muon(model, lr=0.02, **EXACT)
    assert len(optimizer._plan_of(optimizer.matrix_groups()).buckets) > 1
    model(torch.ones(2, 5)).square().mean().backward()
    if dist.get_rank() == 1:
        model[2].weight.grad = None
    assert "rank 1 has no gradient of 2.weight" in refusal(GradientError, optimizer.step)


@on_threads(2, wire=[None, torch.bfloat16, torch.float64])
def test_what_travels_has_the_dtype_of_the_wire(wire):
    seen, model = [], sharded(stack(), placement=Shard(0))

    def function(given):
        seen.append(given.dtype)
        return given

    matrices = [each for each in model.parameters() if each.ndim == 2]
    trained(model, MatrixOptimizer(matrices, function, wire_dtype=wire), batches(1))
    assert set(seen) <= {wire or torch.float32}
    plain, model = stack(), sharded(stack())
    for each in (plain, model):
        trained(each, Muon(each, lr=0.02, wire_dtype=wire, **EXACT), batches(2))
    for (name, found), expected in zip(whole_params(model).items(), plain.parameters(), strict=True):
        atol = 2e-3 if wire is torch.bfloat16 else 1e-6
        torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@on_threads(2, front=["shard", "owned", "flat", "flat wrapper"])
def test_one_rank_alone_prints_an_optimizer_that_has_loaded_another_layout(front, tmp_path):
    """Nothing of its state moves until it steps."""
    models = [sharded(stack(), each) for each in ("blocks", front)]
    first, second = (Muon(model, lr=0.02, beta2=0.9, **EXACT) for model in models)
    trained(models[0], first, batches(2))
    sherd.save(tmp_path / front, {"model": models[0], "optimizer": first}, step=2)
    sherd.load(tmp_path / front, {"model": models[1], "optimizer": second})
    if dist.get_rank() == 1:
        assert "AdamW, since it has 1 dim" in repr(second)
    for model, optimizer in zip(models, (first, second), strict=True):
        trained(model, optimizer, batches(2))
    torch.testing.assert_close(whole_params(models[1]), whole_params(models[0]))
