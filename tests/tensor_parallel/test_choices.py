"""Every choice of sherd holds for tensor-parallel parameters too: precision, offload, accumulation, clipping,
scaling, checkpointed activations, unsharded parameters on loan."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.utils.checkpoint import checkpoint

import sherd
from tests.support.ranks.bodies import on_threads
from tests.tensor_parallel.training import (
    EVEN,
    assert_bit_equal,
    assert_trains,
    backward,
    built,
    close,
    mesh_of,
    optimizer_of,
    plain,
    sharded,
    tensor_parallel,
    tokens,
    train,
    whole,
    whole_grads,
    whole_loss_of,
    wholes,
)


def net_on(mesh, with_=sherd.fully_shard, **options):
    return sharded(tensor_parallel(built(), mesh["tp"]), with_=with_, mesh=mesh["dp"], **options)


def plain_gradients(*batches):
    net = built()
    backward(net, EVEN, *batches)
    return net


# Where and in what


@on_threads(4)
def test_mixed_precision_equals_torchs_and_shards_may_rest_on_the_host():
    mesh = mesh_of((2, 2), "dp", "tp")
    rank = [mesh.get_local_rank("dp")]
    ours, torchs = (
        train(
            net_on(mesh, by.fully_shard, mp_policy=by.MixedPrecisionPolicy(torch.bfloat16, torch.float32)), EVEN, rank
        )
        for by in (sherd, fsdp)
    )
    assert_bit_equal(ours, torchs)
    assert_trains(train(net_on(mesh, offload_policy=sherd.CPUOffloadPolicy()), EVEN, rank), plain(EVEN, 2))


# Gradients


@on_threads(4)
def test_accumulated_gradients_and_recomputed_ones_are_those_of_one_process():
    """Reduced each time, at the last one, and with activations computed again."""
    mesh = mesh_of((2, 2), "dp", "tp")
    rank = mesh.get_local_rank("dp")
    expected = whole_grads(plain_gradients((0, 0), (0, 1), (1, 0), (1, 1)))
    for sync, reentrant in ((True, None), (False, None), (True, False), (True, True)):
        net = tensor_parallel(built(), mesh["tp"])
        if reentrant is not None:
            (block,) = net.blocks
            block.forward = lambda x, run=block.forward, kind=reentrant: checkpoint(run, x, use_reentrant=kind)
        sharded(net, mesh=mesh["dp"])
        for step in (0, 1):
            net.set_requires_gradient_sync(sync or step == 1)
            (whole_loss_of(net, tokens(EVEN, step, rank)) / 2).backward()
        close(whole_grads(net), expected, ".grad")


@on_threads(4, clip=[sherd.clip_grad_norm_, nn.utils.clip_grad_norm_])
def test_the_norm_is_that_of_all_parts_on_both_axes_each_counted_once(clip):
    mesh, one = mesh_of((2, 2), "dp", "tp"), plain_gradients((0, 0), (0, 1))
    expected = nn.utils.clip_grad_norm_(one.parameters(), 0.1)
    net = net_on(mesh)
    backward(net, EVEN, (0, mesh.get_local_rank("dp")))
    torch.testing.assert_close(whole(clip(net.parameters(), 0.1)), expected, rtol=1e-5, atol=0)
    close(whole_grads(net), whole_grads(one), ".grad")


@on_threads(4, kind=[sherd.ShardedGradScaler, torch.amp.GradScaler])
def test_all_ranks_skip_a_step_in_which_one_overflows(kind):
    """The first step overflows on one rank of four."""
    mesh = mesh_of((2, 2), "dp", "tp")
    net = net_on(mesh)
    optimizer, scaler = optimizer_of(net), kind("cpu", init_scale=8.0)
    before, changed = wholes(net), []
    for step in (0, 1):
        loss = whole_loss_of(net, tokens(EVEN, step, mesh.get_local_rank("dp")))
        scaler.scale(loss * (float("inf") if (step, dist.get_rank()) == (0, 1) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed.append(any(not torch.equal(after, before[name]) for name, after in wholes(net).items()))
    assert changed == [False, True]
    assert scaler.get_scale() == 4


# Unsharded parameters on loan


@on_threads(4)
def test_what_is_lent_is_whole_over_the_data_parallel_axis_and_is_written_back():
    """With gradients, and still in parts over the other axis."""
    mesh, one = mesh_of((2, 2), "dp", "tp"), plain_gradients((0, 0), (0, 1))
    net = net_on(mesh)
    backward(net, EVEN, (0, mesh.get_local_rank("dp")))
    with sherd.unsharded(net, with_grads=True):
        close(wholes(net), wholes(one))
        close(whole_grads(net), whole_grads(one), ".grad")
        assert all(each.device_mesh == mesh["tp"] for each in net.parameters())
        with torch.no_grad():
            for each in net.parameters():
                each.mul_(2)
    close(wholes(net), {name: 2 * each for name, each in wholes(one).items()})
