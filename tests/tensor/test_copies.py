"""Does a ragged tensor survive being copied, moved, saved, loaded, gathered and cut anew?"""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sherd.layout.runs import Runs
from sherd.tensor.ragged import RaggedDTensor, as_dtensor, distribute_ragged, ragged_dtensor, redistribute_to
from tests.tensor.cuts import KINDS, SHAPES, cuts, line, numbers, ragged, spec_for, uneven, whole_of


def everything_gathered(kind):
    mesh = line(dist.get_world_size())
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64, torch.float8_e4m3fn):
        for shape, cut in zip(SHAPES, cuts(kind, SHAPES, mesh.size()), strict=True):
            whole = numbers(shape, dtype if dtype != torch.float8_e4m3fn else torch.float32).to(dtype)
            tensor = ragged(whole, cut, mesh)
            gathered = tensor.full_tensor()
            assert gathered.dtype == dtype
            assert gathered.shape == shape
            assert torch.equal(gathered.view(-1).view(torch.uint8), whole.view(-1).view(torch.uint8))
            assert gathered.data_ptr() != tensor.to_local().data_ptr() or not whole.numel()


def test_every_rank_gets_the_whole_tensor(threads):
    for num_ranks in (1, 2, 3, 4):
        for kind in KINDS:
            threads(num_ranks).run(everything_gathered, kind)


def calls_to_gather(cut):
    mesh = line(4)
    tensor = ragged(numbers(cut.shape), cut, mesh)
    with torch.profiler.profile(acc_events=True) as seen:
        tensor.full_tensor()
    names = [event.key for event in seen.key_averages() if event.key.startswith("c10d::")]
    counts = {event.key: event.count for event in seen.key_averages()}
    return {name.removeprefix("c10d::"): counts[name] for name in names}


def test_a_gather_pads_to_at_most_twice_the_tensor_and_else_holders_send(world):
    even, slightly, one = (5, 10, 15, 20), (8, 12, 16, 20), (0, 20)
    assert world(4).run(calls_to_gather, Runs((20,), 4, 0, even))[0] == {"_allgather_base_": 1}
    assert world(4).run(calls_to_gather, Runs((20,), 4, 0, slightly))[0] == {"_allgather_base_": 1}
    assert world(4).run(calls_to_gather, Runs((20,), 4, 1, one))[0] == {"broadcast_": 1}


def redistributed(kind):
    mesh = line(dist.get_world_size())
    for shape, cut in zip(SHAPES, cuts(kind, SHAPES, mesh.size()), strict=True):
        whole = numbers(shape)
        tensor = ragged(whole, cut, mesh)
        replicated = tensor.redistribute(placements=[Replicate()])
        assert type(replicated) is DTensor
        assert torch.equal(replicated.to_local(), whole)
        assert tensor.redistribute(placements=tensor.placements) is tensor
        for dim in range(len(shape)):
            sharded = tensor.redistribute(mesh, [Shard(dim)])
            assert torch.equal(sharded.to_local(), distribute_tensor(whole, mesh, [Shard(dim)]).to_local())
            assert torch.equal(redistribute_to(sharded, cut).to_local(), tensor.to_local())
        other = uneven(shape, mesh.size())
        moved = redistribute_to(tensor, other)
        assert moved.cut == other
        assert torch.equal(moved.to_local(), ragged(whole, other, mesh).to_local())


def test_to_and_from_replicas_equal_chunks_and_other_runs(threads):
    for num_ranks in (1, 2, 3):
        for kind in KINDS:
            threads(num_ranks).run(redistributed, kind)


def copied_into(kind):
    mesh = line(3)
    for shape, cut in zip(SHAPES, cuts(kind, SHAPES, 3), strict=True):
        whole = numbers(shape)
        sources = [whole, ragged(whole, cut, mesh), whole.double(), distribute_tensor(whole, mesh, [Replicate()])]
        if shape:
            sources.append(distribute_tensor(whole, mesh, [Shard(0)]))
        for source in sources:
            target = ragged(torch.zeros(shape), cut, mesh)
            assert target.copy_(source) is target
            assert torch.equal(whole_of(target), whole)
        target.copy_(torch.tensor(3.0))
        assert torch.equal(whole_of(target), torch.full(shape, 3.0))


def test_copying_whole_tensors_replicas_chunks_and_runs_into_runs(threads):
    for kind in KINDS:
        threads(3).run(copied_into, kind)


def kept(kind):
    mesh = line(2)
    for shape, cut in zip(SHAPES, cuts(kind, SHAPES, 2), strict=True):
        whole = numbers(shape)
        tensor = ragged(whole, cut, mesh)
        parameter = nn.Parameter(tensor)
        frozen = nn.Parameter(tensor, requires_grad=False)
        buffer = io.BytesIO()
        torch.save({"tensor": tensor, "parameter": parameter}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)
        for each in (
            copy.deepcopy(tensor),
            pickle.loads(pickle.dumps(tensor)),
            copy.deepcopy(parameter),
            copy.deepcopy(frozen),
            pickle.loads(pickle.dumps(parameter)),
            loaded["tensor"],
            loaded["parameter"],
            nn.Parameter(tensor.detach()),
        ):
            assert type(each) is RaggedDTensor
            assert each.cut == cut
            assert torch.equal(whole_of(each), whole)
        for original, twin in (
            (tensor, loaded["tensor"]),
            (parameter, loaded["parameter"]),
            (frozen, copy.deepcopy(frozen)),
        ):
            assert isinstance(twin, nn.Parameter) == isinstance(original, nn.Parameter)
            assert twin.requires_grad == original.requires_grad
        assert (
            copy.deepcopy(tensor).to_local().data_ptr() != tensor.to_local().data_ptr() or not tensor.to_local().numel()
        )
        pair = copy.deepcopy([parameter, parameter])
        assert pair[0] is pair[1]
        assert "RaggedShard" in repr(parameter)


def test_deep_copies_pickles_and_saved_files_keep_layout_and_parameters(world):
    for kind in KINDS:
        world(2).run(kept, kind)


class Holder(nn.Module):
    """A module of ragged parameters."""

    def __init__(self, kind, mesh, factor=1.0):
        super().__init__()
        for index, (shape, cut) in enumerate(zip(SHAPES, cuts(kind, SHAPES, mesh.size()), strict=True)):
            self.register_parameter(f"p{index}", nn.Parameter(ragged(numbers(shape) * factor, cut, mesh)))


def moved_modules(kind):
    mesh = line(2)
    module = Holder(kind, mesh)
    identities = [id(each) for each in module.parameters()]
    module.to(torch.bfloat16)
    assert [id(each) for each in module.parameters()] == identities
    for each, shape in zip(module.parameters(), SHAPES, strict=True):
        assert each.dtype == each.to_local().dtype == torch.bfloat16
        assert torch.equal(whole_of(each), numbers(shape).bfloat16())
    module.float().double().requires_grad_(False)
    other = Holder(kind, mesh, factor=2.0)
    other.load_state_dict(Holder(kind, mesh).state_dict())
    assigned = Holder(kind, mesh, factor=3.0)
    assigned.load_state_dict(Holder(kind, mesh).state_dict(), assign=True)
    for each, taken, shape in zip(other.parameters(), assigned.parameters(), SHAPES, strict=True):
        assert isinstance(taken, nn.Parameter)
        assert torch.equal(whole_of(each), numbers(shape))
        assert torch.equal(whole_of(taken), numbers(shape))
    twin = copy.deepcopy(other)
    assert all(isinstance(each, nn.Parameter) for each in twin.parameters())
    empty = Holder(kind, mesh).to("meta").to_empty(device="cpu")
    assert [each.cut for each in empty.parameters()] == [each.cut for each in other.parameters()]
    assert all(each.to_local().device.type == "cpu" for each in empty.parameters())


def test_modules_move_change_dtype_and_load(threads):
    for kind in KINDS:
        threads(2).run(moved_modules, kind)


def constructed():
    mesh = line(2)
    cut = uneven((4, 3), 2)
    whole = numbers((4, 3))
    view = distribute_ragged(whole, spec_for(cut, mesh))
    assert view.to_local().untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    local = view.to_local().clone()
    with torch.no_grad():
        assert ragged_dtensor(local, spec_for(cut, mesh)).to_local() is local
    assert type(as_dtensor(local, spec_for(cut, mesh))) is RaggedDTensor
    stock = distribute_tensor(whole, mesh, [Shard(0)])
    assert type(as_dtensor(stock.to_local(), stock._spec)) is DTensor


def test_constructors_take_memory_as_it_is(threads):
    threads(2).run(constructed)


def drawn(kind):
    mesh = line(dist.get_world_size())
    for shape, cut in zip(SHAPES, cuts(kind, SHAPES, mesh.size()), strict=True):
        tensor, plain = ragged(torch.zeros(shape), cut, mesh), torch.zeros(shape)
        for fill in (
            lambda each: each.normal_(1, 2),
            lambda each: nn.init.uniform_(each, -1, 1),
            lambda each: nn.init.trunc_normal_(each),
            lambda each: torch.rand_like(each),
            lambda each: torch.randn_like(each, dtype=torch.float64),
            lambda each: each.bernoulli_(0.5),
        ):
            torch.manual_seed(3)
            result = fill(tensor)
            torch.manual_seed(3)
            assert torch.equal(whole_of(result), fill(plain))


def test_random_numbers_are_those_of_the_whole_tensor(world):
    for kind in KINDS:
        world(2).run(drawn, kind)


def two_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = numbers((7, 6))
    cut = uneven((7, 6), 2)
    tensor = ragged(whole, cut, mesh)
    assert tensor.to_local().shape == cut.local_shape(mesh.get_local_rank("shard"))
    assert torch.equal(whole_of(tensor), whole)
    torch.testing.assert_close(tensor.norm().to_local(), whole.norm())
    torch.testing.assert_close(tensor.sum().full_tensor(), whole.sum())
    both = tensor.redistribute(placements=[Shard(0), Shard(1)])
    assert torch.equal(whole_of(both), whole)
    assert torch.equal(whole_of(redistribute_to(both, uneven((7, 6), 2))), whole)
    torch.manual_seed(dist.get_rank() // 2)
    first, *others = [torch.empty(7, 6) for _ in range(2)]
    mesh_group = mesh.get_group("replicate")
    mine = whole_of(tensor.normal_())
    gathered = [first, *others]
    dist.all_gather(gathered, mine, group=mesh_group)
    assert torch.equal(*gathered)


def test_replicas_reduce_over_the_shard_axis_only_and_stay_equal(world):
    world(4).run(two_axes)


@pytest.mark.parametrize("cut", [Runs((4, 3), 3, 0, (5, 12)), Runs((4, 3), 3, 2, (12,), by_rows=True)])
def test_a_cut_for_another_number_of_ranks_is_refused(threads, cut):
    with pytest.raises(Exception, match=r"is cut for 3 ranks, but axis 0 of .* has 2"):
        threads(2).run(lambda: ragged(numbers((4, 3)), cut, line(2)))
