"""Every choice of sherd holds for tensor-parallel parameters too: precision, offload, accumulation, clipping,
scaling, checkpointed activations, unsharded parameters on loan."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.utils.checkpoint import checkpoint

import sherd
from tests.tensor_parallel.training import (
    EVEN,
    assert_bit_equal,
    assert_same,
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


def narrow_and_on_the_host():
    mesh = mesh_of((2, 2), "dp", "tp")
    rank = [mesh.get_local_rank("dp")]
    in_bf16 = [
        train(net_on(mesh, by, mp_policy=policy(torch.bfloat16, torch.float32)), EVEN, rank)
        for by, policy in (
            (sherd.fully_shard, sherd.MixedPrecisionPolicy),
            (fsdp.fully_shard, fsdp.MixedPrecisionPolicy),
        )
    ]
    return *in_bf16, train(net_on(mesh, offload_policy=sherd.CPUOffloadPolicy()), EVEN, rank)


def test_mixed_precision_equals_torchs_and_shards_may_rest_on_the_host(world):
    runs = world(4).run(narrow_and_on_the_host)
    for ours, torchs, _ in runs:
        assert_bit_equal(ours, torchs)
    assert_same([offloaded for _, _, offloaded in runs], plain(EVEN, 2))


# Gradients


def gradients_of_two_batches():
    """Reduced each time, at the last one, and with activations computed again."""
    mesh = mesh_of((2, 2), "dp", "tp")
    rank = mesh.get_local_rank("dp")
    found = []
    for sync, reentrant in ((True, None), (False, None), (True, False), (True, True)):
        net = tensor_parallel(built(), mesh["tp"])
        if reentrant is not None:
            (block,) = net.blocks
            block.forward = lambda x, run=block.forward, kind=reentrant: checkpoint(run, x, use_reentrant=kind)
        sharded(net, mesh=mesh["dp"])
        for step in (0, 1):
            net.set_requires_gradient_sync(sync or step == 1)
            (whole_loss_of(net, tokens(EVEN, step, rank)) / 2).backward()
        found.append(whole_grads(net))
    return found


def test_accumulated_gradients_and_recomputed_ones_are_those_of_one_process(world):
    expected = whole_grads(plain_gradients((0, 0), (0, 1), (1, 0), (1, 1)))
    for found in world(4).run(gradients_of_two_batches):
        for grads in found:
            close(grads, expected, ".grad")


def clipped(clip):
    mesh = mesh_of((2, 2), "dp", "tp")
    net = net_on(mesh)
    backward(net, EVEN, (0, mesh.get_local_rank("dp")))
    return whole(clip(net.parameters(), 0.1)), whole_grads(net)


def test_the_norm_is_that_of_all_parts_on_both_axes_each_counted_once(threads):
    for clip in (sherd.clip_grad_norm_, nn.utils.clip_grad_norm_):
        one = plain_gradients((0, 0), (0, 1))
        expected = nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        for norm, grads in threads(4).run(clipped, clip):
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
            close(grads, whole_grads(one), f"{clip.__module__}: .grad")


def scaled():
    """The first step overflows on one rank of four."""
    mesh = mesh_of((2, 2), "dp", "tp")
    results = []
    for kind in (sherd.ShardedGradScaler, torch.amp.GradScaler):
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
        results.append((changed, scaler.get_scale()))
    return results


def test_all_ranks_skip_a_step_in_which_one_overflows(world):
    for results in world(4).run(scaled):
        assert results == [([False, True], 4.0)] * 2


# Unsharded parameters on loan


def lent():
    """Whole over the data-parallel axis, with gradients; still in parts over the other."""
    mesh = mesh_of((2, 2), "dp", "tp")
    net = net_on(mesh)
    backward(net, EVEN, (0, mesh.get_local_rank("dp")))
    with sherd.unsharded(net, with_grads=True):
        seen = {
            name: (whole(each), whole(each.grad), each.device_mesh == mesh["tp"])
            for name, each in net.named_parameters()
        }
        with torch.no_grad():
            for each in net.parameters():
                each.mul_(2)
    return seen, wholes(net)


def test_what_is_lent_is_whole_over_the_data_parallel_axis_and_is_written_back(threads):
    one = plain_gradients((0, 0), (0, 1))
    for seen, after in threads(4).run(lent):
        close({name: param for name, (param, _, _) in seen.items()}, wholes(one))
        close({name: grad for name, (_, grad, _) in seen.items()}, whole_grads(one), ".grad")
        assert all(on_tp for _, _, on_tp in seen.values())
        close(after, {name: 2 * each for name, each in wholes(one).items()})
