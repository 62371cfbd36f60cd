"""How is what a program asks of FSDP1 said with `fully_shard`? `explain_migration` writes it down as a program.

What the arguments mean is read off `Choices`, as the wrapper reads it; here it is only put into words.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from sherd import wrap
from sherd.api.fsdp1 import BackwardPrefetch, Choices, CPUOffload, MixedPrecision, ShardingStrategy
from sherd.api.fully_shard import fully_shard
from sherd.api.ignored import Ignored
from sherd.api.wrapper import FullyShardedDataParallel
from sherd.comm.mesh import default_device_type
from sherd.errors import PolicyTypeError
from sherd.layout.runs import Flat
from sherd.policy import MixedPrecisionPolicy
from sherd.port.source import NoLiteralError, Source

TAKES = tuple(name for name in inspect.signature(FullyShardedDataParallel.__init__).parameters if name != "self")
DEFAULTS = {name: each.default for name, each in inspect.signature(fully_shard).parameters.items() if name != "module"}
WIDTH = 116

Told: TypeAlias = dict[str, str]
"""Arguments of `fully_shard`, as source."""


def explain_migration(module: nn.Module | None = None, **arguments: Any) -> str:
    """Say with `fully_shard` what `FullyShardedDataParallel(module, **arguments)` sets up, as a program that runs.

    The program expects the plain module under the name `model`. What has no literal form (a lambda, a process group, a
    mesh) is called by the argument's name. What has no counterpart, or another one in the training loop, is told in
    comments. It is printed as well, by rank 0 alone where there are ranks.

    Args:
        module: the plain module, or None. With it the program is exact where it depends on the module: norms that
            compute in full precision, ignored modules, a start on the meta device, a policy that gives modules
            arguments of their own. It is not changed.
        arguments: those of `FullyShardedDataParallel`; torch's own enums, dataclasses and policies are taken too.

    Returns:
        The program.

    Raises:
        PolicyTypeError: an argument that `FullyShardedDataParallel` does not take, or of the wrong type.
        PolicyError: arguments that exclude each other.
    """
    text = _Program(_Request(module, arguments)).text()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text)
    return text


# What is asked


class _Request:
    """The arguments of a wrapper, read.

    `given` are all of them, `choices` those of one unit. `fills_whole`: parameters on the meta device need values
    before they are sharded, as all ranks take those of rank 0, or some parts are not to be touched. `precise_classes`:
    what FSDP1 makes units of their own, in full precision.
    """

    def __init__(self, module: nn.Module | None, arguments: Mapping[str, Any]) -> None:
        if module is not None and not isinstance(module, nn.Module):
            raise PolicyTypeError(f"explain_migration(module=...): expected a module, got a {type(module).__name__}")
        for name in arguments:
            _check_taken(name)
        self.module = module
        self.given = {name: _as_ours(each) for name, each in arguments.items()}
        self.choices = Choices(**{name: each for name, each in self.given.items() if name in _CHOICES})
        self.policy: Any = self.given.get("auto_wrap_policy")
        self.init: Any = self.given.get("param_init_fn")
        # Listed, because generators can be looked at only once.
        self.left_alone = {name: _listed(self.given[name]) for name in _IGNORED if self.given.get(name) is not None}
        root = module if module is not None else nn.Module()
        self.ignored = Ignored.read(root, *(self.left_alone.get(name) for name in _IGNORED))
        self.synchronizes = bool(self.given.get("sync_module_states"))
        self.fills_whole = self.synchronizes or bool(self.ignored.modules or self.ignored.parameters)
        self.precise_classes = self.choices.precise_classes if self.policy is not None else ()

    @property
    def device(self) -> Any:
        """Where the module is to be."""
        return self.choices.device_id if self.choices.device_id is not None else self.device_type

    @property
    def device_type(self) -> str:
        """Where the program will compute, as far as that can be known before there are ranks."""
        device = self.choices.device_id
        if device is not None and not isinstance(device, int):
            return torch.device(device).type
        if dist.is_initialized():
            return default_device_type()
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator.type if accelerator is not None else "cpu"

    @property
    def may_be_meta(self) -> bool:
        """Whether the program has to see to parameters on the meta device."""
        if self.module is None:
            return self.init is not None
        return any(each.is_meta for each in (*self.module.parameters(), *self.module.buffers()))

    def units_of_their_own(self) -> dict[str, tuple[Choices, bool]] | None:
        """By name, each unit below the root with its choices, and whether it is one of the precise classes.

        None: `auto_shard` with the policy makes the same units, or nobody knows them.
        """
        if self.module is None or self.policy is None:
            return None
        kwargs = {name: getattr(self.choices, name) for name in _CHOICES}
        choose = partial(wrap.choose, self.module, self.policy, root_kwargs=kwargs)
        apart = self.precise_classes
        wrapped = _with_forward(
            choose(self.ignored.modules, self.ignored.parameters, apart=apart, apart_kwargs={"mixed_precision": None})
        )
        simply = _with_forward(choose(ignored_params=self.ignored.parameters))
        if wrapped.keys() == simply.keys() and all(its == kwargs for its in wrapped.values()):
            return None
        names = {each: name for name, each in self.module.named_modules()}
        return {names[each]: (_choices_of(its), isinstance(each, apart)) for each, its in wrapped.items()}


_CHOICES = tuple(each.name for each in dataclasses.fields(Choices))
_IGNORED = ("ignored_modules", "ignored_states")
_OURS: dict[str, Any] = {
    each.__name__: each for each in (ShardingStrategy, BackwardPrefetch, MixedPrecision, CPUOffload)
}


def _check_taken(name: str) -> None:
    if name in TAKES:
        return
    near = difflib.get_close_matches(name, TAKES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(TAKES)}"
    raise PolicyTypeError(f"explain_migration({name}=...): FullyShardedDataParallel takes no such argument; {hint}")


def _as_ours(value: Any) -> Any:
    """torch's value of an enum or a dataclass as sherd's of the same name; anything else as it is."""
    ours = _OURS.get(type(value).__name__)
    if ours is None or isinstance(value, ours):
        return value
    if isinstance(value, Enum):
        return ours[value.name]
    return ours(**{each.name: getattr(value, each.name) for each in dataclasses.fields(ours)})


def _choices_of(kwargs: Mapping[str, Any]) -> Choices:
    return Choices(**{name: _as_ours(kwargs[name]) for name in _CHOICES})


def _listed(given: Any) -> Any:
    return list(given) if isinstance(given, Iterable) and not isinstance(given, torch.Tensor) else given


def _with_forward(chosen: wrap.Chosen) -> wrap.Chosen:
    return {module: kwargs for module, kwargs in chosen.items() if not wrap.is_container(module)}


# What is answered


class _Program:
    """The program: sections of source, and notes on what source does not say."""

    def __init__(self, request: _Request) -> None:
        self._request = request
        self._source = Source()
        self._notes: dict[str, None] = {}  # a set in the order of making
        self._meshes: dict[str, str] = {}
        """By the statements that make a mesh called `mesh`: what it is called."""

    def text(self) -> str:
        """All of it. The sections are in the order in which the wrapper does what they do."""
        units = self._units()
        ignored, before, after = self._ignored(), list(self._before()), list(self._after())
        meshes = [lines.replace("mesh = ", f"{name} = ") for lines, name in self._meshes.items()]
        self._note_what_differs()
        notes = "\n".join(_comment(note, "- ") for note in self._notes)
        sections = [self._title(), self._source.imports(), *meshes, *ignored, *before, units, *after, notes, _LOOP]
        return "\n\n".join(sections) + "\n"

    def _title(self) -> str:
        told = ", ".join(["model", *(f"{name}=..." for name in self._request.given)])
        return _comment(f"FullyShardedDataParallel({told}), said with fully_shard. `model` is the plain model.")

    def _literal(self, value: Any, name: str) -> str:
        """`value` as an expression, or else `name`, which the user's program has for it."""
        try:
            return self._source.of(value)
        except NoLiteralError:
            self._note(f"{name}: what you pass to FSDP1 under this name.")
            return name

    def _note(self, text: str) -> None:
        self._notes[text] = None

    # Which ranks

    def _mesh(self, choices: Choices) -> str | None:
        """A mesh for these choices, as an expression; None for one axis over all ranks."""
        if choices.process_group is not None and choices.process_group is dist.group.WORLD:
            choices = dataclasses.replace(choices, process_group=None)
        for name in ("device_mesh", "process_group"):
            if getattr(choices, name) is not None:
                self._literal(getattr(choices, name), name)
        if choices.strategy is ShardingStrategy.NO_SHARD:
            self._note("NO_SHARD: a shard axis of one rank, so that every rank holds everything.")
            return self._called(self._mesh_of_one_shard(choices))
        if choices.device_mesh is not None:
            return self._mesh_with_names(choices.device_mesh)
        if choices.strategy.is_hybrid:
            lines = self._mesh_of_nodes() if choices.process_group is None else self._mesh_of_pair()
            return self._called(lines)
        if choices.process_group is not None:
            return self._called(f"mesh = {self._from_group}(process_group, {self._device_type})")
        return None

    def _called(self, lines: str) -> str:
        """The name of the mesh that `lines` make."""
        return self._meshes.setdefault(lines, f"mesh_{len(self._meshes) + 1}" if self._meshes else "mesh")

    @property
    def _device_type(self) -> str:
        return self._source.of(self._request.device_type)

    @property
    def _from_group(self) -> str:
        return self._source.name("torch.distributed.device_mesh", "DeviceMesh") + ".from_group"

    def _mesh_with_names(self, mesh: Any) -> str:
        if mesh.ndim == 1 or mesh.mesh_dim_names is not None:
            return "device_mesh"
        device_mesh = self._source.name("torch.distributed.device_mesh", "DeviceMesh")
        return self._called(f"mesh = {device_mesh}(device_mesh.device_type, device_mesh.mesh, {_AXES})")

    def _mesh_of_shape(self, shape: str) -> str:
        self._source.module("torch.distributed")
        function = self._source.name("torch.distributed.device_mesh", "init_device_mesh")
        return f"mesh = {function}({self._device_type}, {shape}, {_AXES})"

    def _mesh_of_nodes(self) -> str:
        for name in ("os", "torch"):
            self._source.module(name)
        per_node = 'int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or torch.accelerator.device_count()'
        shape = "(dist.get_world_size() // per_node, per_node)"
        return f"per_node = {per_node} or dist.get_world_size()\n{self._mesh_of_shape(shape)}"

    def _mesh_of_pair(self) -> str:
        for name in ("torch", "torch.distributed"):
            self._source.module(name)
        return (
            "shard_group, replicate_group = process_group\n"
            "rows = [None] * dist.get_world_size(replicate_group)\n"
            "dist.all_gather_object(rows, dist.get_process_group_ranks(shard_group), group=replicate_group)\n"
            f"mesh = {self._from_group}(\n"
            f"    [replicate_group, shard_group], {self._device_type}, mesh=torch.tensor(rows), {_AXES}\n"
            ")"
        )

    def _mesh_of_one_shard(self, choices: Choices) -> str:
        if choices.device_mesh is None and choices.process_group is None:
            return self._mesh_of_shape("(dist.get_world_size(), 1)")
        for name in ("torch", "torch.distributed"):
            self._source.module(name)
        group = "process_group" if choices.device_mesh is None else "device_mesh.get_group()"
        device_type = self._device_type if choices.device_mesh is None else "device_mesh.device_type"
        return (
            "alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)\n"
            f"column = torch.tensor(dist.get_process_group_ranks({group})).unsqueeze(1)\n"
            f"mesh = {self._from_group}(\n"
            f"    [{group}, alone], {device_type}, mesh=column, {_AXES}\n"
            ")"
        )

    # What becomes a unit, and how

    def _units(self) -> str:
        request = self._request
        arguments = self._arguments(request.choices)
        apart = request.units_of_their_own()
        if apart is not None:
            told = [(name, self._arguments(*of_unit)) for name, of_unit in apart.items()]
            calls = [self._loop([name for name, _ in alike], its) for its, alike in groupby(told, lambda each: each[1])]
            return "\n".join([*calls, self._call("fully_shard", ["model"], arguments)])
        if request.policy is not None:
            policy = self._literal(request.policy, "auto_wrap_policy")
            return self._call("auto_shard", ["model", policy], arguments)
        return self._call("fully_shard", ["model"], arguments)

    def _loop(self, names: Sequence[str], arguments: Told) -> str:
        """`fully_shard` of each of the modules called so."""
        if len(names) == 1:
            return self._call("fully_shard", [f"model.get_submodule({self._source.of(names[0])})"], arguments)
        call = self._call("fully_shard", ["model.get_submodule(name)"], arguments)
        listed = textwrap.fill(", ".join(map(self._source.of, names)) + ",", WIDTH, **_INDENTED)
        return f"for name in (\n{listed}\n):\n{textwrap.indent(call, '    ')}"

    def _call(self, function: str, modules: list[str], arguments: Told) -> str:
        parts = [*modules, *(f"{name}={each}" for name, each in arguments.items())]
        return _wrapped_call(self._source.name("sherd", function), parts)

    def _arguments(self, choices: Choices, is_precise: bool = False) -> Told:
        """`fully_shard`'s arguments for one unit, without those at their default."""
        precision, low = _effective(choices.precision), self._request.choices.precision.param_dtype
        if is_precise and low is not None:
            precision = MixedPrecisionPolicy(torch.float32, output_dtype=low)
        values = {
            "reshard_after_forward": choices.reshard_after_forward,
            "mp_policy": precision,
            "offload_policy": choices.offload,
            "prefetch_policy": choices.prefetch,
            "placement": Flat(),
            "comm_policy": choices.comm,
        }
        told = {name: self._source.of(each) for name, each in values.items() if each != DEFAULTS[name]}
        mesh = self._mesh(choices)
        told |= {"mesh": mesh} if mesh is not None else {}
        told |= {"ignored_params": "ignored_params"} if self._request.ignored.parameters else {}
        return {name: told[name] for name in DEFAULTS if name in told}

    # What is left alone

    def _ignored(self) -> Iterator[str]:
        """`ignored_params`, and `ignored` if there are modules."""
        if not any(self._request.left_alone.values()):
            return
        ((name, given),) = self._request.left_alone.items()
        listed = self._by_names(given) or name
        if listed == name:
            self._note(f"{name}: what you pass to FSDP1 under this name.")
        if self._request.ignored.modules:
            yield (
                f"ignored = {{below for each in {listed} for below in each.modules()}}\n"
                "ignored_params = {parameter for each in ignored for parameter in each.parameters(recurse=False)}"
            )
        else:
            yield f"ignored_params = set({listed})"

    def _by_names(self, given: Sequence[Any]) -> str | None:
        """Modules or parameters by their names in the module; None if it does not have them all."""
        if self._request.module is None:
            return None
        modules, parameters = self._request.module.named_modules(), self._request.module.named_parameters()
        known = {id(each): f"model.get_submodule({self._source.of(name)})" for name, each in modules}
        known |= {id(each): f"model.get_parameter({self._source.of(name)})" for name, each in parameters}
        names = [known.get(id(each), "") for each in given]
        return f"[{', '.join(names)}]" if all(names) else None

    # Values and devices

    def _before(self) -> Iterator[str]:
        """What is done to unsharded parameters."""
        request = self._request
        if request.may_be_meta and request.fills_whole:
            yield f"{_IF_META}\n{self._fill_whole()}"
        if request.choices.device_id is not None and not request.may_be_meta:
            yield f"model.to({self._source.of(request.device)})"
        if request.synchronizes:
            yield self._broadcast()

    def _after(self) -> Iterator[str]:
        """What is done to shards, and to buffers."""
        request = self._request
        if request.may_be_meta and not request.fills_whole:
            yield f"{_IF_META}  # so that no rank ever holds all of it\n{self._fill_shards()}"
        if request.choices.buffer_dtype is not None:
            yield self._cast_buffers(request.choices.buffer_dtype)

    def _fill_whole(self) -> str:
        """Give the modules memory and values before they are sharded, as FSDP1 does."""
        # FSDP1's param_init_fn gives memory itself, or leaves what has some.
        gives = self._request.init is not None
        memory = "" if gives else f"        each.to_empty(device={self._device}, recurse=False)\n"
        return f"    for each in model.modules():\n{self._skip('        ', [])}{memory}{self._values()}"

    def _fill_shards(self) -> str:
        """Give the shards memory and values."""
        return f"    model.to_empty(device={self._device})\n    for each in model.modules():\n{self._values()}"

    def _values(self) -> str:
        """What gives the module `each` its values."""
        if self._request.init is not None:
            return f"        {self._literal(self._request.init, 'param_init_fn')}(each)"
        own = "[*each.parameters(recurse=False), *each.buffers(recurse=False)]"
        return f"        if {own}:\n            each.reset_parameters()"

    @property
    def _device(self) -> str:
        return self._source.of(self._request.device)

    def _broadcast(self) -> str:
        self._source.module("torch.distributed")
        mesh = self._mesh(self._request.choices)
        skip = "    if tensor not in ignored_params:\n    " if self._request.ignored.parameters else ""
        lines = (
            "for tensor in (*model.parameters(), *model.buffers()):\n"
            f"{skip}    dist.broadcast(tensor.detach(), group_src=0{'' if mesh is None else ', group=group'})"
        )
        if mesh is not None:
            lines = f"for group in {mesh}.get_all_groups():\n{textwrap.indent(lines, '    ')}"
        return f"# Rank 0's values for all\n{lines}"

    def _cast_buffers(self, dtype: torch.dtype) -> str:
        classes = self._request.precise_classes
        precise = f"isinstance(each, {self._literal(classes, '_module_classes_to_ignore')})"
        return (
            f"for each in model.modules():\n{self._skip('    ', [precise] if classes else [])}"
            "    for name, buffer in each.named_buffers(recurse=False):\n"
            "        if buffer.is_floating_point():\n"
            f"            setattr(each, name, buffer.to({self._source.of(dtype)}))"
        )

    def _skip(self, indent: str, conditions: list[str]) -> str:
        """Lines that pass over `each` if a condition holds, or if it is ignored."""
        conditions = ["each in ignored", *conditions] if self._request.ignored.modules else conditions
        return f"{indent}if {' or '.join(conditions)}:\n{indent}    continue\n" if conditions else ""

    # What is told in words

    def _note_what_differs(self) -> None:
        request, choices = self._request, self._request.choices
        self._note(
            "placement=Flat(): cut anywhere, as FSDP1 does. Without it each parameter is cut on its dim 0, into a "
            "stock DTensor."
        )
        if not choices.use_orig_params:
            self._note(
                "use_orig_params=False: here the optimizer sees the model's own parameters, not flat ones. With "
                "optimizer = sherd.flatten_optimizer(optimizer) it steps whole buffers all the same."
            )
        if not choices.forward_prefetch:
            self._note("prefetch_policy: without it forward gathers one unit ahead, which FSDP1 does when asked to.")
        if "limit_all_gathers" in request.given:
            self._note(
                "limit_all_gathers: nothing to say, gathers never run further ahead than prefetch_policy allows; its "
                "bytes_in_flight bounds them in bytes."
            )
        if request.given.get("extensions") is not None:
            self._note("extensions: nothing to say, DTensors are sharded as they are; a subclass would not be asked.")
        if request.synchronizes:
            self._note(
                "sync_module_states: a full state dict that rank 0 alone has is loaded into shards by "
                "set_model_state_dict, with StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)."
            )
        if request.init is not None and not request.may_be_meta:
            self._note("param_init_fn: not called, as the module is not on the meta device.")
        if request.choices.buffer_dtype is not None:
            self._note("buffer_dtype: state dicts hold buffers in it; FSDP1's hold them in their own dtype.")
        if request.module is None and request.policy is not None:
            self._note_what_depends_on_the_module()

    def _note_what_depends_on_the_module(self) -> None:
        request = self._request
        if request.precise_classes and request.choices.precision.param_dtype is not None:
            classes = ", ".join(each.__name__ for each in request.precise_classes)
            self._note(
                f"mixed_precision: FSDP1 makes modules of {classes} units of their own, in full precision. If there "
                "are any, give explain_migration the module."
            )
        if request.ignored.modules:
            self._note("auto_wrap_policy: if it would choose ignored modules too, give explain_migration the module.")
        if type(request.policy).__name__ == "CustomPolicy":
            self._note(
                "auto_wrap_policy: if its function returns dicts, they hold arguments of FSDP1. Give "
                "explain_migration the module, or let them hold those of fully_shard."
            )


_AXES = 'mesh_dim_names=("replicate", "shard")'
_IF_META = "if any(each.is_meta for each in (*model.parameters(), *model.buffers())):"
_INDENTED: dict[str, Any] = {
    "initial_indent": "    ",
    "subsequent_indent": "    ",
    "break_long_words": False,
    "break_on_hyphens": False,
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


def _effective(precision: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """`precision` without the fields that mean nothing where there is no `param_dtype`."""
    if precision.param_dtype is not None:
        return precision
    return dataclasses.replace(
        precision, cast_forward_inputs=True, cast_root_forward_inputs=None, full_precision_in_eval=False
    )


def _comment(text: str, mark: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"# {mark}", subsequent_indent="#   " if mark else "# ")


def _wrapped_call(function: str, parts: Sequence[str]) -> str:
    """A call on one line if it is short, else with one argument per line; of long arguments, with one of theirs."""
    line = f"{function}({', '.join(parts)})"
    if len(line) <= WIDTH:
        return line
    lines = []
    for part in parts:
        head, bracket, rest = part.partition("(")
        if len(part) > WIDTH - 4 and bracket and "(" not in rest:
            part = _wrapped_call(head, rest.removesuffix(")").split(", "))
        lines.append(textwrap.indent(part, "    ") + ",\n")
    return f"{function}(\n{''.join(lines)})"
