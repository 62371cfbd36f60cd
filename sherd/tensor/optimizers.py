"""Our tensors in optimizers: lists that they step, which optimizers step parts instead, state with other placements.

A list may hold ragged tensors, DTensors of torch and plain tensors side by side; each class is computed by itself.

A list of tensors of a class of ours reaches Python once for each operation: 900 tensors add three quarters to the time
of a foreach step. So the second step and later ones compute on this rank's parts (`LocalStep`). Optimizers of other
packages know plain tensors alone. Where each parameter is unsharded on one rank (`Owned`), they get these, from the
first step on.

torch cuts a full state dict into equal chunks (`set_optimizer_state_dict` with `full_state_dict=True`), and a user may
load unsharded tensors. Both are cut like the parameter: when they are loaded, or before the first step at the latest.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from sherd._torch import local_tensor, register_optimizer_step_pre_hook, spec_of, specs_of
from sherd.tensor.local_step import LocalStep, params_of
from sherd.tensor.operands import broadcasts, common_owner, layouts_in, local_of, lone_value, mixed, part_at
from sherd.tensor.placement import Layout, Places, is_ragged, layout_of
from sherd.tensor.ragged import RaggedDTensor, as_result, local_part
from sherd.tensor.sharded import OwnDTensor, ShardedDTensor, by_torch, places_at, sharded_dtensor
from sherd.tensor.state_kind import StateKind, elementwise_keys, state_kind
from sherd.tensor.table import RAGGED, SHARDED, Args, Aten, Kwargs, first_list, is_in_place, is_list_of_tensors

OnLists = Callable[[Aten, Args, Kwargs], object]
ON_LISTS = ("_foreach_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


@SHARDED.answers(*ON_LISTS)
@RAGGED.answers(*ON_LISTS)
def on_lists(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Compute on the lists of this rank's shards. Results have the places of the first list."""
    if is_in_place(func):
        torch.autograd.graph.increment_version(first_list(args))
    return by_kind(_on_parts, func, args, kwargs)


def by_kind(answer: OnLists, func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Let `answer` compute the parts of the lists that are of one class of ours, and torch the rest."""
    first = first_list(args)
    if len(set(map(type, first))) == 1 and isinstance(first[0], OwnDTensor):
        return answer(func, args, kwargs)
    classes = [_class_of(tensor) for tensor in first]
    results: dict[int, torch.Tensor] = {}
    answers: Any
    for tensor_class in (RaggedDTensor, ShardedDTensor, DTensor, torch.Tensor):
        chosen = [index for index, other in enumerate(classes) if other is tensor_class]
        if not chosen:
            continue
        pick = partial(_picked, chosen=chosen, length=len(first), is_plain=tensor_class is torch.Tensor)
        picked, named = tuple(map(pick, args)), {key: pick(value) for key, value in kwargs.items()}
        if issubclass(tensor_class, OwnDTensor):
            answers = answer(func, picked, named)
        else:
            for index in chosen if layouts_in(picked, {}) else ():
                for layout in layouts_in(tuple(_picked(each, [index], len(first), False) for each in args), {}):
                    raise mixed(func, layout, first[index])
            answers = by_torch(func, picked, named)
        results |= zip(chosen, answers or (), strict=False)
    return [results[index] for index in range(len(first))] if results else None


def _class_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    if isinstance(tensor, RaggedDTensor):
        return RaggedDTensor
    return type(tensor) if type(tensor) in (ShardedDTensor, DTensor) else torch.Tensor


def _picked(value: object, chosen: list[int], length: int, is_plain: bool) -> object:
    """Returns the chosen items of a list of `length`, and any other value unchanged."""
    if isinstance(value, list | tuple) and len(value) == length:
        return [value[index] for index in chosen]
    # Plain tensors cannot meet a replicated DTensor, only its number.
    one = lone_value(value) if is_plain else None
    return value if one is None else one


def _on_parts(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Compute on lists of this rank's shards, if tensors that meet have the same places."""
    first = first_list(args)
    otherwise = _on_runs if isinstance(first[0], RaggedDTensor) else by_torch
    places = list(map(places_at, first))

    def operand(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            one = lone_value(value)
            return None if one is None else one.reshape(())
        return _parts_at(value, places) if is_list_of_tensors(value) else value

    own_args, own_kwargs = [operand(each) for each in args], {key: operand(each) for key, each in kwargs.items()}
    pairs = zip((*own_args, *own_kwargs.values()), (*args, *kwargs.values()), strict=True)
    if any(own is None and value is not None for own, value in pairs):
        return otherwise(func, args, kwargs)
    results = func(*own_args, **own_kwargs)
    if results is None or is_in_place(func):
        return None
    if any(result.shape != local.shape for result, local in zip(results, map(local_tensor, first), strict=True)):
        return otherwise(func, args, kwargs)  # one value of each tensor
    return [each.around(result) for each, result in zip(first, results, strict=True)]


def _parts_at(values: Sequence[Any], places: Sequence[Places]) -> list[Any] | None:
    """Returns `part_at` of each value. None: the elements of a value are elsewhere."""
    # Equal places are one object, so this comparison of lists is quick.
    classes = set(map(type, values))
    if all(issubclass(each, OwnDTensor) for each in classes) and list(map(places_at, values)) == places:
        return list(map(local_tensor, values))
    if len(values) != len(places):
        return None
    shards = [part_at(value, each) for value, each in zip(values, places, strict=True)]
    return None if any(shard is None for shard in shards) else shards


def _on_runs(func: Aten, args: Args, kwargs: Kwargs) -> Sequence[torch.Tensor] | None:
    """Compute on lists of runs whose tensors have other places than those of the first list."""
    first = first_list(args)
    layouts = [layout_of(spec) for spec in specs_of(first)]

    def operand(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raise mixed(func, layouts[0], value)
        if not is_list_of_tensors(value):
            return value
        return [
            local_tensor(each) if _meets_at_owner(each, layout) else local_of(each, layout, func)
            for each, layout in zip(value, layouts, strict=True)
        ]

    results = func(*map(operand, args), **{key: operand(value) for key, value in kwargs.items()})
    if results is None or is_in_place(func):
        return None
    return [as_result(local, layout) for local, layout in zip(results, layouts, strict=True)]


def _meets_at_owner(value: object, expected: Layout) -> bool:
    """Returns True if `value` is at the owner of the expected layout, and broadcasts to its shape."""
    if not isinstance(value, RaggedDTensor) or not broadcasts(value.shape, expected.shape):
        return False
    return common_owner([layout_of(spec_of(value)), expected]) is not None


# Optimizers that step parts

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers known to treat every element alike. AdamW is an Adam."""

STEPPED = frozenset((*ELEMENTWISE, torch.optim.AdamW))
"""The optimizers that are stepped here. The `step` of a subclass may not treat every element alike."""

_ELEMENTWISE_STEPS = {inspect.unwrap(vars(each)["step"]) for each in ELEMENTWISE}

_locals: weakref.WeakKeyDictionary[Optimizer, LocalStep] = weakref.WeakKeyDictionary()
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def is_elementwise_class(optimizer_class: type[Optimizer]) -> bool:
    """Returns True for a class of `ELEMENTWISE`, and for a subclass of one without a `step` of its own."""
    return inspect.unwrap(optimizer_class.step) in _ELEMENTWISE_STEPS


def _knows_dtensors(optimizer_class: type[Optimizer]) -> bool:
    """Returns True if the steps of a class take DTensors: element by element, ours, and those that take them apart.

    That of torch's LBFGS is one of all parameters, which ranks do not make by themselves.
    """
    is_ours = hasattr(optimizer_class, "spec_of_state") or issubclass(optimizer_class, LBFGS)
    knows = is_ours or is_elementwise_class(optimizer_class)
    return knows or takes_parts(optimizer_class)  # type: ignore[arg-type]  # classes are hashable


@functools.cache
def takes_parts(optimizer_class: type) -> bool:
    """Returns True if a class of another package, or a function that it calls, names DTensors or their methods."""
    own = [each for each in optimizer_class.__mro__ if not each.__module__.startswith(("torch.optim", "builtins"))]
    methods = [inspect.unwrap(each) for one in own for each in vars(one).values() if inspect.isfunction(each)]
    called = [each.__globals__.get(name) for each in methods for name in each.__code__.co_names]
    functions = [*methods, *(each for each in called if inspect.isfunction(each))]
    names = {name for each in functions for name in each.__code__.co_names}
    return not names.isdisjoint(("DTensor", "to_local", "full_tensor", "_local_tensor", "device_mesh"))


class InBlocks(Optimizer):
    """What torchao's optimizers with state in 8 or 4 bits have. Their steps treat every block of state alike."""

    block_size: int

    _new_buffer: Callable[[torch.Tensor, bool], torch.Tensor]
    """Returns state of zeros for a tensor: in blocks, or plain where the tensor is small or no number of blocks."""
    _subclass_zeros: Callable[[torch.Tensor, bool, int], torch.Tensor]
    """Returns state of zeros for a tensor, in blocks."""


def in_blocks(optimizer: object) -> TypeGuard[InBlocks]:
    """Returns whether `optimizer` is one of torchao's or bitsandbytes' that keep their state in blocks."""
    return _is_a(optimizer, "torchao.optim.adam._AdamBase") or of_bitsandbytes(optimizer)


def of_bitsandbytes(optimizer: Any) -> bool:
    """Returns whether `optimizer` is one of bitsandbytes' whose steps are element-wise but for the blocks."""
    return _is_a(optimizer, "bitsandbytes.optim.optimizer.Optimizer8bit") and not optimizer.args.max_unorm


def _is_a(optimizer: object, name: str) -> bool:
    return name in [f"{each.__module__}.{each.__name__}" for each in type(optimizer).__mro__]


def block_size(optimizer: InBlocks) -> int:
    """Returns the elements of a block. A tensor of bitsandbytes' may end within one."""
    return getattr(optimizer, "block_size", 256)


def has_blocks(optimizer: Any, parameter: torch.Tensor, numel: int) -> bool:
    """Returns whether `optimizer` keeps blocks for a tensor of `numel` elements in the dtype of `parameter`."""
    if of_bitsandbytes(optimizer):
        return bool(optimizer.args.optim_bits == 8 and numel >= optimizer.args.min_8bit_size)
    like = torch.empty(numel, dtype=parameter.dtype, device="meta")
    return type(optimizer._new_buffer(like, True)) is not torch.Tensor


def _warn_of_cut_blocks(optimizer: InBlocks, parameters: Sequence[torch.Tensor]) -> None:
    """Warn if this rank holds a part of a block: the optimizer keeps state of such a shard in full precision."""
    block = block_size(optimizer)
    for parameter in parameters:
        local = local_part(parameter)
        is_part = local.shape != parameter.shape
        is_cut = is_part and (local.numel() % block or (local.ndim > 1 and local.shape[1:] != parameter.shape[1:]))
        if is_cut and has_blocks(optimizer, parameter, parameter.numel()):
            rows = block // math.gcd(block, math.prod(parameter.shape[1:]))
            warnings.warn(
                f"{type(optimizer).__name__}: a block of {block} elements is cut in two where a parameter of shape "
                f"{tuple(parameter.shape)} is sharded, so that its state stays in full precision; shard with "
                f"placement=Blocks({rows})",
                stacklevel=2,
            )
            return


def _is_unsharded_somewhere(parameter: torch.Tensor) -> bool:
    """Returns True if one rank was to have the full parameter, or each rank has it."""
    if not isinstance(parameter, DTensor):
        return True
    if is_ragged(spec_of(parameter)):
        return layout_of(spec_of(parameter)).cut.owned
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return all(each.is_replicate() or size == 1 for each, size in sizes)


def steps_owned(optimizer: Optimizer) -> bool:
    """Returns True if `optimizer` gets unsharded parameters, on the ranks that hold them."""
    return not _knows_dtensors(type(optimizer)) and all(map(_is_unsharded_somewhere, params_of(optimizer)))


def local_step_of(optimizer: Optimizer, has_closure: bool) -> LocalStep | None:
    """Returns what `optimizer` is about to step in the place of its own tensors, with gradients. None: its own.

    Torch's element-wise optimizers step chunks, and so do torchao's with state in few bits. Optimizers that know no
    DTensors step the parameters that this rank holds unsharded, if each is unsharded on some rank.
    """
    parameters, of_owners = params_of(optimizer), type(optimizer) not in STEPPED and not in_blocks(optimizer)
    if not any(isinstance(each, OwnDTensor) for each in parameters):
        return None
    if of_owners:
        if not steps_owned(optimizer):
            return None
    elif has_closure or "_init_group" in vars(optimizer):
        adopt_state(optimizer)
        return None  # a closure makes gradients, and what replaces a method may look at full tensors
    elif optimizer not in _stepped and in_blocks(optimizer):
        _stepped.add(optimizer)
        _warn_of_cut_blocks(optimizer, parameters)
    elif optimizer not in _stepped:  # its first step, which makes the state, is its own
        _stepped.add(optimizer)
        _part_counts(optimizer)
        return None
    local = _locals.get(optimizer)
    if local is None or not local.is_of(optimizer):
        adopt_state(optimizer)
        local = _locals[optimizer] = LocalStep(optimizer, of_owners)
    return local if local.take_gradients() else None


# State with other placements than its parameter

_adopted: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def adopt_state(optimizer: Optimizer) -> None:
    """Cut the state of sharded parameters as the parameters are cut. All ranks must call it, as it may gather.

    DTensors of torch, as files bring them, become ours. The state of a scalar, which torch leaves plain, becomes a
    DTensor with a copy on every rank, like the scalar. So does a plain tensor of the shape of this rank's part, which a
    user has put in their place, under an optimizer that is known to keep no such state itself.
    """
    from sherd.tensor.relayout import laid_out  # seldom needed, so loaded late: tests/test_storeys.py

    _part_counts(optimizer)
    states = [(parameter, state) for parameter, state in optimizer.state.items() if isinstance(parameter, DTensor)]
    elementwise, keeps_parts = elementwise_keys(states), takes_parts(type(optimizer))  # type: ignore[arg-type]
    for parameter, state in states:
        layout = layout_of(spec_of(parameter)) if isinstance(parameter, RaggedDTensor) else None
        part = local_tensor(parameter)
        for key, value in state.items():
            kind = state_kind(key, value, parameter.shape, None, elementwise)
            if kind not in (StateKind.ELEMENTS, StateKind.OTHER) or isinstance(value, RaggedDTensor):
                continue
            own = parameter if isinstance(parameter, OwnDTensor) and not isinstance(value, DTensor) else None
            if own is not None and value.ndim and value.shape == part.shape and type(optimizer) in STEPPED:
                state[key] = own.around(value)
            elif own is not None and kind is StateKind.OTHER and keeps_parts:
                continue  # of this rank's part
            elif layout is not None:
                state[key] = _cut(value, layout)
            elif type(value) is DTensor:
                state[key] = sharded_dtensor(local_tensor(value), spec_of(value))
            elif own is not None and kind is StateKind.ELEMENTS and not parameter.ndim:
                state[key] = sharded_dtensor(value, spec_of(parameter))
            elif own is not None and kind is StateKind.ELEMENTS and value.shape != part.shape:
                state[key] = laid_out(value, spec_of(parameter), part.device)


def _part_counts(optimizer: Optimizer) -> None:
    """Give each parameter a count of steps of its own, where the shards of a span that was stepped share one."""
    states = (state for parameter, state in optimizer.state.items() if torch.is_tensor(parameter))
    num_users = Counter(id(value) for state in states for value in state.values() if torch.is_tensor(value))
    for parameter in params_of(optimizer):
        state = optimizer.state.get(parameter, {})
        shared = {key: value.clone() for key, value in state.items() if num_users[id(value)] > 1}
        if shared:  # Another dict, so that a span notices it, and is made again where it is stepped again.
            optimizer.state[parameter] = {**state, **shared}


def _cut(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns state of the parameter's shape cut like the parameter; state of another shape is cut at an owner only."""
    shape = tuple(value.shape)
    is_elsewhere = isinstance(value, DTensor) and value.device_mesh != layout.mesh
    if is_elsewhere or not (shape == layout.shape or (shape and layout.owner is not None)):
        return value
    from sherd.tensor.relayout import laid_out

    cut = layout.cut if shape == layout.shape else layout.owned_cut(shape)
    return laid_out(value, layout.like(cut).spec(value.dtype), value.device)


def _adopt_once(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if optimizer not in _adopted:
        _adopted.add(optimizer)
        optimizer.register_load_state_dict_post_hook(adopt_state)
        adopt_state(optimizer)


register_optimizer_step_pre_hook(_adopt_once)
