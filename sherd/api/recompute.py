"""Selective recomputation: a checkpointed block keeps the results that take longest to compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._grouped_mm"})
"""Matrix products, of which the results of every second one are kept, from the first of a forward on."""
ATTENTION = frozenset(
    f"aten._scaled_dot_product_{kernel}"
    for kernel in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
)
"""Fused attention, whose results are all kept."""


class KeptResults:
    """Tells of one operation of a forward after the other whether its results are kept.

    Which ones is as in torchtitan's selective checkpointing by operation
    (https://github.com/pytorch/torchtitan): attention, and every second matrix product, since a product costs less to
    compute again than attention of long samples, and its result takes as much memory.
    """

    def __init__(self) -> None:
        self._num_products = 0

    def keeps(self, name: str) -> bool:
        """Returns whether the results of the next operation are kept, which has this `name`, as `aten.mm`."""
        if name not in PRODUCTS:
            return name in ATTENTION
        self._num_products += 1
        return self._num_products % 2 == 1


Policy = Callable[..., CheckpointPolicy]


def _policy() -> Policy:
    passes = {False: KeptResults(), True: KeptResults()}  # by whether it is the forward that runs again

    def policy(
        context: SelectiveCheckpointContext, operation: Any, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        is_kept = passes[context.is_recompute].keeps(str(getattr(operation, "overloadpacket", operation)))
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def selective_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of a forward and of its recomputation, in which what `KeptResults` tells is kept: a
    `context_fn` for `torch.utils.checkpoint.checkpoint`, with `use_reentrant=False`."""
    made: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    made = create_selective_checkpoint_contexts(_policy())
    return made
