"""`iter_full_parameters`: the unsharded weights of a sharded model, one after the other, for an inference engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from sherd.api.module import require_module
from sherd.checkpoint.catalog import without_wrappers
from sherd.checkpoint.full_tensors import FullTensors
from sherd.requirements import require_bool, require_floating_dtype, require_int, require_type

BUCKET_BYTES = 64 << 20


def iter_full_parameters(
    model: nn.Module,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    to: torch.device | str | None = None,
    *,
    buffers: bool = False,
    rank0_only: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the names and unsharded values of all parameters, in the model's order, on all ranks together.

        for name, weight in sherd.iter_full_parameters(model, dtype=torch.bfloat16):
            engine.load_weights([(name, weight)])

    Parameters are gathered in buckets, and the next bucket is gathered while the loop works on this one. Beside the
    shards, this takes two buckets (three over gloo), the largest parameter, and the part of one bucket that this rank
    sends. A tensor belongs to the caller: nothing writes it again, and it lives as long as the caller keeps it. A tied
    parameter comes once, under its first name. Names are those of the plain model, without the parts that wrappers add.

    The loop may end early on all ranks, after the same tensor. If the loop ends on one rank alone, the other ranks
    raise `CommError`, after the timeout of the process group at the latest. Inside the loop, ranks may communicate over
    groups of their own; the model may not run, and its optimizer may not step.

    Args:
        model: the model, by either front end, in any layout; parameters that are not sharded come too.
        bucket_bytes: the bytes of a bucket, unsharded. A larger parameter is a bucket by itself.
        dtype: the dtype in which floating-point tensors are sent and yielded. None: the dtype of each tensor.
        to: the device of the tensors, "cpu" for host memory. None: the device that computes. Tensors that are not
            sharded stay on their own device.
        buffers: after the parameters, yield the buffers that a state dict has, with this rank's values.
        rank0_only: only rank 0 of the default process group gets tensors. The other ranks take part, and their loop has
            no iteration; so the body of the loop must not communicate.

    Returns:
        An iterator over pairs of a name and a tensor.

    Raises:
        StateError: the model is on the meta device, inside `sherd.unsharded`, or in the middle of a forward or
            backward; from the loop: the model has run, or its parameters were written, during the loop.
        CommError: a rank has died, or does not go on; from the loop.
        PolicyError, PolicyTypeError: an argument is out of range, or of another type.
    """
    require_module("iter_full_parameters expects a module", model)
    require_int("iter_full_parameters(bucket_bytes={})", bucket_bytes, 1)
    require_floating_dtype("iter_full_parameters(dtype={})", dtype)
    require_type("iter_full_parameters(to=...): expected a device or its name", to, torch.device | str | None)
    require_bool("iter_full_parameters(buffers={})", buffers)
    require_bool("iter_full_parameters(rank0_only={})", rank0_only)
    device = None if to is None else torch.device(to)
    tensors = FullTensors(model, dtype, "iter_full_parameters()")
    wanted = [*tensors.parameters, *(name for name in tensors.buffers if buffers and name in tensors.saved_buffers)]
    shown = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    named = tensors.read(wanted, bucket_bytes, shown)
    return ((without_wrappers(name), value if device is None else value.to(device)) for name, value in named)
