"""`auto_shard`: `fully_shard` on every module that a policy, or else the model's description of itself, chooses."""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from sherd.api.blocks import UnitCall, in_words, repeated_blocks
from sherd.api.fully_shard import Options, fully_shard
from sherd.api.module import FSDPModule, require_module
from sherd.engine import ParameterOwnership, Unit
from sherd.errors import ModuleError, PolicyError, PolicyTypeError
from sherd.wrap import Kwargs, WrapPolicy, choose, is_container, outermost, post_order

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("sherd")


def auto_shard(model: nn.Module, policy: WrapPolicy | None = None, **fully_shard_args: Unpack[Options]) -> FSDPModule:
    """Call `fully_shard` on the modules that `policy` chooses, children before their parents, and on `model` last.

    Args:
        model: what to shard, in place.
        policy: a policy of `sherd.wrap` or torch, or a function `policy(module, recurse, nonwrapped_numel) -> bool`.
            The arguments that a `CustomPolicy` gives a module override `fully_shard_args`. Containers without a forward
            are left out: the unit above shards their modules, unless these are units. None: the model describes itself,
            as Hugging Face's models do. Instances of the classes in `_no_split_modules`, of the model and of models in
            it, are units, and so are the modules that `_fsdp_plan` names: "free_full_weight" means
            `reshard_after_forward=True`, "keep_full_weight" False, unless `fully_shard_args` say otherwise. A plan's
            last norm and `lm_head` are one unit; rules of a plan that match no module have no effect; and a module with
            an embedding whose weight is used outside too (tied to `lm_head`) is left to the root. If a model has
            neither, the units are the blocks that it repeats: the modules in its largest lists of one class
            (`nn.ModuleList`, `nn.Sequential`). A record of the logger "sherd", level INFO, says which.
        fully_shard_args: arguments of `fully_shard`, for every unit.

    Returns:
        `model`.

    Raises:
        PolicyError: no policy, and a model that neither describes itself nor repeats blocks, or whose description names
            an unknown strategy.
        PolicyTypeError: something that is no policy, or an argument that `fully_shard` does not take.
        ModuleError: `model` or a chosen module is sharded already. Other errors are those of `fully_shard`.
    """
    require_module("auto_shard expects a module", model)
    check_arguments(fully_shard_args, "auto_shard")
    arguments: Kwargs = {**fully_shard_args}
    if policy is None:
        units = described(model, arguments)
    else:
        chosen = choose(model, policy, ignored_params=arguments.get("ignored_params") or (), root_kwargs=arguments)
        for name, module in post_order(model):
            if module in chosen:
                check_arguments(chosen[module], f"the policy, for {name},")
        units = [UnitCall([module], of_unit) for module, of_unit in chosen.items() if not is_container(module)]
    return shard_units(model, units, arguments)


def shard_units(model: nn.Module, units: Sequence[UnitCall], arguments: Kwargs) -> FSDPModule:
    """Call `fully_shard` for each of `units`, and on `model` last. Raises ModuleError if one is sharded already."""
    # Checked here, since `fully_shard` would raise with half of the model sharded.
    ParameterOwnership.below([model], ())  # raises if torch's own FSDP has a part
    asked = {module for unit in units for module in unit.modules} | {model}
    sharded = [name or "the model" for name, each in model.named_modules() if each in asked and Unit.of(each)]
    if sharded:
        raise ModuleError(
            f"auto_shard would shard {', '.join(sharded)} of {type(model).__name__} again; leave to the policy what is "
            "not sharded yet, or shard by hand alone"
        )
    for unit in units:
        fully_shard(unit.modules, **unit.arguments)
    return fully_shard(model, **arguments)


_TAKES = tuple(name for name in inspect.signature(fully_shard).parameters if name != "module")


def check_arguments(arguments: Mapping[str, object], who: str) -> None:
    """Raise `PolicyTypeError` if `who` gives `fully_shard` an argument that it does not take."""
    unknown = [name for name in arguments if name not in _TAKES]
    if unknown:
        raise PolicyTypeError(
            f"{who} gives fully_shard {', '.join(map(str, unknown))}, which it does not take; it takes "
            f"{', '.join(_TAKES)}"
        )


# A model's description of itself

RESHARDS = {"free_full_weight": True, "keep_full_weight": False}
TAIL = {"norm", "lm_head"}

Rule: TypeAlias = str | tuple[str, ...]
"""A name of modules that are one unit each, or names of modules that are one unit together."""


def described(model: nn.Module, arguments: Kwargs) -> list[UnitCall]:
    """Returns the units that the model's `_fsdp_plan` and `_no_split_modules` describe, or else its repeated blocks."""
    unit_of_module: dict[nn.Module, UnitCall] = {}
    # A plan includes the plans of models inside of its own.
    for owner, plan in outermost(model, lambda module: getattr(module, "_fsdp_plan", None)):
        for planned in _planned(owner, plan, arguments):
            for module in planned.modules:
                unit_of_module.setdefault(module, planned)
    classes = _no_split_classes(model)
    for module in model.modules():
        if classes & {each.__name__ for each in type(module).__mro__}:
            unit_of_module.setdefault(module, UnitCall([module], dict(arguments)))
    unit_of_module.pop(model, None)
    if not unit_of_module and not classes:
        repeated = repeated_blocks(model)
        unit_of_module = {block: UnitCall([block], dict(arguments)) for blocks in repeated.values() for block in blocks}
        if repeated:
            kind = type(model).__name__
            _log.info("auto_shard: %s does not say what its units are: they are %s", kind, in_words(repeated))
    if not unit_of_module:
        if classes:
            lack = f"has no module of the classes in its _no_split_modules ({', '.join(sorted(classes))})"
        else:
            lack = (
                "has no _no_split_modules, no _fsdp_plan that names modules of it, and no list of blocks of one class"
            )
        raise PolicyError(
            f"auto_shard without a policy: {type(model).__name__} {lack}; "
            "say what becomes a unit, as policy=ModuleWrapPolicy({Block}) of sherd.wrap"
        )
    return _bottom_up(model, unit_of_module)


def _bottom_up(model: nn.Module, unit_of_module: dict[nn.Module, UnitCall]) -> list[UnitCall]:
    """Returns each unit once, after the units below its modules, without units that are left to the root."""
    places = Counter(id(each) for module in model.modules() for each in module._parameters.values() if each is not None)
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tied = Counter({key: number for key, number in places.items() if number > 1 and key in embedded})
    waiting = Counter(id(unit) for unit in unit_of_module.values())
    units = []
    for _, module in post_order(model):
        unit = unit_of_module.get(module)
        if unit is None:
            continue
        waiting[id(unit)] -= 1
        if not waiting[id(unit)] and not any(_is_tied_outside(module, tied) for module in unit.modules):
            units.append(unit)
    return units


def _no_split_classes(model: nn.Module) -> set[str]:
    """Returns the names of classes in every `_no_split_modules` at and below `model`."""
    classes: set[str] = set()
    for module in model.modules():
        names = getattr(module, "_no_split_modules", None) or ()
        if isinstance(names, str) or not all(isinstance(each, str) for each in names):
            raise PolicyTypeError(
                f"{type(module).__name__}._no_split_modules is {names!r}; expected a list of names of classes"
            )
        classes.update(names)
    return classes


def _planned(owner: nn.Module, plan: object, arguments: Kwargs) -> list[UnitCall]:
    """Returns the units of one plan: a dict from names below `owner` to strategies.

    In a name `*` stands for a number; a tuple of names is one unit.
    """
    if not isinstance(plan, Mapping):
        raise PolicyTypeError(
            f"{type(owner).__name__}._fsdp_plan is {plan!r}; expected a dict from names to strategies"
        )
    modules = {name: module for name, module in owner.named_modules() if name}
    units: list[UnitCall] = []
    for rule, strategy in _with_one_tail(plan).items():
        if strategy not in RESHARDS:
            raise PolicyError(
                f"{type(owner).__name__}._fsdp_plan asks for {strategy!r} for {rule}; sherd knows "
                f"{' and '.join(RESHARDS)}. Correct the plan, or pass a policy"
            )
        of_unit = {"reshard_after_forward": RESHARDS[strategy], **arguments}
        if isinstance(rule, tuple):
            together = [module for name in rule for module in _matching(name, modules)]
            units += [UnitCall(together, of_unit)] if together else []
        else:
            units += [UnitCall([module], dict(of_unit)) for module in _matching(rule, modules)]
    for module in (module for unit in units for module in unit.modules if is_container(module)):
        (name,) = (name for name, below in owner.named_modules() if below is module)
        raise PolicyError(
            f"{type(owner).__name__}._fsdp_plan names {name}, a {type(module).__name__}, which has no forward to "
            f"gather parameters for; name what is in it, as {name}.*, or pass a policy"
        )
    return units


def _with_one_tail(plan: Mapping[Rule, str]) -> dict[Rule, str]:
    """Returns `plan` with the last norm and the head as one rule, if the plan keeps both."""
    # Norm and head run one after the other, so that one gather serves both.
    kept = [rule for rule, strategy in plan.items() if strategy == "keep_full_weight" and isinstance(rule, str)]
    if len(kept) != len(TAIL) or {rule.rpartition(".")[2] for rule in kept} != TAIL:
        return dict(plan)
    norm_first = sorted(kept, key=lambda rule: rule.endswith("lm_head"))
    others = {rule: strategy for rule, strategy in plan.items() if rule not in kept}
    return {**others, tuple(norm_first): "keep_full_weight"}


def _matching(rule: str, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Returns the modules that a plan's rule names: "layers.*" is every numbered module of `layers`."""
    pattern = re.compile(re.escape(rule).replace(r"\*", r"\d+"))
    return [module for name, module in modules.items() if pattern.fullmatch(name)]


def _is_tied_outside(module: nn.Module, places: Counter[int]) -> bool:
    """Returns whether a parameter in `places`, by id, is registered both in `module` and outside."""
    inside = Counter(
        id(each) for below in module.modules() for each in below._parameters.values() if id(each) in places
    )
    return any(number < places[key] for key, number in inside.items())
