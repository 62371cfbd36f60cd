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


def collectives_of_a_step(preset):
    """By backward of an accumulated step: which collectives ran in its forward and backward. One unit, one group."""
    mesh = mesh_of((2, 2))
    model = sharded(build("whole_in_one_unit"), preset, "flat", mesh, comm_policy=TORCH)
    backward_of(model, 0)
    counts = []
    with Calls(mesh) as calls, sherd.accumulate(model, 3):
        for micro in range(3):
            backward_of(model, micro)
            counts.append(calls.taken())
    return counts


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


def all_collectives():
    return {preset: collectives_of_a_step(preset) for preset in EXPECTED}


def test_each_backward_reduces_over_the_axes_that_gradients_are_sharded_over_and_the_last_one_over_all(world):
    for found in world(4).run(all_collectives):
        assert found == EXPECTED


@pytest.mark.parametrize("front_end", ["fully_shard", "original", "flat_parameter"])
def test_accumulated_steps_are_those_of_one_process(world, front_end):
    words = {"micro_batches": 2, "max_norm": 0.1}
    how = {"accumulate": True}
    if front_end == "fully_shard":
        cases = {preset: Case(Recipe("tied_across", **words), preset, how=how) for preset in PRESETS}
    else:
        options = {"use_orig_params": front_end == "original"}
        presets = ("zero1", "hfsdp")
        cases = {each: Case(Recipe("mlp", **words), each, by=wrapped, options=options, how=how) for each in presets}
    assert_each_trains(world(4), cases)


BRANCHES = (2, 0, 1)


def gradients_where_units_come_and_go():
    """Each micro-batch runs another unit, the last one among them; the sum of gradients, whole."""
    found = {}
    for preset in ("ddp", "zero1", "hsdp", "hfsdp"):
        model = sharded(build("branching"), preset, "rows")
        with sherd.accumulate(model, 3):
            for branch in BRANCHES:
                loss_of(model, branch, dist.get_rank(), branch).backward()
        found[preset] = whole_grads(model)
    return found


def test_a_unit_that_only_an_early_backward_reached_has_its_gradient_after_the_last(world):
    assert_mean_gradients(
        world(4).run(gradients_where_units_come_and_go),
        build("branching"),
        lambda plain, rank: sum(loss_of(plain, branch, rank, branch) for branch in BRANCHES),
    )


class Dot(nn.Module):
    """Its gradient is its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return (self.weight * x).sum()


def sums_of_256_and_four_ones():
    """By preset. In bfloat16 256 + 1 is 256."""
    low, found = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), {}
    for preset in PRESETS:
        model = Dot()
        sherd.fully_shard(model, mesh=mesh_of((2, 2)), placements=preset, mp_policy=low, comm_policy=TORCH)
        with sherd.accumulate(model, 5):
            for value in (256.0, 1.0, 1.0, 1.0, 1.0):
                model(torch.full((6,), value)).backward()
        found[preset] = model.weight.grad.full_tensor().tolist()
    return found


def test_micro_batches_add_up_in_float32_whatever_they_are_reduced_in(world):
    assert world(4).run(sums_of_256_and_four_ones) == [dict.fromkeys(PRESETS, [260.0] * 6)] * 4


def own_gradients(model):
    """What this rank holds of each."""
    return [each.grad.to_local().clone() for each in model.parameters()]


def steps_that_went_wrong(preset):
    """What each said, and whether the step after it has its own gradients alone."""
    model = sharded(build("mlp"), preset, "flat")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward_of(model, 7)  # nothing goes wrong
    expected, said = own_gradients(model), []

    def still_right():
        with sherd.accumulate(model, 1):
            optimizer.zero_grad()
            backward_of(model, 7)
        torch.testing.assert_close(own_gradients(model), expected)

    for kind in (too_few, too_many, nested, interrupted, of_a_unit_within):
        optimizer.zero_grad()
        try:
            kind(model)
        except (StateError, ZeroDivisionError) as error:
            said.append(str(error))
        still_right()
    return said


def too_few(model):
    with sherd.accumulate(model, 3):
        backward_of(model, 1)


def too_many(model):
    with sherd.accumulate(model, 1):
        backward_of(model, 1)
        backward_of(model, 2)


def nested(model):
    with sherd.accumulate(model, 2), sherd.accumulate(model.blocks[0], 2):
        pass


def interrupted(model):
    with sherd.accumulate(model, 3):
        backward_of(model, 1)
        raise ZeroDivisionError("interrupted")


def of_a_unit_within(model):
    with sherd.accumulate(model.blocks[0], 1):
        backward_of(model, 1)


@pytest.mark.parametrize("preset", ["zero1", "hfsdp"])
def test_a_step_that_goes_wrong_says_so_and_leaves_nothing_to_the_next(world, preset):
    for few, many, inner, broken, part in world(4).run(steps_that_went_wrong, preset):
        assert "accumulate(model, 3) saw 1 backwards" in few
        assert "backward number 2 of Mlp inside accumulate(model, 1)" in many
        assert "accumulate within accumulate" in inner
        assert broken == "interrupted"
        assert "saw 0 backwards" in part


def gradients_with_other_switches():
    """Announced micro-batches of which some are not to be reduced, by the switches of either front end."""
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
    return found


def test_switching_reductions_off_by_hand_inside_changes_no_value(world):
    assert_mean_gradients(
        world(4).run(gradients_with_other_switches),
        build("mlp"),
        lambda plain, rank: loss_of(plain, 0, rank) + loss_of(plain, 1, rank),
    )


def three_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def penalty(model, number):
    x = (torch.ones(2, 4) * (number + 1)).requires_grad_()
    loss = model(x).square().sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def penalties_within_accumulation():
    model = sharding.sharded(made(three_layers))
    with sherd.accumulate(model, 2):
        for number in range(2):
            penalty(model, number).backward()
    return {"penalties": whole_grads(model)}


def test_a_backward_for_other_tensors_is_none_of_those_announced(world):
    assert_mean_gradients(
        world(2).run(penalties_within_accumulation),
        made(three_layers),
        lambda plain, rank: penalty(plain, 0) + penalty(plain, 1),
    )
