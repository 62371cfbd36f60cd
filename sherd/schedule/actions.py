"""The events that happen to units, from module calls and from autograd, and the actions that the schedule asks for.

A unit is named by its index in the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

# Events


@dataclass(frozen=True, slots=True)
class BeforeForward:
    """The unit's forward begins. `recomputing`: inside backward, for activation checkpointing."""

    unit: int
    recomputing: bool = False


@dataclass(frozen=True, slots=True)
class AfterForward:
    """The unit's forward ends, or raises. `in_use`: views of its unsharded parameters are still alive."""

    unit: int
    recomputing: bool = False
    in_use: bool = False


@dataclass(frozen=True, slots=True)
class EndForward:
    """The outermost forward ends. `differentiable`: a backward may follow."""

    differentiable: bool = True


@dataclass(frozen=True, slots=True)
class BeforeBackward:
    """Autograd reaches an output of the unit, and needs the unit's parameters."""

    unit: int


@dataclass(frozen=True, slots=True)
class GradientsReady:
    """Each trainable parameter of the unit has its gradient from this backward, on every rank."""

    unit: int


@dataclass(frozen=True, slots=True)
class GroupPassed:
    """One group of the unit has its gradients, others lack theirs. Nothing in this backward reads the group again."""

    unit: int
    group: int


@dataclass(frozen=True, slots=True)
class AfterBackward:
    """Autograd is past the unit: nothing in this backward reads its unsharded parameters again.

    `unreduced`: gradients arrived without a `GradientsReady`, because some ranks may lack others of the unit.
    """

    unit: int
    unreduced: bool = False


@dataclass(frozen=True, slots=True)
class EndBackward:
    """Backward ends. `last`: the user expects no further backward before the optimizer step."""

    last: bool = True


@dataclass(frozen=True, slots=True)
class Unshard:
    """The user asks for the unit's unsharded parameters. Without `wait`, the all-gather is only started."""

    unit: int
    wait: bool = True


@dataclass(frozen=True, slots=True)
class Reshard:
    unit: int


@dataclass(frozen=True, slots=True)
class Reset:
    """A forward or backward is abandoned: back to shards, nothing in flight. `gradients`: drop gradients, too."""

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
    """Start the all-gather of the unit's parameters, but those of the last `left` groups: `GatherMore` follows."""

    unit: int
    left: int = 0


@dataclass(frozen=True, slots=True)
class GatherMore:
    """Go on with a `Gather` that has left groups, until `left` are left."""

    unit: int
    left: int = 0


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the unit's all-gather, and show its unsharded parameters to the modules."""

    unit: int


@dataclass(frozen=True, slots=True)
class Free:
    """Show the shards to the modules, and free the unsharded parameters, after a wait for an all-gather in flight."""

    unit: int


@dataclass(frozen=True, slots=True)
class FreeGroup:
    """As `Free`, for one group of the unit. The next `Gather` of the unit gathers the group again."""

    unit: int
    group: int


@dataclass(frozen=True, slots=True)
class Collect:
    """Copy the gradients of groups of the unit that were freed alone to where a reduction takes them."""

    unit: int


@dataclass(frozen=True, slots=True)
class Shrink:
    """As `Free`, but keep this rank's part for a smaller mesh (`reshard_after_forward=k`)."""

    unit: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start the reduction of the unit's gradients over the ranks."""

    unit: int


@dataclass(frozen=True, slots=True)
class FinishReduce:
    """Wait for the unit's reduction, give the shards their gradients, and drop the buffer that was reduced."""

    unit: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop the unit's gradients that have not reached the shards: arrived, accumulated or in flight."""

    unit: int


Action = Gather | GatherMore | Await | Free | FreeGroup | Collect | Shrink | Reduce | FinishReduce | Discard
