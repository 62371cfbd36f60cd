"""The arguments of `plan`, checked. What cannot be is told with the argument's name, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sherd.errors import PolicyError
from sherd.requirements import require_floating_dtype, require_int
from sherd.tools.plan.axes import CUT_AXES, Layout
from sherd.tools.simulate.cluster import Cluster
from sherd.tools.simulate.settings import AXES, HYBRID, NAMES, STRATEGIES, VALUES, Mesh, Settings, usual_name
from sherd.tools.simulate.sharded import OPTIMIZERS, Optimizer

__all__ = ["ArgumentError", "beginning", "mesh_of", "named", "optimizer_of", "require_arguments"]


class ArgumentError(PolicyError):
    """An argument that cannot be: its name, and what is wrong, for a command that has a flag of another name for it."""

    def __init__(self, argument: str, value: object, said: str) -> None:
        super().__init__(f"plan({argument}={value}): {said}")
        self.argument, self.said = argument, said


def require_arguments(cluster: object, compute_dtype: object, loss: object, shard: object, parallelize: object) -> None:
    """Raise PolicyError if one of these is nothing that `plan` takes."""
    if not isinstance(cluster, (str, Path, Cluster)):
        raise ArgumentError("cluster", repr(cluster), "expected the name of one that is shipped, a path or a Cluster")
    require_floating_dtype("plan(compute_dtype={})", compute_dtype)
    for name, given in (*([("loss", loss)] if loss is not None else []), ("shard", shard)):
        if not callable(given):
            raise ArgumentError(name, repr(given), "expected a function")
    if parallelize is None:
        return
    if not isinstance(parallelize, Mapping):
        raise ArgumentError("parallelize", repr(parallelize), f"expected a dict of functions by axes, {_AXES}")
    for name, cut in parallelize.items():
        if name not in CUT_AXES:
            raise ArgumentError("parallelize", f"{{{name!r}: ...}}", f"expected the axes {_AXES}")
        if not callable(cut):
            raise ArgumentError("parallelize", f"{{{name!r}: {cut!r}}}", "expected a function of a model and an axis")


_AXES = " and ".join(map(repr, sorted(CUT_AXES)))


def optimizer_of(given: object) -> Optimizer:
    """Returns the optimizer that `plan` was given, or the one of that name. Raises PolicyError if there is none."""
    if isinstance(given, Optimizer):
        return given
    if not isinstance(given, str) or given not in OPTIMIZERS:
        raise ArgumentError("optimizer", repr(given), f"expected one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[given]


def mesh_of(mesh: int | tuple[int, int] | Mapping[str, int]) -> int | Mesh:
    """Returns the mesh that `plan` was given; the number of ranks if any mesh of them may be taken.

    Raises:
        PolicyError: it is none.
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
    made = Mesh(**{AXES[name]: size for name, size in sizes.items()} | {"shard": sizes.get("dp", 1)})
    if made.shard % made.ep:
        raise ArgumentError("mesh", "...", f"ep={made.ep} does not divide dp={made.shard}; ep is a part of dp")
    return made


def named(given: Mapping[str, Any], mesh: int | Mesh) -> dict[str, Any]:
    """Returns the settings that are given, a strategy by its own name.

    Raises:
        PolicyError: there is no such setting or strategy, or two that are given contradict each other.
    """
    choosable = set(NAMES) - {"mesh", "micro_batches"}
    for name in given:
        if name not in choosable:
            raise PolicyError(f"plan has no setting {name!r}; expected one of {', '.join(sorted(choosable))}")
    found = dict(given)
    if "strategy" in given:
        word = usual_name(given["strategy"])
        if word not in STRATEGIES:
            raise ArgumentError("strategy", repr(given["strategy"]), f"expected one of {', '.join(STRATEGIES)}")
        found["strategy"] = STRATEGIES[word]
        if word in HYBRID and (isinstance(mesh, int) or mesh.replicate == 1):
            raise ArgumentError("strategy", repr(word), "it has replicas; give a mesh with the axis replicate")
        if found["strategy"] != "auto" and given.get("reshard") is True:
            raise ArgumentError("reshard", True, f"by the strategy {word} parameters are kept; leave one of them out")
    if "recompute" in given and given.get("checkpointing", True) in (False, 0):
        said = "without checkpointing nothing is computed again; leave one of them out"
        raise ArgumentError("recompute", repr(given["recompute"]), said)
    return found


def beginning(mesh: Mesh, samples: int, given: Mapping[str, Any], layout: Layout) -> Settings:
    """Returns the settings that are given, as `named` has them, and the usual ones besides.

    `samples`: of a rank in a step.

    Raises:
        PolicyError: a value that a setting cannot have, or that does not go with the mesh and the samples.
    """
    share = given.get("checkpointing", 0)
    if not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ArgumentError("checkpointing", repr(share), "expected True, False, or the share of blocks, 0 to 1")
    for name in ("reshard", "offload"):
        if not isinstance(given.get(name, True), bool):
            raise ArgumentError(name, repr(given[name]), "expected True or False")
    for name in ("placement", "wrapping", "recompute"):
        if given.get(name, VALUES[name][0]) not in VALUES[name]:
            raise ArgumentError(name, repr(given[name]), f"expected one of {', '.join(VALUES[name])}")
    if given.get("wrapping", "auto") != "auto" and not layout.rewraps:
        said = "the units are made by `shard`; leave one of them out"
        raise ArgumentError("wrapping", repr(given["wrapping"]), said)
    require_int("plan(prefetch={})", given.get("prefetch", 1), 0)
    size = given.get("micro_batch", 1)
    require_int("plan(micro_batch={})", size, 1)
    if samples % size:
        said = f"it does not divide the {samples} sample{'' if samples == 1 else 's'} of a rank in a step"
        raise ArgumentError("micro_batch", size, said)
    if samples // size < mesh.pp:
        raise ArgumentError("mesh", mesh, f"{samples // size} micro-batches are fewer than its {mesh.pp} stages")
    made = replace(Settings(mesh, micro_batches=samples // size), **(dict(given) | {"checkpointing": float(share)}))
    if made.conflict:
        raise ArgumentError("strategy", repr(made.strategy), f"with {made.conflict} all is sharded; leave it out")
    return made
