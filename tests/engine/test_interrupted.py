"""A model is usable after Ctrl-C, which no hook of torch's is told of."""

import pytest
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.api.checks import assert_trains
from tests.support.models import Block
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded
from tests.support.training import made, mean_square


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def stack():
    return nn.Sequential(Block(), Checkpointed(), Block())


@pytest.mark.parametrize("where", ["forward", "backward", "recomputation"])
@on_threads(2)
def test_after_an_interrupt_the_state_is_saved_and_training_goes_on(where):
    model, rank, forwards = sharded(made(stack)), dist.get_rank(), []

    def interrupt(*_):
        forwards.append(where)
        if where != "recomputation" or len(forwards) == 2:
            raise KeyboardInterrupt

    inner = model[1].up
    register = inner.register_full_backward_pre_hook if where == "backward" else inner.register_forward_pre_hook
    handle = register(interrupt)
    with pytest.raises(KeyboardInterrupt):
        mean_square(model, rank, 0).backward()
    handle.remove()
    assert all(name in model.state_dict() for name, _ in model.named_parameters())  # what a trainer does next
    model.zero_grad()
    assert_trains(model, stack)
