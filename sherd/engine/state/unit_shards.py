"""The shards of one unit: where they hang on its modules, and whether their buffers are still what optimizers write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from sherd.engine.state.flat import FlatShard
from sherd.engine.state.group import Group, group_key_of
from sherd.engine.state.parameter import ShardedParameter
from sherd.engine.state.place import Place, key_of


class UnitShards:
    """What a unit holds between steps: its parameters, in groups."""

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self._parameters = tuple(parameters)
        self._groups: tuple[Group, ...] = ()
        self._flat_place: Place | None = None
        self._hung = {place.key: (record, place) for record in parameters for place in record.places}

    def regroup(self, groups: Sequence[Group]) -> None:
        """Have the parameters in these groups from now on."""
        self._groups = tuple(groups)

    # Where they hang

    def record_at(self, module: nn.Module, attribute: str) -> ShardedParameter | None:
        """The parameter that hangs on `module`, one of the unit's, as `attribute`."""
        hung = self._hung.get(key_of(module, attribute))
        return None if hung is None else hung[0]

    def hides(self, module: nn.Module, attribute: str) -> bool:
        """Whether a flat parameter stands for the one there, which is not among the module's parameters now."""
        hung = self._hung.get(key_of(module, attribute))
        return hung is not None and not hung[1].registered

    def merge(self, module: nn.Module, attribute: str) -> None:
        """Merge the shards, which are of one group, into one flat parameter for the optimizer, a parameter of `module`
        called `attribute`. The unit is to be grouped anew then."""
        (group,) = self._groups
        flat = FlatShard(group)
        for record in self._parameters:
            record.merge(flat)
        module.register_parameter(attribute, flat.parameter)
        self._flat_place = Place(module, attribute)

    @property
    def shows_flat_parameter(self) -> bool:
        """Whether a flat parameter is registered in the place of the unit's own."""
        return self._flat_place is not None and self._flat_place.registered

    def register(self, registered: bool) -> None:
        """With a flat parameter: have the parameters among their modules' instead of it, or it instead of them."""
        if self._flat_place is None:
            return
        for record in self._parameters:
            record.shard.requires_grad_(record.requires_grad)  # which the flat one may have been told since
            record.register(registered)
        self._flat_place.register(not registered)

    # What they are

    @property
    def optimizer_params(self) -> list[nn.Parameter]:
        """What the optimizer owns of the unit."""
        return [optimizer_param.parameter for group in self._groups for optimizer_param in group.optimizer_params]

    @property
    def num_kinds(self) -> int:
        """How many sorts of parameters the unit has, by dtype and trainability."""
        return len({replace(group_key_of(record), plan_id=None) for record in self._parameters})

    @property
    def on_meta(self) -> list[str]:
        """The names of the parameters that have no data yet."""
        return [record.name for group in self._groups if group.is_meta for record in group.parameters]

    # What users do to them

    @property
    def are_in_buffer(self) -> bool:
        """Whether all shards still lie in their groups' buffers."""
        return all(group.is_in_buffer for group in self._groups)

    @property
    def are_on_one_device(self) -> bool:
        """Whether all shards are on one device, as they are once `module.to()` is done with the last module."""
        device = self._parameters[0].resting.device if self._parameters else None
        # From the last one on, which the first is to move moves last: modules that move one by one look at one tensor.
        return all(record.resting.device == device for record in reversed(self._parameters))

    def note_optimizer_params(self) -> None:
        """Note that other Parameters are the shards now, in the same memory."""
        for group in self._groups:
            group.shard_memory.note()

    def settle(self) -> bool:
        """Take the values of what was put in the place of the shards' memory. Returns whether there was anything.

        Raises:
            WriteBackError: values that a user gave are lost, or of another shape.
        """
        moved = [group for group in self._groups if not group.shard_memory.are_taken]
        for group in moved:
            group.shard_memory.settle()
        return bool(moved)

    @property
    def have_moved(self) -> bool:
        """Whether anything was put in the place of the shards' memory."""
        return not all(group.shard_memory.are_taken for group in self._groups)
