"""A step beside its record: what the record says is alive at each moment, and what a real step on the CPU took."""

from __future__ import annotations

import gc

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from bench.peak import LiveBytes
from sherd.planning.reading import read_work
from sherd.simulate.work import Allocate, Gradient, Op, Release, TensorKind


def _counted_as(name):
    def count(*args, **kwargs):
        return flop_registry[getattr(torch.ops.aten, name)](*args, **kwargs)

    count._get_raw = True
    return count


CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
LIKE = {  # torch counts no operations of these two
    CPU: _counted_as("_scaled_dot_product_flash_attention"),
    CPU_BACKWARD: _counted_as("_scaled_dot_product_flash_attention_backward"),
}


def heights(work):
    """Bytes after each event: of activations, temporaries, logits and gradients, without the batch."""
    sizes, now, found = {}, 0, []
    for event in work.events:
        if isinstance(event, Allocate):
            sizes[event.tensor] = 0 if event.kind is TensorKind.INPUT else event.nbytes
            now += sizes[event.tensor]
        elif isinstance(event, Release):
            now -= sizes.pop(event.tensor)
        elif isinstance(event, Gradient):
            now += work.parameters[event.parameter].nbytes
        found.append(now)
    assert not sizes, "what was allocated is released"
    return found


def peak(work):
    return max(heights(work))


def made(build):
    """What `build` returns, on the meta device."""
    with torch.device("meta"):
        return build()


def read(build, loss):
    """The work of what `build` returns, a model and its batch, by the CPU's kernels."""
    return read_work(*made(build), loss, device_type="cpu")


def measured(build, loss):
    """The peak of a real step on the CPU, beside parameters and batch, and its floating-point operations."""
    torch.manual_seed(0)
    model, batch = build()

    def step():
        value = loss(model, batch)
        value.backward()

    with LiveBytes() as live:
        for _ in range(2):
            step()
            model.zero_grad()
        gc.collect()
        live.forget_peak()
        before = live.now
        step()
        found = live.peak - before
    model.zero_grad()
    with FlopCounterMode(display=False, custom_mapping=LIKE) as counter:
        step()
    return found, counter.get_total_flops()


def flops(work):
    return sum(event.flops for event in work.events if isinstance(event, Op))
