"""Hooks on optimizers: they exchange parameters that were sharded since, and tell units that their shards are stepped.

A plain Parameter cannot turn into a DTensor in place, so an optimizer that was built before the model was sharded holds
objects that the model no longer has. With torch's own FSDP it then trains nothing, without an error. Here replaced
parameters are exchanged for their shards before the optimizer steps. If the optimizer has state for a replaced
parameter already, the step raises.

Some optimizers cannot step shards. torch would raise in the middle of the step, and name only the operation that
DTensor does not support; the step is refused with the parameter's name, of torch's own classes before it begins.
Where each parameter is unsharded on one rank, its owner, optimizers of any other class step these, and ranks tell each
other how the first steps went.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import LBFGS, Adafactor, Adam, Optimizer

from sherd._torch import (
    asked_by_checkpointing,
    dynamo_disabled,
    put_around_step,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from sherd.comm.objects import all_gather_objects
from sherd.engine.state.parameter import Owner, ShardedParameter, as_sharded, name_of, record_of
from sherd.errors import CommError, OptimizerError, OptimStateError, PlacementError, SherdError, in_short
from sherd.tensor.local_step import LocalStep, is_here
from sherd.tensor.optimizers import STEPPED, local_step_of, takes_parts
from sherd.tensor.placement import is_ragged
from sherd.tensor.ragged import RaggedDTensor, local_part
from sherd.tensor.state_kind import PlacesState, StateKind, state_kind


@dataclass(eq=False)
class News:
    """The parameters that a model gained and lost, for optimizers that do not know of the change yet.

    Args:
        units: the ids of the model's units.
        adopted: the new parameters.
        dropped: the local tensors of dropped parameters, and their names. A local tensor lives and dies with its
            parameter. No reference to the parameter is held: torch refuses to move a tensor with a weak reference, and
            a strong one would keep the memory.
    """

    units: frozenset[int]
    adopted: list[weakref.ref[ShardedParameter]]
    dropped: list[tuple[weakref.ref[torch.Tensor], str]]

    def missing_from(self, present: Mapping[int, torch.Tensor], stepped: Collection[int]) -> list[str]:
        """Returns the names of new parameters that are not `present` in an optimizer of the units `stepped`.

        Parameters that were reported once, or that an optimizer holds, are left out from then on.
        """
        alive = [record for ref in self.adopted if (record := ref()) is not None]
        absent = [each for each in alive if id(each.optimizer_param) not in present]
        is_reported = not self.units.isdisjoint(stepped)
        self.adopted = [] if is_reported else [weakref.ref(each) for each in absent]
        return [each.name for each in absent if is_reported and each.requires_grad]

    def left_in(self, present: Mapping[int, torch.Tensor]) -> list[str]:
        """Returns the names of dropped parameters that are `present` in an optimizer."""
        plain = [each for each in present.values() if isinstance(each, DTensor) and record_of(each) is None]
        local_ids = {id(local_part(each)) for each in plain}
        alive = [(local, ref, name) for ref, name in self.dropped if (local := ref()) is not None]
        self.dropped = [(ref, name) for local, ref, name in alive if id(local) not in local_ids]
        return [name for local, _, name in alive if id(local) in local_ids]


StateDict = dict[str, Any]
"""The state dict of an optimizer."""

Foreign = Callable[[dict[str, Any], torch.Tensor, Mapping[str, object]], set[str]]
"""Returns the keys of a parameter's state that its group cannot use."""


Step = Callable[..., object]
"""Makes a step, as `step(*args, **kwargs)`."""

StepHook = Callable[[Optimizer, Step, Step], Step]
"""Returns how an optimizer steps, given the step of its class and how it steps so far."""


class StepListener(Protocol):
    """Is called before and after each optimizer step, and for what else is done to shards between collectives."""

    def before_step(self, optimizer: Optimizer, unit_ids: Sequence[int]) -> None:
        """Note that `optimizer` is about to step the shards of these units."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that `optimizer` has stepped shards."""

    def gave_up(self, optimizer: Optimizer) -> None:
        """Note that the step of `optimizer` has raised."""

    def noted(self, what: str, values: Sequence[object], unit_ids: Sequence[int]) -> None:
        """Note what is done to the shards of these units; `what` has a place {} for each of the `values`."""


class _Watcher:
    """The global hooks on all optimizers' steps, the hook on each one's loads, and the units that each one steps."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[tuple[object, ...], list[weakref.ref[Owner]]]]
        self._known = weakref.WeakKeyDictionary()
        self._last_change = object()
        self._load_hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._listeners: weakref.WeakSet[StepListener] = weakref.WeakSet()
        self._told: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._installed = False
        self._news: list[News] = []
        self._inside: list[StepHook] = []
        self._completing: list[Callable[[Optimizer], object]] = []

    def announce(self, news: News) -> None:
        """Check every optimizer against `news`, at the optimizer's next step."""
        self._news.append(news)
        self.sharded_again()

    def install(self) -> None:
        if not self._installed:
            # Disabled for Dynamo: a step may be compiled, and the hooks read objects that Dynamo cannot trace.
            register_optimizer_step_pre_hook(dynamo_disabled(self._before_step))
            register_optimizer_step_post_hook(dynamo_disabled(self._after_step))
            self._installed = True

    def sharded_again(self) -> None:
        """Examine every optimizer again at its next step, since parameters were replaced."""
        # What is known stays: a closure, or another thread, may shard in the middle of a step, whose end needs it.
        self._last_change = object()

    def adopt(self, optimizer: Optimizer) -> list[weakref.ref[Owner]]:
        """Give `optimizer` the shards of its parameters. Returns the units that it steps. Raises as `_adopt` does."""
        known = self._known.get(optimizer)
        # A step compares the sizes of the groups and looks at no parameter: test_an_optimizer_is_looked_at_once.
        now = (self._last_change, *_sizes(optimizer))
        if known is None or known[0] != now:
            owners = _adopt(optimizer)
            self._warn(optimizer, owners)
            # Once: a second hook would do the check twice.
            if optimizer not in self._load_hooked:
                # An optimizer around another one, as accelerate's, may have no hooks; the one inside has.
                with contextlib.suppress(AttributeError):
                    optimizer.register_load_state_dict_pre_hook(check_loaded)
                    if isinstance(optimizer, Adam):
                        optimizer.register_load_state_dict_pre_hook(_without_muons)
                self._load_hooked.add(optimizer)
            self._known[optimizer] = known = (now, owners)
        return known[1]

    def inside_of_steps(self, hook: StepHook) -> None:
        """Call `hook` when a step begins to compute, after all pre-hooks, which do not see what it changes.

        What later hooks return is around what earlier ones have returned.
        """
        if hook not in self._inside:
            self._inside.append(hook)

    def complete_with(self, complete: Callable[[Optimizer], object]) -> None:
        """Call `complete` before torch's checkpointing reads an optimizer whose ranks step what they own."""
        self._completing = [complete]

    def before_state_dict(self, optimizer: Optimizer) -> None:
        """Complete the state if torch's checkpointing, which all ranks call, is about to gather it."""
        for complete in self._completing if asked_by_checkpointing() else ():
            complete(optimizer)

    def step_inside(self, plain: Callable[..., object], optimizer: Optimizer, *args: Any, **kwargs: Any) -> object:
        """Call `plain`, the step of the optimizer's class, on what this optimizer is to step."""
        step: Step = functools.partial(self._step, plain, optimizer)
        for hook in self._inside:
            step = hook(optimizer, plain, step)
        return step(*args, **kwargs)

    def _step(self, plain: Callable[..., object], optimizer: Optimizer, *args: Any, **kwargs: Any) -> object:
        try:
            local = local_step_of(optimizer, bool(args or kwargs))
            if local is not None and local.of_owners:
                return _step_at_owners(local, plain, optimizer, *args, **kwargs)
            with contextlib.nullcontext() if local is None else local.lent_to(optimizer):
                return plain(optimizer, *args, **kwargs)
        except Exception as error:
            for listener in list(self._listeners):
                listener.gave_up(optimizer)
            _explain(optimizer, error)
            raise

    def _warn(self, optimizer: Optimizer, owners: list[weakref.ref[Owner]]) -> None:
        """Warn of parameters that a model gained or lost, and that `optimizer` lacks or still holds."""
        present = _present(optimizer)
        stepped = {owner.id for ref in owners if (owner := ref()) is not None}
        missing = [name for each in self._news for name in each.missing_from(present, stepped)]
        dropped = [name for each in self._news for name in each.left_in(present)]
        self._news = [each for each in self._news if each.adopted or each.dropped]
        class_name = type(optimizer).__name__
        if missing:
            warnings.warn(
                f"{class_name} steps a model that has got parameters since, and has none of these: "
                f"{in_short(missing)}. Nothing trains them unless another optimizer does; pass it to "
                "sherd.refresh(model, optimizer), or call its add_param_group()",
                stacklevel=2,
            )
        if dropped:
            warnings.warn(
                f"{class_name} holds parameters that its model has no more: {in_short(dropped)}. They get no "
                "gradients; pass it to sherd.refresh(model, optimizer), which takes them out",
                stacklevel=2,
            )

    def listen(self, listener: StepListener) -> None:
        self._listeners.add(listener)

    def note(self, what: str, values: Sequence[object], unit_ids: Sequence[int]) -> None:
        """Tell listeners of something else than a step that is done to the shards of these units."""
        for listener in list(self._listeners):
            listener.noted(what, values, unit_ids)

    @staticmethod
    def not_adams(state: Mapping[str, object]) -> set[str]:
        """Returns the keys of a parameter's state that has the momentum of Muon, and no moments of Adam."""
        return set(state) if "momentum_buffer" in state and "exp_avg" not in state else set()

    @staticmethod
    def fitting(optimizer: Optimizer, state_dict: StateDict, foreign: Foreign) -> StateDict:
        """Returns a state that `optimizer` is about to load without what another algorithm left, and warns of that.

        A group keeps its own options if such state is all that a parameter in it has.
        """
        state, groups, dropped = dict(state_dict["state"]), list(state_dict["param_groups"]), dict[str, set[str]]()
        for at, (own, given) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
            of_group = own.get("param_names") or list(map(name_of, own["params"]))
            for name, parameter, key in zip(of_group, own["params"], given["params"], strict=False):
                if not (others := foreign(own, parameter, state.get(key, {}))):
                    continue
                dropped[name] = others
                state[key] = {each: value for each, value in state[key].items() if each not in others}
                if not state[key]:
                    groups[at] = {**own, "params": given["params"]}
        if dropped:
            keys = ", ".join(sorted(set.union(*dropped.values())))
            warnings.warn(
                f"{type(optimizer).__name__} drops {keys} of {in_short(list(dropped))}: another algorithm left them; "
                "the state of this one starts over where there was no other",
                stacklevel=3,
            )
        return {**state_dict, "state": {key: each for key, each in state.items() if each}, "param_groups": groups}

    @staticmethod
    def num_moments(optimizer: Optimizer) -> int:
        """Returns how many tensors of its elements an optimizer of torch.optim keeps for a parameter; 0: not known."""
        kind = getattr(optimizer, "_sherd_kind", type(optimizer))
        keys = _MOMENTS.get(kind.__name__, (set[str](),))[0]
        return 0 if keys == {"momentum_buffer"} and not optimizer.param_groups[0].get("momentum") else len(keys)

    @staticmethod
    def of_another_algorithm(optimizer: Optimizer, states: Mapping[Any, Any]) -> str:
        """Returns what `optimizer` cannot use in parameters' `states`, by name, in words; empty if there is nothing.

        What Muon or SGD has left to Adam's kind is not meant: `fitting` drops it.
        """
        kind = getattr(optimizer, "_sherd_kind", type(optimizer))
        wanted = _MOMENTS.get(kind.__name__, ()) if kind.__module__.startswith("torch.optim.") else ()
        for name, state in states.items() if wanted else ():
            known = _OF_ANY.intersection(state) if isinstance(state, Mapping) else set()
            is_dropped = isinstance(optimizer, Adam) and watcher.not_adams(state)
            if known and not is_dropped and not any(keys <= known for keys in wanted):
                return (
                    f"{kind.__name__} is given another algorithm's state: {', '.join(sorted(known))} of {name}, where "
                    f"it keeps {' or '.join(', '.join(sorted(keys)) for keys in wanted)}; build the optimizer that was "
                    "saved, or load the model alone"
                )
        return ""

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        put_around_step(type(optimizer), _around)
        owners = [owner for ref in self.adopt(optimizer) if (owner := ref()) is not None]
        for owner in owners:
            owner.before_step()
            if owner.was_unsynced and optimizer not in self._told and (name := owner.unsynced):
                self._told.add(optimizer)
                warnings.warn(
                    f"{type(optimizer).__name__} steps while gradients of unit {name} wait for a reduction, so "
                    "this step does without them: call set_requires_gradient_sync(True) before the last backward of "
                    "a step, leave no_sync() before it, or use sherd.accumulate",
                    stacklevel=4,
                )
        _bring_flags(optimizer)
        for listener in list(self._listeners):
            listener.before_step(optimizer, [owner.id for owner in owners])

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        known = self._known.get(optimizer)
        if known is None or not known[1]:
            return
        # Foreach and fused forms leave the version of a DTensor as it was.
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        stepped = [_owned(each) for each in parameters if each.grad is not None and isinstance(each, DTensor)]
        torch.autograd.graph.increment_version(stepped)
        for ref in known[1]:
            owner = ref()
            if owner is not None:
                owner.compared.stepped()
                if owner.late is None:  # else the step had no gradient of it
                    owner.shards_written()
        for listener in list(self._listeners):
            listener.after_step(optimizer)


def _bring_flags(optimizer: Any) -> None:
    """Give an optimizer that steps on the host what a gradient scaler tells it, in host memory.

    A fused step copies that without waiting, and reads it at once.
    """
    found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    are_far = any(isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in (found, scale))
    params = (each for group in optimizer.param_groups for each in group["params"]) if are_far else ()
    if any(local_part(each).device.type == "cpu" for each in params):
        optimizer.found_inf = None if found is None else found.cpu()
        optimizer.grad_scale = None if scale is None else scale.cpu()


def bring_up_to_date(
    optimizer: Optimizer, adopted: Collection[ShardedParameter], dropped: Collection[nn.Parameter]
) -> None:
    """Add trainable `adopted` parameters as a group with the optimizer's defaults. Remove `dropped` and their state."""
    watcher.adopt(optimizer)
    dropped_ids = {id(parameter) for parameter in dropped}
    for group in optimizer.param_groups:
        kept = [at for at, parameter in enumerate(group["params"]) if id(parameter) not in dropped_ids]
        for key in ("params", "param_names"):
            if key in group:
                group[key][:] = [group[key][at] for at in kept]
    for parameter in dropped:
        optimizer.state.pop(parameter, None)
    present = _present(optimizer)
    new = [each for each in adopted if each.requires_grad and id(each.optimizer_param) not in present]
    if new:
        named = any("param_names" in group for group in optimizer.param_groups)
        optimizer.add_param_group(
            {"params": [(each.name, each.optimizer_param) if named else each.optimizer_param for each in new]}
        )


def _present(optimizer: Optimizer) -> dict[int, torch.Tensor]:
    """Returns the parameters of `optimizer`, and the flat parameters that some of them are in, by id."""
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(each): each for parameter in given for each in (parameter, _owned(parameter))}


def _owned(parameter: torch.Tensor) -> torch.Tensor:
    record = record_of(parameter)
    return parameter if record is None else record.optimizer_param


def _sizes(optimizer: Optimizer) -> tuple[int, ...]:
    """Returns the size of each group, and the ids of its ends, which tell of a list that was replaced."""
    groups = [group["params"] for group in optimizer.param_groups]
    return tuple(each for group in groups for each in (len(group), *map(id, (*group[:1], *group[-1:]))))


def _adopt(optimizer: Optimizer) -> list[weakref.ref[Owner]]:
    """Exchange replaced parameters for their shards or for flat parameters. Returns the units of the shards.

    Raises:
        OptimizerError: the optimizer has state for a replaced parameter, or has the shard or the flat parameter as
            well, or cannot step shards.
    """
    if not isinstance(optimizer, (PlacesState, *STEP_MATRICES)):
        _merge(optimizer)
    present = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners: dict[int, weakref.ref[Owner]] = {}
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            record = record_of(parameter)
            if record is None:
                continue
            if parameter is not record.optimizer_param and parameter is not record.shard:
                is_there = not present.isdisjoint((id(record.shard), id(record.optimizer_param)))
                if record.has_taken(parameter) and is_there:
                    continue  # it gets no gradients, and the optimizer has the shard in its place, too
                if optimizer.state.get(parameter):
                    # A shard that another took the place of (`load_state_dict(assign=True)`) hands on its state.
                    if not _is_shard_of(record, parameter):
                        raise _has_state(optimizer)
                    optimizer.state[record.shard] = optimizer.state.pop(parameter)
                if is_there:
                    raise _holds_twice(optimizer, [record])
                group["params"][position] = shard = record.shard
                present.add(id(shard))
                if parameter.grad is not None and shard.grad is None and not parameter.grad.any():
                    # torch's checkpointing makes the state of a new optimizer by a step with gradients of zero:
                    # test_a_new_optimizer_built_before_sharding_gets_a_state_to_load_into
                    shard.grad = torch.zeros_like(shard)
            require_steppable(optimizer, record)
            owner = record.owner
            if owner is not None:
                owners.setdefault(owner.id, weakref.ref(owner))
    return list(owners.values())


def _merge(optimizer: Optimizer) -> None:
    """Put a flat parameter in the place of its members if all of them are in one group. Others are stepped themselves.

    Raises:
        OptimizerError: the optimizer has state for a member, or has the flat parameter as well.
    """
    present = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    members_of: dict[int, dict[nn.Parameter, tuple[int, ShardedParameter]]] = {}
    for at, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            record = record_of(parameter)
            if record is None or parameter is record.optimizer_param or parameter is record.shard:
                continue
            if not (record.has_taken(parameter) and id(record.optimizer_param) in present):
                members_of.setdefault(id(record.optimizer_param), {})[parameter] = (at, record)
    for members in members_of.values():
        groups, records = zip(*members.values(), strict=True)
        flat = records[0].flat
        if flat is None:
            continue
        if id(flat.parameter) in present:
            raise _holds_twice(optimizer, records)
        if len(set(groups)) > 1 or len(set(map(id, records))) < len(flat.names):
            continue
        if any(optimizer.state.get(parameter) for parameter in members):
            raise _has_state(optimizer)
        # The flat parameter takes the place of the first member; the others are dropped.
        group = optimizer.param_groups[groups[0]]
        is_member = [parameter in members for parameter in group["params"]]
        first = is_member.index(True)
        kept = [index for index, drops in enumerate(is_member) if not drops or index == first]
        group["params"][first] = flat.parameter
        for key in ("params", "param_names"):
            if key in group:
                group[key][:] = [group[key][index] for index in kept]


def _holds_twice(optimizer: Optimizer, records: Sequence[ShardedParameter]) -> OptimizerError:
    names = list(dict.fromkeys(record.name for record in records))
    return OptimizerError(
        f"{type(optimizer).__name__} holds {', '.join(names[:4])}{' and others' if len(names) > 4 else ''} twice: as "
        "before sharding, and as the shard or in a flat parameter. Build it from the sharded model's parameters(); "
        "where a module outside every unit still shows the old one (tied weights?), shard a module that contains both"
    )


def _is_shard_of(record: ShardedParameter, parameter: torch.Tensor) -> bool:
    """Returns whether `parameter` is laid out as the shard. A DTensor from before sharding is not."""
    spec = (record.shard_spec.mesh, record.shard_spec.placements)
    return isinstance(parameter, DTensor) and (parameter.device_mesh, parameter.placements) == spec


def _has_state(optimizer: Optimizer) -> OptimizerError:
    """Returns the error for an optimizer with state for parameters that were replaced by shards."""
    names = [
        record.name
        for parameter, state in optimizer.state.items()
        if state
        and (record := record_of(parameter)) is not None
        and parameter is not record.optimizer_param
        and not _is_shard_of(record, parameter)
    ]
    return OptimizerError(
        f"{type(optimizer).__name__} holds state for {in_short(names)} as before fully_shard, or as inside "
        "sherd.unsharded; stepping these would train nothing. Build the optimizer after sharding, and load its state "
        "with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
    )


watcher = _Watcher()


# Steps that compute on what this rank owns, and steps that cannot

COMPARED = (1, 2, 4)
"""The steps after which ranks that step what they own tell each other what went wrong, and what they have computed."""

_num_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def _around(plain: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(plain)
    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> object:
        if torch.compiler.is_compiling():
            return plain(optimizer, *args, **kwargs)
        return watcher.step_inside(plain, optimizer, *args, **kwargs)

    return step


def _step_at_owners(
    local: LocalStep, plain: Callable[..., object], optimizer: Optimizer, *args: Any, **kwargs: Any
) -> object:
    """Step the parameters that this rank holds unsharded.

    Raises:
        OptimizerError: on all ranks, if the step fails on one of them in one of the first steps.
    """
    number = _num_steps[optimizer] = _num_steps.get(optimizer, 0) + 1
    if number == 1:
        optimizer.register_state_dict_pre_hook(watcher.before_state_dict)
    before = _numbers_of(optimizer) if number in COMPARED else {}
    args = tuple(local.around_closure(optimizer, each) if callable(each) else each for each in args)
    if callable(closure := kwargs.get("closure")):
        kwargs["closure"] = local.around_closure(optimizer, closure)
    failure, result = None, None
    try:
        with local.lent_to(optimizer):
            result = plain(optimizer, *args, **kwargs)
    except CommError:
        raise
    except Exception as error:
        if number not in COMPARED:
            raise
        failure = error
    if number in COMPARED:
        now = _numbers_of(optimizer)
        _tell(optimizer, failure, {key: now[key] for key in now if repr(now[key]) != repr(before.get(key))})
    return result


def _tell(optimizer: Optimizer, failure: Exception | None, computed: dict[str, object]) -> None:
    """Tell all ranks of a failure on one of them, and warn of numbers that the step has computed on each by itself."""
    kind, rank = type(optimizer).__name__, dist.get_rank()
    words = failure and f"{type(failure).__name__}: {failure}"[:500]
    reports = {rank: (words, computed)}
    records = [record for each in _present(optimizer).values() if (record := record_of(each)) is not None]
    for group in {id(group): group for record in records for group in record.mesh.piece_groups}.values():
        for others in all_gather_objects(reports, f"the comparison of {kind}'s first steps", group):
            reports |= others
    failed = {each: said for each, (said, _) in sorted(reports.items()) if said}
    if failed:
        first, said = next(iter(failed.items()))
        own = [record.name for record in records if is_here(record.shard)]
        ours = f"; this rank's are {in_short(own)}" if own else "; this rank has none"
        raise OptimizerError(
            f"{kind} cannot step the parameters that ranks {list(failed)} own{ours}. Rank {first}: {said}. It gets "
            "each parameter on one rank; replicate(model) gives it all of them on every rank"
        ) from failure
    keys = dict.fromkeys(key for _, of_rank in reports.values() for key in of_rank)
    differing = [key for key in keys if len({repr(of_rank.get(key)) for _, of_rank in reports.values()}) > 1]
    if differing and _num_steps[optimizer] < 2 * COMPARED[-1]:
        of_ranks = ", ".join(
            f"{of_rank.get(differing[0])} on rank {each}" for each, (_, of_rank) in sorted(reports.items())
        )
        adds_up = any(group.get("fsdp_in_use") is False for group in optimizer.param_groups)
        remedy = "build it with fsdp_in_use=True, so that it adds them up" if adds_up else "replicate(model) instead"
        warnings.warn(
            f"{kind} computes {in_short(differing)} from the parameters that it steps, and each rank steps those that "
            f"it owns: {differing[0]} is {of_ranks}. It does not train as in one process; {remedy}",
            stacklevel=3,
        )
        _num_steps[optimizer] = 2 * COMPARED[-1]


def _numbers_of(optimizer: Optimizer) -> dict[str, object]:
    """Returns the numbers that an optimizer keeps in its groups and attributes, by their place."""
    places = [
        (f"param_groups[{at}][{key!r}]", group[key]) for at, group in enumerate(optimizer.param_groups) for key in group
    ]
    found = {key: value for key, value in (*places, *vars(optimizer).items()) if not key.startswith("_")}
    numbers = {
        key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in found.items()
    }
    return {key: value for key, value in numbers.items() if type(value) in (int, float, bool)}


def _explain(optimizer: Optimizer, error: Exception) -> None:
    """Raise what `error`, in which a step of sharded parameters has ended, means, if it is that they are sharded.

    Raises:
        OptimStateError: state has another shape than its parameter.
        OptimizerError: the step is not written for shards.
    """
    if isinstance(error, SherdError) and type(error) is not PlacementError:
        return
    records = [record for each in _present(optimizer).values() if (record := record_of(each)) is not None]
    cut = [each.name for each in records if not all(of.is_replicate() for of in each.shard_spec.placements)]
    for parameter, state in optimizer.state.items() if type(optimizer) in STEPPED else ():
        for key, value in state.items():
            if state_kind(key, value, parameter.shape, local_part(parameter).shape) is StateKind.OTHER:
                raise OptimStateError(
                    f"{name_of(parameter)}: its state {key!r} has shape {tuple(value.shape)}; give the full tensor, "
                    f"{tuple(parameter.shape)}, or this rank's part, {tuple(local_part(parameter).shape)}"
                ) from error
    text = str(error)
    is_of_sharding = (
        type(error) in (PlacementError, NotImplementedError)
        or (type(error) is AssertionError and not text)
        or any(word in text for word in ("DTensor", "placement", "sharding", "redistribute"))
    )
    # What reads DTensors takes runs for equal chunks, and ends in shapes that do not fit.
    names_dtensors = takes_parts(type(optimizer))  # type: ignore[arg-type]  # classes are hashable
    takes_for_chunks = names_dtensors and any(is_ragged(each.shard_spec) for each in records)
    if cut and (is_of_sharding or (takes_for_chunks and type(error) in (RuntimeError, TypeError, ValueError))):
        if type(optimizer) in STEPPED:
            return
        remedy = _USE_CHUNKS if takes_for_chunks else _USE_OWNED
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot step {in_short(cut)} as sharded: its step ended in "
            f"{type(error).__name__}{f': {text}' if text else ''}; {remedy}"
        ) from error


STEP_MATRICES = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()
"""Optimizers of torch that step full matrices."""


# What an optimizer cannot step or load


_USE_CHUNKS = "it reads DTensors that are cut into equal chunks, so shard with the default placement"
_USE_OWNED = "shard with placement=Owned(), of which each tensor's owner steps it"
_NEEDS_EVEN = (
    "it joins all parameters in one line, whose elements would be on all ranks in turn; shard so that dim 0 of every "
    "parameter divides by the number of ranks, or replicate(model)"
)


def require_steppable(optimizer: Optimizer, record: ShardedParameter) -> None:
    """Raise `OptimizerError` if `optimizer` is of one of torch's own classes and cannot step `record`'s parameter.

    A subclass may step otherwise, so it is never refused.
    `test_what_is_refused_torch_cannot_step` tries each refusal on torch.
    """
    optimizer_class, parameter = type(optimizer), as_sharded(record.optimizer_param)
    if optimizer_class not in (Adafactor, LBFGS) or parameter.device_mesh.size() == 1:
        return
    if all(each.is_replicate() for each in parameter.placements):
        return
    is_stock = not isinstance(parameter, RaggedDTensor)
    if optimizer_class is Adafactor:
        remedy = _USE_OWNED if is_stock else None
    else:
        divides = parameter.ndim > 0 and parameter.shape[0] % parameter.device_mesh.size() == 0
        # Every rank holds equally many elements, which are consecutive.
        is_even = is_stock and all(
            each.is_replicate() or (isinstance(each, Shard) and each.dim == 0 and divides)
            for each in parameter.placements
        )
        remedy = None if is_even else _NEEDS_EVEN
    if remedy is not None:
        raise OptimizerError(
            f"{optimizer_class.__name__} cannot step {record.name}, of shape {tuple(parameter.shape)}, as it is "
            f"sharded; {remedy}"
        )


def _without_muons(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    return watcher.fitting(optimizer, state_dict, lambda group, parameter, state: watcher.not_adams(state))


_MOMENTS: dict[str, tuple[set[str], ...]] = {
    "SGD": ({"momentum_buffer"},),
    "Muon": ({"momentum_buffer"},),
    **dict.fromkeys(("Adam", "AdamW", "RAdam", "SparseAdam"), ({"exp_avg", "exp_avg_sq"},)),
    "NAdam": ({"exp_avg", "exp_avg_sq", "mu_product"},),
    "Adamax": ({"exp_avg", "exp_inf"},),
    "Adagrad": ({"sum"},),
    "Adadelta": ({"square_avg", "acc_delta"},),
    "RMSprop": ({"square_avg"},),
    "ASGD": ({"ax", "eta"},),
    "Rprop": ({"prev", "step_size"},),
    "Adafactor": ({"row_var", "col_var"}, {"variance"}),
}
"""The state of a parameter that an optimizer of torch.optim goes on from, by its class; one of the sets."""

_OF_ANY = frozenset(key for each in _MOMENTS.values() for keys in each for key in keys)


def check_loaded(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise `OptimStateError` if `optimizer` is about to load state that has not the shape of the parameter.

    torch compares neither shapes nor algorithms. Another algorithm's state is warned of.
    """
    why = ""
    for group, given in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for parameter, key in zip(group["params"], given["params"], strict=False):
            kept, shape, local = optimizer.state.get(parameter, {}), parameter.shape, local_part(parameter).shape
            state = state_dict["state"].get(key, {})
            why = why or watcher.of_another_algorithm(optimizer, {name_of(parameter): state})
            for name, value in state.items():
                kinds = [state_kind(name, each, shape, local) for each in (kept.get(name), value)]
                if kinds == [StateKind.ELEMENTS, StateKind.OTHER] and value.shape != shape:
                    raise OptimStateError(
                        f"{name_of(parameter)}: its state {name!r} has shape {tuple(shape)}, and {tuple(value.shape)} "
                        "in what is loaded; load it into the model that it was saved from"
                    )
    if why:
        warnings.warn(why, stacklevel=3)
