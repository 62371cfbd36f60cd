"""What tests gather at once is what `full_tensor` gives, tensor by tensor, and hides nothing."""

import pytest
import torch
import torch.distributed as dist

from tests.parity.test_layouts import PLACEMENTS, case
from tests.support.comparing import assert_named_close, whole_params
from tests.support.meshes import mesh_of
from tests.support.models import build
from tests.support.sharding import sharded


def in_both_ways(models, placement):
    found = {}
    for name in models:
        model = sharded(build(name), **case(name, placement)[1])
        found[name] = whole_params(model), {name: each.full_tensor() for name, each in model.named_parameters()}
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_values_gathered_at_once_are_those_of_full_tensor(threads, placement):
    models = ["uneven", "uneven_columns", "tiny_parameter", "scalar_parameter", "mixed_bfloat"]
    for run in threads(3).run(in_both_ways, models, placement):
        for name, (at_once, one_by_one) in run.items():
            assert_named_close(at_once, one_by_one, name, 0, 0)
            assert_named_close(at_once, dict(build(name).named_parameters()), name, 0, 0)


def with_a_rank_of_its_own():
    model = sharded(build("uneven"), mesh=mesh_of((2, 2)))
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().fill_(dist.get_rank())
    return whole_params(model)["layers.1.weight"].tolist()


def test_replicas_that_drifted_apart_show_themselves(threads):
    for rank, rows in enumerate(threads(4).run(with_a_rank_of_its_own)):
        first = rank - rank % 2
        assert rows == [[first] * 7, [first] * 7, [first + 1] * 7]
