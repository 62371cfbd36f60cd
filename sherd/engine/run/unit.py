"""One unit: the modules of one `fully_shard` call, their parameters in groups, and the policy that is in force.

The schedule says what happens to a unit; here it happens to each of its groups.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
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
from sherd.engine.run.backward import Backward
from sherd.engine.state.compared import Compared
from sherd.engine.state.fetching import RestingPlace
from sherd.engine.state.group import Group, batches_of
from sherd.engine.state.optimizers import watcher
from sherd.engine.state.ownership import UNIT, Belongings
from sherd.engine.state.parameter import ShardedParameter, notice_replaced
from sherd.engine.state.unit_shards import UnitShards
from sherd.errors import StateError, WrapperStateError
from sherd.policy import MixedPrecisionPolicy, UnitPolicy, UnshardTerms
from sherd.schedule.state import Live

_ids = itertools.count()

TouchHook = tuple[OrderedDict[int, Callable[..., Any]], int, Callable[..., Any]]


class UnitRuntime(Protocol):
    """The part of `Runtime` that a unit calls. `Runtime` itself would close a circle of imports."""

    @property
    def units(self) -> Sequence[Unit]:
        """All units of the runtime, the root first."""

    @property
    def is_idle(self) -> bool:
        """Whether no forward, backward or reduction is under way."""

    def show_shards(self, unit: Unit) -> None:
        """Free the unit's unsharded parameters, for a caller that reads or writes shards."""

    def shards_written(self, unit: Unit) -> None:
        """Note that the unit's unsharded parameters, if there are any, are older than its shards."""

    def before_backward(self, unit: Unit) -> None:
        """Note that backward has reached the unit."""

    def finish_unshard(self, unit: Unit) -> None:
        """Wait for the unit's all-gather, if one is in flight."""

    def reset(self) -> None:
        """Free all unsharded parameters, and drop every collective in flight."""


class ModuleRuns:
    """The run of a unit of several modules: from the first of their forwards until all have run once."""

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


def _nowhere() -> None:
    """Returns None, the runtime that a unit has before its first forward."""


class Unit:
    """The unit that one `fully_shard` call made. `companions`: units that own a parameter which this one's modules use
    too; `surrounds`: there are units below its modules. `found` is what it is made of.

    `sealed_into()` returns its runtime, if it has one that still exists. `backward` is its part in the present
    backward, `runs` are those of its modules, `shards` what it holds between steps.

    `touch_hooks` are forward pre-hooks on modules below its own (`engine/run/touch.py`): the dict that they are put
    into as the first ones, key and value. They are there while it is at rest.

    It holds its modules weakly: they hold it, and a deleted model must go at once.
    """

    RUNTIME = "_sherd_runtime"
    """The attribute of a root module for its runtime."""
    FRONT_END = "_sherd_state"
    """The attribute of a module for what its front end keeps beside the unit."""
    ATTRIBUTES = (UNIT, RUNTIME, FRONT_END)
    """All attributes that sherd writes on modules."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[ShardedParameter],
        companions: Sequence[Unit],
        mesh: DataMesh,
        streams: Streams,
        precision: MixedPrecisionPolicy,
        place: RestingPlace,
        policy: UnitPolicy,
        surrounds: bool,
        found: Belongings,
    ) -> None:
        self.id = next(_ids)
        self.class_name = type(modules[0]).__name__
        self.name = self.class_name
        self.parameters = list(parameters)
        self.companions = tuple(companions)
        self.mesh = mesh
        self.streams = streams
        self.precision = precision
        self.policy = policy
        self.ignored = found.ignored
        self.surrounds = surrounds
        self.place = place
        self._modules = tuple(weakref.ref(module) for module in modules)
        self.sealed_into: Callable[[], UnitRuntime | None] = _nowhere
        surprised = partial(_if_alive, weakref.ref(self), _enter_backward)
        self.backward = Backward(surprised, mesh.num_shards * mesh.num_replicas)
        self.runs = ModuleRuns(self._modules) if len(modules) > 1 else None
        self.lent: UnshardTerms | None = None
        self.touch_hooks: list[TouchHook] = []
        self.compared = Compared(mesh)
        self.weights: list[Weights] = []
        self.gradients: list[Gradients] = []
        self.shards = UnitShards(parameters)
        for parameter in self.parameters:
            parameter.belong_to(self)
        self.regroup()

    def __repr__(self) -> str:
        live = self.live.name.lower()
        return f"Unit({self.name}, {len(self.parameters)} parameters in {len(self.weights)} groups, {live})"

    # Units and modules

    @staticmethod
    def of(module: nn.Module) -> Unit | None:
        """Returns the unit that `module` was made into, alone or in a list; None if there is none."""
        unit = module.__dict__.get(UNIT)
        return unit if isinstance(unit, Unit) else None

    @staticmethod
    def below(root: nn.Module) -> list[Unit]:
        """Returns the units at and below `root`, each once, in the order of `named_modules`, as a runtime has them."""
        # Not by `modules()`, whose generators go through all modules above for each one.
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
    def attached_to(module: nn.Module) -> list[object]:
        """Returns the values of those of `ATTRIBUTES` that `module` has."""
        return [module.__dict__[key] for key in Unit.ATTRIBUTES if key in module.__dict__]

    def attach_to(self, module: nn.Module) -> None:
        """Make this the unit of `module`, which torch's DDP leaves alone from now on. The module keeps it alive."""
        write_into(module, UNIT, self)
        say_fully_sharded(module)

    @property
    def modules(self) -> list[nn.Module]:
        """Those of its modules that still exist."""
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def live(self) -> Live:
        """The position of its parameters. A unit without any is always sharded."""
        lives = [live for weights in self.weights if (live := weights.live) is not Live.SHARDED]
        return lives[0] if lives else Live.SHARDED

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of its gathered parameters."""
        return sum(weights.group.unsharded_bytes for weights in self.weights)

    def join(self, runtime: UnitRuntime | None) -> None:
        """Be sealed into `runtime`, which holds the unit; the unit holds it weakly. None: into none, as at first."""
        self.sealed_into = _nowhere if runtime is None else weakref.ref(runtime)

    def have(self, parameters: Sequence[ShardedParameter], companions: Sequence[Unit], found: Belongings) -> None:
        """Be made of these from now on, in new groups. The shards that it had stay the same Parameters."""
        self.parameters, self.companions, self.ignored = list(parameters), tuple(companions), found.ignored
        self.shards = UnitShards(self.parameters)
        for parameter in self.parameters:
            parameter.belong_to(self)
        self.regroup()

    def rename(self, unit_name: str, module_names: dict[int, str]) -> None:
        """Use names as seen from the root module; `module_names` are keyed by the id of the module."""
        self.name = unit_name
        for parameter in self.parameters:
            parameter.rename(module_names)

    def change(self, **fields: Any) -> None:
        """Replace fields of the policy; the schedule sees it at the next forward or backward."""
        before, grouping = self.policy, _grouping(self)
        self.policy = UnitPolicy(**(before.__dict__ | fields))  # as `replace`, which asks for each field
        self.compared.changed()
        if grouping == _grouping(self):
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
        """Of a step of several backwards the next one is the last, or it is not and leaves over what can wait."""
        policy = self.policy
        over_shards = is_last or not policy.accumulates_unsharded
        over_copies = is_last or not policy.accumulates_copies
        if (policy.reduce_gradients, policy.all_reduce_gradients) != (over_shards, over_copies):
            self.change(reduce_gradients=over_shards, all_reduce_gradients=over_copies)

    # Grouping

    def regroup(self) -> None:
        """Put parameters into groups and each group's shards into one buffer: at the start, and when they moved."""
        if self.live is not Live.SHARDED:
            raise StateError(f"unit {self.name}: its parameters cannot be regrouped while they are {self.live.name}")
        this = weakref.ref(self)
        self.compared.changed()
        self.weights, self.gradients = [], []
        part_bytes = self.mesh.comm.part_bytes
        for batch in batches_of(self.parameters, self.streams, self.surrounds, self.gathers_as_one, part_bytes):
            group = Group(batch.parameters, self.precision, self.place, batch.is_part)
            completed = self.backward.completed(len(self.gradients))
            plan = BufferPlan.of(group, self.streams, self.reduce_buffers)
            gradients = Gradients(group, plan, self.streams, partial(_if_alive, this, _enter_backward), completed)
            self.gradients.append(gradients)
            unshard = partial(_if_alive, this, Unit.unshard_for_backward)
            self.weights.append(
                SelfGatheredWeights(group, plan, self.streams, self.precision, gradients.arrivals.watch, unshard)
                if group.gathers_itself
                else Weights(group, plan, self.streams, gradients.arrivals.watch, unshard)
            )
        self.backward.regroup(self.weights, self.gradients)
        self.shards.regroup([weights.group for weights in self.weights])
        self.keeps_copies = any(weights.group.keeps_copies for weights in self.weights)
        held = [weights.group.sizes for weights in self.weights if weights.group.mesh is self.mesh]
        self.is_on_all_ranks = bool(held) and all(map(any, zip(*held, strict=True)))

    @property
    def gathers_as_one(self) -> bool:
        """Whether the user has put something in the way of each collective, which then is to see the unit as one."""
        return bool(self.policy.all_gather or self.policy.reduce_scatter or self.policy.all_reduce_hook)

    @property
    def meshes(self) -> list[DataMesh]:
        """Its own mesh, and those that some of its parameters are sharded over instead."""
        return list(dict.fromkeys((self.mesh, *(each.mesh for each in self.parameters))))

    def flatten(self, module: nn.Module, attribute: str) -> None:
        """Merge the shards, which are of one group, into one flat parameter for the optimizer, a parameter of `module`
        called `attribute`."""
        self.shards.merge(module, attribute)
        self.regroup()

    def rebind(self) -> None:
        """Put shards that may have moved (`module.to()`, a load) back into one buffer, once all are on one device."""
        for parameter in self.parameters:
            parameter.keep_attributes()
        if self.shards.are_on_one_device and not self.shards.are_in_buffer:
            self.regroup()

    def notice_moved(self) -> None:
        """Take the values of what a user has put in the place of the shards' memory.

        Raises:
            WriteBackError: they are lost, or of another shape.
        """
        if self.shards.settle() and not self.shards.are_in_buffer:
            self.rebind()  # some are of another dtype, or elsewhere

    def notice_replaced(self) -> None:
        """Take the values of Parameters that the user has put in the place of shards. They have moved then if they were
        on the meta device.

        Raises:
            WriteBackError: one of another shape.
        """
        if self.policy.notices_replaced and notice_replaced(self.parameters):
            watcher.sharded_again()

    def before_step(self) -> None:
        """An optimizer is about to write to the shards: what a user gave them before is what it steps.

        Raises:
            WrapperStateError: what is written to the shards now will be written over by what is lent.
            WriteBackError: values that a user gave are lost, or of another shape.
        """
        if self.lent is not None and self.lent.writeback:
            raise WrapperStateError(
                f"an optimizer steps unit {self.name} inside an unshard context, at the end of which the whole "
                "parameters will be written over its shards; step outside, or enter the context with writeback=False"
            )
        self.shards.settle()

    # What the user asks for

    def lend(self, terms: UnshardTerms | None) -> None:
        """Note that unsharded copies of its parameters are lent, on these terms, until they are taken back (None)."""
        self.lent = terms
        self.shards.register(terms is not None)

    def show_shards(self) -> None:
        """Have the modules show shards, for something that is about to read or write them.

        Raises:
            StateError: the unit is in the middle of a forward or backward, which needs the unsharded ones.
            WriteBackError: shards were given other memory, and its values are lost.
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
        """Note that a user may have written to the shards, unnoticed (`parameter.data.copy_(...)`), or given them other
        memory, whose values are taken.

        Raises:
            WriteBackError: they are lost, or of another shape.
        """
        self.notice_moved()
        self.shards_written()

    def shards_written(self) -> None:
        """Shards have new values: unsharded parameters made from the old ones are stale, and what is kept of them by
        placements that say so is brought up to date at the next gather."""
        for weights in self.weights:
            weights.group.mark_shards_written()
        runtime = self.sealed_into()
        if runtime is not None and self.live is not Live.SHARDED:
            runtime.shards_written(self)

    def zero_grad(self, set_to_none: bool, module_ids: Collection[int]) -> None:
        """Drop or zero the gradients of what hangs on these modules, and drop what waits of them for a reduction.

        Of a unit of several modules that may be a part of it.
        """
        is_all = all(id(module) in module_ids for module in self.modules)
        for gradients in self.gradients:
            group = gradients.group
            chosen = [
                optimizer_param
                for optimizer_param in group.optimizer_params
                if is_all or group.hangs_on(optimizer_param, module_ids)
            ]
            gradients.drop_unreduced_of(
                frozenset(index for optimizer_param in chosen for index in optimizer_param.members)
            )
            for parameter in (optimizer_param.parameter for optimizer_param in chosen):
                if set_to_none or parameter.grad is None:
                    parameter.grad = None
                else:
                    parameter.grad.detach_().zero_()

    @property
    def in_full_precision(self) -> bool:
        """Whether it computes in its parameters' own dtype for now, whatever `param_dtype` says."""
        return self.precision.full_precision_in_eval and not any(module.training for module in self.modules)

    # The schedule's actions
    #
    # Each looks at the groups and the policy when it is called, so a call that is bound once (`tape.py`) stays right.

    def gather(self, in_full_precision: bool | None = None, but: Collection[int] = ()) -> None:
        """Start the all-gathers of all groups but the numbers `but`. None: in the precision that the unit computes in
        now."""
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
            transport = mesh.gather_transport if user is None else UsersCollectives(user, mesh.shard_group)
            weights.gather(transport, precisely)

    def wait(self) -> None:
        """Wait for the all-gathers, and show unsharded parameters."""
        for weights in self.weights:
            if weights.live is not Live.UNSHARDED:
                weights.wait()
        for hooks, key, _ in self.touch_hooks:
            if key in hooks:
                del hooks[key]

    def free(self) -> None:
        """Free the unsharded parameters, and show shards."""
        self.watch_touch()
        for weights in self.weights:
            weights.free()

    def shrink(self) -> None:
        """Show shards, and keep a part of the unsharded parameters for the smaller mesh."""
        size = self.policy.reshard_after_forward
        assert isinstance(size, int), "only an int asks for a smaller mesh"
        for weights in self.weights:
            weights.shrink(size)
        self.watch_touch()

    def watch_touch(self) -> None:
        """Put the `touch_hooks` in their places, each before all other hooks on its module.

        A unit with `on_touch="unshard"` needs them also while it rests unsharded, kept for the backward of such a call.
        """
        for hooks, key, hook in self.touch_hooks:
            has_others = bool(hooks)
            hooks[key] = hook
            if has_others:
                hooks.move_to_end(key, last=False)

    def reduce(self, policy: UnitPolicy | None = None, but: Collection[int] = ()) -> None:
        """Start the reductions of the collected gradients of all groups but the numbers `but`. None: by the unit's
        policy."""
        if policy is None:
            policy = self.policy
        user, apart = policy.reduce_scatter, policy.separate_reduce_group
        # All rows are taken before the first reduction is queued, or compute would wait for that to take the second's.
        for gradients in self.gradients if len(self.gradients) > 1 else ():
            gradients.collect()
        for number, gradients in enumerate(self.gradients):
            if number in but:
                continue
            mesh = gradients.group.mesh
            if user is not None:
                transport: Transport = UsersCollectives(user, mesh.reduction_group() if apart else mesh.shard_group)
            else:
                transport = mesh.separate_reduce_transport if apart else mesh.reduce_transport
            gradients.reduce(policy, transport)

    def finish_reduce(self) -> None:
        """Wait for the reductions, and add their results to the gradients of the shards."""
        for gradients in self.gradients:
            gradients.finish_reduce(self.policy)
        if self.policy.when_reduced is not None:
            self.land_gradients()
            self.policy.when_reduced()

    def discard(self) -> None:
        """Drop gradients that have not reached the shards."""
        for weights in self.weights:
            weights.drop_gradients()
        for gradients in self.gradients:
            gradients.discard()

    def land_gradients(self) -> None:
        """Wait for the gradients that are on their way to host memory: the optimizer, which no stream orders, reads
        them there."""
        for gradients in self.gradients:
            gradients.land()

    @property
    def reduce_buffers(self) -> int:
        """The number of units whose gradients may be in reduction while the next are collected."""
        chosen = self.policy.reduce_buffers
        return chosen if chosen is not None else int(not self.streams.in_host_order)

    def unshard_for_backward(self) -> None:
        """A node of backward is about to read its parameters, which are not there.

        Raises:
            StateError: it is not backward that reads, or the user has said that backward does not need them.
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


def _grouping(unit: Unit) -> tuple[bool, bool]:
    """Returns what the groups and their buffers depend on, of a policy that may change."""
    return unit.gathers_as_one, unit.streams.in_host_order or unit.reduce_buffers <= 1


def _enter_backward(unit: Unit) -> None:
    runtime = unit.sealed_into()
    if runtime is not None:
        runtime.before_backward(unit)


def _if_alive(unit: weakref.ref[Unit], act: Callable[[Unit], None]) -> None:
    alive = unit()
    if alive is not None:
        act(alive)
