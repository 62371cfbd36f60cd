"""Does the figure for one GPU go its whole way, on a tiny stack without one?"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import cuda
from bench.__main__ import FIGURES, parse
from bench.cuda import AIMS, COMPARED, LLAMA_8B, TINY, Measured, measure_systems, rows_of, shape_for
from bench.models import num_bytes
from bench.peak import MIB
from bench.ranks import Conditions
from bench.rounds import Lap
from tests.forked import answer_of


def measured_on_a_fake_rank():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    return measure_systems(init_device_mesh("cpu", (8,)), replace(TINY, num_layers=1), 2)


def test_every_system_has_peaks_and_laps_and_rows_of_them():
    measured = answer_of(measured_on_a_fake_rank)
    names = [system.name for system in COMPARED]
    assert list(measured.peaks) == list(measured.laps) == names
    for name in names:
        before, whole = measured.peaks[name]
        assert 0 < before <= whole, name
        assert len(measured.laps[name]) == 2
    rows = rows_of(TINY, 8, measured, [])
    assert [row.unit for row in rows] == ["ms", "ms", "MiB", "MiB"]
    assert all(set(row.ratios) == {"sherd", "sherd coalesced", "Flat", "wrapper", "wrapper flat"} for row in rows)


def test_rows_say_size_and_span_and_aim_at_what_torch_takes():
    peaks = {"FSDP2": (3.0 * MIB, 4.0 * MIB), "sherd": (1.5 * MIB, 4.0 * MIB)}
    laps = {"FSDP2": [Lap(10, 4)] * 2, "sherd": [Lap(9, 5)] * 2}
    step, host, backward, whole = rows_of(TINY, 64, Measured(peaks, laps), AIMS)
    assert step.figure == "Llama, 2 layers of width 64, 16 tokens, 64 fake ranks: step"
    assert (step.ratios, host.ratios) == ({"sherd": 0.9}, {"sherd": 1.25})
    assert (backward.ratios, whole.ratios) == ({"sherd": 0.5}, {"sherd": 1.0})
    assert [aim.verdict(row) for row in (step, host) for aim in row.aims[:1]] == ["<= 1: met", "<= 1: missed"]


def test_the_large_stack_is_llama_3_8_b_but_for_grouped_keys_and_layers():
    assert shape_for(Conditions("cuda")) is LLAMA_8B
    assert shape_for(Conditions("cpu")) is TINY
    model = LLAMA_8B.on(torch.device("meta")).build()
    assert len(model.blocks) == 8
    assert num_bytes(model) == 2 * (2 * 128256 * 4096 + 8 * (4 * 4096**2 + 3 * 4096 * 14336 + 2 * 4096) + 4096)


def test_the_figure_is_asked_for_by_name_where_there_is_no_gpu():
    assert FIGURES["cuda"] is cuda.measure
    assert "cuda" not in parse(["--device", "cpu"]).only
    assert parse(["--device", "cpu"]).only == [name for name in FIGURES if name not in ("cuda", "mesh")]
    assert parse(["--device", "cpu", "--only", "cuda"]).only == ["cuda"]
