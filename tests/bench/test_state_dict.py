"""Is what a whole state dict needs beside itself counted, in units of the largest unit?"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from bench.models import deep_narrow, num_bytes
from bench.state_dict import bytes_of_largest_unit, bytes_on, full_state_dict, peak_beside_result, row_of_ranks
from bench.systems import FSDP1, WRAPPER, WRAPPER_FLAT, Trainee

WORKLOAD = deep_narrow(1, 4, num_blocks=2)


def state_dicts_on_a_rank():
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for system in (FSDP1, WRAPPER, WRAPPER_FLAT):
        trainee = Trainee(system, WORKLOAD, mesh)
        beside = peak_beside_result(trainee)
        found[system.name] = beside, bytes_on(trainee.device, full_state_dict(trainee).values())
    return found


@pytest.mark.filterwarnings("ignore:FSDP.state_dict_type:FutureWarning")
def test_beside_a_full_state_dict_there_is_at_most_the_largest_unit(world) -> None:
    first, second = world(2).run(state_dicts_on_a_rank)
    model = WORKLOAD.build()
    for name in first:
        for beside, nbytes, is_first in [(*first[name], True), (*second[name], False)]:
            assert nbytes == (num_bytes(model) if is_first else 0), name
            assert 0 < beside <= 1.02 * bytes_of_largest_unit(model), name


def test_the_largest_unit_is_a_block_or_what_is_in_none() -> None:
    model = WORKLOAD.build()
    outside = num_bytes(model.embed) + num_bytes(model.head) + num_bytes(model.norm)
    assert bytes_of_largest_unit(model) == outside > num_bytes(model.blocks[0])
    model.head = torch.nn.Identity()
    assert bytes_of_largest_unit(model) == num_bytes(model.blocks[0])


def test_a_result_counts_each_storage_once_and_only_where_it_is_asked_for() -> None:
    x = torch.zeros(256)
    assert bytes_on(torch.device("cpu"), [x, x[:7], x.view(2, -1), "no tensor", torch.zeros(3)]) == 1024 + 12
    assert bytes_on(torch.device("cuda"), [x]) == 0


def test_the_row_takes_the_largest_rank_and_holds_both_wrappers_to_one_unit() -> None:
    row = row_of_ranks("GPT", [{"FSDP1": 2.0, "wrapper": 1.0}, {"FSDP1": 1.0, "wrapper": 1.1}])
    assert row.values == {"FSDP1": 2.0, "wrapper": 1.1}
    assert row.ratios == {"wrapper": pytest.approx(0.55)}
    assert [aim.verdict(row) for aim in row.aims] == ["<= 1: missed", "<= 1: not measured"]
