"""`iter_full_parameters`: the unsharded weights of a sharded model, or their changes, for an inference engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar, overload, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from sherd.api.module import require_module
from sherd.checkpoint.catalog import without_wrappers
from sherd.checkpoint.full_tensors import FullTensors
from sherd.engine import Runtime
from sherd.errors import PolicyError
from sherd.requirements import require_bool, require_floating_dtype, require_int, require_type

BUCKET_BYTES = 64 << 20
Item = TypeVar("Item")


class TensorChange(Protocol):
    """A change of one tensor, such as `sherd.WeightDelta`."""

    def to(self: Item, device: torch.device) -> Item:
        """Returns the change with its tensors on `device`."""


Changed = TypeVar("Changed", bound=TensorChange, covariant=True)


@runtime_checkable
class Mark(Protocol[Changed]):
    """A record of the weights that were last sent, such as `sherd.WeightMark`. Both methods update it."""

    def own_changes(self, tensors: FullTensors, names: Sequence[str], rank: int) -> Iterator[Changed]:
        """Yields what has changed in this rank's shards of the tensors `names`, without communication."""

    def all_changes(
        self, tensors: FullTensors, names: Sequence[str], bucket_bytes: int, shown: bool
    ) -> Iterator[Changed]:
        """Yields what has changed in the tensors `names`, nothing unless `shown`. All ranks must call it."""


@overload
def iter_full_parameters(
    model: nn.Module,
    bucket_bytes: int = ...,
    dtype: torch.dtype | None = ...,
    to: torch.device | str | None = ...,
    *,
    buffers: bool = ...,
    rank0_only: bool = ...,
) -> Iterator[tuple[str, torch.Tensor]]: ...
@overload
def iter_full_parameters(
    model: nn.Module,
    bucket_bytes: int = ...,
    dtype: torch.dtype | None = ...,
    to: torch.device | str | None = ...,
    *,
    buffers: bool = ...,
    rank0_only: bool = ...,
    changed_since: Mark[Changed],
    own_part: bool = ...,
) -> Iterator[Changed]: ...
def iter_full_parameters(
    model: nn.Module,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    to: torch.device | str | None = None,
    *,
    buffers: bool = False,
    rank0_only: bool = False,
    changed_since: Mark[Changed] | None = None,
    own_part: bool = False,
) -> Iterator[tuple[str, torch.Tensor]] | Iterator[Changed]:
    """Iterate over the names and unsharded values of all parameters, in the model's order, on all ranks together.

        for name, weight in sherd.iter_full_parameters(model, dtype=torch.bfloat16):
            engine.load_weights([(name, weight)])

    Parameters are gathered in buckets, and the next bucket is gathered while the loop works on this one. This takes two
    buckets more than the shards (three over gloo), the largest parameter, and the part of one bucket that this rank
    sends. A tensor belongs to the caller: nothing writes it again, and it lives as long as the caller keeps it. A tied
    parameter comes once, under its first name. Names are those of the plain model, without the parts that wrappers add.

    The loop may end early on all ranks, after the same tensor. If the loop ends on one rank alone, the other ranks
    raise `CommError`, after the timeout of the process group at the latest. Inside the loop, ranks may communicate over
    groups of their own; the model may not run, and its optimizer may not step.

    With `changed_since=mark` the loop yields what has changed since the last loop with this mark:

        mark = sherd.WeightMark()
        for delta in sherd.iter_full_parameters(model, dtype=torch.bfloat16, changed_since=mark):
            send(delta)  # to a process with a sherd.WeightReceiver

    Each rank compares its shards, in the dtype that is sent, with a copy in host memory, and positions and values are
    gathered bucket by bucket. A tensor comes unsharded if that takes fewer bytes, if it was not sent before, or if
    functions of its own put it together. What a receiver makes of one rank's deltas are the bits that a loop without a
    mark yields on that rank. Ranks yield the same deltas, but for tensors that each rank has in full, such as buffers.

    Args:
        model: the model, by either front end, in any layout; parameters that are not sharded come too.
        bucket_bytes: the bytes of a bucket, unsharded. A larger parameter is a bucket by itself.
        dtype: the dtype in which floating-point tensors are sent and yielded. None: the dtype of each tensor.
        to: the device of the tensors, "cpu" for host memory. None: the device that computes. Tensors that are not
            sharded stay on their own device.
        buffers: after the parameters, yield the buffers that a state dict has, with this rank's values.
        rank0_only: only rank 0 of the default process group gets tensors. The other ranks take part, and their loop has
            no iteration; so the body of the loop must not communicate.
        changed_since: yield changes, and move this mark on. All ranks must give one.
        own_part: with a mark, yield the changes of this rank's own shards, without communication. A receiver needs the
            deltas of all ranks, each rank's in order. Of elements on several ranks, the first of these yields changes,
            as far as the meshes of parameters tell: replicas on separate meshes each yield theirs. What is not sharded
            comes from the first rank of the widest mesh, or from rank 0 if there is no mesh.

    Returns:
        An iterator over pairs of a name and a tensor; with a mark, over `WeightDelta`s.

    Raises:
        StateError: the model is on the meta device, inside `sherd.unsharded`, or in the middle of a forward or
            backward; from the loop: the model has run, its parameters were written, the mark was used elsewhere, or
            the model no longer has a tensor, or its name, that was sent with this mark.
        UnsupportedError: `own_part` for a parameter that functions of its own put together; with a mark, a quantized
            parameter, which has no elements to compare; from the loop.
        CommError: a rank has died, does not go on, or gives other arguments; from the loop.
        PolicyError, PolicyTypeError: an argument is out of range, or of another type.
    """
    require_module("iter_full_parameters expects a module", model)
    require_int("iter_full_parameters(bucket_bytes={})", bucket_bytes, 1)
    require_floating_dtype("iter_full_parameters(dtype={})", dtype)
    require_type("iter_full_parameters(to=...): expected a device or its name", to, torch.device | str | None)
    require_bool("iter_full_parameters(buffers={})", buffers)
    require_bool("iter_full_parameters(rank0_only={})", rank0_only)
    require_type("iter_full_parameters(changed_since=...): expected a sherd.WeightMark", changed_since, Mark | None)
    require_bool("iter_full_parameters(own_part={})", own_part)
    if own_part and (changed_since is None or rank0_only):
        raise PolicyError(
            "iter_full_parameters(own_part=True): expected changed_since=sherd.WeightMark() with it, and no "
            "rank0_only, which gathers"
        )
    device = None if to is None else torch.device(to)
    tensors = FullTensors(model, dtype, "iter_full_parameters()")
    wanted = [*tensors.parameters, *(tensors.saved_buffers if buffers else ())]
    rank = dist.get_rank() if dist.is_initialized() else 0
    shown = not rank0_only or rank == 0
    words = (
        f"dtype={dtype}, bucket_bytes={bucket_bytes}, buffers={buffers}, rank0_only={rank0_only}",
        f"{'with' if changed_since else 'without'} a WeightMark",
    )
    if changed_since is not None:
        if own_part:
            deltas = changed_since.own_changes(tensors, wanted, rank)
        else:
            deltas = _together(tensors, words, changed_since.all_changes(tensors, wanted, bucket_bytes, shown))
        return deltas if device is None else (delta.to(device) for delta in deltas)
    named = _together(tensors, words, tensors.read(wanted, bucket_bytes, shown))
    return ((without_wrappers(name), value if device is None else value.to(device)) for name, value in named)


def _together(tensors: FullTensors, words: Sequence[str], reading: Iterator[Item]) -> Iterator[Item]:
    """Yields what `reading` yields, once all ranks read with the same arguments."""
    Runtime.agree_on_call(tensors.units, "reads out full parameters", words)
    yield from reading
