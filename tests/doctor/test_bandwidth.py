"""`sherd doctor --bandwidth` measures what ranks compute and move, and writes a cluster file that reads."""

import os
import socket
from itertools import islice
from unittest import mock

import pytest
import torch.distributed as dist

from sherd.tools.doctor import bandwidth, operations
from sherd.tools.doctor.findings import FAILURE
from sherd.tools.simulate.cluster import cluster_toml, read_cluster
from sherd.tools.simulate.costs import NodeRanks, collective_seconds, op_seconds, waited
from sherd.tools.simulate.work import Op, OpKind
from tests.doctor.started import findings_of
from tests.support.commands import refusal
from tests.support.ranks.forked import sherd as be_sherd

PROBES = operations.probes


def few(dtype):
    """Of the models that train while operations are timed, some small ones."""
    return islice(PROBES(dtype), 0, 60, 24)


def be_quick(words, environment):
    """Be the program sherd, as which fewer operations are timed, and steps of models for a shorter time."""
    shorter = mock.patch.multiple(bandwidth, OWN_S=0.5, STEPS_S=0.5, LEAST_TURNS=2)
    with mock.patch.object(operations, "probes", few), shorter:
        be_sherd(words, environment)


FACTORY = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.layers = nn.ModuleList(nn.Conv1d(24, 24, 7, padding=3) for _ in range(6))
    def forward(self, x):
        x = self.words(x).transpose(1, 2)
        for layer in self.layers:
            x = layer(x).relu()
        return x.transpose(1, 2)
def make():
    return Model(), torch.zeros(3, 100, dtype=torch.int64)
def fails():
    return 3
"""


@pytest.mark.slow
def test_the_command_writes_a_file_that_reads_and_whose_figures_fit_together(tmp_path):
    (tmp_path / "made.py").write_text(FACTORY)
    words = "doctor --bandwidth box.toml --ranks 2 --json --model made.py:make --samples 1,4"
    findings = findings_of(tmp_path, be_quick, words)
    cluster = read_cluster(tmp_path / "box.toml")
    device = cluster.device
    assert (cluster.name, cluster.devices_per_node, device.overlaps, device.host) == ("box", 2, False, 0)
    assert all(measured > 0 for measured in (*device.flops.values(), device.bandwidth, device.launch))
    assert {*device.flops} == {"bfloat16", "float32"}
    assert 0.01 < device.attention_share < 10
    assert all(0.01 < share <= 1 for share in device.shares.values())
    assert device.flops["float32"] > device.bandwidth / 10, "a product computes more than a sum does"
    assert device.launch < 2 * 1024**3 / device.flops["float32"], "a small operation takes less than a large one"
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    for name in ("mm", "addmm", "add", "gelu_backward", attention, f"{attention}_backward"):
        for dtype in ("float32", "bfloat16"):
            assert all(each.seconds > 0 and each.nbytes > 0 for each in device.timed[f"{name}.{dtype}"])
    assert {each.depth for each in device.timed["mm.float32"]} >= {64}
    own = [each for each in device.timed["convolution.float32"] if each.depth == 24 * 7]
    assert {round(each.flops / (2 * 100 * 24 * 24 * 7), 3) for each in own} == {3, 12}, "of 3 samples, and of 12"
    for each in own:
        alike = Op(OpKind.MATMUL, "aten.convolution", each.flops, each.nbytes, "float32", each.depth)
        assert op_seconds(alike, device) == pytest.approx(each.seconds, rel=0.01)
    assert cluster.optimizer.latency > 0
    assert device.library_bytes < device.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    assert cluster.within.latency > 0
    assert 0 < cluster.within.bandwidth <= device.bandwidth
    small, large = (collective_seconds("all-gather", nbytes, NodeRanks(2, 2), cluster) for nbytes in (2**10, 2**26))
    assert small < large
    assert cluster.sources["device"].startswith("measured by sherd doctor --bandwidth on 20")
    assert cluster.sources["across"].startswith("estimate: not measured, as there is one host")
    assert [each for each in findings if each["verdict"] == FAILURE] == []
    told = {each["name"]: each["value"] for each in findings if each["section"] == "bandwidth"}
    assert told["written"] == "box.toml"
    assert f'device.bandwidth = "{told["device.bandwidth"]}"' in (tmp_path / "box.toml").read_text()
    assert not [each for each in findings if each["section"] == "self-test"]


def measured_on(hosts):
    """What ranks measure that believe to be on these hosts."""
    here = mock.patch.object(socket, "gethostname", return_value=hosts[dist.get_rank()])
    none = mock.patch.object(bandwidth, "timed_operations", return_value={})
    with here, none, mock.patch.object(bandwidth, "MEASURE_S", 0.001):
        return cluster_toml(bandwidth.measured("box"))


@pytest.mark.parametrize(
    ("hosts", "per_node", "estimated"),
    [("aabb", 2, []), ("aaab", 3, ["within", "across"]), ("ab", 1, ["within"]), ("a", 1, ["within", "across"])],
)
def test_hosts_are_told_apart_and_what_cannot_be_measured_is_an_estimate(world, tmp_path, hosts, per_node, estimated):
    files = world(len(hosts)).run(measured_on, hosts)
    assert len(set(files)) == 1, "all ranks agree"
    (tmp_path / "box.toml").write_text(files[0])
    cluster = read_cluster(tmp_path / "box.toml")
    assert cluster.devices_per_node == per_node
    assert [link for link in ("within", "across") if cluster.sources[link].startswith("estimate")] == estimated


def link_over(launch, latency, rate):
    """The link that is found where collectives take what the formula says."""
    exact = {
        "_slowest": lambda call, at: launch + latency + call / 2 / rate,
        "collective": lambda transport, kind, size, number: size,
    }
    with mock.patch.multiple(bandwidth, **exact):
        return bandwidth._link([[0, 1]], launch)


def test_latency_and_bandwidth_are_found_again(world):
    for link in world(2).run(link_over, 2e-6, 3e-5, 4e9):
        assert (link.latency, link.bandwidth) == (pytest.approx(3e-5), pytest.approx(4e9))


def test_large_collectives_decide_on_bandwidth_although_small_ones_are_noisy():
    sizes, noise = [2.0**13, 2.0**15, 2.0**19, 2.0**21, 2.0**23], [1.1, 0.9, 1.1, 1.0, 1.0]
    link = bandwidth._line(sizes, [by * (1e-3 + size / 1e9) for by, size in zip(noise, sizes, strict=True)])
    assert (link.latency, link.bandwidth) == (pytest.approx(1e-3, rel=0.05), pytest.approx(1e9, rel=0.05))
    for took in ([1e-3, 1e-3], [2e-3, 1e-3]):
        level = bandwidth._line([1e6, 2e6], took)
        assert level.latency > 0, took
        assert 0 < level.bandwidth < 1e12, took


def test_what_equal_collectives_take_more_behind_more_compute_is_skew():
    soon, late = [(1e-4, 5e-4), (4e-4, 2e-3), (1e-3, 7e-3)], [1.6e-3, 6.4e-3, 16e-3]
    for skew, noise in ((3e-4, 0.0), (0.0, -1e-4)):
        later = [
            (more, took + noise + waited(more, skew) - waited(less, skew))
            for (less, took), more in zip(soon, late, strict=True)
        ]
        assert bandwidth._skew(soon, later) == pytest.approx(skew)


def in_turns():
    """The order of two calls, and the seconds of each. The second rank is slower; others disturb two runs of three."""
    ran = []

    def take(name, seconds):
        ran.append(name)
        disturbed = ran.count(name) % 3 > 0
        return seconds * (1 + dist.get_rank()) * (10 if disturbed else 1)

    with mock.patch.multiple(bandwidth, STEPS_S=0.0, _seconds=lambda call, at: call()):
        return bandwidth._in_turns([lambda: take("a", 0.001), lambda: take("b", 0.01)]), ran


def test_calls_run_in_turns_and_the_lower_quartile_of_the_slowest_rank_counts(world):
    for seconds, ran in world(2).run(in_turns):
        assert ran == ["a", "b"] * (1 + bandwidth.LEAST_TURNS)
        assert seconds == [0.002, 0.02]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.toml").write_text("mine")
    for file in ("there.toml", "no/box.toml"):
        said = refusal(capsys, "doctor", "--bandwidth", file)
        assert said.startswith(f"sherd doctor: --bandwidth {file}: it is there, or its folder is not;")
    assert (tmp_path / "there.toml").read_text() == "mine"
