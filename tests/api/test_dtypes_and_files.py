"""A sharded model survives a change of dtype, a file and a pickle."""

import io
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

import sherd
from tests.api.checks import assert_trains
from tests.support.comparing import assert_named_close, whole_params
from tests.support.models import WIDTH, chain, noise
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import sharded
from tests.support.training import LR, mean_square, train_job, train_job_plain


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
@on_threads(2)
def test_a_sharded_model_trains_in_the_dtype_it_was_moved_to(dtype, tolerance, moment, cast):
    def job(model, rank, step):
        return model(noise(step, rank).to(dtype)).square().mean()

    model, rank = sharded(chain(3)), dist.get_rank()
    if moment == "after_a_step":
        mean_square(model, rank, 0).backward()
        model.zero_grad()
    cast(model, dtype)
    assert {param.dtype for param in model.parameters()} == {dtype}
    assert {param.to_local().dtype for param in model.parameters()} == {dtype}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(2):
        job(model, rank, step).backward()
        assert {param.grad.dtype for param in model.parameters()} == {dtype}
        optimizer.step()
        optimizer.zero_grad()
    expected = train_job_plain(chain(3).to(dtype), job, 2, steps=2)
    assert_named_close(whole_params(model), expected, "parameter", tolerance, tolerance)


@pytest.mark.filterwarnings("ignore:a sharded tensor is pickled")
@pytest.mark.parametrize("weights_only", [True, False], ids="weights_only_{}".format)
@on_threads(2)
def test_a_sharded_state_survives_a_file_of_its_own_on_each_rank(tmp_path, weights_only):
    model, other, path = sharded(chain(3)), sharded(chain(3)), tmp_path / f"{dist.get_rank()}.pt"
    train_job(model, mean_square, steps=1)
    torch.save(model.state_dict(), path)
    loaded = torch.load(path, weights_only=weights_only)
    assert all(isinstance(value, DTensor) for value in loaded.values())
    other.load_state_dict(loaded)
    assert_named_close(whole_params(other), whole_params(model), "parameter", 0, 0)
    found = train_job(other, lambda m, rank, step: mean_square(m, rank, step + 1), steps=2)
    assert_named_close(found, train_job_plain(chain(3), mean_square, 2), "parameter", 1e-5, 1e-6)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def saved(value, weights_only):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@pytest.mark.filterwarnings("ignore:a sharded tensor is pickled")
@on_threads(2)
def test_a_shard_that_went_through_a_file_is_a_free_copy():
    model = sharded(chain())
    before = whole_params(model)
    for through in (pickled, partial(saved, weights_only=False), partial(saved, weights_only=True)):
        for param in model.parameters():
            copy = through(param)
            assert isinstance(copy, DTensor)
            assert isinstance(copy, nn.Parameter)
            torch.testing.assert_close(copy.to_local(), param.to_local())
            # A copy is nobody's shard: an optimizer may step it and the model does not move.
            copy.grad = torch.ones_like(copy)
            torch.optim.SGD([copy], lr=1.0).step()
        assert_named_close(whole_params(model), before, "parameter", 0, 0)
    assert_trains(model, chain)


@on_threads(2)
def test_loading_wrong_shapes_says_what_torch_says():
    """The message for a whole tensor of another shape is torch's own, and nothing was loaded half."""
    plain, model = chain(), sharded(chain())
    wrong = {"0.up.weight": torch.zeros(3, 5), "1.down.bias": torch.zeros(WIDTH + 1)}
    messages = []
    for each in (plain, model):
        with pytest.raises(RuntimeError) as raised:
            each.load_state_dict({**chain().state_dict(), **wrong})
        messages.append(str(raised.value).replace("FSDP", ""))
    assert messages[0] == messages[1]
    assert_named_close(whole_params(model), whole_params(plain), "parameter", 0, 0)
    assert_trains(model, chain)


@on_processes(2, way=["shard", "flat", "wrapper"])
def test_float8_parameters_are_gathered_and_saved_over_gloo(way, tmp_path):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    model[0].weight = nn.Parameter(torch.arange(24.0).view(6, 4).to(torch.float8_e4m3fn), requires_grad=False)
    model[0].forward = lambda x: nn.functional.linear(x, model[0].weight.float(), model[0].bias)
    expected = model[0].weight.detach().view(torch.uint8).clone()
    model = sharded(model, way)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    sherd.save(tmp_path / "own", {"model": model}, step=0)
    again = sharded(nn.Sequential(nn.Linear(4, 6).to(torch.float8_e4m3fn), nn.Linear(6, 2)), way)
    sherd.load(tmp_path / "own", {"model": again})
    for values in (full, dict(sherd.iter_full_parameters(model)), dict(sherd.iter_full_parameters(again))):
        assert torch.equal(values["0.weight"].view(torch.uint8), expected)
