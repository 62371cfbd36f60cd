"""A gradient scaler whose ranks agree that the loss scale was too high, when the shards of one rank show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sherd._torch import device_of, gradients_of, spec_of
from sherd.clip import note_of_several, with_gradients
from sherd.errors import PolicyTypeError
from sherd.tensor.reduction_table import ANY, by_dtype, local_gradient_of


class ShardedGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` (Micikevicius et al., 2018) for sharded gradients: all ranks step, or all skip the step.

    Gradients may be ragged DTensors, torch's DTensors and plain tensors side by side, in float16 too, on the CPU while
    the loss is on an accelerator, or missing on some ranks. Each `unscale_` (or `step` without `unscale_`) is one small
    all-reduce over `process_group`; and, if that group leaves ranks out, one over each axis of the meshes of the
    optimizer's parameters. So every rank of these groups calls it, with or without gradients.

    Args:
        device: type of the device of the losses, such as "cpu" or "xpu". The default is torch's; without CUDA, it
            disables the scaler with a warning.
        init_scale: the first scale.
        backoff_factor: the factor of the scale after a step with an inf or nan; below 1.
        growth_factor: the factor of the scale after `growth_interval` steps without inf and nan; above 1.
        growth_interval: the number of these steps.
        enabled: False makes `scale`, `unscale_` and `update` do nothing, and `step` the optimizer's own.
        process_group: the ranks that step together; None for all ranks.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        # By name: torch's own sharded scaler takes the two factors in this order, and GradScaler in the other order.
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each tensor of an iterable, by the scale.

        Returns:
            The scaled tensors, in the structure and the dtypes of `outputs`.

        Raises:
            PolicyTypeError: `outputs` has an element that is no tensor.
        """
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, torch.Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if isinstance(outputs, list | tuple):
            return type(outputs)(map(self.scale, outputs))
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise PolicyTypeError(f"scale() expects a tensor or an iterable of tensors, got a {type(outputs).__name__}")

    @torch.no_grad()
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale this rank's shards. Returns the flags of all ranks, one per device.

        `unscale_` calls the method. So does `step`, with an `inv_scale` of 1, for optimizers that unscale by
        themselves. GradScaler (2.11 to 2.13) has no public method for the flags, and torch's own sharded scaler
        overrides this method too: test_torch_asks_for_the_flags_in_one_place.
        """
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parameters = with_gradients("ShardedGradScaler", held)
        # On a device the host would wait for the scale, which follows from the first one and the other numbers.
        scale = self._init_scale if inv_scale.device.type != "cpu" else self.get_scale()
        terms = scale, self.get_growth_factor(), self.get_backoff_factor(), self.get_growth_interval()
        what = "gradients are unscaled from {}, growth_factor={}, backoff_factor={}, growth_interval={}, of {} tensors"
        note_of_several(what, terms, parameters)
        pieces_of_all = [
            local_gradient_of(grad, parameter)
            for grad, parameter in zip(gradients_of(parameters), parameters, strict=True)
            if grad is not None
        ]
        flags: dict[torch.device, torch.Tensor] = {}
        for pieces in by_dtype(pieces_of_all):
            device = pieces[0].device
            # A blocking copy: with CPU offload, the host reads the flag next.
            flag = flags.setdefault(device, found_inf.to(device))
            torch._amp_foreach_non_finite_check_and_unscale_(pieces, flag, inv_scale.to(device))
        flags = flags or {found_inf.device: found_inf}
        worst = torch.stack([flag.reshape(()).to(found_inf.device) for flag in flags.values()]).amax()
        for group, device in self._groups(parameters, found_inf.device):
            joined = ANY.join(worst.to(device), [group], "the comparison of gradients that overflowed")
            worst = joined.to(worst.device)
        for flag in flags.values():
            flag.copy_(worst)
        return flags

    def _groups(
        self, parameters: Iterable[torch.Tensor], home: torch.device
    ) -> Iterator[tuple[dist.ProcessGroup | None, torch.device]]:
        """Yields the process groups whose ranks agree, each with the device of its collectives."""
        if not dist.is_initialized():
            return
        # Of all parameters, with or without a gradient, so that all ranks agree over the same groups.
        specs = [spec_of(parameter) for parameter in parameters if isinstance(parameter, DTensor)]
        each_once = {id(spec.mesh): spec.mesh for spec in specs}
        meshes = [mesh for mesh in each_once.values() if mesh.get_coordinate() is not None]
        yield self.process_group, device_of(meshes[0]) if meshes else home
        if dist.get_world_size(self.process_group) < dist.get_world_size():
            axes = [(mesh, axis) for mesh in meshes for axis in range(mesh.ndim) if mesh.size(axis) > 1]
            groups = {mesh.get_group(axis): device_of(mesh) for mesh, axis in axes}
            yield from ((group, device) for group, device in groups.items() if group is not self.process_group)
