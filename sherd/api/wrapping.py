"""The making of a wrapper: modules below are wrapped by a policy, and the module becomes a unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from sherd._torch import is_tensor_parallel
from sherd.api import advice, materialize
from sherd.api.extensions import FSDPExtensions, flattened, has_own, restored
from sherd.api.fsdp1 import Choices
from sherd.api.ignored import Ignored
from sherd.api.placements import rule_of
from sherd.api.state_dicts import FLAT_PARAM
from sherd.api.wrapper_state import WrapperState, find_state
from sherd.comm.mesh import DataMesh
from sherd.engine import Belongings, FlatParameter, ShardingRequest, make_unit
from sherd.errors import PlacementError, PolicyError
from sherd.wrap import WrapPolicy, apply_wraps, check_frozen, check_none_wrapped, choose
from sherd.wrap.walks import Kwargs


def wrap_below(
    module: nn.Module,
    policy: WrapPolicy,
    make: Callable[..., nn.Module],
    choices: Choices,
    mesh: DataMesh,
    ignored: Ignored,
    more: Mapping[str, object],
) -> None:
    """Wrap the modules below `module` that `policy` chooses by `make(module, **kwargs)`; `more` are arguments that
    `choices` do not have.

    Raises:
        ModuleError: a module below is wrapped already.
        PlacementError: an integer parameter, or a flat parameter. Nothing is wrapped then.
        PolicyError: a unit would have trained and frozen parameters in one flat parameter.
    """
    _check_parameters(Belongings.below([module], ignored.parameters), use_orig_params=True)
    check_none_wrapped(module, lambda each: find_state(each) is not None)
    kwargs = {field.name: getattr(choices, field.name) for field in dataclasses.fields(choices)}
    kwargs |= {**more, "ignored_states": ignored.parameters}
    if choices.strategy.is_hybrid and choices.device_mesh is None:
        # One mesh for all, made once; a unit that makes its own would make groups of its own too.
        kwargs.update(process_group=None, device_mesh=mesh.mesh)
    precise = {below for below in module.modules() if isinstance(below, choices.precise_classes)}
    advice.of_precise_modules(precise)
    chosen = choose(
        module,
        policy,
        ignored.modules,
        ignored.parameters,
        kwargs,
        apart=choices.precise_classes,
        apart_kwargs={"mixed_precision": None},
    )
    if not choices.use_orig_params:
        check_frozen(module, chosen, ignored.parameters)

    def wrapped(below: nn.Module, of_unit: Kwargs) -> nn.Module:
        if below in precise:
            materialize.compute_in_full_precision(below)
        return make(below, **of_unit)

    apply_wraps(module, chosen, wrapped)


def make_wrappers_unit(
    wrapper: nn.Module, choices: Choices, extensions: FSDPExtensions, mesh: DataMesh, ignored: Ignored
) -> WrapperState:
    """Make `wrapper` a unit, with a flat parameter unless `use_orig_params`, and cast its buffers.

    Returns:
        The wrapper's record.

    Raises:
        PlacementError: a parameter that cannot be cut.
        PolicyError: parameters that differ in dtype or in `requires_grad`, for a flat parameter.
    """
    cut = choices.placement
    found = Belongings.below([wrapper], ignored.parameters)
    _check_parameters(found, choices.use_orig_params)
    returned = [flattened(extensions, each.parameter, each.name) for each in found.owned]
    unit = make_unit(
        [wrapper],
        found,
        mesh,
        lambda each: ShardingRequest(rule_of(cut, each.parameter), mesh),
        choices.precision,
        choices.offload,
        choices.policy,
    )
    extended = {
        record: extension for record, extension in zip(unit.parameters, returned, strict=True) if extension is not None
    }
    if has_own(extensions, "post_unflatten_transform"):
        for record, extension in extended.items():
            spec = record.unsharded_spec
            assert spec is not None, "only a DTensor is extended"
            record.restore_with(partial(restored, extensions, extension, spec, record.name))
    if found.owned and not choices.use_orig_params:
        unit.flatten(wrapper, FLAT_PARAM)
    return WrapperState(
        unit,
        choices,
        extensions,
        extended,
        buffer_dtypes=materialize.cast_buffers(wrapper, choices, ignored),
        undistributed=[each for each in found.modules if each._parameters and not is_tensor_parallel(each)],
    )


def _check_parameters(found: Belongings, use_orig_params: bool) -> None:
    """Raise for what cannot be cut as one line of numbers."""
    for borrowed in found.borrowed:
        if isinstance(borrowed.place.shown, FlatParameter):
            raise PlacementError(
                f"Cannot flatten a `FlatParameter`: {borrowed.place.attribute} is another wrapper's; leave it there"
            )
    for each in found.owned:
        dtype = each.parameter.dtype
        if isinstance(each.parameter, FlatParameter):
            raise PlacementError(
                f"Cannot flatten a `FlatParameter`: {each.name} is one already; wrap the module it came from only once"
            )
        if not (dtype.is_floating_point or dtype.is_complex):
            raise PlacementError(
                f"Cannot flatten integer dtype tensors: {each.name} is {dtype}; make it a buffer, or put it into "
                "ignored_states"
            )
    if use_orig_params:
        return
    for what, values in (
        ("dtype", {each.name: each.parameter.dtype for each in found.owned}),
        ("`requires_grad`", {each.name: each.parameter.requires_grad for each in found.owned}),
    ):
        if len(set(values.values())) > 1:
            first = next(iter(values))
            other = next(name for name in values if values[name] != values[first])
            raise PolicyError(
                f"Must flatten tensors with uniform {what} when `use_orig_params=False`: {first} has {values[first]}, "
                f"{other} has {values[other]}; pass use_orig_params=True, or wrap them apart"
            )
