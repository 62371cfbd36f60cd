"""Plans count formats of fewer bits: their bytes, the time of encoding and decoding; and choose them where asked to."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

import sherd
from sherd.codecs import codec
from sherd.errors import PolicyError
from sherd.tools.plan.operations import Accesses
from sherd.tools.simulate.cluster import Link, read_cluster
from sherd.tools.simulate.settings import COSTS
from tests.planning.models import FIXED

WIDTH, BLOCKS = 256, 4
SLOW = Link(latency=1e-4, bandwidth=1e7)


def model():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(BLOCKS)))


def planned(mesh, cluster="laptop", **options):
    usual = {"cluster": cluster, "compute_dtype": None, **FIXED, "micro_batch": 4}
    return sherd.plan(model(), mesh, torch.empty(4, WIDTH), **usual | options)


def slow(**changes):
    return replace(read_cluster("laptop"), across=SLOW, within=SLOW, **changes)


def sent(plan):
    return sum(plan.prediction.sent.values())


def test_what_is_sent_is_as_long_as_codecs_make_it():
    numel, times = WIDTH * WIDTH // 2, {"gather": 2, "reduce": 1}  # a gather in forward and one in backward
    flag = {"own": 4, "bf16": 2}  # says that gradients are there; what is encoded has none
    for name, word in product(times, ("own", "bf16", *codec_names())):
        if (name, word) == ("gather", "bf16"):
            continue
        part = {"own": 4 * numel, "bf16": 2 * numel}.get(word) or codec(word).num_bytes(numel)
        rest = 2 * 4 * numel if name == "reduce" else 4 * numel
        flags = flag.get(word if name == "reduce" else "own", 0)
        found = planned(2, **{name: word})
        assert sent(found) == BLOCKS * (times[name] * part + rest + flags), (name, word)


def test_gradients_in_the_order_of_ranks_take_the_bytes_of_a_reduce_scatter_and_a_pass_over_all_contributions():
    fast = replace(read_cluster("laptop"), across=Link(0.0, 1e18), within=Link(0.0, 1e18))
    for options in ({}, {"reduce": "bf16"}, {"placement": "flat"}):
        usual, found = (planned(2, fast, **options, reproducible=each) for each in (False, True))
        assert found.prediction.timeline.peak.nbytes >= usual.prediction.timeline.peak.nbytes
        assert 0 <= sent(usual) - sent(found) <= BLOCKS * 4, "but for the flag of each unit"
        added, had = ([s for s in each.timeline.spans if s.name == "add up"] for each in (found, usual))
        assert len(added) == BLOCKS
        assert not had
        assert found.fully_shard_args["comm_policy"].sums_in_order
        assert "added up in the order of ranks" in str(found)
    assert "order" not in str(usual)


def codec_names():
    return [name for name in COSTS if name != "bf16"]


def test_sums_between_replicas_travel_there_and_back_in_their_format():
    part = codec("int8").num_bytes(WIDTH * WIDTH // 2)  # of a rank alone with its shard: half of what it reduces
    found = planned((2, 1), reduce_replicas="int8")
    assert sent(found) == BLOCKS * 2 * part
    assert "int8 reductions between replicas" in str(found)


def test_the_costs_in_words_are_those_of_codecs():
    values = torch.linspace(-1, 1, 1 << 12)
    for name in codec_names():
        part, error = COSTS[name]
        assert codec(name).num_bytes(1 << 12) / (4 << 12) == pytest.approx(part, rel=0.01), name
        largest = float(codec(name).bound(values).max())
        said = float(error.split("/")[1].split()[0])
        assert largest == pytest.approx(1 / said, rel=0.02), name


def test_operations_in_place_read_and_write():
    values = torch.empty(100, device="meta")
    with Accesses() as seen:
        values.add_(1)
        torch.empty(100, dtype=torch.uint8, device="meta").copy_(values)
        values.view(10, 10)
    assert (seen.num_ops, seen.nbytes) == (2, 800 + 500)


@pytest.mark.parametrize("name", ["laptop", "h100"])
def test_a_step_is_longer_by_encoding_and_decoding_where_links_are_free(name):
    fast = replace(read_cluster(name), across=Link(0.0, 1e18), within=Link(0.0, 1e18))
    usual = planned(2, fast).prediction.timeline.seconds
    for settings in ({"gather": "int8"}, {"reduce": "int8"}, {"gather": "int4"}):
        found = planned(2, fast, **settings)
        assert found.prediction.timeline.seconds > usual, settings
        assert [times < 1 for times in found.speedups.values()] == [True], settings


def test_on_a_slow_link_a_step_is_about_as_much_faster_as_there_are_fewer_bytes():
    for name, word, part in (("gather", "int8", 2 / 3), ("reduce", "bf16", 1 / 3)):
        found = planned(2, slow(), **{name: word})
        assert 1 / found.speedups[name] == pytest.approx(1 - part * (1 - COSTS[word][0]), rel=0.1), (name, word)


def test_formats_are_chosen_only_among_those_that_are_named():
    free = {name: value for name, value in FIXED.items() if name not in ("gather", "reduce", "reduce_replicas")}
    assert planned(2, slow(), **free).settings.formats == {}
    found = planned(2, slow(), **free, formats=("int8", "bf16"))
    assert found.settings.formats == {"gather": "int8", "reduce": "int8"}
    text = str(found)
    assert "int8 gathers: 0.25 of the bytes of float32, error at most largest/250 of a block" in text
    assert "gathers as they are instead of int8 gathers would take" in text
    policy = found.fully_shard_args["comm_policy"]
    assert policy == sherd.CommPolicy(gather="int8", reduce=sherd.Reduction(wire="int8"))
    with pytest.raises(PolicyError, match=r"plan\(formats='int9'\): expected formats of bf16, int8"):
        planned(2, formats=("int9",))


def test_kept_parameters_are_not_gathered_in_a_format():
    with pytest.raises(PolicyError, match="with gather all is sharded; leave it out"):
        planned(2, gather="int8", strategy="zero2", reshard=False)


def test_the_command_plans_the_formats_of_a_config_and_writes_those_it_chose(tmp_path, capsys):
    from sherd.cli.main import main
    from sherd.train.config import Config, read_tree, toml

    given, written = tmp_path / "a.toml", tmp_path / "b.toml"
    given.write_text(toml(Config(layers=2, width=32, heads=2, kv_heads=2, hidden=64, gather="int4")))
    assert main(["plan", str(given), "--as-configured", "--cluster", "laptop", "--ranks", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["gather"] == "int4"
    assert [*told["speedups"]] == ["gather"]
    words = ["--cluster", "laptop", "--ranks", "2", "--reduce", "int8", "--gather", "fp8_e4m3", "--write", str(written)]
    assert main(["plan", str(given), *words]) == 0
    assert "fp8_e4m3 gathers, int8 reductions" in " ".join(capsys.readouterr().out.split())
    config = Config.of(read_tree(str(written)))
    assert (config.gather, config.reduce, config.reduce_replicas) == ("fp8_e4m3", "int8", "same")
