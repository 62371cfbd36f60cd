"""Is what a step needs beside activations counted and held against the schedule's prediction?"""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from bench.models import gpt
from bench.peak import MIB, Held, _held_rows, held_by, peak_of_backward
from bench.systems import FLAT, FSDP1, FSDP2, PLAIN, SHERD, WRAPPER, Trainee
from bench.table import Aim
from sherd._torch import imagined_ranks


def test_rows_take_the_largest_rank_and_set_aims_for_the_ratio_and_the_prediction() -> None:
    ranks = [
        {"FSDP2": Held(100 * MIB), "sherd": Held(91 * MIB, 90 * MIB), "Flat": Held(80 * MIB, 80 * MIB, 7 * MIB)},
        {"FSDP2": Held(100 * MIB), "sherd": Held(92 * MIB, 92 * MIB), "Flat": Held(88 * MIB, 80 * MIB, 9 * MIB)},
    ]
    held, off = _held_rows("GPT", ranks)
    assert held.values == {"FSDP2": 100, "sherd": 92, "Flat": 88}
    assert held.ratios == {"sherd": 0.92, "Flat": 0.88}
    assert [aim.verdict(held) for aim in held.aims] == ["<= 0.9: met", "<= 0.9: missed"]
    assert "9 MiB staged" in held.remark
    assert off.values == {"sherd": 0.0, "Flat": pytest.approx(10)}
    assert off.aims == [Aim(2, of="sherd"), Aim(2, of="Flat")]


def held_on_a_rank():
    mesh = init_device_mesh("cpu", (2,))
    workload = gpt(1, 8, num_blocks=1)
    plain = peak_of_backward(Trainee(PLAIN, workload, mesh))
    systems = {system.name: held_by(Trainee(system, workload, mesh), 0) for system in (FSDP2, SHERD, FLAT)}
    weights = sum(parameter.nbytes for parameter in workload.build().parameters())
    return plain, weights, systems


def test_the_plain_module_needs_its_weights_twice_and_sherd_what_was_predicted(world) -> None:
    for plain, weights, held in world(2).run(held_on_a_rank):
        assert plain == pytest.approx(2 * weights, rel=0.02)
        assert held["FSDP2"].said is None
        for name in ("sherd", "Flat"):
            assert held[name].nbytes == pytest.approx(held[name].said, rel=0.02)
            assert held[name].nbytes > weights  # shards and their gradients alone


def test_with_activations_a_step_peaks_below_torchs_by_the_embedding() -> None:
    """Where backward begins: without the embedding, which backward does not read."""
    workload = gpt(2, 128, num_blocks=2)
    with imagined_ranks(8):
        mesh = init_device_mesh("cpu", (8,))
        peaks = {
            system: peak_of_backward(Trainee(system, workload, mesh)) for system in (FSDP1, FSDP2, SHERD, FLAT, WRAPPER)
        }
    embedding = 4 * 4096 * 512
    assert {peaks[SHERD], peaks[FLAT], peaks[WRAPPER]} == {peaks[SHERD]}
    for theirs in (FSDP1, FSDP2):
        assert peaks[SHERD] <= peaks[theirs] - embedding
