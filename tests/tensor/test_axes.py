"""The runs of a tensor over tensor parallelism, over two axes at once, or both: their places, and what is refused."""

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from sherd._torch import dtensor_spec, strided_shard
from sherd.clip import clip_grad_norm_
from sherd.errors import PlacementError
from sherd.layout.extent import Extent
from sherd.layout.runs import Runs
from sherd.tensor.placement import RaggedShard, layout_of, ragged_spec, virtual_rank
from sherd.tensor.ragged import distribute_ragged, redistribute_to
from sherd.tensor.vectors import VectorShard
from tests.support.ranks.bodies import on_processes, on_threads
from tests.tensor.cuts import numbers, refusal, uneven
from tests.tensor.grids import FOUR, Grid, part_of, ragged_on


@on_threads(4)
def test_what_cannot_be_is_refused_by_name():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shape, whole = (6, 4), numbers((6, 4))
    halves, all_of_it, four = uneven((6, 2), 2), uneven((6, 4), 2), uneven((6, 4), 4)

    def spec(placements, cut, axes, shape=shape):
        return ragged_spec(mesh, placements, shape, torch.float32, cut, axes)

    def raw(*placements):
        return layout_of(dtensor_spec(mesh, placements, torch.Size(shape), torch.float32))

    replicate, strided = Replicate(), strided_shard(0, 2)
    over_tp = distribute_ragged(whole, spec((replicate, Shard(1)), halves, (0,)))
    copies = distribute_ragged(whole, spec((replicate, replicate), all_of_it, (0,)))
    both = distribute_ragged(whole, spec((replicate, replicate), four, (1, 0)))
    both_ways = distribute_ragged(whole, spec((replicate, replicate), four, (0, 1)))
    stock = distribute_tensor(whole, mesh, (replicate, Shard(1)))
    for attempt, said in (
        (lambda: spec((replicate, Partial()), all_of_it, (0,)), "reduce what is Partial"),
        (lambda: spec((replicate, strided), all_of_it, (0,)), "redistribute what is sharded in another way"),
        (lambda: spec((replicate,), all_of_it, (0,)), "each of its 2 axes"),
        (lambda: spec((Shard(0), replicate), all_of_it, (0,)), "give Replicate.. on that axis"),
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
    ):
        assert re.search(said, refusal(attempt)), (said, refusal(attempt))
    torch.testing.assert_close((over_tp @ over_tp.t()).full_tensor(), whole @ whole.t())
    torch.testing.assert_close(both.flatten().cumsum(0).full_tensor(), whole.flatten().cumsum(0))


@on_threads(8)
def test_the_run_of_an_inner_rank_is_cut_further_by_its_outer_neighbours():
    # So the outer axis halves what the inner one holds: both forms of a parameter are neighbours in memory.
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    outer, inner = mesh.get_coordinate()
    spec = ragged_spec(mesh, (Replicate(),) * 2, (8,), torch.float32, Runs((8,), 8, 0, tuple(range(1, 9))), (1, 0))
    assert [each.stride for each in spec.placements] == [1, 2]
    assert virtual_rank(mesh, (1, 0)) == layout_of(spec).rank == inner * 2 + outer
    assert virtual_rank(mesh, (1,)) == inner
    held = distribute_ragged(torch.arange(8.0), spec).to_local().tolist()
    assert part_of(torch.arange(8.0), Grid((2, 4), (None, 0), (0,)), mesh).tolist() == [2.0 * inner, 2.0 * inner + 1]
    assert held == [dist.get_rank() % 4 * 2.0 + dist.get_rank() // 4]


@on_processes(4)
def test_one_collective_for_each_axis_that_shards():
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
    assert counts == [2, 1, 2, 2, 2, 1, 1, 2, 0] or dist.get_rank()


# Ranks on one axis with vectors of their own: a flat parameter over tensor parallelism.

# Of 5 and 4 elements; the last two of each are the same ones, and so are not to be counted twice.
VECTORS = (torch.tensor([1.0, -2.0, 3.0, 7.0, 8.0]), torch.tensor([-9.0, 5.0, 7.0, 8.0]))
OWN = torch.tensor([1.0, -2.0, 3.0, -9.0, 5.0, 7.0, 8.0])
ENDS = ((3, 5), (4, 4))
"""Of the runs that each vector is cut into."""


def vector_tensor():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh.get_local_rank("tp")
    size = len(VECTORS[tp])
    placement = VectorShard((5, 4), (Extent(size - 2, 2),))
    spec = ragged_spec(mesh, (Replicate(), placement), (9,), torch.float32, Runs((size,), 2, 0, ENDS[tp]), (0,))
    return distribute_ragged(torch.cat(VECTORS), spec)


@on_threads(4)
def test_vectors_are_gathered_one_behind_the_other_and_reduced_without_copies():
    tensor = vector_tensor()
    tp, dp = tensor.device_mesh.get_local_rank("tp"), tensor.device_mesh.get_local_rank("dp")
    start, stop = (0, *ENDS[tp])[dp : dp + 2]
    assert torch.equal(tensor.to_local(), VECTORS[tp][start:stop])
    assert torch.equal(tensor.full_tensor(), torch.cat(VECTORS))
    for placements in ((Replicate(), Replicate()), (Shard(0), Shard(0))):
        stock = tensor.redistribute(placements=placements)
        assert type(stock) is DTensor
        assert stock.placements == placements
        assert torch.equal(stock.full_tensor(), torch.cat(VECTORS))
        assert torch.equal(redistribute_to(stock, tensor._spec).to_local(), tensor.to_local())
    for again in (copy.deepcopy(tensor), tensor * 1):
        assert again.placements == tensor.placements
    assert pickle.loads(pickle.dumps(tensor.placements)) == tensor.placements
    for reduction in (torch.sum, torch.mean, torch.prod, torch.count_nonzero, torch.max, torch.min):
        torch.testing.assert_close(reduction(tensor).full_tensor(), reduction(OWN))
    for power in (0.0, 1.0, 2.0, torch.inf, -torch.inf):
        torch.testing.assert_close(torch.linalg.vector_norm(tensor, power).full_tensor(), OWN.norm(power))
        torch.testing.assert_close(torch._foreach_norm([tensor, tensor * 2], power)[0].full_tensor(), OWN.norm(power))
    parameter = nn.Parameter(tensor)
    for power in (1.0, 2.0, torch.inf):
        parameter.grad = tensor.clone()
        torch.testing.assert_close(clip_grad_norm_(parameter, 1.0, power), OWN.norm(power))
        torch.testing.assert_close(parameter.grad.to_local(), tensor.to_local() / OWN.norm(power))
    placements, cut = (Replicate(), VectorShard((5, 5), ())), Runs((4,), 2, 0, (4, 4))
    with pytest.raises(PlacementError, match="this rank's part has shape"):
        ragged_spec(tensor.device_mesh, placements, (10,), torch.float32, cut, (0,))
