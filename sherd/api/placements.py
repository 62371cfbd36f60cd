"""Strategies as values: what of parameters, gradients and optimizer state is sharded over each data-parallel axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as ShardSpec

from sherd.errors import PlacementError, PolicyError, PolicyTypeError
from sherd.layout.placement import Shard
from sherd.layout.runs import AnyPlacement, Owned, RunPlacement
from sherd.policy import DataParallelMeshDims, Level, PrefetchPolicy, UnitPolicy

AxisPlacement = ShardSpec | RunPlacement | Replicate

PRESETS: dict[str, tuple[Level, ...]] = {
    "ddp": (Level.COPIES,),
    "zero1": (Level.OPTIMIZER,),
    "zero2": (Level.GRADIENTS,),
    "zero3": (Level.PARAMETERS,),
    "hsdp": (Level.COPIES, Level.PARAMETERS),
    "hsdp_zero2": (Level.COPIES, Level.GRADIENTS),
    "hfsdp": (Level.OPTIMIZER, Level.PARAMETERS),
    "zero1_across_zero2_within": (Level.OPTIMIZER, Level.GRADIENTS),
}
"""The level over each axis, the outer axis first, by the name of the strategy. A single level holds for all axes."""


@dataclass(frozen=True)
class _PerAxis:
    """The placements of parameters, gradients and optimizer state, one for each data-parallel axis."""

    parameter: tuple[AxisPlacement, ...]
    gradient: tuple[AxisPlacement, ...]
    optimizer: tuple[AxisPlacement, ...]


class Placements(_PerAxis):
    """How parameters, gradients and optimizer state are placed over each data-parallel axis.

    Each argument is one placement, or one per axis in the mesh's order (the replicate axis first). A placement is
    torch's `Replicate()`, or one of `Shard(dim)`, `Flat()`, `Blocks(rows)` and `Owned()`, the same for all that is
    not `Replicate()`. Over one axis these combinations exist:

        parameter   gradient    optimizer                                              over one axis, alone
        Replicate   Replicate   Replicate   gradients all-reduced                      DDP
        Replicate   Replicate   Shard       reduced at the last backward of a step     ZeRO-1
        Replicate   Shard       Shard       reduced at every backward                  ZeRO-2
        Shard       Shard       Shard       and parameters gathered for use            ZeRO-3

    Gradient and optimizer may be `Owned()` where the parameter is cut otherwise: the full gradient of each tensor with
    two dims or more is reduced to one rank, which keeps the optimizer's state of the tensor and computes its update.
    This is for optimizers of full matrices (`sherd.Muon`, `sherd.MatrixOptimizer`); others refuse such gradients.

    Over two axes, HSDP is DDP across replicas and ZeRO-3 within a replica; HFSDP is ZeRO-1 across and ZeRO-3 within.
    The stages are those of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    SC 2020; HSDP is that of Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.

    Args:
        parameter: where parameters are between two uses.
        gradient: where gradients are while micro-batches are added up.
        optimizer: where the optimizer's state is, and the parameters that it steps.

    Raises:
        PlacementError: the combination does not exist, or the placements cut in different ways.
        PolicyError: sequences of different lengths, or of more than two placements.
        PolicyTypeError: something that is no placement.
    """

    def __init__(
        self,
        parameter: AxisPlacement | Sequence[AxisPlacement],
        gradient: AxisPlacement | Sequence[AxisPlacement],
        optimizer: AxisPlacement | Sequence[AxisPlacement],
    ) -> None:
        super().__init__(
            _per_axis("parameter", parameter), _per_axis("gradient", gradient), _per_axis("optimizer", optimizer)
        )
        numbers = len(self.parameter), len(self.gradient), len(self.optimizer)
        if len(set(numbers)) > 1 or not 1 <= numbers[0] <= 2:
            raise PolicyError(
                f"Placements: {numbers[0]} placements for parameters, {numbers[1]} for gradients, "
                f"{numbers[2]} for the optimizer; give each one placement for one data-parallel axis, or two "
                "for (replicate, shard), and flatten further axes into one of them (dp_mesh_dims)"
            )
        if len(self._cuts) > 1 and not self.owns_gradients:
            raise PlacementError(
                f"Placements cut in different ways, {sorted(map(repr, self._cuts))}; all that is not Replicate() is "
                "cut alike, or the gradient and the optimizer are Owned()"
            )
        _ = self.levels  # raises if the combination does not exist

    @classmethod
    def preset(cls, name: str, placement: ShardSpec | RunPlacement | None = None) -> Placements:
        """Returns the strategy called `name` (`PRESETS`), which cuts as `placement` says; None is `Shard(0)`.

        Raises:
            PolicyError: there is no strategy of that name.
        """
        if name not in PRESETS:
            raise PolicyError(f"placements={name!r}: expected one of {', '.join(PRESETS)}, or a Placements(...)")
        copy, cut = Replicate(), ShardSpec(0) if placement is None else placement

        def sharded_from(least: Level) -> tuple[AxisPlacement, ...]:
            return tuple(cut if level >= least else copy for level in PRESETS[name])

        return cls(sharded_from(Level.PARAMETERS), sharded_from(Level.GRADIENTS), sharded_from(Level.OPTIMIZER))

    @property
    def levels(self) -> tuple[Level, ...]:
        """Returns the level of sharding over each axis."""
        per_axis = zip(self.parameter, self.gradient, self.optimizer, strict=True)
        return tuple(_level(axis, *placements) for axis, placements in enumerate(per_axis))

    @property
    def owns_gradients(self) -> bool:
        """True if full gradients and states go to owners, and parameters are cut otherwise."""
        parameters = {each for each in self.parameter if is_cut(each)}
        others = {each for each in (*self.gradient, *self.optimizer) if is_cut(each)}
        return len(parameters) == 1 and others == {Owned()} != parameters

    @property
    def cut(self) -> ShardSpec | RunPlacement | None:
        """Returns how parameters are cut, or if they are replicated, the optimizer's state; None if nothing is cut."""
        return next((each for each in (*self.parameter, *self.gradient, *self.optimizer) if is_cut(each)), None)

    @property
    def _cuts(self) -> set[ShardSpec | RunPlacement]:
        return {each for each in (*self.parameter, *self.gradient, *self.optimizer) if is_cut(each)}


def _per_axis(name: str, given: AxisPlacement | Sequence[AxisPlacement]) -> tuple[AxisPlacement, ...]:
    placements = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for each in placements:
        if not is_cut(each) and not isinstance(each, Replicate):
            raise PolicyTypeError(
                f"Placements({name}=...): expected Replicate(), Shard(dim), Flat(), Blocks(rows) or Owned(), one or a "
                f"sequence of one per data-parallel axis, got {each!r}"
            )
    return placements


def _level(axis: int, parameter: AxisPlacement, gradient: AxisPlacement, optimizer: AxisPlacement) -> Level:
    sharded = [is_cut(placement) for placement in (parameter, gradient, optimizer)]
    if sharded != sorted(sharded):
        raise PlacementError(
            f"Placements over data-parallel axis {axis}: parameter {parameter}, gradient {gradient}, optimizer "
            f"{optimizer}; what is sharded for the parameter must be for the gradient, and what is for the gradient "
            "must be for the optimizer. Replicate, Replicate, Shard is ZeRO-1, Replicate, Shard, Shard is ZeRO-2"
        )
    return Level(sum(sharded))


@dataclass(frozen=True)
class OnMesh:
    """An answer of `shard_placement_fn`: shard this parameter over another mesh than the rest of the unit.

    An example is a routed expert: each rank of an expert axis has other experts, so fewer ranks share an expert. The
    gradient is summed over `mesh`, and divided by the number of ranks of the unit's mesh, as the unit's other gradients
    are: each of these ranks has its own batch, and the expert gets tokens of all these batches.

    Args:
        mesh: as for `fully_shard`: 1-D, `(replicate, shard)`, or larger with `dp_mesh_dims`.
        placement: how the parameter is cut, or `Replicate()` if each rank of `mesh` keeps all of it; None for the
            unit's placement.
        dp_mesh_dims: which axes of a larger `mesh` are data parallel for this parameter.

    Raises:
        PolicyTypeError: an argument of another type.
    """

    mesh: DeviceMesh
    placement: AxisPlacement | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None

    @classmethod
    def of_torchs(cls, answer: Any, info: Any) -> OnMesh:
        """Returns what torch's `ShardPlacementResult`, or a record of the same attributes, says.

        Args:
            answer: has the attribute `placement`.
            info: its `mesh_info`, with a `mesh`, the `shard_mesh_dim` of it, and a `replicate_mesh_dim` or None.

        Raises:
            PolicyTypeError: an attribute of another type.
            PlacementError: no axis is sharded.
        """
        shard, replicate = info.shard_mesh_dim, info.replicate_mesh_dim
        if shard is None:
            raise PlacementError(f"shard_placement_fn returned {answer}, which shards over no axis; name one")
        names = getattr(info.mesh, "mesh_dim_names", None) or ()
        if len(names) < 2:
            return cls(info.mesh, answer.placement)
        dims = DataParallelMeshDims(names[shard], None if replicate is None else names[replicate])
        return cls(info.mesh, answer.placement, dims)

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, DeviceMesh):
            raise PolicyTypeError(f"OnMesh(mesh=...): expected a DeviceMesh, got {self.mesh!r}")
        if self.placement is not None and not is_cut(self.placement) and not isinstance(self.placement, Replicate):
            raise PolicyTypeError(f"OnMesh(placement={self.placement!r}): {ANSWERS}, or None for the unit's")
        if self.dp_mesh_dims is not None and not isinstance(self.dp_mesh_dims, DataParallelMeshDims):
            raise PolicyTypeError(f"OnMesh(dp_mesh_dims=...): expected DataParallelMeshDims, got {self.dp_mesh_dims!r}")


def rule_of(cut: ShardSpec | RunPlacement | None, parameter: nn.Parameter) -> AnyPlacement | None:
    """Returns how the engine cuts `parameter`; None for a scalar, which has no dim to cut."""
    if isinstance(cut, ShardSpec):
        return Shard(cut.dim) if parameter.dim() else None
    return cut


EXPECTED = "expected a torch.distributed.tensor.Shard, or sherd's Flat(), Blocks(rows) or Owned()"


ANSWERS = f"{EXPECTED}, or Replicate() for the full parameter on every rank"


def is_cut(value: object) -> TypeGuard[ShardSpec | RunPlacement]:
    """Returns whether `value` says how to cut a parameter."""
    # The class `Flat` has all methods of a placement, so that `placement=Flat` would be taken for one.
    return isinstance(value, ShardSpec | RunPlacement) and not isinstance(value, type)


Levels = tuple[Level, ...] | None
"""The level of sharding over each axis; None leaves the levels to the mesh."""


def levels_and_cut(
    placements: Placements | str | None, cut: ShardSpec | RunPlacement | None
) -> tuple[Levels, ShardSpec | RunPlacement | None]:
    """Returns the levels of `placements`, and the cut of parameters. Raises `PolicyError` for contradictions."""
    if placements is None:
        return None, cut
    if isinstance(placements, str):
        return Placements.preset(placements).levels, cut
    if cut is not None and cut != placements.cut:
        raise PolicyError(f"placement={cut} next to {placements}, which says how to cut; give one of them")
    return placements.levels, placements.cut


def unit_policy(levels: Levels, reshard_after_forward: bool | int | None, prefetch: PrefetchPolicy) -> UnitPolicy:
    """Returns the policy of a unit. Raises `PolicyError` if there is nothing to reshard after forward."""
    lowest = Level.COPIES if levels is None else min(levels)
    highest = Level.PARAMETERS if levels is None else max(levels)
    if highest is not Level.PARAMETERS and reshard_after_forward not in (None, False):
        raise PolicyError(
            f"reshard_after_forward={reshard_after_forward}: by its placements every rank keeps unsharded "
            "parameters; leave it out, or shard them (zero3, hsdp, hfsdp)"
        )
    return UnitPolicy(
        reshard_after_forward=reshard_after_forward,
        prefetch=prefetch,
        accumulates_unsharded=highest < Level.GRADIENTS,
        # Where the lower axis shards gradients, they cannot wait. Over `PARAMETERS` there are replicated ones alone.
        accumulates_copies=lowest is not Level.GRADIENTS,
    )
