"""Muon under flat parameters (`use_orig_params=False`): the matrices in them are stepped as parameters of their own."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sherd
from sherd import (
    CommPolicy,
    CPUOffload,
    FlatParameter,
    FullyShardedDataParallel,
    MatrixOptimizer,
    Muon,
    ShardingStrategy,
)
from sherd.engine import Unit
from sherd.errors import GradientError, OptimizerError
from tests.optim.test_muon import EXACT, assert_as_plain, batches, stack, torchs_steps, trained, trained_at_second_try
from tests.support.comparing import whole, whole_params
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import one_line
from tests.support.sharding import sharded

FLAT = {"front": "flat wrapper"}


def matrices() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 9, bias=False), nn.Tanh(), nn.Linear(9, 4, bias=False))


def as_one(model: nn.Module) -> nn.Module:
    """One unit, and so one flat parameter."""
    return sharded(model, units=[model], **FLAT)


def member(model: nn.Module, name: str) -> nn.Parameter:
    return next(each for path, each in Unit.named_members(model).items() if path.endswith(name))


class Odd(nn.Module):
    """Tied, frozen and unused matrices, in one unit but for the frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.unused = (nn.Linear(5, 5) for _ in range(3))
        self.third, self.frozen = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False).requires_grad_(False)
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.frozen(self.second(self.first(x)))))


@on_threads(2, 4, strategy=list(ShardingStrategy))
def test_steps_under_every_strategy_are_those_of_one_process(strategy):
    mesh = {"device_mesh": mesh_of((dist.get_world_size() // 2, 2))} if "HYBRID" in strategy.name else {}
    plain, model = stack(), sharded(stack(), sharding_strategy=strategy, **mesh, **FLAT)
    torchs_steps(plain, batches(6))
    trained(model, Muon(model, lr=0.02, **EXACT), batches(6))
    assert_as_plain(model, plain)


@on_threads(2, 3, 4)
def test_tied_frozen_and_unused_matrices_train_as_in_one_process():
    plain, model = Odd(), Odd()
    model = sharded(model, units=[model.frozen, model], **FLAT)
    for each in (plain, model):
        trained(each, Muon(each, lr=0.02, **EXACT), batches(4))
    assert_as_plain(model, plain)


@on_threads(2)
def test_it_says_what_steps_each_parameter_in_a_flat_one():
    model = as_one(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4)))
    optimizer = Muon(model)
    assert repr(optimizer).splitlines()[1:] == [
        "  *.weight  4 x 4  rank 0; nothing travels",
        "  *.weight  AdamW, since it is an embedding",
        "  *.bias    AdamW, since it has 1 dim  (2 of them)",
        "  *.weight  AdamW, since it has 1 dim",
    ]
    assert not any(isinstance(each, FlatParameter) for group in optimizer.param_groups for each in group["params"])


@on_threads(2)
def test_flat_parameters_may_be_given_in_groups_and_with_names():
    plain, model = matrices(), sharded(matrices(), **FLAT)
    optimizers = [Muon([{"params": list(each.named_parameters()), "lr": 0.02}], **EXACT) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        trained(each, optimizer, batches(3))
    assert_as_plain(model, plain)
    assert optimizers[1].param_groups[0]["param_names"] == ["0.weight", "2.weight"]
    vectors = as_one(nn.Sequential(nn.LayerNorm(4)))
    assert repr(Muon([{"params": next(vectors.parameters()), "algorithm": "adamw"}])).count("its group says so") == 2


@on_threads(2)
def test_what_is_in_a_flat_parameter_is_refused_by_its_own_name():
    mixed = as_one(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))
    flat = next(mixed.parameters())
    assert one_line(OptimizerError, Muon, [flat]).startswith("0.weight has shape (4,), and is no matrix")
    assert "is given twice" in one_line(OptimizerError, MatrixOptimizer, [member(mixed, "1.weight")] * 2, torch.sign)
    assert "that no unit of sherd holds" in one_line(OptimizerError, Muon, [copy.deepcopy(flat)])
    with pytest.raises(ValueError, match="2D parameters"):  # torch's own words
        torch.optim.Muon([flat])


@pytest.mark.parametrize("kind", [torch.optim.Muon, Muon, MatrixOptimizer])
@on_threads(2)
def test_an_optimizer_may_be_built_before_the_model_is_wrapped(kind):
    plain, model = matrices(), matrices()
    given = {torch.optim.Muon: (), Muon: (), MatrixOptimizer: (torch.sign,)}[kind]
    optimizers = [kind(list(each.parameters()), *given, lr=0.02) for each in (plain, model)]
    model = as_one(model)
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        trained(each, optimizer, batches(3))
    assert [p.shape for p in optimizers[1].param_groups[0]["params"]] == [(9, 5), (4, 9)]
    assert_as_plain(model, plain)


@on_threads(2)
def test_torchs_muon_steps_matrices_in_flat_parameters_beside_an_optimizer_of_the_rest():
    plain, model = stack(), as_one(stack())
    for each in (plain, model):
        named = Unit.named_members(each).values()
        muon = torch.optim.Muon([p for p in named if p.ndim == 2], lr=0.02)
        rest = torch.optim.SGD([p for p in named if p.ndim == 1], lr=0.02, momentum=0.9)
        for batch in batches(3):
            each(batch).square().mean().backward()
            for optimizer in (muon, rest):
                optimizer.step()
                optimizer.zero_grad()
        assert all(p.grad is None for p in each.parameters())
    for (name, found), expected in zip(whole_params(model).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@on_threads(2)
def test_the_gradient_of_a_member_is_its_part_of_the_flat_parameters():
    plain, model = stack(), as_one(stack())
    for each in (plain, model):
        each(batches(1)[0]).square().mean().backward()
    flat = next(model.parameters())
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(whole(member(model, name).grad), expected.grad)
    first, second = member(model, "0.weight"), member(model, "2.weight")
    first.grad *= 2
    torch.testing.assert_close(whole(first.grad), plain[0].weight.grad * 2)
    first.grad = None
    assert first.grad is None
    assert second.grad is not None
    model(batches(1)[0]).square().mean().backward()
    for one, expected in ((first, plain[0].weight.grad), (second, plain[2].weight.grad * 2)):
        torch.testing.assert_close(whole(one.grad), expected)
    for each in Unit.named_members(model).values():
        each.grad = None
    assert flat.grad is None
    second.grad = torch.ones_like(second)
    torch.testing.assert_close(float(flat.grad.norm()), 7.0)
    assert first.grad is None
    assert one_line(GradientError, setattr, first, "grad", torch.ones(7, 5, 1)).startswith("0.weight: .grad was set to")


def _with_a_scaler(model, optimizer, given):
    scaler = sherd.ShardedGradScaler("cpu")
    for batch in given:
        scaler.scale(model(batch).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)


def _with_torchs_scaler(model, optimizer, given):
    scaler = torch.amp.GradScaler("cpu")
    for batch in given:
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()


def _with_micro_batches(model, optimizer, given):
    for batch in given:
        for part in batch.chunk(2):
            (model(part).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("train", [_with_a_scaler, _with_torchs_scaler, _with_micro_batches])
@on_threads(2)
def test_it_trains_alike_with_what_loops_do_around_a_step(train):
    plain, model = stack(), sharded(stack(), **FLAT)
    torchs_steps(plain, batches(3))
    train(model, Muon(model, lr=0.02, **EXACT), batches(3))
    assert_as_plain(model, plain)


@on_threads(2, 3)
def test_a_step_within_backward_has_the_gradients_that_it_waits_with():
    """Without a momentum, which would keep them; `zero_grad` comes before the step is over."""

    def deep():
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(6)))

    plain, model = deep(), deep()
    model = sharded(model, units=[model[1], model], **FLAT)
    optimizers = [MatrixOptimizer(list(each.parameters()), lambda given: given * 2, lr=0.02) for each in (plain, model)]
    trained(plain, optimizers[0], batches(3))
    sherd.step_in_backward(model, optimizers[1])
    for batch in batches(3):
        model(batch).square().mean().backward()
    assert_as_plain(model, plain)


@on_processes(2)
def test_a_step_that_is_undone_leaves_nothing_behind():
    plain, model = stack(), sharded(stack(), comm_policy=CommPolicy(divergence="join"), **FLAT)
    torchs_steps(plain, batches(2))
    optimizer = Muon(model, lr=0.02, **EXACT)
    trained_at_second_try(model, optimizer, batches(2))
    assert_as_plain(model, plain)


@on_threads(2)
def test_it_goes_on_after_a_change_of_dtype_with_its_state_and_from_host_memory():
    plain, model = matrices(), as_one(matrices())
    optimizers = [Muon(each, lr=0.02, **EXACT) for each in (plain, model)]
    for dtype in (torch.float32, torch.float64):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            trained(each.to(dtype), optimizer, [batch.to(dtype) for batch in batches(2)])
    assert_as_plain(model, plain)
    assert optimizers[1].state[member(model, "0.weight")]["momentum_buffer"].shape == (9, 5)
    plain, model = stack(), sharded(stack(), cpu_offload=CPUOffload(True), **FLAT)
    for each in (plain, model):
        trained(each, Muon(each, lr=0.02, **EXACT), batches(2))
    assert_as_plain(model, plain)


@on_threads(2)
def test_a_flat_parameter_that_is_frozen_for_a_while_is_not_stepped():
    plain, model = Odd(), Odd()
    model = sharded(model, units=[model.second, model.frozen, model], **FLAT)
    optimizers = [Muon(each, lr=0.02, **EXACT) for each in (plain, model)]
    for is_trained in (True, False, True):
        plain.second.requires_grad_(is_trained)
        model.second.requires_grad_(is_trained)
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            trained(each, optimizer, batches(2))
    assert_as_plain(model, plain)


@on_threads(2)
def test_a_gradient_that_one_rank_lacks_is_named_on_all_before_a_parameter_changes():
    model = as_one(stack())
    optimizer = Muon(model, lr=0.02)
    for name in ("0.weight", "4.weight"):
        model(batches(1)[0]).square().mean().backward()
        if dist.get_rank() == 1:
            member(model, name).grad = None
        before = whole_params(model)
        said = one_line(GradientError, optimizer.step)
        assert said.startswith(f"rank 1 has no gradient of {name}"), said
        assert all(torch.equal(before[key], now) for key, now in whole_params(model).items())
        optimizer.zero_grad()


@on_threads(2)
def test_its_state_is_by_name_and_goes_on_in_torchs_muon_in_one_process():
    plain, model = matrices(), as_one(matrices())
    optimizer = Muon(model, lr=0.02, ns_dtype=torch.bfloat16)
    trained(model, optimizer, batches(2))
    full = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    assert {name: list(state) for name, state in full["state"].items()} == {
        "0.weight": ["momentum_buffer"],
        "2.weight": ["momentum_buffer"],
    }
    plain.load_state_dict(whole_params(model))
    torchs = torch.optim.Muon(plain.parameters(), lr=0.02)
    numbered = {number: full["state"][name] for number, (name, _) in enumerate(plain.named_parameters())}
    torchs.load_state_dict({**torchs.state_dict(), "state": numbered})
    trained(plain, torchs, batches(4)[2:])
    trained(model, optimizer, batches(4)[2:])
    for (name, found), expected in zip(whole_params(model).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    other = as_one(matrices())
    later = Muon(other, lr=0.5)
    to_load = FullyShardedDataParallel.optim_state_dict_to_load(other, later, full)
    later.load_state_dict(to_load)
    assert later.param_groups[0]["lr"] == 0.02
    kept = later.state[member(other, "2.weight")]["momentum_buffer"]
    torch.testing.assert_close(whole(kept), full["state"]["2.weight"]["momentum_buffer"])
    assert kept.placements == member(other, "2.weight").placements
