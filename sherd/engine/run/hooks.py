"""Module calls and autograd, turned into calls of the runtime.

    where                         hook                                    call of the runtime
    module call                   forward pre-hook, first of all          enter
    module return, or raise       forward hook, always called             leave
    first node behind an output   prehook on its grad_fn                  before_backward
    a node reads what was saved   hook on saved tensors (saved.py)        before_backward, unless it was called and the
                                                                          parameter is still alive
    node that made an input       prehook on its grad_fn                  after_backward
    a parameter's gradient        post-accumulate hook (gradients.py)     before_backward as above; gradients complete
    end of backward               engine callback (runtime.py)            end of backward

No autograd Function is put around the user's tensors: it would forbid in-place operations on them. A prehook on
`(t._base or t).grad_fn` also survives a user's in-place change of `t`.

The node that made an input runs after all nodes of the unit: autograd takes ready nodes in the reverse order of their
creation.
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
"""The key of a list of `_Border` in the metadata of an autograd node."""

_TAKERS = "sherd_takers"
"""The key of a tuple of the units that took the result of an autograd node, the last one last."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())).union(Unit.ATTRIBUTES)
"""The attributes of a module that hold nothing from a forward: parameters, buffers, hooks, and sherd's."""

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def install(unit: Unit, modules: Sequence[nn.Module]) -> None:
    for module in modules:
        # Disabled for Dynamo here and not inside: a compiled block must find no Python of sherd's to trace
        # (test_blocks_compile_as_one_graph_each).
        module.register_forward_pre_hook(eager(before_forward, unit), prepend=True, with_kwargs=True)
        module.register_forward_hook(eager(after_forward, unit), always_call=True)


class Eager(functools.partial[Any]):
    """A hook made by `eager`. It is called in C, and a deep copy shares it like a function."""

    def __deepcopy__(self, memo: object) -> Eager:
        return self


def eager(function: Callable[..., Any], unit: Unit | weakref.ref[Unit]) -> Callable[..., Any]:
    """Returns `function` of `unit` as a hook that Dynamo does not trace."""
    return Eager(dynamo_disabled(function), unit)


class BoundForward:
    """A method of a module, run as if it were the module's forward.

    It holds its module weakly, because the module holds it. A function that is not bound to the module, as a static
    method, is called without it.

    Dynamo must not trace the call: this object is in the place of the user's method, and Dynamo, which knows methods by
    their places, would call this object again (`test_a_method_run_as_a_forward_may_be_compiled`).
    """

    def __init__(self, unit: Unit, module: nn.Module, method: Callable[..., Any]) -> None:
        self._unit = unit
        self._module = weakref.ref(module)
        self._takes_module = inspect.ismethod(method) and method.__self__ is module
        self._function: Any = getattr(method, "__func__", method) if self._takes_module else method
        functools.update_wrapper(self, self._function)

    def of_copy(self, unit: Unit, module: nn.Module) -> BoundForward:
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
    """Begin a forward of `module`. Returns its arguments on the device and in the dtype of the unit."""
    if unit.lent is not None and _computes_with_copies(unit):
        return args, kwargs
    runtime: Runtime | None = unit.sealed_into()  # not `Runtime.over`: a call less
    if runtime is None or unit.id in runtime.external_units:
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
        nodes = _nodes_of(inputs)
        for node in nodes:
            takers = node.metadata[_TAKERS] if _TAKERS in node.metadata else ()  # noqa: SIM401  # `get` is a call
            # A unit that takes it again is computed again by a checkpoint, which counts operations.
            if not takers or unit in takers or runtime.is_running(takers[-1]):
                break
        else:
            if nodes and not are_transforms_active():
                # Other units have taken all of it, and backward comes to these nodes when it is past all of them. By
                # views each unit is reduced and freed by itself: test_units_that_share_an_input_are_freed_one_by_one.
                args, kwargs = map_tensors(_view, (args, kwargs))
                nodes = [tensor.grad_fn for tensor in _inputs_in(args, kwargs) if tensor.requires_grad]
        for node in nodes:
            takers = node.metadata[_TAKERS] if _TAKERS in node.metadata else ()  # noqa: SIM401  # `get` is a call
            if unit not in takers:
                node.metadata[_TAKERS] = (*takers, unit)
            borders = _borders_of(node)
            # Backward is not past the unit where an output of the unit is its input again.
            if not [giver for giver, is_output, _ in borders if is_output and giver is unit]:
                borders.append((unit, False, runtime))
    return args, kwargs


def after_forward(unit: Unit, module: nn.Module, args: Args, output: Any) -> Any:
    """End a forward of `module`, which returned or raised. Returns the output in the unit's `output_dtype`."""
    # Views of parameters lose their memory with the unit: returned tensors are copied, other views keep it unsharded.
    is_viewed, is_tensor = True in [weights.is_viewed for weights in unit.weights], isinstance(output, torch.Tensor)
    output = with_own_memory(output) if is_tensor else map_tensors(with_own_memory, output)
    differentiable = torch.is_grad_enabled()
    error = sys.exc_info()[1]
    if unit.lent is not None and _computes_with_copies(unit):
        dtype = unit.precision.output_dtype
        return output if dtype is None else map_tensors(functools.partial(_cast, dtype), output)
    is_in_use = is_viewed and _keeps_view(unit, output)
    runtime: Runtime | None = unit.sealed_into()
    if runtime is None:
        return output
    try:
        returned = runtime.leave(module, differentiable, is_in_use)
    except CommError:
        if not isinstance(error, CommError):
            raise
        # No collective can be finished any more, which the first error says. torch would only warn of a second one.
        returned = False
    if not returned:
        explain(error, runtime.units)
        return output
    if unit.precision.output_dtype is not None:
        output = map_tensors(functools.partial(_cast, unit.precision.output_dtype), output)
    if differentiable:
        for node in _nodes_of([output] if is_tensor else tensors_in(output, in_any_object=True)):
            _borders_of(node).append((unit, True, runtime))
    return output


def _computes_with_copies(unit: Unit) -> bool:
    """Returns whether a forward of `unit`, which is lent, needs no runtime: copies are shown, without gradients."""
    hides = unit.lent is not None and unit.lent.rank0_only and unit.mesh.shard_rank != 0
    return not (hides or torch.is_grad_enabled())


def _inputs_in(args: Args, kwargs: Kwargs) -> Sequence[torch.Tensor]:
    if not kwargs:
        for value in args:
            if not isinstance(value, torch.Tensor):
                break
        else:
            return args  # the usual case, without a walk
    return tensors_in((args, kwargs))


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def _keeps_view(unit: Unit, output: Any) -> bool:
    """Returns whether `output` or a module holds a view of the unit's parameters after its forward. Warns if so."""
    modules = (inner for module in unit.modules for inner in module.modules())
    attributes = [value for module in modules for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
    for tensor in tensors_held_by(output, attributes):
        source = source_of(tensor)
        owner = None if source is None else source()
        if any(owner is weights and not weights.is_parameter(tensor) for weights in unit.weights):
            warnings.warn(
                f"a view of a parameter of unit {unit.name} is still alive after its forward, inside of an object that "
                "was returned or on a module, so the unit stays unsharded until backward is done; return or keep a "
                "clone() of it",
                stacklevel=2,
            )
            return True
    return False


def _to_device(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


# Backward


_Border = tuple[Unit, bool, Runtime]
"""A point where a tensor leaves a unit or enters it: the unit, True if the tensor leaves it, and the runtime."""


def _borders_of(node: Any) -> list[_Border]:
    """Returns the borders that the result of `node` crosses in forward. Backward crosses them in reverse order.

    So backward passes the unit that took the result before it reaches the unit that gave it, on every rank: all ranks
    must reduce and gather in one order, also where a rank uses none of a unit's parameters
    (test_ranks_may_use_none_of_a_unit_while_others_use_all_of_it).
    """
    metadata = node.metadata
    if _BORDERS in metadata:
        borders: list[_Border] = metadata[_BORDERS]
    else:
        borders = metadata[_BORDERS] = []

        def reached(_: Any, borders: list[_Border] = borders) -> None:
            for unit, is_output, runtime in reversed(borders):
                present: Runtime = (
                    unit.sealed_into() or runtime
                )  # a root may have taken the unit over since the forward
                (present.before_backward if is_output else present.after_backward)(unit)

        node.register_prehook(reached)
    return borders


def _view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad and type(tensor) is torch.Tensor else tensor


def _not_a_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of `tensor` if it is a leaf that requires a gradient, as an input of a reentrant checkpoint does.

    A leaf has no node that runs after the unit's nodes: autograd gives the leaf its gradient as soon as that is known,
    when nodes may still read the unit's parameters (`test_an_input_may_be_a_leaf`). A view has such a node.
    """
    return tensor.view_as(tensor) if tensor.requires_grad and tensor.is_leaf else tensor


def _nodes_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    nodes: dict[Any, None] = {}
    for tensor in beneath_transforms(tensors) if are_transforms_active() else tensors:
        if tensor.requires_grad:
            # A base outside autograd has no node, if a custom Function or DTensor made the view a result.
            node = (None if tensor._base is None else tensor._base.grad_fn) or tensor.grad_fn
            if node is not None:
                nodes[node] = None
    return list(nodes)
