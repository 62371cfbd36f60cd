"""Do the default set-ups compute on this machine's devices what plain torch computes on one?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sherd

from ..device.cases import Stack
from ..models import Model
from ..systems import FLAT, SHERD, WRAPPER, System, device_of

STACK = Stack("check", num_layers=4, width=128, hidden=256, num_heads=4, vocab=512, num_tokens=64)
NUM_STEPS = 3
FLOAT32, BFLOAT16 = 1e-3, 5e-2
"""How far losses, and what the steps have changed in the weights, may differ, as a share: sums are added in another
order, and in bfloat16 rounded to three digits."""


@dataclass(frozen=True, slots=True)
class SetUp:
    """One way to shard, as `System` and `Case` have it, and the fewest ranks that it makes sense on."""

    name: str
    system: System
    mixed: bool = False
    recomputed: bool = False
    fewest_ranks: int = 1


@dataclass(frozen=True, slots=True)
class _Hybrid:
    """`sherd.fully_shard` over halves of the ranks, with two replicas."""

    def __call__(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        halves = init_device_mesh(mesh.device_type, (2, mesh.size() // 2), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            sherd.fully_shard(block, mesh=halves)
        return sherd.fully_shard(model, mesh=halves)


SET_UPS = (
    SetUp("fully_shard", SHERD),
    SetUp("fully_shard, Flat", FLAT),
    SetUp("wrapper", WRAPPER),
    SetUp("HSDP", System("HSDP", _Hybrid()), fewest_ranks=4),
    SetUp("bfloat16", SHERD.told(mixed=True, offload=False), mixed=True),
    SetUp("checkpointing", SHERD, recomputed=True),
    SetUp("CPU offload", SHERD.told(mixed=False, offload=True)),
)


def differences(mesh: DeviceMesh, set_up: SetUp) -> str:
    """On a rank: what differs from plain torch on this rank's device, in words; empty if nothing does."""
    rank, num_ranks, device = mesh.get_rank(), mesh.size(), device_of(mesh)
    torch.manual_seed(0)
    plain = STACK.on(device, torch.float32)
    model: nn.Module = copy.deepcopy(plain)
    before = [each.detach().cpu().clone() for each in plain.parameters()]
    if set_up.recomputed:
        for place, block in enumerate(model.blocks):
            model.blocks[place] = checkpoint_wrapper(block)
    model = set_up.system.distribute(model, mesh)

    dtype = torch.bfloat16 if set_up.mixed else torch.float32

    def cast(*batch: Tensor) -> Tensor:
        weights = {name: each.to(dtype) for name, each in plain.named_parameters()}
        return torch.func.functional_call(plain, weights, batch)

    expected = _trained(plain, cast, range(num_ranks), device)
    found = _trained(model, model, [rank], device)
    allowed = BFLOAT16 if set_up.mixed else FLOAT32
    theirs = torch.tensor(expected[rank::num_ranks], dtype=torch.float64)
    ours = torch.tensor(found, dtype=torch.float64)
    if not torch.allclose(ours, theirs, rtol=allowed):
        return f"losses {ours.tolist()} are not {theirs.tolist()}"
    with sherd.unsharded(model, writeback=False):
        after = [each.detach().cpu().clone() for each in model.parameters()]
    worst = 0.0
    for start, mine, (name, weight) in zip(before, after, plain.named_parameters(), strict=True):
        weight = weight.detach().cpu()
        rounding = 4 * torch.finfo(torch.float32).eps * weight.abs().max()
        share = ((mine - weight).abs().max() - rounding) / (weight - start).abs().max()
        if not share <= allowed:
            return f"{name} differs by {share:.2g} of what {NUM_STEPS} steps have changed in it; {allowed:g} is allowed"
        worst = max(worst, float(share))
    return ""


def _trained(
    model: nn.Module, compute: Callable[..., Tensor], ranks: range | list[int], device: torch.device
) -> list[float]:
    """The losses of the batches of `ranks`, step by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    losses = []
    for step in range(NUM_STEPS):
        for rank in ranks:
            loss = compute(*(each.to(device) for each in STACK.batch(1000 * step + rank)))
            (loss / len(ranks)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
