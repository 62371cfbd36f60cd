"""Backwards that the user ends with `finalize_backward` leave the gradients, and raise the errors, of torch's own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import sherd
from sherd import CPUOffloadPolicy, Flat, GradientReductionHandle
from sherd.errors import StateError
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import refusal
from tests.support.versions import needs_torch

SINCE_2_15 = needs_torch(2, 15, "torch's own fully_shard has it since then")


def stack(by=sherd, by_hand=True, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    for layer in (model[0], model[2]):
        by.fully_shard(layer, **options)
    by.fully_shard(model, **options)
    model.set_manual_backward_finalization(by_hand)
    return model


def batch(number):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def backward(model, number):
    model(batch(number)).square().sum().backward()


def gradients(model):
    return [each.grad.full_tensor() for each in model.parameters()]


def trained(by, synced, async_op, **options):
    """The gradients of two steps of three backwards each, added up."""
    model = stack(by, **options)
    for step in range(2):
        for number in range(3):
            model.set_requires_gradient_sync(synced)
            backward(model, 3 * step + number)
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=async_op)
        if async_op:
            handle.wait()
            handle.wait()  # a second one does nothing
        assert all(parameter.grad is not None for parameter in model.parameters())
    return gradients(model)


def plain_gradients(number_of_ranks):
    """The same of one process, for each rank's batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    for number in range(6):
        for rank in range(number_of_ranks):
            inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * number + rank))
            (model(inputs).square().sum() / number_of_ranks).backward()
    return [each.grad for each in model.parameters()]


def assert_close(found, expected, case):
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5), case


OPTIONS = {
    "rows": {},
    "kept": {"reshard_after_forward": False},
    "flat": {"placement": Flat()},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@on_threads(2)
def test_gradients_are_those_of_one_process_whatever_reduces_them():
    expected = plain_gradients(2)
    for name, options in OPTIONS.items():
        for synced in (True, False):
            for async_op in (True, False):
                assert_close(trained(sherd, synced, async_op, **options), expected, (name, synced, async_op))


@SINCE_2_15
@on_processes(2)
def test_gradients_are_those_of_torchs_own():
    for synced in (True, False):
        for async_op in (True, False):
            ours, theirs = (trained(by, synced, async_op) for by in (sherd, fsdp))
            assert_close(ours, theirs, (synced, async_op))


@on_threads(4)
def test_replicas_are_finalized_with_their_all_reduce():
    mesh = mesh_of((2, 2))
    assert_close(trained(sherd, False, True, mesh=mesh), plain_gradients(4), "replicas")
    model = stack(mesh=mesh)
    model.set_requires_all_reduce(False)
    backward(model, 0)
    said = refusal(StateError, model.finalize_backward)
    assert "not over its replicas; call set_requires_all_reduce(True)" in said, said


@on_threads(2)
def test_a_rank_that_uses_no_unit_in_any_of_the_backwards_takes_part():
    model = stack(reshard_after_forward=False)  # or backward would gather on rank 1 alone
    model.set_requires_gradient_sync(False)
    hidden = []
    model[0].register_forward_hook(lambda *call: hidden.append(call[-1]))
    output = model(batch(0))
    (output if dist.get_rank() else hidden[0]).sum().backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@on_threads(2)
def test_parameters_are_freed_by_the_policy_at_the_end():
    model = stack()
    model.set_reshard_after_backward(False)
    backward(model, 0)
    assert not isinstance(model[0].weight, torch.distributed.tensor.DTensor)
    model.set_reshard_after_backward(True)
    model.finalize_backward()
    assert isinstance(model[0].weight, torch.distributed.tensor.DTensor)


def raised(by, body):
    """The type of error, as one that both have, and whether one was raised."""
    try:
        body(by)
    except RuntimeError:
        return "RuntimeError"
    return "nothing"


def not_by_hand(by):
    model = stack(by, by_hand=False)
    backward(model, 0)
    model.finalize_backward()


def before_the_first_forward(by):
    model = stack(by)
    assert model.finalize_backward() is None
    model.finalize_backward(async_op=True).wait()


def not_the_root(by):
    model = stack(by)
    backward(model, 0)
    model[0].finalize_backward()


def set_below_the_root(by):
    model = stack(by)
    backward(model, 0)
    model[0].set_manual_backward_finalization(True)


def set_below_the_root_before_the_first_forward(by):
    model = stack(by, by_hand=False)
    model[0].set_manual_backward_finalization(True)
    model(batch(0))


def set_after_a_backward(by):
    model = stack(by)
    backward(model, 0)
    model.set_manual_backward_finalization(False)


def set_after_the_end(by):
    model = stack(by)
    backward(model, 0)
    model.finalize_backward()
    model.set_manual_backward_finalization(False)
    backward(model, 1)


def set_in_a_backward(by):
    model = stack(by, by_hand=False)
    output = model(batch(0))
    output.register_hook(lambda _: model.set_manual_backward_finalization(True))
    output.sum().backward()


def finalized_in_a_backward(by):
    model = stack(by)
    output = model(batch(0))
    output.register_hook(lambda _: model.finalize_backward())
    output.sum().backward()


def finalized_twice_at_once(by):
    model = stack(by)
    backward(model, 0)
    model.finalize_backward(async_op=True)
    model.finalize_backward()


def forward_before_the_wait(by):
    model = stack(by)
    backward(model, 0)
    model.finalize_backward(async_op=True)
    model(batch(1))


def waited_after_a_reset(by):
    model = stack(by)
    backward(model, 0)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    handle.wait()


def finalized_without_a_backward(by):
    model = stack(by)
    for _ in range(2):
        backward(model, 0)
        model.finalize_backward()
        model.finalize_backward()


ERRORS = {
    not_by_hand: "RuntimeError",
    before_the_first_forward: "nothing",
    not_the_root: "RuntimeError",
    set_below_the_root: "RuntimeError",
    set_below_the_root_before_the_first_forward: "RuntimeError",
    set_after_a_backward: "RuntimeError",
    set_after_the_end: "nothing",
    finalized_twice_at_once: "RuntimeError",
    forward_before_the_wait: "RuntimeError",
    waited_after_a_reset: "RuntimeError",
    finalized_without_a_backward: "nothing",
}
IN_BACKWARD = (set_in_a_backward, finalized_in_a_backward)


@on_threads(2)
def test_what_is_refused_is_a_state_error():
    for body, expected in ERRORS.items():
        assert raised(sherd, body) == expected, body.__name__


@on_processes(2)
def test_what_is_refused_inside_of_a_backward_is_a_state_error():
    for body in IN_BACKWARD:
        assert raised(sherd, body) == "RuntimeError", body.__name__


@SINCE_2_15
@on_processes(2)
def test_torchs_own_refuses_the_same():
    for body, expected in (ERRORS | dict.fromkeys(IN_BACKWARD, "RuntimeError")).items():
        assert raised(fsdp, body) == expected, body.__name__


@on_threads(2)
def test_a_reset_gives_the_reduction_up():
    model = stack()
    backward(model, 0)
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, GradientReductionHandle)
    model.reset_iter_state()
    assert all(each.grad is None for each in model.parameters())
    assert "was given up by reset_iter_state()" in refusal(StateError, handle.wait)
    backward(model, 1)
    model.finalize_backward()
    found, again = gradients(model), stack(by_hand=False)
    backward(again, 1)
    assert_close(found, gradients(again), "after a reset")
