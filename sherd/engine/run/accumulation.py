"""Which of several backwards is the last one before the optimizer step."""

from __future__ import annotations

from collections import Counter

from sherd.errors import StateError


class Accumulation:
    """A step of `num_backwards`, counted for each model by its root unit.

    Before the last one a unit reduces over those axes only over which it shards gradients: what it has reduced it adds
    up as shards, what it has not as it is.
    """

    def __init__(self, num_backwards: int) -> None:
        self.num_backwards = num_backwards
        self._ended: Counter[int] = Counter()
        self._forwarded: set[int] = set()
        self.is_in_first_forward = True

    @property
    def fewest(self) -> int:
        """The number of backwards of the model that has had fewest; 0 if none has ended."""
        return min(self._ended.values(), default=0)

    def begin_forward(self, root: int) -> bool:
        """Note that a forward of the model begins whose root unit has the id `root`. Returns True if it is the first,
        before which shards may have been written."""
        is_first = root not in self._forwarded
        self._forwarded.add(root)
        self.is_in_first_forward = is_first
        return is_first

    def begin_backward(self, root: int, name: str) -> bool:
        """Note that a backward of the model begins whose root unit has the id `root`, and that `name`. Returns True if
        it is the last one.

        Raises:
            StateError: it is one more than announced, after gradients were reduced for the last time.
        """
        number = self._ended[root] + 1
        if number > self.num_backwards:
            raise StateError(
                f"backward number {number} of {name} inside accumulate(model, {self.num_backwards}); leave the context "
                "after that many, or announce as many as there are"
            )
        return number == self.num_backwards

    def end_backward(self, root: int, has_brought_gradients: bool) -> None:
        """Note that a backward is over. It counts only if it `has_brought_gradients`, as `torch.autograd.grad` for
        other tensors does not."""
        self._ended[root] += has_brought_gradients
