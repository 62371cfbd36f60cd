"""What becomes of a trainable parameter that was added after sharding, if nobody calls `sherd.refresh`?"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sherd
from sherd.errors import PolicyError, RanksDifferError, UnmanagedParameterError
from tests.adoption.adapters import Adapter, adapt, assert_alike, net, plain_steps, sgd, shards, steps, text_of
from tests.support.comparing import whole_params
from tests.support.models import WIDTH, noise

FRONT_ENDS = ("fully_shard", "wrapper")


def refused(front_end):
    """What is said at the first forward in training, and again at the next."""
    model = adapt(shards(net(), front_end))
    with torch.no_grad():
        model(noise(0, 0))
    model.eval()
    model(noise(0, 0))
    model.train()
    said = [text_of(lambda: model(noise(0, 0)), UnmanagedParameterError) for _ in range(2)]
    assert said[0] == said[1]
    assert not any(unsharded for unsharded in (each.untyped_storage().size() == 0 for each in model.parameters()))
    return said[0]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_it_is_named_at_the_first_forward_in_training(world, front_end):
    for said in world(2).run(refused, front_end):
        assert "0.2.lora_A.default.weight (in unit 0)" in said
        assert "2.lora_B.default.weight (in unit" in said
        assert "sherd.refresh(model)" in said
        assert "base_layer" not in said


def added_between_steps():
    model = shards(net())
    optimizer = sgd(model)
    steps(model, optimizer)
    model[1].register_parameter("scale", nn.Parameter(torch.ones(WIDTH)))
    return text_of(lambda: model(noise(0, 0)), UnmanagedParameterError)


def test_it_is_found_between_steps(world):
    for said in world(2).run(added_between_steps):
        assert "1.scale (in unit 1)" in said


def frozen_at_first():
    model = shards(net())
    model[0].scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
    steps(model, sgd(model))
    model[0].scale.requires_grad_(True)
    return text_of(lambda: model(noise(0, 0)), UnmanagedParameterError)


def test_a_frozen_one_is_left_alone_until_it_is_trained(world):
    for said in world(2).run(frozen_at_first):
        assert "0.scale (in unit 0)" in said


def trained_in_eval_mode():
    model = adapt(shards(net())).eval()
    loss = model(noise(0, 0)).square().mean()
    return text_of(loss.backward, UnmanagedParameterError)


def test_a_backward_in_eval_mode_is_refused_too(world):
    for said in world(2).run(trained_in_eval_mode):
        assert "0.2.lora_A.default.weight" in said


def ignored():
    """An ignored parameter, also once it was materialised anew; a value in a shard's place; another unit."""
    with torch.device("meta"):
        model = net()
        model.own = nn.Parameter(torch.ones(WIDTH))
    sherd.fully_shard(model, ignored_params={model.own})
    model.to_empty(device="cpu")
    model[2].bias = nn.Parameter(torch.zeros(WIDTH))
    model[0].adapter = sherd.fully_shard(nn.Linear(WIDTH, WIDTH))
    assert isinstance(model.own, nn.Parameter)
    model(noise(0, 0)).sum().backward()


def test_ignored_parameters_units_and_new_values_are_no_strangers(world):
    world(2).run(ignored)


def alone():
    model = adapt(shards(net()))
    steps(model, sgd(model))
    return whole_params(model)


def test_one_rank_may_train_what_it_likes(world):
    expected = adapt(net())
    plain_steps(expected, sgd(expected), 1)
    assert_alike(world(1).run(alone), expected)


def replicated(front_end, mesh_shape=None, micro_batches=1):
    options = {"mesh_shape": mesh_shape} if front_end == "fully_shard" else {}
    # Each rank draws another adapter; all train rank 0's.
    model = adapt(shards(net(), front_end, unmanaged="replicate", **options), seed=7 + 10 * dist.get_rank())
    optimizer = sgd(model)
    for step in range(3):
        with sherd.accumulate(model, micro_batches):
            for part in noise(step, dist.get_rank()).chunk(micro_batches):
                (model(part).square().mean() / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_params(model)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (2, {"front_end": "fully_shard"}),
        (2, {"front_end": "wrapper"}),
        (4, {"front_end": "fully_shard", "mesh_shape": (2, 2)}),
        (2, {"front_end": "fully_shard", "micro_batches": 2}),
    ],
    ids=("fully_shard", "wrapper", "hsdp", "accumulated"),
)
def test_replicated_ones_train_as_in_one_process(world, num_ranks, settings):
    expected = adapt(net())
    plain_steps(expected, sgd(expected), num_ranks)
    assert_alike(world(num_ranks).run(replicated, **settings), expected)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, is_used):
        x = self.linear(x)
        return x * self.scale * self.phase.abs() if is_used else x


def used_on_one_rank():
    torch.manual_seed(0)
    model = sherd.fully_shard(Routed(), unmanaged="replicate")
    model.scale = nn.Parameter(torch.full((WIDTH,), 2.0).bfloat16())
    model.phase = nn.Parameter(torch.full((WIDTH,), 1.0 + 1.0j))
    model.unused = nn.Parameter(torch.ones(2))
    x = torch.ones(1, WIDTH)
    model(x, is_used=dist.get_rank() == 1).sum().backward()
    return model.scale.grad, model.phase.grad, model.unused.grad


def test_a_rank_without_a_gradient_counts_as_zero(world):
    torch.manual_seed(0)
    model = Routed()
    model.scale = nn.Parameter(torch.full((WIDTH,), 2.0).bfloat16())
    model.phase = nn.Parameter(torch.full((WIDTH,), 1.0 + 1.0j))
    model(torch.ones(1, WIDTH), True).sum().backward()
    for scale, phase, unused in world(2).run(used_on_one_rank):
        torch.testing.assert_close(scale, model.scale.grad / 2)
        torch.testing.assert_close(phase, model.phase.grad / 2)
        assert unused is None


def differing():
    model = shards(net(), unmanaged="replicate")
    model[2] = Adapter(model[2], rank=3 + dist.get_rank())
    return text_of(lambda: model(noise(0, 0)), RanksDifferError)


def test_ranks_with_different_ones_raise_the_same_error(world):
    said = world(2).run(differing)
    assert said[0] == said[1]
    assert f"2.lora_A.default.weight (3, {WIDTH}) torch.float32 only on ranks [0]" in said[0]


def left_alone():
    model = adapt(shards(net(), unmanaged="ignore"), seed=dist.get_rank())
    steps(model, sgd(model))
    return model[2].lora_A["default"].weight.grad is None and model[2].lora_A["default"].weight.detach()


def test_ignored_by_policy_they_are_the_programs_own(world):
    first, second = world(2).run(left_alone)
    assert not torch.equal(first, second)


def misspelt():
    model = net()
    said = text_of(lambda: sherd.fully_shard(model, unmanaged="warn"), PolicyError)
    said += text_of(lambda: sherd.FullyShardedDataParallel(net(), unmanaged="warn"), PolicyError)
    sherd.fully_shard(model)  # it was left as it was
    return said


def test_another_word_is_refused(world):
    (said,) = world(1).run(misspelt)
    assert said.count("unmanaged='warn': expected one of error, replicate, ignore") == 2
