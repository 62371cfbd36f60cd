"""`python -m bench --only muon` counts what docs/do/optimizers.md says, and notices losses that differ."""

import pytest

from bench.models import deep_narrow, num_bytes
from bench.muon import OURS, Counts, OnRank, counted_on_made_up_ranks, differences, rows_of_counts, rows_of_time
from bench.rounds import Lap
from bench.steps import Training

WORKLOAD = deep_narrow(1, 4, num_blocks=2)
MATRIX, NUM_MATRICES = 64 * 64, 8


def test_ranks_divide_the_products_and_send_shards_in_the_dtype_of_products():
    ranks = counted_on_made_up_ranks(WORKLOAD, 4, ("sherd", "Shard", "Owned"))
    products = 15 * 2 * 64**3 * NUM_MATRICES / 1e9
    both_ways = 2 * (2 * MATRIX * NUM_MATRICES / 4) * 3 / 4 / num_bytes(WORKLOAD.build())
    for name, sent, collectives in (("sherd", both_ways / 2, 1), ("Shard", both_ways, 2), ("Owned", 0, 0)):
        for counts in (rank[name] for rank in ranks):
            assert counts.gflop == pytest.approx(products / 4), name
            assert counts.sent == pytest.approx(sent, rel=0.01), name
            assert counts.collectives == collectives, name
    most = [row.values["Shard"] for row in rows_of_counts("4 fake ranks", ranks)]
    assert most == [pytest.approx(products / 4), 2, pytest.approx(both_ways, rel=0.01)]


def test_times_are_held_against_a_share_of_plain_muons_and_bare_bytes():
    names = ("FSDP2", "AdamW", *OURS)
    laps = {name: [Lap(120.0, 50.0)] for name in names} | {"DDP": [Lap(180.0, 90.0)], "wire": [Lap(5.0, 1.0)]}
    losses = {name: [8.0, 4.0] for name in (*names, "DDP")} | {"FSDP2": [8.0, 4.4]}
    steps = Training({}, {name: taken for name, taken in laps.items() if name != "wire"}, losses)
    counts = dict.fromkeys(OURS, Counts(1, 2, 0.5)) | {"sherd": Counts(1, 1, 0.25), "Owned": Counts(1, 0, 0)}
    rows = {row.figure: row for row in rows_of_time([OnRank(Training({}, laps, losses), steps, counts)] * 2)}
    over = rows["Muon: optimizer step, of its bound"].values
    assert (over["Shard"], over["sherd"], over["Owned"]) == (120 / (90 + 10), 120 / (90 + 5), 120 / 90)
    assert rows["Muon: optimizer step"].ratios == dict.fromkeys(OURS, 1)
    assert differences([steps]) == dict.fromkeys(OURS, 0) | {"FSDP2": pytest.approx(0.1)}
