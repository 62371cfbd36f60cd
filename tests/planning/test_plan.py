"""A plan says what a training takes, chooses settings that run, and refuses what cannot be planned."""

import re
import textwrap
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import sherd
from sherd._torch import imagined_ranks
from sherd.engine import Unit
from sherd.errors import ClusterError, ModuleError, PolicyError, StateError
from sherd.memory.report import memory_report
from sherd.policy import Disk
from sherd.schedule.moments import MemoryKind
from sherd.tools.plan.axes import ModelLayout, auto_units
from sherd.tools.plan.plan import plan
from sherd.tools.plan.planner import FEW, MORE, MOST_PLAYED, Planner, RoughPlanner, Training
from sherd.tools.simulate import sharded
from sherd.tools.simulate.cluster import Link, read_cluster
from sherd.tools.simulate.settings import Mesh, Settings
from sherd.tools.simulate.sharded import OPTIMIZERS
from sherd.train.config import Config, InputError
from sherd.train.models import Decoder
from tests.planning.models import FIXED, Calls, next_token
from tests.support.meshes import mesh_of

GIB = 1 << 30
ENGINE = {kind.value for kind in MemoryKind} - {MemoryKind.OPTIMIZER.value}


def decoder(layers=6, width=256):
    with torch.device("meta"):
        return Decoder(Config(layers=layers, width=width, heads=4, kv_heads=4, hidden=2 * width, tied=False))


def tokens(samples=2, length=64):
    return torch.zeros(samples, length, dtype=torch.int64)


def shard_as(found):
    """Shards the model as a plan says, on its mesh."""
    model, mesh = decoder(), found.settings.mesh
    shape = (mesh.shard,) if mesh.replicate == 1 else (mesh.replicate, mesh.shard)
    return auto_units(model, mesh=mesh_of(shape), **found.fully_shard_args)


def made(model=None, mesh=(1, 8), length=64, **options):
    return plan(model or decoder(), mesh, tokens(length=length), **{"loss": next_token, **FIXED, **options})


@pytest.mark.pairs
@pytest.mark.parametrize("mesh", [(1, 8), (2, 4)])
@pytest.mark.parametrize("placement", ["shard", "flat"])
@pytest.mark.parametrize("reshard", [True, False])
def test_the_engines_buffers_are_those_that_the_memory_report_predicts(mesh, placement, reshard):
    # On a CPU both play the schedule without streams. The report guesses in which order gradients arrive, on the safe
    # side.
    found = made(mesh=mesh, placement=placement, reshard=reshard, cluster="laptop", compute_dtype=None)
    with imagined_ranks(8):
        report = memory_report(shard_as(found))
    most = max(accumulate(change.nbytes for change in found.timeline.changes if change.kind in ENGINE))
    assert most <= report.predicted_peak <= 1.02 * most


def test_checkpointing_and_offload_and_smaller_batches_take_less():
    usual = made(decoder(width=1024), length=2048)
    for settings in ({"checkpointing": True}, {"offload": True}, {"offload": "state"}, {"micro_batch": 1}):
        other = made(decoder(width=1024), length=2048, **settings)
        assert other.prediction.timeline.peak.nbytes < usual.prediction.timeline.peak.nbytes, settings
    assert usual.prediction.timeline.peak.by_kind["shards"] > 0
    assert "shards" not in made(offload=True).prediction.timeline.peak.by_kind


def test_offloaded_shards_gradients_and_state_are_counted_in_host_memory_as_they_are_held_there():
    """Pinned memory comes in powers of two; gradients of a further micro-batch lie beside those that are there."""
    model, usual = decoder(), {name: value for name, value in FIXED.items() if name != "offload"}
    for samples, num_gradients in ((16, 1), (32, 2)):
        found = plan(model, {"dp": 8}, tokens(), loss=next_token, samples=samples, offload=True, **usual)
        with imagined_ranks(8):
            groups = [weights.group for unit in Unit.below(shard_as(found)) for weights in unit.weights]
        states = 2 * sum(group.shard_buffer.nbytes for group in groups)
        pinned = sum(1 << (group.shard_buffer.nbytes - 1).bit_length() for group in groups)
        scalars, flags = 4 * len([*model.parameters()]), 4 * len([*model.parameters()])
        least = states + (1 + num_gradients) * pinned
        assert least <= found.prediction.host_bytes <= least + scalars + num_gradients * flags, samples
        assert found.prediction.outcome.host_bytes == 8 * found.prediction.host_bytes


@mock.patch.object(sharded, "CHUNK_NUMEL", 1 << 12)
def test_more_of_the_state_on_the_host_takes_less_of_the_device_and_longer():
    for word in ("state", "masters", "step", "everything"):
        plans = [made(decoder(width=256), offload=f"{word}:{share}").prediction for share in (0, 0.25, 0.5, 0.75, 1)]
        peaks, seconds = [each.timeline.peak.nbytes for each in plans], [each.timeline.seconds for each in plans]
        assert peaks == sorted(set(peaks), reverse=True), word
        assert seconds == sorted(seconds), word
        assert [each.host_bytes for each in plans] == sorted(each.host_bytes for each in plans), word


def test_state_on_a_disk_is_counted_there():
    cluster = replace(read_cluster("h100"), disk=Link(1e-4, 1e9))
    on_host, on_disk = (made(offload=f"masters{at}", cluster=cluster).prediction for at in ("", "@/scratch"))
    rounding = {"rounding of pinned memory", "temporaries"}
    assert on_disk.on_disk == sum(each for kind, each in on_host.in_host.items() if kind not in rounding)
    assert (on_disk.host_bytes, on_host.on_disk) == (0, 0)
    assert on_disk.timeline.seconds > on_host.timeline.seconds
    assert on_disk.timeline.peak == replace(on_host.timeline.peak, time=on_disk.timeline.peak.time)


def test_everything_on_a_disk_leaves_the_host_gradients_and_two_groups_that_are_read():
    cluster = replace(read_cluster("h100"), disk=Link(1e-4, 1e9))
    on_host, on_disk = (made(offload=f"everything{at}", cluster=cluster) for at in ("", "@/scratch"))
    ours, theirs = on_disk.prediction, on_host.prediction
    assert ours.on_disk == 3 * theirs.in_host["shards"], "with two moments"
    assert not {"shards", "optimizer state"} & ours.in_host.keys()
    assert ours.in_host["gradients"] == theirs.in_host["gradients"]
    assert 0 < ours.in_host["state in flight"] < theirs.in_host["shards"]
    assert ours.timeline.seconds > theirs.timeline.seconds
    assert ours.timeline.peak == replace(theirs.timeline.peak, time=ours.timeline.peak.time)
    assert on_disk.fully_shard_args["offload_policy"].parameters == Disk("/scratch")


def test_nothing_moves_where_device_and_host_share_one_memory():
    cluster = replace(read_cluster("h100"), one_memory=True)
    usual, kept = (made(cluster=cluster, offload=offload) for offload in ("nothing", "everything"))
    assert usual.prediction == kept.prediction
    found = plan(decoder(), 8, tokens(), loss=next_token, cluster=cluster, memory_limit=usual.prediction.driver_bytes)
    assert {each.offload for each in found.found.outcomes} == {"nothing"}


def test_what_is_chosen_fits_and_shards():
    model, limit = decoder(width=1024), 3 * GIB
    options = {"loss": next_token, "samples": 64, "placement": "shard", "prefetch": 1, "offload": False}
    found = plan(model, 8, tokens(4, 2048), memory_limit=limit, **options)
    assert found.fits
    assert found.prediction.driver_bytes <= limit
    assert found.settings.micro_batch * found.settings.micro_batches == 8
    with imagined_ranks(found.settings.mesh.num_ranks):
        shard_as(found)
    # Embedding and head are small beside a block, so that "ends" would be as "auto".
    assert {each.wrapping for each in found.found.outcomes} == {"auto", "pairs", "parts"}
    roomy = plan(model, 8, tokens(4, 2048), **options)
    assert roomy.prediction.timeline.seconds <= found.prediction.timeline.seconds
    assert str(found).count("\n") > 10
    assert found.search.best == 0
    best, prediction = found.search.candidates[0], found.prediction
    assert best.fits
    assert (best.step_seconds, best.peak_bytes) == (prediction.timeline.seconds, prediction.driver_bytes)
    assert len({each.checkpointing for each in found.found.outcomes}) <= 7, "of 6 blocks"


def test_on_a_cpu_nothing_is_saved_in_host_memory():
    usual, kept = (made(cluster="laptop", compute_dtype=None, offload=offload) for offload in (False, True))
    assert usual.prediction == kept.prediction
    limit = usual.prediction.driver_bytes - 4096
    options = {name: value for name, value in FIXED.items() if name != "offload"}
    found = plan(decoder(), (1, 8), tokens(), loss=next_token, cluster="laptop", memory_limit=limit, **options)
    assert "in host memory" not in str(found)


def test_what_does_not_fit_gets_advice_that_fits_and_is_what_the_changed_settings_take():
    settings = {"model": decoder(width=128), "length": 1024, "cluster": "laptop"}
    usual = made(**settings).prediction
    limit = usual.driver_bytes - (4 << 20)
    found = made(**settings, memory_limit=limit)
    assert not found.fits
    assert "what would fit" in str(found)
    assert "too much by" in str(found)
    assert 1 <= len(found.advice) <= 3
    assert all(usual.driver_bytes - each.saves_bytes <= limit for each in found.advice)
    assert [each.costs_seconds for each in found.advice] == sorted(each.costs_seconds for each in found.advice)
    given_shares = {f"{eighth / 8:.0%} of blocks computed again": eighth / 8 for eighth in range(8)}
    told = [(each, given_shares[each.change]) for each in found.advice if each.change in given_shares]
    assert told
    for advice, share in told:
        changed = made(**settings, checkpointing=share).prediction
        assert changed.driver_bytes == usual.driver_bytes - advice.saves_bytes <= limit
        assert changed.timeline.seconds == pytest.approx(usual.timeline.seconds + advice.costs_seconds)


class FixedBatch(nn.Module):
    """A model that adds a state of each sample, and so runs with batches of one size."""

    def __init__(self, samples):
        super().__init__()
        self.first, self.last = nn.Linear(256, 256), nn.Linear(256, 256)
        self.state = nn.Parameter(torch.zeros(samples, 256))

    def forward(self, batch):
        return self.last(self.first(batch).view(*self.state.shape) + self.state)


def test_micro_batches_that_the_model_does_not_run_with_are_neither_chosen_nor_planned():
    for samples in (1, 4):
        found = plan(FixedBatch(samples), 8, torch.ones(samples, 256), samples=64)
        assert found.settings.micro_batch == samples
        assert {each.micro_batch for each in found.found.outcomes} == {samples}
    said = r"^with 8 samples, where the batch given has 4: the model \(FixedBatch\) "
    for settings in ({"micro_batch": 8}, FIXED | {"micro_batch": 8}):
        with pytest.raises(InputError, match=said):
            plan(FixedBatch(4), 8, torch.ones(4, 256), samples=64, **settings)
    with pytest.raises(InputError, match=r"^the model \(FixedBatch\) does not run without values"):
        plan(FixedBatch(4), 8, torch.ones(2, 256), samples=64)


def refuses_flat_and_replicas(model, **arguments):
    if "placement" in arguments or arguments["mesh"].ndim > 1:
        raise PolicyError("only Shard(0), and no replicas")
    sherd.fully_shard(model, **arguments)
    return model


def test_settings_that_cannot_be_sharded_so_are_not_chosen():
    found = plan(decoder(2), 8, tokens(), loss=next_token, samples=64, shard=refuses_flat_and_replicas)
    assert {(each.placement, each.mesh.replicate) for each in found.found.outcomes} == {("shard", 1)}
    assert "flat" not in str(found)
    with pytest.raises(PolicyError, match=r"only Shard\(0\), and no replicas"):
        plan(decoder(2), (2, 4), tokens(), loss=next_token, samples=64, shard=refuses_flat_and_replicas)


def test_other_units_may_be_what_fits():
    with torch.device("meta"):
        model = ReadsFromOutside(False, rows=4_000_000, is_tied=False)
    usual = plan(model, (1, 8), tokens(2, 64), **FIXED)
    found = plan(model, (1, 8), tokens(2, 64), memory_limit=usual.prediction.driver_bytes - (400 << 20), **FIXED)
    assert "embedding and head as units" in [each.change for each in found.advice]


def test_a_limit_that_nothing_fits_is_told():
    libraries = read_cluster("h100").device.library_bytes
    for limit, told in (
        (1, "nothing fits: the driver and libraries alone take 1.80 GiB; raise the limit"),
        (libraries + (1 << 20), "no settings that were tried fit"),
    ):
        assert told in str(made(decoder(2, 64), memory_limit=limit))


def training(layers):
    return Training(
        decoder(layers), lambda size: tokens(size).to("meta"), ModelLayout(next_token), OPTIMIZERS["adamw-fused"]
    )


@pytest.mark.parametrize(
    "settings",
    [
        Settings(Mesh(8)),
        Settings(Mesh(4, 2), checkpointing=True, micro_batch=4),
        Settings(Mesh(8), wrapping="pairs"),
        Settings(Mesh(4, 2), wrapping="parts", checkpointing=True),
        Settings(Mesh(8), wrapping="ends", placement="flat"),
    ],
    ids=str,
)
def test_a_rough_prediction_is_close(settings):
    of_20, h100 = training(20), read_cluster("h100")
    assert FEW < MORE < 20
    exact = Planner(of_20, h100).predict(settings)
    rough = RoughPlanner(of_20, h100).outcome(settings)
    assert rough.seconds == pytest.approx(exact.timeline.seconds, rel=0.02)
    # Without holes between blocks. What is reserved is a multiple of 2 MiB in each pool.
    without_holes = Planner(of_20, h100, is_rough=True).predict(settings).driver_bytes
    assert rough.nbytes == pytest.approx(without_holes, rel=0.02, abs=16 << 20)
    assert without_holes <= exact.driver_bytes


class ReadsFromOutside(nn.Module):
    """A head whose weight is that of the embedding, or one of its own; and blocks of whose parts only weights are
    read."""

    def __init__(self, reads_part, rows=1000, is_tied=True):
        super().__init__()
        self.embedding = nn.Embedding(rows, 64)
        self.head = None if is_tied else nn.Linear(64, rows)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(6))
        self.reads_part = reads_part

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = nn.functional.linear(block[0](x), block[1].weight) if self.reads_part else block(x)
        return nn.functional.linear(x, self.embedding.weight) if self.head is None else self.head(x)


def test_units_whose_parameters_are_read_from_outside_are_not_chosen():
    with torch.device("meta"):
        model, other = ReadsFromOutside(False), ReadsFromOutside(True)
    found = plan(model, 4, tokens(1, 16), cluster="laptop")
    assert {each.wrapping for each in found.found.outcomes} == {"auto", "pairs", "parts"}
    for each, wrapping, said in (
        (model, "ends", r"'ends'\): forward reads embedding\.weight while no module of its unit"),
        (other, "parts", r"'parts'\): forward reads blocks\.0\.1\.weight"),
    ):
        with pytest.raises(PolicyError, match=f"wrapping={said}"):
            made(each, wrapping=wrapping)


def test_a_real_model_is_neither_read_nor_changed():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    found = plan(model, (1, 2), torch.randn(4, 8), **FIXED | {"micro_batch": 4})
    assert found.prediction.samples_per_second > 0
    assert found.prediction.tokens_per_second == 0
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert not hasattr(model, "unshard")


NO_MESH = ("8", (1, 2, 3), None, 8.0, True)
REFUSED = [
    ({"mesh": {"dp": 2, "tp": 0}}, "tp=0: expected 1 or more"),
    ({"mesh": {"dp": 2, "cp": 2}}, "no layout says how this model is laid over cp"),
    ({"replicate_below": -1}, r"^plan\(replicate_below=-1\): expected 0 or more"),
    ({"strategy": "zero2", "offload": True, "reshard": False}, "with offload all is sharded"),
    ({"checkpointing": 1.5}, "the share of blocks, 0 to 1"),
    ({"mesh": 0}, "mesh"),
    ({"mesh": (2, 0)}, "mesh"),
    ({"mesh": {"xp": 2}}, r"^plan\(mesh=\.\.\.\): 'xp' is no axis"),
    ({"compute_dtype": "bf16"}, r"^plan\(compute_dtype='bf16'\): expected a torch\.dtype or None"),
    ({"compute_dtype": torch.int32}, r"^plan\(compute_dtype=torch\.int32\): expected a floating"),
    ({"shard": 3}, r"^plan\(shard=3\): expected a function"),
    ({"loss": 3}, r"^plan\(loss=3\): expected a function"),
    ({"shard": None}, r"^plan\(shard=None\): expected a function"),
    ({"shard": lambda model, **_: 3}, r"^plan\(shard=\.\.\.\): it returned int; expected the model"),
    ({"cluster": 3}, r"^plan\(cluster=3\): expected the name"),
    ({"optimizer": ["sgd"]}, r"^plan\(optimizer=\['sgd'\]\): expected one of"),
    ({"parallelize": {"tp": 1}}, r"^plan\(parallelize=\{'tp': 1\}\): expected a function"),
    ({"parallelize": [1]}, r"^plan\(parallelize=\[1\]\): expected a dict of functions by axes"),
    ({"strategy": "zero4"}, r"^plan\(strategy='zero4'\): expected one of auto, zero3, fsdp"),
    ({"strategy": "zero2"}, r"^plan\(reshard=True\): by the strategy zero2 parameters are kept"),
    ({"strategy": "hsdp"}, r"^plan\(strategy='hsdp'\): it has replicas"),
    ({"recompute": "full"}, r"^plan\(recompute='full'\): without checkpointing nothing is computed"),
    ({"samples": 9}, "8 ranks do not divide it"),
    ({"micro_batch": 3}, "does not divide the 2 samples"),
    ({"placement": "rows"}, "expected one of shard, flat, whole"),
    ({"wrapping": "triples"}, "expected one of auto, pairs, parts, ends"),
    ({"model": nn.Embedding(4, 4), "wrapping": "pairs"}, "is for repeated blocks"),
    ({"wrapping": "pairs", "shard": sherd.fully_shard}, "the units are made by `shard`"),
    (
        {"offload": "half"},
        r"^plan\(offload='half'\): expected one of nothing, state, masters, step, everything, activations; ",
    ),
    ({"offload": "state:2"}, "expected one of nothing, state"),
    ({"offload": "nothing@/scratch"}, "expected one of nothing, state"),
    ({"offload": "activations:0.5@/scratch"}, "expected one of nothing, state"),
    ({"optimizer": "muon", "step_in_backward": True}, r"^plan\(step_in_backward=True\): of muon the step after it"),
    ({"offload": "state@/scratch"}, r"^plan\(offload='state@/scratch'\): the cluster's file has no \[disk\]"),
    ({"offload": "masters", "compute_dtype": None}, "masters are of weights that compute in bfloat16"),
    ({"offload": "step", "optimizer": "muon"}, "of muon only state elsewhere is planned"),
    ({"prefetch": -1}, "prefetch"),
    ({"depth": 2}, "no setting 'depth'"),
    ({"optimizer": "lion"}, "adamw-fused"),
    ({"memory_limit": 0}, "memory_limit"),
    ({"parallelize": {"pp": print}}, r"^plan\(parallelize=\{'pp': \.\.\.\}\): expected the axes 'cp' and 'tp'"),
    *(({"mesh": mesh}, rf"^plan\(mesh={re.escape(repr(mesh))}\): expected the number of") for mesh in NO_MESH),
]


def test_what_cannot_be_planned_is_refused_in_words():
    for options, says in REFUSED:
        with pytest.raises(PolicyError, match=says) as raised:
            made(**options)
        assert "\n" not in str(raised.value), options
    with pytest.raises(PolicyError, match=r"expected the number of ranks, \(replicas, shards\), or"):
        made(mesh="8")
    with pytest.raises(ModuleError, match=r"got function; call it: plan\(decoder\(\), \.\.\.\)"):
        plan(decoder, 2, tokens())
    with pytest.raises(ModuleError, match="got type"):
        made(nn.Linear)
    with pytest.raises(ClusterError, match="did you mean"):
        made(cluster="h1000")
    with pytest.raises(InputError, match=r"^shard raised TypeError: .* unexpected keyword argument 'mesh'"):
        made(shard=lambda model: model)
    with pytest.raises(PolicyError, match="first dim is samples"):
        plan(decoder(), 8, [1, 2])
    deciding = nn.Sequential(nn.Linear(8, 8), Calls(lambda x: x if x.sum().item() > 0 else -x))
    with pytest.raises(InputError, match=r"^1 \(Calls\) does not run without values"):
        plan(deciding, (1, 2), torch.randn(2, 8), **FIXED)
    with imagined_ranks(2), pytest.raises(StateError, match="before init_process_group"):
        made()


def test_strategies_have_their_usual_names():
    full = sherd.ShardingStrategy.FULL_SHARD
    for name, own in (("zero3", "auto"), (full, "auto"), ("SHARD_GRAD_OP", "zero2")):
        assert made(strategy=name, reshard=False).settings.strategy == own, name
    assert made(mesh=(2, 4), strategy="hybrid_shard").settings.mesh == Mesh(4, 2)


def test_of_very_many_micro_batches_the_last_ones_are_added():
    planner = Planner(training(1), read_cluster("h100"))
    most, more = (planner.predict(Settings(Mesh(8), micro_batches=MOST_PLAYED + extra)) for extra in (0, 100))
    few, other = (planner._play(Settings(Mesh(8), micro_batches=number), "") for number in (20, 30))
    for of in (lambda each: each.timeline.seconds, lambda each: each.flops, lambda each: each.sent["within nodes"]):
        assert of(more) - of(most) == pytest.approx(10 * (of(other) - of(few)), rel=1e-6)
    assert more.driver_bytes == most.driver_bytes
    assert more.mfu == pytest.approx(more.flops / more.timeline.seconds / 66.9e12)
    assert more.tokens_per_second == pytest.approx(8 * 64 * (MOST_PLAYED + 100) / more.timeline.seconds)


def test_many_ranks_are_planned_as_fast_as_few_and_always_alike():
    first, second = (str(made(mesh=(1024, 128), placement="flat")) for _ in range(2))
    assert first == second
    assert first.startswith("Decoder on 131072 ranks: 131072 x NVIDIA H100")


def test_the_program_of_the_page_runs():
    page = (Path(__file__).parents[2] / "docs/do/plan.md").read_text()
    program = page[page.index("    import torch") :].split("\n\nSettings that")[0]
    exec(compile(textwrap.dedent(program), "docs/do/plan.md", "exec"), {})
