"""How a rank trains a `Setting` on its accelerator, and what differs from the plain model."""

from __future__ import annotations

import contextlib
import functools
import gc
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import sherd
from sherd.wrap import ModuleWrapPolicy
from tests.api.own_collectives import GatherByList, ReduceByAllReduce
from tests.gpu.devices import Accelerator, here
from tests.gpu.setting_model import (
    ASIDE,
    NUM_STEPS,
    Block,
    Outcome,
    batch,
    finish,
    made,
    optimizer_of,
    plain,
    seen_between,
    share_of,
    shrink,
)
from tests.gpu.settings import WRAPPER_STRATEGIES, Setting, shown
from tests.support.comparing import whole_params
from tests.support.models import next_token_loss
from tests.support.ranks import RanksFailed
from tests.support.ranks.each import each_on


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
    model = (
        _wrapped(setting, model, mesh, ignored) if setting.is_wrapped else shard_units(setting, model, mesh, ignored)
    )
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


def shard_units(setting: Setting, model: Any, mesh: DeviceMesh, ignored: Collection[nn.Parameter] = frozenset()) -> Any:
    """Shards the blocks of `model` and the rest in place, and returns it. Not for wrappers."""
    package: Any = fsdp if setting.front == "FSDP2" else sherd
    offload = package.OffloadPolicy()
    if setting.offload:
        offload = package.CPUOffloadPolicy(pin_memory=setting.offload == "pinned")
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": package.MixedPrecisionPolicy(_dtype(setting.param_dtype), _dtype(setting.reduce_dtype)),
        "offload_policy": offload,
    }
    if package is fsdp:
        options["reshard_after_forward"] = setting.reshard is not False
    else:
        options |= _of_sherd_alone(setting) | {"ignored_params": set(ignored)}
    for module in (*model.blocks, model):
        package.fully_shard(module, **options)
        if setting.own_collectives:
            module.set_custom_all_gather(GatherByList(waits=True))
            module.set_custom_reduce_scatter(ReduceByAllReduce())
        if setting.group_memory:
            module.set_allocate_memory_from_process_group_for_comm(True)
        if setting.hook:
            hook = functools.partial(_double_and_halve, here())
            module.set_all_reduce_hook(hook, stream=torch.Stream(device=here().device))
    if setting.reduce_buffers is not None:
        model.set_reduce_scatter_max_input_buffers(setting.reduce_buffers)
    return model


def _double_and_halve(accelerator: Accelerator, gradient: Tensor) -> None:
    """Does nothing, so slowly that whoever does not wait finds a doubled gradient."""
    gradient.mul_(2)
    accelerator.sleep(3000)
    gradient.div_(2)


def _of_sherd_alone(setting: Setting) -> dict[str, Any]:
    """Returns the arguments of `fully_shard` that torch's has not."""
    depths = (setting.forward_depth, setting.backward_depth)
    return {
        "placements": setting.strategy,
        "reshard_after_forward": setting.reshard,
        "prefetch_policy": sherd.PrefetchPolicy(*depths, after_backward=setting.after_backward),
        "comm_policy": _comm_policy(setting),
    } | _cut(setting.placement)


def _comm_policy(setting: Setting) -> sherd.CommPolicy:
    order, _, wire = setting.reduction.partition(" ")
    travels = wire if wire == "int8" else _dtype(wire)
    reduction = sherd.Reduction(travels, order=order) if order else None
    gather = "int8" if setting.encoded else None
    return sherd.CommPolicy(setting.transport, part_bytes=setting.part_bytes, reduce=reduction, gather=gather)


def _cut(placement: str) -> dict[str, Any]:
    """Returns the arguments of `fully_shard` that say how parameters are cut."""
    if placement == "Shard(1)":
        return {"shard_placement_fn": lambda each: Shard(1) if each.dim() > 1 else None}
    if placement == "mixed":
        kinds = {0: None, 1: Shard(0), 2: sherd.Flat()}
        return {"shard_placement_fn": lambda each: kinds[each.dim()]}
    if placement == "replicated":
        return {"replicate_below": 300}
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
        comm_policy=_comm_policy(setting),
    )


def _dtype(name: str) -> torch.dtype | None:
    return getattr(torch, name) if name else None


Sabotage = Callable[[], AbstractContextManager[None]]


def trained(setting: Setting, sabotage: Sabotage = contextlib.nullcontext) -> Outcome:
    """On a rank: returns what came out of training, with `sabotage()` about its steps."""
    accelerator, rank, outcome = here(), dist.get_rank(), Outcome()
    accelerator.races()
    if setting.pauses:
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
    with sabotage():
        if setting.interrupted:
            _interrupted_step(model, optimizer, batches[0, 0])
        for step in range(NUM_STEPS):
            with accelerator.host_waits() as waits:
                seen += _backwards(setting, model, scaler, [batches[step, micro] for micro in micros], step)
                if setting.offload:
                    accelerator.host_steps(model.parameters())
                finish(setting, scaler, optimizer, _clip_of(setting, model), outcome)
                if setting.follows_event:
                    model.set_post_optim_event(torch.accelerator.current_stream().record_event())
            if setting.between:
                outcome.between.append(_between(setting, model, batches[step, ASIDE]))
        accelerator.synchronize()
    outcome.losses = [each.item() for each in seen]
    outcome.norms = [float(each) for each in outcome.norms]
    outcome.waits = dict(waits)
    if not setting.ignored and setting.between != "eval":  # both may leave some where compute is
        assert {each.device.type for each in model.parameters()} == {"cpu" if setting.offload else accelerator.kind}
    outcome.params = whole_on_host(model)
    outcome.races = accelerator.races()
    accelerator.pause(0)
    return outcome


def whole_on_host(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters, whole, in host memory; all ranks call it."""
    for module in model.modules():
        if isinstance(module, sherd.FSDPModule):
            module.reshard()  # a forward without backward may have left it unsharded, in the dtype of compute
    return {name: each.cpu() for name, each in whole_params(model).items()}


def _interrupted_step(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    def interrupt(_: Tensor) -> None:
        raise InterruptedError

    handle = model.embed.register_forward_hook(
        lambda _module, _inputs, output: output.register_hook(interrupt) and None
    )
    with contextlib.suppress(InterruptedError):
        next_token_loss(model, tokens).backward()
    handle.remove()
    optimizer.zero_grad()


def _backwards(setting: Setting, model: Any, scaler: Any, batches: Sequence[Tensor], step: int) -> list[Tensor]:
    """Run the forwards and backwards of one step. Returns the losses, on the device."""
    losses = []
    counted = sherd.accumulate(model, len(batches)) if setting.accumulation == "accumulate" else None
    with counted or contextlib.nullcontext():
        for micro, tokens in enumerate(batches):
            with of_micro_batch(setting, model, micro + 1 == len(batches)):
                loss = next_token_loss(model, tokens) / len(batches)
                scaler.scale(share_of(setting, loss, step)).backward()
            losses.append(loss.detach())
    return losses


@contextlib.contextmanager
def of_micro_batch(setting: Setting, model: Any, is_last: bool) -> Iterator[None]:
    """Inside, the gradients of all but the last one stay where they are, as far as `setting` says."""
    if setting.accumulation == "no_sync" and setting.is_wrapped and not is_last:
        with model.no_sync():
            yield
        return
    if setting.accumulation == "no_sync" and not setting.is_wrapped:
        model.set_requires_gradient_sync(is_last)
    elif setting.accumulation == "replicas once":
        model.set_requires_all_reduce(is_last)
    yield


def _clip_of(setting: Setting, model: Any) -> Any:
    if setting.is_wrapped:
        return model.clip_grad_norm_
    return lambda norm: sherd.clip_grad_norm_(model.parameters(), norm)


def _between(setting: Setting, model: Any, tokens: Tensor) -> float:
    if setting.between not in ("unsharded", "written"):
        return seen_between(setting, model, model, tokens)
    with sherd.unsharded(model, writeback=setting.between == "written"):
        if setting.between == "written":
            shrink(model)
        return seen_between(setting, model, model, tokens)


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

PAGEABLE = "copy to host, not to pinned memory as it lies on the device"


def wrong_numbers(setting: Setting, found: Outcome, expected: Outcome) -> list[str]:
    """Returns which numbers of a rank are not those of the plain model, in words."""
    is_rounded = setting.param_dtype or setting.reduce_dtype or " " in setting.reduction
    rtol, atol = (2e-2, 4e-3) if is_rounded else (1e-4, 1e-5)
    if setting.reduction.endswith("int8") or setting.encoded:
        rtol, atol = 0.1, 0.06
    said = []
    for what in ("losses", "norms", "scales", "between"):
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
    return said


def unwanted_waits(setting: Setting, waits: dict[str, int]) -> dict[str, int]:
    """Returns which waits of the host for the device should not be in a settled step.

    A scaler's step is left out or not by what the host reads. With offload the optimizer runs on the host: it waits
    for what backward has brought, once a unit at most, and so does each copy to memory that is not pinned, and a norm
    of gradients, which ranks add up on the device. FSDP2 waits for each gradient.
    """
    if setting.scaled or (setting.offload and (setting.front == "FSDP2" or setting.max_norm is not None)):
        return {}
    if not setting.offload:
        return waits
    most = {"Event.synchronize": setting.micro_batches * (setting.num_blocks + 1)}
    if setting.offload == "pageable":
        most[PAGEABLE] = waits.get(PAGEABLE, 0)
    return {cause: count for cause, count in waits.items() if count > most.get(cause, 0)}


def differences(setting: Setting, rank: int, found: Outcome, expected: Outcome, counts_waits: bool) -> list[str]:
    """Returns what is not as it should be on a rank, in words."""
    if found.error:
        return [f"rank {rank}: {found.error}"]
    said = wrong_numbers(setting, found, expected)
    said += [f"race, {count} times: {what}" for what, count in found.races.items()]
    if counts_waits:
        said += [
            f"the host waits {count} times: {what}" for what, count in unwanted_waits(setting, found.waits).items()
        ]
    return [f"rank {rank}: {each}" for each in said]


def wrong(ranks: Any, settings: Sequence[Setting], counts_waits: bool) -> dict[Setting, str]:
    """Returns which of `settings`, all on as many ranks, fail, with what is wrong; trained in few calls."""
    assert {each.num_ranks for each in settings} == {ranks.num_ranks}
    failing = {}
    for setting, outcomes in each_on(ranks, settings, train_all, timeout=60 + 5 * len(settings)):
        if isinstance(outcomes, RanksFailed):  # a rank died, or waits for one that raised
            failing[setting] = str(outcomes)
            continue
        said: list[str] = []
        for rank, (found, expected) in enumerate(zip(outcomes, plain(setting), strict=True)):
            said += differences(setting, rank, found, expected, counts_waits)
        if said:
            failing[setting] = "\n".join(said[:8])
    return failing


def report(failing: dict[Setting, str]) -> str:
    """Returns all failures as one text."""
    return "\n\n".join(f"{shown(setting)}\n{said}" for setting, said in failing.items())
