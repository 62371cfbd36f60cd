"""Is every argument and setting that means nothing refused, and the model left usable?"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from sherd import (
    FSDPModule,
    PrefetchPolicy,
    fully_shard,
    share_comm_ctx,
)
from sherd.errors import (
    PolicyError,
    PolicyTypeError,
)
from tests.api.own_collectives import GatherByList, ReduceByAllReduce
from tests.support.comparing import assert_refused
from tests.support.models import Block, build, noise, shard
from tests.support.sharding import shard_children
from tests.support.training import Recipe, assert_all_same, assert_trained, made, mean_square, steps_sharded, train_job


def stack():
    return nn.Sequential(Block(), Block())


def assert_untouched(model):
    """No module of `model` is a unit and no parameter a shard; it can still be sharded and run."""
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    fully_shard(model)
    with torch.no_grad():
        model(noise(0, 0))


def mesh_of(shape, names=None):
    _clear_sharding_prop_cache()
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


# Policies

WRONG_ARGUMENTS = [
    ({"reshard_after_forward": "yes"}, PolicyTypeError, ("reshard_after_forward", "'yes'")),
    ({"reshard_after_forward": 1.0}, PolicyTypeError, ("reshard_after_forward", "1.0")),
    ({"reshard_after_forward": 3}, PolicyError, ("3", "2 ranks", "[1, 2]")),
    ({"reshard_after_forward": 0}, PolicyError, ("0", "[1, 2]")),
    ({"reshard_after_forward": -1}, PolicyError, ("-1", "[1, 2]")),
    ({"mp_policy": torch.bfloat16}, PolicyTypeError, ("mp_policy", "MixedPrecisionPolicy", "dtype")),
    ({"offload_policy": True}, PolicyTypeError, ("offload_policy", "OffloadPolicy", "bool")),
    ({"prefetch_policy": 2}, PolicyTypeError, ("prefetch_policy", "PrefetchPolicy", "int")),
    ({"ignored_params": 3}, PolicyTypeError, ("ignored_params", "int")),
    ({"shard_placement_fn": Shard(1)}, PolicyTypeError, ("shard_placement_fn", "Shard")),
]


def wrong_argument(index):
    model = made(stack)
    arguments, kind, words = WRONG_ARGUMENTS[index]
    also = TypeError if kind is PolicyTypeError else ValueError
    assert_refused(lambda: fully_shard(model, **arguments), kind, also, *words)
    assert_untouched(model)


@pytest.mark.parametrize("index", range(len(WRONG_ARGUMENTS)), ids=lambda i: str(WRONG_ARGUMENTS[i][0]))
def test_a_wrong_argument_is_refused_before_anything_is_touched(world, index):
    world(2).run(wrong_argument, index)


WRONG_CALLS = [
    ("set_reshard_after_forward", ("no",), PolicyTypeError, "'no'"),
    ("set_reshard_after_forward", (3,), PolicyError, "[1, 2]"),
    ("set_reshard_after_backward", (1,), PolicyTypeError, "set_reshard_after_backward(1)"),
    ("set_unshard_in_backward", (None,), PolicyTypeError, "set_unshard_in_backward(None)"),
    ("set_is_last_backward", ("last",), PolicyTypeError, "set_is_last_backward"),
    ("set_requires_gradient_sync", ("no",), PolicyTypeError, "set_requires_gradient_sync"),
    ("set_requires_all_reduce", ("no",), PolicyTypeError, "set_requires_all_reduce"),
    ("set_gradient_divide_factor", ("2",), PolicyTypeError, "'2'"),
    ("set_gradient_divide_factor", (True,), PolicyTypeError, "True"),
    ("set_gradient_divide_factor", (0,), PolicyError, "above 0"),
    ("set_gradient_divide_factor", (float("nan"),), PolicyError, "nan"),
    ("set_gradient_divide_factor", (float("inf"),), PolicyError, "inf"),
    ("set_reduce_scatter_divide_factor", (-1.0,), PolicyError, "above 0"),
    ("set_force_sum_reduction_for_comms", ("x",), PolicyTypeError, "'x'"),
    ("set_reduce_scatter_unused_params", (1,), PolicyTypeError, "expected a bool"),
    ("set_reduce_scatter_max_input_buffers", (True,), PolicyTypeError, "expected an int"),
    ("set_reduce_scatter_max_input_buffers", (0,), PolicyError, "1 or more"),
    ("set_separate_reduce_scatter_group", ("x",), PolicyTypeError, "expected a bool"),
    ("set_allocate_memory_from_process_group_for_comm", (0,), PolicyTypeError, "expected a bool"),
    ("set_symm_mem_for_comm", (), PolicyError, "CUDA"),
    ("set_modules_to_forward_prefetch", ([nn.Linear(1, 1)],), PolicyError, "Linear"),
    ("set_modules_to_backward_prefetch", ([None],), PolicyError, "NoneType"),
    ("set_modules_to_forward_prefetch", (None,), PolicyTypeError, "None"),
    ("set_custom_all_gather", (len,), PolicyTypeError, "AllGather"),
    ("set_custom_reduce_scatter", ([],), PolicyTypeError, "ReduceScatter"),
    ("set_all_reduce_hook", ("hook",), PolicyTypeError, "hook"),
]


def wrong_call(index):
    model = shard_children(made(stack))
    method, args, kind, word = WRONG_CALLS[index]
    also = TypeError if kind is PolicyTypeError else ValueError
    assert_refused(lambda: getattr(model[0], method)(*args), kind, also, word)
    return train_job(model, mean_square, steps=1)


@pytest.mark.parametrize("index", range(len(WRONG_CALLS)), ids=lambda i: f"{WRONG_CALLS[i][0]}{WRONG_CALLS[i][1]}"[:60])
def test_a_setter_refuses_what_it_cannot_mean(world, index):
    world(2).run(wrong_call, index)


def test_a_prefetch_policy_takes_numbers_from_zero_up():
    for name in ("forward_depth", "backward_depth", "bytes_in_flight"):
        assert_refused(lambda n=name: PrefetchPolicy(**{n: -1}), PolicyError, ValueError, name, "0 or more")
        assert_refused(lambda n=name: PrefetchPolicy(**{n: 1.5}), PolicyTypeError, TypeError, name, "int")
        assert_refused(lambda n=name: PrefetchPolicy(**{n: True}), PolicyTypeError, TypeError, name, "int")
    for name in ("forward_depth", "backward_depth"):
        assert_refused(lambda n=name: PrefetchPolicy(**{n: None}), PolicyTypeError, TypeError, name)
    assert PrefetchPolicy(bytes_in_flight=None).bytes_in_flight is None


def several_kinds():
    model = build("mixed_double")
    shard(model)
    unit = model.layers[0]
    for call in (
        lambda: unit.set_custom_all_gather(GatherByList(waits=True)),
        lambda: unit.set_custom_reduce_scatter(ReduceByAllReduce()),
        lambda: unit.set_all_reduce_hook(lambda reduced: None),
    ):
        assert_refused(call, PolicyError, ValueError, "plain.weight", "other.weight", "separate units")
    return steps_sharded(model, Recipe("mixed_double", steps=2), dist.get_rank())


def test_an_own_collective_for_several_kinds_of_parameters_is_refused(world):
    assert_all_same(world(2).run(several_kinds), Recipe("mixed_double", steps=2))


def memory_beside_an_own_collective():
    model = shard_children(made(stack))
    model[0].set_custom_all_gather(GatherByList(waits=True))
    model[1].set_custom_reduce_scatter(ReduceByAllReduce())
    for block, name in ((model[0], "GatherByList"), (model[1], "ReduceByAllReduce")):
        assert_refused(
            lambda b=block: b.set_allocate_memory_from_process_group_for_comm(True), PolicyError, ValueError, name
        )
        assert_refused(block.set_symm_mem_for_comm, PolicyError, ValueError, name)
    return train_job(model, mean_square)


def test_the_groups_memory_and_an_own_collective_exclude_each_other(world):
    assert_trained(world(2).run(memory_beside_an_own_collective), stack)


def stream_beside_replicas():
    model = shard_children(made(stack), mesh=mesh_of((1, 2), ("copies", "shards")))
    model[0].set_all_reduce_hook(lambda reduced: None, stream=object())  # one replica is none
    model = shard_children(made(stack), mesh=mesh_of((2, 1), ("copies", "shards")))
    assert_refused(
        lambda: model[0].set_all_reduce_hook(lambda reduced: None, stream=object()), PolicyError, ValueError, "stream"
    )


def test_a_hooks_own_stream_beside_replicas_is_refused(world):
    world(2).run(stream_beside_replicas)


def shared_streams():
    model = shard_children(made(stack))
    assert_refused(lambda: share_comm_ctx([model, nn.Linear(1, 1)]), PolicyError, ValueError, "Linear")
    share_comm_ctx([model, model[0]])
    share_comm_ctx([])


def test_streams_are_shared_among_sharded_modules_only(world):
    world(1).run(shared_streams)
