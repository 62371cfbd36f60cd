"""The planner: predicts a training under any settings. A model is read once, and sharded once for each way to shard."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sherd._torch import imagined_ranks
from sherd.api.blocks import repeated_blocks
from sherd.comm.streams import RecordingStreams, use_streams
from sherd.comm.transports import use_transports
from sherd.engine.run.structures import map_tensors
from sherd.layout.runs import Flat
from sherd.planning.axes import Layout
from sherd.planning.blocks import thin_out, with_blocks, with_fewer_blocks
from sherd.planning.reading import read_work
from sherd.planning.sharding import sharded_of
from sherd.planning.transports import between_hosts, on_one_host
from sherd.policy import CPUOffloadPolicy, MixedPrecisionPolicy, PrefetchPolicy
from sherd.simulate.cluster import Cluster
from sherd.simulate.costs import op_seconds
from sherd.simulate.predict import Prediction, predict
from sherd.simulate.search import Outcome
from sherd.simulate.settings import Mesh, Settings
from sherd.simulate.sharded import Optimizer, Sharded
from sherd.simulate.stretches import Part, parts_of
from sherd.simulate.transform import checkpointed, scaled
from sherd.simulate.work import Work

@dataclass(frozen=True)
class Training:
    """A model, and how it is trained.

    Attributes:
        model: on the meta device, its parameters in the dtype that the optimizer steps. It is copied.
        batch: returns a batch of so many samples, on the meta device.
        layout: the loss, the units, and how the model is laid over axes that are not data parallel.
        optimizer: steps all trainable parameters.
        compute_dtype: forward and backward compute in it (mixed precision, with gradients reduced in float32); None:
            in that of the parameters.
        samples: a batch of so many is one that the model runs with.
    """

    model: nn.Module
    batch: Callable[[int], Any]
    layout: Layout
    optimizer: Optimizer
    compute_dtype: torch.dtype | None = None
    samples: int = 1


class Planner:
    """Predicts steps of `training` on `cluster`. This process must not be in a process group.

    With `is_rough`, the model is read with one batch only, and its work scaled for others: for a search.
    """

    def __init__(self, training: Training, cluster: Cluster, is_rough: bool = False) -> None:
        self.training, self.cluster, self._is_rough = training, cluster, is_rough
        self._read = cache(self._read_once)
        self._work = cache(self._work_of)
        self._sharded = cache(self._shard_once)
        self._parts = cache(self._cut_once)

    def predict(self, settings: Settings, title: str = "") -> Prediction:
        """Returns the prediction of a step.

        Raises:
            InputError: the model does not run without values.
            SherdError: it cannot be sharded so.
        """
        work_key = settings.micro_batch, _without_data(settings.mesh), settings.checkpointing
        sharded_key = settings.mesh, settings.placement, settings.reshard, settings.prefetch
        sharded = self._sharded(*sharded_key)
        return predict(
            self._work(*work_key),
            offloaded(sharded) if settings.offload else sharded,
            self.cluster,
            settings.mesh,
            parts=self._parts(work_key, sharded_key),
            micro_batches=settings.micro_batches,
            title=title,
        )

    def _read_once(self, micro_batch: int, mesh: Mesh) -> Work:
        training = self.training
        if self._is_rough and micro_batch != training.samples:
            return scaled(self._read(training.samples, mesh), micro_batch / training.samples)
        model, loss = copy.deepcopy(training.model), training.layout.loss
        if training.compute_dtype is not None:
            _compute_in(training.compute_dtype, model)
        device_type = "cuda" if self.cluster.device.overlaps else "cpu"
        if mesh.num_ranks == 1:
            return read_work(model, training.batch(micro_batch), loss, device_type)
        with _imagined(mesh):
            laid = training.layout.lay(model, mesh)
            with laid.running():
                return read_work(model, training.batch(micro_batch), laid.loss, device_type)

    def _work_of(self, micro_batch: int, mesh: Mesh, checkpointing: float) -> Work:
        work = self._read(micro_batch, mesh)
        if not checkpointing:
            return work
        lists = repeated_blocks(self.training.model).values()
        blocks = {id(block) for each in lists for block in _spread(each, checkpointing)}
        names = {name for name, module in self.training.model.named_modules() if id(module) in blocks}
        return checkpointed(work, [number for number, each in enumerate(work.modules) if each.name in names])

    def _cut_once(self, work_key: tuple[int, Mesh, float], sharded_key: tuple[Mesh, str, bool, int]) -> tuple[Part, ...]:
        device = self.cluster.device
        return parts_of(self._work(*work_key), self._sharded(*sharded_key), lambda op: op_seconds(op, device))

    def _shard_once(self, mesh: Mesh, placement: str, reshard: bool, prefetch: int) -> Sharded:
        work, training = self._read(self.training.samples, _without_data(mesh)), self.training
        settings = Settings(mesh, placement, reshard, prefetch=prefetch)
        arguments = fully_shard_args(settings, training.compute_dtype)
        cluster = self.cluster
        if cluster.device.overlaps:
            machine: AbstractContextManager[None] = use_streams(RecordingStreams())
        else:
            is_one_host = mesh.num_ranks // mesh.replicate <= cluster.devices_per_node
            machine = use_transports(on_one_host if is_one_host else between_hosts)
        with _imagined(mesh), machine:

            def shard(model: nn.Module) -> Sharded:
                laid = training.layout.lay(model, mesh)
                return sharded_of(laid.shard(model, **arguments), work, training.optimizer)

            model = copy.deepcopy(training.model)
            like = thin_out(model)
            sharded = shard(model)
            whole = with_blocks(sharded, like, work) if like else sharded
            return shard(copy.deepcopy(training.model)) if whole is None else whole


def _without_data(mesh: Mesh) -> Mesh:
    """Returns `mesh` with no more ranks than a forward needs that read other samples: those that exchange experts."""
    return replace(mesh, shard=mesh.ep, replicate=1)


def _imagined(mesh: Mesh) -> AbstractContextManager[None]:
    """The ranks of `mesh`. This one has the last part of samples that are cut, whose attention sees all of them."""
    return imagined_ranks(mesh.num_ranks, (mesh.cp - 1) * mesh.tp)


def _spread(blocks: Sequence[nn.Module], share: float) -> list[nn.Module]:
    """Returns so many of `blocks`, evenly spread."""
    number = round(share * len(blocks))
    return [each for at, each in enumerate(blocks) if (at + 1) * number // len(blocks) > at * number // len(blocks)]


FEW, MORE = 4, 8
"""Of many equal blocks a rough prediction plays so many, and adds the difference for each of the others."""


class RoughPlanner:
    """Predicts the seconds and bytes of steps in less time, for a search: of models with many equal blocks by models
    with fewer, and of several samples by what one takes."""

    def __init__(self, training: Training, cluster: Cluster) -> None:
        self._training, self._cluster = training, cluster

    @cached_property
    def _planners(self) -> tuple[list[Planner], float]:
        """The planners of both models, and how often their difference is added to the first."""
        model = self._training.model
        few, more = (with_fewer_blocks(model, number) for number in (FEW, MORE))
        models = [model] if few is None or more is None else [few[0], more[0]]
        num_more = (few[1] - FEW) / (MORE - FEW) if few is not None and more is not None else 0.0
        return [Planner(replace(self._training, model=each), self._cluster, is_rough=True) for each in models], num_more

    def outcome(self, settings: Settings) -> Outcome:
        """Returns what a step takes under `settings`. Raises as `Planner.predict` does."""
        planners, num_more = self._planners
        predictions = [planner.predict(settings) for planner in planners]
        first, last = predictions[0], predictions[-1]
        seconds, nbytes = first.timeline.seconds, first.driver_bytes
        return Outcome(
            seconds + num_more * (last.timeline.seconds - seconds),
            nbytes + round(num_more * (last.driver_bytes - nbytes)),
        )


def fully_shard_args(settings: Settings, compute_dtype: torch.dtype | None) -> dict[str, Any]:
    """Returns the arguments of `fully_shard`, besides `mesh`, that `settings` stand for."""
    arguments: dict[str, Any] = {}
    if settings.prefetch != 1:
        arguments["prefetch_policy"] = PrefetchPolicy(settings.prefetch, settings.prefetch)
    if settings.placement == "flat":
        arguments["placement"] = Flat()
    if not settings.reshard:
        arguments["reshard_after_forward"] = False
    if settings.offload:
        arguments["offload_policy"] = CPUOffloadPolicy()
    if compute_dtype is not None:
        arguments["mp_policy"] = MixedPrecisionPolicy(compute_dtype, torch.float32)
    return arguments


def _compute_in(dtype: torch.dtype, model: nn.Module) -> None:
    """Let `model` compute as under a MixedPrecisionPolicy: parameters are cast, and inputs of units, which are its
    blocks and itself; buffers stay."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_tensors(cast, args), map_tensors(cast, kwargs)

    for unit in (model, *(block for blocks in repeated_blocks(model).values() for block in blocks)):
        unit.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def offloaded(sharded: Sharded) -> Sharded:
    """Returns `sharded` with shards, gradients and optimizer state in host memory (`CPUOffloadPolicy`), on a device
    with streams. An all-gather sends from rows in the memory of the device, so no buffer is added."""
    units = tuple(
        replace(unit, groups=tuple(replace(sizes, shards=0, is_offloaded=True) for sizes in unit.groups))
        for unit in sharded.units
    )
    return replace(sharded, units=units, is_offloaded=True)
