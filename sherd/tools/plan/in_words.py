"""A plan in words: lines of text, facts for a report, advice, and the program that trains as planned."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import nn

from sherd.api.blocks import repeated_blocks
from sherd.tools.plan.planner import fully_shard_args
from sherd.tools.simulate.costs import ACROSS
from sherd.tools.simulate.predict import Prediction
from sherd.tools.simulate.search import Outcome, Room, SearchResult, Verdict
from sherd.tools.simulate.settings import AXES, COSTS, Settings
from sherd.tools.simulate.timeline import Advice, Lane, Timeline
from sherd.units import in_bytes, in_seconds, three_digits

WIDTH = 100
"""The longest line for a terminal."""


def facts_of(prediction: Prediction, settings: Settings, room: Room, training: str) -> dict[str, str]:
    """Returns the figures of a plan by name, in words. `training` names the dtype and the optimizer."""
    verdict, published = verdict_of(prediction, room)
    cluster, mesh = prediction.cluster, prediction.mesh
    cost, per = cost_of(prediction)
    num_nodes, samples = -(-mesh.num_ranks // cluster.devices_per_node), settings.num_samples
    tokens = prediction.tokens_per_second * prediction.timeline.seconds / samples
    of = f" of {tokens:,.0f} tokens" if tokens else ""
    return {
        "memory": f"{in_bytes(prediction.driver_bytes)} {verdict}",
        **({"published": published} if published else {}),
        "training": f"{_number(samples, 'sample')}{of} in a step, {training}",
        "cluster": f"{mesh.num_ranks} x {cluster.device.name}, on {_number(num_nodes, 'node')}",
        "reserved": in_bytes(prediction.reserved_bytes),
        **({"memory of a node": _of_node(prediction, room)} if prediction.host_bytes else {}),
        **({"tokens/s": f"{prediction.tokens_per_second:,.0f}"} if prediction.tokens_per_second else {}),
        "samples/s": three_digits(prediction.samples_per_second),
        "MFU": f"{prediction.mfu:.1%}",
        **{f"sent {link}": in_bytes(nbytes) for link, nbytes in prediction.sent.items()},
        **({f"{cluster.currency} {per}": f"{cost:.3g}"} if cost is not None else {}),
        **settings.in_words(),
    }


def verdict_of(prediction: Prediction, room: Room) -> tuple[str, str]:
    """Returns whether a step fits on a device, and how far published trainings were from their plans, if known."""
    outcome, limit, published = prediction.outcome, room.device, room.published
    lacks = outcome.nbytes - limit
    answer = f"of {in_bytes(limit)}: {replace(room, host=None).answer(outcome).value}"
    if published is None:
        return answer + _too_much(lacks), ""
    may_fit = lacks > 0 and outcome.nbytes * (1 + published.low) <= limit
    return answer + _too_much(lacks), f"{published}{', so it may fit' if may_fit else ''}"


def _of_node(prediction: Prediction, room: Room) -> str:
    taken = prediction.outcome.host_bytes
    if room.host is None:
        return f"{in_bytes(taken)}; how much there is the cluster's file does not say (host_memory)"
    fits = "" if taken <= room.host else ": does not fit"
    return f"{in_bytes(taken)} of {in_bytes(room.host)}{fits}{_too_much(taken - room.host)}"


def _too_much(lacks: int) -> str:
    return f", too much by {in_bytes(lacks)}" if lacks > 0 else ""


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count > 1)}"


def cost_of(prediction: Prediction) -> tuple[float | None, str]:
    """Returns the price of a million tokens, or samples if the model reads no tokens, and the unit in words."""
    if prediction.tokens_per_second:
        return prediction.cost_per_million_tokens, "per million tokens"
    return prediction.cost_per_million_samples, "per million samples"


def advice_of(settings: Settings, outcome: Outcome, other: Settings, of_other: Outcome) -> Advice:
    words = other.all_in_words()
    names = [name for name in settings.differing(other) if name != "micro_batches"]
    change = " and ".join(words[name] for name in names)
    return Advice(change, outcome.nbytes - of_other.nbytes, of_other.seconds - outcome.seconds)


def compared(plans: Iterable[tuple[Prediction, Settings, Verdict]], tokens: float | None) -> Iterator[str]:
    """Yields a table of plans of one model, a row for each, with the time and price of a run over `tokens`."""
    rows = []
    for found, settings, answer in plans:
        (cost, per), currency = cost_of(found), found.cluster.currency
        speed, unit = (
            (found.tokens_per_second, "tokens/s")
            if found.tokens_per_second
            else (found.samples_per_second, "samples/s")
        )
        row = {
            "cluster": found.cluster.name,
            "ranks": str(found.mesh.num_ranks),
            "samples": f"{settings.num_samples:,}",
            "step": in_seconds(found.timeline.seconds),
            unit: three_digits(speed),
            "MFU": f"{found.mfu:.1%}",
            per: "" if cost is None else f"{cost:.3g} {currency}",
        }
        if tokens:
            price = found.price(tokens)
            row |= {"days": f"{found.days(tokens):,.1f}", "price": "" if price is None else f"{price:,.0f} {currency}"}
        rows.append(row | {"memory": answer.value})
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    for row in ({name: name for name in widths}, *rows):
        *cells, last = (row[name].rjust(width) for name, width in widths.items())
        yield "  ".join((*cells, last.strip()))


def run_of(prediction: Prediction, tokens: float) -> str:
    """Returns the days and the price of a run over `tokens` in words."""
    price = prediction.price(tokens)
    of = "" if price is None else f", {price:,.0f} {prediction.cluster.currency}"
    return f"{tokens:,.0f} tokens in {prediction.days(tokens):,.1f} days{of}"


def parted(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        wrapped = textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        yield "\n".join(wrapped) if len(line) > WIDTH else line


def _settings_in_lines(settings: Settings) -> Iterator[str]:
    line = "settings    "
    *others, last = settings.in_words().values()
    for words in (*(f"{each}, " for each in others), last):
        if len(line) + len(words) > WIDTH:
            yield line.rstrip()
            line = " " * 12
        line += words
    yield line


def lines_of(
    prediction: Prediction,
    settings: Settings,
    room: Room,
    found: SearchResult | None,
    advice: Sequence[Advice],
    training: str,
    speedups: Mapping[str, float],
) -> Iterator[str]:
    """Yields the lines of a plan. They may be too long for a terminal."""
    timeline, facts = prediction.timeline, facts_of(prediction, settings, room, training)
    yield f"{timeline.title}: {facts['cluster']}"
    yield f"training    {facts['training']}"
    yield from _settings_in_lines(settings)
    for name, times in speedups.items():
        part, error = COSTS[settings.formats[name]]
        said = f"{part:.2f} of the bytes of float32, error at most {error}"
        yield f"values      {settings.in_words()[name]}: {said}; a step {times:.2f} times as fast as without"
    speed = f"{facts['tokens/s']} tokens/s" if "tokens/s" in facts else f"{facts['samples/s']} samples/s"
    yield f"step        {in_seconds(timeline.seconds)}, MFU {facts['MFU']}, {speed}"
    gathered = "copies to the device" if prediction.mesh.shard * prediction.mesh.cp == 1 else "all-gather"
    lanes = {lane.replace("all-gather", gathered): seconds for lane, seconds in timeline.exposed.items()}
    waits = [f"{in_seconds(seconds)} for {lane}" for lane, seconds in lanes.items()]
    yield f"waits       {', '.join(waits) or 'none'}"
    yield from _of_optimizer(timeline)
    sent = [f"{in_bytes(nbytes)} {link}" for link, nbytes in prediction.sent.items()]
    leaves = in_bytes(prediction.sent.get(ACROSS, 0) * prediction.ranks_of_node)
    of_node = f"; {leaves} leave a node" if ACROSS in prediction.sent else ""
    yield f"sends       {', '.join(sent) or 'nothing'}, each rank in a step{of_node}"
    cost, per = cost_of(prediction)
    if cost is not None:
        yield f"cost        {cost:.3g} {prediction.cluster.currency} {per}"
    yield ""
    peak = timeline.peak
    yield f"memory of a rank at the peak, {peak.moment}"
    for kind, nbytes in peak.by_kind.items():
        if nbytes >= peak.nbytes / 1000:
            yield f"  {kind:22} {in_bytes(nbytes):>10}"
    yield f"  {'alive':22} {in_bytes(peak.nbytes):>10}"
    yield f"  {'reserved':22} {in_bytes(prediction.reserved_bytes):>10}"
    verdict = "; ".join(filter(None, verdict_of(prediction, room)))
    yield f"  {'with the driver':22} {in_bytes(prediction.driver_bytes):>10}   {verdict}"
    if prediction.in_host and prediction.cluster.device.overlaps:
        yield f"on the host {', '.join(f'{in_bytes(each)} of {kind}' for kind, each in prediction.in_host.items())}"
    if prediction.on_disk:
        yield f"on a disk   {in_bytes(prediction.on_disk)}"
    if "memory of a node" in facts:
        yield f"host memory {facts['memory of a node']}, of each node"
    answer, libraries = room.answer(prediction.outcome), prediction.cluster.device.library_bytes
    if advice:
        yield f"\nwhat would fit{' with a margin' if answer is Verdict.TIGHT else ''}"
        yield from lines_of_advice(advice)
    elif answer is Verdict.NOT and room.device <= libraries:
        yield f"\nnothing fits: the driver and libraries alone take {in_bytes(libraries)}; raise the limit"
    elif answer is Verdict.NOT:
        yield "\nno settings that were tried fit; take more ranks, or fewer tokens in a sample"
    if found is not None and found.fits:
        yield "\nwhy, and what the next best would be"
        yield from _reasons(found)
        yield from _of_offload(found, prediction.ranks_of_node)


def _of_offload(found: SearchResult, ranks_of_node: int) -> Iterator[str]:
    """Yields a table of what was tried to offload, all else as in the best settings."""
    best, outcomes = found.best, found.outcomes
    alone = [each for each in outcomes if best.differing(each) == ["offload"]]
    if alone:
        yield "\nwhat rests elsewhere, of a rank"
        yield f"  {'offload':16} {'device':>10} {'host':>10} {'step':>10}"
    for each in sorted((best, *alone), key=lambda each: -outcomes[each].nbytes) if alone else ():
        outcome = outcomes[each]
        sizes = (in_bytes(outcome.nbytes), in_bytes(outcome.host_bytes // ranks_of_node), in_seconds(outcome.seconds))
        answer = found.room.answer(outcome)
        said = "  chosen" if each == best else f"  {answer.value}" if answer is not Verdict.FITS else ""
        yield f"  {each.offload:16} {' '.join(f'{size:>10}' for size in sizes)}{said}"


def _of_optimizer(timeline: Timeline) -> Iterator[str]:
    """Yields the line on the step of an optimizer whose matrices travel."""
    travel = [span for span in timeline.spans if span.lane is Lane.MATRICES]
    if travel:
        seconds = timeline.seconds - min(span.start for span in timeline.spans if span.name == "optimizer")
        hidden = 1 - timeline.exposed.get(Lane.MATRICES.value, 0.0) / sum(span.end - span.start for span in travel)
        share = f"{seconds / timeline.seconds:.1%} of the step"
        yield f"optimizer   {in_seconds(seconds)}, {share}; {hidden:.0%} of what travels in it is hidden"


def lines_of_advice(advice: Sequence[Advice]) -> Iterator[str]:
    for change in advice:
        longer = _costs(change.costs_seconds)
        yield f"  {change.change}: saves {in_bytes(change.saves_bytes)}, {'takes ' * (longer == 'as long')}{longer}"


def _costs(seconds: float) -> str:
    if abs(seconds) < 5e-9:
        return "as long"
    return f"{in_seconds(abs(seconds))} {'longer' if seconds > 0 else 'shorter'}"


def _reasons(found: SearchResult) -> Iterator[str]:
    best = found.outcomes[found.best]
    chosen = found.best.all_in_words()
    for name, other, outcome in found.others():
        words, more = other.all_in_words()[name], outcome.nbytes - best.nbytes
        if words == chosen[name]:
            continue  # the same ranks, counted along other axes
        if outcome == best:
            said = "make no difference"
        elif found.room.lack(outcome):
            said = f"not fit, by {in_bytes(found.room.lack(outcome))}"
        else:
            memory = f"{in_bytes(abs(more))} {'more' if more > 0 else 'less'}" if more else "in as much memory"
            memory += ", tight" * (found.room.answer(outcome) is Verdict.TIGHT)
            said = f"take {_costs(outcome.seconds - best.seconds)}, {memory}"
        yield f"  {words} instead of {chosen[name]} would {said}"


@dataclass(frozen=True)
class Origin:
    """The lines of a program that make a model, and the names that they give to what it brings.

    Attributes:
        imports: the lines that import it.
        call: the expression that makes it.
        names: of what the call returns: "model", and maybe "batch", "loss" and "cuts".
    """

    imports: str
    call: str
    names: tuple[str, ...] = ("model",)


OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=1e-4)",
    "adamw-fused": "torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)",
    "sgd": "torch.optim.SGD(model.parameters(), lr=1e-2)",
    "sgd-momentum": "torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)",
    "muon": 'sherd.Muon(model, lr=0.02, adamw={"lr": 1e-4})',
}
"""The calls that make optimizers, by their names in a plan."""


def program_of(
    settings: Settings,
    dtype: torch.dtype | None,
    optimizer: str,
    device_type: str,
    origin: Origin,
    model: nn.Module,
    batch: object,
) -> Iterator[str]:
    """Yields the lines of a program for torchrun that trains as planned, on `batch` without its values.

    It makes the model by its `origin` and the mesh on `device_type`, checkpoints blocks of `model`, shards it,
    and steps.
    """
    loss = "loss" if "loss" in origin.names else "own_or_usual_loss"
    blocks = repeated_blocks(model) if settings.checkpointing else {}
    yield from (["import functools"] if blocks else [])
    yield from (origin.imports, "import torch", "import torch.distributed as dist")
    yield "from torch.distributed.device_mesh import init_device_mesh"
    yield from (["from torch.utils.checkpoint import checkpoint"] if blocks else [])
    shards = "sherd.auto_shard" if settings.wrapping == "auto" else "auto_units"
    yield "import sherd"
    yield from (["from sherd.tools.plan.axes import auto_units"] if shards == "auto_units" else [])
    yield from (["from sherd.tools.plan.reading import own_or_usual_loss"] if loss != "loss" else [])
    yield from ("", "torch.manual_seed(0)  # the same weights on all ranks")
    yield f"{', '.join(origin.names)} = {origin.call}"
    yield from ["model.to(torch.bfloat16)  # with masters"] * settings.offload.startswith("masters")
    sizes = {name: getattr(settings.mesh, field) for name, field in AXES.items()}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "dp"}
    yield f'mesh = init_device_mesh("{device_type}", {(*sizes.values(),)}, mesh_dim_names={(*sizes,)})'
    lay = 'cuts["{0}"](model, mesh["{0}"])' if "cuts" in origin.names else '# lay the model over mesh["{0}"] here'
    yield from (lay.format(name) for name in ("cp", "tp") if name in sizes)
    selective = ", context_fn=sherd.selective_contexts" if settings.recompute == "selective" else ""
    for name, each in blocks.items():
        count, number = len(each), round(settings.checkpointing * len(each))
        yield f"for at, block in enumerate(model{'.' * bool(name)}{name}):"
        yield f"    if (at + 1) * {number} // {count} > at * {number} // {count}:  # {number} of {count}, evenly spread"
        yield f"        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False{selective})"
    data = [name for name in ("replicate", "dp", "cp") if name in sizes]
    yield f"{shards}(\n    model,\n    mesh=mesh[{', '.join(map(repr, data))}],"
    if "cp" in sizes:
        yield f"    dp_mesh_dims=sherd.DataParallelMeshDims({('dp', 'cp')}, {'replicate' if data[2:] else None!r}),"
    yield from (f"    {name}={_written(value)}," for name, value in fully_shard_args(settings, dtype).items())
    yield from (")", f"optimizer = {OPTIMIZERS[optimizer]}")
    yield from ["sherd.step_in_backward(model, optimizer)"] * settings.step_in_backward
    yield "# Your data in its place, other samples on each rank:"
    yield f"batch = {_in_code(batch, device_type)}"
    num, step = settings.micro_batches, [f"    now = {loss}(model, batch)", "    now.backward()"]
    if num > 1:
        step = [
            f"    with sherd.accumulate(model, {num}):",
            f"        for _ in range({num}):",
            *(" " * 8 + each for each in step),
        ]
        step[-1] = step[-1].replace("now", f"(now / {num})")
    yield from ("for step in range(10):", *step, "    optimizer.step()", "    optimizer.zero_grad()")
    yield from ("    if dist.get_rank() == 0:", "        print(step, now.item())")
    yield "dist.destroy_process_group()"


def _in_code(value: object, device_type: str) -> str:
    """Returns the expression of a batch as large as `value`."""
    if isinstance(value, torch.Tensor):
        make = "randn" if value.is_floating_point() else "zeros"
        return f'torch.{make}({(*value.shape,)}, dtype={value.dtype}, device="{device_type}")'
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {_in_code(each, device_type)}' for name, each in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"({','.join(f' {_in_code(each, device_type)}' for each in value).strip()},)"
    return repr(value)


def _written(value: object) -> str:
    """Returns the call that makes `value`, a policy, with the fields that differ from their defaults."""
    if not is_dataclass(value):
        return repr(value)
    pairs = [(field.name, getattr(value, field.name), field.default) for field in fields(value)]
    arguments = ", ".join(f"{name}={_written(own)}" for name, own, default in pairs if own != default)
    return f"sherd.{type(value).__name__}({arguments})"
