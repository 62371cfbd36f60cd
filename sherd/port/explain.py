"""`explain_migration`: the `fully_shard` calls that a `FullyShardedDataParallel(...)` call corresponds to.

`Choices` reads the arguments, as it does for the wrapper. This file only puts their meaning into words.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from sherd import wrap
from sherd.api.fsdp1 import BackwardPrefetch, Choices, CPUOffload, MixedPrecision, ShardingStrategy
from sherd.api.fully_shard import fully_shard
from sherd.api.ignored import Ignored
from sherd.api.placements import Placements
from sherd.api.wrapper import FullyShardedDataParallel
from sherd.comm.mesh import default_device_type
from sherd.errors import PolicyTypeError
from sherd.layout.runs import Flat
from sherd.policy import MixedPrecisionPolicy
from sherd.port.source import NoLiteralError, written

TAKES = tuple(name for name in inspect.signature(FullyShardedDataParallel.__init__).parameters if name != "self")
DEFAULTS = {
    name: parameter.default for name, parameter in inspect.signature(fully_shard).parameters.items() if name != "module"
}
WIDTH = 116


def explain_migration(module: nn.Module | None = None, **arguments: Any) -> str:
    """Say with `fully_shard` what `FullyShardedDataParallel(module, **arguments)` sets up.

    The answer has the calls with all their arguments, the plain module under the name `model`, and then notes in
    comments: what to do before and after the calls, which arguments have no counterpart, and how the wrapper's methods
    are called now. What cannot be written in a call (a lambda, a process group, a mesh) appears under the argument's
    name. The answer is printed as well, by rank 0 alone where there are ranks.

    Args:
        module: the plain module, or None. With it the answer is exact where it depends on the module: norms that
            compute in full precision, ignored modules, a start on the meta device, a policy that gives modules
            arguments of their own. It is not changed.
        arguments: those of `FullyShardedDataParallel`; torch's own enums, dataclasses and policies are taken too.

    Returns:
        The calls and the notes.

    Raises:
        PolicyTypeError: an argument that `FullyShardedDataParallel` does not take, or of the wrong type.
        PolicyError: arguments that exclude each other.
    """
    text = _Explanation(module, arguments).text()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text)
    return text


class _Explanation:
    """A wrapper's arguments as they were read, and the statements and notes collected while calls are written."""

    def __init__(self, module: nn.Module | None, arguments: Mapping[str, Any]) -> None:
        if module is not None and not isinstance(module, nn.Module):
            raise PolicyTypeError(f"explain_migration(module=...): expected a module, got a {type(module).__name__}")
        for name in arguments.keys() - TAKES:
            near = difflib.get_close_matches(name, TAKES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(TAKES)}"
            raise PolicyTypeError(
                f"explain_migration({name}=...): FullyShardedDataParallel takes no such argument; {hint}"
            )
        given = {name: _as_sherds(value) for name, value in arguments.items()}
        self._module, self._given = module, given
        self._choices = Choices(**{name: value for name, value in given.items() if name in _CHOICES})
        self._policy = given.get("auto_wrap_policy")
        self._precise_classes = self._choices.precise_classes if self._policy is not None else ()
        root = module if module is not None else nn.Module()
        self._ignored = Ignored.read(root, given.get("ignored_modules"), given.get("ignored_states"))
        self._statements: dict[str, None] = {}
        """The statements above the calls. A dict is a set in the order of insertion."""
        self._notes: dict[str, None] = {}

    def text(self) -> str:
        names = ", ".join(["model", *(f"{name}=..." for name in self._given)])
        title = _comment(
            f"FullyShardedDataParallel({names}), said with fully_shard. `model` is the plain model; other names are "
            "those of sherd, sherd.wrap, torch.distributed.device_mesh and your program."
        )
        calls = self._calls()
        self._note_steps()
        self._note_differences()
        notes = "\n".join(_comment(note, "- ") for note in self._notes)
        return "\n\n".join(part for part in (title, "\n".join(self._statements), calls, notes, _LOOP) if part) + "\n"

    def _note(self, *notes: str | Literal[False]) -> None:
        """Add the notes that hold: one is False where its condition does not."""
        self._notes |= dict.fromkeys(note for note in notes if note)

    def _written(self, value: Any, name: str) -> str:
        """Returns `value` as an expression, or else `name`, which the user's program has for it."""
        try:
            return written(value)
        except NoLiteralError:
            self._note(f"{name}: what you pass to FSDP1 under this name.")
            return name

    # The calls

    def _calls(self) -> str:
        """Returns one call of `auto_shard` if that makes all units, else a call of `fully_shard` per kind of unit."""
        arguments = self._arguments(self._choices)
        units = self._units()
        if units is None and self._policy is not None:
            return _call("auto_shard", ["model", self._written(self._policy, "auto_wrap_policy")], arguments)
        calls = []
        for of_unit, alike in groupby((units or {}).items(), lambda unit: unit[1]):
            call = _call("fully_shard", ["model.get_submodule(name)"], of_unit)
            names = ", ".join(written(name) for name, _ in alike)
            head = textwrap.fill(f"for name in [{names}]:", WIDTH, subsequent_indent=" " * 8, break_on_hyphens=False)
            calls.append(f"{head}\n{textwrap.indent(call, '    ')}")
        return "\n".join([*calls, _call("fully_shard", ["model"], arguments)])

    def _units(self) -> dict[str, dict[str, str]] | None:
        """Returns the arguments of each unit below the root, by the unit's name; None where `auto_shard` with the
        policy makes the same units, or where the module is not known."""
        if self._module is None or self._policy is None:
            return None
        kwargs = {name: getattr(self._choices, name) for name in _CHOICES}
        choose = partial(wrap.choose, self._module, self._policy, root_kwargs=kwargs)
        ignored, precise = self._ignored, {"mixed_precision": None}
        wrapped = _with_forward(
            choose(ignored.modules, ignored.parameters, apart=self._precise_classes, apart_kwargs=precise)
        )
        plain = _with_forward(choose(ignored_params=ignored.parameters))
        if wrapped.keys() == plain.keys() and all(of_unit == kwargs for of_unit in wrapped.values()):
            return None
        names = {module: name for name, module in self._module.named_modules()}
        return {
            names[module]: self._arguments(
                Choices(**{name: _as_sherds(of_unit[name]) for name in _CHOICES}),
                is_precise=isinstance(module, self._precise_classes),
            )
            for module, of_unit in wrapped.items()
        }

    def _arguments(self, choices: Choices, is_precise: bool = False) -> dict[str, str]:
        """Returns `fully_shard`'s arguments for one unit, without those at their default."""
        precision, low = choices.precision, self._choices.precision.param_dtype
        if is_precise and low is not None:
            precision = MixedPrecisionPolicy(torch.float32, output_dtype=low)
        elif precision.param_dtype is None:  # then these fields mean nothing
            precision = dataclasses.replace(
                precision, cast_forward_inputs=True, cast_root_forward_inputs=None, full_precision_in_eval=False
            )
        strategy = choices.sharding_strategy
        placements = strategy if isinstance(strategy, Placements) else None
        copies = strategy is ShardingStrategy.NO_SHARD
        values = {
            "reshard_after_forward": None if copies else choices.reshard_after_forward,
            "mp_policy": precision,
            "offload_policy": choices.offload,
            "prefetch_policy": choices.prefetch,
            "placement": Flat() if placements is None else None,
            "comm_policy": choices.comm,
            "placements": "ddp" if copies else placements,
        }
        arguments = {name: written(value) for name, value in values.items() if value != DEFAULTS[name]}
        mesh = self._mesh(choices)
        arguments |= {"mesh": mesh} if mesh is not None else {}
        arguments |= {"ignored_params": "ignored_params"} if self._ignored.parameters else {}
        return {name: arguments[name] for name in DEFAULTS if name in arguments}

    def _mesh(self, choices: Choices) -> str | None:
        """Returns the name of a mesh of the ranks that `choices` mean; None for one axis over all ranks."""
        group, mesh = choices.process_group, choices.device_mesh
        if mesh is not None:
            self._written(mesh, "device_mesh")
            if mesh.ndim == 1 or mesh.mesh_dim_names is not None:
                return "device_mesh"
            made = f"DeviceMesh(device_mesh.device_type, device_mesh.mesh, {_AXES})"
        elif group is not None and group is not dist.group.WORLD:
            self._written(group, "process_group")
            made = f"DeviceMesh.from_group(process_group, {written(self._device_type)})"
            if choices.strategy.is_hybrid:
                made = (
                    "DeviceMesh.from_group([process_group[1], process_group[0]], "
                    f"{written(self._device_type)}, mesh=ranks, {_AXES})"
                )
                self._note(
                    "ranks: an int tensor with a row for each shard group, the ranks of the group in order; those of "
                    "this rank's are dist.get_process_group_ranks(process_group[0]), and process_group[1] has one rank "
                    "of each row."
                )
        elif choices.strategy.is_hybrid:
            made = f"init_device_mesh({written(self._device_type)}, (num_nodes, ranks_per_node), {_AXES})"
            self._note(
                "ranks_per_node: LOCAL_WORLD_SIZE of the environment, else the number of accelerators, else all ranks; "
                "num_nodes * ranks_per_node is the number of ranks."
            )
        else:
            return None
        self._statements[f"mesh = {made}"] = None
        return "mesh"

    @property
    def _device_type(self) -> str:
        """Returns where the model will compute, as far as that can be known before there are ranks."""
        device = self._choices.device_id
        if device is not None and not isinstance(device, int):
            return torch.device(device).type
        if dist.is_initialized():
            return default_device_type()
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator.type if accelerator is not None else "cpu"

    def _note_steps(self) -> None:
        """Note what is to be done beside the calls, in the order of doing it."""
        choices, ignored = self._choices, self._ignored
        init, synchronizes = self._given.get("param_init_fn"), bool(self._given.get("sync_module_states"))
        may_be_meta = init is not None
        if self._module is not None:
            may_be_meta = any(each.is_meta for each in (*self._module.parameters(), *self._module.buffers()))
        # Values before the shards where rank 0's are to be sent, or some modules are not to be touched.
        whole = synchronizes or bool(ignored.modules or ignored.parameters)
        when = "before the calls" if whole else "after the calls, so that no rank ever holds all of it"
        device = written(choices.device_id if choices.device_id is not None else self._device_type)
        init_said = self._written(init, "param_init_fn") if init is not None else ""
        values = f"{init_said}(module)" if init_said else "its reset_parameters(), if it has tensors of its own"
        empty = "" if init_said and whole else f"to_empty(device={device}), then "
        modules = "each of model.modules()" + (" that is not in ignored_modules" if ignored.modules else "")
        tensors = "(*model.parameters(), *model.buffers())"
        tensors += " that is not in ignored_params" if ignored.parameters else ""
        given_as = "ignored_modules" if self._given.get("ignored_modules") else "ignored_states"
        precise = self._written(self._precise_classes, "_module_classes_to_ignore") if choices.buffer_dtype else ""
        apart = f", except instances of {precise}" if self._precise_classes else ""
        self._note(
            bool(ignored.modules)
            and f"ignored_params: the set of all parameters of the modules that you pass to FSDP1 as {given_as}; "
            "ignored_modules are these modules and all modules below them.",
            bool(ignored.parameters)
            and not ignored.modules
            and "ignored_params: the set of what you pass to FSDP1 as ignored_states.",
            may_be_meta and f"meta device: {when}, give memory and values to {modules}: {empty}{values}.",
            init is not None
            and not may_be_meta
            and "param_init_fn: not called, as the module is not on the meta device.",
            choices.device_id is not None and not may_be_meta and f"device_id: before the calls, model.to({device}).",
            synchronizes
            and "sync_module_states: before the calls, dist.broadcast(tensor.detach(), group_src=0) for each tensor of "
            f"{tensors}; with a mesh, over each of mesh.get_all_groups(). Or load into shards a full state dict that "
            "rank 0 alone has: set_model_state_dict, with StateDictOptions(full_state_dict=True, "
            "broadcast_from_rank0=True).",
            choices.buffer_dtype is not None
            and f"buffer_dtype: after the calls, cast the floating-point buffers of {modules}{apart}, to "
            f"{choices.buffer_dtype}. State dicts hold buffers in it; FSDP1's hold them in their own dtype.",
        )

    def _note_differences(self) -> None:
        """Note what is said otherwise, or not at all, and what depends on a module that is not known."""
        given, choices = self._given, self._choices
        has_unknown_units = self._module is None and self._policy is not None
        classes = ", ".join(each.__name__ for each in self._precise_classes)
        self._note(
            choices.sharding_strategy is ShardingStrategy.NO_SHARD
            and 'NO_SHARD: placements="ddp", as sherd.replicate: every rank holds everything, and gradients are '
            "all-reduced.",
            "placement=Flat(): cut anywhere, as FSDP1 does. Without it each parameter is cut on its dim 0, into a "
            "DTensor.",
            not choices.use_orig_params
            and "use_orig_params=False: here the optimizer sees the model's own parameters, not flat ones. With "
            "optimizer = sherd.flatten_optimizer(optimizer) it steps whole buffers all the same.",
            not choices.forward_prefetch
            and "prefetch_policy: without it forward gathers one unit ahead, which FSDP1 does when asked to.",
            "limit_all_gathers" in given
            and "limit_all_gathers: nothing to say, gathers never run further ahead than prefetch_policy allows; its "
            "bytes_in_flight bounds them in bytes.",
            given.get("extensions") is not None
            and "extensions: nothing to say, DTensors are sharded as they are; a subclass would not be asked.",
            has_unknown_units
            and bool(classes)
            and choices.precision.param_dtype is not None
            and f"mixed_precision: FSDP1 makes modules of {classes} units of their own, in full precision. If there "
            "are any, give explain_migration the module.",
            has_unknown_units
            and bool(self._ignored.modules)
            and "auto_wrap_policy: if it would choose ignored modules too, give explain_migration the module.",
            has_unknown_units
            and type(self._policy).__name__ == "CustomPolicy"
            and "auto_wrap_policy: if its function returns dicts, they hold arguments of FSDP1. Give "
            "explain_migration the module, or let them hold those of fully_shard.",
        )


_AXES = 'mesh_dim_names=("replicate", "shard")'
_CHOICES = tuple(field.name for field in dataclasses.fields(Choices))
_SHERDS: dict[str, Any] = {
    kind.__name__: kind for kind in (ShardingStrategy, BackwardPrefetch, MixedPrecision, CPUOffload)
}
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


def _with_forward(chosen: wrap.Chosen) -> wrap.Chosen:
    return {module: kwargs for module, kwargs in chosen.items() if not wrap.is_container(module)}


def _as_sherds(value: Any) -> Any:
    """Returns sherd's value of the same name for torch's value of an enum or a dataclass; anything else as it is."""
    kind = _SHERDS.get(type(value).__name__)
    if kind is None or isinstance(value, kind):
        return value
    if isinstance(value, Enum):
        return kind[value.name]
    return kind(**{field.name: getattr(value, field.name) for field in dataclasses.fields(kind)})


def _comment(text: str, mark: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"# {mark}", subsequent_indent="#   " if mark else "# ")


def _call(function: str, modules: Sequence[str], arguments: dict[str, str]) -> str:
    """Returns a call on one line if it is short, else with one argument per line."""
    parts = [*modules, *(f"{name}={value}" for name, value in arguments.items())]
    line = f"{function}({', '.join(parts)})"
    return line if len(line) <= WIDTH else f"{function}(\n" + "".join(f"    {part},\n" for part in parts) + ")"
