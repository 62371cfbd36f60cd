"""Does a sharded model survive a change of dtype, a file and a pickle?"""

import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.comparing import assert_named_close, whole_params
from tests.support.models import WIDTH, Block, noise
from tests.support.sharding import shard_children
from tests.support.training import LR, assert_trained, made, mean_square, train_job, train_job_plain


def stack():
    return nn.Sequential(Block(), Block(), Block())


# Dtypes, files, pickles


def train_in_another_dtype(dtype, moment, cast):
    model, rank = shard_children(made(stack)), dist.get_rank()
    if moment == "after_a_step":
        mean_square(model, rank, 0).backward()
        model.zero_grad()
    cast(model, dtype)
    assert {param.dtype for param in model.parameters()} == {dtype}
    assert {param.to_local().dtype for param in model.parameters()} == {dtype}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(2):
        loss = model(noise(step, rank).to(dtype)).square().mean()
        loss.backward()
        assert {param.grad.dtype for param in model.parameters()} == {dtype}
        optimizer.step()
        optimizer.zero_grad()
    return whole_params(model)


def by_to(model, dtype):
    model.to(dtype)


def by_a_block_at_a_time(model, dtype):
    for block in model:
        block.to(dtype)


# Each pair of a dtype, a moment and a way.
@pytest.mark.parametrize(
    ("dtype", "tolerance", "moment", "cast"),
    [
        (torch.float64, 1e-10, "fresh", by_to),
        (torch.float64, 1e-10, "after_a_step", by_a_block_at_a_time),
        (torch.bfloat16, 2e-2, "fresh", by_a_block_at_a_time),
        (torch.bfloat16, 2e-2, "after_a_step", by_to),
    ],
)
def test_a_sharded_model_trains_in_the_dtype_it_was_moved_to(world, dtype, tolerance, moment, cast):
    plain = made(stack).to(dtype)
    expected = train_job_plain(plain, lambda m, rank, step: m(noise(step, rank).to(dtype)).square().mean(), 2, steps=2)
    for params in world(2).run(train_in_another_dtype, dtype, moment, cast):
        assert_named_close(params, expected, "parameter", tolerance, tolerance)


def save_and_load_a_file(folder, weights_only):
    model, rank = shard_children(made(stack)), dist.get_rank()
    train_job(model, mean_square, steps=1)
    path = f"{folder}/{rank}.pt"
    torch.save(model.state_dict(), path)
    loaded = torch.load(path, weights_only=weights_only)
    assert all(isinstance(value, DTensor) for value in loaded.values())
    torch.manual_seed(5)
    other = shard_children(stack())
    other.load_state_dict(loaded)
    assert_named_close(whole_params(other), whole_params(model), "parameter", 0, 0)
    return train_job(other, lambda m, r, step: mean_square(m, r, step + 1), steps=2)


@pytest.mark.parametrize("weights_only", [True, False], ids="weights_only_{}".format)
def test_a_sharded_state_survives_a_file_of_its_own_on_each_rank(world, tmp_path, weights_only):
    assert_trained(world(2).run(save_and_load_a_file, str(tmp_path), weights_only), stack)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def saved(value, weights_only):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def saved_with_trust(value):
    return saved(value, weights_only=False)


def saved_without_trust(value):
    return saved(value, weights_only=True)


def copy_shards(through):
    model = shard_children(made(stack))
    before = whole_params(model)
    for param in model.parameters():
        copy = through(param)
        assert isinstance(copy, DTensor)
        assert isinstance(copy, nn.Parameter)
        torch.testing.assert_close(copy.to_local(), param.to_local())
        # A copy is nobody's shard: an optimizer may step it and the model does not move.
        copy.grad = torch.ones_like(copy)
        torch.optim.SGD([copy], lr=1.0).step()
    assert_named_close(whole_params(model), before, "parameter", 0, 0)
    return train_job(model, mean_square)


@pytest.mark.parametrize("through", [pickled, saved_with_trust, saved_without_trust], ids=lambda f: f.__name__)
def test_a_shard_that_went_through_a_file_is_a_free_copy(world, through):
    assert_trained(world(2).run(copy_shards, through), stack)


def load_wrong_shapes():
    """The message for a whole tensor of another shape is torch's own, and nothing was loaded half."""
    plain, model = made(stack), shard_children(made(stack))
    wrong = {"0.up.weight": torch.zeros(3, 5), "1.down.bias": torch.zeros(WIDTH + 1)}
    messages = []
    for each in (plain, model):
        with pytest.raises(RuntimeError) as raised:
            each.load_state_dict({**made(stack).state_dict(), **wrong})
        messages.append(str(raised.value).replace("FSDP", ""))
    assert messages[0] == messages[1]
    assert_named_close(whole_params(model), whole_params(plain), "parameter", 0, 0)
    return train_job(model, mean_square)


def test_loading_wrong_shapes_says_what_torch_says(world):
    assert_trained(world(2).run(load_wrong_shapes), stack)
