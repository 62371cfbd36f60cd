"""Pickles that are not trusted, read without running code: names that are not in a table are errors."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NoReturn, cast

from sherd.errors import CheckpointError

Names = Mapping[tuple[str, str], object]
"""Replacements of the classes and functions of a pickle, by module and name."""

_FEW, _MOST_UNFOLDED = 1_000_000, 1_000
"""A pickle may unfold to `_FEW` objects, plus `_MOST_UNFOLDED` for each of its containers: optimizers share tuples."""


class UnknownName(CheckpointError):
    """A pickle has a name that its format does not need."""


class _Sealed(type):
    """A class that a pickle cannot change."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError(f"{cls.__name__} is not to be changed")


class Inert(metaclass=_Sealed):
    """An object of an unknown class: it only keeps what its pickle passes to it."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Inert:
        instance = super().__new__(cls)
        instance.__setstate__(None, args)
        return instance

    def __setstate__(self, state: Any, args: tuple[Any, ...] | None = None) -> None:
        self.state = state
        if args is not None:
            self.args = args

    def get(self, field: str, position: int = -1) -> Any:
        """Returns the field of this name, else the argument at `position`, else None."""
        fields = self.state[-1] if isinstance(self.state, tuple) and self.state else self.state
        if isinstance(fields, dict) and field in fields:
            return fields[field]
        return self.args[position] if 0 <= position < len(self.args) else None


def inert(name: str) -> type[Inert]:
    return cast("type[Inert]", _Sealed(name, (Inert,), {"__slots__": ()}))


class Dict(dict[Any, Any], metaclass=_Sealed):
    """An OrderedDict, without the attributes that were pickled with it."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None: ...


class Unpickler(pickle._Unpickler):
    """Reads a pickle that is not trusted: it finds what is in `names`, and raises at any other name.

    It is based on the unpickler in Python, since the one in C allocates as much memory as numbers in the pickle say.

    Args:
        file: the pickle.
        names: what its classes and functions become. They may be called by the pickle with any arguments.
        where: names the pickle in errors.
        stubs: top-level packages whose classes all become inert objects.
    """

    def __init__(self, file: BinaryIO, names: Names, where: str, stubs: tuple[str, ...] = ()) -> None:
        super().__init__(file)
        self._names, self._where, self._stubs = names, where, stubs
        self._made: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Returns the replacement of `module.name`. Raises CheckpointError if there is none."""
        known = self._names.get((module, name))
        if known is not None:
            return known
        full = f"{module}.{name}"
        if module.split(".")[0] in self._stubs:
            return self._made.setdefault(full, inert(full))
        raise UnknownName(
            f"{self._where} names {full[:200]}, which is not among the names that this format needs; it is not "
            "loaded, as reading a checkpoint never runs code of others"
        )

    def read(self) -> Any:
        """Returns the object. Raises CheckpointError if the pickle is malformed."""
        try:
            tree = self.load()
            _require_unfolded(tree, self._where)
            return tree
        except CheckpointError:
            raise
        except RecursionError:
            raise CheckpointError(f"{self._where} is nested too deeply") from None
        except Exception as error:
            raise CheckpointError(f"{self._where} is no pickle of that kind: {error!r:.200}") from None


def _require_unfolded(tree: object, where: str) -> None:
    """Raise CheckpointError if `tree` contains its objects so many times over that a walk would not end."""
    sizes: dict[int, int] = {}
    waiting: list[tuple[object, bool]] = [(tree, False)]
    while waiting:
        value, are_known = waiting.pop()
        if are_known:
            sizes[id(value)] = 1 + sum(sizes.get(id(child), 1) for child in _children(value))
        elif id(value) not in sizes and (children := _children(value)):
            sizes[id(value)] = 1
            waiting.append((value, True))
            waiting += [(child, False) for child in children]
    if sizes.get(id(tree), 1) > _MOST_UNFOLDED * len(sizes) + _FEW:
        raise CheckpointError(
            f"{where} has lists in lists in several places, so that they would never be read to the end"
        )


def _children(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, Inert):
        return [value.args, value.state]
    return [*value] if isinstance(value, list | tuple | set) else ()
