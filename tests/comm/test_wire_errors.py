"""What codecs change: `comm_report` says it, and `CommPolicy(error_limit=)` limits it, on all ranks together."""

import copy
import logging
import math
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sherd
from sherd import CommPolicy, Reduction
from sherd.engine import Unit
from sherd.errors import CommError, ModuleError, PolicyError, StateError
from tests.support.ranks.bodies import on_processes, on_threads

WAYS: dict[str, dict[str, Any]] = {
    "shard": {},
    "flat": {"placement": sherd.Flat()},
    "blocks": {"placement": sherd.Blocks(2)},
    "owned": {"placement": sherd.Owned()},
    "wrapper": {"is_wrapped": True},
    "hsdp": {"shape": (2, 2)},
    "hfsdp": {"shape": (2, 2), "placements": "hfsdp"},
}
BOTH = CommPolicy(gather="int8", reduce=Reduction(wire="int4"))


def made(policy: CommPolicy, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 33), nn.GELU(), nn.Linear(33, 24)) for _ in range(2)))
    shape = options.pop("shape", None) or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    if options.pop("is_wrapped", False):
        wrap = sherd.FullyShardedDataParallel
        blocks = (wrap(each, comm_policy=policy, use_orig_params=True) for each in model)
        return wrap(nn.Sequential(*blocks), comm_policy=policy, use_orig_params=True)
    for block in (*model, model):
        sherd.fully_shard(block, mesh=mesh, comm_policy=policy, **options)
    return model


def rows(step: int = 0) -> Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))


def num_ranks(way: str) -> int:
    return 4 if "shape" in WAYS[way] else 2


def rows_of(report: sherd.CommReport, phase: str, axis: str = "shard") -> list[Any]:
    return [row for row in report.rows if (row.phase, row.axis) == (phase, axis)]


# The report


def inner(model: Any) -> list[Any]:
    return [getattr(each, "_fsdp_wrapped_module", each) for each in getattr(model, "module", model)]


def gathered(way: str) -> list[tuple[float, float]]:
    """The error of each unit's gather in the report, and that of what forward reads."""
    model = made(BOTH, **WAYS[way])
    errors = [row.error for row in rows_of(sherd.comm_report(model), "gather")]
    read: list[list[Tensor]] = []
    hooks = [
        each.register_forward_pre_hook(lambda module, _: read.append([p.detach().clone() for p in module.parameters()]))
        for each in inner(model)
    ]
    model(rows())
    for hook in hooks:
        hook.remove()
    exact = []
    with sherd.unsharded(model):
        exact = [[each.detach().clone() for each in block.parameters()] for block in inner(model)]
    return [
        (error, relative(torch.cat([*map(torch.flatten, found)]), torch.cat([*map(torch.flatten, expected)])))
        for error, found, expected in zip(errors, read, exact, strict=True)
    ]


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("way", WAYS)
def test_the_error_of_gathers_is_that_of_what_forward_reads(way, threads):
    for of_rank in threads(num_ranks(way)).run(gathered, way):
        assert len(of_rank) == 2
        for reported, found in of_rank:
            assert 0.001 < reported < 0.01
            assert reported == pytest.approx(found, rel=1e-5)


def encoded(values: Tensor, codec: sherd.Codec) -> Tensor:
    wire = torch.empty(codec.num_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, wire)
    codec.decode(wire, found := torch.empty_like(values))
    return found


@on_threads(2)
def test_the_error_of_reductions_is_that_of_what_owners_decode():
    plain = [torch.randn(8, 8, generator=torch.Generator().manual_seed(number)) for number in range(2)]
    for wire in ("int8", torch.bfloat16, None):
        reduction = None if wire is None else Reduction(wire=wire)
        layer = sherd.fully_shard(nn.Linear(8, 8, bias=False), comm_policy=CommPolicy(reduce=reduction))
        with sherd.comm_report(layer) as report:
            (layer(torch.eye(8)) * plain[dist.get_rank()].T).sum().backward()
            assert report.held > 0
        sent = [part for each in plain for part in each.flatten().chunk(2)]
        if wire == "int8":
            found = [encoded(part, sherd.codec("int8")) for part in sent]
        else:
            found = [part.to(wire or torch.float32) for part in sent]
        (row,) = rows_of(report, "reduce")
        assert row.error == pytest.approx(relative(torch.cat(found), torch.cat(sent)), rel=1e-5)
        assert report.held == 0
        assert row.format == ("int8" if wire == "int8" else str(wire or torch.float32).removeprefix("torch."))


def listeners(model: Any) -> int:
    meshes = [unit.mesh for unit in Unit.below(model)]
    return sum(len(errors.listeners) for mesh in meshes for errors in mesh.wire_errors.values())


def measured(way: str) -> sherd.CommReport:
    model = made(BOTH, **WAYS[way])
    assert all(row.error is None for row in sherd.comm_report(model).rows if row.phase == "reduce")
    assert listeners(model) == 0  # nothing is measured
    with sherd.comm_report(model) as report:
        assert listeners(model) > 0
        model(rows()).square().sum().backward()
    assert listeners(model) == 0
    return report


@pytest.mark.parametrize("way", WAYS)
def test_reductions_are_measured_in_the_block_alone(way, threads):
    reports = threads(num_ranks(way)).run(measured, way)
    for report in reports:
        axes = ("shard", "replicate") if "shape" in WAYS[way] else ("shard",)
        for axis in axes:
            found = rows_of(report, "reduce", axis)
            assert len(found) == 2
            assert all(row.format == "int4" and 0.01 < row.error < 0.3 for row in found)
        assert [row.error for row in report.rows] == [row.error for row in reports[0].rows]
        assert " ".join(str(report).splitlines()[0].split()) == "unit axis phase format error bytes a step saved"
        assert "not measured" not in str(report)


@on_threads(2)
def test_bytes_are_those_of_the_messages():
    model = made(BOTH)
    report, half = sherd.comm_report(model), (24 * 34 + 33 * 25) // 2  # of a block of 2 Linears, 33 and 24 rows
    for row in rows_of(report, "gather"):
        assert row.nbytes + row.saved == 2 * 4 * (17 * 24 + 17 + 12 * 33 + 12)  # twice, with a row of padding
    for row in rows_of(report, "reduce"):
        assert row.nbytes + row.saved == 4 * (17 * 24 + 17 + 12 * 33 + 12)
        assert half / 2 < row.nbytes < half * 0.6
    assert report.saved == sum(row.saved for row in report.rows)


class Mixed(nn.Module):
    """With numbers that no codec takes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))
        self.phase = nn.Parameter(torch.randn(16, dtype=torch.complex64, generator=torch.Generator().manual_seed(2)))
        self.index = nn.Parameter(torch.arange(16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight)[:, self.index] * (self.phase * self.phase.conj()).real


@on_threads(2)
def test_integers_and_complex_numbers_travel_as_they_are_and_the_report_says_so():
    model = sherd.fully_shard(Mixed(), comm_policy=BOTH)
    with sherd.comm_report(model) as report:
        model(torch.ones(2, 16)).sum().backward()
    found = {(row.phase, row.format): (row.error, row.saved) for row in report.rows}
    assert found.keys() == {
        *(("gather", form) for form in ("int8", "complex64", "int64")),
        *(("reduce", form) for form in ("int4", "complex64")),
    }
    for phase, form in (("gather", "complex64"), ("gather", "int64"), ("reduce", "complex64")):
        assert found[phase, form] == (0.0, 0)


@on_threads(2)
def test_what_is_no_report_is_refused():
    with pytest.raises(ModuleError, match="comm_report expects a module that fully_shard was called on"):
        sherd.comm_report(nn.Linear(2, 2))
    model = made(BOTH)
    with sherd.comm_report(model) as report:
        with pytest.raises(StateError, match="the report measures already"), report:
            pass
        with pytest.raises(StateError, match="tracked already"), sherd.comm_report(model):
            pass
    gone = sherd.comm_report(made(BOTH))
    with pytest.raises(StateError, match="the model of this report is gone"), gone:
        pass


# The limit


def raised(way: str, policy: CommPolicy) -> str:
    model = made(policy, **WAYS[way])
    with pytest.raises(CommError) as caught:
        model(rows()).square().sum().backward()
    model.zero_grad()
    with pytest.raises(CommError, match="codecs change values"):  # the program may go on, and finds the same
        model(rows()).square().sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", ["gather", "reduce"])
def test_all_ranks_raise_above_the_limit(way, phase, threads):
    given = {"gather": {"gather": "int4"}, "reduce": {"reduce": Reduction(wire="int4")}}[phase]
    texts = {*threads(num_ranks(way)).run(raised, way, CommPolicy(error_limit=0.001, **given))}
    assert len(texts) == 1
    (text,) = texts
    assert f"{phase} over shard: relative error 0." in text
    assert "above 0.001" in text
    assert "\n" not in text


@on_threads(2)
def test_one_rank_with_large_errors_is_enough():
    """The other rank has zeros, which are exact."""
    layer = sherd.fully_shard(
        nn.Linear(24, 24, bias=False), comm_policy=CommPolicy(reduce=Reduction(wire="int4"), error_limit=0.01)
    )
    with pytest.raises(CommError, match="reduce over shard"):
        (layer(rows()).sum() * dist.get_rank()).backward()


@on_threads(2)
def test_below_the_limit_nothing_is_said(caplog):
    model = made(CommPolicy(gather="int8", reduce=Reduction(wire="int8"), error_limit=0.1))
    for step in range(3):
        with sherd.accumulate(model, 2):
            for _ in range(2):
                model(rows(step)).square().sum().backward()
        model.zero_grad()
    assert not caplog.records
    found = sherd.comm_report(model)
    assert all(0 < row.error < 0.1 and not row.is_above_limit for row in found.rows)


def fallen_back(way: str, is_late: bool) -> list[str]:
    policy = CommPolicy(gather="int4", reduce=Reduction(wire="int4"), error_limit=0.01, above_limit="unencoded")
    model, plain = made(policy, **WAYS[way]), made(CommPolicy(), **WAYS[way])
    handler = logging.Handler()
    texts: list[str] = []
    handler.emit = lambda record: texts.append(record.getMessage())
    log = logging.getLogger("sherd")
    log.addHandler(handler)
    try:
        model(rows()).square().sum().backward()
        for each in (model, plain):
            each.zero_grad()
            optimizer = torch.optim.SGD(each.parameters(), lr=0.0)
            for step in range(2):
                found = each(rows(step))
                found.square().sum().backward()
                optimizer.step()
            if each is model:
                kept = found, [grad_of(parameter) for parameter in model.parameters()]
    finally:
        log.removeHandler(handler)
    assert torch.equal(kept[0], found)
    for ours, parameter in zip(kept[1], plain.parameters(), strict=True):
        torch.testing.assert_close(ours, grad_of(parameter))
    report = sherd.comm_report(model)
    encoded_ways = [row for row in report.rows if row.is_above_limit]
    assert {row.format for row in encoded_ways} == {"float32"}
    assert {row.phase for row in encoded_ways} == {"gather", "reduce"}
    assert "float32 (above the limit)" in str(report)
    return texts


def grad_of(parameter: Any) -> Tensor:
    grad = parameter.grad
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


@pytest.mark.parametrize("way", WAYS)
def test_above_the_limit_a_unit_sends_unencoded_from_then_on(way, threads):
    fallen_back_on = threads(num_ranks(way)).run(fallen_back, way, False)
    ways = 3 if way == "hsdp" or way == "hfsdp" else 2
    # Rank 0 warns once of each unit and way; threads share the logger.
    said = max(fallen_back_on, key=len)
    assert len(said) == 2 * ways, said
    assert all("it is not encoded any more" in text for text in said)


@on_threads(2)
def test_what_is_owed_when_a_unit_leaves_its_format_is_sent():
    reduction = Reduction(wire="int4", feedback=True)
    left = made(CommPolicy(reduce=reduction, error_limit=1e-6, above_limit="unencoded"))
    for model in (left, plain := made(CommPolicy())):
        for step in range(2):
            model(rows(step)).square().mean().backward()
    for ours, theirs in zip(left.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(grad_of(ours), grad_of(theirs), rtol=1e-5, atol=1e-7)


@on_threads(2)
def test_with_feedback_the_error_is_that_of_what_is_encoded():
    """What is owed of a large gradient is no error of a small one."""
    model = made(CommPolicy(reduce=Reduction(wire="int8", feedback=True), error_limit=0.05))
    for step in range(3):
        (model(rows(step)).square().mean() * 0.001**step).backward()
        model.zero_grad()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "wrapper"])
def test_a_copy_has_errors_of_its_own(way, threads):
    threads(num_ranks(way)).run(copied, way)


def copied(way: str) -> None:
    policy = CommPolicy(gather="int4", reduce=Reduction(wire="int4"), error_limit=0.01, above_limit="unencoded")
    model = made(policy, **WAYS[way])
    first = copy.deepcopy(model)
    model(rows()).square().sum().backward()
    for each, is_above in ((model, True), (first, False), (copy.deepcopy(model), False)):
        found = sherd.comm_report(each)
        assert any(row.is_above_limit for row in found.rows) is is_above, found
    with sherd.comm_report(first) as report:
        model(rows()).square().sum().backward()
    assert {row.error for row in report.rows if row.phase == "reduce"} == {None}, "the other model's are not counted"
    first(rows()).square().sum().backward()
    assert any(row.is_above_limit for row in sherd.comm_report(first).rows)


@on_processes(2)
def test_processes_that_are_compared_fall_back_together_and_raise_together():
    """With the comparison of ranks, to which each fallback is a change of terms."""
    for above in ("unencoded", "raise"):
        policy = CommPolicy(gather="int4", reduce=Reduction(wire="int4"), error_limit=0.01, above_limit=above)
        model = made(policy)
        for _ in range(4):
            allowed = nullcontext() if above == "unencoded" else pytest.raises(CommError, match="codecs change values")
            with allowed:
                model(rows()).square().sum().backward()
        dist.barrier()


def test_what_limits_nothing_is_refused():
    def refuses(words: str, **options: Any) -> None:
        with pytest.raises(PolicyError, match=words):
            CommPolicy(**options)

    refuses("error_limit=0.1.: nothing is encoded", error_limit=0.1)
    refuses("nothing is encoded", error_limit=0.1, reduce=Reduction(wire=torch.bfloat16))
    refuses("expected a finite number above 0", error_limit=0.0, gather="int8")
    refuses("expected a number", error_limit="0.1", gather="int8")
    refuses("ranks without a batch do not compare errors", error_limit=0.1, gather="int8", divergence="join")
    refuses("above_limit='warn'.: expected one of raise, unencoded", above_limit="warn")


@on_threads(2)
def test_a_limit_that_raises_is_refused_where_units_step_before_ranks_compare():
    for above_limit in ("raise", "unencoded"):
        model = made(CommPolicy(gather="int8", error_limit=0.1, above_limit=above_limit))
        refused = pytest.raises(PolicyError, match="compare errors when backward ends, after its steps")
        with refused if above_limit == "raise" else nullcontext():
            sherd.step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))


# Ranks that differ


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (CommPolicy("torch", gather="int8"), CommPolicy("torch", gather="fp8_e4m3")),
        (CommPolicy("torch", gather="int8"), CommPolicy("torch", gather=sherd.codec("int8", block=64))),
        (CommPolicy("torch", gather="int8"), CommPolicy("torch", gather="int8", error_limit=0.1)),
        (CommPolicy("torch", gather="int8"), CommPolicy("torch")),
        (CommPolicy("torch", reduce=Reduction(wire="int8")), CommPolicy.reproducible(transport="torch")),
    ],
)
@on_processes(2)
def test_ranks_with_other_formats_limits_or_orders_are_named_before_they_send(one, other):
    model = made(other if dist.get_rank() else one)
    with (
        mock.patch("torch.distributed.all_to_all_single", side_effect=AssertionError("bytes were sent")),
        pytest.raises(CommError, match=r"rank 0 .*; rank 1 |parameters encoded|gradients summed|errors up to"),
    ):
        model(rows()).square().sum().backward()


@pytest.mark.parametrize("wire", ["int8", "fp8_e4m3", "fp8_e5m2", "int4"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@on_threads(2)
def test_what_is_not_finite_arrives_on_all_ranks_and_is_no_error(wire, value):
    policy = CommPolicy(gather=wire, reduce=Reduction(wire=wire), error_limit=0.2)
    layer = nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, 256).view(16, 16))
        layer.weight[3, 5] = value
    sherd.fully_shard(layer, comm_policy=policy)
    read: list[Tensor] = []
    layer.register_forward_pre_hook(lambda module, _: read.append(module.weight.detach().clone()))
    with sherd.comm_report(layer) as report:
        loss = (layer(torch.eye(16))[5] * torch.linspace(1, 2, 16)).sum()
        (loss * (value if dist.get_rank() else 1.0)).backward()
    expected = math.nan if wire == "int4" or value != value else value
    assert torch.equal(read[0][3, 5].isnan(), torch.tensor(math.isnan(expected)))
    assert int((~read[0].isfinite()).sum()) == 1
    assert not layer.weight.grad.full_tensor()[:, 5].isfinite().any()
    assert all(row.error is not None and math.isfinite(row.error) for row in report.rows)
