"""The host waits where it would wait for a GPU, and each time is counted under its cause."""

import pytest
import torch

import simdevice


@pytest.fixture
def x(device):
    x = torch.arange(6.0, device=device)
    torch.accelerator.synchronize()
    simdevice.host_waits()
    return x


CAUSES = {
    "item": lambda x: x[0].item(),
    "copy to host, blocking": lambda x: x.cpu(),
    "copy to device, blocking": lambda x: x.copy_(torch.ones(6)),
    "copy to host, not to pinned memory as it lies on the device": lambda x: torch.empty(6).copy_(x, non_blocking=True),
    "synchronize": lambda x: torch.accelerator.synchronize(),
    "Stream.synchronize": lambda x: torch.accelerator.current_stream().synchronize(),
    "Event.synchronize": lambda x: torch.accelerator.current_stream().record_event().synchronize(),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 2),
    "equal": lambda x: torch.equal(x, x),
}


def test_each_cause_is_counted_and_heard(x):
    for cause, wait in CAUSES.items():
        heard = []
        simdevice.on_host_wait(heard.append)
        wait(x)
        simdevice.on_host_wait(None)
        waits = simdevice.host_waits()
        assert [each.removesuffix(", no meta kernel") for each in waits] == [cause]
        assert heard == list(waits), cause
        assert simdevice.host_waits() == {}, cause


def test_copies_with_pinned_memory_do_not_wait(x):
    pinned = torch.ones(6).pin_memory()
    assert pinned.is_pinned()
    assert not torch.ones(6).is_pinned()
    gate = simdevice.closed_gate()
    x.copy_(pinned, non_blocking=True)
    back = torch.empty(6, pin_memory=True).copy_(x * 2, non_blocking=True)
    assert not torch.accelerator.current_stream().query()
    assert simdevice.host_waits() == {}
    gate.open()
    torch.accelerator.synchronize()
    assert back.tolist() == [2] * 6


def test_the_host_may_overwrite_pageable_memory_at_once_and_pinned_memory_not(x):
    for pin, expected in ((False, 1), (True, 5)):
        source = torch.ones(6, pin_memory=pin)
        gate = simdevice.closed_gate()
        x.copy_(source, non_blocking=True)
        source.fill_(5)
        gate.open()
        assert x[0].item() == expected


def test_pinned_memory_is_reused_only_when_its_copies_have_run(x):
    gate = simdevice.closed_gate()
    pinned = torch.ones(6, pin_memory=True)
    begin = pinned.data_ptr()
    x.copy_(pinned, non_blocking=True)
    del pinned
    assert torch.empty(6, pin_memory=True).data_ptr() != begin
    gate.open()
    torch.accelerator.synchronize()
    several = [torch.empty(6, pin_memory=True) for _ in range(2)]
    assert begin in {each.data_ptr() for each in several}
    assert not simdevice.races()


def test_what_the_hook_raises_comes_out_when_the_device_is_done_with_the_hosts_memory(x):
    """Raised at once, it would free the result of the copy before the device has written it."""
    simdevice.on_host_wait(lambda cause: 1 / 0)
    simdevice.sleep(300_000)
    slept = torch.accelerator.current_stream().record_event()
    with pytest.raises(ZeroDivisionError):
        x.cpu()
    assert slept.query()
