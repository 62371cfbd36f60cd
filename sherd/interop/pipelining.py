"""`PipelineStage`, by which torch's pipeline schedules run sherd's modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining

from sherd._torch import defers_reductions, write_into
from sherd.engine import StageUnits, Unit
from sherd.errors import StateError
from sherd.interop.identity import lend_identity
from sherd.interop.packages import wrapped
from sherd.tensor.ragged import local_part

__all__ = ["PipelineStage"]


class PipelineStage(pipelining.PipelineStage):
    """A stage of a pipeline whose module sherd has sharded, as one unit, in parts, or not at all.

    Arguments, attributes and methods are those of `torch.distributed.pipelining.PipelineStage`, for torch's schedules.
    In one step of a schedule

    - parameters are gathered before the stage's first forward, or ahead of it where the schedule says UNSHARD, and kept
      until its last backward, or until the schedule says RESHARD;
    - unsharded gradients of all micro-batches are added up and reduced once, in the last backward or after it;
    - a backward in two parts (zero-bubble schedules) works like any other backward.

    The policy of each unit (`reshard_after_forward` and so on) holds again after the step.

    Raises (in a step):
        ModuleError, OwnershipError, StateError: a unit that is not the stage's alone.
    """

    shows_whole_parameters = True
    """The mark by which the engine knows this class from torch's (`sherd._torch.splitting_stage`)."""

    def __init__(self, submodule: nn.Module, stage_index: int, num_stages: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(submodule, stage_index, num_stages, *args, **kwargs)
        self._sherd_units = StageUnits(submodule, f"stage {stage_index}")
        self._sherd_lent: set[type] = set()
        self._sherd_earlier: list[tuple[nn.Parameter, torch.Tensor]] | None = None

    def clear_runtime_states(self) -> None:
        """As torch's. A schedule calls the method when a step begins."""
        if self._sherd_units.units and defers_reductions():
            raise StateError(
                f"{self._sherd_units.name}: step(finalize_gradients=False) is for torch's FSDP; to add several steps "
                "up, call set_requires_gradient_sync(False) on the stage's module before all but the last"
            )
        super().clear_runtime_states()
        self._sherd_earlier = None
        self._sherd_units.begin()
        # torch's schedules apply UNSHARD and RESHARD only to instances of torch's FSDPModule.
        classes = {type(unit.modules[0]) for unit in self._sherd_units.units} - self._sherd_lent
        lend_identity(self, classes)
        self._sherd_lent |= classes

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        # Since 2.15 torch's method has FSDP wait for a call after the last backward. The units know which one that is.
        name, module = "set_manual_backward_finalization", self.submod
        write_into(module, name, lambda *_: None)
        try:
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            delattr(module, name)
        if not self.has_backward and fwd_chunk_id == len(self.args_recv_info) - 1:
            self._sherd_units.end()
        return output

    def _post_metadata_inference_cleanup(self) -> None:
        """As torch's (2.13): free the parameters that were gathered to learn the shapes. Keeps the gradients.

        There are gradients if shapes are learnt again, by an evaluation between a step and the optimizer's step.
        """
        self._sherd_units.free()
        gradients = [(parameter, parameter.grad) for parameter in self.submod.parameters()]
        super()._post_metadata_inference_cleanup()
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        """As torch's."""
        backward = functools.partial(super().backward_maybe_with_nosync, backward_type, bwd_kwargs, last_backward)
        if backward_type != "full":
            with self._sherd_units.split_backward():
                return backward()
        if not last_backward:
            return backward()
        self._sherd_set_earlier_aside()
        self._sherd_units.last_backward()
        module = self.submod
        self.submod = None  # type: ignore[assignment]  # torch's stage would tell it not to reduce
        try:
            return backward()
        finally:
            self.submod = module

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Finish the reductions of the step, and divide the step's gradients by `grad_scale_factor`.

        Gradients of earlier steps are then added, undivided.
        """
        if self.has_backward:
            self.start_gradient_reduction()
            self.wait_for_gradient_reduction(grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        """Start the reductions of the step. Schedules of torch 2.15 may compute until they wait for them."""
        self._sherd_set_earlier_aside()
        self._sherd_units.start_reductions()

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """Do the rest of `perform_reduce_grad`."""
        self._sherd_units.finish_reductions()
        self.scale_grads(grad_scale_factor)
        earlier, self._sherd_earlier = self._sherd_earlier, None
        for shard, gradient in earlier or ():
            shard.grad = gradient if shard.grad is None else gradient.add_(shard.grad)

    def _sherd_set_earlier_aside(self) -> None:
        """Keep the gradients that shards have from earlier steps out of this step's division."""
        if self._sherd_earlier is None:
            shards = [shard for unit in self._sherd_units.units for shard in unit.shards.optimizer_params]
            self._sherd_earlier = [(shard, shard.grad) for shard in shards if shard.grad is not None]
            for shard, _ in self._sherd_earlier:
                shard.grad = None

    def scale_grads(self, grad_scale_factor: int) -> None:
        gradients = [parameter.grad for parameter in self.submod.parameters() if parameter.grad is not None]
        if grad_scale_factor != 1 and gradients:
            torch._foreach_div_([local_part(gradient) for gradient in gradients], grad_scale_factor)


def split_backwards_in_torchs_stages() -> Callable[[], None]:
    """Let torch's own stages show unsharded parameters in split backwards. Returns a function that undoes it."""
    name = "backward_maybe_with_nosync"
    owner = next(cls for cls in pipelining.PipelineStage.__mro__ if name in vars(cls))

    def run(original: Callable[..., Any], stage: Any, backward_type: Any, *args: Any, **kwargs: Any) -> Any:
        of_stage = StageUnits(stage.submod, f"stage {stage.stage_index}")
        if backward_type == "full" or isinstance(stage, PipelineStage) or not of_stage.units:
            return original(stage, backward_type, *args, **kwargs)
        if Unit.of(stage.submod) is None:
            raise StateError(
                f"{of_stage.name}: its schedule splits backward in two, and modules inside are sharded but not the "
                f"stage's own, {type(stage.submod).__name__}, which torch's PipelineStage looks at; call fully_shard "
                "on it too, or use sherd.interop.pipelining.PipelineStage"
            )
        with of_stage.split_backward():
            return original(stage, backward_type, *args, **kwargs)

    return wrapped(owner, name, run)
