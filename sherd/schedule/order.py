"""The order in which units really ran, per phase, and the units that come next.

The first pass records the order, and later passes follow it. A pass that leaves the
recorded order becomes the new recording, so a model that changes its mind costs prefetching for one pass and no more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Order:
    """The learnt sequence of one phase, and the place of the present pass in it.

    `learnt` is the last complete pass. `at` entries of it have come true in this pass as long as `strayed` is None;
    after the first surprise `strayed` holds the whole present pass instead.
    """

    learnt: tuple[int, ...] = ()
    at: int = 0
    strayed: tuple[int, ...] | None = None

    def after(self, unit: int) -> Order:
        """Returns the order once `unit` has run."""
        if self.strayed is not None:
            return replace(self, strayed=(*self.strayed, unit))
        if self.at < len(self.learnt) and self.learnt[self.at] == unit:
            return replace(self, at=self.at + 1)
        return replace(self, strayed=(*self.learnt[: self.at], unit))

    def rewound(self) -> Order:
        """Returns the order at the start of the next pass, which follows this one."""
        return Order(learnt=self.learnt if self.strayed is None else self.strayed)

    def upcoming(self) -> tuple[int, ...]:
        """Returns the units expected next, nearest first. There are none while the order is unknown or was left."""
        return self.learnt[self.at :] if self.strayed is None else ()
