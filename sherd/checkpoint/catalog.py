"""The catalog of a model's tensors: their names, and which parameter of an optimizer each parameter belongs to.

optimizer      entry                    members: name, extent in this rank's vector
parameter 0    a shard                  blocks.0.weight
parameter 1    a flat parameter         out.weight, 0 to 7 | out.bias, 8 to 9
parameter 2    a parameter of no unit   head.weight
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import DTensorSpec, spec_of
from sherd.engine import FlatParameter, Runtime, ShardedParameter, Unit
from sherd.errors import OptimStateError, PolicyTypeError, StateError, in_short
from sherd.tensor.local_step import Span
from sherd.tensor.ragged import local_part
from sherd.tensor.relayout import Named, put
from sherd.wrap.names import plain_name

StateDict = dict[str, Any]
"""The state of an optimizer: `{"state": {key: State}, "param_groups": [ParamGroup, ...]}`."""

ParamGroup = dict[str, Any]
"""One group of an optimizer: its hyper-parameters, and maybe "params"."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One parameter of the model: a shard, or a plain parameter.

    For a member of a flat parameter under tensor parallelism, `unsharded_spec` is the layout of the unsharded
    parameter, and `unsharded_shape` is the shape of this rank's part of it. Otherwise that is the parameter's shape.
    """

    name: str
    parameter: nn.Parameter
    unsharded_shape: torch.Size
    unsharded_spec: DTensorSpec | None = None

    @property
    def spec(self) -> DTensorSpec | None:
        return spec_of(self.parameter) if isinstance(self.parameter, DTensor) else None


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerEntry:
    """One parameter of an optimizer, and the parameters of the model in it: one, or the members of a flat parameter.

    `path` is its name in `model.named_parameters()`. For a flat parameter, `span` tells where the members are in this
    rank's vector, and `unsharded_span` where they are in the gathered vector.
    """

    path: str
    parameter: nn.Parameter
    members: tuple[Member, ...]
    span: Span | None = None
    unsharded_span: Span | None = None

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]

    @property
    def spec(self) -> DTensorSpec | None:
        """The layout of the parameter over the ranks, or None for a plain tensor, which every rank has."""
        return spec_of(self.parameter) if isinstance(self.parameter, DTensor) else None

    @property
    def local_shape(self) -> torch.Size:
        return local_part(self.parameter).shape


Groups = list[list[OptimizerEntry]]
"""The parameters of an optimizer, by parameter group."""


class Catalog:
    """All parameters of a model, in the model's order, each under its first name in the model.

    The model may consist of several modules, as the stages of a pipeline are.
    """

    def __init__(self, *modules: nn.Module) -> None:
        places = [place for module in modules for place in _places_of(module)]
        names: dict[int, str] = {}
        for path, record, parameter in places:
            if record is not None and not isinstance(parameter, FlatParameter):
                names.setdefault(id(record), plain_name(path))
        registered = (named for module in modules for named in module.named_parameters())
        paths = {id(_optimizer_param_of(parameter)): path for path, parameter in registered}
        self._by_optimizer_param: dict[int, OptimizerEntry] = {}
        for path, record, parameter in places:
            key = id(parameter if record is None else record.optimizer_param)
            if key not in self._by_optimizer_param:
                self._by_optimizer_param[key] = _entry(paths.get(key, path), record, parameter, names)
        self.entries = list(self._by_optimizer_param.values())
        for path, record, parameter in places:  # optimizers that need full matrices step members of flat parameters
            if record is not None and parameter is not record.optimizer_param:
                self._by_optimizer_param.setdefault(id(record.shard), _shard_entry(path, record, names))
        self._by_path = {plain_name(entry.path): entry for entry in self.all_entries}

    @property
    def all_entries(self) -> list[OptimizerEntry]:
        """The `entries`, and those of the members of flat parameters, each by itself, in an order that ranks share."""
        return list(self._by_optimizer_param.values())

    @property
    def names(self) -> list[str]:
        return [name for entry in self.entries for name in entry.names]

    def at(self, path: str) -> OptimizerEntry | None:
        """Returns the entry that the model calls `path`. A flat parameter has the path of its attribute."""
        return self._by_path.get(plain_name(path))

    def groups_of(self, optimizer: Optimizer) -> Groups:
        """Returns the parameters of `optimizer`. Raises `OptimStateError` if one is not the model's."""
        return self._groups([group["params"] for group in optimizer.param_groups], type(optimizer).__name__)

    def groups_of_input(self, optim_input: object) -> tuple[Groups, list[ParamGroup]]:
        """Returns the parameters of an optimizer built from `optim_input`, and the hyper-parameters of each group.

        `optim_input` is an iterable of parameters, or of dicts with "params", or None for all parameters of the model.

        Raises:
            OptimStateError: it is empty, a dict has no "params", or a parameter is not the model's.
            PolicyTypeError: it is anything else.
        """
        if optim_input is None:
            return [self.entries], [{}]
        if not isinstance(optim_input, Iterable) or isinstance(optim_input, torch.Tensor | dict):
            raise PolicyTypeError(
                f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input!r}; pass what the "
                "optimizer was built from"
            )
        groups = list(optim_input)
        if not groups:
            raise OptimStateError(
                "Optimizer input should not be empty; a generator gives its parameters once, so pass a new one"
            )
        if all(isinstance(group, torch.Tensor) for group in groups):
            return self._groups([groups], "optim_input"), [{}]
        if not all(isinstance(group, dict) for group in groups):
            kinds = sorted({type(group).__name__ for group in groups})
            raise PolicyTypeError(f"Optimizer input should be an iterable of Tensors or dicts, not of {kinds}")
        for at, group in enumerate(groups):
            if "params" not in group:
                raise OptimStateError(
                    f'group {at} of the optimizer input has no "params": A parameter group should map "params" to a '
                    "list of the parameters in the group"
                )
        members = (group["params"] for group in groups)
        listed = [[params] if isinstance(params, torch.Tensor) else list(params) for params in members]
        hyperparameters = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        return self._groups(listed, "optim_input"), hyperparameters

    def _groups(self, groups: Sequence[Sequence[torch.Tensor]], source: str) -> Groups:
        """Returns the entries of parameters. Sharding may have replaced a parameter since the optimizer was built."""
        entries: Groups = []
        for at, group in enumerate(groups):
            entries.append([])
            for index, parameter in enumerate(group):
                known = self._by_optimizer_param
                entry = known.get(id(parameter)) or known.get(id(_optimizer_param_of(parameter)))
                if entry is None:
                    raise OptimStateError(
                        f"parameter {index} in group {at} of {source} is a tensor of shape {tuple(parameter.shape)} "
                        "that is no parameter of the model; pass the model that the optimizer was built from, or build "
                        "the optimizer again from model.parameters()"
                    )
                entries[-1].append(entry)
        return entries


def _places_of(model: nn.Module) -> Iterator[tuple[str, ShardedParameter | None, nn.Parameter]]:
    """Yields the path, the record and the parameter of every place in the model that shows a parameter."""
    records = {
        (place.module_id, place.attribute): record
        for unit in Unit.below(model)
        for record in unit.parameters
        for place in record.places
    }
    for prefix, module in model.named_modules():
        for attribute, registered in module._parameters.items():
            # In a unit with a flat parameter, either that or the shards are plain attributes.
            parameter = module.__dict__.get(attribute) if registered is None else registered
            if isinstance(parameter, nn.Parameter):
                record = records.get((id(module), attribute)) or ShardedParameter.of(parameter)
                yield f"{prefix}.{attribute}" if prefix else attribute, record, parameter


def _optimizer_param_of(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the optimizer parameter of `parameter`, which may be the one that sharding has replaced."""
    record = ShardedParameter.of(parameter)
    return parameter if record is None else record.optimizer_param


def _shard_entry(path: str, record: ShardedParameter, names: dict[int, str]) -> OptimizerEntry:
    return OptimizerEntry(path, record.shard, (Member(names[id(record)], record.shard, record.shard.shape),))


def _entry(
    path: str, record: ShardedParameter | None, parameter: nn.Parameter, names: dict[int, str]
) -> OptimizerEntry:
    if record is None:
        return OptimizerEntry(path, parameter, (Member(plain_name(path), parameter, parameter.shape),))
    if record.flat is None:
        return _shard_entry(path, record, names)
    unit = record.owner
    assert isinstance(unit, Unit), "a shard's unit lives as long as the modules that show it"
    (weights,) = unit.weights
    group, slots = weights.group, weights.group.packing.slots
    members = tuple(
        Member(names.get(id(member), member.name), member.shard, member.shape, member.unsharded_spec)
        for member in group.parameters
    )
    return OptimizerEntry(
        path,
        record.optimizer_param,
        members,
        Span(group.used.numel, tuple(slot.held(group.mesh.piece) for slot in slots)),
        Span(group.packing.runs_together.numel, tuple(slot.unsharded for slot in slots)),
    )


# Names


def plain_key(key: object) -> object:
    """Returns the key of a state, without wrappers if it is a name."""
    return plain_name(key) if isinstance(key, str) else key


def without_wrappers(name: str) -> str:
    """Returns the name of a parameter in the plain model, without the part that `torch.compile` adds, too."""
    return ".".join(part for part in plain_name(name).split(".") if part != "_orig_mod")


# Parameters and buffers


class ModelTensors:
    """The parameters and buffers below a module, each once, under its first name; and the units that own them.

    `aliases` are the other names of tied parameters. `saved_buffers` are the names of buffers that a state dict has.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters: dict[str, ShardedParameter | nn.Parameter] = {}
        self.aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for path, record, parameter in _places_of(module):
            if isinstance(parameter, FlatParameter):
                continue  # its members have places of their own
            name, owned = plain_name(path), record or parameter
            if first.setdefault(id(owned), name) == name:
                self._parameters[name] = owned
            else:
                self.aliases[name] = first[id(owned)]
        self.records = {name: each for name, each in self._parameters.items() if isinstance(each, ShardedParameter)}
        self.trained = {name for name, each in self._parameters.items() if each.requires_grad}
        self.buffers = {plain_name(path): buffer for path, buffer in module.named_buffers()}
        self.saved_buffers = {
            plain_name(f"{path}.{name}" if path else name)
            for path, below in module.named_modules()
            for name in below._buffers.keys() - below._non_persistent_buffers_set
        } & self.buffers.keys()
        owners = [*Unit.below(module), *(record.owner for record in self.records.values())]
        self.units = {owner.id: owner for owner in owners if isinstance(owner, Unit)}.values()

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        shards = {name: record.shard for name, record in self.records.items()}
        return {**self._parameters, **shards, **self.buffers}  # type: ignore[dict-item]  # no record is left

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """All parameters, and the buffers that a state dict has."""
        left_out = self.buffers.keys() - self.saved_buffers
        return {name: tensor for name, tensor in self.by_name.items() if name not in left_out}

    def require_at_rest(self, call: str) -> None:
        """Raise `StateError` if the tensors are in use, or on the meta device.

        Units take over the values of tensors that a user has put in the place of shards.
        """
        for unit in self.units:
            unit.require_at_rest(call)
            unit.notice_replaced()
        on_meta = [name for name, tensor in self.by_name.items() if local_part(tensor).is_meta]
        if on_meta:
            raise StateError(f"{call}: {in_short(on_meta)} on the meta device; give the model memory and values first")

    def compare_replicas(self, call: str) -> None:
        """Raise `CommError` on all ranks if replicas hold different shards. All ranks must call it, for `call`."""
        if replicated := [unit for unit in self.units if unit.compared.has_replicas]:
            Runtime.agree_on_call(replicated, call, (), with_values=True)

    def take(self, values: Named) -> None:
        self.before_writing()
        tensors = self.by_name
        for name, value in values.items():
            record = self.records.get(name)
            if record is None or record.masters is None:
                put(tensors, {name: value})
            else:
                masters = record.around(torch.empty_like(record.local, dtype=torch.float32))
                put({name: masters}, {name: value})
                record.put_masters(local_part(masters))
        self.after_writing()

    def exact(self, name: str) -> torch.Tensor:
        """Returns a tensor, uncopied; the masters of a parameter that has any, in float32."""
        record = self.records.get(name)
        if record is None or record.masters is None:
            return self.by_name[name]
        return record.around(record.masters_of(record.local))

    def before_writing(self) -> None:
        """Find the memory of shards that a user has moved."""
        for unit in self.units:
            unit.notice_moved()

    def after_writing(self) -> None:
        """Tell the units that their shards have other values."""
        for unit in self.units:
            unit.compared.loaded()
            unit.shards_written()
