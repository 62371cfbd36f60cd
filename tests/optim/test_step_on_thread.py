"""A thread makes the steps: what is trained is what is trained without it, and readers wait for the steps."""

import copy
import gc
import os
import threading
import weakref
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import distributed as dist

import sherd
from sherd import steps_on_thread
from sherd.errors import OptimizerError, PolicyTypeError
from sherd.optim.flat import Stepper
from tests.support.comparing import whole_params
from tests.support.models import build, noise
from tests.support.ranks.bodies import on_threads
from tests.support.refusals import one_line
from tests.support.sharding import sharded

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-1),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-1, momentum=0.9),
    "flat": lambda params: sherd.flatten_optimizer(torch.optim.AdamW(params, lr=torch.tensor(1e-2))),
}
WAYS = ("after", "in backward", "clip", "accumulate")


def model_of(front="shard"):
    return sharded(build("mlp"), front)


def trained(model, optimizer, way, on_thread, num_steps=4):
    """The parameters and the state."""
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if on_thread:
        sherd.step_on_thread(optimizer)
    if way == "in backward":
        sherd.step_in_backward(model, optimizer)
    micro = 3 if way == "accumulate" else 1
    for step in range(num_steps):
        with sherd.accumulate(model, micro):
            for number in range(micro):
                model(noise(10 * step + number, dist.get_rank())).square().mean().backward()
        if way == "clip":
            sherd.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        scheduler.step()
    return whole_params(model), optimizer.state_dict()


def compared(optimizer, way, front="shard"):
    (expected, state), (found, other) = (trained(model_of(front), optimizer, way, each) for each in (False, True))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for key, values in state["state"].items():
        for name, value in values.items():
            one, there = (getattr(each, "_local_tensor", each) for each in (value, other["state"][key][name]))
            assert torch.equal(one, there) if isinstance(one, torch.Tensor) else one == there, name


@pytest.mark.pairs
@pytest.mark.parametrize("front", ["shard", "flat"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_and_state_are_those_of_steps_that_the_caller_makes(optimizer, way, front, threads):
    if (optimizer, way) != ("flat", "in backward"):
        threads(2).run(compared, optimizer, way, front, timeout=40.0)


# Who waits


class Gate:
    """The thread makes no step before somebody waits for one."""

    def __init__(self):
        self.waits, self._opened = 0, threading.Event()

    def close(self):
        self.waits = 0
        self._opened.clear()

    def open(self, *_):
        self._opened.set()

    @contextmanager
    def shut(self):
        compute, wait = Stepper.compute, steps_on_thread._Step.wait_on_host

        def computed(stepper, *args):
            if threading.current_thread().name.startswith("sherd steps"):
                assert self._opened.wait(10)
            compute(stepper, *args)

        def waited(step):
            self.waits += 1
            self.open()
            wait(step)

        with (
            mock.patch.object(Stepper, "compute", computed),
            mock.patch.object(steps_on_thread._Step, "wait_on_host", waited),
        ):
            yield self


def made(model, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    sherd.step_on_thread(optimizer)
    return optimizer


def step(model, optimizer, number):
    model(noise(number, dist.get_rank())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def with_unsharded(model, optimizer):
    with sherd.unsharded(model):
        pass


@on_threads(1)
def test_whoever_reads_waits(tmp_path):
    model = model_of()
    optimizer, ema = made(model), sherd.Ema(model)
    parameter = next(model.parameters())
    readers = {
        "forward": lambda: model(noise(0, 0)),
        "to_local": parameter.to_local,
        "full_tensor": parameter.full_tensor,
        "an operation": lambda: parameter + 1,
        "a write": lambda: parameter.data.zero_(),
        "state_dict": model.state_dict,
        "the optimizer's": optimizer.state_dict,
        "save": lambda: sherd.save(tmp_path, {"model": model, "optimizer": optimizer}, step=1),
        "unsharded": lambda: with_unsharded(model, optimizer),
        "deepcopy": lambda: copy.deepcopy(model),
        "Ema": ema.update,
        "a second step": optimizer.step,
        "iter_full_parameters": lambda: list(sherd.iter_full_parameters(model)),
        "wait": sherd.step_on_thread(optimizer).wait,
        "remove": sherd.step_on_thread(optimizer).remove,
    }
    step(model, optimizer, 0)
    with Gate().shut() as gate:
        for name, read in readers.items():
            gate.open()
            model(noise(1, 0)).square().mean().backward()
            gate.close()
            optimizer.step()
            assert not gate.waits, "step() returns at once"
            read()
            assert gate.waits, name
            optimizer.zero_grad()
            steps_on_thread.wait_for_steps()


def test_a_process_is_forked_when_no_step_is_under_way(world):
    assert world(1).run(forked) == [True]


def forked():
    model = model_of()
    optimizer = made(model)
    step(model, optimizer, 0)
    with Gate().shut() as gate:
        step(model, optimizer, 1)
        threading.Timer(0.05, gate.open).start()
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        return all(each.done() for each in steps_on_thread._futures)


@on_threads(1)
def test_a_model_that_is_deleted_is_gone_after_its_last_step():
    model = model_of()
    optimizer = made(model)
    step(model, optimizer, 0)
    with Gate().shut() as gate:
        step(model, optimizer, 1)
        gone = [weakref.ref(each) for each in (model, optimizer)]
        del model, optimizer
        steps_on_thread.wait_for_steps()
        assert gate.waits
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


@on_threads(1)
def test_an_error_on_the_thread_is_raised_once_where_the_program_waits():
    model = model_of()
    optimizer = made(model)
    step(model, optimizer, 0)
    with mock.patch.object(Stepper, "compute", mock.Mock(side_effect=RuntimeError("out of order"))):
        step(model, optimizer, 1)
        said = one_line(OptimizerError, model, noise(2, 0))
        assert "the step of unit" in one_line(OptimizerError, steps_on_thread.wait_for_steps), "of the other units"
        steps_on_thread.wait_for_steps()
    assert "the step of unit" in said
    assert "RuntimeError: out of order; go on from the last checkpoint" in said


def resumed(folder):
    plain = trained(model_of(), "adamw", "after", False)[0]
    model = model_of()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for number in range(4):
        if number == 2:
            sherd.save(folder, {"model": model, "optimizer": optimizer}, step=2)
            model = model_of()
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            sherd.load(folder, {"model": model, "optimizer": optimizer})
        sherd.step_on_thread(optimizer)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5**number
        step(model, optimizer, 10 * number)
    found = whole_params(model)
    assert all(torch.equal(found[name], value) for name, value in plain.items())


def test_a_run_goes_on_from_a_checkpoint(threads, tmp_path):
    threads(2).run(resumed, str(tmp_path))


@on_threads(1)
def test_what_may_need_other_ranks_is_refused():
    model = model_of()
    for wrong, error in ((torch.optim.LBFGS(model.parameters()), OptimizerError), ("adam", PolicyTypeError)):
        assert "step_on_thread" in one_line(error, sherd.step_on_thread, wrong)
    assert "step_on_thread: Muon is not known" in one_line(OptimizerError, sherd.step_on_thread, sherd.Muon(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert sherd.step_on_thread(optimizer) is sherd.step_on_thread(optimizer)
