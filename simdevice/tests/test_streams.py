"""Streams run at once and the host runs ahead; events alone put their tasks in an order."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

import simdevice


def test_the_host_does_not_wait_for_what_it_queues(device):
    x = torch.ones(64, 64, device=device)
    gate = simdevice.closed_gate()
    y = x @ x
    done = torch.accelerator.current_stream().record_event()
    assert not done.query()
    gate.open()
    assert y[0, 0].item() == 64
    assert done.query()
    assert simdevice.host_waits() == {"item": 1}


def test_streams_do_not_wait_for_each_other(device):
    side = torch.Stream(device=device)
    gate = simdevice.closed_gate()
    with side:
        ones = torch.ones(4, device=device) + 1
        side.synchronize()
        assert not torch.sim.default_stream().query()
        assert ones.tolist() == [2] * 4
    gate.open()


def test_a_stream_waits_for_an_event_and_the_host_does_not(device):
    side = torch.Stream(device=device)
    x = torch.zeros(4, device=device)
    gate = simdevice.closed_gate()
    x.fill_(3)
    side.wait_stream(torch.accelerator.current_stream())
    assert not side.query()
    gate.open()
    with side:
        assert (x * 2).tolist() == [6] * 4


def test_an_event_stands_for_its_last_recording_and_tells_the_time_between_two(device):
    start, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    assert end.query()
    for _ in range(2):
        start.record()
        simdevice.sleep(100_000)
        gate = simdevice.closed_gate()
        end.record()
        assert not end.query()
        gate.open()
        end.synchronize()
        assert end.query()
        assert start.elapsed_time(end) >= 100


def test_each_thread_has_its_own_current_stream(device):
    side = torch.Stream(device=device)
    with side, ThreadPoolExecutor(1) as pool:
        assert torch.accelerator.current_stream() == side
        assert pool.submit(torch.accelerator.current_stream).result() == torch.sim.default_stream()
    assert torch.accelerator.current_stream() == torch.sim.default_stream()


def test_urgent_streams_are_others_than_the_usual_ones(device):
    usual = {torch.Stream(device=device).stream_id for _ in range(40)}
    urgent = {torch.Stream(device=device, priority=-1).stream_id for _ in range(40)}
    assert len(usual) == len(urgent) == 32
    assert not usual & urgent
    assert 0 not in usual | urgent


@pytest.mark.usefixtures("device")
def test_devices_have_streams_of_their_own():
    gate = simdevice.closed_gate()
    assert torch.full((3,), 2.0, device="sim:1").tolist() == [2, 2, 2]
    assert not torch.sim.current_stream(0).query()
    gate.open()
    with torch.sim.device(1):
        assert torch.empty(1, device="sim").device == torch.device("sim", 1)
        assert torch.sim.current_device() == 1
    assert torch.sim.current_device() == 0


def test_what_the_host_can_see_is_raised_at_the_call_and_what_fails_on_a_stream_later_with_its_name(device):
    with pytest.raises(RuntimeError, match="size of tensor"):
        torch.ones(2, 2, device=device).add_(torch.ones(5, device=device))
    x = torch.ones(4, device=device)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="memory was freed"):
        x.add_(1)
    table = torch.ones(3, 2, device=device)
    rows = torch.tensor([0, 7], device=device)
    torch.nn.functional.embedding(rows, table)
    with pytest.raises(RuntimeError, match=r"sim: index_select on sim:0 stream 0 failed: .*out of range"):
        torch.accelerator.synchronize()
    assert table.tolist() == [[1, 1]] * 3  # raised once; the device goes on


def test_pauses_follow_from_the_seed(device):
    def milliseconds(seed):
        """Returns how long 40 empty tasks took, each."""
        simdevice.configure(pause_us=3000, pause_percent=50, seed=seed)
        x = torch.zeros(1, device=device)
        events = [torch.Event(device=device, enable_timing=True) for _ in range(41)]
        for event in events:
            event.record()
            x.add_(1)
        torch.accelerator.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(events)]

    def pauses(seed):
        """Returns which tasks pause: they always take long, while others do only where the machine is busy."""
        return [min(times) > 0.25 for times in zip(*(milliseconds(seed) for _ in range(4)), strict=True)]

    first, other = pauses(5), pauses(6)
    assert any(first)
    assert not all(first)
    assert first != other
    assert sum(a != b for a, b in zip(first, pauses(5), strict=True)) <= 8  # the machine adds some of its own


def test_stream_context_and_names_of_torch_cuda(device):
    stream = torch.sim.Stream(priority=-1)
    with torch.sim.stream(stream):
        assert torch.sim.current_stream() == stream
    with torch.sim.stream(None):
        assert torch.sim.current_stream() == torch.sim.default_stream()
    event = torch.sim.Event(enable_timing=True)
    event.record(stream)
    event.wait(torch.sim.current_stream())
    stream.synchronize()
    torch.sim.synchronize()
    assert simdevice.host_waits() == {"Stream.synchronize": 1, "synchronize": 1}
