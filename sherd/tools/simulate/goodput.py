"""The speed that is left in a long run over many devices, after jitter, stragglers, failures and checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

POINTS = 1024


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of devices, all of them alike and independent.

    Attributes:
        jitter: the standard deviation of the logarithm of a rank's step time, from step to step.
        slow_share: of the devices that are always slow.
        slow_by: how much longer such a device takes: 0.1 for 10 % longer.
        mtbf: hours between failures of one device that end the run. Llama 3 (Grattafiori et al., 2024, section 3.3.4)
            had 419 in 54 days on 16,384 H100: one in 50,700 device-hours.
        checkpoint: seconds in which a checkpoint holds training up.
        restart: seconds from a failure until training goes on from the last checkpoint.
    """

    jitter: float = 0.01
    slow_share: float = 0.0
    slow_by: float = 0.1
    mtbf: float = 50_700.0
    checkpoint: float = 30.0
    restart: float = 300.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """Shares of the undisturbed speed that are left, from 0 to 1, and the best seconds between checkpoints."""

    jitter: float
    stragglers: float
    failures: float
    interval: float

    @property
    def share(self) -> float:
        """The share that is left after all of them."""
        return self.jitter * self.stragglers * self.failures


def goodput(num_devices: int, faults: Faults) -> Goodput:
    """Returns what is left on `num_devices` that checkpoint at the best interval."""
    mtbf = faults.mtbf * 3600 / num_devices
    interval = best_interval(mtbf, faults.checkpoint)
    stragglers = straggler_slowdown(num_devices, faults.slow_share, faults.slow_by)
    useful = useful_share(interval, mtbf, faults.checkpoint, faults.restart)
    return Goodput(1 / jitter_slowdown(num_devices, faults.jitter), 1 / stragglers, useful, interval)


def jitter_slowdown(num_ranks: int, jitter: float) -> float:
    """Returns the mean of the slowest of `num_ranks` step times that are lognormal with mean 1.

    The slowest of N stands at the quantile u^(1/N), u uniform in 0..1: the mean over the middles of equal parts of u.
    """
    # Of a quantile close to 1, what it lacks to 1 is exact, and the normal distribution is symmetric.
    lacks = (-math.expm1(math.log((point + 0.5) / POINTS) / num_ranks) for point in range(POINTS))
    slowest = (math.exp(-jitter * NormalDist().inv_cdf(each) - jitter**2 / 2) for each in lacks)
    return max(1.0, sum(slowest) / POINTS)


def straggler_slowdown(num_ranks: int, slow_share: float, slow_by: float) -> float:
    """Returns the mean time of a step, 1 without slow devices: all wait for the slowest, so one of them is enough."""
    return 1 + slow_by * (1 - (1 - slow_share) ** num_ranks)


def best_interval(mtbf: float, checkpoint: float) -> float:
    """Returns the best seconds of training between two checkpoints, where the whole cluster fails every `mtbf` seconds:
    Daly, A higher order estimate of the optimum checkpoint interval for restart dumps (2006), equation 37, whose first
    term is Young's sqrt(2 * checkpoint * mtbf) (1974)."""
    if checkpoint >= 2 * mtbf:
        return mtbf
    ratio = checkpoint / (2 * mtbf)
    return math.sqrt(2 * checkpoint * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint


def useful_share(interval: float, mtbf: float, checkpoint: float, restart: float) -> float:
    """Returns the share of the time in which steps are made that last, if failures are Poisson: Daly's equation 20. A
    failure costs what was done since the last checkpoint, and may come during a restart too."""
    if interval == 0:  # checkpoints take no time, so only restarts are left
        return math.exp(-restart / mtbf)
    if (interval + checkpoint + restart) / mtbf > 700:  # e^700 is about the largest float: nothing is ever finished
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + checkpoint) / mtbf))
