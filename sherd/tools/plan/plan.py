"""`sherd.plan`: what a training takes on a cluster, and the fastest settings that fit, before the training runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sherd.errors import ModuleError, PolicyError, StateError
from sherd.requirements import require_floating_dtype, require_int
from sherd.tensor.structures import map_tensors, tensors_in
from sherd.tools.plan.axes import CUT_AXES, Cut, ModelLayout, Shards, auto_units
from sherd.tools.plan.in_words import advice_of, facts_of, lines_of, parted
from sherd.tools.plan.planner import (
    ArgumentError,
    Evaluate,
    Planner,
    RoughPlanner,
    Training,
    fully_shard_args,
    or_impossible,
)
from sherd.tools.plan.reading import Loss, own_or_usual_loss
from sherd.tools.plan.sharding import shares_of_blocks
from sherd.tools.simulate.cluster import Cluster, read_cluster
from sherd.tools.simulate.predict import Prediction
from sherd.tools.simulate.search import (
    IMPOSSIBLE,
    Outcome,
    Room,
    SearchResult,
    Verdict,
    cheapest_changes,
    garbage_left,
    published_on,
    search,
)
from sherd.tools.simulate.settings import (
    AXES,
    COSTS,
    FORMATS,
    HYBRID,
    KINDS,
    SHARES,
    STRATEGIES,
    VALUES,
    Mesh,
    Settings,
    Space,
    usual_name,
)
from sherd.tools.simulate.sharded import OPTIMIZERS, Optimizer
from sherd.tools.simulate.timeline import Advice, Candidate, Timeline, TriedSettings

__all__ = ["Plan", "mesh_of", "num_samples", "plan", "planned", "resized_batch"]

RETRIED = 4
"""The most searches for settings that fit when predicted exactly."""
WHY = {
    Verdict.FITS: "",
    Verdict.TIGHT: "tight: published trainings took more than planned",
    Verdict.NOT: "it takes more memory than there is",
}
MOST_ASKED = 4
"""The most searches for advice that fits when predicted exactly."""


@dataclass(frozen=True)
class Plan:
    """The settings of a training, and what a step takes. `print` it for a page of text.

    Attributes:
        settings: as given, or as chosen where none were given.
        prediction: of a step, on one rank.
        room: the memory of a device and of a node.
        found: the search; None if all settings were given.
        advice: the cheapest changes that fit, if `settings` do not; if they are tight, those that fit with a margin.
        compute_dtype: of forward and backward; None: that of the parameters.
        optimizer: steps the parameters.
        speedups: how many times as fast a step is with each format of fewer bits, as without it.
    """

    settings: Settings
    prediction: Prediction
    room: Room
    found: SearchResult | None
    advice: tuple[Advice, ...]
    compute_dtype: torch.dtype | None
    optimizer: Optimizer
    speedups: Mapping[str, float] = field(default_factory=dict)

    @property
    def training_in_words(self) -> str:
        """The dtype of forward and backward, and the optimizer."""
        dtype = {None: "in the parameters' dtype", torch.bfloat16: "bf16"}.get(
            self.compute_dtype, str(self.compute_dtype).removeprefix("torch.")
        )
        return f"{dtype}, {self.optimizer_name or 'an optimizer of its own'}"

    @property
    def optimizer_name(self) -> str:
        """The name of the optimizer; empty if it has none."""
        return next((name for name, optimizer in OPTIMIZERS.items() if optimizer == self.optimizer), "")

    @property
    def limit(self) -> int:
        """The bytes of a device."""
        return self.room.device

    @property
    def answer(self) -> Verdict:
        """Whether the training fits into the memory of a device and of its node."""
        return self.room.answer(self.prediction.outcome)

    @property
    def fits(self) -> bool:
        """True if the training fits as planned, maybe tightly."""
        return self.answer is not Verdict.NOT

    @property
    def timeline(self) -> Timeline:
        """The predicted step, for `sherd report`."""
        return replace(
            self.prediction.timeline,
            facts=facts_of(self.prediction, self.settings, self.room, self.training_in_words),
            lines={"reserved, with the driver": self.prediction.driver_bytes, "limit": self.limit},
        )

    @property
    def search(self) -> TriedSettings | None:
        """All settings that were tried, for a report."""
        if self.found is None:
            return None
        outcomes = self.found.outcomes
        ranking = dict.fromkeys((*self.found.ranking, *outcomes))
        candidates = []
        for settings in ranking:
            outcome = outcomes[settings]
            answer, words = self.room.answer(outcome), settings.in_words()
            fits, why = answer is not Verdict.NOT, WHY[answer]
            candidates.append(Candidate(str(settings), words, outcome.seconds, outcome.nbytes, fits, why))
        return TriedSettings(tuple(candidates), 0 if self.found.fits else -1, self.limit)

    @property
    def fully_shard_args(self) -> dict[str, Any]:
        """The arguments of `auto_shard`, without `mesh`, that shard the model as planned.

        A plan with unusual units has `wrapping` too, which `sherd.tools.plan.axes.auto_units` takes.
        """
        return fully_shard_args(self.settings, self.compute_dtype)

    def __str__(self) -> str:
        made = (self.prediction, self.settings, self.room, self.found, self.advice)
        lines = lines_of(*made, self.training_in_words, self.speedups)
        return "\n".join(parted(lines)) + "\n"


def plan(
    model: nn.Module,
    mesh: int | tuple[int, int] | Mapping[str, int],
    batch: Any,
    *,
    cluster: str | Path | Cluster = "h100",
    samples: int | None = None,
    loss: Loss | None = None,
    compute_dtype: torch.dtype | None = torch.bfloat16,
    optimizer: str | Optimizer = "adamw-fused",
    memory_limit: int | None = None,
    shard: Shards = auto_units,
    parallelize: Mapping[str, Cut] | None = None,
    formats: Sequence[str] = (),
    **settings: Any,
) -> Plan:
    """Predict a step of `model` on `cluster`, under the fastest settings that fit into memory.

        print(sherd.plan(model, 64, tokens, cluster="h100", checkpointing=True))

    The model is read on the meta device and sharded over ranks that do not exist: nothing is computed or sent. The
    schedule of a step is simulated on a clock and a memory meter. This process must not be in a process group.

    Args:
        model: on any device; its values are not read. It is not changed.
        mesh: the number of ranks, to try any mesh of them; or one mesh, as (replicas, shards) or as the ranks of its
            axes by name: `replicate`, `dp`, `cp`, `tp`.
        batch: of one forward: tensors in any containers, whose first dim is samples. Values are not read.
        cluster: the name of a shipped cluster, the path of a cluster file, or a `Cluster`.
        samples: of a step, over all ranks. None: as many on each rank as in `batch`.
        loss: of (model, batch). None: the `loss` in the model's output, for tokens the cross-entropy of the logits,
            else the sum of the outputs.
        compute_dtype: of forward and backward, with gradients reduced in float32 (mixed precision); None: that of the
            parameters.
        optimizer: "adamw", "adamw-fused", "sgd", "sgd-momentum", or a record of another one.
        memory_limit: the most bytes that the training may take of a device. None: all memory of a CPU; 95 % of an
            accelerator's, since kernels allocate for themselves.
        shard: makes the units, from the model and arguments of `fully_shard`. By default `auto_shard`; a model that
            names and repeats no units is one unit.
        parallelize: by the name of an axis, `tp` or `cp`, a function of the model and a DeviceMesh of this axis alone.
            It lays the model over the axis in place, as `parallelize_module` does. Only these axes are tried. With
            `cp`, the model takes its rank's part of each sample.
        formats: formats of fewer bits ("int8", "fp8_e4m3", "fp8_e5m2", "int4", "bf16") that gathers and reductions may
            travel in. They change values, so that none is chosen unless it is named here.
        settings: given instead of chosen: `strategy` ("auto", "zero2", "zero1" or "ddp", or another name of one, such
            as "zero3" or "full_shard"), `placement` ("shard", "flat", or "whole", which is chosen for muon alone),
            `wrapping` (the units: "auto", "pairs", "parts" or "ends"), `reshard`, `checkpointing` (True, False, or the
            share of blocks), `recompute` ("full", the default with a given `checkpointing`, or "selective", as with
            `selective_contexts`), `offload`, `prefetch`, `micro_batch` (samples in one forward of a rank),
            `step_in_backward` (True, never chosen: it excludes clipping).

    Returns:
        The settings and the prediction. It may not fit: `fits` says so, and `advice` what would.

    Raises:
        ModuleError: `model` is not a module.
        PolicyError: a wrong argument, such as a batch that ranks do not divide, or two that contradict each other.
        ClusterError: the cluster's file is wrong.
        StateError: this process is in a process group.
        InputError: the model does not run without values; the message names the module.
    """
    if not isinstance(model, nn.Module):
        hint = f"; call it: plan({getattr(model, '__name__', 'build')}(), ...)" if callable(model) else ""
        raise ModuleError(f"plan expects a module, got {type(model).__name__}{hint}")
    _require_arguments(cluster, compute_dtype, loss, shard, parallelize)
    on = cluster if isinstance(cluster, Cluster) else read_cluster(cluster)
    shape = mesh_of(mesh)
    first = num_samples(batch)
    training = Training(
        _on_meta(model),
        lambda size: resized_batch(batch, first, size),
        ModelLayout(loss or own_or_usual_loss, shard, parallelize or {}),
        _optimizer_of(optimizer),
        compute_dtype,
        first,
    )
    if samples is None:
        samples = first * (shape if isinstance(shape, int) else shape.num_data)
    return planned(training, on, shape, samples, memory_limit, settings, formats=formats)


@garbage_left()
def planned(
    training: Training,
    cluster: Cluster,
    mesh: int | Mesh,
    samples: int,
    memory_limit: int | None,
    given: Mapping[str, Any],
    title: str = "",
    formats: Sequence[str] = (),
) -> Plan:
    """Returns the plan of `training`; see `plan`."""
    if dist.is_initialized():
        raise StateError("plan() imagines ranks of its own; call it before init_process_group, or in another process")
    require_int("plan(samples={})", samples, 1)
    layout, given = training.layout, _settings_of(given, mesh)
    # Where the device is the host, offloading saves no memory.
    never = frozenset() if cluster.device.overlaps and not cluster.one_memory else frozenset({"offload"})
    for word in formats:
        if word not in COSTS:
            raise ArgumentError("formats", repr(word), f"expected formats of {', '.join(COSTS)}")
    space = replace(_space_of(training, cluster, mesh, samples, {*given, *never}), formats=tuple(formats))
    shape = _first_mesh(space, given) if isinstance(mesh, int) else mesh
    misfit = layout.misfit(shape)
    if misfit:
        raise ArgumentError("mesh", shape, misfit)
    of_a_rank, rest = divmod(samples, shape.num_data)
    if rest:
        raise ArgumentError("samples", samples, f"{shape.num_data} ranks do not divide it; take a multiple")
    rough = RoughPlanner(training, cluster)
    evaluate: Evaluate = cache(or_impossible(rough.outcome))
    default = {} if rough.runs_with(1) else {"micro_batch": training.samples}
    beginning = _beginning(shape, of_a_rank, default | given, layout)
    limit = memory_limit
    if limit is None:  # kernels of an accelerator allocate memory of their own
        limit = cluster.device.memory * (95 if cluster.device.overlaps else 100) // 100
    require_int("plan(memory_limit={})", limit, 1)
    room = Room(limit, cluster.host_memory, published_on(cluster))
    exactly = partial(
        Planner(training, cluster).predict, title=title or f"{type(training.model).__name__} on {space.num_ranks} ranks"
    )
    found = None
    if space.choices:
        rough.outcome(beginning)  # raises if these settings are impossible: a search begins with possible ones
        if "wrapping" not in space.fixed:
            space = replace(space, wrappings=_wrappings(evaluate, layout, beginning))
        saving = replace(beginning, **({"checkpointing": 1.0} | given))
        first = min((beginning, saving), key=lambda settings: room.merit(evaluate(settings)))
        found, prediction = _searched(evaluate, exactly, space, first, room)
    else:
        prediction = exactly(beginning)
    settings = beginning if found is None else found.best
    advice: tuple[Advice, ...] = ()
    if room.answer(prediction.outcome) is not Verdict.FITS:
        space = replace(space, fixed=never, wrappings=_wrappings(evaluate, layout, settings))
        wanted = room if room.lack(prediction.outcome) else Room(room.roomy, room.host)
        advice = _advice(evaluate, exactly, space, settings, prediction, wanted)
    speedups = {
        name: evaluate(replace(settings, **dict[str, Any]({name: usual}))).seconds / evaluate(settings).seconds
        for name, (usual, *_) in FORMATS.items()
        if name in settings.formats and name not in settings.without_effect
    }
    return Plan(settings, prediction, room, found, advice, training.compute_dtype, training.optimizer, speedups)


# The search


def _space_of(training: Training, cluster: Cluster, mesh: int | Mesh, samples: int, fixed: set[str]) -> Space:
    """Returns the settings to choose from, apart from the `fixed` ones."""
    layout = training.layout
    if not isinstance(mesh, int):
        fixed = fixed | {"mesh"}
    if not layout.rewraps:
        fixed = fixed | {"wrapping"}
    if "checkpointing" in fixed:
        fixed = fixed | {"recompute"}
    return Space(
        mesh if isinstance(mesh, int) else mesh.num_ranks,
        samples,
        cluster.devices_per_node,
        frozenset(fixed),
        axes=layout.axes,
        # Uncut parameters balance worse, and save nothing but messages of an optimizer that needs full matrices.
        placements=VALUES["placement"] if training.optimizer.is_muon else ("shard", "flat"),
        shares=shares_of_blocks(training.model, SHARES),
        fits=lambda mesh: not layout.misfit(mesh),
    )


def _searched(
    evaluate: Evaluate, exactly: Callable[[Settings], Prediction], space: Space, first: Settings, room: Room
) -> tuple[SearchResult, Prediction]:
    """Returns the search, and the exact prediction of its best settings.

    `evaluate` leaves out holes in the allocator's pools. If the best settings do not fit, or have no margin, because of
    their holes, the search is repeated with as many bytes of holes in all settings.
    """
    tried: list[tuple[SearchResult, Prediction]] = []
    holes = 0
    while True:
        found = search(_with_holes(evaluate, holes), space, [first], room)
        first, prediction = found.best, exactly(found.best)
        tried.append((found, prediction))
        answer = room.answer(prediction.outcome)
        if not found.fits or answer in (Verdict.FITS, room.answer(found.outcomes[first])) or len(tried) == RETRIED:
            found, prediction = min(tried, key=lambda attempt: room.merit(attempt[1].outcome))
            return found.corrected({each.best: exact.outcome for each, exact in tried}), prediction
        holes = prediction.driver_bytes - evaluate(first).nbytes


def _advice(
    evaluate: Evaluate,
    exactly: Callable[[Settings], Prediction],
    space: Space,
    settings: Settings,
    prediction: Prediction,
    room: Room,
) -> tuple[Advice, ...]:
    """Returns the cheapest changes of `settings` that fit by an exact prediction."""
    rough = _with_holes(evaluate, prediction.driver_bytes - evaluate(settings).nbytes)
    exact, exact_of = {settings: prediction.outcome}, or_impossible(lambda each: exactly(each).outcome)

    def known(settings: Settings) -> Outcome:
        return exact.get(settings) or rough(settings)

    for _ in range(MOST_ASKED):
        changes = cheapest_changes(known, space, settings, room)
        unknown = [changed for changed, _ in changes if changed not in exact]
        if not unknown:
            break
        exact |= {changed: exact_of(changed) for changed in unknown}
    fitting = [changed for changed, _ in changes if not room.lack(exact[changed])]
    return tuple(advice_of(settings, exact[settings], changed, exact[changed]) for changed in fitting)


def _with_holes(evaluate: Evaluate, holes: int) -> Evaluate:
    """Returns `evaluate` with `holes` more bytes in each outcome."""

    def evaluated(settings: Settings) -> Outcome:
        outcome = evaluate(settings)
        return outcome if outcome is IMPOSSIBLE else replace(outcome, nbytes=outcome.nbytes + holes)

    return evaluated


def _wrappings(evaluate: Evaluate, layout: ModelLayout, settings: Settings) -> tuple[str, ...]:
    """Returns the ways to make units that are possible for the model, and differ from one another."""
    of_outcome: dict[Outcome, str] = {}
    for word in VALUES["wrapping"] if layout.rewraps else ("auto",):
        of_outcome.setdefault(evaluate(replace(settings, wrapping=word)), word)
    # Impossible: the model repeats no blocks, reads a parameter of a block from outside, or cannot be sharded so.
    return tuple(word for outcome, word in of_outcome.items() if outcome is not IMPOSSIBLE)


def _first_mesh(space: Space, given: Mapping[str, Any]) -> Mesh:
    """Returns the mesh that the search begins with: all ranks data parallel, if there are samples for so many."""
    whole, size = Mesh(space.num_ranks), given.get("micro_batch", 1)
    meshes = (whole, *space.meshes(whole))
    return next((mesh for mesh in meshes if space.batch % (mesh.num_data * size) == 0), whole)


# The model and the batch, without values


def _on_meta(model: nn.Module) -> nn.Module:
    """Returns a copy of `model` on the meta device. No value of `model` is read."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied


def num_samples(batch: Any) -> int:
    """Returns the first dim of the first tensor in `batch`. Raises PolicyError if there is none."""
    sizes = [tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()]
    if not sizes or not sizes[0]:
        raise PolicyError("plan(batch=...): expected tensors whose first dim is samples, one at least")
    return sizes[0]


def resized_batch(batch: Any, first: int, size: int) -> Any:
    """Returns `batch` on the meta device, with `size` instead of `first` samples."""

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        shape = (size, *tensor.shape[1:]) if tensor.dim() and tensor.shape[0] == first else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return map_tensors(resized, batch)


# The arguments


def _require_arguments(
    cluster: object, compute_dtype: object, loss: object, shard: object, parallelize: object
) -> None:
    """Raise PolicyError if `plan` does not take one of these."""
    if not isinstance(cluster, (str, Path, Cluster)):
        raise ArgumentError("cluster", repr(cluster), "expected the name of one that is shipped, a path or a Cluster")
    require_floating_dtype("plan(compute_dtype={})", compute_dtype)
    for name, given in (*([("loss", loss)] if loss is not None else []), ("shard", shard)):
        if not callable(given):
            raise ArgumentError(name, repr(given), "expected a function")
    if parallelize is None:
        return
    axes = " and ".join(map(repr, sorted(CUT_AXES)))
    if not isinstance(parallelize, Mapping):
        raise ArgumentError("parallelize", repr(parallelize), f"expected a dict of functions by axes, {axes}")
    for name, cut in parallelize.items():
        if name not in CUT_AXES:
            raise ArgumentError("parallelize", f"{{{name!r}: ...}}", f"expected the axes {axes}")
        if not callable(cut):
            raise ArgumentError("parallelize", f"{{{name!r}: {cut!r}}}", "expected a function of a model and an axis")


def _optimizer_of(given: object) -> Optimizer:
    """Returns the argument `optimizer`, or the optimizer of this name. Raises PolicyError if there is none."""
    if isinstance(given, Optimizer):
        return given
    if not isinstance(given, str) or given not in OPTIMIZERS:
        raise ArgumentError("optimizer", repr(given), f"expected one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[given]


def mesh_of(mesh: int | tuple[int, int] | Mapping[str, int]) -> int | Mesh:
    """Returns the argument `mesh` as a mesh, or as the number of ranks if any mesh of them may be taken.

    Raises:
        PolicyError: it is neither.
    """
    if isinstance(mesh, Mapping):
        sizes = dict(mesh)
    elif isinstance(mesh, (tuple, list)) and len(mesh) == 2:
        sizes = dict(zip(("replicate", "dp"), mesh, strict=True))
    elif isinstance(mesh, int) and not isinstance(mesh, bool):
        require_int("plan(mesh={})", mesh, 1)
        return mesh
    else:
        said = 'expected the number of ranks, (replicas, shards), or the ranks of each axis, as {"dp": 8, "tp": 2}'
        raise ArgumentError("mesh", repr(mesh), said)
    for name, size in sizes.items():
        if name not in AXES:
            raise ArgumentError("mesh", "...", f"{name!r} is no axis; expected {', '.join(AXES)}")
        require_int(f"plan(mesh=...): {name}={{}}", size, 1)
    return Mesh(**{AXES[name]: size for name, size in sizes.items()} | {"shard": sizes.get("dp", 1)})


def _settings_of(given: Mapping[str, Any], mesh: int | Mesh) -> dict[str, Any]:
    """Returns the given settings, with sherd's own name of a strategy.

    Raises:
        PolicyError: there is no such setting, it cannot have this value, or two settings contradict each other.
    """
    settings = dict(given)
    for name, value in given.items():
        if name not in KINDS:
            raise PolicyError(f"plan has no setting {name!r}; expected one of {', '.join(sorted(KINDS))}")
        kind = KINDS[name]
        settings[name] = value = kind.usual(value)
        if kind.least is not None:
            require_int(f"plan({name}={{}})", value, int(kind.least))
        elif kind.type is float and isinstance(value, bool | int):
            settings[name] = value = float(value)
        if kind.reason(value if name != "strategy" else usual_name(value)):
            raise ArgumentError(name, repr(value), f"expected {kind.expected}")
    if "strategy" in given:
        word = usual_name(given["strategy"])
        settings["strategy"] = STRATEGIES[word]
        if word in HYBRID and (isinstance(mesh, int) or mesh.replicate == 1):
            raise ArgumentError("strategy", repr(word), "it has replicas; give a mesh with the axis replicate")
        if settings["strategy"] != "auto" and given.get("reshard") is True:
            raise ArgumentError("reshard", True, f"by the strategy {word} parameters are kept; leave one of them out")
    if "recompute" in given and settings.get("checkpointing", 1.0) == 0:
        said = "without checkpointing nothing is computed again; leave one of them out"
        raise ArgumentError("recompute", repr(given["recompute"]), said)
    return settings


def _beginning(mesh: Mesh, samples: int, given: Mapping[str, Any], layout: ModelLayout) -> Settings:
    """Returns the settings that a search begins with: the given ones, by `_settings_of`, and defaults.

    `samples` are those of a rank in a step.

    Raises:
        PolicyError: a value does not go with the mesh and the samples.
    """
    if given.get("wrapping", "auto") != "auto" and not layout.rewraps:
        said = "the units are made by `shard`; leave one of them out"
        raise ArgumentError("wrapping", repr(given["wrapping"]), said)
    size = given.get("micro_batch", 1)
    if samples % size:
        said = f"it does not divide the {samples} sample{'' if samples == 1 else 's'} of a rank in a step"
        raise ArgumentError("micro_batch", size, said)
    if samples // size < mesh.pp:
        raise ArgumentError("mesh", mesh, f"{samples // size} micro-batches are fewer than its {mesh.pp} stages")
    settings = replace(Settings(mesh, micro_batches=samples // size), **given)
    conflict = settings.conflict
    if conflict:
        raise ArgumentError("strategy", repr(settings.strategy), f"with {conflict} all is sharded; leave it out")
    return settings
