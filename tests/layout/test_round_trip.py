"""Tensors come back unchanged after they went to rows and out again."""

import torch
from hypothesis import given
from hypothesis.strategies import integers

from sherd.engine.moves.buffer_views import JoinedTensors, RowViews, copy_out, row_views, sources_for, tensor_views
from sherd.layout.packing import Packing, pack
from sherd.layout.placement import Cut, Shard
from sherd.layout.plan import Wanted, plan
from sherd.layout.runs import Runs
from sherd.tensor.gather import shard_of
from tests.layout.strategies import groups, run_groups


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


def assert_whole(found: torch.Tensor, tensors: list[torch.Tensor], packing: Packing) -> None:
    """The unsharded buffer `found` has each tensor where its slot is."""
    for tensor, slot in zip(tensors, packing.slots, strict=True):
        place = found[slot.unsharded.start : slot.unsharded.start + slot.cut.numel]
        assert torch.equal(place.view(tensor.shape), tensor)


def transposed_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous, if it has several dims."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() > 1 else tensor


@given(groups())
def test_gathered_shards_copied_out_or_landed_rank_by_rank_are_the_whole_tensors(group):
    ranks, cuts = group
    packing, tensors = pack(cuts, ranks), tensors_of(cuts)
    rows = sharded(tensors, packing)
    at_once, landed = (torch.full((packing.unsharded_numel,), -2) for _ in range(2))
    copy_out(packing, at_once)(rows.view(-1))
    landing = copy_out(packing, landed)
    for rank, row in enumerate(rows):
        landing.copy_into_place(rank, row)
    assert_whole(at_once, tensors, packing)
    assert_whole(landed, tensors, packing)


@given(groups())
def test_whole_gradients_copied_into_rows_lie_where_each_ranks_shard_will_be_contiguous_or_not(group):
    ranks, cuts = group
    packing, tensors = pack(cuts, ranks), tensors_of(cuts)
    for values in (tensors, list(map(transposed_in_memory, tensors))):
        rows = torch.full((ranks, packing.shard_numels[0]), -1)
        for tensor, slot in zip(values, packing.slots, strict=True):
            targets, sources = row_views(rows, slot), tensor_views(tensor, slot.cut)
            assert [target.shape for target in targets] == [source.shape for source in sources]
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        assert torch.equal(rows, sharded(tensors, packing))


def joined(tensors: list[torch.Tensor], packing: Packing, num_flags: int = 2) -> torch.Tensor | None:
    """The rows with these tensors, without flags, as `sharded` has them."""
    rows = torch.full((packing.num_ranks, packing.shard_numels[0] + num_flags), -1)
    if not JoinedTensors(packing, rows.view(-1), 1 << 20).take(dict(enumerate(tensors))):
        return None
    assert (rows[:, packing.shard_numels[0] :] == -1).all()
    return rows[:, : packing.shard_numels[0]]


@given(groups())
def test_tensors_joined_by_one_call_are_the_rows_unless_the_part_of_a_rank_is_padded(group):
    ranks, cuts = group
    packing, tensors = pack(cuts, ranks), tensors_of(cuts)
    found, expected = joined(tensors, packing), sharded(tensors, packing)
    if found is not None:
        assert torch.equal(found[expected > 0], expected[expected > 0])


def test_tensors_that_all_ranks_share_evenly_are_joined_but_not_without_the_others_or_unlike_the_rows():
    packing = pack([Shard(0).cut(shape, 4, "weight") for shape in ((8, 3), (4,), (12, 5))], 4)
    tensors = tensors_of([slot.cut for slot in packing.slots])
    found, expected = joined(tensors, packing), sharded(tensors, packing)
    assert found is not None
    assert torch.equal(found[expected > 0], expected[expected > 0])
    assert joined(tensors[:2], packing) is None
    assert joined([transposed_in_memory(tensors[0]), *tensors[1:]], packing) is None
    assert joined([*tensors[:2], tensors[2].int()], packing) is None
    assert joined(tensors_of([packing.slots[0].cut]), pack([Shard(0).cut((9, 3), 4, "weight")], 4)) is None


# Cut into runs: nothing is copied, so this needs no code but the numbers


def packed(group: tuple[int, list[Wanted]]) -> tuple[Packing, list[torch.Tensor]]:
    """The packing of tensors cut into runs, and the tensors."""
    ranks, wanted = group
    packing = pack(plan(wanted, ranks), ranks)
    return packing, tensors_of([slot.cut for slot in packing.slots])


def rest_buffers(tensors: list[torch.Tensor], packing: Packing) -> list[torch.Tensor]:
    """What every rank holds; -1 for padding."""
    rests = [torch.full((numel,), -1) for numel in packing.shard_numels]
    for tensor, slot in zip(tensors, packing.slots, strict=True):
        for rank, rest in enumerate(rests):
            held, piece = slot.held(rank), slot.cut.piece(rank)
            rest[held.start : held.stop] = tensor.flatten()[piece.start : piece.stop]
    return rests


@given(run_groups())
def test_whole_tensors_are_views_of_the_ranks_runs_side_by_side_also_where_they_land_rank_by_rank(group):
    packing, tensors = packed(group)
    rests = rest_buffers(tensors, packing)
    rows = torch.cat(rests)
    assert_whole(rows, tensors, packing)
    assert all((rows[gap.start : gap.stop] == -1).all() for gap in packing.gaps)
    landed = torch.full((packing.unsharded_numel,), -2)
    landing = copy_out(packing, landed)
    for rank, rest in enumerate(rests):
        landing.copy_into_place(rank, rest)
    assert_whole(landed, tensors, packing)


@given(run_groups(), integers(0, 3))
def test_whole_gradients_copied_into_the_ranks_parts_leave_room_for_flags(group, num_flags):
    packing, tensors = packed(group)
    rows = torch.full((packing.gathered_numel + packing.num_ranks * num_flags,), -1)
    views = RowViews(packing, rows, num_flags)
    for targets, tensor, slot in zip(views.tensors, tensors, packing.slots, strict=True):
        sources = sources_for(targets, transposed_in_memory(tensor), slot.cut)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    for flags in views.flags:
        flags.fill_(-3)
    expected = [torch.cat([rest, torch.full((num_flags,), -3)]) for rest in rest_buffers(tensors, packing)]
    assert torch.equal(rows, torch.cat(expected))


@given(run_groups())
def test_what_a_rank_holds_of_a_tensor_has_the_shape_it_has_there(group):
    packing, tensors = packed(group)
    for tensor, slot in zip(tensors, packing.slots, strict=True):
        pieces = [shard_of(tensor, slot.cut, rank) for rank in range(packing.num_ranks)]
        assert [tuple(piece.shape) for piece in pieces] == list(map(slot.cut.local_shape, range(packing.num_ranks)))
        assert torch.equal(torch.cat([piece.flatten() for piece in pieces]), tensor.flatten())
