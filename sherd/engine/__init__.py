"""HOW parameters and gradients move: the only place where layout, schedule and communication meet.

The rest of sherd imports the names in `__all__`, and none of the modules inside.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sherd.engine.between.gather import Gatherer as Gatherer
    from sherd.engine.between.gather import Line as Line
    from sherd.engine.between.unsharded import UnshardedCopies as UnshardedCopies
    from sherd.engine.make.adoption import Refreshed as Refreshed
    from sherd.engine.make.adoption import adopt_changes as adopt_changes
    from sherd.engine.make.build import make_unit as make_unit
    from sherd.engine.make.copying import deep_copied as deep_copied
    from sherd.engine.make.sharding import ShardingRequest as ShardingRequest
    from sherd.engine.run.hooks import BoundForward as BoundForward
    from sherd.engine.run.runtime import Runtime as Runtime
    from sherd.engine.run.sharded_access import met_a_shard as met_a_shard
    from sherd.engine.run.sizes import sizes_of as sizes_of
    from sherd.engine.run.stage import StageUnits as StageUnits
    from sherd.engine.run.unit import Unit as Unit
    from sherd.engine.state.flat import FlatParameter as FlatParameter
    from sherd.engine.state.group import Group as Group
    from sherd.engine.state.optimizers import watcher as watcher
    from sherd.engine.state.ownership import DiscoveredParameter as DiscoveredParameter
    from sherd.engine.state.ownership import ParameterOwnership as ParameterOwnership
    from sherd.engine.state.parameter import ShardedParameter as ShardedParameter

_HOMES = {
    "ParameterOwnership": "state.ownership",
    "BoundForward": "run.hooks",
    "FlatParameter": "state.flat",
    "DiscoveredParameter": "state.ownership",
    "Gatherer": "between.gather",
    "Group": "state.group",
    "Line": "between.gather",
    "Refreshed": "make.adoption",
    "Runtime": "run.runtime",
    "ShardedParameter": "state.parameter",
    "ShardingRequest": "make.sharding",
    "StageUnits": "run.stage",
    "Unit": "run.unit",
    "UnshardedCopies": "between.unsharded",
    "adopt_changes": "make.adoption",
    "deep_copied": "make.copying",
    "make_unit": "make.build",
    "met_a_shard": "run.sharded_access",
    "sizes_of": "run.sizes",
    "watcher": "state.optimizers",
}
"""The names of the door, and the module of each: the imports above once more, as type checkers read those."""

__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name):
        """Load the module of `name`: a program that shards a model needs no copies, no refresh and no sizes."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value
