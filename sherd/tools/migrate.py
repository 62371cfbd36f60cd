"""`explain_migration`: the `fully_shard` calls for a `FullyShardedDataParallel(...)` call.

`WrapperArguments` reads the arguments, as for the wrapper. This file only puts their meaning into words.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sherd.api.fully_shard import fully_shard
from sherd.errors import PolicyTypeError, did_you_mean
from sherd.fsdp1.arguments import (
    KINDS,
    Ignored,
    ShardingStrategy,
    WrapperArguments,
)
from sherd.fsdp1.wrapper import FullyShardedDataParallel
from sherd.layout.runs import Flat
from sherd.policy import MixedPrecisionPolicy
from sherd.requirements import as_own

TAKES = tuple(name for name in inspect.signature(FullyShardedDataParallel.__init__).parameters if name != "self")
DEFAULTS = {
    name: parameter.default for name, parameter in inspect.signature(fully_shard).parameters.items() if name != "module"
}
WIDTH = 116


def explain_migration(module: nn.Module | None = None, **arguments: Any) -> str:
    """Translate `FullyShardedDataParallel(module, **arguments)` to `fully_shard` calls, and print them.

    The text has the calls with all their arguments, with the plain module as `model`, and then notes in comments: what
    to do before and after the calls, which arguments have no counterpart, and what replaces the wrapper's methods. A
    policy, a function, a process group and a mesh appear under the argument's name. Only rank 0 prints.

    Args:
        module: the plain module, or None. With a module, the text leaves out notes on norms in full precision and on
            the meta device if the module has neither. It is not changed.
        arguments: those of `FullyShardedDataParallel`; torch's own enums, dataclasses and policies too.

    Returns:
        The calls and the notes.

    Raises:
        PolicyTypeError: `FullyShardedDataParallel` has no such argument, or an argument is of the wrong type.
        PolicyError: arguments that exclude each other.
    """
    if module is not None and not isinstance(module, nn.Module):
        raise PolicyTypeError(f"explain_migration(module=...): expected a module, got a {type(module).__name__}")
    for name in arguments.keys() - TAKES:
        hint = did_you_mean(name, TAKES, f"it takes {', '.join(TAKES)}")
        raise PolicyTypeError(f"explain_migration({name}=...): FullyShardedDataParallel takes no such argument; {hint}")
    given = {name: as_own(value, KINDS) for name, value in arguments.items()}
    choices = WrapperArguments(**{name: value for name, value in given.items() if name in _CHOICES})
    ignored = Ignored.read(module or nn.Module(), given.get("ignored_modules"), given.get("ignored_states"))
    calls = "\n".join(_calls(module, given, choices, ignored))
    notes = [*_steps(module, given, choices, ignored), *_differences(given, choices)]
    title = (
        f"FullyShardedDataParallel({', '.join(['model', *(f'{name}=...' for name in given)])}), said with fully_shard. "
        "`model` is the plain model, names of arguments are what you pass to FSDP1; other names are those of sherd and "
        "torch.distributed.device_mesh."
    )
    text = "\n\n".join([_comment(title), calls, "\n".join(_comment(note, "- ") for note in notes), _LOOP]) + "\n"
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text)
    return text


# The calls


def _calls(
    module: nn.Module | None, given: Mapping[str, Any], choices: WrapperArguments, ignored: Ignored
) -> Iterator[str]:
    """Yields the mesh, the calls for units in full precision if there are any, and the call for all other units."""
    arguments = _arguments(choices)
    mesh = _mesh(choices)
    if mesh is not None:
        yield f"mesh = {mesh}"
        arguments["mesh"] = "mesh"
    if ignored.parameters:
        arguments["ignored_params"] = "ignored_params"
    if given.get("auto_wrap_policy") is None:
        yield _call("fully_shard", "model", arguments)
        return
    precise = choices.precise_classes
    if precise and (module is None or any(isinstance(each, precise) for each in module.modules())):
        low = choices.precision.param_dtype
        in_full = MixedPrecisionPolicy(None if low is None else torch.float32, output_dtype=low)
        call = _call("fully_shard", "each", {**arguments, "mp_policy": _written(in_full)})
        yield "for each in [*model.modules()]:  # in full precision, as FSDP1 makes them"
        yield "    if isinstance(each, mixed_precision._module_classes_to_ignore):"
        yield textwrap.indent(call, " " * 8)
    yield _call("auto_shard", "model, auto_wrap_policy", arguments)


def _arguments(choices: WrapperArguments) -> dict[str, str]:
    """Returns the arguments of `fully_shard` that differ from their defaults."""
    precision, placements = choices.precision, choices.placements
    if precision.param_dtype is None:  # then these fields have no effect
        precision = dataclasses.replace(
            precision, cast_forward_inputs=True, cast_root_forward_inputs=None, full_precision_in_eval=False
        )
    copies = choices.sharding_strategy is ShardingStrategy.NO_SHARD
    values = {
        "reshard_after_forward": None if copies else choices.reshard_after_forward,
        "mp_policy": precision,
        "offload_policy": choices.offload,
        "prefetch_policy": choices.prefetch,
        "placement": Flat() if placements is None else None,
        "comm_policy": choices.comm,
        "placements": "ddp" if copies else placements,
    }
    return {name: _written(value) for name, value in values.items() if value != DEFAULTS[name]}


def _mesh(choices: WrapperArguments) -> str | None:
    """Returns an expression for the mesh of `choices`, or None for one axis over all ranks."""
    group, mesh, device = choices.process_group, choices.device_mesh, _written(choices.device_type)
    if mesh is not None and (mesh.ndim == 1 or mesh.mesh_dim_names is not None):
        return "device_mesh"
    if mesh is not None:
        return f"DeviceMesh(device_mesh.device_type, device_mesh.mesh, {_AXES})"
    if group is None or group is dist.group.WORLD:
        sizes = "(num_nodes, ranks_per_node)"
        return f"init_device_mesh({device}, {sizes}, {_AXES})" if choices.strategy.is_hybrid else None
    if choices.strategy.is_hybrid:
        return f"DeviceMesh.from_group([process_group[1], process_group[0]], {device}, mesh=ranks, {_AXES})"
    return f"DeviceMesh.from_group(process_group, {device})"


# The notes


def _steps(
    module: nn.Module | None, given: Mapping[str, Any], choices: WrapperArguments, ignored: Ignored
) -> Iterator[str]:
    """Yields what to do before and after the calls, in order."""
    init, synchronizes = given.get("param_init_fn"), given.get("sync_module_states")
    device = _written(str(choices.device_id) if choices.device_id is not None else choices.device_type)
    modules = "each of model.modules()" + (" that is not ignored" if ignored.modules else "")
    if choices.strategy.is_hybrid and choices.device_mesh is None:
        yield (
            "ranks: an int tensor with a row for each shard group, its ranks in the order of process_group[0]; "
            "process_group[1] has one rank of each row."
            if choices.process_group is not None
            else "ranks_per_node: LOCAL_WORLD_SIZE, else the number of accelerators, else all ranks."
        )
    if ignored.parameters:
        yield (
            "ignored_params: the set of the parameters that FSDP1 ignores, those of ignored modules too. If the policy "
            "would choose an ignored module, let it pass that over."
        )
    if init is not None if module is None else any(parameter.is_meta for parameter in module.parameters()):
        # Before the calls if rank 0's values are to be sent, or if ignored modules must stay as they are.
        when = "before" if synchronizes or ignored.parameters else "after"
        values = "param_init_fn(module)" if init is not None else "its reset_parameters(), if it has tensors of its own"
        yield f"meta device: {when} the calls, for {modules}: to_empty(device={device}, recurse=False), then {values}."
    elif choices.device_id is not None:
        yield f"device_id: before the calls, model.to({device})."
    if synchronizes:
        yield (
            "sync_module_states: before the calls, dist.broadcast(tensor.detach(), group_src=0) of each parameter and "
            "buffer that is not ignored; with a mesh, over each of mesh.get_all_groups()."
        )
    if choices.buffer_dtype is not None:
        yield (
            f"buffer_dtype: after the calls, cast the floating-point buffers of {modules} to {choices.buffer_dtype}, "
            "but for modules in full precision. State dicts hold buffers in it; FSDP1's hold them in their own dtype."
        )


def _differences(given: Mapping[str, Any], choices: WrapperArguments) -> Iterator[str]:
    """Yields the arguments that `fully_shard` has in another form, or not at all."""
    yield "placement=Flat(): cuts anywhere, as FSDP1 does. Without it a parameter is a DTensor, cut on its dim 0."
    if not choices.use_orig_params:
        yield (
            "use_orig_params=False: here the optimizer sees the model's own parameters, not flat ones. With "
            "optimizer = sherd.flatten_optimizer(optimizer) it steps flat buffers all the same."
        )
    if not choices.forward_prefetch:
        yield "prefetch_policy: without it forward gathers one unit ahead, as FSDP1 does if asked to, and on devices."
    if "limit_all_gathers" in given:
        yield (
            "limit_all_gathers: nothing to say, gathers never run further ahead than prefetch_policy allows; its "
            "bytes_in_flight bounds them in bytes."
        )
    if given.get("extensions") is not None:
        yield "extensions: nothing to say, DTensors are sharded as they are; a subclass would not be asked."
    if type(given.get("auto_wrap_policy")).__name__ == "CustomPolicy":
        yield "auto_wrap_policy: if its function returns dicts, let them hold arguments of fully_shard."


_AXES = 'mesh_dim_names=("replicate", "shard")'
_CHOICES = tuple(field.name for field in dataclasses.fields(WrapperArguments))
_LOOP = """\
# In the rest of the program:
#   model.clip_grad_norm_(max_norm)    sherd.clip_grad_norm_(model.parameters(), max_norm)
#   with model.no_sync():              model.set_requires_gradient_sync(False), and True before the last backward
#   FSDP.summon_full_params(model)     sherd.unsharded(model), with the same arguments
#   FSDP.fsdp_modules(model)           [each for each in model.modules() if isinstance(each, sherd.FSDPModule)]
#   model.module                       model
#   model.register_comm_hook           set_custom_reduce_scatter or set_all_reduce_hook, of each unit
#   FULL_STATE_DICT                    get_model_state_dict and set_model_state_dict of
#                                      torch.distributed.checkpoint.state_dict, with
#                                      options=StateDictOptions(full_state_dict=True, cpu_offload=True)
#   SHARDED_STATE_DICT                 model.state_dict(), saved and loaded by torch.distributed.checkpoint
#   LOCAL_STATE_DICT                   {name: each.to_local() for name, each in model.state_dict().items()}
#   FSDP.optim_state_dict              get_optimizer_state_dict of torch.distributed.checkpoint.state_dict
#   FSDP.optim_state_dict_to_load      set_optimizer_state_dict of the same module"""


def _written(value: Any) -> str:
    """Returns `value` as written in a program: `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"({''.join(f'{_written(item)}, ' for item in value).rstrip()})"
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith("sherd."):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr)
        chosen = (f"{field.name}={_written(own)}" for field, own in fields if own != field.default)
        return f"{type(value).__name__}({', '.join(chosen)})"
    return repr(value)


def _comment(text: str, mark: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"# {mark}", subsequent_indent="#   " if mark else "# ")


def _call(function: str, module: str, arguments: Mapping[str, str]) -> str:
    """Returns a call on one line if it is short, else with one argument on each line."""
    parts = [module, *(f"{name}={arguments[name]}" for name in DEFAULTS if name in arguments)]
    line = f"{function}({', '.join(parts)})"
    return line if len(line) <= WIDTH else f"{function}(\n" + "".join(f"    {part},\n" for part in parts) + ")"
