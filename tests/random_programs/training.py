"""A program's training, plain and sharded, and what the two differ in."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sherd
from sherd.optim import chunks
from tests.random_programs import sharding
from tests.random_programs.containers import found_in
from tests.random_programs.cores import DTYPE, NUM_TOKENS, Moment
from tests.random_programs.models import Root, bare, called
from tests.random_programs.programs import Program
from tests.support.comparing import Named, plain_name
from tests.support.gathered import gathered

ROWS = 3
NUM_MICRO = 3


class InvalidProgram(Exception):
    """Plain torch cannot run it: the generator's mistake."""


@dataclass
class Outcome:
    """What a training left: what each rank has seen, the gradients of each step, and the last parameters."""

    seen: dict[int, list[tuple[str, Tensor]]] = field(default_factory=dict)
    gradients: list[Named] = field(default_factory=list)
    parameters: Named = field(default_factory=dict)


@dataclass
class Way:
    """What differs between the plain training and the sharded one. `share`: of a rank's gradient in the step's."""

    model: Any
    moment: Moment
    ranks: list[int]
    share: float
    optimizer: torch.optim.Optimizer | None
    micro: Callable[[bool], AbstractContextManager[Any]] = lambda is_last: nullcontext()
    step: Callable[[], AbstractContextManager[Any]] = nullcontext
    in_backward: Named | None = None

    def __post_init__(self) -> None:
        # What the optimizer has, by name. A model may show unsharded parameters after a step.
        self.optimizer_params = _named(self.model)


def plain(program: Program) -> Outcome:
    """Every rank's batch in turn, in one process."""
    moment = Moment()
    model = Root(program, moment)
    ranks = list(range(program.num_ranks))
    way = Way(model, moment, ranks, 1 / program.num_ranks, sharding.optimizer_of(model, momentum=_momentum(program)))
    outcome = Outcome()
    try:
        train(program, way, outcome)
    except Exception as error:
        raise InvalidProgram(f"{type(error).__name__}: {error}") from error
    outcome.parameters = _clones(dict(model.named_parameters()))
    return outcome


def on_ranks(program: Program, rank: int) -> Outcome:
    """This rank's batches, sharded."""
    moment = Moment()
    root = Root(program, moment)
    early = sharding.optimizer_of(root, momentum=_momentum(program)) if program.optimizer == "before" else None
    model = sharding.sharded(program, root)
    moment.leaves_garbage = program.garbage
    way = Way(model, moment, [rank], 1.0, early)
    if program.optimizer == "in_backward":
        way.in_backward = {}
        _step_in_backward(model, way.in_backward)
    elif early is None:
        way.optimizer = sharding.optimizer_of(model, program.optimizer == "matrices", _momentum(program))
    if program.backwards == "no_sync":
        way.micro = lambda is_last: sharding.without_sync(program, model, is_last)
    elif program.backwards == "accumulate":
        way.step = lambda: sherd.accumulate(model, NUM_MICRO)
    elif program.backwards == "micro" and "is_last_backward" in program.setters:
        way.micro = lambda is_last: _last_backward(model, is_last, moment)
    outcome = Outcome()
    train(program, way, outcome)
    outcome.gradients = _gathered(program, outcome.gradients)
    with _as_the_user_names(program, model):
        last = _named(model) if program.front == "wrapper_flat" else way.optimizer_params
        outcome.parameters = _gathered(program, [_clones(last)])[0]
    return outcome


@contextmanager
def _last_backward(model: Any, is_last: bool, moment: Moment) -> Iterator[None]:
    if moment.step > 0:
        model.set_is_last_backward(is_last)
    yield


def _momentum(program: Program) -> float:
    """What a parameter without a gradient gets is zeros, under a flat parameter: momentum would move it."""
    has_zeros = program.front == "wrapper_flat" or "reduce_scatter_unused_params" in program.setters
    return 0.5 if program.on_disk and program.optimizer != "matrices" and not has_zeros else 0.0


def _step_in_backward(model: nn.Module, taken: Named) -> None:
    """Each parameter is stepped as soon as it has its gradient."""
    for name, parameter in _named(model).items():
        assert isinstance(parameter, nn.Parameter)
        if not parameter.requires_grad:
            continue
        optimizer = torch.optim.SGD([parameter], lr=0.3)

        def step(given: Tensor, name: str = name, optimizer: torch.optim.Optimizer = optimizer) -> None:
            taken[name] = given.grad.detach().clone()
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


# One step, whichever way


def train(program: Program, way: Way, outcome: Outcome) -> None:
    """All steps; `outcome` is filled in as they go."""
    buffers: dict[int, dict[str, Tensor]] = {}
    for rank in way.ranks:
        outcome.seen[rank] = []
    if program.first:
        _for_each_rank(way, buffers, -1, lambda rank: _first(program, way, outcome.seen[rank]))
    for step in range(program.steps):
        with way.step():
            _for_each_rank(way, buffers, step, lambda rank: _backwards(program, way, outcome.seen[rank]))
        outcome.gradients.append(_gradients(program, way))
        if way.optimizer is not None:
            way.optimizer.step()
            way.optimizer.zero_grad()
        if program.between:
            _for_each_rank(way, buffers, step, lambda rank: _aside(program, way, program.between, outcome.seen[rank]))


def _for_each_rank(way: Way, buffers: dict[int, dict[str, Tensor]], step: int, do: Callable[[int], None]) -> None:
    """`do` with each rank's own buffers."""
    root = bare(way.model)
    for rank in way.ranks:
        way.moment.step, way.moment.rank = max(step, 0), rank
        if len(way.ranks) > 1:
            for name, buffer in root.named_buffers():
                buffer.copy_(buffers.get(rank, {}).get(name, torch.zeros_like(buffer)))
        do(rank)
        if len(way.ranks) > 1:
            buffers[rank] = {name: buffer.clone() for name, buffer in root.named_buffers()}


def _input(program: Program, way: Way, micro: int) -> Tensor:
    moment = way.moment
    noise = torch.Generator().manual_seed(7919 * program.seed + 101 * moment.step + 11 * micro + moment.rank)
    moment.tokens = torch.randint(NUM_TOKENS, (ROWS,), generator=noise)
    return torch.randn(ROWS, program.width, generator=noise, dtype=DTYPE)


def _backwards(program: Program, way: Way, seen: list[tuple[str, Tensor]]) -> None:
    """The forwards and backwards of one rank in one step."""
    if program.backwards in ("micro", "no_sync", "accumulate"):
        for micro in range(NUM_MICRO):
            with way.micro(micro == NUM_MICRO - 1):
                _, loss, x = _forward(program, way, micro, seen)
                _backward(way, loss / NUM_MICRO)
                _see_input(x, way, seen)
    elif program.backwards in ("forwards", "forwards_apart"):
        made = [_forward(program, way, micro, seen) for micro in range(2)]
        if program.backwards == "forwards":
            _backward(way, made[0][1] + 0.5 * made[1][1])
        else:
            for _, loss, _ in made:
                _backward(way, loss)
        for _, _, x in made:
            _see_input(x, way, seen)
    else:
        early, late, x = _forward(program, way, 0, seen)
        if program.backwards == "retain":
            _backward(way, late, retain_graph=True)
            _backward(way, 0.5 * late)
        elif program.backwards == "parts":
            _backward(way, early, retain_graph=True)
            _backward(way, late)
        elif program.backwards == "early" and way.moment.step % 2 == 0:
            _backward(way, early)
        else:
            _backward(way, late)
        _see_input(x, way, seen)


def _forward(program: Program, way: Way, micro: int, seen: list[tuple[str, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    x = _input(program, way, micro)
    if program.leaf_input or program.penalty:
        x.requires_grad_()
    early, late = bare(way.model).losses(way.model(x))
    if program.penalty:
        (gradient,) = torch.autograd.grad(late, x, create_graph=True)
        late = late + gradient.square().sum()
    seen.append((f"step {way.moment.step}: loss", late.detach()))
    return early, late, x


def _backward(way: Way, loss: Tensor, **options: Any) -> None:
    (loss * way.share).backward(**options)


def _see_input(x: Tensor, way: Way, seen: list[tuple[str, Tensor]]) -> None:
    if x.grad is not None:
        seen.append((f"step {way.moment.step}: the input's gradient", x.grad.detach() / way.share))


def _gradients(program: Program, way: Way) -> Named:
    """Of this step, copied."""
    if way.in_backward is not None:
        taken = {name: way.in_backward.get(name) for name in way.optimizer_params}
        way.in_backward.clear()
        return taken
    if program.front == "wrapper_flat" and len(way.ranks) == 1:
        with sherd.unsharded(way.model, with_grads=True, writeback=False):
            return _clones({name: each.grad for name, each in _named(way.model).items()})
    return _clones({name: each.grad for name, each in way.optimizer_params.items()})


# Beside the steps


def _first(program: Program, way: Way, seen: list[tuple[str, Tensor]]) -> None:
    if program.first != "inner_trained":
        _aside(program, way, program.first, seen)
        return
    x = _input(program, way, 50)
    output = _inner(way, x)
    if output.requires_grad:
        (output.square().mean() * way.share).backward()
    seen.append(("before: the inner loss", output.detach()))


def _aside(program: Program, way: Way, what: str, seen: list[tuple[str, Tensor]]) -> None:
    if what == "unsharded":
        value = _sum_of_all(program, way)
    else:
        way.model.eval()
        with torch.inference_mode() if what == "inference" else torch.no_grad():
            x = _input(program, way, 60)
            value = _inner(way, x) if what == "inner" else found_in(program.root_output, way.model(x))
        way.model.train()
        value = torch.tensor(value.tolist(), dtype=DTYPE)
    seen.append((f"after step {way.moment.step}: {what}", value))


def _inner(way: Way, x: Tensor) -> Tensor:
    """The forward of the first layer by itself."""
    root: Root = bare(way.model)
    return called(root.layers[0], root.calls[0][0], x)


def _sum_of_all(program: Program, way: Way) -> Tensor:
    if len(way.ranks) > 1:
        return _sum(way.model)
    with sherd.unsharded(way.model, writeback=False):
        return _sum(way.model)


def _sum(model: nn.Module) -> Tensor:
    parts = [each.detach().sum().real.to(DTYPE) for each in model.parameters()]
    return torch.stack(parts).square().sum()


# Names and values


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): each for name, each in model.named_parameters()}


def _clones(tensors: dict[str, Any]) -> Named:
    return {name: None if each is None else each.detach().clone() for name, each in tensors.items()}


def _as_the_user_names(program: Program, model: nn.Module) -> AbstractContextManager[Any]:
    if program.front == "wrapper_flat":
        return sherd.unsharded(model, writeback=False)
    return nullcontext()


def _gathered(program: Program, steps: list[Named]) -> list[Named]:
    """All of them whole, in one exchange."""
    whole = iter(gathered(each for step in steps for each in step.values()))
    return [{name: next(whole) for name in step} for step in steps]


# Comparing


def differences(program: Program, found: Outcome, expected: Outcome, rank: int) -> list[str]:
    """What is not as it should be, in words, the earliest first."""
    said: list[str] = []
    for (what, value), (_, wanted) in zip(found.seen[rank], expected.seen[rank], strict=True):
        said += _compared(f"rank {rank}: {what}", value, wanted, program)
    for step, (own, wanted_all) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        if set(own) != set(wanted_all):
            said.append(f"step {step}: gradients of {sorted(set(own) ^ set(wanted_all))} on one side only")
        for name, wanted in wanted_all.items():
            said += _compared(f"rank {rank}: step {step}: gradient of {name}", own.get(name), wanted, program)
    for name, wanted in expected.parameters.items():
        said += _compared(f"rank {rank}: parameter {name}", found.parameters.get(name), wanted, program)
    return said


def _compared(what: str, found: Tensor | None, wanted: Tensor | None, program: Program) -> list[str]:
    zeros_for_none = program.front == "wrapper_flat" or "reduce_scatter_unused_params" in program.setters
    if zeros_for_none and (found is None) != (wanted is None):
        there = found if found is not None else wanted
        assert there is not None, "one of them is"
        return [] if not there.count_nonzero() else [f"{what}: {found} is not {wanted}"]
    if found is None or wanted is None:
        return [] if found is wanted else [f"{what}: {_brief(found)} is not {_brief(wanted)}"]
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return [f"{what}: {found.dtype} {tuple(found.shape)} is not {wanted.dtype} {tuple(wanted.shape)}"]
    if not found.numel() or torch.equal(found, wanted):
        return []
    largest, apart = wanted.abs().max().item(), (found - wanted).abs().max().item()
    if apart <= program.tolerance * (largest + 1e-2):
        return []
    return [f"{what}: off by {apart:.2g} of {largest:.2g}"]


def _brief(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"a tensor of {tensor.abs().max().item() if tensor.numel() else 0:.2g} at most"


# On a rank


@dataclass(frozen=True)
class Verdict:
    """What came of a program on one rank: nothing wrong, if both are empty."""

    wrong: tuple[str, ...] = ()
    invalid: str = ""


def judged(programs: tuple[Program, ...]) -> list[Verdict]:
    """On a rank: train each in both ways."""
    return [_judged(each) for each in programs]


@contextmanager
def _without_collections() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _judged(program: Program) -> Verdict:
    rank = dist.get_rank()
    # Garbage is collected between programs only, so that a failure is the program's, and comes again.
    gc.collect()
    with _without_collections(), torch.random.fork_rng():
        try:
            expected = plain(program)
        except InvalidProgram as error:
            return Verdict(invalid=str(error))
        with mock.patch.object(chunks, "CHUNK_NUMEL", 8) if program.on_disk else nullcontext():
            found = on_ranks(program, rank)
    return Verdict(wrong=tuple(differences(program, found, expected, rank)))
