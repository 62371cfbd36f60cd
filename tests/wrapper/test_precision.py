"""The dtype that each tensor has under a wrapper's `MixedPrecision`, and what FSDP1's switches switch."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import sherd
from sherd.fsdp1.arguments import MixedPrecision
from sherd.fsdp1.wrapper import FullyShardedDataParallel
from sherd.tensor.ragged import local_part
from sherd.wrap import ModuleWrapPolicy
from tests.support.comparing import assert_same, whole_grads
from tests.support.models import WIDTH, build, noise
from tests.support.ranks.bodies import on_processes, on_threads
from tests.wrapper.training import BOTH_KINDS, wrap_blocks, wrap_units

BF16, FP32 = torch.bfloat16, torch.float32


class Inner(nn.Module):
    """Notes in which dtypes it is called and computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x, seen):
        seen.update(child=x.dtype, child_weight=self.linear.weight.dtype, buffer=self.scale.dtype)
        return self.linear(x.to(self.linear.weight.dtype)) * self.scale


class Outer(nn.Module):
    """Hands its inner module float32, whatever it was given."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, seen, *, more, number):
        seen.update(root=x.dtype, nested=more["y"][0].dtype, number=number.dtype)
        hidden = self.inner(x.float(), seen)
        return self.head(hidden.to(self.head.weight.dtype)) + more["y"][0].sum().to(hidden.dtype)


def outer(**options):
    return FullyShardedDataParallel(Outer(), auto_wrap_policy=ModuleWrapPolicy({Inner}), **options)


def run_outer(model):
    """The dtypes in forward by place, and the output."""
    seen = {}
    output = model(torch.ones(3, WIDTH), seen, more={"y": [torch.ones(1)]}, number=torch.tensor(1))
    return seen, output


CASTS = [
    ({"param_dtype": BF16}, BF16, FP32),
    ({"param_dtype": BF16, "cast_forward_inputs": True}, BF16, BF16),
    ({"param_dtype": BF16, "cast_root_forward_inputs": False}, FP32, FP32),
    ({"param_dtype": BF16, "cast_forward_inputs": True, "cast_root_forward_inputs": False}, BF16, BF16),
    ({"buffer_dtype": BF16}, FP32, FP32),
]


@BOTH_KINDS
@on_threads(2, case=CASTS)
def test_inputs_buffers_and_weights_have_the_dtypes_that_were_chosen(orig, case):
    precision, root, child = case
    model = outer(mixed_precision=MixedPrecision(**precision), use_orig_params=orig)
    seen, output = run_outer(model)
    output.float().square().sum().backward()
    parameter, buffers = next(model.parameters()), dict(model.named_buffers())
    compute, buffer = precision.get("param_dtype", FP32), precision.get("buffer_dtype", FP32)
    assert (seen["root"], seen["nested"], seen["child"]) == (root, root, child)
    assert seen["number"] == buffers["inner.count"].dtype == torch.int64
    assert seen["child_weight"] == compute
    assert seen["buffer"] == buffers["inner.scale"].dtype == buffer
    assert parameter.dtype == parameter.grad.dtype == FP32


LOW = [
    {"param_dtype": compute, "reduce_dtype": reduce, "keep_low_precision_grads": True}
    for compute, reduce in ((BF16, None), (BF16, FP32), (None, BF16), (torch.float16, BF16), (None, None))
]


def dtypes_of_gradients(api, strategy, orig):
    """Those of two micro-batches under each precision; and, where reduced in full, what the second one adds up to."""
    more = {} if api is sherd else {"device_id": torch.device("cpu")}
    dtypes, sums = [], []
    for precision in LOW:
        torch.manual_seed(0)
        model = api.FullyShardedDataParallel(
            nn.Linear(WIDTH, WIDTH),
            sharding_strategy=api.ShardingStrategy[strategy],
            mixed_precision=api.MixedPrecision(**precision),
            use_orig_params=orig,
            **more,
        )
        for _ in range(2):
            model(torch.ones(2, WIDTH) * (dist.get_rank() + 1)).sum().backward()
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            dtypes.append({each.dtype for each in gradients})
        total = sum(local_part(each).double().sum() for each in gradients)
        dist.all_reduce(total)
        sums.append(total.item() / (1 if strategy == "FULL_SHARD" else dist.get_world_size()))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert {each.dtype for each in model.parameters()} == {FP32}
    return dtypes, sums


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@on_processes(2, strategy=("FULL_SHARD", "NO_SHARD"), orig=(True, False))
def test_gradients_that_are_kept_in_low_precision_are_in_that_of_torchs_fsdp1(strategy, orig):
    theirs, ours = (dtypes_of_gradients(api, strategy, orig) for api in (torch_fsdp, sherd))
    assert ours == theirs


@on_threads(2)
def test_gradients_given_in_an_unshard_context_are_kept_in_low_precision_too():
    """To a model that has had none yet."""
    precision = MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True)
    model = FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH), use_orig_params=True, mixed_precision=precision)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    assert {each.grad.dtype for each in model.parameters()} == {BF16}
    ones = {"weight": torch.ones(WIDTH, WIDTH, dtype=BF16), "bias": torch.ones(WIDTH, dtype=BF16)}
    assert_same(whole_grads(model), ones)


# Norms in full precision


@pytest.mark.filterwarnings("ignore:mixed_precision and auto_wrap_policy were both given")
@on_threads(2)
def test_batch_norms_compute_in_full_precision_in_a_unit_of_their_own():
    model = wrap_blocks(build("buffers"), mixed_precision=MixedPrecision(param_dtype=BF16, buffer_dtype=BF16))
    norm, seen = model.layers[1], {}
    norm.module.register_forward_hook(
        lambda module, args, output: seen.update(weight=module.weight.dtype, mean=module.running_mean.dtype)
    )
    norm.register_forward_hook(lambda _, args, output: seen.update(given=args[0].dtype, returned=output.dtype))
    model.loss(model(noise(0, dist.get_rank()))).backward()
    assert isinstance(norm, FullyShardedDataParallel)
    assert norm.mixed_precision is None or norm.mixed_precision.param_dtype is None
    assert seen == {"weight": FP32, "mean": FP32, "given": BF16, "returned": BF16}


# Switches of the environment


def outputs_in_train_and_eval(orig):
    model = wrap_units(
        build("mlp"), mixed_precision=MixedPrecision(param_dtype=BF16, buffer_dtype=BF16), use_orig_params=orig
    )
    x = noise(0, 0)
    found = []
    for mode in (True, False, True):
        model.train(mode)
        output = model(x)
        model.loss(output).backward()
        found.append(output.detach())
        model.zero_grad()
    return found


@BOTH_KINDS
def test_evaluation_may_be_in_full_precision(threads, monkeypatch, orig):
    plain = build("mlp")(noise(0, 0)).detach()
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    for trained, evaluated, trained_again in threads(2).run(outputs_in_train_and_eval, orig):
        assert trained.dtype == trained_again.dtype == BF16
        torch.testing.assert_close(evaluated, plain)
        assert torch.equal(trained, trained_again)
    monkeypatch.delenv("FSDP_USE_FULL_PREC_IN_EVAL")
    for _, evaluated, _ in threads(2).run(outputs_in_train_and_eval, orig):
        assert evaluated.dtype == BF16


@on_threads(2)
def test_buffers_too_are_in_full_precision_in_evaluation(monkeypatch):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    model = outer(mixed_precision=MixedPrecision(param_dtype=BF16, buffer_dtype=BF16))
    for mode, dtype in ((True, BF16), (False, FP32), (True, BF16)):
        seen, _ = run_outer(model.train(mode))
        assert (seen["root"], seen["child_weight"], seen["buffer"]) == (dtype,) * 3


@BOTH_KINDS
@on_threads(2)
def test_fake_collectives_move_nothing_and_wait_for_nobody(monkeypatch, orig):
    """After a first step together rank 0 takes further ones, which nobody answers."""
    monkeypatch.setenv("FSDP_USE_FAKE_ALL_GATHER", "1")
    monkeypatch.setenv("FSDP_USE_FAKE_REDUCE", "1")
    model = wrap_units(build("mlp"), use_orig_params=orig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3 if dist.get_rank() == 0 else 1):
        model.loss(model(noise(step, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()


def gradients_with_fake_reduction():
    model = wrap_units(build("mlp"), use_orig_params=True)
    model.loss(model(noise(0, dist.get_rank()))).backward()
    return [each.grad.to_local() for each in model.parameters()]


def test_a_fake_reduction_leaves_gradients_in_the_shards(threads, monkeypatch):
    true = threads(2).run(gradients_with_fake_reduction)
    monkeypatch.setenv("FSDP_USE_FAKE_REDUCE", "1")
    for found, expected in zip(threads(2).run(gradients_with_fake_reduction), true, strict=True):
        assert [each.shape for each in found] == [each.shape for each in expected]
