"""Values that have to be the same: to the bit, unless a test says how close."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten


def assert_same(found: Any, expected: Any, where: str = "", rtol: float | None = 0, atol: float | None = 0) -> None:
    """The same values, of tensors and of what else can be compared, in dicts, lists and tuples of each one. `where`
    begins what is said of a difference; tolerances of None are torch's own."""
    (ours, form), (theirs, expected_form) = tree_flatten(found), tree_flatten(expected)
    assert form == expected_form, f"{where}: {form} is not {expected_form}"
    for index, (mine, value) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                mine,
                value,
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda text, index=index: f"{where}[{index}]: {text}",
            )
        else:
            assert mine == value, f"{where}[{index}]"
