"""The modules and parameters that a wrapper ignores, given by either of FSDP1's two arguments."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from sherd.engine import Unit
from sherd.errors import ModuleError, PolicyError, PolicyTypeError


@dataclass(frozen=True)
class Ignored:
    """The ignored modules, parameters and buffers of a wrapper.

    Args:
        modules: the ignored modules and all modules below them, apart from units, which are sharded already.
        parameters: the ignored parameters, with all parameters of `modules`.
        buffers: the buffers of `modules`.
    """

    modules: frozenset[nn.Module]
    parameters: frozenset[nn.Parameter]
    buffers: frozenset[torch.Tensor]

    @classmethod
    def read(cls, root: nn.Module, modules: object, states: object) -> Ignored:
        """Returns what `ignored_modules` and `ignored_states` of a wrapper around `root` mean.

        Raises:
            PolicyError: both were given, or one has an element of another type.
            PolicyTypeError: one of them is not iterable.
            ModuleError: one of the modules is a unit.
        """
        if modules is not None and states is not None:
            raise PolicyError(
                "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
            )
        given = [*_listed("ignored_modules", modules, (nn.Module,))]
        given += _listed("ignored_states", states, (nn.Parameter, nn.Module))
        tops = [each for each in given if isinstance(each, nn.Module)]
        alone = [each for each in given if isinstance(each, nn.Parameter)]
        if tops and alone:
            kinds = sorted({type(each) for each in given}, key=lambda kind: kind.__name__)
            raise PolicyError(
                f"ignored_states expects all nn.Parameter or all nn.Module list elements but got types {kinds}; give "
                "modules, or their parameters"
            )
        if any(each is root for each in tops):
            warnings.warn(
                "the module that is wrapped is itself among the ignored ones, so nothing will be sharded", stacklevel=4
            )
        for each in tops:
            if Unit.of(each) is not None:
                raise ModuleError(
                    f"`ignored_modules` should not include FSDP modules: a {type(each).__name__} is one already; "
                    "ignore its parameters when it is wrapped"
                )
        below = _outside_units(tops)
        parameters = {*alone, *(inner for each in below for inner in each.parameters(recurse=False))}
        buffers = {inner for each in below for inner in each.buffers(recurse=False)}
        return cls(frozenset(below), frozenset(parameters), frozenset(buffers))


def _outside_units(tops: Iterable[nn.Module]) -> set[nn.Module]:
    """Returns `tops` and all modules below them, apart from units and modules below units."""
    found: set[nn.Module] = set()
    waiting = list(tops)
    while waiting:
        module = waiting.pop()
        if module not in found and Unit.of(module) is None:
            found.add(module)
            waiting.extend(module.children())
    return found


def _listed(name: str, given: object, kinds: tuple[type, ...]) -> list[object]:
    if given is None:
        return []
    if not isinstance(given, Iterable) or isinstance(given, torch.Tensor):
        raise PolicyTypeError(f"{name}={given!r}: expected a list or a set of {_names(kinds)}")
    listed = list(given)
    wrong = [each for each in listed if not isinstance(each, kinds)]
    if wrong:
        raise PolicyError(
            f"{name} expects {_names(kinds)} list elements but got types {[type(each) for each in wrong]}"
        )
    return listed


def _names(kinds: tuple[type, ...]) -> str:
    return " or ".join(f"nn.{each.__name__}" for each in kinds)
