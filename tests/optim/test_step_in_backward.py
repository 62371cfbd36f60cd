"""A unit that is stepped within backward trains as one that is stepped after it."""

import contextlib
import functools

import pytest
import torch
from torch import distributed as dist
from torch import nn

import sherd
from sherd.comm.streams import HostStreams, RecordingStreams, use_streams
from sherd.errors import ModuleError, OptimizerError, PolicyTypeError
from tests.support.comparing import assert_same, whole_params
from tests.support.models import WIDTH, build, noise
from tests.support.ranks import RanksFailed
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded
from tests.support.training import made

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-1, momentum=0.9),
}
STREAMS = {"host": HostStreams, "streams": RecordingStreams}


class Reads(nn.Module):
    """Reads a weight's values where no gradient goes, in a layer before the weight's own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        self.second.unshard()
        x = self.first(x) @ self.second.weight.detach()
        return self.second(x)


def model_of(model="mlp", streams="host", front="shard"):
    with use_streams(STREAMS[streams]()):
        return sharded(build(model), front)


def trained(model, optimizer, in_backward, micro=1):
    """Three steps: the parameters, how many gradients are there when backward is over, and how many of blocks at most
    when backward reaches a block."""
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if in_backward:
        sherd.step_in_backward(model, optimizer)
    seen, left = [], []
    blocks = getattr(model, "blocks", ())

    def look(*_):
        seen.append(sum(each.grad is not None for block in blocks for each in block.parameters()))

    for block in blocks:
        block.register_full_backward_pre_hook(look)
    for step in range(3):
        with sherd.accumulate(model, micro) if micro > 1 else contextlib.nullcontext():
            for number in range(micro):
                x = noise(10 * step + number, dist.get_rank()).requires_grad_()
                model(x).square().mean().backward()
        left.append(sum(parameter.grad is not None for parameter in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return whole_params(model), left, max(seen, default=0)


def compared(build=model_of, optimizer="adamw", micro=1):
    """What is left of gradients without and with steps in backward, after a comparison of the parameters."""
    expected, *kept = trained(build(), optimizer, False, micro)
    found, *left = trained(build(), optimizer, True, micro)
    assert_same(found, expected, rtol=None, atol=None)
    return kept, left


@pytest.mark.pairs
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("front", ["shard", "flat"])
def test_the_parameters_are_those_of_steps_after_backward_and_gradients_are_never_there_at_once(
    threads, streams, optimizer, front
):
    build = functools.partial(model_of, "mlp", streams, front)
    for (kept, before), (left, most) in threads(2).run(compared, build, optimizer):
        assert (kept, left) == ([15] * 3, [0] * 3)
        assert most <= 4
        assert (most, before) == (0, 4) or streams != "host"  # on other streams gradients come late


def test_of_several_backwards_the_last_one_steps(threads):
    for _, (left, _) in threads(2).run(compared, micro=3):
        assert left == [0] * 3


def test_recomputation_reads_what_is_not_stepped_yet(threads):
    threads(2).run(compared, functools.partial(model_of, "checkpoint_outside"))


def reading_late():
    model = sharded(made(Reads))
    model.second.set_reshard_after_forward(False)
    return model


def test_a_unit_that_backward_will_read_again_is_left_to_the_optimizers_own_step(threads):
    threads(2).run(compared, reading_late, "sgd")


def test_gradients_that_come_twice_in_one_backward_are_refused(threads):
    threads(2).run(lambda: trained(model_of("shared_and_reentrant"), "sgd", False))
    with pytest.raises(RanksFailed, match="came a second time in one backward"):
        threads(2).run(lambda: trained(model_of("shared_and_reentrant"), "sgd", True))


@on_threads(2)
def test_removed_it_leaves_all_gradients_to_the_optimizer():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sherd.step_in_backward(model, optimizer).remove()
    model(noise(0, dist.get_rank())).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@on_threads(1)
def test_what_cannot_be_stepped_unit_by_unit_is_refused():
    model = model_of()
    flat = sherd.flatten_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for wrong, error in (
        ((model, "adam"), PolicyTypeError),
        ((model, torch.optim.LBFGS(model.parameters())), OptimizerError),
        ((model, flat), OptimizerError),
        ((build("mlp"), torch.optim.SGD(build("mlp").parameters(), lr=1.0)), ModuleError),
    ):
        with pytest.raises(error, match="step_in_backward"):
            sherd.step_in_backward(*wrong)
