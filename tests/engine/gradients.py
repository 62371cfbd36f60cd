"""The gradients of a step, and how they are compared with those of plain training."""

from __future__ import annotations

from torch import Tensor, nn

from tests.support.comparing import Named, assert_named_close, whole_grads


def gradients(model: nn.Module, loss: Tensor | None = None) -> Named:
    """The gradients that are there, or those of `loss`, whole; they are dropped."""
    if loss is not None:
        loss.backward(retain_graph=True)
    found = whole_grads(model)
    model.zero_grad(set_to_none=True)
    return found


def assert_as_plain(found: list[Named], *expected: Named) -> None:
    """Of each step: as the one that is expected of all, or of this one."""
    for each, plain in zip(found, expected * len(found) if len(expected) == 1 else expected, strict=True):
        assert_named_close(each, plain, "gradient", rtol=1e-4, atol=1e-7)
