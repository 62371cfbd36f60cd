"""The numbers are those of torch's own FSDP1, for the same seeds, wherever that runs on the CPU."""

import contextlib
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp as torchs

from sherd import CommPolicy
from sherd.fsdp1 import arguments
from sherd.fsdp1.wrapper import FullyShardedDataParallel
from sherd.wrap import ModuleWrapPolicy
from tests.support.models import Block, build

pytestmark = [
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:FSDP.summon_full_params:UserWarning"),
]

STEPS = 3


@dataclass(frozen=True)
class Setup:
    """Arguments by name, so that each side makes its own objects of them."""

    strategy: str = "FULL_SHARD"
    orig: bool = False
    precision: dict = field(default_factory=dict)
    prefetch: str | None = "BACKWARD_PRE"


def wrap(kind, model, setup):
    theirs = kind == "torch"
    names, cls = (torchs, torchs.FullyShardedDataParallel) if theirs else (arguments, FullyShardedDataParallel)
    return cls(
        model,
        sharding_strategy=names.ShardingStrategy[setup.strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        backward_prefetch=names.BackwardPrefetch[setup.prefetch] if setup.prefetch else None,
        mixed_precision=names.MixedPrecision(**setup.precision) if setup.precision else None,
        device_id=torch.device("cpu"),
        use_orig_params=setup.orig,
    )


def train(kind, name, setup, micro_batches, max_norm, no_sync):
    """Losses, norms and last parameters of a few steps under torch's class or ours."""
    model, rank = wrap(kind, build(name), setup), dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(micro_batches):
            held_back = no_sync and micro < micro_batches - 1
            with model.no_sync() if held_back else contextlib.nullcontext():
                loss = model.loss(model(*model.make_inputs(step + 100 * micro, rank))) / micro_batches
                loss.backward()
            losses.append(loss.item())
        norms.append(model.clip_grad_norm_(max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    with model.summon_full_params(model):
        params = {name: each.detach().clone() for name, each in model.named_parameters()}
    return losses, norms, params


def train_with_both(name, setups, transport, **how):
    with mock.patch.object(arguments.WrapperArguments, "comm", CommPolicy(transport)):
        return [(train("sherd", name, setup, **how), train("torch", name, setup, **how)) for setup in setups]


def check(world, name, setups, micro_batches=1, max_norm=0.3, no_sync=False, exactly=True, transport="auto"):
    """Losses are the same bits where `exactly`; a norm is summed up in another order."""
    how = {"micro_batches": micro_batches, "max_norm": max_norm, "no_sync": no_sync}
    for of_rank in world(2).run(train_with_both, name, setups, transport, **how):
        for setup, (ours, theirs) in zip(setups, of_rank, strict=True):
            if exactly:
                assert ours[0] == theirs[0], setup
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, msg=lambda text, s=setup: f"{s}: {text}")


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
PREFETCHES = ["BACKWARD_PRE", "BACKWARD_POST", None]


@pytest.mark.front("Coming from FSDP1")
@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_float32_losses_are_the_same_bits(world, orig):
    setups = [
        Setup(strategy, orig, prefetch=prefetch) for strategy, prefetch in zip(STRATEGIES, PREFETCHES, strict=True)
    ]
    # Clipping would let the norm's last bit into the parameters.
    check(world, "mlp", setups, max_norm=1e9)


@pytest.mark.parametrize("no_sync", [True, False], ids=["no_sync", "synced_each_time"])
def test_accumulated_and_clipped_gradients_are_the_same(world, no_sync):
    setups = [Setup(strategy, orig) for strategy, orig in zip(STRATEGIES, (True, False, True), strict=True)]
    setups.append(Setup("FULL_SHARD", False))
    check(world, "mlp", setups, micro_batches=2, no_sync=no_sync, exactly=False)


PRECISIONS = {
    "bfloat16": {"param_dtype": torch.bfloat16},
    "bfloat16_reduced_in_float32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "reduced_in_bfloat16": {"reduce_dtype": torch.bfloat16},
    "units_cast_inputs": {"param_dtype": torch.bfloat16, "cast_forward_inputs": True},
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_mixed_precision_rounds_where_torch_rounds(world, precision):
    setups = [
        Setup("FULL_SHARD", False, PRECISIONS[precision]),
        Setup("SHARD_GRAD_OP", True, PRECISIONS[precision]),
        Setup("NO_SHARD", False, PRECISIONS[precision]),
    ]
    # Over torch's own collectives, as FSDP1 has them; sherd's other transports add up low precision in float32.
    check(world, "mlp", setups, max_norm=1e9, transport="torch")


def test_a_transformer_trains_as_under_torch(world):
    check(world, "transformer", [Setup("FULL_SHARD", True), Setup("FULL_SHARD", False)], max_norm=1e9)
