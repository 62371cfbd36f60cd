"""The groups of one unit, and what the schedule asks of them: gather, wait, free, shrink, reduce, finish, discard.

The schedule decides for units; a unit carries each decision out on its groups, one after the other.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from sherd.comm.collectives import UsersCollectives
from sherd.comm.mesh import DataMesh
from sherd.comm.streams import Handoff, Streams, under_way
from sherd.comm.transport import Transport
from sherd.engine.moves.buffer_plan import BufferPlan
from sherd.engine.moves.gradients import Gradients
from sherd.engine.moves.selfgather import Phase, SelfGatheredWeights
from sherd.engine.moves.weights import Weights
from sherd.engine.run.backward import Backward
from sherd.engine.state.compared import Compared
from sherd.engine.state.fetching import RestingPlace
from sherd.engine.state.group import Group, batches_of
from sherd.engine.state.optimizers import watcher
from sherd.engine.state.parameter import ShardedParameter, notice_replaced
from sherd.engine.state.unit_shards import UnitShards
from sherd.errors import StateError
from sherd.policy import MixedPrecisionPolicy, UnitPolicy
from sherd.schedule.state import Live

TouchHook = tuple[OrderedDict[int, Callable[..., Any]], int, Callable[..., Any]]
"""A forward pre-hook that is installed while its unit is at rest only: the dict of a module's hooks, key, hook."""


class UnitGroups(ABC):
    """The parameters of one unit in groups, and the policy in force.

    Args:
        enter_backward: called when a gradient comes before a backward was announced.
        unshard: called when backward is about to read parameters that were freed.

    Attributes:
        surrounds: there are units below this unit's modules.
        backward: the unit's part in the present backward.
        shards: the parameters as they are between steps.
        self_gathered: the weights whose tensors have an all-gather of their own.
        touch_hooks: hooks on modules below the unit's own, to notice calls by themselves (`engine/run/touch.py`).
        compared: the facts about the unit that ranks have compared.
        gathers: some parameters are sharded over several ranks.
        keeps_copies: some group keeps copies of the shards, which have to be renewed after writes.
        is_on_all_ranks: each rank of the mesh holds elements of the unit.
        num_parts: the number of groups, if backward gathers them one by one, as those of another unit go; else 1.
        arriving: the copies to host memory of gradients that shards have already.
        updating: the step of the shards that a thread makes; None once it was waited for.
        late: such a step whose values gathers are to read after the next step only, from copies that are renewed then.
    """

    name: str
    parameters: list[ShardedParameter]
    shards: UnitShards

    def __init__(
        self,
        mesh: DataMesh,
        streams: Streams,
        precision: MixedPrecisionPolicy,
        place: RestingPlace,
        policy: UnitPolicy,
        surrounds: bool,
        enter_backward: Callable[[], None],
        unshard: Callable[[], None],
    ) -> None:
        self.mesh = mesh
        self.streams = streams
        self.precision = precision
        self.place = place
        self.policy = policy
        self.surrounds = surrounds
        # Groups call these, so they hold the unit weakly. A circle would leave the shards of a deleted model to the
        # garbage collector: test_they_keep_nothing_alive.
        self._enter_backward, self._unshard = enter_backward, unshard
        self.backward = Backward(enter_backward, mesh.num_shards * mesh.num_replicas)
        self.touch_hooks: list[TouchHook] = []
        self.compared = Compared()
        self.weights: list[Weights] = []
        self.gradients: list[Gradients] = []
        self.arriving: list[Handoff] = []
        self.updating: Handoff | None = None
        self.late: Handoff | None = None

    @property
    @abstractmethod
    def in_full_precision(self) -> bool:
        """Whether the unit computes in the parameters' own dtype now, whatever `param_dtype` says."""

    @property
    @abstractmethod
    def phase(self) -> Phase:
        """The phase that reads what is gathered now."""

    @property
    def live(self) -> Live:
        """The form of the parameters. A unit without parameters is always sharded."""
        lives = [live for weights in self.weights if (live := weights.live) is not Live.SHARDED]
        return lives[0] if lives else Live.SHARDED

    @property
    def unsharded_bytes(self) -> int:
        return sum(weights.group.unsharded_bytes for weights in self.weights)

    @property
    def meshes(self) -> list[DataMesh]:
        return list(dict.fromkeys((self.mesh, *(each.mesh for each in self.parameters))))

    # Grouping

    def regroup(self) -> None:
        """Put the parameters into groups, and the shards of each group into one buffer."""
        self.await_update()
        if self.live is not Live.SHARDED:
            raise StateError(f"unit {self.name}: its parameters cannot be regrouped while they are {self.live.name}")
        self.compared.changed()
        self.weights, self.gradients = [], []
        part_bytes = self.mesh.comm.part_bytes
        for batch in batches_of(self.parameters, self.streams, self.surrounds, self.gathers_as_one, part_bytes):
            group = Group(batch.parameters, self.precision, self.place, batch.is_part, batch.promoted)
            completed = self.backward.completed(len(self.gradients))
            plan = BufferPlan.of(group, self.streams, self.reduce_buffers)
            gradients = Gradients(group, plan, self.streams, self._enter_backward, completed)
            self.gradients.append(gradients)
            self.weights.append(
                SelfGatheredWeights(group, plan, self.streams, self.precision, gradients.watch, self._unshard)
                if group.gathers_itself
                else Weights(group, plan, self.streams, gradients.watch, self._unshard)
            )
        self.self_gathered = [each for each in self.weights if isinstance(each, SelfGatheredWeights)]
        self.backward.regroup(self.weights, self.gradients)
        self.shards.regroup([weights.group for weights in self.weights])
        self.keeps_copies = any(weights.group.keeps_copies for weights in self.weights)
        groups = [weights.group for weights in self.weights]
        self.gathers = any(group.mesh.num_shards > 1 for group in groups)
        self.compared.have_replicas(any(group.mesh.holds_copies for group in groups))
        sizes = [group.sizes for group in groups if group.mesh is self.mesh]
        are_copied = any(group.is_one_piece and group.shard_numel for group in groups)
        # A part costs a call, and begins later. So it is for units with shards in host memory: what is unsharded is the
        # most that they have on the device. A unit around others passes its groups before and after all of theirs, and
        # ranks that join others gather all groups at once.
        is_in_parts = self.place.is_elsewhere and not self.surrounds and self.mesh.comm.divergence != "join"
        self.num_parts = len(self.weights) if is_in_parts else 1
        self.is_on_all_ranks = are_copied or (bool(sizes) and all(map(any, zip(*sizes, strict=True))))

    def _grouping(self) -> tuple[bool, bool]:
        """Returns the part of the policy on which groups and their buffers depend."""
        return self.gathers_as_one, self.streams.in_host_order or self.reduce_buffers <= 1

    @property
    def gathers_as_one(self) -> bool:
        """Whether the user has a custom collective or a hook, which gets all parameters of the unit at once."""
        return bool(self.policy.all_gather or self.policy.reduce_scatter or self.policy.all_reduce_hook)

    @property
    def may_lack(self) -> bool:
        """Whether ranks without gradients take part in reductions of the unit."""
        return any(gradients.may_lack(self.policy) for gradients in self.gradients)

    # Shards that change

    def flatten(self, module: nn.Module, attribute: str) -> None:
        """Merge the shards, all of one group, into the flat parameter `attribute` of `module`, for the optimizer."""
        if any(each.grad_dtype for each in self.parameters):  # one flat parameter cannot have several
            for parameter in self.parameters:
                parameter.forget_grad_dtype()
            self.regroup()
        self.shards.merge(module, attribute)
        self.regroup()

    def rebind(self) -> None:
        """Put shards that may have moved (`module.to()`, a load) back into one buffer, if all are on one device."""
        for parameter in self.parameters:
            parameter.keep_attributes()
        if self.shards.are_on_one_device and (self.keep_grad_dtypes() or not self.shards.are_in_buffer):
            self.regroup()

    def keep_grad_dtypes(self) -> bool:
        """Note the `grad_dtype` of each shard, as `ShardedParameter.keep_grad_dtype` does.

        Returns:
            True if a user has set one, so that the unit must be regrouped.
        """
        return True in [parameter.keep_grad_dtype() for parameter in self.parameters]  # of all: it also gives back

    @contextmanager
    def gradients_kept(self) -> Iterator[None]:
        """Inside the context `module.to()` leaves gradients in the `grad_dtype` that a user has set, as it leaves that.

        They follow their parameters to another device.
        """
        must_regroup = self.keep_grad_dtypes()
        kept = {each: each.shard.grad for each in self.parameters if each.grad_dtype}
        for record in kept:
            record.shard.grad = None
        try:
            yield
            if must_regroup:
                self.regroup()
        finally:
            for record, gradient in kept.items():
                record.shard.grad = None if gradient is None else gradient.to(record.shard.device)

    def notice_moved(self) -> None:
        """Take the values of memory that the user has given to shards in the place of their own.

        Raises:
            WriteBackError: values are lost, or have another shape.
        """
        if self.shards.settle() and not self.shards.are_in_buffer:
            self.rebind()  # some shards have another dtype or device now

    def notice_replaced(self) -> None:
        """Take the values of Parameters that the user has put in the place of shards. Meta shards get memory by that.

        Raises:
            WriteBackError: a Parameter has another shape.
        """
        if self.policy.notices_replaced and notice_replaced(self.parameters):
            watcher.sharded_again()

    # The schedule's actions

    def gather(self, in_full_precision: bool | None = None, but: Collection[int] = ()) -> None:
        """Start the all-gathers of all groups but the numbers `but`, by default in the unit's present precision."""
        if self.updating is not None:
            self.await_update()
        for each in self.self_gathered:
            each.be_read_in(self.phase)
        user = self.policy.all_gather
        for number, weights in enumerate(self.weights):
            if number in but or weights.live in (Live.GATHERING, Live.UNSHARDED):
                continue  # other groups of the unit were freed alone, or are gathered later
            precisely = in_full_precision
            if precisely is None:
                precisely = self.precision.full_precision_in_eval and self.in_full_precision
            if precisely and self.late is not None:  # the copy in this dtype was not renewed with the others
                self.await_update()
            if self.policy.notices_replaced and notice_replaced(weights.group.parameters):
                watcher.sharded_again()
            mesh = weights.group.mesh
            transport: Transport = mesh.gather_transport
            if user is not None and not mesh.only_sums:
                transport = UsersCollectives(user, mesh.shard_group)
            weights.gather(transport, precisely)

    def gather_but(self, left: int) -> None:
        """Start the all-gathers of all groups but the last `left`, and of the first group in any case."""
        self.gather(but=range(max(len(self.weights) - left, 1), len(self.weights)))

    def gather_more(self, left: int) -> None:
        """Go on with a gather that has left groups, until `left` are left."""
        if self.live is Live.GATHERING:  # else an error came in between, and freed what was gathered
            self.gather_but(left)

    def wait(self) -> None:
        """Wait for the all-gathers, and show unsharded parameters."""
        for weights in self.weights:
            if weights.live is not Live.UNSHARDED:
                weights.wait()
        # In C: the key, and the hook as the default of `pop`.
        deque(itertools.starmap(OrderedDict.pop, self.touch_hooks), 0)

    def free(self) -> None:
        """Free the unsharded parameters, and show shards."""
        self.watch_touch()
        keeps_storage = self.policy.keeps_storage
        for weights in self.weights:
            weights.free(keeps_storage)

    def collect(self) -> None:
        """Copy the gradients of groups that were freed alone into rows, before those of the last group come."""
        for weights, gradients in zip(self.weights, self.gradients, strict=True):
            if weights.live is Live.SHARDED:
                gradients.collect()

    def shrink(self) -> None:
        """Show shards, and keep a part of the unsharded parameters for the smaller mesh."""
        size = self.policy.reshard_after_forward
        assert isinstance(size, int), "only an int asks for a smaller mesh"
        for weights in self.weights:
            weights.shrink(size, self.policy.keeps_storage)
        self.watch_touch()

    def watch_touch(self) -> None:
        """Put the `touch_hooks` in their places, each before all other hooks on its module.

        A unit with `on_touch="unshard"` needs them also while it rests unsharded, kept for the backward of such a call.
        """
        for hooks, key, hook in self.touch_hooks:
            has_others = bool(hooks)
            hooks[key] = hook
            if has_others:
                # A key that comes back is the dict's last. A user's hook that computes a weight (weight norm) needs the
                # gather before: test_a_users_hook_that_computes_the_weight_before_the_call_finds_unsharded_parameters.
                hooks.move_to_end(key, last=False)

    def reduce(self, policy: UnitPolicy | None = None, but: Collection[int] = ()) -> None:
        """Start the reductions of all groups but the numbers `but`, by `policy`; None: by the unit's policy."""
        if policy is None:
            policy = self.policy
        user, apart = policy.reduce_scatter, policy.separate_reduce_group
        # All rows are taken before the first reduction is queued. Else compute would wait for that reduction before it
        # takes the rows of the second group.
        for gradients in self.gradients if len(self.gradients) > 1 else ():
            gradients.collect()
        for number, gradients in enumerate(self.gradients):
            if number in but:
                continue
            mesh = gradients.group.mesh
            if user is not None and not mesh.only_sums:
                transport: Transport = UsersCollectives(user, mesh.reduction_group() if apart else mesh.shard_group)
            else:
                transport = mesh.separate_reduce_transport if apart else mesh.reduce_transport
            if gradients.narrowing is not None:
                transport = gradients.narrowed(transport, self.backward.number)
            gradients.reduce(policy, transport)

    def narrowings_kept(self) -> list[Callable[[], None]]:
        """Returns what restores what is kept of reductions now, and the number of backwards; empty if nothing is."""
        kept = [each.narrowing.kept() for each in self.gradients if each.narrowing is not None]
        return [*kept, partial(self.backward.go_on, self.backward.number)] if kept else []

    def finish_reduce(self) -> None:
        """Wait for the reductions, and add their results to the gradients of the shards."""
        for gradients in self.gradients:
            gradients.finish_reduce(self.policy)
        if self.policy.when_reduced is not None:
            self.policy.when_reduced()

    def discard(self) -> None:
        """Drop gradients that have not reached the shards."""
        for weights in self.weights:
            weights.drop_gradients()
        for gradients in self.gradients:
            gradients.discard()

    def land_gradients(self, ahead: bool = False) -> None:
        """Wait for gradients on their way to host memory, where no stream orders the optimizer that reads them.

        `ahead`: give them to the shards at once, where nothing reads them yet; whoever steps waits for `arriving`.
        """
        self.arriving = [copy for gradients in self.gradients for copy in gradients.land(ahead)]
        under_way.update((id(each), each) for each in self.arriving)

    def update_by(self, step: Handoff, is_late: bool = False) -> None:
        """Note the step of the shards that a thread is to make once the gradients that are `arriving` have come."""
        for each in self.arriving:
            under_way.pop(id(each), None)
        under_way[id(step)] = step
        if is_late:
            self.late = step
        else:
            self.updating = step

    def renew_copies(self) -> list[Handoff]:
        """Begin to copy the shards to the copies that gathers read. Returns what to wait for before shards change."""

        def renew(group: Group, async_op: bool) -> None:
            group.source(group.compute_dtype)

        return [self.streams.gather.run(partial(renew, weights.group)) for weights in self.weights]

    def await_update(self) -> None:
        """Block the caller until a thread has made its step of the shards, if there is one. Raises its error."""
        updating, self.updating, self.late = self.updating or self.late, None, None
        if updating is not None:
            try:
                updating.wait_on_host()
            finally:
                under_way.pop(id(updating), None)

    @property
    def reduce_buffers(self) -> int:
        """The number of units that may be in reduction while the next unit collects gradients."""
        chosen = self.policy.reduce_buffers
        return chosen if chosen is not None else int(not self.streams.in_host_order)
