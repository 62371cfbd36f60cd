"""A flat parameter does over tensor parallelism what it does over data-parallel ranks alone."""

import copy
import functools
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from sherd import FlatParameter, ShardingStrategy, clip_grad_norm_
from sherd import FullyShardedDataParallel as FSDP
from sherd.wrap import ModuleWrapPolicy
from tests.support.comparing import whole
from tests.tensor_parallel.conftest import meshes_know_their_thread  # noqa: F401  a fixture for threads
from tests.tensor_parallel.training import ODD, built, close, mesh_of, optimizer_of, tokens, whole_loss_of
from tests.wrapper.two_axes import (
    FULL,
    LOCAL,
    SHARDED,
    WHOLE_AFTER,
    axes_of,
    both_of,
    clip_and_step,
    load,
    moments,
    net_on,
    one_process,
    size_of,
    state_of,
    step,
    wholes,
    zeroed,
)

STEPS = 3
flat_on = functools.partial(net_on, use_orig_params=False)


def stepped_plainly(num_ranks):
    """Losses, norms and parameters of one process with the batches of all data-parallel ranks, clipped."""
    net = built(ODD)
    optimizer, losses, norms = optimizer_of(net), [], []
    for number in range(STEPS):
        loss = sum(whole_loss_of(net, tokens(ODD, number, rank)) for rank in range(num_ranks)) / num_ranks
        loss.backward()
        losses.append(loss.item())
        norms.append(clip_and_step(net.parameters(), optimizer, 0.1))
    return losses, norms, wholes(net)


def trained(shape, clip, options):
    model, rank, optimizer = net_on(shape, **options)
    losses, norms = [], []
    for number in range(STEPS):
        loss = whole_loss_of(model, tokens(ODD, number, rank))
        loss.backward()
        losses.append(loss.item())
        norms.append(whole(clip(model)).item())
        optimizer.step()
        optimizer.zero_grad()
    return [type(each) for each in model.parameters()], losses, norms, model.state_dict()


CLIPS = {
    "torch": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "wrapper": lambda model: model.clip_grad_norm_(0.1),
    "sherd": lambda model: clip_grad_norm_(model.parameters(), 0.1),
}
NO_SHARD = {"sharding_strategy": ShardingStrategy.NO_SHARD}


@pytest.mark.parametrize(
    ("shape", "clip", "options"),
    [
        ((2, 2), "torch", {"use_orig_params": False}),
        ((2, 2, 2), "wrapper", {"use_orig_params": False}),
        ((2, 2), "sherd", {"use_orig_params": False, **NO_SHARD}),
        ((2, 2), "torch", {"use_orig_params": True, **NO_SHARD}),
    ],
    ids=["dp_tp", "copies_dp_tp", "no shards", "no shards, orig"],
)
def test_parameters_over_tensor_parallelism_train_and_are_clipped_as_in_one_process(threads, shape, clip, options):
    losses, norms, params = stepped_plainly(size_of(shape[:-1]))
    runs = threads(size_of(shape)).run(trained, shape, CLIPS[clip], options)
    for leaves, _, its_norms, its_params in runs:
        # One vector for each unit.
        assert FlatParameter not in leaves if options["use_orig_params"] else leaves == [FlatParameter] * 2
        assert its_norms == pytest.approx(norms, rel=1e-4)
        close(its_params, params)
    for number, loss in enumerate(losses):
        assert sum(each[1][number] for each in runs) / len(runs) == pytest.approx(loss, abs=1e-5)


def trained_with_empty_vectors():
    """Of the first layer the second rank of tp has nothing."""
    mesh, data = axes_of((2, 2))
    net = parallelize_module(narrow(), mesh["tp"], {"0": WHOLE_AFTER})
    model = FSDP(net, device_mesh=data, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.full((2, 3), 1.0 + data.get_local_rank())).square().mean().backward()
    norm = model.clip_grad_norm_(0.1).item()
    optimizer.step()
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    return norm, model.state_dict(), moments(state)


def narrow():
    net = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.fill_(0.1 + number)
    return net


def test_a_rank_without_any_element_of_a_flat_parameter_takes_part(threads):
    net = narrow()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    (sum(net(torch.full((2, 3), 1.0 + rank)).square().mean() for rank in range(2)) / 2).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1).item()
    optimizer.step()
    params, state = state_of(net, optimizer)
    for its_norm, its_params, its_state in threads(4).run(trained_with_empty_vectors):
        assert its_norm == pytest.approx(norm, rel=1e-5)
        close(its_params, params)
        close(its_state, state)


# Files


def through_files(folder):
    """The parameters by name, and as the vectors they are, with the optimizer's state; into other vectors."""
    model, rank, optimizer = flat_on((2, 2))
    step(model, rank, optimizer)
    other, _, its = flat_on((2, 2))
    step(other, rank, its)
    expected = model.state_dict(), moments(FSDP.optim_state_dict(model, optimizer)["state"])
    for kind in (SHARDED, LOCAL):
        FSDP.set_state_dict_type(model, kind)
        FSDP.set_state_dict_type(other, kind)
        dcp.save(both_of(model, optimizer), checkpoint_id=folder / kind.name)
        with FSDP.summon_full_params(other):
            zeroed(other)
        state = both_of(other, its)
        dcp.load(state, checkpoint_id=folder / kind.name)
        load(other, its, state["model"], state["optimizer"])
        FSDP.set_state_dict_type(other, FULL)
        close(other.state_dict(), expected[0], f" as {kind.name}")
        close(moments(FSDP.optim_state_dict(other, its)["state"]), expected[1], f" as {kind.name}")
    flat = next(model.parameters())
    vector = flat.detach().full_tensor()
    assert vector.shape == flat.shape, "the vectors of all ranks"
    assert torch.equal(flat.detach().redistribute(placements=[Replicate()] * 2).to_local(), vector)
    file = io.BytesIO()
    torch.save(flat, file)
    file.seek(0)
    for again in (copy.deepcopy(flat), torch.load(file)):
        assert type(again) is FlatParameter
        assert torch.equal(again.detach().full_tensor(), vector)
    from_torchs_functions(model, optimizer, other, its)
    close(other.state_dict(), expected[0], " from rank 0")
    close(moments(FSDP.optim_state_dict(other, its)["state"]), expected[1], " from rank 0")
    return expected, vector


def from_torchs_functions(model, optimizer, other, its):
    """Of torch's checkpointing: everything whole, of which the others have nothing until it is sent."""
    FSDP.set_state_dict_type(model, FULL)
    states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    with FSDP.summon_full_params(other):
        zeroed(other)
    params, state = states if dist.get_rank() == 0 else ({}, {})
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, params, options=options)
    set_optimizer_state_dict(other, its, state, options=options)


def test_files_take_flat_parameters_over_both_axes_by_name_and_as_vectors(world, tmp_path):
    params, state = one_process(2)
    runs = world(4).run(through_files, tmp_path)
    for (its_params, its_state), vector in runs:
        close(its_params, params)
        close(its_state, state)
        assert torch.equal(vector, runs[0][1])


# Several axes beside


class Experts(nn.Module):
    """A matrix of which each rank of `ep` has some rows, one that is cut over `tp`, and one that no axis cuts."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, rows in (("experts", 5), ("parallel", 3), ("free", 2), ("both", 7)):
            setattr(self, name, nn.Parameter(torch.randn(rows, 3, generator=generator)))

    def forward(self, x):
        """This rank's part of a sum over all elements."""
        parts = (each.to_local() if isinstance(each, DTensor) else each for each in self.parameters_used())
        return sum((part * x).square().sum() for part in parts)

    def parameters_used(self):
        return self.experts, self.parallel, self.free, self.both


def over_three_axes():
    mesh = mesh_of((2, 2, 2), "dp", "ep", "tp")
    net = Experts()
    for name, axes, placements in (
        ("experts", "ep", [Shard(0)]),
        ("parallel", "tp", [Shard(0)]),
        ("both", ("ep", "tp"), [Shard(0), Shard(1)]),
    ):
        laid = distribute_tensor(getattr(net, name).detach(), mesh[axes], placements, src_data_rank=None)
        setattr(net, name, nn.Parameter(laid))
    model = FSDP(net, device_mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.tensor(1.0 + mesh.get_local_rank("dp"))).backward()
    norms = [whole(nn.utils.get_total_norm([each.grad for each in model.parameters()])).item()]
    norms.append(model.clip_grad_norm_(1.0).item())
    optimizer.step()
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    return norms, model.state_dict(), moments(state)


def test_a_flat_parameter_of_members_on_different_axes_is_stepped_and_saved_as_in_one_process(threads):
    net = Experts()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    (sum(net(torch.tensor(1.0 + rank)) for rank in range(2)) / 2).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0).item()
    optimizer.step()
    params, state = state_of(net, optimizer)
    for norms, its_params, its_state in threads(8).run(over_three_axes):
        assert norms == pytest.approx([norm, norm], rel=1e-5)
        close(its_params, params)
        close(its_state, state)
