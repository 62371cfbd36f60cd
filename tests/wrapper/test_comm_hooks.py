"""Do communication hooks reduce what the default would, see what they should, and does a grad scaler go with fp16?"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

from sherd import FullyShardedDataParallel, MixedPrecision, ShardedGradScaler, ShardingStrategy, comm_hooks
from sherd._torch import local_tensor
from sherd.comm.groups import one_rank_group
from sherd.errors import PolicyError, PolicyTypeError, StateError
from tests.support.on_ranks import on_processes, on_threads

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
STRATEGIES = [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD]


class Net(nn.Module):
    """Units of 25 and 15 elements, no multiples of the ranks; `spare` is used if its caller says so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5, bias=False))
        self.out = nn.Linear(5, 2)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x, spare=True):
        return self.out(self.inner(x if not spare else x * self.spare))


def wrapped(model=None, **options):
    model = model if model is not None else Net()
    model.inner = FullyShardedDataParallel(model.inner, **options)
    return FullyShardedDataParallel(model, **options)


def batch(seed=None):
    generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    return torch.randn(4, 3, generator=generator)


def backward(model, **kwargs):
    model(batch(), **kwargs).square().sum().backward()


def local_grads(model):
    return [None if each.grad is None else local_tensor(each.grad).clone() for each in model.parameters()]


def hook_for(hooks, strategy):
    return hooks.allreduce_hook if strategy is NO_SHARD else hooks.reduce_scatter_hook


def same(found, expected, **tolerance):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


# The ready-made hooks

HOOKS = {"ours": comm_hooks, "torch's": torchs}


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_processes(2)
def test_the_default_hooks_reduce_as_the_default_does(strategy, use_orig_params):
    """Gradients of two backwards by the default reduction, by the plain hooks, and by those that compress."""
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}

    def run(state=None, hook=None):
        model = wrapped(**options)
        if hook is not None:
            model.register_comm_hook(state, hook)
        for spare in (True, dist.get_rank() == 1):  # a gradient that rank 0, which holds it, has not
            backward(model, spare=spare)
        return local_grads(model)

    group, default = dist.group.WORLD, run()
    for hooks in HOOKS.values():
        same(run(hooks.DefaultState(group), hook_for(hooks, strategy)), default, rtol=1e-6, atol=1e-6)
    state = comm_hooks.LowPrecisionState(group)
    for hook, error in ((comm_hooks.fp16_compress_hook, 2e-3), (comm_hooks.bf16_compress_hook, 2e-2)):
        compressed = run(state, hook)
        same(compressed, default, rtol=error, atol=error)
        assert all(each.dtype == torch.float32 for each in compressed)
        if sum(each.numel() for each in default):
            assert any(not torch.equal(one, other) for one, other in zip(compressed, default, strict=True))


def test_the_mean_is_divided_before_and_after_as_in_torch():
    for num_ranks in range(1, 130):
        expected = torchs.DefaultState._get_gradient_predivide_factor(num_ranks)
        assert comm_hooks._power_of_two_near_the_root(num_ranks) == expected


@on_processes(2)
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
    lone = Net()
    lone(batch()).square().sum().backward()
    named = {name: each.grad.reshape(-1) for name, each in lone.named_parameters()}
    return [torch.cat([named[name] for name in unit]) for unit in units]


INNER = ("inner.0.weight", "inner.0.bias", "inner.1.weight")
ROOT = ("spare", "out.weight", "out.bias")


def calls_of_a_hook(strategy, use_orig_params):
    model, seen = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params), Seen()
    model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), seen)
    with model.no_sync():
        backward(model)
    assert seen.wholes == []
    backward(model)
    backward(model)
    assert len(seen.wholes) == 4, "once for each unit and backward that reduces"
    return seen.wholes, seen.shards, own_grads([INNER, ROOT])


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
def test_a_hook_sees_one_whole_gradient_a_unit_and_backward(world, strategy, use_orig_params):
    for wholes, shards, (inner, root) in world(2).run(calls_of_a_hook, strategy, use_orig_params):
        assert [each.numel() for each in wholes] == [2 * shape.numel() for shape in shards] or strategy is NO_SHARD
        for turn, whole in enumerate(wholes):
            assert whole.ndim == 1
            assert whole.dtype == torch.float32
            # `spare` is the root's, and the last to have its gradient. The first turn has an earlier backward's too.
            own = (inner, root)[turn % 2] * (2 if turn < 2 else 1)
            assert whole.numel() > own.numel()  # there is padding, and it shows as zeros
            torch.testing.assert_close(whole[whole != 0].sort().values, own.sort().values)


def add_noise(state, grad, output=None):
    """The hook of the tutorials: reduce, then a noise that all ranks know."""
    Seen()(state["reduce"], grad, output)
    result = grad if output is None else output
    result.add_(state["noise"])


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@on_processes(2, use_orig_params=(True,))
def test_what_a_hook_makes_of_a_gradient_arrives(strategy, use_orig_params):
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    model, default = wrapped(**options), wrapped(**options)
    model.register_comm_hook({"reduce": comm_hooks.DefaultState(dist.group.WORLD), "noise": 0.5}, add_noise)
    for each in (model, default):
        backward(each, spare=False)
    for found, expected in zip(local_grads(model), local_grads(default), strict=True):
        if expected is None:
            assert found is None  # `spare`, of which no rank has a gradient: noise does not make one
        else:
            torch.testing.assert_close(found, expected + 0.5)


class Positions(nn.Module):
    """One parameter, whose gradient autograd hands on to the input as well."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return x + self.weight.view(8, 8)


def input_gradient():
    model = FullyShardedDataParallel(Positions(), use_orig_params=True)
    model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), comm_hooks.reduce_scatter_hook)
    x = torch.ones(8, 8, requires_grad=True)
    (model(x * 3) * torch.arange(64.0).view(8, 8)).sum().backward()
    return x.grad, model.module.weight.grad.full_tensor()


def test_a_hook_that_writes_its_gradient_leaves_autograds_alone(world):
    values = torch.arange(64.0)
    for grad, reduced in world(2).run(input_gradient):
        torch.testing.assert_close(grad, 3 * values.view(8, 8))
        torch.testing.assert_close(reduced, values)


def in_other_dtypes(strategy):
    """The reduce dtype is what the hook gets; frozen parameters are none of its business."""
    model, seen = Net(), Seen()
    model.out.requires_grad_(False)
    precision = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float16)
    model = wrapped(model, sharding_strategy=strategy, use_orig_params=True, mixed_precision=precision)
    model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), seen)
    backward(model)
    assert {each.dtype for each in model.parameters() if each.grad is not None} == {torch.float32}
    assert model.module.out.weight.grad is None
    return [each.dtype for each in seen.wholes], sum(each.count_nonzero().item() for each in seen.wholes)


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
def test_a_hook_gets_the_reduce_dtype_and_nothing_of_frozen_parameters(world, strategy):
    for dtypes, numel in world(2).run(in_other_dtypes, strategy):
        assert dtypes == [torch.float16] * 2
        assert numel <= 25 + 3


def on_one_rank(strategy):
    model, seen = wrapped(sharding_strategy=strategy, process_group=one_rank_group()), Seen()
    model.register_comm_hook(comm_hooks.DefaultState(one_rank_group()), seen)
    backward(model)
    for found, expected in zip(local_grads(model), reversed(own_grads([INNER, ROOT])), strict=True):
        torch.testing.assert_close(found[found != 0].sort().values, expected.sort().values)
    return len(seen.wholes), len(seen.shards)


def test_one_rank_has_hooks_too(world):
    assert world(2).run(on_one_rank, FULL_SHARD) == [(2, 2)] * 2
    assert world(2).run(on_one_rank, NO_SHARD) == [(2, 0)] * 2


# Mistakes


@on_processes(2)
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


@on_threads(4)
def test_hybrid_strategies_are_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    with pytest.raises(PolicyError, match="not supported for hybrid strategies"):
        model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), comm_hooks.reduce_scatter_hook)


# A grad scaler around the wrapper

SCALE = {"init_scale": 64.0, "growth_interval": 2}
STEPS, BAD_STEP = 6, 2


def scaled_batch(step, rank):
    """In one step, one rank has inputs that overflow float16 on the way back."""
    inputs = batch(10 * step + rank)
    return inputs * 1e4 if (step, rank) == (BAD_STEP, 1) else inputs


def losses_and_scales(loss_of, parameters, scaler):
    optimizer, seen = torch.optim.SGD(parameters, lr=0.05), []
    for step in range(STEPS):
        loss = loss_of(step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    return seen


class Half(nn.Module):
    """Large inputs stay large."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 5)
        self.out = nn.Linear(5, 2)

    def forward(self, x):
        return self.out(self.inner(x).relu())


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_processes(2)
def test_a_scaler_trains_a_half_precision_wrapper_as_one_process(use_orig_params):
    rank = dist.get_rank()
    precision = MixedPrecision(torch.float16, cast_forward_inputs=True)
    model = wrapped(Half(), use_orig_params=use_orig_params, mixed_precision=precision)
    scales = losses_and_scales(
        lambda step: model(scaled_batch(step, rank)).float().square().mean(),
        model.parameters(),
        ShardedGradScaler("cpu", **SCALE),
    )
    with FullyShardedDataParallel.summon_full_params(model):
        found = {name: each.detach().clone() for name, each in model.named_parameters()}
    lone = Half()

    def loss_of(step):
        half = {name: each.half() for name, each in lone.named_parameters()}
        outputs = [functional_call(lone, half, scaled_batch(step, each).half()) for each in range(2)]
        return sum(each.float().square().mean() for each in outputs) / 2

    expected_scales = losses_and_scales(loss_of, lone.parameters(), torch.amp.GradScaler("cpu", **SCALE))
    assert scales == expected_scales == [64.0, 128.0, 64.0, 64.0, 128.0, 128.0]
    for name, each in lone.named_parameters():
        torch.testing.assert_close(found[name], each.detach(), rtol=5e-3, atol=1e-3)
