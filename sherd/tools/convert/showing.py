"""The contents of a checkpoint, as text for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sherd.checkpoint.writing import RANDOM
from sherd.tools.convert.contents import Source
from sherd.tools.convert.state_trees import GROUPS, PARAMS, STATE, references
from sherd.units import in_bytes


def as_json(source: Source) -> dict[str, Any]:
    """Returns all that is known of a checkpoint without reading its tensors."""
    contents, pieces = source.contents, source.pieces()
    tensors = {
        name: {"dtype": spec.dtype, "shape": list(spec.shape), "bytes": spec.nbytes, "pieces": pieces.get(name, 1)}
        for name, spec in contents.tensors.items()
    }
    return {
        "format": source.format,
        "step": contents.step,
        "bytes": contents.nbytes,
        "notes": source.notes(),
        "tensors": tensors,
        "aliases": dict(contents.aliases),
        "values": dict(contents.values),
        "user": contents.user,
    }


def as_text(source: Source, path: str) -> str:
    """Returns the same in lines."""
    return "\n".join(line.replace("\n", "\\n") for line in _lines(source, path))


def _lines(source: Source, path: str) -> Iterator[str]:
    contents, pieces = source.contents, source.pieces()
    step = "" if contents.step is None else f", step {contents.step}"
    yield f"{path}: {source.format}{step}, {len(contents.tensors)} tensors, {in_bytes(contents.nbytes)}"
    yield from source.notes()
    for item, value in contents.values.items():
        mine = contents.of_item(item)
        total = in_bytes(sum(spec.nbytes for spec in mine.values()))
        yield ""
        yield f"{item}: {value.get('kind', 'values')}, {len(mine)} tensors, {total}"
        width = max(map(len, mine), default=0)
        for name, spec in mine.items():
            number = pieces.get(f"{item}/{name}", 1)
            of = f"  {number} pieces" if number > 1 else ""
            yield f"  {name:{width}}  {spec.dtype:5}{list(spec.shape)!s:20} {in_bytes(spec.nbytes)}{of}"
        begin = f"{item}/"
        for alias, other in contents.aliases.items():
            if alias.startswith(begin):
                yield f"  {alias[len(begin) :]} = {other[len(begin) :]}"
        yield from _values(value)
    if contents.user is not None:
        yield f"user: {json.dumps(contents.user)[:200]}"


def _values(value: dict[str, Any]) -> Iterator[str]:
    """Yields what an item has beside tensors."""
    for number, group in enumerate(value.get(GROUPS, ())):
        settings = {key: each for key, each in group.items() if key != PARAMS}
        names = len(group.get(PARAMS, ()))
        yield f"  group {number}: {names} parameters, {json.dumps(settings)[:300]}"
    if value.get("kind") == "optimizer":
        alike: dict[str, int] = {}
        for kept in value.get(STATE, {}).values():
            # Tensors are in the list above.
            text = json.dumps({key: each for key, each in kept.items() if not references(each)})[:200]
            alike[text] = alike.get(text, 0) + 1
        for text, number in alike.items():
            yield f"  state of {number} parameters: {text}"
    else:
        held = {key: each for key, each in value.items() if key != "kind"}
        for rank, own in held.items():  # what a rank has for itself, but the states of its random generators
            held[rank] = {key: each for key, each in own.items() if key != RANDOM} if isinstance(own, dict) else own
        if held:
            yield f"  {json.dumps(held)[:300]}"
