"""Steps that are one step late (`step_on_thread(delay=1)`): the values of a plain model whose steps a test delays."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim

import sherd
import simdevice
from bench.delayed import Delayed
from sherd import CPUOffloadPolicy, Disk, MixedPrecisionPolicy, OffloadPolicy
from sherd.errors import OptimizerError, PolicyError, PolicyTypeError
from sherd.optim import chunks
from sherd.optim.flat import Stepper
from tests.device.test_offload_axes import ON_HOST, WIDTH, model_of
from tests.support.models import chain, noise
from tests.support.refusals import one_line

MASTERS = OffloadPolicy(gradients="host", masters="host")
WAYS = ("after", "in backward", "clip", "scaler", "accumulate", "kept zeros", "some without gradients")
ADAMW = partial(optim.AdamW, lr=1e-2, weight_decay=0.1)
FUSED = partial(ADAMW, fused=True)
SGD = partial(optim.SGD, lr=1e-1, momentum=0.9)
STEPS = 5


def flattened(parameters: Any) -> optim.Optimizer:
    return sherd.flatten_optimizer(ADAMW(parameters))


def batch(number: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return noise(number, rank, 3, WIDTH).to("sim").to(dtype)


def trained(
    kind: Any, way: str, delays: str, policy: OffloadPolicy = ON_HOST, dtype: Any = torch.float32, **options: Any
) -> Any:
    """The losses and the unsharded parameters, and what forward waited for; `delays` is "thread" or "test"."""
    model = model_of(policy, dtype, **options)
    optimizer = kind(model.parameters())
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    scaler = sherd.ShardedGradScaler("sim", init_scale=8.0, enabled=(way, delays) == ("scaler", "thread"))
    if way == "in backward" and delays == "thread":
        sherd.step_in_backward(model, optimizer)
    on_host = [each for each in model.parameters() if each.device.type == "cpu"]
    delayed = sherd.step_on_thread(optimizer, delay=1) if delays == "thread" else Delayed(optimizer, on_host)
    losses, waits, micro = [], list[str](), 2 if way == "accumulate" else 1

    def waited(what: str) -> None:
        if "sherd" not in threading.current_thread().name:
            waits.append(what)

    with mock.patch.object(chunks, "CHUNK_NUMEL", 64):
        for number in range(STEPS):
            with sherd.accumulate(model, micro):
                for at in range(micro):
                    x = batch(2 * number + at, torch.distributed.get_rank(), dtype)
                    simdevice.on_host_wait(waited if number == STEPS - 1 else None)
                    losses.append(loss := model(x).float().square().mean())
                    simdevice.on_host_wait(None)
                    scaler.scale(loss).backward()
            if way == "clip":
                sherd.clip_grad_norm_(model.parameters(), 0.1)
            if way == "some without gradients" and number % 2:
                model[1].up.weight.grad = None
            scaler.step(delayed if isinstance(delayed, Delayed) else optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=way != "kept zeros")
            scheduler.step()
    (delayed.finish if isinstance(delayed, Delayed) else delayed.wait)()
    values = [each.full_tensor().float().cpu() for each in model.parameters()]
    torch.accelerator.synchronize()
    return [loss.item() for loss in losses], values, waits


def compared(kind: Any, way: str, *options: Any) -> list[str]:
    losses, values, _ = trained(kind, way, "test", *options)
    found, others, waits = trained(kind, way, "thread", *options)
    assert found == losses
    assert all(map(torch.equal, others, values))
    return waits


@pytest.mark.pairs
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [ADAMW, FUSED, SGD, flattened])
def test_values_are_those_of_steps_that_are_delayed_by_hand(kind, way, sim_world):
    if (kind, way) != (flattened, "in backward"):
        for waits in sim_world(2, pause_us=300, seed=9).run(compared, kind, way).values:
            assert not waits, "forward waits for nothing"


def test_other_policies_and_meshes_have_them_too(sim_world):
    for num_ranks in (1, 4):
        sim_world(num_ranks, pause_us=300, seed=10).run(compared, ADAMW, "clip")
    for policy in (OffloadPolicy(gradients="host", share=0.5), OffloadPolicy(gradients="host", pin_memory=False)):
        sim_world(2, pause_us=300, seed=11).run(compared, ADAMW, "clip", policy)


def with_masters() -> bool:
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    losses, values, _ = trained(ADAMW, "clip", "test", mp_policy=low)
    found, others, _ = trained(ADAMW, "clip", "thread", MASTERS, torch.bfloat16)
    return found == losses and all(
        torch.equal(one.bfloat16().float(), other) for one, other in zip(values, others, strict=True)
    )


def test_masters_have_the_values_of_float32_parameters(sim_world):
    assert sim_world(2, pause_us=300, seed=12).run(with_masters).values == [True] * 2


def plain(kind: Any) -> tuple[list[float], list[Tensor]]:
    """The losses of rank 0's batches, and the parameters, of one process that adds up the gradients of two ranks."""
    torch.manual_seed(0)
    model = chain(3, WIDTH).append(nn.Linear(WIDTH, 5)).to("sim").to(torch.bfloat16).float()
    optimizer = kind(model.parameters())
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    delayed, losses = Delayed(optimizer, list(model.parameters())), list[float]()
    for number in range(STEPS):
        of_ranks = []
        for rank in range(2):
            loss = model(batch(2 * number, rank)).square().mean()
            of_ranks.append(torch.autograd.grad(loss, list(model.parameters())))
            losses += [loss.item()] * (rank == 0)
        for parameter, one, other in zip(model.parameters(), *of_ranks, strict=True):
            parameter.grad = (one + other) / 2
        delayed.step()
        scheduler.step()
    delayed.finish()
    return losses, [each.detach().cpu() for each in model.parameters()]


def as_plain(kind: Any) -> None:
    losses, values = plain(kind)
    found, others, _ = trained(kind, "after", "thread")
    assert torch.distributed.get_rank() or found == losses
    assert all(map(torch.equal, others, values))


@pytest.mark.parametrize("kind", [ADAMW, SGD])
def test_values_are_those_of_a_plain_model_in_one_process(kind, sim_world):
    sim_world(2, pause_us=300, seed=13).run(as_plain, kind)


class Gate:
    """The thread makes no step while this is shut."""

    def __init__(self) -> None:
        self.is_open, self._compute = threading.Event(), Stepper.compute

    def __call__(self, stepper: Stepper, *args: Any) -> None:
        if threading.current_thread().name.startswith("sherd steps"):
            assert self.is_open.wait(10)
        self._compute(stepper, *args)


def step(model: Any, optimizer: Any, number: int) -> None:
    model(batch(number, torch.distributed.get_rank())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def begun(delay: int = 1) -> tuple[Any, Any, Any]:
    """A model, its optimizer and its steps, of which three were asked for: the last may be under way."""
    model = model_of(ON_HOST)
    optimizer = ADAMW(model.parameters())
    steps = sherd.step_on_thread(optimizer, delay=delay)
    for number in range(3):
        step(model, optimizer, number)
    return model, optimizer, steps


def a_forward_and_a_backward_pass_before_the_step() -> None:
    gate = Gate()
    gate.is_open.set()
    with mock.patch.object(Stepper, "compute", lambda *args: gate(*args)):
        model, optimizer, steps = begun()
        steps.wait()
        step(model, optimizer, 3)
        steps.wait()
        gate.is_open.clear()
        step(model, optimizer, 4)
        model(batch(5, torch.distributed.get_rank())).square().mean().backward()
        torch.accelerator.synchronize()
        gate.is_open.set()
        optimizer.step()


def test_the_next_forward_and_backward_do_not_wait_for_the_step(sim_world):
    sim_world(2).run(a_forward_and_a_backward_pass_before_the_step)


def output(model: Any) -> Tensor:
    with torch.no_grad():
        return model(batch(9, torch.distributed.get_rank())).cpu()


ENDS = {
    "nothing": lambda *_: None,
    "wait": lambda folder, model, optimizer, steps: steps.wait(),
    "save": lambda folder, model, optimizer, _: sherd.save(folder, {"model": model, "optimizer": optimizer}, step=3),
    "state_dict": lambda folder, model, *_: model.state_dict(),
    "the optimizer's": lambda folder, model, optimizer, _: optimizer.state_dict(),
    "unsharded": lambda folder, model, *_: read_unsharded(model),
    "remove": lambda folder, model, optimizer, steps: steps.remove(),
}


def what_ends_a_delay(folder: Path) -> dict[str, tuple[bool, bool]]:
    """Whether forward has another output after each call, and that of the newest weights."""
    found = {}
    for name, end in ENDS.items():
        model, optimizer, steps = begun()
        before = output(model)
        end(folder, model, optimizer, steps)
        now = output(model)
        steps.wait()
        found[name] = not torch.equal(before, now), torch.equal(now, output(model))
    return found


def read_unsharded(model: Any) -> None:
    with sherd.unsharded(model):
        pass


def test_checkpoints_and_whoever_waits_end_the_delay(sim_world, tmp_path):
    for found in sim_world(2).run(what_ends_a_delay, tmp_path).values:
        assert found.pop("nothing") == (False, False)
        assert set(found.values()) == {(True, True)}, found


def resumed(folder: Path) -> None:
    outputs = []
    for goes_on in (True, False):
        model, optimizer, _ = begun()
        sherd.save(folder, {"model": model, "optimizer": optimizer}, step=3)
        if not goes_on:
            model = model_of(ON_HOST)
            optimizer = ADAMW(model.parameters())
            sherd.load(folder, {"model": model, "optimizer": optimizer})
        for number in range(3, 6):
            step(model, optimizer, number)
            if number == 3:  # a first step is the caller's, and no late one
                sherd.step_on_thread(optimizer, delay=1).wait()
        outputs.append(output(model))
    assert torch.equal(*outputs)


def test_a_run_goes_on_from_a_checkpoint(sim_world, tmp_path):
    sim_world(2).run(resumed, tmp_path)


def loaded(assign: bool) -> list[Tensor]:
    model, optimizer, _ = begun()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    outputs = []
    for number in range(3, 7):
        step(model, optimizer, number)
        if number == 4:
            model.load_state_dict(values, assign=assign)
        outputs.append(output(model))
    return outputs


def assigned_as_copied() -> None:
    assert all(map(torch.equal, loaded(assign=True), loaded(assign=False)))


def test_shards_that_a_load_assigns_are_delayed_as_those_it_copies_into(sim_world):
    sim_world(2, pause_us=300, seed=14).run(assigned_as_copied)


def refused(folder: Path) -> list[str]:
    said = []
    for policy in (CPUOffloadPolicy(), OffloadPolicy(gradients="host", optimizer=Disk(str(folder)))):
        model = model_of(policy)
        optimizer = ADAMW(model.parameters())
        sherd.step_on_thread(optimizer, delay=1)
        model(batch(0, 0)).square().mean().backward()
        said.append(one_line(OptimizerError, optimizer.step))
    said.append(one_line(OptimizerError, sherd.step_on_thread, optimizer))
    said.append(one_line(PolicyError, lambda: sherd.step_on_thread(optimizer, delay=2)))
    said.append(one_line(PolicyTypeError, lambda: sherd.step_on_thread(optimizer, delay=0.5)))
    return said


def test_what_cannot_be_delayed_is_refused(sim_world, tmp_path):
    for first, second, other, two, half in sim_world(2).run(refused, tmp_path).values:
        assert first == second
        assert "forward reads unit " in first
        assert 'OffloadPolicy(gradients="host")' in first
        assert "call its remove() first" in other
        assert "expected 0 or 1" in two
        assert "expected an int" in half
