"""Unusual backwards, and programs that fail in the middle of one, leave the right gradients."""

import copy

import pytest
import torch
import torch.distributed as dist

from sherd import fully_shard
from tests.parity.cases import assert_each_trains
from tests.support.comparing import assert_named_close, whole_grads
from tests.support.models import Wired, build, noise
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import sharded
from tests.support.training import Recipe, assert_same_run, made, steps_sharded, train_plain
from tests.support.versions import needs_torch


def check(ranks, cases):
    """The gradients of each case, a program of a model's by name, are the mean of what it makes on a plain model."""
    found_by_rank = ranks.run(run_programs, cases)
    for case, (program, name, _) in cases.items():
        sums = {}
        for rank in range(ranks.num_ranks):
            model = build(name)
            program(model, rank)
            for param_name, param in model.named_parameters():
                share = None if param.grad is None else param.grad / ranks.num_ranks
                others = sums.get(param_name)
                sums[param_name] = share if others is None or share is None else others + share
        for found in found_by_rank:
            assert_named_close(found[case], sums, f"{case}: gradient", 1e-5, 1e-6)


def run_programs(cases):
    """On a rank: the gradients that each program leaves on its sharded model."""
    found = {}
    for case, (program, name, options) in cases.items():
        model = sharded(build(name), **options)
        program(model, dist.get_rank())
        found[case] = whole_grads(model)
    return found


def two_backwards_of_one_graph(model, rank):
    loss = model.loss(model(*model.make_inputs(0, rank)))
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses_of_one_output(model, rank):
    output = model(*model.make_inputs(0, rank))
    output.square().mean().backward(retain_graph=True)
    output.tanh().sum().backward()


def two_forwards_then_one_backward(model, rank):
    first = model.loss(model(*model.make_inputs(0, rank)))
    second = model.loss(model(*model.make_inputs(1, rank)))
    (first + 2 * second).backward()


def two_forwards_then_two_backwards(model, rank):
    first = model.loss(model(*model.make_inputs(0, rank)))
    second = model.loss(model(*model.make_inputs(1, rank)))
    second.backward()
    first.backward()


def three_whole_steps_without_update(model, rank):
    for step in range(3):
        model.loss(model(*model.make_inputs(step, rank))).backward()


def evaluation_between_forward_and_backward(model, rank):
    loss = model.loss(model(*model.make_inputs(0, rank)))
    with torch.no_grad():
        model(*model.make_inputs(1, rank))
    loss.backward()


def evaluations_before_and_after(model, rank):
    model.eval()
    with torch.inference_mode():
        model(*model.make_inputs(3, rank))
    with torch.no_grad():
        model(*model.make_inputs(4, rank))
    model.train()
    model.loss(model(*model.make_inputs(0, rank))).backward()
    with torch.inference_mode():
        model(*model.make_inputs(5, rank))
    model.loss(model(*model.make_inputs(1, rank))).backward()


def a_forward_whose_loss_is_thrown_away(model, rank):
    model(*model.make_inputs(3, rank))
    model.loss(model(*model.make_inputs(0, rank))).backward()


def a_unit_called_alone_then_the_whole(model, rank):
    model.blocks[1](noise(0, rank)).square().mean().backward()
    model.loss(model(*model.make_inputs(0, rank))).backward()


def a_backward_with_part_of_the_parameters_asked_for(model, rank):
    loss = model.loss(model(*model.make_inputs(0, rank)))
    loss.backward()
    x = noise(9, rank).requires_grad_()
    (wanted,) = torch.autograd.grad(model(x).sum(), [x])
    assert wanted.shape == x.shape


PROGRAMS = [
    two_backwards_of_one_graph,
    two_losses_of_one_output,
    two_forwards_then_one_backward,
    two_forwards_then_two_backwards,
    three_whole_steps_without_update,
    evaluation_between_forward_and_backward,
    evaluations_before_and_after,
    a_forward_whose_loss_is_thrown_away,
]


VARIED = ["mlp", "view_saving", "nested", "uneven"]


# Each program meets each model, and both of them either choice.
@pytest.mark.parametrize("turn", range(len(VARIED)))
def test_a_program_leaves_the_plain_gradients(threads, turn):
    cases = {}
    for at, program in enumerate(PROGRAMS):
        model = (at + turn) % len(VARIED)
        cases[program.__name__] = program, VARIED[model], {"reshard_after_forward": (model + at) % 2 == 0}
    check(threads(2), cases)


@pytest.mark.parametrize("model", ["mlp", "view_saving"])
def test_a_program_leaves_the_plain_gradients_on_processes_too(world, model):
    programs = [*PROGRAMS, a_backward_with_part_of_the_parameters_asked_for] if model == "mlp" else PROGRAMS
    check(world(2), {program.__name__: (program, model, {}) for program in programs})


def test_the_whole_may_run_after_a_unit_ran_alone(threads):
    check(threads(2), {"alone": (a_unit_called_alone_then_the_whole, "mlp", {})})


MODELS = ("mlp", "adapted", "checkpoint_outside", "reentrant_outside")


@pytest.mark.parametrize("reshard", [True, False], ids="reshard_{}".format)
@on_threads(2, name=MODELS)
def test_the_inputs_gradient_is_the_plain_one(name, reshard):
    gradients = []
    for model in (sharded(build(name), reshard_after_forward=reshard), build(name)):
        x = noise(0, dist.get_rank()).requires_grad_()
        model.loss(model(x)).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def train_after_a_mishap(recipe, where):
    """A first step fails on all ranks, then the recipe runs."""
    model = sharded(build(recipe.model))
    fail_once(model, where, dist.get_rank())
    return steps_sharded(model, recipe, dist.get_rank())


def fail_once(model, where, rank):
    def explode(*_):
        raise ZeroDivisionError("the user's own mistake")

    def explode_in_backward(_, __, output):
        if output.requires_grad:  # not in the first pass of a reentrant checkpoint
            output.register_hook(explode)

    inside = model.blocks[1].down
    if where == "forward":
        hook = inside.register_forward_pre_hook(explode)
    else:
        module = inside if where == "backward" else model
        hook = module.register_forward_hook(explode_in_backward)
    with pytest.raises(ZeroDivisionError):
        model.loss(model(*model.make_inputs(7, rank))).backward()
    hook.remove()
    model.zero_grad()


@pytest.mark.parametrize("where", ["forward", "backward", "start_of_backward"])
def test_after_an_exception_the_next_steps_are_right(world, where):
    models = ("mlp", "checkpoint_outside", "reentrant_outside")
    cases = {model: (Recipe(model), {"where": where}) for model in models}
    assert_each_trains(world(2), cases, train_after_a_mishap)


@on_processes(2)
def test_several_exceptions_after_a_good_step_leave_nothing_behind():
    """A mishap before each of the three first steps, each in another place; state must not pile up."""
    recipe, rank = Recipe("mlp", steps=3), dist.get_rank()
    model = sharded(build("mlp"), reshard_after_forward=False)
    model.loss(model(*model.make_inputs(6, rank))).backward()
    for where in ("backward", "forward", "start_of_backward", "backward"):
        fail_once(model, where, rank)
    assert_same_run(steps_sharded(model, recipe, rank), train_plain(recipe, 2)[rank])


@on_threads(2)
def test_a_failed_forward_leaves_gradients_alone():
    """One good backward, one that fails in its own forward, before zero_grad: the good gradients stay."""
    model, rank = sharded(build("mlp")), dist.get_rank()
    model.loss(model(*model.make_inputs(0, rank))).backward()
    before = whole_grads(model)
    hook = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(*model.make_inputs(1, rank))
    hook.remove()
    assert_named_close(before, train_plain(Recipe("mlp", steps=1), 2)[0].grads[0], "gradient", 1e-5, 1e-6)
    assert_named_close(whole_grads(model), before, "gradient", 0, 0)


def weighted():
    """Its weight is made from two parameters, which autograd reads after it knows the input's gradient."""
    sizes = {"bias": (64,), "gain": (64, 64), "direction": (64, 64)}
    parts = {name: torch.nn.Parameter(torch.randn(size)) for name, size in sizes.items()}
    return Wired(lambda self, x: (x + self.bias) @ (self.gain * self.direction), **parts)


@on_processes(2)
def test_an_input_may_be_a_leaf():
    plain, sharded = made(weighted), fully_shard(made(weighted))
    found = []
    for model in (sharded, plain):
        x = torch.linspace(-1, 1, 3 * 64).view(3, 64).requires_grad_()
        for _ in range(2):
            model(x).sum().backward()
        found.append({"x": x.grad, **whole_grads(model)})
    assert_named_close(*found, "gradient", 1e-5, 1e-5)


@needs_torch(2, 14, "set_output_grad_dtype")
@on_threads(2)
def test_a_gradient_of_another_dtype_than_the_units_output_arrives_as_it_is():
    class Wide(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_output_grad_dtype(torch.float32)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            dtypes.append(gradient.dtype)
            return (gradient * 3).bfloat16()

    class Narrow(torch.nn.Linear):
        def forward(self, x):
            return Wide.apply(super().forward(x))

    dtypes: list[torch.dtype] = []
    torch.manual_seed(0)
    plain = torch.nn.Sequential(Narrow(4, 4), Narrow(4, 4)).bfloat16()
    model = sharded(copy.deepcopy(plain))
    for each in (plain, model):
        each(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().sum().backward()
    assert dtypes == 4 * [torch.float32]
    assert_named_close(whole_grads(model), {n: p.grad for n, p in plain.named_parameters()}, "gradient", 0.0, 0.0)
