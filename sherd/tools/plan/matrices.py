"""The step of `sherd.Muon`, read as forward and backward are: it runs without values, on a rank that need not exist."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sherd.engine import Unit
from sherd.optim.faults import StepFaults
from sherd.optim.gradients import zeros_as_gradient
from sherd.optim.matrix import MatrixOptimizer
from sherd.optim.muon import Muon, left_to_adamw
from sherd.optim.newton_schulz import computes_in
from sherd.tools.plan.operations import collective_of, is_communication, tensors_among
from sherd.tools.plan.reading import Recording
from sherd.tools.simulate.work import Event, Wait
from sherd.wrap.names import plain_name

__all__ = ["StepOfMatrices"]

_ALL_TO_ALL = torch.ops.c10d.alltoall_base_.default
_TO_DEVICE, _NEW = torch.ops.aten._to_copy.default, torch.ops.aten.lift_fresh.default
HOST = torch.device("cpu")


@dataclass(frozen=True)
class StepOfMatrices:
    """A step of Muon over the hidden matrices of a model without values.

    Attributes:
        model: is kept alive, since its units know the parameters.
        names: of the matrices, in the model.
        optimizer: of these alone.
    """

    model: nn.Module
    names: frozenset[str]
    optimizer: Muon

    @classmethod
    def of(cls, model: nn.Module, on_host: bool = False) -> StepOfMatrices | None:
        """Returns the step for a sharded model, whose gradients it may place again; None if Muon steps nothing of it.

        The products are in the dtype of an accelerator, or of this CPU. Raises OptimizerError as Muon does.
        """
        left = left_to_adamw(model)
        matrices = {name: each for name, each in Unit.named_members(model).items() if not left[name]}
        if not matrices:
            return None
        optimizer = _MuonAsPlanned(list(matrices.values()), on_host)
        optimizer._plan_of(optimizer.matrix_groups()).faults = _NoFaults(on_host)
        for each in matrices.values():
            each.grad = zeros_as_gradient(each, each.dtype)
        return cls(model, frozenset(plain_name(name) for name in matrices), optimizer)

    @property
    def most_loaded(self) -> int:
        """The rank that computes the most, the first of several; this one if all compute the same."""
        flops: Mapping[int, float] = self.optimizer.flops_of_ranks
        return max(sorted(flops), key=flops.__getitem__, default=dist.get_rank())

    def events(self) -> Sequence[Event]:
        """Returns what this rank does in a step, after a first one that makes the state."""
        step = inspect.unwrap(MatrixOptimizer.step)  # without the profiler's mark, an operation
        for _ in range(2):
            recording = _StepRecording()
            with recording:
                step(self.optimizer)
        return tuple(recording.finished())


class _MuonAsPlanned(Muon):
    """Muon with the dtypes of an accelerator, or of this CPU."""

    def __init__(self, matrices: Sequence[nn.Parameter], on_host: bool) -> None:
        super().__init__(matrices, ns_dtype=computes_in(HOST) if on_host else None)
        self._on_host = on_host

    def _is_host(self, device: torch.device) -> bool:
        return self._on_host

    def travels_in(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        return dtype if self._on_host else super().travels_in(dtype, torch.device("meta"))


class _NoFaults(StepFaults):
    """Looks at updates as a device or the host does, finds nothing, and reads no headers: they have no values."""

    def __init__(self, on_host: bool) -> None:
        super().__init__()
        self._on_host = on_host

    def finite(self, update: torch.Tensor, *_: object) -> torch.Tensor:
        bad = update.sum((1, 2), dtype=torch.float32).isfinite().logical_not()
        return update if self._on_host else torch.where(bad[:, None, None], 0, update)

    def keep_reported(self, status: Sequence[object]) -> None:
        pass


class _StepRecording(Recording):
    """Records a step, with the moments at which it waits for a collective."""

    def __init__(self) -> None:
        super().__init__([], [], [])
        self._coming: dict[int, int] = {}
        self._num_begun = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == HOST:  # that of the ranks which are not there, where the shards have no values
            if func is _TO_DEVICE and kwargs.get("dtype") in (None, args[0].dtype):
                return args[0]
            kwargs = {**kwargs, "device": torch.device("meta")}
        if func is _NEW:
            return torch.empty_like(args[0], device="meta")
        if func is _ALL_TO_ALL and not args[1].numel():  # the ranks that are not there refuse to send to one like this
            args = (args[0], args[0], args[2], args[3], args[3], *args[5:])
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if is_communication(func) and collective_of(func, args, result) is not None:
            for each in tensors_among(args[:1]):
                self._coming[id(each.untyped_storage())] = self._num_begun
            self._num_begun += 1
        return result

    def _use(self, args: tuple[Any, ...]) -> None:
        for each in tensors_among(args):
            begun = self._coming.pop(id(each.untyped_storage()), None)
            if begun is not None:
                self._events.append(Wait(begun))
