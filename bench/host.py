"""What does the host pay for each unit? CPU time and Python calls, beside FSDP2 and FSDP1, of a nearly free model."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from . import silent_group
from .calls import narrow_llama, per_unit
from .overhead import MANY, over_plain, runners_of
from .ranks import Conditions, first_ranks, on_fake_ranks
from .rounds import Lap, interleaved, without_collector
from .systems import FLAT, FSDP1_FLAT, FSDP2, SHERD, WRAPPER_FLAT
from .table import Figure, row_of_counts, row_of_differences

NUM_BLOCKS = 12
COMPARED = (FSDP1_FLAT, FSDP2, SHERD, FLAT, WRAPPER_FLAT)


def measure(conditions: Conditions) -> Figure:
    """Of forward and backward, over the plain module's, on 16 ranks whose collectives do nothing."""
    num_rounds = (1 if conditions.quick else 8) * conditions.rounds  # laps are short
    laps, calls = on_fake_ranks(Conditions(), MANY, lap_and_count, num_rounds)
    over = over_plain(laps, MANY)
    per_block = {name: [ms / NUM_BLOCKS for ms in samples] for name, samples in over.items()}
    remark = f"over plain, the root's share included; {num_rounds} rounds"
    return Figure(
        [
            row_of_differences("host time of a unit of nine parameters", "ms CPU", per_block, None, remark),
            row_of_counts("Python calls of the unit", "calls", calls, None, "counted, over plain"),
        ],
        {"laps": laps, "calls": calls},
    )


def lap_and_count(mesh: DeviceMesh, num_rounds: int) -> tuple[dict[str, list[Lap]], dict[str, int]]:
    """On a rank: all systems in turns, and then one after the other."""
    silent_group.register(mesh.device_type)
    silent = first_ranks(mesh, mesh.size(), silent_group.NAME)
    with without_collector():
        runners = runners_of(narrow_llama(NUM_BLOCKS), [(system, MANY) for system in COMPARED], {MANY: silent})
        interleaved(runners, 5)  # the first steps teach them their way
        laps = interleaved(runners, num_rounds)
        return laps, {system.name: per_unit(system, mesh) for system in COMPARED}
