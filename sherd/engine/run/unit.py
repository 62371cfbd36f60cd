"""One unit: the modules of one `fully_shard` call, their parameters in groups, and the policy in force.

The schedule decides for whole units; a unit carries each decision out on its groups, one after the other.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from sherd._torch import in_backward, say_fully_sharded, write_into
from sherd.comm.collectives import UsersCollectives
from sherd.comm.mesh import DataMesh
from sherd.comm.streams import Streams
from sherd.comm.transport import Transport
from sherd.engine.moves.buffer_plan import BufferPlan
from sherd.engine.moves.gradients import Gradients
from sherd.engine.moves.selfgather import SelfGatheredWeights
from sherd.engine.moves.weights import Weights
from sherd.engine.run.backward import Backward, if_alive
from sherd.engine.state.compared import Compared
from sherd.engine.state.fetching import RestingPlace
from sherd.engine.state.group import Group, batches_of
from sherd.engine.state.optimizers import watcher
from sherd.engine.state.ownership import UNIT
from sherd.engine.state.parameter import ParameterPlace, ShardedParameter, notice_replaced
from sherd.engine.state.unit_shards import UnitShards
from sherd.errors import StateError, WrapperStateError
from sherd.policy import MixedPrecisionPolicy, UnitPolicy, UnshardTerms
from sherd.schedule.state import Live

_ids = itertools.count()

TouchHook = tuple[OrderedDict[int, Callable[..., Any]], int, Callable[..., Any]]
"""A forward pre-hook that is installed while its unit is at rest only: the dict of a module's hooks, key, hook."""


class _Runtime(Protocol):
    """The methods of `Runtime` that a unit calls. An import of `Runtime` itself would be circular."""

    @property
    def units(self) -> Sequence[Unit]: ...
    @property
    def is_idle(self) -> bool: ...
    def show_shards(self, unit: Unit) -> None: ...
    def shards_written(self, unit: Unit) -> None: ...
    def before_backward(self, unit: Unit) -> None: ...
    def finish_unshard(self, unit: Unit) -> None: ...
    def reset(self) -> None: ...


class ModuleRuns:
    """The runs of a unit of several modules: each lasts from one module's forward until all have run once."""

    def __init__(self, modules: Sequence[weakref.ref[nn.Module]]) -> None:
        self._modules = modules
        self._to_run: set[int] = set()

    def begin(self) -> bool:
        """Note that a module begins a forward. Returns True if the unit's run begins with it."""
        begins = not self._to_run
        if begins:
            self._to_run = {id(module) for ref in self._modules if (module := ref()) is not None}
        return begins

    def end(self, module: nn.Module) -> bool:
        """Note that `module` has ended a forward. Returns True if the unit's run ends with it."""
        was_running = id(module) in self._to_run
        self._to_run.discard(id(module))
        return was_running and not self._to_run

    def give_up(self) -> bool:
        """Note that the outermost forward is over. Returns True if a run was still going on."""
        was_running = bool(self._to_run)
        self._to_run.clear()
        return was_running


_nowhere = type(None)  # called, it returns None: the runtime of a unit before its first forward


meshes: weakref.WeakValueDictionary[int, DataMesh] = weakref.WeakValueDictionary()
"""The meshes of units, by their ids, in the order of their first units."""


class Unit:
    """The modules of one `fully_shard` call, whose parameters are gathered and freed as one.

    A unit holds its modules weakly: they hold the unit, and a deleted model must be freed at once.

    Attributes:
        tied_owners: the units that own a parameter which this unit's modules use too.
        surrounds: there are units below this unit's modules.
        ignored: the places of parameters that no unit shards; `ignored_names` are their names in the model.
        sealed_into: returns the unit's runtime, if it has one that still exists.
        backward: the unit's part in the present backward.
        runs: the runs of the modules, for a unit of several.
        shards: the parameters as they are between steps.
        lent: the terms on which unsharded copies are lent to the user, None outside of such a context.
        touch_hooks: hooks on modules below the unit's own, to notice calls by themselves (`engine/run/touch.py`).
        compared: the facts about the unit that ranks have compared.
        gathers: some parameters are sharded over several ranks.
        keeps_copies: some group keeps copies of the shards, which have to be renewed after writes.
        is_on_all_ranks: each rank of the mesh holds elements of the unit.
    """

    RUNTIME = "_sherd_runtime"
    """The attribute of a root module for its runtime."""
    FRONT_END = "_sherd_state"
    """The attribute of a module for what its front end keeps besides the unit."""
    ATTRIBUTES = (UNIT, RUNTIME, FRONT_END)
    """All attributes of modules that sherd writes."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[ShardedParameter],
        tied_owners: Sequence[Unit],
        mesh: DataMesh,
        streams: Streams,
        precision: MixedPrecisionPolicy,
        place: RestingPlace,
        policy: UnitPolicy,
        surrounds: bool,
        ignored: Sequence[ParameterPlace],
    ) -> None:
        self.id = next(_ids)
        self.class_name = type(modules[0]).__name__
        self.name = self.class_name
        self.mesh = mesh
        self.streams = streams
        self.precision = precision
        self.policy = policy
        self.surrounds = surrounds
        self.place = place
        self._modules = tuple(weakref.ref(module) for module in modules)
        self.sealed_into: Callable[[], _Runtime | None] = _nowhere
        enter_backward = partial(if_alive, weakref.ref(self), Unit._enter_backward)
        self.backward = Backward(enter_backward, mesh.num_shards * mesh.num_replicas)
        self.ignored_names: tuple[str, ...] = ()
        self.runs = ModuleRuns(self._modules) if len(modules) > 1 else None
        self.lent: UnshardTerms | None = None
        self.was_unsynced = False  # True once the policy had a backward leave gradients unreduced
        self.touch_hooks: list[TouchHook] = []
        self.compared = Compared()
        self.weights: list[Weights] = []
        self.gradients: list[Gradients] = []
        self.have(parameters, tied_owners, ignored)

    def __repr__(self) -> str:
        live = self.live.name.lower()
        return f"Unit({self.name}, {len(self.parameters)} parameters in {len(self.weights)} groups, {live})"

    # Units and modules

    @staticmethod
    def of(module: nn.Module) -> Unit | None:
        unit = module.__dict__.get(UNIT)
        return unit if isinstance(unit, Unit) else None

    @staticmethod
    def below(root: nn.Module) -> list[Unit]:
        """Returns the units at and below `root`, each once, in the order of `named_modules`."""
        # `modules()` is slower: its nested generators pass each module through all modules above.
        units: dict[int, Unit] = {}
        ahead: list[nn.Module | None] = [root]
        passed: set[nn.Module] = set()
        while ahead:
            module = ahead.pop()
            if module is not None and module not in passed:
                passed.add(module)
                ahead += reversed(module._modules.values())
                if UNIT in module.__dict__ and (unit := Unit.of(module)) is not None:
                    units[unit.id] = unit
        return list(units.values())

    @staticmethod
    @contextmanager
    def members_shown(units: Iterable[Unit]) -> Iterator[None]:
        """Within the context, the members of the units' flat parameters are registered under their own names."""
        switched = [unit for unit in units if unit.shards.shows_flat_parameter]
        for unit in switched:
            unit.shards.register(True)
        try:
            yield
        finally:
            for unit in switched:
                unit.shards.register(False)

    @staticmethod
    def named_members(root: nn.Module) -> dict[str, nn.Parameter]:
        """Returns the parameters of `root` by name, with the members of flat parameters in the place of these."""
        with Unit.members_shown(Unit.below(root)):
            return dict(root.named_parameters())

    @staticmethod
    def attached_to(module: nn.Module) -> list[object]:
        """Returns what sherd has written on `module`."""
        return [module.__dict__[key] for key in Unit.ATTRIBUTES if key in module.__dict__]

    def attach_to(self, module: nn.Module) -> None:
        """Write the unit on `module`, which then keeps the unit alive. torch's DDP leaves such a module alone."""
        write_into(module, UNIT, self)
        say_fully_sharded(module)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that still exist."""
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def live(self) -> Live:
        """The form of the parameters. A unit without parameters is always sharded."""
        lives = [live for weights in self.weights if (live := weights.live) is not Live.SHARDED]
        return lives[0] if lives else Live.SHARDED

    @property
    def unsharded_bytes(self) -> int:
        return sum(weights.group.unsharded_bytes for weights in self.weights)

    def join(self, runtime: _Runtime | None) -> None:
        self.sealed_into = _nowhere if runtime is None else weakref.ref(runtime)

    def have(
        self, parameters: Sequence[ShardedParameter], tied_owners: Sequence[Unit], ignored: Sequence[ParameterPlace]
    ) -> None:
        """Replace what the unit consists of, in new groups. Shards that stay are the same Parameters."""
        self.parameters, self.tied_owners, self.ignored = list(parameters), tuple(tied_owners), list(ignored)
        self.shards = UnitShards(self.parameters)
        for parameter in self.parameters:
            parameter.belong_to(self)
        self.regroup()

    def rename(self, unit_name: str, module_names: dict[int, str]) -> None:
        """Take names as seen from the root module. `module_names`: by the ids of modules."""
        self.name = unit_name
        for parameter in self.parameters:
            parameter.rename(module_names)
        self.ignored_names = tuple(
            f"{module_names[place.module_id]}.{place.attribute}".lstrip(".")
            for place in self.ignored
            if place.module_id in module_names
        )

    def change(self, **fields: Any) -> None:
        """Replace fields of the policy. The schedule sees the new policy at the next forward or backward.

        Raises:
            StateError: the groups would change, and gradients wait for a reduction.
        """
        before, grouping = self.policy, self._grouping()
        self.policy = UnitPolicy(**(before.__dict__ | fields))  # faster than `replace`
        self.was_unsynced |= not (self.policy.reduce_gradients and self.policy.all_reduce_gradients)
        self.compared.changed()
        if grouping == self._grouping():
            return
        if self.backward.has_unreduced:
            self.policy = before
            raise StateError(
                f"{', '.join(fields)} of unit {self.name} cannot change while gradients of earlier backwards wait for "
                "their reduction; change it before the first backward of a step"
            )
        self.show_shards()
        self.regroup()

    def reduce_fully(self, is_last: bool) -> None:
        """Reduce gradients over all axes in the next backward if it `is_last`, else only over axes that cannot wait."""
        policy = self.policy
        over_shards = is_last or not policy.accumulates_unsharded
        over_copies = is_last or not policy.accumulates_copies
        if (policy.reduce_gradients, policy.all_reduce_gradients) != (over_shards, over_copies):
            self.change(reduce_gradients=over_shards, all_reduce_gradients=over_copies)

    # Grouping

    def regroup(self) -> None:
        """Put the parameters into groups, and the shards of each group into one buffer."""
        if self.live is not Live.SHARDED:
            raise StateError(f"unit {self.name}: its parameters cannot be regrouped while they are {self.live.name}")
        # The unit holds its groups, and they call it weakly. A circle would leave the shards of a deleted model to the
        # garbage collector: test_they_keep_nothing_alive.
        this = weakref.ref(self)
        self.compared.changed()
        self.weights, self.gradients = [], []
        part_bytes = self.mesh.comm.part_bytes
        for batch in batches_of(self.parameters, self.streams, self.surrounds, self.gathers_as_one, part_bytes):
            group = Group(batch.parameters, self.precision, self.place, batch.is_part, batch.promoted)
            completed = self.backward.completed(len(self.gradients))
            plan = BufferPlan.of(group, self.streams, self.reduce_buffers)
            gradients = Gradients(group, plan, self.streams, partial(if_alive, this, Unit._enter_backward), completed)
            self.gradients.append(gradients)
            unshard = partial(if_alive, this, Unit.unshard_for_backward)
            self.weights.append(
                SelfGatheredWeights(group, plan, self.streams, self.precision, gradients.arrivals.watch, unshard)
                if group.gathers_itself
                else Weights(group, plan, self.streams, gradients.arrivals.watch, unshard)
            )
        self.backward.regroup(self.weights, self.gradients)
        self.shards.regroup([weights.group for weights in self.weights])
        self.keeps_copies = any(weights.group.keeps_copies for weights in self.weights)
        groups = [weights.group for weights in self.weights]
        self.gathers = any(group.mesh.num_shards > 1 for group in groups)
        self.compared.have_replicas(any(group.mesh.holds_copies for group in groups))
        sizes = [group.sizes for group in groups if group.mesh is self.mesh]
        are_copied = any(group.is_one_piece and group.shard_numel for group in groups)
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

    @property
    def waits_for_replicas(self) -> bool:
        """Whether gradients are reduced over the shard axis now, and over the replicas later."""
        policy = self.policy
        return self.mesh.num_replicas > 1 and policy.reduce_gradients and not policy.all_reduce_gradients

    @property
    def steps_in_backward(self) -> bool:
        return self.policy.when_reduced is not None

    @property
    def meshes(self) -> list[DataMesh]:
        return list(dict.fromkeys((self.mesh, *(each.mesh for each in self.parameters))))

    def own_gradients(self, owners: Mapping[ShardedParameter, int]) -> None:
        """Let the full gradients of some parameters be reduced to these ranks of their cuts, from the next backward on.

        All ranks must call it with the same owners. Parameters, their values and their gathers stay as they are.

        Raises:
            StateError: a forward or backward is under way, or the unit has gradients, or some wait for a reduction.
        """
        self.require_at_rest("optimizer that wants full gradients")
        if self.backward.has_unreduced or any(each.optimizer_param.grad is not None for each in owners):
            raise StateError(
                f"unit {self.name} has gradients, and an optimizer is made that wants full ones; make it before the "
                "first backward, or after zero_grad()"
            )
        for record, owner in owners.items():
            record.gradient_owner = owner
        self.regroup()

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

    @property
    def unsynced(self) -> str:
        """The unit's name if gradients wait for a reduction, or for the second half of one; else empty."""
        return self.name if self.backward.has_unreduced else ""

    def before_step(self) -> None:
        """Take values that the user gave to shards: an optimizer is about to step them.

        Raises:
            WrapperStateError: the unsharded copies that are lent will be written over the step's results.
            WriteBackError: values of the user are lost, or have another shape.
        """
        if self.lent is not None and self.lent.writeback:
            raise WrapperStateError(
                f"an optimizer steps unit {self.name} inside an unshard context, at the end of which the whole "
                "parameters will be written over its shards; step outside, or enter the context with writeback=False"
            )
        self.shards.settle()

    # What the user asks for

    def lend(self, terms: UnshardTerms | None) -> None:
        """Note that unsharded copies of the parameters are lent on `terms`; None: they are taken back."""
        self.lent = terms
        self.shards.register(terms is not None)

    def show_shards(self) -> None:
        """Show shards on the modules, for a caller that reads or writes them.

        Raises:
            StateError: the unit is in the middle of a forward or backward, which needs unsharded parameters.
            WriteBackError: the user gave shards other memory, and its values are lost.
        """
        self.notice_moved()
        runtime = self.sealed_into()
        if runtime is None:
            with torch.no_grad():
                self.free()
        elif self.live is not Live.SHARDED:
            runtime.show_shards(self)

    def require_at_rest(self, call: str) -> None:
        """Show the shards for `call`, the words for what the user calls, which reads or writes them.

        Raises:
            StateError: an unshard context lends the unit, or a forward or backward is under way.
        """
        if self.lent is not None:
            raise StateError(f"{call} inside an unshard context that lends unit {self.name}; leave the context first")
        self.show_shards()
        runtime = self.sealed_into()
        if runtime is not None and not runtime.is_idle:
            raise StateError(
                f"{call}: a forward or backward of {runtime.units[0].name} is under way, or has raised; call it "
                "between steps, or reset_iter_state() first"
            )

    def may_be_written(self) -> None:
        """Note that the user may have written to the shards (`parameter.data.copy_(...)` is not noticed otherwise).

        Raises:
            WriteBackError: the user gave shards other memory, and its values are lost, or have another shape.
        """
        self.notice_moved()
        self.shards_written()

    def shards_written(self) -> None:
        """Note that shards have new values, so unsharded parameters and kept copies are stale."""
        for weights in self.weights:
            weights.group.mark_shards_written()
        runtime = self.sealed_into()
        if runtime is not None and self.live is not Live.SHARDED:
            runtime.shards_written(self)

    def zero_grad(self, set_to_none: bool, module_ids: Collection[int]) -> None:
        """Drop or zero the gradients of the parameters on these modules, also gradients that wait for a reduction.

        The modules may be some of the unit's.
        """
        is_all = all(id(module) in module_ids for module in self.modules)
        for gradients in self.gradients:
            group = gradients.group
            chosen = [param for param in group.optimizer_params if is_all or group.hangs_on(param, module_ids)]
            gradients.drop_unreduced_of(frozenset(index for param in chosen for index in param.members))
            for parameter in (param.parameter for param in chosen):
                if set_to_none or parameter.grad is None:
                    parameter.grad = None
                else:
                    parameter.grad.detach_().zero_()

    @property
    def in_full_precision(self) -> bool:
        """Whether the unit computes in the parameters' own dtype now, whatever `param_dtype` says."""
        return self.precision.full_precision_in_eval and not any(module.training for module in self.modules)

    def _enter_backward(self) -> None:
        runtime = self.sealed_into()
        if runtime is not None:
            runtime.before_backward(self)

    # The schedule's actions
    #
    # Each looks at the groups and the policy when it is called, so a call that is bound once (`tape.py`) stays right.

    def gather(self, in_full_precision: bool | None = None, but: Collection[int] = ()) -> None:
        """Start the all-gathers of all groups but the numbers `but`, by default in the unit's present precision."""
        user = self.policy.all_gather
        for number, weights in enumerate(self.weights):
            if number in but or weights.live is Live.UNSHARDED:
                continue  # other groups of the unit were freed alone
            precisely = in_full_precision
            if precisely is None:
                precisely = self.precision.full_precision_in_eval and self.in_full_precision
            if self.policy.notices_replaced and notice_replaced(weights.group.parameters):
                watcher.sharded_again()
            mesh = weights.group.mesh
            transport: Transport = mesh.gather_transport
            if user is not None and not mesh.only_sums:
                transport = UsersCollectives(user, mesh.shard_group)
            weights.gather(transport, precisely)

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
            gradients.reduce(policy, transport)

    def finish_reduce(self) -> None:
        """Wait for the reductions, and add their results to the gradients of the shards."""
        for gradients in self.gradients:
            gradients.finish_reduce(self.policy)
        if self.policy.when_reduced is not None:
            # An optimizer may step in the call, and no stream orders it after copies to host memory.
            self.land_gradients()
            self.policy.when_reduced()

    def discard(self) -> None:
        """Drop gradients that have not reached the shards."""
        for weights in self.weights:
            weights.drop_gradients()
        for gradients in self.gradients:
            gradients.discard()

    def land_gradients(self) -> None:
        """Wait for gradients on their way to host memory, where no stream orders the optimizer that reads them."""
        for gradients in self.gradients:
            gradients.land()

    @property
    def reduce_buffers(self) -> int:
        """The number of units that may be in reduction while the next unit collects gradients."""
        chosen = self.policy.reduce_buffers
        return chosen if chosen is not None else int(not self.streams.in_host_order)

    def unshard_for_backward(self) -> None:
        """Unshard the unit, whose freed parameters a node of backward is about to read.

        Raises:
            StateError: the reader is not backward, or the user has said that backward does not need the parameters.
        """
        if not in_backward():
            raise StateError(
                f"what autograd has saved of the parameters of unit {self.name} was read outside of backward, when "
                "they are sharded; read it between unshard() and reshard()"
            )
        runtime = self.sealed_into()
        if runtime is not None:
            runtime.before_backward(self)
            runtime.finish_unshard(self)
        if self.live is not Live.UNSHARDED:
            raise StateError(
                f"backward needs the parameters of unit {self.name}, for which set_unshard_in_backward(False) was "
                "called; leave that out, or freeze what does not need a gradient"
            )
