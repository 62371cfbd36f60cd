"""The work of a training step, read from a model by one forward and backward on the meta device, without values."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from sherd._torch import PackHook, TorchDispatchMode, are_fake, pop_saving_hooks, push_saving_hooks, storage_uses
from sherd.engine import Unit
from sherd.errors import InputError, reason_of
from sherd.tensor.ragged import local_part
from sherd.tensor.structures import tensors_in
from sherd.tools.plan.operations import (
    WITHOUT_VALUES,
    KnownResults,
    collective_of,
    is_communication,
    kernels_of,
    op_of,
    tensors_among,
)
from sherd.tools.simulate.work import (
    Allocate,
    Alone,
    BackwardBegins,
    Enter,
    Event,
    Gradient,
    Leave,
    Module,
    Parameter,
    Passed,
    Reached,
    Read,
    Release,
    Save,
    TensorKind,
    Use,
    Work,
)
from sherd.tools.verify.equivalence import loss_in, output_of, own_loss

__all__ = ["Loss", "Recording", "is_as_logits", "logits_among", "own_or_usual_loss", "read_work", "reads_tokens"]

Loss = Callable[[nn.Module, Any], Tensor]
"""Returns the loss, a scalar, of a model and a batch."""


def read_work(model: nn.Module, batch: Any, loss: Loss = own_loss, device_type: str = "cuda") -> Work:
    """Returns the work of one micro-batch: what forward and backward of `loss(model, batch)` do, in order.

    Memory is exact, apart from memory that a kernel allocates for itself, which no operation of torch shows.

    Args:
        model: plain, on the meta device, its floating-point parameters in the dtype that forward computes in.
        batch: tensors on the meta device, in any containers.
        loss: the loss of (model, batch). By default the `loss` in the model's output, else the mean square of the
            output; a batch that is a tuple, list or dict is passed as arguments.
        device_type: the type of device whose kernels run: "cpu", or any other for CUDA's.

    Raises:
        InputError: a parameter, buffer or tensor of the batch has values, or forward or backward needs values; or
            `loss` returns no loss.
    """
    inputs = tensors_in(batch)
    of_batch = (("the batch", tensor) for tensor in inputs)
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *of_batch):
        if not tensor.is_meta:
            raise InputError(f"{name} is on {tensor.device}, and not on meta; make it under torch.device('meta')")
    modules = list(model.named_modules())
    recording = Recording(list(model.parameters()), list(model.buffers()), inputs)
    handles = [*_call_hooks(modules, recording), *_gradient_hooks(model, recording)]
    Unit.share_saving()
    try:
        with torch.device("meta"), kernels_of(device_type), recording:
            push_saving_hooks((PackHook(recording.save), recording.read))
            try:
                with torch.enable_grad():
                    value = loss(model, batch)
            finally:
                pop_saving_hooks()
            _require_loss(value, model)
            recording.end_forward(value)
            with torch.no_grad():  # so operations with gradients on are a forward that runs again
                value.backward()
            nodes = _nodes_behind(value)
            del value
            while nodes:
                nodes.popleft()
    except InputError:
        raise
    except Exception as error:
        where = "the loss"
        if recording.failed_in is not None:
            name, module = modules[recording.failed_in]
            where = f"{name or 'the model'} ({type(module).__name__})"
        reason = reason_of(error)
        # of torch's grouped matrix product, for experts: before 2.14, and since
        if "Expected inputs of BF16 type" in reason or "Expected mat_a to be BFloat16" in reason:
            hint = "compute in bfloat16: compute_dtype=torch.bfloat16, or --precision bf16"
            reason = f"{reason.rstrip('.')}; {hint}"
        raise InputError(f"{where} does not run without values: {reason}") from error
    finally:
        for handle in handles:
            handle.remove()
    tokens = [tensor.numel() for tensor in inputs if not tensor.is_floating_point() and tensor.dim() > 1]
    return Work(
        *_parts(model, recording.widths),
        tuple(recording.finished()),
        samples=inputs[0].shape[0] if inputs and inputs[0].dim() else 1,
        tokens=tokens[0] if tokens else 0,
    )


def _nodes_behind(loss: Tensor) -> deque[Node]:
    """Returns the nodes of autograd's graph from the loss on, to be freed one by one in this order.

    Freeing only the loss would free the nodes by recursion: for a thousand layers the stack is too small.
    """
    waiting = [] if loss.grad_fn is None else [loss.grad_fn]  # a loss that is itself a parameter has no node
    nodes, seen = deque(waiting), {*waiting}
    while waiting:
        before = dict.fromkeys(node for after in waiting for node, _ in after.next_functions if node is not None)
        waiting = [node for node in before if node not in seen]
        seen.update(waiting)
        nodes.extend(waiting)
    return nodes


def _require_loss(value: object, model: nn.Module) -> None:
    """Raise InputError if backward cannot begin with `value`."""
    if not isinstance(value, Tensor):
        raise InputError(f"the loss is {value!r:.80}; expected a tensor of one number, from which backward begins")
    if value.numel() != 1:
        raise InputError(f"the loss has the shape {tuple(value.shape)}; expected one number, as its mean or sum")
    if not value.requires_grad:
        is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
        why = "no parameter of the model is trainable" if is_frozen else "it does not depend on a trainable parameter"
        raise InputError(f"the loss has no gradient: {why} (requires_grad), so that there is no backward to plan")


def own_or_usual_loss(model: nn.Module, batch: Any) -> Tensor:
    """Returns the `loss` in the model's output; without one, a loss of the outputs in float32.

    For tokens it is the cross-entropy of the logits, as in `sherd train`, else the sum of the outputs.
    """
    output = output_of(model, batch)
    loss = loss_in(output)
    if loss is not None:
        return loss
    tokens, *_ = tensors_in(batch)
    outputs = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    del output  # so that nothing but `outputs` keeps the logits alive
    if not outputs:
        raise InputError("the model returns no tensor of floating-point numbers; give a loss of (model, batch)")
    if tokens.is_floating_point() or outputs[0].dim() <= tokens.dim():
        return torch.stack([tensor.float().sum() for tensor in outputs]).sum()
    logits = outputs.pop(0).float().flatten(0, -2)
    return F.cross_entropy(logits, tokens.flatten(), reduction="none").mean()


def _parts(model: nn.Module, widths: Mapping[int, int]) -> tuple[tuple[Module, ...], tuple[Parameter, ...]]:
    """Returns the model's modules and parameters, as in `Work`. `widths` are those of gradients, in bytes."""
    number = {name: at for at, (name, _) in enumerate(model.named_modules())}
    modules = tuple(
        Module(name, type(module).__name__, number[name.rpartition(".")[0]] if name else None)
        for name, module in model.named_modules()
    )
    parameters = tuple(
        Parameter(
            name,
            number[name.rpartition(".")[0]],
            tuple(local_part(parameter).shape),
            str(parameter.dtype).removeprefix("torch."),
            local_part(parameter).nbytes,
            parameter.requires_grad,
            max(1, widths.get(at, 0) // parameter.dtype.itemsize),
        )
        for at, (name, parameter) in enumerate(model.named_parameters())
    )
    return modules, parameters


def _call_hooks(modules: Sequence[tuple[str, nn.Module]], recording: Recording) -> Iterator[RemovableHandle]:
    def enter(number: int, module: nn.Module, args: object, kwargs: object) -> None:
        recording.enter(number, tensors_in((args, kwargs)))

    def leave(module: nn.Module, args: object, output: object) -> None:
        recording.leave(tensors_in(output, in_any_object=True))

    for number, (_, module) in enumerate(modules):
        yield module.register_forward_pre_hook(partial(enter, number), prepend=True, with_kwargs=True)
        # always_call: a recomputed forward stops early by an exception, and that ends it, too.
        yield module.register_forward_hook(leave, always_call=True)


def _gradient_hooks(model: nn.Module, recording: Recording) -> Iterator[RemovableHandle]:
    def hand_over(number: int, parameter: Tensor) -> None:
        assert parameter.grad is not None, "autograd has just accumulated it"
        gradient, parameter.grad = parameter.grad, None
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):  # as the engine does it
            gradient = gradient.redistribute(placements=parameter.placements)
        recording.hand_over(number, gradient)

    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            yield parameter.register_post_accumulate_grad_hook(partial(hand_over, number))


# The record of forward and backward while they run

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
        self._saved: dict[int, tuple[int, int]] = {}  # the address and the number of views of what is not yet alone
        self._num_saved = 0
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
            return result  # this will never be computed
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
            self._saved.pop(number, None)
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

    # What autograd saves

    def save(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """Keep `tensor` for backward, and note that its memory is saved."""
        local = local_part(tensor)
        storage = local.untyped_storage()
        number = self._number_at.get(id(storage))
        if number is None:
            return tensor if tensor.is_leaf else tensor.detach(), None
        self._look_at_saved()
        self._num_saved += 1
        view = tensor.detach()
        self._saved[number] = storage._cdata, self._saved.get(number, (0, 0))[1] + 1
        self._events.append(Save(number, -self._num_saved))
        return view, -self._num_saved

    def read(self, saved: tuple[Tensor, int | None]) -> Tensor:
        """Return a saved tensor, and note that backward reads it."""
        tensor, mark = saved
        if mark is not None:
            self._events.append(Read(mark))
        return tensor

    def _look_at_saved(self) -> None:
        """Note the saved tensors that nothing else keeps any more."""
        for number, (address, num_views) in list(self._saved.items()):
            if storage_uses(address) <= num_views + 1:  # the views, and the object that tells when the storage dies
                del self._saved[number]
                self._events.append(Alone(number))

    # Calls of modules

    def enter(self, module: int, inputs: Sequence[Tensor]) -> None:
        """The forward of a module begins. The operations that made its `inputs` belong to the call around it."""
        self._claim(inputs)
        self._look_at_saved()
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
