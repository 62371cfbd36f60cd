"""The errors that sherd raises, and the Python error that each of them also is.

    SherdError
    ├── ModuleError     ValueError    a module that cannot become a unit: no forward, sharded twice, copied
    ├── UnsupportedError  NotImplementedError  a combination that means something but is not offered
    ├── MeshError       ValueError    a mesh, or an axis of it, that does not fit what was asked
    ├── PlacementError  ValueError    a parameter that cannot be cut as asked
    │   └── WriteBackError  RuntimeError  a parameter's new value is of another shape than the parameter
    ├── OwnershipError  ValueError    a parameter that two units would own, or none
    │   └── UnmanagedParameterError   one that was added after sharding, and that every rank would train for itself
    ├── PolicyError     ValueError    a choice that means nothing, or that excludes another one
    │   └── PolicyTypeError  TypeError    a choice of the wrong type
    ├── StateError      RuntimeError  a call at a moment when it cannot be served
    │   ├── ShardedAccessError        unsharded parameters were needed where only shards were at hand
    │   └── WrapperStateError  AssertionError, ValueError    such a call of a wrapper's method, as in FSDP1
    ├── OptimizerError  RuntimeError  an optimizer that holds parameters which are no longer the model's
    │   └── OptimStateError  AssertionError, ValueError    optimizer state that does not fit the model
    ├── GradientError   RuntimeError  a gradient that cannot be reduced
    ├── CheckpointError RuntimeError  a checkpoint that cannot be written or read
    │   └── NoCheckpointError FileNotFoundError  a folder without a whole checkpoint
    ├── ClusterError    ValueError    a cluster file that cannot be read, or that holds something wrong
    ├── InputError      ValueError    what a user gave to the `sherd` command or to `plan` cannot be used
    ├── MemoryLimitError MemoryError  tensors take more bytes than the user allows
    ├── EquivalenceError AssertionError  a sharded training that differs from the plain one
    └── CommError       RuntimeError  a collective that cannot be finished: a rank has died, or ranks differ
        └── RanksDifferError          ranks have changed a model in different ways

Every message names what was found, where (parameter, module, rank), and what to do. Errors that torch's FSDP raises
as ValueError, TypeError or RuntimeError are also that here, so `except` clauses keep working after a port.
"""

import os
from typing import ClassVar

__all__ = [
    "CheckpointError",
    "ClusterError",
    "CommError",
    "EquivalenceError",
    "GradientError",
    "InputError",
    "MemoryLimitError",
    "MeshError",
    "ModuleError",
    "NoCheckpointError",
    "OptimStateError",
    "OptimizerError",
    "OwnershipError",
    "PlacementError",
    "PolicyError",
    "PolicyTypeError",
    "RanksDifferError",
    "ShardedAccessError",
    "SherdError",
    "StateError",
    "StorageError",
    "UnmanagedParameterError",
    "UnsupportedError",
    "WrapperStateError",
    "WriteBackError",
]


class SherdError(Exception):
    """The base of all errors of sherd. The text begins with the rank if RANK is set, as torchrun does."""

    _names_rank: ClassVar[bool] = True
    """False for an error that one rank reports for all ranks."""

    def __str__(self) -> str:
        rank = os.environ.get("RANK")
        return super().__str__() if rank is None or not self._names_rank else f"[rank {rank}] {super().__str__()}"


class ModuleError(SherdError, ValueError):
    """A module that cannot become a unit."""


class MeshError(SherdError, ValueError):
    """A device mesh, or an axis of it, that does not fit what was asked."""


class PlacementError(SherdError, ValueError):
    """A parameter that cannot be cut as asked."""


class WriteBackError(PlacementError, RuntimeError):
    """A new value of a parameter that has another shape: a RuntimeError in FSDP1."""


class OwnershipError(SherdError, ValueError):
    """A parameter that two units would own, or none."""


class UnmanagedParameterError(OwnershipError):
    """A trainable parameter that was added after sharding: no unit has it, and every rank would train its own."""


class PolicyError(SherdError, ValueError):
    """A choice that means nothing, or that excludes another one."""


class PolicyTypeError(PolicyError, TypeError):
    """A choice of the wrong type."""


class StateError(SherdError, RuntimeError):
    """A call at a moment when it cannot be served."""


class ShardedAccessError(StateError):
    """Unsharded parameters were needed where only shards were at hand."""


class WrapperStateError(StateError, ValueError, AssertionError):
    """A method of the wrapper at a moment when it cannot be served: a ValueError or AssertionError in FSDP1, so it is
    both here."""


class UnsupportedError(SherdError, NotImplementedError):
    """A combination of choices that is not offered."""


class OptimizerError(SherdError, RuntimeError):
    """An optimizer that holds parameters which are no longer the model's."""


class OptimStateError(OptimizerError, ValueError, AssertionError):
    """Optimizer state that does not fit the model or the optimizer it is for. A ValueError or AssertionError in FSDP1,
    so it is both here."""


class GradientError(SherdError, RuntimeError):
    """A gradient that cannot be reduced."""


class CheckpointError(SherdError, RuntimeError):
    """A checkpoint that cannot be written or read: a file is missing, damaged, or not what it says it is."""

    _names_rank = False


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """A folder without a whole checkpoint, so that a run begins anew."""


class StorageError(CheckpointError):
    """The storage gives errors, so that nobody can tell whether a checkpoint is there and whole. An older one is not
    taken in its place, and a run does not begin anew. Try again once the storage answers."""


class ClusterError(SherdError, ValueError):
    """A cluster file that cannot be read, or that holds something wrong. The message is one line."""

    _names_rank = False


class InputError(SherdError, ValueError):
    """Something that a user gave to the `sherd` command or to `plan`, and that cannot be used. The message is one line:
    the command prints it and exits with 2."""

    _names_rank = False


class MemoryLimitError(SherdError, MemoryError):
    """Tensors take more bytes than the limit of `sherd.explain_memory` allows."""


class EquivalenceError(SherdError, AssertionError):
    """A sharded training that differs from the plain one: `verify_equivalence(...).require()`."""

    _names_rank = False


class CommError(SherdError, RuntimeError):
    """A collective that cannot be finished: a rank has died, or ranks asked for different things."""


class RanksDifferError(CommError):
    """Ranks have changed a model in different ways. All of them raise it, with one text."""

    _names_rank: ClassVar[bool] = False


def reason_of(error: BaseException) -> str:
    """Returns the first line of an error's text, and the next ones as long as a line ends with a colon; of an error
    without text its name."""
    said = ""
    for line in str(error).split("\n"):
        said = f"{said} {line.strip()}".strip()
        if said and not said.endswith(":"):
            break
    return said or type(error).__name__
