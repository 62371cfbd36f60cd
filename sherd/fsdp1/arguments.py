"""The arguments of FSDP1, and their meaning in the engine's terms.

    process_group, device_mesh, sharding_strategy     which ranks shard and which hold copies: a `DataMesh`
    sharding_strategy                                 `reshard_after_forward`
    mixed_precision, full precision in eval           `MixedPrecisionPolicy`
    cpu_offload                                       `OffloadPolicy`
    backward_prefetch, forward_prefetch               `PrefetchPolicy`
    sharding_strategy=Placements(...)                 the levels of a `DataMesh`, how parameters are cut
    use_orig_params                                   `Flat()`, merged into one flat parameter or not
    ignored_modules, ignored_states                   `Ignored`

Names, fields, defaults and environment variables are those of torch 2.13's `torch.distributed.fsdp`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import get_args, get_type_hints

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard as ShardSpec

from sherd.api.placements import Placements, unit_policy
from sherd.comm.groups import default_group, one_rank_group
from sherd.comm.mesh import DataMesh, arranged, default_device_type, mesh_of_groups
from sherd.engine import Unit
from sherd.errors import MeshError, ModuleError, PolicyError, PolicyTypeError
from sherd.layout.runs import Flat, RunPlacement
from sherd.policy import (
    CommPolicy,
    CPUOffloadPolicy,
    Level,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OnTouch,
    PrefetchPolicy,
    UnitPolicy,
    Unmanaged,
)
from sherd.requirements import require_bool, require_floating_dtype, require_type

FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
SKIP_WRITEBACK_CHECK = "FSDP_SKIP_WRITEBACK_CHECK"
FAKE_ALL_GATHER = "FSDP_USE_FAKE_ALL_GATHER"
FAKE_REDUCE = "FSDP_USE_FAKE_REDUCE"


class ShardingStrategy(Enum):
    """The strategies: which tensors are sharded, and over which ranks.

    `FULL_SHARD` is ZeRO-3 and `SHARD_GRAD_OP` ZeRO-2 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
    Trillion Parameter Models", SC 2020); the hybrid strategies are those of Zhao et al., "PyTorch FSDP: Experiences on
    Scaling Fully Sharded Data Parallel", VLDB 2023.
    """

    FULL_SHARD = auto()
    """Parameters, gradients and optimizer state; unsharded parameters are freed after forward and after backward."""
    SHARD_GRAD_OP = auto()
    """As `FULL_SHARD`, but unsharded parameters are kept from forward to backward."""
    NO_SHARD = auto()
    """Nothing: every rank holds everything, gradients are all-reduced, as in `DistributedDataParallel`."""
    HYBRID_SHARD = auto()
    """`FULL_SHARD` within a group of ranks (a node), copies in the other groups."""
    _HYBRID_SHARD_ZERO2 = auto()
    """`SHARD_GRAD_OP` within a group of ranks, copies in the other groups."""

    @property
    def is_hybrid(self) -> bool:
        """Returns whether there are both shards and copies."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def frees_after_forward(self) -> bool:
        """Returns whether unsharded parameters are freed between forward and backward."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class BackwardPrefetch(Enum):
    """When the parameters of the next unit of backward are gathered."""

    BACKWARD_PRE = auto()
    """Before the current unit's gradients are computed: most overlap."""
    BACKWARD_POST = auto()
    """After the current unit's parameters are freed: less memory."""


@dataclass
class MixedPrecision:
    """The dtypes of a unit. None leaves each tensor in its own dtype.

    Args:
        param_dtype: the dtype of gathered parameters, hence of compute.
        reduce_dtype: the dtype in which gradients are reduced; None takes `param_dtype`.
        buffer_dtype: the dtype of floating-point buffers; a state dict has them in their original dtype.
        keep_low_precision_grads: leave gradients in `param_dtype`; under `NO_SHARD` in the dtype they were reduced in.
        cast_forward_inputs: cast the inputs of each unit's forward to `param_dtype`.
        cast_root_forward_inputs: cast the inputs of the root's forward, also where `cast_forward_inputs` is False.
        _module_classes_to_ignore: modules of these classes become units of their own, in full precision, when there
            is an `auto_wrap_policy`.

    Raises:
        PolicyTypeError: a dtype that is no `torch.dtype`, or a switch that is no bool.
        PolicyError: an integer or bool dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._BatchNorm,)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            require_floating_dtype(f"MixedPrecision({name}={{}})", getattr(self, name))
        for name in ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"):
            require_bool(f"MixedPrecision({name}={{}})", getattr(self, name))


@dataclass
class CPUOffload:
    """Offloading: `offload_params` keeps shards, gradients and optimizer state in host memory between uses."""

    offload_params: bool = False

    def __post_init__(self) -> None:
        require_bool("CPUOffload(offload_params={})", self.offload_params)


KINDS: tuple[type, ...] = (ShardingStrategy, BackwardPrefetch, MixedPrecision, CPUOffload)


@dataclass(frozen=True)
class WrapperArguments:
    """The arguments that describe one unit, as the user gave them.

    Raises:
        PolicyTypeError: an argument of the wrong type.
        PolicyError: arguments that exclude each other.
    """

    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    sharding_strategy: ShardingStrategy | Placements | None = None
    cpu_offload: CPUOffload | OffloadPolicy | None = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision | None = None
    device_id: int | str | torch.device | None = None
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    device_mesh: DeviceMesh | None = None
    unmanaged: Unmanaged = "error"
    comm_policy: CommPolicy | None = None
    on_touch: OnTouch = "error"

    def __post_init__(self) -> None:
        kinds = get_type_hints(WrapperArguments)
        del kinds["process_group"]  # `mesh` checks the group, since the right type depends on the strategy
        del kinds["unmanaged"], kinds["on_touch"]  # `UnitPolicy` checks both
        for name, kind in kinds.items():
            value = getattr(self, name)
            wanted = " or ".join(each.__name__ for each in get_args(kind) or (kind,) if each is not type(None))
            require_type(f"FullyShardedDataParallel({name}={value!r}): expected sherd's {wanted}", value, kind)
        if self.process_group is not None and self.device_mesh is not None:
            raise PolicyError(
                "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."
            )

    @property
    def strategy(self) -> ShardingStrategy:
        """Returns the strategy, by default `FULL_SHARD`; for `Placements`, the strategy with the same groups."""
        chosen = self.sharding_strategy
        if isinstance(chosen, Placements):
            if len(chosen.levels) > 1:
                return ShardingStrategy.HYBRID_SHARD
            return ShardingStrategy.NO_SHARD if chosen.levels == (Level.COPIES,) else ShardingStrategy.FULL_SHARD
        return chosen if chosen is not None else ShardingStrategy.FULL_SHARD

    @property
    def placement(self) -> ShardSpec | RunPlacement:
        """Returns how parameters are cut: as `Flat()`, unless `Placements` say otherwise.

        Raises:
            PolicyError: a flat parameter, with `Placements` that do not cut as `Flat()`.
        """
        cut = self.placements.cut if self.placements is not None else None
        if not self.use_orig_params:
            if not isinstance(cut, Flat | None):
                raise PolicyError(
                    f"sharding_strategy=Placements(...) that cut as {cut} with use_orig_params=False: a flat parameter "
                    "is cut as Flat(); pass that, or use_orig_params=True"
                )
            return Flat(together=True)
        return Flat() if cut is None else cut

    @property
    def owns_gradients(self) -> bool:
        """Returns whether `Placements` let full gradients go to owners.

        Raises:
            PolicyError: a flat parameter, whose gradient is one line.
        """
        owns_gradients = self.placements is not None and self.placements.owns_gradients
        if owns_gradients and not self.use_orig_params:
            raise PolicyError(
                "sharding_strategy=Placements(gradient=Owned()) with use_orig_params=False: the gradient of a flat "
                "parameter is one line, which has no owner; pass use_orig_params=True"
            )
        return owns_gradients

    @property
    def placements(self) -> Placements | None:
        """Returns the user's `Placements`; None for a strategy of FSDP1."""
        return self.sharding_strategy if isinstance(self.sharding_strategy, Placements) else None

    @property
    def policy(self) -> UnitPolicy:
        levels = None if self.placements is None else self.placements.levels
        chosen = unit_policy(levels, self.reshard_after_forward, self.prefetch)
        notices_replaced = not _is_on(SKIP_WRITEBACK_CHECK)
        return replace(chosen, notices_replaced=notices_replaced, unmanaged=self.unmanaged, on_touch=self.on_touch)

    @property
    def reshard_after_forward(self) -> bool | None:
        """Returns the argument of `fully_shard`: None frees the parameters of all units but the root."""
        return None if self.strategy.frees_after_forward or self.placements is not None else False

    @property
    def precision(self) -> MixedPrecisionPolicy:
        """Returns the dtypes, with the switch for full precision in eval that the environment has."""
        chosen = self.mixed_precision if self.mixed_precision is not None else MixedPrecision()
        return MixedPrecisionPolicy(
            param_dtype=chosen.param_dtype,
            # Named, since None means something else to `fully_shard` from torch 2.15 on.
            reduce_dtype=chosen.param_dtype if chosen.reduce_dtype is None else chosen.reduce_dtype,
            cast_forward_inputs=chosen.cast_forward_inputs,
            cast_root_forward_inputs=chosen.cast_root_forward_inputs or chosen.cast_forward_inputs,
            full_precision_in_eval=_is_on(FULL_PRECISION_IN_EVAL),
            keep_low_precision_grads=chosen.keep_low_precision_grads,
        )

    @property
    def precise_classes(self) -> tuple[type[nn.Module], ...]:
        """Returns the classes of modules that become units in full precision below an `auto_wrap_policy`."""
        return () if self.mixed_precision is None else tuple(self.mixed_precision._module_classes_to_ignore)

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        """Returns the dtype that floating-point buffers are cast to; None leaves them as they are."""
        return None if self.mixed_precision is None else self.mixed_precision.buffer_dtype

    @property
    def offload(self) -> OffloadPolicy:
        if isinstance(self.cpu_offload, OffloadPolicy):
            return self.cpu_offload
        offloads = self.cpu_offload is not None and self.cpu_offload.offload_params
        return CPUOffloadPolicy() if offloads else OffloadPolicy()

    @property
    def prefetch(self) -> PrefetchPolicy:
        """Returns how far gathers run ahead. `limit_all_gathers` is not read: gathers never run further than this."""
        # FSDP1's forward runs ahead without being asked where a host runs ahead of its device, by two gathers at most.
        return PrefetchPolicy(
            forward_depth=int(self.forward_prefetch or self.device_type != "cpu"),
            backward_depth=int(self.backward_prefetch is not None),
            after_backward=self.backward_prefetch is BackwardPrefetch.BACKWARD_POST,
        )

    @property
    def device_type(self) -> str:
        """Returns the type of device that the model will compute on, as far as it is known before there are ranks."""
        return self._device_type(None) if self.device_mesh is None else self.device_mesh.device_type

    @property
    def comm(self) -> CommPolicy:
        """Returns how bytes are sent. Switches of the environment leave collectives out, for ablations."""
        if self.comm_policy is not None:
            return self.comm_policy
        return CommPolicy(fake_all_gather=_is_on(FAKE_ALL_GATHER), fake_reduce=_is_on(FAKE_REDUCE))

    def mesh(self, has_policy: bool) -> DataMesh:
        """Returns the ranks that shard and the ranks that hold copies. `has_policy` says if a policy wraps modules.

        Raises:
            MeshError: groups or axes that do not fit the strategy.
            PolicyError: a flat parameter, with nothing sharded over either of two axes.
        """
        mesh = self._mesh(has_policy)
        if self.placements is None or self.strategy is ShardingStrategy.NO_SHARD:
            return mesh
        if self.placements.cut is None and mesh.replicate_axis is not None and not self.use_orig_params:
            raise PolicyError(
                "sharding_strategy=Placements(...) that replicates everything over two axes, with "
                "use_orig_params=False: there is no axis for a flat parameter to span; pass use_orig_params=True, or "
                "a device_mesh of one axis"
            )
        return arranged(mesh, self.placements.levels)

    def _mesh(self, has_policy: bool) -> DataMesh:
        if self.strategy.is_hybrid:
            return self._hybrid_mesh(has_policy)
        copies_only = self.strategy is ShardingStrategy.NO_SHARD
        mesh = self.device_mesh
        if mesh is not None:
            if mesh.ndim != 1:
                raise MeshError(
                    f"{self.strategy.name} expects a 1-D device_mesh, got {mesh.ndim} axes: {mesh}; take one axis, "
                    "mesh['dp'], or HYBRID_SHARD for (replicate, shard)"
                )
            if copies_only:
                return mesh_of_groups(one_rank_group(), mesh.get_group(), mesh.device_type, self.comm, copies=mesh)
            return DataMesh(mesh, shard_axis=0, replicate_axis=None, comm=self.comm)
        group = self.process_group if self.process_group is not None else default_group()
        if not isinstance(group, dist.ProcessGroup):
            raise MeshError(
                f"{self.strategy.name} expects one process group, got {group!r}; a pair (shard group, replicate group) "
                "is for HYBRID_SHARD"
            )
        if copies_only:
            return mesh_of_groups(one_rank_group(), group, self._device_type(group), self.comm)
        return mesh_of_groups(group, None, self._device_type(group), self.comm)

    def _hybrid_mesh(self, has_policy: bool) -> DataMesh:
        if self.device_mesh is not None:
            if self.device_mesh.ndim != 2:
                raise MeshError(
                    f"{self.strategy.name}: Expected device_mesh to have ndim=2 but got {self.device_mesh.ndim}; its "
                    "axes are (replicate, shard)"
                )
            return DataMesh(self.device_mesh, shard_axis=1, replicate_axis=0, comm=self.comm)
        if self.process_group is not None:
            pair = self.process_group
            if not (
                isinstance(pair, tuple)
                and len(pair) == 2
                and all(isinstance(group, dist.ProcessGroup) for group in pair)
            ):
                raise MeshError(
                    f"{self.strategy.name}: Expected process_group to be passed in as either None or "
                    f"Tuple[dist.ProcessGroup, dist.ProcessGroup] but got {type(pair)}; the pair is (shard group, "
                    "replicate group)"
                )
            return mesh_of_groups(pair[0], pair[1], self._device_type(pair[0]), self.comm)
        if not has_policy:
            raise MeshError(
                f"Manual wrapping with ShardingStrategy.{self.strategy.name} requires explicit specification of "
                "process group or device_mesh; or give an auto_wrap_policy"
            )
        # Shards are spread within a node, whose links are fast, and each node has a copy.
        world = dist.get_world_size(default_group())
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or devices_here() or world
        if world % per_node:
            raise MeshError(
                f"{self.strategy.name}: {world} ranks are not a multiple of the {per_node} of a node "
                "(LOCAL_WORLD_SIZE); pass process_group=(shard group, replicate group) or a 2-D device_mesh"
            )
        device_type = self._device_type(default_group())
        mesh = init_device_mesh(device_type, (world // per_node, per_node), mesh_dim_names=("replicate", "shard"))
        return DataMesh(mesh, shard_axis=1, replicate_axis=0, comm=self.comm)

    def _device_type(self, group: dist.ProcessGroup | None) -> str:
        if self.device_id is not None and not isinstance(self.device_id, int):
            return torch.device(self.device_id).type
        if dist.is_initialized():
            return default_device_type(group)
        return str(torch.accelerator.current_accelerator() or "cpu") if torch.accelerator.is_available() else "cpu"


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "") == "1"


def devices_here() -> int:
    """Returns the number of accelerators of this host."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


@dataclass(frozen=True)
class Ignored:
    """The ignored modules, parameters and buffers of a wrapper.

    Args:
        modules: the ignored modules and all modules below them, without units, which are sharded already.
        parameters: the ignored parameters, with all parameters of `modules`.
        buffers: the buffers of `modules`.
    """

    modules: frozenset[nn.Module]
    parameters: frozenset[nn.Parameter]
    buffers: frozenset[torch.Tensor]

    @classmethod
    def read(cls, root: nn.Module, modules: object, states: object) -> Ignored:
        """Returns what `ignored_modules` and `ignored_states` of a wrapper around `root` mean.

        Raises:
            PolicyError: both arguments, or an element of another type.
            PolicyTypeError: an argument is not iterable.
            ModuleError: a module is a unit.
        """
        if modules is not None and states is not None:
            raise PolicyError(
                "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
            )
        given = [*_elements_of("ignored_modules", modules, (nn.Module,))]
        given += _elements_of("ignored_states", states, (nn.Parameter, nn.Module))
        tops = [each for each in given if isinstance(each, nn.Module)]
        alone = [each for each in given if isinstance(each, nn.Parameter)]
        if tops and alone:
            kinds = sorted({type(each) for each in given}, key=lambda kind: kind.__name__)
            raise PolicyError(
                f"ignored_states expects all nn.Parameter or all nn.Module list elements but got types {kinds}; give "
                "modules, or their parameters"
            )
        if any(each is root for each in tops):
            warnings.warn(
                "the module that is wrapped is itself among the ignored ones, so nothing will be sharded", stacklevel=4
            )
        for each in tops:
            if Unit.of(each) is not None:
                raise ModuleError(
                    f"`ignored_modules` should not include FSDP modules: a {type(each).__name__} is one already; "
                    "ignore its parameters when it is wrapped"
                )
        below: set[nn.Module] = set()
        waiting = list(tops)
        while waiting:
            module = waiting.pop()
            if module not in below and Unit.of(module) is None:
                below.add(module)
                waiting.extend(module.children())
        parameters = {*alone, *(inner for each in below for inner in each.parameters(recurse=False))}
        buffers = {inner for each in below for inner in each.buffers(recurse=False)}
        return cls(frozenset(below), frozenset(parameters), frozenset(buffers))


def _elements_of(name: str, given: object, kinds: tuple[type, ...]) -> list[object]:
    if given is None:
        return []
    wanted = " or ".join(f"nn.{each.__name__}" for each in kinds)
    if not isinstance(given, Iterable) or isinstance(given, torch.Tensor):
        raise PolicyTypeError(f"{name}={given!r}: expected a list or a set of {wanted}")
    listed = list(given)
    wrong = [each for each in listed if not isinstance(each, kinds)]
    if wrong:
        raise PolicyError(f"{name} expects {wanted} list elements but got types {[type(each) for each in wrong]}")
    return listed
