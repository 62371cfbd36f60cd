"""Does `block.compile(fullgraph=True)` hold under sharding, and compute what the plain model computes?"""

import pytest
import torch
import torch.distributed as dist

from tests.models import build, shard
from tests.parity.training import Recipe, assert_all_same, steps_sharded

# Dynamo looks at `.grad` of every graph input, a block's hidden states too, and is warned for it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def train_compiled(recipe, backend, compile_first, **options):
    model = build(recipe.model)
    blocks = [unit for unit in model.units() if unit is not model]
    if not compile_first:
        shard(model, **options)
    for block in blocks:
        block.compile(fullgraph=True, backend=backend)
    if compile_first:
        shard(model, **options)
    return steps_sharded(model, recipe, dist.get_rank())


# Each pair of two choices once: compiling takes seconds.
@pytest.mark.parametrize(
    ("model", "backend", "compile_first"),
    [
        ("mlp", "eager", True),
        ("mlp", "aot_eager", False),
        ("checkpoint_inside", "eager", False),
        ("checkpoint_inside", "aot_eager", True),
    ],
)
def test_blocks_compile_as_one_graph_each(world, model, backend, compile_first):
    recipe = Recipe(model)
    assert_all_same(world(2).run(train_compiled, recipe, backend, compile_first), recipe)


@pytest.mark.parametrize("reshard", [True, False], ids="reshard_{}".format)
def test_compiled_blocks_may_be_recomputed_from_outside(world, reshard):
    recipe = Recipe("checkpoint_outside")
    runs = world(2).run(train_compiled, recipe, "aot_eager", True, reshard_after_forward=reshard)
    assert_all_same(runs, recipe)


def num_graphs(num_steps):
    """How many graphs the blocks make in all: they are alike, so one is enough for forward."""
    seen = []

    def backend(graph, _):
        seen.append(graph)
        return graph.forward

    model = shard(build("mlp"))
    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)
    for step in range(num_steps):
        model.loss(model(*model.make_inputs(step, dist.get_rank()))).backward()
    return len(seen)


def test_steps_do_not_compile_again(world):
    few, many = world(2).run(num_graphs, 1), world(2).run(num_graphs, 4)
    assert few == many
    assert all(1 <= count <= 3 for count in few)


def train_whole_compiled(recipe):
    """The root compiled too, with graph breaks at the units."""
    model = shard(build(recipe.model))
    model.compile(backend="eager")
    return steps_sharded(model, recipe, dist.get_rank())


def test_the_whole_model_may_be_compiled_with_breaks(world):
    assert torch._dynamo.config.suppress_errors is False, "a failed compilation would pass unseen"
    recipe = Recipe("mlp")
    assert_all_same(world(2).run(train_whole_compiled, recipe), recipe)
