"""The moments of a step in words, for tables and messages."""

from __future__ import annotations

from collections.abc import Sequence

from sherd.schedule.actions import (
    AfterBackward,
    AfterForward,
    BeforeBackward,
    BeforeForward,
    EndBackward,
    EndForward,
    GradientsReady,
    GroupPassed,
)
from sherd.schedule.moments import Arrival, Moment


def in_words(moment: Moment | None, names: Sequence[str]) -> str:
    """Returns `moment` in words, as "when forward ends". `names` are those of the units."""
    match moment:
        case None:
            return "at rest"
        case BeforeForward(unit, recomputing):
            return f"when {'recomputing' if recomputing else 'forward'} of {names[unit]} begins"
        case AfterForward(unit):
            return f"when forward of {names[unit]} ends"
        case EndForward():
            return "when forward ends"
        case BeforeBackward(unit):
            return f"when backward reaches {names[unit]}"
        case Arrival(unit) | GroupPassed(unit):
            return f"when a gradient of {names[unit]} arrives"
        case GradientsReady(unit) | AfterBackward(unit):
            return f"when gradients of {names[unit]} are reduced"
        case EndBackward():
            return "when backward ends"
        case _:
            return "between steps"
