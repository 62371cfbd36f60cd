"""The numbers are those of torch's own FSDP2, wherever it can run the model."""

import pytest
import torch
from torch.distributed import fsdp

import sherd
from tests.support.models import MODELS
from tests.support.ranks.bodies import on_processes
from tests.support.training import Recipe, assert_same_run, train_sharded

# What torch's FSDP2 refuses, warns about or gets wrong; `test_layouts` holds these to plain training.
BEYOND_TORCH = {
    "changed_in_place",
    "dataclasses",
    "mixed_bfloat",
    "mixed_double",
    "non_contiguous",
    "passthrough",
    "scalar_parameter",
    "shared_and_reentrant",
    "tied_across",
    "tied_to_root",
    "uneven_columns",
}


def train_with_both(recipe, **options):
    theirs = train_sharded(recipe, with_=fsdp.fully_shard, **options)
    return train_sharded(recipe, **options), theirs


@pytest.mark.front("Coming from FSDP2")
@pytest.mark.parametrize("model", [name for name in MODELS if name not in BEYOND_TORCH])
@on_processes(2)
def test_a_model_trains_as_under_torch(model):
    assert_same_run(*train_with_both(Recipe(model, optimizer="adamw_foreach")), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("model", ["mlp", "nested", "transformer", "frozen"])
@on_processes(4)
def test_replicas_train_as_under_torch(model):
    assert_same_run(*train_with_both(Recipe(model), mesh_shape=(2, 2)), rtol=1e-5, atol=1e-6)


POLICIES = {
    "param_bfloat16": {"param_dtype": torch.bfloat16},
    "param_bfloat16_reduce_float32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "reduce_bfloat16": {"reduce_dtype": torch.bfloat16},
    "inputs_as_they_are": {"reduce_dtype": torch.float32, "cast_forward_inputs": False},
}


def assert_rounds_as_torch(model, **policy):
    # torch's own collectives, as FSDP2 has them; sherd's other transports add up in float32 (test_precision).
    comm = sherd.CommPolicy("torch")
    ours = train_sharded(Recipe(model), mp_policy=sherd.MixedPrecisionPolicy(**policy), comm_policy=comm)
    theirs = train_sharded(Recipe(model), with_=fsdp.fully_shard, mp_policy=fsdp.MixedPrecisionPolicy(**policy))
    # The same casts in the same places give the same bits, on two ranks also in the reduction.
    assert_same_run(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.values
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", ["mlp", "nested", "containers", "transformer"])
@on_processes(2)
def test_mixed_precision_rounds_where_torch_rounds(model, policy):
    assert_rounds_as_torch(model, **POLICIES[policy])


@on_processes(2)
def test_outputs_are_cast_as_under_torch():
    assert_rounds_as_torch("whole_in_one_unit", param_dtype=torch.bfloat16, output_dtype=torch.float32)
