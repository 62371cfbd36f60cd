"""`sherd doctor --bandwidth` measures an accelerator, with times between events, and writes a cluster that reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

from sherd.tools.doctor import bandwidth, ranks
from sherd.tools.simulate.cluster import cluster_toml, read_cluster
from tests.gpu.devices import Accelerator

SMALL = (64, 16, (1, 1, 16, 16))


@pytest.fixture
def _fast(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device computes on one core, and its events tell no time."""
    if accelerator.kind == "cuda":
        return
    monkeypatch.setattr(bandwidth, "ON_DEVICE", SMALL)
    monkeypatch.setattr(ranks, "MEASURE_S", 0.0)


@pytest.mark.usefixtures("_fast")
def test_an_accelerator_is_measured(alone: DeviceMesh, accelerator: Accelerator, tmp_path: Path) -> None:
    file = tmp_path / "box.toml"
    file.write_text(cluster_toml(bandwidth.measured("box")))
    cluster = read_cluster(file)
    device = cluster.device
    assert {*device.flops} == {"bfloat16", "float16", "float32", "tfloat32"}
    assert device.overlaps
    assert device.host > 0
    assert device.library_bytes < device.memory
    assert cluster.sources["within"].startswith("estimate: not measured")
    assert cluster.from_host.bandwidth > 0
    assert cluster.host_bandwidth > 0
    if accelerator.kind == "cuda":
        assert device.flops["bfloat16"] > device.flops["float32"]
        assert device.bandwidth > 2 * cluster.to_host.bandwidth
        assert device.launch < 2 * 8192**3 / device.flops["float32"]
