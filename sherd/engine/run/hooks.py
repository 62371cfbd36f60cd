"""Module calls and autograd, turned into calls of the runtime.

    where                         hook                                    what the runtime hears
    module call                   forward pre-hook, first of all          enter
    module return, or raise       forward hook, always called             leave
    first node behind an output   prehook on its grad_fn                  before_backward
    a node reads what was saved   hook on saved tensors (saved.py)        before_backward, if that was not said, or the
                                                                          parameter was freed since
    node that made an input       prehook on its grad_fn                  after_backward
    a parameter's gradient        post-accumulate hook (gradients.py)     before_backward, likewise; gradients complete
    end of backward               engine callback (runtime.py)            end of backward

No autograd Function is put around the user's tensors: it would forbid in-place operations on them. A prehook on
`(t._base or t).grad_fn` also survives a user's in-place change of `t`.

The node that made an input runs after every node of the unit: autograd takes ready nodes in the reverse order of their
making.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from sherd._torch import are_transforms_active, beneath_transforms, dynamo_disabled
from sherd.engine.moves.saved import source_of, with_own_memory
from sherd.engine.run.runtime import Runtime
from sherd.engine.run.sharded_access import explain
from sherd.engine.run.unit import Unit
from sherd.errors import CommError
from sherd.tensor.structures import map_tensors, tensors_held_by, tensors_in

_BORDERS = "sherd_borders"
"""In an autograd node's metadata: a list of `_Border`."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())).union(Unit.ATTRIBUTES)
"""Parameters, buffers, hooks, and ours: nothing that a forward has left on a module."""

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def install(unit: Unit, modules: Sequence[nn.Module]) -> None:
    """Hook the unit's `modules` for forward and backward."""
    for module in modules:
        # Disabled for Dynamo here and not inside: a compiled block must find no Python of ours to trace
        # (test_blocks_compile_as_one_graph_each).
        module.register_forward_pre_hook(eager(before_forward, unit), prepend=True, with_kwargs=True)
        module.register_forward_hook(eager(after_forward, unit), always_call=True)


class Eager(functools.partial[Any]):
    """A hook that `eager` has made. It is called in C, and a deep copy shares it, as it does a function."""

    def __deepcopy__(self, memo: object) -> Eager:
        return self


def eager(function: Callable[..., Any], unit: Unit | weakref.ref[Unit]) -> Callable[..., Any]:
    """`function` of `unit` as a hook that Dynamo does not trace."""
    return Eager(dynamo_disabled(function), unit)


class BoundForward:
    """A method run as a forward. It finds its module weakly: the module holds it. A function that is not bound to the
    module, a static method say, is called without it.

    Dynamo must not trace the call: the user's method has this object's place on the module, and Dynamo, which knows
    methods by their places, would call this one again (`test_a_method_run_as_a_forward_may_be_compiled`).
    """

    def __init__(self, unit: Unit, module: nn.Module, method: Callable[..., Any]) -> None:
        self._unit = unit
        self._module = weakref.ref(module)
        self._takes_module = inspect.ismethod(method) and method.__self__ is module
        self._function: Any = getattr(method, "__func__", method) if self._takes_module else method
        functools.update_wrapper(self, self._function)

    def of_copy(self, unit: Unit, module: nn.Module) -> BoundForward:
        """Returns the same for `module`, a copy of this one's module, and its `unit`."""
        return BoundForward(unit, module, self._function.__get__(module) if self._takes_module else self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the method returns. The unit is unsharded while it runs."""
        module = self._module()
        assert module is not None, "called through the module"
        method = self._function.__get__(module) if self._takes_module else self._function
        args, kwargs = before_forward(self._unit, module, args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        except BaseException:
            after_forward(self._unit, module, args, None)
            raise
        return after_forward(self._unit, module, args, output)


# Forward


def before_forward(unit: Unit, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """A forward of `module`, one of the unit's, begins. Returns its arguments as the unit's policies want them."""
    runtime = Runtime.over(unit)
    if runtime is None or unit.id in runtime.guests:
        runtime = Runtime.of(unit, module)
    call = runtime.enter(unit, module)
    if call.outermost and unit.mesh.device.type != "cpu":
        args, kwargs = map_tensors(functools.partial(_to_device, unit.mesh.device), (args, kwargs))
    precision = unit.precision
    if (
        precision.param_dtype is not None
        and precision.casts_inputs(is_root=runtime.root is unit)
        and not unit.in_full_precision
    ):
        args, kwargs = map_tensors(functools.partial(_cast, precision.param_dtype), (args, kwargs))
    if call.opens_run and torch.is_grad_enabled():
        inputs = _inputs_in(args, kwargs)
        if [tensor for tensor in inputs if tensor.requires_grad and tensor.is_leaf]:
            args, kwargs = map_tensors(_not_a_leaf, (args, kwargs))
            inputs = _inputs_in(args, kwargs)
        _watch_inputs(runtime, unit, inputs)
    return args, kwargs


def after_forward(unit: Unit, module: nn.Module, args: Args, output: Any) -> Any:
    """A forward of `module` has ended, or raised. Returns its output as the unit's policies want it."""
    is_viewed, is_tensor = True in [weights.is_viewed for weights in unit.weights], isinstance(output, torch.Tensor)
    output = with_own_memory(output) if is_tensor else map_tensors(with_own_memory, output)
    differentiable = torch.is_grad_enabled()
    error = sys.exc_info()[1]
    is_in_use = is_viewed and _keeps_view(unit, output)
    runtime = Runtime.over(unit)
    if runtime is None:
        return output
    try:
        returned = runtime.leave(module, differentiable, is_in_use)
    except CommError:
        if not isinstance(error, CommError):
            raise
        # What was under way cannot be finished either, which the first error says. From here torch would warn of it.
        returned = False
    if not returned:
        explain(error, runtime.units)
        return output
    if unit.precision.output_dtype is not None:
        output = map_tensors(functools.partial(_cast, unit.precision.output_dtype), output)
    if differentiable:
        _watch_outputs(runtime, unit, [output] if is_tensor else tensors_in(output, in_any_object=True))
    return output


def _inputs_in(args: Args, kwargs: Kwargs) -> Sequence[torch.Tensor]:
    """Returns the tensors among a forward's arguments."""
    if not kwargs:
        for value in args:
            if not isinstance(value, torch.Tensor):
                break
        else:
            return args  # as most are, which need not be walked through
    return tensors_in((args, kwargs))


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def _is_view(unit: Unit, tensor: torch.Tensor) -> bool:
    """Returns whether `tensor` is a view of one of the unit's unsharded parameters, and not one of them."""
    source = source_of(tensor)
    owner = None if source is None else source()
    return any(owner is weights and not weights.is_parameter(tensor) for weights in unit.weights)


def _keeps_view(unit: Unit, output: Any) -> bool:
    """Returns whether a view of the unit's parameters has outlived its forward, in what was returned or on a module."""
    modules = (part for each in unit.modules for part in each.modules())
    attributes = [value for part in modules for name, value in vars(part).items() if name not in _OF_EVERY_MODULE]
    found = any(_is_view(unit, tensor) for tensor in tensors_held_by(output, attributes))
    if found:
        warnings.warn(
            f"a view of a parameter of unit {unit.name} is still there after its forward, inside of an object that was "
            "returned or on a module, so the unit stays unsharded until backward is done; return or keep a clone() "
            "of it",
            stacklevel=2,
        )
    return found


def _to_device(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


# Backward


_Border = tuple[Unit, bool, Runtime]
"""A point where a tensor comes out of a unit, or goes into it: the unit, whether it comes out, and the runtime."""


def _watch_outputs(runtime: Runtime, unit: Unit, outputs: Iterable[torch.Tensor]) -> None:
    """Tell the runtime when backward reaches the first node behind one of `outputs`, those of `unit`."""
    for node in _nodes_of(outputs):
        _borders_of(node).append((unit, True, runtime))


def _watch_inputs(runtime: Runtime, unit: Unit, inputs: Iterable[torch.Tensor]) -> None:
    """Tell the runtime when backward has passed all of `unit`: when it reaches a node that made one of the inputs."""
    for node in _nodes_of(inputs):
        borders = _borders_of(node)
        # An output of the unit itself that it is given again: backward has not passed it there.
        if not [its for its, is_output, _ in borders if is_output and its is unit]:
            borders.append((unit, False, runtime))


def _borders_of(node: Any) -> list[_Border]:
    """The borders of units that the result of `node` has crossed in forward. Backward crosses them in reverse: it has
    passed the unit that took the result, before it reaches the one that gave it, and may be the same.

    All ranks must reduce and gather in one order, also where one has used none of a unit's parameters:
    test_ranks_may_use_none_of_a_unit_while_others_use_all_of_it.
    """
    metadata = node.metadata
    if _BORDERS in metadata:
        borders: list[_Border] = metadata[_BORDERS]
    else:
        borders = metadata[_BORDERS] = []

        def reached(_: Any, borders: list[_Border] = borders) -> None:
            for unit, is_output, runtime in reversed(borders):
                now = Runtime.over(unit) or runtime  # a root may have taken the unit over since
                (now.before_backward if is_output else now.after_backward)(unit)

        node.register_prehook(reached)
    return borders


def _not_a_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a leaf: an input whose gradient is asked for, a detached input of a reentrant checkpoint.

    A leaf has no node whose turn comes after the unit's: autograd gives it its gradient as soon as that is known, when
    the unit's parameters may still be read (`test_an_input_may_be_a_leaf`). The view has one.
    """
    return tensor.view_as(tensor) if tensor.requires_grad and tensor.is_leaf else tensor


def _nodes_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The distinct autograd nodes that made `tensors`."""
    nodes: dict[Any, None] = {}
    for tensor in beneath_transforms(tensors) if are_transforms_active() else tensors:
        if tensor.requires_grad:
            # A base outside autograd has no node: the view was made a result by a custom Function, or by DTensor.
            node = (None if tensor._base is None else tensor._base.grad_fn) or tensor.grad_fn
            if node is not None:
                nodes[node] = None
    return list(nodes)
