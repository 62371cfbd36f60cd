"""The functions that carry out on a unit what other ranks want of it, and this one does not: `divergence="join"`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from sherd.engine import Unit
from sherd.errors import StateError
from sherd.schedule.agreed import Kind, Step
from sherd.schedule.state import Live


def gather_for_others(unit: Unit, in_full_precision: bool, but: Collection[int] = ()) -> None:
    """Start the all-gathers that other ranks want, of all groups `but` those."""
    live = unit.live
    if live is not Live.SHARDED and in_full_precision != unit.in_full_precision:
        raise StateError(
            f"another rank gathers unit {unit.name} in {'full' if in_full_precision else 'low'} precision while it is "
            "unsharded here in the other one; call train() and eval() at the same places on all ranks"
        )
    unit.free()
    unit.streams.begin_step()  # an optimizer may have stepped since the last forward began
    unit.gather(in_full_precision, but)


def have_again(unit: Unit, live: Live) -> None:
    """Have the parameters of `unit`, which other ranks have gathered, in the form that they had before."""
    if live is Live.SHARDED:
        unit.free()
    elif live is not Live.GATHERING:
        unit.wait()
        if live is Live.SHRUNK:
            unit.shrink()


def reduce_for_others(unit: Unit, over_replicas: bool, but: Collection[int] = ()) -> None:
    """Start the reductions that other ranks want, of all groups `but` those, with what has been collected here, be it
    nothing."""
    for gradients in unit.gradients:
        gradients.finish_reduce(unit.policy)
    policy = replace(unit.policy, reduce_gradients=True, all_reduce_gradients=over_replicas)
    with unit.backward.reducing_for_others(policy):
        unit.reduce(policy, but)


def finish_for_others(unit: Unit) -> None:
    """Have gradients on the shards from here on, also those that go to host memory: no backward of this rank lands
    them."""
    unit.finish_reduce()
    unit.land_gradients()


def start_for_others(step: Step, unit: Unit, but: Collection[int] = ()) -> None:
    """Start what `step` wants of `unit` on ranks that did not want it, for all groups `but` those."""
    start = gather_for_others if step.kind is Kind.GATHER else reduce_for_others
    start(unit, bool(step.detail), but)


@torch.no_grad()
def pay(step: Step, unit: Unit, but: Collection[int]) -> None:
    """Start the collectives of `step` for all groups of `unit` `but` those, and drop what they bring."""
    start_for_others(step, unit, but)
    if step.kind is Kind.GATHER:
        unit.free()
    else:
        finish_for_others(unit)
