"""Does every rank get the one value that the whole tensor has?"""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.tensor.cuts import KINDS, SHAPES, cuts, line, local_like, numbers, ragged, uneven, whole_of

REDUCTIONS = {
    "sum": lambda a: a.sum(),
    "sum in double": lambda a: a.sum(dtype=torch.float64),
    "mean": lambda a: a.mean(),
    "prod": lambda a: a.prod(),
    "max": lambda a: a.max(),
    "min": lambda a: a.min(),
    "amax": lambda a: a.amax(),
    "amin": lambda a: torch.amin(a),
    "norm": lambda a: a.norm(),
    "1-norm": lambda a: torch.linalg.vector_norm(a, 1),
    "3-norm": lambda a: torch.linalg.vector_norm(a, 3),
    "inf-norm": lambda a: torch.linalg.vector_norm(a, math.inf),
    "-inf-norm": lambda a: torch.linalg.vector_norm(a, -math.inf),
    "0-norm": lambda a: torch.linalg.vector_norm(a * (a > 0), 0),
    "norm in double": lambda a: torch.linalg.vector_norm(a, 2, dtype=torch.float64),
    "torch.norm": lambda a: torch.norm(a, 2),
    "any": lambda a: (a > 0).any(),
    "all": lambda a: torch.isfinite(a).all(),
    "nan": lambda a: torch.isnan(a).any(),
    "count": lambda a: torch.count_nonzero(a > 0),
    "over all dims": lambda a: a.sum(dim=tuple(range(a.ndim))),
    "keepdim": lambda a: a.sum(dim=tuple(range(a.ndim)), keepdim=True),
    "ordered": lambda a: (a > 10).sum() + (a < 0).sum(),
}


def compare(kinds, reduction, dtype):
    mesh = line(torch.distributed.get_world_size())
    for kind in kinds:
        for shape, cut in zip(SHAPES, cuts(kind, SHAPES, mesh.size()), strict=True):
            whole = numbers(shape, dtype)
            result, expected = reduction(ragged(whole, cut, mesh)), reduction(whole)
            assert isinstance(result, DTensor)
            assert result.placements == (Replicate(),)
            torch.testing.assert_close(
                result.to_local(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
            )


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_gives_what_it_gives_on_plain_tensors(threads, name):
    for num_ranks, kinds in ((1, ("uneven",)), (2, KINDS), (4, ("uneven", "rows"))):
        threads(num_ranks).run(compare, kinds, REDUCTIONS[name], torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        threads(2).run(compare, ("uneven",), REDUCTIONS[name], dtype)


def whole_numbers_and_complex():
    mesh = line(3)
    cut = uneven((4, 5), 3)
    for dtype in (torch.int64, torch.uint8, torch.int32):
        whole = numbers((4, 5), dtype)
        mine = ragged(whole, cut, mesh)
        for reduction in (torch.sum, torch.max, torch.min, torch.any, torch.all, torch.count_nonzero):
            result, expected = reduction(mine).to_local(), reduction(whole)
            assert result.dtype == expected.dtype
            assert torch.equal(result, expected)
    whole = numbers((4, 5), torch.complex64)
    mine = ragged(whole, cut, mesh)
    for reduction in (torch.sum, torch.mean, torch.linalg.vector_norm):
        torch.testing.assert_close(reduction(mine).to_local(), reduction(whole))
    assert math.isnan(ragged(torch.tensor([1.0, math.nan, 2.0]), uneven((3,), 3), mesh).max().item())
    assert ragged(torch.tensor([-3.0, -1.0]), uneven((2,), 3), mesh).max().item() == -1.0
    assert ragged(torch.zeros(0, 3), uneven((0, 3), 3), mesh).sum().item() == 0.0
    assert ragged(torch.tensor(5.0), uneven((), 3), mesh).item() == 5.0
    assert ragged(torch.tensor([[7]]), uneven((1, 1), 3), mesh).item() == 7
    same, other = ragged(whole, cut, mesh), ragged(whole + (torch.arange(20).view(4, 5) == 19), cut, mesh)
    assert torch.equal(mine, same)
    assert not torch.equal(mine, other)
    assert torch.allclose(mine, same)
    assert not torch.allclose(mine, other)


def test_whole_numbers_complex_numbers_nan_empty_and_single_ones(threads):
    threads(3).run(whole_numbers_and_complex)


def clipped(kind, foreach, norm_type, replicas=0):
    """A model of ragged, stock and plain parameters: the norm of all, and what is left of each gradient."""
    ranks = torch.distributed.get_world_size()
    if replicas:
        mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = line(ranks)
    stock_placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    plain = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    mine = []
    for index, (each, cut) in enumerate(zip(plain, cuts(kind, SHAPES, mesh.size(-1)), strict=True)):
        each.grad = numbers(each.shape)
        if index == 2:
            mine.append(nn.Parameter(distribute_tensor(each.detach(), mesh, stock_placements)))
            mine[-1].grad = distribute_tensor(each.grad, mesh, stock_placements)
        else:
            mine.append(nn.Parameter(ragged(each.detach(), cut, mesh)))
            mine[-1].grad = ragged(each.grad, cut, mesh)
    expected = nn.utils.clip_grad_norm_(plain, 1.0, norm_type=norm_type, foreach=foreach)
    assert torch.allclose(
        whole_of(nn.utils.get_total_norm([each.grad for each in mine], norm_type, foreach=foreach)), expected
    )
    found = nn.utils.clip_grad_norm_(mine, 1.0, norm_type=norm_type, foreach=foreach)
    torch.testing.assert_close(whole_of(found), expected)
    for each, like in zip(mine, plain, strict=True):
        torch.testing.assert_close(each.grad.to_local(), local_like(like.grad, each.grad))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("foreach", [True, False, None])
def test_clipping_a_model_of_ragged_and_stock_parameters(threads, foreach, norm_type):
    for kind in KINDS if norm_type == 2.0 else ("uneven", "last"):
        threads(2).run(clipped, kind, foreach, norm_type)
    threads(4).run(clipped, "uneven", foreach, norm_type, replicas=2)


def unscaled(kind, bad):
    mesh = line(3)
    shapes = SHAPES[:3]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    mine = [
        nn.Parameter(ragged(torch.zeros(shape), cut, mesh))
        for shape, cut in zip(shapes, cuts(kind, shapes, 3), strict=True)
    ]
    for each in mine:
        whole = torch.full(each.shape, 16.0)
        if bad:
            whole.view(-1)[-1] = bad
        each.grad = ragged(whole, each.cut, mesh)
    optimizer = torch.optim.SGD(mine, lr=1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return [whole_of(each).view(-1)[0].item() for each in mine], scaler.get_scale()


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
def test_gradient_scaling_skips_the_step_on_all_ranks_when_one_finds_infinity(threads, bad):
    for kind in ("uneven", "rows", "last"):
        values = threads(3).run(unscaled, kind, bad)
        assert values == [([0.0] * 3, 4.0) if bad else ([-2.0] * 3, 8.0)] * 3
