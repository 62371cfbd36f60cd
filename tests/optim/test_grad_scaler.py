"""All ranks skip the step and lower the scale when one rank's shards hold what is not finite, and only then."""

import copy
import inspect
import itertools
import math
import pickle
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchsScaler
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sherd._torch import local_tensor
from sherd.clip import clip_grad_norm_
from sherd.errors import PolicyTypeError
from sherd.grad_scaler import ShardedGradScaler
from sherd.optim import flatten_optimizer
from tests.optim.twins import NAMES, Pair, groups
from tests.support.comparing import assert_same, whole_params
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import PLACEMENTS, sharded
from tests.tensor.cuts import line, ragged
from tests.tensor.cuts import uneven as uneven_cut

SCALE = {"init_scale": 8.0, "growth_interval": 2}
SCALERS = {"ours": ShardedGradScaler, "torch's": torch.amp.GradScaler}
BAD_STEPS = {1: math.inf, 2: math.nan, 5: -math.inf}
SCALES = [8.0, 4.0, 2.0, 2.0, 4.0, 2.0, 2.0, 4.0]
"""After each step."""


def adamw(model, fused=False):
    return optim.AdamW(groups(model), lr=0.1, fused=fused, foreach=not fused)


# Training


def spoil(model, step):
    """In some steps, one element of one gradient is not finite: of a sharded model, on the rank that holds it only."""
    if step in BAD_STEPS:
        grad = model.first.w.grad
        if not isinstance(grad, DTensor):
            grad.view(-1)[-1] = BAD_STEPS[step]
        elif holds_the_end(grad):
            grad.to_local().view(-1)[-1] = BAD_STEPS[step]


def holds_the_end(tensor):
    """Whether this rank is the last one that holds some of it; of replicas, the last one."""
    numels = [None] * dist.get_world_size()
    dist.all_gather_object(numels, tensor.to_local().numel())
    return dist.get_rank() == max(rank for rank, numel in enumerate(numels) if numel)


def train(model, optimizer, scaler, unscale, num_steps=8):
    """The scale after each step."""
    scales = []
    for step in range(num_steps):
        scaler.scale(model(step, NAMES)).backward()
        spoil(model, step)
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def train_alike(placement, scaler, kind, unscale):
    model, lone = sharded(Pair(), placement), Pair()
    optimizer = adamw(model, "fused" in kind)
    if "flat" in kind:
        flatten_optimizer(optimizer)
    assert train(model, optimizer, SCALERS[scaler]("cpu", **SCALE), unscale) == SCALES
    assert train(lone, adamw(lone), torch.amp.GradScaler("cpu", **SCALE), unscale) == SCALES
    assert_same(whole_params(model), whole_params(lone), rtol=1e-4, atol=1e-5)


KINDS = ["foreach", "fused", "flat", "flat fused"]


# Each pair of a placement, a kind, a scaler, and whether the gradients are unscaled by hand.
@pytest.mark.values
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_training_with_bad_steps_is_that_of_one_process(threads, placement, kind):
    row, column = list(PLACEMENTS).index(placement), KINDS.index(kind)
    scaler, unscale = list(SCALERS)[(row + column) % 2], (row // 2 + column) % 2 == 0
    threads(3).run(train_alike, placement, scaler, kind, unscale)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_processes_agree_too(world, placement):
    for num_ranks, scaler in ((1, "ours"), (2, "ours"), (2, "torch's")):
        world(num_ranks).run(train_alike, placement, scaler, "foreach", False)


@on_threads(4)
def test_replicas_of_shards_step_together():
    """The last rank alone sees what is bad, so it must travel along both axes."""
    mesh = mesh_of((2, 2))
    model = sharded(Pair(), "flat", mesh=mesh)
    scaler = ShardedGradScaler("cpu", process_group=mesh.get_group("shard"), **SCALE)
    assert train(model, adamw(model), scaler, True) == SCALES


# One step


def parameter_with(value, grad):
    parameter = nn.Parameter(value)
    parameter.grad = grad
    return parameter


def plain(value, dtype=torch.float32):
    return parameter_with(torch.zeros(3, dtype=dtype), torch.full((3,), value, dtype=dtype))


def even(value, mesh):
    zeros = distribute_tensor(torch.zeros(5), mesh, [Shard(0)])
    return parameter_with(zeros, torch.full_like(zeros, value))


def uneven(value, mesh):
    cut = uneven_cut((5,), mesh.size())
    return parameter_with(ragged(torch.zeros(5), cut, mesh), ragged(torch.full((5,), value), cut, mesh))


def one_step(parameters, scaler, fused=False, unscale=False):
    """What the first held element of each parameter is after a step of size 1 against its gradient, and the scale."""
    scaler.scale(torch.zeros(()))
    optimizer = optim.SGD(parameters, lr=1.0, fused=fused)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    held = [each.to_local() if isinstance(each, DTensor) else each for each in parameters]
    return [each.view(-1)[0].item() for each in held if each.numel()], scaler.get_scale()


@on_threads(3)
def test_plain_even_and_ragged_gradients_of_two_dtypes_in_one_optimizer():
    mesh = line(dist.get_world_size())
    for bad, unscale in itertools.product((None, 0, 1, 2, 3), (True, False)):
        parameters = [plain(16.0), even(16.0, mesh), uneven(16.0, mesh), plain(16.0, torch.float64)]
        if bad is not None and dist.get_rank() == 1:
            grad = parameters[bad].grad
            (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = math.inf
        values, scale = one_step(parameters, ShardedGradScaler("cpu", **SCALE), unscale=unscale)
        assert (set(values), scale) == (({-2.0}, 8.0) if bad is None else ({0.0}, 4.0)), (bad, unscale)


@on_threads(3)
def test_ranks_without_gradients_agree_with_the_others():
    mesh, rank = line(dist.get_world_size()), dist.get_rank()
    for fused, bad in itertools.product((False, True), (False, True)):
        # torch's fused SGD takes no DTensors of torch.
        parameters = [(uneven if fused else even)(math.inf if bad else 16.0, mesh), plain(16.0)]
        if rank != 1:
            for each in parameters:
                each.grad = None
        values, scale = one_step(parameters, ShardedGradScaler("cpu", **SCALE), fused)
        assert set(values) == ({0.0} if bad or rank != 1 else {-2.0}), (fused, bad)
        assert scale == (4.0 if bad else 8.0), (fused, bad)


def step_with_groups(narrow):
    """The groups of the all-reduces of one step, and the scale."""
    rank = dist.get_rank()
    alone = [dist.new_group([each]) for each in range(4)][rank]
    mesh = mesh_of((2, 2))
    grad = torch.full((2,), math.inf if rank == 3 else 16.0)
    shards = DTensor.from_local(torch.zeros(2), mesh, [Shard(0), Shard(0)], run_check=False)
    parameter = parameter_with(shards, DTensor.from_local(grad, mesh, [Shard(0), Shard(0)], run_check=False))
    scaler = ShardedGradScaler("cpu", process_group=alone if narrow else None, **SCALE)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
        _, scale = one_step([parameter], scaler)
    names = {None: "all", alone: "alone", mesh.get_group(0): "axis 0", mesh.get_group(1): "axis 1"}
    return [names[call.kwargs["group"]] for call in called.call_args_list], scale


def test_the_axes_of_a_mesh_agree_when_the_process_group_leaves_ranks_out(world):
    assert world(4).run(step_with_groups, False) == [(["all"], 4.0)] * 4
    assert world(4).run(step_with_groups, True) == [(["alone", "axis 0", "axis 1"], 4.0)] * 4


@on_threads(2)
def test_gradients_are_clipped_between_unscaling_and_the_step():
    parameters = [even(24.0, line(2)), plain(32.0)]
    scaler = ShardedGradScaler("cpu", **SCALE)
    scaler.scale(torch.zeros(()))
    optimizer = optim.SGD(parameters, lr=1.0)
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(parameters, 1.0).item()
    scaler.step(optimizer)
    assert norm == pytest.approx(math.sqrt(5 * 3**2 + 3 * 4**2))
    assert parameters[1][0].item() == pytest.approx(-4 / norm)


# As torch's


def test_it_is_called_as_torchs_sharded_scaler_is():
    mine, theirs = (inspect.signature(each).parameters for each in (ShardedGradScaler, TorchsScaler))
    assert list(mine) == list(theirs)
    assert [each.default for each in mine.values()] == [each.default for each in theirs.values()]
    scaler = ShardedGradScaler("cpu", 4.0, 0.25, 3.0, 7)
    assert (scaler.get_backoff_factor(), scaler.get_growth_factor(), scaler.get_growth_interval()) == (0.25, 3.0, 7)


def test_torch_asks_for_the_flags_in_one_place():
    """`_unscale_grads_` is not public: `unscale_` and the step of a fused optimizer must still go through it."""
    asked = []

    class Asked(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            asked.append(inv_scale.item())
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    for fused in (False, True):
        one_step([plain(16.0)], Asked("cpu", **SCALE), fused)
    assert asked == [0.125, 1.0]


def unscaled_embedding(scaler, dtype, bad):
    """The sparse gradient of an embedding, whole, and whether something was not finite."""
    table = nn.Embedding(4, 2, sparse=True, dtype=dtype)
    with torch.sparse.check_sparse_tensor_invariants(True):
        scaler.scale(table(torch.tensor([0, 2, 2])).sum()).backward()
        if bad:
            table.weight.grad._values()[-1] = math.inf
        optimizer = optim.SGD(table.parameters(), lr=1.0)
        scaler.unscale_(optimizer)
    return table.weight.grad.to_dense(), [bool(each) for each in scaler._found_inf_per_device(optimizer).values()]


def test_sparse_gradients_are_unscaled_as_by_torch():
    for dtype, bad in itertools.product((torch.float32, torch.float16), (False, True)):
        grad, found = unscaled_embedding(ShardedGradScaler("cpu", init_scale=8.0), dtype, bad)
        expected, found_by_torch = unscaled_embedding(local_copy_of_torchs(), dtype, bad)
        assert found == found_by_torch == [bad], (dtype, bad)
        assert torch.equal(grad, expected), (dtype, bad)


def local_copy_of_torchs():
    """torch's sharded scaler in one process without a process group."""

    class Lone(TorchsScaler):
        def unscale_(self, optimizer):
            with mock.patch.object(dist, "all_reduce"):
                super().unscale_(optimizer)

    return Lone("cpu", init_scale=8.0)


def test_outputs_keep_their_dtype_and_structure_and_half_gradients_are_unscaled():
    parameter = plain(16.0, torch.float16)
    assert one_step([parameter], ShardedGradScaler("cpu", **SCALE)) == ([-2.0], 8.0)
    assert parameter.grad.dtype is torch.float16
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    half, single = torch.tensor(2.0, dtype=torch.float16), torch.ones(2)
    scaled = scaler.scale([half, (single, [half])])
    assert scaled[0].dtype is torch.float16
    assert scaled[0] == 8
    assert isinstance(scaled[1], tuple)
    assert torch.equal(scaled[1][0], single * 4)
    assert [each.item() for each in scaler.scale(each for each in [half, half])] == [8, 8]
    with pytest.raises(PolicyTypeError, match="tensor or an iterable of tensors, got a int"):
        scaler.scale(3)


def test_disabled_it_does_nothing_and_unscaling_twice_is_refused_as_by_torch():
    disabled, loss = ShardedGradScaler("cpu", enabled=False), torch.ones(())
    assert disabled.scale(loss) is loss
    assert one_step([plain(16.0)], disabled, unscale=True) == ([-16.0], 1.0)
    assert disabled.state_dict() == {}
    scaler, optimizer = ShardedGradScaler("cpu"), optim.SGD([plain(1.0)], lr=1.0)
    scaler.scale(loss)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


def test_its_state_is_saved_loaded_copied_and_pickled():
    scaler = ShardedGradScaler("cpu", **SCALE)
    one_step([plain(math.inf)], scaler)
    like = torch.amp.GradScaler("cpu", **SCALE)
    one_step([plain(math.inf)], like)
    assert scaler.state_dict() == like.state_dict()
    other = ShardedGradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    for each in (other, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert each.state_dict() == scaler.state_dict()
        assert one_step([plain(math.inf)], each) == ([0.0], 2.0)


@on_threads(2)
def test_a_gradient_that_was_unscaled_is_freed_when_it_is_dropped():
    parameter = even(16.0, line(2))
    one_step([parameter], ShardedGradScaler("cpu", **SCALE))
    local = weakref.ref(local_tensor(parameter.grad))
    parameter.grad = None
    assert local() is None
