"""`step_on_thread`: a thread steps what rests in host memory, while the device and the program go on.

    device   backward of 3   backward of 2   backward of 1   forward of 1   forward of 2   forward of 3
    thread                   step of 3       step of 2       step of 1

Numbers are those of units; the forward of 1 waits for its step. The thread has the arithmetic alone: hooks, collectives
and what settings are come with the call of `optimizer.step()`. Steps that overlap with the device are known from
ZeRO-Offload (Ren et al. 2021).
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial

import torch
from torch.optim import Optimizer

from sherd.comm.cores import cores_near, own_cores, threads_of_steps
from sherd.comm.streams import Handoff, wait_for_steps
from sherd.engine import Group, ShardedParameter, Unit, watcher
from sherd.errors import OptimizerError, PolicyError, PolicyTypeError
from sherd.optim import FlatStep, params_replaced
from sherd.optim.flat import Stepper
from sherd.requirements import require_int
from sherd.tensor.optimizers import is_elementwise_class

_NAME = "sherd steps"


@cache
def _thread() -> ThreadPoolExecutor:
    """Returns the one thread of this process, which makes the steps in the order in which they are asked for."""
    kind, num_threads = torch.accelerator.current_accelerator(check_available=True), torch.get_num_threads()
    cores = (
        own_cores() if kind is None else cores_near(torch.device(kind.type, torch.accelerator.current_device_index()))
    )
    thread = ThreadPoolExecutor(
        1, _NAME, _settle, (cores, threads_of_steps(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    )
    thread.submit(int).result()
    torch.set_num_threads(num_threads)  # of all other threads, which torch counts together with the new one's
    return thread


def _settle(cores: set[int], num_threads: int) -> None:
    """Bind this thread, and those that torch computes with here, to some cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.get_num_threads()  # else torch takes the number that all threads begin with when this one first computes
    torch.set_num_threads(num_threads)


_futures: weakref.WeakSet[Future[None]] = weakref.WeakSet()
# A forked process has no thread, and shards as they are when none of them is being written.
os.register_at_fork(before=lambda: wait(list(_futures)), after_in_child=_thread.cache_clear)


class _Step:
    """The step of one unit, on the thread."""

    def __init__(self, unit: Unit, stepper: Stepper, optimizer: Optimizer, is_late: bool) -> None:
        self._name, self._is_told = unit.name, False
        groups = [weights.group for weights in unit.weights]
        before = [*unit.arriving, *(unit.renew_copies() if is_late else ())]
        self._future = _thread().submit(_make, before, stepper, optimizer, groups)
        _futures.add(self._future)
        unit.update_by(self, is_late)

    def wait(self) -> None:
        self.wait_on_host()

    def wait_on_host(self) -> None:
        """Block the caller until the step is made. Raises OptimizerError, once, if it has failed."""
        if threading.current_thread().name.startswith(_NAME):
            return  # a step waits for none after it
        error = self._future.exception()
        if error is not None and not self._is_told:
            self._is_told = True
            raise OptimizerError(
                f"the step of unit {self._name} has failed on the thread of step_on_thread, and a part of it may be "
                f"made: {type(error).__name__}: {error}; go on from the last checkpoint"
            ) from error


def _make(before: Sequence[Handoff], stepper: Stepper, optimizer: Optimizer, groups: Sequence[Group]) -> None:
    for copies in before:
        copies.wait_on_host()
    stepper.compute(optimizer)
    for masters in (group.masters for group in groups if group.masters is not None):
        masters.note_step()


class StepsOnThread:
    """The steps of `step_on_thread`. `wait()` returns once they are made, `remove()` ends them."""

    def __init__(self, optimizer: Optimizer, delay: int) -> None:
        self._optimizer, self.delay = weakref.ref(optimizer), delay
        self._known: weakref.WeakKeyDictionary[Unit, tuple[Stepper, set[int]]] = weakref.WeakKeyDictionary()
        self._ready: list[tuple[Unit, Stepper, Optimizer]] = []
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: self.wait()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.wait()),
        ]
        watcher.listen(self)
        if isinstance(optimizer, FlatStep):
            optimizer._sherd_step_inside(self.step)

    def wait(self) -> None:
        """Block the caller until all steps are made, for a reader of state. Raises OptimizerError if one has failed.

        With `delay=1` the next forward has them, too, so all ranks must call it together.
        """
        wait_for_steps()
        for unit in list(self._known):
            unit.catch_up()

    def remove(self) -> None:
        """Leave all steps to the caller of `optimizer.step()` again."""
        self.wait()
        optimizer = self._optimizer()
        if optimizer is not None and _on_thread.pop(optimizer, None) is not None:
            if isinstance(optimizer, FlatStep):
                optimizer._sherd_step_inside(None)
            for hook in self._hooks:
                hook.remove()

    def step(self, step: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Get the steps of units ready, and make the step of what is left. Returns what that returns."""
        optimizer, self._ready = self._optimizer(), []  # Ctrl-C in a step may have left some
        if optimizer is None or args or kwargs:  # a closure computes with the shards
            return step(*args, **kwargs)
        lists = [group["params"] for group in optimizer.param_groups]
        by_unit: dict[Unit, list[list[torch.Tensor]]] = {}
        for at, own in enumerate(lists):
            for parameter in own:
                record = ShardedParameter.of(parameter)
                if record is not None and isinstance(record.owner, Unit):
                    by_unit.setdefault(record.owner, [[] for _ in lists])[at].append(parameter)
        self._ready = [ready for unit, own in by_unit.items() for ready in self._made_ready(unit, own, optimizer)]
        taken = {id(each) for unit, _, _ in self._ready for own in by_unit[unit] for each in own}
        left = [[each for each in own if id(each) not in taken] for own in lists]
        if all(each.grad is None for own in left for each in own):
            return None
        wait_for_steps()
        with params_replaced(optimizer, left):
            return step()

    def _made_ready(
        self, unit: Unit, own: list[list[torch.Tensor]], optimizer: Optimizer
    ) -> list[tuple[Unit, Stepper, Optimizer]]:
        """Returns what the thread needs to step a unit; nothing if that is left to the caller, as each first step."""
        groups, kind = [weights.group for weights in unit.weights], _kind_of(optimizer)
        is_on_disk = any(group.place.disks for group in groups)  # ranks agree after each step, and in each gather
        if any(group.shard_buffer.device.type != "cpu" for group in groups):
            return []
        if self.delay and (is_on_disk or not all(group.place.keeps_copies for group in groups)):
            raise OptimizerError(
                f"step_on_thread(delay=1): forward reads unit {unit.name} where its step writes, or its state is on a "
                'disk; shard it with OffloadPolicy(gradients="host"), where the device has copies of the weights'
            )
        if is_on_disk:
            return []
        stepper, known = self._known.setdefault(unit, (Stepper(kind, isinstance(optimizer, FlatStep)), set()))
        # By record: `load_state_dict(assign=True)` makes new shards, which may have the ids of former ones.
        with_gradient = {id(ShardedParameter.of(each)) for part in own for each in part if each.grad is not None}
        if not with_gradient or not with_gradient <= known:
            known |= with_gradient
            return []
        # As it is now: schedulers change the settings, and callers the parameters, before the thread comes to it.
        as_now: Optimizer = object.__new__(kind)
        names = ("params", "param_names")
        lists = [
            {"params": of_group} | {key: copy.deepcopy(group[key]) for key in group if key not in names}
            for group, of_group in zip(optimizer.param_groups, own, strict=True)
        ]
        Optimizer.__setstate__(as_now, vars(optimizer) | {"param_groups": lists})
        return [(unit, stepper, as_now)] if stepper.ready(as_now) else []

    # What the optimizer's hooks tell

    def before_step(self, optimizer: Optimizer, unit_ids: Sequence[int]) -> None:
        """Do nothing."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Let the thread begin, when all hooks on the step were called."""
        if optimizer is self._optimizer():
            ready, self._ready = self._ready, []
            for each in ready:
                _Step(*each, self.delay > 0)

    def gave_up(self, optimizer: Optimizer) -> None:
        """Forget what was ready."""
        self._ready = []

    def noted(self, what: str, values: Sequence[object], unit_ids: Sequence[int]) -> None:
        """Do nothing."""


def _kind_of(optimizer: Optimizer) -> type[Optimizer]:
    return getattr(optimizer, "_sherd_kind", type(optimizer))


_on_thread: weakref.WeakKeyDictionary[Optimizer, StepsOnThread] = weakref.WeakKeyDictionary()


def is_on_thread(optimizer: Optimizer) -> bool:
    """Returns whether `step_on_thread` has the optimizer."""
    return optimizer in _on_thread


def _inside(optimizer: Optimizer, plain: Callable[..., object], step: Callable[..., object]) -> Callable[..., object]:
    steps = _on_thread.get(optimizer)
    return step if steps is None else partial(steps.step, step)


watcher.inside_of_steps(_inside)


def step_on_thread(optimizer: Optimizer, *, delay: int = 0) -> StepsOnThread:
    """Have a thread make the steps of `optimizer` on the host, while the device and the program go on.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        sherd.step_on_thread(optimizer)
        for batch in batches:
            loss_of(model, batch).backward()
            sherd.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()          # returns at once
            optimizer.zero_grad()     # and the next forward waits for each unit's step when it comes to the unit

    After `sherd.step_in_backward(model, optimizer)` the thread steps each unit while backward goes on, as soon as the
    unit's gradients are in host memory.

    It is for units whose gradients rest in host memory (`OffloadPolicy(gradients="host")`, or a model on a CPU). The
    caller steps all others, those with state on a disk, and each parameter for the first time; all of them if the step
    gets a closure. Values are those of a step without the thread, to the bit. Operations on parameters and their
    `to_local()`, gathers, state dicts, checkpoints, `unsharded`, copies of the model, and a fork wait for the steps.
    Another reader of memory, as of `optimizer.state`, calls `wait()` first.

    With `delay=1` forward does not wait: it reads the parameters as they were at the last call of `optimizer.step()`,
    so forward k + 1 has the weights of step k - 1. This is the delayed update of ZeRO-Offload (Ren et al. 2021). It is
    for units with `OffloadPolicy(gradients="host")`, whose forward reads copies on the device. What the caller steps
    is not delayed. `wait()`, `optimizer.state_dict()`, state dicts of modules, `sherd.save`, `unsharded` and copies of
    the model end the delay: the next forward has all steps, so a run that goes on from a checkpoint computes as the
    one that has saved it. All ranks must call them together.

    Args:
        optimizer: one of torch's that treats every element alike (AdamW, SGD and others).
        delay: 0, or 1 to let forward read weights that are a step old.

    Returns:
        An object with `wait()` and `remove()`.

    Raises:
        OptimizerError: the optimizer steps full matrices, or is not known to treat every element alike, or its steps
            are on the thread with another `delay`. Later, where the program first waits for a unit, if its step has
            failed; in a step, if the device has no copies that `delay=1` needs.
        PolicyError: `delay` is neither 0 nor 1.
        PolicyTypeError: `optimizer` is no optimizer of torch, or `delay` no int.
    """
    require_int("step_on_thread(delay={})", delay, 0)
    if delay > 1:
        raise PolicyError(f"step_on_thread(delay={delay}): expected 0 or 1")
    if not isinstance(optimizer, Optimizer):
        raise PolicyTypeError(f"step_on_thread expects a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    if not is_elementwise_class(_kind_of(optimizer)):
        raise OptimizerError(
            f"step_on_thread: {type(optimizer).__name__} is not known to treat every element alike, and its step may "
            "need other ranks; leave its steps to optimizer.step()"
        )
    if optimizer not in _on_thread:
        _on_thread[optimizer] = StepsOnThread(optimizer, delay)
    steps = _on_thread[optimizer]
    if steps.delay != delay:
        raise OptimizerError(f"step_on_thread(delay={delay}): it has delay={steps.delay}; call its remove() first")
    return steps
