"""The layout of planned models over the axes that are not data parallel.

Models of `sherd train` are laid out as it does; models of transformers by their own plan for tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from sherd.errors import InputError
from sherd.tools.plan.axes import ModelLayout, ParallelModel
from sherd.tools.plan.reading import own_or_usual_loss
from sherd.tools.simulate.settings import Mesh
from sherd.train.axes import Axes, axes_of
from sherd.train.config import Config
from sherd.train.parallel import cut_tensors
from sherd.train.passes import cross_entropy, running

__all__ = ["trained_layout", "transformers_layout"]


@dataclass(frozen=True)
class TrainedLayout(ModelLayout):
    """The layout of a model that was made of `config`, which `sherd train` cuts over `tp`."""

    config: Config = field(default_factory=Config)

    def misfit(self, mesh: Mesh) -> str:
        if others := super().misfit(mesh):
            return others
        axes = Axes(mesh.replicate, mesh.shard, mesh.tp)
        try:
            axes_of(replace(self.config, mesh=str(axes)), axes.num_ranks)
        except InputError as error:
            return str(error)
        return ""

    def lay(self, model: nn.Module, mesh: Mesh) -> ParallelModel:
        laid = super().lay(model, mesh)
        if mesh.tp == 1:
            return laid
        tp = next(each.device_mesh for each in model.parameters() if isinstance(each, DTensor))

        def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
            return cross_entropy(model(batch[0]), batch[0], tp).mean()

        return replace(laid, loss=loss, running=partial(running, tp))


def trained_layout(config: Config) -> ModelLayout:
    """Returns the layout of the model of a config of `sherd train`."""
    if config.hf:
        return ModelLayout(own_or_usual_loss)
    return TrainedLayout(own_or_usual_loss, cuts={"tp": cut_tensors}, config=config)


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
