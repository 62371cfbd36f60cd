"""The layout of planned models over the axes that are not data parallel.

Models of `sherd train` are laid out as it does; models of transformers by their own plan for tensor parallelism.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from sherd.api.blocks import Wrapping
from sherd.errors import InputError
from sherd.tools.plan.axes import ModelLayout, ParallelModel
from sherd.tools.plan.reading import own_or_usual_loss
from sherd.tools.simulate.settings import AXES, Mesh
from sherd.train.axes import Axes, axes_of
from sherd.train.config import Config
from sherd.train.experts import Experts, Way, exchanged
from sherd.train.mesh import RankGrid
from sherd.train.models import Decoder
from sherd.train.parallel import blocks_of, cut, own_layers, shard
from sherd.train.passes import Passes

__all__ = ["TrainedLayout", "spread_evenly", "transformers_layout"]


@dataclass(frozen=True)
class TrainedLayout(ModelLayout):
    """The layout of a model that was made of `config`; `names` are the axes that it can be laid over."""

    config: Config = field(default_factory=Config)
    names: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        return self.names

    @property
    def rewraps(self) -> bool:
        return True

    def misfit(self, mesh: Mesh) -> str:
        axes = _axes(mesh)
        run = replace(self.config.run, mesh=str(axes), ranks=0)
        try:
            axes_of(replace(self.config, run=run), axes.num_ranks)
        except InputError as error:
            return str(error)
        return ""

    def stage(self, model: nn.Module, number: int, num_stages: int) -> nn.Module:
        stage = copy.deepcopy(model)
        assert isinstance(stage, Decoder), "models of transformers have no stages"
        own_layers(stage, number, num_stages)
        stage.blocks = nn.ModuleList(blocks_of(stage))
        return stage

    def stream_numel(self, batch: Any, mesh: Mesh) -> int:
        return int(batch[0].numel()) // mesh.cp // mesh.tp * self.config.model.width

    def lay(self, model: nn.Module, mesh: Mesh) -> ParallelModel:
        grid = RankGrid(_axes(mesh), "cpu")

        def shards(model: Any, wrapping: Wrapping = "auto", **options: Any) -> nn.Module:
            sharded: nn.Module = shard(model, grid, wrapping, **options)
            return sharded

        if not isinstance(model, Decoder):
            return ParallelModel(shards, self.loss)
        cut(model, grid, self.config)
        spread_evenly(model, grid.ep)
        passes = _OnMeta(model, grid)
        return ParallelModel(shards, passes.stage_loss, passes.running)


class _OnMeta(Passes):
    """Passes without values."""

    def part(self, samples: Tensor) -> Tensor:
        return samples.chunk(self.grid.axes.cp, dim=1)[self.grid.context_rank]

    def stage_loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        """Returns the mean cross-entropy, or the sum of what a stage sends on, which has a gradient as large."""
        part, axes = self.part(batch[0]), self.grid.axes
        x = part
        if self.grid.stage > 0:
            assert isinstance(model, Decoder), "models of transformers have no stages"
            shape = (len(part), part.shape[1] // axes.tp, model.model.width)
            x = torch.empty(shape, dtype=next(model.parameters()).dtype, device="meta", requires_grad=True)
        out = model(x)
        if self.grid.stage == axes.pp - 1:
            return self.cross_entropy(out, part).mean()
        return (out.to_local() if isinstance(out, DTensor) else out).sum()


def _axes(mesh: Mesh) -> Axes:
    return Axes(**{name: getattr(mesh, field) for name, field in AXES.items()})


def spread_evenly(model: nn.Module, ep: DeviceMesh | None = None) -> None:
    """Let all experts of `model` have equal shares of the tokens, those of other ranks of `ep` too."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.exchange = partial(_even, ep)


def _even(ep: DeviceMesh | None, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Way]:
    def back(done: Tensor) -> Tensor:
        return done

    if ep is not None:
        sent, group = _shares(len(rows), ep.size()), ep.get_group()
        counts = counts[: len(counts) // ep.size()]
        order = torch.empty(sum(sent), dtype=torch.int64, device="meta")  # rows are sorted by their experts
        rows = exchanged(rows, sent, sent, group)[order]

        def back(done: Tensor) -> Tensor:
            return exchanged(done[order], sent, sent, group)

    return rows, torch.tensor(_shares(len(rows), len(counts)), device="cpu"), back


def _shares(number: int, parts: int) -> list[int]:
    share, rest = divmod(number, parts)
    return [share + (at < rest) for at in range(parts)]


def transformers_layout(model: Any) -> ModelLayout:
    """Returns the layout of a causal LM of transformers. It has `tp` if transformers has a plan of kinds known here."""
    config, plan = model.config, model.tp_plan or {}
    if not plan or not set(plan.values()) <= {*_STYLES, *_AS_THEY_ARE}:
        return ModelLayout(own_or_usual_loss)
    heads = (getattr(config, name, None) or 1 for name in ("num_attention_heads", "num_key_value_heads", "vocab_size"))
    return _TensorParallel(own_or_usual_loss, cuts={"tp": partial(_cut_by, plan)}, divided=tuple(heads))


@dataclass(frozen=True)
class _TensorParallel(ModelLayout):
    divided: tuple[int, ...] = ()

    def misfit(self, mesh: Mesh) -> str:
        if any(size % mesh.tp for size in self.divided):
            return f"tp={mesh.tp} does not divide the model's heads and vocabulary, {self.divided}"
        return super().misfit(mesh)


_STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
}
"""The styles of transformers' plans, in torch's own words."""
_AS_THEY_ARE = ("replicated_with_grad_allreduce",)
"""Norms of single heads: small, so their copies are left out."""


def _cut_by(plan: dict[str, str], model: nn.Module, tp: DeviceMesh) -> None:
    for name, module in model.named_modules():
        style = next((each for pattern, each in plan.items() if fnmatchcase(name, pattern)), None)
        if style in _STYLES:
            parallelize_module(module, tp, _STYLES[style], src_data_rank=None)
