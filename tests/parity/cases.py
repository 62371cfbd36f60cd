"""Trainings on ranks, each by a name, and their comparison with one process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch.distributed as dist

from tests.support.comparing import assert_same
from tests.support.models import build
from tests.support.ranks import Processes, Threads
from tests.support.sharding import sharded
from tests.support.training import Recipe, assert_all_same, tolerance, train_sharded

Cases = Mapping[Hashable, tuple[Recipe, dict[str, Any]]]
"""Recipes and the options of what trains them."""

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def each(train: Callable[..., Any], cases: Cases) -> dict[Hashable, Any]:
    """On a rank: `train(recipe, **options)` of all cases, one after another; an error names the case."""
    found = {}
    for name, (recipe, options) in cases.items():
        try:
            found[name] = train(recipe, **options)
        except Exception as error:
            raise AssertionError(f"in the case {name!r}: {error}") from error
    return found


def assert_each_trains(ranks: Processes | Threads, cases: Cases, train: Callable[..., Any] = train_sharded) -> None:
    """What `train` returns of each case on `ranks` is the run of one process."""
    runs = ranks.run(each, train, cases)
    for name, (recipe, _) in cases.items():
        assert_all_same([run[name] for run in runs], recipe, **tolerance(recipe.model, len(runs)))


def on_one_side(program: Callable[..., Any], recipe: Recipe, num_ranks: int | None = None, **options: Any) -> Any:
    """`program(model, recipe, ranks)`, which trains on the batches of `ranks`: of a model that is sharded with
    `options` on this rank's; with `num_ranks` of the plain model, on those of all of them."""
    model = build(recipe.model)
    if num_ranks is not None:
        return program(model, recipe, range(num_ranks))
    return program(sharded(model, **options), recipe, [dist.get_rank()])


def assert_both_sides_agree(
    ranks: Processes | Threads, program: Callable[..., Any], recipe: Recipe, **options: Any
) -> None:
    """Whatever `program` returns, it does so on each of `ranks` and in one process."""
    expected = on_one_side(program, recipe, ranks.num_ranks)
    for rank, found in enumerate(ranks.run(on_one_side, program, recipe, **options)):
        assert_same(found, expected, f"{recipe} on rank {rank}", **CLOSE)
