"""Which parameters of a model does an optimizer own, by which names, and where in what it owns?

optimizer          owned                    members: name, extent of this rank's part
parameter 0        a shard                  blocks.0.weight, all of it
parameter 1        a flat parameter         out.weight, 0 to 7 | out.bias, 8 to 9
parameter 2        a parameter of no unit   head.weight, all of it
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
from sherd.engine.run.seal import units_below
from sherd.engine.run.unit import Unit
from sherd.engine.state.flat import FlatParameter
from sherd.engine.state.parameter import ShardedParameter, plain_name, record_of
from sherd.errors import OptimStateError, PolicyTypeError
from sherd.layout.extent import Extent


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One parameter of the model: a shard, or a plain one. `shape` is the whole's; `spec` says how the shard lies, None
    for a plain parameter.

    `extent` is where this rank's part is in that of the flat parameter it was merged into, and `start` where it begins
    in all of that; None if it is owned itself. `part` is the shape that it has there, and `unsharded` what DTensor it
    is part of: None, unless it is tensor parallel.
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    spec: DTensorSpec | None
    extent: Extent | None = None
    start: int | None = None
    part: torch.Size | None = None
    full: DTensorSpec | None = None


@dataclass(frozen=True, slots=True, eq=False)
class NamedState:
    """What an optimizer owns, and the parameters of the model that this is: one, or those that were merged into it.

    `path` is what `model.named_parameters()` calls it.
    """

    path: str
    parameter: nn.Parameter
    members: tuple[Member, ...]

    @property
    def names(self) -> list[str]:
        """The names of its members."""
        return [each.name for each in self.members]

    @property
    def is_flat(self) -> bool:
        """Whether it is a flat parameter."""
        return self.members[0].extent is not None

    @property
    def spec(self) -> DTensorSpec | None:
        """How it lies over the ranks; None for a plain tensor, which every rank has."""
        return spec_of(self.parameter) if isinstance(self.parameter, DTensor) else None


Groups = list[list[NamedState]]
"""What an optimizer owns, by its parameter groups."""


class Catalog:
    """All parameters of a model, in its order, each under the first name that it has there."""

    def __init__(self, model: nn.Module) -> None:
        self._records = {
            (place.module_id, place.attribute): record
            for unit in units_below(model)
            for record in unit.parameters
            for place in record.places
        }
        self._by_optimizer_param: dict[int, NamedState] = {}
        found = list(self._found(model))
        names: dict[int, str] = {}
        for path, record, shown in found:
            if record is not None and not isinstance(shown, FlatParameter):
                names.setdefault(id(record), plain_name(path))
        paths = {id(_optimizer_param_of(each)): path for path, each in model.named_parameters()}
        for path, record, shown in found:
            optimizer_param = shown if record is None else record.optimizer_param
            if id(optimizer_param) not in self._by_optimizer_param:
                self._by_optimizer_param[id(optimizer_param)] = _owned(
                    paths.get(id(optimizer_param), path), record, optimizer_param, names
                )
        self.owned = list(self._by_optimizer_param.values())
        self._by_path = {plain_name(each.path): each for each in self.owned}

    def _found(self, model: nn.Module) -> Iterator[tuple[str, ShardedParameter | None, nn.Parameter]]:
        """Every place of the model where a parameter is: its path, its record, and what is there."""
        for prefix, module in model.named_modules():
            for attribute, parameter in module._parameters.items():
                # Of a unit with a flat parameter, either that or the shards are plain attributes.
                shown = module.__dict__.get(attribute) if parameter is None else parameter
                if isinstance(shown, nn.Parameter):
                    record = self._records.get((id(module), attribute)) or record_of(shown)
                    yield f"{prefix}.{attribute}" if prefix else attribute, record, shown

    @property
    def names(self) -> list[str]:
        """Of all parameters."""
        return [name for each in self.owned for name in each.names]

    def at(self, path: str) -> NamedState | None:
        """What the model calls so; of a flat parameter that is the path of the attribute that it is."""
        return self._by_path.get(plain_name(path))

    def of(self, parameter: torch.Tensor, where: str) -> NamedState:
        """What `parameter` is, or has become when it was sharded. `where`: for the message.

        Raises:
            OptimStateError: it is no parameter of the model.
        """
        found = self._by_optimizer_param.get(id(_optimizer_param_of(parameter)))
        if found is None:
            raise OptimStateError(
                f"{where} is a tensor of shape {tuple(parameter.shape)} that is no parameter of the model; pass the "
                "model that the optimizer was built from, or build the optimizer anew from model.parameters()"
            )
        return found

    def groups_of(self, optimizer: Optimizer) -> Groups:
        """What an optimizer owns. Raises `OptimStateError` for what is not the model's."""
        return self._groups([group["params"] for group in optimizer.param_groups], type(optimizer).__name__)

    def groups_of_input(self, given: Any) -> tuple[Groups, list[dict[str, Any]]]:
        """What an optimizer built from `given` owns, and the choices for each group: an iterable of parameters, or of
        dicts with "params"; None for all parameters of the model.

        Raises:
            OptimStateError: it is empty, a dict has no "params", or there is what is not the model's.
            PolicyTypeError: it is anything else.
        """
        if given is None:
            return [self.owned], [{}]
        if not isinstance(given, Iterable) or isinstance(given, torch.Tensor | dict):
            raise PolicyTypeError(
                f"Optimizer input should be an iterable of Tensors or dicts, but got {given!r}; pass what the "
                "optimizer was built from"
            )
        entries = list(given)
        if not entries:
            raise OptimStateError(
                "Optimizer input should not be empty; a generator gives its parameters once, so pass a new one"
            )
        if all(isinstance(each, torch.Tensor) for each in entries):
            return self._groups([entries], "optim_input"), [{}]
        if not all(isinstance(each, dict) for each in entries):
            kinds = sorted({type(each).__name__ for each in entries})
            raise PolicyTypeError(f"Optimizer input should be an iterable of Tensors or dicts, not of {kinds}")
        for at, group in enumerate(entries):
            if "params" not in group:
                raise OptimStateError(
                    f'group {at} of the optimizer input has no "params": A parameter group should map "params" to a '
                    "list of the parameters in the group"
                )
        choices = [{key: value for key, value in group.items() if key != "params"} for group in entries]
        return self._groups([_listed(group["params"]) for group in entries], "optim_input"), choices

    def _groups(self, groups: Sequence[Sequence[torch.Tensor]], what: str) -> Groups:
        return [
            [self.of(each, f"parameter {position} in group {at} of {what}") for position, each in enumerate(group)]
            for at, group in enumerate(groups)
        ]


def _optimizer_param_of(parameter: torch.Tensor) -> torch.Tensor:
    """What an optimizer owns of a parameter that may have been sharded since it was read."""
    record = record_of(parameter)
    return parameter if record is None else record.optimizer_param


def _listed(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _owned(
    path: str, record: ShardedParameter | None, optimizer_param: nn.Parameter, names: dict[int, str]
) -> NamedState:
    if record is None:
        spec = spec_of(optimizer_param) if isinstance(optimizer_param, DTensor) else None
        return NamedState(
            path, optimizer_param, (Member(plain_name(path), optimizer_param, optimizer_param.shape, spec),)
        )
    if record.flat is None:
        return NamedState(
            path,
            optimizer_param,
            (Member(names[id(record)], optimizer_param, optimizer_param.shape, record.shard_spec),),
        )
    unit = record.owner
    assert isinstance(unit, Unit), "a shard's unit lives as long as the modules that show it"
    (weights,) = unit.weights
    group, rank = weights.group, weights.group.mesh.piece
    members = tuple(
        Member(
            names.get(id(each), each.name),
            each.shard,
            each.shard.shape,
            each.shard_spec,
            slot.held(rank),
            slot.unsharded.start,
            each.shape,
            each.unsharded_spec,
        )
        for each, slot in zip(group.parameters, group.packing.slots, strict=True)
    )
    return NamedState(path, optimizer_param, members)
