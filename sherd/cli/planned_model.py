"""The model that is planned, named by a word: a Python factory, a Hugging Face config, or a config of `sherd train`."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from sherd.cli.planned_transformers import batch_of, context_of, has_positions, read_model
from sherd.errors import InputError, reason_of
from sherd.tensor.structures import tensors_in
from sherd.tools.plan.axes import CUT_AXES, ModelLayout, ParallelModel
from sherd.tools.plan.in_words import Origin
from sherd.tools.plan.plan import num_samples, resized_batch
from sherd.tools.plan.planner import Training
from sherd.tools.plan.reading import own_or_usual_loss
from sherd.tools.simulate.settings import Mesh
from sherd.tools.simulate.sharded import Optimizer
from sherd.train.axes import Axes, axes_of
from sherd.train.config import FIELDS, Config, read_tree
from sherd.train.parallel import cut_tensors, on_meta
from sherd.train.passes import cross_entropy, running

HINT = "name a factory as package.module:function or file.py:function, or give a config.json or a config of sherd train"


@dataclass(frozen=True)
class Planned:
    """A model on the meta device, and what a step of it is made of.

    Attributes:
        batch: makes a batch of so many samples and tokens in each; a batch of the factory's own is as it is.
        layout: of a batch's loss, and of the model over axes that are not data parallel.
        context: the tokens of a sample that the model is meant for; None: not known.
        config: that of `sherd train`, if it was given.
        has_positions: it has a table of so many positions as `context`, and none for more tokens.
        origin: how a program makes the model; None for one of `sherd train`.
    """

    model: nn.Module
    batch: Callable[[int, int], Any]
    layout: ModelLayout = field(default_factory=lambda: ModelLayout(own_or_usual_loss))
    context: int | None = None
    config: Config | None = None
    has_positions: bool = False
    origin: Origin | None = None

    @property
    def reads_tokens(self) -> bool:
        """Whether samples are of as many tokens as `batch` is asked for."""
        one, two = ([each.shape for each in tensors_in(self.batch(1, length))] for length in (1, 2))
        return one != two

    def training(self, context: int, optimizer: Optimizer, compute_dtype: torch.dtype | None) -> Training:
        """Returns the training of the model with samples of `context` tokens."""
        batch = self.batch(1, context)
        first = num_samples(batch)  # of a factory's own batch maybe more than one
        return Training(
            self.model,
            lambda size: resized_batch(batch, first, size),
            self.layout,
            optimizer,
            compute_dtype,
            first,
        )


def model_from(spec: str) -> Planned:
    """Returns the model that `spec` names, plain and on the meta device, with float32 parameters for the optimizer.

    Args:
        spec: `package.module:function` or `path/file.py:function`, which is called without arguments and returns a
            module, (module, batch), (module, batch, loss) or (module, batch, loss, cuts), with the loss of (module,
            batch), and the functions that `sherd.plan` takes as `parallelize`; or the path of a Hugging Face
            config.json, of a causal LM; or that of a config of `sherd train`.

    Raises:
        InputError: there is no such model, or it cannot be made. The message is one line.
    """
    file, colon, function = spec.rpartition(":")
    if colon and function.isidentifier():
        planned = _from_factory(spec, file, function)
    elif not Path(spec).is_file():
        raise InputError(_not_found(spec))
    elif spec.endswith(".py"):
        raise InputError(f"{spec} names no function in it; write {spec}:FUNCTION")
    else:
        tree = read_tree(spec)
        planned = _hugging_face(spec) if "model_type" in tree else trained(_config(spec, tree))
    for parameter in planned.model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return planned


def _not_found(path: str) -> str:
    """Returns that a file is not there. Only a word that is no file's name gets a hint which words there are."""
    return f"{path}: not found" if path.endswith((".json", ".toml", ".py")) else f"{path} is no file; {HINT}"


def _from_factory(spec: str, file: str, function: str) -> Planned:
    is_file = file.endswith(".py")
    if is_file and not Path(file).is_file():
        raise InputError(_not_found(file))
    sys.path.insert(0, str(Path(file).parent) if is_file else "")  # it can import its neighbors
    try:
        with torch.device("meta"):
            names = runpy.run_path(file) if is_file else vars(importlib.import_module(file))
            made = _function(file, names, function)()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{spec} raised {type(error).__name__}: {reason_of(error)}") from error
    finally:
        del sys.path[0]
    model, *rest = made if isinstance(made, tuple) and made else (made,)
    batch, loss, cuts = (*rest, *(None, None, {})[len(rest) :])[:3]
    wrong = []
    if not isinstance(model, nn.Module) or len(rest) > 3:
        wrong.append(type(made).__name__)
    if loss is not None and not callable(loss):
        wrong.append(f"a loss that is no function, but {type(loss).__name__}")
    if not (isinstance(cuts, dict) and set(cuts) <= set(CUT_AXES) and all(map(callable, cuts.values()))):
        wrong.append(f"as functions by the axes cp and tp {cuts!r:.80}")
    if wrong:
        raise InputError(
            f"{spec} returned {wrong[0]}; return a module, (module, batch), (module, batch, loss), or (module, batch, "
            "loss, functions), with a dict of functions by the axes cp and tp"
        )
    imports, call = f"from {file} import {function}", f"{function}()"
    if is_file:
        imports, call = "import runpy", f"runpy.run_path({file!r})[{function!r}]()"
    brought = ("model", "batch", "loss", "cuts")[: 1 + len(rest)]
    origin = Origin(imports, call, tuple(name if name != "loss" or loss else "_" for name in brought))
    layout = ModelLayout(loss or own_or_usual_loss, cuts=cuts)
    return Planned(model, (lambda *_: batch) if rest else token_batch, layout, origin=origin)


def _function(file: str, names: Mapping[str, Any], name: str) -> Callable[[], Any]:
    """Returns the function or class `name` of a file or module that has `names`. Raises InputError if there is none."""
    found: Callable[[], Any] | None = names.get(name)
    if callable(found):
        return found
    if name in names:
        raise InputError(f"{file}: {name} is no function, but {type(found).__name__}")
    places = {each: getattr(made, "__module__", "") for each, made in names.items() if callable(made)}
    own = [each for each, place in places.items() if place == names["__name__"]]
    raise InputError(f"{file} has no function {name}; it has {', '.join(own) or 'none'}")


def _hugging_face(path: str) -> Planned:
    model = read_model(path)
    context, name = context_of(model), type(model).__name__
    imports = f"from transformers import AutoConfig, {name}"
    origin = Origin(imports, f"{name}(AutoConfig.from_pretrained({path!r}, use_cache=False))")
    return Planned(
        model,
        batch_of(model),
        transformers_layout(model),
        context,
        has_positions=has_positions(model, context),
        origin=origin,
    )


def _config(path: str, tree: Any) -> Config:
    if path.endswith(".json") and not tree.keys() & FIELDS.keys():
        raise InputError(f"{path} has neither a model_type, as Hugging Face configs have, nor fields of sherd train")
    return Config.of(tree)


def trained(config: Config) -> Planned:
    """Returns the model of a run of `sherd train`, plain and on the meta device. Raises InputError as `build` does."""
    return Planned(on_meta(config), token_batch, trained_layout(config), config.context, config)


def token_batch(samples: int, length: int) -> tuple[Tensor]:
    """Returns tokens on the meta device, the batch of a model that brings none of its own."""
    return (torch.zeros(samples, length, dtype=torch.int64, device="meta"),)


# The layout of planned models over the axes that are not data parallel


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
