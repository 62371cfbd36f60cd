"""A checkpoint whose tensors are renamed and reshaped by rules, in its models and its optimizers' state alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, whole
from sherd.layout.extent import Extent
from sherd.layout.placement import Shape
from sherd.tools.convert.contents import Contents, Lazy, Source, Spec, in_pieces
from sherd.tools.convert.mapping import Rule, each_match, filled, matcher
from sherd.tools.convert.state_trees import GROUPS, PARAMS, STATE, references

T = TypeVar("T")


class Mapped(Source):
    """A source after `rules`, in this order, on each model and on each key of the optimizers' state.

    Raises:
        CheckpointError: a rule does not fit its tensors.
    """

    def __init__(self, source: Source, rules: Sequence[Rule]) -> None:
        before = source.contents
        tensors: dict[str, Lazy] = {name: source.tensor(name) for name in before.tensors}
        aliases, values = dict(before.aliases), dict(before.values)
        models, optimizers = before.of_kind("module"), before.of_kind("optimizer")
        for item in optimizers:
            values[item] = _without_references(item, values[item])
        for rule in rules:
            num_rows: dict[str, int] = {}
            for item in models:
                names = [name.removeprefix(f"{item}/") for name in tensors if name.startswith(f"{item}/")]
                num_rows |= {name: (*tensors[f"{item}/{name}"].spec.shape, 1)[0] for name in names}
            for item in models:
                aliases = _with_aliases(rule, item, aliases, tensors)
                tensors = _with_layer(rule, item, "", tensors)
            for item in optimizers:
                for key in sorted({name.rpartition("/")[2] for name in tensors if name.startswith(f"{item}/")}):
                    tensors = _with_layer(rule, item, f"/{key}", tensors)
                values[item] = _optimizer_values(rule, values[item], num_rows)
        for item in optimizers:
            values[item] = _with_references(item, values[item], tensors)
        lost = [alias for alias, name in aliases.items() if name not in tensors]
        if lost:
            raise CheckpointError(f"{lost[0]} is another name of {aliases[lost[0]]}, which the rules take away")
        rest = Contents({}, aliases, values, before.step, before.user)
        super().__init__(source.format, tensors, rest, source.close, source.notes())


def _with_layer(rule: Rule, item: str, key: str, tensors: dict[str, Lazy]) -> dict[str, Lazy]:
    """Returns `tensors` after `rule` has changed the tensors item/NAMEkey. The others keep their places."""
    if rule.kind in ("tie", "untie"):
        return tensors
    begin = f"{item}/"
    layer = {
        name[len(begin) : len(name) - len(key)]: lazy
        for name, lazy in tensors.items()
        if name.startswith(begin) and name.endswith(key)
    }
    after = _applied(rule, layer, _reshaped_tensors, {})
    if after.keys() == layer.keys() and all(after[name] is layer[name] for name in layer):
        return tensors
    others = [(name, lazy) for name, lazy in tensors.items() if not (name.startswith(begin) and name.endswith(key))]
    first = next((at for at, name in enumerate(tensors) if name.startswith(begin)), 0)
    changed = [(f"{begin}{name}{key}", lazy) for name, lazy in after.items()]
    return dict([*others[:first], *changed, *others[first:]])


def _with_aliases(rule: Rule, item: str, aliases: dict[str, str], tensors: Mapping[str, Lazy]) -> dict[str, str]:
    """Returns the aliases after `rule` has changed those of `item`."""
    begin = f"{item}/"

    def renamed(name: str) -> str:
        if not name.startswith(begin):
            return name
        return begin + next(iter(_applied(rule, {name[len(begin) :]: None}, _reshaped_values, {})))

    if rule.kind == "rename":
        return {renamed(alias): renamed(name) for alias, name in aliases.items()}
    if rule.kind == "drop":
        dropped = matcher(rule.of[0])
        return {
            alias: name
            for alias, name in aliases.items()
            if not (alias.startswith(begin) and dropped.fullmatch(alias[len(begin) :]))
        }
    if rule.kind not in ("tie", "untie"):
        return aliases
    alias, name = f"{begin}{rule.of[0]}", f"{begin}{rule.to[0]}"
    if rule.kind == "untie":
        return {other: of for other, of in aliases.items() if other != alias}
    if alias in tensors:
        raise CheckpointError(f"{alias} is a tensor of its own, so it cannot be tied to {name}; drop it first")
    return aliases | {alias: name} if name in tensors else aliases


# An optimizer's values


def _without_references(item: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of an optimizer without references to the tensors item/NAME/KEY."""
    state = {
        name: {key: entry for key, entry in kept.items() if entry != {"$tensor": f"{item}/{name}/{key}"}}
        for name, kept in value.get(STATE, {}).items()
    }
    return {**value, STATE: state}


def _with_references(item: str, value: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
    """Returns the values of an optimizer with references to the tensors item/NAME/KEY."""
    state = {name: dict(kept) for name, kept in value.get(STATE, {}).items()}
    nested = references(state) | references(value.get(GROUPS, []))
    for full in tensors:
        if full.startswith(f"{item}/") and full not in nested:
            name, _, key = full.removeprefix(f"{item}/").rpartition("/")
            state.setdefault(name, {})[key] = {"$tensor": full}
    return {**value, STATE: state}


def _optimizer_values(rule: Rule, value: Mapping[str, Any], num_rows: Mapping[str, int]) -> dict[str, Any]:
    """Returns the values of an optimizer by the names after `rule`."""
    if rule.kind in ("tie", "untie"):
        return dict(value)
    state: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(key for kept in value.get(STATE, {}).values() for key in kept):
        layer = {name: kept[key] for name, kept in value[STATE].items() if key in kept}
        for name, entry in _applied(rule, layer, _reshaped_values, num_rows).items():
            state.setdefault(name, {})[key] = entry
    groups = [dict(group) for group in value.get(GROUPS, ())]
    group_of = {name: number for number, group in enumerate(groups) for name in group.get(PARAMS, ())}
    after = _applied(rule, group_of, _reshaped_values, num_rows)
    for number, group in enumerate(groups):
        if PARAMS in group:
            group[PARAMS] = [name for name, of in after.items() if of == number]
    return {**value, STATE: state, GROUPS: groups}


# A rule, applied to a layer: the tensors or values of one kind, by the names of parameters

Reshape = Callable[[Rule, Sequence[T], str, int], Sequence[T]]
"""Returns what a rule makes of tensors or values. The name is for errors; the number counts rows for "unstack"."""


def _applied(rule: Rule, layer: Mapping[str, T], reshape: Reshape[T], num_rows: Mapping[str, int]) -> dict[str, T]:
    """Returns a layer after `rule`. `num_rows` are the first dims of the model's tensors."""
    made: dict[str, T] = {}
    gone: set[str] = set()
    if rule.regex:
        renamed = {name: re.sub(rule.of[0], rule.to[0], name) for name in layer}
        made = {to: layer[name] for name, to in renamed.items() if to != name}
        gone = {name for name, to in renamed.items() if to != name}
    elif rule.kind == "stack":
        for stack, names in _stacks(rule, list(layer)):
            (made[stack],) = reshape(rule, [layer[name] for name in names], stack, 0)
            gone |= set(names)
    else:
        for name, holes in each_match(rule, list(layer)):
            names = [filled(pattern, holes) for pattern in rule.of]
            missing = [of for of in names if of not in layer]
            if missing:
                raise CheckpointError(f"{name} is to be joined with {missing[0]}, which is not there")
            gone |= set(names)
            parts = [layer[of] for of in names]
            if rule.kind == "unstack":
                rows = reshape(rule, parts, name, num_rows.get(name, 1))
                made |= {filled(rule.to[0], {**holes, "expert": str(at)}): row for at, row in enumerate(rows)}
            elif rule.kind != "drop":
                to = [filled(pattern, holes) for pattern in rule.to]
                made |= zip(to, reshape(rule, parts, to[0] if rule.kind == "merge" else name, 0), strict=True)
    left = {name: thing for name, thing in layer.items() if name not in gone}
    twice = made.keys() & left.keys()
    if twice:
        raise CheckpointError(f"{min(twice)} would be the name of two tensors")
    return _in_order(layer, left, made, gone)


def _stacks(rule: Rule, names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields the name of each stack, and the names of its experts in order."""
    experts: dict[str, dict[int, str]] = {}
    for name, holes in each_match(rule, names):
        experts.setdefault(filled(rule.to[0], holes), {})[int(holes["expert"])] = name
    for to, numbered in experts.items():
        if sorted(numbered) != list(range(len(numbered))):
            raise CheckpointError(f"{to} is to be stacked of experts {sorted(numbered)}, and some are not there")
        yield to, [numbered[number] for number in range(len(numbered))]


def _in_order(layer: Mapping[str, T], left: Mapping[str, T], made: dict[str, T], gone: set[str]) -> dict[str, T]:
    """Returns `left` and `made`, the latter in the place of what is gone."""
    ordered: dict[str, T] = {}
    waiting = dict(made)
    for name in layer:
        if name in left:
            ordered[name] = left[name]
        elif len(made) == len(gone) and waiting:
            to = next(iter(waiting))  # one for one: each takes the place of the one it was
            ordered[to] = waiting.pop(to)
        else:
            ordered |= waiting
            waiting = {}
    return ordered | waiting


def _reshaped_values(rule: Rule, values: Sequence[T], name: str, num_rows: int) -> Sequence[T]:
    """Returns the value of each part, since all parts of a tensor have the same value. A `Reshape`."""
    if rule.kind in ("merge", "stack") and any(value != values[0] for value in values):
        raise CheckpointError(f"{name} would be one of several parameters whose settings or steps differ")
    number = {"split": len(rule.to), "unstack": num_rows}.get(rule.kind, 1)
    return [values[0]] * number


def _reshaped_tensors(rule: Rule, tensors: Sequence[Lazy], name: str, _: int) -> Sequence[Lazy]:
    """Returns the tensors that `rule` makes of `tensors`. A `Reshape`. Raises CheckpointError if shapes do not fit."""
    first = tensors[0]
    shape = first.spec.shape
    if rule.kind == "transpose":
        if len(shape) != 2:
            raise CheckpointError(f"{name} of shape {shape} is no matrix, so it cannot be transposed")
        return [_transposed(first)]
    if rule.kind == "permute":
        if not shape or shape[0] % (2 * rule.heads):
            raise CheckpointError(f"{name} of shape {shape} has no even number of rows for each of {rule.heads} heads")
        return [_permuted(first, rule.heads, rule.backwards)]
    if rule.kind == "merge":
        return [_joined(tensors, rule.dim, rule.ratio, name)]
    if rule.kind == "split":
        if rule.dim >= len(shape):
            raise CheckpointError(f"{name} of shape {shape} has no dim {rule.dim}")
        sizes = _sizes(shape[rule.dim], rule.ratio or [1] * len(rule.to), name)
        return [_part(first, box) for box in _boxes(shape, rule.dim, sizes)]
    if rule.kind == "stack":
        if len({tensor.spec for tensor in tensors}) > 1:
            raise CheckpointError(f"{name}: tensors of other shapes or dtypes cannot be stacked")
        return [_stacked(tensors)]
    if rule.kind == "unstack":
        if not shape:
            raise CheckpointError(f"{name} has no dims, so it cannot be cut into rows")
        return [_row(first, number) for number in range(shape[0])]
    return tensors


# Tensors made of other tensors, and read by parts like these


def _joined(parts: Sequence[Lazy], dim: int, ratio: Sequence[int], name: str) -> Lazy:
    """Returns `parts` one behind the other along `dim`. Raises CheckpointError if their shapes do not fit."""
    shapes = [part.spec.shape for part in parts]
    others = {(part.spec.dtype, *(size for at, size in enumerate(part.spec.shape) if at != dim)) for part in parts}
    if any(dim >= len(shape) for shape in shapes) or len(others) > 1:
        raise CheckpointError(f"{name}: tensors of shapes {shapes} cannot be joined along dim {dim}")
    sizes = [shape[dim] for shape in shapes]
    if sizes != _sizes(sum(sizes), ratio or [1] * len(sizes), name):
        raise CheckpointError(f"{name}: its parts have sizes {sizes}, so the rule needs ratio, as in {sizes}")
    shape = tuple(sum(sizes) if at == dim else size for at, size in enumerate(shapes[0]))
    boxes = _boxes(shape, dim, sizes)
    return in_pieces(_shaped(parts[0], shape), list(zip(boxes, parts, strict=True)))


def _sizes(size: int, ratio: Sequence[int], name: str) -> list[int]:
    if not sum(ratio) or size % sum(ratio):
        raise CheckpointError(f"{name}: {size} does not divide into parts of ratio {list(ratio)}")
    return [size // sum(ratio) * part for part in ratio]


def _boxes(shape: Shape, dim: int, sizes: Iterable[int]) -> Iterator[Box]:
    """Yields the parts of `sizes` along `dim` of a tensor of `shape`."""
    start = 0
    for size in sizes:
        yield whole(shape).narrowed(dim, Extent(start, size))
        start += size


def _shaped(like: Lazy, shape: Shape) -> Spec:
    return Spec(like.spec.dtype, shape)


def _part(of: Lazy, box: Box) -> Lazy:
    def read_into(part: Box, target: torch.Tensor, most_bytes: int) -> None:
        offsets = tuple(first + at for first, at in zip(box.offsets, part.offsets, strict=True))
        of.read_into(Box(offsets, part.sizes), target, most_bytes)

    return Lazy(_shaped(of, box.sizes), read_into)


def _transposed(of: Lazy) -> Lazy:
    def read_into(part: Box, target: torch.Tensor, most_bytes: int) -> None:
        target.copy_(of.part(Box(part.offsets[::-1], part.sizes[::-1]), most_bytes).t())

    return Lazy(_shaped(of, of.spec.shape[::-1]), read_into)


def _permuted(of: Lazy, heads: int, apart: bool) -> Lazy:
    """Returns a tensor with the rows of both halves of each head interleaved, or taken `apart` again."""
    width = of.spec.shape[0] // heads

    def read_into(part: Box, target: torch.Tensor, most_bytes: int) -> None:
        # All rows of a head are read, also for a part of it: one head at a time.
        for head in range(part.offsets[0] // width, -(-(part.offsets[0] + part.sizes[0]) // width)):
            rows = Box((head * width, *part.offsets[1:]), (width, *part.sizes[1:]))
            shared = rows.intersect(part)
            if shared is not None:
                halves = (width // 2, 2) if apart else (2, width // 2)
                read = of.part(rows, most_bytes).view(*halves, *part.sizes[1:]).transpose(0, 1)
                target[shared.within(part)] = read.reshape(rows.sizes)[shared.within(rows)]

    return Lazy(of.spec, read_into)


def _stacked(parts: Sequence[Lazy]) -> Lazy:
    """Returns tensors of one shape along a new first dim."""

    def read_into(part: Box, target: torch.Tensor, most_bytes: int) -> None:
        below = Box(part.offsets[1:], part.sizes[1:])
        for number in range(part.sizes[0]):
            parts[part.offsets[0] + number].read_into(below, target[number], most_bytes)

    return Lazy(_shaped(parts[0], (len(parts), *parts[0].spec.shape)), read_into)


def _row(of: Lazy, number: int) -> Lazy:
    def read_into(part: Box, target: torch.Tensor, most_bytes: int) -> None:
        of.read_into(Box((number, *part.offsets), (1, *part.sizes)), target.unsqueeze(0), most_bytes)

    return Lazy(_shaped(of, of.spec.shape[1:]), read_into)
