"""Is a correct training found equivalent in every layout, and the first wrong tensor of an incorrect one named?"""

import random
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sherd
from sherd import errors, verify_equivalence
from sherd.verify.report import Difference
from tests.support.ranks import RanksFailed
from tests.verify import programs
from tests.verify.programs import (
    ON_FOUR,
    SHARDED,
    Counting,
    Net,
    Unused,
    adamw,
    composed,
    next_word,
    noise,
    verified,
    words,
)


def same_everywhere(of_ranks):
    """The result of all ranks, which is the same."""
    assert [str(each) for each in of_ranks] == [str(of_ranks[0])] * len(of_ranks)
    return of_ranks[0]


# What is right


@pytest.mark.parametrize("shard", SHARDED)
def test_every_layout_of_both_front_ends_is_equivalent(world, shard):
    report = same_everywhere(world(2).run(verified, shard))
    assert report.ok, report
    assert report.counts["gradient"] == report.counts["updated parameter"] == 2 * 3 * len(list(Net().parameters()))
    assert report.counts["loss"] == 2 * 3
    report.require()


@pytest.mark.parametrize("shard", ON_FOUR)
def test_replicas_and_tensor_parallel_ranks_are_equivalent(world, shard):
    report = same_everywhere(world(4).run(verified, shard))
    assert report.ok, report
    # Ranks of one data-parallel coordinate have the same part: two parts, each seen by two ranks.
    assert f"{2 if shard == 'tensor parallel' else 4} part(s)" in report.setting
    assert report.counts["loss"] == 4 * 3


def test_many_ranks_are_equivalent(threads):
    assert same_everywhere(threads(8).run(verified, "rows")).ok


def test_a_forward_in_float32_is_the_same_to_the_bit_and_limits_are_as_narrow(world):
    report = world(2).run(verified, "rows")[0]
    assert report.closest["forward output"].absolute == 0
    for kind in ("gradient", "updated parameter"):
        assert 0 <= report.closest[kind].share < 0.5
        assert report.closest[kind].allowed < 1e-5


@pytest.mark.parametrize("shard", ["bfloat16", "pure bfloat16", "wrapper, bfloat16"])
def test_correct_bfloat16_stays_far_from_its_limits(world, shard):
    report = world(2).run(verified, shard)[0]
    assert 0 < max(each.share for each in report.closest.values()) < 0.7, report


def test_a_parameter_without_a_gradient_decays_in_a_flat_parameter_only_and_that_is_found(world):
    """A flat parameter has one gradient for all of its members, as in FSDP1."""
    assert world(2).run(verified, "rows", build=Unused)[0].ok
    assert world(2).run(verified, "wrapper", build=Unused)[0].ok
    found = world(2).run(verified, "wrapper, flat parameters", build=Unused)[0].first_difference
    assert (found.kind, found.name) == ("updated parameter", "unused")


class Dropping(Net):
    """With dropout, and blocks that are computed again in backward."""

    recompute = True

    def __init__(self):
        super().__init__(dropout=0.3)


def test_dropout_drops_the_same_in_both_trainings(world):
    report = world(2).run(verified, "rows", build=Dropping)[0]
    assert report.ok
    assert report.closest["forward output"].absolute == 0


def counted(**options):
    return verify_equivalence(Counting, noise(), shard=composed, **options)


@pytest.mark.parametrize("parts", [None, 4])
def test_each_part_has_the_statistics_of_its_own_batch_norm(world, parts):
    report = world(2).run(counted, parts=parts)[0]
    assert report.ok, report
    assert report.counts["buffer"] == (parts or 2) * 3 * len(list(Counting().buffers()))


def flattened():
    optimizer = lambda parameters: sherd.flatten_optimizer(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))  # noqa: E731
    return verified("flat", optimizer=optimizer)


def test_a_flattened_optimizer_is_equivalent(world):
    report = world(2).run(flattened)[0]
    assert report.ok, report


# What is wrong


def spoiled(name, build=Net, **options):
    batches = noise() if build is Counting else words()
    options = {"optimizer": adamw, "loss": next_word, **options}
    if build is Counting:
        del options["loss"]
    return verify_equivalence(build, batches, shard=getattr(programs, name), **options)


def first(world, name, num_ranks=2, **options):
    report = same_everywhere(world(num_ranks).run(spoiled, name, **options))
    assert not report.ok
    return report.first_difference


def test_a_gradient_that_is_off_by_a_thousandth_is_found(world):
    found = first(world, "with_gradient_off")
    assert (found.kind, found.name, found.step, found.rank) == ("gradient", "blocks.1.up.weight", 1, 0)
    assert found.relative == pytest.approx(1e-3, rel=0.01)
    assert found.share > 100
    assert found.found == pytest.approx(found.expected * 1.001)


def test_it_is_the_only_gradient_that_is_found_in_its_step(world):
    report = world(2).run(spoiled, "with_gradient_off")[0]
    assert {each.name for each in report.differences if each.kind == "gradient"} == {"blocks.1.up.weight"}
    assert report.steps == 1


def test_an_output_that_is_off_is_found_where_it_is_put_out(world):
    found = first(world, "with_output_off")
    assert (found.kind, found.name, found.step, found.rank) == ("forward output", "blocks.0", 1, 1)
    assert found.index == (2, 1, 7)


def test_a_rank_whose_gradient_is_lost_is_found_in_bfloat16(world):
    found = first(world, "with_lost_rank_in_bfloat16")
    assert (found.kind, found.name, found.step) == ("gradient", "blocks.0.down.weight", 1)


def test_an_eighth_of_a_gradient_that_is_lost_is_found_in_bfloat16(threads):
    """One of eight ranks has not contributed."""
    found = same_everywhere(threads(8).run(spoiled, "with_an_eighth_lost")).first_difference
    assert (found.kind, found.name, found.step) == ("gradient", "blocks.1.up.weight", 1)
    assert 1 < found.share < 10


def test_ranks_that_build_other_weights_are_found_before_the_first_step(world):
    found = first(world, "with_other_weights")
    assert (found.kind, found.name, found.step) == ("initial parameter", "blocks.0.up.weight", 0)


def test_a_buffer_that_is_off_is_found(world):
    found = first(world, "with_buffer_off", build=Counting)
    assert (found.kind, found.name, found.step) == ("buffer", "norm.running_mean", 1)


def test_a_parameter_that_is_not_updated_is_found_however_small_its_update_is(world):
    found = first(world, "composed", optimizer=programs.forgetful)
    assert (found.kind, found.name, found.step) == ("updated parameter", "blocks.0.norm.bias", 2)
    assert found.absolute < 1e-5


def test_a_replica_that_drifts_is_named_by_a_rank_of_it(world):
    found = first(world, "with_drifting_replica", num_ranks=4)
    assert (found.kind, found.name, found.step, found.rank) == ("gradient", "head.bias", 1, 2)


PLANTED = Difference("gradient", "w", 1, 0, (3,), 2.0, 1.0, 1.0, 1.0, 1e-6)


def test_require_raises_one_error_with_the_table():
    good = sherd.EquivalenceReport((), {}, {}, 1, "nothing")
    good.require()
    bad = sherd.EquivalenceReport((PLANTED,), {}, {}, 1, "nothing")
    with pytest.raises(errors.EquivalenceError, match="step 1, gradient of w on rank 0: 2 at"):
        bad.require()


# Files


def written(path, **options):
    return verified("rows", save_reference=path, **options)


def read(path, shard, **options):
    return verified(shard, reference=path, **options)


def test_a_reference_of_one_process_serves_other_numbers_of_ranks_and_dtypes(world, tmp_path):
    path = str(tmp_path / "reference.pt")
    assert world(1).run(written, path, parts=4)[0].ok
    for num_ranks, shard, parts in ((2, "wrapper", 4), (2, "bfloat16", 4), (4, "rows", None)):
        report = same_everywhere(world(num_ranks).run(read, path, shard, parts=parts))
        assert report.ok, report
        assert f"against the file {path}" in report.setting


def test_a_reference_is_written_and_read_without_a_process_group(tmp_path):
    assert not dist.is_initialized()
    path = tmp_path / "reference.pt"
    assert written(path, parts=2).ok
    assert read(path, "rows", parts=2).ok
    assert not dist.is_initialized()
    options = {"loss": next_word, "optimizer": adamw, "parts": 2, "reference": path}
    found = verify_equivalence(Net, words(), shard=doubled, **options).first_difference
    assert (found.kind, found.name) == ("initial parameter", "frozen.weight")


def doubled(net):
    with torch.no_grad():
        net.frozen.weight.mul_(2)
    composed(net)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"parts": 4}, "made with other parts"),
        ({"parts": 2, "seed": 1}, "made with other seed"),
        ({"parts": 2, "batches": words(2)}, "made with other batches"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, options, why):
    path = tmp_path / "reference.pt"
    written(path, parts=2)
    options = {"batches": words(), "shard": composed, "loss": next_word, "optimizer": adamw, **options}
    with pytest.raises(errors.PolicyError, match=why):
        verify_equivalence(Net, reference=path, **options)
    path.write_bytes(b"nothing")
    with pytest.raises(errors.PolicyError, match="cannot be read"):
        verify_equivalence(Net, reference=path, **options)


# Bad inputs


def refused(num_rows=8, **options):
    batches = options.pop("batches", words(1, num_rows))
    return verify_equivalence(options.pop("build", Net), batches, **{"loss": next_word, "shard": composed, **options})


def other_words():
    return verify_equivalence(Net, [words(1)[0] + dist.get_rank()], loss=next_word)


def fewer_words():
    return verify_equivalence(Net, words()[dist.get_rank() :], loss=next_word)


def build_on_one_rank():
    if dist.get_rank() == 1:
        raise OSError("no such file")
    return Net()


def no_loss(model, batch):
    return model(batch)


def frozen():
    return Net().requires_grad_(False)


@pytest.mark.parametrize(
    ("function", "options", "error", "why"),
    [
        (refused, {"num_rows": 7}, "PolicyError", r"batch 0 have \[7\] rows, to be cut into 2 equal parts"),
        (refused, {"parts": 3}, "PolicyError", "expected a multiple of the 2 data-parallel ranks"),
        (refused, {"parts": 0}, "PolicyError", "expected 1 or more"),
        (refused, {"build": 3}, "PolicyTypeError", r"build=\.\.\.\): expected a function"),
        (refused, {"build": dict}, "PolicyTypeError", "expected it to return a module"),
        (refused, {"batches": 3}, "PolicyTypeError", "expected a list of batches"),
        (refused, {"batches": [3]}, "PolicyError", "each with a tensor that has rows"),
        (refused, {"loss": no_loss}, "PolicyTypeError", "a tensor with one floating-point element"),
        (refused, {"build": frozen}, "PolicyError", "no parameter of the model needs a gradient"),
        (refused, {"build": build_on_one_rank}, "StateError", r"failed on rank 1: OSError\('no such file'\)"),
        (refused, {"reference": "/missing"}, "PolicyError", "write it with save_reference="),
        (other_words, {}, "PolicyError", "rank 1 has other batches than rank 0"),
        (fewer_words, {}, "PolicyError", "rank 1 has other batches than rank 0, or another number"),
    ],
)
def test_bad_inputs_are_refused_on_all_ranks_alike(world, function, options, error, why):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(function, **options)
    found = [failed.value.errors[rank] for rank in range(2)]
    assert [kind for kind, _ in found] == [error, error]
    for _, text in found:
        assert re.search(why, text), text


# What stays as it was


def states():
    def drawn():
        return torch.rand(1).item(), random.random()

    torch.manual_seed(3), random.seed(3)
    expected = drawn()
    torch.manual_seed(3), random.seed(3)
    group = dist.group.WORLD
    with torch.no_grad():
        report = verified("rows")
        kept = not torch.is_grad_enabled()
    return report.ok, kept, drawn() == expected, dist.group.WORLD is group


def test_random_state_grad_mode_and_process_group_stay(world):
    assert world(2).run(states) == [(True, True, True, True)] * 2


def output_with_loss():
    class Labelled(nn.Linear):
        def forward(self, x, y):
            return {"loss": (super().forward(x) - y).square().mean()}

    batches = [{"x": each, "y": each[:, :1]} for each in noise()]
    return verify_equivalence(lambda: Labelled(programs.WIDTH, 1), batches)


def test_a_models_own_loss_is_taken_and_a_dict_is_given_as_arguments(world):
    assert world(2).run(output_with_loss)[0].ok
