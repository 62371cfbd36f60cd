"""Compiled blocks, whole models, methods and optimizer steps train as the plain model does."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sherd import Blocks, Flat, Owned, flatten_optimizer, register_fsdp_forward_method
from tests.support.comparing import plain_name
from tests.support.models import build, noise
from tests.support.ranks.bodies import on_processes
from tests.support.sharding import sharded
from tests.support.training import Recipe, assert_all_same, made, steps_sharded
from tests.wrapper.training import assert_all_trained_plainly, steps_wrapped

# Dynamo looks at `.grad` of every graph input, a block's hidden states too, and is warned for it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def train_compiled(recipe, backend, compile_first, **options):
    model = build(recipe.model)
    blocks = [unit for unit in model.units() if unit is not model]
    if not compile_first:
        sharded(model, **options)
    for block in blocks:
        block.compile(fullgraph=True, backend=backend)
    if compile_first:
        sharded(model, **options)
    return steps_sharded(model, recipe, dist.get_rank())


# Each pair of two choices once: compiling takes seconds.
@pytest.mark.parametrize(
    ("model", "backend", "compile_first", "options"),
    [
        ("mlp", "eager", True, {}),
        ("mlp", "aot_eager", False, {"placement": Flat()}),
        ("mlp", "aot_eager", True, {"placement": Blocks(2), "on_touch": "unshard", "reshard_after_forward": False}),
        ("checkpoint_inside", "eager", False, {"placement": Owned(), "on_touch": "unshard"}),
        ("checkpoint_inside", "aot_eager", True, {}),
    ],
)
def test_blocks_compile_as_one_graph_each(world, model, backend, compile_first, options):
    recipe = Recipe(model)
    assert_all_same(world(2).run(train_compiled, recipe, backend, compile_first, **options), recipe)


@pytest.mark.parametrize("reshard", [True, False], ids="reshard_{}".format)
def test_compiled_blocks_may_be_recomputed_from_outside(world, reshard):
    recipe = Recipe("checkpoint_outside")
    runs = world(2).run(train_compiled, recipe, "aot_eager", True, reshard_after_forward=reshard)
    assert_all_same(runs, recipe)


def num_graphs(num_steps, **options):
    """How many graphs the blocks make in all: they are alike, so one is enough for forward."""
    seen = []

    def backend(graph, _):
        seen.append(graph)
        return graph.forward

    model = sharded(build("mlp"), **options)
    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)
    for step in range(num_steps):
        model.loss(model(*model.make_inputs(step, dist.get_rank()))).backward()
    return len(seen)


@pytest.mark.parametrize("options", [{}, {"on_touch": "unshard", "reshard_after_forward": False}], ids=["", "on_touch"])
def test_steps_do_not_compile_again(world, options):
    few, many = world(2).run(num_graphs, 1, **options), world(2).run(num_graphs, 4, **options)
    assert few == many
    assert all(1 <= count <= 3 for count in few)


def train_whole_compiled(recipe, front, backend, in_place):
    """The root compiled too, with graph breaks at the units."""
    steps = steps_wrapped if "wrapper" in front else steps_sharded
    model = sharded(build(recipe.model), front)
    if in_place:
        model.compile(backend=backend)
    run = steps(model if in_place else torch.compile(model, backend=backend), recipe, dist.get_rank())
    run.grads = [{plain_name(name): each for name, each in grads.items()} for grads in run.grads]
    run.params = {plain_name(name): each for name, each in run.params.items()}
    return run


@pytest.mark.parametrize(
    ("front", "backend", "in_place"),
    [
        ("shard", "eager", True),
        ("flat", "aot_eager", False),
        ("blocks", "aot_eager", True),
        ("owned", "eager", False),
        ("wrapper", "eager", True),
        ("flat wrapper", "eager", False),
    ],
)
def test_the_whole_model_may_be_compiled_with_breaks(world, front, backend, in_place):
    assert torch._dynamo.config.suppress_errors is False, "a failed compilation would pass unseen"
    recipe = Recipe("mlp")
    runs = world(2).run(train_whole_compiled, recipe, front, backend, in_place)
    compare = assert_all_trained_plainly if "wrapper" in front else assert_all_same
    compare(runs, recipe)


class TwoWays(nn.Module):
    """Two units and a root, and a method beside forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def encode(self, x):
        return torch.tanh(self.first(x))

    def forward(self, x):
        return self.second(self.encode(x))


def two_ways(front=None):
    """The same weights on all ranks; plain without a front end or placement."""
    model = made(TwoWays)
    return model if front is None else sharded(model, front, [model.second, model])


@pytest.mark.parametrize(
    ("front", "flattened", "whole_step"),
    [
        ("flat", False, False),
        ("blocks", True, False),
        ("owned", False, True),
        ("wrapper", False, True),
        ("flat wrapper", False, False),
    ],
)
# Torch imports Inductor for a compiled step.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@on_processes(2)
def test_an_optimizers_step_may_be_compiled(front, flattened, whole_step):
    """Against the same steps uncompiled, on the same shards."""
    models = [two_ways(front), two_ways(front)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    if flattened:
        optimizers[0] = flatten_optimizer(optimizers[0])
    compiled_step = torch.compile(optimizers[0].step, backend="eager")

    def step(model, optimizer_step, x):
        loss = model(x).square().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer_step()
        return loss.detach()

    def whole(model, _, x):
        return step(model, optimizers[0].step, x)

    compiled = torch.compile(whole, backend="eager") if whole_step else step
    for number in range(2):
        x = noise(number, dist.get_rank(), 3, 4)
        found, expected = compiled(models[0], compiled_step, x), step(models[1], optimizers[1].step, x)
        torch.testing.assert_close(found, expected)
        for optimizer in optimizers:
            optimizer.zero_grad()
    for found, expected in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(found.to_local(), expected.to_local())


@on_processes(2)
def test_a_method_run_as_a_forward_may_be_compiled():
    plain, model = two_ways(), two_ways("flat")
    register_fsdp_forward_method(model, "encode")
    x = noise(0, 0, 3, 4)

    def loss_of(module):
        return module.encode(x).sum() + module(x).square().sum()

    compiled = torch.compile(loss_of, backend="aot_eager")
    for _ in range(2):
        found, expected = compiled(model), loss_of(plain)
        torch.testing.assert_close(found, expected)
        found.backward()
        expected.backward()
    for (name, parameter), each in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), each.grad, msg=name)


@on_processes(2)
def test_one_graph_over_ragged_tensors_is_refused_by_name():
    model = two_ways("flat")
    total = torch.compile(lambda: sum(map(torch.sum, model.parameters())), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="sherd cuts into runs is not traced"):
        total()
