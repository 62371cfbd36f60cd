"""Communication hooks reduce what the default would and see what they should, and a grad scaler goes with fp16."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torchs
from torch.func import functional_call

from sherd import FullyShardedDataParallel, MixedPrecision, ShardedGradScaler, ShardingStrategy, comm_hooks
from sherd._torch import local_tensor
from sherd.comm.groups import one_rank_group
from sherd.errors import PolicyError, PolicyTypeError, StateError
from tests.support.comparing import assert_same, whole_params
from tests.support.meshes import mesh_of
from tests.support.models import Wired, noise
from tests.support.ranks.bodies import on_threads
from tests.support.training import made
from tests.wrapper.training import BOTH_KINDS, FULL_SHARD, NO_SHARD, SHARD_GRAD_OP

STRATEGIES = pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
BOTH_ENDS = pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])


class WithASpare(nn.Module):
    """Units of 25 and 15 elements, no multiples of the ranks; `spare` is used if its caller says so."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5, bias=False))
        self.out = nn.Linear(5, 2)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x, spare=True):
        return self.out(self.inner(x if not spare else x * self.spare))


def wrapped(model=None, **options):
    model = made(WithASpare) if model is None else model
    model.inner = FullyShardedDataParallel(model.inner, **options)
    return FullyShardedDataParallel(model, **options)


def batch():
    return noise(0, dist.get_rank(), 4, 3)


def backward(model, **kwargs):
    model(batch(), **kwargs).square().sum().backward()


def local_grads(model):
    return [None if each.grad is None else local_tensor(each.grad).clone() for each in model.parameters()]


def hook_for(hooks, strategy):
    return hooks.allreduce_hook if strategy is NO_SHARD else hooks.reduce_scatter_hook


# The ready-made hooks

HOOKS = {"ours": comm_hooks, "torch's": torchs}


@BOTH_KINDS
@STRATEGIES
@on_threads(2)
def test_the_default_hooks_reduce_as_the_default_does(strategy, orig):
    """Gradients of two backwards by the default reduction, by the plain hooks, and by those that compress."""
    options = {"sharding_strategy": strategy, "use_orig_params": orig}

    def run(state=None, hook=None):
        model = wrapped(**options)
        if hook is not None:
            model.register_comm_hook(state, hook)
        for spare in (True, dist.get_rank() == 1):  # a gradient that rank 0, which holds it, has not
            backward(model, spare=spare)
        return local_grads(model)

    group, default = dist.group.WORLD, run()
    for hooks in HOOKS.values():
        assert_same(run(hooks.DefaultState(group), hook_for(hooks, strategy)), default, rtol=1e-6, atol=1e-6)
    state = comm_hooks.LowPrecisionState(group)
    for hook, error in ((comm_hooks.fp16_compress_hook, 2e-3), (comm_hooks.bf16_compress_hook, 2e-2)):
        compressed = run(state, hook)
        assert_same(compressed, default, rtol=error, atol=error)
        assert all(each.dtype == torch.float32 for each in compressed)
        if sum(each.numel() for each in default):
            assert any(not torch.equal(one, other) for one, other in zip(compressed, default, strict=True))


def test_the_mean_is_divided_before_and_after_as_in_torch():
    for num_ranks in range(1, 130):
        expected = torchs.DefaultState._get_gradient_predivide_factor(num_ranks)
        assert comm_hooks._power_of_two_near_the_root(num_ranks) == expected


@on_threads(2)
def test_a_hooks_state_has_torchs_fields():
    ours, theirs = comm_hooks.DefaultState(dist.group.WORLD), torchs.DefaultState(dist.group.WORLD)
    for name in torchs.DefaultState.__slots__:
        assert getattr(ours, name) == getattr(theirs, name)
    assert comm_hooks.LowPrecisionState(dist.group.WORLD).parameter_type == torch.float32
    for kind in (comm_hooks.DefaultState, comm_hooks.LowPrecisionState):
        with pytest.raises(PolicyError, match="explicit ProcessGroup"):
            kind(None)


# What a hook sees


class Seen:
    """A hook that notes what it is called with, and reduces by the default ones."""

    def __init__(self):
        self.wholes, self.shards = [], []

    def __call__(self, state, grad, output=None):
        self.wholes.append(grad.clone())
        if output is None:
            comm_hooks.allreduce_hook(state, grad)
        else:
            self.shards.append(output.shape)
            comm_hooks.reduce_scatter_hook(state, grad, output)


def own_grads(units):
    """What this rank's batch gives, by plain training: one flat gradient for each list of parameters."""
    lone = made(WithASpare)
    lone(batch()).square().sum().backward()
    named = {name: each.grad.reshape(-1) for name, each in lone.named_parameters()}
    return [torch.cat([named[name] for name in unit]) for unit in units]


INNER = ("inner.0.weight", "inner.0.bias", "inner.1.weight")
ROOT = ("spare", "out.weight", "out.bias")


@BOTH_KINDS
@BOTH_ENDS
@on_threads(2)
def test_a_hook_sees_one_whole_gradient_a_unit_and_backward(strategy, orig):
    model, seen = wrapped(sharding_strategy=strategy, use_orig_params=orig), Seen()
    model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), seen)
    with model.no_sync():
        backward(model)
    assert seen.wholes == []
    backward(model)
    backward(model)
    assert len(seen.wholes) == 4, "once for each unit and backward that reduces"
    sizes = [each.numel() for each in seen.wholes]
    assert sizes == [2 * shape.numel() for shape in seen.shards] or strategy is NO_SHARD
    units = own_grads([INNER, ROOT])
    for turn, whole in enumerate(seen.wholes):
        assert whole.ndim == 1
        assert whole.dtype == torch.float32
        # `spare` is the root's, and the last to have its gradient. The first turn has an earlier backward's too.
        own = units[turn % 2] * (2 if turn < 2 else 1)
        assert whole.numel() > own.numel()  # there is padding, and it shows as zeros
        torch.testing.assert_close(whole[whole != 0].sort().values, own.sort().values)


def add_noise(state, grad, output=None):
    """The hook of the tutorials: reduce, then a noise that all ranks know."""
    Seen()(state["reduce"], grad, output)
    result = grad if output is None else output
    result.add_(state["noise"])


@BOTH_ENDS
@on_threads(2)
def test_what_a_hook_makes_of_a_gradient_arrives(strategy):
    model, default = (wrapped(sharding_strategy=strategy, use_orig_params=True) for _ in range(2))
    model.register_comm_hook({"reduce": comm_hooks.DefaultState(dist.group.WORLD), "noise": 0.5}, add_noise)
    for each in (model, default):
        backward(each, spare=False)
    for found, expected in zip(local_grads(model), local_grads(default), strict=True):
        if expected is None:
            assert found is None  # `spare`, of which no rank has a gradient: noise does not make one
        else:
            torch.testing.assert_close(found, expected + 0.5)


@on_threads(2)
def test_a_hook_that_writes_its_gradient_leaves_autograds_alone():
    """Of one parameter, whose gradient autograd hands on to the input as well."""
    net = Wired(lambda self, x: x + self.weight.view(8, 8), weight=nn.Parameter(torch.ones(64)))
    model = FullyShardedDataParallel(net, use_orig_params=True)
    model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), comm_hooks.reduce_scatter_hook)
    x, factors = torch.ones(8, 8, requires_grad=True), torch.arange(64.0)
    (model(x * 3) * factors.view(8, 8)).sum().backward()
    torch.testing.assert_close(x.grad, 3 * factors.view(8, 8))
    torch.testing.assert_close(model.module.weight.grad.full_tensor(), factors)


@BOTH_ENDS
@on_threads(2)
def test_a_hook_gets_the_reduce_dtype_and_nothing_of_frozen_parameters(strategy):
    model, seen = made(WithASpare), Seen()
    model.out.requires_grad_(False)
    precision = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float16)
    model = wrapped(model, sharding_strategy=strategy, use_orig_params=True, mixed_precision=precision)
    model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), seen)
    backward(model)
    assert {each.dtype for each in model.parameters() if each.grad is not None} == {torch.float32}
    assert model.module.out.weight.grad is None
    assert [each.dtype for each in seen.wholes] == [torch.float16] * 2
    assert sum(each.count_nonzero().item() for each in seen.wholes) <= 25 + 3


@on_threads(2, strategy=(FULL_SHARD, NO_SHARD))
def test_one_rank_has_hooks_too(strategy):
    model, seen = wrapped(sharding_strategy=strategy, process_group=one_rank_group()), Seen()
    model.register_comm_hook(comm_hooks.DefaultState(one_rank_group()), seen)
    backward(model)
    for found, expected in zip(local_grads(model), reversed(own_grads([INNER, ROOT])), strict=True):
        torch.testing.assert_close(found[found != 0].sort().values, expected.sort().values)
    assert (len(seen.wholes), len(seen.shards)) == (2, 2 if strategy is FULL_SHARD else 0)


# Mistakes


@on_threads(4)
def test_mistakes_are_named():
    state, hook = comm_hooks.DefaultState(dist.group.WORLD), comm_hooks.reduce_scatter_hook
    model = wrapped()
    model(batch())
    with pytest.raises(PolicyTypeError, match="must be callable but got 3"):
        model.register_comm_hook(state, 3)
    with pytest.raises(AssertionError, match="register_comm_hook") as raised:
        model.module.inner.register_comm_hook(state, hook)
    assert isinstance(raised.value, StateError)
    model.register_comm_hook(state, hook)
    with pytest.raises(AssertionError, match="already registered for unit"):
        model.register_comm_hook(state, hook)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(PolicyError, match=r"2 dtypes \(torch.float32, torch.float64\)"):
        FullyShardedDataParallel(mixed, use_orig_params=True).register_comm_hook(state, hook)

    hybrid = wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh_of((2, 2)))
    with pytest.raises(PolicyError, match="not supported for hybrid strategies"):
        hybrid.register_comm_hook(state, hook)


# A grad scaler around the wrapper

SCALE = {"init_scale": 64.0, "growth_interval": 2}
STEPS, BAD_STEP = 6, 2


def scaled_batch(step, rank):
    """In one step, one rank has inputs that overflow float16 on the way back."""
    return noise(step, rank, 4, 3) * (1e4 if (step, rank) == (BAD_STEP, 1) else 1)


def scales_of(loss_of, parameters, scaler):
    optimizer, seen = torch.optim.SGD(parameters, lr=0.05), []
    for step in range(STEPS):
        loss = loss_of(step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    return seen


def keeps_large_inputs():
    return nn.Sequential(OrderedDict(inner=nn.Linear(3, 5), relu=nn.ReLU(), out=nn.Linear(5, 2)))


@BOTH_KINDS
@on_threads(2)
def test_a_scaler_trains_a_half_precision_wrapper_as_one_process(orig):
    rank = dist.get_rank()
    precision = MixedPrecision(torch.float16, cast_forward_inputs=True)
    model = wrapped(made(keeps_large_inputs), use_orig_params=orig, mixed_precision=precision)
    scales = scales_of(
        lambda step: model(scaled_batch(step, rank)).float().square().mean(),
        model.parameters(),
        ShardedGradScaler("cpu", **SCALE),
    )
    lone = made(keeps_large_inputs)

    def loss_of(step):
        half = {name: each.half() for name, each in lone.named_parameters()}
        outputs = [functional_call(lone, half, scaled_batch(step, each).half()) for each in range(2)]
        return sum(each.float().square().mean() for each in outputs) / 2

    expected_scales = scales_of(loss_of, lone.parameters(), torch.amp.GradScaler("cpu", **SCALE))
    assert scales == expected_scales == [64.0, 128.0, 64.0, 64.0, 128.0, 128.0]
    assert_same(whole_params(model), whole_params(lone), rtol=5e-3, atol=1e-3)
