"""A load leaves a unit's buffers where they are, however many modules the unit is made of."""

import pytest
import torch
from torch import nn

from sherd import Flat, fully_shard
from sherd.engine.run.unit import Unit


def stack(placement):
    return fully_shard(nn.Sequential(*(nn.Linear(3, 5) for _ in range(8))), placement=placement)


def loaded(assign, placement, dtype):
    """How often the buffers were looked for or made anew, whether they have moved, and whether the values are there."""
    source, model = stack(placement).to(dtype), stack(placement)
    unit = Unit.of(model)
    shards, buffers = list(model.parameters()), [weights.group.shard_buffer.data_ptr() for weights in unit.weights]
    counted = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("regroup", "rebind"):
            whole = getattr(Unit, name)
            patch.setattr(Unit, name, lambda self, name=name, whole=whole: (counted.append(name), whole(self)))
        model.load_state_dict(source.state_dict(), assign=assign)
    assert unit.shards.are_in_buffer
    assert assign != all(one is other for one, other in zip(shards, model.parameters(), strict=True))
    expected = dict(source.named_parameters())
    assert all(each.full_tensor().equal(expected[name].full_tensor()) for name, each in model.named_parameters())
    return (
        counted.count("regroup"),
        counted.count("rebind"),
        buffers != [each.group.shard_buffer.data_ptr() for each in unit.weights],
    )


@pytest.mark.parametrize("placement", [None, Flat()], ids=["rows", "flat"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_shards_that_fit_are_loaded_into_the_buffers(world, assign, placement):
    assert world(2).run(loaded, assign, placement, torch.float32) == [(0, 0, False)] * 2


def test_shards_of_another_dtype_get_buffers_of_their_own(world):
    for regrouped, looked, moved in world(2).run(loaded, True, None, torch.float64):
        assert regrouped
        assert looked == 8  # modules
        assert moved
