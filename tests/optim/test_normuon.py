"""NorMuon trains as in one process, however its matrices are sharded, and its averages of rows go where they go."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import sherd
from sherd import Muon
from sherd.optim.newton_schulz import QUINTIC, coefficients_of, orthogonalized
from tests.optim.moves import MOVES, assert_goes_on
from tests.optim.test_muon import EXACT, FRONTS, assert_as_plain, batches, sharded_by, stack, trained
from tests.support.checkpoints import load, save
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded

NOR = {"lr": 0.02, "beta2": 0.9, **EXACT}


def normuons_steps(model: nn.Module, given: list[torch.Tensor]) -> None:
    """Steps as the paper has them, matrix by matrix, and torch's AdamW for the rest."""
    matrices = {p: (torch.zeros_like(p), torch.zeros(len(p), 1)) for p in model.parameters() if p.ndim == 2}
    others = [p for p in model.parameters() if p.ndim < 2]
    adamw = torch.optim.AdamW(others, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    for batch in given:
        model(batch).square().mean().backward()
        with torch.no_grad():
            for p, (momentum, squares) in matrices.items():
                momentum.lerp_(p.grad, 0.05)
                update = p.grad.lerp(momentum, 0.95)
                update = orthogonalized(update[None], coefficients_of(QUINTIC, 5), 1e-7, torch.float32)[0]
                squares.mul_(0.9).add_(update.square().mean(1, keepdim=True), alpha=0.1)
                divided = update / squares.sqrt()
                divided *= update.norm() / divided.norm()
                p.mul_(1 - 0.02 * 0.1).add_(divided, alpha=-0.02 * max(1, p.shape[0] / p.shape[1]) ** 0.5)
        adamw.step()
        model.zero_grad()


@on_threads(1, 2, 3, 4, front=FRONTS)
def test_normuon_trains_as_in_one_process(front):
    plain, model = stack(), sharded_by(front, stack())
    normuons_steps(plain, batches())
    trained(model, Muon(model, **NOR), batches())
    assert_as_plain(model, plain)


@on_threads(4, front=["shard", "flat", "owned", "blocks"], sizes=[(2, 2), (4, 1), (1, 4)])
def test_replicas_divide_the_averages_too(front, sizes):
    plain = stack()
    normuons_steps(plain, batches(6))
    model = sharded(stack(), front, mesh=mesh_of(sizes))
    optimizer = Muon(model, **NOR)
    trained(model, optimizer, batches(6))
    assert_as_plain(model, plain)
    kept = [optimizer.state[p]["second_momentum_buffer"] for p in model.parameters() if p.ndim == 2]
    assert sum(each.numel() for each in kept) == sum(p.shape[0] for p in model.parameters() if p.ndim == 2)


@pytest.mark.parametrize("form", ["sherd", "dcp"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_its_averages_go_on_under_another_layout_on_other_ranks(threads, tmp_path, form, move, steps_before):
    folder = tmp_path / "checkpoint"
    made = stack, lambda model: Muon(model, **NOR)
    assert_goes_on(threads, folder, form, move, *made, batches(4), normuons_steps, trained, steps_before)


@on_threads(2, front=["shard", "owned", "wrapper", "flat wrapper"])
def test_a_full_state_dict_has_the_averages_of_one_process(front):
    plain, model = stack(), sharded(stack(), front)
    optimizers = [Muon(each, **NOR) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        trained(each, optimizer, batches(2))
    options = StateDictOptions(full_state_dict=True)
    found = get_optimizer_state_dict(model, optimizers[1], options=options)["state"]
    for name, p in plain.named_parameters():
        if p.ndim == 2:
            kept = optimizers[0].state[p]["second_momentum_buffer"]
            torch.testing.assert_close(found[name]["second_momentum_buffer"], kept, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", ["sherd", "dcp"])
@on_threads(2)
def test_momentum_and_averages_in_float32_keep_all_bits_beside_parameters_in_bfloat16(form, tmp_path):
    models = [sharded(stack().bfloat16()) for _ in range(2)]
    first, second = (Muon(model, momentum_dtype=torch.float32, **NOR) for model in models)
    trained(models[0], first, [batch.bfloat16() for batch in batches(3)])
    if form == "dcp":
        save(models[0], first, tmp_path)
        load(models[1], second, tmp_path)
    else:
        sherd.save(tmp_path, {"model": models[0], "optimizer": first}, step=3)
        sherd.load(tmp_path, {"model": models[1], "optimizer": second})
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        for key in ("momentum_buffer", "second_momentum_buffer") if one.ndim == 2 else ():
            saved, loaded = first.state[one][key], second.state[other][key]
            assert saved.dtype is loaded.dtype is torch.float32
            assert torch.equal(saved.full_tensor(), loaded.full_tensor())
