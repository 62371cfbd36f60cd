"""The plan of a run: what it would take on each rank, said without running it: `sherd train --dry-run`.

One process stands for rank 0 of any number of ranks: the model is on the meta device, and collectives move nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from sherd import memory_report
from sherd._torch import TorchDispatchMode, fake_tensors, imagined_ranks
from sherd.api.recompute import KeptResults
from sherd.engine.run.seal import units_below
from sherd.engine.run.structures import tensors_in
from sherd.memory.report import MemoryReport
from sherd.memory.sizes import sizes_of
from sherd.schedule.moments import MemoryKind
from sherd.train.axes import Axes, axes_of
from sherd.train.config import Config, Split
from sherd.train.device import ranks_to_plan
from sherd.train.mesh import Grid
from sherd.train.models import Decoder
from sherd.train.parallel import on_meta, parallelize
from sherd.units import in_bytes

__all__ = ["Plan", "plan", "planned"]


@dataclass(frozen=True)
class Plan:
    """The memory that a step takes on rank 0, in bytes; `activations` is None where it is not known.

    Attributes:
        parameters, gradients, optimizer: what is there between steps: this rank's shards, or wholes by the strategy.
        passing: what comes and goes in a step at its peak: whole parameters of a unit or two, and their gradients.
        activations: what autograd keeps for backward, about.
    """

    config: Config
    axes: Axes
    split: Split
    num_parameters: int
    parameters: int
    gradients: int
    optimizer: int
    passing: int
    activations: int | None

    @property
    def peak(self) -> int:
        """The most at once, about: all of it together."""
        return self.parameters + self.gradients + self.optimizer + self.passing + (self.activations or 0)

    def __str__(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        config, batch, context = self.config, self.config.optimizer.batch, self.config.data.context
        ranks = f"{self.axes.num_ranks} rank{'s' if self.axes.num_ranks > 1 else ''}"
        yield f"model    {self.num_parameters:,} parameters, on {ranks}: {self.axes}"
        yield f"step     {batch:,} samples x {context:,} tokens = {batch * context:,} tokens"
        times = f"{self.split.times} micro-batch{'es' if self.split.times > 1 else ''}"
        yield f"rank     {times} of {self.split.micro_batch} x {context // self.axes.cp:,} tokens in a step"
        steps, minutes = config.run.steps, config.run.minutes
        tokens = f" = {steps * batch * context:,} tokens" if steps else ""
        yield f"run      {steps:,} steps{tokens}" if steps else f"run      as many steps as {minutes:g} minutes allow"
        yield "\nbytes on rank 0"
        yield from _table(
            {
                "parameters": self.parameters,
                "gradients": self.gradients,
                "optimizer state": self.optimizer,
                "passing by": self.passing,
                "activations, about": self.activations,
                "at the peak, about": self.peak,
            }
        )
        yield "\nwithout torch itself and what the allocator keeps; docs/training.md says what each line counts"
        yield from (f"note     {note}" for note in config.notes())


def _table(rows: dict[str, int | None]) -> Iterator[str]:
    for name, nbytes in rows.items():
        yield f"  {name:20} {'not known' if nbytes is None else in_bytes(nbytes):>12}"


def plan(config: Config, num_ranks: int | None) -> str:
    """Returns what `config` takes on `num_ranks` ranks, in words; None: as many as would be started here.

    Raises:
        InputError: it does not fit so many ranks.
    """
    return str(planned(config, num_ranks or config.run.ranks or ranks_to_plan(config)))


def planned(config: Config, num_ranks: int) -> Plan:
    """Returns what `config` takes on `num_ranks` ranks. This process must not be in a process group.

    Raises:
        InputError: it does not fit so many ranks.
    """
    axes = axes_of(config, num_ranks)
    split = config.split(axes.num_data, axes.pp)
    # How bytes travel is not asked: nobody is there. What a transport takes is passed over, or on the safe side.
    config = replace(config, shard=replace(config.shard, transport="auto"))
    with imagined_ranks(num_ranks):
        model = on_meta(config)
        num_parameters = sum(each.numel() for each in model.parameters())
        model = parallelize(model, Grid(axes, "cpu"), config)
        sizes = [each for unit in units_below(model) for each in sizes_of(unit)]
        parameters, gradients = (sum(each.shards + each.kept for each in sizes), sum(each.gradients for each in sizes))
        # These strategies keep whole gradients from one micro-batch to the next: sherd.accumulate.
        kept = split.times - 1 if config.shard.strategy in ("ddp", "zero1") else 0
        report = memory_report(model, unsynced_batches=kept)
        # From the second micro-batch on, gradients of all units are there while the first unit's backward begins.
        early = gradients - _at_peak(report, MemoryKind.GRADIENTS) if split.times > 1 and not kept else 0
        return Plan(
            config,
            axes,
            split,
            num_parameters,
            parameters,
            gradients,
            _adamw_bytes(model),
            report.predicted_peak + early - parameters - gradients,
            _activations(config, axes, split),
        )


def _at_peak(report: MemoryReport, kind: MemoryKind) -> int:
    return sum(row.at_peak for row in report.rows if row.kind == kind.value)


def _adamw_bytes(model: nn.Module) -> int:
    """Two running means of each element that this rank owns, and a step count per parameter."""
    owned = (each.to_local() if isinstance(each, DTensor) else each for each in model.parameters())
    return sum(2 * each.nbytes + 4 for each in owned)


# Activations


def _activations(config: Config, axes: Axes, split: Split) -> int | None:
    """Returns the bytes that autograd keeps until backward, of the micro-batches that are under way at once."""
    if config.model.hf:
        return None
    one, two = (_kept_for_backward(config, axes, split, layers) for layers in (1, 2))
    block, rest, again = two - one, 2 * one - two, 0
    if config.run.checkpointing:
        itemsize = 2 if config.run.precision == "bf16" else 4
        again = block  # of the block that is at its backward
        inputs = split.micro_batch * config.data.context // axes.cp * config.model.width * itemsize
        results = 0 if config.run.recompute == "full" else _kept_results(config, axes, split)
        block -= round(config.run.checkpointing_share * (block - inputs - results))
    layers = ceil(config.model.layers / axes.pp)
    # The first stage has the most micro-batches under way, the last one the logits.
    first, last = min(axes.pp, split.times) * layers * block, layers * block + rest
    return (again + max(first if axes.pp > 1 else 0, last)) // axes.tp


def _kept_for_backward(config: Config, axes: Axes, split: Split, layers: int) -> int:
    """Returns the bytes that autograd keeps of one micro-batch in a decoder of so many layers, parameters apart."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        storages.append(tensor.untyped_storage())
        return tensor

    storages: list[torch.UntypedStorage] = []  # kept alive, so that no two have one id
    with fake_tensors():
        model, tokens = _fake(config, axes, split, layers)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logits = model(tokens).float().flatten(0, 1)
            F.cross_entropy(logits, tokens.flatten())
        own = {id(each.untyped_storage()) for each in model.parameters()}
    return sum(nbytes for storage, nbytes in kept.items() if storage not in own)


def _kept_results(config: Config, axes: Axes, split: Split) -> int:
    """Returns the bytes of the results that a block keeps of one micro-batch under selective recomputation."""
    results = _Results()
    with fake_tensors():
        model, tokens = _fake(config, axes, split, 1)
        block = model.blocks[0]
        forward = block.forward

        def watched(*args: Any) -> Any:
            with results:
                return forward(*args)

        block.forward = watched
        model(tokens)
    return results.nbytes


class _Results(TorchDispatchMode):
    """Adds up the bytes of the results that are kept."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes, self._kept = 0, KeptResults()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._kept.keeps(str(func.overloadpacket)):
            self.nbytes += sum(each.nbytes for each in tensors_in(made))
        return made


def _fake(config: Config, axes: Axes, split: Split, layers: int) -> tuple[Decoder, torch.Tensor]:
    """Returns a decoder of so many layers, and a micro-batch of it."""
    m = config.model
    if m.experts:  # as many rows of as many numbers as in one layer of this width
        m = replace(m, experts=0, hidden=m.hidden * m.top_k)
    model = Decoder(replace(m, layers=layers))
    if config.run.precision == "bf16":
        _halve(model)
    return model, torch.zeros(split.micro_batch, config.data.context // axes.cp, dtype=torch.int64)


def _halve(model: nn.Module) -> None:
    """Let the parameters be bfloat16, as gathered ones are. Fake ones cannot be changed in place, as `to` does it."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(parameter.detach().bfloat16()))
