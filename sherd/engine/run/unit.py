"""One unit: the modules of one `fully_shard` call, their names, and what the user and the optimizer ask of them."""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from sherd._torch import in_backward, say_fully_sharded, write_into
from sherd.comm.mesh import DataMesh
from sherd.comm.streams import Streams, under_way, wait_for_steps
from sherd.engine.moves.saved import share_saving
from sherd.engine.moves.selfgather import Phase
from sherd.engine.run.backward import if_alive
from sherd.engine.run.unit_groups import UnitGroups
from sherd.engine.state.fetching import RestingPlace
from sherd.engine.state.ownership import UNIT
from sherd.engine.state.parameter import ParameterPlace, ShardedParameter
from sherd.engine.state.unit_shards import UnitShards
from sherd.errors import PolicyError, StateError, WrapperStateError
from sherd.policy import CommPolicy, MixedPrecisionPolicy, SavedOnHost, UnitPolicy, UnshardTerms
from sherd.schedule.state import Live

_ids = itertools.count()


def _require_allowed(name: str, comm: CommPolicy, fields: Mapping[str, object]) -> None:
    """Raise PolicyError if a policy with `fields` contradicts how `comm` has gradients travel and added up."""
    if comm.encodes_gradients and fields.get("reduce_unused") is False:
        raise PolicyError(
            f"unit {name} sends gradients by a codec, without flags that say which ones are missing; leave "
            "set_reduce_scatter_unused_params(False) out, or send a dtype"
        )
    if (comm.encodes_gradients or comm.remembers) and (fields.get("reduce_scatter") or fields.get("all_reduce")):
        raise PolicyError(
            f"unit {name} sends gradients by a codec, with feedback, or rounded at random, and a reduction of the "
            "user's own would not; leave one of the two out"
        )
    if not comm.sums_in_order:
        return
    if fields.get("reduce_gradients") is False:
        raise PolicyError(
            f"unit {name} adds gradients up in the order of ranks, and without a reduction (no_sync, a pipeline) each "
            "rank adds up its own first; call accumulate(model, n), or leave out CommPolicy(reduce=)"
        )
    for field in ("reduce_scatter", "all_reduce", "all_reduce_hook"):
        if fields.get(field) is not None:
            raise PolicyError(
                f"unit {name} adds gradients up in the order of ranks, and {field} of the user's own may add them in "
                "another; leave one of the two out"
            )


class UnitRuntime(ABC):
    """The part of a runtime that its units call. `Runtime` is the only one; its module imports this one."""

    units: Sequence[Unit]

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether no forward or backward is under way, and no reduction is in flight."""

    @abstractmethod
    def show_shards(self, unit: Unit) -> None:
        """Free the unsharded parameters of `unit`, for a caller that reads or writes shards."""

    @abstractmethod
    def shards_written(self, unit: Unit) -> None:
        """Free the unsharded parameters of `unit`, because its shards have new values."""

    @abstractmethod
    def phase_of(self, unit: Unit) -> Phase:
        """Returns the phase that reads what is gathered of `unit` now."""

    @abstractmethod
    def before_backward(self, unit: Unit) -> None:
        """Unshard `unit`, because autograd reaches it."""

    @abstractmethod
    def finish_unshard(self, unit: Unit) -> None:
        """Wait for the all-gather of `unit`, if one is in flight."""


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


class Unit(UnitGroups):
    """The modules of one `fully_shard` call, whose parameters are gathered and freed as one.

    A unit holds its modules weakly: they hold the unit, and a deleted model must be freed at once.

    Attributes:
        tied_owners: the units that own a parameter which this unit's modules use too.
        ignored: the places of parameters that no unit shards; `ignored_names` are their names in the model.
        sealed_into: returns the unit's `Runtime`, or None; typed by `Runtime.over`.
        runs: the runs of the modules, for a unit of several.
        lent: the terms on which unsharded copies are lent to the user, None outside of such a context.
        reread: the phases in which a gather brings the planes of both, because the other one has read them, too.
        was_unsynced: the policy has had a backward leave gradients unreduced.
    """

    RUNTIME = "_sherd_runtime"
    """The attribute of a root module for its runtime."""
    FRONT_END = "_sherd_state"
    """The attribute of a module for what its front end keeps in addition to the unit."""
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
        this = weakref.ref(self)
        calls = (partial(if_alive, this, call) for call in (Unit._enter_backward, Unit._unshard_for_backward))
        super().__init__(mesh, streams, precision, place, policy, surrounds, *calls)
        self.id = next(_ids)
        self.class_name = type(modules[0]).__name__
        self.name = self.class_name
        self._modules = tuple(weakref.ref(module) for module in modules)
        self.sealed_into: Callable[[], Any] = _nowhere
        self.ignored_names: tuple[str, ...] = ()
        self.runs = ModuleRuns(self._modules) if len(modules) > 1 else None
        self.lent: UnshardTerms | None = None
        self.was_unsynced, self.reread = False, set[Phase]()
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
    @contextmanager
    def saving_on_host(units: Sequence[Unit], terms: SavedOnHost) -> Iterator[None]:
        """Within the context, what forwards of `units` save goes to host memory, on `terms`."""
        before = [unit.backward.offload for unit in units]
        for unit in units:
            unit.offload_saved(terms)
        try:
            yield
        finally:
            for unit, offload in zip(units, before, strict=True):
                unit.backward.offload_saved(offload)

    @staticmethod
    def saved_bytes(device: torch.device) -> int:
        """Returns the bytes of host memory that there are for what forwards of units on `device` save."""
        from sherd.engine.moves.offload import saved_on_host  # few programs use it

        return saved_on_host(device)

    @staticmethod
    def share_saving() -> None:
        """Let our hooks on saved tensors share torch's stack with others, and with `torch.func.grad`."""
        share_saving()

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

    def offload_saved(self, terms: SavedOnHost) -> None:
        """Let what later forwards save for backward go to host memory. On a CPU this is the device's memory anyway."""
        if self.mesh.device.type not in ("cpu", "meta"):
            from sherd.engine.moves.offload import offload_on  # few programs use it

            self.backward.offload_saved(offload_on(self.mesh.device, terms))

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that still exist."""
        return [module for ref in self._modules if (module := ref()) is not None]

    def join(self, runtime: UnitRuntime | None) -> None:
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
        if self.mesh.limits_policies:
            _require_allowed(self.name, self.mesh.comm, fields)
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
        in_order = self.mesh.sums_in_order
        over_shards = is_last or in_order or not policy.accumulates_unsharded
        over_copies = is_last or not (in_order or policy.accumulates_copies)
        if (policy.reduce_gradients, policy.all_reduce_gradients) != (over_shards, over_copies):
            self.change(reduce_gradients=over_shards, all_reduce_gradients=over_copies)

    @property
    def waits_for_replicas(self) -> bool:
        """Whether gradients are reduced over the shard axis now, and over the replicas later."""
        policy = self.policy
        adds_later = self.mesh.num_replicas > 1 or self.mesh.sums_in_order
        return adds_later and policy.reduce_gradients and not policy.all_reduce_gradients

    @property
    def steps_in_backward(self) -> bool:
        return self.policy.when_reduced is not None

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
                f"an optimizer steps unit {self.name} inside an unshard context, at the end of which the full "
                "parameters will be written over its shards; step outside, or enter the context with writeback=False"
            )
        if self.late is not None and all(each.grad is None for each in self.shards.optimizer_params):
            return
        self.await_update()
        self.shards.settle()
        self.shards.settle_masters()

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
        if under_way:
            wait_for_steps()
        self.catch_up()
        self.notice_moved()
        runtime: UnitRuntime | None = self.sealed_into()
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
        runtime: UnitRuntime | None = self.sealed_into()
        if runtime is not None and not runtime.is_idle:
            raise StateError(
                f"{call}: a forward or backward of {runtime.units[0].name} is under way, or has raised; call it "
                "between steps, or reset_iter_state() first"
            )

    def catch_up(self) -> None:
        """Let the next gather read what a late step makes. All ranks must call it together."""
        if self.late is not None:
            self.shards_written()

    def may_be_written(self) -> None:
        """Note that the user may have written to the shards (`parameter.data.copy_(...)` is not noticed otherwise).

        Raises:
            WriteBackError: the user gave shards other memory, and its values are lost, or have another shape.
        """
        self.notice_moved()
        if self.late is None:  # copies are renewed with the next step
            self.shards_written()

    def shards_written(self) -> None:
        """Note that shards have new values, so unsharded parameters and kept copies are stale."""
        if self.late is not None:
            self.updating, self.late = self.late, None
        for weights in self.weights:
            weights.group.mark_shards_written()
        runtime: UnitRuntime | None = self.sealed_into()
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

    @property
    def phase(self) -> Phase:
        """The phase that reads what is gathered now; `"both"` of a unit that is unsharded by itself."""
        runtime: UnitRuntime | None = self.sealed_into()
        return "both" if runtime is None else runtime.phase_of(self)

    def _enter_backward(self) -> None:
        runtime: UnitRuntime | None = self.sealed_into()
        if runtime is not None:
            runtime.before_backward(self)

    def _unshard_for_backward(self) -> None:
        """Unshard the unit, whose freed parameters a node of backward is about to read.

        Raises:
            StateError: the reader is not backward, or the user has said that backward does not need the parameters.
        """
        if not in_backward():
            raise StateError(
                f"what autograd has saved of the parameters of unit {self.name} was read outside of backward, when "
                "they are sharded; read it between unshard() and reshard()"
            )
        runtime: UnitRuntime | None = self.sealed_into()
        if runtime is not None:
            runtime.before_backward(self)
            runtime.finish_unshard(self)
        if self.live is not Live.UNSHARDED:
            raise StateError(
                f"backward needs the parameters of unit {self.name}, for which set_unshard_in_backward(False) was "
                "called; leave that out, or freeze what does not need a gradient"
            )
