"""How a model is laid over the axes of a mesh that are not data parallel, on ranks that do not exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sherd._torch import concatenate_meshes, flatten_mesh
from sherd.api.auto_shard import auto_shard, described, shard_units
from sherd.api.blocks import Wrapping, repeated_blocks, rewrapped
from sherd.api.fully_shard import fully_shard
from sherd.errors import InputError, PolicyError, SherdError, reason_of
from sherd.tools.plan.reading import Loss
from sherd.tools.simulate.settings import Mesh

__all__ = ["CUT_AXES", "Cut", "ModelLayout", "ParallelModel", "Shards", "auto_units"]

Shards = Callable[..., nn.Module]
"""A function that shards a model as `auto_shard` does, with the arguments of `fully_shard`."""

CUT_AXES = ("tp", "cp")
"""The axes that a user's functions lay a model over, the innermost first."""

Cut = Callable[[nn.Module, DeviceMesh], object]
"""A function that lays a model over one axis, in place, as `parallelize_module` does."""


def auto_units(model: nn.Module, wrapping: Wrapping = "auto", **fully_shard_args: Any) -> nn.Module:
    """Shard `model` by `auto_shard`, or as one unit if it names and repeats no units.

    Args:
        model: what to shard, in place.
        wrapping: "pairs": two successive blocks are one unit, which halves the number of collectives. "parts": large
            modules within a block, as attention and feed-forward, are units too, which takes less memory at once.
            "ends": large modules next to the blocks, as an embedding and a head, are units too.
        fully_shard_args: arguments of `fully_shard`, for every unit.

    Raises:
        PolicyError: another wrapping than "auto", and a model without repeated blocks.
    """
    lists = repeated_blocks(model).values()
    if wrapping != "auto":
        if not lists:
            raise PolicyError(f"wrapping={wrapping!r} is for repeated blocks, and {type(model).__name__} has none")
        units = rewrapped(model, described(model, fully_shard_args), lists, wrapping)
        return shard_units(model, units, fully_shard_args)
    says = ("_no_split_modules", "_fsdp_plan")
    describes_itself = any(getattr(module, name, None) for module in model.modules() for name in says)
    return (auto_shard if describes_itself or lists else fully_shard)(model, **fully_shard_args)


@dataclass(frozen=True)
class ParallelModel:
    """A model that is laid over all axes of a mesh but the data-parallel ones.

    Attributes:
        shard: shards the model over the data-parallel axes, with the other arguments of `fully_shard`.
        loss: of the model and a batch.
        running: makes the context in which forward and backward run.
    """

    shard: Shards
    loss: Loss
    running: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class ModelLayout:
    """How a model is laid over a mesh.

    Attributes:
        loss: of the model and a batch.
        shard: makes the units.
        cuts: by the name of an axis, `cp` or `tp`, the function that lays a model over it. Inner axes come first.
    """

    loss: Loss
    shard: Shards = auto_units
    cuts: Mapping[str, Cut] = field(default_factory=dict)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes other than data-parallel ones that may have several ranks."""
        return tuple(self.cuts)

    @property
    def rewraps(self) -> bool:
        """True if `shard` takes a `wrapping`."""
        return self.shard is auto_units

    def misfit(self, mesh: Mesh) -> str:
        """Returns why the model cannot be laid over `mesh`, or an empty text if it can."""
        others = [name for name in ("pp", "cp", "tp") if getattr(mesh, name) > 1 and name not in self.axes]
        return f"no layout says how this model is laid over {others[0]}" if others else ""

    def stage(self, model: nn.Module, number: int, num_stages: int) -> nn.Module:
        """Returns the part of `model` in one stage of a pipeline."""
        raise NotImplementedError("a layout with the axis pp says what its stages are")

    def stream_numel(self, batch: Any, mesh: Mesh) -> int:
        """Returns the number of elements that a stage sends to the next one."""
        raise NotImplementedError("a layout with the axis pp says what its stages send")

    def lay(self, model: nn.Module, mesh: Mesh) -> ParallelModel:
        """Lay `model` in place over the axes that are not data parallel, as this rank of the default process group."""
        sizes = {"pp": mesh.pp, "replicate": mesh.replicate, "shard": mesh.shard, "cp": mesh.cp, "tp": mesh.tp}
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        whole = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for name in CUT_AXES:
            if name in sizes:
                _called(f"the function for {name}", self.cuts[name], model, whole[name])
        shard = flatten_mesh(whole["shard", "cp"], "shards") if "cp" in sizes else whole["shard"]
        data = concatenate_meshes([whole["replicate"], shard]) if "replicate" in sizes else shard
        return ParallelModel(partial(self.shard if self.rewraps else self._sharded, mesh=data), self.loss)

    def _sharded(self, model: nn.Module, **fully_shard_args: Any) -> nn.Module:
        sharded = _called("shard", self.shard, model, **fully_shard_args)
        if not isinstance(sharded, nn.Module):
            raise PolicyError(f"plan(shard=...): it returned {type(sharded).__name__}; expected the model, sharded")
        return sharded


def _called(name: str, function: Callable[..., object], *args: Any, **kwargs: Any) -> object:
    """Call a function of the user's. Raises InputError if it raises anything but sherd's own errors."""
    try:
        return function(*args, **kwargs)
    except SherdError:
        raise
    except Exception as error:
        raise InputError(f"{name} raised {type(error).__name__}: {reason_of(error)}") from error
