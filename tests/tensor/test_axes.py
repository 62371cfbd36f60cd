"""The runs of a tensor over tensor parallelism, over two axes at once, or both: their places, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from sherd._torch import dtensor_spec, strided_shard
from sherd.errors import PlacementError
from sherd.layout.runs import Runs
from sherd.tensor.placement import RaggedShard, layout_of, ragged_spec, virtual_rank
from sherd.tensor.ragged import distribute_ragged, redistribute_to
from tests.tensor.cuts import numbers, uneven
from tests.tensor.grids import FOUR, Grid, part_of, ragged_on


def refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shape, whole = (6, 4), numbers((6, 4))
    halves, all_of_it = uneven((6, 2), 2), uneven((6, 4), 2)

    def spec(placements, cut, axes, shape=shape):
        return ragged_spec(mesh, placements, shape, torch.float32, cut, axes)

    def raw(*placements):
        return layout_of(dtensor_spec(mesh, placements, torch.Size(shape), torch.float32))

    replicate = Replicate()
    four = uneven(shape, 4)
    over_tp = distribute_ragged(whole, spec((replicate, Shard(1)), halves, (0,)))
    copies = distribute_ragged(whole, spec((replicate, replicate), all_of_it, (0,)))
    both = distribute_ragged(whole, spec((replicate, replicate), four, (1, 0)))
    both_ways = distribute_ragged(whole, spec((replicate, replicate), four, (0, 1)))
    stock = distribute_tensor(whole, mesh, (replicate, Shard(1)))
    for attempt, said in (
        (lambda: spec((replicate, Partial()), all_of_it, (0,)), "reduce what is Partial"),
        (
            lambda: spec((replicate, strided_shard(0, 2)), all_of_it, (0,)),
            "redistribute what is sharded in another way",
        ),
        (lambda: spec((replicate,), all_of_it, (0,)), "each of its 2 axes"),
        (lambda: spec((Shard(0), replicate), all_of_it, (0,)), "give Replicate.. there"),
        (lambda: spec((replicate, replicate), all_of_it, ()), "over at least one axis"),
        (lambda: spec((replicate, Shard(1)), all_of_it, (0,)), "this rank's part has shape .6, 2."),
        (lambda: spec((replicate, Shard(2)), all_of_it, (0,)), "has no dim 2"),
        (lambda: spec((replicate, replicate), all_of_it, (1, 0)), "axis 0 x axis 1 .* has 2 x 2"),
        (lambda: raw(RaggedShard(four), RaggedShard(four)), "two ranks would hold one run"),
        (lambda: raw(RaggedShard(four), RaggedShard(four, stride=4)), "two ranks would hold one run"),
        (lambda: raw(RaggedShard(four), RaggedShard(Runs(shape, 4, 0, (24,)), stride=2)), "of one cut"),
        (
            lambda: redistribute_to(stock, spec((replicate, replicate), uneven((4, 6), 4), (1, 0), (4, 6))),
            "was given for one of shape .6, 4.",
        ),
        (lambda: over_tp + copies, "cut as"),
        (lambda: both + both_ways, "stride=2.*met one of shape .6, 4. cut as"),
        (lambda: both.copy_(over_tp), "copy_.*cut as"),
        (lambda: torch._foreach_add_([over_tp], [copies]), "_foreach_add_.*cut as"),
        (lambda: over_tp * stock, "met a DTensor of shape .6, 4. with"),
        (lambda: over_tp @ over_tp.t(), "aten.t is not known"),
        (lambda: both.sum(0), "aten.sum.* is not known.*RaggedShard.*RaggedShard"),
    ):
        with pytest.raises(PlacementError, match=said):
            attempt()


def test_what_cannot_be_is_refused_by_name(threads):
    threads(4).run(refused)


def numbered():
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    outer, inner = mesh.get_coordinate()
    spec = ragged_spec(mesh, (Replicate(),) * 2, (8,), torch.float32, Runs((8,), 8, 0, tuple(range(1, 9))), (1, 0))
    assert [each.stride for each in spec.placements] == [1, 2]
    assert virtual_rank(mesh, (1, 0)) == layout_of(spec).rank == inner * 2 + outer
    assert virtual_rank(mesh, (1,)) == inner
    held = distribute_ragged(torch.arange(8.0), spec).to_local().tolist()
    assert part_of(torch.arange(8.0), Grid((2, 4), (None, 0), (0,)), mesh).tolist() == [2.0 * inner, 2.0 * inner + 1]
    return dist.get_rank(), held


def test_the_run_of_an_inner_rank_is_cut_further_by_its_outer_neighbours(threads):
    # So the outer axis halves what the inner one holds: both forms of a parameter are neighbours in memory.
    assert threads(8).run(numbered) == [(rank, [float(rank % 4 * 2 + rank // 4)]) for rank in range(8)]


def calls():
    mesh = FOUR["tp copies"].mesh()
    over_tp, both, alone = (
        ragged_on(FOUR[name], mesh, "flat", numbers((8, 2))) for name in ("tp columns", "two axes", "tp copies")
    )
    part = (Replicate(), Shard(1))
    counts = []
    for action in (
        over_tp.full_tensor, lambda: over_tp.redistribute(placements=part), over_tp.norm, both.full_tensor, both.sum,
        alone.full_tensor, alone.sum, lambda: torch._foreach_norm([both, both]), lambda: both * 2 + both,
    ):  # fmt: skip
        with torch.profiler.profile(acc_events=True) as seen:
            action()
        counts.append(sum(event.count for event in seen.key_averages() if event.key.startswith("c10d::")))
    return counts


def test_one_collective_for_each_axis_that_shards(world):
    assert world(4).run(calls)[0] == [2, 1, 2, 2, 2, 1, 1, 2, 0]
