"""Wrapping policies, which choose the modules that become units, `wrap`, which makes units by hand, and the walks.

The policies have the names and meanings of those in `torch.distributed.fsdp.wrap`. The walks over a model ask a policy
which modules become units, put wrappers in their places, and check them.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import nn

from sherd.errors import ModuleError, PolicyError, PolicyTypeError, in_short

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

T = TypeVar("T")
Kwargs: TypeAlias = dict[str, Any]
Chosen: TypeAlias = dict[nn.Module, Kwargs]
"""The modules that become units, children before their parents, each with the arguments of the unit."""


class _Policy(Protocol):
    """A rule that looks at the full model: an object with `_run_policy`, torch's own too."""

    @abstractmethod
    def _run_policy(self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs) -> Chosen:
        """Returns the modules below the root that become units, with arguments that start from `root_kwargs`."""


WrapPolicy: TypeAlias = "_Policy | Callable[..., bool]"

# Policies that are objects: asked once for the full model


class ModuleWrapPolicy(_Policy):
    """A policy that makes every instance of some classes a unit, with the root's arguments.

    Raises:
        PolicyTypeError: `module_classes` is not an iterable of module classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        classes = list(module_classes) if isinstance(module_classes, Iterable) else None
        if classes is None or not all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes):
            raise PolicyTypeError(
                f"ModuleWrapPolicy expects a set of module classes, as {{TransformerBlock}}, got {module_classes!r}"
            )
        self._module_classes = set(classes)

    def _run_policy(self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs) -> Chosen:
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and self(module, recurse=False)
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: object, **kwargs: object) -> bool:
        """Answer as a policy function does, so that the policy can be a part of other policies."""
        return _wrap_module_cls_individually(module, tuple(self._module_classes), recurse)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(sorted(each.__name__ for each in self._module_classes))}}})"


class CustomPolicy(_Policy):
    """A policy that calls a function with every module.

    The function returns True for a unit with the root's arguments, a dict for a unit with the dict's arguments over
    the root's, and False or an empty dict to leave the module in the unit above.

    Raises:
        PolicyTypeError: when the policy runs, if the function returns anything but a bool or a dict.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Kwargs]) -> None:
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
                    f"{answer!r} for {label(name)}, a {type(module).__name__}"
                )
            if answer:
                chosen[module] = {**root_kwargs, **({} if answer is True else answer)}
        return chosen


# Policies that are functions: asked about each module on the way down and on the way back


def always_wrap_policy(*args: object, **kwargs: object) -> bool:
    """Every module is a unit."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """A module is a unit if `lambda_fn(module)` is true; bind the function with `functools.partial`."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """A module is a unit if it is an instance of one of `transformer_layer_cls`.

    Embeddings stay with the root, where they may share their weights with the head.
    """
    return _wrap_module_cls_individually(module, tuple(transformer_layer_cls), recurse)


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
        nonwrapped_numel: number of elements at and below `module`; with `recurse=False`, without those of units below.
        min_num_params: number of elements of a unit, at least.
        force_leaf_modules: classes below which no unit is made; None means `FORCE_LEAF_MODULES`.
        exclude_wrap_modules: classes that are never a unit; None means `EXCLUDE_WRAP_MODULES`.
    """
    defaults = vars(size_based_auto_wrap_policy)
    closed = defaults["FORCE_LEAF_MODULES"] if force_leaf_modules is None else force_leaf_modules
    never = defaults["EXCLUDE_WRAP_MODULES"] if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(closed if recurse else never))


# Containers have no forward in which a unit is gathered. nn.MultiheadAttention reads the weight of its projection
# without calling the projection, which would stay sharded as a unit of its own.
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]) -> bool:
    """A module is a unit if any of `policies` (functions) makes it one."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Sequence[type[nn.Module]], recurse: bool, *args: object, **kwargs: object
) -> bool:
    return recurse or isinstance(module, tuple(module_classes))


# Programs written against torch import these under the names that they have there.
_or_policy = or_policy


# By hand, while a model is built

# A variable of the thread, not of the process: ranks may be threads.
_wrapping: ContextVar[Callable[..., nn.Module] | None] = ContextVar("sherd_wrapping", default=None)
"""The function that `wrap` calls in the body of an `enable_wrap`."""


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: object) -> Iterator[None]:
    """Let `wrap(module)` mean `wrapper_cls(module, **wrapper_kwargs)` inside the context. The innermost context holds.

    Args:
        wrapper_cls: `FullyShardedDataParallel`, `fully_shard`, or any other function from a module to a module.
        wrapper_kwargs: arguments of each wrapper; arguments of `wrap` replace them.
    """
    before = _wrapping.set(partial(wrapper_cls, **wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(before)


def wrap(module: nn.Module, **wrap_overrides: object) -> nn.Module:
    """Returns `module` as a unit inside `enable_wrap`, with its arguments and, over them, `wrap_overrides`.

    Elsewhere it returns `module` itself, so that one model can be built with and without units.
    """
    wrapping = _wrapping.get()
    return module if wrapping is None else wrapping(module, **wrap_overrides)


# The walks that ask a policy


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
        root: the model; it is never chosen, because the caller makes its unit last.
        policy: an object with `_run_policy` (sherd's or torch's), or a function `policy(module, recurse,
            nonwrapped_numel) -> bool`.
        ignored_modules: the policy is not asked about these and all below them.
        ignored_params: not counted in `nonwrapped_numel`.
        root_kwargs: the arguments each unit starts from; every unit gets a dict of its own.
        apart: classes whose instances become units in any case, such as norms that compute in full precision under
            mixed precision.
        apart_kwargs: the arguments of these units, over all others.

    Returns:
        The chosen modules with their arguments, children before their parents, a shared module once.

    Raises:
        PolicyTypeError: `policy` is neither kind of policy, or returns something of the wrong type.
    """
    ignored = {below for module in ignored_modules for below in module.modules()}
    kwargs = dict(root_kwargs or {})
    apart_modules = {module for module in root.modules() if isinstance(module, tuple(apart))}
    if hasattr(policy, "_run_policy"):
        chosen = _ask_object(root, policy, ignored, kwargs, apart_modules)
    else:
        function, ignored_ids = _checked_function(policy), {id(parameter) for parameter in ignored_params}
        asking = _Asking(root, function, ignored, ignored_ids, kwargs, apart_modules, bool(apart))
        asking.choose_below(root)
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
    """Asks a function about every module below `root`, in the order of torch's walk.

    As in torch, a shared module is asked about once, but each parent counts it. Modules in `apart` become units in any
    case; a walk that `looks_everywhere` for them also goes below modules that the policy closes. `kwargs` are the
    arguments of each unit.
    """

    root: nn.Module
    policy: Callable[..., object]
    ignored: set[nn.Module]
    ignored_ids: set[int]
    kwargs: Kwargs
    apart: set[nn.Module]
    looks_everywhere: bool
    chosen: Chosen = field(default_factory=dict)
    numel_in_units: dict[nn.Module, int] = field(default_factory=dict)

    # A method, and no function inside of another: one that calls itself is a circle, which would keep the model until
    # the garbage collector comes (test_a_deleted_model_is_gone_at_once).
    def choose_below(self, module: nn.Module) -> int:
        """Choose at and below `module`. Returns the number of its elements that are in units then."""
        numel = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in self.ignored_ids)
        if not (self._asked(module, True, numel) or self.looks_everywhere):
            return 0
        below = 0
        for child in module.children():
            if child not in self.ignored:
                if child not in self.numel_in_units:
                    self.numel_in_units[child] = self.choose_below(child)
                below += self.numel_in_units[child]
        if module is self.root or not (self._asked(module, False, numel - below) or module in self.apart):
            return below
        self.chosen[module] = dict(self.kwargs)
        return numel

    def _asked(self, module: nn.Module, recurse: bool, numel: int) -> bool:
        answer = self.policy(module=module, recurse=recurse, nonwrapped_numel=numel)
        if isinstance(answer, dict):
            raise PolicyTypeError(
                f"a policy function returned {answer!r} for a {type(module).__name__}, expected a bool; "
                "for arguments per module pass CustomPolicy(function), which calls function(module)"
            )
        return bool(answer)


def _checked_function(policy: object) -> Callable[..., object]:
    """Returns `policy`. Raises PolicyTypeError if it does not take a policy's three arguments."""
    if not callable(policy) or isinstance(policy, type):
        raise PolicyTypeError(
            f"expected a policy, got {policy!r}; pass ModuleWrapPolicy({{Block}}), CustomPolicy(function), or a "
            "function (module, recurse, nonwrapped_numel) -> bool"
        )
    try:
        inspect.signature(policy).bind(module=None, recurse=True, nonwrapped_numel=0)
    except ValueError:  # some callables written in C have no signature to read
        pass
    except TypeError as error:
        raise PolicyTypeError(
            f"the policy {getattr(policy, '__name__', policy)!r} cannot be called as policy(module=..., recurse=..., "
            f"nonwrapped_numel=...): {error}. Give what else it takes with functools.partial; a function of the module "
            "alone goes into CustomPolicy(function)"
        ) from error
    return policy


def post_order(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module at and below `root` once, by the first of its names, children before their parents."""
    return _post_order(root, "", {root})


def _post_order(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        if child not in seen:
            seen.add(child)
            yield from _post_order(child, f"{name}.{child_name}" if name else child_name, seen)
    yield name, module


def outermost(root: nn.Module, of: Callable[[nn.Module], T | None]) -> Iterator[tuple[nn.Module, T]]:
    """Yields the modules at and below `root` of which `of` returns something, with that; none below another one."""
    found = of(root)
    if found is not None:
        yield root, found
        return
    for child in root.children():
        yield from outermost(child, of)


def is_container(module: nn.Module) -> bool:
    """Returns True for a list or dict without a forward, which as a unit of its own would never be gathered."""
    containers = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    return isinstance(module, containers) and type(module).forward is nn.Module.forward


# The walks that put wrappers in their places, and check them


def apply_wraps(
    root: nn.Module, chosen: Mapping[nn.Module, Kwargs], wrap_fn: Callable[[nn.Module, Kwargs], nn.Module]
) -> None:
    """Call `wrap_fn(module, kwargs)` for each module of `chosen`, children before their parents.

    If `wrap_fn` returns another module, that one takes every place of `module` below `root`.
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
    names = [label(name) for name, module in root.named_modules() if is_wrapped(module)]
    if names:
        raise ModuleError(
            "FSDP auto wrapping requires modules to not already have FSDP applied but found "
            f"{in_short(names)} in {type(root).__name__}; wrap by hand or by a policy, not both"
        )


def check_frozen(root: nn.Module, units: Collection[nn.Module], ignored_params: Collection[nn.Parameter] = ()) -> None:
    """Raise if a unit would hold parameters with and without `requires_grad`, which no flat parameter can.

    Args:
        root: the model before it is wrapped.
        units: the modules that become units; the root is checked if it is among them.
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
                f"parameters separately. The following parameters have requires_grad=True: {in_short(trained)}. The "
                f"following parameters have requires_grad=False: {in_short(frozen)}"
            )


def label(name: str) -> str:
    """Returns the module's name for error texts."""
    return name or "the root"
