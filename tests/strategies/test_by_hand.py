"""Shards that somebody writes between steps count, under every strategy, and whole values are seen as they are."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import sherd
from sherd import MixedPrecisionPolicy
from tests.strategies.cases import assert_mean_gradients, sharded
from tests.support.comparing import assert_named_close, whole, whole_grads
from tests.support.models import build, noise


def in_place(parameters):
    for each in parameters:
        each.mul_(1.5)


def by_foreach(parameters):
    torch._foreach_mul_([each.to_local() for each in parameters], 1.5)


def by_data(parameters):
    for each in parameters:
        each.data.copy_(each.detach() * 1.5)


def by_local_data(parameters):
    for each in parameters:
        each.to_local().data.copy_(each.to_local().detach() * 1.5)


WAYS = (in_place, by_foreach, by_data, by_local_data)


def outputs_after_writing(preset, cut, precision):
    """The output after each way of writing, with and without gradients; then whole values in every form."""
    model = sharded(build("uneven"), preset, cut, mp_policy=precision)
    outputs = []
    for at, way in enumerate(WAYS):
        with torch.no_grad():
            way(list(model.parameters()))
        with torch.set_grad_enabled(at % 2 == 0):
            outputs.append(model(noise(0, 0, 4, 7)).detach().float())
    with sherd.unsharded(model, writeback=False):
        lent = whole(dict(model.named_parameters()))
    full, saved = whole(dict(model.named_parameters())), whole(model.state_dict())
    model.layers[1].unshard()
    shown = model.layers[1].weight.detach().float().clone()
    model.layers[1].reshard()
    assert isinstance(model.layers[1].weight, DTensor)
    return outputs, lent, full, saved, shown


def everything_written(cut, precision):
    return {preset: outputs_after_writing(preset, cut, precision) for preset in ("ddp", "zero1", "hsdp", "hfsdp")}


@pytest.mark.parametrize(
    ("cut", "precision", "atol"),
    [
        ("rows", MixedPrecisionPolicy(), 1e-5),
        ("whole", MixedPrecisionPolicy(param_dtype=torch.bfloat16), 0.25),
    ],
)
def test_the_next_forward_computes_with_what_was_written_and_all_forms_show_it(world, cut, precision, atol):
    plain = build("uneven")
    expected = []
    with torch.no_grad():
        for _ in WAYS:
            in_place(plain.parameters())
            expected.append(plain(noise(0, 0, 4, 7)))
    values = plain.state_dict()
    for found in world(4).run(everything_written, cut, precision):
        for preset, (outputs, *forms, shown) in found.items():
            for output, wanted in zip(outputs, expected, strict=True):
                torch.testing.assert_close(
                    output, wanted, rtol=0.02, atol=atol, msg=lambda said, at=preset: f"{at}: {said}"
                )
            for form in forms:
                assert_named_close(form, values, f"{preset}: value", 1.3e-6, 1e-5)
            torch.testing.assert_close(shown, values["layers.1.weight"], rtol=0.01, atol=0.01)


def trained_where_one_rank_uses_less():
    """Rank 0 leaves the second block out of one unit; gradients, whole, by preset."""
    found = {}
    for preset in ("ddp", "zero1", "hfsdp"):
        model = sharded(build("whole_in_one_unit"), preset, "rows")
        for micro in range(2):
            loss_without(model, dist.get_rank(), micro).backward()
        found[preset] = whole_grads(model)
    return found


def loss_without(model, rank, micro):
    """In one of its backwards rank 0 has no use for the second block."""
    without = mock.patch.object(model.blocks[1], "forward", lambda x: x)
    with without if rank == 0 and micro == 1 else nullcontext():
        return model.loss(model(noise(micro, rank)))


def test_a_parameter_that_one_rank_has_not_used_has_the_gradient_of_the_others(world):
    assert_mean_gradients(
        world(4).run(trained_where_one_rank_uses_less),
        build("whole_in_one_unit"),
        lambda plain, rank: loss_without(plain, rank, 0) + loss_without(plain, rank, 1),
    )
