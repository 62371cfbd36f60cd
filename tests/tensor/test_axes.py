"""Is a tensor right that is cut into runs over tensor parallelism, over two axes at once, or both?"""

import copy
import io
import math
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from sherd._torch import dtensor_spec, strided_shard
from sherd.errors import PlacementError
from sherd.layout.runs import Runs
from sherd.tensor.placement import RaggedShard, layout_of, ragged_spec, virtual_rank
from sherd.tensor.ragged import RaggedDTensor, distribute_ragged, redistribute_to
from tests.tensor.cuts import SHAPES, numbers, uneven, whole_of
from tests.tensor.grids import EIGHT, FOUR, Grid, local_on, part_of, placements_of, ragged_on
from tests.tensor.test_elementwise import OPERATIONS
from tests.tensor.test_reductions import REDUCTIONS

EVERY = FOUR | EIGHT


def gathered(grid):
    mesh = grid.mesh()
    for kind, dtype in (("uneven", torch.float32), ("rows", torch.bfloat16), ("whole", torch.float8_e4m3fn)):
        for shape in (*SHAPES, (0, 3)):
            whole = numbers(shape).to(dtype)
            tensor = ragged_on(grid, mesh, kind, whole)
            assert torch.equal(distribute_ragged(whole, tensor._spec).to_local().float(), tensor.to_local().float())
            found = tensor.full_tensor()
            assert found.dtype == dtype
            assert found.shape == shape
            assert torch.equal(found.float(), whole.float())
            assert not whole.numel() or found.data_ptr() != tensor.to_local().data_ptr()
            assert tensor.placements == copy.deepcopy(tensor).placements


@pytest.mark.parametrize("name", EVERY)
def test_every_rank_holds_its_run_of_its_part_and_gets_the_whole(threads, name):
    threads(EVERY[name].num_ranks).run(gathered, EVERY[name])


def redistributed(grid):
    mesh = grid.mesh()
    replicated = (Replicate(),) * mesh.ndim
    for kind in ("uneven", "rows"):
        for shape in ((7, 6), (3, 1, 5), ()):
            whole = numbers(shape)
            tensor = ragged_on(grid, mesh, kind, whole)
            part = placements_of(grid, shape)
            shards = [*replicated[1:], Shard(0)] if shape else replicated
            every = (Shard(0),) * mesh.ndim if shape else replicated
            strided = [strided_shard(0, 2), *replicated[2:], Shard(0)] if shape else replicated
            # torch keeps the plans for chunks of chunks by their shapes, and ranks that are threads would share them.
            chunks = () if mesh.size() > 4 else (every, strided)
            for wanted in (replicated, part, shards, *chunks):
                stock = tensor.redistribute(placements=wanted)
                assert type(stock) is DTensor
                assert stock.placements == tuple(wanted)
                expected = distribute_tensor(whole, mesh, wanted, src_data_rank=None)
                assert torch.equal(stock.to_local(), expected.to_local())
                assert torch.equal(redistribute_to(stock, tensor._spec).to_local(), tensor.to_local())
            assert tensor.redistribute(placements=tensor.placements) is tensor
            over_last = redistribute_to(tensor, uneven(shape, mesh.size(-1)))
            assert torch.equal(whole_of(over_last), whole)
            assert torch.equal(redistribute_to(over_last, tensor._spec).to_local(), tensor.to_local())


@pytest.mark.parametrize(
    "name", ["tp columns", "tp rows", "tp rows, the other way round", "two axes", "two axes and columns"]
)
def test_to_and_from_replicas_tensor_parallel_parts_and_strided_chunks(world, threads, name):
    (world if name in FOUR else threads)(EVERY[name].num_ranks).run(redistributed, EVERY[name])


def operated(grid):
    mesh = grid.mesh()
    for kind, shapes in (("uneven", SHAPES[:6]), ("rows", SHAPES[:1])):
        for shape in shapes:
            a, b = numbers(shape), numbers(shape, seed=1)
            mine = [ragged_on(grid, mesh, kind, each) for each in (a, b)]
            for operation in OPERATIONS.values():
                result, expected = operation(*mine), operation(a, b)
                assert type(result) is RaggedDTensor
                assert result.placements == mine[0].placements
                assert result.shape == shape
                torch.testing.assert_close(result.to_local(), local_on(grid, mesh, kind, expected), equal_nan=True)


@pytest.mark.parametrize("name", [*FOUR, "two axes and columns"])
def test_an_operation_gives_what_it_gives_on_plain_tensors(threads, name):
    threads(EVERY[name].num_ranks).run(operated, EVERY[name])


def reduced(grid):
    mesh = grid.mesh()
    for kind, shapes in (("uneven", ((7, 6), (1,))), ("last", ((3, 1, 5), ()))):
        for shape in shapes:
            whole = numbers(shape)
            tensor = ragged_on(grid, mesh, kind, whole)
            for reduction in REDUCTIONS.values():
                result = reduction(tensor)
                assert result.placements == (Replicate(),) * mesh.ndim
                torch.testing.assert_close(result.to_local(), reduction(whole), rtol=1e-5, atol=1e-6)
            assert torch.equal(tensor, tensor.clone())
            other = whole.clone()
            other.view(-1)[-1] += 1
            assert not torch.equal(tensor, ragged_on(grid, mesh, kind, other))
            assert not torch.allclose(tensor, ragged_on(grid, mesh, kind, other))
    assert ragged_on(grid, mesh, "uneven", torch.tensor([[7]])).item() == 7
    assert ragged_on(grid, mesh, "uneven", torch.zeros(0, 3)).sum().item() == 0
    with pytest.raises(IndexError, match="no largest or smallest"):
        ragged_on(grid, mesh, "uneven", torch.zeros(0, 3)).max()


@pytest.mark.parametrize("name", [*FOUR, "two axes and columns", "rows of rows"])
def test_a_reduction_is_over_all_axes_that_shard_and_over_no_copies(threads, name):
    threads(EVERY[name].num_ranks).run(reduced, EVERY[name])


# Training


def trained(grid, make, given, shapes, kind, with_stock=False):
    """Two steps of an optimizer, with clipping, beside the same on plain tensors."""
    mesh = grid.mesh()
    plain = [nn.Parameter(numbers(shape)) for shape in shapes]

    def laid(whole, index):
        if with_stock and index == 1:
            return distribute_tensor(whole, mesh, placements_of(grid, whole.shape), src_data_rank=None)
        return ragged_on(grid, mesh, kind, whole)

    mine = [nn.Parameter(laid(each.detach().clone(), index)) for index, each in enumerate(plain)]
    expected, optimizer = make(plain, **given), make(mine, **given)
    for step in range(2):
        for index, (each, like) in enumerate(zip(mine, plain, strict=True)):
            like.grad = numbers(like.shape, seed=step)
            each.grad = laid(like.grad.clone(), index)
        norms = [nn.utils.clip_grad_norm_(each, 1.0, norm_type=2.0 + step) for each in (plain, mine)]
        torch.testing.assert_close(whole_of(norms[1]), norms[0])
        expected.step()
        optimizer.step()
    for index, (each, like) in enumerate(zip(mine, plain, strict=True)):
        torch.testing.assert_close(each.detach().to_local(), laid(like.detach(), index).to_local())
        for name, value in expected.state[like].items():
            if torch.is_tensor(value) and value.ndim:
                torch.testing.assert_close(whole_of(optimizer.state[each][name]), value)


STEPS = {
    "foreach": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    "fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "for-loop": (torch.optim.NAdam, {"lr": 0.1, "foreach": False}),
    "fused SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
}


FORMS_ON = {
    "tp columns": STEPS,
    "tp rows": ("foreach", "for-loop"),
    "two axes": ("foreach", "fused"),
    "two axes and columns": ("for-loop", "fused SGD"),
}


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in FORMS_ON.items() for form in forms])
def test_an_optimizer_and_clipping_step_as_on_plain_tensors(threads, name, form):
    shapes = ((7, 6), (5, 3), (3, 4, 5), (1,), ())
    kind = "blocks" if name == "tp rows" else "uneven"
    threads(EVERY[name].num_ranks).run(trained, EVERY[name], *STEPS[form], shapes, kind, form != "fused SGD")


MATRICES = ((6, 4), (3, 5), (4, 4))


def test_an_owner_steps_whole_matrices_wherever_it_has_them(threads):
    # Adafactor makes statistics of rows, which are at the owner too.
    # On an axis of one rank a tensor is sharded by name only.
    for grid in (FOUR["tp copies"], FOUR["two axes"], Grid((2, 1), (None, 0), (0,))):
        threads(grid.num_ranks).run(trained, grid, torch.optim.Muon, {"lr": 0.1}, MATRICES, "whole")
        threads(grid.num_ranks).run(trained, grid, torch.optim.Adafactor, {"lr": 0.1}, (*MATRICES[:1], (5,)), "last")


@pytest.mark.parametrize("name", ["tp columns", "tp rows"])
def test_no_one_owns_a_matrix_that_tensor_parallelism_shards(threads, name):
    with pytest.raises(Exception, match=r"PlacementError(.|\n)*any operation, if no other axis of .* shards it"):
        threads(4).run(trained, FOUR[name], torch.optim.Muon, {"lr": 0.1}, MATRICES, "whole")


def unscaled(grid, bad):
    mesh = grid.mesh()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    mine = []
    for shape in ((7, 6), (5,)):
        mine.append(nn.Parameter(ragged_on(grid, mesh, "flat", torch.zeros(shape))))
        grad = torch.full(shape, 16.0)
        grad.view(-1)[-1] += bad
        mine[-1].grad = ragged_on(grid, mesh, "flat", grad)
    optimizer = torch.optim.SGD(mine, lr=1.0)
    scaler.step(optimizer)
    scaler.update()
    return [whole_of(each).view(-1)[0].item() for each in mine], scaler.get_scale()


@pytest.mark.parametrize("name", ["tp columns", "tp rows", "two axes", "two axes and columns"])
def test_an_infinity_on_one_rank_skips_the_step_on_all(threads, name):
    for bad in (0.0, math.inf, math.nan):
        values = threads(EVERY[name].num_ranks).run(unscaled, EVERY[name], bad)
        assert set(map(str, values)) == {str(([0.0] * 2, 4.0) if bad else ([-2.0] * 2, 8.0))}


# Copies


class Holder(nn.Module):
    def __init__(self, grid, mesh, factor=1.0):
        super().__init__()
        for index, shape in enumerate(SHAPES):
            value = nn.Parameter(ragged_on(grid, mesh, "uneven", numbers(shape) * factor))
            self.register_parameter(f"p{index}", value)


def kept(grid, in_processes):
    mesh = grid.mesh()
    for shape in SHAPES:
        whole = numbers(shape)
        tensor = ragged_on(grid, mesh, "uneven", whole)
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        for each in (
            copy.deepcopy(tensor),
            pickle.loads(pickle.dumps(tensor)),
            torch.load(file),
            tensor.cpu(),
            tensor.detach(),
            nn.Parameter(tensor),
        ):
            assert isinstance(each, RaggedDTensor)
            assert layout_of(each._spec).same_as(layout_of(tensor._spec))
            assert torch.equal(each.to_local(), tensor.to_local())
        target = ragged_on(grid, mesh, "uneven", torch.zeros(shape))
        stock = [distribute_tensor(whole, mesh, placements_of(grid, shape), src_data_rank=None)]
        if shape and in_processes:
            stock.append(distribute_tensor(whole, mesh, (Shard(0),) * mesh.ndim, src_data_rank=None))
        for source in (whole, tensor, *stock):
            with torch.no_grad():
                target.zero_().copy_(source)
                assert torch.equal(target.to_local(), tensor.to_local())
                target.zero_().data = source
                assert torch.equal(target.to_local(), tensor.to_local())
        for fill in (nn.init.trunc_normal_, torch.rand_like, lambda each: each.bernoulli_(0.5)) if in_processes else ():
            torch.manual_seed(3)
            result = fill(target)
            torch.manual_seed(3)
            assert torch.equal(result.to_local(), local_on(grid, mesh, "uneven", fill(torch.zeros(shape))))
    model = Holder(grid, mesh)
    other = Holder(grid, mesh, factor=0.0)
    other.load_state_dict(model.state_dict())
    half = copy.deepcopy(other).to(torch.bfloat16)
    for each, less, shape in zip(other.parameters(), half.parameters(), SHAPES, strict=True):
        assert torch.equal(each.to_local(), local_on(grid, mesh, "uneven", numbers(shape)))
        assert torch.equal(less.to_local(), each.to_local().bfloat16())


@pytest.mark.parametrize("name", [*FOUR, "two axes and columns"])
def test_a_tensor_is_copied_pickled_converted_filled_and_loaded(world, threads, name):
    # Threads share random numbers, and torch's plans for chunks of chunks.
    (world if name in FOUR else threads)(EVERY[name].num_ranks).run(kept, EVERY[name], in_processes=name in FOUR)


def differentiated(grid):
    mesh = grid.mesh()
    for shape in ((7, 6), (5,), ()):
        plain = nn.Parameter(numbers(shape))
        part = placements_of(grid, shape)
        for way in (
            lambda each: (each * each).sum(),
            lambda each: (each * each).mean() + each.norm() * 0.1,
            lambda each: (each.full_tensor() ** 2).sum() if isinstance(each, DTensor) else (each**2).sum(),
            lambda each, part=part: (
                (each.redistribute(placements=part) if isinstance(each, DTensor) else each) ** 2
            ).sum(),
        ):
            mine = nn.Parameter(ragged_on(grid, mesh, "uneven", plain.detach()))
            plain.grad = None
            way(plain).backward()
            way(mine).backward()
            assert type(mine.grad) is RaggedDTensor
            torch.testing.assert_close(mine.grad.to_local(), local_on(grid, mesh, "uneven", plain.grad))


@pytest.mark.parametrize("name", ["tp columns", "tp rows", "two axes"])
def test_gradients_flow_back_to_the_runs(threads, name):
    threads(4).run(differentiated, FOUR[name])


# Mistakes


def said_of(*attempts):
    said = []
    for attempt in attempts:
        with pytest.raises(PlacementError) as caught:
            attempt()
        said.append(str(caught.value))
    return said


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
    return said_of(
        lambda: spec((replicate, Partial()), all_of_it, (0,)),
        lambda: spec((replicate, strided_shard(0, 2)), all_of_it, (0,)),
        lambda: spec((replicate,), all_of_it, (0,)),
        lambda: spec((Shard(0), replicate), all_of_it, (0,)),
        lambda: spec((replicate, replicate), all_of_it, ()),
        lambda: spec((replicate, Shard(1)), all_of_it, (0,)),
        lambda: spec((replicate, Shard(2)), all_of_it, (0,)),
        lambda: spec((replicate, replicate), all_of_it, (1, 0)),
        lambda: raw(RaggedShard(four), RaggedShard(four)),
        lambda: raw(RaggedShard(four), RaggedShard(uneven(shape, 4), stride=4)),
        lambda: raw(RaggedShard(four), RaggedShard(Runs(shape, 4, 0, (24,)), stride=2)),
        lambda: redistribute_to(stock, spec((replicate, replicate), uneven((4, 6), 4), (1, 0), (4, 6))),
        lambda: over_tp + copies,
        lambda: both + both_ways,
        lambda: both.copy_(over_tp),
        lambda: torch._foreach_add_([over_tp], [copies]),
        lambda: over_tp * stock,
        lambda: over_tp @ over_tp.t(),
        lambda: both.sum(0),
    )


def test_what_cannot_be_is_refused_by_name(threads):
    expected = (
        "reduce what is Partial", "redistribute what is sharded in another way", "each of its 2 axes",
        "give Replicate.. there",
        "over at least one axis", r"this rank's part has shape .6, 2.", "has no dim 2", "axis 0 x axis 1 .* has 2 x 2",
        "two ranks would hold one run", "two ranks would hold one run", "of one cut",
        r"was given for one of shape .6, 4.", "cut as", "stride=2.*met one of shape .6, 4. cut as", "copy_.*cut as",
        "_foreach_add_.*cut as", r"met a DTensor of shape .6, 4. with", "aten.t is not known",
        "aten.sum.* is not known.*RaggedShard.*RaggedShard",
    )  # fmt: skip
    for said in threads(4).run(refused):
        assert [text for text, like in zip(said, expected, strict=True) if not re.search(like, text)] == []


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
