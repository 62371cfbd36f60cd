"""The planner: predicts a training under any settings. A model is read once, and sharded once for each way to shard.

`Planner` predicts exactly. `RoughPlanner` asks planners of smaller models, in less time, for a search.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from math import floor
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sherd._torch import REDUCES_IN_GRAD_DTYPE, STAGES_KEEP_BUFFERS, imagined_ranks, set_grad_dtype
from sherd.api.recompute import KeptResults
from sherd.comm.host.gloo import Gloo
from sherd.comm.host.sums import sum_dtype
from sherd.comm.streams import RecordingStreams, use_streams
from sherd.comm.transport import LargeCoalesced, SingleCalls, Transport
from sherd.comm.transports import use_transports
from sherd.errors import InputError, PolicyError, SherdError
from sherd.layout.runs import Flat, Owned
from sherd.policy import MixedPrecisionPolicy, PrefetchPolicy
from sherd.tensor.structures import map_tensors
from sherd.tools.plan.axes import ModelLayout
from sherd.tools.plan.reading import read_work
from sherd.tools.plan.sharding import (
    Run,
    block_lists,
    most_loaded,
    renumbered,
    sharded_of,
    spread,
    thin_out,
    with_blocks,
    with_fewer_blocks,
    with_replicas,
)
from sherd.tools.simulate.cluster import Cluster
from sherd.tools.simulate.costs import op_seconds
from sherd.tools.simulate.play import Stage
from sherd.tools.simulate.predict import Prediction, RankWork, predict, predict_pipeline
from sherd.tools.simulate.search import IMPOSSIBLE, Outcome
from sherd.tools.simulate.segments import OptimizerPart, Part, parts_of, parts_of_step, read_outside
from sherd.tools.simulate.settings import Mesh, Settings, comm_policy, offload_policy, parts_of_offload
from sherd.tools.simulate.sharded import Optimizer, Sharded
from sherd.tools.simulate.work import Allocate, Event, RankGroup, TensorKind, Work, checkpointed, scaled

if TYPE_CHECKING:
    from sherd.tools.plan.matrices import StepOfMatrices

NOT_OF_SHARDING = ("checkpointing", "recompute", "offload", "step_in_backward", "micro_batch", "micro_batches")
"""Settings that decide nothing about sharding."""
NOT_OF_CUTS = (*NOT_OF_SHARDING, "reshard", "prefetch")
"""Settings that decide nothing about how parameters are cut."""
ACCUMULATING = ("zero1", "ddp")
"""Strategies that keep unsharded gradients from one micro-batch to the next, with `sherd.accumulate`."""
MOST_PLAYED = 512
"""The most micro-batches of a step that are simulated. Each further one counts as the last one."""


class ArgumentError(PolicyError):
    """An argument of `plan` is wrong. A command names its flag instead of `argument`, and gives the same reason."""

    def __init__(self, argument: str, value: object, said: str) -> None:
        super().__init__(f"plan({argument}={value}): {said}")
        self.argument, self.said = argument, said


@dataclass(frozen=True)
class Training:
    """A model, and how it is trained.

    Attributes:
        model: on the meta device, its parameters in the dtype that the optimizer steps. It is copied.
        batch: returns a batch of so many samples, on the meta device.
        layout: the loss, the units, and how the model is laid over axes that are not data parallel.
        optimizer: steps all trainable parameters.
        compute_dtype: of forward and backward (mixed precision, with gradients reduced in float32); None: that of the
            parameters.
        samples: the size of a batch that the model surely runs with.
        stage: "first" or "last" if `model` is a stage of a pipeline.
        stages_keep_buffers: a pipeline's stages have memory for all that they will receive, as torch's had before 2.15.
        copies_out: what accelerators gather is copied out of rows, as by torch's FSDP2.
    """

    model: nn.Module
    batch: Callable[[int], Any]
    layout: ModelLayout
    optimizer: Optimizer
    compute_dtype: torch.dtype | None = None
    samples: int = 1
    stage: str = ""
    stages_keep_buffers: bool = STAGES_KEEP_BUFFERS
    copies_out: bool = False


class Planner:
    """Predicts steps of `training` on `cluster`. This process must not be in a process group.

    A rough planner, for a search, reads the model with one batch only and scales its work for other sizes. It shards
    the model once for all prefetch depths and numbers of replicas, and takes every pipeline for one of two stages. A
    planner `like` this one, whose model has more or fewer of the same blocks, lends its sharded models. Of the step of
    matrices of the `whole` model this one, with fewer blocks, counts as large a share as it has of the blocks.
    """

    def __init__(
        self,
        training: Training,
        cluster: Cluster,
        is_rough: bool = False,
        like: Planner | None = None,
        whole: Planner | None = None,
    ) -> None:
        self._whole = whole or self
        self.training, self.cluster, self._is_rough = training, cluster, is_rough
        # Muon gives the matrices of each block to other ranks, so that no block stands for all.
        self._lender = self if like is None or training.optimizer.is_muon else like
        # Caches of one planner: a cache on the class would keep all planners and their models alive.
        self._read = cache(self._read_once)
        self._any_read: dict[Mesh, Work] = {}
        """By mesh, a micro-batch of any size, for the names of modules and parameters."""
        self._work = cache(self._work_of)
        self._sharded = cache(self._shard_once)
        self._thin = cache(self._shard_thin)
        self._thinned = cache(self._thin_out)
        self._step = cache(self._read_step)
        self._matrices = cache(self._cut_step)
        self._parts: dict[Hashable, tuple[Part, ...]] = {}
        self._of_stage = cache(self._stage_planner)

    @property
    def has_holes(self) -> bool:
        """True if predictions count the holes in the allocator's pools as reserved."""
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
        mesh, num = settings.mesh, settings.micro_batches
        if settings.step_in_backward and (mesh.pp > 1 or self.training.optimizer.is_muon):
            said = "pipelines divide gradients after it" if mesh.pp > 1 else "of muon the step after it is planned"
            raise ArgumentError("step_in_backward", True, f"{said}; leave one of them out")
        if mesh.pp == 1:
            return predict(
                self._rank_work(settings),
                self.cluster,
                mesh,
                micro_batches=num,
                reduces_each=settings.strategy not in ACCUMULATING,
                has_holes=self.has_holes,
                title=title,
                steps_in_backward=settings.step_in_backward,
            )
        training = self.training
        numel = training.layout.stream_numel(training.batch(settings.micro_batch), mesh)
        keep = training.stages_keep_buffers
        dtype, pair = training.compute_dtype or torch.float32, RankGroup(2, mesh.num_ranks // mesh.pp)
        num_stages = 2 if self._is_rough else mesh.pp
        ranks = [self._of_stage(num_stages, name)._rank_work(settings) for name in ("first", "last")]
        logits = (
            each for each in ranks[1].work.events if isinstance(each, Allocate) and each.kind is TensorKind.LOGITS
        )
        output = next((each.nbytes for each in logits), 0)
        first, last = (
            replace(each, stage=Stage(number, mesh.pp, numel * dtype.itemsize, pair, output, keep))
            for each, number in zip(ranks, (0, mesh.pp - 1), strict=True)
        )
        return predict_pipeline(
            first, last, self.cluster, mesh, micro_batches=num, has_holes=self.has_holes, title=title
        )

    def read(self, samples: int) -> Work:
        """Returns the work of a micro-batch of `samples` on a rank alone. Raises InputError as `predict`."""
        return self._read(samples, Mesh(1))

    def _stage_planner(self, num_stages: int, name: str) -> Planner:
        number = num_stages - 1 if name == "last" else 0
        model = self.training.layout.stage(self.training.model, number, num_stages)
        like = None if self._lender is self else self._lender._of_stage(num_stages, name)
        return Planner(replace(self.training, model=model, stage=name), self.cluster, self._is_rough, like)

    def _rank_work(self, settings: Settings) -> RankWork:
        work_key = settings.micro_batch, _without_data(settings.mesh), settings.checkpointing, settings.recompute
        work = self._work(*work_key)
        what = parts_of_offload(settings.offload)[0]
        as_cut = replace(_usual(settings, NOT_OF_SHARDING), offload="masters" if what == "masters" else "nothing")
        sharded = self._sharded(as_cut)
        sharded = self._offloaded(sharded, settings)
        parts_key = work_key, sharded.cuts, settings.wrapping
        if parts_key not in self._parts:
            device = self.cluster.device
            outside = read_outside(work, sharded) if settings.wrapping != "auto" else None
            if outside is not None:
                said = f"forward reads {outside} while no module of its unit runs"
                raise ArgumentError("wrapping", repr(settings.wrapping), said)
            self._parts[parts_key] = parts_of(work, sharded, lambda op: op_seconds(op, device))
        return RankWork(
            work,
            sharded,
            self._parts[parts_key],
            self._matrices(_usual(settings, NOT_OF_CUTS)),
        )

    def _offloaded(self, sharded: Sharded, settings: Settings) -> Sharded:
        """Returns `sharded`, all of which is on the device, with what `settings` say resting elsewhere."""
        if settings.offload == "nothing" or not self.cluster.device.overlaps or self.cluster.one_memory:
            return sharded  # the host's memory is the device's
        said, (what, _, folder) = "", parts_of_offload(settings.offload)
        if self.training.optimizer.is_muon and what not in ("state", "activations"):
            said = "of muon only state elsewhere is planned; choose state, or leave one of them out"
        elif what == "activations" and settings.mesh.pp > 1:
            said = "what several micro-batches save in a pipeline is not planned elsewhere; leave one of them out"
        elif self.cluster.disk is None and folder:
            said = "the cluster's file has no [disk]; add its latency and bandwidth"
        if said:
            raise ArgumentError("offload", repr(settings.offload), said)
        return sharded.offloaded(offload_policy(settings.offload))

    # Reading the model

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
            self._widen(model)
            return read_work(model, batch, loss, device_type)
        with _ranks_of(mesh, training.stage):
            laid = training.layout.lay(model, mesh)
            self._widen(model)
            with laid.running():
                return read_work(model, batch, laid.loss, device_type)

    def _widen(self, model: nn.Module) -> None:
        """Let gradients come as wide as autograd makes them, as the engine does since torch 2.15 if it widens them."""
        compute = self.training.compute_dtype
        if REDUCES_IN_GRAD_DTYPE and compute is not None and compute.itemsize < torch.float32.itemsize:
            for parameter in filter(lambda each: each.requires_grad, model.parameters()):
                set_grad_dtype(parameter, None)

    def _work_of(self, micro_batch: int, mesh: Mesh, checkpointing: float, recompute: str) -> Work:
        work = self._read(micro_batch, mesh)
        self._any_read.setdefault(mesh, work)
        if not checkpointing:
            return work
        blocks = {id(block) for block in spread(block_lists(self.training.model), checkpointing)}
        names = {name for name, module in self.training.model.named_modules() if id(module) in blocks}
        modules = [number for number, module in enumerate(work.modules) if module.name in names]
        return checkpointed(work, modules, (lambda: KeptResults().keeps) if recompute == "selective" else None)

    # Sharding the model

    def _shard_once(self, settings: Settings) -> Sharded:
        mesh, prefetch = settings.mesh, settings.prefetch
        work, usual = self._any_read[_without_data(mesh)], settings
        if self._is_rough:
            # Two replicas stand for more, which differ only in the size of the replicas' groups.
            few = mesh.replicate if settings.strategy != "auto" else min(mesh.replicate, 2)
            usual = replace(settings, prefetch=1, mesh=replace(mesh, replicate=few, pp=min(mesh.pp, 2)))
        thin, thin_work = self._lender._thin(usual)
        whole = with_blocks(renumbered(thin, thin_work, work), self._thinned(together(settings))[1], work)
        if whole is None:
            whole = self._shard(self.training.model, usual, work)
        if usual != settings:
            whole = replace(whole, limits=replace(whole.limits, forward_depth=prefetch, backward_depth=prefetch))
            whole = with_replicas(whole, mesh.replicate) if mesh.replicate != usual.mesh.replicate else whole
        return whole

    def _shard_thin(self, settings: Settings) -> tuple[Sharded, Work]:
        """Returns the sharded model with one block of each kind, and the work that numbers its modules."""
        work = self._any_read[_without_data(settings.mesh)]
        model, _ = self._thinned(together(settings))
        return self._shard(model, settings, work), work

    def _shard(self, model: nn.Module, settings: Settings, work: Work, rank: int | None = None) -> Sharded:
        """Returns what `rank` has of `model`; without a rank, what the first has, or the one with the most elements."""
        with self._machines(settings.mesh, rank):
            sharded, step = self._sharded_model(model, settings)
            most = dist.get_rank() if settings.placement != "whole" or rank is not None else most_loaded(sharded)
            if most == dist.get_rank():
                return sharded_of(sharded, work, self.training.optimizer, step.names if step else ())
        return self._shard(model, settings, work, most)

    def _sharded_model(self, model: nn.Module, settings: Settings) -> tuple[nn.Module, StepOfMatrices | None]:
        """Returns a copy of `model`, sharded over the imagined ranks, and the optimizer's step of its matrices."""
        model = copy.deepcopy(model)
        if settings.offload == "masters":
            self._require_masters()
            model.to(torch.bfloat16)
        laid = self.training.layout.lay(model, settings.mesh)
        model = laid.shard(model, **fully_shard_args(settings, self.training.compute_dtype))
        if not self.training.optimizer.is_muon:
            return model, None
        from sherd.tools.plan.matrices import StepOfMatrices  # loaded for Muon alone

        return model, StepOfMatrices.of(model, on_host=not self.cluster.device.overlaps)

    def _require_masters(self) -> None:
        """Raise ArgumentError unless bfloat16 weights with masters train as the model does."""
        training = self.training
        dtypes = {each.dtype for each in training.model.parameters()}
        if training.compute_dtype is not torch.bfloat16 and dtypes != {torch.bfloat16}:
            raise ArgumentError("offload", "'masters'", "masters are of weights that compute in bfloat16; choose state")

    def _cut_step(self, settings: Settings) -> tuple[OptimizerPart, ...]:
        """Returns the optimizer's step of matrices: of the full model's step a share, as of its blocks."""
        if not self.training.optimizer.is_muon:
            return ()
        number, of_all = (len(spread(block_lists(each.training.model), 1.0)) for each in (self, self._whole))
        device, share = self.cluster.device, number / of_all if of_all else 1.0
        return tuple(parts_of_step(self._whole._step(settings), lambda op: op_seconds(op, device), share))

    def _read_step(self, settings: Settings, rank: int | None = None) -> Sequence[Event]:
        """Returns what the rank that computes the most does with matrices in a step; `rank` may be that rank."""
        with self._machines(settings.mesh, rank):
            _, step = self._sharded_model(self.training.model, settings)
            if step is None or step.most_loaded == dist.get_rank():
                return step.events() if step else ()
            most = step.most_loaded
        return self._read_step(settings, most)

    def _thin_out(self, together: int) -> tuple[nn.Module, dict[Run, Run]]:
        model = copy.deepcopy(self.training.model)
        return model, {} if self.training.optimizer.is_muon else thin_out(model, together)

    @contextmanager
    def _machines(self, mesh: Mesh, rank: int | None = None) -> Iterator[None]:
        """A context with the imagined ranks of `mesh`, this process as `rank`, on machines of the cluster."""
        overlaps = self.cluster.device.overlaps
        make = _on_one_host if mesh.num_ranks // mesh.replicate <= self.cluster.devices_per_node else _between_hosts
        between = SingleCalls if self.training.copies_out else LargeCoalesced
        transports = use_transports((lambda group, _: between(group)) if overlaps else make)
        ranks = _ranks_of(mesh, self.training.stage) if rank is None else imagined_ranks(mesh.num_ranks, rank)
        with ranks, transports, use_streams(RecordingStreams()) if overlaps else nullcontext():
            yield


def _usual(settings: Settings, names: Iterable[str]) -> Settings:
    usual = Settings(settings.mesh)
    return replace(settings, **{name: getattr(usual, name) for name in names})


def together(settings: Settings) -> int:
    """Returns the most blocks in a unit."""
    return 2 if settings.wrapping == "pairs" else 1


def _without_data(mesh: Mesh) -> Mesh:
    """Returns `mesh` with no more ranks than a forward needs: of the stages these are the first and the last one."""
    return replace(mesh, shard=1, replicate=1, pp=min(mesh.pp, 2))


def _ranks_of(mesh: Mesh, stage: str) -> AbstractContextManager[None]:
    """Returns a context with the imagined ranks of `mesh`, and this process as one rank of a stage.

    With `cp` this rank has the last part of each sample: the part whose attention sees all others.
    """
    before = mesh.num_ranks - mesh.num_ranks // mesh.pp if stage == "last" else 0
    return imagined_ranks(mesh.num_ranks, before + (mesh.cp - 1) * mesh.tp)


CUTS = {"flat": Flat(), "whole": Owned()}
"""The `placement` of `fully_shard` by its name in `Settings`."""


def fully_shard_args(settings: Settings, compute_dtype: torch.dtype | None) -> dict[str, Any]:
    """Returns the arguments of `auto_units`, without `mesh`, that `settings` stand for.

    Without `wrapping`, which only settings with unusual units have, these are arguments of `fully_shard`.
    """
    arguments: dict[str, Any] = {"wrapping": settings.wrapping} if settings.wrapping != "auto" else {}
    if settings.prefetch != 1:
        arguments["prefetch_policy"] = PrefetchPolicy(settings.prefetch, settings.prefetch)
    if settings.strategy != "auto":  # parameters are kept, also by a model that says itself when they are freed
        arguments |= {"placements": settings.strategy, "reshard_after_forward": None}
    elif not settings.reshard:
        arguments["reshard_after_forward"] = False
    if settings.placement != "shard":
        arguments["placement"] = CUTS[settings.placement]
    if settings.replicate_below:
        arguments["replicate_below"] = settings.replicate_below
    if settings.offload != "nothing":
        arguments["offload_policy"] = offload_policy(settings.offload)
    if settings.formats or settings.reproducible:
        arguments["comm_policy"] = comm_policy(settings, torch.bfloat16)
    if compute_dtype is not None:
        arguments["mp_policy"] = MixedPrecisionPolicy(compute_dtype, torch.float32)
    return arguments


def compute_in(dtype: torch.dtype, model: nn.Module) -> None:
    """Let `model` compute as under a MixedPrecisionPolicy.

    Parameters are cast, and inputs of the model and of its blocks, which will be units. Buffers stay as they are.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_tensors(cast, args), map_tensors(cast, kwargs)

    for unit in (model, *(block for blocks in block_lists(model) for block in blocks)):
        unit.register_forward_pre_hook(cast_inputs, with_kwargs=True)


# Transports of ranks that do not exist, with the buffers and copies of those that ranks of a cluster have


class _TorchOnHost(SingleCalls):
    """torch's calls over gloo, which copies what it reduces."""

    def scratch_bytes(self, sizes: Sequence[int], rank: int, itemsize: int) -> int:
        return sum(sizes) * itemsize


class _Shared(SingleCalls):
    """CPU ranks of one host, which read one another's memory."""

    shares_memory = True

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return sum_dtype(dtype)


def _on_one_host(group: dist.ProcessGroup, wanted: str) -> Transport:
    return _Shared(group) if wanted in ("auto", "shared_memory") else _between_hosts(group, wanted)


def _between_hosts(group: dist.ProcessGroup, wanted: str) -> Transport:
    return Gloo(group) if wanted in ("auto", "gloo") else _TorchOnHost(group)


# Rough predictions

FEW, MORE = 2, 4
"""The numbers of blocks of the two models that a rough prediction simulates. Further blocks count as the difference."""
MICRO_BATCHES = 3
"""The micro-batches that a rough prediction simulates. Each further one counts as the last one."""


class RoughPlanner:
    """Predicts the seconds and bytes of steps in little time, for a search, by extrapolation.

    It extrapolates from few blocks to many, from few micro-batches to many, from one batch to other sizes, and between
    0, 50 and 100 % of blocks computed again.
    """

    def __init__(self, training: Training, cluster: Cluster) -> None:
        self._training, self._cluster = training, cluster
        self._played = cache(self._play)
        self._planners = cache(self._make_planners)
        self._refusal = cache(self._find_refusal)
        self._lists = block_lists(training.model)
        self._whole = cache(lambda is_rough: Planner(training, cluster, is_rough))

    def _make_planners(self, times: int) -> tuple[list[Planner], int | None]:
        """Returns planners of the models with `times` `FEW` and `MORE` blocks, and the full model's number of blocks.

        Returns `[], None` if the model has fewer blocks, or blocks that differ.
        """
        training, cluster, model = self._training, self._cluster, self._training.model
        few, more = (with_fewer_blocks(model, number * times) for number in (FEW, MORE))
        if few is None or more is None:
            return [], None
        whole = self._whole(True)
        first = Planner(replace(training, model=few[0]), cluster, is_rough=True, whole=whole)
        return [first, Planner(replace(training, model=more[0]), cluster, True, first, whole)], few[1]

    def runs_with(self, samples: int) -> bool:
        """Returns whether the model runs with a batch of so many `samples`."""
        return self._refusal(samples) is None

    def _find_refusal(self, samples: int) -> InputError | None:
        """Returns the error of a model that runs with its own batch, but not with a batch of `samples`."""
        own = self._training.samples
        if samples == own:
            return None
        few = with_fewer_blocks(self._training.model, FEW)
        reader = Planner(self._training if few is None else replace(self._training, model=few[0]), self._cluster)
        try:
            reader.read(samples)
        except InputError as error:
            with suppress(InputError):
                reader.read(own)
                return error  # else the model refuses any number of samples
        return None

    def outcome(self, settings: Settings) -> Outcome:
        """Returns what a step takes under `settings`. Raises as `Planner.predict` does."""
        refusal = self._refusal(settings.micro_batch)
        if refusal is not None:
            raise refusal
        num_blocks = len(spread(self._lists, 1.0))
        what, part, folder = parts_of_offload(settings.offload)
        if 0 < part < 1:  # of few blocks it would be another part
            all_of_it = replace(settings, offload=f"{what}{'@' * bool(folder)}{folder}")
            return _between(self.outcome(replace(settings, offload="nothing")), self.outcome(all_of_it), part)
        share = len(spread(self._lists, settings.checkpointing)) / num_blocks if num_blocks else 0.0
        if self._few_blocks(settings)[1] is None:
            return self._of_all(replace(settings, checkpointing=share))
        lower = floor(2 * share) / 2
        outcome, part = self._of_all(replace(settings, checkpointing=lower)), 2 * (share - lower)
        return _between(outcome, self._of_all(replace(settings, checkpointing=lower + 0.5)), part) if part else outcome

    def _of_all(self, settings: Settings) -> Outcome:
        num = min(settings.micro_batches, max(MICRO_BATCHES, settings.mesh.pp + 1))
        last, others = self._played(replace(settings, micro_batches=num)), settings.micro_batches - num
        return _between(self._played(replace(settings, micro_batches=num - 1)), last, 1 + others) if others else last

    def _play(self, settings: Settings) -> Outcome:
        planners, num = self._few_blocks(settings)
        first, *more = (planner.predict(settings).outcome for planner in planners)
        return first if num is None else _between(first, more[0], (num - FEW) / (MORE - FEW))

    def _few_blocks(self, settings: Settings) -> tuple[list[Planner], float | None]:
        """Returns planners of models with `FEW` and `MORE` units of blocks, and the number of units in one stage.

        If the full model has no more units: its own planner alone.
        """
        pp, run = settings.mesh.pp, together(settings)
        planners, num = self._planners(min(pp, 2) * run)
        if num is None or num < MORE * pp * run:
            return [self._whole(pp == 1)], None
        return planners, num / pp / run


Evaluate = Callable[[Settings], Outcome]


def or_impossible(evaluate: Evaluate) -> Evaluate:
    """Returns `evaluate` with the answer `IMPOSSIBLE` for settings that the model refuses."""

    def evaluated(settings: Settings) -> Outcome:
        try:
            return evaluate(settings)
        except SherdError:
            return IMPOSSIBLE

    return evaluated


def _between(first: Outcome, last: Outcome, part: float) -> Outcome:
    """Returns the outcome on the line through `first` (at 0) and `last` (at 1) at `part`."""
    seconds = first.seconds + part * (last.seconds - first.seconds)
    nbytes, host_bytes = (
        round(before + part * (after - before))
        for before, after in ((first.nbytes, last.nbytes), (first.host_bytes, last.host_bytes))
    )
    return Outcome(seconds, nbytes, host_bytes)
