"""A number that is read of a tensor in equal chunks is the unsharded one's on all ranks, also those without rows."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sherd.errors import PlacementError
from sherd.layout.runs import Runs
from sherd.tensor.ragged import RaggedDTensor, as_dtensor
from sherd.tensor.replicated import ReplicatedDTensor
from sherd.tensor.sharded import ShardedDTensor
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import refusal
from tests.tensor.cuts import KINDS, line, ragged, uneven
from tests.tensor.grids import FOUR, ragged_on

ROWS, COLUMNS = Shard(0), Shard(1)
LAYOUTS = {
    "even rows": ((8, 4), (4,), (ROWS,)),
    "uneven rows": ((7, 3), (4,), (ROWS,)),
    "ranks without rows": ((2, 5), (4,), (ROWS,)),
    "columns": ((3, 7), (4,), (COLUMNS,)),
    "one element": ((1,), (4,), (ROWS,)),
    "replicas": ((3, 2), (2, 2), (Replicate(), ROWS)),
    "replicas without rows": ((1, 5), (2, 2), (Replicate(), ROWS)),
    "rows and columns": ((7, 3), (2, 2), (ROWS, COLUMNS)),
    "rows of rows": ((3, 4), (2, 2), (ROWS, ROWS)),
}


def numbers(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def cut(whole, sizes, placements):
    stock = distribute_tensor(whole, init_device_mesh("cpu", sizes), placements, src_data_rank=None)
    return as_dtensor(stock.to_local().clone(), stock._spec)


def layouts(*names):
    """Yields the name of each layout, an unsharded tensor, and the same cut."""
    for name in names or LAYOUTS:
        shape, sizes, placements = LAYOUTS[name]
        yield name, numbers(shape), cut(numbers(shape), sizes, placements)


READ = {
    "sum": lambda t: t.sum().item(),
    "mean": lambda t: float(t.mean()),
    "max": lambda t: t.abs().max().item(),
    "amin": lambda t: float(t.amin()),
    "aminmax": lambda t: float(torch.aminmax(t).max),
    "var": lambda t: t.var(correction=0).item(),
    "median": lambda t: float(t.median()),
    "argmax": lambda t: int(t.argmax()),
    "count": lambda t: int(t.count_nonzero()),
    "logsumexp": lambda t: t.logsumexp(tuple(range(t.ndim))).item(),
    "prod": lambda t: t.prod().item(),
    "any": lambda t: bool((t > 1).any()),
    "all": lambda t: bool(torch.isfinite(t).all()),
    "nan": lambda t: bool(torch.isnan(t).any()),
    "share": lambda t: (t > 0).float().mean().item(),
    "whole numbers": lambda t: int((t * 10).int().max()),
    "order 1": lambda t: t.norm(p=1).item(),
    "order 3": lambda t: t.norm(p=3).item(),
    "order inf": lambda t: t.norm(p=math.inf).item(),
    "compared": lambda t: bool(t.abs().max() > 0.9 * t.norm()),
    "formatted": lambda t: f"{t.abs().max():.5f} {t.norm():.3e} {t.mean():8.3f} {t.sum()}"[:20],
    "list": lambda t: t.sum(0).tolist(),
    "values": lambda t: t.tolist(),
    "of a sum": lambda t: t.sum(0).max().item(),
    "of largest": lambda t: t.amax(0).sum().item(),
    "stacked": lambda t: torch.stack([t.sum(), t.max(), t.norm()]).max().item(),
    "rms": lambda t: t.pow(2).mean().sqrt().item(),
    "loss": lambda t: float(F.mse_loss(t, t * 2)),
    "quantile": lambda t: t.flatten().quantile(0.9).item(),
    "top": lambda t: t.flatten().topk(1).values.item(),
    "bins": lambda t: t.histc(bins=8, min=-3, max=3).tolist(),
    "histogram": lambda t: torch.histogram(t.float(), 4)[0].tolist(),
    "unique": lambda t: len(t.sign().unique()),
    "chosen": lambda t: t[t > 0].sum().item(),
    "last": lambda t: t[(-1,) * t.ndim].item(),
    "row": lambda t: t[0].sum().item(),
    "first dim": lambda t: t.std(0, correction=0).sum().item(),
}


@on_threads(4)
def test_a_number_that_is_read_is_that_of_the_unsharded_tensor():
    for layout, whole, tensor in layouts():
        for name, read in READ.items():
            found, expected = read(tensor), read(whole)
            if isinstance(expected, list | float | int):
                assert torch.allclose(torch.tensor(found), torch.tensor(expected)), f"{name}, {layout}"
            else:
                assert found == expected, f"{name}, {layout}"


RAGGED = {
    "uneven": uneven((7, 3), 3),
    "rows": Runs((7, 3), 3, 0, (6, 15, 21), by_rows=True),
    "one rank has all": Runs((7, 3), 3, 1, (21,)),
    "a vector": uneven((7,), 3),
}
OF_ITS_ROWS = {"last", "row", "loss"}
"""Of runs, what needs an owner."""


@on_threads(3)
def test_a_number_that_is_read_of_a_ragged_tensor_is_that_of_the_unsharded_tensor():
    for kind, runs in RAGGED.items():
        whole = numbers(runs.shape)
        for name, read in READ.items():
            if name in OF_ITS_ROWS:
                continue
            found, expected = read(ragged(whole, runs, line(3))), read(whole)
            if isinstance(expected, list | float | int):
                assert torch.allclose(torch.tensor(found), torch.tensor(expected)), f"{name}, {kind}"
            else:
                assert found == expected, f"{name}, {kind}"


@on_threads(4)
def test_numbers_and_writes_of_ragged_tensors_on_two_axes_are_those_of_the_unsharded_tensor():
    for on, grid in FOUR.items():
        mesh, whole = grid.mesh(), numbers((6, 4))
        tensor = ragged_on(grid, mesh, KINDS[0], whole)
        for name in ("var", "median", "quantile", "top", "bins", "chosen", "list", "first dim"):
            if grid.shards != (None, None) and name in ("quantile", "top"):
                continue  # a view of a part is no view of the tensor
            found, expected = READ[name](tensor), READ[name](whole)
            assert torch.allclose(torch.tensor(found), torch.tensor(expected)), f"{name}, {on}"
        for name in ("plain rows", "index_fill", "index_add", "scatter", "largest"):
            MASKS[name](tensor, None)
            MASKS[name](whole, None)
            assert torch.equal(tensor.full_tensor(), whole), f"{name}, {on}"


@on_threads(3)
def test_a_view_of_all_elements_of_a_ragged_tensor_has_runs_too_and_writes_through():
    for kind, runs in RAGGED.items():
        whole = numbers(runs.shape)
        for view in (
            lambda t: t.flatten(),
            lambda t: t.unsqueeze(0),
            lambda t: t.view(1, -1),
            lambda t: t.reshape(-1, 1).squeeze(1),
        ):
            tensor, expected = ragged(whole.clone(), runs, line(3)), view(whole.clone())
            found = view(tensor)
            assert torch.equal(found.full_tensor(), expected), kind
            found.mul_(2)
            assert torch.equal(tensor.full_tensor(), whole * 2), kind
            torch.testing.assert_close((found * found).sum().to_local(), (whole * 2).square().sum())


TRAINED = {
    "std": lambda t: t.std(),
    "flat": lambda t: t.flatten().square().sum(),
    "median": lambda t: t.median(),
    "norms of rows": lambda t: t.norm(dim=1).sum(),
    "top": lambda t: t.flatten().topk(3).values.sum(),
    "chosen": lambda t: t[t > 0].sum(),
    "quantile": lambda t: torch.quantile(t, 0.3),
    "dot": lambda t: torch.dot(t.flatten(), t.flatten()),
}


@on_threads(3)
def test_a_statistic_of_a_ragged_tensor_has_the_gradient_of_the_unsharded_tensor():
    for name, read in TRAINED.items():
        whole = numbers((7, 3)).requires_grad_()
        tensor = ragged(whole.detach(), RAGGED["uneven"], line(3)).requires_grad_()
        for each in (whole, tensor):
            read(each).backward()
        torch.testing.assert_close(tensor.grad.full_tensor(), whole.grad, msg=name)
    assert "rows of their own" in refusal(PlacementError, lambda: tensor[torch.tensor([0, 2])])


@on_processes(2)
def test_one_ranks_nan_is_read_by_all():
    for shape in ((5, 3), (1, 4)):
        for at in (0, -1):
            whole = numbers(shape)
            whole.view(-1)[at] = math.nan
            tensor = cut(whole, (2,), [ROWS])
            for name in ("sum", "max", "amin", "prod", "order 1", "order inf", "of largest", "rms"):
                assert math.isnan(READ[name](tensor)), f"{name}, {shape}, {at}"
            assert READ["nan"](tensor)
            assert not READ["all"](tensor)


@on_threads(2)
def test_results_stay_tensors_of_the_library_and_files_have_torchs():
    whole = numbers((4, 3))
    total = cut(whole, (2,), [ROWS]).sum()
    assert type(total) is ReplicatedDTensor
    assert type(cut(whole, (2,), [ROWS]).T) is ShardedDTensor
    assert total.__reduce_ex__(2)[1][0].__module__.startswith("torch")
    torch.testing.assert_close(total.to_local(), whole.sum())


MASKS = {
    "rows": lambda w, b: w.__setitem__(b > 0, 0.0),
    "no row": lambda w, b: w.__setitem__(b > 100, 0.0),
    "elements": lambda w, b: w.__setitem__(w > 0, 7.0),
    "plain rows": lambda w, b: w.__setitem__(torch.arange(len(w)) % 2 == 0, 1.0),
    "plain elements": lambda w, b: w.__setitem__(torch.arange(w.numel()).view(w.shape) % 3 == 0, 1.0),
    "masked_fill": lambda w, b: w.masked_fill_((b > 0).unsqueeze(1), -1.0),
    "masked_fill, plain": lambda w, b: w.masked_fill_(torch.arange(w.shape[1]) % 2 == 0, -1.0),
    "where": lambda w, b: w.copy_(torch.where(b.unsqueeze(1) > 0, w, 0.0)),
    "where, plain": lambda w, b: w.copy_(torch.where(torch.arange(w.shape[1]) > 0, w, w * 2)),
    "index_fill": lambda w, b: w.index_fill_(0, torch.tensor([0, 2]), 3.0),
    "index_add": lambda w, b: w.index_add_(0, torch.tensor([1, 1]), torch.ones(2, w.shape[1], dtype=w.dtype)),
    "index_copy": lambda w, b: w.index_copy_(1, torch.tensor([1]), torch.ones(len(w), 1, dtype=w.dtype)),
    "indices": lambda w, b: w.__setitem__(torch.tensor([0, 2]), 5.0),
    "two indices": lambda w, b: w.__setitem__((torch.tensor([0, 2]), torch.tensor([1, 0])), 5.0),
    "rows of values": lambda w, b: w.__setitem__(b > 0, w[b > 0] * 2),
    "added": lambda w, b: w.index_put_((torch.tensor([0, 0]),), torch.ones(2, 1, dtype=w.dtype), accumulate=True),
    "scatter": lambda w, b: w.scatter_(0, torch.zeros(1, w.shape[1], dtype=torch.long), 4.0),
    "largest": lambda w, b: w.scatter_(1, w.argmax(1, keepdim=True), 0.0),
    "one row": lambda w, b: w.__setitem__(2, 7.0),
    "one element": lambda w, b: w.__setitem__((2, 1), 7.0),
    "plain row": lambda w, b: w.__setitem__(1, torch.arange(float(w.shape[1]))),
    "plain column": lambda w, b: w[:, 1].copy_(torch.arange(float(len(w)))),
    "plain rows of two": lambda w, b: w[1:3].copy_(torch.arange(2.0 * w.shape[1]).view(2, -1)),
    "row of a row": lambda w, b: w[0].copy_(w[2]),
    "plain": lambda w, b: w.copy_(torch.arange(float(w.numel())).view(w.shape)),
    "plain, broadcast": lambda w, b: w.copy_(torch.arange(float(w.shape[1]))),
    "flat": lambda w, b: w.view(-1)[1:4].zero_(),
    "diagonal": lambda w, b: w.fill_diagonal_(2.0),
    "triangle": lambda w, b: w.tril_(),
    "out": lambda w, b: torch.mul(w, 2, out=w),
    "identity": lambda w, b: torch.eye(*w.shape, out=w),
}


@on_threads(4)
def test_rows_are_rows_and_writes_through_masks_indices_and_views_reach_all_ranks():
    for layout, whole, tensor in layouts("even rows", "uneven rows", "columns", "replicas", "rows and columns"):
        sizes, placements = LAYOUTS[layout][1:]
        for name, write in MASKS.items():
            expected, bias = whole.clone(), numbers(len(whole), 1)
            found = tensor.clone()
            places = [each if each == ROWS else Replicate() for each in placements]
            write(expected, bias)
            write(found, cut(bias, sizes, places))
            assert torch.equal(found.full_tensor(), expected), f"{name}, {layout}"
            assert type(found) is ShardedDTensor


OF_RUNS = (
    "rows", "no row", "elements", "plain rows", "plain elements", "masked_fill", "masked_fill, plain", "where, plain",
    "index_fill", "index_add", "index_copy", "indices", "two indices", "rows of values", "added", "scatter", "largest",
    "plain",
)  # fmt: skip


@on_threads(2)
def test_a_ragged_tensor_is_written_through_masks_and_indices():
    for runs in (uneven((5, 3), 2), Runs((5, 3), 2, 0, (6, 15), by_rows=True)):
        for name in OF_RUNS:
            whole, bias = numbers((5, 3)), numbers(5, 1)
            found = ragged(whole.clone(), runs, line(2))
            MASKS[name](found, ragged(bias, uneven((5,), 2), line(2)))
            MASKS[name](whole, bias)
            assert torch.equal(found.full_tensor(), whole), name
            assert type(found) is RaggedDTensor, name


FILLED = {
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "truncated": nn.init.trunc_normal_,
    "xavier": nn.init.xavier_normal_,
    "kaiming": nn.init.kaiming_uniform_,
    "orthogonal": nn.init.orthogonal_,
    "identity": nn.init.eye_,
    "sparse": lambda t: nn.init.sparse_(t, 0.3),
    "constant": lambda t: nn.init.constant_(t, 2.0),
    "bernoulli": lambda t: t.bernoulli_(0.4),
    "probabilities": lambda t: t.copy_(torch.bernoulli(t.sigmoid())),
    "exponential": lambda t: t.exponential_(),
    "log-normal": lambda t: t.log_normal_(),
    "whole numbers": lambda t: t.random_(0, 10),
    "noise": lambda t: t.add_(torch.randn_like(t)).mul_(torch.rand_like(t)),
    "drop-out": lambda t: t.copy_(F.dropout(t, 0.5)),
    "out": lambda t: torch.randn(t.shape, out=t),
}


@on_processes(4)
def test_with_one_seed_on_all_ranks_the_numbers_are_those_of_one_process():
    for layout, whole, tensor in layouts(
        "uneven rows", "ranks without rows", "columns", "replicas", "rows and columns"
    ):
        for name, fill in FILLED.items():
            states = []
            for each in (whole, tensor):
                torch.manual_seed(3)
                with torch.no_grad():
                    fill(each)
                states.append(torch.get_rng_state())
            torch.testing.assert_close(tensor.full_tensor(), whole, msg=f"{name}, {layout}")
            assert torch.equal(*states), f"{name}, {layout}"
    (_, whole, tensor), *_ = layouts("replicas")
    torch.manual_seed(dist.get_rank())
    tensor.normal_()
    replicas = [torch.empty_like(tensor.full_tensor()) for _ in range(4)]
    dist.all_gather(replicas, tensor.full_tensor())
    assert all(torch.equal(replicas[0], each) for each in replicas)


@on_processes(2)
def test_a_convolution_is_initialised_as_in_one_process():
    for fill in (nn.init.dirac_, nn.init.orthogonal_, nn.init.kaiming_normal_):
        for placement in (ROWS, COLUMNS):
            whole = torch.zeros(3, 5, 2, 2)
            tensor = cut(whole, (2,), [placement])
            for each in (whole, tensor):
                torch.manual_seed(3)
                fill(each)
            torch.testing.assert_close(tensor.full_tensor(), whole, msg=f"{fill}, {placement}")


@on_processes(2)
def test_a_penalty_over_shards_is_added_to_a_plain_loss():
    whole, x = numbers((5, 3)), numbers((4, 3), 1 + dist.get_rank())
    parameter, plain = nn.Parameter(cut(whole, (2,), [ROWS])), nn.Parameter(whole.clone())
    weight = nn.Parameter(numbers((3,), 2))
    other = nn.Parameter(numbers((3,), 2))
    for penalised, local in ((parameter, weight), (plain, other)):
        loss = (x @ local).square().mean() + 1e-3 * sum(each.square().sum() for each in [penalised, penalised.abs()])
        assert type(loss) is torch.Tensor
        loss.backward()
    torch.testing.assert_close(weight.grad, other.grad)
    torch.testing.assert_close(parameter.grad.full_tensor(), plain.grad)
    scaled = nn.Parameter(cut(whole, (2,), [ROWS]))  # a factor of each rank's own loss: gradients are means over ranks
    (weight.sum() * (1 + dist.get_rank()) * scaled.norm()).backward()
    (expected,) = torch.autograd.grad(1.5 * other.sum() * plain.norm(), plain)
    torch.testing.assert_close(scaled.grad.full_tensor(), expected)
    with pytest.raises(RuntimeError, match="mixed"):  # tokens of this rank, looked up in a weight that is trained
        F.embedding(torch.tensor([0, 1]), parameter)
