"""The shards of one unit: their places on its modules, and the check that optimizers still write into their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from sherd.engine.state.flat import FlatShard
from sherd.engine.state.group import Group, group_key_of
from sherd.engine.state.parameter import ParameterPlace, ShardedParameter, key_of


class UnitShards:
    """The parameters of a unit, in groups, as they are between steps."""

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self._parameters = tuple(parameters)
        self._groups: tuple[Group, ...] = ()
        self._flat_place: ParameterPlace | None = None
        self._at_place = {place.key: (record, place) for record in parameters for place in record.places}

    def regroup(self, groups: Sequence[Group]) -> None:
        self._groups = tuple(groups)

    # Their places

    def record_at(self, module: nn.Module, attribute: str) -> ShardedParameter | None:
        at_place = self._at_place.get(key_of(module, attribute))
        return None if at_place is None else at_place[0]

    def hides(self, module: nn.Module, attribute: str) -> bool:
        at_place = self._at_place.get(key_of(module, attribute))
        return at_place is not None and not at_place[1].registered

    def merge(self, module: nn.Module, attribute: str) -> None:
        """Merge the shards, which are in one group, into one flat parameter: `attribute` of `module`.

        The caller must regroup the unit.
        """
        (group,) = self._groups
        flat = FlatShard(group)
        for record in self._parameters:
            record.merge(flat)
        module.register_parameter(attribute, flat.parameter)
        self._flat_place = ParameterPlace(module, attribute)

    @property
    def shows_flat_parameter(self) -> bool:
        return self._flat_place is not None and self._flat_place.registered

    def register(self, registered: bool) -> None:
        """Register the parameters in place of the flat one, or, if not `registered`, the flat one in place of them."""
        if self._flat_place is None:
            return
        for record in self._parameters:
            record.shard.requires_grad_(record.requires_grad)  # a user may have changed the flat one's since
            record.register(registered)
        self._flat_place.register(not registered)

    # Their properties

    @property
    def optimizer_params(self) -> list[nn.Parameter]:
        return [optimizer_param.parameter for group in self._groups for optimizer_param in group.optimizer_params]

    def num_kinds(self, but_sums: bool) -> int:
        """Returns how many groups the parameters need apart from plans, `but_sums` without those that are never cut."""
        chosen = [record for record in self._parameters if not (but_sums and record.mesh.only_sums)]
        return len({replace(group_key_of(record), plan_id=None) for record in chosen})

    @property
    def on_meta(self) -> list[str]:
        return [record.name for group in self._groups if group.shard_buffer.is_meta for record in group.parameters]

    # What users changed

    @property
    def are_in_buffer(self) -> bool:
        """True if all shards are still views of their groups' buffers."""
        return all(group.is_in_buffer for group in self._groups)

    @property
    def are_on_one_device(self) -> bool:
        device = self._parameters[0].resting.device if self._parameters else None
        # `module.to()` moves the last one last, so this ends at the first look until the call is done.
        return all(record.resting.device == device for record in reversed(self._parameters))

    def note_optimizer_params(self) -> None:
        """Remember the shards, which are other Parameters now, in the same memory."""
        for group in self._groups:
            group.shard_memory.note()

    def settle(self) -> bool:
        """Copy values that a user put in other memory into the shard buffers. Returns whether there were any.

        Raises:
            WriteBackError: values that a user gave are lost, or have another shape.
        """
        moved = [group for group in self._groups if not group.shard_memory.are_taken]
        for group in moved:
            group.shard_memory.settle()
        return bool(moved)

    def settle_masters(self) -> None:
        """Make what a user has written to shards its own master."""
        for group in self._groups:
            if group.masters is not None:
                group.masters.settle()

    @property
    def have_moved(self) -> bool:
        """True if a user gave shards other memory."""
        return False in [group.shard_memory.are_taken for group in self._groups]
