"""Two uses of the same bytes that nothing orders are named, both, whatever the timing; and no others are."""

import time

import pytest
import torch

import simdevice


@pytest.fixture
def side(device):
    return torch.Stream(device=device)


def default():
    return torch.sim.default_stream()


def numbers(device):
    x = torch.zeros(1000, device=device)
    torch.accelerator.synchronize()
    return x


def the_race():
    """Returns the text of the one race there is."""
    found = simdevice.races()
    assert len(found) == 1, found
    return next(iter(found))


def test_two_uses_that_nothing_orders_are_named(device, side):
    for kind, first, second, names in (
        ("write-read", lambda x: x.fill_(1), lambda x: x * 2, ("fill_.Scalar", "mul.out")),
        ("read-write", lambda x: x * 2, lambda x: x.fill_(1), ("mul.out", "fill_.Scalar")),
        ("write-write", lambda x: x.fill_(1), lambda x: x.fill_(2), ("fill_.Scalar", "fill_.Scalar")),
    ):
        x = numbers(device)
        kept = [first(x)]
        with side:
            kept.append(second(x))
        text = f"{names[0]} on sim:0 stream 0, and unordered with it {names[1]} on sim:0 stream {side.stream_id}"
        assert the_race() == f"{kind}: {text}"
        del kept


def test_two_reads_and_different_bytes_are_no_race(device, side):
    x = numbers(device)
    y = x * 2
    with side:
        z = x * 2
    assert not simdevice.races()
    x = numbers(device)
    x[:500].fill_(1)
    with side:
        x[500:].fill_(2)
        assert not simdevice.races(reset=False)
        x[499:].fill_(2)
    assert "write-write" in the_race()
    del y, z


def test_memory_freed_while_another_stream_reads_it(device, side):
    x = numbers(device)
    with side:
        y = x * 2
    del x
    again = torch.empty(1000, device=device)
    assert the_race().startswith(
        f"read-write: mul.out on sim:0 stream {side.stream_id}, and unordered with it malloc on"
    )
    del y, again


ORDERED = {
    "wait_stream": lambda side: side.wait_stream(default()),
    "event": lambda side: side.wait_event(default().record_event()),
    "event, waited for by a third stream": lambda side: (
        (third := torch.Stream(device="sim")).wait_stream(default()),
        side.wait_stream(third),
    ),
    "the host waits for the stream": lambda side: default().synchronize(),
    "the host waits for an event": lambda side: default().record_event().synchronize(),
    "the host waits for the device": lambda side: torch.accelerator.synchronize(),
    "the host reads a value": lambda side: torch.ones(1, device="sim").item(),
}


def test_what_orders_two_streams_leaves_no_race(device, side):
    for how, order in ORDERED.items():
        x = numbers(device)
        x.fill_(1)
        order(side)
        with side:
            x.fill_(2)
        default().wait_stream(side)
        assert x[0].item() == 2, how
        assert not simdevice.races(), how


def test_an_event_orders_what_came_before_it_and_nothing_after(device, side):
    x = numbers(device)
    event = default().record_event()
    x.fill_(1)
    side.wait_event(event)
    with side:
        y = x * 2
    assert "write-read" in the_race()
    del y


def test_record_stream_leaves_no_race(device, side):
    x = numbers(device)
    with side:
        y = x * 2
    x.record_stream(side)
    del x
    again = torch.ones(1000, device=device)
    side.synchronize()
    last = torch.ones(1000, device=device)
    assert not simdevice.races()
    del y, again, last


def test_a_block_that_other_streams_have_passed_orders_no_other_memory(device, side):
    torch.accelerator.empty_cache()  # what other tests have left would be handed out instead
    # So large that it has a segment to itself: it is neither split nor merged with its neighbours.
    size = 3 << 20
    x, other = torch.zeros(size, device=device), numbers(device)
    begin, taken = x.data_ptr(), []
    with side:
        y = x * 2
        passed = side.record_event()
        other.fill_(3)
    x.record_stream(side)
    del x
    for _ in range(50):  # until the side stream is through: only the allocator has asked
        taken.append(torch.empty(size, device=device))
        if taken[-1].data_ptr() == begin:
            break
        time.sleep(0.02)
    else:
        pytest.fail("the block was never handed out again")
    read = other * 2
    assert "write-read: fill_.Scalar" in the_race()
    del y, passed, read


def test_races_do_not_depend_on_timing(device, side):
    for seed in range(20):
        simdevice.configure(pause_us=2000, pause_percent=50, seed=seed)
        x, y = numbers(device), numbers(device)
        for _ in range(3):
            x.add_(1)
            side.wait_stream(default())
            with side:
                y.add_(x)
            if seed % 2:
                default().wait_stream(side)
            x.mul_(2)
        torch.accelerator.synchronize()
        kinds = {text.partition(":")[0] for text in simdevice.races()}
        assert kinds == (set() if seed % 2 else {"read-write"}), seed
        if seed % 2:
            assert y[0].item() == 1 + 3 + 7, seed


def test_a_missing_wait_gives_wrong_values(device, side):
    x = numbers(device)
    gate = simdevice.closed_gate()
    x.fill_(1)
    with side:
        early = x * 2
        assert early.sum().item() == 0
    gate.open()
    assert simdevice.races()


def test_races_raise_at_the_call_or_are_not_looked_for_when_asked(device, side):
    x = numbers(device)
    simdevice.configure(races="raise")
    x.fill_(1)
    with side, pytest.raises(RuntimeError, match=r"sim: write-write: fill_\.Scalar .* unordered with it zero_"):
        x.zero_()
    assert simdevice.races()
    simdevice.configure(races="off")
    x = numbers(device)
    x.fill_(1)
    with side:
        x.fill_(2)
    simdevice.configure()
    x.fill_(3)  # nothing is held against what came while nobody looked
    assert not simdevice.races()


def test_both_sides_are_labelled_when_asked(device, side):
    simdevice.label_tasks(simdevice.calling_line)
    x = numbers(device)
    x.fill_(1)
    with side:
        x.fill_(2)
    first, second = the_race().split(", and unordered with it ")
    line = test_both_sides_are_labelled_when_asked.__code__.co_firstlineno
    assert first.endswith(f" at test_races.py:{line + 3}")
    assert second.endswith(f" at test_races.py:{line + 5}")


def test_other_devices_are_ordered_by_events_too(device):
    x = numbers(device)
    x.fill_(1)
    y = x.to("sim:1")
    assert (y + 1).sum().item() == 2000
    x.fill_(2)  # behind the copy: it ran on this device's stream
    y.fill_(3)
    with torch.Stream(device="sim:1"):
        y.fill_(4)
    assert "sim:1 stream 0" in the_race()


def test_what_the_host_does_to_pinned_memory_is_checked_when_said(device):
    x = torch.ones(1000, device=device)
    pinned = torch.empty(1000, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    simdevice.host_reads(pinned)
    assert the_race().startswith("write-read: copy to host on sim:0 stream 0, and unordered with it a read on the host")
    torch.accelerator.synchronize()
    simdevice.host_reads(pinned)
    simdevice.host_writes(pinned)
    x.copy_(pinned, non_blocking=True)
    simdevice.host_reads(pinned)
    assert not simdevice.races()
    simdevice.host_writes(pinned)
    assert the_race().startswith("read-write: copy to device")
