"""Backward finds a unit's parameters unsharded, by whatever way it comes to the unit."""

import functools
import gc
import warnings
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sherd import fully_shard
from tests.support import models
from tests.support.comparing import assert_named_close, whole_params
from tests.support.models import WIDTH, Block, Wired
from tests.support.ranks.bodies import on_processes
from tests.support.sharding import FRONTS, sharded
from tests.support.training import made, train_job, train_job_plain


def noise(seed: int, rank: int) -> Tensor:
    """In double precision, as all that is compared here."""
    return models.noise(seed, rank).double()


class Deep:
    """An object that holds another one."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


def nested_deep(tensor: Tensor) -> Any:
    return functools.reduce(lambda inside, _: Deep(inside), range(6), tensor)


def unnested(value: Any) -> Any:
    return unnested(value.inside) if isinstance(value, Deep) else value


def in_object_array(tensor: Tensor) -> Any:
    array = np.empty(1, dtype=object)
    array[0] = tensor
    return array


CARRIERS = {
    "deque": (lambda t: deque([t]), lambda c: c[0]),
    "partial": (lambda t: functools.partial(torch.add, t), lambda c: c(0)),
    "closure": (lambda t: lambda: t, lambda c: c()),
    "six objects deep": (nested_deep, unnested),
    "values of a dict": (lambda t: {"t": t}.values(), lambda c: next(iter(c))),
    "iterator": (lambda t: iter([t]), next),
    "array of objects": (in_object_array, lambda c: c[0]),
    "distribution": (lambda t: torch.distributions.Normal(t, 1.0), lambda c: c.mean),
}


def carrying(carrier: str) -> nn.Module:
    return Wired(lambda self, x: CARRIERS[carrier][0](self.block(x)), block=Block())


class Units(nn.Module):
    """Units, and what a forward does with them: `run(units, x)`."""

    def __init__(self, run: Any, *units: nn.Module) -> None:
        super().__init__()
        self.blocks, self.run = nn.ModuleList(units), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.blocks, x)


def carried(carrier: str) -> nn.Module:
    """Units that return what nobody looks into."""

    def run(units: Any, x: Tensor) -> Tensor:
        *inner, head = units
        for unit in inner:
            x = CARRIERS[carrier][1](unit(x))
        return head(x)

    return Units(run, *(carrying(carrier) for _ in range(3)), nn.Linear(WIDTH, WIDTH))


class Auxiliary(nn.Module):
    """It leaves a loss on itself from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.gate = Block(), nn.Linear(WIDTH, WIDTH)
        self.step, self.aux = 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.main(x)
        if self.step > 0:
            self.aux = self.gate(self.gate(y).tanh()).square().mean()
        return y


def late_losses(kind: type[Auxiliary]) -> nn.Module:
    def run(units: Any, x: Tensor) -> Tensor:
        for unit in units:
            x = unit(x)
        return x.square().mean() + sum(unit.aux for unit in units)

    return Units(run, *(kind() for _ in range(3)))


class Attributes(torch.autograd.Function):
    """It keeps its operands as attributes, not among the saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight.t()
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient @ ctx.weight, ctx.x.t() @ gradient


class KeptApart(Auxiliary):
    """Its loss is made inside of a function that is recomputed, of a weight that is kept apart from saved tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False)

    def _run(self, x: Tensor) -> Tensor:
        y = Attributes.apply(self.main(x), self.gate.weight)
        if self.step > 0:
            self.aux = y.tanh().square().mean()
        return y


class Positions(nn.Module):
    """A unit that returns its own parameter, whole or a part of it."""

    def __init__(self, part: slice) -> None:
        super().__init__()
        self.table, self.scale = nn.Parameter(torch.randn(6, WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.part = part

    def forward(self) -> Tensor:
        return self.table[self.part] if self.part != slice(None) else self.table


def positioned(part: slice) -> nn.Module:
    def run(units: Any, x: Tensor) -> Tensor:
        positions, block = units
        return block(x[: 6 if part == slice(None) else 4] * positions()[: len(x)])

    return Units(run, Positions(part), Block())


class ThroughData(torch.autograd.Function):
    """Its result lies in the memory of its input, of which autograd knows nothing."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Aliased(nn.Module):
    """Autograd saves tensors that lie in its weight's memory, and does not know them for views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        alias = ThroughData.apply(self.weight)
        return (x @ alias.t()).tanh() + (x * alias[1]).tanh() * self.weight.data[0] + x @ self.weight.detach()


def aliased() -> nn.Module:
    return Units(lambda units, x: units[1](units[0](x)), Aliased(), Block())


class Writing(nn.Module):
    """It writes into its argument and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, out: Tensor) -> None:
        out.mul_(0.5).add_(self.block(x))


def written() -> nn.Module:
    def run(units: Any, x: Tensor) -> Tensor:
        for unit in units:
            out = x * 1.0
            unit(x, out)
            x = out
        return x

    return Units(run, Writing(), Writing())


class Forces(nn.Module):
    """The gradient of its energy by its input, taken inside of its forward, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Block(), nn.LayerNorm(WIDTH), Block()))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x
            for unit in self.blocks:
                y = unit(y)
            energy = (y * self.scale).square().sum()
            (forces,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return forces + self.blocks[0](x) * self.scale


class RecomputedInside(Block):
    """Its own parameters are used in a function that is recomputed, and its output is hidden."""

    def forward(self, x: Tensor) -> Any:
        return iter([0.5 * x + checkpoint(super().forward, x, use_reentrant=False)])


def recomputed_inside() -> nn.Module:
    def run(units: Any, x: Tensor) -> Tensor:
        for unit in units:
            (x,) = unit(x)
        return x

    return Units(run, *(RecomputedInside() for _ in range(3)))


def recomputed(reentrant: bool) -> nn.Module:
    """Blocks recomputed in backward, outside and inside of units, whose outputs are hidden."""

    def run(units: Any, x: Tensor) -> Tensor:
        for unit in units:
            x = checkpoint(lambda x, unit=unit: unit(x)[0], x, use_reentrant=reentrant)
        return x

    return Units(run, *(carrying("deque") for _ in range(3)))


def recomputed_by_the_root() -> nn.Module:
    """A backward inside recomputes what uses the root's own parameters, in each of two forwards."""

    def run(self: Any, x: Tensor) -> Tensor:
        return self.last(checkpoint(lambda x: self.inner(x).tanh(), self.blocks[0](x), use_reentrant=True))

    return Wired(run, blocks=nn.ModuleList((Block(),)), inner=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, WIDTH))


def mean_square(model: Any, rank: int, step: int) -> Tensor:
    return model(noise(step, rank)).square().mean()


def with_late_losses(model: Any, rank: int, step: int) -> Tensor:
    for module in model.modules():
        if isinstance(module, Auxiliary):
            module.step = step
    return model(noise(step, rank))


def input_is_a_leaf(model: Any, rank: int, step: int) -> Tensor:
    return model(noise(step, rank).requires_grad_()).square().mean()


def of_two_forwards(model: Any, rank: int, step: int) -> Tensor:
    return mean_square(model, rank, step) + 0.5 * mean_square(model, rank, step + 10)


def gradient_penalty(model: Any, rank: int, step: int) -> Tensor:
    x = noise(step, rank).requires_grad_()
    score = model(x).square().mean()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    return score + (slope.norm(dim=-1) - 1).square().mean()


def evaluated_between(model: Any, rank: int, step: int) -> Tensor:
    model.eval()
    with torch.no_grad():
        told = model(noise(step, 7)).sum()
    model.train()
    return mean_square(model, rank, step) * (1 + told.detach().abs())


def of_saved_on_cpu(model: Any, rank: int, step: int) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return mean_square(model, rank, step)


def seen_by_other_hooks(model: Any, rank: int, step: int) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return mean_square(model, rank, step)


def normed() -> nn.Module:
    return nn.Sequential(Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


class Bare(nn.Module):
    """Nothing in it is saved by autograd: its function keeps all as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Attributes.apply(x, self.weight)


class Surrounded(Bare):
    """Autograd saves something else in it, by which a second backward is seen to come, before it reads the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(torch.tanh(x)))


def transformed() -> nn.Module:
    """Its forward takes a gradient by `torch.func`, which refuses to run inside of hooks on saved tensors."""

    def run(units: Any, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda y: (y @ y.T).exp().mean())(x)
        slopes = torch.vmap(torch.func.grad(lambda y: y.square().sum().sin()))(x)
        y = units[0](x + slope.clamp(-1, 1) + slopes)
        return units[1](y + torch.func.jacrev(torch.sin)(y[0]).sum(0))

    return Units(run, Block(), nn.Linear(WIDTH, WIDTH))


WAYS = {
    **{f"in a {name}": (functools.partial(carried, name), mean_square) for name in CARRIERS},
    "losses from the second step on": (functools.partial(late_losses, Auxiliary), with_late_losses),
    "losses kept apart": (functools.partial(late_losses, KeptApart), with_late_losses),
    "a parameter": (functools.partial(positioned, slice(None)), mean_square),
    "a part of a parameter": (functools.partial(positioned, slice(0, 4)), mean_square),
    "an argument": (written, mean_square),
    "memory of a parameter": (aliased, mean_square),
    "a gradient penalty": (normed, gradient_penalty),
    "a gradient penalty on what is kept apart": (lambda: nn.Sequential(Surrounded(), Surrounded()), gradient_penalty),
    "forces": (Forces, mean_square),
    "forces in evaluation": (Forces, evaluated_between),
    "recomputed": (functools.partial(recomputed, False), mean_square),
    "recomputed by a backward inside": (functools.partial(recomputed, True), input_is_a_leaf),
    "recomputed by the root": (recomputed_by_the_root, of_two_forwards),
    "recomputed inside": (recomputed_inside, mean_square),
    "saved on the CPU": (functools.partial(carried, "deque"), of_saved_on_cpu),
    "transforms of torch.func": (transformed, mean_square),
    "other hooks": (functools.partial(carried, "closure"), seen_by_other_hooks),
}


def doubled(make: Any) -> Any:
    return made(make).double()


def trained_every_way(turn: int) -> dict[str, Any]:
    """Each way under one front end or placement, the next way under the next one."""
    found = {}
    for at, (name, (make, job)) in enumerate(WAYS.items()):
        front = FRONTS[(at + turn) % len(FRONTS)]
        try:
            found[name] = train_job(sharded(doubled(make), front), job)
        except Exception as error:
            raise AssertionError(f"{name}, {front}: {error}") from error
    return found


def assert_trained(params: Any, make: Any, job: Any = mean_square, name: str = "") -> None:
    expected = train_job_plain(doubled(make), job, num_ranks=2)
    assert_named_close(params, expected, f"{name}: parameter", 1e-9, 1e-10)


@pytest.mark.parametrize("turn", range(len(FRONTS)))
def test_training_is_that_of_one_process_whatever_way_backward_takes(world, turn):
    for found in world(2).run(trained_every_way, turn):
        for name, (make, job) in WAYS.items():
            assert_trained(found[name], make, job, name)


# What is saved


class SavedExponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


EXPONENTIALS = {
    "operation": torch.exp,
    "in place": lambda x: (x + 0).exp_(),
    "in place, of a view": lambda x: (x + 0).view(-1).exp_(),
    "function": SavedExponential.apply,
}


class Exponential(Block):
    """Its last node but one saves its own result."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        y = EXPONENTIALS[self.kind](super().forward(x))
        self.result = weakref.ref(y)
        return y.view_as(x) * 2


@on_processes(2, kind=EXPONENTIALS)
def test_a_graph_without_a_backward_is_freed_at_once(kind):
    model = sharded(nn.Sequential(Exponential(kind), nn.Linear(WIDTH, WIDTH)).double())
    gc.disable()  # a cycle is no way to be freed
    try:
        loss = mean_square(model, 0, 0)
        assert model[0].result() is not None or loss.requires_grad
        del loss
        assert model[0].result() is None
    finally:
        gc.enable()


class Changing(Block):
    """It changes in place what autograd has saved."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).exp()
        with torch.no_grad():
            y.add_(1)
        return y * 2


def changed_in_place() -> None:
    mean_square(sharded(nn.Sequential(Changing(), nn.Linear(WIDTH, WIDTH)).double()), 0, 0).backward()


def cast_before_backward() -> None:
    model = sharded(doubled(normed))
    loss = mean_square(model, 0, 0)
    model.float()
    loss.backward()


def read_outside_of_backward() -> None:
    """What was saved of a parameter that is freed."""
    model = sharded(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Block()).double())
    nodes = []
    model[0].register_forward_hook(lambda module, args, output: nodes.append(output.grad_fn))
    model(noise(0, 0).requires_grad_())
    nodes[0]._saved_mat2  # noqa: B018


def not_unsharded_in_backward() -> None:
    """Wrongly said."""
    model = sharded(nn.Sequential(nn.Linear(WIDTH, WIDTH), Block()).double())
    model[1].set_unshard_in_backward(False)
    mean_square(model, 0, 0).backward()


REFUSED: dict[Any, str] = {
    changed_in_place: "modified by an inplace operation",
    cast_before_backward: "was deleted, moved or cast since its forward",
    read_outside_of_backward: "outside of backward",
    not_unsharded_in_backward: r"set_unshard_in_backward\(False\)",
}


@on_processes(2)
def test_what_would_be_a_wrong_number_is_an_error_that_says_why() -> None:
    for program, words in REFUSED.items():
        with pytest.raises(RuntimeError, match=words):
            program()


@on_processes(2, front=FRONTS)
def test_a_weight_kept_as_an_attribute_is_right_or_raises_in_a_gradient_of_a_gradient(front):
    # Right where the unit has saved something else on the way: among WAYS. Here nothing tells of the second backward.
    penalty = gradient_penalty(sharded(nn.Sequential(Bare(), Bare()).double(), front), 0, 0)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        penalty.backward()


class Hidden(Positions):
    """It returns a view of its own parameter in what nobody looks into."""

    def forward(self) -> Any:
        return deque([super().forward()])


def of_hidden() -> nn.Module:
    return Units(lambda units, x: units[1](x[:4] * units[0]()[0]), Hidden(slice(0, 4)), Block())


@on_processes(2)
def test_a_view_of_a_parameter_in_what_nobody_looks_into_keeps_its_unit_and_is_named():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        params = train_job(sharded(doubled(of_hidden)), mean_square)
    assert_trained(params, of_hidden)
    assert "a view of a parameter of unit blocks.0 is still alive after its forward" in str(told[0].message)


class Littering(Block):
    """On rank 0 a view of its weight is in a cycle, garbage that waits for the collector, as a traceback is."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            litter: list[Any] = [self.up.weight.t()]
            litter.append(litter)
        return super().forward(x)


def rooted() -> nn.Module:
    parts = {"scale": nn.Parameter(torch.ones(WIDTH)), "nothing": nn.Tanh(), "block": Littering(), "last": Littering()}
    return Wired(lambda self, x: self.last(self.block(self.nothing(x * self.scale))), **parts)


@on_processes(2)
def test_when_garbage_is_collected_does_not_say_when_ranks_gather():
    gc.disable()
    try:
        model = doubled(rooted)
        fully_shard([model.nothing, model.block])
        fully_shard(model.last)
        fully_shard(model)
        for step in range(3):
            mean_square(model, dist.get_rank(), step).backward()
    finally:
        gc.enable()
    whole_params(model)


class ForcesFirst(nn.Module):
    """A backward inside the root's forward ends while the unit that comes next is gathered ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.blocks = nn.Parameter(torch.eye(WIDTH)), nn.ModuleList((Block(), Block()))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad((x @ self.weight).square().sum(), x, create_graph=True)
        for unit in self.blocks:
            forces = unit(forces)
        return forces


@on_processes(2, placements=("zero1", "zero2", "ddp"))
def test_what_is_kept_whole_is_renewed_after_a_gather_that_nobody_waited_for(placements):
    params = train_job(sharded(doubled(ForcesFirst), placements=placements), mean_square)
    assert_trained(params, ForcesFirst)
