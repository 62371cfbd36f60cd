"""The planner: predicts a training under any settings. A model is read once, and sharded once for each way to shard."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sherd._torch import imagined_ranks
from sherd.api.blocks import repeated_blocks
from sherd.api.recompute import KeptResults
from sherd.comm.streams import RecordingStreams, use_streams
from sherd.comm.transports import use_transports
from sherd.errors import InputError
from sherd.layout.runs import Flat
from sherd.policy import CPUOffloadPolicy, MixedPrecisionPolicy, PrefetchPolicy
from sherd.tensor.structures import map_tensors
from sherd.tools.plan.arguments import ArgumentError
from sherd.tools.plan.axes import Layout
from sherd.tools.plan.blocks import Run, block_lists, renumbered, spread, thin_out, with_blocks, with_replicas
from sherd.tools.plan.reading import read_work
from sherd.tools.plan.sharding import sharded_of
from sherd.tools.plan.transports import between_hosts, on_one_host
from sherd.tools.simulate.cluster import Cluster
from sherd.tools.simulate.costs import op_seconds
from sherd.tools.simulate.play import Stage
from sherd.tools.simulate.predict import Prediction, RankWork, predict, predict_pipeline
from sherd.tools.simulate.settings import Mesh, Settings
from sherd.tools.simulate.sharded import Optimizer, Sharded
from sherd.tools.simulate.stretches import Part, parts_of, read_outside
from sherd.tools.simulate.transform import Keeper, checkpointed, scaled
from sherd.tools.simulate.work import Group, Work


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
        stage: of a pipeline, if `model` is only that: "first" or "last".
    """

    model: nn.Module
    batch: Callable[[int], Any]
    layout: Layout
    optimizer: Optimizer
    compute_dtype: torch.dtype | None = None
    samples: int = 1
    stage: str = ""


class Planner:
    """Predicts steps of `training` on `cluster`. This process must not be in a process group.

    With `is_rough`, for a search, the model is read with one batch only, and its work scaled for others; it is sharded
    once for all that is gathered ahead and for any number of replicas; and it has the blocks of two stages of a
    pipeline, however many there are. A planner `like` this one, whose model has more or fewer of the same blocks, lends
    what it has sharded.
    """

    def __init__(
        self, training: Training, cluster: Cluster, is_rough: bool = False, like: Planner | None = None
    ) -> None:
        self.training, self.cluster, self._is_rough = training, cluster, is_rough
        self._lender = like or self
        self._read = cache(self._read_once)
        self._any_read: dict[Mesh, Work] = {}
        """By the mesh: a micro-batch of any size, for the names of modules and parameters."""
        self._work = cache(self._work_of)
        self._sharded = cache(self._shard_once)
        self._thin = cache(self._shard_thin)
        self._thinned = cache(self._thin_out)
        self._parts: dict[Hashable, tuple[Part, ...]] = {}
        self._of_stage = cache(self._stage_planner)

    @property
    def has_holes(self) -> bool:
        """Whether reserved memory has the holes of the allocator's pools."""
        return not self._is_rough

    def predict(self, settings: Settings, title: str = "") -> Prediction:
        """Returns the prediction of a step.

        Raises:
            InputError: the model does not run without values.
            PolicyError: forward reads a parameter while its unit would be sharded. SherdError: it cannot be sharded so.
        """
        more = settings.micro_batches - MOST_PLAYED
        if more > 0:
            before, last = (self._play(replace(settings, micro_batches=MOST_PLAYED - less), title) for less in (1, 0))
            return last.continued(before, MOST_PLAYED, more)
        return self._play(settings, title)

    def _play(self, settings: Settings, title: str) -> Prediction:
        mesh, times = settings.mesh, settings.micro_batches
        if mesh.pp == 1:
            return predict(
                self._rank_work(settings),
                self.cluster,
                mesh,
                micro_batches=times,
                reduces_each=settings.strategy not in ACCUMULATING,
                has_holes=self.has_holes,
                title=title,
            )
        training = self.training
        numel = training.layout.stream_numel(training.batch(settings.micro_batch), mesh)
        dtype, pair = training.compute_dtype or torch.float32, Group(2, mesh.num_ranks // mesh.pp)
        num_stages = 2 if self._is_rough else mesh.pp
        first, last = (
            replace(
                self._of_stage(num_stages, name)._rank_work(settings),
                stage=Stage(number, mesh.pp, numel * dtype.itemsize, pair),
            )
            for name, number in (("first", 0), ("last", mesh.pp - 1))
        )
        return predict_pipeline(
            first,
            last,
            self.cluster,
            mesh,
            micro_batches=times,
            has_holes=self.has_holes,
            title=title,
        )

    def read(self, samples: int) -> Work:
        """Returns the work of a micro-batch of so many `samples` on a rank alone. Raises InputError as `predict`."""
        return self._read(samples, Mesh(1))

    def _stage_planner(self, num_stages: int, name: str) -> Planner:
        number = num_stages - 1 if name == "last" else 0
        model = self.training.layout.stage(self.training.model, number, num_stages)
        like = None if self._lender is self else self._lender._of_stage(num_stages, name)
        return Planner(replace(self.training, model=model, stage=name), self.cluster, self._is_rough, like)

    def _rank_work(self, settings: Settings) -> RankWork:
        work_key = settings.micro_batch, _without_data(settings.mesh), settings.checkpointing, settings.recompute
        # What else there is decides nothing about sharding.
        usual = Settings(settings.mesh)
        cut = replace(settings, **{name: getattr(usual, name) for name in NOT_OF_SHARDING})
        work = self._work(*work_key)
        sharded = self._sharded(cut)
        parts_key = work_key, sharded.cuts, settings.wrapping
        if parts_key not in self._parts:
            self._parts[parts_key] = self._cut(work, sharded, settings.wrapping)
        if settings.offload and self.cluster.device.overlaps:  # else the host's memory is the device's
            sharded = sharded.offloaded()
        return RankWork(work, sharded, self._parts[parts_key])

    def _read_once(self, micro_batch: int, mesh: Mesh) -> Work:
        training = self.training
        if self._is_rough and micro_batch != training.samples:
            return scaled(self._read(training.samples, mesh), micro_batch / training.samples)
        try:
            return self._read_with(training.batch(micro_batch), mesh)
        except InputError as error:
            if micro_batch == training.samples:
                raise
            raise InputError(
                f"with {micro_batch} samples, where the batch given has {training.samples}: {error}"
            ) from error

    def _read_with(self, batch: Any, mesh: Mesh) -> Work:
        training = self.training
        model, loss = copy.deepcopy(training.model), training.layout.loss
        if training.compute_dtype is not None:
            compute_in(training.compute_dtype, model)
        device_type = "cuda" if self.cluster.device.overlaps else "cpu"
        if mesh.num_ranks == 1:
            return read_work(model, batch, loss, device_type)
        with _imagined(mesh, training.stage):
            laid = training.layout.lay(model, mesh)
            with laid.running():
                return read_work(model, batch, laid.loss, device_type)

    def _work_of(self, micro_batch: int, mesh: Mesh, checkpointing: float, recompute: str) -> Work:
        work = self._read(micro_batch, mesh)
        self._any_read.setdefault(mesh, work)
        if not checkpointing:
            return work
        blocks = {id(block) for block in spread(block_lists(self.training.model), checkpointing)}
        names = {name for name, module in self.training.model.named_modules() if id(module) in blocks}
        modules = [number for number, each in enumerate(work.modules) if each.name in names]
        return checkpointed(work, modules, _selective if recompute == "selective" else None)

    def _cut(self, work: Work, sharded: Sharded, wrapping: str) -> tuple[Part, ...]:
        device, name = self.cluster.device, read_outside(work, sharded) if wrapping != "auto" else None
        if name is not None:
            said = f"forward reads {name} while no module of its unit runs"
            raise ArgumentError("wrapping", repr(wrapping), said)
        return parts_of(work, sharded, lambda op: op_seconds(op, device))

    def _shard_once(self, settings: Settings) -> Sharded:
        mesh, prefetch = settings.mesh, settings.prefetch
        work, usual = self._any_read[_without_data(mesh)], settings
        if self._is_rough:
            few = mesh.replicate if settings.strategy != "auto" else min(mesh.replicate, 2)
            usual = replace(settings, prefetch=1, mesh=replace(mesh, replicate=few, pp=min(mesh.pp, 2)))
        thin, its_work = self._lender._thin(usual)
        whole = with_blocks(renumbered(thin, its_work, work), self._thinned(together(settings))[1], work)
        if whole is None:
            with self._imagined(usual.mesh):
                whole = self._shard(copy.deepcopy(self.training.model), usual, work)
        if usual != settings:
            whole = replace(whole, limits=replace(whole.limits, forward_depth=prefetch, backward_depth=prefetch))
            whole = with_replicas(whole, mesh.replicate) if mesh.replicate != usual.mesh.replicate else whole
        return whole

    def _shard_thin(self, settings: Settings) -> tuple[Sharded, Work]:
        """Returns the sharded model with one block of each kind, and the work by which it is numbered."""
        work = self._any_read[_without_data(settings.mesh)]
        with self._imagined(settings.mesh):
            model, _ = self._thinned(together(settings))
            return self._shard(copy.deepcopy(model), settings, work), work

    def _shard(self, model: nn.Module, settings: Settings, work: Work) -> Sharded:
        laid = self.training.layout.lay(model, settings.mesh)
        model = laid.shard(model, **fully_shard_args(settings, self.training.compute_dtype))
        return sharded_of(model, work, self.training.optimizer)

    def _thin_out(self, together: int) -> tuple[nn.Module, dict[Run, Run]]:
        model = copy.deepcopy(self.training.model)
        return model, thin_out(model, together)

    @contextmanager
    def _imagined(self, mesh: Mesh) -> Iterator[None]:
        """The ranks of `mesh` on machines of the cluster."""
        if self.cluster.device.overlaps:
            machine: AbstractContextManager[None] = use_streams(RecordingStreams())
        else:
            is_one_host = mesh.num_ranks // mesh.replicate <= self.cluster.devices_per_node
            machine = use_transports(on_one_host if is_one_host else between_hosts)
        with _imagined(mesh, self.training.stage), machine:
            yield


def _selective() -> Keeper:
    return KeptResults().keeps


def together(settings: Settings) -> int:
    """Returns how many blocks are in a unit, at most."""
    return 2 if settings.wrapping == "pairs" else 1


def _without_data(mesh: Mesh) -> Mesh:
    """Returns `mesh` with no more ranks than a forward needs: of those that read other samples, as many as exchange
    experts; of stages, a first and a last one."""
    return replace(mesh, shard=mesh.ep, replicate=1, pp=min(mesh.pp, 2))


def _imagined(mesh: Mesh, stage: str) -> AbstractContextManager[None]:
    """The ranks of `mesh`. This one is of a stage, and has the last part of samples that are cut, whose attention sees
    all of them."""
    before = mesh.num_ranks - mesh.num_ranks // mesh.pp if stage == "last" else 0
    return imagined_ranks(mesh.num_ranks, before + (mesh.cp - 1) * mesh.tp)


NOT_OF_SHARDING = ("checkpointing", "recompute", "offload", "micro_batch", "micro_batches")
ACCUMULATING = ("zero1", "ddp")
"""Strategies that keep whole gradients from one micro-batch to the next, with `sherd.accumulate`."""
MOST_PLAYED = 512
"""Of more micro-batches in a step so many are played, and the last one is added for each of the others."""


def fully_shard_args(settings: Settings, compute_dtype: torch.dtype | None) -> dict[str, Any]:
    """Returns the arguments of `fully_shard`, besides `mesh`, that `settings` stand for, and the policy of `auto_shard`
    that makes other units than it does by itself."""
    arguments: dict[str, Any] = {"policy": settings.wrapping} if settings.wrapping != "auto" else {}
    if settings.prefetch != 1:
        arguments["prefetch_policy"] = PrefetchPolicy(settings.prefetch, settings.prefetch)
    if settings.strategy != "auto":  # parameters are kept, also by a model that says itself when they are freed
        arguments |= {"placements": settings.strategy, "reshard_after_forward": None}
    elif not settings.reshard:
        arguments["reshard_after_forward"] = False
    if settings.placement == "flat":
        arguments["placement"] = Flat()
    if settings.offload:
        arguments["offload_policy"] = CPUOffloadPolicy()
    if compute_dtype is not None:
        arguments["mp_policy"] = MixedPrecisionPolicy(compute_dtype, torch.float32)
    return arguments


def compute_in(dtype: torch.dtype, model: nn.Module) -> None:
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
