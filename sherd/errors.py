"""The errors that sherd raises, and the Python error that each of them also is.

    SherdError
    ├── ModuleError     ValueError    a module that cannot become a unit: no forward, sharded twice, copied
    ├── UnsupportedError  NotImplementedError  a combination that sherd does not offer
    ├── MeshError       ValueError    a mesh, or an axis of it, that does not fit the request
    ├── PlacementError  ValueError    a parameter that cannot be cut as requested
    │   └── WriteBackError  RuntimeError  a new value with another shape than the parameter
    ├── OwnershipError  ValueError    a parameter that two units would own, or none
    │   └── UnmanagedParameterError   a parameter that was added after sharding, and that every rank would train alone
    ├── PolicyError     ValueError    a choice that means nothing, or that excludes another choice
    │   └── PolicyTypeError  TypeError    a choice of the wrong type
    ├── StateError      RuntimeError  a call at the wrong moment
    │   ├── ShardedAccessError        an operation on unsharded parameters that found shards
    │   └── WrapperStateError  AssertionError, ValueError    a call of a wrapper's method at the wrong moment
    ├── OptimizerError  RuntimeError  an optimizer with parameters that are no longer the model's
    │   └── OptimStateError  AssertionError, ValueError    optimizer state that does not fit the model
    ├── GradientError   RuntimeError  a gradient that cannot be reduced
    ├── CheckpointError RuntimeError  a checkpoint that cannot be written or read
    │   ├── NoCheckpointError FileNotFoundError  a folder without a complete checkpoint
    │   └── StorageError              storage that fails, so it is unknown which checkpoints are complete
    │       └── ScratchError          a folder for scratch files that cannot be used, is full or has failed
    ├── ClusterError    ValueError    a cluster file that cannot be read, or with a wrong entry
    ├── InputError      ValueError    an unusable argument of the `sherd` command or of `plan`
    ├── MemoryLimitError MemoryError  tensors take more bytes than the user allows
    ├── EquivalenceError AssertionError  a sharded training that differs from the plain training
    └── CommError       RuntimeError  a collective that cannot be finished: a rank has died, or ranks differ
        └── RanksDifferError          ranks have changed a model in different ways

Every message says what is wrong, where (parameter, module, rank), and what to do. Errors that torch's FSDP raises
as ValueError, TypeError or RuntimeError have the same base here, so that `except` clauses keep working after a port.
"""

import difflib
import os
from collections.abc import Iterable, Sequence
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
    "ScratchError",
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
    """The base of all errors of sherd. The text begins with the rank if the variable RANK is set, as by torchrun."""

    _names_rank: ClassVar[bool] = True
    """False for an error that one rank reports for all ranks."""

    def __str__(self) -> str:
        rank = os.environ.get("RANK")
        return super().__str__() if rank is None or not self._names_rank else f"[rank {rank}] {super().__str__()}"


class ModuleError(SherdError, ValueError):
    """A module that cannot become a unit."""


class MeshError(SherdError, ValueError):
    """A device mesh, or an axis of it, that does not fit the request."""


class PlacementError(SherdError, ValueError):
    """A parameter that cannot be cut as requested."""


class WriteBackError(PlacementError, RuntimeError):
    """A new value with another shape than the parameter: a RuntimeError in FSDP1."""


class OwnershipError(SherdError, ValueError):
    """A parameter that two units would own, or none."""


class UnmanagedParameterError(OwnershipError):
    """A trainable parameter that was added after sharding: no unit has it, and every rank would train its own."""


class PolicyError(SherdError, ValueError):
    """A choice that means nothing, or that excludes another choice."""


class PolicyTypeError(PolicyError, TypeError):
    """A choice of the wrong type."""


class StateError(SherdError, RuntimeError):
    """A call at the wrong moment."""


class ShardedAccessError(StateError):
    """An operation on unsharded parameters that found shards."""


class WrapperStateError(StateError, ValueError, AssertionError):
    """A call of a wrapper's method at the wrong moment. FSDP1 raises a ValueError or AssertionError; this is both."""


class UnsupportedError(SherdError, NotImplementedError):
    """A combination of choices that sherd does not offer."""


class OptimizerError(SherdError, RuntimeError):
    """An optimizer with parameters that are no longer the model's."""


class OptimStateError(OptimizerError, ValueError, AssertionError):
    """Optimizer state that does not fit the model or optimizer. FSDP1 raises a ValueError or AssertionError."""


class GradientError(SherdError, RuntimeError):
    """A gradient that cannot be reduced."""


class CheckpointError(SherdError, RuntimeError):
    """A checkpoint that cannot be written or read: a file is missing, damaged, or of another content than expected."""

    _names_rank = False


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """A folder in which no save has ended, so that a run starts from the beginning."""


class StorageError(CheckpointError):
    """Storage that fails, so that it is unknown which checkpoints are complete.

    No older checkpoint is loaded instead, and a run does not start again. Try again once the storage answers.
    """


class ScratchError(StorageError):
    """A folder for scratch files, `Disk(path)`, that cannot be used, is full, or has failed. No checkpoint is there."""

    _names_rank = True


class ClusterError(SherdError, ValueError):
    """A cluster file that cannot be read, or with a wrong entry. The message is one line."""

    _names_rank = False


class InputError(SherdError, ValueError):
    """An unusable argument of the `sherd` command or of `plan`.

    The message is one line: the command prints the line and exits with 2.
    """

    _names_rank = False


class MemoryLimitError(SherdError, MemoryError):
    """Tensors take more bytes than the limit of `sherd.explain_memory` allows."""


class EquivalenceError(SherdError, AssertionError):
    """A sharded training that differs from the plain training: `verify_equivalence(...).require()`."""

    _names_rank = False


class CommError(SherdError, RuntimeError):
    """A collective that cannot be finished: a rank has died, or ranks asked for different things."""


class RanksDifferError(CommError):
    """Ranks have changed a model in different ways. All ranks raise the error, with one text."""

    _names_rank: ClassVar[bool] = False


def reason_of(error: BaseException) -> str:
    """Returns the first line of an error's text, with the next line after a colon; the class's name without a text."""
    reason = ""
    for line in str(error).split("\n"):
        reason = f"{reason} {line.strip()}".strip()
        if reason and not reason.endswith(":"):
            break
    return reason or type(error).__name__


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", prefix: str = "") -> str:
    """Returns "did you mean X?" with `prefix` and the nearest of the `known` names, or `otherwise` if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {prefix}{near[0]}?" if near else otherwise


def in_short(names: Sequence[str], most: int = 4) -> str:
    """Returns the first `most` of `names` for a message, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
