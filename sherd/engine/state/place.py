"""A place: an attribute of a module at which a parameter is registered."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn


class Place:
    """An attribute of a module that holds a parameter.

    Attributes:
        module: a weak reference to the module, which a strong one would keep alive.
        registered: the parameter is among the module's parameters. If False, it is a plain attribute, which
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
        """True if the module still exists. If not, another module may have its ids."""
        return self.module() is not None

    @property
    def module_id(self) -> int:
        """The id of the module, or of None if the module is gone."""
        return id(self.module())

    @property
    def shown(self) -> Any:
        """The module's attribute now: the parameter, what a user has put in its place, or None if it was deleted."""
        shown = self.parameters.get(self.attribute)  # nn.Module puts a user's new Parameter here, registered or not
        return self._shown_in.get(self.attribute) if shown is None else shown

    def on_copy(self, copies: Mapping[int, Any]) -> Place | None:
        """Returns the place on the module's copy, None if there is no copy. `copies` are keyed by the original's id."""
        module = self.module()
        copied = None if module is None else copies.get(id(module))
        return None if copied is None else Place(copied, self.attribute)

    def shows(self, parameter: nn.Parameter) -> bool:
        """Returns whether the module has `parameter` there now."""
        return self.shown is parameter

    def show(self, parameter: nn.Parameter) -> None:
        """Have the module show `parameter`."""
        # Past nn.Module.__setattr__, which would cost ten times as much.
        if not self.registered:
            self.parameters[self.attribute] = None
        self._shown_in[self.attribute] = parameter

    def swap(self, old: nn.Parameter, new: nn.Parameter) -> nn.Parameter | None:
        """Show `new`. Returns `old`, or the Parameter that a user put in its place, or None if a user deleted it."""
        shown = self.shown
        self.show(new)
        is_other = shown is not new and isinstance(shown, nn.Parameter)
        return shown if is_other or (shown is None and self.is_there) else old

    def register(self, registered: bool) -> None:
        """Make it one of the module's parameters, in its old order among them, or a plain attribute."""
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
