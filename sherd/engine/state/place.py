"""An attribute of a module where a parameter hangs."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn


class Place:
    """An attribute of a module that holds the parameter. The module is held weakly, or it would keep itself alive.

    `registered`: it is among the module's parameters; otherwise it is a plain attribute, which `parameters()` and
    `state_dict()` do not see.
    """

    __slots__ = ("_module", "attribute", "parameters", "registered")

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self.parameters = module._parameters
        self.attribute = attribute
        self.registered = True
        self._module = weakref.ref(module)

    @property
    def key(self) -> tuple[int, str]:
        """What `key_of` gives for it."""
        return id(self.parameters), self.attribute

    @property
    def module_id(self) -> int:
        """The id of the module, or of None if that is gone."""
        return id(self._module())

    @property
    def shown(self) -> Any:
        """The module's attribute now: the parameter, what a user has put in its place, or None if it was deleted."""
        registered = self.parameters.get(self.attribute)  # where a Parameter goes that the user puts there
        return self._shown_in.get(self.attribute) if registered is None else registered

    def shows(self, parameter: nn.Parameter) -> bool:
        """Whether the module has `parameter` there now."""
        return (self.parameters.get(self.attribute) if self.registered else self.shown) is parameter

    def show(self, parameter: nn.Parameter) -> None:
        # Past nn.Module.__setattr__, which would cost ten times as much, four times a step.
        if self.registered:
            self.parameters[self.attribute] = parameter
        else:
            self.parameters[self.attribute] = None
            self._shown_in[self.attribute] = parameter

    def swap(self, old: nn.Parameter, new: nn.Parameter) -> nn.Parameter | None:
        """Show `new`; a Parameter other than `old` that was there."""
        shown = self._shown_in if not self.registered else self.parameters
        found = shown.get(self.attribute)
        if found is old:
            shown[self.attribute] = new
            return None
        found = self.shown
        self.show(new)
        return found if isinstance(found, nn.Parameter) and found is not old and found is not new else None

    def register(self, registered: bool) -> None:
        """Have it among the module's parameters, or as a plain attribute. Its turn among them stays."""
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
        module = self._module()
        return {} if module is None else module.__dict__


def key_of(module: nn.Module, attribute: str) -> tuple[int, str]:
    """What the place of that attribute of that module is known by, for as long as there is one."""
    return id(module._parameters), attribute
