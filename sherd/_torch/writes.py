"""Writes under names that a search for `.name =` does not find: there is one function for them."""

from __future__ import annotations


def write_into(owner: object, name: str, value: object) -> None:
    """Write attribute `name` of an object of torch's or of a user's: a function of torch that is replaced, a mark on a
    module, an attribute of a Parameter that another one takes over, a field of a frozen dataclass that was copied.

    Type checkers know none of these names, and some are the user's own, so an assignment cannot be written. All such
    writes come here: a search for `write_into` finds them. A `__setattr__` of the object's class is passed by.
    """
    object.__setattr__(owner, name, value)
