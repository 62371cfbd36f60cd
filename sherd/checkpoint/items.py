"""The items of a checkpoint: modules, optimizers, and whatever else has a state, as named tensors and JSON."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import DTensorSpec
from sherd.checkpoint.broadcast import Filed
from sherd.checkpoint.catalog import Catalog
from sherd.checkpoint.loading import to_load
from sherd.checkpoint.model_tensors import ModelTensors, without_wrappers
from sherd.checkpoint.pieces import local_shape_of, pieces_here
from sherd.checkpoint.relayout import around
from sherd.checkpoint.saving import needs_comparison, state_in_parts
from sherd.checkpoint.tensor_bytes import DTYPES, read_into, read_tensor
from sherd.checkpoint.tree import NOT_WRITTEN, Json, Tensors, decoded, encoded
from sherd.errors import CheckpointError, OptimStateError, SherdError
from sherd.storage.files import Opened
from sherd.tensor.state_kind import StateKind, kind_of

EXTRA = "extra_state"
"""Where the JSON of a module has what `get_extra_state` of modules below it returns, by path."""


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state: a scheduler, a scaler, a data loader, an average."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take a state."""


@dataclass(frozen=True)
class Misfit:
    """The reasons why an item cannot be loaded: names that are `missing` in the checkpoint, names that are `unexpected`
    in it, of which other ranks may have some (stages of a pipeline), and other things that are `wrong`."""

    missing: tuple[str, ...] = ()
    unexpected: frozenset[str] = frozenset()
    wrong: tuple[str, ...] = ()


class Item(ABC):
    """One item. Its tensors are called `name/...` in the checkpoint, and its JSON is `values[name]`."""

    takes_what_fits = False
    """Whether a load leaves alone what only one side has."""

    def __init__(self, name: str) -> None:
        self.name = name

    def aliases(self) -> dict[str, str]:
        """Returns other names of tensors."""
        return {}

    def needs_comparison(self) -> bool:
        """Returns whether this rank cannot tell alone what it holds."""
        return False

    @abstractmethod
    def held(self, compare: bool) -> tuple[Tensors, Json]:
        """Returns the tensors, uncopied, and the JSON. With `compare`, ranks talk to each other, and all must call
        it."""

    def misfit(self, source: Opened) -> Misfit:
        """Returns in what the item and what `source` holds under its name differ. Raises as `load`."""
        return Misfit()

    @abstractmethod
    def load(self, source: Opened, most_bytes: int) -> object:
        """Take what `source` holds under this name. Returns a value that has no place to be put into, or None.

        Raises:
            CheckpointError: a file is damaged, or what it holds does not fit.
        """

    def json(self, source: Opened, kind: str) -> dict[str, Json]:
        """Returns the JSON of this item. Raises CheckpointError if it is not there, or of another kind."""
        found = source.manifest.values.get(self.name)
        if not isinstance(found, dict) or "kind" not in found:
            items = ", ".join(source.manifest.values) or "nothing"
            raise CheckpointError(f"{source.place} has no item {self.name!r}; it has {items}")
        if found["kind"] != kind:
            raise CheckpointError(f"{source.place}: the item {self.name!r} is a {found['kind']}, not a {kind}")
        return found

    def require(self, is_right: bool, source: Opened) -> None:
        """Raises CheckpointError if the JSON of this item has another form than sherd writes."""
        if not is_right:
            raise CheckpointError(f"{source.place}: the item {self.name!r} has values that sherd does not write")


class ModuleItem(Item):
    """The parameters and buffers of one module, or of several with different names, such as stages of a pipeline.

    `strict` says whether all names must be on both sides.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module], strict: bool) -> None:
        super().__init__(name)
        self.takes_what_fits = not strict
        self._modules = modules
        self._tensors = [ModelTensors(module) for module in modules]

    def aliases(self) -> dict[str, str]:
        """Returns the other names of tied parameters."""
        return {self._named(a): self._named(b) for each in self._tensors for a, b in each.aliases.items()}

    def _named(self, name: str) -> str:
        return f"{self.name}/{without_wrappers(name)}"

    def held(self, compare: bool) -> tuple[Tensors, Json]:
        """Returns parameters and buffers by their names in the model."""
        tensors = self._own("sherd.save")
        extra = {path: module.get_extra_state() for path, module in self._with_extra_state()}
        return tensors, {
            "kind": "module",
            **({EXTRA: encoded(extra, f"{self.name}/{EXTRA}", tensors.keep)} if extra else {}),
        }

    def _with_extra_state(self) -> Iterable[tuple[str, nn.Module]]:
        for module in self._modules:
            for path, below in module.named_modules():
                if type(below).get_extra_state is not nn.Module.get_extra_state:
                    yield path, below

    def misfit(self, source: Opened) -> Misfit:
        """Compares names and shapes."""
        self.json(source, "module")
        prefix, manifest, own = f"{self.name}/", source.manifest, self._own("sherd.load")
        stored = {name for name in (*manifest.tensors, *manifest.aliases) if name.startswith(prefix)}
        known = {*own, *self.aliases(), *(name for name in stored if name.startswith(f"{prefix}{EXTRA}/"))}
        entries = {name: entry for name in own if (entry := manifest.entry(name)) is not None}
        shapes = {name: (entry.shape, tuple(own[name].shape)) for name, entry in entries.items()}
        return Misfit(
            () if self.takes_what_fits else tuple(name for name in own if name not in entries),
            frozenset() if self.takes_what_fits else frozenset(stored - known),
            tuple(f"{name} has shape {a}, in the model {b}" for name, (a, b) in shapes.items() if a != b),
        )

    def _own(self, call: str) -> Tensors:
        own = Tensors()
        for of in self._tensors:
            of.require_at_rest(call)
            for name, tensor in of.saved.items():
                own.keep(self._named(name), tensor)
        return own

    @torch.no_grad()
    def load(self, source: Opened, most_bytes: int) -> None:
        """Fill parameters and buffers where they lie."""
        for of in self._tensors:
            of.before_writing()
        for name, tensor in self._own("sherd.load").items():
            if source.manifest.entry(name) is not None:
                fill(source, name, tensor, most_bytes)
        for of in self._tensors:
            of.after_writing()
        extra = decoded(self.json(source, "module").get(EXTRA, {}), lambda name: read_tensor(source, name))
        self.require(isinstance(extra, dict), source)
        for path, module in self._with_extra_state():
            if path in extra:
                module.set_extra_state(extra[path])


class OptimizerItem(Item):
    """An optimizer's state, by the names that its parameters have in `modules`."""

    def __init__(self, name: str, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        super().__init__(name)
        self._optimizer, self._modules = optimizer, modules

    @cached_property
    def _catalog(self) -> Catalog:
        return Catalog(*self._modules)

    def needs_comparison(self) -> bool:
        """Returns whether the optimizer has plain tensors that may be parts of sharded ones."""
        return needs_comparison(self._catalog, self._optimizer)

    def held(self, compare: bool) -> tuple[Tensors, Json]:
        """Returns the elements of the state as `name/PARAMETER/KEY`."""
        tensors = Tensors()
        state = state_in_parts(self._catalog, self._optimizer, compare)
        named = {without_wrappers(name): each for name, each in state["state"].items()}
        groups = [{**group, "params": list(map(without_wrappers, group["params"]))} for group in state["param_groups"]]
        return tensors, {
            "kind": "optimizer",
            "class": type(self._optimizer).__name__,
            "state": _by_parameter(named, self.name, tensors),
            "param_groups": encoded(groups, f"{self.name}/param_groups", tensors.keep),
        }

    def load(self, source: Opened, most_bytes: int) -> None:
        """Give the optimizer the state and the hyper-parameters, one parameter after the other."""
        found = self.json(source, "optimizer")

        def tensor(name: str) -> Filed:
            shape = torch.Size(source.entry(name).shape)
            return Filed(shape, lambda spec: _read(source, name, spec, most_bytes))

        known = {without_wrappers(name): name for name in self._catalog.names}
        state = decoded(found.get("state"), tensor)
        groups = decoded(found.get("param_groups"), tensor)
        self.require(_is_state(state) and _are_groups(groups), source)
        own = {known[name]: each for name, each in state.items() if name in known}
        for group in groups:
            group["params"] = [known[name] for name in group["params"] if name in known]
        given = {"state": own, "param_groups": groups}
        try:
            to_load(self._catalog, self._optimizer, given, load_directly=True, as_it_comes=True)
        except NOT_WRITTEN as error:
            if isinstance(error, SherdError):
                raise
            kind = type(self._optimizer).__name__
            raise OptimStateError(
                f"{source.place}: {kind} does not take the item {self.name!r}: {type(error).__name__}: {error}"
            ) from error


class StateItem(Item):
    """The state of anything with `state_dict` and `load_state_dict`."""

    def __init__(self, name: str, of: Stateful) -> None:
        super().__init__(name)
        self._of = of

    def held(self, compare: bool) -> tuple[Tensors, Json]:
        """Returns the state dict; tensors are called by their path in it."""
        tensors = Tensors()
        return tensors, {"kind": "state", "state": encoded(self._of.state_dict(), self.name, tensors.keep)}

    @torch.no_grad()
    def load(self, source: Opened, most_bytes: int) -> None:
        """Load the state dict. A tensor that lies over the ranks is read as the state dict of now has it."""
        now = Tensors()
        encoded(self._of.state_dict(), self.name, now.keep)

        def tensor(name: str) -> torch.Tensor:
            target = now.get(name)
            if not isinstance(target, DTensor) or tuple(target.shape) != source.entry(name).shape:
                return read_tensor(source, name)
            fill(source, name, target, most_bytes)
            return target

        state = decoded(self.json(source, "state").get("state"), tensor)
        self.require(isinstance(state, dict), source)
        self._of.load_state_dict(state)


class ValueItem(Item):
    """Numbers, texts, lists, dicts and tensors."""

    def __init__(self, name: str, value: object) -> None:
        super().__init__(name)
        self._value = value

    def held(self, compare: bool) -> tuple[Tensors, Json]:
        """Returns the value; tensors are called by their path in it."""
        tensors = Tensors()
        return tensors, {"kind": "value", "value": encoded(self._value, self.name, tensors.keep)}

    def load(self, source: Opened, most_bytes: int) -> object:
        """Returns the value that was saved, with tensors in host memory."""
        found = self.json(source, "value")
        self.require("value" in found, source)
        return decoded(found["value"], lambda name: read_tensor(source, name))


def items_of(given: Mapping[str, object], strict: bool = True) -> list[Item]:
    """Returns the items that a user has given, by name.

    Raises:
        CheckpointError: a name is no text without "/", or there is nothing.
    """
    if not given:
        raise CheckpointError("there is nothing to save or load: pass {'model': model, 'optimizer': optimizer, ...}")
    for name in given:
        if not isinstance(name, str) or not name or "/" in name or "@" in name:
            raise CheckpointError(f"an item is called {name!r}; give it a name without / and @")
    modules = [module for value in given.values() for module in _modules_of(value)]
    return [_item(name, value, modules, strict) for name, value in given.items()]


def _modules_of(value: object) -> list[nn.Module]:
    """Returns `value` as modules: itself, or its elements if all of them are. DDP's wrapper is left out.

    Raises:
        CheckpointError: a module is sharded by torch's FSDP1, of which each rank has other parameters of one name.
    """
    if isinstance(value, nn.Module):
        value = value.module if isinstance(value, nn.parallel.DistributedDataParallel) else value
        if any(_is_of_torchs_fsdp1(module) for module in value.modules()):
            raise CheckpointError(
                "torch's FullyShardedDataParallel shards this module: save it by torch.distributed.checkpoint, which "
                "`sherd convert` reads, or wrap it with sherd.FullyShardedDataParallel"
            )
        return [value]
    is_several = isinstance(value, list | tuple) and value and all(isinstance(each, nn.Module) for each in value)
    return [module for each in value for module in _modules_of(each)] if is_several else []  # type: ignore[attr-defined]


def _is_of_torchs_fsdp1(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # which is not imported for this
    return fsdp is not None and type(module).__module__.startswith(f"{fsdp.__name__}.fully_sharded")


def _item(name: str, value: object, modules: Sequence[nn.Module], strict: bool) -> Item:
    if own := _modules_of(value):
        return ModuleItem(name, own, strict)
    if isinstance(value, Optimizer):
        return OptimizerItem(name, value, modules)
    return StateItem(name, value) if isinstance(value, Stateful) else ValueItem(name, value)


def _is_state(state: object) -> bool:
    """Returns whether this is an optimizer's state by the names of parameters."""
    return isinstance(state, dict) and all(isinstance(each, dict) for each in state.values())


def _are_groups(groups: object) -> bool:
    """Returns whether these are an optimizer's groups, with the names of parameters."""
    return isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, str) for name in group["params"])
        for group in groups
    )


def fill(source: Opened, name: str, tensor: torch.Tensor, most_bytes: int) -> None:
    """Fill this rank's part of `tensor` from the tensor `name` of `source`."""
    for box, part in pieces_here(name, tensor):
        read_into(source, name, box, part, most_bytes)


def _read(source: Opened, name: str, spec: DTensorSpec | None, most_bytes: int) -> torch.Tensor:
    """Returns the tensor `name`, or a DTensor with this rank's part of it."""
    if spec is None:
        return read_tensor(source, name)
    made = around(torch.empty(local_shape_of(name, spec), dtype=DTYPES[source.entry(name).dtype]), spec)
    fill(source, name, made, most_bytes)
    return made


def _by_parameter(state: Mapping[str, Mapping[str, object]], path: str, tensors: Tensors) -> Json:
    """Returns optimizer state as JSON, with each tensor but a count of steps under `path/PARAMETER/KEY`."""

    def of(name: str, key: str, value: object) -> Json:
        place = f"{path}/{name}/{key}"
        if isinstance(value, torch.Tensor) and kind_of(key, value, torch.Size()) is StateKind.ELEMENTS:
            tensors.keep(place, value)
            return {"$tensor": place}
        return encoded(value, place, tensors.keep)

    return {str(name): {str(key): of(name, key, value) for key, value in each.items()} for name, each in state.items()}
