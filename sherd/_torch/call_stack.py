"""The call stack: which function of torch calls us, and which line of the user's."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.stateless import _functional_call

if TYPE_CHECKING:
    from torch.distributed.pipelining.stage import _PipelineStageBase

_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["sherd"], contextlib))

MODULE_CALL: CodeType = torch.nn.Module._call_impl.__code__
"""The code that runs a module's hooks and forward, and stays on the stack until both end (private to 2.15)."""


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields `frame`, its caller, and so on up to the thread's first frame."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_users(frame: FrameType) -> bool:
    """Returns whether the code of `frame` is neither sherd's, torch's nor Python's own."""
    return not frame.f_code.co_filename.startswith(_LIBRARIES)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame, from `frame` on, of code that is neither sherd's nor torch's."""
    return next(filter(is_users, frames_from(frame)), None)


def users_line(frame: FrameType | None) -> str:
    """Returns the line of `users_frame` as "file:number"; "" without such a frame."""
    users = users_frame(frame)
    return "" if users is None else f"{users.f_code.co_filename}:{users.f_lineno}"


def users_stacklevel(frame: FrameType) -> int:
    """Returns the `stacklevel` with which what is called in `frame` warns of the line that `users_line` returns."""
    return 2 + len(list(itertools.takewhile(lambda each: not is_users(each), frames_from(frame))))


def users_call(frame: FrameType | None) -> str:
    """Returns the name of the function of sherd's or torch's that `users_frame` calls; "" if it is not known."""
    name, outermost = "", users_frame(frame)
    for inner in frames_from(frame):
        if inner is outermost:
            break
        if inner.f_code.co_filename.startswith(_LIBRARIES[:2]):
            code = getattr(inner.f_code, "co_qualname", inner.f_code.co_name)
            name = name if "<" in code or code.startswith("_") else code  # a decorator's, or one that no program calls
    return name


def in_functional_call() -> bool:
    """Returns whether this thread is inside a `torch.func.functional_call` (private to 2.15)."""
    code = _functional_call.__code__
    return any(frame.f_code is code for frame in frames_from(sys._getframe()))


def asked_by_spec() -> bool:
    """Returns whether the caller of our caller is a `DTensorSpec` that compares its placements as it is made.

    A new spec asks its placements nothing else that could tell a user what to do instead (2.9 to 2.15).
    """
    return sys._getframe(2).f_code.co_name == "_verify_shard_order"


def asked_by_checkpointing(directly: bool = False) -> bool:
    """Returns whether a function of `torch.distributed.checkpoint.state_dict` (`get_state_dict`, ...) calls us.

    The file says which state dict it wants to instances of torch's FSDP only (2.2 to 2.15).

    Args:
        directly: look at the caller of our caller only, not at the entire stack.
    """
    frame = sys._getframe(2)
    frames = [frame] if directly else frames_from(frame)
    return any(frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict" for frame in frames)


STAGES_KEEP_BUFFERS: bool = torch.__version__ < "2.15"  # compared as versions are, not as text
"""Whether a pipeline stage of torch has memory for all that it will receive, and keeps what it has sent, in a step."""


def splitting_stage() -> _PipelineStageBase | None:
    """Returns the pipeline stage that is calling its module, if its schedule splits backward; else None.

    A split backward has one part for inputs and one for parameters. In the second part torch's stage looks for
    unsharded parameters where sherd shows shards. Two stages need no help, and None is returned for them: one that
    takes the module for torch's FSDP does not look, and one with an attribute `shows_whole_parameters` shows them
    itself. A stage tells its module nothing about itself (2.11 to 2.15).
    """
    if (stages := sys.modules.get("torch.distributed.pipelining.stage")) is None:
        return None
    stage = None
    for frame in frames_from(sys._getframe(1)):
        where = frame.f_globals.get("__name__")
        if stage is None and where == stages.__name__:
            stage = frame.f_locals.get("self")
            module = getattr(stage, "submod", None)
            if hasattr(stage, "shows_whole_parameters") or isinstance(module, stages.FSDPModule):
                return None
        elif stage is not None and where == "torch.distributed.pipelining.schedules":
            orders = getattr(frame.f_locals.get("self"), "pipeline_order_with_comms", None)
            if orders is not None:
                parts = {action.computation_type.name for order in orders.values() for action in order}
                return stage if "BACKWARD_WEIGHT" in parts else None
    return None


def defers_reductions() -> bool:
    """Returns whether the caller of our caller is a pipeline schedule in a `step(finalize_gradients=False)` (2.15).

    A schedule tells its stages nothing of it, and then does not have them reduce.
    """
    return not getattr(sys._getframe(2).f_locals.get("self"), "_finalize_gradients", True)
