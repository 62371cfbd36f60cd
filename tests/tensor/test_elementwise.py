"""Do element-by-element operations on ragged tensors give what they give on plain ones, and keep the layout?"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from sherd.errors import PlacementError
from sherd.layout.runs import Runs
from sherd.tensor.ragged import RaggedDTensor
from tests.tensor.cuts import KINDS, SHAPES, cuts, last, line, local_of, numbers, ragged, uneven, whole_of

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


def compare(kinds, operation):
    """Each rank's run of the result beside that run of the plain one: no operation here moves anything."""
    mesh = line(torch.distributed.get_world_size())
    for kind in kinds:
        for shape, cut in zip(SHAPES, cuts(kind, SHAPES, mesh.size()), strict=True):
            a, b = numbers(shape), numbers(shape, seed=1)
            result = operation(ragged(a, cut, mesh), ragged(b, cut, mesh))
            expected = local_of(operation(a, b), cut, mesh.get_local_rank())
            assert type(result) is RaggedDTensor
            assert result.cut == cut
            assert result.shape == shape
            assert result.dtype == expected.dtype
            torch.testing.assert_close(result.to_local(), expected, equal_nan=True)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_it_gives_on_plain_tensors(threads, name):
    for num_ranks, kinds in ((1, ("uneven",)), (2, KINDS), (4, ("uneven",))):
        threads(num_ranks).run(compare, kinds, OPERATIONS[name])


def in_another_format():
    shape, mesh = (4, 3, 2, 2), line(2)
    (cut,) = cuts("uneven", [shape], 2)
    given = ragged(numbers(shape), cut, mesh)
    results = [
        given.to(torch.float64, memory_format=torch.channels_last),
        given.clone(memory_format=torch.channels_last),
        torch.empty_like(given, memory_format=torch.channels_last).copy_(given),
    ]
    for result in results:
        assert result.is_contiguous()
        assert result.cut == cut
        torch.testing.assert_close(result.to_local(), given.to_local(), check_dtype=False)
    return True


def test_another_memory_format_is_passed_over_since_a_run_has_consecutive_elements(threads):
    assert all(threads(2).run(in_another_format))


def other_dtypes():
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


def test_halves_doubles_complex_and_whole_numbers_keep_their_dtype(threads):
    threads(2).run(other_dtypes)


def foreach_operations():
    mesh = line(3)
    for kind in KINDS:
        all_cuts = cuts(kind, SHAPES, 3)
        plain = [numbers(shape) for shape in SHAPES]
        mine = [ragged(each, cut, mesh) for each, cut in zip(plain, all_cuts, strict=True)]

        def steps(values):
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

        for result, expected in zip(steps(mine), steps(plain), strict=True):
            assert type(result) is RaggedDTensor
            assert torch.equal(whole_of(result), expected)


def test_lists_give_what_they_give_on_plain_tensors(threads):
    threads(3).run(foreach_operations)


def lists_of_many_kinds():
    mesh = line(2)
    plain = [numbers(shape) for shape in ((4, 3), (5,), (2, 2), (6,))]
    cut = cuts("uneven", [(4, 3), (6,)], 2)
    mixed = [
        ragged(plain[0], cut[0], mesh),
        torch.distributed.tensor.distribute_tensor(plain[1], mesh, [torch.distributed.tensor.Shard(0)]),
        plain[2].clone(),
        ragged(plain[3], cut[1], mesh),
    ]
    results = torch._foreach_mul(torch._foreach_add(mixed, mixed), [1.0, 2.0, 3.0, 4.0])
    torch._foreach_add_(results, mixed)
    kinds = [type(each) for each in results]
    assert kinds == [RaggedDTensor, DTensor, torch.Tensor, RaggedDTensor]
    for index, (result, expected) in enumerate(zip(results, plain, strict=True)):
        whole = whole_of(result) if isinstance(result, DTensor) else result
        torch.testing.assert_close(whole, expected * 2 * (index + 1) + expected)


def test_a_list_may_hold_ragged_stock_and_plain_tensors(threads):
    threads(2).run(lists_of_many_kinds)


def gradients():
    mesh = line(2)
    for shape, cut in zip(SHAPES, cuts("uneven", SHAPES, 2), strict=True):
        plain = nn.Parameter(numbers(shape))
        mine = nn.Parameter(ragged(plain.detach(), cut, mesh))
        for each in (plain, mine):
            (each * each + each.exp()).backward(torch.ones_like(each))
        assert type(mine.grad) is RaggedDTensor
        assert torch.equal(whole_of(mine.grad), plain.grad)
        again = nn.Parameter(mine.detach().clone())
        (again.to_local() * 3).backward(torch.ones_like(again.to_local()))
        assert torch.equal(whole_of(again.grad), torch.full(shape, 3.0))
        once_more = nn.Parameter(mine.detach().clone())
        (once_more.full_tensor() ** 2).sum().backward()
        assert torch.equal(whole_of(once_more.grad), 2 * plain.detach())
        decayed = nn.Parameter(mine.detach().clone())
        (decayed * decayed).sum().full_tensor().backward()
        assert torch.equal(whole_of(decayed.grad), 2 * plain.detach())


def test_gradients_flow_through_operations_and_out_of_the_tensor(threads):
    threads(2).run(gradients)


def lone_values():
    mesh = line(2)
    (cut,) = cuts("uneven", [(4, 3)], 2)
    whole = numbers((4, 3))
    replicated = DTensor.from_local(torch.tensor(2.0), mesh, [Replicate()], run_check=False)
    assert torch.equal(whole_of(ragged(whole, cut, mesh) * replicated), whole * 2)
    assert torch.equal(whole_of(ragged(whole, cut, mesh) * replicated.expand(4, 3)), whole * 2)


def test_a_replicated_scalar_may_mix(threads):
    threads(2).run(lone_values)


def pairs_of(kind):
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


@pytest.mark.parametrize("kind", KINDS)
def test_complex_tensors_are_seen_as_pairs_and_back(threads, kind):
    for num_ranks in (1, 2, 4):
        threads(num_ranks).run(pairs_of, kind)


def a_pair_cut_in_two():
    torch.view_as_complex(ragged(numbers((3, 2)), Runs((3, 2), 2, 0, (3, 6)), line(2)))


def test_a_pair_cut_in_two_is_no_complex_number(threads):
    with pytest.raises(Exception, match="a pair of numbers is on two ranks"):
        threads(2).run(a_pair_cut_in_two)


def into_plain_and_as_other_numbers():
    mesh = line(2)
    for shape in ((), (3, 4)):
        for cut in (uneven, last):
            whole = numbers(shape)
            mine = ragged(whole, cut(shape, 2), mesh)
            for operation in (torch.add, torch.maximum):
                with pytest.raises(PlacementError, match="met a plain tensor"):
                    operation(mine, mine, out=torch.zeros(shape))
            assert torch.equal(mine.view(torch.int32).full_tensor(), whole.view(torch.int32))
            if cut is uneven:
                with pytest.raises(PlacementError):
                    ragged(numbers((3, 4)), uneven((3, 4), 2), mesh).view(torch.int16)
    return True


def test_a_plain_out_is_refused_on_all_ranks_and_a_view_as_another_dtype_is_of_the_run(threads):
    assert all(threads(2).run(into_plain_and_as_other_numbers))
