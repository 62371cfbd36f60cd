"""Selective recomputation: a checkpointed block keeps the results that take longest to compute."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._grouped_mm"})
"""Matrix products. The results of every second product are kept, from the first product of a forward on."""
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
    """The choice of the operations of one forward whose results are kept.

    It is torchtitan's selective checkpointing by operation (https://github.com/pytorch/torchtitan): attention, and
    every second matrix product, since a product costs less to compute again than attention of long samples, and the
    result of a product takes as much memory.
    """

    def __init__(self) -> None:
        self._num_products = 0

    def keeps(self, name: str) -> bool:
        """Returns whether the results of the next operation, called `name` as in `aten.mm`, are kept."""
        if name not in PRODUCTS:
            return name in ATTENTION
        self._num_products += 1
        return self._num_products % 2 == 1


def selective_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of a forward and of its recomputation, in which the results of `KeptResults` are kept.

    The function is a `context_fn` for `torch.utils.checkpoint.checkpoint`, with `use_reentrant=False`.
    """
    forward, recomputation = KeptResults(), KeptResults()

    def policy(
        context: SelectiveCheckpointContext, operation: Any, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        kept_results = recomputation if context.is_recompute else forward
        is_kept = kept_results.keeps(str(getattr(operation, "overloadpacket", operation)))
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    contexts = create_selective_checkpoint_contexts(policy)
    return contexts
