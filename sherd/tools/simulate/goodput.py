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
        slow_share: the share of devices that are always slow.
        slow_by: the additional time of a slow device: 0.1 for 10 % longer.
        mtbf: hours between failures of one device that end the run. Llama 3 (Grattafiori et al., 2024, section 3.3.4)
            had 419 in 54 days on 16,384 H100: one in 50,700 device-hours.
        checkpoint: seconds for which a checkpoint stops training.
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
    """The remaining shares of the undisturbed speed, from 0 to 1, and the best seconds between checkpoints."""

    jitter: float
    stragglers: float
    failures: float
    interval: float

    @property
    def share(self) -> float:
        """The product of all three shares."""
        return self.jitter * self.stragglers * self.failures


def goodput(num_devices: int, faults: Faults) -> Goodput:
    """Returns the goodput of `num_devices` with checkpoints at the best interval."""
    mtbf = faults.mtbf * 3600 / num_devices
    interval = best_interval(mtbf, faults.checkpoint)
    stragglers = straggler_slowdown(num_devices, faults.slow_share, faults.slow_by)
    useful = useful_share(interval, mtbf, faults.checkpoint, faults.restart)
    return Goodput(1 / jitter_slowdown(num_devices, faults.jitter), 1 / stragglers, useful, interval)


def jitter_slowdown(num_ranks: int, jitter: float) -> float:
    """Returns the mean of the slowest of `num_ranks` step times that are lognormal with mean 1.

    The slowest of N stands at the quantile u^(1/N), u uniform in 0..1: the mean over the middles of equal parts of u.
    """
    # One minus the quantile is exact also where the quantile is close to 1, and the normal distribution is symmetric.
    complements = (-math.expm1(math.log((point + 0.5) / POINTS) / num_ranks) for point in range(POINTS))
    slowest = (math.exp(-jitter * NormalDist().inv_cdf(each) - jitter**2 / 2) for each in complements)
    return max(1.0, sum(slowest) / POINTS)


def straggler_slowdown(num_ranks: int, slow_share: float, slow_by: float) -> float:
    """Returns the mean time of a step, 1 without slow devices. All ranks wait if a single one is slow."""
    return 1 + slow_by * (1 - (1 - slow_share) ** num_ranks)


def best_interval(mtbf: float, checkpoint: float) -> float:
    """Returns the best seconds of training between two checkpoints on a cluster that fails every `mtbf` seconds.

    It is equation 37 of Daly, A higher order estimate of the optimum checkpoint interval for restart dumps (2006),
    whose first term is Young's sqrt(2 * checkpoint * mtbf) (1974).
    """
    if checkpoint >= 2 * mtbf:
        return mtbf
    ratio = checkpoint / (2 * mtbf)
    return math.sqrt(2 * checkpoint * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint


def useful_share(interval: float, mtbf: float, checkpoint: float, restart: float) -> float:
    """Returns the share of the time in steps that no failure undoes, if failures are Poisson: Daly's equation 20.

    A failure undoes the steps since the last checkpoint, and may come during a restart too.
    """
    if interval == 0:  # checkpoints take no time, so only restarts do
        return math.exp(-restart / mtbf)
    if (interval + checkpoint + restart) / mtbf > 700:  # e^700 is about the largest float: nothing is ever finished
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + checkpoint) / mtbf))
