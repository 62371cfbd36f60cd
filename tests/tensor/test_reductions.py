"""Every rank gets the one value that the whole tensor has."""

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sherd.errors import PlacementError
from sherd.tensor.reduction_table import sum_dtype
from tests.support.ranks.bodies import on_threads
from tests.tensor.cuts import KINDS, SHAPES, last, line, numbers, ragged, uneven, whole_of
from tests.tensor.grids import FOUR, GRIDS, LINES, Grid, ragged_on

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


def compare(grid, kinds, shapes=SHAPES, dtypes=(torch.float32,)):
    mesh = grid.mesh()
    for kind, dtype, shape in product(kinds, dtypes, shapes):
        whole = numbers(shape, dtype)
        mine = ragged_on(grid, mesh, kind, whole)
        close = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-6}
        for name, reduction in REDUCTIONS.items():
            result, case = reduction(mine), f"{name}, {kind}, {dtype}, {shape}"
            assert isinstance(result, DTensor), case
            assert result.placements == (Replicate(),) * mesh.ndim, case
            torch.testing.assert_close(result.to_local(), reduction(whole), **close, msg=f"{case}: {{}}".format)
        other = whole.clone()
        other.view(-1)[-1] += 1
        assert torch.equal(mine, mine.clone())
        assert torch.allclose(mine, mine.clone())
        assert not torch.equal(mine, ragged_on(grid, mesh, kind, other))
        assert not torch.allclose(mine, ragged_on(grid, mesh, kind, other))
    assert ragged_on(grid, mesh, "uneven", torch.tensor([[7]])).item() == 7
    assert ragged_on(grid, mesh, "uneven", torch.tensor(5.0)).item() == 5.0
    assert ragged_on(grid, mesh, "uneven", torch.zeros(0, 3)).sum().item() == 0
    with pytest.raises(IndexError, match="no largest or smallest"):
        ragged_on(grid, mesh, "uneven", torch.zeros(0, 3)).max()


CASES = [
    *(("2 in a row", [kind]) for kind in KINDS),
    ("2 in a row", KINDS[:1], SHAPES, (torch.bfloat16, torch.float64)),
    ("1 in a row", ["uneven"]),
    ("4 in a row", ["uneven", "rows"]),
    *((name, ["uneven", "last"], ((7, 6), (1,), ())) for name in (*FOUR, "two axes and columns", "rows of rows")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_reduction_is_over_all_axes_that_shard_and_over_no_copies(threads, case):
    name, *given = case
    threads(GRIDS[name].num_ranks).run(compare, GRIDS[name], *given)


@on_threads(3)
def test_whole_numbers_complex_numbers_nan_empty_and_single_ones():
    mesh, cut = line(3), uneven((4, 5), 3)
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
    other = ragged(whole + (torch.arange(20).view(4, 5) == 19), cut, mesh)
    for same in (torch.equal, torch.allclose):
        assert same(mine, ragged(whole, cut, mesh))
        assert not same(mine, other)
    assert math.isnan(ragged(torch.tensor([1.0, math.nan, 2.0]), uneven((3,), 3), mesh).max().item())
    assert ragged(torch.tensor([-3.0, -1.0]), uneven((2,), 3), mesh).max().item() == -1.0
    assert ragged(torch.zeros(0, 3), uneven((0, 3), 3), mesh).sum().item() == 0.0
    assert ragged(torch.tensor([[7]]), uneven((1, 1), 3), mesh).item() == 7


def clipped(grid, kind, foreach, norm_type):
    """A model of ragged, stock and plain parameters: the norm of all, and what is left of each gradient."""
    mesh = grid.mesh()

    def laid(whole, index):
        if index == 2:
            return distribute_tensor(whole, mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(0)])
        return ragged_on(grid, mesh, kind, whole)

    plain = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    mine = [nn.Parameter(laid(each.detach(), index)) for index, each in enumerate(plain)]
    for index, (each, like) in enumerate(zip(mine, plain, strict=True)):
        like.grad = numbers(like.shape)
        each.grad = laid(like.grad.clone(), index)
    expected = nn.utils.clip_grad_norm_(plain, 1.0, norm_type=norm_type, foreach=foreach)
    before = nn.utils.get_total_norm([each.grad for each in mine], norm_type, foreach=foreach)
    found = nn.utils.clip_grad_norm_(mine, 1.0, norm_type=norm_type, foreach=foreach)
    for norm in (before, found):
        torch.testing.assert_close(whole_of(norm), expected)
    for index, (each, like) in enumerate(zip(mine, plain, strict=True)):
        torch.testing.assert_close(each.grad.to_local(), laid(like.grad, index).to_local())


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("foreach", [True, False, None])
def test_clipping_a_model_of_ragged_and_stock_parameters(threads, foreach, norm_type):
    for kind in KINDS if norm_type == 2.0 else ("uneven", "last"):
        threads(2).run(clipped, LINES["2 in a row"], kind, foreach, norm_type)
    threads(4).run(clipped, Grid((2, 2), (None, None), (1,)), "uneven", foreach, norm_type)


def unscaled(grid, kind, bad):
    """A step of size 1 against gradients of 2, of which the last of each tensor is more."""
    mesh = grid.mesh()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    mine = []
    for shape in SHAPES[:3]:
        grad = torch.full(shape, 16.0)
        grad.view(-1)[-1] += bad
        mine.append(nn.Parameter(ragged_on(grid, mesh, kind, torch.zeros(shape))))
        mine[-1].grad = ragged_on(grid, mesh, kind, grad)
    optimizer = torch.optim.SGD(mine, lr=1.0)
    if mesh.ndim == 1:  # else the step does it
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return [whole_of(each).view(-1)[0].item() for each in mine], scaler.get_scale()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("3 in a row", kind) for kind in ("uneven", "rows", "last")),
        *((name, "flat") for name in ("tp columns", "tp rows", "two axes", "two axes and columns")),
    ],
)
def test_gradient_scaling_skips_the_step_on_all_ranks_when_one_finds_infinity(threads, name, kind):
    for bad in (0.0, math.inf, math.nan):
        for found in threads(GRIDS[name].num_ranks).run(unscaled, GRIDS[name], kind, bad):
            assert found == (([0.0] * 3, 4.0) if bad else ([-2.0] * 3, 8.0)), bad


REFUSED = {
    "out of a vector norm": lambda a: torch.linalg.vector_norm(a, out=torch.zeros(())),
    "out of a norm": lambda a: torch.norm(a, out=torch.zeros(())),
    "out of a sum": lambda a: torch.sum(a, dim=tuple(range(a.ndim)), out=torch.zeros(())),
    "out of a maximum": lambda a: torch.max(a, out=torch.zeros(())),
}
SINGLE = torch.float32
WRONG = {
    "largest complex": lambda a: a.to(torch.complex64).amax(),
    "smallest complex": lambda a: a.to(torch.complex64).min(),
    "largest complex of a list": lambda a: torch._foreach_max([a.to(torch.complex64)]),
    "norm of whole numbers": lambda a: torch.linalg.vector_norm(a.to(torch.int64)),
    "norm of whole numbers in a list": lambda a: torch._foreach_norm([a.to(torch.int64)], 2),
    "norm in whole numbers": lambda a: torch.linalg.vector_norm(a, dtype=torch.int64),
    "norm in a complex dtype": lambda a: torch.linalg.vector_norm(a, dtype=torch.complex64),
    "norm of complex numbers in a real dtype": lambda a: torch.linalg.vector_norm(a.to(torch.complex64), dtype=SINGLE),
    "norm in a narrower dtype": lambda a: torch.linalg.vector_norm(a.double(), dtype=torch.float32),
    "mean of whole numbers": lambda a: a.to(torch.int64).mean(),
    "a dim too many": lambda a: a.sum(dim=(*range(a.ndim), 7)),
    "a dim too many of a maximum": lambda a: a.amax(dim=(*range(a.ndim), 5)),
    "a dim twice": lambda a: a.sum(dim=(*range(a.ndim), -1)),
    "a dim twice in a norm": lambda a: torch.linalg.vector_norm(a, dim=(*range(a.ndim), -1)),
}


def kind_of_error(operation, tensor):
    try:
        operation(tensor)
    except Exception as error:
        return type(error)
    return None


@on_threads(3)
def test_what_torch_refuses_is_refused_on_all_ranks():
    """And an `out`. Where the first rank holds nothing, and where only the last one holds something."""
    mesh = line(3)
    given = [ragged(numbers(shape), cut(shape, 3), mesh) for shape in ((3, 4), (5,)) for cut in (uneven, last)]
    for name, operation in (REFUSED | WRONG).items():
        of_plain = kind_of_error(operation, numbers((5,)))
        assert (of_plain is None) == (name in REFUSED), name
        assert [kind_of_error(operation, each) for each in given] == [of_plain or PlacementError] * 4, name


@on_threads(2)
def test_a_reduction_over_no_dims_is_of_all_or_of_none_as_in_torch():
    whole = numbers((3, 4))
    mine = ragged(whole, uneven((3, 4), 2), line(2))
    assert torch.equal(mine.any(dim=()).full_tensor(), whole.any(dim=()))
    assert torch.equal(mine.all(dim=()).full_tensor(), whole.all(dim=()))
    torch.testing.assert_close(mine.sum(dim=()).to_local(), whole.sum(dim=()))


def test_parts_of_a_sum_are_float64_on_devices_that_can_add_it_up():
    for device in ("cpu", "cuda", "xpu", "mps", "hpu", "npu"):
        on = SimpleNamespace(type=device)  # torch makes no device of a type that is registered from outside
        has_double = device in ("cpu", "cuda", "xpu")
        real, complex_ = (torch.float64, torch.complex128) if has_double else (torch.float32, torch.complex64)
        widened = {torch.bfloat16: real, torch.float32: real, torch.complex64: complex_, torch.int32: torch.int64}
        for dtype, wider in widened.items():
            assert sum_dtype(dtype, on) == wider, (device, dtype)
