"""What becomes of a trainable parameter that was added after sharding, if nobody calls `sherd.refresh`."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sherd
from sherd.errors import PolicyError, RanksDifferError, UnmanagedParameterError
from tests.adoption.adapters import Adapter, adapt, assert_alike, net, sgd, shards, steps
from tests.support.comparing import assert_refused
from tests.support.models import WIDTH, noise
from tests.support.ranks.bodies import on_threads


def assert_named(action, *words):
    assert_refused(action, UnmanagedParameterError, ValueError, *words)


@pytest.mark.parametrize("front", ["shard", "wrapper"])
@on_threads(2)
def test_it_is_named_at_the_first_forward_in_training_and_at_the_next(front):
    model = adapt(shards(net(), front))
    with torch.no_grad():
        model(noise(0, 0))
    model.eval()
    model(noise(0, 0))
    model.train()
    for _ in range(2):
        with pytest.raises(UnmanagedParameterError) as raised:
            model(noise(0, 0))
        said = str(raised.value)
        for word in (
            "0.2.lora_A.default.weight (in unit 0)",
            "2.lora_B.default.weight (in unit",
            "sherd.refresh(model)",
        ):
            assert word in said
        assert "base_layer" not in said
    assert all(each.untyped_storage().size() for each in model.parameters())


@on_threads(2)
def test_it_is_found_between_steps_and_a_frozen_one_once_it_is_trained():
    model = shards(net())
    optimizer = sgd(model)
    model[0].scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
    steps(model, optimizer)
    model[0].scale.requires_grad_(True)
    assert_named(lambda: model(noise(0, 0)), "0.scale (in unit 0)")
    del model[0].scale
    steps(model, optimizer)
    model[1].register_parameter("scale", nn.Parameter(torch.ones(WIDTH)))
    assert_named(lambda: model(noise(0, 0)), "1.scale (in unit 1)")


@on_threads(2)
def test_a_backward_in_eval_mode_is_refused_too():
    model = adapt(shards(net())).eval()
    loss = model(noise(0, 0)).square().mean()
    assert_named(loss.backward, "0.2.lora_A.default.weight")


@on_threads(2)
def test_ignored_parameters_units_and_new_values_are_no_strangers():
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


@on_threads(1)
def test_one_rank_may_train_what_it_likes():
    model, plain = adapt(shards(net())), adapt(net())
    for each in (model, plain):
        steps(each, sgd(each))
    assert_alike(model, plain)


@pytest.mark.parametrize(
    ("num_ranks", "options", "micro_batches"),
    [(2, {}, 1), (2, {"front": "wrapper"}, 1), (4, {"mesh_shape": (2, 2)}, 1), (2, {}, 2)],
    ids=("fully_shard", "wrapper", "hsdp", "accumulated"),
)
def test_replicated_ones_train_as_in_one_process(threads, num_ranks, options, micro_batches):
    def replicated():
        # Each rank draws another adapter; all train rank 0's.
        model = adapt(shards(net(), unmanaged="replicate", **options), seed=7 + 10 * dist.get_rank())
        optimizer, plain = sgd(model), adapt(net())
        for step in range(3):
            with sherd.accumulate(model, micro_batches):
                for part in noise(step, dist.get_rank()).chunk(micro_batches):
                    (model(part).square().mean() / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
        steps(plain, sgd(plain), of_all=True)
        assert_alike(model, plain)

    threads(num_ranks).run(replicated)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def add(self):
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0).bfloat16())
        self.phase = nn.Parameter(torch.full((WIDTH,), 1.0 + 1.0j))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x, is_used):
        x = self.linear(x)
        return x * self.scale * self.phase.abs() if is_used else x


@on_threads(2)
def test_a_rank_without_a_gradient_counts_as_zero():
    model, plain = sherd.fully_shard(Routed(), unmanaged="replicate"), Routed()
    for each, is_used in ((model, dist.get_rank() == 1), (plain, True)):
        each.add()
        each(torch.ones(1, WIDTH), is_used).sum().backward()
    torch.testing.assert_close(model.scale.grad, plain.scale.grad / 2)
    torch.testing.assert_close(model.phase.grad, plain.phase.grad / 2)
    assert model.unused.grad is None


@on_threads(2)
def test_ranks_with_different_ones_raise_the_same_error():
    model = shards(net(), unmanaged="replicate")
    model[2] = Adapter(model[2], rank=3 + dist.get_rank())
    said = f"2.lora_A.default.weight (3, {WIDTH}) torch.float32 only on ranks [0]"
    assert_refused(lambda: model(noise(0, 0)), RanksDifferError, RuntimeError, said)


def test_ignored_by_policy_they_are_the_programs_own(threads):
    def left_alone():
        model = adapt(shards(net(), unmanaged="ignore"), seed=dist.get_rank())
        steps(model, sgd(model))
        assert model[2].lora_A["default"].weight.grad is None
        return model[2].lora_A["default"].weight.detach()

    first, second = threads(2).run(left_alone)
    assert not torch.equal(first, second)


@on_threads(1)
def test_another_word_is_refused_and_the_model_left_as_it_was():
    model = net()
    for shard in (sherd.fully_shard, sherd.FullyShardedDataParallel):
        with pytest.raises(PolicyError, match="unmanaged='warn': expected one of error, replicate, ignore"):
            shard(model, unmanaged="warn")
    sherd.fully_shard(model)
