"""`accumulate`: several backwards that make one optimizer step, for both front ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from sherd.api.module import sharded_units
from sherd.engine import Unit
from sherd.errors import StateError
from sherd.requirements import require_bool, require_int


@contextmanager
def accumulate(model: nn.Module, num_backwards: int, *, average: bool = False) -> Iterator[None]:
    """Let the next `num_backwards` backwards of `model` make one optimizer step, without needless communication.

        with sherd.accumulate(model, len(micro_batches), average=True):
            for micro_batch in micro_batches:
                loss_of(model, micro_batch).backward()
        optimizer.step()

    A backward before the last one reduces only over axes over which gradients are sharded (`Placements.gradient`). With
    HSDP each backward reduces within a replica, and the last backward over the replicas; with ZeRO-1 and DDP only the
    last backward reduces. Parameters that are kept unsharded, or whose shards replicas divide, are updated once;
    outside this context they are updated at every forward, as the program may have written to them. Gradients that wait
    for the replicas have the parameters' dtype, not the reduce dtype. With sums in the order of ranks
    (`CommPolicy(reduce=)`) every backward reduces, onto the sum of those before.

    Args:
        model: a module on which `fully_shard` was called, or that holds such modules, or a wrapper.
        num_backwards: 1 or more.
        average: gradients are the mean over the backwards. False: the sum, so that the caller divides the losses.

    Raises:
        ModuleError: nothing below `model` is sharded.
        PolicyError: `num_backwards` below 1; `PolicyTypeError` if `num_backwards` is no int, or `average` no bool.
        StateError: inside another `accumulate`, at a backward too many, or at the end after too few backwards. Any
            exception drops gradients that were not yet reduced.
    """
    require_int("accumulate(num_backwards={})", num_backwards, 1)
    require_bool("accumulate(average={})", average)
    units = sharded_units("accumulate", model)
    if any(unit.policy.accumulation is not None for unit in units):
        raise StateError(f"accumulate within accumulate of the same model, {units[0].class_name}; leave the outer one")
    before = [unit.policy for unit in units]
    counted = _Accumulation(num_backwards, num_backwards if average else 1)
    for unit in units:
        unit.change(accumulation=counted)
    try:
        yield
        if counted.fewest < num_backwards:
            raise StateError(
                f"accumulate(model, {num_backwards}) saw {counted.fewest} backwards of {units[0].class_name}, so "
                "gradients wait for a reduction that has not come; run as many as announced, of the outermost module"
            )
    except BaseException:
        # The optimizer's zero_grad does not reach these sums, which would be added to the gradients of the next step.
        for unit in units:
            unit.backward.drop_unreduced()
        raise
    finally:
        for unit, policy in zip(units, before, strict=True):
            unit.change(
                accumulation=None,
                reduce_gradients=policy.reduce_gradients,
                all_reduce_gradients=policy.all_reduce_gradients,
            )


@contextmanager
def without_reduction(units: Sequence[Unit]) -> Iterator[None]:
    """Let `units` add up unsharded gradients within this context, which a backward outside of it reduces."""
    before = [(unit, unit.policy.reduce_gradients, unit.policy.all_reduce_gradients) for unit in units]
    for unit in units:
        unit.change(reduce_gradients=False, all_reduce_gradients=False)
    try:
        yield
    finally:
        for unit, reduces, all_reduces in before:
            unit.change(reduce_gradients=reduces, all_reduce_gradients=all_reduces)


class _Accumulation:
    """The count of the backwards of one optimizer step, for each model, by the id of its root unit.

    Before the last backward a unit reduces only over axes over which it shards gradients.
    """

    def __init__(self, num_backwards: int, num_averaged: int) -> None:
        self.num_backwards, self.num_averaged = num_backwards, num_averaged
        self._ended: Counter[int] = Counter()
        self._forwarded: set[int] = set()
        self.is_in_first_forward = True

    @property
    def fewest(self) -> int:
        """Returns the number of backwards of the model with the fewest, 0 before the first end of a backward."""
        return min(self._ended.values(), default=0)

    def begin_forward(self, root: int) -> bool:
        """Note that a forward of `root` begins. Returns True if it is the first, before which shards may be written."""
        is_first = root not in self._forwarded
        self._forwarded.add(root)
        self.is_in_first_forward = is_first
        return is_first

    def begin_backward(self, root: int, name: str) -> bool:
        """Note that a backward of `root`, called `name`, begins. Returns True if it is the last one.

        Raises:
            StateError: there are more backwards than announced.
        """
        number = self._ended[root] + 1
        if number > self.num_backwards:
            raise StateError(
                f"backward number {number} of {name} inside accumulate(model, {self.num_backwards}); leave the context "
                "after that many, or announce as many as there are"
            )
        return number == self.num_backwards

    def end_backward(self, root: int, has_brought_gradients: bool) -> None:
        """Note that a backward of `root` ends. It counts if it brought gradients (`torch.autograd.grad` need not)."""
        self._ended[root] += has_brought_gradients
