"""A tensor-parallel model under the wrapper, over one and two axes of its own, and the same in one process."""

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from sherd import FullyShardedDataParallel as FSDP
from sherd import ShardedForm, ShardedStateDictConfig, ShardingStrategy, StateDictType
from sherd.wrap import ModuleWrapPolicy
from tests.support.comparing import whole
from tests.tensor_parallel.training import (
    ODD,
    Block,
    built,
    mesh_of,
    optimizer_of,
    tensor_parallel,
    tokens,
    whole_loss_of,
)

FULL, LOCAL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
ROWS = ShardedStateDictConfig(form=ShardedForm.ROWS)
SHARDED_TENSORS = ShardedStateDictConfig(form=ShardedForm.SHARDED_TENSOR)
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
WHOLE_AFTER = ColwiseParallel(output_layouts=Replicate())


def axes_of(shape):
    """The mesh and the data-parallel part of it; `shape` is (dp, tp), (replicate, dp, tp), or (dp,)."""
    mesh = mesh_of(shape, *("replicate", "dp", "tp")[3 - max(2, len(shape)) :][: len(shape)])
    return mesh, mesh["replicate", "dp"] if len(shape) == 3 else mesh["dp"]


def size_of(shape):
    return torch.Size(shape).numel()


def net_on(shape, sizes=ODD, change=None, **options):
    """The net, in units of its own; the rank's number among those that have other batches; and the optimizer."""
    mesh, data = axes_of(shape)
    net = built(sizes)
    if change is not None:
        change(net)
    if "tp" in mesh.mesh_dim_names:
        tensor_parallel(net, mesh["tp"])
    if len(shape) == 3:
        options.setdefault("sharding_strategy", ShardingStrategy.HYBRID_SHARD)
    options = {"use_orig_params": True, "auto_wrap_policy": ModuleWrapPolicy({Block}), **options}
    model = FSDP(net, device_mesh=data, **options)
    rank = 0
    for axis in range(data.ndim):
        rank = rank * data.size(axis) + data.get_local_rank(axis)
    return model, rank, optimizer_of(model)


def step(model, rank, optimizer):
    whole_loss_of(model, tokens(ODD, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def zeroed(net):
    for parameter in net.parameters():
        parameter.zero_()


def wholes(net):
    return whole(dict(net.named_parameters()))


def moments(state):
    """What AdamW keeps, whole."""
    return {f"{name} {key}": whole(value) for name, its in state.items() for key, value in its.items()}


def state_of(net, optimizer):
    """The parameters and the moments of one process, by name."""
    names = [name for name, _ in net.named_parameters()]
    return wholes(net), moments({names[number]: its for number, its in optimizer.state_dict()["state"].items()})


def one_process(num_ranks):
    """The state after a step with the batches of all data-parallel ranks."""
    net = built(ODD)
    optimizer = optimizer_of(net)
    for rank in range(num_ranks):
        (whole_loss_of(net, tokens(ODD, 0, rank)) / num_ranks).backward()
    optimizer.step()
    return state_of(net, optimizer)


def clip_and_step(parameters, optimizer, max_norm):
    """In one process; returns the norm."""
    norm = nn.utils.clip_grad_norm_(parameters, max_norm).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


def load(model, optimizer, params, state):
    """A model's state dict, and that of its optimizer."""
    model.load_state_dict(params)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))


def both_of(model, optimizer):
    return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
