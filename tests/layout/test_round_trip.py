"""Do real tensors come back unchanged after they went to rows and out again?"""

import torch
from hypothesis import given

from sherd.engine.pieces import CopyOut, row_views, tensor_views
from sherd.layout.packing import Packing, pack
from sherd.layout.placement import Cut
from tests.layout.strategies import PROPERTY, groups


def tensors_of(cuts: list[Cut]) -> list[torch.Tensor]:
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
    rows = torch.full((packing.num_ranks, packing.rest_numel), -1)
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
    whole = torch.full((packing.whole_numel,), -2)
    CopyOut(packing, whole)(sharded(tensors, packing).view(-1))
    for tensor, slot in zip(tensors, packing.slots, strict=True):
        found = whole[slot.whole.start : slot.whole.start + slot.cut.numel].view(slot.cut.shape)
        assert torch.equal(found, tensor)


@PROPERTY
@given(groups())
def test_whole_gradients_copied_into_rows_lie_where_each_ranks_shard_will_be(group):
    ranks, cuts = group
    packing, tensors = pack(cuts, ranks), tensors_of(cuts)
    rows = torch.full((ranks, packing.rest_numel), -1)
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
    rows = torch.full((ranks, packing.rest_numel), -1)
    for tensor, slot in zip(tensors, packing.slots, strict=True):
        # The same values, transposed in memory.
        strided = tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() > 1 else tensor
        for target, source in zip(row_views(rows, slot), tensor_views(strided, slot.cut), strict=True):
            target.copy_(source)
    assert torch.equal(rows, sharded(tensors, packing))
