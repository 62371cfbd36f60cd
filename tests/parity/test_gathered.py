"""What tests gather at once is what `full_tensor` gives, tensor by tensor, and hides nothing."""

import torch
import torch.distributed as dist

from tests.parity.test_layouts import PLACEMENTS, case
from tests.support.comparing import assert_named_close, whole_params
from tests.support.meshes import mesh_of
from tests.support.models import build
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded

MODELS = ("uneven", "uneven_columns", "tiny_parameter", "scalar_parameter", "mixed_bfloat")


@on_threads(3, placement=PLACEMENTS, name=MODELS)
def test_values_gathered_at_once_are_those_of_full_tensor(placement, name):
    model = sharded(build(name), **case(name, placement)[1])
    at_once = whole_params(model)
    assert_named_close(at_once, {name: each.full_tensor() for name, each in model.named_parameters()}, name, 0, 0)
    assert_named_close(at_once, dict(build(name).named_parameters()), name, 0, 0)


@on_threads(4)
def test_replicas_that_drifted_apart_show_themselves():
    model = sharded(build("uneven"), mesh=mesh_of((2, 2)))
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().fill_(dist.get_rank())
    first = dist.get_rank() // 2 * 2
    assert whole_params(model)["layers.1.weight"].tolist() == [[first] * 7, [first] * 7, [first + 1] * 7]
