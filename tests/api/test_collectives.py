"""Choices about collectives hold: own ones, hooks, factors, groups, what is in flight."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sherd import MixedPrecisionPolicy, PrefetchPolicy, fully_shard, share_comm_ctx
from sherd.comm.streams import RecordingStreams, use_streams
from sherd.errors import StateError
from tests.api.checks import assert_trains
from tests.api.own_collectives import GatherByList, ReduceByAllReduce
from tests.support.comparing import assert_named_close, form, whole_grads, whole_params
from tests.support.meshes import mesh_of
from tests.support.models import WIDTH, Wired, build, chain, noise
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import sharded
from tests.support.training import LR, made, mean_square, train_job_plain

# A Block's parameters: 16x8 + 16 + 8x16 + 8.
BLOCK_NUMEL, NUM_TENSORS = 280, 4


def plain_grads(num_ranks):
    """The mean gradients of the first step of two blocks."""
    plain = chain()
    for rank in range(num_ranks):
        (mean_square(plain, rank, 0) / num_ranks).backward()
    return whole_grads(plain)


# Own collectives


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("waits", [True, False], ids=["in_host_order", "returns_work"])
@on_processes(2)
def test_own_collectives_carry_one_units_bytes_and_change_no_number(waits, reshard):
    model, gather, reduce = sharded(chain(), reshard_after_forward=reshard), GatherByList(waits), ReduceByAllReduce()
    model[0].set_custom_all_gather(gather)
    model[0].set_custom_reduce_scatter(reduce)
    assert_trains(model, chain)
    assert len(gather.calls) == len(gather.allocated) == (6 if reshard else 3)
    assert len(reduce.calls) == len(reduce.allocated) == 3
    for whole, part, dtype in gather.calls:
        assert (whole, dtype) == (2 * part, torch.float32)
        assert BLOCK_NUMEL / 2 <= part <= BLOCK_NUMEL / 2 + 64, "no more than a little padding"
    for part, whole, dtype in reduce.calls:
        assert (whole, dtype) == (2 * part, torch.float32)
        assert part == gather.calls[0][1] + NUM_TENSORS, "a flag for each tensor: has this rank its gradient?"
    assert {numel for numel, _ in gather.allocated} == {gather.calls[0][0]}
    assert {numel for numel, _ in reduce.allocated} == {reduce.calls[0][0]}


@on_threads(2)
def test_own_collectives_see_the_dtypes_of_the_policy():
    model = fully_shard(chain(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float64))
    gather, reduce = GatherByList(waits=True), ReduceByAllReduce()
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    mean_square(model, dist.get_rank(), 0).backward()
    assert (gather.calls[0][2], gather.allocated[0][1]) == (torch.bfloat16, torch.bfloat16)
    assert (reduce.calls[0][2], reduce.allocated[0][1]) == (torch.float64, torch.float64)


@on_processes(2)
def test_a_large_tensor_does_not_split_what_own_collectives_and_hooks_see():
    """A unit with a matrix of 8 MiB, which a CPU's engine may well gather on its own."""
    model, gather, reduce, hooked = nn.Linear(1024, 2048), GatherByList(waits=True), ReduceByAllReduce(), []
    fully_shard(model)
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    model.set_all_reduce_hook(lambda reduced: hooked.append(reduced.numel()))
    model(noise(0, dist.get_rank(), 2, 1024)).square().mean().backward()
    assert (len(gather.calls), len(reduce.calls), len(hooked)) == (1, 1, 1)
    assert 0 <= hooked[0] - 2048 * 1025 // 2 <= 64


# The hook on reduced gradients


def hooked(mesh_shape, stream):
    model, seen = sharded(chain(), mesh=mesh_of(mesh_shape)), []

    def double(reduced):
        seen.append((reduced.clone(), reduced.dim(), reduced.requires_grad))
        reduced.mul_(2)

    model[1].set_all_reduce_hook(double, stream=stream)
    mean_square(model, dist.get_rank(), 0).backward()
    ((reduced, dim, requires_grad),) = seen
    assert (dim, requires_grad) == (1, False)
    local = torch.cat([param.grad.to_local().flatten() for param in model[1].parameters()])
    assert (reduced.sum() * 2 - local.sum()).abs() < 1e-5
    expected = plain_grads(dist.get_world_size())
    for name, grad in whole_grads(model).items():
        torch.testing.assert_close(grad, expected[name] * (2 if name.startswith("1.") else 1))


def test_a_hook_sees_and_may_change_the_reduced_gradients_of_its_unit(threads):
    for mesh_shape, stream in (((2,), None), ((2,), object()), ((2, 2), None)):
        threads(2 * len(mesh_shape)).run(hooked, mesh_shape, stream)


@pytest.mark.parametrize(
    ("setter", "mesh_shape"), [("set_requires_gradient_sync", None), ("set_requires_all_reduce", (2, 2))]
)
@on_threads(4)
def test_a_hook_waits_for_the_backward_that_reduces(setter, mesh_shape):
    """One backward that does not reduce, over shards or replicas, one that does."""
    model, seen, counts = sharded(chain(), mesh=mesh_of(mesh_shape)), [], []
    model[0].set_all_reduce_hook(seen.append)
    for last in (False, True):
        getattr(model, setter)(last)
        mean_square(model, dist.get_rank(), 0).backward()
        counts.append(len(seen))
    assert counts == [0, 1]


# The optimizer's event


@on_threads(2)
def test_the_first_gather_after_the_optimizer_follows_its_event_once():
    streams = RecordingStreams()
    with use_streams(streams):
        model = sharded(chain())
    for event, expected in ((None, "follow compute"), (object(), "follow event"), (None, "follow compute")):
        if event is not None:
            model.set_post_optim_event(event)
        start = len(streams.log)
        mean_square(model, dist.get_rank(), 0).backward()
        first_gather = streams.log.index(("gather", "run"), start)
        assert [what for lane, what in streams.log[start:first_gather] if lane == "gather"] == [expected]


# Factors

POLICIES = {
    "float32": (MixedPrecisionPolicy(), 1e-5),
    "reduce_bfloat16": (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), 2e-2),
    "reduce_float16": (MixedPrecisionPolicy(reduce_dtype=torch.float16), 2e-3),
}


@pytest.mark.parametrize("setter", ["set_gradient_divide_factor", "set_reduce_scatter_divide_factor"])
@pytest.mark.parametrize("policy", POLICIES)
@on_threads(2)
def test_a_divide_factor_holds_for_one_unit_in_every_reduce_dtype(policy, setter):
    mp_policy, tolerance = POLICIES[policy]
    model, expected = sharded(chain(), mp_policy=mp_policy), plain_grads(2)
    getattr(model[0], setter)(4)
    mean_square(model, dist.get_rank(), 0).backward()
    for name, grad in whole_grads(model).items():
        half = expected[name] / (2 if name.startswith("0.") else 1)
        torch.testing.assert_close(grad, half, rtol=tolerance, atol=tolerance * 1e-1)


# Parameters that only some ranks use


def forked():
    """A unit of two layers, of which a rank uses one, behind another unit."""
    fork = Wired(
        lambda self, x, use_left: (self.left if use_left else self.right)(x),
        left=nn.Linear(WIDTH, WIDTH),
        right=nn.Linear(WIDTH, WIDTH),
    )
    parts = {"stem": nn.Linear(WIDTH, WIDTH), "fork": fork}
    return Wired(lambda self, x, use_left: self.fork(torch.tanh(self.stem(x)), use_left), **parts)


def diverge(model, rank, step):
    return model(noise(step, rank), (rank + step) % 3 == 0).square().mean()


@pytest.mark.parametrize("recurse", [True, False])
@on_threads(3)
def test_ranks_may_use_other_parameters_of_a_unit_and_get_the_mean_with_zeros(recurse):
    model = sharded(made(forked))
    (model if recurse else model.fork).set_reduce_scatter_unused_params(True, recurse=recurse)
    # In SGD a zero gradient and none are the same, so that plain training is the reference although a step leaves None.
    assert_trains(model, forked, diverge, steps=4)


@on_threads(2)
def test_a_parameter_nobody_used_gets_zeros_only_when_asked_for():
    for setting, expected in ((True, 0.0), (False, None)):
        model = sharded(made(forked))
        model.set_reduce_scatter_unused_params(setting)
        model(noise(0, dist.get_rank()), True).sum().backward()
        grad = model.fork.right.weight.grad
        assert (None if grad is None else grad.full_tensor().abs().sum().item()) == expected


# Gathers and reductions in flight


def layers():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


class Watched(RecordingStreams):
    """Counts gathers that were started and not yet waited for."""

    def most_in_flight(self, start, stop):
        now = most = 0
        for entry in self.log[start:stop]:
            now += (entry == ("gather", "run")) - (entry == ("compute", "follow gather"))
            most = max(most, now)
        return most


def gathers_in_flight(policy):
    """Most gathers at once in (forward, backward) of the second step."""
    streams, rank = Watched(), dist.get_rank()
    with use_streams(streams):
        model = sharded(made(layers), reshard_after_forward=True, prefetch_policy=policy)
    mean_square(model, rank, 0).backward()
    start = len(streams.log)
    loss = mean_square(model, rank, 1)
    middle = len(streams.log)
    loss.backward()
    return streams.most_in_flight(start, middle), streams.most_in_flight(middle, len(streams.log))


LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 4

BOUNDS = [
    (PrefetchPolicy(), (2, 2)),
    (PrefetchPolicy(forward_depth=0, backward_depth=0), (1, 1)),
    (PrefetchPolicy(forward_depth=3), (4, 2)),
    (PrefetchPolicy(backward_depth=2), (2, 3)),
    (PrefetchPolicy(forward_depth=5, backward_depth=5, bytes_in_flight=0), (1, 1)),
    (PrefetchPolicy(forward_depth=100, backward_depth=100), (6, 6)),
]


@pytest.mark.parametrize(("policy", "most"), BOUNDS)
@on_threads(2)
def test_a_prefetch_policy_bounds_how_far_gathers_run_ahead_and_changes_no_number(policy, most):
    # The unit that is waited for at once counts as well: at most one more than is prefetched.
    for found, bound in zip(gathers_in_flight(policy), most, strict=True):
        assert found in (bound, bound - 1)
    assert_trains(sharded(made(layers), prefetch_policy=policy), layers)


@on_threads(2)
def test_prefetch_stays_within_the_bytes_in_flight():
    found = []
    for limit in (0, 1, 2, 50):
        policy = PrefetchPolicy(forward_depth=5, bytes_in_flight=limit * 2 * LAYER_BYTES)
        found.append(gathers_in_flight(policy)[0])
    assert found == sorted(found)
    assert found[0] < found[-1]
    assert found[1] <= 3


@on_threads(2)
def test_no_more_reductions_are_in_flight_than_allowed():
    for limit, expected in ((None, 1), (1, 1), (2, 2), (4, 4), (100, 6)):
        streams = RecordingStreams()
        with use_streams(streams):
            model = sharded(layers())
        if limit is not None:
            model.set_reduce_scatter_max_input_buffers(limit)
        mean_square(model, dist.get_rank(), 0).backward()
        in_flight, most = 0, 0
        for entry in streams.log:
            in_flight += (entry == ("reduce", "run")) - (entry == ("compute", "follow reduce"))
            most = max(most, in_flight)
        assert (most, in_flight) == (expected, 0), limit


# Groups and memory


@pytest.mark.parametrize(("enable", "recurse", "same"), [(True, True, False), (False, True, True), (True, False, True)])
@on_threads(2)
def test_reduce_scatters_may_have_a_process_group_of_their_own(enable, recurse, same):
    model, gather, reduce = sharded(chain()), GatherByList(waits=True), ReduceByAllReduce()
    model.set_separate_reduce_scatter_group(enable, recurse=recurse)
    model[0].set_custom_all_gather(gather)
    model[0].set_custom_reduce_scatter(reduce)
    assert_trains(model, chain)
    assert (gather.groups == reduce.groups) == same


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=["shards", "replicas"])
@on_processes(4)
def test_a_separate_group_changes_no_number(mesh_shape):
    model = sharded(chain(), mesh=mesh_of(mesh_shape))
    model.set_separate_reduce_scatter_group()
    assert_trains(model, chain)
    model.set_separate_reduce_scatter_group(False)


def uneven():
    return build("uneven")


def own_job(model, rank, step):
    return model.loss(model(*model.make_inputs(step, rank)))


@on_processes(2)
def test_gloo_has_no_memory_of_its_own_and_ordinary_memory_or_an_own_collective_serves():
    model, rank = sharded(uneven()), dist.get_rank()
    for unit in model.units():
        unit.set_allocate_memory_from_process_group_for_comm(True)
    assert_trains(model, uneven, own_job)
    for unit in model.units():
        unit.set_allocate_memory_from_process_group_for_comm(False)
    own_job(model, rank, 0).backward()
    # Switching off what was never on leaves the user's own collective in place.
    other, gather = sharded(chain()), GatherByList(waits=True)
    other[0].set_allocate_memory_from_process_group_for_comm(True)
    other[0].set_allocate_memory_from_process_group_for_comm(False)
    other[0].set_custom_all_gather(gather)
    mean_square(other, rank, 0).backward()
    assert len(gather.calls) == 2


@on_threads(2)
def test_pipeline_stages_may_share_their_streams():
    """Two models, as pipeline stages are: the second's loss flows back into the first."""
    first, second = sharded(chain()), sharded(chain())
    share_comm_ctx([first, second])
    both = nn.Sequential(first, second)
    optimizer = torch.optim.SGD(both.parameters(), lr=LR)
    for step in range(3):
        second(first(noise(step, dist.get_rank()))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {form(block.up) for block in (*first, *second)} == {"shard"}
    expected = train_job_plain(nn.Sequential(chain(), chain()), mean_square, 2)
    assert_named_close(whole_params(both), expected, "parameter", 1e-5, 1e-6)


@on_threads(2)
def test_what_buffers_depend_on_does_not_change_while_gradients_wait():
    """Several reductions at a time, asked for between two backwards of one step, on a device."""
    model = nn.Sequential(nn.Linear(3, 6))
    with use_streams(RecordingStreams()):
        fully_shard(model)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(StateError, match=r"reduce_buffers of unit .* cannot change while gradients"):
        model.set_reduce_scatter_max_input_buffers(2)
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 3)).sum().backward()
    model.set_reduce_scatter_max_input_buffers(2)
    assert model[0].bias.grad.full_tensor().tolist() == [4.0] * 6
