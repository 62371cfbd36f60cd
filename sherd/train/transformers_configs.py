"""The sizes in a config of transformers, and what transformers says of a config that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sherd.errors import reason_of
from sherd.train.config import InputError

__all__ = ["in_one_line", "require_sizes"]

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def require_sizes(config: Any, name: str) -> None:
    """Raise InputError if a size in the config, which is called `name`, is below 1: transformers makes models of some,
    and falls over others."""
    for where, field, value in _sizes(config):
        if value < 1:
            raise InputError(f"{name}: {where}{field} = {value}; expected a whole number from 1 on")


def _sizes(config: Any, where: str = "") -> Iterator[tuple[str, str, int]]:
    """Yields the sizes that configs of transformers have in common, each with the config in it and its own name."""
    for name in _SIZES:
        value = getattr(config, name, None)
        if isinstance(value, int):
            yield where, config.attribute_map.get(name, name), value
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _sizes(getattr(config, name), f"{where}{name}.")


def in_one_line(error: BaseException) -> str:
    """Returns what `error` says."""
    name = "KeyError: " if isinstance(error, KeyError) else ""  # its text is a key, and no more
    return name + reason_of(error)
