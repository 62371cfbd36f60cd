"""State dicts of models and optimizers, nested or flattened, as the contents of a sherd checkpoint, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sherd.checkpoint.encoding import DTYPES, decoded, dtype_name, encoded
from sherd.errors import CheckpointError
from sherd.layout.boxes import whole
from sherd.tools.convert.contents import MODEL, OPTIMIZER, Contents, Lazy, Source, Spec

MODELS = (MODEL, "module", "model_state_dict", "state_dict")
OPTIMIZERS = (OPTIMIZER, "optim", "optimizer_state_dict", "optim_state_dict")
STEPS = ("step", "global_step", "global_steps", "iteration")

STATE, GROUPS, PARAMS, PARAM_NAMES = "state", "param_groups", "params", "param_names"
SETTINGS = "param_to_group_meta"
"""The key of each parameter's settings, which Megatron-FSDP has instead of groups."""


def in_memory(lazy: Lazy) -> torch.Tensor:
    return lazy.part(whole(lazy.spec.shape), max(lazy.spec.nbytes, 1))


class Collected:
    """The contents of a checkpoint, collected part by part: tensors, aliases, values and notes."""

    def __init__(self) -> None:
        self.tensors: dict[str, Lazy] = {}
        self.aliases: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        self.notes: list[str] = []
        self.step: int | None = None

    def source(self, format: str, close: Callable[[], None]) -> Source:
        rest = Contents({}, self.aliases, self.values, self.step)
        return Source(format, self.tensors, rest, close, self.notes)

    def encode(self, value: object, path: str) -> Any:
        """Returns `value` as JSON, and adds its tensors, but those without dims, to the contents."""
        lazies: dict[int, Lazy] = {}
        keep_alive: list[torch.Tensor] = []

        def as_tensor(leaf: object) -> object:
            """Returns an empty tensor for a lazy one, which `encoded` does not know."""
            if not isinstance(leaf, Lazy):
                return leaf
            if not leaf.spec.shape:
                return in_memory(leaf)
            empty = torch.empty(leaf.spec.shape, dtype=DTYPES[leaf.spec.dtype], device="meta")
            keep_alive.append(empty)
            lazies[id(empty)] = leaf
            return empty

        def keep(name: str, tensor: torch.Tensor) -> None:
            self.tensors[name] = lazies[id(tensor)] if id(tensor) in lazies else _lazy(tensor)

        return encoded(_changed(value, as_tensor), path, keep)

    def add_model(self, state: Mapping[Any, Any], item: str = MODEL) -> None:
        """Add a model's state dict. Further names of a tensor become aliases of its first name."""
        self.values[item] = {"kind": "module"}
        seen: dict[object, str] = {}
        for name, value in _flat(state):
            if not isinstance(value, Lazy):
                self.notes.append(f"{item}/{name} is left out: it is no tensor")
                continue
            same = value.memory if value.spec.nbytes else None
            if same in seen:
                self.aliases[f"{item}/{name}"] = seen[same]
            else:
                self.tensors[f"{item}/{name}"] = value
                if same is not None:
                    seen[same] = f"{item}/{name}"

    def add_optimizer(
        self, state: Mapping[str, Mapping[Any, Any]], groups: Sequence[Mapping[str, Any]], item: str = OPTIMIZER
    ) -> None:
        """Add an optimizer's state, by parameter name and key, and its groups of parameter names."""
        kept: dict[str, dict[str, Any]] = {}
        for name, of_parameter in state.items():
            for key, value in of_parameter.items():
                if "/" in str(key):
                    raise CheckpointError(f"{item}: the state of {name} has the key {key}; a key may not hold a /")
                kept.setdefault(name, {})[str(key)] = self.encode(value, f"{item}/{name}/{key}")
        encoded_groups = [
            {key: self.encode(value, f"{item}/{GROUPS}/{key}") for key, value in group.items()} for group in groups
        ]
        self.values[item] = {"kind": "optimizer", GROUPS: encoded_groups, STATE: kept}

    def add_state(self, item: str, value: object) -> None:
        if item in self.values:
            raise CheckpointError(f"two parts of the checkpoint are called {item}")
        kind = "state" if isinstance(value, Mapping) else "value"
        self.values[item] = {"kind": kind, kind: self.encode(value, item)}


def _changed(tree: Any, change: Callable[[object], object]) -> Any:
    """Returns `tree` with its leaves changed: all but dicts, lists and tuples."""
    if isinstance(tree, Mapping):
        return {key: _changed(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_changed(value, change) for value in tree)
    return change(tree)


def _spec_of(tensor: torch.Tensor) -> Spec:
    return Spec(dtype_name(tensor.dtype, "a tensor"), tuple(tensor.shape))


def _lazy(tensor: torch.Tensor) -> Lazy:
    """Returns a tensor in memory as a lazy one."""
    box = whole(tuple(tensor.shape))
    return Lazy(_spec_of(tensor), lambda part, target, _: target.copy_(tensor[part.within(box)]))


def _flat(state: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def collected(tree: Any, where: str) -> Collected:
    """Returns the contents of a file or folder with this tree of values.

    The tree is a model's state dict, or has state dicts of a model, of an optimizer, and others.

    Raises:
        CheckpointError: there is no model and no optimizer in it, or the names of an optimizer's state are unknown.
    """
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{where} holds a {type(tree).__name__} where a dict is expected")
    model, optimizer = _key_of(tree, MODELS), _key_of(tree, OPTIMIZERS)
    within = [value for value in tree.values() if isinstance(value, Mapping)]
    bare = {name: value for name, value in tree.items() if isinstance(value, Lazy) and name not in STEPS}
    if model is None and not bare and len(within) == 1 and _key_of(within[0], MODELS) is not None:
        return collected(within[0], where)  # such as {"app": {"model": ..., "optimizer": ...}}
    contents = Collected()
    if model is not None:
        contents.add_model(tree[model])
    elif bare:
        contents.add_model(bare)
    if optimizer is not None:
        names = [name.removeprefix(f"{MODEL}/") for name in [*contents.tensors, *contents.aliases]]
        contents.add_optimizer(*_optimizer(tree[optimizer], names, contents, where))
    if not contents.values:
        raise CheckpointError(
            f"{where} holds neither a model nor an optimizer; it has {', '.join(map(str, tree))[:100]}"
        )
    for name, value in tree.items():
        if name in (model, optimizer) or (model is None and name in bare):
            continue
        if name in STEPS and (isinstance(value, Lazy) or type(value) is int):
            contents.step = int(in_memory(value)) if isinstance(value, Lazy) else value
        else:
            contents.add_state(str(name), value)
    return contents


def _key_of(tree: Mapping[Any, Any], names: Iterable[str]) -> str | None:
    return next((name for name in names if isinstance(tree.get(name), Mapping)), None)


def _optimizer(
    saved: Mapping[Any, Any], names: Sequence[str], contents: Collected, where: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns an optimizer's state and groups, by the names of parameters, of which `names` are known."""
    if isinstance(saved.get(STATE), Mapping) or (GROUPS in saved and STATE not in saved):  # DCP has no empty dicts
        groups = saved.get(GROUPS, [])
        if isinstance(saved.get(SETTINGS), Mapping):
            groups = _grouped(saved[SETTINGS])
        groups = list(groups.values()) if isinstance(groups, Mapping) else groups
        state, groups = dict(saved.get(STATE, {})), [dict(group) for group in groups]
        keys = [*state, *(parameter for group in groups for parameter in group.get(PARAMS, ()))]
        is_numbered = any(type(key) is int for key in keys)
        return _named(state, groups, names, contents, where) if is_numbered else (state, groups)
    if any(str(key).startswith(f"{STATE}.") for key in saved):
        return _unflattened(saved, names)
    if not saved:
        return {}, []
    raise CheckpointError(f"{where}: the optimizer has {', '.join(map(str, saved))[:100]} where its state is expected")


def _unflattened(saved: Mapping[Any, Any], names: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the state and groups of {"state.NAME.KEY": ..., "param_groups.NAME.KEY": ...}."""
    known = set(names)
    state: dict[str, Any] = {}
    settings: dict[str, dict[str, Any]] = {}
    for flat, value in saved.items():
        kind, _, rest = str(flat).partition(".")
        if kind in (STATE, GROUPS):
            name, key = _cut(rest, known)
            (state if kind == STATE else settings).setdefault(name, {})[key] = value
    return state, _grouped(settings)


def _grouped(settings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the groups of parameters whose settings, by name, are the same."""
    groups: list[dict[str, Any]] = []
    for name, of_parameter in settings.items():
        alike = next((group for group in groups if {**group, PARAMS: 0} == {**of_parameter, PARAMS: 0}), None)
        if alike is None:
            groups.append(alike := {**of_parameter, PARAMS: []})
        alike[PARAMS].append(name)
    return groups


def _cut(rest: str, known: set[str]) -> tuple[str, str]:
    """Returns NAME and KEY of "NAME.KEY": the longest known NAME, else everything before the last dot."""
    dots = [at for at, letter in enumerate(rest) if letter == "."]
    at = next((at for at in reversed(dots) if rest[:at] in known), dots[-1] if dots else len(rest))
    return rest[:at], rest[at + 1 :]


def _named(
    state: dict[Any, Any], groups: list[dict[str, Any]], names: Sequence[str], contents: Collected, where: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns numbered states and groups with names instead of numbers."""
    # torch.distributed.checkpoint makes texts of the numbers in `state`.
    state = {int(number) if str(number).isdecimal() else number: value for number, value in state.items()}
    numbers = [number for group in groups for number in group.get(PARAMS, ())]
    listed = [name for group in groups for name in group.get(PARAM_NAMES, ())]
    if len(listed) != len(numbers):
        listed = [name for name in names if f"{MODEL}/{name}" not in contents.aliases]
        floats = [name for name in listed if DTYPES[contents.tensors[f"{MODEL}/{name}"].spec.dtype].is_floating_point]
        listed = floats if len(floats) == len(numbers) else listed
        if len(groups) != 1 or len(listed) != len(numbers) or numbers != list(range(len(numbers))):
            raise CheckpointError(
                f"{where}: the optimizer numbers its {len(numbers)} parameters in {len(groups)} groups, and the model "
                f"has {len(listed)} tensors, so which number is which cannot be known; save the optimizer's state by "
                "name (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict), make the optimizer of "
                "model.named_parameters(), or leave it out"
            )
        for number, name in zip(numbers, listed, strict=True):
            _require_shapes(state.get(number, {}), contents.tensors[f"{MODEL}/{name}"].spec, name, where)
    name_of = dict(zip(numbers, listed, strict=True))
    if not set(state) <= set(name_of):
        raise CheckpointError(f"{where}: the optimizer has state of parameters that are in none of its groups")
    for group in groups:
        group[PARAMS] = [name_of[number] for number in group[PARAMS]]
        group.pop(PARAM_NAMES, None)
    return {name_of[number]: value for number, value in state.items()}, groups


def _require_shapes(state: Mapping[Any, Any], spec: Spec, name: str, where: str) -> None:
    for key, value in state.items():
        if isinstance(value, Lazy) and str(key).startswith("exp_avg") and value.spec.shape != spec.shape:
            raise CheckpointError(
                f"{where}: by its number {key} of shape {value.spec.shape} is of {name}, which has {spec.shape}; the "
                "optimizer has its parameters in another order, so save its state by name"
            )


# The way back


@dataclass(frozen=True)
class PendingTensor:
    """A tensor in a tree to write: its `name` in the checkpoint, or its `value` in memory."""

    spec: Spec
    name: str = ""
    value: torch.Tensor | None = None


def tree_of(contents: Contents, numbered: bool = False) -> dict[str, Any]:
    """Returns the nested state dicts of `contents`, with `PendingTensor` in the place of tensors.

    If `numbered`, an optimizer's parameters have numbers, as in `Optimizer.state_dict`, and names in "param_names".
    """
    pending = {name: PendingTensor(spec, name) for name, spec in contents.tensors.items()}
    pending |= {alias: pending[name] for alias, name in contents.aliases.items()}
    tree: dict[str, Any] = {}
    for item, value in contents.values.items():
        begin, kind = f"{item}/", value.get("kind")
        tensors = {name[len(begin) :]: tensor for name, tensor in pending.items() if name.startswith(begin)}
        if kind == "module":
            tree[item] = tensors
        elif kind == "optimizer":
            tree[item] = _optimizer_tree(item, value, tensors, pending, numbered)
        elif kind in ("state", "value"):
            tree[item] = _decoded(value.get(kind), pending)
    if contents.step is not None and not any(step in tree for step in STEPS):
        tree["step"] = contents.step
    return tree


def left_out_of_tree(contents: Contents) -> list[str]:
    """Returns what `tree_of` leaves out, in sentences."""
    notes = []
    for item, value in contents.values.items():
        kind = value.get("kind")
        if kind not in ("module", "optimizer", "state", "value"):
            notes.append(f"{item} is left out: it is about the ranks that have saved, and sherd's alone")
        elif kind == "module" and len(value) > 1:
            notes.append(f"the extra state of {item} is left out: other formats have no place for it")
    return notes


def references(value: Any) -> set[str]:
    """Returns the names of the tensors in `value`, an encoded tree."""
    if isinstance(value, list):
        return set().union(*map(references, value)) if value else set()
    if not isinstance(value, Mapping):
        return set()
    if set(value) == {"$tensor"}:
        return {str(value["$tensor"])}
    return references(list(value.values()))


def _decoded(value: Any, pending: Mapping[str, PendingTensor]) -> Any:
    def as_pending(leaf: object) -> object:
        return PendingTensor(_spec_of(leaf), value=leaf) if isinstance(leaf, torch.Tensor) else leaf

    return _changed(decoded(value, pending.__getitem__), as_pending)


def _optimizer_tree(
    item: str,
    value: Mapping[str, Any],
    tensors: Mapping[str, PendingTensor],
    pending: Mapping[str, PendingTensor],
    numbered: bool,
) -> dict[str, Any]:
    groups: list[dict[str, Any]] = [_decoded(group, pending) for group in value.get(GROUPS, ())]
    state: dict[Any, dict[str, Any]] = {}
    referred = references(value.get(STATE, {})) | references(value.get(GROUPS, []))
    for name, tensor in tensors.items():
        parameter, _, key = name.rpartition("/")
        if f"{item}/{name}" not in referred:
            state.setdefault(parameter, {})[key] = tensor
    for name, kept in value.get(STATE, {}).items():
        state.setdefault(name, {}).update(_decoded(kept, pending))
    if numbered:
        listed = [name for group in groups for name in group.get(PARAMS, ())]
        number_of = {name: number for number, name in enumerate(listed)}
        if not set(state) <= set(number_of) or len(number_of) != len(listed):
            raise CheckpointError(f"{item} has state of parameters that are in none of its groups, or in two")
        for group in groups:
            group[PARAM_NAMES] = group.get(PARAMS, [])
            group[PARAMS] = [number_of[name] for name in group[PARAM_NAMES]]
        state = {number_of[name]: kept for name, kept in state.items()}
    return {STATE: state, GROUPS: groups}
