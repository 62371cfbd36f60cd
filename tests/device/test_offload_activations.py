"""Saved tensors that rest in host memory: what a step takes on the device, and that nothing else changes."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import sherd
import simdevice
from sherd.engine.moves import offload
from sherd.errors import GradientError
from tests.device.test_peaks import held_before, requested

WIDTH, INNER, ROWS, LAYERS = 32, 64, 512, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


SAVED = 4 * ROWS * (2 * WIDTH + 2 * INNER)
"""Bytes of what a layer saves: inputs of norm, `up`, gelu and `down`; the statistics of the norm stay."""
STAYS = 4 * ROWS * 2
TERMS = {"min_bytes": 16 << 10}
Context = Callable[[], AbstractContextManager[None]]


def rows(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to("sim")


def gradients(model: nn.Module) -> list[Tensor]:
    return [local(each.grad).clone() for each in model.parameters()]


def local(tensor: Any) -> Tensor:
    return tensor.to_local()


class Stack(nn.Module):
    """Layers below a root; `run(layer, x)` calls a layer."""

    def __init__(self, layers: list[nn.Module], run: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.layers, self._run = nn.ModuleList(layers), run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self._run is None else self._run(layer, x)
        return x


class Within(nn.Module):
    """A layer that checkpoints what is inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Gated(nn.Module):
    """A layer that saves two views of one result, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(value * torch.where(gate > 0, gate, gate * 0.1))


class Halves(nn.Module):
    """A layer of two halves, units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.Sequential(Layer(), Layer())

    def forward(self, x: Tensor) -> Tensor:
        return self.halves(x) * 0.5


def units_of(layers: list[nn.Module], run: Callable[..., Tensor] | None = None, **options: Any) -> Any:
    model, mesh = Stack(layers, run).to("sim"), init_device_mesh("sim", (torch.distributed.get_world_size(),))
    for each in layers:
        for half in each.halves if isinstance(each, Halves) else ():
            sherd.fully_shard(half, mesh=mesh, **options)
        sherd.fully_shard(each, mesh=mesh, **options)
    return sherd.fully_shard(model, mesh=mesh, **options)


def layers(num: int = 8, kind: type[nn.Module] = Layer) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind() for _ in range(num)]


def compiled() -> Any:
    made = layers()
    for each in made:
        each.compile(backend="aot_eager")
    return units_of(made)


def wrapped() -> Any:
    mesh = init_device_mesh("sim", (torch.distributed.get_world_size(),))
    options = {"device_mesh": mesh, "device_id": torch.accelerator.current_device_index()}
    made = [sherd.FullyShardedDataParallel(each, **options) for each in layers()]
    return sherd.FullyShardedDataParallel(Stack(made), **options)


def tensor_parallel() -> Any:
    mesh = init_device_mesh("sim", (1, torch.distributed.get_world_size()), mesh_dim_names=("dp", "tp"))
    model = Stack(layers()).to("sim")
    for each in model.layers:
        parallelize_module(each, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        sherd.fully_shard(each, mesh=mesh["dp"])
    return sherd.fully_shard(model, mesh=mesh["dp"])


CHECKPOINTS = functools.partial(checkpoint, use_reentrant=False)
SELECTIVE = functools.partial(checkpoint, use_reentrant=False, context_fn=sherd.selective_contexts)
MODELS: dict[str, Callable[[], Any]] = {
    "plain": lambda: units_of(layers()),
    "checkpointed by the root": lambda: units_of(layers(), CHECKPOINTS),
    "checkpointed within units": lambda: units_of(layers(kind=Within)),
    "reentrant": lambda: units_of(layers(), functools.partial(checkpoint, use_reentrant=True)),
    "selective": lambda: units_of(layers(), SELECTIVE),
    "compiled": compiled,
    "nested": lambda: units_of(layers(kind=Halves)),
    "one layer, called often": lambda: units_of(layers(1), lambda layer, x: nn.Sequential(*[layer] * 8)(x)),
    "bfloat16": lambda: units_of(layers(), mp_policy=sherd.MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "kept unsharded": lambda: units_of(layers(), reshard_after_forward=False),
    "wrapped": wrapped,
    "tensor parallel": tensor_parallel,
    "gated": lambda: units_of(layers(kind=Gated)),
}


# Values


def plain(model: Any, context: Context) -> list[Tensor]:
    x = rows().requires_grad_()
    with context():
        loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), x.grad]


def within(model: Any, context: Context) -> list[Tensor]:
    with context():
        loss = model(rows()).square().mean()
        loss.backward()
    return [loss.detach()]


def several_forwards(model: Any, context: Context) -> list[Tensor]:
    losses = []
    for number in range(3):
        with context():
            losses.append(model(rows(number)).square().mean())
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses]


def summed(model: Any, context: Context) -> list[Tensor]:
    with context():
        loss = sum(model(rows(number).requires_grad_()).square().mean() for number in range(2))
    loss.backward()
    return [loss.detach()]


def accumulated(model: Any, context: Context) -> list[Tensor]:
    with sherd.accumulate(model, 2), context():
        for number in range(2):
            model(rows(number)).square().mean().backward()
    return []


def retained(model: Any, context: Context) -> list[Tensor]:
    x = rows().requires_grad_()
    with context():
        loss = model(x).square().mean()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return [*first, x.grad]


def twice_differentiated(model: Any, context: Context) -> list[Tensor]:
    x = rows().requires_grad_()
    with context():
        loss = model(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = loss + slope.square().sum()
    penalty.backward()
    return [slope.detach(), x.grad]


def twice_differentiated_outside(model: Any, context: Context) -> list[Tensor]:
    x = rows().requires_grad_()
    with context():
        loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    return [slope.detach(), x.grad]


def a_part_of_the_graph(model: Any, context: Context) -> list[Tensor]:
    seen: list[Tensor] = []
    handle = model.layers[4].register_forward_hook(lambda *args: seen.append(args[-1]))
    with context():
        loss = model(rows()).square().mean()
    handle.remove()
    found = torch.autograd.grad(loss, seen.pop(), retain_graph=True)
    loss.backward()
    return list(found)


def with_hooks_of_the_user(model: Any, context: Context) -> list[Tensor]:
    with context(), torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x / 2):
        loss = model(rows()).square().mean()
    loss.backward()
    with torch.autograd.graph.save_on_cpu(), context():
        loss = model(rows(1)).square().mean()
    loss.backward()
    return [loss.detach()]


def interrupted(model: Any, context: Context) -> list[Tensor]:
    class Interruption(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Interruption

    for hook in (
        model.layers[5].register_forward_pre_hook(stop),
        model.layers[3].register_full_backward_pre_hook(stop),
    ):
        with pytest.raises(Interruption):
            plain(model, context)
        hook.remove()
    model.zero_grad()
    return plain(model, context)


def without_gradients(model: Any, context: Context) -> list[Tensor]:
    with torch.no_grad(), context():
        model.eval()
        outputs = [model(rows())]
        model.train()
    return [*outputs, *plain(model, context)]


def read_by_the_program(model: Any, context: Context) -> list[Tensor]:
    """The program reads what was saved, and keeps it over a backward, after which the graph is still there."""
    with context():
        loss = model(rows()).square().mean()
    nodes, kept = {loss.grad_fn: None}, []
    for node in (ahead := list(nodes)):
        kept += [
            getattr(node, name) for name in dir(node) if name in ("_saved_self", "_saved_mat1", "_saved_condition")
        ]
        new = [each for each, _ in node.next_functions if each is not None and each not in nodes]
        nodes |= dict.fromkeys(new)
        ahead += new
    loss.backward(retain_graph=True)
    return [each.detach().clone() for each in kept if isinstance(each, Tensor)]


def kept_by_the_program(model: Any, context: Context) -> list[Tensor]:
    """The program keeps tensors that forward saves, and changes one when backward is done."""
    kept: list[Tensor] = []
    handle = model.layers[2].up.register_forward_hook(lambda _, args, output: kept.extend((*args, output.detach())))
    with context():
        loss = model(rows()).square().mean()
    handle.remove()
    copies = [each.detach().clone() for each in kept]
    loss.backward()
    found = [*copies, *(each.detach().clone() for each in kept)]
    kept[1].add_(1)
    return [*found, kept[1]]


def changed_in_place(model: Any, context: Context) -> list[Tensor]:
    """A saved tensor is changed, so backward raises; the gradients of the layers above are there."""
    kept: list[Tensor] = []
    handle = model.layers[2].up.register_forward_hook(lambda *args: kept.append(args[-1].detach()))
    with context():
        loss = model(rows()).square().mean()
    handle.remove()
    kept.pop().add_(1)
    with pytest.raises(GradientError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    return plain(model, context)


PROGRAMS = {
    each.__name__: each
    for each in (
        plain,
        within,
        several_forwards,
        summed,
        accumulated,
        retained,
        twice_differentiated,
        twice_differentiated_outside,
        a_part_of_the_graph,
        with_hooks_of_the_user,
        interrupted,
        without_gradients,
        read_by_the_program,
        kept_by_the_program,
        changed_in_place,
    )
}


def run_of(kind: str, name: str, budget: int | None) -> list[Tensor]:
    """What three steps of a program have found."""
    model = MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []

    def context() -> AbstractContextManager[None]:
        return nullcontext() if budget is None else sherd.offload_activations(model, budget=budget, **TERMS)

    for _ in range(3):
        found += PROGRAMS[name](model, context)
        found += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return [each.cpu() for each in found]


def in_host_memory() -> int:
    """The bytes of host memory that were in use, once no graph is left."""
    gc.collect()
    memories = list(offload._by_device.values())
    for each in memories:
        each._bury()
    return sum(nbytes * len(kept) for each in memories for (nbytes, _), kept in each._buffers._idle.items())


def forget_host_memory() -> None:
    offload._by_device.clear()


def compared(kind: str, name: str, budget: int) -> int:
    forget_host_memory()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks
        found, usual = run_of(kind, name, budget), run_of(kind, name, None)
    for number, (ours, plainly) in enumerate(zip(found, usual, strict=True)):
        assert torch.equal(ours, plainly), number
    return in_host_memory()


@pytest.mark.parametrize("budget", [0, SAVED * 3 // 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_without_offload_to_the_bit(name, budget, sim_world):
    kind = (
        "gated" if name == "read_by_the_program" else "plain"
    )  # its masks have no gradients, so are not wrapped again
    for taken in sim_world(2, pause_us=200, seed=5).run(compared, kind, name, budget).values:
        assert (taken > 0) == (name != "with_hooks_of_the_user")


@pytest.mark.parametrize("name", ["plain", "summed", "twice_differentiated"])
@pytest.mark.parametrize("kind", MODELS)
def test_values_are_the_same_for_any_model(kind, name, sim_world):
    if name.startswith("twice") and kind in ("reentrant", "compiled", "selective"):
        pytest.skip("torch differentiates such a model once only")
    for taken in sim_world(2, pause_us=200, seed=7).run(compared, kind, name, 0).values:
        assert taken > 0


# Bytes


def peak(num_layers: int, budget: int | None, run: Callable[..., Tensor] | None = None, steps: int = 3) -> int:
    before = held_before()
    model, x = units_of(layers(num_layers), run), rows()
    for _ in range(steps):
        requested()
        with nullcontext() if budget is None else sherd.offload_activations(model, budget=budget, **TERMS):
            loss = model(x).square().mean()
        loss.backward()
        del loss
        model.zero_grad()
        found = requested()
    return found - before


BUDGETS = (0, 1, 4, 16, LAYERS)
"""In layers."""


def peaks() -> tuple[int, int, int, dict[int, int]]:
    """The peaks of two layers and of all, the bytes of a rank's shards, and peaks of all with each budget."""
    shards = sum(each.to_local().nbytes for each in units_of(layers(LAYERS)).parameters())
    return peak(2, None), peak(LAYERS, None), shards, {each: peak(LAYERS, each * SAVED) for each in BUDGETS}


def test_a_step_takes_what_two_units_save_and_the_budget(sim_world):
    for two_layers, all_layers, shards, found in sim_world(2, spoil="no", races="off").run(peaks).values:
        others = two_layers + 2 * shards * (LAYERS - 2) // LAYERS + STAYS * LAYERS
        for budget, taken in found.items():
            print(f"{budget} layers: {taken:,} of {others + budget * SAVED:,} bytes")
            assert taken <= 1.05 * (others + budget * SAVED)
        assert sorted(found.values()) == list(found.values())
        assert found[LAYERS] == all_layers


def checkpointed_peaks() -> tuple[int, int, int]:
    """The peaks of 64 checkpointed layers, without offload and with it, and what comes with 62 layers otherwise."""
    shards = sum(each.to_local().nbytes for each in units_of(layers(1)).parameters())
    return peak(64, None, CHECKPOINTS), peak(64, 0, CHECKPOINTS), peak(2, None, CHECKPOINTS) + 2 * 62 * shards


def test_of_checkpointed_layers_the_inputs_go(sim_world):
    for usual, found, others in sim_world(2, spoil="no", races="off").run(checkpointed_peaks).values:
        print(f"{found:,} of {others:,} bytes; {usual:,} without offload")
        assert found <= 1.05 * others
        assert usual > 2.5 * others


def host_bytes(kind: type[nn.Module]) -> int:
    forget_host_memory()
    plain(units_of(layers(kind=kind)), lambda: nullcontext())
    assert not in_host_memory()
    model, x = units_of(layers(kind=kind)), rows()
    for _ in range(2):
        with sherd.offload_activations(model, **TERMS):
            loss = model(x).square().mean()
        loss.backward()
    return in_host_memory()


@pytest.mark.parametrize(("kind", "saved"), [(Layer, SAVED), (Gated, ROWS * (8 * WIDTH + 17 * INNER))])
def test_a_storage_is_copied_once_and_neither_the_input_nor_what_the_last_unit_saves(kind, saved, sim_world):
    for found in sim_world(2).run(host_bytes, kind).values:
        assert found == 7 * saved - 4 * ROWS * WIDTH


def dropped_graphs() -> list[int]:
    """The bytes on the device before and after forwards whose graphs are dropped at once."""
    model, x = units_of(layers()), rows()
    found = []
    for _ in range(3):
        found.append(torch.accelerator.memory_stats()["requested_bytes.all.current"])
        with sherd.offload_activations(model, **TERMS):
            loss = model(x).square().mean()
        del loss
        torch.full((SAVED // 2,), 1.0, device="sim")  # takes memory that was given back
    return found[1:]


def test_a_graph_that_is_dropped_gives_it_back(sim_world):
    for first, second in sim_world(2, pause_us=500, seed=3).run(dropped_graphs).values:
        assert first == second


# Steps in their steady state


def waits_and_pins(kind: str, budget: int) -> tuple[list[str], int]:
    """The host's waits in the third step, on a busy stream, and the buffers in host memory that it asks for."""
    model, x, waits, pinned = MODELS[kind](), rows().requires_grad_(), list[str](), 0
    plain_empty = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal pinned
        pinned += kwargs.get("pin_memory") is True
        return plain_empty(*args, **kwargs)

    for number in range(3):
        if number == 2:
            gate = simdevice.closed_gate()
            simdevice.on_host_wait(lambda cause, gate=gate: (waits.append(cause), gate.open()))
            torch.empty = empty
        try:
            with sherd.offload_activations(model, budget=budget, **TERMS):
                loss = model(x).square().mean()
            loss.backward()
        finally:
            torch.empty = plain_empty
        model.zero_grad()
    gate.open()
    simdevice.on_host_wait(None)
    return waits, pinned


@pytest.mark.parametrize("kind", ["plain", "checkpointed by the root", "nested"])
def test_the_host_neither_waits_nor_pins(kind, sim_world):
    for waits, pinned in sim_world(2, pause_us=100, seed=2).run(waits_and_pins, kind, 2 * SAVED).values:
        assert (waits, pinned) == ([], 0)


# By policy


def by_policy(place: str, copied: bool) -> tuple[list[Tensor], int]:
    """The gradients of a step, and the bytes in host memory; every second unit keeps what it saves where it is."""
    forget_host_memory()
    made = layers()
    model, mesh = Stack(made).to("sim"), init_device_mesh("sim", (torch.distributed.get_world_size(),))
    for number, each in enumerate(made):
        policy = sherd.OffloadPolicy(activations=place if number % 2 else "device")
        sherd.fully_shard(each, mesh=mesh, offload_policy=policy)
    sherd.fully_shard(model, mesh=mesh)
    if copied:
        model = copy.deepcopy(model)
    for number in range(2):
        model(torch.cat([rows(number)] * 20)).square().mean().backward()
    return [each.cpu() for each in gradients(model)], in_host_memory()


@pytest.mark.parametrize("copied", [False, True])
def test_a_policy_chooses_the_units(copied, sim_world):
    world = sim_world(2, pause_us=100, seed=4)
    usual, found = (world.run(by_policy, place, copied).values for place in ("device", "host"))
    for (plainly, none), (ours, taken) in zip(usual, found, strict=True):
        assert none == 0
        assert taken == 3 * 20 * SAVED
        assert all(map(torch.equal, ours, plainly))
