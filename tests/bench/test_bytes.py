"""The bench counts what it says in bytes: two axes on the wire and in memory, a step beside activations, and what a
whole state dict needs beside itself."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from bench.mesh import bytes_of, least_sent
from bench.models import deep_narrow, gpt, num_bytes
from bench.peak import MIB, Held, _held_rows, held_by, peak_of_backward
from bench.state_dict import bytes_of_largest_unit, bytes_on, full_state_dict, peak_beside_result, row_of_ranks
from bench.systems import FLAT, FSDP1, FSDP2, PLAIN, SHERD, WRAPPER, WRAPPER_FLAT, Trainee
from bench.table import Aim
from sherd._torch import imagined_ranks
from sherd.api.placements import PRESETS

WORKLOAD = deep_narrow(1, 4, num_blocks=2)
ABOVE = 0.03
"""Padding and flags, of a model as small as this."""

# In units of all parameters, on 2 replicas of 2 shards: kept between steps, gradients, those of a backward that is not
# the last, optimizer state.
EXPECTED = {
    "ddp": (1, 1, 1, 2),
    "zero1": (1, 1 / 4, 1, 1 / 2),
    "zero2": (1, 1 / 4, 1 / 4, 1 / 2),
    "zero3": (1 / 4, 1 / 4, 1 / 4, 1 / 2),
    "hsdp": (1 / 2, 1 / 2, 1 / 2, 1),
    "hsdp_zero2": (1, 1 / 2, 1 / 2, 1),
    "hfsdp": (1 / 2, 1 / 4, 1 / 2, 1 / 2),
    "zero1_across_zero2_within": (1, 1 / 4, 1 / 2, 1 / 2),
}


def test_a_strategy_sends_the_least_and_keeps_what_it_must():
    for rank in (0, 3):
        with imagined_ranks(4, rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            of_rank = {name: bytes_of(name, mesh, WORKLOAD) for name in PRESETS}
        for name, kept in of_rank.items():
            assert kept.least <= kept.sent <= kept.least * (1 + ABOVE), name
            found = kept.parameters, kept.gradients, kept.unreduced, kept.optimizer
            assert found == pytest.approx(EXPECTED[name], rel=ABOVE), name


def test_the_least_is_what_the_collectives_of_a_strategy_need():
    assert least_sent("ddp", 8, 0, 2, 2) == 2 * 8 * 3 / 4
    assert least_sent("zero3", 8, 2, 1, 4) == (2 * 8 - 2 + 8) * 3 / 4
    assert least_sent("hsdp", 8, 0, 2, 2) == 3 * 8 / 2 + 2 * 4 / 2
    assert least_sent("hfsdp", 8, 0, 2, 2) == least_sent("hsdp", 8, 0, 2, 2)
    assert least_sent("hsdp_zero2", 8, 0, 2, 2) == 2 * 8 / 2 + 2 * 4 / 2


# A step


def test_rows_take_the_largest_rank_and_set_aims_for_the_ratio_and_the_prediction():
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


def test_the_plain_module_needs_its_weights_twice_and_sherd_what_was_predicted(world):
    for plain, weights, held in world(2).run(held_on_a_rank):
        assert plain == pytest.approx(2 * weights, rel=0.02)
        assert held["FSDP2"].said is None
        for name in ("sherd", "Flat"):
            assert held[name].nbytes == pytest.approx(held[name].said, rel=0.02)
            assert held[name].nbytes > weights  # shards and their gradients alone


@pytest.mark.slow
def test_with_activations_a_step_peaks_no_higher_than_torchs():
    workload = gpt(2, 128, num_blocks=1)
    with imagined_ranks(8):
        mesh = init_device_mesh("cpu", (8,))
        peaks = {
            system: peak_of_backward(Trainee(system, workload, mesh)) for system in (FSDP1, FSDP2, SHERD, FLAT, WRAPPER)
        }
    assert {peaks[SHERD], peaks[FLAT], peaks[WRAPPER]} == {peaks[SHERD]}
    assert peaks[SHERD] <= min(peaks[FSDP1], peaks[FSDP2])


# A state dict


def state_dicts_on_a_rank():
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for system in (FSDP1, WRAPPER, WRAPPER_FLAT):
        trainee = Trainee(system, WORKLOAD, mesh)
        beside = peak_beside_result(trainee)
        found[system.name] = beside, bytes_on(trainee.device, full_state_dict(trainee).values())
    return found


@pytest.mark.filterwarnings("ignore:FSDP.state_dict_type:FutureWarning")
def test_beside_a_full_state_dict_there_is_at_most_the_largest_unit(world):
    first, second = world(2).run(state_dicts_on_a_rank)
    model = WORKLOAD.build()
    for name in first:
        for beside, nbytes, is_first in [(*first[name], True), (*second[name], False)]:
            assert nbytes == (num_bytes(model) if is_first else 0), name
            assert 0 < beside <= 1.02 * bytes_of_largest_unit(model), name


def test_the_largest_unit_is_a_block_or_what_is_in_none_and_a_result_counts_each_storage_once():
    model = WORKLOAD.build()
    outside = num_bytes(model.embed) + num_bytes(model.head) + num_bytes(model.norm)
    assert bytes_of_largest_unit(model) == outside > num_bytes(model.blocks[0])
    model.head = torch.nn.Identity()
    assert bytes_of_largest_unit(model) == num_bytes(model.blocks[0])
    x = torch.zeros(256)
    assert bytes_on(torch.device("cpu"), [x, x[:7], x.view(2, -1), "no tensor", torch.zeros(3)]) == 1024 + 12
    assert bytes_on(torch.device("cuda"), [x]) == 0


def test_the_row_takes_the_largest_rank_and_holds_both_wrappers_to_one_unit():
    row = row_of_ranks("GPT", [{"FSDP1": 2.0, "wrapper": 1.0}, {"FSDP1": 1.0, "wrapper": 1.1}])
    assert row.values == {"FSDP1": 2.0, "wrapper": 1.1}
    assert row.ratios == {"wrapper": pytest.approx(0.55)}
    assert [aim.verdict(row) for aim in row.aims] == ["<= 1: missed", "<= 1: not measured"]
