"""`sherd.plan`: what a training takes on a cluster, and the settings that it should have, said before it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sherd.errors import ModuleError, PolicyError, StateError
from sherd.requirements import require_int
from sherd.tensor.structures import map_tensors, tensors_in
from sherd.tools.plan.arguments import ArgumentError, beginning, mesh_of, named, optimizer_of, require_arguments
from sherd.tools.plan.axes import Cut, Layout, Shards, auto_units
from sherd.tools.plan.blocks import shares_of_blocks
from sherd.tools.plan.garbage import garbage_left
from sherd.tools.plan.in_words import advice_of, facts_of, lines_of, parted
from sherd.tools.plan.planner import Planner, Training, fully_shard_args
from sherd.tools.plan.reading import Loss, own_or_usual_loss
from sherd.tools.plan.rough import RoughPlanner, or_impossible, outcome_of
from sherd.tools.simulate.cluster import Cluster, read_cluster
from sherd.tools.simulate.predict import Prediction
from sherd.tools.simulate.search import IMPOSSIBLE, Found, Outcome, cheapest_changes, merit, search
from sherd.tools.simulate.settings import NAMES, SHARES, VALUES, Mesh, Settings, Space
from sherd.tools.simulate.sharded import OPTIMIZERS, Optimizer
from sherd.tools.simulate.timeline import Advice, Candidate, Search, Timeline

__all__ = ["Plan", "num_samples", "plan", "planned", "resized_batch"]


RETRIED = 4
"""So many settings that searches have found are predicted exactly, until one fits."""


@dataclass(frozen=True)
class Plan:
    """The settings of a training, and what a step of it takes. `print` it for a page of text.

    Attributes:
        settings: as given, and else as chosen.
        prediction: of a step, on one rank.
        limit: the bytes of a device.
        found: the search; None if all settings were given.
        advice: where `settings` do not fit, the cheapest changes that would.
        compute_dtype: forward and backward compute in it; None: that of the parameters.
        optimizer: steps the parameters.
    """

    settings: Settings
    prediction: Prediction
    limit: int
    found: Found | None
    advice: tuple[Advice, ...]
    compute_dtype: torch.dtype | None
    optimizer: Optimizer

    @property
    def training_in_words(self) -> str:
        """The dtype of forward and backward, and the optimizer."""
        names = [name for name, each in OPTIMIZERS.items() if each == self.optimizer]
        dtype = {None: "in the parameters' dtype", torch.bfloat16: "bf16"}.get(
            self.compute_dtype, str(self.compute_dtype).removeprefix("torch.")
        )
        return f"{dtype}, {names[0] if names else 'an optimizer of its own'}"

    @property
    def fits(self) -> bool:
        """Whether the training fits into the memory of a device."""
        return self.prediction.driver_bytes <= self.limit

    @property
    def timeline(self) -> Timeline:
        """The predicted step, for `sherd report`."""
        return replace(
            self.prediction.timeline, facts=facts_of(self.prediction, self.settings, self.limit, self.training_in_words)
        )

    @property
    def search(self) -> Search | None:
        """All settings that were tried, for a report."""
        if self.found is None:
            return None
        ranking = (*self.found.ranking, *(each for each in self.found.outcomes if each not in self.found.ranking))
        outcomes = self.found.outcomes
        candidates = tuple(
            Candidate(
                str(each),
                each.in_words(),
                outcomes[each].seconds,
                outcomes[each].nbytes,
                outcomes[each].nbytes <= self.limit,
                "" if outcomes[each].nbytes <= self.limit else "it takes more memory than there is",
            )
            for each in ranking
        )
        return Search(candidates, 0 if self.found.fits else -1, self.limit)

    @property
    def fully_shard_args(self) -> dict[str, Any]:
        """The arguments of `auto_shard`, besides `mesh`, that make the sharding as it was planned. Without `policy`,
        which is there for other units than its usual ones, they are those of `fully_shard`."""
        return fully_shard_args(self.settings, self.compute_dtype)

    def __str__(self) -> str:
        lines = lines_of(self.prediction, self.settings, self.limit, self.found, self.advice, self.training_in_words)
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
    **settings: Any,
) -> Plan:
    """Returns what a step of `model` takes on `cluster`, under the fastest settings that fit its memory.

        print(sherd.plan(model, 64, tokens, cluster="h100", checkpointing=True))

    The model is read on the meta device and sharded over ranks that do not exist: nothing is computed or sent. The
    schedule that would run it is played on a clock and a memory meter. This process must not be in a process group.

    Args:
        model: on any device; what it holds is not read. It is not changed.
        mesh: the number of ranks, of which any mesh is tried; or for one mesh alone (replicas, shards), or the ranks of
            its axes by name: `replicate`, `dp`, `cp`, `tp`.
        batch: of one forward: tensors in whatever containers, whose first dim is samples. Values are not read.
        cluster: the name of one that is shipped, the path of a cluster file, or a `Cluster`.
        samples: of a step, over all ranks. None: those of `batch` on each rank.
        loss: of (model, batch). None: the `loss` in the model's output, for tokens the cross-entropy of its logits,
            else the sum of its outputs.
        compute_dtype: forward and backward compute in it, and gradients are reduced in float32 (mixed precision); None:
            parameters are computed with as they are.
        optimizer: "adamw", "adamw-fused", "sgd", "sgd-momentum", or a record of another one.
        memory_limit: the bytes of a device that the training may take; None: all that a CPU has, and of an
            accelerator all but a twentieth, for what kernels take for themselves.
        shard: makes the units, of the model and arguments of `fully_shard`. By default those of `auto_shard`; a model
            that does not describe or repeat any is one unit.
        parallelize: by the name of an axis, `tp` or `cp`, a function of a model and that axis, a DeviceMesh of one dim,
            that lays the model over it in place, as `parallelize_module` does. Only these axes are tried. With `cp`,
            the model takes its rank's part of each sample.
        settings: those that are not to be chosen: `strategy` ("auto", "zero2", "zero1" or "ddp", or another name of
            these, as "zero3" and "full_shard"), `placement` ("shard" or "flat"), `wrapping` (the units, by a word that
            `auto_shard` takes), `reshard`, `checkpointing` (True, False, or the share of blocks), `recompute` ("full",
            also where only `checkpointing` is given, or "selective", as with `selective_contexts`), `offload`,
            `prefetch`, `micro_batch` (samples in one forward of a rank).

    Raises:
        PolicyError: an argument that cannot be, as a batch that ranks do not divide, or two that contradict each other.
        ClusterError: the cluster's file is wrong.
        StateError: this process is in a process group.
        InputError: the model does not run without values; the message names the module.
    """
    if not isinstance(model, nn.Module):
        hint = f"; call it: plan({getattr(model, '__name__', 'build')}(), ...)" if callable(model) else ""
        raise ModuleError(f"plan expects a module, got {type(model).__name__}{hint}")
    require_arguments(cluster, compute_dtype, loss, shard, parallelize)
    found = cluster if isinstance(cluster, Cluster) else read_cluster(cluster)
    shape = mesh_of(mesh)
    first = num_samples(batch)
    training = Training(
        on_meta(model),
        lambda size: resized_batch(batch, first, size),
        Layout(loss or own_or_usual_loss, shard, parallelize or {}),
        optimizer_of(optimizer),
        compute_dtype,
        first,
    )
    if samples is None:
        samples = first * (shape if isinstance(shape, int) else shape.num_data)
    return planned(training, found, shape, samples, memory_limit, settings)


@garbage_left()
def planned(
    training: Training,
    cluster: Cluster,
    mesh: int | Mesh,
    samples: int,
    memory_limit: int | None,
    given: Mapping[str, Any],
    title: str = "",
) -> Plan:
    """Returns the plan of `training`; see `plan`."""
    if dist.is_initialized():
        raise StateError("plan() imagines ranks of its own; call it before init_process_group, or in another process")
    require_int("plan(samples={})", samples, 1)
    num_ranks = mesh if isinstance(mesh, int) else mesh.num_ranks
    layout, given = training.layout, named(given, mesh)
    # Where the device is the host, nothing is saved by what is kept there.
    never = frozenset() if cluster.device.overlaps else frozenset({"offload"})
    fixed = {*given, *never}
    fixed |= set() if isinstance(mesh, int) else {"mesh"}
    fixed |= set() if layout.rewraps else {"wrapping"}
    fixed |= {"recompute"} if "checkpointing" in given else set()
    space = Space(
        num_ranks,
        samples,
        cluster.devices_per_node,
        frozenset(fixed),
        axes=layout.axes,
        shares=shares_of_blocks(training.model, SHARES),
        fits=lambda mesh: not layout.misfit(mesh),
    )
    shape = _first_mesh(space, given) if isinstance(mesh, int) else mesh
    misfit = layout.misfit(shape)
    if misfit:
        raise ArgumentError("mesh", shape, misfit)
    of_a_rank, rest = divmod(samples, shape.num_data)
    if rest:
        raise ArgumentError("samples", samples, f"{shape.num_data} ranks do not divide it; take a multiple")
    rough = RoughPlanner(training, cluster)
    evaluate: Evaluate = cache(or_impossible(rough.outcome))
    usual = {} if rough.runs_with(1) else {"micro_batch": training.samples}
    usual_ones = beginning(shape, of_a_rank, usual | given, layout)
    limit = usual_limit(cluster) if memory_limit is None else memory_limit
    require_int("plan(memory_limit={})", limit, 1)
    exactly = partial(
        Planner(training, cluster).predict, title=title or f"{type(training.model).__name__} on {num_ranks} ranks"
    )
    found = None
    if fixed < set(NAMES) - {"micro_batches"}:
        rough.outcome(usual_ones)  # or it raises: a search begins with settings that are possible
        if "wrapping" not in fixed:
            space = replace(space, wrappings=_wrappings(evaluate, layout, usual_ones))
        saving = replace(usual_ones, **({"checkpointing": 1.0} | given))
        first = min((usual_ones, saving), key=lambda each: merit(evaluate(each), limit))
        found, prediction = _searched(evaluate, exactly, space, first, limit)
    else:
        prediction = exactly(usual_ones)
    settings = usual_ones if found is None else found.best
    advice: tuple[Advice, ...] = ()
    if prediction.driver_bytes > limit:
        space = replace(space, fixed=never, wrappings=_wrappings(evaluate, layout, settings))
        advice = _advice(evaluate, exactly, space, settings, prediction, limit)
    return Plan(settings, prediction, limit, found, advice, training.compute_dtype, training.optimizer)


Evaluate = Callable[[Settings], Outcome]


def _searched(
    evaluate: Evaluate, exactly: Callable[[Settings], Prediction], space: Space, first: Settings, limit: int
) -> tuple[Found, Prediction]:
    """Returns what a search finds, and the prediction of the best.

    `evaluate` leaves out holes in the allocator's pools. Where the best settings do not fit because of these, the
    search goes on as if others had as large ones.
    """
    tried: list[tuple[Found, Prediction]] = []
    holes = 0
    while True:
        found = search(_with_holes(evaluate, holes), space, [first], limit)
        first, prediction = found.best, exactly(found.best)
        tried.append((found, prediction))
        if not found.fits or prediction.driver_bytes <= limit or len(tried) == RETRIED:
            found, prediction = min(tried, key=lambda each: max(limit, each[1].driver_bytes))
            return found.corrected({each.best: outcome_of(made) for each, made in tried}), prediction
        holes = prediction.driver_bytes - evaluate(first).nbytes


MOST_ASKED = 4
"""So many times advice is asked for, each time with what was told before predicted exactly."""


def _advice(
    evaluate: Evaluate,
    exactly: Callable[[Settings], Prediction],
    space: Space,
    settings: Settings,
    prediction: Prediction,
    limit: int,
) -> tuple[Advice, ...]:
    """Returns the cheapest changes of `settings` that fit, predicted exactly as these were."""
    rough = _with_holes(evaluate, prediction.driver_bytes - evaluate(settings).nbytes)
    exact, exact_of = {settings: outcome_of(prediction)}, or_impossible(lambda each: outcome_of(exactly(each)))

    def known(settings: Settings) -> Outcome:
        return exact.get(settings) or rough(settings)

    for _ in range(MOST_ASKED):
        changes = cheapest_changes(known, space, settings, limit)
        unknown = [each for each, _ in changes if each not in exact]
        if not unknown:
            break
        exact |= {each: exact_of(each) for each in unknown}
    fitting = [each for each, _ in changes if exact[each].nbytes <= limit]
    return tuple(advice_of(settings, exact[settings], each, exact[each]) for each in fitting)


def _with_holes(evaluate: Evaluate, holes: int) -> Evaluate:
    """Returns `evaluate`, where each outcome takes so many more bytes."""

    def evaluated(settings: Settings) -> Outcome:
        found = evaluate(settings)
        return found if found is IMPOSSIBLE else replace(found, nbytes=found.nbytes + holes)

    return evaluated


def _wrappings(evaluate: Evaluate, layout: Layout, settings: Settings) -> tuple[str, ...]:
    """Returns the ways to make units that go with the model, and differ from one another."""
    found: dict[Outcome, str] = {}
    for word in VALUES["wrapping"] if layout.rewraps else ("auto",):
        found.setdefault(evaluate(replace(settings, wrapping=word)), word)
    # Impossible: it repeats no blocks, reads a parameter of one from outside, or cannot be sharded so.
    return tuple(word for outcome, word in found.items() if outcome is not IMPOSSIBLE)


def usual_limit(cluster: Cluster) -> int:
    """Returns the bytes of a device that a training should not exceed."""
    return cluster.device.memory * (95 if cluster.device.overlaps else 100) // 100


def _first_mesh(space: Space, given: Mapping[str, Any]) -> Mesh:
    """Returns the mesh that the search begins with: all ranks read other samples, if there are as many."""
    whole, size = Mesh(space.num_ranks), given.get("micro_batch")
    size = size if isinstance(size, int) and size > 0 else 1
    meshes = (whole, *space.meshes(whole))
    return next((mesh for mesh in meshes if space.batch % (mesh.num_data * size) == 0), whole)


def on_meta(model: nn.Module) -> nn.Module:
    """Returns a copy of `model` on the meta device. Nothing that it holds is read."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    memo: dict[int, Any] = {
        key: nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
        if isinstance(each, nn.Parameter)
        else torch.empty_like(each, device="meta")
        for key, each in tensors.items()
    }
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied


def num_samples(batch: Any) -> int:
    """Returns the first dim of the first tensor in `batch`. Raises PolicyError if there is none."""
    sizes = [each.shape[0] for each in tensors_in(batch) if each.dim()]
    if not sizes or not sizes[0]:
        raise PolicyError("plan(batch=...): expected tensors whose first dim is samples, one at least")
    return sizes[0]


def resized_batch(batch: Any, first: int, size: int) -> Any:
    """Returns `batch` on the meta device, with `size` samples in the place of `first`."""

    def resized(each: torch.Tensor) -> torch.Tensor:
        shape = (size, *each.shape[1:]) if each.dim() and each.shape[0] == first else each.shape
        return torch.empty(shape, dtype=each.dtype, device="meta")

    return map_tensors(resized, batch)
