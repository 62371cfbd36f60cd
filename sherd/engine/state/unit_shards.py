"""The shards of one unit: their places on its modules, and the check that optimizers still write into their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from sherd.engine.state.flat import FlatShard
from sherd.engine.state.group import Group, group_key_of
from sherd.engine.state.parameter import ShardedParameter
from sherd.engine.state.place import Place, key_of


class UnitShards:
    """The parameters of a unit, in groups, as they are between steps."""

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self._parameters = tuple(parameters)
        self._groups: tuple[Group, ...] = ()
        self._flat_place: Place | None = None
        self._hung = {place.key: (record, place) for record in parameters for place in record.places}

    def regroup(self, groups: Sequence[Group]) -> None:
        """Put the parameters in these groups."""
        self._groups = tuple(groups)

    # Where they hang

    def record_at(self, module: nn.Module, attribute: str) -> ShardedParameter | None:
        """Returns the parameter that hangs on `module`, one of the unit's, as `attribute`."""
        hung = self._hung.get(key_of(module, attribute))
        return None if hung is None else hung[0]

    def hides(self, module: nn.Module, attribute: str) -> bool:
        """Returns whether a flat parameter stands for the parameter there, so that the module does not list it."""
        hung = self._hung.get(key_of(module, attribute))
        return hung is not None and not hung[1].registered

    def merge(self, module: nn.Module, attribute: str) -> None:
        """Merge the shards, which are in one group, into one flat parameter for the optimizer: `attribute` of `module`.
        The caller must group the unit anew."""
        (group,) = self._groups
        flat = FlatShard(group)
        for record in self._parameters:
            record.merge(flat)
        module.register_parameter(attribute, flat.parameter)
        self._flat_place = Place(module, attribute)

    @property
    def shows_flat_parameter(self) -> bool:
        """True if a flat parameter is registered in the place of the unit's own."""
        return self._flat_place is not None and self._flat_place.registered

    def register(self, registered: bool) -> None:
        """Register the parameters on their modules in place of the flat one, or the other way round, if there is
        one."""
        if self._flat_place is None:
            return
        for record in self._parameters:
            record.shard.requires_grad_(record.requires_grad)  # which the flat one may have been told since
            record.register(registered)
        self._flat_place.register(not registered)

    # What they are

    @property
    def optimizer_params(self) -> list[nn.Parameter]:
        """The unit's parameters as the optimizer has them."""
        return [optimizer_param.parameter for group in self._groups for optimizer_param in group.optimizer_params]

    @property
    def num_kinds(self) -> int:
        """The number of groups that the parameters need, apart from plans: one for each dtype and trainability."""
        return len({replace(group_key_of(record), plan_id=None) for record in self._parameters})

    @property
    def on_meta(self) -> list[str]:
        """The names of the parameters that have no data yet."""
        return [record.name for group in self._groups if group.is_meta for record in group.parameters]

    # What users do to them

    @property
    def are_in_buffer(self) -> bool:
        """True if all shards still lie in their groups' buffers."""
        return all(group.is_in_buffer for group in self._groups)

    @property
    def are_on_one_device(self) -> bool:
        """True if all shards are on one device, as they are once `module.to()` is done with the last module."""
        device = self._parameters[0].resting.device if self._parameters else None
        # From the last one on, which `module.to()` moves last, so that this ends at the first look until it is done.
        return all(record.resting.device == device for record in reversed(self._parameters))

    def note_optimizer_params(self) -> None:
        """Remember that the shards are other Parameters now, in the same memory."""
        for group in self._groups:
            group.shard_memory.note()

    def settle(self) -> bool:
        """Copy values that a user has put elsewhere into the shard buffers. Returns whether there were any.

        Raises:
            WriteBackError: values that a user gave are lost, or have another shape.
        """
        moved = [group for group in self._groups if not group.shard_memory.are_taken]
        for group in moved:
            group.shard_memory.settle()
        return bool(moved)

    @property
    def have_moved(self) -> bool:
        """Whether anything was put in the place of the shards' memory."""
        return False in [group.shard_memory.are_taken for group in self._groups]
