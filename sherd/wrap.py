"""Which modules below a root become units? Policies with the names and meanings of `torch.distributed.fsdp.wrap`, the
walk that asks them, and the walk that puts wrappers in place."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from sherd.errors import ModuleError, PolicyError, PolicyTypeError

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "or_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

Kwargs: TypeAlias = dict[str, Any]
Chosen: TypeAlias = dict[nn.Module, Kwargs]
"""What becomes a unit, children before their parents, with the arguments it is made with."""


# Policies that are objects: asked once for the whole tree


class _Policy(ABC):
    """A rule that looks at a whole model. Any object with `_run_policy` counts as one, torch's own too."""

    @abstractmethod
    def _run_policy(self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs) -> Chosen:
        """Each module below `root_module` that is to become a unit, with the arguments to make it with; the root and
        `ignored_modules` need not be looked at. `root_kwargs` are the root's arguments, to start from."""


class ModuleWrapPolicy(_Policy):
    """Every instance of some classes is a unit, made as the root is.

    Raises:
        PolicyTypeError: `module_classes` is not an iterable of module classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = _checked_classes(module_classes)

    def _run_policy(self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs) -> Chosen:
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, tuple(self._module_classes))
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """The same rule in the form of a function, so that it can be a part of other rules."""
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(sorted(each.__name__ for each in self._module_classes))}}})"


class CustomPolicy(_Policy):
    """A function is asked about every module: False or an empty dict leaves it in the unit above, True makes it a unit
    as the root is made, and a dict makes it a unit whose arguments differ from the root's by the dict's.

    Raises:
        PolicyTypeError: when the policy runs, if the function returned something else than a bool or a dict.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs) -> Chosen:
        chosen: Chosen = {}
        for name, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, dict | bool):
                raise PolicyTypeError(
                    "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned "
                    f"{answer!r} for {_called(name)}, a {type(module).__name__}"
                )
            if answer:
                chosen[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return chosen


def _checked_classes(classes: Any) -> set[type[nn.Module]]:
    found = list(classes) if isinstance(classes, Iterable) and not isinstance(classes, str) else [classes]
    wrong = [each for each in found if not (isinstance(each, type) and issubclass(each, nn.Module))]
    if wrong or not isinstance(classes, Iterable):
        raise PolicyTypeError(
            f"ModuleWrapPolicy expects a set of module classes, as {{TransformerBlock}}, got {classes!r}"
        )
    return set(found)


# Policies that are functions: asked about each module on the way down and on the way back


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Every module is a unit."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """A module is a unit if `lambda_fn(module)` says so; give the function with `functools.partial`."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """A module is a unit if it is an instance of one of `transformer_layer_cls`. Embeddings are left to the root, where
    they may share their weights with the head."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    # Additional custom arguments
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """A module is a unit once it holds `min_num_params` elements that no unit below it has.

    Args:
        module: the module in question.
        recurse: True asks whether to go below `module`, False whether it becomes a unit.
        nonwrapped_numel: number of elements at and below `module`; with `recurse=False`, less those of units below.
        min_num_params: how many elements make a unit.
        force_leaf_modules: classes below which no unit is made; None means `FORCE_LEAF_MODULES`.
        exclude_wrap_modules: classes that are never a unit; None means `EXCLUDE_WRAP_MODULES`.
    """
    defaults: Any = size_based_auto_wrap_policy
    closed = defaults.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    never = defaults.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(closed if recurse else never))


# Containers have no forward in which they could be gathered; nn.MultiheadAttention reads the weight of its projection
# without calling it, so that the projection must not be a unit of its own.
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]) -> bool:
    """A module is a unit if any of `policies` (functions) makes it one."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Sequence[type[nn.Module]], recurse: bool, *args: Any, **kwargs: Any
) -> bool:
    return recurse or isinstance(module, tuple(module_classes))


# Programs written against torch import these under the names that they have there.
_or_policy = or_policy


# Asking them

WrapPolicy: TypeAlias = "_Policy | Callable[..., bool]"


def choose(
    root: nn.Module,
    policy: WrapPolicy,
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
    root_kwargs: Mapping[str, Any] | None = None,
    *,
    apart: Collection[type[nn.Module]] = (),
    apart_kwargs: Mapping[str, Any] | None = None,
) -> Chosen:
    """What `policy` makes units of below `root`. Changes nothing.

    Args:
        root: the model; never chosen itself, as its unit is made last by whoever asks.
        policy: an object with `_run_policy` (sherd's or torch's), or a function `policy(module, recurse,
            nonwrapped_numel) -> bool`.
        ignored_modules: these and all below them are not asked about.
        ignored_params: not counted in `nonwrapped_numel`.
        root_kwargs: the arguments each unit starts from; every unit gets a dict of its own.
        apart: classes whose instances become units whatever the policy says, with `apart_kwargs` over all others.
            Norms that compute in full precision under mixed precision are such.

    Returns:
        The chosen modules with their arguments, children before their parents, a shared module once.

    Raises:
        PolicyTypeError: `policy` is neither kind of policy, or returned something of the wrong type.
    """
    ignored = {below for module in ignored_modules for below in module.modules()}
    kwargs = dict(root_kwargs or {})
    if hasattr(policy, "_run_policy"):
        chosen = _ask_object(root, policy, ignored, kwargs, tuple(apart))
    else:
        _check_takes_three(policy)
        asking = _Asking(root, policy, ignored, {id(each) for each in ignored_params}, kwargs, tuple(apart))
        asking.visit(root)
        chosen = asking.chosen
    for module, its_kwargs in chosen.items():
        if isinstance(module, tuple(apart)):
            its_kwargs.update(apart_kwargs or {})
    return chosen


def _ask_object(
    root: nn.Module, policy: Any, ignored: set[nn.Module], kwargs: Kwargs, apart: tuple[type[nn.Module], ...]
) -> Chosen:
    answer = policy._run_policy(root, ignored, dict(kwargs))
    named = isinstance(answer, Mapping)
    kwargs_of = answer.items() if named else ()
    wrong = [f"{its!r} for a {type(each).__name__}" for each, its in kwargs_of if not _is_kwargs(its)]
    if wrong or not named:
        raise PolicyTypeError(
            f"{type(policy).__name__}._run_policy returned {wrong[0] if named else f'a {type(answer).__name__}'}; "
            "expected a dict from modules to dicts of arguments"
        )
    chosen: Chosen = {}
    for _, module in post_order(root):
        is_apart = isinstance(module, apart) and module not in ignored
        if module is not root and (module in answer or is_apart):
            chosen[module] = dict(answer.get(module, kwargs))
    return chosen


def _is_kwargs(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


@dataclass
class _Asking:
    """A function policy being asked about every module below `root`. `ignored_ids` are parameters that do not count;
    instances of `apart` are looked for everywhere.

    A shared module is asked about once; each parent counts it, as torch's walk does.
    """

    root: nn.Module
    policy: Callable[..., Any]
    ignored: set[nn.Module]
    ignored_ids: set[int]
    kwargs: Kwargs
    apart: tuple[type[nn.Module], ...]
    chosen: Chosen = field(default_factory=dict)
    _in_units: dict[nn.Module, int] = field(default_factory=dict)

    def visit(self, module: nn.Module) -> int:
        """Choose at and below `module`; the number of elements that are then in units."""
        if module not in self._in_units:
            self._in_units[module] = self._decide(module)
        return self._in_units[module]

    def _decide(self, module: nn.Module) -> int:
        numel = sum(each.numel() for each in module.parameters() if id(each) not in self.ignored_ids)
        if not (self._says(module, True, numel) or self.apart):
            return 0
        below = sum(self.visit(child) for child in module.children() if child not in self.ignored)
        if module is self.root or not (self._says(module, False, numel - below) or isinstance(module, self.apart)):
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


def _check_takes_three(policy: Any) -> None:
    if not callable(policy) or isinstance(policy, type):
        raise PolicyTypeError(
            f"expected a policy, got {policy!r}; pass ModuleWrapPolicy({{Block}}), CustomPolicy(function), or a "
            "function (module, recurse, nonwrapped_numel) -> bool"
        )
    try:
        signature = inspect.signature(policy)
    except ValueError:  # some callables written in C do not tell theirs
        return
    try:
        signature.bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as error:
        raise PolicyTypeError(
            f"the policy {getattr(policy, '__name__', policy)!r} cannot be called as policy(module=..., recurse=..., "
            f"nonwrapped_numel=...): {error}. Give what else it takes with functools.partial; a function of the module "
            "alone goes into CustomPolicy(function)"
        ) from error


def post_order(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module at and below `root` once, with the first of its names, children before their parents."""
    return _post_order("", root, {root})


def _post_order(name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        if child not in seen:
            seen.add(child)
            yield from _post_order(f"{name}.{child_name}" if name else child_name, child, seen)
    yield name, module


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_container(module: nn.Module) -> bool:
    """Whether `module` is a list or dict without a forward: as a unit of its own it would never be gathered."""
    return isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward


# Doing what was chosen


def apply_wraps(
    root: nn.Module, chosen: Mapping[nn.Module, Kwargs], wrap_fn: Callable[[nn.Module, Kwargs], nn.Module]
) -> None:
    """Call `wrap_fn(module, kwargs)` for each module of `chosen`, children before their parents, and hang what it
    returns, if that is another module, on every place of `module` below `root`."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    for _, module in list(post_order(root)):
        if module not in chosen or module is root:
            continue
        wrapped = wrap_fn(module, chosen[module])
        assert isinstance(wrapped, nn.Module), "wrap_fn is ours; it returns a wrapper or the module"
        if wrapped is not module:
            for parent, name in places[module]:
                setattr(parent, name, wrapped)


def check_none_wrapped(root: nn.Module, is_wrapped: Callable[[nn.Module], bool]) -> None:
    """Raise if a module at or below `root` is a unit already, by hand or by an earlier policy.

    Raises:
        ModuleError: it names them.
    """
    found = [name for name, module in root.named_modules() if is_wrapped(module)]
    if found:
        raise ModuleError(
            "FSDP auto wrapping requires modules to not already have FSDP applied but found "
            f"{_some(map(_called, found))} in {type(root).__name__}; wrap by hand or by a policy, not both"
        )


def check_frozen(root: nn.Module, units: Collection[nn.Module], ignored_params: Collection[nn.Parameter] = ()) -> None:
    """Raise if a unit would hold parameters with and without `requires_grad`, where it has one flat parameter for all.

    Args:
        root: the model before it is wrapped.
        units: the modules that become units; the root is looked at if it is among them.
        ignored_params: belong to no unit.

    Raises:
        PolicyError: it names the unit, its trained and its frozen parameters.
    """
    ignored = {id(parameter) for parameter in ignored_params}
    taken: set[nn.Module] = set()
    for unit_name, unit in post_order(root):
        if unit not in units:
            continue
        trained: list[str] = []
        frozen: list[str] = []
        for name, parameter in _left_for(unit, unit_name, taken):
            if id(parameter) not in ignored:
                (trained if parameter.requires_grad else frozen).append(name)
        if trained and frozen:
            raise PolicyError(
                f"{_called(unit_name)} has both parameters with requires_grad=True and False. FSDP does not support "
                "wrapping such modules when use_orig_params=False: pass use_orig_params=True, or wrap the frozen "
                f"parameters separately. The following parameters have requires_grad=True: {_some(trained)}. The "
                f"following parameters have requires_grad=False: {_some(frozen)}"
            )


def _left_for(unit: nn.Module, unit_name: str, taken: set[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters, with names, of the modules below `unit` that are not `taken`; they are afterwards."""
    for below, module in unit.named_modules(prefix=unit_name):
        if module not in taken:
            taken.add(module)
            yield from module.named_parameters(prefix=below, recurse=False)


def _called(name: str) -> str:
    return name or "the root"


def _some(names: Iterable[str], limit: int = 8) -> str:
    listed = list(names)
    more = [f"and {len(listed) - limit} more"] if len(listed) > limit else []
    return ", ".join(listed[:limit] + more)


# By hand, while a model is built


# Of this thread, not of the process: ranks may be threads.
_wrapping: ContextVar[Callable[..., nn.Module] | None] = ContextVar("sherd_wrapping", default=None)
"""What `wrap` does in the body of an `enable_wrap`."""


@contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """In its body `wrap(module)` means `wrapper_cls(module, **wrapper_kwargs)`. Inside another one, the inner holds.

    Args:
        wrapper_cls: `FullyShardedDataParallel`, `fully_shard`, or whatever takes a module and returns one.
        wrapper_kwargs: what each wrapper is made with, where `wrap` does not say otherwise.
    """
    before = _wrapping.set(partial(wrapper_cls, **wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(before)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """`module` as a unit in the body of `enable_wrap`, with its arguments and, over them, `wrap_overrides`; elsewhere
    `module` as it is, so that one model can be built with and without."""
    wrapping = _wrapping.get()
    return module if wrapping is None else wrapping(module, **wrap_overrides)
