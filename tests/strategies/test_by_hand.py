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
from tests.support.ranks.bodies import on_processes

WAYS = (
    lambda each: each.mul_(1.5),
    lambda each: torch._foreach_mul_([each.to_local()], 1.5),
    lambda each: each.data.copy_(each.detach() * 1.5),
    lambda each: each.to_local().data.copy_(each.to_local().detach() * 1.5),
)


@pytest.mark.parametrize(
    ("cut", "precision", "atol"),
    [
        ("rows", MixedPrecisionPolicy(), 1e-5),
        ("whole", MixedPrecisionPolicy(param_dtype=torch.bfloat16), 0.25),
    ],
)
@on_processes(4, preset=["ddp", "zero1", "hsdp", "hfsdp"])
def test_the_next_forward_computes_with_what_was_written_and_all_forms_show_it(preset, cut, precision, atol):
    model, plain, x = sharded(build("uneven"), preset, cut, mp_policy=precision), build("uneven"), noise(0, 0, 4, 7)
    for at, way in enumerate(WAYS):
        with torch.no_grad():
            for each in model.parameters():
                way(each)
            for each in plain.parameters():
                each.mul_(1.5)
        with torch.set_grad_enabled(at % 2 == 0):
            torch.testing.assert_close(model(x).float(), plain(x), rtol=0.02, atol=atol)
    values = plain.state_dict()
    with sherd.unsharded(model, writeback=False):
        lent = whole(dict(model.named_parameters()))
    for form in (lent, whole(dict(model.named_parameters())), whole(model.state_dict())):
        assert_named_close(form, values, "value", 1.3e-6, 1e-5)
    model.layers[1].unshard()
    torch.testing.assert_close(model.layers[1].weight.float(), values["layers.1.weight"], rtol=0.01, atol=0.01)
    model.layers[1].reshard()
    assert isinstance(model.layers[1].weight, DTensor)


def loss_without(model, rank, micro):
    """In one of its backwards rank 0 has no use for the second block."""
    without = mock.patch.object(model.blocks[1], "forward", lambda x: x)
    with without if rank == 0 and micro == 1 else nullcontext():
        return model.loss(model(noise(micro, rank)))


@on_processes(4)
def test_a_parameter_that_one_rank_has_not_used_has_the_gradient_of_the_others():
    """Rank 0 leaves the second block out of one unit."""
    found = {}
    for preset in ("ddp", "zero1", "hfsdp"):
        model = sharded(build("whole_in_one_unit"), preset, "rows")
        for micro in range(2):
            loss_without(model, dist.get_rank(), micro).backward()
        found[preset] = whole_grads(model)
    plain_loss = lambda plain, rank: loss_without(plain, rank, 0) + loss_without(plain, rank, 1)  # noqa: E731
    assert_mean_gradients(found, build("whole_in_one_unit"), plain_loss)
