"""A place: an attribute of a module on which a parameter hangs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn


class Place:
    """An attribute of a module that holds a parameter. The reference to the module is weak: a strong one would keep the
    module alive; `module()` returns it, or None if it is gone.

    `registered`: the parameter is among the module's parameters. Otherwise it is a plain attribute, which
    `parameters()` and `state_dict()` do not see.
    """

    __slots__ = ("attribute", "module", "parameters", "registered")

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self.parameters = module._parameters
        self.attribute = attribute
        self.registered = True
        self.module = weakref.ref(module)

    @property
    def key(self) -> tuple[int, str]:
        """The key that `key_of` returns for this module and attribute."""
        return id(self.parameters), self.attribute

    @property
    def is_there(self) -> bool:
        """Whether the module still exists. If not, another one may have got its ids."""
        return self.module() is not None

    @property
    def module_id(self) -> int:
        """The id of the module, or of None if the module is gone."""
        return id(self.module())

    @property
    def shown(self) -> Any:
        """The module's attribute now: the parameter, what a user has put in its place, or None if it was deleted."""
        shown = self.parameters.get(self.attribute)  # where a Parameter goes that the user puts there
        return self._shown_in.get(self.attribute) if shown is None else shown

    def on_copy(self, copies: Mapping[int, Any]) -> Place | None:
        """Returns the place on the copy of the module, by `copies`, which are keyed by the id of what was copied; None
        if there is none."""
        module = self.module()
        copied = None if module is None else copies.get(id(module))
        return None if copied is None else Place(copied, self.attribute)

    def shows(self, parameter: nn.Parameter) -> bool:
        """Returns whether the module has `parameter` there now."""
        return self.shown is parameter

    def show(self, parameter: nn.Parameter) -> None:
        # Past nn.Module.__setattr__, which would cost ten times as much.
        if not self.registered:
            self.parameters[self.attribute] = None
        self._shown_in[self.attribute] = parameter

    def swap(self, old: nn.Parameter, new: nn.Parameter) -> nn.Parameter | None:
        """Show `new`. Returns the Parameter that was there instead of `old`, or None if it was deleted; else `old`."""
        found = self.shown
        self.show(new)
        is_other = found is not new and isinstance(found, nn.Parameter)
        return found if is_other or (found is None and self.is_there) else old

    def register(self, registered: bool) -> None:
        """Make it one of the module's parameters, or a plain attribute. Its turn among the parameters stays."""
        if registered == self.registered:
            return
        shown = self.shown
        if registered:
            self._shown_in.pop(self.attribute, None)
        else:
            self.parameters[self.attribute] = None
        self.registered = registered
        self._shown_in[self.attribute] = shown

    @property
    def _shown_in(self) -> dict[str, Any]:
        if self.registered:
            return self.parameters
        module = self.module()
        return {} if module is None else module.__dict__


def key_of(module: nn.Module, attribute: str) -> tuple[int, str]:
    """Returns the key of a place, which is valid as long as the module lives."""
    return id(module._parameters), attribute
