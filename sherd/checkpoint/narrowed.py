"""A checkpoint's record of what each rank's gradients have lost on the wire, and the number of batches of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sherd.checkpoint.catalog import ModelTensors, without_wrappers
from sherd.checkpoint.encoding import Json
from sherd.comm.failures import own_rank
from sherd.engine import Unit

LOST, BATCHES, LAYOUT = "lost", "batches", "layout"


def json_of(models: Sequence[ModelTensors]) -> Json:
    """Returns how many batches all ranks together have reduced, and whether something was lost."""
    found = list(_narrowings(models))
    batches = (unit.backward.number * _ranks(unit) for unit, *_ in found)
    return {BATCHES: max(batches, default=0), LOST: any(narrowing.lost for *_, narrowing in found)}


def own_of(models: Sequence[ModelTensors]) -> dict[str, dict[str, Any]]:
    """Returns what this rank has lost, by the name of each group's first parameter, with the layout of its rows."""
    lost = {name: {LAYOUT: layout, **each.lost} for _, name, layout, each in _narrowings(models) if each.lost}
    return {LOST: lost} if lost else {}


def load(models: Sequence[ModelTensors], json: Mapping[str, Any], own: Mapping[str, Any] | None, place: str) -> None:
    """Go on from what `json_of` and `own_of` have saved. What was lost under another layout is dropped."""
    is_dropped, of_groups = False, (own or {}).get(LOST, {})
    for unit, name, layout, narrowing in _narrowings(models):
        unit.backward.go_on(json[BATCHES] // _ranks(unit))
        of_group = dict(of_groups.get(name, {}))
        if json.get(LOST) and of_group.pop(LAYOUT, None) != layout:
            of_group, is_dropped = {}, True
        narrowing.go_on({what: each.to(unit.mesh.device) for what, each in of_group.items()})
    if is_dropped and own_rank() == 0:
        warnings.warn(
            f"{place}: what gradients have lost on the wire (Reduction(feedback=True)) is each rank's own, and is "
            "dropped here, on another number of ranks or in another layout: feedback begins again with nothing",
            stacklevel=2,
        )


def _narrowings(models: Sequence[ModelTensors]) -> Iterator[tuple[Unit, str, str, Any]]:
    """Yields each group's unit, the name of its first parameter, the layout of its rows, and what it keeps."""
    for model in models:
        names = {id(record): without_wrappers(name) for name, record in model.records.items()}
        for unit in model.units:
            for gradients in unit.gradients:
                own = [names.get(id(each), each.name) for each in gradients.group.parameters]
                if gradients.narrowing is not None:
                    yield unit, own[0], gradients.layout_of(own), gradients.narrowing


def _ranks(unit: Unit) -> int:
    return unit.mesh.num_shards * unit.mesh.num_replicas
