"""Two checkpoints of any formats, compared tensor by tensor, by parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sherd.checkpoint.tensor_bytes import DTYPES
from sherd.layout.boxes import spans, whole
from sherd.tools.convert.contents import Contents, Source, Spec


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference in `name`, a tensor or a value, in words; the largest ones of elements if it is values."""

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
    progress: Callable[[str, int], None] = lambda name, nbytes: None,
    most_bytes: int = 16 << 20,
) -> Iterator[Difference]:
    """Yields what differs between two checkpoints: tensors that one of them lacks, that have another shape or dtype, or
    elements that differ by more than `atol` + `rtol` * |b|; and values, such as an optimizer's settings.

    Raises:
        CheckpointError: one of them is damaged.
    """
    names_a, names_b = _names(a.contents, model_only), _names(b.contents, model_only)
    for name in dict.fromkeys([*names_a, *names_b]):
        of_a, of_b = names_a.get(name), names_b.get(name)
        if of_a is None or of_b is None:
            yield Difference(name, f"is missing in {'A' if of_a is None else 'B'}")
        elif of_a != of_b:
            yield Difference(name, f"is {said(of_a)} in A, {said(of_b)} in B")
        else:
            found = _elements(a, b, name, of_a, rtol, atol, progress, most_bytes)
            if found is not None:
                yield found
    if not model_only:
        yield from _values(dict(a.contents.values), dict(b.contents.values), "")


def said(spec: Spec) -> str:
    """Returns a dtype and a shape, as people read them."""
    return f"{spec.dtype} {list(spec.shape)}"


def _names(contents: Contents, model_only: bool) -> dict[str, Spec]:
    found = dict(contents.tensors)
    found |= {alias: contents.tensors[name] for alias, name in contents.aliases.items()}
    models = tuple(f"{item}/" for item in contents.of_kind("module"))
    return {name: spec for name, spec in found.items() if name.startswith(models)} if model_only else found


def _elements(
    a: Source, b: Source, name: str, spec: Spec, rtol: float, atol: float, progress: Any, most_bytes: int
) -> Difference | None:
    box, dtype = whole(spec.shape), DTYPES[spec.dtype]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    max_abs, max_rel, num = 0.0, 0.0, 0
    for span in spans(box, box, max(most_bytes // 8, 1)) if box.numel else ():
        parts = [torch.empty(span.box.sizes, dtype=dtype) for _ in range(2)]
        a.read_into(name, span.box, parts[0], most_bytes)
        b.read_into(name, span.box, parts[1], most_bytes)
        progress(name, parts[0].nbytes)
        of_a, of_b = (part.flatten().to(wide) for part in parts)
        apart = (of_a - of_b).abs()
        # What is not finite is the same, or differs without end.
        same = (of_a == of_b) | (of_a.isnan() & of_b.isnan())
        if not dtype.is_floating_point and not dtype.is_complex:
            same = (parts[0] == parts[1]).flatten()  # integers of more than 53 bits
            apart = apart.clamp(min=1.0)
        apart = torch.where(same, 0.0, torch.where(apart.isnan(), torch.inf, apart))
        beyond = ~same & ~(apart.isfinite() & (apart <= atol + rtol * of_b.abs()))
        num += int(beyond.sum())
        max_abs = max(max_abs, float(apart.max()))
        relative = torch.where(same, 0.0, apart / of_b.abs())
        max_rel = max(max_rel, float(torch.where(relative.isnan(), torch.inf, relative).max()))
    return Difference(name, f"{num} of {box.numel} elements differ", max_abs, max_rel, num) if num else None


def _values(a: Any, b: Any, path: str) -> Iterator[Difference]:
    """Yields where two trees of JSON differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            below = f"{path}/{key}" if path else str(key)
            if key not in a or key not in b:
                yield Difference(below, f"is missing in {'A' if key not in a else 'B'}")
            else:
                yield from _values(a[key], b[key], below)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for at, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _values(one, other, f"{path}/{at}")
    elif a != b:
        yield Difference(path, f"is {a!r:.60} in A, {b!r:.60} in B")
