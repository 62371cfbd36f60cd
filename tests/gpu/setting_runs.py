"""How a rank trains a `Setting` on its accelerator, and what differs from the plain model."""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import sherd
from sherd.wrap import ModuleWrapPolicy
from tests.api.own_collectives import GatherByList, ReduceByAllReduce
from tests.gpu.devices import here
from tests.gpu.setting_model import (
    ASIDE,
    NUM_STEPS,
    Block,
    Outcome,
    batch,
    evaluated,
    finish,
    loss_of,
    made,
    optimizer_of,
    plain,
    share_of,
    shrink,
    total,
)
from tests.gpu.settings import WRAPPER_STRATEGIES, Setting, shown
from tests.support.ranks import RanksFailed


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Returns a mesh of all ranks on this rank's kind of accelerator."""
    return init_device_mesh(here().kind, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def sharded(setting: Setting, mesh: DeviceMesh) -> Any:
    """Returns the model, sharded as `setting` says."""
    device = here().device
    model: Any = made(setting, device if setting.built == "device" else setting.built)
    if setting.ignored and setting.built == "cpu":
        model.norm.to(device)  # sherd leaves alone what is ignored, also where it is
    ignored = set(model.norm.parameters()) if setting.ignored else set()
    model = _wrapped(setting, model, mesh, ignored) if setting.is_wrapped else _units(setting, model, mesh, ignored)
    if setting.built == "meta":
        # Resting shards are where they are computed with, or in host memory.
        model.to_empty(device="cpu" if setting.offload else device)
        if setting.ignored:
            model.norm.to_empty(device=device)
        values = dict(made(setting).named_parameters())
        with sherd.unsharded(model), torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])
    return model


def _units(setting: Setting, model: Any, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> Any:
    offload: Any = sherd.OffloadPolicy()
    if setting.offload:
        offload = sherd.CPUOffloadPolicy(pin_memory=setting.offload == "pinned")
    options: dict[str, Any] = {
        "mesh": mesh,
        "placements": setting.strategy,
        "reshard_after_forward": setting.reshard,
        "mp_policy": sherd.MixedPrecisionPolicy(_dtype(setting.param_dtype), _dtype(setting.reduce_dtype)),
        "offload_policy": offload,
        "prefetch_policy": sherd.PrefetchPolicy(
            setting.forward_depth, setting.backward_depth, after_backward=setting.after_backward
        ),
        "comm_policy": sherd.CommPolicy(setting.transport, part_bytes=1 if setting.parts else None),
        "ignored_params": ignored,
    } | _cut(setting.placement)
    for module in (*model.blocks, model):
        sherd.fully_shard(module, **options)
        if setting.own_collectives:
            module.set_custom_all_gather(GatherByList(waits=True))
            module.set_custom_reduce_scatter(ReduceByAllReduce())
    return model


def _cut(placement: str) -> dict[str, Any]:
    """Returns the arguments of `fully_shard` that say how parameters are cut."""
    if placement == "Shard(1)":
        return {"shard_placement_fn": lambda each: Shard(1) if each.dim() > 1 else None}
    if placement == "mixed":
        kinds = {0: None, 1: Shard(0), 2: sherd.Flat()}
        return {"shard_placement_fn": lambda each: kinds[each.dim()]}
    runs = {"Shard(0)": None, "Flat": sherd.Flat(), "Blocks": sherd.Blocks(3), "Owned": sherd.Owned()}
    return {"placement": runs[placement]}


def _wrapped(setting: Setting, model: Any, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> Any:
    ahead = sherd.BackwardPrefetch.BACKWARD_POST if setting.after_backward else sherd.BackwardPrefetch.BACKWARD_PRE
    return sherd.FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=sherd.ShardingStrategy[WRAPPER_STRATEGIES[setting.strategy]],
        cpu_offload=sherd.CPUOffload(offload_params=bool(setting.offload)),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        backward_prefetch=ahead if setting.backward_depth else None,
        forward_prefetch=bool(setting.forward_depth),
        mixed_precision=sherd.MixedPrecision(_dtype(setting.param_dtype), _dtype(setting.reduce_dtype)),
        ignored_states=ignored or None,
        device_id=here().device,
        use_orig_params=setting.front == "wrapper",
    )


def _dtype(name: str) -> torch.dtype | None:
    return getattr(torch, name) if name else None


def trained(setting: Setting) -> Outcome:
    """On a rank: returns what came out of training."""
    accelerator, rank, outcome = here(), dist.get_rank(), Outcome()
    accelerator.races()
    accelerator.pause(setting.pauses)
    model = sharded(setting, mesh_of(setting.mesh))
    optimizer = optimizer_of(setting, model)
    if setting.optimizer == "flattened":
        sherd.flatten_optimizer(optimizer)
    scaler = sherd.ShardedGradScaler(accelerator.kind, init_scale=2.0**8, enabled=setting.scaled)
    # Brought to the device before the first step, as a step must not wait for them.
    micros = range(setting.micro_batches)
    batches = {(step, micro): batch(step, micro, rank) for step in range(NUM_STEPS) for micro in (*micros, ASIDE)}
    batches = {key: each.to(accelerator.device) for key, each in batches.items()}
    seen: list[Tensor] = []
    for step in range(NUM_STEPS):
        with accelerator.host_waits() as waits:
            seen += _backwards(setting, model, scaler, [batches[step, micro] for micro in micros], step)
            if setting.offload:
                accelerator.host_reads([each.grad for each in model.parameters() if each.grad is not None])
            finish(setting, scaler, optimizer, _clip_of(setting, model), outcome)
        _between(setting, model, batches[step, ASIDE], outcome)
    accelerator.synchronize()
    outcome.losses = [each.item() for each in seen]
    outcome.norms = [float(each) for each in outcome.norms]
    outcome.waits = dict(waits)
    with sherd.unsharded(model, writeback=False):
        outcome.params = {_plain_name(name): each.detach().cpu().clone() for name, each in model.named_parameters()}
    outcome.races = accelerator.races()
    accelerator.pause(0)
    return outcome


def _backwards(setting: Setting, model: Any, scaler: Any, batches: Sequence[Tensor], step: int) -> list[Tensor]:
    """Run the forwards and backwards of one step. Returns the losses, on the device."""
    losses = []
    counted = sherd.accumulate(model, len(batches)) if setting.accumulation == "accumulate" else None
    with counted or contextlib.nullcontext():
        for micro, tokens in enumerate(batches):
            waits = setting.accumulation == "no_sync" and micro + 1 < len(batches)
            with _without_sync(model) if waits else contextlib.nullcontext():
                loss = loss_of(model, tokens) / len(batches)
                scaler.scale(share_of(setting, loss, step)).backward()
            losses.append(loss.detach())
    return losses


@contextlib.contextmanager
def _without_sync(model: Any) -> Any:
    if isinstance(model, sherd.FullyShardedDataParallel):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def _clip_of(setting: Setting, model: Any) -> Any:
    if setting.is_wrapped:
        return model.clip_grad_norm_
    return lambda norm: sherd.clip_grad_norm_(model.parameters(), norm)


def _between(setting: Setting, model: Any, tokens: Tensor, outcome: Outcome) -> None:
    if setting.between in ("unsharded", "written"):
        with sherd.unsharded(model, writeback=setting.between == "written"):
            if setting.between == "written":
                shrink(model)
            outcome.between.append(total(model.parameters()))
    elif setting.between == "state dict":
        held = model.state_dict().values()
        outcome.between.append(total(each.full_tensor() if hasattr(each, "full_tensor") else each for each in held))
    elif setting.between == "eval":
        outcome.between.append(evaluated(model, model, tokens))


def _plain_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def train_all(settings: Sequence[Setting]) -> list[Outcome]:
    """On a rank: returns what came out of each, up to the first one that raises."""
    outcomes: list[Outcome] = []
    for setting in settings:
        gc.collect()  # so that garbage is collected at one point of the program on all ranks
        torch.manual_seed(0)
        try:
            outcomes.append(trained(setting))
        except Exception:
            # Most errors come on all ranks, which are fit for the next call then.
            return [*outcomes, Outcome(error=traceback.format_exc())]
    return outcomes


# What differs


def differences(setting: Setting, rank: int, found: Outcome, expected: Outcome, counts_waits: bool) -> list[str]:
    """Returns what is not as it should be on a rank, in words."""
    if found.error:
        return [f"rank {rank}: {found.error}"]
    rtol, atol = (2e-2, 4e-3) if setting.param_dtype or setting.reduce_dtype else (1e-4, 1e-5)
    said = []
    for what in ("losses", "norms", "between"):
        ours, theirs = (torch.tensor(getattr(each, what), dtype=torch.float64) for each in (found, expected))
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=rtol, atol=atol, equal_nan=True):
            said.append(f"{what}: {ours.tolist()} are not {theirs.tolist()}")
    if found.params.keys() != expected.params.keys():
        said.append(f"parameters: {sorted(found.params.keys() ^ expected.params.keys())} on one side only")
    for name, tensor in expected.params.items():
        assert torch.isfinite(tensor).all(), f"{name}: nothing to compare with"
        ours = found.params.get(name, torch.full_like(tensor, torch.nan))
        if not torch.allclose(ours, tensor, rtol=rtol, atol=atol):
            said.append(f"{name}: differs by {(ours - tensor).abs().max().item():.2g}")
    said += [f"race, {count} times: {what}" for what, count in found.races.items()]
    if counts_waits and not setting.lets_host_wait:
        said += [f"the host waits {count} times: {what}" for what, count in found.waits.items()]
    return [f"rank {rank}: {each}" for each in said]


def wrong(ranks: Any, settings: Sequence[Setting], counts_waits: bool) -> dict[Setting, str]:
    """Returns which of `settings`, all on as many ranks, fail, with what is wrong; trained in few calls."""
    if not settings:
        return {}
    assert {each.num_ranks for each in settings} == {ranks.num_ranks}
    try:
        by_rank = ranks.run(train_all, tuple(settings), timeout=60 + 5 * len(settings))
    except RanksFailed as error:
        # A rank died, or waits for one that raised.
        if len(settings) == 1:
            return {settings[0]: str(error)}
        half = len(settings) // 2
        return wrong(ranks, settings[:half], counts_waits) | wrong(ranks, settings[half:], counts_waits)
    failing = {}
    seen = list(zip(*by_rank, strict=False))
    for setting, outcomes in zip(settings, seen, strict=False):
        pairs = enumerate(zip(outcomes, plain(setting), strict=True))
        said = [
            each for rank, (found, right) in pairs for each in differences(setting, rank, found, right, counts_waits)
        ]
        if said:
            failing[setting] = "\n".join(said[:8])
    return failing | wrong(ranks, settings[len(seen) :], counts_waits)


def report(failing: dict[Setting, str]) -> str:
    """Returns all failures as one text."""
    return "\n\n".join(f"{shown(setting)}\n{said}" for setting, said in failing.items())


def option(name: str, default: int) -> int:
    """Returns the whole number in an environment variable."""
    return int(os.environ.get(name, default))
