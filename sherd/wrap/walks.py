"""The walks over a model that ask a policy which modules become units, put wrappers in their places, and check them."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import nn

from sherd.errors import ModuleError, PolicyError, PolicyTypeError

Kwargs: TypeAlias = dict[str, Any]
Chosen: TypeAlias = dict[nn.Module, Kwargs]
"""The modules that become units, children before their parents, each with the arguments of its unit."""


class _Policy(Protocol):
    """A rule that looks at a whole model: an object with `_run_policy`, torch's own too."""

    @abstractmethod
    def _run_policy(self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs) -> Chosen:
        """Returns the modules below `root_module` that become units, with their arguments, which start from the root's,
        `root_kwargs`. The root and `ignored_modules` need not be looked at."""


WrapPolicy: TypeAlias = "_Policy | Callable[..., bool]"


def choose(
    root: nn.Module,
    policy: WrapPolicy,
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
    root_kwargs: Mapping[str, object] | None = None,
    *,
    apart: Collection[type[nn.Module]] = (),
    apart_kwargs: Mapping[str, object] | None = None,
) -> Chosen:
    """Returns the modules below `root` that `policy` makes units of. Changes nothing.

    Args:
        root: the model; never chosen itself, because the caller makes its unit last.
        policy: an object with `_run_policy` (sherd's or torch's), or a function `policy(module, recurse,
            nonwrapped_numel) -> bool`.
        ignored_modules: these and all below them are not asked about.
        ignored_params: not counted in `nonwrapped_numel`.
        root_kwargs: the arguments each unit starts from; every unit gets a dict of its own.
        apart: classes whose instances become units whatever the policy says, with `apart_kwargs` over all others:
            norms that compute in full precision under mixed precision.

    Returns:
        The chosen modules with their arguments, children before their parents, a shared module once.

    Raises:
        PolicyTypeError: `policy` is neither kind of policy, or returned something of the wrong type.
    """
    ignored = {below for module in ignored_modules for below in module.modules()}
    kwargs = dict(root_kwargs or {})
    apart_modules = {module for module in root.modules() if isinstance(module, tuple(apart))}
    if hasattr(policy, "_run_policy"):
        chosen = _ask_object(root, policy, ignored, kwargs, apart_modules)
    else:
        ignored_ids = {id(parameter) for parameter in ignored_params}
        asking = _Asking(
            root, _checked_function(policy), ignored, ignored_ids, kwargs, apart_modules, looks_everywhere=bool(apart)
        )
        asking.visit(root)
        chosen = asking.chosen
    for module in apart_modules & chosen.keys():
        chosen[module].update(apart_kwargs or {})
    return chosen


def _ask_object(
    root: nn.Module, policy: _Policy, ignored: set[nn.Module], kwargs: Kwargs, apart: set[nn.Module]
) -> Chosen:
    answer = policy._run_policy(root, ignored, dict(kwargs))
    wrong = None if isinstance(answer, Mapping) else f"a {type(answer).__name__}"
    for module, unit_kwargs in () if wrong else answer.items():
        if not isinstance(unit_kwargs, Mapping) or not all(isinstance(name, str) for name in unit_kwargs):
            wrong = wrong or f"{unit_kwargs!r} for a {type(module).__name__}"
    if wrong:
        raise PolicyTypeError(
            f"{type(policy).__name__}._run_policy returned {wrong}; expected a dict from modules to dicts of arguments"
        )
    chosen: Chosen = {}
    for _, module in post_order(root):
        if module is not root and (module in answer or (module in apart and module not in ignored)):
            chosen[module] = dict(answer.get(module, kwargs))
    return chosen


@dataclass
class _Asking:
    """The walk that asks a function policy about every module below `root`.

    Parameters in `ignored_ids` do not count. Modules in `apart` become units in any case; a walk that
    `looks_everywhere` for them also goes below modules that the policy closes. A shared module is asked about once, but
    each parent counts it. Both are so in torch's walk.
    """

    root: nn.Module
    policy: Callable[..., object]
    ignored: set[nn.Module]
    ignored_ids: set[int]
    kwargs: Kwargs
    apart: set[nn.Module]
    looks_everywhere: bool
    chosen: Chosen = field(default_factory=dict)
    _in_units: dict[nn.Module, int] = field(default_factory=dict)

    def visit(self, module: nn.Module) -> int:
        """Choose at and below `module`. Returns the number of its elements that are in units now."""
        if module not in self._in_units:
            self._in_units[module] = self._decide(module)
        return self._in_units[module]

    def _decide(self, module: nn.Module) -> int:
        numel = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in self.ignored_ids)
        if not (self._says(module, True, numel) or self.looks_everywhere):
            return 0
        below = sum(self.visit(child) for child in module.children() if child not in self.ignored)
        if module is self.root or not (self._says(module, False, numel - below) or module in self.apart):
            return below
        self.chosen[module] = dict(self.kwargs)
        return numel

    def _says(self, module: nn.Module, recurse: bool, numel: int) -> bool:
        answer = self.policy(module=module, recurse=recurse, nonwrapped_numel=numel)
        if isinstance(answer, dict):
            raise PolicyTypeError(
                f"a policy function returned {answer!r} for a {type(module).__name__}, expected a bool; "
                "for arguments per module pass CustomPolicy(function), which calls function(module)"
            )
        return bool(answer)


def _checked_function(policy: object) -> Callable[..., object]:
    """Returns `policy`, a function that takes a policy's three arguments."""
    if not callable(policy) or isinstance(policy, type):
        raise PolicyTypeError(
            f"expected a policy, got {policy!r}; pass ModuleWrapPolicy({{Block}}), CustomPolicy(function), or a "
            "function (module, recurse, nonwrapped_numel) -> bool"
        )
    try:
        inspect.signature(policy).bind(module=None, recurse=True, nonwrapped_numel=0)
    except ValueError:  # some callables written in C do not tell their signature
        pass
    except TypeError as error:
        raise PolicyTypeError(
            f"the policy {getattr(policy, '__name__', policy)!r} cannot be called as policy(module=..., recurse=..., "
            f"nonwrapped_numel=...): {error}. Give what else it takes with functools.partial; a function of the module "
            "alone goes into CustomPolicy(function)"
        ) from error
    return policy


def post_order(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module at and below `root` once, with the first of its names, children before their parents."""
    return _post_order("", root, {root})


def _post_order(name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        if child not in seen:
            seen.add(child)
            yield from _post_order(f"{name}.{child_name}" if name else child_name, child, seen)
    yield name, module


def is_container(module: nn.Module) -> bool:
    """Returns whether `module` is a list or dict without a forward. As a unit of its own it would never be gathered."""
    containers = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    return isinstance(module, containers) and type(module).forward is nn.Module.forward


# Doing what was chosen


def apply_wraps(
    root: nn.Module, chosen: Mapping[nn.Module, Kwargs], wrap_fn: Callable[[nn.Module, Kwargs], nn.Module]
) -> None:
    """Call `wrap_fn(module, kwargs)` for each module of `chosen`, children before their parents.

    If it returns another module, that takes every place of `module` below `root`.
    """
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    for _, module in list(post_order(root)):
        if module not in chosen or module is root:
            continue
        wrapped = wrap_fn(module, chosen[module])
        if wrapped is not module:
            for parent, name in places[module]:
                parent.register_module(name, wrapped)


def check_none_wrapped(root: nn.Module, is_wrapped: Callable[[nn.Module], bool]) -> None:
    """Raise ModuleError, with the names, if modules at or below `root` are units already."""
    found = [name for name, module in root.named_modules() if is_wrapped(module)]
    if found:
        raise ModuleError(
            "FSDP auto wrapping requires modules to not already have FSDP applied but found "
            f"{_some(map(label, found))} in {type(root).__name__}; wrap by hand or by a policy, not both"
        )


def check_frozen(root: nn.Module, units: Collection[nn.Module], ignored_params: Collection[nn.Parameter] = ()) -> None:
    """Raise if a unit would hold parameters with and without `requires_grad`, where it has one flat parameter for all.

    Args:
        root: the model before it is wrapped.
        units: the modules that become units; the root is looked at if it is among them.
        ignored_params: belong to no unit.

    Raises:
        PolicyError: names the unit, its trained and its frozen parameters.
    """
    ignored = {id(parameter) for parameter in ignored_params}
    taken: set[nn.Module] = set()
    for unit_name, unit in post_order(root):
        if unit not in units:
            continue
        left = {name: module for name, module in unit.named_modules(prefix=unit_name) if module not in taken}
        taken.update(left.values())
        trained: list[str] = []
        frozen: list[str] = []
        for module_name, module in left.items():
            for name, parameter in module.named_parameters(prefix=module_name, recurse=False):
                if id(parameter) not in ignored:
                    (trained if parameter.requires_grad else frozen).append(name)
        if trained and frozen:
            raise PolicyError(
                f"{label(unit_name)} has both parameters with requires_grad=True and False. FSDP does not support "
                "wrapping such modules when use_orig_params=False: pass use_orig_params=True, or wrap the frozen "
                f"parameters separately. The following parameters have requires_grad=True: {_some(trained)}. The "
                f"following parameters have requires_grad=False: {_some(frozen)}"
            )


def label(name: str) -> str:
    return name or "the root"


def _some(names: Iterable[str], limit: int = 8) -> str:
    listed = list(names)
    more = [f"and {len(listed) - limit} more"] if len(listed) > limit else []
    return ", ".join(listed[:limit] + more)
