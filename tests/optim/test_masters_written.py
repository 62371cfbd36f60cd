"""Every way in which values come into shards: what is written is its own master, and what is not keeps its low bits."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import sherd
from tests.optim.test_masters import MASTERS, made, masters_of, sharded, steps
from tests.support.ranks.bodies import on_processes, on_threads

NAME = "0.up.weight"


def stepped(**how: Any) -> Any:
    """A model whose masters all have low bits, and its optimizer."""
    model = sharded(MASTERS, torch.bfloat16, **how)
    optimizer = made(optim.AdamW, model)
    steps(model, optimizer, range(3))
    return model, optimizer


def assert_written(model: Any, before: dict[str, torch.Tensor], value: float | None, names: Any = (NAME,)) -> None:
    """The parameters `names` are their own masters, of this value, and all others are as before."""
    now = masters_of(model)
    assert now.keys() == before.keys()
    for name, master in now.items():
        if name in names:
            assert torch.equal(master, master.to(torch.bfloat16).float()), name
            assert value is None or bool((master == value).all()), name
        else:
            assert torch.equal(master, before[name]), name


def named(model: Any) -> Any:
    return model.get_parameter(NAME)


def full(model: Any, value: float) -> torch.Tensor:
    return torch.full(named(model).shape, value, dtype=torch.bfloat16)


@torch.no_grad()
def by_foreach(model: Any, value: float) -> None:
    torch._foreach_mul_([named(model)], 0.0)
    torch._foreach_add_([named(model)], value)


@torch.inference_mode()
def in_inference_mode(model: Any, value: float) -> None:
    named(model).fill_(value)


@torch.no_grad()
def by_local(model: Any, value: float) -> None:
    named(model).to_local().fill_(value)


def by_collective(model: Any, value: float) -> None:
    parameter = named(model)
    received = parameter.to_local().detach()
    torch.distributed.broadcast(received.fill_(value), src=torch.distributed.get_rank(), group=alone())
    torch.autograd.graph.increment_version(parameter)


def alone() -> Any:
    return torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)


def by_parameter(model: Any, value: float) -> None:
    model[0].up.weight = nn.Parameter(full(model, value))
    model(torch.zeros(1, 24, dtype=torch.bfloat16))


def by_data(model: Any, value: float) -> None:
    named(model).data = full(model, value)


def by_swap(model: Any, value: float) -> None:
    like = nn.Parameter(torch.full_like(named(model), value))
    torch.utils.swap_tensors(named(model), like)
    model(torch.zeros(1, 24, dtype=torch.bfloat16))


def by_unsharded(model: Any, value: float) -> None:
    with sherd.unsharded(model):
        named(model).data.fill_(value)


def by_unsharded_replaced(model: Any, value: float) -> None:
    with sherd.unsharded(model):
        model[0].up.weight = nn.Parameter(full(model, value))


def load(model: Any, value: torch.Tensor, **options: bool) -> None:
    model.load_state_dict({NAME: value}, strict=False, **options)


WAYS = {
    "copy_": lambda model, value: named(model).detach().copy_(full(model, value)),
    "data.copy_": lambda model, value: named(model).data.copy_(full(model, value)),
    "data =": by_data,
    "init": lambda model, value: nn.init.constant_(named(model), value),
    "foreach": by_foreach,
    "inference mode": in_inference_mode,
    "to_local": by_local,
    "data.to_local": lambda model, value: named(model).data.to_local().fill_(value),
    "detach().to_local": lambda model, value: named(model).detach().to_local().fill_(value),
    "a collective": by_collective,
    "module.weight =": by_parameter,
    "swap_tensors": by_swap,
    "unsharded": by_unsharded,
    "unsharded, replaced": by_unsharded_replaced,
    "load_state_dict": lambda model, value: model.load_state_dict({NAME: full(model, value)}, strict=False),
    "load_state_dict, assign": lambda model, value: model.load_state_dict(
        {NAME: full(model, value)}, strict=False, assign=True
    ),
    "load_state_dict, float32": lambda model, value: model.load_state_dict(
        {NAME: full(model, value).float()}, strict=False
    ),
}


@on_threads(2)
def test_what_is_written_in_any_way_is_its_own_master_and_nothing_else():
    model, optimizer = stepped()
    for at, (way, write) in enumerate(WAYS.items()):
        value = (0.5, -0.25)[at % 2]
        before = masters_of(model)
        assert not torch.equal(before[NAME], before[NAME].to(torch.bfloat16).float()), way
        write(model, value)
        assert_written(model, before, value)
        steps(model, optimizer, range(2))


def held_low_bits(masters: dict[str, torch.Tensor]) -> bool:
    return not any(each.numel() and torch.equal(each, each.to(torch.bfloat16).float()) for each in masters.values())


@on_threads(2)
def test_what_is_written_after_a_step_that_shards_another_model_is_its_own_master():
    model, optimizer = stepped()

    def closure() -> None:
        model(torch.ones(3, 24, dtype=torch.bfloat16)).float().square().mean().backward()
        sharded(MASTERS, torch.bfloat16)

    optimizer.step(closure)
    model.load_state_dict(model.state_dict())
    assert_written(model, masters_of(model), None, list(masters_of(model)))


@on_threads(2)
def test_what_is_only_looked_at_keeps_its_low_bits():
    model, optimizer = stepped()
    ema = sherd.Ema(model, decay=0.5)
    steps(model, optimizer, range(3, 4))
    ema.update()
    before = masters_of(model)
    with sherd.unsharded(model):
        assert named(model).shape == (16, 24)
    with ema.applied():
        assert not torch.equal(masters_of(model)[NAME], before[NAME])
    model.to("cpu")
    model.state_dict()
    for parameter in model.parameters():
        parameter.to_local().square().sum()
        parameter.full_tensor()
    model.eval()(torch.zeros(1, 24, dtype=torch.bfloat16))
    sherd.refresh(model, optimizer)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    sherd.refresh(model)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    sherd.refresh(model)
    assert_written(model, before, None, ())
    assert held_low_bits(before)


@on_threads(2)
def test_an_unsharded_context_resets_the_elements_that_change():
    model, _ = stepped()
    before = masters_of(model)
    with sherd.unsharded(model):
        weight = named(model).data
        weight[::2] = 3.0
    now = masters_of(model)[NAME]
    rows = named(model).to_local().shape[0]
    first = torch.distributed.get_rank() * rows % 2
    assert (now.view(rows, -1)[first::2] == 3.0).all()
    assert torch.equal(now.view(rows, -1)[1 - first :: 2], before[NAME].view(rows, -1)[1 - first :: 2])
    assert_written(model, before | {NAME: now}, None, ())


@on_threads(2)
def test_new_memory_with_other_values_has_no_low_bits_of_the_old():
    for device in ("cpu", "meta"):
        model, _ = stepped()
        if device == "meta":
            model.to("meta")
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        model(torch.zeros(1, 24, dtype=torch.bfloat16))
        assert_written(model, masters_of(model), None, list(masters_of(model)))
    model, _ = stepped()
    before = masters_of(model)
    for parameter in model.parameters():
        parameter.grad = None
    model.float()
    model.to(torch.bfloat16)
    model(torch.zeros(1, 24, dtype=torch.bfloat16))
    assert_written(model, before, None, list(before))


@on_threads(2)
def test_a_copy_has_the_masters_and_the_float32_moments():
    model, optimizer = stepped()
    before = masters_of(model)
    copied, other = copy.deepcopy((model, optimizer))
    assert_written(copied, before, None, ())
    both = [(model, optimizer), (copied, other)]
    for each, its in both:
        steps(each, its, range(3, 6))
    found = masters_of(copied)
    assert all(torch.equal(master, found[name]) for name, master in masters_of(model).items())


@pytest.mark.filterwarnings("ignore:a sharded tensor is pickled")
@on_threads(2)
def test_files_of_torch_have_weights_as_they_are_and_float32_moments():
    for flattens in (False, True):
        model = sharded(MASTERS, torch.bfloat16)
        optimizer = made(optim.AdamW, model, flattens)
        steps(model, optimizer, range(3))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert all(each.dtype is torch.bfloat16 for each in saved["model"].values())
        moments = {key: each[key] for each in saved["optimizer"]["state"].values() for key in ("exp_avg", "exp_avg_sq")}
        assert all(each.dtype is torch.float32 for each in moments.values())
        weights = {name: each.to_local().clone() for name, each in model.named_parameters()}
        other = sharded(MASTERS, torch.bfloat16)
        its = made(optim.AdamW, other, flattens)
        steps(other, its, range(7, 8))
        other.load_state_dict(saved["model"])
        its.load_state_dict(saved["optimizer"])
        assert_written(other, masters_of(other), None, list(masters_of(other)))
        assert all(torch.equal(each.to_local(), weights[name]) for name, each in other.named_parameters())
        for state in its.state.values():
            assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.float32
        # The same masters, so the same steps.
        model.load_state_dict(saved["model"])
        for each, of in ((model, optimizer), (other, its)):
            steps(each, of, range(3, 6))
        found = masters_of(other)
        assert all(torch.equal(master, found[name]) for name, master in masters_of(model).items())


@on_processes(2)
def test_torchs_checkpoints_of_the_model_leave_no_low_bits(tmp_path):
    model, _ = stepped()
    for options in ({}, {"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}):
        chosen = StateDictOptions(**options)
        state = get_model_state_dict(model, options=chosen)
        assert all(each.dtype is torch.bfloat16 for each in state.values())
        other, _ = stepped()
        is_empty = "broadcast_from_rank0" in options and torch.distributed.get_rank() > 0
        set_model_state_dict(other, {} if is_empty else state, options=chosen)
        assert_written(other, masters_of(other), None, list(masters_of(other)))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path)
    other, _ = stepped()
    dcp.load({"model": get_model_state_dict(other)}, checkpoint_id=tmp_path)  # in place
    assert_written(other, masters_of(other), None, list(masters_of(other)))


@on_processes(2)
def test_a_step_that_is_undone_brings_the_low_bits_back():
    model, optimizer = stepped(comm_policy=sherd.CommPolicy(divergence="join"))
    before = masters_of(model)
    for is_wrong in (True, False):
        with sherd.step(model, optimizer, undo_optimizer=True):
            steps(model, optimizer, range(5, 6))
            if is_wrong and torch.distributed.get_rank():
                raise RuntimeError("of this rank's data")
        assert is_wrong == all(torch.equal(each, before[name]) for name, each in masters_of(model).items())
    assert held_low_bits(masters_of(model))


@on_processes(2)
def test_the_wrappers_state_dicts_and_full_parameters_do_so_too():
    for use_orig_params, kind in itertools.product((True, False), sherd.StateDictType):
        torch.manual_seed(0)
        model = sherd.FullyShardedDataParallel(
            nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 24)).to(torch.bfloat16),
            cpu_offload=MASTERS,
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        optimizer = made(optim.AdamW, model)
        steps(model, optimizer, range(3))
        before = masters_of(model)
        assert held_low_bits(before)
        with sherd.FullyShardedDataParallel.summon_full_params(model):
            model.module[1].weight.data.add_(0)
        assert_written(model, before, None, ())
        sherd.FullyShardedDataParallel.set_state_dict_type(model, kind)
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        assert_written(model, masters_of(model), None, list(before))
        steps(model, optimizer, range(2))
        before = masters_of(model)
        with sherd.FullyShardedDataParallel.summon_full_params(model):
            model.module[1].weight.data.fill_(0.5)
        (name,) = (each for each in before if each.endswith("1.weight"))
        assert_written(model, before, 0.5, (name,))


@on_threads(2)
def test_averages_are_those_of_float32_parameters():
    found = []
    for policy, dtype in ((MASTERS, torch.bfloat16), (sherd.OffloadPolicy(), torch.float32)):
        model = sharded(policy, dtype)
        optimizer = made(optim.AdamW, model)
        steps(model, optimizer, range(1))
        ema = sherd.Ema(model, decay=0.5)
        for step in range(1, 4):
            steps(model, optimizer, range(step, step + 1))
            ema.update()
        found.append({name: each.to_local() for name, each in ema.state_dict()["averages"].items()})
    assert all(torch.equal(each, found[1][name]) for name, each in found[0].items())
