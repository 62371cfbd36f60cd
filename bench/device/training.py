"""One system's model and optimizer in one case, and its step in three phases."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh

from ..systems import System, device_of, groups_of
from .cases import TINY, Case, Stack

Batch = tuple[Tensor, ...]

NUM_STEPS_BEFORE_CAPTURE = 3


class Unsupported(Exception):
    """Raised by a case that this device or this system cannot do; the message says why, in a line."""


class Training:
    """A sharded model on this rank's device, with AdamW. A step is `phases`, in order."""

    def __init__(self, system: System, case: Case, stack: Stack, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.case, self.stack = case, stack
        self.device = device_of(mesh)
        self.rank = mesh.get_rank()
        model = stack.on(self.device, torch.float32 if case.mixed else torch.bfloat16)
        for place, block in enumerate(model.blocks):
            model.blocks[place] = self._prepared(block)
        if case.mixed or case.offload:
            system = system.told(mixed=case.mixed, offload=case.offload)
        self.model = system.distribute(model, mesh)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups_of(self.model), lr=3e-4, foreach=True)
        if system.finish is not None:
            self.optimizer = system.finish(self.optimizer)
        self.last_loss: Tensor | None = None

    def _prepared(self, block: nn.Module) -> nn.Module:
        """A block as the case has it, before it is sharded."""
        if self.case.recomputed:
            block = checkpoint_wrapper(block)
        if self.case.compiled is not None:
            # A dry run shows that tracing works; the device may be none that Inductor writes code for.
            how = {"backend": "aot_eager"} if self.stack == TINY else {"mode": self.case.compiled}
            block.compile(**how)
        return block

    def batches(self, number: int) -> list[Batch]:
        """The micro-batches of step `number`, on the device."""
        first = 1000 * number + 10 * self.rank
        return [
            tuple(each.to(self.device) for each in self.stack.batch(first + micro))
            for micro in range(self.case.num_micro_batches)
        ]

    def step(self, batches: Sequence[Batch]) -> None:
        """Forward, backward, AdamW (foreach), gradients to None. The host reads nothing from the device."""
        for _ in self.phases(batches):
            pass

    def phases(self, batches: Sequence[Batch]) -> Iterator[str]:
        """A step that stops behind each phase, and says which it was."""
        if self.case.compiled == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        for number, batch in enumerate(batches):
            with self._reduces(number + 1 == len(batches)):
                loss = self.model(*batch)
                yield "forward"
                loss.backward()
                self.last_loss = loss.detach()
                del loss
                yield "backward"
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        yield "optimizer"

    @contextlib.contextmanager
    def _reduces(self, is_last: bool) -> Iterator[None]:
        """Around a micro-batch: only the last one's gradients are reduced, as each library says it."""
        model: Any = self.model
        if self.case.num_micro_batches == 1:
            yield
        elif hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            yield
        else:
            with contextlib.nullcontext() if is_last else model.no_sync():
                yield


class GraphedTraining(Training):
    """Forward and backward are captured once and replayed; the optimizer steps as ever, on gradients that stay."""

    def __init__(self, system: System, case: Case, stack: Stack, mesh: DeviceMesh) -> None:
        module = torch.get_device_module(mesh.device_type)
        kind = next((name for name in ("CUDAGraph", "XPUGraph") if hasattr(module, name)), None)
        if kind is None or not hasattr(module, "graph"):
            raise Unsupported(f"torch has no graphs for {mesh.device_type}")
        super().__init__(system, case, stack, mesh)
        self._graph: Any = None
        self._inputs = self.batches(0)
        # Autograd accumulates a gradient on the stream that was current when it first saw the parameter. Were that not
        # the stream of the capture, the capture would end in an error.
        stream = module.Stream()
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            for _ in range(NUM_STEPS_BEFORE_CAPTURE):
                self.step(self._inputs)
        torch.accelerator.synchronize()
        graph = getattr(module, kind)()
        with module.graph(graph, stream=stream):
            self.last_loss = self._forward_backward()
        self._graph = graph

    def _forward_backward(self) -> Tensor:
        loss: Tensor = self.model(*self._inputs[0])
        loss.backward()
        return loss.detach()

    def phases(self, batches: Sequence[Batch]) -> Iterator[str]:
        """A replay fills the gradients that the capture left behind, so they are not dropped."""
        if self._graph is None:
            yield from super().phases(batches)
            return
        for ours, given in zip(self._inputs[0], batches[0], strict=True):
            ours.copy_(given)
        self._graph.replay()
        yield "forward and backward"
        self.optimizer.step()
        yield "optimizer"


def training_for(system: System, case: Case, stack: Stack, mesh: DeviceMesh) -> Training:
    """Returns the model and optimizer, ready for their first step."""
    kind = GraphedTraining if case.graphed else Training
    return kind(system, case, stack, mesh)
