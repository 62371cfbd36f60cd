"""The clock: durations by hand, streams that wait, communicators that serialise, and the same times every time."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import simdevice
from simdevice import machines
from simdevice.tests.collective_programs import gather_single, scatter_single

US = 1e-6
# A million FLOP and a million bytes in a microsecond, one for each kernel, two for the host to queue it.
MACHINE = {
    "launch": 1 * US,
    "host": 2 * US,
    "python": 0.0,
    "bandwidth": 1e12,
    "ranks_per_node": 8,
    "flops": dict.fromkeys(machines.DTYPES, 1e12),
    "shares": dict.fromkeys(machines.SHARES, 1.0),
    "within": {"latency": 1 * US, "bandwidth": 1e11},
    "across": {"latency": 10 * US, "bandwidth": 1e10},
    "to_host": {"latency": 10 * US, "bandwidth": 1e10},
}
EVENT = 1  # microseconds of the host, to record an event or to queue a wait for one
PRODUCT = 1 + 2 * 1000**3 / 1e6  # of two matrices of 1000 x 1000
SUM = 1 + 2 * 4 * 1000**2 / 1e6  # of a matrix and a number


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    """A matrix of float32; the clock begins behind it."""
    x = torch.ones(1000, 1000, device=device)
    torch.accelerator.synchronize()
    simdevice.configure(machine=MACHINE)
    return x


def spans() -> list[tuple[str, float, float]]:
    return [(task.name.partition(".")[0], task.start, task.end) for task in simdevice.trace()]


def test_one_stream_takes_the_sum_of_its_tasks(x):
    y = x @ x
    y + 1
    assert spans() == [("mm", 2, 2 + PRODUCT), ("add", 2 + PRODUCT, 2 + PRODUCT + SUM)]
    times = simdevice.times()
    assert (times.host, times.end) == (4, 2 + PRODUCT + SUM)
    assert times.compute.computing == times.compute.busy == PRODUCT + SUM
    assert (times.idle, times.exposed) == (2, 0)


def test_small_kernels_last_as_long_as_the_host_takes_to_queue_them(x):
    small = torch.ones(8, device="sim")
    simdevice.reset_times()
    for _ in range(100):
        small.add_(1)
    assert simdevice.times().end == pytest.approx(100 * 2 + 1, rel=1e-3)
    assert simdevice.times().idle > 90


def test_an_event_alone_puts_tasks_of_two_streams_in_an_order(x):
    side = torch.Stream(device="sim")
    for waits in (False, True):
        simdevice.reset_times()
        y = x @ x
        if waits:
            side.wait_stream(torch.accelerator.current_stream())
        with side:
            x + 1
        product, addition = spans()
        assert product[1:] == (2, 2 + PRODUCT)
        assert addition[1] == (2 + PRODUCT if waits else 4)
        torch.accelerator.synchronize()
        assert simdevice.times().host >= 2 + PRODUCT
        del y


def test_a_host_that_waits_goes_on_when_the_device_is_there_and_copies_go_over_the_link(x):
    y = x @ x
    y[0, 0].item()
    assert simdevice.times().host == pytest.approx(2 + PRODUCT + 10, abs=0.1)
    simdevice.reset_times()
    x.cpu()
    assert simdevice.times().host == pytest.approx(2 + 10 + 4 * 1000**2 / 1e4, abs=0.1)


def test_events_tell_the_clocks_time(x):
    start, end = (torch.Event(device="sim", enable_timing=True) for _ in range(2))
    start.record()
    x @ x
    end.record()
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) == pytest.approx((PRODUCT + 2) / 1000)


@pytest.fixture
def imagined(device: torch.device) -> Iterator[None]:
    simdevice.imagine_ranks(16)
    yield
    torch.accelerator.synchronize()
    dist.destroy_process_group()


@pytest.mark.usefixtures("imagined")
def test_a_communicator_runs_one_collective_at_a_time_in_the_hosts_order(x):
    shard, full = torch.ones(1000, device="sim"), torch.ones(16000, device="sim")
    half, part = torch.ones(2000, device="sim"), torch.ones(16000, device="sim")
    other = dist.new_group()
    streams = [torch.Stream(device="sim") for _ in range(2)]
    torch.accelerator.synchronize()
    for group, serial in ((None, True), (other, False)):
        simdevice.reset_times()
        with streams[0]:
            gather_single(full, shard)
        with streams[1]:
            scatter_single(half[:1000], part, group=group)
        first, second = (task for task in simdevice.trace() if task.engine == "communication")
        # 14 hops within two nodes and one between them; 8 devices of a node share its traffic with the other one.
        assert first.end - first.start == pytest.approx(1 + 14 + 10 + 64000 * 15 / 16 / 8e4)
        assert (second.start == first.end) is serial
        torch.sim.current_stream().wait_stream(streams[0])
        x + 1
        times = simdevice.times()
        assert times.exposed == times.compute.waiting > 0


def test_ranks_of_one_node_do_not_use_the_link_between_nodes(device):
    x = torch.ones(1000, device=device)
    for per_node, expected in ((8, 1 + 7 * 1 + 4000 * 7 / 8 / 1e5), (1, 1 + 3 * 10 + 4000 * 7 / 8 / 1e4)):
        simdevice.imagine_ranks(8)
        simdevice.configure(machine=MACHINE, ranks_per_node=per_node)
        gather_single(x, torch.ones(125, device=device))
        (task,) = [task for task in simdevice.trace() if task.engine == "communication"]
        assert task.end - task.start == pytest.approx(expected)
        torch.accelerator.synchronize()
        dist.destroy_process_group()


@pytest.mark.usefixtures("imagined")
@pytest.mark.parametrize("compute", [True, False])
def test_an_imagined_rank_has_gathered_what_this_rank_has(device, compute):
    simdevice.configure(machine=MACHINE, compute=compute)
    own = torch.tensor([435, -1]).to(device)
    full, parts = torch.empty(32, dtype=torch.int64, device=device), [torch.empty_like(own) for _ in range(16)]
    gather_single(full, own)
    dist.all_gather(parts, own)
    assert full.tolist() == [435, -1] * 16
    assert [part[0].item() for part in parts] == [435] * 16
    # What another rank alone would send, and what all of them reduce, stays what it was.
    dist.broadcast(own, 3)
    dist.all_reduce(own)
    assert own.cpu().tolist() == own.clone().tolist() == [435, -1]
    dist.gather(own, parts)
    assert parts[15].tolist() == [435, -1]


def test_where_nothing_is_computed_new_integers_are_zero_and_kernels_leave_those_that_were_copied(device):
    simdevice.configure(machine=MACHINE, compute=False)
    few = torch.arange(1000).to(device)
    assert few.add_(5)[7].item() == 7
    assert (few + 5)[7].item() == 0
    del few
    assert not any(torch.empty(1000, dtype=torch.int64, device=device).tolist())
    assert torch.ones(3).to(device).tolist() == [0.0] * 3
    assert torch.ones(1 << 20, dtype=torch.int64).to(device)[0].item() == 0


def trained(steps: int = 3) -> tuple[float, dict[str, int]]:
    """A small model's steps: the time on the clock, and what the allocator counts."""
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    simdevice.reset_times()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512)).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(steps):
        loss = model(torch.randn(64, 512, device="sim")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    counted = torch.accelerator.memory_stats()
    return simdevice.times().end, {
        name: counted[name] for name in counted if name.endswith(("bytes.all.peak", "bytes.all.current"))
    }


@pytest.mark.usefixtures("device")
def test_times_and_bytes_are_the_same_on_a_slow_machine_and_where_nothing_is_computed():
    def run(**settings):
        simdevice.configure(machine="h100", **settings)
        return trained()

    first_time, counted = run()
    assert first_time > 0
    for settings in ({}, {"pause_us": 300, "pause_percent": 30, "seed": 5}, {"compute": False}):
        time, found = run(**settings)
        assert time == first_time, settings
        assert found == counted, settings
    assert {name: figure for name, figure in counted.items() if "peak" in name}


@pytest.mark.usefixtures("device")
def test_where_nothing_is_computed_a_tensor_may_be_larger_than_this_machine():
    simdevice.configure(machine="h100", compute=False)
    large = torch.ones(100, 1 << 30, dtype=torch.bfloat16, device="sim")
    assert (large * 2).sum().item() == 0.0
    assert bool((large > 1).any()) is False
    assert torch.accelerator.max_memory_allocated() >= 2 * large.nbytes
    assert large[:1, :5].float().cpu().tolist() == [[0.0] * 5]
    assert simdevice.times().end > 1e6 * 4 * large.nbytes / 2.94e12


@pytest.mark.usefixtures("device")
def test_attention_takes_its_flop_and_half_of_them_where_it_is_causal():
    simdevice.configure(machine=MACHINE, compute=False)
    q, k, v = (torch.ones(1, 8, 2048, 64, device="sim", requires_grad=True) for _ in range(3))
    taken = {}
    for causal in (False, True):
        simdevice.reset_times()
        simdevice.host_waits()
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
        assert not simdevice.host_waits()
        taken[causal] = sum(task.end - task.start for task in simdevice.trace() if "attention" in task.name)
    flops = 4 * 8 * 2048**2 * 64
    assert taken[False] == pytest.approx(3.5 * flops / 1e6 + 2)
    assert taken[True] == pytest.approx(3.5 * flops / 2e6 + 2)


@pytest.mark.usefixtures("device")
def test_what_is_one_kernel_on_a_gpu_is_launched_once():
    simdevice.configure(machine=MACHINE, compute=False)
    many = [torch.ones(1000, device="sim") for _ in range(40)]
    simdevice.reset_times()
    torch._foreach_add_(many, 1.0)
    assert (simdevice.times().host, simdevice.times().end) == (2, pytest.approx(2 + 1 + 40 * 2 * 4000 / 1e6))
    x = torch.ones(64, 1000, device="sim", requires_grad=True)
    norm = nn.RMSNorm(1000, device="sim")
    simdevice.reset_times()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_stats()["requested_bytes.all.current"]
    norm(x).backward(torch.ones_like(x))
    assert [name for name, *_ in spans()].count("_fused_rms_norm") == 1
    assert [name for name, *_ in spans()].count("_fused_rms_norm_backward") == 2
    assert (x.grad.shape, norm.weight.grad.shape) == (x.shape, (1000,))
    # Its result, the gradient of that, and the two of the inputs; nothing of a norm's inner steps.
    assert torch.accelerator.memory_stats()["requested_bytes.all.peak"] - before < 3.1 * x.nbytes


def test_an_rms_norm_that_computes_is_torchs(x):
    norm = nn.RMSNorm(1000, device="sim")
    given = torch.randn(4, 1000)
    on_device = given.to("sim").requires_grad_()
    norm(on_device).sum().backward()
    expected = given.requires_grad_()
    nn.functional.rms_norm(expected, (1000,), torch.ones(1000)).sum().backward()
    torch.testing.assert_close(on_device.grad.cpu(), expected.grad)


def test_a_strided_view_moves_its_own_bytes(x):
    x[:, :10].fill_(1)
    (task,) = simdevice.trace()
    assert task.end - task.start == pytest.approx(1 + 4 * 1000 * 10 / 1e6)


def test_meta_kernels_in_python_are_not_the_hosts_calls(x):
    simdevice.configure(machine={**MACHINE, "python": 1.0 * US})
    simdevice.times()
    before = simdevice.times().host
    torch.addcmul(x, x, x, value=0.123)  # seen for the first time: its shapes are asked of a meta kernel
    assert simdevice.times().host - before < 2 + 20


def test_the_host_takes_time_for_python_calls_and_for_what_it_is_said_to_do(x):
    simdevice.configure(machine={**MACHINE, "python": 1.0 * US})

    def nothing() -> None:
        pass

    before = simdevice.times().host
    for _ in range(1000):
        nothing()
    assert 1000 <= simdevice.times().host - before < 1050
    simdevice.configure(machine=MACHINE)
    simdevice.host_works(250)
    assert simdevice.times().host == 250


def test_machines_have_all_figures_and_others_are_refused(device):
    for name in machines.names():
        assert all(figure >= 0 for figure in machines.record(name).values()), name
    with pytest.raises(ValueError, match=r"no machine 'abacus': one of a100, h100, h200, mi300x"):
        simdevice.configure(machine="abacus")
    with pytest.raises(ValueError, match=r"has no launch, shares\.copy"):
        simdevice.configure(machine={**MACHINE, "launch": None, "shares": {**MACHINE["shares"], "copy": None}})


def test_a_trace_is_a_file_that_a_browser_shows(x, tmp_path):
    x @ x
    simdevice.write_chrome_trace(simdevice.trace(), tmp_path / "trace.json")
    (event,) = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (event["tid"], event["ts"], event["dur"]) == ("sim:0 stream 0", 2.0, PRODUCT)
