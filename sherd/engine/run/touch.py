"""Calls of a module inside of a unit, by itself, while the unit is sharded. The policy `on_touch` decides.

    model.embed(tokens)         the weight belongs to the unit of `model`, whose forward does not run

    on_touch="error"            raises; torch's DTensor would raise without a name, or compute something else
    on_touch="unshard"          runs the call as a forward of the unit
    on_touch="ignore"           leaves the call to torch

A forward pre-hook on the inner modules notices such calls. The hook is installed only while the unit is at rest
(`Unit.touch_hooks`): it comes and goes by a write into a dict, so it costs nothing in forward and backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import in_backward, users_frame, users_line
from sherd.engine.moves.saved import is_running
from sherd.engine.run.hooks import Args, Kwargs, after_forward, before_forward, eager
from sherd.engine.run.unit import Unit
from sherd.engine.state.parameter import ShardedParameter, record_of
from sherd.errors import ShardedAccessError
from sherd.schedule.state import Live
from sherd.tensor.sharded import OwnDTensor
from sherd.tensor.structures import tensors_in


def install(unit: Unit, modules: Sequence[nn.Module]) -> None:
    """Hook those of `modules`, the unit's own and all below, that the unit's policy is about.

    With "error" these are the inner modules with parameters of their own; with "unshard" also the modules around them,
    so that one call gathers once.
    """
    on_touch = unit.policy.on_touch
    if on_touch == "ignore":
        return
    known = {id(hooks) for hooks, _, _ in unit.touch_hooks} | {id(own._forward_pre_hooks) for own in unit.modules}
    holders = {id(module) for module in modules if any(_records_on(module))}
    for module in modules:
        if on_touch == "error":
            is_concerned = id(module) in holders
        else:
            is_concerned = any(id(inner) in holders for inner in module.modules())
        if is_concerned and id(module._forward_pre_hooks) not in known:
            # The unit holds the hook, so the hook holds the unit weakly.
            hook = eager(_refuse if on_touch == "error" else _gather, weakref.ref(unit))
            handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            registered: Any = module._forward_pre_hooks  # declared as a dict; it is ordered
            unit.touch_hooks.append((registered, handle.id, hook))


def _records_on(module: nn.Module) -> Iterator[ShardedParameter]:
    for attribute, parameter in module._parameters.items():
        # A member of a flat parameter is a plain attribute.
        shown = module.__dict__.get(attribute) if parameter is None else parameter
        record = None if shown is None else record_of(shown)
        if record is not None:
            yield record


def _refuse(touched: weakref.ref[Unit], module: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Raise `ShardedAccessError` if `module`, which shows shards, is about to compute with plain tensors."""
    unit = touched()
    if unit is None or all(isinstance(each, DTensor) for each in tensors_in((args, kwargs))):
        return
    sharded = [record for record in _records_on(module) if any(place.shows(record.shard) for place in record.places)]
    if not sharded:
        if any(isinstance(each, OwnDTensor) and record_of(each) is None for each in module._parameters.values()):
            raise ShardedAccessError(
                f"{type(module).__name__}, a deep copy of a module inside of unit {unit.name}, was called at "
                f"{users_line(sys._getframe())}: it has shards of the unit's parameters, but no unit gathers them. "
                "Copy the full unit; or make each parameter of the copy a Parameter of its full_tensor(), on all ranks"
            )
        return
    method = _method_around(module)
    within = remedy = ""
    if method is not None:
        within = f", in {method}(),"
        remedy = f"call register_fsdp_forward_method(module, {method.rpartition('.')[2]!r}) once; or "
    raise ShardedAccessError(
        f"{type(module).__name__}, a module inside of unit {unit.name}, was called at "
        f"{users_line(sys._getframe())}{within} outside of the unit's forward, while its parameters are "
        f'sharded: {", ".join(each.name for each in sharded)}. Pass on_touch="unshard" where the unit is made, which '
        f"has such calls gather it; or {remedy}call module.unshard() before and module.reshard() after; or, for values "
        "without gradients, call it inside `with sherd.unsharded(module)`"
    )


def _method_around(module: nn.Module) -> str | None:
    """Returns "class.method" of the outermost running method, but forward, of a module around `module`; else None."""
    method = None
    frame = users_frame(sys._getframe())
    while frame is not None:
        caller, name = frame.f_locals.get("self"), frame.f_code.co_name
        if isinstance(caller, nn.Module) and name != "forward" and any(inner is module for inner in caller.modules()):
            method = f"{type(caller).__name__}.{name}"
        frame = users_frame(frame.f_back)
    return method


def _gather(touched: weakref.ref[Unit], module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Run the call of `module` as a forward of its unit, unless a forward or backward of the unit is under way."""
    unit = touched()
    if unit is None or is_running(unit.backward) or (in_backward() and unit.live is Live.UNSHARDED):
        return None
    if not any(True for each in module.modules() for _ in _records_on(each)):
        return None  # the module shows copies that are lent, or values of `functional_call`
    is_over = False

    def ended(unit: Unit, module: nn.Module, args: Args, output: Any) -> Any:
        nonlocal is_over
        if output is not None:  # else the call may have raised: torch iterates over the hooks then
            handle.remove()
        if is_over:
            return output
        is_over = True
        return after_forward(unit, module, args, output)

    handle = module.register_forward_hook(eager(ended, unit), always_call=True)
    return before_forward(unit, module, args, kwargs)
