"""Does every rank get the one value that the whole tensor has?"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sherd.errors import PlacementError
from sherd.tensor.reduction_table import wide
from tests.tensor.cuts import KINDS, SHAPES, cuts, last, line, local_like, numbers, ragged, uneven, whole_of

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


REFUSED = {
    "out of a vector norm": lambda a: torch.linalg.vector_norm(a, out=torch.zeros(())),
    "out of a norm": lambda a: torch.norm(a, out=torch.zeros(())),
    "out of a sum": lambda a: torch.sum(a, dim=tuple(range(a.ndim)), out=torch.zeros(())),
    "out of a maximum": lambda a: torch.max(a, out=torch.zeros(())),
}
WRONG = {
    "largest complex": lambda a: a.to(torch.complex64).amax(),
    "smallest complex": lambda a: a.to(torch.complex64).min(),
    "largest complex of a list": lambda a: torch._foreach_max([a.to(torch.complex64)]),
    "norm of whole numbers": lambda a: torch.linalg.vector_norm(a.to(torch.int64)),
    "norm of whole numbers in a list": lambda a: torch._foreach_norm([a.to(torch.int64)], 2),
    "norm in whole numbers": lambda a: torch.linalg.vector_norm(a, dtype=torch.int64),
    "norm in a complex dtype": lambda a: torch.linalg.vector_norm(a, dtype=torch.complex64),
    "norm of complex numbers in a real dtype": lambda a: torch.linalg.vector_norm(
        a.to(torch.complex64), dtype=torch.float32
    ),
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


def refused(operation):
    """Each rank's error, where the first rank holds nothing, and where only the last one holds something."""
    mesh = line(3)
    return [
        kind_of_error(operation, ragged(numbers(shape), cut(shape, 3), mesh))
        for shape in ((3, 4), (5,))
        for cut in (uneven, last)
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_out_of_a_reduction_is_refused_by_name_on_all_ranks(threads, name):
    assert REFUSED[name](numbers((3, 4))) is not None
    for errors in threads(3).run(refused, REFUSED[name]):
        assert errors == [PlacementError] * 4


@pytest.mark.parametrize("name", WRONG)
def test_what_torch_refuses_is_refused_on_all_ranks(threads, name):
    expected = kind_of_error(WRONG[name], numbers((5,)))
    assert expected is not None
    for errors in threads(3).run(refused, WRONG[name]):
        assert errors == [expected] * 4


def over_no_dims():
    mesh = line(2)
    whole = numbers((3, 4))
    mine = ragged(whole, uneven((3, 4), 2), mesh)
    assert torch.equal(mine.any(dim=()).full_tensor(), whole.any(dim=()))
    assert torch.equal(mine.all(dim=()).full_tensor(), whole.all(dim=()))
    torch.testing.assert_close(mine.sum(dim=()).to_local(), whole.sum(dim=()))


def test_a_reduction_over_no_dims_is_of_all_or_of_none_as_in_torch(threads):
    threads(2).run(over_no_dims)


@pytest.mark.parametrize(
    ("device", "real", "complex_"),
    [
        *((device, torch.float64, torch.complex128) for device in ("cpu", "cuda", "xpu")),
        *((device, torch.float32, torch.complex64) for device in ("mps", "hpu", "npu")),
    ],
)
def test_parts_of_a_sum_are_float64_on_devices_that_can_add_it_up(device, real, complex_):
    on = SimpleNamespace(type=device)  # torch makes no device of a type that is registered from outside
    assert [wide(dtype, on) for dtype in (torch.bfloat16, torch.float32, torch.complex64, torch.int32)] == [
        real,
        real,
        complex_,
        torch.int64,
    ]
