"""A value that all ranks know is computed with as on one rank, and gets along with torch's own DTensors."""

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sherd.tensor.replicated import ReplicatedDTensor
from tests.support.ranks.bodies import on_processes, on_threads
from tests.tensor.cuts import line, numbers, ragged, uneven, whole_of


def value_of_ones():
    return ragged(torch.ones(3, 4), uneven((3, 4), 2), line(2)).sum()


@on_processes(2)
def test_a_known_value_is_computed_with_without_communication():
    value = value_of_ones()
    with torch.profiler.profile(acc_events=True) as seen:
        result = torch.stack([value, value * 2, value / torch.tensor(4.0)]).clamp(max=20).add_(1)
        total = result.norm().sqrt() + result.max()
    assert not [event.key for event in seen.key_averages() if event.key.startswith("c10d::")]
    expected = torch.tensor([13.0, 21.0, 4.0])
    assert type(result) is type(total) is ReplicatedDTensor
    assert result.placements == (Replicate(),)
    assert torch.equal(result.to_local(), expected)
    assert torch.equal(result.full_tensor(), expected)
    torch.testing.assert_close(total.item(), (expected.norm().sqrt() + 21).item())
    written = torch.empty_like(result)
    assert torch.mul(result, 2, out=written) is written
    assert written.to_local().tolist() == [26, 42, 8]
    assert torch.max(result, dim=0)[1].to_local().item() == 1
    assert bool(torch.logical_or(value.isnan(), value.isinf())) is False


@on_threads(2)
def test_a_known_value_meets_ragged_stock_and_plain_tensors():
    mesh = line(2)
    value = value_of_ones()
    stock = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    for result in (stock * value, value * stock, torch.add(stock, value, alpha=2) - value):
        assert type(result) is DTensor
    assert torch.equal(whole_of(stock * value), torch.arange(4.0) * 12)
    both = torch.stack([value, stock.norm()])
    torch.testing.assert_close(whole_of(both), torch.stack([torch.tensor(12.0), torch.arange(4.0).norm()]))
    whole = numbers((3, 4))
    mine = ragged(whole, uneven((3, 4), 2), mesh)
    assert torch.equal(whole_of(mine * value), whole * 12)
    assert torch.equal(whole_of(value - mine), 12 - whole)
    assert torch.equal(whole_of(mine.clone().div_(value)), whole / 12)
    assert torch.equal(whole_of(torch._foreach_mul([mine], value)[0]), whole * 12)
    assert torch.equal(whole_of(torch._foreach_mul([stock, mine], value)[0]), torch.arange(4.0) * 12)
    assert torch.equal(torch._foreach_mul([torch.ones(2), mine], value)[0], torch.full((2,), 12.0))


@on_threads(2)
def test_a_known_value_is_copied_pickled_and_differentiated():
    value = value_of_ones()
    for each in (copy.deepcopy(value), pickle.loads(pickle.dumps(value)), value.cpu(), value.detach()):
        assert isinstance(each, DTensor)
        assert each.item() == 12
    parameter = nn.Parameter(ragged(numbers((3, 4)), uneven((3, 4), 2), line(dist.get_world_size())))
    plain = nn.Parameter(numbers((3, 4)))
    for each in (parameter, plain):
        loss = (each * each).mean() + each.norm() * 0.1 + each.exp().sum()
        loss.backward()
    torch.testing.assert_close(whole_of(parameter.grad), plain.grad)
