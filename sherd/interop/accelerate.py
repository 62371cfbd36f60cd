"""sherd in place of torch's FSDP2 in Hugging Face's accelerate, and so in the trainers of transformers and TRL.

accelerate 1.15 has no extension point for the library that shards. It reaches FSDP2 through one function, by name, and
offers it on accelerators only. While `in_place_of_fsdp` is in force, four names in `accelerate.accelerator` are ours:

    fsdp2_prepare_model           shards the model that `Accelerator.prepare` gets, as the plugin says
    Accelerator.prepare           takes a model without an optimizer too: for an evaluation before any training
    Accelerator._prepare_fsdp2    leaves a model alone that is sharded already: in a second training, or by the user
    AcceleratorState              takes the plugin on a CPU too

Everything else is accelerate's own: it works on DTensors, which sherd's shards are.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sherd.api.auto_shard import auto_shard, check_arguments
from sherd.api.blocks import WRAPPINGS, Wrapping
from sherd.api.fully_shard import Options, fully_shard
from sherd.api.module import FSDPModule, register_fsdp_forward_method
from sherd.errors import PolicyError, PolicyTypeError, StateError
from sherd.interop.packages import require_tried, take_rank0s_values
from sherd.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from sherd.wrap import WrapPolicy

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["in_place_of_fsdp"]

TRIED = "1.15"
"""The version of accelerate whose names are replaced."""


class in_place_of_fsdp:
    """Let accelerate shard with sherd where it would with torch's FSDP2: write it before the `Accelerator` is made.

        in_place_of_fsdp()
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, ...))

    The plugin, a config of `accelerate launch`, or `fsdp_config` of a `TrainingArguments` says how; they stay as they
    are. FSDP works on CPUs too then, with two processes or more. The call takes effect at once; the end of a `with`
    statement restores what was before.

    Args:
        policy: which modules are units, as in `auto_shard`. None: the plugin's `auto_wrap_policy`; without one the
            model is one unit.
        options: arguments of `fully_shard` (`placement`, `mp_policy` and others), which override the plugin's.

    Raises:
        UnsupportedError: accelerate is missing, or of a version that was not tried.
        PolicyTypeError: no policy, or an argument that `fully_shard` does not take.
        StateError: an `Accelerator` was made before, and shards nothing.
        PolicyError: of the `Accelerator`, when its plugin asks for FSDP1.
    """

    def __init__(self, policy: WrapPolicy | Wrapping | None = None, **options: Unpack[Options]) -> None:
        check_arguments(options, "in_place_of_fsdp")
        if not (policy is None or policy in WRAPPINGS or callable(policy) or hasattr(policy, "_run_policy")):
            raise PolicyTypeError(
                f"in_place_of_fsdp(policy={policy!r}): expected a policy of sherd.wrap or torch, a function or one of "
                f"{', '.join(WRAPPINGS)}"
            )
        require_tried("accelerate", TRIED, "in_place_of_fsdp")
        import accelerate.accelerator as names

        made = names.AcceleratorState._shared_state
        if made and made["distributed_type"] == "MULTI_CPU" and os.environ.get("ACCELERATE_USE_FSDP") == "true":
            raise StateError(
                "in_place_of_fsdp: an Accelerator with a plugin was made before, and on a CPU accelerate ignores the "
                "plugin; write in_place_of_fsdp() above the first Accelerator"
            )

        def prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
            return _prepared(accelerator, model, policy, options)

        self._undo = [
            _replace(names, "fsdp2_prepare_model", prepare_model),
            _replace(names, "AcceleratorState", _state_class()),
            _replace(names.Accelerator, "prepare", _taking_models_alone(names.Accelerator.prepare)),
            _replace(names.Accelerator, "_prepare_fsdp2", _leaving_sharded_models(names.Accelerator._prepare_fsdp2)),
        ]

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for undo in self._undo:
            undo()


def _replace(owner: object, name: str, value: object) -> Callable[[], None]:
    """Give `owner` another value of `name`. Returns a function that undoes it."""
    undo = functools.partial(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
    return undo


def _state_class() -> type:
    """Returns accelerate's class of the state that all accelerators share, with FSDP on CPUs too."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    class State(AcceleratorState):  # type: ignore[misc]
        def __init__(self, *args: Any, fsdp_plugin: Any = None, cpu: bool = False, **kwargs: Any) -> None:
            if fsdp_plugin is not None and fsdp_plugin.fsdp_version != 2:
                raise PolicyError(
                    f"fsdp_version={fsdp_plugin.fsdp_version}: sherd takes the place of FSDP2; write fsdp_version=2 in "
                    "the plugin, version: 2 in an fsdp_config; accelerate to-fsdp2 converts the config of a launch"
                )
            cpu = cpu or (fsdp_plugin is not None and not torch.accelerator.is_available())
            super().__init__(*args, fsdp_plugin=fsdp_plugin, cpu=cpu, **kwargs)
            shared = PartialState()
            if fsdp_plugin is not None and shared.distributed_type == DistributedType.MULTI_CPU:
                self.fsdp_plugin = fsdp_plugin
                if self.mixed_precision != "no":
                    fsdp_plugin.set_mixed_precision(self.mixed_precision)
                self.distributed_type = shared.distributed_type = DistributedType.FSDP

    return State


def _taking_models_alone(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Returns accelerate's `prepare` for a model without an optimizer, which accelerate refuses under FSDP2."""

    @functools.wraps(prepare)
    def prepare_any(accelerator: Any, *args: object, **kwargs: object) -> Any:
        models = [each for each in args if isinstance(each, nn.Module)]
        has_optimizer = any(isinstance(each, torch.optim.Optimizer) for each in args)
        if not accelerator.is_fsdp2 or not models or has_optimizer:
            return prepare(accelerator, *args, **kwargs)
        *prepared, _ = prepare(accelerator, *args, torch.optim.SGD(models[0].parameters()), **kwargs)
        accelerator._optimizers.pop()
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

    return prepare_any


def _leaving_sharded_models(prepare: Callable[..., Sequence[object]]) -> Callable[..., tuple[object, ...]]:
    """Returns accelerate's `prepare` for arguments of which a model may be sharded.

    accelerate finds the parameters of an optimizer again by their addresses, and empty shards have none.
    """

    def prepare_fsdp2(accelerator: Any, *args: object) -> tuple[object, ...]:
        sharded = {place: each for place, each in enumerate(args) if _is_sharded(each)}
        others = iter(prepare(accelerator, *(each for place, each in enumerate(args) if place not in sharded)))
        accelerator._models += [each for each in sharded.values() if each not in accelerator._models]
        return tuple(each if place in sharded else next(others) for place, each in enumerate(args))

    return prepare_fsdp2


def _is_sharded(given: object) -> bool:
    return isinstance(given, nn.Module) and isinstance(_inner(given), FSDPModule)


def _inner(model: nn.Module) -> nn.Module:
    """Returns the module that torch.compile was given, or `model`."""
    from accelerate.utils import extract_model_from_parallel

    inner: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return inner


def _prepared(accelerator: Any, model: nn.Module, policy: WrapPolicy | Wrapping | None, given: Options) -> nn.Module:
    """Shard `model` in place, as accelerate's `fsdp2_prepare_model` does. Returns `model`."""
    inner, plugin = _inner(model), accelerator.state.fsdp_plugin
    plugin.set_auto_wrap_policy(inner)
    options: Options = {**_of_plugin(accelerator, plugin, inner), **given}
    if accelerator.mixed_precision != "no":  # the optimizer steps in full precision
        for parameter in inner.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()
    if plugin.cpu_ram_efficient_loading:
        # transformers loads them on rank 0 alone.
        take_rank0s_values((*inner.parameters(), *inner.buffers()), options, "cpu_ram_efficient_loading")
    chosen = plugin.auto_wrap_policy if policy is None else policy
    if chosen is None:
        fully_shard(inner, **options)
    else:
        auto_shard(inner, chosen, **options)
    if hasattr(inner, "generate"):  # of a PeftModel it calls modules below the root
        register_fsdp_forward_method(inner, "generate")
    return model


def _of_plugin(accelerator: Any, plugin: Any, model: nn.Module) -> Options:
    """Returns what the plugin and the accelerator's mesh say, as arguments of `fully_shard`."""
    from accelerate.utils.fsdp_utils import get_parameters_from_modules

    mesh, precision = accelerator.torch_device_mesh, plugin.mixed_precision_policy
    dtypes = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    pins = getattr(plugin.cpu_offload, "pin_memory", None)
    kept: Options = {} if plugin.reshard_after_forward else {"reshard_after_forward": False}
    return {
        **kept,  # else as without an argument: the root is kept for backward, other units are freed
        "mesh": None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
        "mp_policy": MixedPrecisionPolicy(**{name: getattr(precision, name) for name in dtypes if precision}),
        "offload_policy": OffloadPolicy() if pins is None else CPUOffloadPolicy(pin_memory=pins),
        "ignored_params": get_parameters_from_modules(plugin.ignored_modules, model, accelerator.device),
    }
