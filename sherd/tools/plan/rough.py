"""Rough predictions, for a search that asks for many settings: of small models, which stand for the whole one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import floor

from sherd.errors import InputError, SherdError
from sherd.tools.plan.blocks import block_lists, spread, with_fewer_blocks
from sherd.tools.plan.planner import Planner, Training, together
from sherd.tools.simulate.cluster import Cluster
from sherd.tools.simulate.predict import Prediction
from sherd.tools.simulate.search import IMPOSSIBLE, Outcome
from sherd.tools.simulate.settings import Settings

FEW, MORE = 2, 4
"""Of many equal blocks a rough prediction plays so many, and adds the difference for each of the others."""
MICRO_BATCHES = 3
"""Of many micro-batches it plays so many, and adds the last one for each of the others."""


class RoughPlanner:
    """Predicts the seconds and bytes of steps in less time, for a search: of models with many equal blocks by models
    with fewer, of many micro-batches by fewer, of several samples by what one takes, and of a share of blocks that are
    computed again by the next ones of none, half and all."""

    def __init__(self, training: Training, cluster: Cluster) -> None:
        self._training, self._cluster = training, cluster
        self._played = cache(self._play)
        self._planners = cache(self._make_planners)
        self._refusal = cache(self._find_refusal)
        self._lists = block_lists(training.model)
        self._whole = cache(lambda is_rough: Planner(training, cluster, is_rough))

    def _make_planners(self, times: int) -> tuple[list[Planner], int | None]:
        """Returns the planners of both models, with so many times `FEW` and `MORE` blocks, and how many blocks the
        whole one has; nothing, if that is not made of more and equal ones."""
        training, cluster, model = self._training, self._cluster, self._training.model
        few, more = (with_fewer_blocks(model, number * times) for number in (FEW, MORE))
        if few is None or more is None:
            return [], None
        first = Planner(replace(training, model=few[0]), cluster, is_rough=True)
        return [first, Planner(replace(training, model=more[0]), cluster, is_rough=True, like=first)], few[1]

    def runs_with(self, samples: int) -> bool:
        """Returns whether the model runs with a batch of so many `samples`."""
        return self._refusal(samples) is None

    def _find_refusal(self, samples: int) -> InputError | None:
        """Returns the error of a model that does not run with so many samples, but does with those of its own batch."""
        own = self._training.samples
        if samples == own:
            return None
        few = with_fewer_blocks(self._training.model, FEW)
        reader = Planner(self._training if few is None else replace(self._training, model=few[0]), self._cluster)
        try:
            reader.read(samples)
        except InputError as error:
            with suppress(InputError):
                reader.read(own)
                return error  # else it is not the number that it refuses
        return None

    def outcome(self, settings: Settings) -> Outcome:
        """Returns what a step takes under `settings`. Raises as `Planner.predict` does."""
        refusal = self._refusal(settings.micro_batch)
        if refusal is not None:
            raise refusal
        share = self._whole_blocks(settings.checkpointing)
        if self._few_blocks(settings)[1] is None:
            return self._of_all(replace(settings, checkpointing=share))
        lower = floor(2 * share) / 2
        found, part = self._of_all(replace(settings, checkpointing=lower)), 2 * (share - lower)
        return _between(found, self._of_all(replace(settings, checkpointing=lower + 0.5)), part) if part else found

    def _whole_blocks(self, share: float) -> float:
        """Returns the share of blocks that is computed again where `share` is asked for."""
        whole = len(spread(self._lists, 1.0))
        return len(spread(self._lists, share)) / whole if whole else 0.0

    def _of_all(self, settings: Settings) -> Outcome:
        """Returns the outcome of all micro-batches."""
        num = min(settings.micro_batches, max(MICRO_BATCHES, settings.mesh.pp + 1))
        found, others = self._played(replace(settings, micro_batches=num)), settings.micro_batches - num
        return _between(self._played(replace(settings, micro_batches=num - 1)), found, 1 + others) if others else found

    def _play(self, settings: Settings) -> Outcome:
        planners, num = self._few_blocks(settings)
        predictions = (planner.predict(settings) for planner in planners)
        first, *more = map(outcome_of, predictions)
        return first if num is None else _between(first, more[0], (num - FEW) / (MORE - FEW))

    def _few_blocks(self, settings: Settings) -> tuple[list[Planner], float | None]:
        """Returns the planners of models with `FEW` and `MORE` units of blocks, and how many of these a stage of the
        whole one has; that of the whole model alone, if it has no more."""
        pp, run = settings.mesh.pp, together(settings)
        planners, num = self._planners(min(pp, 2) * run)
        if num is None or num < MORE * pp * run:
            return [self._whole(pp == 1)], None
        return planners, num / pp / run


def outcome_of(prediction: Prediction) -> Outcome:
    """Returns what a search knows of a prediction."""
    return Outcome(prediction.timeline.seconds, prediction.driver_bytes)


def or_impossible(evaluate: Callable[[Settings], Outcome]) -> Callable[[Settings], Outcome]:
    """Returns `evaluate`, but for settings that the model refuses, which are `IMPOSSIBLE`."""

    def evaluated(settings: Settings) -> Outcome:
        try:
            return evaluate(settings)
        except SherdError:
            return IMPOSSIBLE

    return evaluated


def _between(first: Outcome, last: Outcome, part: float) -> Outcome:
    """Returns the outcome that far from the first to the last, or beyond it, along a line."""
    nbytes = first.nbytes + part * (last.nbytes - first.nbytes)
    return Outcome(first.seconds + part * (last.seconds - first.seconds), round(nbytes))
