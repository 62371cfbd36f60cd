"""Which parameters of a unit share a group, and with it one all-gather, one reduce-scatter and one unsharded buffer.

A large unit on a device with streams is cut into parts of neighbouring parameters, each a group:

    registered     norm  qkv  out  up  down           groups    | norm qkv out | up | down |
    in backward                                       freed            3rd       2nd   1st

Backward comes to the parts from the last to the first. A part's unsharded parameters are freed once its gradients are
there, so that not all parameters and all gradients of the unit are in memory together. Small tensors (norms, biases)
share the first part, whose gradients come last: a norm that is registered behind the weights, and is used before them,
would keep the part that it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from sherd.comm.streams import Streams
from sherd.engine.state.group import GroupKey, group_key_of, travels_alone
from sherd.engine.state.parameter import ShardedParameter

MOST_PARTS = 4
"""Of one unit. With more, messages become small while the largest tensor still bounds what is freed."""

SMALL = 16
"""A tensor of less than this fraction of a part, 1/16, goes to the first part."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The parameters of one group to be. `is_part`: of a unit that was cut into parts for the sake of memory."""

    parameters: tuple[ShardedParameter, ...]
    is_part: bool = False


def batches_of(
    parameters: Sequence[ShardedParameter], streams: Streams, surrounds: bool, as_one: bool, part_bytes: int | None
) -> list[Batch]:
    """Returns the groups to make of a unit's parameters.

    Args:
        parameters: all of the unit's.
        streams: the lanes of its device.
        surrounds: the unit has others inside.
        as_one: the user has put something in the way of its collectives, which is to see the unit as one.
        part_bytes: the fewest bytes, unsharded, of a part; None leaves a unit in one part.
    """
    keys: dict[GroupKey, list[ShardedParameter]] = {}
    for parameter in parameters:
        keys.setdefault(group_key_of(parameter), []).append(parameter)
    batches: list[Batch] = []
    for key, members in keys.items():
        together: list[ShardedParameter] = []
        alone: list[Batch] = []
        for parameter in members:
            # Runs are never in order: those of one plan share a line.
            is_apart = parameter.cut.in_order and not as_one
            if key.gathers_itself or (is_apart and travels_alone(parameter, streams, surrounds)):
                alone.append(Batch((parameter,)))
            else:
                together.append(parameter)
        if part_bytes is not None and not as_one and not streams.in_host_order and _is_freed_in_parts(key):
            batches += _parts(together, part_bytes)
        elif together:
            batches.append(Batch(tuple(together)))
        batches += alone
    return batches


def _is_freed_in_parts(key: GroupKey) -> bool:
    """Returns whether parts would save memory: what is kept unsharded would not be freed. Runs of one plan, which
    balance over the ranks together, are never in parts."""
    return key.plan_id is None and key.mesh.num_pieces > 1 and not key.mesh.keeps_unsharded


def _parts(parameters: Sequence[ShardedParameter], part_bytes: int) -> list[Batch]:
    """Returns `parameters` in parts of about equal bytes, each of at least `part_bytes`: one part if they are fewer
    than twice as many."""
    sizes = [each.shape.numel() * each.dtype.itemsize for each in parameters]
    num_parts = min(MOST_PARTS, sum(sizes) // part_bytes)
    if num_parts < 2:
        return [Batch(tuple(parameters))] if parameters else []
    is_large = [size * SMALL * num_parts >= sum(sizes) for size in sizes]
    parts = [[each for each, large in zip(parameters, is_large, strict=True) if not large]]
    least = max(part_bytes, sum(compress(sizes, is_large)) / num_parts)
    filled = 0
    for parameter, size in zip(compress(parameters, is_large), compress(sizes, is_large), strict=True):
        if filled >= least:
            parts.append([])
            filled = 0
        parts[-1].append(parameter)
        filled += size
    if filled < part_bytes and len(parts) > 1:
        parts[-2:] = [parts[-2] + parts[-1]]
    return [Batch(tuple(part), len(parts) > 1) for part in parts]
