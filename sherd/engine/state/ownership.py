"""Ownership: every parameter belongs to one unit, the first that shards it.

A later unit whose modules use the parameter too (tied weights) borrows it: the same shard is registered at the later
unit's modules, and the owner becomes a tied owner, which is unsharded whenever the borrower is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from sherd._torch import is_fsdp_of_torch, is_replicated
from sherd.engine.state.parameter import ParameterPlace, ShardedParameter, record_of
from sherd.errors import ModuleError
from sherd.wrap.names import plain_name

UNIT = "_sherd_unit"
"""The attribute of a module for the unit that it was made into."""


def is_taken(module: nn.Module) -> bool:
    """Returns whether `module` is a unit, or torch's DDP has it. A unit around it leaves it alone, and all below."""
    return module.__dict__.get(UNIT) is not None or is_replicated(module)


@dataclass(frozen=True)
class DiscoveredParameter:
    """One parameter to shard: its name as seen from the unit's module, the first module that has it, all its places."""

    name: str
    parameter: nn.Parameter
    holder: nn.Module
    places: list[ParameterPlace] = field(default_factory=list)


@dataclass(frozen=True)
class BorrowedParameter:
    record: ShardedParameter
    place: ParameterPlace


@dataclass(frozen=True)
class ParameterOwnership:
    """The modules and parameters of a unit.

    Attributes:
        modules: every module below the unit's that no nested unit has.
        ignored: the places of parameters to leave alone. `to_empty()` may exchange a Parameter, but not its place.
    """

    modules: list[nn.Module]
    owned: list[DiscoveredParameter]
    borrowed: list[BorrowedParameter]
    ignored: list[ParameterPlace] = field(default_factory=list)

    @classmethod
    def below(cls, roots: Sequence[nn.Module], ignored: Collection[nn.Parameter]) -> ParameterOwnership:
        """Walk the modules below `roots` that are not taken yet, and sort their parameters.

        Raises:
            ModuleError: torch's own FSDP has one of the modules.
        """
        ignored_ids = {id(parameter) for parameter in ignored}
        modules: dict[int, nn.Module] = {}
        owned: dict[int, DiscoveredParameter] = {}
        borrowed: list[BorrowedParameter] = []
        ignored_places: list[ParameterPlace] = []
        for prefix, module in _walk(roots):
            require_not_torchs(prefix, module)
            modules[id(module)] = module
            for attribute, parameter in module._parameters.items():
                place = ParameterPlace(module, attribute)
                if parameter is None:
                    # A flat parameter may stand for it, if a module is used inside a wrapper and outside of it.
                    shown = module.__dict__.get(attribute)
                    record = record_of(shown) if isinstance(shown, nn.Parameter) else None
                    if record is not None:
                        borrowed.append(BorrowedParameter(record, place))
                elif id(parameter) in ignored_ids:
                    ignored_places.append(place)
                elif (record := record_of(parameter)) is not None:
                    borrowed.append(BorrowedParameter(record, place))
                else:
                    name = plain_name(f"{prefix}.{attribute}" if prefix else attribute)
                    owned.setdefault(id(parameter), DiscoveredParameter(name, parameter, module)).places.append(place)
        return cls(list(modules.values()), list(owned.values()), borrowed, ignored_places)


def require_not_torchs(path: str, module: nn.Module) -> None:
    """Raise ModuleError if torch's own FSDP has `module`, at `path`."""
    if is_fsdp_of_torch(module):
        name = plain_name(path)
        raise ModuleError(
            f"{name + ', ' if name else ''}a {type(module).__name__}: torch's own FSDP has it already "
            "(torch.distributed.fsdp, its fully_shard or its FullyShardedDataParallel). Neither knows the units of the "
            "other, so some parameters would not train: use one library for the full model, and take fully_shard or "
            "FullyShardedDataParallel from sherd throughout"
        )


def _walk(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module below `roots` once, after its name. Leaves out taken modules, and all below them."""
    own = {id(root) for root in roots}
    seen: set[int] = set()
    stack = [("", root) for root in reversed(roots)]
    while stack:
        prefix, module = stack.pop()
        if id(module) in seen or (id(module) not in own and is_taken(module)):
            continue
        seen.add(id(module))
        yield prefix, module
        children = [(f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children()]
        stack.extend(reversed(children))
