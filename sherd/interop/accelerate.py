"""sherd in place of torch's FSDP in Hugging Face's accelerate, and so in the trainers of transformers and TRL.

accelerate 1.15 has no extension point for the library that shards. While `in_place_of_fsdp` is in force, names of
`accelerate.accelerator` are ours:

    AcceleratorState              takes the plugin on a CPU too
    get_grad_scaler, and FSDP2's  make loss scalers whose ranks agree
    fsdp2_prepare_model           shards the model that `Accelerator.prepare` gets, as the plugin says
    Accelerator.prepare           takes a model without an optimizer too: for an evaluation before any training
    Accelerator._prepare_fsdp2    leaves a model alone that is sharded already: in a second training, or by the user

FSDP1's wrapper accelerate imports from torch inside of seven functions. Many modules hold them, so they stay the same
objects, and in their code the name of the module to import from is another one, which has sherd's wrapper.

Everything else is accelerate's own: it works on DTensors, which sherd's shards are, and on FSDP1's methods.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from sherd.api.auto_shard import auto_shard, check_arguments
from sherd.api.fully_shard import Options, fully_shard
from sherd.api.module import FSDPModule, register_fsdp_forward_method
from sherd.errors import ModuleError, PolicyTypeError, StateError, in_short
from sherd.fsdp1.wrapper import FullyShardedDataParallel
from sherd.grad_scaler import ShardedGradScaler
from sherd.interop.packages import TemporaryChange, replaced, require_tried, take_rank0s_values, wrapped
from sherd.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from sherd.wrap import WrapPolicy, choose, is_container

__all__ = ["in_place_of_fsdp"]

TRIED = "1.15"
"""The version of accelerate whose names are replaced."""

OF_WRAPPER = inspect.signature(FullyShardedDataParallel).parameters.keys() - {"module", "auto_wrap_policy"}


class in_place_of_fsdp(TemporaryChange):
    """Let accelerate shard with sherd where it would with torch's FSDP: write it before the `Accelerator` is made.

        in_place_of_fsdp()
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, ...))

    The plugin, a config of `accelerate launch`, or `fsdp_config` of a `TrainingArguments` says how; they stay as they
    are. With version 2 the model is sharded by `fully_shard`, with version 1 by `sherd.FullyShardedDataParallel`. FSDP
    works on CPUs too then, with two processes or more. The call takes effect at once; the end of a `with` statement
    restores what was before.

    Args:
        policy: which modules are units, as in `auto_shard`; or, for version 2, "auto": those that `auto_shard` chooses
            without a policy. None: the plugin's `auto_wrap_policy`; without one the model is one unit.
        options: arguments of `fully_shard` (`placement`, `mp_policy` and others), or for version 1 of the wrapper
            (`comm_policy` and others), which override the plugin's.

    Raises:
        UnsupportedError: accelerate is missing, or of a version that was not tried.
        PolicyTypeError: no policy, or an argument that sherd does not take; of the `Accelerator`, one for the other
            version.
        StateError: an `Accelerator` was made before, and shards nothing.
    """

    def __init__(self, policy: WrapPolicy | Literal["auto"] | None = None, **options: Any) -> None:
        check_arguments({name: options[name] for name in options if name not in OF_WRAPPER}, "in_place_of_fsdp")
        if not (policy is None or policy == "auto" or callable(policy) or hasattr(policy, "_run_policy")):
            raise PolicyTypeError(
                f"in_place_of_fsdp(policy={policy!r}): expected a policy of sherd.wrap or torch, a function or 'auto'"
            )
        require_tried("accelerate", TRIED, "in_place_of_fsdp")
        import accelerate.accelerator as names

        made = names.AcceleratorState._shared_state
        if made and made["distributed_type"] == "MULTI_CPU" and os.environ.get("ACCELERATE_USE_FSDP") == "true":
            raise StateError(
                "in_place_of_fsdp: an Accelerator with a plugin was made before, and on a CPU accelerate ignores the "
                "plugin; write in_place_of_fsdp() above the first Accelerator"
            )
        its, plugin, shards = names.Accelerator, names.FullyShardedDataParallelPlugin, _Shards(policy, options)
        undoes: list[Callable[[], None]] = []
        undoes += [
            replaced(names, "AcceleratorState", _state_class(undoes, shards)),
            wrapped(names, "get_grad_scaler", _scaler_for_fsdp),
            replaced(names, "get_fsdp2_grad_scaler", ShardedGradScaler),
            replaced(names, "fsdp2_prepare_model", shards.prepared),
            wrapped(its, "prepare", _taking_models_alone),
            wrapped(its, "_prepare_fsdp2", _leaving_sharded_models),
            wrapped(plugin, "__post_init__", _on_cpus_too),
            _import_for(its.prepare_model, shards),
            _import_for(names.load_fsdp_optimizer, _Filled),
        ]
        for function in (
            its.get_state_dict,
            names.extract_model_from_parallel,
            names.save_fsdp_model,
            names.load_fsdp_model,
            names.save_fsdp_optimizer,
        ):
            undoes.append(_import_for(function, FullyShardedDataParallel))
        super().__init__(undoes)


_numbers = itertools.count()


def _import_for(function: FunctionType, wrapper: object) -> Callable[[], None]:
    """Let `function` import `wrapper` as FSDP1's class, and all else from torch. Returns a function that undoes it."""
    import torch.distributed.fsdp.fully_sharded_data_parallel as torchs

    ours = f"{__name__}, for {function.__qualname__} {next(_numbers)}"
    sys.modules[ours] = ModuleType(ours)  # where an import statement looks first
    vars(sys.modules[ours]).update({**vars(torchs), "FullyShardedDataParallel": wrapper})
    code, prefixes = function.__code__, ("torch.distributed.fsdp", f"{__name__}, for ")
    names = tuple(ours if name.startswith(prefixes) else name for name in code.co_names)
    restore = replaced(function, "__code__", code.replace(co_names=names))

    def undo() -> None:
        restore()
        sys.modules.pop(ours, None)

    return undo


def _import_in_trainers() -> Iterator[Callable[[], None]]:
    """Give the modules of transformers and TRL the wrapper where they have torch's. Yields functions that undo it."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Theirs

    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] in ("transformers", "trl"):
            for name in [name for name, value in vars(module).items() if value is Theirs]:
                yield replaced(module, name, FullyShardedDataParallel)
    if fsdp := sys.modules.get("transformers.distributed.fsdp"):
        yield _import_for(fsdp.is_fsdp_managed_module, FullyShardedDataParallel)


def _state_class(undo: list[Callable[[], None]], shards: _Shards) -> type:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    class State(AcceleratorState):  # type: ignore[misc]
        def __init__(self, *args: Any, fsdp_plugin: Any = None, cpu: bool = False, **kwargs: Any) -> None:
            if fsdp_plugin is not None:
                shards.require_fit(fsdp_plugin.fsdp_version)
                undo.extend(_import_in_trainers() if fsdp_plugin.fsdp_version == 1 else ())
            cpu = cpu or (fsdp_plugin is not None and not torch.accelerator.is_available())
            super().__init__(*args, fsdp_plugin=fsdp_plugin, cpu=cpu, **kwargs)
            shared = PartialState()
            if fsdp_plugin is not None and shared.distributed_type == DistributedType.MULTI_CPU:
                self.fsdp_plugin = fsdp_plugin
                if self.mixed_precision != "no":
                    fsdp_plugin.set_mixed_precision(self.mixed_precision)
                self.distributed_type = shared.distributed_type = DistributedType.FSDP

    return State


def _on_cpus_too(post_init: Callable[[Any], None], plugin: Any) -> None:
    """Call the plugin's `__post_init__`, also on CPUs, where it ends with an error for `sync_module_states`."""
    try:
        post_init(plugin)
    except RuntimeError:
        if not plugin.sync_module_states or torch.accelerator.is_available():
            raise
        plugin.param_init_fn = lambda module: module.to_empty(device="cpu", recurse=False)


def _scaler_for_fsdp(make: Callable[..., Any], distributed_type: Any = None, **kwargs: Any) -> Any:
    if distributed_type != "FSDP":
        return make(distributed_type, **kwargs)
    device = torch.accelerator.current_accelerator()
    return ShardedGradScaler("cpu" if device is None else device.type, **kwargs)


def _taking_models_alone(prepare: Callable[..., Any], accelerator: Any, *args: object, **kwargs: object) -> Any:
    """Call accelerate's `prepare`, also for a model without an optimizer, which accelerate refuses under FSDP2."""
    models = [each for each in args if isinstance(each, nn.Module)]
    has_optimizer = any(isinstance(each, torch.optim.Optimizer) for each in args)
    if not accelerator.is_fsdp2 or not models or has_optimizer:
        return prepare(accelerator, *args, **kwargs)
    *prepared, _ = prepare(accelerator, *args, torch.optim.SGD(models[0].parameters()), **kwargs)
    accelerator._optimizers.pop()
    return tuple(prepared) if len(prepared) > 1 else prepared[0]


def _leaving_sharded_models(
    prepare: Callable[..., Sequence[object]], accelerator: Any, *args: object
) -> tuple[object, ...]:
    """Call accelerate's `prepare` for arguments of which a model may be sharded.

    accelerate finds the parameters of an optimizer again by their addresses, and empty shards have none.
    """
    groups = [group for each in args if isinstance(each, torch.optim.Optimizer) for group in each.param_groups]
    if any(parameter.is_meta for group in groups for parameter in group["params"]):
        for model in [each for each in args if isinstance(each, nn.Module)]:
            _give_memory(model, accelerator, groups)
    sharded = {place: each for place, each in enumerate(args) if _is_sharded(each)}
    others = iter(prepare(accelerator, *(each for place, each in enumerate(args) if place not in sharded)))
    accelerator._models += [each for each in sharded.values() if each not in accelerator._models]
    return tuple(each if place in sharded else next(others) for place, each in enumerate(args))


def _is_sharded(given: object) -> bool:
    return isinstance(given, nn.Module) and isinstance(getattr(given, "_orig_mod", given), FSDPModule)


def _inner(model: nn.Module) -> nn.Module:
    from accelerate.utils import extract_model_from_parallel

    inner: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return inner


@dataclass(frozen=True)
class _Shards:
    """What shards a model: `prepared` in place with version 2; with version 1 a call, as of FSDP1's class."""

    policy: WrapPolicy | Literal["auto"] | None
    options: Mapping[str, Any]

    def require_fit(self, version: int) -> None:
        """Raise `PolicyTypeError` for a policy or an option that is for another version of FSDP than `version`."""
        if version == 2:
            check_arguments(self.options, "in_place_of_fsdp, with fsdp_version=2,")
            return
        wrong = [name for name in self.options if name not in OF_WRAPPER]
        wrong += ["policy"] if isinstance(self.policy, str) else []
        if wrong:
            raise PolicyTypeError(
                f"in_place_of_fsdp({wrong[0]}=...), with fsdp_version=1: expected a policy of sherd.wrap, or of the "
                f"wrapper's arguments one of {', '.join(sorted(OF_WRAPPER))}; or write fsdp_version=2"
            )

    def prepared(self, accelerator: Any, model: nn.Module) -> nn.Module:
        inner, plugin = _inner(model), accelerator.state.fsdp_plugin
        plugin.set_auto_wrap_policy(inner)
        options = cast(Options, {**_of_plugin(accelerator, plugin, inner), **self.options})
        if plugin.cpu_ram_efficient_loading and not _of_4_bits(inner):
            _take_rank0s_model(inner, accelerator, options)
        _widen(accelerator.state, inner)
        if self.policy is None:
            _shard_as_accelerate(inner, plugin.auto_wrap_policy, options, self.options)
        else:
            auto_shard(inner, None if isinstance(self.policy, str) else self.policy, **options)
        if hasattr(inner, "generate"):  # of a PeftModel it calls modules below the root
            register_fsdp_forward_method(inner, "generate")
        return model

    # What `Accelerator.prepare_model` asks of FSDP1's class

    def __call__(self, module: nn.Module, **of_plugin: Any) -> FullyShardedDataParallel:
        from accelerate.state import AcceleratorState

        _widen(AcceleratorState(), module)
        if self.policy is not None:
            of_plugin["auto_wrap_policy"] = self.policy
        return FullyShardedDataParallel(module, **{**of_plugin, **self.options})

    def __instancecheck__(self, given: object) -> bool:
        return isinstance(given, FullyShardedDataParallel)

    def fsdp_modules(self, model: nn.Module) -> tuple[nn.Module, ...]:
        """Returns no module: accelerate would widen the dtypes of their flat parameters, which were widened before."""
        return ()


class _Filled(FullyShardedDataParallel):
    """What `load_fsdp_optimizer` takes for FSDP1's class: a new optimizer gets a state, as room for the saved one."""

    @staticmethod
    def optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:  # type: ignore[override]
        get_optimizer_state_dict(model, optim)
        return FullyShardedDataParallel.optim_state_dict(model, optim)


def _widen(state: Any, model: nn.Module) -> None:
    """With mixed precision give the trained parameters float32, in which the optimizer steps."""
    if state.mixed_precision != "no":
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()


def _of_4_bits(model: nn.Module) -> set[nn.Parameter]:
    """Returns parameters of bitsandbytes, which every rank loads, together with the state of their quantization."""
    return {each for each in model.parameters() if type(each).__name__ == "Params4bit"}


def _give_memory(model: nn.Module, accelerator: Any, groups: Iterable[dict[str, Any]] = ()) -> None:
    """Give memory to what transformers leaves on the meta device but on rank 0, since a checkpoint lacks it.

    Optimizers have it in `groups`. accelerate tells parameters by their addresses, which are all 0 there.
    """
    given: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules() if not accelerator.is_main_process else ():
        registered: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in registered:
            for name, each in tensors.items():
                if each is not None and each.is_meta:
                    empty = torch.empty_like(each, device="cpu")
                    is_parameter = isinstance(each, nn.Parameter)
                    given.setdefault(each, nn.Parameter(empty, each.requires_grad) if is_parameter else empty)
                    tensors[name] = given[each]
    for group in groups:
        group["params"] = [given.get(each, each) for each in group["params"]]


def _take_rank0s_model(model: nn.Module, accelerator: Any, options: Options) -> None:
    from accelerate.utils import broadcast_object_list

    named = dict(chain(model.named_parameters(), model.named_buffers()))
    (empty,) = broadcast_object_list([[name for name, each in named.items() if each.is_meta]])
    if empty:
        raise ModuleError(
            f"cpu_ram_efficient_loading: {in_short(empty)} of {type(model).__name__} on rank 0 is on the meta "
            "device, so there are no values to send; load the model there, or set cpu_ram_efficient_loading=False"
        )
    _give_memory(model, accelerator)
    take_rank0s_values(chain(model.parameters(), model.buffers()), options, "cpu_ram_efficient_loading")


def _shard_as_accelerate(
    model: nn.Module, policy: WrapPolicy | None, options: Options, given: Mapping[str, Any]
) -> None:
    """Shard what `policy` chooses, the embedding, the last norm with the head, and `model`: accelerate's units."""
    from accelerate.utils.fsdp_utils import _find_final_norm

    finders = (getattr(model, f"get_{which}_embeddings", lambda: None) for which in ("input", "output"))
    embedding, head = (find() for find in finders)
    weight = getattr(embedding, "weight", None)
    is_tied = weight is not None and weight is getattr(head, "weight", None)
    first, last = ([], [embedding]) if is_tied else ([embedding], [])
    ignored = options.get("ignored_params") or ()
    chosen = {} if policy is None else choose(model, policy, ignored_params=ignored, root_kwargs={**options})
    within = {below for module in chosen for below in module.modules()}
    for module, of_unit in chosen.items():
        if not (is_container(module) or isinstance(module, FSDPModule)):
            fully_shard(module, **cast(Options, of_unit))
    kept = cast(Options, {**options, "reshard_after_forward": False, **given})
    for modules, of_end in ((first, options), ([_find_final_norm(model), *last, head], kept)):
        end = [each for each in modules if not (each is None or each in within or isinstance(each, FSDPModule))]
        if end:
            fully_shard(end, **of_end)
    fully_shard(model, **options)


def _of_plugin(accelerator: Any, plugin: Any, model: nn.Module) -> Options:
    """Returns what the plugin and the accelerator's mesh say, as arguments of `fully_shard`."""
    from accelerate.utils.fsdp_utils import get_parameters_from_modules

    mesh, precision = accelerator.torch_device_mesh, plugin.mixed_precision_policy
    pins = getattr(plugin.cpu_offload, "pin_memory", None)
    kept: Options = {} if plugin.reshard_after_forward else {"reshard_after_forward": False}
    ignored = get_parameters_from_modules(plugin.ignored_modules, model, accelerator.device)
    return {
        **kept,  # else as without an argument: the root is kept for backward, other units are freed
        "mesh": None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
        "mp_policy": MixedPrecisionPolicy(**(vars(precision) if precision else {})),
        "offload_policy": OffloadPolicy() if pins is None else CPUOffloadPolicy(pin_memory=pins),
        "ignored_params": ignored | {each for each in _of_4_bits(model) if not each.is_floating_point()},
    }
