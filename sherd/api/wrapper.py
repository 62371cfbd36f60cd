"""`FullyShardedDataParallel`: a wrapper around a module that makes one unit of it. FSDP1's front end on sherd's engine.

The wrapper has one child, the user's module. `fsdp1.py` reads its arguments; the engine does not know that wrappers
exist.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sherd._torch import (
    asked_by_checkpointing,
    dynamo_disabled,
    gradients_of,
    in_functional_call,
)
from sherd.api import advice, comm_hook, materialize, optim_states, state_dict_settings, state_dicts
from sherd.api.copying import deep_copy
from sherd.api.extensions import FSDPExtensions, extensions_given
from sherd.api.fsdp1 import BackwardPrefetch, Choices, CPUOffload, MixedPrecision, ShardingStrategy
from sherd.api.ignored import Ignored
from sherd.api.module import FSDPModule, require_module
from sherd.api.placements import Placements
from sherd.api.unsharded import unsharded
from sherd.api.wrapper_state import before_forward, find_state
from sherd.api.wrapping import make_wrappers_unit, wrap_below
from sherd.clip import clip_grad_norm_
from sherd.engine import Runtime
from sherd.errors import ModuleError, UnsupportedError, WrapperStateError
from sherd.policy import CommPolicy, OnTouch, Unmanaged
from sherd.wrap import WrapPolicy
from sherd.wrap.names import WRAPPED, plain_name


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
        sharding_strategy: what is sharded, and when unsharded parameters are freed. None: `FULL_SHARD`. Beyond torch:
            `sherd.Placements(...)`, of two axes for a pair of groups or a 2-D mesh.
        cpu_offload: keep shards, gradients and optimizer state in host memory.
        auto_wrap_policy: which modules below become units of their own (`sherd.wrap`), made with these arguments.
        backward_prefetch: when to gather the next unit in backward; None: when it is needed.
        mixed_precision: dtypes of compute, of reduction and of buffers.
        ignored_modules: modules whose parameters stay as they are, with all modules below them.
        param_init_fn: called with each module that has parameters or buffers on the meta device, to give them memory
            and values; None: `to_empty`, then `reset_parameters()`.
        device_id: the device to move the module to before it is sharded.
        sync_module_states: take rank 0's parameters and buffers on all ranks.
        forward_prefetch: gather the next unit while the present one computes.
        limit_all_gathers: accepted; gathers never run further ahead than the prefetch arguments say.
        use_orig_params: what the optimizer sees. True: the module's own parameters, as `RaggedDTensor`s, of which each
            rank holds a run, some of them empty. False: one `FlatParameter` per unit.
        ignored_states: parameters, or modules, that stay as they are.
        device_mesh: instead of `process_group`: a 1-D mesh, or for hybrid strategies a 2-D one `(replicate, shard)`.
            Beside tensor parallelism: the data-parallel axes of a mesh that has others, `mesh["dp"]`.
        extensions: what is done with parameters that are DTensors already; None: `DTensorExtensions`. Beyond torch.
        unmanaged: what is done about trainable parameters that are added later, as for `fully_shard`. Beyond torch.
        comm_policy: how bytes travel, and what is done about ranks that go different ways, as for `fully_shard`. Beyond
            torch.
        on_touch: what is done about calls of modules inside, as for `fully_shard`. Beyond torch.

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
        cpu_offload: CPUOffload | None = None,
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
        choices = Choices(
            process_group,
            sharding_strategy,
            cpu_offload,
            backward_prefetch,
            mixed_precision,
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
        mesh = choices.mesh(has_policy=auto_wrap_policy is not None)
        advice.of_containers(module)
        if choices.placements is None:
            advice.of_one_rank(mesh.num_shards * mesh.num_replicas, choices.strategy.name)
        self.sharding_strategy = choices.strategy
        self.mixed_precision = choices.mixed_precision or MixedPrecision()
        self.cpu_offload = choices.cpu_offload or CPUOffload()
        self.backward_prefetch = choices.backward_prefetch
        self.forward_prefetch, self.limit_all_gathers = choices.forward_prefetch, choices.limit_all_gathers
        extended_by = extensions_given(extensions)
        if auto_wrap_policy is not None:
            more = {"param_init_fn": param_init_fn, "sync_module_states": sync_module_states, "extensions": extended_by}
            # Before the module itself is touched: an error for what no unit can have leaves it as it was.
            wrap_below(module, auto_wrap_policy, FullyShardedDataParallel, choices, mesh, ignored, more)
        replaced = materialize.prepare(module, mesh, ignored, param_init_fn, device_id, sync_module_states)
        self.add_module(WRAPPED, module)
        self._sherd_state = make_wrappers_unit(self, choices, extended_by, mesh, ignored)
        materialize.remember(replaced)
        state_dicts.install(self)
        # As with hooks: a compiled wrapper is to find no Python of ours to trace.
        self._sherd_prepare = dynamo_disabled(before_forward)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise, as a pickle would be of process groups, and of one rank's shards."""
        raise ModuleError(
            f"a FullyShardedDataParallel around {type(self.module).__name__} cannot be pickled; save its state_dict()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return deep_copy(self, memo)

    # The wrapped module

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without wrappers of activation checkpointing around it."""
        found = self.get_submodule(WRAPPED)
        while find_state(found) is None and WRAPPED in found._modules:
            found = found.get_submodule(WRAPPED)
        return found

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
        """As nn.Module's, but a tensor with the name of a parameter of the wrapped module is set there, where reading
        finds it. `torch.func.functional_call` sets the parameters of a nested wrapper in this way."""
        found = self.__dict__.get("_modules", {}).get(WRAPPED) if isinstance(value, torch.Tensor) else None
        while found is not None and WRAPPED in found._modules:
            found = found._modules[WRAPPED]
        if found is None or name in self._parameters or name not in found._parameters:
            super().__setattr__(name, value)
        elif in_functional_call():
            found._parameters[name] = value
        else:
            found.register_parameter(name, value)

    def __getitem__(self, key: object) -> Any:
        """`wrapped[key]`, for a wrapped container."""
        return self.module.__getitem__(key)  # type: ignore[operator]  # where it has none, the error says so

    # Names

    # torch's wrapper declares these two with `*args, **kwargs`; test_public_names.py holds us to that.
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
        """Returns the instances at and below `module`, outermost first; with `root_only` only those in no other."""
        found = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        if not root_only:
            return found
        nested = {id(each) for outer in found for each in outer.modules() if each is not outer}
        return [each for each in found if id(each) not in nested]

    def check_is_root(self) -> bool:
        """Returns whether this is the outermost unit. Before the first forward it is, until a unit above runs."""
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
        """As nn.Module's: `fn` sees each module with unsharded parameters, and its changes are kept."""
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
        """Let backwards in this context not reduce: gradients are added up unsharded until a backward outside.

        Raises:
            RuntimeError: on an instance that is not the root (a `StateError`).
        """
        self._sherd_require_root("no_sync")
        units = self._sherd_units(recurse=True)
        before = [(unit, unit.policy.reduce_gradients, unit.policy.all_reduce_gradients) for unit in units]
        for unit in units:
            unit.change(reduce_gradients=False, all_reduce_gradients=False)
        try:
            yield
        finally:
            for unit, reduces, all_reduces in before:
                unit.change(reduce_gradients=reduces, all_reduce_gradients=all_reduces)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | torch.Tensor, norm_type: float | str = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm, over all ranks and parameters, is at most `max_norm`.

        Returns:
            The norm before, 0-D, the same on every rank.

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
        divides too.

        Raises:
            PolicyError: not callable, a hybrid strategy, or a unit of several dtypes.
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
        """As nn.Module's, for any kind of state dict. Flat parameters are registered again also if it raises."""
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            for each in self.fsdp_modules(self):
                each._sherd_state.hide_names()

    set_state_dict_type = staticmethod(state_dict_settings.set_state_dict_type)
    get_state_dict_type = staticmethod(state_dict_settings.get_state_dict_type)
    state_dict_type = staticmethod(state_dict_settings.state_dict_type)

    # Optimizer state

    optim_state_dict = staticmethod(optim_states.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_states.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(optim_states.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optim_states.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optim_states.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optim_states.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optim_states.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optim_states.rekey_optim_state_dict)
