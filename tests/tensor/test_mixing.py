"""An operation that ragged tensors cannot answer says so, on every rank, and says what to do."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from sherd._torch import dtensor_spec
from sherd.errors import PlacementError
from sherd.layout.runs import Runs
from sherd.tensor.placement import RaggedShard, layout_of
from sherd.tensor.ragged import distribute_ragged, ragged_dtensor, redistribute_to
from sherd.tensor.sharded import sharded_dtensor
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import NOTHING
from tests.support.versions import needs_torch
from tests.tensor.cuts import line, numbers, ragged, refusal, rows, spec_for, uneven, whole_of

SHAPE = (6, 4)


def three_kinds(mesh):
    whole = numbers(SHAPE)
    cuts = uneven(SHAPE, 2), rows(SHAPE, 2)
    return *(ragged(whole, cut, mesh) for cut in cuts), distribute_tensor(whole, mesh, [Shard(0)])


MIXES = {
    "two layouts": (lambda ragged, other, stock: ragged + other, "met one of shape .6, 4. cut as"),
    "two layouts in place": (lambda ragged, other, stock: ragged.mul_(other), "met one of shape"),
    "a copy of another layout": (lambda ragged, other, stock: ragged.copy_(other), "met one of shape"),
    "where": (lambda ragged, other, stock: torch.where(ragged > 0, other, ragged), "met one of shape"),
    "stock first": (lambda ragged, other, stock: stock + ragged, r"met a DTensor of shape \(6, 4\)"),
    "stock second": (lambda ragged, other, stock: ragged * stock, r"with \(Shard\(dim=0\),\)"),
    "stock in place": (lambda ragged, other, stock: stock.add_(ragged), "met a DTensor"),
    "stock replicated": (
        lambda ragged, other, stock: ragged + stock.redistribute(placements=[Replicate()]),
        r"with \(Replicate\(\),\)",
    ),
    "plain": (lambda ragged, other, stock: ragged + torch.ones(SHAPE), r"a plain tensor of shape \(6, 4\)"),
    "plain row": (lambda ragged, other, stock: ragged * torch.ones(4), r"a plain tensor of shape \(4,\)"),
    "plain of one element": (lambda ragged, other, stock: ragged * torch.ones(1), r"a plain tensor of shape \(1,\)"),
    "lists of two layouts": (lambda ragged, other, stock: torch._foreach_add([ragged], [other]), "_foreach_add"),
    "lists with stock": (lambda ragged, other, stock: torch._foreach_add_([ragged], [stock]), "met a DTensor"),
    "lists with plain": (lambda ragged, other, stock: torch._foreach_add_([ragged], [torch.ones(SHAPE)]), "a plain"),
    "lists, stock first": (lambda ragged, other, stock: torch._foreach_add_([stock], [ragged]), "met a DTensor"),
    "lists, plain first": (lambda ragged, other, stock: torch._foreach_mul([torch.ones(6, 4)], [ragged]), "a plain"),
    "in place on a number": (lambda ragged, other, stock: torch.tensor(1.0).add_(ragged), "a plain tensor of shape"),
    "in place on a known value": (lambda ragged, other, stock: ragged.sum().add_(ragged), "met a DTensor"),
    "copy into a plain tensor": (lambda ragged, other, stock: torch.ones(SHAPE).copy_(ragged), "cannot be copied into"),
    "copy into stock": (lambda ragged, other, stock: stock.copy_(ragged), "cannot be copied into"),
    "copy of another shape": (lambda ragged, other, stock: ragged.copy_(torch.ones(4, 6)), "a plain tensor of shape"),
    "product": (lambda ragged, other, stock: ragged @ torch.ones(4), r"a plain tensor of shape \(4,\)"),
    "fused": (
        lambda ragged, other, stock: torch._fused_sgd_(
            [ragged], [other], [], weight_decay=0, momentum=0, lr=1, dampening=0, nesterov=False, maximize=False,
            is_first_step=True,
        ),
        "_fused_sgd_",
    ),
}  # fmt: skip

OF_OTHERS = {
    "matmul": lambda a: a @ a.T,
    "transpose": lambda a: a.T.contiguous(),
    "two transposes": lambda a: a.T * 2 + a.t(),
    "reshape": lambda a: a.reshape(4, 6),
    "reshaped transpose": lambda a: a.T.reshape(3, 8),
    "index": lambda a: a[0],
    "slice": lambda a: a[1:3],
    "element": lambda a: a[2, 1],
    "rows": lambda a: a.sum(0),
    "norms": lambda a: a.norm(dim=-1, keepdim=True),
    "normed": lambda a: a / a.norm(),
    "centred": lambda a: a - a.mean(1, keepdim=True),
    "cat": lambda a: torch.cat([a, a * 2]),
    "stack": lambda a: torch.stack([a, a]).cumsum(0),
    "sort": lambda a: a.sort(descending=True)[0],
    "qr": lambda a: torch.linalg.qr(a)[0],
    "new of another shape": lambda a: a.new_zeros(3) + 1,
    "softmax": lambda a: a.softmax(-1),
    "addmm": lambda a: torch.addmm(a @ a.T, a, a.T, beta=0.5, alpha=2),
    "topk": lambda a: a.flatten().topk(3)[0],
    "expand": lambda a: a.expand(2, 6, 4),
    "split": lambda a: a.split(2)[1],
    "nonzero": lambda a: (a > 0).nonzero(),
}


@on_threads(2)
def test_tensors_that_lie_elsewhere_do_not_mix():
    given = three_kinds(line(2))
    for name, (operation, said) in MIXES.items():
        told = refusal(operation, *given)
        assert re.search(said, told), (name, told)
        assert ".full_tensor()" in told, name


@on_threads(2)
def test_tensors_that_lie_elsewhere_are_compared_alike_on_all_ranks():
    mesh = line(2)
    first, other, _ = three_kinds(mesh)
    short = ragged(numbers((3,)), uneven((3,), 2), mesh)
    for same in (torch.equal, torch.allclose):
        assert (same(first, other), same(other, first), same(first, other + 1)) == (True, True, False)
    assert (torch.equal(first, short), torch.equal(short, first)) == (False, False)


@on_threads(3)
def test_what_needs_other_ranks_elements_is_that_of_the_unsharded_tensor():
    mesh, whole = line(3), numbers(SHAPE)
    owned = Runs(SHAPE, 3, 1, (24,), by_rows=True)
    for cut in (uneven(SHAPE, 3), Runs(SHAPE, 3, 0, (8, 24, 24), by_rows=True), owned):
        mine = ragged(whole, cut, mesh)
        for name, operation in OF_OTHERS.items():
            torch.testing.assert_close(whole_of(operation(mine)), operation(whole), msg=f"{name}, {cut}")
        part, like = mine.clone(), whole.clone()
        for each in (part, like):
            each.T[1:3].mul_(3)
            each[0].fill_(2)
        assert torch.equal(whole_of(part), like)
        parameter, plain = nn.Parameter(mine.clone()), nn.Parameter(whole.clone())
        for each in (parameter, plain):
            product = each @ each.T
            product.backward(torch.ones_like(product))
        torch.testing.assert_close(whole_of(parameter.grad), plain.grad)
        assert "gives the tensor itself another shape" in refusal(mine.clone().t_)
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|reduction dim"):
            mine @ mine
    elsewhere = ragged(whole, Runs(SHAPE, 3, 2, (24,), by_rows=True), mesh)
    mine = ragged(whole, owned, mesh)
    torch.testing.assert_close(whole_of(mine + elsewhere), 2 * whole)
    assert (mine + elsewhere).cut == owned, "the first one stays where it is"
    assert refusal(lambda: mine @ torch.ones(4, 4)) != NOTHING


# Torch warns of a plain tensor of one element beside DTensors, which is of its own making here.
@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor with numel=1:UserWarning")
@on_threads(3)
def test_a_quantile_is_the_owners_in_every_bit():
    whole = numbers(SHAPE)
    found = ragged(whole, Runs(SHAPE, 3, 1, (24,), by_rows=True), line(3)).quantile(0.3)
    assert found.shape == ()
    assert torch.equal(whole_of(found), whole.quantile(0.3))


@on_threads(2)
def test_a_ragged_placement_equals_its_like_and_no_other():
    mesh, cut = line(2), uneven(SHAPE, 2)
    shard = RaggedShard(cut)
    assert shard == RaggedShard(uneven(SHAPE, 2))
    assert hash(shard) == hash(RaggedShard(uneven(SHAPE, 2)))
    assert shard != RaggedShard(rows(SHAPE, 2))
    assert shard != Shard(0)
    assert Shard(0) != shard
    assert shard.is_shard()
    assert shard.dim == 0
    assert copy.deepcopy(shard) == pickle.loads(pickle.dumps(shard)) == shard
    assert "elements=[0, 24]" in repr(shard)
    spec = spec_for(cut, mesh)
    assert copy.deepcopy(layout_of(spec)) is layout_of(spec)
    assert layout_of(copy.copy(spec)).cut == cut


@on_threads(2)
def test_no_dtensor_of_torch_can_have_a_ragged_placement():
    # Its dispatch would take the runs for equal chunks.
    mesh = line(2)
    tensor = ragged(numbers(SHAPE), uneven(SHAPE, 2), mesh)
    sizes = {"shape": tensor.shape, "stride": tensor.stride()}
    for attempt in (
        lambda: DTensor.from_local(tensor.to_local(), mesh, tensor.placements, run_check=False),
        lambda: DTensor.from_local(tensor.to_local(), mesh, tensor.placements, **sizes),
        lambda: distribute_tensor(numbers(SHAPE), mesh, [Shard(0)]).redistribute(placements=tensor.placements),
        lambda: type(tensor._spec)(mesh, tensor.placements, tensor_meta=tensor._spec.tensor_meta),
    ):
        with pytest.raises((AssertionError, PlacementError)):
            attempt()
    stock = distribute_tensor(numbers(SHAPE), mesh, tensor.placements)
    assert stock.placements == (Shard(0),)
    assert torch.equal(whole_of(stock), numbers(SHAPE))


@needs_torch(2, 14, "no chunk becomes a summand")
@on_processes(2)
def test_a_cut_tensor_becomes_summands_or_strided_chunks_as_torchs_does():
    whole, mesh = numbers(SHAPE), line(2)
    stock = distribute_tensor(whole, mesh, [Shard(0)])
    for wanted in (Partial("sum"), _StridedShard(1, split_factor=2)):
        expected = stock.redistribute(placements=[wanted])
        for tensor in (*(ragged(whole, cut, mesh) for cut in (uneven(SHAPE, 2), rows(SHAPE, 2))), as_sherds(stock)):
            found = tensor.redistribute(placements=[wanted])
            assert found.placements == expected.placements
            assert found.to_local().shape == expected.to_local().shape
            assert torch.equal(found.full_tensor(), whole), (type(tensor), wanted)


@needs_torch(2, 14, "it has no such redistribution")
@on_processes(2)
def test_strided_chunks_of_sherds_class_go_to_another_dim_as_torchs_do():
    mesh, strided = line(2), [_StridedShard(0, split_factor=2)]
    stock = distribute_tensor(numbers((8, 4)), mesh, [Replicate()]).redistribute(placements=strided)
    found = as_sherds(stock).redistribute(placements=[Shard(1)])
    assert torch.equal(found.to_local(), stock.redistribute(placements=[Shard(1)]).to_local())
    assert torch.equal(found.full_tensor(), numbers((8, 4)))


def as_sherds(stock):
    return sharded_dtensor(stock.to_local(), stock._spec)


@on_threads(2)
def test_wrong_arguments_are_named():
    mesh, cut = line(2), uneven(SHAPE, 2)
    tensor = ragged(numbers(SHAPE), cut, mesh)
    attempts = (
        lambda: distribute_ragged(numbers((4, 6)), spec_for(cut, mesh)),
        lambda: redistribute_to(tensor, uneven((4, 6), 2)),
        lambda: redistribute_to(tensor, uneven(SHAPE, 3)),
        lambda: tensor.redistribute(placements=[RaggedShard(rows(SHAPE, 2))]),
        lambda: tensor.redistribute(placements=[Replicate(), Shard(0)]),
        lambda: tensor.to_local(grad_placements=[Replicate()]),
        lambda: tensor.full_tensor(grad_placements=[Shard(0)]),
        lambda: layout_of(dtensor_spec(mesh, (Replicate(),), torch.Size(SHAPE), torch.float32)),
        lambda: layout_of(dtensor_spec(mesh, (RaggedShard(cut),), torch.Size((4, 6)), torch.float32)),
        lambda: copy.deepcopy(nn.Parameter(tensor) * 2),
    )
    for number, attempt in enumerate(attempts):
        assert refusal(attempt) != NOTHING, f"attempt {number}"
    with pytest.raises(AssertionError, match="rank holds"):
        ragged_dtensor(torch.zeros(1), spec_for(cut, mesh))
