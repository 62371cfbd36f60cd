"""A parameter's elements are where its placements say, for all sizes and numbers of ranks."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

import sherd
from sherd._torch import strided_shard
from sherd.layout.extent import chunks
from sherd.tensor.tensor_parallel import _reads_as_cut
from tests.support.ranks.bodies import on_threads
from tests.tensor_parallel.training import mesh_of


def cut(pieces, num_ranks):
    return [piece[each.start : each.stop] for piece in pieces for each in chunks(len(piece), num_ranks)]


def by_placement(rows, placement, num_ranks):
    """What torch's placement gives each rank of `rows`."""
    return placement._split_tensor(rows, num_ranks, with_padding=False)[0]


@pytest.mark.parametrize("behind", [(2,), (3,), (4,), (2, 2)], ids=str)
def test_what_is_said_to_read_as_it_was_cut_does(behind):
    """Against torch's own splitting of a strided shard, then of the axes behind it. Behind two axes the answer is on
    the safe side: our axis may go behind although it need not."""
    split = torch.Size(behind).numel()
    for num_shards, size in itertools.product((1, 2, 3, 4, 8), range(40)):
        rows = torch.arange(size)
        pieces = [rows]
        for num_ranks in behind:
            pieces = cut(pieces, num_ranks)
        ours = [piece.tolist() for piece in cut(pieces, num_shards)]  # ranks of `behind` first, then data parallel
        read = by_placement(rows, strided_shard(0, split), num_shards)
        for num_ranks in behind:
            read = [part for piece in read for part in by_placement(piece, Shard(0), num_ranks)]
        order = [dp * split + tp for tp, dp in itertools.product(range(split), range(num_shards))]
        is_same = ours == [read[at].tolist() for at in order]
        said = _reads_as_cut(size, num_shards, behind, strided=False)
        assert said == is_same if len(behind) == 1 else said <= is_same, (num_shards, size)


@on_threads(8)
def test_a_tensor_that_would_read_otherwise_has_our_axis_behind_and_still_steps_and_clips_with_others():
    """Nine rows over 4 data-parallel and 2 tensor-parallel ranks; 8 rows beside them."""
    mesh = mesh_of((4, 2), "dp", "tp")
    model = torch.nn.Module()
    for name, num_rows in (("odd", 9), ("even", 8)):
        tensor = torch.arange(3.0 * num_rows).view(num_rows, 3)
        setattr(model, name, torch.nn.Parameter(distribute_tensor(tensor, mesh["tp"], [Shard(0)])))
    model.forward = lambda: sum(each.to_local().square().sum() for each in model.parameters())
    sherd.fully_shard(model, mesh=mesh["dp"])
    model().backward()
    norm = sherd.clip_grad_norm_(model.parameters(), 1e9)
    torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0).step()
    assert model.odd.device_mesh.mesh_dim_names == ("tp", "dp")
    assert model.even.device_mesh.mesh_dim_names == ("dp", "tp")
    if mesh.get_local_rank("dp") == 3:
        rows = [[], [24.0, 25.0, 26.0]][mesh.get_local_rank("tp")]
        assert model.odd.to_local().flatten().tolist() == rows
    expected = 2 * torch.cat([torch.arange(27.0), torch.arange(24.0)]).norm()
    assert norm.item() == pytest.approx(expected.item())
