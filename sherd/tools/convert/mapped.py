"""A checkpoint whose tensors have been renamed and reshaped by rules, in its models and its optimizers' state alike."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from sherd.errors import CheckpointError
from sherd.layout.boxes import Box
from sherd.tools.convert import views
from sherd.tools.convert.contents import Contents, Lazy, Named, Source
from sherd.tools.convert.mapping import Rule, each_match, filled, matcher
from sherd.tools.convert.state_trees import GROUPS, PARAMS, STATE, references

T = TypeVar("T")


class _Things(ABC, Generic[T]):
    """The tensor or value of one name in a layer, and what the rules do with such."""

    @abstractmethod
    def transposed(self, of: T, name: str) -> T:
        """Returns `of` transposed."""

    @abstractmethod
    def permuted(self, of: T, rule: Rule, name: str) -> T:
        """Returns `of` with its rows in another order."""

    @abstractmethod
    def joined(self, parts: Sequence[T], rule: Rule, name: str) -> T:
        """Returns one for several."""

    @abstractmethod
    def cut(self, of: T, rule: Rule, name: str) -> Sequence[T]:
        """Returns several for one."""

    @abstractmethod
    def stacked(self, parts: Sequence[T], name: str) -> T:
        """Returns one for several."""

    @abstractmethod
    def rows(self, of: T, name: str, num: int) -> Sequence[T]:
        """Returns several for one; `num` of them where it does not say itself."""


class _Tensors(_Things[Lazy]):
    def transposed(self, of: Lazy, name: str) -> Lazy:
        return views.transposed(of, name)

    def permuted(self, of: Lazy, rule: Rule, name: str) -> Lazy:
        return views.permuted(of, rule.heads, rule.backwards, name)

    def joined(self, parts: Sequence[Lazy], rule: Rule, name: str) -> Lazy:
        return views.joined(parts, rule.dim, rule.ratio, name)

    def cut(self, of: Lazy, rule: Rule, name: str) -> Sequence[Lazy]:
        return views.cut(of, rule.dim, rule.ratio or [1] * len(rule.to), name)

    def stacked(self, parts: Sequence[Lazy], name: str) -> Lazy:
        return views.stacked(parts, name)

    def rows(self, of: Lazy, name: str, num: int) -> Sequence[Lazy]:
        shape = of.spec.shape
        if not shape:
            raise CheckpointError(f"{name} has no dims, so it cannot be cut into rows")
        return [views.Row(of, number) for number in range(shape[0])]


class _Values(_Things[object]):
    """Values are the same for all parts of a tensor."""

    def transposed(self, of: object, name: str) -> object:
        return of

    def permuted(self, of: object, rule: Rule, name: str) -> object:
        return of

    def joined(self, parts: Sequence[object], rule: Rule, name: str) -> object:
        return self.stacked(parts, name)

    def cut(self, of: object, rule: Rule, name: str) -> Sequence[object]:
        return [of] * len(rule.to)

    def stacked(self, parts: Sequence[object], name: str) -> object:
        if any(part != parts[0] for part in parts):
            raise CheckpointError(f"{name} would be one of several parameters whose settings or steps differ")
        return parts[0]

    def rows(self, of: object, name: str, num: int) -> Sequence[object]:
        return [of] * num


def _applied(rule: Rule, layer: Mapping[str, T], things: _Things[T], rows: Mapping[str, int]) -> dict[str, T]:
    """Returns a layer, what each name has, after `rule`. `rows` are the first dims of the model's tensors."""
    made: dict[str, T] = {}
    gone: set[str] = set()
    if rule.regex:
        renamed = {name: re.sub(rule.of[0], rule.to[0], name) for name in layer}
        made = {to: layer[name] for name, to in renamed.items() if to != name}
        gone = {name for name, to in renamed.items() if to != name}
    elif rule.kind == "stack":
        made, gone = _stack(rule, layer, things)
    else:
        for name, holes in each_match(rule, list(layer)):
            names = [filled(pattern, holes) for pattern in rule.of]
            missing = [each for each in names if each not in layer]
            if missing:
                raise CheckpointError(f"{name} is to be joined with {missing[0]}, which is not there")
            gone |= set(names)
            made |= _made(rule, names, holes, [layer[each] for each in names], things, rows)
    left = {name: thing for name, thing in layer.items() if name not in gone}
    twice = made.keys() & left.keys()
    if twice:
        raise CheckpointError(f"{min(twice)} would be the name of two tensors")
    return _in_order(layer, left, made, gone)


def _in_order(layer: Mapping[str, T], left: Mapping[str, T], made: dict[str, T], gone: set[str]) -> dict[str, T]:
    """Returns `left` and `made`, the latter from where the first one that is gone was."""
    found: dict[str, T] = {}
    waiting = dict(made)
    for name in layer:
        if name in left:
            found[name] = left[name]
        elif len(made) == len(gone) and waiting:
            to = next(iter(waiting))  # one for one: each takes the place of the one it was
            found[to] = waiting.pop(to)
        else:
            found |= waiting
            waiting = {}
    return found | waiting


def _made(
    rule: Rule,
    names: Sequence[str],
    holes: Mapping[str, str],
    of: Sequence[T],
    things: _Things[T],
    rows: Mapping[str, int],
) -> dict[str, T]:
    if rule.kind == "drop":
        return {}
    if rule.kind == "unstack":
        parts = things.rows(of[0], names[0], rows.get(names[0], 1))
        return {filled(rule.to[0], {**holes, "expert": str(at)}): part for at, part in enumerate(parts)}
    to = [filled(pattern, holes) for pattern in rule.to]
    if rule.kind == "transpose":
        return {to[0]: things.transposed(of[0], names[0])}
    if rule.kind == "permute":
        return {to[0]: things.permuted(of[0], rule, names[0])}
    if rule.kind == "merge":
        return {to[0]: things.joined(of, rule, to[0])}
    if rule.kind == "split":
        return dict(zip(to, things.cut(of[0], rule, names[0]), strict=True))
    return {to[0]: of[0]}


def _stack(rule: Rule, layer: Mapping[str, T], things: _Things[T]) -> tuple[dict[str, T], set[str]]:
    experts: dict[str, dict[int, str]] = {}
    for name, holes in each_match(rule, list(layer)):
        experts.setdefault(filled(rule.to[0], holes), {})[int(holes["expert"])] = name
    made: dict[str, T] = {}
    for to, numbered in experts.items():
        if sorted(numbered) != list(range(len(numbered))):
            raise CheckpointError(f"{to} is to be stacked of experts {sorted(numbered)}, and some are not there")
        made[to] = things.stacked([layer[numbered[number]] for number in range(len(numbered))], to)
    return made, {name for numbered in experts.values() for name in numbered.values()}


class Mapped:
    """A source after rules.

    Args:
        source: the checkpoint.
        rules: are followed in their order, by each model, and by each key of the optimizers' state.

    Raises:
        CheckpointError: a rule does not fit what it is for.
    """

    def __init__(self, source: Source, rules: Sequence[Rule]) -> None:
        self._source, self.format = source, source.format
        of = source.contents
        self._lazy: dict[str, Lazy] = {name: Named(source, name) for name in of.tensors}
        aliases, values = dict(of.aliases), dict(of.values)
        models, optimizers = of.of_kind("module"), of.of_kind("optimizer")
        for item in optimizers:
            values[item] = _without_references(item, values[item])
        for rule in rules:
            rows: dict[str, int] = {}
            for item in models:
                names = [name.removeprefix(f"{item}/") for name in self._lazy if name.startswith(f"{item}/")]
                rows |= {name: (*self._lazy[f"{item}/{name}"].spec.shape, 1)[0] for name in names}
            for item in models:
                aliases = self._tie(rule, item, aliases)
                self._layer(rule, item, "")
            for item in optimizers:
                for key in sorted({name.rpartition("/")[2] for name in self._lazy if name.startswith(f"{item}/")}):
                    self._layer(rule, item, f"/{key}")
                values[item] = _optimizer_values(rule, values[item], rows)
        for item in optimizers:
            values[item] = _with_references(item, values[item], self._lazy)
        specs = {name: lazy.spec for name, lazy in self._lazy.items()}
        lost = [alias for alias, name in aliases.items() if name not in specs]
        if lost:
            raise CheckpointError(f"{lost[0]} is another name of {aliases[lost[0]]}, which the rules take away")
        self.contents = Contents(specs, aliases, values, of.step, of.user)

    def _layer(self, rule: Rule, item: str, key: str) -> None:
        """Follow `rule` with the tensors item/NAMEkey."""
        if rule.kind in ("tie", "untie"):
            return
        begin = f"{item}/"
        mine = {
            name[len(begin) : len(name) - len(key)]: lazy
            for name, lazy in self._lazy.items()
            if name.startswith(begin) and name.endswith(key)
        }
        after = _applied(rule, mine, _Tensors(), {})
        if after.keys() == mine.keys() and all(after[name] is mine[name] for name in mine):
            return
        others = [name for name in self._lazy if not (name.startswith(begin) and name.endswith(key))]
        made = {f"{begin}{name}{key}": lazy for name, lazy in after.items()}
        first = next((at for at, name in enumerate(self._lazy) if name.startswith(begin)), 0)
        kept = {name: self._lazy[name] for name in others}
        self._lazy = dict([*list(kept.items())[:first], *made.items(), *list(kept.items())[first:]])

    def _tie(self, rule: Rule, item: str, aliases: dict[str, str]) -> dict[str, str]:
        begin = f"{item}/"
        if rule.kind == "rename":
            return {_renamed(rule, alias, begin): _renamed(rule, name, begin) for alias, name in aliases.items()}
        if rule.kind == "drop":
            return {
                alias: name
                for alias, name in aliases.items()
                if not (alias.startswith(begin) and matcher(rule.of[0]).fullmatch(alias[len(begin) :]))
            }
        if rule.kind not in ("tie", "untie"):
            return aliases
        alias, name = f"{begin}{rule.of[0]}", f"{begin}{rule.to[0]}"
        if rule.kind == "untie":
            return {each: of for each, of in aliases.items() if each != alias}
        if alias in self._lazy:
            raise CheckpointError(f"{alias} is a tensor of its own, so it cannot be tied to {name}; drop it first")
        return aliases | {alias: name} if name in self._lazy else aliases

    def read_into(self, name: str, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part` of the tensor `name`."""
        self._lazy[self.contents.aliases.get(name, name)].read_into(part, target, most_bytes)

    def notes(self) -> list[str]:
        """Returns what a user should know of the source."""
        return self._source.notes()

    def pieces(self) -> Mapping[str, int]:
        """Returns nothing: pieces are the source's."""
        return {}

    def close(self) -> None:
        """Close the source."""
        self._source.close()


def _renamed(rule: Rule, name: str, begin: str) -> str:
    if not name.startswith(begin):
        return name
    return begin + next(iter(_applied(rule, {name[len(begin) :]: None}, _Values(), {})))


def _without_references(item: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an optimizer has beside tensors that are called item/NAME/KEY."""
    state = {
        name: {key: each for key, each in kept.items() if each != {"$tensor": f"{item}/{name}/{key}"}}
        for name, kept in value.get(STATE, {}).items()
    }
    return {**value, STATE: state}


def _with_references(item: str, value: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
    """Returns the same, with the names of these tensors in their places."""
    state = {name: dict(kept) for name, kept in value.get(STATE, {}).items()}
    nested = references(state) | references(value.get(GROUPS, []))
    for full in tensors:
        if full.startswith(f"{item}/") and full not in nested:
            name, _, key = full.removeprefix(f"{item}/").rpartition("/")
            state.setdefault(name, {})[key] = {"$tensor": full}
    return {**value, STATE: state}


def _optimizer_values(rule: Rule, value: Mapping[str, Any], rows: Mapping[str, int]) -> dict[str, Any]:
    """Returns what an optimizer has beside tensors, by the names after `rule`."""
    if rule.kind in ("tie", "untie"):
        return dict(value)
    state: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(key for kept in value.get(STATE, {}).values() for key in kept):
        layer = {name: kept[key] for name, kept in value[STATE].items() if key in kept}
        for name, each in _applied(rule, layer, _Values(), rows).items():
            state.setdefault(name, {})[key] = each
    groups = [dict(group) for group in value.get(GROUPS, ())]
    group_of = {name: number for number, group in enumerate(groups) for name in group.get(PARAMS, ())}
    after = _applied(rule, group_of, _Values(), rows)
    for number, group in enumerate(groups):
        if PARAMS in group:
            group[PARAMS] = [name for name, of in after.items() if of == number]
    return {**value, STATE: state, GROUPS: groups}
