"""Which of several backwards is the last one before the optimizer step, and what do the others leave undone?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sherd.errors import StateError

if TYPE_CHECKING:
    from sherd.engine.unit import Unit


class Accumulation:
    """A step of `num_backwards`, counted for each model by its root unit.

    Before the last one a unit reduces over those axes only over which it shards gradients: what it has reduced it adds
    up as shards, what it has not as it is.
    """

    def __init__(self, num_backwards: int) -> None:
        self.num_backwards = num_backwards
        self._ended: Counter[int] = Counter()
        self._forwarded: set[int] = set()

    @property
    def fewest(self) -> int:
        """How many backwards the model has had that had fewest; 0 if none has ended."""
        return min(self._ended.values(), default=0)

    def begin_forward(self, units: Sequence[Unit]) -> bool:
        """A forward begins of the model that `units` are; whether it is the first, before which shards may have been
        written."""
        is_first = units[0].id not in self._forwarded
        self._forwarded.add(units[0].id)
        return is_first

    def begin_backward(self, units: Sequence[Unit]) -> None:
        """A backward begins of the model that `units` are, the root's first.

        Raises:
            StateError: it is one more than announced, after gradients were reduced for the last time.
        """
        number = self._ended[units[0].id] + 1
        if number > self.num_backwards:
            raise StateError(
                f"backward number {number} of {units[0].name} inside accumulate(model, {self.num_backwards}); leave "
                "the context after that many, or announce as many as there are"
            )
        is_last = number == self.num_backwards
        for unit in units:
            unit.reduce_fully(is_last)

    def end_backward(self, units: Sequence[Unit]) -> None:
        """A backward is over of the model that `units` are. It counts if it has brought gradients, as
        `torch.autograd.grad` for other tensors does not."""
        self._ended[units[0].id] += any(unit.has_received for unit in units)
