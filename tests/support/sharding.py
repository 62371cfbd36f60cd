"""How tests shard a model: by which front end and placement, and what its units are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sherd import Blocks, Flat, FullyShardedDataParallel, Owned, fully_shard
from tests.support.models import Specimen

PLACEMENTS: dict[str, Any] = {"shard": None, "flat": Flat(), "blocks": Blocks(2), "owned": Owned()}
WRAPPERS: dict[str, dict[str, Any]] = {"wrapper": {"use_orig_params": True}, "flat wrapper": {"use_orig_params": False}}
FRONTS = (*PLACEMENTS, *WRAPPERS)
"""Each way to shard: the placements of `fully_shard`, and both forms of the wrapper."""


def units_of(model: Any) -> list[Any]:
    """Returns the units of `model`, bottom up: what its method `units` returns; else its `blocks`, or its children with
    parameters, and then itself."""
    if callable(getattr(model, "units", None)):
        return list(model.units())
    inner = getattr(model, "blocks", None) or model.children()
    return [*(each for each in inner if any(True for _ in each.parameters())), model]


def sharded(
    model: Any,
    front: str = "shard",
    units: list[Any] | None = None,
    *,
    with_: Callable[..., Any] = fully_shard,
    **options: Any,
) -> Any:
    """Shards each unit of `model` in place, and returns the model; under a wrapper that is another module.

    Args:
        front: one of `FRONTS`.
        units: modules, or lists of modules (not under a wrapper), bottom up, the model last; default: `units_of`.
        with_: what shards a unit where `front` is no wrapper.
        options: go to each call of the front end.
    """
    units = units_of(model) if units is None else units
    if front in WRAPPERS:
        options = {**WRAPPERS[front], **options}
        for unit in units[:-1]:
            replace(model, unit, FullyShardedDataParallel(unit, **options))
        return FullyShardedDataParallel(model, **options)
    if PLACEMENTS[front] is not None:
        options = {"placement": PLACEMENTS[front], **options}
    elif isinstance(model, Specimen) and model.placement is not None:
        options = {"shard_placement_fn": model.placement, **options}
    for unit in units:
        with_(unit, **options)
    return model


def replace(root: nn.Module, module: nn.Module, wrapped: nn.Module) -> None:
    """Registers `wrapped` wherever `module` is registered below `root`."""
    for parent in list(root.modules()):
        if parent is not wrapped:
            for name, child in parent._modules.items():
                if child is module:
                    parent._modules[name] = wrapped
