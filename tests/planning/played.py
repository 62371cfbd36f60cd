"""A step beside its record: what the record says is alive at each moment, and what a real step on the CPU took."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from bench.peak import LiveBytes
from sherd.schedule.moments import MemoryKind
from sherd.tools.plan.reading import read_work
from sherd.tools.plan.tracing import traced
from sherd.tools.simulate.work import Allocate, Enter, Gradient, Leave, Op, Release, TensorKind


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
    return sum(event.flops for event in ops(work))


def ops(work):
    return [event for event in work.events if isinstance(event, Op)]


def names(work):
    """Of all operations, in order."""
    return [event.name for event in ops(work)]


def of_kind(work, kind):
    """The bytes of each tensor of this kind."""
    return [event.nbytes for event in work.events if isinstance(event, Allocate) and event.kind is kind]


def assert_calls_see_what_is_alive(work):
    """Calls are inside of one another, what they read and return is alive, and at the end nothing is."""
    alive, calls = set(), []
    for event in work.events:
        match event:
            case Allocate(tensor):
                assert tensor not in alive
                alive.add(tensor)
            case Release(tensor):
                alive.remove(tensor)
            case Enter(module):
                assert set(event.inputs) <= alive
                calls.append(module)
            case Leave(module):
                assert calls.pop() == module
                assert set(event.outputs) <= alive
    assert not calls
    assert not alive


def settled(model, optimizer, step, on):
    """On a rank: the timeline of a settled step, on the ranks `on`; None on the others."""
    found = []
    for number in range(5):
        with traced(model, optimizer) if number > 1 and dist.get_rank() in on else nullcontext() as trace:
            step()
            optimizer.step()
        optimizer.zero_grad()
        if trace is not None:
            found.append(trace.timeline)
    # A thread of gloo may let go of what it has received too late, when the machine is busy, but never too early.
    return min(found, key=lambda each: each.peak.nbytes, default=None)


def engine(by_kind, without=()):
    """Of bytes by kind those of the engine's buffers."""
    return {kind.value: by_kind[kind.value] for kind in {*MemoryKind} - {*without} if by_kind.get(kind.value)}


def most(timeline):
    """The most bytes of each kind that are alive at once."""
    now, found = {}, {}
    for change in timeline.changes:
        now[change.kind] = now.get(change.kind, 0) + change.nbytes
        found[change.kind] = max(found.get(change.kind, 0), now[change.kind])
    return found
