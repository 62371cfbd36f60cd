"""Timelines that look like real ones, made without a simulator, and a search."""

from sherd.schedule.moments import MemoryKind
from sherd.tools.simulate.timeline import (
    Advice,
    Candidate,
    Change,
    Lane,
    LaneSpan,
    Peak,
    Timeline,
    TimelineUnit,
    TriedSettings,
)
from sherd.tools.simulate.work import TensorKind

MIB = 1 << 20
WHOLE, ROWS, GRADIENTS = MemoryKind.UNSHARDED.value, MemoryKind.GRADIENT_ROWS.value, MemoryKind.GRADIENTS.value
ACTIVATION, TEMPORARY, LOGITS = (
    kind.value for kind in (TensorKind.ACTIVATION, TensorKind.TEMPORARY, TensorKind.LOGITS)
)
HOSTILE = "</script><img src=x onerror=alert(1)>'\"&\u2028\u202e\ud800 größer"


def units_of(layers, prefix="layers."):
    root = TimelineUnit("", "Transformer", 131_072_000, 250 * MIB, 32 * MIB)
    return (root, *(TimelineUnit(f"{prefix}{n}", "Block", 201_326_592, 384 * MIB, 48 * MIB) for n in range(layers)))


def timeline(layers=12, micro_batches=1, title="llama-8b on 8 ranks", is_predicted=True, slow=1.0, prefix="layers."):
    """A step: gathers overlap compute, activations grow in forward and shrink in backward, each layer is reduced."""
    units = units_of(layers, prefix)
    spans, changes, clock = [], [], 0.0
    gathered = 0.0  # when the gather lane is free
    for number, unit in enumerate(units):
        changes.append(Change(0.0, MemoryKind.SHARDS.value, number, unit.shard_bytes))
        changes.append(Change(0.0, MemoryKind.OPTIMIZER.value, number, 2 * unit.shard_bytes))

    def gather(unit, at):
        nonlocal gathered
        start = max(gathered, at)
        gathered = start + 0.0031 * slow
        spans.append(LaneSpan(Lane.GATHER, "gather", unit, start, gathered, units[unit].unsharded_bytes * 7 // 8))
        changes.append(Change(start, WHOLE, unit, units[unit].unsharded_bytes))
        return gathered

    def compute(name, unit, seconds, ready=0.0):
        nonlocal clock
        if ready > clock:
            spans.append(LaneSpan(Lane.COMPUTE, "wait", unit, clock, ready))
            clock = ready
        changes.append(Change(clock, TEMPORARY, unit, 96 * MIB))
        spans.append(LaneSpan(Lane.COMPUTE, name, unit, clock, clock + seconds))
        clock += seconds
        changes.append(Change(clock, TEMPORARY, unit, -96 * MIB))

    for _ in range(micro_batches):
        root_ready = gather(0, clock)
        ready = gather(1, clock)
        compute("forward", 0, 0.0004, root_ready)
        for layer in range(1, layers + 1):
            following = gather(layer + 1, clock) if layer < layers else 0.0
            compute("forward", layer, 0.0029, ready)
            changes.append(Change(clock, ACTIVATION, layer, 420 * MIB))
            changes.append(Change(clock, WHOLE, layer, -units[layer].unsharded_bytes))
            ready = following
        compute("forward", 0, 0.0021)
        changes.append(Change(clock, LOGITS, 0, 900 * MIB))
        ready = gather(layers, clock)
        compute("backward", 0, 0.0035)
        changes.append(Change(clock, LOGITS, 0, -900 * MIB))
        reduced = clock
        for layer in range(layers, 0, -1):
            following = gather(layer - 1, clock) if layer > 1 else 0.0
            compute("recompute" if layer % 3 == 0 else "backward", layer, 0.0058, ready)
            changes.append(Change(clock, ACTIVATION, layer, -420 * MIB))
            changes.append(Change(clock, WHOLE, layer, -units[layer].unsharded_bytes))
            start = max(reduced, clock)
            reduced = start + 0.0047 * slow
            changes.append(Change(clock, ROWS, layer, units[layer].unsharded_bytes))
            spans.append(LaneSpan(Lane.REDUCE, "reduce", layer, start, reduced, units[layer].unsharded_bytes * 7 // 8))
            spans.append(LaneSpan(Lane.ALL_REDUCE, "reduce", layer, reduced, reduced + 0.001, units[layer].shard_bytes))
            changes.append(Change(reduced, ROWS, layer, -units[layer].unsharded_bytes))
            changes.append(Change(reduced, GRADIENTS, layer, units[layer].shard_bytes))
            ready = following
        changes.append(Change(clock, WHOLE, 0, -units[0].unsharded_bytes))
        spans.append(LaneSpan(Lane.COMPUTE, "wait", -1, clock, reduced + 0.001))
        clock = reduced + 0.001
        for layer in range(1, layers + 1):
            changes.append(Change(clock, GRADIENTS, layer, -units[layer].shard_bytes))
    spans.append(LaneSpan(Lane.COPY, "copy", -1, clock, clock + 0.001, 4 * MIB))
    spans.append(LaneSpan(Lane.MODEL, "all-gather", 1, clock, clock + 0.001, 4 * MIB))
    spans.append(LaneSpan(Lane.COMPUTE, "optimizer", -1, clock, clock + 0.004))
    clock += 0.004
    changes.sort(key=lambda change: change.time)
    return Timeline(
        title,
        is_predicted,
        units,
        tuple(spans),
        tuple(changes),
        peak_of(units, changes),
        clock,
        {"tokens/s": "12,300", "MFU": "41.2 %", "memory of the device": "80.0 GiB"},
    )


def peak_of(units, changes):
    kinds, by_unit, best, found = {}, {}, -1, None
    for place, change in enumerate(changes):
        kinds[change.kind] = kinds.get(change.kind, 0) + change.nbytes
        by_unit[change.unit] = by_unit.get(change.unit, 0) + change.nbytes
        is_last = place + 1 == len(changes) or changes[place + 1].time > change.time
        if is_last and sum(kinds.values()) > best:
            best, found = sum(kinds.values()), (change, dict(kinds), dict(by_unit))
    change, by_kind, in_units = found
    moment = f"when backward reaches {units[change.unit].name or 'the root'}"
    return Peak(
        best, change.time, moment, {k: v for k, v in by_kind.items() if v}, {u: v for u, v in in_units.items() if v}
    )


def search(count=48, limit=9_000 * MIB):
    """Settings along a curve: less memory takes more time."""
    candidates = []
    for number in range(count):
        nbytes = (4_000 + 160 * number + (number * 7919 % 13) * 90) * MIB
        seconds = 0.11 + 2.2e8 / nbytes + (number * 104729 % 11) * 0.004
        settings = {"wrap": f"every {1 + number % 4}", "reshard": "after forward", "micro-batch": str(1 + number // 12)}
        fits = nbytes <= limit
        why = "" if fits else "its peak is above the memory of the device"
        name = f"micro-batch {1 + number // 12}, blocks of {1 + number % 4}"
        candidates.append(Candidate(name, settings, seconds, nbytes, fits, why))
    fitting = [number for number, each in enumerate(candidates) if each.fits]
    return TriedSettings(tuple(candidates), min(fitting, key=lambda number: candidates[number].step_seconds), limit)


ADVICE = (
    Advice("reshard the last block after forward", 384 * MIB, 0.0031),
    Advice("checkpoint the activations of every second block", 2_520 * MIB, 0.0174),
)
