"""`swap_class`: a module becomes an `FSDPModule` in place, with its object and its attributes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

from torch import nn

from sherd._torch import write_into
from sherd.api.module import FSDPModule
from sherd.engine import Unit, met_a_shard
from sherd.errors import ModuleError, PlacementError, ShardedAccessError, StateError
from sherd.schedule.state import Live

P = ParamSpec("P")
R = TypeVar("R")

NO_STRATEGY = "does not have a sharding strategy registered"
"""In what torch says of an operation that DTensor does not know."""

_classes: dict[type, type] = {}
"""The class that `swap_class` made of each class: one each, so that two such modules are of one class."""


def swap_class(module: nn.Module) -> None:
    """Make `module` an `FSDPModule` in place: its class becomes a subclass of `FSDPModule` and of its own class."""
    original = type(module)
    if original not in _classes:
        members: dict[str, object] = {
            "__new__": _new_of_the_original,
            "__deepcopy__": deep_copy,
            "__reduce_ex__": _refuse_copy,
            "__module__": original.__module__,
        }
        members |= {name: _explained(name, method) for name, method in _public_methods(original)}
        _classes[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), members)
    module.__class__ = _classes[original]


def _new_of_the_original(cls: type[nn.Module], *args: object, **kwargs: object) -> nn.Module:
    """Returns an instance of the original class, so that a sharded `Sequential[1:]` is a plain `Sequential`."""
    original: type[nn.Module] = cls.__mro__[2]
    plain = original.__new__(original, *args, **kwargs)
    plain.__init__(*args, **kwargs)  # type: ignore[misc]  # Python does it only for instances of `cls`
    return plain


def deep_copy(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """Returns a deep copy of `module`, a unit of either front end: a model of its own, with copied shards.

    Policies and mesh are the same objects.

    Raises:
        ModuleError: a unit with a flat parameter, or a unit that uses parameters outside of the copied modules.
        StateError: inside an unshard context, or in the middle of a forward or backward.
    """
    from sherd.engine import deep_copied  # loaded with the first copy: few programs make one

    def finish(unit: Unit, copied: Unit, memo: dict[int, object]) -> None:
        for each in unit.modules:
            state = each.__dict__.get(Unit.FRONT_END)
            if state is not None:
                write_into(memo[id(each)], Unit.FRONT_END, state.of_copy(copied, memo))

    return deep_copied(module, memo, finish)


def _refuse_copy(self: nn.Module, protocol: object) -> NoReturn:
    raise ModuleError(
        f"{type(self).__name__} is sharded and cannot be pickled (torch.save) or copied by copy.copy: it would be of "
        "process groups, and of one rank's shards. Save its state_dict(); for a copy call copy.deepcopy"
    )


def _public_methods(original: type) -> list[tuple[str, Callable[..., object]]]:
    """Returns the methods that the user's own classes add to nn.Module's; forward is one of nn.Module's."""
    found: dict[str, Callable[..., object]] = {}
    known = set(dir(nn.Module)) | set(dir(FSDPModule))
    for cls in original.__mro__:
        if cls.__module__.startswith("torch."):
            continue
        for name, value in vars(cls).items():
            if inspect.isfunction(value) and not name.startswith("_") and name not in known:
                found.setdefault(name, value)
    return list(found.items())


def _explained(name: str, method: Callable[Concatenate[nn.Module, P], R]) -> Callable[Concatenate[nn.Module, P], R]:
    """Returns `method` with an error that says what to do where it finds shards and needs unsharded parameters."""

    @functools.wraps(method)
    def call(self: nn.Module, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except StateError:
            raise
        except (RuntimeError, PlacementError) as error:
            unit = Unit.of(self)
            met = met_a_shard(error) or NO_STRATEGY in str(error)
            if unit is None or unit.live is Live.UNSHARDED or not met:
                raise
            raise ShardedAccessError(
                f"{type(self).__name__}.{name}() used parameters of unit {unit.name} while they are "
                f"sharded, outside its forward. Call register_fsdp_forward_method(module, {name!r}) once, or "
                "module.unshard() before and module.reshard() after; a method that changes shapes, before sharding"
            ) from error

    return call
