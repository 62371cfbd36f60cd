"""The check that a unit is at rest: nothing runs that needs its shards, or that will write them."""

from __future__ import annotations

from sherd.engine.run.runtime import runtime_over
from sherd.engine.run.unit import Unit
from sherd.errors import StateError


def require_at_rest(unit: Unit, call: str) -> None:
    """Show the shards of `unit` for `call`, the words for what the user has called.

    Raises:
        StateError: an unshard context lends the unit, or a forward or backward is under way.
    """
    if unit.lent is not None:
        raise StateError(f"{call} inside an unshard context that lends unit {unit.name}; leave the context first")
    unit.show_shards()
    runtime = runtime_over(unit)
    if runtime is not None and not runtime.is_idle:
        raise StateError(
            f"{call}: a forward or backward of {runtime.root.name} is under way, or has raised; call it between "
            "steps, or reset_iter_state() first"
        )
