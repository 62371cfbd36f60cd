"""The norm is that of all gradients, wherever their pieces lie, and they are scaled as on one rank."""

import itertools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from sherd import Flat, fully_shard
from sherd.clip import clip_grad_norm_
from sherd.errors import GradientError, MeshError, PolicyError
from sherd.grad_scaler import ShardedGradScaler
from tests.optim.twins import NAMES, Pair, backward
from tests.support.comparing import assert_same, whole, whole_grads
from tests.support.meshes import mesh_of
from tests.support.models import Wired
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import PLACEMENTS, sharded
from tests.tensor.cuts import cuts, line, numbers, ragged

ORDERS = [2.0, 1.0, 0.5, math.inf]
SHAPES = {"a": (7, 6), "b": (3, 4, 5), "c": (5,), "d": (1,), "e": (), "f": (2, 9), "g": (9,)}


# Whole models


def second_dim(parameter):
    """Shard(1) where there is such a dim that divides by two."""
    return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % 2 == 0 else None


def clip_a_model(front, replicas, orders, names, max_norm=0.5):
    """The norms on this rank, after a comparison of the gradients with those of an unsharded twin."""
    mesh = mesh_of((replicas, dist.get_world_size() // replicas) if replicas else None)
    columns = {"shard_placement_fn": second_dim} if front == "columns" else {}
    lone, model = Pair(), sharded(Pair(), "shard" if columns else front, mesh=mesh, **columns)
    norms = []
    for order in orders:
        for each in (model, lone):
            each.zero_grad()
            backward(each, 0, names)
        expected = nn.utils.clip_grad_norm_(lone.parameters(), max_norm, order)
        norm = clip_grad_norm_(model.parameters(), max_norm, order)
        assert type(norm) is torch.Tensor
        assert (norm.shape, norm.dtype) == ((), torch.float32)
        assert_close_at(order, norm, expected)
        assert_same(whole_grads(model), whole_grads(lone), f"order {order}:", rtol=1e-5, atol=1e-6)
        norms.append(norm.item())
    return tuple(norms)


def assert_close_at(case, found, expected, **tolerance):
    torch.testing.assert_close(found, expected, **tolerance, msg=lambda text: f"{case}: {text}")


@pytest.mark.parametrize("front", [*PLACEMENTS, "columns"])
def test_a_models_norm_and_gradients_are_those_of_the_unsharded_model(threads, front):
    # On eight, most ranks hold nothing of the small parameters.
    for num_ranks, replicas in ((1, 0), (2, 0), (4, 2), (8, 0)) if front != "columns" else ((1, 0), (2, 0), (4, 2)):
        assert len(set(threads(num_ranks).run(clip_a_model, front, replicas, ORDERS, NAMES))) == 1
    # Gradients below the norm are left as they are, and parameters without one do not count.
    threads(2).run(clip_a_model, front, 0, [2.0], NAMES, max_norm=1e6)
    threads(2 if front == "columns" else 3).run(clip_a_model, front, 0, [2.0], NAMES[2:5])
    threads(2).run(clip_a_model, front, 0, [math.inf], [])


def test_processes_agree_bit_by_bit(world):
    assert len(set(world(2).run(clip_a_model, "flat", 0, (2.0, math.inf), NAMES))) == 1


@on_threads(4)
def test_two_meshes_frozen_and_plain_parameters_are_clipped_together():
    """One is sharded over all ranks, one over pairs of them; a frozen and a plain part are clipped with them."""
    mine, lone = [Pair() for _ in range(3)], [Pair() for _ in range(3)]
    fully_shard(mine[0], placement=Flat())
    fully_shard(mine[1], mesh=mesh_of((2, 2)))
    for models in (mine, lone):
        models[2].first.w.requires_grad_(False)
    given = [[each for model in models for each in model.parameters()] for models in (mine, lone)]
    for order in ORDERS:
        for step, model in itertools.chain(enumerate(mine), enumerate(lone)):
            model.zero_grad()
            backward(model, step)
        expected = nn.utils.clip_grad_norm_(given[1], 2.0, order)
        assert_close_at(order, clip_grad_norm_(given[0], 2.0, order), expected)
        for model, like in zip(mine, lone, strict=True):
            assert_same(whole_grads(model), whole_grads(like), f"order {order}:", rtol=1e-5, atol=1e-6)


# Any DTensors


def placed(both):
    """Gradients on a (2, 2) mesh, on its axes, and on no mesh: the way each of `SHAPES` lies."""
    columns, rows = (both[name] for name in both.mesh_dim_names)
    return {
        "a": (both, [Shard(0), Shard(1)]),
        "b": (both, [Replicate(), Shard(2)]),
        "c": (columns, [Shard(0)]),
        "d": (rows, [Shard(0)]),
        "e": (both, [Replicate(), Replicate()]),
        "f": (both, [Shard(0), Shard(0)]),
        "g": None,
    }


def parameter_with(grad, lies):
    if lies is None:
        parameter = nn.Parameter(torch.zeros_like(grad))
        parameter.grad = grad.clone()
        return parameter
    mesh, placements = lies
    shard = distribute_tensor(grad, mesh, placements)
    parameter = nn.Parameter(torch.zeros_like(shard))
    parameter.grad = shard.clone()
    return parameter


def plain_with(grads):
    return [parameter_with(each, None) for each in grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@on_threads(4)
def test_any_mixture_keeps_its_dtype_and_the_norm_of_halves_is_in_float32(dtype):
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for case in itertools.product([*ORDERS, 3] if dtype is torch.float32 else [2.0], (True, False)):
        clip_a_mixture(meshes, dtype, *case)


def clip_a_mixture(meshes, dtype, order, foreach):
    grads = {name: numbers(shape, dtype) for name, shape in SHAPES.items()}
    mine = [parameter_with(grads[name], lies) for name, lies in placed(meshes).items()]
    for shape, cut in zip(SHAPES.values(), cuts("uneven", tuple(SHAPES.values()), 4), strict=True):
        parameter = nn.Parameter(ragged(torch.zeros(shape, dtype=dtype), cut, line(4)))
        parameter.grad = ragged(numbers(shape, dtype, seed=1), cut, line(4))
        mine.append(parameter)
    plain = plain_with([*grads.values(), *(numbers(shape, dtype, seed=1) for shape in SHAPES.values())])
    in_float = plain_with([each.grad.to(torch.promote_types(dtype, torch.float32)) for each in plain])
    expected = nn.utils.clip_grad_norm_(in_float, 1.5, order)
    norm = clip_grad_norm_(mine, 1.5, order, foreach=foreach)
    case = f"order {order}, foreach {foreach}"
    assert_close_at(case, norm, expected)
    for each, like in zip(mine, in_float, strict=True):
        assert each.grad.dtype is dtype
        assert_close_at(case, whole(each.grad), like.grad.to(dtype))


@on_threads(2)
def test_the_norm_of_halves_is_exact():
    """Which a sum in halves could not hold."""
    mesh = line(dist.get_world_size())
    for dtype in (torch.bfloat16, torch.float16):
        given = [parameter_with(torch.full((64, 64), 2.0**-5, dtype=dtype), (mesh, [Shard(0)])) for _ in range(16)]
        assert clip_grad_norm_(given, 1.0) == 8.0, dtype


def squares(tensors):
    """A loss in which each parameter's gradient lies as the parameter does."""
    parameters = nn.ParameterList(nn.Parameter(each) for each in tensors)
    return Wired(lambda self: sum(each.square().sum() for each in self.all), all=parameters)


@on_threads(4)
def test_a_tensor_parallel_model_that_is_sharded_too():
    """Two matrices in columns and in rows over tp, a bias replicated there, and all of it sharded over dp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = [numbers((6, 4)), numbers((4, 6), seed=1), numbers((6,), seed=2)]
    for dim, order in itertools.product((0, 1), ORDERS):
        ways = zip(values, (Shard(0), Shard(1), Replicate()), strict=True)
        model = squares(distribute_tensor(each, mesh["tp"], [way]) for each, way in ways)
        lone = squares(each.clone() for each in values)
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda parameter, dim=dim: Shard(dim % parameter.ndim))
        for each in (model, lone):
            each().backward()
        case = f"dim {dim}, order {order}"
        expected = nn.utils.clip_grad_norm_(lone.parameters(), 0.5, order)
        assert_close_at(case, clip_grad_norm_(model.parameters(), 0.5, order), expected)
        for each, like in zip(model.all, lone.all, strict=True):
            assert_close_at(case, whole(each.grad), like.grad)


@on_threads(2)
def test_order_0_counts_elements_that_are_not_zero():
    mesh = line(dist.get_world_size())
    grads = [torch.tensor([0.0, 1.0, 2.0, 0.0, 3.0]), torch.zeros(4), torch.ones(3, 2)]
    given = [parameter_with(grads[0], (mesh, [Shard(0)])), parameter_with(grads[1], (mesh, [Shard(0)]))]
    norm = clip_grad_norm_([*given, parameter_with(grads[2], None)], 3.0, 0)
    assert norm == torch.linalg.vector_norm(torch.cat([each.flatten() for each in grads]), 0)
    torch.testing.assert_close(whole(given[0].grad), grads[0] / 3)


@on_threads(3)
def test_the_largest_magnitude_is_known_where_torch_refuses_an_empty_shard():
    given = [parameter_with(torch.tensor([3.0, -4.0]), (line(3), [Shard(0)]))]
    if dist.get_rank() == 2:
        with pytest.raises(RuntimeError, match=r"vector_norm"):
            torch.linalg.vector_norm(given[0].grad.to_local(), math.inf)
    assert clip_grad_norm_(given, 8.0, math.inf).item() == 4.0


# Who takes part


DROPS = {"on all but one": lambda index, rank: rank != 1, "on one": lambda index, rank: rank == index}


@pytest.mark.parametrize("name", DROPS)
@on_threads(4)
def test_gradients_that_some_ranks_lack_count_as_zeros(name):
    drop, mesh = DROPS[name], line(4)
    given = [parameter_with(numbers((4, 3), seed=index), (mesh, [Shard(0)])) for index in range(3)]
    given.append(parameter_with(torch.ones(2), None))
    rows = torch.stack([numbers((4, 3), seed=index) for index in range(3)])
    for index, rank in itertools.product(range(3), range(4)):
        if drop(index, rank):
            rows[index, rank] = 0
            if rank == dist.get_rank():
                given[index].grad = None
    for order in (1.0, 2.0, math.inf):
        expected = torch.linalg.vector_norm(torch.cat([rows.flatten(), torch.ones(2)]), order)
        assert_close_at(order, clip_grad_norm_(given, 1e9, order), expected)


@on_threads(2)
def test_without_any_gradient_the_norm_is_zero():
    mesh = line(dist.get_world_size())
    given = [nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)])), nn.Parameter(torch.zeros(3))]
    for order in (0, 2, math.inf):
        assert clip_grad_norm_(given, 1.0, order) == clip_grad_norm_([], 1, order) == 0


def all_reduces(on_each_axis):
    """The axes of the all-reduces of one call, in order."""
    mesh = mesh_of((2, 2))
    axes = {mesh.get_group(axis): axis for axis in (0, 1)}
    ways = placed(mesh).values() if on_each_axis else [(mesh, [Replicate(), Shard(0)]), None]
    given = [parameter_with(torch.ones(4, 4, 4), lies) for lies in ways for _ in range(3)]
    if dist.get_rank() == 3:
        for each in given:
            each.grad = None
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
        for order in (2.0, math.inf):
            clip_grad_norm_(given, 1.0, order)
    return [axes[call.kwargs["group"]] for call in called.call_args_list]


def test_each_process_group_has_one_all_reduce_on_all_ranks(world):
    assert world(4).run(all_reduces, True) == [[0, 1] * 2] * 4
    assert world(4).run(all_reduces, False) == [[1] * 2] * 4


@on_threads(3)
def test_extra_groups_join_the_norms_of_stages():
    """Each rank has a stage of its own, with another number of parameters."""
    rank = dist.get_rank()
    given = plain_with([torch.full((2,), 1.0 + rank)] * (rank + 1))
    # Rank 0 has two ones, rank 1 four twos, rank 2 six threes.
    for order, expected in ((1.0, 28.0), (2.0, math.sqrt(2 + 16 + 54)), (math.inf, 3.0)):
        norm = clip_grad_norm_(given, 1e9, order, extra_groups=[dist.group.WORLD]).item()
        assert norm == pytest.approx(expected), order
    norm = clip_grad_norm_([] if rank else given, 1e9, extra_groups=[dist.group.WORLD]).item()
    assert norm == pytest.approx(math.sqrt(2))


# What is given, and what is refused


def test_plain_tensors_without_any_process_group_are_clipped_as_by_torch():
    for order, foreach in itertools.product((*ORDERS, 3, "inf"), (True, False, None)):
        given, like = (plain_with([numbers(shape) for shape in SHAPES.values()]) for _ in range(2))
        expected = nn.utils.clip_grad_norm_(like, 0.5, order, False, foreach)
        assert_close_at((order, foreach), clip_grad_norm_(given, 0.5, order, False, foreach), expected)
        for each, other in zip(given, like, strict=True):
            assert_close_at((order, foreach), each.grad, other.grad)


def test_one_tensor_a_generator_and_one_given_twice_outside_autograd():
    first, second, third = (plain_with([torch.tensor([3.0, 4.0])])[0] for _ in range(3))
    norms = [clip_grad_norm_(each, 1.0) for each in (first, (each for each in [second]), [third, third])]
    for each, norm in zip((first, second, third), norms, strict=True):
        assert norm == 5
        assert not norm.requires_grad
        torch.testing.assert_close(each.grad, torch.tensor([0.6, 0.8]))
        assert each.grad.grad_fn is None


def test_a_generator_that_was_used_up_is_told_of():
    with pytest.warns(UserWarning, match="generator without parameters") as told:
        assert clip_grad_norm_((each for each in []), 1.0) == 0
    assert told[0].filename == __file__


def test_a_sparse_gradient_counts_an_index_that_is_there_twice_once():
    parameter = nn.Parameter(torch.zeros(4))
    with torch.sparse.check_sparse_tensor_invariants(True):
        parameter.grad = torch.sparse_coo_tensor([[0, 0, 2]], torch.tensor([1.0, 2.0, 4.0]), (4,))
        assert clip_grad_norm_(parameter, 1.0) == 5
    torch.testing.assert_close(parameter.grad.to_dense(), torch.tensor([0.6, 0.0, 0.8, 0.0]))


def clip_bad_numbers(bad, order):
    """One element of rank 1's shard is `bad`."""
    grad = torch.arange(8.0)
    grad[-1] = bad
    given = [parameter_with(grad, (line(dist.get_world_size()), [Shard(0)])), parameter_with(torch.ones(3), None)]
    with pytest.raises(GradientError, match=f"norm of order {float(order)} of all gradients is .*overflows") as told:
        clip_grad_norm_(given, 1.0, order, error_if_nonfinite=True)
    assert isinstance(told.value, RuntimeError)
    assert torch.equal(whole(given[0].grad)[:-1], grad[:-1])
    like = plain_with([grad, torch.ones(3)])
    expected = nn.utils.clip_grad_norm_(like, 1.0, order)
    torch.testing.assert_close(clip_grad_norm_(given, 1.0, order), expected, equal_nan=True)
    for each, other in zip(given, like, strict=True):
        torch.testing.assert_close(whole(each.grad), other.grad, equal_nan=True)


def test_what_is_not_finite_on_one_rank_is_seen_by_all(threads, world):
    for bad, order in itertools.product((math.inf, -math.inf, math.nan), (1.0, 2.0, math.inf)):
        for ranks in (threads(2), world(2)):
            ranks.run(clip_bad_numbers, bad, order)


def test_an_order_that_is_no_norms_is_refused():
    for order in (-1, -math.inf, math.nan):
        with pytest.raises(PolicyError, match=f"norm_type={order}.*expected a number of 0 or more, or inf"):
            clip_grad_norm_(plain_with([torch.ones(2)]), 1.0, order)


@on_threads(2)
def test_a_partial_gradient_is_refused_until_it_is_reduced():
    mesh = line(dist.get_world_size())
    parameter = nn.Parameter(distribute_tensor(torch.zeros(2, 3), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(2, 3), mesh, [Partial()], run_check=False)
    with pytest.raises(GradientError, match=r"parameter 1, of shape \(2, 3\): .*Partial.* reduce it before clipping"):
        clip_grad_norm_([*plain_with([torch.ones(2)]), parameter], 1.0)
    same = nn.Parameter(parameter.grad)
    same.grad = parameter.grad
    with pytest.raises(GradientError, match="Partial"):
        clip_grad_norm_(same, 1.0)
    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    assert clip_grad_norm_(parameter, 1.0).item() == pytest.approx(2 * math.sqrt(6))


@on_threads(2)
def test_a_gradient_may_be_cut_where_its_parameter_is_not():
    mesh = line(dist.get_world_size())
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Replicate()]))
    parameter.grad = distribute_tensor(numbers((4, 3)), mesh, [Shard(0)])
    torch.testing.assert_close(clip_grad_norm_(parameter, 9.0), numbers((4, 3)).norm())


@on_threads(3)
def test_a_rank_outside_a_parameters_mesh_is_told_so():
    mesh = DeviceMesh("cpu", [0, 1])
    parameter = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
    if mesh.get_coordinate() is None:
        with pytest.raises(MeshError, match=r"parameter 0, of shape .*: rank 2 is not in its mesh .*extra_groups"):
            clip_grad_norm_(parameter, 1.0)
    else:
        parameter.grad = torch.ones_like(parameter)
        assert clip_grad_norm_(parameter, 1.0) == 2


@on_threads(2, front=["composed", "wrapper", "flat"])
def test_an_optimizer_from_before_sharding_clips_and_unscales_what_it_will_step(front):
    """Until its first step it holds the parameters from before, which get no gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    inputs = torch.full((2, 8), 1.0)
    model(inputs).sum().mul(4).backward()
    expected = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
    model.zero_grad()
    net = fully_shard(model) if front == "composed" else sharded(model, "wrapper", use_orig_params=front == "wrapper")
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(net(inputs).sum()).backward()
    if dist.get_rank() == 0:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert all(each.grad is None for each in held)
    norms = [clip_grad_norm_(optimizer.param_groups[0]["params"], 1e9)]
    scaler.unscale_(optimizer)
    norms.append(clip_grad_norm_(optimizer.param_groups[0]["params"], 1e9))
    torch.testing.assert_close(torch.stack(norms), torch.stack([expected, expected / 4]))
