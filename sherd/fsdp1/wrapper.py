"""`FullyShardedDataParallel`: a wrapper that makes one unit of a module. FSDP1's front end on sherd's engine.

The wrapper has one child, the user's module. `fsdp1.py` reads the arguments; the engine does not know that wrappers
exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sherd._torch import (
    answer_checkpointing,
    asked_by_checkpointing,
    dynamo_disabled,
    gradients_of,
    in_functional_call,
    is_tensor_parallel,
)
from sherd.api.accumulate import without_reduction
from sherd.api.module import FSDPModule, require_module
from sherd.api.placements import Placements, rule_of
from sherd.api.swap_class import deep_copy
from sherd.api.unsharded import unsharded
from sherd.clip import clip_grad_norm_
from sherd.comm.mesh import DataMesh
from sherd.engine import FlatParameter, ParameterOwnership, Runtime, ShardingRequest, make_unit
from sherd.errors import ModuleError, PlacementError, PolicyError, UnsupportedError, WrapperStateError
from sherd.fsdp1 import advice, comm_hook, materialize, state_dicts, state_methods
from sherd.fsdp1.arguments import (
    KINDS,
    BackwardPrefetch,
    CPUOffload,
    Ignored,
    MixedPrecision,
    ShardingStrategy,
    WrapperArguments,
)
from sherd.fsdp1.extensions import FSDPExtensions, extensions_given, flattened, has_own, restored
from sherd.fsdp1.wrapper_state import WrapperState, before_forward, find_state
from sherd.policy import CommPolicy, OffloadPolicy, OnTouch, Unmanaged
from sherd.requirements import as_own
from sherd.wrap import Kwargs, WrapPolicy, apply_wraps, check_frozen, check_none_wrapped, choose
from sherd.wrap.names import WRAPPED, plain_name, wrapped_by


class FullyShardedDataParallel(FSDPModule, nn.Module):
    """Shards the parameters of `module` over the data-parallel ranks; gathers them for its forward and backward.

    Each instance is one unit, of the parameters below `module` that no nested instance has. Arguments, attributes and
    methods are those of torch 2.13's class of this name (Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully
    Sharded Data Parallel", VLDB 2023); on CPU and gloo it needs no argument more. It is an `FSDPModule` too, with all
    methods of that class.

    Args:
        module: the module to wrap.
        process_group: the ranks that shard; for hybrid strategies a pair, the ranks that shard and the ranks that hold
            copies. None: all ranks.
        sharding_strategy: which tensors are sharded, and when unsharded parameters are freed; None: `FULL_SHARD`.
            Beyond torch: `sherd.Placements(...)`, of two axes for a pair of groups or a 2-D mesh.
        cpu_offload: keep shards, gradients and optimizer state in host memory. Beyond torch: an `OffloadPolicy`, which
            names a place for each.
        auto_wrap_policy: which modules below become units of their own (`sherd.wrap`), made with these arguments.
        backward_prefetch: when to gather the next unit in backward; None: when it is needed.
        mixed_precision: dtypes of compute, of reduction and of buffers.
        ignored_modules: modules whose parameters stay as they are, with all modules below them.
        param_init_fn: called with each module that has parameters or buffers on the meta device, to give them memory
            and values; None: `to_empty`, then `reset_parameters()`.
        device_id: the device to move the module to before it is sharded.
        sync_module_states: take rank 0's parameters and buffers on all ranks.
        forward_prefetch: gather the next unit while the present one computes; on an accelerator always so.
        limit_all_gathers: accepted; gathers never run further ahead than the prefetch arguments say.
        use_orig_params: what the optimizer sees. True: the module's own parameters, as `RaggedDTensor`s, of which each
            rank holds a run, some of them empty. False: one `FlatParameter` per unit.
        ignored_states: parameters, or modules, that stay as they are.
        device_mesh: instead of `process_group`: a 1-D mesh, or for hybrid strategies a 2-D one `(replicate, shard)`.
            With tensor parallelism: the data-parallel axes of a mesh that has others, `mesh["dp"]`.
        extensions: the treatment of parameters that are DTensors already; None: `DTensorExtensions`. Beyond torch.
        unmanaged: as for `fully_shard`. Beyond torch.
        comm_policy: as for `fully_shard`. Beyond torch.
        on_touch: as for `fully_shard`. Beyond torch.

    Raises:
        MeshError: groups or a mesh that do not fit the strategy, or a DTensor among the parameters.
        ModuleError: a module that is wrapped already, below an `auto_wrap_policy`.
        PlacementError: an integer parameter, or a flat parameter among the parameters.
        PolicyError: choices that exclude each other; `PolicyTypeError` for wrong types.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
        sharding_strategy: ShardingStrategy | Placements | None = None,
        cpu_offload: CPUOffload | OffloadPolicy | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        extensions: FSDPExtensions | None = None,
        unmanaged: Unmanaged = "error",
        comm_policy: CommPolicy | None = None,
        on_touch: OnTouch = "error",
    ) -> None:
        super().__init__()
        require_module("FullyShardedDataParallel expects a module", module)
        choices = WrapperArguments(
            process_group,
            as_own(sharding_strategy, KINDS),
            as_own(cpu_offload, KINDS),
            as_own(backward_prefetch, KINDS),
            as_own(mixed_precision, KINDS),
            device_id,
            forward_prefetch,
            limit_all_gathers,
            use_orig_params,
            device_mesh,
            unmanaged,
            comm_policy,
            on_touch,
        )
        ignored = Ignored.read(module, ignored_modules, ignored_states)
        # torch's names: accelerate's and other packages' tests read them.
        self._ignored_modules, self._ignored_params = set(ignored.modules), set(ignored.parameters)
        mesh = choices.mesh(has_policy=auto_wrap_policy is not None)
        advice.of_containers(module)
        if choices.placements is None:
            advice.of_one_rank(mesh.num_shards * mesh.num_replicas, choices.strategy.name)
        self.sharding_strategy, self.backward_prefetch = choices.strategy, choices.backward_prefetch
        self.mixed_precision = choices.mixed_precision or MixedPrecision()
        self.cpu_offload = choices.cpu_offload or CPUOffload()
        self.forward_prefetch, self.limit_all_gathers = choices.forward_prefetch, choices.limit_all_gathers
        extended_by = extensions_given(extensions)
        if auto_wrap_policy is not None:
            more = {"param_init_fn": param_init_fn, "sync_module_states": sync_module_states, "extensions": extended_by}
            # Before the module itself is touched, so that an error for what no unit can have leaves it as it was.
            _wrap_below(module, auto_wrap_policy, choices, mesh, ignored, more)
        replaced = materialize.prepare(module, mesh, ignored, param_init_fn, device_id, sync_module_states)
        self.add_module(WRAPPED, module)
        self._sherd_state = _make_unit(self, choices, extended_by, mesh, ignored)
        materialize.remember(replaced)
        state_dicts.install(self)
        # Dynamo must not trace sherd's Python inside a compiled wrapper; the same holds for hooks.
        self._sherd_prepare = dynamo_disabled(before_forward)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises `ModuleError`: a pickle would hold process groups, and the shards of one rank."""
        raise ModuleError(
            f"a FullyShardedDataParallel around {type(self.module).__name__} cannot be pickled; save its state_dict()"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
        return deep_copy(self, memo)

    # The wrapped module

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without wrappers of activation checkpointing around it."""
        wrapped = self.get_submodule(WRAPPED)
        while find_state(wrapped) is None and (inner := wrapped_by(wrapped)) is not None:
            wrapped = inner
        return wrapped

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that shard, or under `NO_SHARD` the ranks that hold copies."""
        return self._sherd_state.process_group

    @property
    def rank(self) -> int:
        """This rank within `process_group`."""
        return dist.get_rank(self.process_group)

    @property
    def world_size(self) -> int:
        """The number of ranks of `process_group`."""
        return dist.get_world_size(self.process_group)

    @property
    def compute_device(self) -> torch.device:
        """Where forward and backward run."""
        return self._sherd_own_unit.mesh.device

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Call the wrapped module's forward, with unsharded parameters."""
        self._sherd_prepare(self)
        wrapped = self._modules[WRAPPED]
        assert wrapped is not None, "a wrapper has its module from the end of its making on"
        return wrapped(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns the wrapped module's attribute where the wrapper has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            wrapped = self.__dict__.get("_modules", {}).get(WRAPPED)
            if wrapped is None:
                raise
            return getattr(wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """As nn.Module's, but set a tensor on the wrapped module if that has a parameter of the name.

        `__getattr__` reads the tensor from it. `torch.func.functional_call` sets the parameters of a nested wrapper
        this way.
        """
        wrapped, inner = None, wrapped_by(self) if isinstance(value, torch.Tensor) else None
        while inner is not None:
            wrapped, inner = inner, wrapped_by(inner)
        if wrapped is None or name in self._parameters or name not in wrapped._parameters:
            super().__setattr__(name, value)
        elif in_functional_call():
            wrapped._parameters[name] = value
        else:
            wrapped.register_parameter(name, value)

    def __getitem__(self, key: object) -> Any:
        """Returns `wrapped[key]`, for a wrapped container."""
        return self.module.__getitem__(key)  # type: ignore[operator]  # a module without `__getitem__` raises

    # Names

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """As nn.Module's. torch's checkpointing, which begins by it, gets names without the wrapper from then on."""
        if asked_by_checkpointing(directly=True):
            answer_checkpointing({"_get_fqns": state_dicts.plain_names})
        return super().named_children()

    # torch's wrapper declares both methods with `*args, **kwargs`; test_public_names.py holds sherd to that.
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As nn.Module's, with the names that the user's own model has."""
        named = super().named_parameters(*args, **kwargs)
        plainly_named = ((plain_name(name), parameter) for name, parameter in named)
        if kwargs.get("recurse", True) is False and asked_by_checkpointing(directly=True):
            return state_dicts.named_for_checkpointing(self, plainly_named)
        return plainly_named

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As nn.Module's, with the names that the user's own model has."""
        return ((plain_name(name), buffer) for name, buffer in super().named_buffers(*args, **kwargs))

    # Instances

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Returns the instances at and below `module`, outermost first; with `root_only` only the outermost."""
        wrappers = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        if not root_only:
            return wrappers
        nested = {id(each) for outer in wrappers for each in outer.modules() if each is not outer}
        return [each for each in wrappers if id(each) not in nested]

    def check_is_root(self) -> bool:
        """Returns whether this is the outermost unit, as any unit is until a unit above runs."""
        return self._sherd_own_runtime.root is self._sherd_own_unit

    # Unsharded parameters

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """As `sherd.unsharded`, with an error where FSDP1 has one.

        Raises:
            UnsupportedError: `with_grads` for a unit with a flat parameter, or with `offload_to_cpu`; `writeback` with
                `rank0_only`; `offload_to_cpu` under `NO_SHARD`.
        """
        within = module.modules() if recurse else (module,)
        for choices in (state.choices for state in map(find_state, within) if state is not None):
            if with_grads and (offload_to_cpu or not choices.use_orig_params):
                raise UnsupportedError(
                    f"with_grads={with_grads}, use_orig_params={choices.use_orig_params}, offload_to_cpu="
                    f"{offload_to_cpu} is not supported yet; gradients of single parameters need use_orig_params=True, "
                    "and stay on the device"
                )
            if offload_to_cpu and choices.strategy is ShardingStrategy.NO_SHARD:
                raise UnsupportedError(
                    "offload_to_cpu=True and NO_SHARD is not supported yet; copy the parameters, which every rank has"
                )
        with unsharded(module, recurse, writeback, rank0_only, offload_to_cpu, with_grads):
            if offload_to_cpu and not rank0_only:
                advice.of_many_copies()
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """As nn.Module's: `fn` gets each module with unsharded parameters, and may change them."""
        if self._sherd_own_unit.lent is not None:
            raise WrapperStateError(
                "apply() inside an unshard context that lends this unit's parameters; call it outside, or on "
                "the wrapped module"
            )
        with unsharded(self, recurse=False):
            return super().apply(fn)

    # Gradients

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Add up unsharded gradients in this context; a backward outside reduces them.

        Raises:
            RuntimeError: on an instance that is not the root (a `StateError`).
        """
        self._sherd_require_root("no_sync")
        with without_reduction(self._sherd_units(recurse=True)):
            yield

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | torch.Tensor, norm_type: float | str = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm, over all ranks and parameters, is at most `max_norm`.

        Returns:
            The norm before clipping, 0-D, the same on every rank.

        Raises:
            StateError: on an instance that is not the root.
        """
        self._sherd_require_root("clip_grad_norm_")
        parameters = list(self.parameters())
        norm = clip_grad_norm_(parameters, float(max_norm), float(norm_type))
        if all(each is None for each in gradients_of(parameters)):
            advice.of_no_gradients(self.rank, norm.dtype)
        return norm

    def register_comm_hook(self, state: object, hook: comm_hook.Hook) -> None:
        """Reduce gradients with `hook`, in the form of DDP's communication hooks; `sherd.comm_hooks` has some.

        Under `NO_SHARD` `hook(state, gradient)` reduces in place; otherwise `hook(state, gradient, shard)` fills
        `shard`. Both tensors are 1-D, in the reduce dtype, and include padding, which is 0 in `gradient`. The hook
        divides by the number of ranks too.

        Raises:
            PolicyError: a hybrid strategy, or a unit of several dtypes; `PolicyTypeError` if `hook` is not callable.
            WrapperStateError: there is a hook already, or this instance is not the root.
        """
        self._sherd_require_root("register_comm_hook")
        wrappers = self.fsdp_modules(self)
        copies = [each.sharding_strategy is ShardingStrategy.NO_SHARD for each in wrappers]
        comm_hook.register(wrappers, state, hook, copies)

    def _sherd_require_root(self, method: str) -> None:
        unit = self._sherd_own_unit
        if not self.check_is_root():
            runtime = Runtime.over(unit)
            root = runtime.root.name if runtime is not None else "?"
            raise WrapperStateError(
                f"`{method}()` on inner FSDP instances is not supported. Please call `{method}()` on root FSDP module: "
                f"this is {unit.name}, the root is {root}"
            )
        if unit.lent is not None:
            raise WrapperStateError(f"{method}() inside an unshard context; leave it first")

    # State dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module's, with the names that the user's own model has, of the kind that `set_state_dict_type` says.

        All ranks must call it, as some kinds gather values of other ranks.

        Raises:
            StateError: in the middle of a forward or backward.
        """
        try:
            return super().state_dict(*args, **kwargs)
        finally:
            self._sherd_state.hide_names()

    def load_state_dict(self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's, for any kind of state dict. Flat parameters are registered again also after an error."""
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            for each in self.fsdp_modules(self):
                each._sherd_state.hide_names()

    set_state_dict_type = staticmethod(state_methods.set_state_dict_type)
    get_state_dict_type = staticmethod(state_methods.get_state_dict_type)
    state_dict_type = staticmethod(state_methods.state_dict_type)

    # Optimizer state

    optim_state_dict = staticmethod(state_methods.optim_state_dict)
    optim_state_dict_to_load = staticmethod(state_methods.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(state_methods.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(state_methods.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(state_methods.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(state_methods.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(state_methods.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(state_methods.rekey_optim_state_dict)


# The making of a wrapper


def _wrap_below(
    module: nn.Module,
    policy: WrapPolicy,
    choices: WrapperArguments,
    mesh: DataMesh,
    ignored: Ignored,
    more: Mapping[str, object],
) -> None:
    """Wrap the modules below `module` that `policy` chooses. `more` has the arguments that `choices` lacks."""
    _check_parameters(ParameterOwnership.below([module], ignored.parameters), use_orig_params=True)
    check_none_wrapped(module, lambda each: find_state(each) is not None)
    kwargs = {field.name: getattr(choices, field.name) for field in dataclasses.fields(choices)}
    kwargs |= {**more, "ignored_states": ignored.parameters}
    if choices.strategy.is_hybrid and choices.device_mesh is None:
        # One mesh for all units: a unit that made its own mesh would make process groups of its own too.
        kwargs.update(process_group=None, device_mesh=mesh.mesh)
    precise = {below for below in module.modules() if isinstance(below, choices.precise_classes)}
    advice.of_precise_modules(precise)
    chosen = choose(
        module,
        policy,
        ignored.modules,
        ignored.parameters,
        kwargs,
        apart=choices.precise_classes,
        apart_kwargs={"mixed_precision": None},
    )
    if not choices.use_orig_params:
        check_frozen(module, chosen, ignored.parameters)

    def wrapped(below: nn.Module, of_unit: Kwargs) -> nn.Module:
        if below in precise:
            materialize.compute_in_full_precision(below)
        return FullyShardedDataParallel(below, **of_unit)

    apply_wraps(module, chosen, wrapped)


def _make_unit(
    wrapper: nn.Module, choices: WrapperArguments, extensions: FSDPExtensions, mesh: DataMesh, ignored: Ignored
) -> WrapperState:
    """Make `wrapper` a unit, with a flat parameter unless `use_orig_params`, and cast its buffers."""
    cut = choices.placement
    ownership = ParameterOwnership.below([wrapper], ignored.parameters)
    _check_parameters(ownership, choices.use_orig_params)
    returned = [flattened(extensions, each.parameter, each.name) for each in ownership.owned]
    unit = make_unit(
        [wrapper],
        ownership,
        mesh,
        lambda each: ShardingRequest(rule_of(cut, each.parameter), mesh, choices.owns_gradients),
        choices.precision,
        choices.offload,
        choices.policy,
    )
    extended = {
        record: extension for record, extension in zip(unit.parameters, returned, strict=True) if extension is not None
    }
    if has_own(extensions, "post_unflatten_transform"):
        for record, extension in extended.items():
            spec = record.unsharded_spec
            assert spec is not None, "only a DTensor is extended"
            record.restore_with(partial(restored, extensions, extension, spec, record.name))
    if ownership.owned and not choices.use_orig_params:
        unit.flatten(wrapper, state_dicts.FLAT_PARAM)
    return WrapperState(
        unit,
        choices,
        extensions,
        extended,
        buffer_dtypes=materialize.cast_buffers(wrapper, choices, ignored),
        undistributed=[each for each in ownership.modules if each._parameters and not is_tensor_parallel(each)],
    )


def _check_parameters(ownership: ParameterOwnership, use_orig_params: bool) -> None:
    """Raise for parameters that cannot be cut as one line of numbers."""
    for borrowed in ownership.borrowed:
        if isinstance(borrowed.place.shown, FlatParameter):
            raise PlacementError(
                f"Cannot flatten a `FlatParameter`: {borrowed.place.attribute} is another wrapper's; leave it as it is"
            )
    for each in ownership.owned:
        dtype = each.parameter.dtype
        if isinstance(each.parameter, FlatParameter):
            raise PlacementError(
                f"Cannot flatten a `FlatParameter`: {each.name} is one already; wrap the module it came from only once"
            )
        if not (dtype.is_floating_point or dtype.is_complex):
            raise PlacementError(
                f"Cannot flatten integer dtype tensors: {each.name} is {dtype}; make it a buffer, or put it into "
                "ignored_states"
            )
    if use_orig_params:
        return
    for attribute, values in (
        ("dtype", {each.name: each.parameter.dtype for each in ownership.owned}),
        ("`requires_grad`", {each.name: each.parameter.requires_grad for each in ownership.owned}),
    ):
        if len(set(values.values())) > 1:
            first = next(iter(values))
            other = next(name for name in values if values[name] != values[first])
            raise PolicyError(
                f"Must flatten tensors with uniform {attribute} when `use_orig_params=False`: {first} has "
                f"{values[first]}, {other} has {values[other]}; pass use_orig_params=True, or wrap them apart"
            )
