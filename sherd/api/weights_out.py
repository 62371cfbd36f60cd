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
    """Returns an iterator over the names and unsharded values of all parameters, in the model's order. All ranks must
    go through it together.

        for name, weight in sherd.iter_full_parameters(model, dtype=torch.bfloat16):
            engine.load_weights([(name, weight)])

    Parameters are gathered in buckets, and the next bucket is gathered while the loop works on this one. Beside the
    shards that takes two buckets (three over gloo), the largest parameter, and what this rank sends of one bucket. A
    tensor is the caller's own: it is not written again, and lives as long as it is held. A tied parameter comes once,
    under its first name. Names are those of the plain model, without the parts that wrappers add.

    The loop may end early on all ranks, behind the same tensor. If it ends on one rank alone, the others raise
    `CommError` after the timeout of the process group, at the latest. Inside the loop ranks may talk over groups of
    their own; the model may not run, nor its optimizer step.

    Args:
        model: the model, by either front end, in whatever layout; parameters that are not sharded come, too.
        bucket_bytes: the bytes of a bucket, unsharded. A larger parameter is a bucket by itself.
        dtype: the dtype in which floating-point tensors are sent and come. None: their own.
        to: the device of the tensors, "cpu" for host memory. None: the device that computes. Tensors that are not
            sharded are elsewhere only if they were.
        buffers: let the buffers that a state dict has follow the parameters. Their values are this rank's own.
        rank0_only: only rank 0 of the default process group gets tensors. On the other ranks the loop ends without
            one, after they have taken part; so its body must not communicate.

    Raises:
        StateError: the model is on the meta device, inside `sherd.unsharded`, or in the middle of a forward or
            backward; from the loop: it has run, or its parameters were written, meanwhile.
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
    found = tensors.read(wanted, bucket_bytes, shown)
    return ((without_wrappers(name), value if device is None else value.to(device)) for name, value in found)
