"""`sherd doctor --bandwidth` measures what ranks compute and move, and writes a cluster file that reads."""

import os
import socket
from unittest import mock

import pytest
import torch.distributed as dist

from sherd.tools.doctor import bandwidth, ranks
from sherd.tools.doctor.findings import FAILURE
from sherd.tools.simulate.cluster import cluster_toml, read_cluster
from sherd.tools.simulate.costs import NodeRanks, collective_seconds
from tests.doctor.started import findings_of
from tests.support.commands import refusal
from tests.support.ranks.forked import sherd as be_sherd

QUICKLY = mock.patch.object(ranks, "MEASURE_S", 0.001)


@pytest.mark.slow
def test_the_command_writes_a_file_that_reads_and_whose_figures_fit_together(tmp_path):
    findings = findings_of(tmp_path, be_sherd, "doctor --bandwidth box.toml --ranks 2 --json")
    cluster = read_cluster(tmp_path / "box.toml")
    device = cluster.device
    assert (cluster.name, cluster.devices_per_node, device.overlaps, device.host) == ("box", 2, False, 0)
    assert all(measured > 0 for measured in (*device.flops.values(), device.bandwidth, device.launch))
    assert {*device.flops} == {"bfloat16", "float32"}
    assert 0.01 < device.attention_share < 10
    assert all(0.01 < share <= 1 for share in device.shares.values())
    assert device.flops["float32"] > device.bandwidth / 10, "a product computes more than a sum does"
    assert device.launch < 2 * 1024**3 / device.flops["float32"], "a small operation takes less than a large one"
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
    """What ranks measure that believe to be on these hosts, with small operations."""
    here = mock.patch.object(socket, "gethostname", return_value=hosts[dist.get_rank()])
    with here, QUICKLY, mock.patch.multiple(bandwidth, ON_CPU=(64, 2**8, (1, 1, 32, 16))):
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


def test_a_disk_is_measured_where_a_folder_is_given(world, tmp_path):
    (file,) = world(1).run(measured_with_disk, str(tmp_path / "scratch"))
    (tmp_path / "box.toml").write_text(file)
    cluster = read_cluster(tmp_path / "box.toml")
    assert cluster.disk.bandwidth > 0
    assert cluster.sources["disk"].endswith(f", in {tmp_path / 'scratch'}")
    assert not list((tmp_path / "scratch").iterdir())
    assert cluster.from_host is None, "a CPU has no link to itself"


def measured_with_disk(folder):
    with QUICKLY, mock.patch.multiple(bandwidth, ON_CPU=(64, 2**8, (1, 1, 32, 16)), ON_DISK=(2**12, 2**16)):
        return cluster_toml(bandwidth.measured("box", folder))


def link_over(launch, latency, rate):
    """The link that is found where collectives take what the formula says."""
    exact = {
        "slowest": lambda call, at: launch + latency + call / 2 / rate,
        "collective": lambda transport, kind, size, number: size,
    }
    with mock.patch.multiple(bandwidth, **exact):
        return bandwidth._link([[0, 1]], launch)


def test_latency_and_bandwidth_are_found_again(world):
    for link in world(2).run(link_over, 2e-6, 3e-5, 4e9):
        assert (link.latency, link.bandwidth) == (pytest.approx(3e-5), pytest.approx(4e9))


def test_large_collectives_decide_on_bandwidth_although_small_ones_are_noisy():
    sizes, noise = [2.0**13, 2.0**15, 2.0**19, 2.0**21, 2.0**23], [1.1, 0.9, 1.1, 1.0, 1.0]
    link = bandwidth.line_through(sizes, [by * (1e-3 + size / 1e9) for by, size in zip(noise, sizes, strict=True)])
    assert (link.latency, link.bandwidth) == (pytest.approx(1e-3, rel=0.05), pytest.approx(1e9, rel=0.05))
    for took in ([1e-3, 1e-3], [2e-3, 1e-3]):
        level = bandwidth.line_through([1e6, 2e6], took)
        assert level.latency > 0, took
        assert 0 < level.bandwidth < 1e12, took


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.toml").write_text("mine")
    for file in ("there.toml", "no/box.toml"):
        said = refusal(capsys, "doctor", "--bandwidth", file)
        assert said.startswith(f"sherd doctor: --bandwidth {file}: it is there, or its folder is not;")
    assert (tmp_path / "there.toml").read_text() == "mine"
