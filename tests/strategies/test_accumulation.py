"""`sherd.accumulate` moves what a step needs and no more, and adds up to what plain accumulation does."""

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sherd
from sherd import CommPolicy, MixedPrecisionPolicy
from sherd.api.placements import PRESETS
from sherd.comm.transport import SingleCalls
from sherd.errors import StateError
from tests.strategies.cases import Case, assert_each_trains, assert_mean_gradients, sharded, wrapped
from tests.support import sharding
from tests.support.comparing import whole_grads
from tests.support.meshes import mesh_of
from tests.support.models import build, noise
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.training import Recipe, made

OUTER, INNER = "outer", "inner"
TORCH = CommPolicy("torch")


class Calls(Counter):
    """Counts the collectives of torch's transport by what they do and along which axis of a (2, 2) mesh."""

    def __init__(self, mesh):
        super().__init__()
        self._axes = {id(mesh.get_group(0)): OUTER, id(mesh.get_group(1)): INNER}

    def __enter__(self):
        self._patch = mock.patch.multiple(
            SingleCalls, **{name: self._counting(name) for name in ("all_gather", "reduce_scatter", "all_reduce")}
        )
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()

    def _counting(self, name):
        original = getattr(SingleCalls, name)

        def counted(transport, *args):
            self[name, self._axes.get(id(transport._group), "both")] += 1
            return original(transport, *args)

        return counted

    def taken(self):
        """What was counted since it was asked last, without gathers along the inner axis."""
        found = {key: number for key, number in self.items() if key != ("all_gather", INNER)}
        self.clear()
        return found


def loss_of(model, micro, rank, *further):
    return model.loss(model(noise(micro, rank), *further))


def backward_of(model, micro):
    loss_of(model, micro, dist.get_rank()).backward()


RS, AG, AR = "reduce_scatter", "all_gather", "all_reduce"
NOTHING: dict = {}
EXPECTED = {
    "hsdp": [{(RS, INNER): 1}, {(RS, INNER): 1}, {(RS, INNER): 1, (AR, OUTER): 1}],
    "hsdp_zero2": [{(RS, INNER): 1}, {(RS, INNER): 1}, {(RS, INNER): 1, (AR, OUTER): 1}],
    "hfsdp": [{(RS, INNER): 1, (AG, OUTER): 1}, {(RS, INNER): 1}, {(RS, INNER): 1, (RS, OUTER): 1}],
    "zero1_across_zero2_within": [
        {(RS, INNER): 1, (AG, OUTER): 1},
        {(RS, INNER): 1},
        {(RS, INNER): 1, (RS, OUTER): 1},
    ],
    "zero1": [{(AG, OUTER): 1}, NOTHING, {(RS, INNER): 1, (RS, OUTER): 1}],
    "zero2": [{(AG, OUTER): 1, (RS, INNER): 1, (RS, OUTER): 1}] + [{(RS, INNER): 1, (RS, OUTER): 1}] * 2,
    "ddp": [NOTHING, NOTHING, {(AR, "both"): 1}],
}


@on_processes(4, preset=EXPECTED)
def test_each_backward_reduces_over_the_axes_that_gradients_are_sharded_over_and_the_last_one_over_all(preset):
    """One unit, one group."""
    mesh = mesh_of((2, 2))
    model = sharded(build("whole_in_one_unit"), preset, "flat", mesh, comm_policy=TORCH)
    backward_of(model, 0)
    with Calls(mesh) as calls, sherd.accumulate(model, 3):
        for micro, expected in enumerate(EXPECTED[preset]):
            backward_of(model, micro)
            assert calls.taken() == expected, micro


@pytest.mark.parametrize("front_end", ["fully_shard", "original", "flat_parameter"])
@on_threads(4)
def test_accumulated_steps_are_those_of_one_process(front_end):
    words = {"micro_batches": 2, "max_norm": 0.1}
    how = {"accumulate": True}
    if front_end == "fully_shard":
        cases = {preset: Case(Recipe("tied_across", **words), preset, how=how) for preset in PRESETS}
    else:
        options = {"use_orig_params": front_end == "original"}
        presets = ("zero1", "hfsdp")
        cases = {each: Case(Recipe("mlp", **words), each, by=wrapped, options=options, how=how) for each in presets}
    assert_each_trains(cases)


BRANCHES = (2, 0, 1)


@on_threads(4)
def test_a_unit_that_only_an_early_backward_reached_has_its_gradient_after_the_last():
    """Each micro-batch runs another unit, the last one among them."""
    found = {}
    for preset in ("ddp", "zero1", "hsdp", "hfsdp"):
        model = sharded(build("branching"), preset, "rows")
        with sherd.accumulate(model, 3):
            for branch in BRANCHES:
                loss_of(model, branch, dist.get_rank(), branch).backward()
        found[preset] = whole_grads(model)
    plain_loss = lambda plain, rank: sum(loss_of(plain, branch, rank, branch) for branch in BRANCHES)  # noqa: E731
    assert_mean_gradients(found, build("branching"), plain_loss)


class Dot(nn.Module):
    """Its gradient is its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return (self.weight * x).sum()


@on_threads(4, preset=PRESETS)
def test_micro_batches_add_up_in_float32_whatever_they_are_reduced_in(preset):
    low, model = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), Dot()
    sherd.fully_shard(model, mesh=mesh_of((2, 2)), placements=preset, mp_policy=low, comm_policy=TORCH)
    with sherd.accumulate(model, 5):
        for value in (256.0, 1.0, 1.0, 1.0, 1.0):  # in bfloat16 256 + 1 is 256
            model(torch.full((6,), value)).backward()
    assert model.weight.grad.full_tensor().tolist() == [260.0] * 6


def own_gradients(model):
    """What this rank holds of each."""
    return [each.grad.to_local().clone() for each in model.parameters()]


@on_threads(4, preset=["zero1", "hfsdp"])
def test_a_step_that_goes_wrong_says_so_and_leaves_nothing_to_the_next(preset):
    model = sharded(build("mlp"), preset, "flat")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward_of(model, 7)  # nothing goes wrong
    expected, block = own_gradients(model), model.blocks[0]

    def goes_wrong(of, announced, num_backwards, then):
        with sherd.accumulate(of, announced):
            for number in range(num_backwards):
                backward_of(model, 1 + number)
            if then is not None:
                then()

    interrupt, nest = lambda: 1 / 0, lambda: sherd.accumulate(block, 2).__enter__()
    for of, announced, num_backwards, then, error, words in (
        (model, 3, 1, None, StateError, r"accumulate\(model, 3\) saw 1 backwards"),
        (model, 1, 2, None, StateError, r"backward number 2 of Mlp inside accumulate\(model, 1\)"),
        (model, 2, 0, nest, StateError, "accumulate within accumulate"),
        (model, 3, 1, interrupt, ZeroDivisionError, "division by zero"),
        (block, 1, 1, None, StateError, "saw 0 backwards"),
    ):
        optimizer.zero_grad()
        with pytest.raises(error, match=words):
            goes_wrong(of, announced, num_backwards, then)
        with sherd.accumulate(model, 1):
            optimizer.zero_grad()
            backward_of(model, 7)
        torch.testing.assert_close(own_gradients(model), expected)


@on_threads(4)
def test_switching_reductions_off_by_hand_inside_changes_no_value():
    """Of announced micro-batches some are not to be reduced, by the switches of either front end."""
    found = {}
    for preset in ("zero1", "hfsdp"):
        composed = sharded(build("mlp"), preset, "flat")
        with sherd.accumulate(composed, 2):
            composed.set_requires_gradient_sync(False)
            backward_of(composed, 0)
            composed.set_requires_gradient_sync(True)
            backward_of(composed, 1)
        other = wrapped(build("mlp"), preset, "flat", use_orig_params=True)
        with sherd.accumulate(other, 2):
            with other.no_sync():
                backward_of(other, 0)
            backward_of(other, 1)
        found |= {preset: whole_grads(composed), f"{preset}, wrapped": whole_grads(other)}
    plain_loss = lambda plain, rank: loss_of(plain, 0, rank) + loss_of(plain, 1, rank)  # noqa: E731
    assert_mean_gradients(found, build("mlp"), plain_loss)


def three_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def penalty(model, number):
    x = (torch.ones(2, 4) * (number + 1)).requires_grad_()
    loss = model(x).square().sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


@on_threads(2)
def test_a_backward_for_other_tensors_is_none_of_those_announced():
    model = sharding.sharded(made(three_layers))
    with sherd.accumulate(model, 2):
        for number in range(2):
            penalty(model, number).backward()
    assert_mean_gradients(
        {"penalties": whole_grads(model)}, made(three_layers), lambda plain, rank: penalty(plain, 0) + penalty(plain, 1)
    )


class MayLeaveOut(nn.Linear):
    leaves_out = False

    def forward(self, x):
        y = super().forward(x)
        return x + (y.detach() if self.leaves_out else y)


@on_threads(4, preset=[None, "hfsdp"], order=["any", "ranks"])
def test_a_rank_without_gradients_in_the_last_backward_sums_what_waits_for_replicas(preset, order):
    torch.manual_seed(0)
    layer, rank = MayLeaveOut(4, 4), dist.get_rank()
    placements = {} if preset is None else {"placements": preset}
    policy = sherd.CommPolicy(reduce=sherd.Reduction(order=order))
    sherd.fully_shard(layer, mesh=mesh_of((2, 2)), comm_policy=policy, **placements)
    for is_last in (False, True):
        layer.set_requires_all_reduce(is_last)
        layer.leaves_out = is_last and rank == 1
        layer(torch.full((2, 4), rank + 1.0).requires_grad_()).sum().backward()
    # The mean over ranks of rank + 1, of 2 samples: once of all ranks, once without rank 1.
    expected = torch.full((4, 4), 2 * (1 + 2 + 3 + 4 + 1 + 3 + 4) / 4)
    torch.testing.assert_close(whole_grads(layer)["weight"], expected)
