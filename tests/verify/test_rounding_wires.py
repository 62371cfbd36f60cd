"""`verify_equivalence` of models whose collectives round, and of those with the same bits on any number of ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sherd
from sherd import CommPolicy, Reduction, verify_equivalence
from sherd.errors import PolicyError
from tests.support.meshes import mesh_of
from tests.support.models import next_token_loss
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import FRONTS, sharded
from tests.verify.programs import Stack, adamw, words

POLICIES: dict[str, Any] = {
    "int8": CommPolicy(gather="int8", reduce=Reduction(wire="int8")),
    "fp8": CommPolicy(gather="fp8_e4m3", reduce=Reduction(wire="fp8_e5m2")),
    "int4 weights": CommPolicy(gather="int4"),
    "bfloat16 gradients": CommPolicy(reduce=Reduction(wire=torch.bfloat16)),
    "reproducible": CommPolicy.reproducible(),
}


def verified(policy: str, factor: float = 1.0, **options: Any) -> sherd.EquivalenceReport:
    """`factor`: of the gradients that rank 1 brings to the blocks, which is a mistake unless it is 1."""
    parts = options.pop("parts", None)

    def shard(model: Any) -> nn.Module:
        blocks = list(model.blocks)
        model = sharded(model, comm_policy=POLICIES[policy], **options)
        if factor != 1.0 and dist.get_rank() == 1:
            blocks[-1].register_forward_hook(lambda module, args, out: spoilt(out))
        return model

    def spoilt(out: torch.Tensor) -> torch.Tensor:
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * factor)
        return out

    return verify_equivalence(Stack, words(), shard=shard, loss=next_token_loss, optimizer=adamw, parts=parts)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_right_program_is_equivalent(policy, front, threads):
    report = threads(2).run(verified, policy, front=front)[0]
    assert report.ok, report


@pytest.mark.parametrize("policy", POLICIES)
def test_so_it_is_between_replicas(policy, threads):
    report = threads(4).run(replicated, policy)[0]
    assert report.ok, report


def replicated(policy: str) -> sherd.EquivalenceReport:
    return verified(policy, mesh=mesh_of((2, 2)))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_that_brings_other_gradients_is_found(policy, threads):
    wrong = threads(2).run(verified, policy, 3.0)[0]
    assert not wrong.ok
    assert wrong.first_difference.kind == "gradient"


def test_gradients_alone_are_rounded_by_their_dtype(threads):
    report = threads(2).run(verified, "bfloat16 gradients")[0]
    assert report.closest["forward output"].absolute == 0
    assert report.closest["forward output"].allowed < 1e-5 < report.closest["gradient"].allowed
    assert 0 < report.closest["gradient"].share < 0.7


def test_weights_of_8_bits_need_what_is_allowed(threads):
    """The limit is near what happens: a thousandth of it would be exceeded."""
    report = threads(2).run(verified, "int8")[0]
    for kind in ("forward output", "gradient"):
        assert 0.01 < report.closest[kind].share < 1


@pytest.mark.parametrize("parts", [None, 4])
def test_reproducible_sums_must_have_equal_bits(parts, threads):
    report = threads(2).run(verified, "reproducible", parts=parts)[0]
    assert report.ok, report
    assert "all bits must be equal" in report.setting
    assert all(each.absolute == each.allowed == 0 for each in report.closest.values())
    wrong = threads(2).run(verified, "reproducible", 1 + 2**-22, parts=parts)[0]
    assert wrong.first_difference.kind == "gradient"


def test_on_three_ranks_the_mean_is_made_last(threads):
    report = threads(3).run(of_three)[0]
    assert report.ok, report


def of_three() -> sherd.EquivalenceReport:
    return verify_equivalence(
        Stack,
        words(rows=9),
        shard=lambda model: sharded(model, comm_policy=CommPolicy.reproducible()),
        loss=next_token_loss,
    )


@on_threads(2)
def test_in_another_dtype_bits_need_not_be_equal():
    def shard(model: Any) -> nn.Module:
        precision = sherd.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return sharded(model, comm_policy=CommPolicy.reproducible(), mp_policy=precision)

    report = verify_equivalence(Stack, words(), shard=shard, loss=next_token_loss)
    assert report.ok, report
    assert "bits" not in report.setting


@on_threads(2)
def test_a_file_has_no_errors_of_codecs():
    def shard(model: Any) -> nn.Module:
        return sharded(model, comm_policy=POLICIES["int8"])

    with pytest.raises(PolicyError, match="no file has these errors; leave both out"):
        verify_equivalence(Stack, words(), shard=shard, loss=next_token_loss, save_reference="unused.pt")
