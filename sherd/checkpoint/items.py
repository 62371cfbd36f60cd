"""The items of a checkpoint: modules, optimizers, and any other object with a state, as named tensors and JSON."""

from __future__ import annotations

import random
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from operator import methodcaller
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import DTensorSpec
from sherd.checkpoint.blockwise import apart, together
from sherd.checkpoint.catalog import Catalog, ModelTensors, OptimizerEntry, without_wrappers
from sherd.checkpoint.encoding import DTYPES, NOT_WRITTEN, Json, Tensors, decoded, encoded, read_into, read_tensor
from sherd.checkpoint.loading import Awaited, to_load
from sherd.checkpoint.pieces import local_shape_of, pieces_here
from sherd.checkpoint.saving import Form, needs_comparison, state_by_name
from sherd.engine import Unit, watcher
from sherd.errors import CheckpointError, OptimStateError, SherdError
from sherd.storage.files import Opened
from sherd.storage.manifest import Entry
from sherd.tensor.ragged import local_part
from sherd.tensor.relayout import around
from sherd.tensor.state_kind import State, Stateful, StateKind, state_kind
from sherd.tensor.structures import map_tensors

OWN = "own"
OPTIONS = "own_options"
"""The key in the JSON of an optimizer for the keys of state that is each rank's own, by parameter."""
NARROWED = "narrowed"
"""The key in the JSON of a module for `sherd.checkpoint.narrowed`."""
EXTRA = "extra_state"
"""The key in the JSON of a module for the results of `get_extra_state`, by the path of the module below it."""


@dataclass(frozen=True)
class Misfit:
    """The reasons why an item cannot be loaded.

    Args:
        missing: names that the checkpoint lacks.
        unexpected: names that this rank's part of the item lacks. Other ranks may have them (stages of a pipeline).
        wrong: any other reasons, in words.
    """

    missing: tuple[str, ...] = ()
    unexpected: frozenset[str] = frozenset()
    wrong: tuple[str, ...] = ()


class Item(ABC):
    """One item. Its tensors are called `name/...` in the checkpoint, and its JSON is `values[name]`."""

    takes_what_fits = False
    """True if a load skips names that only the item or only the checkpoint has."""
    own: Mapping[str, object] = {}
    """After `contents`: what each rank has of its own, which as many ranks load."""
    models: Sequence[ModelTensors] = ()
    """The tensors of the modules that the item is."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def aliases(self) -> dict[str, str]:
        """Returns other names of tensors, and the names that they stand for."""
        return {}

    def needs_comparison(self) -> bool:
        """Returns True if ranks must talk to each other before one of them knows the item's tensors."""
        return False

    @abstractmethod
    def contents(self, tensors: Tensors, compare: bool) -> Json:
        """Add the item's tensors to `tensors`, uncopied, and return its JSON.

        With `compare`, ranks talk to each other, and all of them must call it.
        """

    def with_own_options(self, json: Json, of_ranks: Sequence[Json]) -> Json:
        """Returns the JSON for all ranks, given that of ranks whose JSON differs."""
        return json

    def misfit(self, source: Opened) -> Misfit:
        """Returns how the item differs from the item of this name in `source`. Raises as `json`."""
        self.json(source)
        return Misfit()

    @abstractmethod
    def load(self, source: Opened, most_bytes: int) -> object:
        """Load it from `source`. Returns a `ValueItem`'s value, else None. Raises CheckpointError if it is damaged."""

    def load_own(self, own: dict[str, Any] | None, source: Opened) -> None:  # noqa: B027  # most items have none
        """Load what this rank had of its own; None: another number of ranks saved."""

    def json(self, source: Opened) -> dict[str, Json]:
        """Returns the JSON of this item. Raises CheckpointError if there is none, or of another kind."""
        items = {name: one for name, one in source.manifest.values.items() if isinstance(one, dict) and "kind" in one}
        if self.name not in items:
            raise CheckpointError(f"{source.place} has no item {self.name!r}; load what it has: {', '.join(items)}")
        if (kind := items[self.name]["kind"]) != self.kind:
            raise CheckpointError(f"{source.place}: the item {self.name!r} is a {kind}, not a {self.kind}")
        return items[self.name]

    def require(self, is_valid: bool, source: Opened) -> None:
        """Raises CheckpointError unless the JSON of this item has the form that sherd writes."""
        if not is_valid:
            raise CheckpointError(f"{source.place}: the item {self.name!r} has values that sherd does not write")


class ModuleItem(Item):
    """The parameters and buffers of one module, or of several with different names, such as stages of a pipeline.

    With `strict`, the item and the checkpoint must have the same names.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module], strict: bool) -> None:
        super().__init__(name, "module")
        self.takes_what_fits = not strict
        self._modules = modules
        self.models = self._tensors = [ModelTensors(module) for module in modules]

    def aliases(self) -> dict[str, str]:
        return {self._named(a): self._named(b) for module in self._tensors for a, b in module.aliases.items()}

    def _named(self, name: str) -> str:
        return f"{self.name}/{without_wrappers(name)}"

    def contents(self, tensors: Tensors, compare: bool) -> Json:
        self._add_own(tensors, "sherd.save")
        extra = {path: module.get_extra_state() for path, module in self._with_extra_state()}
        json = {"kind": self.kind}
        if extra:
            json[EXTRA] = encoded(extra, f"{self.name}/{EXTRA}", tensors.keep)
        if any(unit.mesh.remembers for module in self._tensors for unit in module.units):
            from sherd.checkpoint import narrowed  # seldom needed, so loaded late

            self.own, json[NARROWED] = narrowed.own_of(self._tensors), narrowed.json_of(self._tensors)
        return json

    def _with_extra_state(self) -> Iterable[tuple[str, nn.Module]]:
        for module in self._modules:
            for path, below in module.named_modules():
                if type(below).get_extra_state is not nn.Module.get_extra_state:
                    yield path, below

    def misfit(self, source: Opened) -> Misfit:
        """Compares names, shapes and dtypes, and looks whether tensors of the model can be filled."""
        self.json(source)
        prefix, manifest, own = f"{self.name}/", source.manifest, self._add_own(Tensors(), "sherd.load")
        stored = {name for name in (*manifest.tensors, *manifest.aliases) if name.startswith(prefix)}
        known = {*own, *self.aliases(), *(name for name in stored if name.startswith(f"{prefix}{EXTRA}/"))}
        entries = {name: entry for name in own if (entry := manifest.entry(name)) is not None}
        return Misfit(
            tuple(name for name in own if name not in entries),
            frozenset(stored - known),
            tuple(why for name, entry in entries.items() if (why := _why_unfit(name, entry, own[name]))),
        )

    def _add_own(self, tensors: Tensors, call: str) -> Tensors:
        for module in self._tensors:
            module.require_at_rest(call)
            for name, tensor in module.saved.items():
                tensors.keep(self._named(name), tensor, module.records.get(name))
        return tensors

    @torch.no_grad()
    def load(self, source: Opened, most_bytes: int) -> None:
        """Fill parameters and buffers in place."""
        for module in self._tensors:
            module.before_writing()
        own = self._add_own(Tensors(), "sherd.load")
        for name, tensor in own.items():
            if source.manifest.entry(name) is None:
                continue
            if record := own.masters.get(name):
                tensor = record.around(torch.empty_like(record.local, dtype=torch.float32))
                fill(source, name, tensor, most_bytes)
                record.put_masters(local_part(tensor))
            else:
                fill(source, name, tensor, most_bytes)
        for module in self._tensors:
            module.after_writing()
        extra = decoded(self.json(source).get(EXTRA, {}), lambda name: read_tensor(source, name))
        self.require(isinstance(extra, dict), source)
        for path, below in self._with_extra_state():
            if path in extra:
                below.set_extra_state(extra[path])

    def load_own(self, own: dict[str, Any] | None, source: Opened) -> None:
        """Load what gradients have lost on the wire; under another layout that is dropped, with a warning."""
        if (json := self.json(source).get(NARROWED)) is not None:
            from sherd.checkpoint import narrowed  # seldom needed, so loaded late

            try:
                narrowed.load(self._tensors, json, own, str(source.place))
            except NOT_WRITTEN:
                self.require(False, source)


class OptimizerItem(Item):
    """An optimizer's state, by the names that its parameters have in `modules`."""

    def __init__(self, name: str, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        super().__init__(name, "optimizer")
        self._optimizer, self._modules = optimizer, modules

    @cached_property
    def _catalog(self) -> Catalog:
        return Catalog(*self._modules)

    def needs_comparison(self) -> bool:
        if torch.accelerator.is_available():
            units = [unit for module in self._modules for unit in Unit.below(module)]
            for device in {unit.mesh.device for unit in units if unit.place.brings_state} - {torch.device("cpu")}:
                torch.accelerator.synchronize(device)  # state may still be on its way to where it rests
        return needs_comparison(self._catalog, self._optimizer)

    def contents(self, tensors: Tensors, compare: bool) -> Json:
        """Add tensors with elements of a parameter as `name/PARAMETER/KEY`; a count of steps is in the JSON."""

        def state_json(path: str, key: str, value: object) -> Json:
            # A scalar parameter's momentum has no dims either: without this, it would be JSON.
            if isinstance(value, torch.Tensor) and state_kind(key, value, torch.Size()) is StateKind.ELEMENTS:
                tensors.keep(path, value)
                return {"$tensor": path}
            return encoded(value, path, tensors.keep)

        own: dict[str, State] = {}
        blocks_apart = apart(self._catalog, self._optimizer)
        state = state_by_name(self._catalog, self._optimizer, blocks_apart, Form(), compare, own)
        self.own = {name: [self._layout_of(name), of_parameter] for name, of_parameter in own.items()}
        groups = [{**group, "params": list(map(without_wrappers, group["params"]))} for group in state["param_groups"]]
        by_parameter: Json = {}
        for name, of_parameter in state["state"].items():
            plain = without_wrappers(name)
            if not isinstance(of_parameter, dict):  # some keep a number of their own next to the parameters' state
                by_parameter[plain] = encoded(of_parameter, f"{self.name}/{plain}", tensors.keep)
                continue
            by_parameter[plain] = {
                str(key): state_json(f"{self.name}/{plain}/{key}", key, value) for key, value in of_parameter.items()
            }
        return {
            "kind": self.kind,
            "class": type(self._optimizer).__name__,
            "state": by_parameter,
            **({OWN: {name: list(of_parameter) for name, of_parameter in own.items()}} if own else {}),
            "param_groups": encoded(groups, f"{self.name}/param_groups", tensors.keep),
        }

    def with_own_options(self, json: Json, of_ranks: Sequence[Json]) -> Json:
        """Note the numbers in groups that ranks have differently, as an optimizer at owners computes them (`d`)."""
        own: dict[str, None] = {}
        for groups in zip(*(each["param_groups"] for each in of_ranks), strict=False):
            numbers = [numbers_of(group) for group in groups]
            keys = {key: {repr(each.get(key)) for each in numbers} for of_rank in numbers for key in of_rank}
            own |= dict.fromkeys(key for key, values in keys.items() if len(values) > 1)
        if not own:
            return json
        mine = [{key: group[key] for key in own if key in group} for group in self._optimizer.param_groups]
        self.own = {**self.own, OPTIONS: mine}
        return {**json, OPTIONS: list(own)}

    def _entry_of(self, name: str) -> OptimizerEntry | None:
        return next((entry for entry in self._catalog.all_entries if name in entry.names), None)

    def _layout_of(self, name: str) -> str:
        """Returns the layout of this rank's part of a parameter, in words."""
        entry = self._entry_of(name)
        return "" if entry is None or entry.spec is None else f"{entry.spec.placements} {tuple(entry.local_shape)}"

    def load_own(self, own: dict[str, Any] | None, source: Opened) -> None:
        """Load the state that was this rank's own. Raises OptimStateError if this rank's parts are others."""
        if options := self.json(source).get(OPTIONS):
            groups = (own or {}).get(OPTIONS, [])
            self.require(type(options) is type(groups) is list, source)
            for group, of_rank in zip(self._optimizer.param_groups, groups, strict=False):
                group.update(of_rank)
            if not groups:
                warnings.warn(
                    f"{source.place}: {', '.join(options)} of {type(self._optimizer).__name__}'s groups were each "
                    "rank's own, which only as many ranks load: all ranks go on with those of one",
                    stacklevel=2,
                )
        names = self.json(source).get(OWN) or {}
        self.require(isinstance(names, dict), source)
        for name, keys in names.items():
            entry = self._entry_of(name)
            if entry is None or entry.parameter not in set(chain(*(g["params"] for g in self._optimizer.param_groups))):
                continue
            layout, values = (own or {}).get(name, ("another number of ranks", {}))
            if layout != self._layout_of(name):
                raise OptimStateError(
                    f"{source.place}: {name}: its state {', '.join(keys)} is each rank's own, for {layout}, and is "
                    f"{self._layout_of(name)} here; load it on as many ranks and under the layout of the save, or load "
                    "the model without the optimizer"
                )
            state, device = self._optimizer.state[entry.parameter], entry.parameter.device
            for key, value in values.items():
                if value is not None:
                    state[key] = map_tensors(methodcaller("to", device), value)

    def misfit(self, source: Opened) -> Misfit:
        """Raises OptimStateError if the state is another algorithm's."""
        state = self.json(source).get("state")
        if why := watcher.of_another_algorithm(self._optimizer, state if isinstance(state, dict) else {}):
            raise OptimStateError(f"{source.place}, item {self.name!r}: {why}")
        return Misfit()

    def load(self, source: Opened, most_bytes: int) -> None:
        """Give the optimizer the state and the hyper-parameters, one parameter after the other."""
        json = self.json(source)

        def awaited(name: str) -> Awaited:
            entry = source.entry(name)

            def read(spec: DTensorSpec | None) -> torch.Tensor:
                if spec is None or tuple(spec.shape) != entry.shape:
                    return read_tensor(source, name)
                # Only this rank's part is read.
                part = around(torch.empty(local_shape_of(name, spec), dtype=DTYPES[entry.dtype]), spec)
                fill(source, name, part, most_bytes)
                return part

            return Awaited(torch.Size(entry.shape), read)

        state, groups = decoded(json.get("state"), awaited), decoded(json.get("param_groups"), awaited)
        known = {without_wrappers(name): name for name in self._catalog.names}
        of_known = [each for name, each in state.items() if name in known] if isinstance(state, dict) else [None]
        self.require(all(isinstance(each, dict) for each in of_known), source)

        def is_group(group: Json) -> bool:
            members = group.get("params") if isinstance(group, dict) else None
            return isinstance(members, list) and all(isinstance(name, str) for name in members)

        self.require(isinstance(groups, list) and all(map(is_group, groups)), source)
        for group in groups:
            group["params"] = [known[name] for name in group["params"] if name in known]
        entries = {without_wrappers(name): entry for entry in self._catalog.all_entries for name in entry.names}
        for name in state.keys() & entries.keys():
            state[name] = together(entries[name], state[name], self._optimizer)
        own = {
            known.get(name, name): each for name, each in state.items() if name in known or not isinstance(each, dict)
        }
        complete = {"state": own, "param_groups": groups}
        try:
            to_load(self._catalog, self._optimizer, complete, load_directly=True, as_it_comes=True)
        except NOT_WRITTEN as error:
            if isinstance(error, SherdError):
                raise
            raise OptimStateError(
                f"{source.place}: {type(self._optimizer).__name__} does not take the item {self.name!r}: "
                f"{type(error).__name__}: {error}"
            ) from error


def numbers_of(group: dict[str, Json]) -> dict[str, Json]:
    return {key: value for key, value in group.items() if type(value) in (bool, int, float)}


class StateItem(Item):
    def __init__(self, name: str, stateful: Stateful) -> None:
        super().__init__(name, "state")
        self._stateful = stateful

    def contents(self, tensors: Tensors, compare: bool) -> Json:
        """Returns the state dict. The name of a tensor is its path in the state dict."""
        return {"kind": self.kind, "state": encoded(self._stateful.state_dict(), self.name, tensors.keep)}

    @torch.no_grad()
    def load(self, source: Opened, most_bytes: int) -> None:
        """Load the state dict. A tensor that is a DTensor in the present state dict is read into that one."""
        now = Tensors()
        encoded(self._stateful.state_dict(), self.name, now.keep)

        def tensor(name: str) -> torch.Tensor:
            target = now.get(name)
            if not isinstance(target, DTensor) or tuple(target.shape) != source.entry(name).shape:
                return read_tensor(source, name)
            fill(source, name, target, most_bytes)
            return target

        state = decoded(self.json(source).get("state"), tensor)
        self.require(isinstance(state, dict), source)
        self._stateful.load_state_dict(state)


class ValueItem(Item):
    def __init__(self, name: str, value: object) -> None:
        super().__init__(name, "value")
        self._value = value

    def contents(self, tensors: Tensors, compare: bool) -> Json:
        """Returns the value. The name of a tensor is its path in the value."""
        return {"kind": self.kind, "value": encoded(self._value, self.name, tensors.keep)}

    def load(self, source: Opened, most_bytes: int) -> object:
        """Returns the value that was saved, with tensors in host memory."""
        json = self.json(source)
        self.require("value" in json, source)
        return decoded(json["value"], lambda name: read_tensor(source, name))


def items_of(values: Mapping[str, object], strict: bool = True) -> list[Item]:
    """Returns the items of a `save` or `load`.

    Raises:
        CheckpointError: there are none, a name is not a text without "/" and "@", or torch's FSDP1 shards a module.
    """
    if not values:
        raise CheckpointError("there is nothing to save or load: pass {'model': model, 'optimizer': optimizer, ...}")
    for name in values:
        if not isinstance(name, str) or not name or "/" in name or "@" in name:
            raise CheckpointError(f"an item is called {name!r}; give it a name without / and @")
    modules_of = {name: _modules_of(value) for name, value in values.items()}
    modules = [module for own in modules_of.values() for module in own]
    items: list[Item] = []
    for name, value in values.items():
        if modules_of[name]:
            items.append(ModuleItem(name, modules_of[name], strict))
        elif isinstance(value, Optimizer):
            items.append(OptimizerItem(name, value, modules))
        elif isinstance(value, Stateful):
            items.append(StateItem(name, value))
        else:
            items.append(ValueItem(name, value))
    return items


def _modules_of(value: object) -> list[nn.Module]:
    if isinstance(value, nn.Module):
        value = value.module if isinstance(value, nn.parallel.DistributedDataParallel) else value
        fsdp = sys.modules.get("torch.distributed.fsdp")  # which is not imported for this
        fsdp1 = f"{fsdp.__name__}.fully_sharded" if fsdp is not None else ""
        if fsdp1 and any(type(module).__module__.startswith(fsdp1) for module in value.modules()):
            # Each rank has other parameters of one name in its model.
            raise CheckpointError(
                "torch's FullyShardedDataParallel shards this module: save it by torch.distributed.checkpoint, which "
                "`sherd convert` reads, or wrap it with sherd.FullyShardedDataParallel"
            )
        return [value]
    if isinstance(value, list | tuple) and all(isinstance(element, nn.Module) for element in value):
        return [module for element in value for module in _modules_of(element)]
    return []


def _why_unfit(name: str, stored: Entry, tensor: torch.Tensor) -> str:
    """Returns why the tensor `name` of a checkpoint cannot be read into `tensor`; empty if it can be."""
    if stored.shape != tuple(tensor.shape):
        return f"{name} has shape {stored.shape}, in the model {tuple(tensor.shape)}"
    if not torch.can_cast(dtype := DTYPES[stored.dtype], tensor.dtype):
        return f"{name} is of {dtype}, in the model of {tensor.dtype}, which would lose more than precision"
    for _, part in pieces_here(name, tensor):
        dims = [(size - 1, stride) for size, stride in zip(part.shape, part.stride(), strict=True) if size > 1]
        if any(stride == 0 for _, stride in dims) or sum(map(prod, dims)) + 1 < part.numel():
            return f"elements of {name} share memory in the model, as after expand; replace it by its clone()"
    return ""


def fill(source: Opened, name: str, tensor: torch.Tensor, most_bytes: int) -> None:
    for box, part in pieces_here(name, tensor):
        read_into(source, name, box, part, most_bytes)


# The random generators of one process


def random_state() -> dict[str, object]:
    """Returns the states of torch's and Python's generators, and of numpy's if it is loaded."""
    state: dict[str, object] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.accelerator.is_available():
        state["accelerator"] = _accelerator().get_rng_state()
    if "numpy" in sys.modules:
        numpys = sys.modules["numpy"].random.get_state(legacy=False)
        state["numpy"] = {**numpys, "state": {**numpys["state"], "key": numpys["state"]["key"].tolist()}}
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    try:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if "accelerator" in state and torch.accelerator.is_available():
            _accelerator().set_rng_state(state["accelerator"])
        if "numpy" in state and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(state["numpy"])
    except NOT_WRITTEN as error:
        raise CheckpointError(f"the state of the random generators is not what sherd writes: {error}") from error


def _accelerator() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())
