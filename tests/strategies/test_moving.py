"""What was saved under one strategy, mesh, cut and front end loads under any other, on any number of ranks."""

import itertools
import tempfile
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sherd import Flat, fully_shard
from sherd.policy import Level
from tests.strategies.cases import CUTS, sharded, wrapped
from tests.strategies.routed import Routed, built, loss_of
from tests.strategies.test_experts import sharded as sharded_experts
from tests.support import checkpoints
from tests.support.comparing import whole
from tests.support.models import build
from tests.support.suites import examples

AXES = ("replicate", "shard")


@dataclass(frozen=True)
class Setup:
    """Where a model is: `shape` of the data-parallel mesh, `tp` ranks beside it; no shape is the plain model."""

    shape: tuple[int, ...] = ()
    tp: int = 1
    levels: tuple[Level, ...] = ()
    cut: str = "rows"
    front_end: str = "fully_shard"
    below: int | None = None

    @property
    def num_ranks(self):
        return torch.Size(self.shape).numel() * self.tp

    def placed(self, seed):
        """A model of the weights of `seed`, and its optimizer."""
        model = build("mlp", seed)
        return with_optimizer(self._sharded(model) if self.shape else model)

    def _sharded(self, model):
        _clear_sharding_prop_cache()
        mesh = init_device_mesh("cpu", (*self.shape, self.tp), mesh_dim_names=(*AXES[-len(self.shape) :], "tp"))
        if self.tp > 1:
            for block in model.blocks:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        data = mesh[AXES[-len(self.shape) :]]
        if self.front_end == "fully_shard":
            return sharded(model, self.levels, self.cut, data, replicate_below=self.below)
        return wrapped(model, self.levels, self.cut, data, use_orig_params=True)


def with_optimizer(model):
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-2, fused=True)


def steps(model, optimizer, which):
    """Every rank has the same batch, so that any number of them does the same. The last loss."""
    for step in which:
        loss = loss_of(model, step, 0) if isinstance(model, Routed) else model.loss(model(*model.make_inputs(step, 0)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def saved(placed, folder, full=False):
    """Train a step and save, by shards to `folder` or as whole states; the loss of the next step, and the states."""
    model, optimizer = placed(0)
    steps(model, optimizer, (0,))
    kept = None
    if full:
        kept = whole(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))
    else:
        checkpoints.save(model, optimizer, folder)
    return steps(model, optimizer, (1, 2)), kept


def loaded(placed, folder, states=None):
    """Of other weights and after a step of its own; the loss of the same next steps."""
    model, optimizer = placed(1)
    steps(model, optimizer, (5,))
    if states is None:
        checkpoints.load(model, optimizer, folder)
    else:
        options = StateDictOptions(full_state_dict=True)
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    return steps(model, optimizer, (1, 2))


def assert_moves(sources, placed, targets, placed_there, full=False):
    """What the ranks `sources` have saved goes on with `targets` as with them."""
    with tempfile.TemporaryDirectory() as folder:
        found = sources.run(saved, placed, folder, full)
        expected, states = found[0]
        assert [loss for loss, _ in found] == pytest.approx([expected] * len(found), rel=1e-5)
        losses = targets.run(loaded, placed_there, folder, states)
    assert losses == pytest.approx([expected] * len(losses), rel=1e-4)
    return expected


SHAPES = st.sampled_from(
    [((2, 2), 1), ((1, 2), 2), ((2, 1), 2), ((2,), 2), ((2, 2), 1), ((3,), 1), ((2,), 1), ((4,), 1)]
)


@st.composite
def setups(draw):
    (shape, tp), cut = draw(SHAPES), draw(st.sampled_from(list(CUTS)))
    levels = tuple(draw(st.sampled_from(list(Level))) for _ in shape)
    wraps = cut in ("flat", "blocks", "whole") and tp == 1 and draw(st.booleans())
    below = None if wraps else draw(st.sampled_from((None, 100, 1 << 20)))
    return Setup(shape, tp, levels, cut, "wrapper" if wraps else "fully_shard", below)


@pytest.mark.slow
@settings(
    max_examples=examples(4),
    database=None,
    phases=[Phase.generate],  # to shrink what takes a second would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(source=setups(), target=setups(), full=st.booleans())
def test_training_goes_on_from_any_strategy_under_any_other(world, source, target, full):
    assert_moves(world(source.num_ranks), source.placed, world(target.num_ranks), target.placed, full)


@pytest.mark.parametrize("below", [None, 100])
def test_the_plain_model_is_one_of_them(world, below):
    plain, hfsdp = Setup(), Setup((2, 2), 1, (Level.OPTIMIZER, Level.PARAMETERS), "flat", below=below)
    expected = assert_moves(world(1), plain.placed, world(4), hfsdp.placed)
    assert assert_moves(world(4), hfsdp.placed, world(1), plain.placed) == pytest.approx(expected, rel=1e-4)


# Experts


def routed(form, _):
    """Plain; or divided over `ep` and sharded over `edp` in two ways; or sharded with the rest, none divided."""
    if form == "plain":
        return with_optimizer(built())
    if form == "together":
        return with_optimizer(fully_shard(built(), placements="zero1", placement=Flat()))
    return with_optimizer(sharded_experts(True, Flat() if form == "flat" else None)[0])


def test_experts_move_with_their_optimizer_state_between_meshes(world):
    ranks = {"plain": 1, "together": 2, "rows": 4, "flat": 4}
    for source, target in (
        *itertools.pairwise(("rows", "flat", "plain", "rows")),
        *itertools.pairwise(("flat", "together", "rows")),
    ):
        places = partial(routed, source), partial(routed, target)
        assert_moves(world(ranks[source]), places[0], world(ranks[target]), places[1])
