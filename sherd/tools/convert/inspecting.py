"""Checkpoints of any format, inspected: shown as text or JSON, compared tensor by tensor, and read to find damage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sherd.checkpoint.encoding import DTYPES
from sherd.checkpoint.writing import PER_RANK, RANDOM
from sherd.errors import CheckpointError
from sherd.layout.boxes import spans, whole
from sherd.storage.manifest import MANIFEST, name_in_file
from sherd.tools.convert.contents import MOST_BYTES, Contents, Progress, Source, Spec, chunks_of
from sherd.tools.convert.of_sherd import SherdSource
from sherd.tools.convert.state_trees import GROUPS, PARAMS, STATE, references
from sherd.units import in_bytes

# Shown


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
    return "\n".join(line.replace("\n", "\\n") for line in _lines(source, path))


def _lines(source: Source, path: str) -> Iterator[str]:
    contents, pieces = source.contents, source.pieces()
    step = "" if contents.step is None else f", step {contents.step}"
    yield f"{path}: {source.format}{step}, {len(contents.tensors)} tensors, {in_bytes(contents.nbytes)}"
    yield from source.notes()
    for item, value in contents.values.items():
        tensors = contents.of_item(item)
        total = in_bytes(sum(spec.nbytes for spec in tensors.values()))
        yield ""
        yield f"{item}: {value.get('kind', 'values')}, {len(tensors)} tensors, {total}"
        width = max(map(len, tensors), default=0)
        for name, spec in tensors.items():
            number = pieces.get(f"{item}/{name}", 1)
            of = f"  {number} parts" if number > 1 else ""
            yield f"  {name:{width}}  {spec.dtype:5}{list(spec.shape)!s:20} {in_bytes(spec.nbytes)}{of}"
        begin = f"{item}/"
        for alias, other in contents.aliases.items():
            if alias.startswith(begin):
                yield f"  {alias[len(begin) :]} = {other[len(begin) :]}"
        yield from _lines_of_values(value)
    if contents.user is not None:
        yield f"user: {json.dumps(contents.user)[:200]}"


def _lines_of_values(value: dict[str, Any]) -> Iterator[str]:
    """Yields what an item has in addition to tensors."""
    for number, group in enumerate(value.get(GROUPS, ())):
        settings = {key: setting for key, setting in group.items() if key != PARAMS}
        names = len(group.get(PARAMS, ()))
        yield f"  group {number}: {names} parameters, {json.dumps(settings)[:300]}"
    if value.get("kind") == "optimizer":
        alike: dict[str, int] = {}
        for kept in value.get(STATE, {}).values():
            # Tensors are in the list above.
            text = json.dumps({key: entry for key, entry in kept.items() if not references(entry)})[:200]
            alike[text] = alike.get(text, 0) + 1
        for text, number in alike.items():
            yield f"  state of {number} parameters: {text}"
    else:
        values = {key: entry for key, entry in value.items() if key != "kind"}
        for rank, own in values.items():  # a rank's own values, without the states of its random generators
            values[rank] = {key: entry for key, entry in own.items() if key != RANDOM} if isinstance(own, dict) else own
        if values:
            yield f"  {json.dumps(values)[:300]}"


# Compared


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How the tensor or value `name` differs, in words. Tensors whose elements differ have the largest differences."""

    name: str
    what: str
    max_abs: float | None = None
    max_rel: float | None = None
    num: int | None = None


def differences(
    a: Source,
    b: Source,
    rtol: float = 0.0,
    atol: float = 0.0,
    model_only: bool = False,
    progress: Progress = lambda name, nbytes: None,
    most_bytes: int = 16 << 20,
) -> Iterator[TensorDifference]:
    """Yields what differs between two checkpoints.

    Tensors differ if one is missing, if shapes or dtypes differ, or if elements differ by more than `atol` + `rtol` *
    |b|. Values, such as an optimizer's settings, are compared too. Models come first. What only one side knows of the
    ranks that saved, and of an optimizer's class, is no difference: most formats cannot hold it.

    Raises:
        CheckpointError: one of the checkpoints is damaged.
    """
    specs_a, specs_b = _specs(a.contents, model_only), _specs(b.contents, model_only)
    values_a, values_b = _values_of_both(dict(a.contents.values), dict(b.contents.values))
    for item in dict.fromkeys([*values_a, *values_b, PER_RANK]):
        if item not in values_a or item not in values_b:
            tensors = {name for name in (*specs_a, *specs_b) if name.startswith(f"{item}/")}
            specs_a, specs_b = ({name: s for name, s in of.items() if name not in tensors} for of in (specs_a, specs_b))
            if item != PER_RANK and (tensors or not model_only):
                with_them = f", with {len(tensors)} tensors" if tensors else ""
                yield TensorDifference(item, f"is missing in {'B' if item in values_a else 'A'}{with_them}")
            values_a.pop(item, None)
            values_b.pop(item, None)
    models = tuple(f"{item}/" for each in (a, b) for item in each.contents.of_kind("module"))
    for name in sorted(dict.fromkeys([*specs_a, *specs_b]), key=lambda name: not name.startswith(models)):
        of_a, of_b = specs_a.get(name), specs_b.get(name)
        if of_a is None or of_b is None:
            yield TensorDifference(name, f"is missing in {'A' if of_a is None else 'B'}")
        elif of_a != of_b:
            said_a, said_b = (f"{spec.dtype} {list(spec.shape)}" for spec in (of_a, of_b))
            yield TensorDifference(name, f"is {said_a} in A, {said_b} in B")
        else:
            difference = _in_elements(a, b, name, of_a, rtol, atol, progress, most_bytes)
            if difference is not None:
                yield difference
    if not model_only:
        yield from _in_values(values_a, values_b, "")


def _values_of_both(a: dict[str, Any], b: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values without what most formats cannot hold, where one side lacks that."""
    for one, other in ((a, b), (b, a)):
        if PER_RANK not in other:
            one.pop(PER_RANK, None)
        for item in one.keys() & other.keys():
            if "class" not in other[item]:
                one[item] = {key: value for key, value in one[item].items() if key != "class"}
    return a, b


def _specs(contents: Contents, model_only: bool) -> dict[str, Spec]:
    specs = dict(contents.tensors)
    specs |= {alias: contents.tensors[name] for alias, name in contents.aliases.items()}
    models = tuple(f"{item}/" for item in contents.of_kind("module"))
    return {name: spec for name, spec in specs.items() if name.startswith(models)} if model_only else specs


def _in_elements(
    a: Source, b: Source, name: str, spec: Spec, rtol: float, atol: float, progress: Progress, most_bytes: int
) -> TensorDifference | None:
    box, dtype = whole(spec.shape), DTYPES[spec.dtype]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    max_abs, max_rel, num = 0.0, 0.0, 0
    for span in spans(box, box, max(most_bytes // 8, 1)) if box.numel else ():
        parts = [source.tensor(name).part(span.box, most_bytes) for source in (a, b)]
        progress(name, parts[0].nbytes)
        of_a, of_b = (part.flatten().to(wide) for part in parts)
        apart = (of_a - of_b).abs()
        # Equal infinities and two NaNs do not differ; any other value that is not finite differs infinitely.
        same = (of_a == of_b) | (of_a.isnan() & of_b.isnan())
        if not dtype.is_floating_point and not dtype.is_complex:
            same = (parts[0] == parts[1]).flatten()  # float64 rounds integers of more than 53 bits
            apart = apart.clamp(min=1.0)
        apart = torch.where(same, 0.0, torch.where(apart.isnan(), torch.inf, apart))
        beyond = ~same & ~(apart.isfinite() & (apart <= atol + rtol * of_b.abs()))
        num += int(beyond.sum())
        max_abs = max(max_abs, float(apart.max()))
        relative = torch.where(same, 0.0, apart / of_b.abs())
        max_rel = max(max_rel, float(torch.where(relative.isnan(), torch.inf, relative).max()))
    return TensorDifference(name, f"{num} of {box.numel} elements differ", max_abs, max_rel, num) if num else None


def _in_values(a: Any, b: Any, path: str) -> Iterator[TensorDifference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            below = f"{path}/{key}" if path else str(key)
            if key not in a or key not in b:
                yield TensorDifference(below, f"is missing in {'A' if key not in a else 'B'}")
            else:
                yield from _in_values(a[key], b[key], below)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for at, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _in_values(one, other, f"{path}/{at}")
    elif a != b:
        yield TensorDifference(path, f"is {a!r:.60} in A, {b!r:.60} in B")


# Verified


@dataclass(frozen=True, slots=True)
class Damage:
    """A fault of `file`, a file of a checkpoint, or of a tensor."""

    file: str
    what: str


def damages(source: Source, progress: Progress = lambda name, nbytes: None) -> Iterator[Damage]:
    """Yields the faults of a checkpoint, all of which is read.

    For sherd's own format, each block of each file is compared with its checksum, and each header with the manifest.
    For other formats all tensors are read: that finds files that end too early and damaged headers, but changed bytes
    only where the format has checksums.
    """
    if isinstance(source, SherdSource):
        yield from _damages_of_sherd(source, progress)
        return
    for name in source.contents.tensors:
        try:
            for chunk in chunks_of(source.tensor(name), MOST_BYTES):
                progress(name, len(chunk))
        except CheckpointError as error:
            yield Damage(name, str(error))


def _damages_of_sherd(source: SherdSource, progress: Progress) -> Iterator[Damage]:
    opened, manifest = source.opened, source.opened.manifest
    expected: dict[int, dict[str, str]] = {number: {} for number in range(len(manifest.files))}
    for name, entry in manifest.tensors.items():
        for number, box in entry.pieces():
            piece = name_in_file(name, entry.shape, box)
            expected[number][piece] = f"{entry.dtype} {list(box.sizes)}"
    for number, file in enumerate(manifest.files):
        try:
            opened_file = opened.file(number)
            buffer = memoryview(bytearray(manifest.block_bytes))
            for start in range(0, file.nbytes, manifest.block_bytes):
                part = buffer[: min(manifest.block_bytes, file.nbytes - start)]
                opened_file.bytes.read_into(start, part)
                progress(file.name, len(part))
        except CheckpointError as error:
            yield Damage(file.name, str(error))
            continue
        present = {name: f"{stored.dtype} {list(stored.shape)}" for name, stored in opened_file.tensors.items()}
        for piece, said in expected[number].items():
            if present.get(piece) != said:
                is_ = f"has {present[piece]} as" if piece in present else "lacks"
                yield Damage(file.name, f"{is_} {piece}, {said} by {MANIFEST}")
        for piece in present.keys() - expected[number].keys():
            yield Damage(file.name, f"has {piece}, which {MANIFEST} does not name")
