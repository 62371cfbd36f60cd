"""Wrapping policies, which choose the modules that become units, and `wrap`, which makes units by hand.

The policies have the names and meanings of those in `torch.distributed.fsdp.wrap`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from torch import nn

from sherd.errors import PolicyTypeError

# `as` makes a name one that other layers import from here: the front ends ask policies by these walks.
from sherd.wrap.walks import Chosen as Chosen
from sherd.wrap.walks import Kwargs, _Policy, label
from sherd.wrap.walks import WrapPolicy as WrapPolicy
from sherd.wrap.walks import apply_wraps as apply_wraps
from sherd.wrap.walks import check_frozen as check_frozen
from sherd.wrap.walks import check_none_wrapped as check_none_wrapped
from sherd.wrap.walks import choose as choose
from sherd.wrap.walks import is_container as is_container
from sherd.wrap.walks import post_order as post_order

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

# Policies that are objects: asked once for the whole tree


class ModuleWrapPolicy(_Policy):
    """Every instance of some classes is a unit, made as the root is.

    Raises:
        PolicyTypeError: `module_classes` is not an iterable of module classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        classes = list(module_classes) if isinstance(module_classes, Iterable) else None
        if classes is None or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in classes):
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
        """Returns what a policy function would, so that the rule can be a part of other rules."""
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(sorted(kind.__name__ for kind in self._module_classes))}}})"


class CustomPolicy(_Policy):
    """A function is called with every module. It returns True for a unit with the root's arguments, a dict for a unit
    with the dict's arguments over the root's, and False or an empty dict to leave the module in the unit above.

    Raises:
        PolicyTypeError: when the policy runs, if the function returned something else than a bool or a dict.
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
    """A module is a unit if it is an instance of one of `transformer_layer_cls`. Embeddings are left to the root, where
    they may share their weights with the head."""
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
        nonwrapped_numel: number of elements at and below `module`; with `recurse=False`, less those of units below.
        min_num_params: how many elements make a unit.
        force_leaf_modules: classes below which no unit is made; None means `FORCE_LEAF_MODULES`.
        exclude_wrap_modules: classes that are never a unit; None means `EXCLUDE_WRAP_MODULES`.
    """
    defaults = vars(size_based_auto_wrap_policy)
    closed = defaults["FORCE_LEAF_MODULES"] if force_leaf_modules is None else force_leaf_modules
    never = defaults["EXCLUDE_WRAP_MODULES"] if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(closed if recurse else never))


# Containers have no forward in which they could be gathered; nn.MultiheadAttention reads the weight of its projection
# without calling it, so that the projection must not be a unit of its own.
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
    """In its body `wrap(module)` means `wrapper_cls(module, **wrapper_kwargs)`. The innermost one holds.

    Args:
        wrapper_cls: `FullyShardedDataParallel`, `fully_shard`, or any other function from a module to a module.
        wrapper_kwargs: arguments of each wrapper; those of `wrap` come before them.
    """
    before = _wrapping.set(partial(wrapper_cls, **wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(before)


def wrap(module: nn.Module, **wrap_overrides: object) -> nn.Module:
    """Returns `module` as a unit, inside `enable_wrap`, with its arguments and, over them, `wrap_overrides`.

    Elsewhere it returns `module` as it is, so that one model can be built with and without units.
    """
    wrapping = _wrapping.get()
    return module if wrapping is None else wrapping(module, **wrap_overrides)
