"""A correct training is found equivalent in every layout, and the first wrong tensor of an incorrect one is named."""

import dataclasses
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import sherd
from sherd import errors, verify_equivalence
from sherd.errors import PolicyError, PolicyTypeError, StateError
from sherd.tools.verify.report import Difference
from tests.support.models import next_token_loss
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import sharded
from tests.verify import programs
from tests.verify.programs import (
    ON_FOUR,
    PURE_BFLOAT16,
    SHARDED,
    Counting,
    Stack,
    Unused,
    adamw,
    noise,
    verified,
    with_gradient_scaled,
    words,
)


def same_everywhere(of_ranks):
    """The result of all ranks, which is the same."""
    assert [str(each) for each in of_ranks] == [str(of_ranks[0])] * len(of_ranks)
    return of_ranks[0]


# What is right


@pytest.mark.front("A check that it trains the same")
@pytest.mark.parametrize("shard", SHARDED)
def test_every_layout_of_both_front_ends_is_equivalent(threads, shard):
    report = same_everywhere(threads(2).run(verified, shard))
    assert report.ok, report
    assert report.counts["gradient"] == report.counts["updated parameter"] == 2 * 3 * len(list(Stack().parameters()))
    assert report.counts["loss"] == 2 * 3
    report.require()
    if "bfloat16" in shard:
        assert 0 < max(each.share for each in report.closest.values()) < 0.7, report


@pytest.mark.parametrize("shard", ON_FOUR)
def test_replicas_and_tensor_parallel_ranks_are_equivalent(threads, shard):
    report = same_everywhere(threads(4).run(verified, shard))
    assert report.ok, report
    # Ranks of one data-parallel coordinate have the same part: two parts, each seen by two ranks.
    assert f"{2 if shard == 'tensor parallel' else 4} part(s)" in report.setting
    assert report.counts["loss"] == 4 * 3


@pytest.mark.slow  # the same on four ranks is quick
def test_many_ranks_are_equivalent(threads):
    assert same_everywhere(threads(8).run(verified, "shard")).ok


def test_a_forward_in_float32_is_the_same_to_the_bit_and_limits_are_as_narrow(threads):
    report = threads(2).run(verified, "shard")[0]
    assert report.closest["forward output"].absolute == 0
    for kind in ("gradient", "updated parameter"):
        assert 0 <= report.closest[kind].share < 0.5
        assert report.closest[kind].allowed < 1e-5


def test_a_parameter_without_a_gradient_decays_in_a_flat_parameter_only_and_that_is_found(threads):
    """A flat parameter has one gradient for all of its members, as in FSDP1."""
    assert threads(2).run(verified, "shard", build=Unused)[0].ok
    assert threads(2).run(verified, "wrapper", build=Unused)[0].ok
    found = threads(2).run(verified, "flat wrapper", build=Unused)[0].first_difference
    assert (found.kind, found.name) == ("updated parameter", "unused")


class Dropping(Stack):
    """With dropout, and blocks that are computed again in backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(checkpoint_wrapper(nn.Sequential(each, nn.Dropout(0.3))) for each in self.blocks)


def test_dropout_drops_the_same_in_both_trainings(world):
    report = world(2).run(verified, "shard", build=Dropping)[0]
    assert report.ok
    assert report.closest["forward output"].absolute == 0


@pytest.mark.parametrize("parts", [None, 4])
@on_threads(2)
def test_each_part_has_the_statistics_of_its_own_batch_norm(parts):
    report = verify_equivalence(Counting, noise(), shard=sharded, parts=parts)
    assert report.ok, report
    assert report.counts["buffer"] == (parts or 2) * 3 * len(list(Counting().buffers()))


@on_threads(2)
def test_a_flattened_optimizer_is_equivalent():
    def optimizer(parameters):
        return sherd.flatten_optimizer(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))

    report = verified("flat", optimizer=optimizer)
    assert report.ok, report


class Labelled(nn.Linear):
    def forward(self, x, y):
        return {"loss": (super().forward(x) - y).square().mean()}


@on_threads(2)
def test_a_models_own_loss_is_taken_and_a_dict_is_given_as_arguments():
    batches = [{"x": each, "y": each[:, :1]} for each in noise()]
    assert verify_equivalence(lambda: Labelled(programs.WIDTH, 1), batches).ok


# What is wrong


def first(threads, shard, num_ranks=2, build=Stack, **options):
    """The first difference of the report, which is the same on all ranks, and the report."""

    def spoiled():
        if build is Counting:
            return verify_equivalence(build, noise(), shard=shard, optimizer=adamw)
        return verify_equivalence(
            build, words(), shard=shard, **{"optimizer": adamw, "loss": next_token_loss, **options}
        )

    report = same_everywhere(threads(num_ranks).run(spoiled))
    assert not report.ok
    return report.first_difference, report


def test_a_gradient_that_is_off_by_a_thousandth_is_found_and_no_other_in_its_step(threads):
    found, report = first(threads, with_gradient_scaled("blocks.1.up.weight", 1.001))
    assert (found.kind, found.name, found.step, found.rank) == ("gradient", "blocks.1.up.weight", 1, 0)
    assert found.relative == pytest.approx(1e-3, rel=0.01)
    assert found.share > 100
    assert found.found == pytest.approx(found.expected * 1.001)
    assert {each.name for each in report.differences if each.kind == "gradient"} == {"blocks.1.up.weight"}
    assert report.steps == 1


def test_a_rank_whose_gradient_is_lost_is_found_in_bfloat16_also_if_it_is_one_of_eight(threads):
    """What it contributes to the gradient is not there, as where its reduction was skipped."""
    found, _ = first(threads, with_gradient_scaled("blocks.0.down.weight", 1 / 2, mp_policy=PURE_BFLOAT16))
    assert (found.kind, found.name, found.step) == ("gradient", "blocks.0.down.weight", 1)
    found, _ = first(threads, with_gradient_scaled("blocks.1.up.weight", 7 / 8, mp_policy=PURE_BFLOAT16), num_ranks=8)
    assert (found.kind, found.name, found.step) == ("gradient", "blocks.1.up.weight", 1)
    assert 1 < found.share < 10


def test_the_first_tensor_that_is_off_is_named_with_its_step(threads):
    output, _ = first(threads, programs.with_output_off)
    assert (output.kind, output.name, output.step, output.rank) == ("forward output", "blocks.0", 1, 1)
    assert output.index == (2, 1, 7)
    weights, _ = first(threads, programs.with_other_weights)
    assert (weights.kind, weights.name, weights.step) == ("initial parameter", "blocks.0.up.weight", 0)
    buffer, _ = first(threads, programs.with_buffer_off, build=Counting)
    assert (buffer.kind, buffer.name, buffer.step) == ("buffer", "norm.running_mean", 1)
    update, _ = first(threads, sharded, optimizer=programs.forgetful)
    assert (update.kind, update.name, update.step) == ("updated parameter", "blocks.0.up.bias", 2)
    assert update.absolute < 1e-5, "however small it is"


def test_a_replica_that_drifts_is_named_by_a_rank_of_it(threads):
    found, _ = first(threads, programs.with_drifting_replica, num_ranks=4)
    assert (found.kind, found.name, found.step, found.rank) == ("gradient", "blocks.1.down.bias", 1, 2)


PLANTED = Difference("gradient", "w", 1, 0, (3,), 2.0, 1.0, 1.0, 1.0, 1e-6)


def test_require_raises_one_error_with_the_table():
    good = sherd.EquivalenceReport((), {}, {}, 1, "nothing")
    good.require()
    bad = sherd.EquivalenceReport((PLANTED,), {}, {}, 1, "nothing")
    with pytest.raises(errors.EquivalenceError, match="step 1, gradient of w as gathered by rank 0: 2 at"):
        bad.require()
    far = dataclasses.replace(PLANTED, allowed=0.0)
    assert "  >10x  w, step 1" in str(dataclasses.replace(bad, closest={"gradient": far}, counts={"gradient": 1}))


# Files


def written(path, **options):
    return verified("shard", save_reference=path, **options)


def test_a_reference_of_one_process_serves_other_numbers_of_ranks_and_dtypes(threads, tmp_path):
    path = str(tmp_path / "reference.pt")
    assert threads(1).run(written, path, parts=4)[0].ok
    for num_ranks, shard, parts in ((2, "wrapper", 4), (2, "bfloat16", 4), (4, "shard", None)):
        report = same_everywhere(threads(num_ranks).run(verified, shard, reference=path, parts=parts))
        assert report.ok, report
        assert f"against the file {path}" in report.setting


def doubled(net):
    with torch.no_grad():
        net.norm.weight.mul_(2)
    sharded(net)


def test_a_reference_is_written_and_read_without_a_process_group_and_one_that_does_not_fit_is_refused(tmp_path):
    assert not dist.is_initialized()
    path = tmp_path / "reference.pt"
    assert written(path, parts=2).ok
    assert verified("shard", reference=path, parts=2).ok
    assert not dist.is_initialized()
    options = {"loss": next_token_loss, "optimizer": adamw, "reference": path}
    found = verify_equivalence(Stack, words(), shard=doubled, parts=2, **options).first_difference
    assert (found.kind, found.name) == ("initial parameter", "norm.weight")
    for parts, seed, batches, why in ((4, 0, words(), "parts"), (2, 1, words(), "seed"), (2, 0, words(2), "batches")):
        with pytest.raises(PolicyError, match=f"made with other {why}"):
            verify_equivalence(Stack, batches, shard=sharded, parts=parts, seed=seed, **options)
    path.write_bytes(b"nothing")
    with pytest.raises(PolicyError, match="cannot be read"):
        verify_equivalence(Stack, words(), shard=sharded, parts=2, **options)


@pytest.mark.usefixtures("torchrun_of_one_rank")
def test_it_makes_torchruns_group_once_and_leaves_it_for_the_next_call_and_for_the_program():
    groups = [verified("shard").ok and dist.group.WORLD for _ in range(2)]
    assert dist.is_initialized()
    assert groups[0] is groups[1]


# Bad inputs


def build_on_one_rank():
    if dist.get_rank() == 1:
        raise OSError("no such file")
    return Stack()


def no_loss(model, batch):
    return model(batch)


@on_threads(2)
def test_bad_inputs_are_refused_on_all_ranks_alike():
    rank, batches = dist.get_rank(), words(1)
    for options, error, why in (
        ({"batches": words(1, 7)}, PolicyError, r"batch 0 have \[7\] rows, to be cut into 2 equal parts"),
        ({"parts": 3}, PolicyError, "expected a multiple of the 2 data-parallel ranks"),
        ({"parts": 0}, PolicyError, "expected 1 or more"),
        ({"build": 3}, PolicyTypeError, r"build=\.\.\.\): expected a function"),
        ({"build": dict}, PolicyTypeError, "expected it to return a module"),
        ({"batches": 3}, PolicyTypeError, "expected a list of batches"),
        ({"batches": [3]}, PolicyError, "each with a tensor that has rows"),
        ({"loss": no_loss}, PolicyTypeError, "a tensor with one floating-point element"),
        ({"build": lambda: Stack().requires_grad_(False)}, PolicyError, "no parameter of the model needs a gradient"),
        ({"build": build_on_one_rank}, StateError, r"failed on rank 1: OSError\('no such file'\)"),
        ({"reference": "/missing"}, PolicyError, "write it with save_reference="),
        ({"batches": [batches[0] + rank]}, PolicyError, "rank 1 has other batches than rank 0"),
        ({"batches": words()[rank:]}, PolicyError, "rank 1 has other batches than rank 0, or another number"),
    ):
        with pytest.raises(error, match=why) as raised:
            verify_equivalence(
                **{"build": Stack, "batches": batches, "loss": next_token_loss, "shard": sharded, **options}
            )
        assert type(raised.value) is error, why


# What stays as it was


@on_processes(2)
def test_random_state_grad_mode_and_process_group_stay():
    def drawn():
        return torch.rand(1).item(), random.random()

    torch.manual_seed(3), random.seed(3)
    expected = drawn()
    torch.manual_seed(3), random.seed(3)
    group = dist.group.WORLD
    with torch.no_grad():
        assert verified("shard").ok
        assert not torch.is_grad_enabled()
    assert drawn() == expected
    assert dist.group.WORLD is group
