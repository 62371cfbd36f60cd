"""One unit: the modules of one `fully_shard` call, their parameters in groups, and the policy that is in force.

The schedule says what happens to a unit; here it happens to each of its groups.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from sherd._torch import in_backward
from sherd.comm.mesh import DataMesh
from sherd.comm.streams import Streams
from sherd.engine.moves.buffer_plan import BufferPlan
from sherd.engine.moves.gradients import Gradients
from sherd.engine.moves.selfgather import SelfGatheredWeights
from sherd.engine.moves.weights import Weights
from sherd.engine.run.backward import Backward
from sherd.engine.run.conductor import Conductor
from sherd.engine.run.module_runs import ModuleRuns
from sherd.engine.state.compared import Compared
from sherd.engine.state.fetching import RestingPlace
from sherd.engine.state.group import Group, batches_of
from sherd.engine.state.optimizers import watcher
from sherd.engine.state.ownership import Belongings
from sherd.engine.state.parameter import ShardedParameter, notice_replaced
from sherd.engine.state.unit_shards import UnitShards
from sherd.errors import StateError, WrapperStateError
from sherd.policy import MixedPrecisionPolicy, UnitPolicy, UnshardTerms
from sherd.schedule.state import Live

_ids = itertools.count()

TouchHook = tuple[OrderedDict[int, Callable[..., Any]], int, Callable[..., Any]]


def put_first(touch_hooks: Sequence[TouchHook]) -> None:
    """Have calls of modules inside of a unit noticed by its `touch_hooks`, each before all other hooks on its module.

    A unit that gathers for such calls has them noticed also where it rests unsharded, kept for the backward of one.
    """
    for hooks, key, hook in touch_hooks:
        has_others = bool(hooks)
        hooks[key] = hook
        if has_others:
            hooks.move_to_end(key, last=False)


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
        self.sealed_into: Callable[[], Conductor[Unit] | None] = _nowhere
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

    # What it is

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

    def join(self, conductor: Conductor[Unit] | None) -> None:
        """Be sealed into a runtime, which holds the unit; the unit holds it weakly. None: into none, as at first."""
        self.sealed_into = _nowhere if conductor is None else weakref.ref(conductor)

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
        conductor = self.sealed_into()
        if conductor is None:
            with torch.no_grad():
                self.free()
        elif self.live is not Live.SHARDED:
            conductor.show_shards(self)

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
        conductor = self.sealed_into()
        if conductor is not None and self.live is not Live.SHARDED:
            conductor.shards_written(self)

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

    def free(self) -> None:
        """Shards from here on."""
        put_first(self.touch_hooks)
        for weights in self.weights:
            weights.free()

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
        conductor = self.sealed_into()
        if conductor is not None:
            conductor.before_backward(self)
            conductor.finish_unshard(self)
        if self.live is not Live.UNSHARDED:
            raise StateError(
                f"backward needs the parameters of unit {self.name}, for which set_unshard_in_backward(False) was "
                "called; leave that out, or freeze what does not need a gradient"
            )


def _grouping(unit: Unit) -> tuple[bool, bool]:
    """Returns what the groups and their buffers depend on, of a policy that may change."""
    return unit.gathers_as_one, unit.streams.in_host_order or unit.reduce_buffers <= 1


def _enter_backward(unit: Unit) -> None:
    conductor = unit.sealed_into()
    if conductor is not None:
        conductor.before_backward(unit)


def _if_alive(unit: weakref.ref[Unit], act: Callable[[Unit], None]) -> None:
    alive = unit()
    if alive is not None:
        act(alive)
