"""The words of the schedule: events, which happen to a unit, and actions, which the engine must carry out.

Units are named by their index. Events come from module calls and from autograd.
"""

from __future__ import annotations

from dataclasses import dataclass

# Events


@dataclass(frozen=True, slots=True)
class BeforeForward:
    """The unit's module is about to run; `recomputing` when backward runs it again for activation checkpointing."""

    unit: int
    recomputing: bool = False


@dataclass(frozen=True, slots=True)
class AfterForward:
    """The unit's module has run, or has raised. `in_use`: views of its unsharded parameters are still alive."""

    unit: int
    recomputing: bool = False
    in_use: bool = False


@dataclass(frozen=True, slots=True)
class EndForward:
    """The outermost module's forward has run. `differentiable`: autograd may come back for it."""

    differentiable: bool = True


@dataclass(frozen=True, slots=True)
class BeforeBackward:
    """Autograd has reached an output of the unit: its parameters are needed now."""

    unit: int


@dataclass(frozen=True, slots=True)
class GradientsReady:
    """Every trainable parameter of the unit has its gradient from this backward."""

    unit: int


@dataclass(frozen=True, slots=True)
class GroupPassed:
    """One group of the unit has its gradients, others have not. Nothing will read the group's unsharded parameters
    again in this backward."""

    unit: int
    group: int


@dataclass(frozen=True, slots=True)
class AfterBackward:
    """Autograd is past the unit: nothing will read its unsharded parameters again in this backward.

    `unreduced`: gradients have arrived that no `GradientsReady` announced, because others never came.
    """

    unit: int
    unreduced: bool = False


@dataclass(frozen=True, slots=True)
class EndBackward:
    """Autograd is done. `last`: the user expects no further backward before the optimizer step."""

    last: bool = True


@dataclass(frozen=True, slots=True)
class Unshard:
    """The user asks for the unit's unsharded parameters; `wait` for them too, or only start the all-gather."""

    unit: int
    wait: bool = True


@dataclass(frozen=True, slots=True)
class Reshard:
    """The user asks for the unit's unsharded parameters to be freed, or has written to its shards."""

    unit: int


@dataclass(frozen=True, slots=True)
class Reset:
    """A forward or backward was abandoned: back to shards, nothing in flight. `gradients`: they are lost too."""

    gradients: bool = True


Event = (
    BeforeForward
    | AfterForward
    | EndForward
    | BeforeBackward
    | GradientsReady
    | GroupPassed
    | AfterBackward
    | EndBackward
    | Unshard
    | Reshard
    | Reset
)

# Actions


@dataclass(frozen=True, slots=True)
class Gather:
    """Start the all-gather of the unit's parameters."""

    unit: int


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the unit's all-gather and show its unsharded parameters to the modules."""

    unit: int


@dataclass(frozen=True, slots=True)
class Free:
    """Show the shards to the modules again and free the unsharded parameters; an all-gather in flight is waited for."""

    unit: int


@dataclass(frozen=True, slots=True)
class FreeGroup:
    """As `Free`, but for one group of the unit only. The next `Gather` of the unit brings it back."""

    unit: int
    group: int


@dataclass(frozen=True, slots=True)
class Shrink:
    """As `Free`, but keep this rank's part of them for a smaller mesh (`reshard_after_forward=k`)."""

    unit: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start the reduction of the unit's gradients over the ranks."""

    unit: int


@dataclass(frozen=True, slots=True)
class FinishReduce:
    """Wait for the unit's reduction, give its shards their gradients, drop the buffer that was reduced."""

    unit: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop the unit's gradients that are not yet the shards': arrived, accumulated or in flight."""

    unit: int


Action = Gather | Await | Free | FreeGroup | Shrink | Reduce | FinishReduce | Discard
