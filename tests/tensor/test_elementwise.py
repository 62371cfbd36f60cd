"""Element-by-element operations on ragged tensors give what they give on plain ones, and keep the layout."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sherd.errors import PlacementError
from sherd.layout.runs import Runs
from sherd.tensor.ragged import RaggedDTensor
from tests.support.comparing import assert_same, whole
from tests.support.ranks.bodies import on_threads
from tests.tensor.cuts import KINDS, SHAPES, cuts, last, line, numbers, ragged, uneven, whole_of
from tests.tensor.grids import FOUR, GRIDS, local_on, on_grids, placements_of, ragged_on

OPERATIONS = {
    "arithmetic": lambda a, b: (a * 2 + b / 3 - 1) ** 2,
    "reversed": lambda a, b: 1 - a + 2 / (b.abs() + 1),
    "in place": lambda a, b: a.clone().mul_(b).add_(1).clamp_(min=-1, max=2),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b.abs() + 1, value=0.5),
    "addcmul in place": lambda a, b: a.clone().addcmul_(b, b, value=2),
    "where": lambda a, b: torch.where(a > b, a, b),
    "where with a number": lambda a, b: torch.where(a > 0, a, 0.0),
    "masked fill": lambda a, b: a.masked_fill(a < b, 7.0),
    "masked fill in place": lambda a, b: a.clone().masked_fill_(a < b, 7.0),
    "comparison": lambda a, b: (a == b) | (a < b) & ~(a >= 0.5),
    "roots": lambda a, b: a.abs().sqrt().exp().rsqrt().log(),
    "signs": lambda a, b: torch.sign(a) * torch.copysign(a, b) + torch.maximum(a, b),
    "isnan": lambda a, b: torch.isfinite(a) | torch.isnan(b),
    "zeros": lambda a, b: torch.zeros_like(a) + torch.ones_like(b) + torch.full_like(a, 3.0),
    "fresh": lambda a, b: a.new_zeros(a.shape) + a.new_full(a.shape, 2) + a.new_ones(a.shape) + b,
    "to double": lambda a, b: a.to(torch.float64) + b.double(),
    "bfloat16": lambda a, b: a.bfloat16() * b.to(torch.bfloat16),
    "promotion": lambda a, b: a.half() + b,
    "zero-dim tensor": lambda a, b: a * torch.tensor(3.0, dtype=torch.float64) + torch.tensor(2),
    "out": lambda a, b: torch.add(a, b, out=torch.empty_like(a)),
    "detach and fill": lambda a, b: a.detach().clone().fill_(3).zero_(),
    "same view": lambda a, b: a.view(a.shape) + b.view_as(a),
    "sigmoid": lambda a, b: torch.sigmoid(a) + torch.nn.functional.relu(b),
}


def compare(grid, kinds, shapes):
    """Each rank's run of the result beside that run of the plain one: no operation here moves anything."""
    mesh = grid.mesh()
    for kind, shape in product(kinds, shapes):
        a, b = numbers(shape), numbers(shape, seed=1)
        mine = [ragged_on(grid, mesh, kind, each) for each in (a, b)]
        for name, operation in OPERATIONS.items():
            case = f"{name}, {kind}, {shape}"
            result, expected = operation(*mine), local_on(grid, mesh, kind, operation(a, b))
            assert type(result) is RaggedDTensor, case
            assert result.placements == mine[0].placements, case
            assert (result.shape, result.dtype) == (shape, expected.dtype), case
            assert_same(result.to_local(), expected, case, rtol=None, atol=None)


CASES = [
    *(("2 in a row", [kind], SHAPES) for kind in KINDS),
    *((name, KINDS[:1], SHAPES) for name in ("1 in a row", "4 in a row", *FOUR, "two axes and columns")),
    *((name, ["rows"], SHAPES[:1]) for name in (*FOUR, "two axes and columns")),
]


@pytest.mark.parametrize(("name", "kinds", "shapes"), CASES)
def test_an_operation_gives_what_it_gives_on_plain_tensors(threads, name, kinds, shapes):
    threads(GRIDS[name].num_ranks).run(compare, GRIDS[name], kinds, shapes)


@on_threads(2)
def test_another_memory_format_is_passed_over_since_a_run_has_consecutive_elements():
    shape, mesh = (4, 3, 2, 2), line(2)
    given = ragged(numbers(shape), uneven(shape, 2), mesh)
    for result in (
        given.to(torch.float64, memory_format=torch.channels_last),
        given.clone(memory_format=torch.channels_last),
        torch.empty_like(given, memory_format=torch.channels_last).copy_(given),
    ):
        assert result.is_contiguous()
        assert result.cut == given.cut
        torch.testing.assert_close(result.to_local(), given.to_local(), check_dtype=False)


@on_threads(2)
def test_halves_doubles_complex_and_whole_numbers_keep_their_dtype():
    mesh = line(2)
    for dtype in (torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool):
        for shape, cut in zip(SHAPES, cuts("uneven", SHAPES, 2), strict=True):
            a = numbers(shape, dtype)
            b = ragged(a, cut, mesh)
            assert torch.equal(whole_of(b == b), a == a)
            assert torch.equal(whole_of(b), a)
            assert torch.equal(whole_of(b.to(torch.complex128)), a.to(torch.complex128))
            if dtype != torch.bool:
                assert torch.equal(whole_of(b * 2 + b), a * 2 + a)


def of_lists(values):
    other = torch._foreach_mul(values, 2.0)
    torch._foreach_lerp_(other, values, 0.3)
    torch._foreach_addcmul_(other, values, values, 0.5)
    torch._foreach_add_(other, values, alpha=-1)
    torch._foreach_mul_(other, [float(index) for index in range(len(values))])
    torch._foreach_mul_(other, torch.tensor(0.5))
    roots = torch._foreach_sqrt(torch._foreach_abs(other))
    torch._foreach_maximum_(roots, other)
    torch._foreach_copy_(other, roots)
    return [*roots, *other]


@on_threads(3)
def test_lists_give_what_they_give_on_plain_tensors():
    mesh = line(3)
    for kind in KINDS:
        plain = [numbers(shape) for shape in SHAPES]
        mine = [ragged(each, cut, mesh) for each, cut in zip(plain, cuts(kind, SHAPES, 3), strict=True)]
        results = of_lists(mine)
        assert {type(each) for each in results} == {RaggedDTensor}
        assert_same(whole(results), of_lists(plain), kind)


@on_threads(2)
def test_a_list_may_hold_ragged_stock_and_plain_tensors():
    mesh = line(2)
    plain = [numbers(shape) for shape in ((4, 3), (5,), (2, 2), (6,))]
    mixed = [
        ragged(plain[0], uneven((4, 3), 2), mesh),
        distribute_tensor(plain[1], mesh, [Shard(0)]),
        plain[2].clone(),
        ragged(plain[3], uneven((6,), 2), mesh),
    ]
    results = torch._foreach_mul(torch._foreach_add(mixed, mixed), [1.0, 2.0, 3.0, 4.0])
    torch._foreach_add_(results, mixed)
    assert [type(each) for each in results] == [RaggedDTensor, DTensor, torch.Tensor, RaggedDTensor]
    for index, (result, value) in enumerate(zip(whole(results), plain, strict=True)):
        torch.testing.assert_close(result, value * 2 * (index + 1) + value)


@on_grids(["2 in a row", "tp columns", "tp rows", "two axes"])
@on_threads()
def test_gradients_flow_through_operations_and_out_of_the_tensor(grid):
    mesh = grid.mesh()

    def as_whole(each):
        return each.full_tensor() if isinstance(each, DTensor) else each

    def as_part(each):
        return each.redistribute(placements=placements_of(grid, each.shape)) if isinstance(each, DTensor) else each

    for shape in SHAPES:
        plain = nn.Parameter(numbers(shape))
        for way in (
            lambda each: each * each + each.exp(),
            lambda each: (each * each).sum(),
            lambda each: (each * each).mean() + each.norm() * 0.1,
            lambda each: (as_whole(each) ** 2).sum(),
            lambda each: as_whole((each * each).sum()),
            lambda each: (as_part(each) ** 2).sum(),
        ):
            mine = nn.Parameter(ragged_on(grid, mesh, "uneven", plain.detach()))
            plain.grad = None
            for each in (plain, mine):
                result = way(each)
                result.backward(torch.ones_like(result))
            assert type(mine.grad) is RaggedDTensor
            torch.testing.assert_close(mine.grad.to_local(), local_on(grid, mesh, "uneven", plain.grad))
        mine.grad = None
        (mine.to_local() * 3).backward(torch.ones_like(mine.to_local()))
        assert torch.equal(mine.grad.to_local(), torch.full_like(mine.to_local(), 3.0))


@on_threads(2)
def test_a_replicated_scalar_may_mix():
    mine = ragged(numbers((4, 3)), uneven((4, 3), 2), line(2))
    replicated = DTensor.from_local(torch.tensor(2.0), mine.device_mesh, [Replicate()], run_check=False)
    assert torch.equal(whole_of(mine * replicated), numbers((4, 3)) * 2)
    assert torch.equal(whole_of(mine * replicated.expand(4, 3)), numbers((4, 3)) * 2)


@pytest.mark.parametrize("kind", KINDS)
@on_threads(1, 2, 4)
def test_complex_tensors_are_seen_as_pairs_and_back(kind):
    """Views, both ways, and gradients through them."""
    mesh = line(torch.distributed.get_world_size())
    for shape, cut in zip(SHAPES, cuts(kind, SHAPES, mesh.size()), strict=True):
        plain = numbers(shape, torch.complex64)
        mine = ragged(plain, cut, mesh)
        pairs = torch.view_as_real(mine)
        assert pairs.shape == (*shape, 2)
        torch.testing.assert_close(whole_of(pairs), torch.view_as_real(plain))
        pairs.mul_(2)
        torch.testing.assert_close(whole_of(mine), 2 * plain)
        again = torch.view_as_complex(pairs)
        assert again.cut == cut
        torch.testing.assert_close(whole_of(again), 2 * plain)
        leaf, ours = plain.clone().requires_grad_(), ragged(plain, cut, mesh).requires_grad_()
        for each in (leaf, ours):
            torch.view_as_real(each).square().sum().backward()
        torch.testing.assert_close(whole_of(ours.grad), leaf.grad)


@on_threads(2)
def test_a_pair_cut_in_two_is_no_complex_number():
    pair = ragged(numbers((3, 2)), Runs((3, 2), 2, 0, (3, 6)), line(2))
    with pytest.raises(PlacementError, match="a pair of numbers is on two ranks"):
        torch.view_as_complex(pair)


@on_threads(2)
def test_a_plain_out_is_refused_on_all_ranks_and_a_view_as_another_dtype_is_of_the_run():
    mesh = line(2)
    for shape in ((), (3, 4)):
        for cut in (uneven, last):
            given = numbers(shape)
            mine = ragged(given, cut(shape, 2), mesh)
            for operation in (torch.add, torch.maximum):
                with pytest.raises(PlacementError, match="met a plain tensor"):
                    operation(mine, mine, out=torch.zeros(shape))
            assert torch.equal(mine.view(torch.int32).full_tensor(), given.view(torch.int32))
    given = numbers((3, 4))
    halves = ragged(given, uneven((3, 4), 2), mesh).view(torch.int16)
    assert torch.equal(halves.full_tensor(), given.view(torch.int16))
