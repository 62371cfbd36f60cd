"""Does backward find a unit's parameters unsharded, by whatever way it comes to the unit?"""

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

from sherd import Blocks, Flat, FullyShardedDataParallel, Owned, fully_shard
from sherd.wrap import ModuleWrapPolicy
from tests.support.comparing import assert_named_close, whole_params
from tests.support.models import WIDTH, Block, noise
from tests.support.sharding import shard_children
from tests.support.training import LR, made, train_job_plain

PLACEMENTS = {"shard": None, "flat": Flat(), "blocks": Blocks(2), "whole": Owned()}


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


class Carrying(nn.Module):
    def __init__(self, carrier: str) -> None:
        super().__init__()
        self.block = Block()
        self.carrier = carrier

    def forward(self, x: Tensor) -> Any:
        return CARRIERS[self.carrier][0](self.block(x))


class Carried(nn.Module):
    """Units that return what nobody looks into."""

    def __init__(self, carrier: str) -> None:
        super().__init__()
        self.units = nn.ModuleList(Carrying(carrier) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = CARRIERS[unit.carrier][1](unit(x))
        return self.head(x)


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


class LateLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Auxiliary() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x.square().mean() + sum(unit.aux for unit in self.units)


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


class LateLossesKeptApart(LateLosses):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(KeptApart() for _ in range(3))


class Positions(nn.Module):
    """A unit that returns its own parameter, whole or a part of it."""

    def __init__(self, part: slice) -> None:
        super().__init__()
        self.table, self.scale = nn.Parameter(torch.randn(6, WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.part = part

    def forward(self) -> Tensor:
        return self.table[self.part] if self.part != slice(None) else self.table


class Positioned(nn.Module):
    def __init__(self, part: slice) -> None:
        super().__init__()
        self.units = nn.ModuleList((Positions(part), Block()))

    def forward(self, x: Tensor) -> Tensor:
        positions, block = self.units
        return block(x[: 6 if positions.part == slice(None) else 4] * positions()[: len(x)])


class Writing(nn.Module):
    """It writes into its argument and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, out: Tensor) -> None:
        out.mul_(0.5).add_(self.block(x))


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Writing() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            out = x * 1.0
            unit(x, out)
            x = out
        return x


class Forces(nn.Module):
    """The gradient of its energy by its input, taken inside of its forward, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList((Block(), nn.LayerNorm(WIDTH), Block()))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x
            for unit in self.units:
                y = unit(y)
            energy = (y * self.scale).square().sum()
            (forces,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return forces + self.units[0](x) * self.scale


class RecomputedInside(Block):
    """Its own parameters are used in a function that is recomputed, and its output is hidden."""

    def forward(self, x: Tensor) -> Any:
        return iter([0.5 * x + checkpoint(super().forward, x, use_reentrant=False)])


class OfRecomputedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(RecomputedInside() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            (x,) = unit(x)
        return x


class Recomputed(nn.Module):
    """Blocks recomputed in backward, outside and inside of units, whose outputs are hidden."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.units = nn.ModuleList(Carrying("deque") for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = checkpoint(lambda x, unit=unit: unit(x)[0], x, use_reentrant=self.reentrant)
        return x


class RecomputedByTheRoot(nn.Module):
    """A backward inside recomputes what uses the root's own parameters, in each of two forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList((Block(),))
        self.inner, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(lambda x: self.inner(x).tanh(), self.units[0](x), use_reentrant=True))


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


WAYS = {
    **{f"in a {name}": (functools.partial(Carried, name), mean_square) for name in CARRIERS},
    "losses from the second step on": (LateLosses, with_late_losses),
    "losses kept apart": (LateLossesKeptApart, with_late_losses),
    "a parameter": (functools.partial(Positioned, slice(None)), mean_square),
    "a part of a parameter": (functools.partial(Positioned, slice(0, 4)), mean_square),
    "an argument": (Written, mean_square),
    "a gradient penalty": (normed, gradient_penalty),
    "a gradient penalty on what is kept apart": (lambda: nn.Sequential(Surrounded(), Surrounded()), gradient_penalty),
    "forces": (Forces, mean_square),
    "forces in evaluation": (Forces, evaluated_between),
    "recomputed": (functools.partial(Recomputed, False), mean_square),
    "recomputed by a backward inside": (functools.partial(Recomputed, True), input_is_a_leaf),
    "recomputed by the root": (RecomputedByTheRoot, of_two_forwards),
    "recomputed inside": (OfRecomputedInside, mean_square),
    "saved on the CPU": (functools.partial(Carried, "deque"), of_saved_on_cpu),
    "other hooks": (functools.partial(Carried, "closure"), seen_by_other_hooks),
}


def sharded(model: nn.Module, front: str) -> nn.Module:
    units = list(getattr(model, "units", model.children()))
    if front in PLACEMENTS:
        for unit in units:
            fully_shard(unit, placement=PLACEMENTS[front])
        return fully_shard(model, placement=PLACEMENTS[front])
    kinds = {type(unit) for unit in units}
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy(kinds), use_orig_params=front == "wrapper", device_id=None
    )


def trained_every_way(front: str) -> dict[str, Any]:
    return {name: trained(made(make), front, job) for name, (make, job) in WAYS.items()}


def trained(plain: nn.Module, front: str, job: Any) -> Any:
    model = sharded(plain.double(), front)
    torch.set_default_dtype(torch.float64)
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for step in range(3):
            job(model, dist.get_rank(), step).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)
    if isinstance(model, FullyShardedDataParallel):
        return {name.replace("_fsdp_wrapped_module.", ""): each for name, each in model.state_dict().items()}
    return whole_params(model)


@functools.cache
def expected(name: str) -> Any:
    make, job = WAYS[name]
    torch.set_default_dtype(torch.float64)
    try:
        return train_job_plain(made_double(make), job, num_ranks=2)
    finally:
        torch.set_default_dtype(torch.float32)


def made_double(make: Any) -> nn.Module:
    torch.set_default_dtype(torch.float32)
    model = made(make).double()
    torch.set_default_dtype(torch.float64)
    return model


@pytest.mark.parametrize("front", [*PLACEMENTS, "wrapper", "flat parameters"])
def test_training_is_that_of_one_process_whatever_way_backward_takes(world, front):
    for found in world(2).run(trained_every_way, front):
        for name, params in found.items():
            try:
                assert_named_close(params, expected(name), "parameter", 1e-9, 1e-10)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def penalized_while_bare(front: str) -> str:
    model = sharded(nn.Sequential(Bare(), Bare()), front)
    try:
        gradient_penalty(model, 0, 0).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize("front", [*PLACEMENTS, "wrapper", "flat parameters"])
def test_a_weight_kept_as_an_attribute_is_right_or_raises_in_a_gradient_of_a_gradient(world, front):
    # Right where the unit has saved something else on the way: among WAYS. Here nothing tells of the second backward.
    for said in world(2).run(penalized_while_bare, front):
        assert "modified by an inplace operation" in said or "has been modified inplace" in said


# What is saved


class Exponential(Block):
    """Its last node saves its own result."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).exp()
        self.result = weakref.ref(y)
        return y * 2


def forward_without_backward() -> bool:
    model = shard_children(nn.Sequential(Exponential(), nn.Linear(WIDTH, WIDTH)))
    gc.disable()  # a cycle is no way to be freed
    try:
        loss = mean_square(model, 0, 0)
        was_there = model[0].result() is not None or loss.requires_grad
        del loss
        return was_there and model[0].result() is None
    finally:
        gc.enable()


def test_a_graph_without_a_backward_is_freed_at_once(world):
    assert world(2).run(forward_without_backward) == [True, True]


class Changing(Block):
    """It changes in place what autograd has saved."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).exp()
        with torch.no_grad():
            y.add_(1)
        return y * 2


def changed_in_place() -> str:
    model = shard_children(nn.Sequential(Changing(), nn.Linear(WIDTH, WIDTH)))
    try:
        mean_square(model, 0, 0).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


def test_a_saved_tensor_that_was_changed_in_place_is_refused_as_without_sharding(world):
    assert all("modified by an inplace operation" in said for said in world(2).run(changed_in_place))


def cast_before_backward() -> str:
    model = shard_children(made(normed))
    loss = mean_square(model, 0, 0)
    model.double()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


def test_a_model_that_was_cast_before_backward_is_an_error_not_a_number(world):
    assert all("was deleted, moved or cast since its forward" in said for said in world(2).run(cast_before_backward))


def read_outside_of_backward() -> str:
    model = shard_children(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Block()))
    nodes = []
    model[0].register_forward_hook(lambda module, args, output: nodes.append(output.grad_fn))
    model(noise(0, 0).requires_grad_())
    try:
        return str(nodes[0]._saved_mat2)
    except RuntimeError as error:
        return str(error)


def test_what_was_saved_of_a_freed_parameter_is_not_shown_outside_of_backward(world):
    assert all("outside of backward" in said for said in world(2).run(read_outside_of_backward))


def not_unsharded_in_backward() -> str:
    model = shard_children(nn.Sequential(nn.Linear(WIDTH, WIDTH), Block()))
    model[1].set_unshard_in_backward(False)
    try:
        mean_square(model, 0, 0).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


def test_a_unit_that_was_wrongly_said_not_to_be_needed_is_named(world):
    assert all("set_unshard_in_backward(False)" in said for said in world(2).run(not_unsharded_in_backward))


class Hidden(Positions):
    """It returns a view of its own parameter in what nobody looks into."""

    def forward(self) -> Any:
        return deque([super().forward()])


class OfHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList((Hidden(slice(0, 4)), Block()))

    def forward(self, x: Tensor) -> Tensor:
        return self.units[1](x[:4] * self.units[0]()[0])


def with_a_hidden_view() -> tuple[Any, str]:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        params = trained(OfHidden(), "shard", mean_square)
    return params, str(told[0].message)


def test_a_view_of_a_parameter_in_what_nobody_looks_into_keeps_its_unit_and_is_named(world):
    torch.manual_seed(0)
    plain = OfHidden().double()
    torch.set_default_dtype(torch.float64)
    try:
        wanted = train_job_plain(plain, mean_square, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    for params, told in world(2).run(with_a_hidden_view):
        assert_named_close(params, wanted, "parameter", 1e-9, 1e-10)
        assert "a view of a parameter of unit units.0 is still there after its forward" in told


class Transformed(nn.Module):
    """Its forward takes a gradient by `torch.func`, which refuses to run inside of hooks on saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList((Block(), nn.Linear(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda y: (y @ y.T).exp().mean())(x)
        slopes = torch.vmap(torch.func.grad(lambda y: y.square().sum().sin()))(x)
        y = self.units[0](x + slope.clamp(-1, 1) + slopes)
        return self.units[1](y + torch.func.jacrev(torch.sin)(y[0]).sum(0))


def trained_transformed() -> Any:
    return trained(made(Transformed), "shard", mean_square)


def test_a_forward_may_call_transforms_of_torch_func(world):
    torch.set_default_dtype(torch.float64)
    try:
        wanted = train_job_plain(made_double(Transformed), mean_square, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    for params in world(2).run(trained_transformed):
        assert_named_close(params, wanted, "parameter", 1e-9, 1e-10)


class Littering(Block):
    """On rank 0 a view of its weight is in a cycle, garbage that waits for the collector, as a traceback is."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            litter: list[Any] = [self.up.weight.t()]
            litter.append(litter)
        return super().forward(x)


class Rooted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.nothing, self.block, self.last = nn.Tanh(), Littering(), Littering()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.nothing(x * self.scale)))


def trained_with_garbage_on_one_rank() -> Any:
    gc.disable()
    try:
        model = made(Rooted)
        fully_shard([model.nothing, model.block])
        fully_shard(model.last)
        fully_shard(model)
        for step in range(3):
            mean_square(model, dist.get_rank(), step).backward()
    finally:
        gc.enable()
    return whole_params(model)


def test_when_garbage_is_collected_does_not_say_when_ranks_gather(world):
    world(2).run(trained_with_garbage_on_one_rank)


class ForcesFirst(nn.Module):
    """A backward inside the root's forward ends while the unit that comes next is gathered ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.units = nn.Parameter(torch.eye(WIDTH)), nn.ModuleList((Block(), Block()))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad((x @ self.weight).square().sum(), x, create_graph=True)
        for unit in self.units:
            forces = unit(forces)
        return forces


def trained_with(placements: str) -> Any:
    plain = made(ForcesFirst).double()
    for unit in (*plain.units, plain):
        fully_shard(unit, placements=placements)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    for step in range(3):
        plain(noise(step, dist.get_rank()).double()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_params(plain)


@pytest.mark.parametrize("placements", ["zero1", "zero2", "ddp"])
def test_what_is_kept_whole_is_renewed_after_a_gather_that_nobody_waited_for(world, placements):
    plain = made(ForcesFirst).double()
    wanted = train_job_plain(plain, lambda model, rank, step: model(noise(step, rank).double()).square().mean(), 2)
    for params in world(2).run(trained_with, placements):
        assert_named_close(params, wanted, "parameter", 1e-9, 1e-10)
