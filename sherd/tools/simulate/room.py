"""The memory that there is for a step, and the answer: it fits, is tight, or does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from sherd.tools.simulate.cluster import Cluster


class Answer(str, Enum):
    """Whether a step fits. The value is its name in words."""

    FITS = "fits"
    TIGHT = "tight"
    """It fits as planned, and would not if it took as much more as published trainings did."""
    NOT = "does not fit"


class Published(NamedTuple):
    """What `num` published trainings on several `devices` took of a device's memory.

    It was their plan and a share of it from `low` to `high`, a tenth of them at either end left out.
    """

    devices: str
    low: float
    high: float
    num: int

    def __str__(self) -> str:
        if self.low < 0 < self.high:
            share = f"{-self.low:.0%} less to {self.high:.0%} more"
        else:
            least, most = sorted(map(abs, (self.low, self.high)))
            share = f"{100 * least:.0f} to {most:.0%} {'more' if self.high > 0 else 'less'}"
        return f"published {self.devices} trainings took {share} than planned"


PUBLISHED = (
    Published("A100", 0.062, 0.131, 4),
    Published("H100", -0.176, 0.095, 49),
    Published("A100, B200, H100 and MI300X", -0.188, 0.107, 57),
)
"""By kinds of devices with four trainings at least, and of all. tests/planning/test_published.py computes them from
docs/data/predictions.csv."""


def published_on(cluster: Cluster) -> Published | None:
    """Returns the published trainings on the kind of the cluster's device, or on all kinds; None for a CPU."""
    if not cluster.device.overlaps:
        return None
    return next((each for each in PUBLISHED if each.devices in cluster.device.name), PUBLISHED[-1])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The seconds of a step under some settings, its bytes on a device, and those in the memory of its node."""

    seconds: float
    nbytes: int
    host_bytes: int = 0


TIGHT = 1.5
"""A tight step counts as so many times as long, so that settings with a margin are chosen up to this price."""


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes of a device and of a node's memory (None: not known), and how far published trainings were off."""

    device: int
    host: int | None = None
    published: Published | None = None

    @property
    def roomy(self) -> int:
        """The most planned bytes of a device that still fit with the margin that published trainings needed."""
        return self.device if self.published is None else int(self.device / (1 + max(0.0, self.published.high)))

    def lack(self, outcome: Outcome) -> int:
        """Returns the missing bytes, of the device and of the node."""
        missing = 0 if self.host is None else max(0, outcome.host_bytes - self.host)
        return max(0, outcome.nbytes - self.device) + missing

    def answer(self, outcome: Outcome) -> Answer:
        """Returns whether a step with this outcome fits."""
        if self.lack(outcome):
            return Answer.NOT
        return Answer.TIGHT if outcome.nbytes > self.roomy else Answer.FITS

    def merit(self, outcome: Outcome) -> tuple[int, float, int]:
        """Returns a key by which better outcomes come first: those that fit, then faster ones, with a margin if any."""
        weight = TIGHT if outcome.nbytes > self.roomy else 1.0
        return self.lack(outcome), outcome.seconds * weight, outcome.nbytes
