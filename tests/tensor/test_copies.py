"""A ragged tensor survives being copied, moved, saved, loaded, gathered and cut anew, on one mesh axis or several."""

import copy
import io
import pickle
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sherd._torch import strided_shard
from sherd.errors import PlacementError
from sherd.layout.runs import Runs
from sherd.tensor.placement import layout_of
from sherd.tensor.ragged import RaggedDTensor, as_dtensor, distribute_ragged, ragged_dtensor, redistribute_to
from sherd.tensor.sharded import ShardedDTensor
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import refusal
from tests.tensor.cuts import KINDS, SHAPES, line, local_of, numbers, ragged, spec_for, uneven, whole_of
from tests.tensor.grids import FOUR, GRIDS, LINES, local_on, on_grids, placements_of, ragged_on

DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64, torch.float8_e4m3fn)
COPIED_ON = ["2 in a row", *FOUR, "two axes and columns"]


def kinds_on(grid):
    """All on one axis, the first on several."""
    return KINDS if grid in LINES.values() else KINDS[:1]


@on_grids(GRIDS)
@on_threads()
def test_every_rank_holds_its_run_of_its_part_and_gets_the_whole(grid):
    mesh = grid.mesh()
    ways = product(KINDS, DTYPES) if grid in LINES.values() else zip(KINDS, DTYPES, strict=True)
    for (kind, dtype), shape in product(ways, (*SHAPES, (0, 3))):
        whole = numbers(shape, dtype)
        tensor = ragged_on(grid, mesh, kind, whole)
        again = distribute_ragged(whole, tensor._spec).to_local()
        assert torch.equal(again.reshape(-1).view(torch.uint8), tensor.to_local().reshape(-1).view(torch.uint8))
        found = tensor.full_tensor()
        assert (found.dtype, found.shape) == (dtype, shape)
        assert torch.equal(found.view(-1).view(torch.uint8), whole.view(-1).view(torch.uint8))
        assert not whole.numel() or found.data_ptr() != tensor.to_local().data_ptr()


@on_processes(4)
def test_a_gather_pads_to_at_most_twice_the_tensor_and_else_holders_send():
    for first, ends, call in (
        (0, (5, 10, 15, 20), "_allgather_base_"),
        (0, (8, 12, 16, 20), "_allgather_base_"),
        (1, (0, 20), "broadcast_"),
    ):
        tensor = ragged(numbers((20,)), Runs((20,), 4, first, ends), line(4))
        with torch.profiler.profile(acc_events=True) as seen:
            tensor.full_tensor()
        calls = {event.key: event.count for event in seen.key_averages() if event.key.startswith("c10d::")}
        assert calls == {f"c10d::{call}": 1}, (ends, calls)


def stock_placements(grid, shape):
    """Replicas, what is left before the cut, each dim in chunks, and in processes chunks of chunks."""
    replicated = (Replicate(),) * len(grid.sizes)
    yield from (replicated, placements_of(grid, shape))
    yield from ((*replicated[1:], Shard(dim)) for dim in range(len(shape)))
    # torch keeps the plans for chunks of chunks by their shapes, and ranks that are threads would share them.
    if shape and grid in FOUR.values():
        yield from ((Shard(0),) * len(grid.sizes), (strided_shard(0, 2), *replicated[2:], Shard(0)))


def redistributed(grid):
    mesh = grid.mesh()
    ways = product(KINDS, SHAPES) if grid in LINES.values() else product(KINDS[:2], ((7, 6), (3, 1, 5), ()))
    for kind, shape in ways:
        whole = numbers(shape)
        tensor = ragged_on(grid, mesh, kind, whole)
        assert tensor.redistribute(placements=tensor.placements) is tensor
        for wanted in stock_placements(grid, shape):
            stock = tensor.redistribute(mesh, wanted)
            assert type(stock) is DTensor
            assert stock.placements == wanted
            expected = distribute_tensor(whole, mesh, wanted, src_data_rank=None)
            assert torch.equal(stock.to_local(), expected.to_local())
            assert torch.equal(redistribute_to(stock, tensor._spec).to_local(), tensor.to_local())
        other = uneven(shape, mesh.size(-1))
        moved = redistribute_to(tensor, other)
        assert moved.cut == other
        assert torch.equal(moved.to_local(), local_of(whole, other, mesh.get_coordinate()[-1]))
        assert torch.equal(redistribute_to(moved, tensor._spec).to_local(), tensor.to_local())


MOVED_ON = ["tp columns", "tp rows", "tp rows, the other way round", "two axes", "two axes and columns"]


@pytest.mark.parametrize("name", [*LINES, *MOVED_ON])
def test_to_and_from_replicas_equal_chunks_other_runs_and_strided_chunks(world, threads, name):
    (world if name in FOUR else threads)(GRIDS[name].num_ranks).run(redistributed, GRIDS[name])


def copied_into(grid):
    mesh = grid.mesh()
    for kind, shape in product(kinds_on(grid), SHAPES):
        whole = numbers(shape)
        expected = ragged_on(grid, mesh, kind, whole)
        target = ragged_on(grid, mesh, kind, torch.zeros(shape))
        stock = [(Replicate(),) * mesh.ndim, placements_of(grid, shape)]
        if shape and (mesh.ndim == 1 or grid in FOUR.values()):
            stock.append((Shard(0),) * mesh.ndim)
        laid = (distribute_tensor(whole, mesh, each, src_data_rank=None) for each in stock)
        for source in (whole, expected, whole.double(), *laid):
            with torch.no_grad():
                assert target.zero_().copy_(source) is target
                assert torch.equal(target.to_local(), expected.to_local())
                if source.dtype == target.dtype:
                    target.zero_().data = source
                    assert torch.equal(target.to_local(), expected.to_local())
        target.copy_(torch.tensor(3.0))
        assert torch.equal(whole_of(target), torch.full(shape, 3.0))


@pytest.mark.parametrize("name", ["3 in a row", *COPIED_ON])
def test_whole_tensors_replicas_chunks_and_runs_are_copied_into_runs(world, threads, name):
    (world if name in FOUR else threads)(GRIDS[name].num_ranks).run(copied_into, GRIDS[name])


def in_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.filterwarnings("ignore:a sharded tensor is pickled")
@on_grids(COPIED_ON)
@on_threads()
def test_deep_copies_pickles_and_saved_files_keep_layout_and_parameters(grid):
    mesh = grid.mesh()
    for kind, shape in product(kinds_on(grid), SHAPES):
        tensor = ragged_on(grid, mesh, kind, numbers(shape))
        parameter, frozen = nn.Parameter(tensor), nn.Parameter(tensor, requires_grad=False)
        for original in (tensor, parameter, frozen):
            for twin in (copy.deepcopy(original), pickle.loads(pickle.dumps(original)), in_a_file(original)):
                assert isinstance(twin, nn.Parameter) == isinstance(original, nn.Parameter)
                assert twin.requires_grad == original.requires_grad
                assert_same_runs(twin, tensor)
                local = twin.to_local()
                assert not local.numel() or local.data_ptr() != tensor.to_local().data_ptr()
        for each in (nn.Parameter(tensor.detach()), tensor.cpu(), tensor.detach(), parameter):
            assert_same_runs(each, tensor)
        pair = copy.deepcopy([parameter, parameter])
        assert pair[0] is pair[1]
        assert "RaggedShard" in repr(parameter)


def assert_same_runs(found, expected):
    assert type(found) is RaggedDTensor
    assert found.placements == expected.placements
    assert layout_of(found._spec).same_as(layout_of(expected._spec))
    assert torch.equal(found.to_local(), expected.to_local())


@on_grids(COPIED_ON)
@on_threads()
def test_modules_move_change_dtype_and_load(grid):
    mesh = grid.mesh()

    def holder(factor=1.0):
        return nn.ParameterList(ragged_on(grid, mesh, kind, numbers(shape) * factor) for shape in SHAPES)

    for kind in kinds_on(grid):
        module = holder()
        identities = [id(each) for each in module.parameters()]
        module.to(torch.bfloat16)
        assert [id(each) for each in module.parameters()] == identities
        for each, shape in zip(module.parameters(), SHAPES, strict=True):
            assert each.dtype == each.to_local().dtype == torch.bfloat16
            assert torch.equal(each.to_local(), local_on(grid, mesh, kind, numbers(shape).bfloat16()))
        module.float().double().requires_grad_(False)
        loaded, assigned = holder(factor=2.0), holder(factor=3.0)
        loaded.load_state_dict(holder().state_dict())
        assigned.load_state_dict(holder().state_dict(), assign=True)
        for taken in (loaded, assigned, copy.deepcopy(loaded)):
            for each, shape in zip(taken.parameters(), SHAPES, strict=True):
                assert isinstance(each, nn.Parameter)
                assert torch.equal(each.to_local(), local_on(grid, mesh, kind, numbers(shape)))
        empty = holder().to("meta").to_empty(device="cpu")
        assert [each.cut for each in empty.parameters()] == [each.cut for each in loaded.parameters()]
        assert all(each.to_local().device.type == "cpu" for each in empty.parameters())


@on_threads(2)
def test_constructors_take_memory_as_it_is():
    mesh, cut, whole = line(2), uneven((4, 3), 2), numbers((4, 3))
    view = distribute_ragged(whole, spec_for(cut, mesh))
    assert view.to_local().untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    local = view.to_local().clone()
    with torch.no_grad():
        assert ragged_dtensor(local, spec_for(cut, mesh)).to_local() is local
    assert type(as_dtensor(local, spec_for(cut, mesh))) is RaggedDTensor
    stock = distribute_tensor(whole, mesh, [Shard(0)])
    assert type(as_dtensor(stock.to_local(), stock._spec)) is ShardedDTensor


FILLS = (
    lambda each: each.normal_(1, 2),
    lambda each: nn.init.uniform_(each, -1, 1),
    lambda each: nn.init.trunc_normal_(each),
    lambda each: torch.rand_like(each),
    lambda each: torch.randn_like(each, dtype=torch.float64),
    lambda each: each.bernoulli_(0.5),
)


# Threads share the generator that ragged tensors draw from.
@on_grids(["2 in a row", *FOUR])
@on_processes()
def test_random_numbers_are_those_of_the_whole_tensor(grid):
    mesh = grid.mesh()
    for kind, shape, fill in product(kinds_on(grid), SHAPES, FILLS):
        tensor, plain = ragged_on(grid, mesh, kind, torch.zeros(shape)), torch.zeros(shape)
        torch.manual_seed(3)
        result = fill(tensor)
        torch.manual_seed(3)
        assert torch.equal(result.to_local(), local_on(grid, mesh, kind, fill(plain)))


@on_processes(4)
def test_replicas_reduce_over_the_shard_axis_only_and_stay_equal():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = numbers((7, 6))
    tensor = ragged(whole, uneven((7, 6), 2), mesh)
    torch.testing.assert_close(tensor.norm().to_local(), whole.norm())
    torch.testing.assert_close(tensor.sum().full_tensor(), whole.sum())
    both = tensor.redistribute(placements=[Shard(0), Shard(1)])
    assert torch.equal(whole_of(both), whole)
    assert torch.equal(whole_of(redistribute_to(both, uneven((7, 6), 2))), whole)
    torch.manual_seed(dist.get_rank() // 2)
    mine = whole_of(tensor.normal_())
    gathered = [torch.empty(7, 6) for _ in range(2)]
    dist.all_gather(gathered, mine, group=mesh.get_group("replicate"))
    assert torch.equal(*gathered)


@on_threads(2)
def test_a_cut_for_another_number_of_ranks_is_refused():
    for cut in (Runs((4, 3), 3, 0, (5, 12)), Runs((4, 3), 3, 2, (12,), by_rows=True)):
        with pytest.raises(PlacementError, match=r"is cut for 3 ranks, but axis 0 of .* has 2"):
            ragged(numbers((4, 3)), cut, line(2))


@on_threads(2)
def test_torch_is_told_what_makes_a_tensor_with_a_ragged_placement():
    cut, full = Runs((4, 5), 2, 0, (7, 20)), numbers((4, 5))
    like = ragged(full, cut, line(2))
    for sizes in ({}, {"shape": like.shape, "stride": like.stride()}):
        placed = like.device_mesh, like.placements
        said = refusal(PlacementError, DTensor.from_local, like.to_local(), *placed, **sizes)
        assert "made = torch.empty_like(it), and then made.to_local().copy_(local)" in said, sizes
    made, of_full = torch.empty_like(like), torch.empty_like(like)
    made.to_local().copy_(like.to_local())
    of_full.copy_(full)
    assert torch.equal(made.full_tensor(), full)
    assert torch.equal(of_full.full_tensor(), full)


@on_processes(2)
def test_a_pickle_of_a_shard_says_that_it_holds_one_ranks_part():
    whole = torch.arange(12.0).view(4, 3)
    rows = distribute_tensor(whole, line(2), [Shard(0)])
    for tensor in (ragged(whole, uneven((4, 3), 2), line(2)), as_dtensor(rows.to_local(), rows._spec)):
        with pytest.warns(UserWarning, match="this rank's part alone is written"):
            torch.save({"weight": tensor}, io.BytesIO())
