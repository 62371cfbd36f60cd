"""A tensor in equal chunks computes on its chunk what the unsharded tensor would get; else it is torch's DTensor."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sherd.tensor.ragged import as_dtensor
from sherd.tensor.replicated import ReplicatedDTensor
from sherd.tensor.sharded import ShardedDTensor
from tests.support.ranks.bodies import on_threads

SHAPES = [(5, 3), (4, 4), (1, 3), (7,), ()]


def numbers(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def of_torch(whole, placement=None):
    placement = placement or (Shard(0) if whole.ndim else Replicate())
    return distribute_tensor(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [placement])


def sharded(whole, placement=None):
    stock = of_torch(whole, placement)
    return as_dtensor(stock.to_local().clone(), stock._spec)


ELEMENTWISE = [
    lambda a, b: a * b + 2,
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: a.clone().mul_(b).add_(1),
    lambda a, b: a.to(torch.float32).sqrt().nan_to_num(),
    lambda a, b: torch.zeros_like(a) - a.abs(),
    lambda a, b: a.detach().copy_(b),
    lambda a, b: a.masked_fill(b > 0, 3.0),
    lambda a, b: torch._foreach_add([a, b], [b, a], alpha=0.5)[1],
    lambda a, b: torch._foreach_lerp([a], [b], 0.25)[0],
]


@on_threads(2)
def test_elementwise_operations_and_lists_are_those_of_the_whole_tensor():
    for shape in SHAPES:
        whole = numbers(shape), numbers(shape, 1)
        for operation in ELEMENTWISE:
            found = operation(*(sharded(each) for each in whole))
            assert type(found) is ShardedDTensor
            torch.testing.assert_close(found.full_tensor(), operation(*whole), rtol=0, atol=0)


@on_threads(2)
def test_what_chunks_do_not_answer_torch_does():
    whole, other = numbers((4, 4)), numbers((4, 4), 1)
    for operation in (
        lambda a, b: a @ b.T,
        lambda a, b: a.sum(0),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: a.T * b,
    ):
        mixed = operation(sharded(whole), of_torch(other, Shard(0)))
        torch.testing.assert_close(mixed.full_tensor(), operation(whole, other))
    column = sharded(whole[:, :1].contiguous())
    column.squeeze_(1)
    torch.testing.assert_close(column.full_tensor(), whole[:, 0])
    (doubled,) = torch._foreach_add([column], [column])
    torch.testing.assert_close((doubled - column).full_tensor(), whole[:, 0])
    for chunk in (0, -1):  # that differs, of one rank alone
        unlike = whole.index_add(0, torch.tensor([chunk % 4]), torch.ones(1, 4, dtype=whole.dtype))
        assert (torch.equal(sharded(whole), sharded(unlike)), torch.equal(sharded(whole), sharded(whole))) == (
            False,
            True,
        )


@on_threads(2)
def test_norms_are_known_to_all_ranks_and_clip_beside_plain_tensors():
    for power in (2.0, 1.0, 0.0, float("inf")):
        whole = [numbers(shape, seed) for seed, shape in enumerate(SHAPES)]
        found = torch._foreach_norm([*map(sharded, whole), numbers((3,))], power)
        expected = torch._foreach_norm([*whole, numbers((3,))], power)
        assert isinstance(found[0], ReplicatedDTensor)
        assert [each.item() for each in found] == pytest.approx([each.item() for each in expected])
        assert sharded(whole[0]).norm(power).item() == pytest.approx(whole[0].norm(power).item())
        torch.testing.assert_close(sharded(whole[0]).norm(power, dim=0).full_tensor(), whole[0].norm(power, dim=0))


WRITES = [
    lambda a: a[1].zero_(),
    lambda a: a[-1].fill_(7),
    lambda a: a[1:4].mul_(2),
    lambda a: a[2][0].add_(5),
    lambda a: a[:, 1].zero_(),
    lambda a: a.split(2)[1].neg_(),
    lambda a: a.unsqueeze(1)[2:4].zero_(),
    lambda a: a.T[1].exp_(),
    lambda a: a.data[0].zero_(),
]


def wrote(write, tensor):
    with torch.no_grad():
        write(tensor)
    return tensor


@on_threads(2)
def test_what_is_written_into_a_view_is_written_into_the_tensor():
    """Torch's own DTensor would write most of these into a copy."""
    for placement in (Shard(0), Shard(1)):
        for write in WRITES:
            whole, tensor = numbers((5, 3)), sharded(numbers((5, 3)), placement)
            before = tensor._version
            torch.testing.assert_close(wrote(write, tensor).full_tensor(), wrote(write, whole), rtol=0, atol=0)
            assert tensor._version > before


@pytest.mark.filterwarnings("ignore:a sharded tensor is pickled")
@on_threads(2)
def test_files_and_copies_have_what_torchs_would():
    parameter = nn.Parameter(sharded(numbers((5, 3))))
    parameter.mark = "kept"
    copied = copy.deepcopy(parameter)
    assert (type(copied), copied.mark, copied.requires_grad) == (ShardedDTensor, "kept", True)
    assert isinstance(copied, nn.Parameter)
    assert copied.to_local().data_ptr() != parameter.to_local().data_ptr()
    written = io.BytesIO()
    torch.save({"whole": parameter, "half": parameter.detach()[:2]}, written)
    assert b"sherd" not in written.getvalue()
    written.seek(0)
    for loaded in (torch.load(written)["whole"], pickle.loads(pickle.dumps(parameter))):
        assert (type(loaded), loaded.mark, isinstance(loaded, nn.Parameter)) == (DTensor, "kept", True)
        assert torch.equal(loaded.full_tensor(), parameter.full_tensor())


@on_threads(2)
def test_a_step_over_many_tensors_costs_what_one_over_few_does_for_each():
    """Torch plans a list of DTensors by all of its tensors, for each of them."""
    calls = {number: calls_of_the_first_step(number) for number in (20, 200)}
    assert calls[200] < 12 * calls[20]


def calls_of_the_first_step(number):
    import sys

    parameters = [nn.Parameter(sharded(numbers((4, 2)))) for _ in range(number)]
    for each in parameters:
        each.grad = each.detach().clone()
    optimizer, calls = torch.optim.AdamW(parameters, foreach=True), [0]

    def seen(frame, event, arg):
        calls[0] += event == "call"

    sys.setprofile(seen)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return calls[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_traces_it():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        whole = numbers((4, 3))
        parameter, plain = nn.Parameter(sharded(whole)), nn.Parameter(whole[:2].clone())
        for each in (parameter, plain):
            each.grad = torch.ones_like(each)
            optimizer = torch.optim.AdamW([each], foreach=True)
            torch.compile(optimizer.step, backend="aot_eager")()
        torch.testing.assert_close(parameter.to_local(), plain)
    finally:
        dist.destroy_process_group()
