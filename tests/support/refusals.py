"""What is said where something is refused, for loops over rows of what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NOTHING = "nothing was refused"


def refusal(
    kind: type[Exception] | tuple[type[Exception], ...], action: Callable[..., Any], *args: Any, **kwargs: Any
) -> str:
    """Returns what `kind` says that `action(*args, **kwargs)` raises, so that one `assert` has the words and the row.

    Any other exception goes on; where nothing is raised, `NOTHING` is what is said.
    """
    try:
        action(*args, **kwargs)
    except kind as error:
        return str(error)
    return NOTHING


def one_line(
    kind: type[Exception] | tuple[type[Exception], ...], action: Callable[..., Any], *args: Any, **kwargs: Any
) -> str:
    """Returns the same, which has to be one line."""
    said = refusal(kind, action, *args, **kwargs)
    assert "\n" not in said, said
    return said
