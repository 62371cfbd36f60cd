"""A record of forward and backward while they run: calls of modules, operations, and memory that comes and goes."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sherd._torch import TorchDispatchMode, are_fake
from sherd.tensor.ragged import local_part
from sherd.tools.plan.operations import (
    WITHOUT_VALUES,
    KnownResults,
    collective_of,
    is_communication,
    op_of,
    tensors_among,
)
from sherd.tools.simulate.work import (
    Allocate,
    BackwardBegins,
    Enter,
    Event,
    Gradient,
    Leave,
    Passed,
    Reached,
    Release,
    TensorKind,
    Use,
)

__all__ = ["Recording", "is_as_logits", "logits_among", "reads_tokens"]

_known = KnownResults()
"""The results of all recordings: models that differ only in the number of blocks ask for the same ones."""


# The logits, for this record and for `Storages`


def reads_tokens(inputs: Iterable[Tensor]) -> bool:
    """Returns True if a model with these inputs reads tokens."""
    return any(each.dim() > 1 and not each.is_floating_point() for each in inputs)


def logits_among(outputs: Iterable[Tensor]) -> Tensor | None:
    """Returns the logits of a model that reads tokens: its largest output."""
    numbers = (each for each in outputs if each.is_floating_point() and each.dim() > 1)
    return max(numbers, key=Tensor.numel, default=None)


def is_as_logits(width: int, nbytes: int, logits_width: int, logits_nbytes: int) -> bool:
    """Returns True for a tensor as wide as the logits, of a quarter of the bytes at least."""
    # A copy may be of half the precision, and without some tokens.
    return width == logits_width > 0 and 4 * nbytes >= logits_nbytes


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Returns the memory of `tensor` on this rank."""
    return local_part(tensor).untyped_storage()


@dataclass(eq=False, slots=True)
class ModuleCall:
    """A call of a module, in the call around it."""

    module: int
    around: ModuleCall | None
    again: bool
    used: set[int] = field(default_factory=set)
    """The parameters that the call read itself, outside of calls within it."""
    is_reached: bool = False
    passed_at: int = 0
    """The number of events when backward was past the last operation of the call."""

    def outwards(self) -> Iterator[ModuleCall]:
        """Yields this call and all around it."""
        call: ModuleCall | None = self
        while call is not None:
            yield call
            call = call.around


@dataclass(slots=True)
class _Memory:
    """The memory of a tensor: its size, the shape and the call with which it was made, and its purpose."""

    nbytes: int
    shape: tuple[int, ...]
    call: ModuleCall | None
    kind: TensorKind = TensorKind.TEMPORARY


class Recording(TorchDispatchMode):
    """Records operations and memory. Hooks of modules, parameters and autograd's graph add calls and gradients.

    Args:
        parameters: the model's parameters. Their memory is there before the step, as that of the buffers.
        buffers: the model's buffers.
        batch: the tensors of the batch.
    """

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], batch: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._resting = [storage_of(each) for each in (*parameters, *buffers)]
        self._parameter_at = {id(each): number for number, each in enumerate(self._resting[: len(parameters)])}
        self._is_resting = {id(each) for each in self._resting}
        self._events: list[Event] = []
        self.widths: dict[int, int] = {}
        """The bytes of an element of each gradient, by the index of the parameter."""
        self._memory: list[_Memory] = []
        self._number_at: dict[int, int] = {}  # by the id of a storage that is alive
        self._call: ModuleCall | None = None
        self._calls: list[ModuleCall] = []
        self._last_reached: ModuleCall | None = None
        self._in_backward = False
        self._recomputed: list[int] = []
        self._has_tokens = reads_tokens(batch)
        self._logits: int | None = None
        self._behind_head: int | None = None  # the length of `_memory` when backward left the call that made the logits
        self._failed_in: int | None = None
        self._handled = sys.exc_info()[1]  # an error that the caller is about to handle
        for each in batch:
            self._note(each)
        self._inputs = list(self._number_at.values())

    @property
    def failed_in(self) -> int | None:
        """The innermost module whose forward ended with an error, or that backward was in; None: the loss."""
        if self._failed_in is None and self._last_reached:
            return self._last_reached.module
        return self._failed_in

    # Operations and memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it asks for operations on local tensors, which come here
        kwargs = kwargs or {}
        again = self._in_backward and torch.is_grad_enabled()  # backward itself runs without
        if self._recomputed and not again:
            self._end_recomputation()
        if again or not self._in_backward:
            self._use(args)
        without_values = WITHOUT_VALUES.get(func)
        result = without_values(*args, **kwargs) if without_values else _known.of(func, args, kwargs)
        if are_fake((*types, type(result))):
            return result  # nobody will compute this
        for each in tensors_among((result,)):
            self._note(each, again)
        if is_communication(func):
            collective = collective_of(func, args, result)
            self._events += [] if collective is None else [collective]
        else:
            op = op_of(func, args, kwargs, result)
            self._events += [] if op is None else [op]
        return result

    def _use(self, args: tuple[Any, ...]) -> None:
        for each in tensors_among(args):
            parameter = self._parameter_at.get(id(each.untyped_storage()))
            used = self._call.used if self._call else set()
            if parameter is not None and parameter not in used:
                used.add(parameter)
                self._events.append(Use(parameter))

    def _note(self, tensor: Tensor, again: bool = False) -> None:
        """Note the memory of `tensor`, if it is new or changed its size."""
        storage = tensor.untyped_storage()
        key, nbytes = id(storage), storage.nbytes()
        number = self._number_at.get(key)
        if key in self._is_resting or (number is not None and self._memory[number].nbytes == nbytes):
            return
        if number is None:
            weakref.finalize(storage, self._died, key).atexit = False
        else:
            self._events.append(Release(number))
        self._number_at[key] = number = len(self._memory)
        self._memory.append(_Memory(nbytes, tuple(tensor.shape), self._call))
        self._events.append(Allocate(number, nbytes, TensorKind.TEMPORARY))
        if again:
            self._recomputed.append(number)

    def _died(self, key: int) -> None:
        number = self._number_at.pop(key, None)
        if number is not None:
            self._events.append(Release(number))

    def _alive(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        numbers = (self._number_at.get(id(storage_of(each))) for each in tensors)
        return tuple(dict.fromkeys(number for number in numbers if number is not None))

    def _end_recomputation(self) -> None:
        alive = set(self._number_at.values())
        for number in self._recomputed:
            if number in alive:
                self._memory[number].kind = TensorKind.ACTIVATION
        self._recomputed.clear()

    # Calls of modules

    def enter(self, module: int, inputs: Sequence[Tensor]) -> None:
        """The forward of a module begins. The operations that made its `inputs` belong to the call around it."""
        self._claim(inputs)
        self._call = ModuleCall(module, self._call, self._in_backward)
        self._calls.append(self._call)
        self._events.append(Enter(module, self._in_backward, self._alive(inputs)))

    def leave(self, outputs: Sequence[Tensor]) -> None:
        """The innermost forward ends, with an error or not."""
        call = self._call
        assert call is not None, "it was entered"
        if self._failed_in is None and not call.again and sys.exc_info()[1] is not self._handled:
            self._failed_in = call.module
        self._claim(outputs)
        self._events.append(Leave(call.module, call.again, self._alive(outputs)))
        self._call = call.around
        logits = logits_among(outputs)
        if self._call is None and self._has_tokens and logits is not None and not self._in_backward:
            self._logits = self._number_at.get(id(storage_of(logits)))

    def _claim(self, tensors: Sequence[Tensor]) -> None:
        """Let the unclaimed nodes of autograd's graph behind `tensors` belong to the innermost call."""
        waiting = [each.grad_fn for each in tensors]
        while waiting:
            node = waiting.pop()
            # The nodes that accumulate gradients have a variable: hooks of parameters record them.
            if node is None or hasattr(node, "variable"):
                continue
            noted: dict[str, ModuleCall | None] = node.metadata  # type: ignore[assignment] # a property, whatever its type says
            if "call" in noted:
                continue
            noted["call"] = self._call
            node.register_prehook(lambda _, call=self._call: self._reach(call))
            waiting.extend(before for before, _ in node.next_functions)

    # Backward

    def end_forward(self, loss: Tensor) -> None:
        """Backward from `loss` begins."""
        self._claim([loss])
        for number in self._number_at.values():
            self._memory[number].kind = TensorKind.ACTIVATION
        self._events.append(BackwardBegins())
        self._in_backward = True

    def _reach(self, call: ModuleCall | None) -> None:
        """Backward is about to run an operation of `call`."""
        self._pass()
        self._last_reached = call
        for each in reversed(list(call.outwards() if call else ())):
            if not each.is_reached:
                each.is_reached = True
                self._events.append(Reached(each.module))
        head = None if self._logits is None else self._memory[self._logits].call
        if head and call and self._behind_head is None and call not in head.outwards():
            self._behind_head = len(self._memory)

    def _pass(self) -> None:
        for each in self._last_reached.outwards() if self._last_reached else ():
            each.passed_at = len(self._events)

    def hand_over(self, parameter: int, gradient: Tensor) -> None:
        """Autograd hands over the gradient of a parameter, whose memory was a temporary's until now."""
        key = id(storage_of(gradient))
        number = self._number_at.get(key)
        if number is not None and self._memory[number].nbytes == local_part(gradient).nbytes:
            self._memory[number].shape = ()  # no logits, whatever its shape
            self._died(key)
        self._events.append(Gradient(parameter))
        self.widths[parameter] = gradient.dtype.itemsize

    # The end

    def _mark_logits(self) -> None:
        """Mark the logits, and all later tensors like them until backward leaves the module that made the logits."""
        logits = None if self._logits is None else self._memory[self._logits]
        if logits is not None and logits.shape:
            for memory in self._memory[self._logits : self._behind_head]:
                if memory.shape and is_as_logits(memory.shape[-1], memory.nbytes, logits.shape[-1], logits.nbytes):
                    memory.kind = TensorKind.LOGITS

    def finished(self) -> Iterator[Event]:
        """Yields the events of the step, once it is over."""
        self._pass()
        self._mark_logits()
        for number in self._inputs:
            self._memory[number].kind = TensorKind.INPUT
        passed: dict[int, list[ModuleCall]] = {}
        for call in reversed(self._calls):  # inner calls were entered after those around them
            if call.is_reached:
                passed.setdefault(call.passed_at, []).append(call)
        for position, event in enumerate(self._events):
            yield from (Passed(call.module) for call in passed.get(position, ()))
            yield replace(event, kind=self._memory[event.tensor].kind) if isinstance(event, Allocate) else event
        yield from (Passed(call.module) for call in passed.get(len(self._events), ()))
        yield from (Release(number) for number in self._number_at.values())
