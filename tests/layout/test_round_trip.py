"""Tensors come back unchanged after they went to rows and out again."""

import torch
from hypothesis import given
from hypothesis.strategies import integers

from sherd.engine.moves.buffer_views import RowViews, copy_out, row_views, sources_for, tensor_views
from sherd.layout.packing import Packing, pack
from sherd.layout.placement import Cut
from sherd.layout.plan import plan
from sherd.layout.runs import Runs
from sherd.tensor.gather import shard_of
from tests.layout.strategies import PROPERTY, groups, run_groups


def tensors_of(cuts: list[Cut] | list[Runs]) -> list[torch.Tensor]:
    """One tensor a cut; no two elements of all of them are equal, and none is zero."""
    starts = [1 + sum(cut.numel for cut in cuts[:number]) for number in range(len(cuts))]
    return [torch.arange(start, start + cut.numel).view(cut.shape) for start, cut in zip(starts, cuts, strict=True)]


def chunk_of(tensor: torch.Tensor, cut: Cut, rank: int) -> torch.Tensor:
    """What torch itself says that `rank` holds."""
    if cut.dim is None:
        return tensor
    pieces = tensor.chunk(cut.num_ranks, cut.dim)
    return pieces[rank] if rank < len(pieces) else tensor.narrow(cut.dim, 0, 0)


def sharded(tensors: list[torch.Tensor], packing: Packing) -> torch.Tensor:
    """The rows as an all-gather of every rank's shards would leave them; -1 for padding."""
    rows = torch.full((packing.num_ranks, packing.shard_numels[0]), -1)
    for tensor, slot in zip(tensors, packing.slots, strict=True):
        for rank in range(packing.num_ranks):
            held = slot.held(rank)
            rows[rank, held.start : held.stop] = chunk_of(tensor, slot.cut, rank).flatten()
    return rows


@PROPERTY
@given(groups())
def test_gathered_shards_copied_out_are_the_whole_tensors(group):
    ranks, cuts = group
    packing, tensors = pack(cuts, ranks), tensors_of(cuts)
    whole = torch.full((packing.unsharded_numel,), -2)
    copy_out(packing, whole)(sharded(tensors, packing).view(-1))
    for tensor, slot in zip(tensors, packing.slots, strict=True):
        found = whole[slot.unsharded.start : slot.unsharded.start + slot.cut.numel].view(slot.cut.shape)
        assert torch.equal(found, tensor)


@PROPERTY
@given(groups())
def test_shards_landed_rank_by_rank_are_the_whole_tensors(group):
    ranks, cuts = group
    packing, tensors = pack(cuts, ranks), tensors_of(cuts)
    whole = torch.full((packing.unsharded_numel,), -2)
    landing = copy_out(packing, whole)
    for rank, row in enumerate(sharded(tensors, packing)):
        landing.copy_into_place(rank, row)
    for tensor, slot in zip(tensors, packing.slots, strict=True):
        assert torch.equal(
            whole[slot.unsharded.start : slot.unsharded.start + slot.cut.numel].view(slot.cut.shape), tensor
        )


@PROPERTY
@given(groups())
def test_whole_gradients_copied_into_rows_lie_where_each_ranks_shard_will_be(group):
    ranks, cuts = group
    packing, tensors = pack(cuts, ranks), tensors_of(cuts)
    rows = torch.full((ranks, packing.shard_numels[0]), -1)
    for tensor, slot in zip(tensors, packing.slots, strict=True):
        targets, sources = row_views(rows, slot), tensor_views(tensor, slot.cut)
        assert [target.shape for target in targets] == [source.shape for source in sources]
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    assert torch.equal(rows, sharded(tensors, packing))


@PROPERTY
@given(groups())
def test_a_tensor_that_is_not_contiguous_goes_to_the_same_rows(group):
    ranks, cuts = group
    packing, tensors = pack(cuts, ranks), tensors_of(cuts)
    rows = torch.full((ranks, packing.shard_numels[0]), -1)
    for tensor, slot in zip(tensors, packing.slots, strict=True):
        # The same values, transposed in memory.
        strided = tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() > 1 else tensor
        for target, source in zip(row_views(rows, slot), tensor_views(strided, slot.cut), strict=True):
            target.copy_(source)
    assert torch.equal(rows, sharded(tensors, packing))


# Cut into runs: nothing is copied, so this needs no code but the numbers


def rest_buffers(tensors: list[torch.Tensor], packing: Packing) -> list[torch.Tensor]:
    """What every rank holds; -1 for padding."""
    rests = [torch.full((numel,), -1) for numel in packing.shard_numels]
    for tensor, slot in zip(tensors, packing.slots, strict=True):
        for rank, rest in enumerate(rests):
            held, piece = slot.held(rank), slot.cut.piece(rank)
            rest[held.start : held.stop] = tensor.flatten()[piece.start : piece.stop]
    return rests


@PROPERTY
@given(run_groups())
def test_whole_tensors_are_views_of_the_ranks_runs_side_by_side(group):
    ranks, wanted = group
    packing = pack(plan(wanted, ranks), ranks)
    tensors = tensors_of([slot.cut for slot in packing.slots])
    rows = torch.cat(rest_buffers(tensors, packing))
    for tensor, slot in zip(tensors, packing.slots, strict=True):
        assert torch.equal(rows[slot.unsharded.start : slot.unsharded.stop].view(tensor.shape), tensor)
    assert all((rows[gap.start : gap.stop] == -1).all() for gap in packing.gaps)


@PROPERTY
@given(run_groups())
def test_runs_landed_rank_by_rank_are_the_whole_tensors(group):
    ranks, wanted = group
    packing = pack(plan(wanted, ranks), ranks)
    tensors = tensors_of([slot.cut for slot in packing.slots])
    whole = torch.full((packing.unsharded_numel,), -2)
    landing = copy_out(packing, whole)
    for rank, rest in enumerate(rest_buffers(tensors, packing)):
        landing.copy_into_place(rank, rest)
    for tensor, slot in zip(tensors, packing.slots, strict=True):
        assert torch.equal(whole[slot.unsharded.start : slot.unsharded.stop].view(tensor.shape), tensor)


@PROPERTY
@given(run_groups(), integers(0, 3))
def test_whole_gradients_copied_into_the_ranks_parts_leave_room_for_flags(group, num_flags):
    ranks, wanted = group
    packing = pack(plan(wanted, ranks), ranks)
    tensors = tensors_of([slot.cut for slot in packing.slots])
    rows = torch.full((packing.gathered_numel + ranks * num_flags,), -1)
    views = RowViews(packing, rows, num_flags)
    for targets, tensor, slot in zip(views.tensors, tensors, packing.slots, strict=True):
        strided = tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() > 1 else tensor
        for target, source in zip(targets, sources_for(targets, strided, slot.cut), strict=True):
            target.copy_(source)
    for flags in views.flags:
        flags.fill_(-3)
    expected = [torch.cat([rest, torch.full((num_flags,), -3)]) for rest in rest_buffers(tensors, packing)]
    assert torch.equal(rows, torch.cat(expected))


@PROPERTY
@given(run_groups())
def test_what_a_rank_holds_of_a_tensor_has_the_shape_it_has_there(group):
    ranks, wanted = group
    packing = pack(plan(wanted, ranks), ranks)
    for tensor, slot in zip(tensors_of([slot.cut for slot in packing.slots]), packing.slots, strict=True):
        pieces = [shard_of(tensor, slot.cut, rank) for rank in range(ranks)]
        assert [tuple(piece.shape) for piece in pieces] == [slot.cut.local_shape(rank) for rank in range(ranks)]
        assert torch.equal(torch.cat([piece.flatten() for piece in pieces]), tensor.flatten())
