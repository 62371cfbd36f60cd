"""Do the choices about collectives hold: own ones, hooks, factors, groups, buffers in flight?"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sherd import MixedPrecisionPolicy, fully_shard, share_comm_ctx
from sherd.comm.streams import RecordingStreams, use_streams
from sherd.errors import StateError
from tests.api.own_collectives import GatherByList, ReduceByAllReduce
from tests.support.comparing import form, whole_grads
from tests.support.meshes import mesh_of
from tests.support.models import WIDTH, Block, build, noise, shard
from tests.support.sharding import shard_children
from tests.support.training import (
    Recipe,
    assert_all_same,
    assert_trained,
    made,
    mean_square,
    steps_sharded,
    train_job,
    train_job_plain,
)

# A Block's parameters: 16x8 + 16 + 8x16 + 8.
BLOCK_NUMEL, NUM_TENSORS = 280, 4


def stack():
    return nn.Sequential(Block(), Block())


# Own collectives


def train_with_own_collectives(waits, reshard):
    model = shard_children(made(stack), reshard_after_forward=reshard)
    gather, reduce = GatherByList(waits), ReduceByAllReduce()
    model[0].set_custom_all_gather(gather)
    model[0].set_custom_reduce_scatter(reduce)
    params = train_job(model, mean_square, steps=3)
    return params, gather.calls, gather.allocated, reduce.calls, reduce.allocated


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("waits", [True, False], ids=["in_host_order", "returns_work"])
def test_own_collectives_carry_one_units_bytes_and_change_no_number(world, waits, reshard):
    runs = world(2).run(train_with_own_collectives, waits, reshard)
    assert_trained([run[0] for run in runs], stack)
    for _, gathers, gather_memory, reduces, reduce_memory in runs:
        assert len(gathers) == len(gather_memory) == (6 if reshard else 3)
        assert len(reduces) == len(reduce_memory) == 3
        for whole, part, dtype in gathers:
            assert (whole, dtype) == (2 * part, torch.float32)
            assert BLOCK_NUMEL / 2 <= part <= BLOCK_NUMEL / 2 + 64, "no more than a little padding"
        for part, whole, dtype in reduces:
            assert (whole, dtype) == (2 * part, torch.float32)
            assert part == gathers[0][1] + NUM_TENSORS, "a flag for each tensor: has this rank its gradient?"
        assert {numel for numel, _ in gather_memory} == {gathers[0][0]}
        assert {numel for numel, _ in reduce_memory} == {reduces[0][0]}


def dtypes_of_own_collectives():
    model = made(stack)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float64))
    gather, reduce = GatherByList(waits=True), ReduceByAllReduce()
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    mean_square(model, dist.get_rank(), 0).backward()
    return gather.calls[0][2], gather.allocated[0][1], reduce.calls[0][2], reduce.allocated[0][1]


def test_own_collectives_see_the_dtypes_of_the_policy(world):
    expected = (torch.bfloat16, torch.bfloat16, torch.float64, torch.float64)
    assert world(2).run(dtypes_of_own_collectives) == [expected] * 2


def wide():
    """A unit with a matrix of 8 MiB, which a CPU's engine may well gather on its own."""
    return nn.Linear(1024, 2048)


def read_wide(model, rank, step):
    return model(noise(step, rank, 2, 1024)).square().mean()


def train_wide_with_own_collectives():
    model = made(wide)
    fully_shard(model)
    gather, reduce, hooked = GatherByList(waits=True), ReduceByAllReduce(), []
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    model.set_all_reduce_hook(lambda reduced: hooked.append(reduced.numel()))
    params = train_job(model, read_wide, steps=1)
    return params["bias"], len(gather.calls), len(reduce.calls), hooked


def test_a_large_tensor_does_not_split_what_own_collectives_and_hooks_see(world):
    numel = 2048 * 1025 // 2
    for _, gathers, reduces, hooked in world(2).run(train_wide_with_own_collectives):
        assert gathers == 1
        assert reduces == 1
        assert len(hooked) == 1
        assert numel <= hooked[0] <= numel + 64


# The hook on reduced gradients


def train_with_a_hook(mesh_shape, stream):
    model = made(stack)
    seen = []

    def double(reduced):
        seen.append((reduced.clone(), reduced.dim(), reduced.requires_grad))
        reduced.mul_(2)

    shard_children(model, mesh=mesh_of(mesh_shape))
    model[1].set_all_reduce_hook(double, stream=stream)
    mean_square(model, dist.get_rank(), 0).backward()
    (reduced, dim, requires_grad) = seen[0]
    local = torch.cat([param.grad.to_local().flatten() for param in model[1].parameters()])
    return len(seen), dim, requires_grad, reduced.sum() * 2 - local.sum(), whole_grads(model)


@pytest.mark.parametrize(
    ("mesh_shape", "stream"),
    [((2,), None), ((2,), object()), ((2, 2), None)],
    ids=["shards", "stream", "replicas"],
)
def test_a_hook_sees_and_may_change_the_reduced_gradients_of_its_unit(world, mesh_shape, stream):
    num_ranks = math.prod(mesh_shape)
    plain = made(stack)
    for rank in range(num_ranks):
        (mean_square(plain, rank, 0) / num_ranks).backward()
    for calls, dim, requires_grad, rest, grads in world(num_ranks).run(train_with_a_hook, mesh_shape, stream):
        assert (calls, dim, requires_grad) == (1, 1, False)
        assert rest.abs() < 1e-5
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad * (2 if name.startswith("1.") else 1))


def calls_of_a_hook_without_sync():
    """One backward that does not reduce, one that does."""
    model = shard_children(made(stack))
    seen = []
    model[0].set_all_reduce_hook(lambda reduced: seen.append(reduced))
    counts = []
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        mean_square(model, dist.get_rank(), 0).backward()
        counts.append(len(seen))
    return counts


def test_a_hook_is_not_called_for_gradients_that_are_not_reduced(world):
    assert world(2).run(calls_of_a_hook_without_sync) == [[0, 1]] * 2


def calls_of_a_hook_that_waits_for_the_replicas():
    model = shard_children(made(stack), mesh=mesh_of((2, 2)))
    seen = []
    model[0].set_all_reduce_hook(lambda reduced: seen.append(reduced.clone()))
    counts = []
    for last in (False, True):
        model.set_requires_all_reduce(last)
        mean_square(model, dist.get_rank(), 0).backward()
        counts.append(len(seen))
    return counts


def test_a_hook_waits_for_the_replicas(world):
    assert world(4).run(calls_of_a_hook_that_waits_for_the_replicas) == [[0, 1]] * 4


# The optimizer's event


def gathers_behind_an_event():
    streams = RecordingStreams()
    with use_streams(streams):
        model = shard_children(made(stack))
    begins = []
    for event in (None, object(), None):
        if event is not None:
            model.set_post_optim_event(event)
        start = len(streams.log)
        mean_square(model, dist.get_rank(), 0).backward()
        first_gather = streams.log.index(("gather", "run"), start)
        begins.append([what for lane, what in streams.log[start:first_gather] if lane == "gather"])
    return begins


def test_the_first_gather_after_the_optimizer_follows_its_event_once(world):
    expected = [["follow compute"], ["follow event"], ["follow compute"]]
    assert world(2).run(gathers_behind_an_event) == [expected] * 2


# Factors


def grads_with_one_units_factor(setter, policy):
    model = shard_children(made(stack), mp_policy=policy)
    getattr(model[0], setter)(4)
    mean_square(model, dist.get_rank(), 0).backward()
    return whole_grads(model)


POLICIES = {
    "float32": (MixedPrecisionPolicy(), 1e-5),
    "reduce_bfloat16": (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), 2e-2),
    "reduce_float16": (MixedPrecisionPolicy(reduce_dtype=torch.float16), 2e-3),
}


@pytest.mark.parametrize("setter", ["set_gradient_divide_factor", "set_reduce_scatter_divide_factor"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_divide_factor_holds_for_one_unit_in_every_reduce_dtype(world, policy, setter):
    plain, (mp_policy, tolerance) = made(stack), POLICIES[policy]
    for rank in range(2):
        mean_square(plain, rank, 0).backward()
    for grads in world(2).run(grads_with_one_units_factor, setter, mp_policy):
        for name, param in plain.named_parameters():
            expected = param.grad / (4 if name.startswith("0.") else 2)
            torch.testing.assert_close(grads[name], expected, rtol=tolerance, atol=tolerance * 1e-1)


# Parameters that only some ranks use


class Fork(nn.Module):
    """Two layers in one unit, of which a rank uses one."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, use_left):
        return self.left(x) if use_left else self.right(x)


class Forked(nn.Module):
    """A unit inside which the ranks diverge."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.fork = Fork()

    def forward(self, x, use_left):
        return self.fork(torch.tanh(self.stem(x)), use_left)


def diverge(model, rank, step):
    return model(noise(step, rank), (rank + step) % 3 == 0).square().mean()


def train_diverging(recurse):
    model = shard_children(made(Forked))
    (model if recurse else model.fork).set_reduce_scatter_unused_params(True, recurse=recurse)
    return train_job(model, diverge, steps=4)


@pytest.mark.parametrize("recurse", [True, False])
def test_ranks_may_use_other_parameters_of_a_unit_and_get_the_mean_with_zeros(world, recurse):
    # In SGD a zero gradient and none are the same, so that plain training is the reference although a step leaves None.
    expected = train_job_plain(made(Forked), diverge, 3, steps=4)
    for params in world(3).run(train_diverging, recurse):
        for name, param in expected.items():
            torch.testing.assert_close(params[name], param, rtol=1e-5, atol=1e-6)


def grads_none_or_not():
    """Nobody uses `right`; with the setting it has zeros, without it none."""
    found = []
    for setting in (True, False):
        model = shard_children(made(Forked))
        model.set_reduce_scatter_unused_params(setting)
        model(noise(0, dist.get_rank()), True).sum().backward()
        grad = model.fork.right.weight.grad
        found.append(None if grad is None else grad.full_tensor().abs().sum().item())
    return found


def test_a_parameter_nobody_used_gets_zeros_only_when_asked_for(world):
    assert world(2).run(grads_none_or_not) == [[0.0, None]] * 2


# Reductions in flight


def most_reductions_in_flight(limit):
    streams = RecordingStreams()
    with use_streams(streams):
        model = shard_children(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))))
    if limit is not None:
        model.set_reduce_scatter_max_input_buffers(limit)
    mean_square(model, dist.get_rank(), 0).backward()
    in_flight, most = 0, 0
    for entry in streams.log:
        in_flight += (entry == ("reduce", "run")) - (entry == ("compute", "follow reduce"))
        most = max(most, in_flight)
    return most, in_flight


@pytest.mark.parametrize(("limit", "most"), [(None, 1), (1, 1), (2, 2), (4, 4), (100, 6)])
def test_no_more_reductions_are_in_flight_than_allowed(world, limit, most):
    assert world(2).run(most_reductions_in_flight, limit) == [(most, 0)] * 2


# Groups and memory


def groups_of_gather_and_reduce(enable, recurse):
    model = shard_children(made(stack))
    model.set_separate_reduce_scatter_group(enable, recurse=recurse)
    gather, reduce = GatherByList(waits=True), ReduceByAllReduce()
    model[0].set_custom_all_gather(gather)
    model[0].set_custom_reduce_scatter(reduce)
    params = train_job(model, mean_square)
    return params, gather.groups == reduce.groups


@pytest.mark.parametrize(("enable", "recurse", "same"), [(True, True, False), (False, True, True), (True, False, True)])
def test_reduce_scatters_may_have_a_process_group_of_their_own(world, enable, recurse, same):
    runs = world(2).run(groups_of_gather_and_reduce, enable, recurse)
    assert_trained([params for params, _ in runs], stack)
    assert [found for _, found in runs] == [same] * 2


def train_in_a_separate_group(recipe, mesh_shape):
    model = shard(build(recipe.model), mesh=mesh_of(mesh_shape))
    model.set_separate_reduce_scatter_group()
    first = steps_sharded(model, recipe, dist.get_rank())
    model.set_separate_reduce_scatter_group(False)
    return first


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=["shards", "replicas"])
def test_a_separate_group_changes_no_number(world, mesh_shape):
    recipe = Recipe("mlp", steps=2)
    assert_all_same(world(4).run(train_in_a_separate_group, recipe, mesh_shape), recipe)


def train_on_group_memory(recipe):
    model = shard(build(recipe.model))
    for unit in model.units():
        unit.set_allocate_memory_from_process_group_for_comm(True)
    run = steps_sharded(model, recipe, dist.get_rank())
    for unit in model.units():
        unit.set_allocate_memory_from_process_group_for_comm(False)
    model.loss(model(*model.make_inputs(0, dist.get_rank()))).backward()
    return run


def test_gloo_has_no_memory_of_its_own_and_ordinary_memory_serves(world):
    recipe = Recipe("uneven")
    assert_all_same(world(2).run(train_on_group_memory, recipe), recipe)


def turn_group_memory_off_beside_an_own_collective():
    """Switching off what was never on leaves the user's own collective in place."""
    model = shard_children(made(stack))
    gather = GatherByList(waits=True)
    model[0].set_allocate_memory_from_process_group_for_comm(True)
    model[0].set_allocate_memory_from_process_group_for_comm(False)
    model[0].set_custom_all_gather(gather)
    mean_square(model, dist.get_rank(), 0).backward()
    return len(gather.calls)


def test_an_own_collective_may_follow_the_groups_memory(world):
    assert world(2).run(turn_group_memory_off_beside_an_own_collective) == [2, 2]


def train_stages():
    """Two models, as pipeline stages are: the second's loss flows back into the first."""
    first, second = shard_children(made(stack)), shard_children(made(stack))
    share_comm_ctx([first, second])
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for step in range(3):
        second(first(noise(step, dist.get_rank()))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {form(block.up) for block in (*first, *second)} == {"shard"}
    return {
        f"{index}.{name}": param.full_tensor().detach()
        for index, stage in enumerate((first, second))
        for name, param in stage.named_parameters()
    }


def two_stages():
    torch.manual_seed(0)
    first = stack()
    torch.manual_seed(0)
    return nn.Sequential(first, stack())


def test_pipeline_stages_may_share_their_streams(world):
    assert_trained(world(2).run(train_stages), two_stages)


def changed_while_gradients_wait():
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
    return model[0].bias.grad.full_tensor().tolist()


def test_what_buffers_depend_on_does_not_change_while_gradients_wait(world):
    assert world(2).run(changed_while_gradients_wait) == [[4.0] * 6] * 2
