"""Every argument and setting that means nothing is refused, and the model is left usable."""

from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from sherd import Blocks, CommPolicy, Flat, Owned, PrefetchPolicy, fully_shard, share_comm_ctx
from sherd.errors import PlacementError, PolicyError, PolicyTypeError
from tests.api.checks import assert_refuses, assert_trains, named_mesh, untouched
from tests.api.own_collectives import GatherByList, ReduceByAllReduce
from tests.support.models import build, chain
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded
from tests.support.training import made

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
    ({"comm_policy": "gloo"}, PolicyTypeError, ("comm_policy", "CommPolicy", "str")),
    ({"comm_policy": CommPolicy}, PolicyTypeError, ("comm_policy", "CommPolicy")),
    ({"placement": "flat"}, PolicyTypeError, ("placement='flat'", "Flat()")),
    ({"placement": Flat}, PolicyTypeError, ("placement", "Flat()")),
    ({"placement": Blocks}, PolicyTypeError, ("placement", "Blocks")),
    ({"placement": 0}, PolicyTypeError, ("placement=0", "Flat()")),
    ({"placement": Replicate()}, PolicyTypeError, ("placement", "Replicate")),
    ({"placement": (Flat(),)}, PolicyTypeError, ("placement=(Flat()", "Flat()")),
    ({"placement": lambda parameter: Flat()}, PolicyTypeError, ("placement", "function")),
    ({"placement": Shard(2)}, PlacementError, ("0.up.weight", "Shard(2)")),
    ({"placement": Shard(1)}, PlacementError, ("0.up.bias", "Shard(1)")),
    ({"shard_placement_fn": Flat()}, PolicyTypeError, ("shard_placement_fn", "Flat")),
    ({"shard_placement_fn": Shard(1)}, PolicyTypeError, ("shard_placement_fn", "Shard")),
]
# What a `shard_placement_fn` returns.
WRONG_PLACEMENTS = [
    (lambda parameter: Shard(2), ("0.up.weight", "Shard(2)", "(16, 8)")),
    (lambda parameter: Shard(-3), ("0.up.weight", "Shard(-3)")),
    (lambda parameter: Shard(1), ("0.up.bias", "Shard(1)")),
    (lambda parameter: Partial(), ("0.up.weight", "Partial")),
    (lambda parameter: Flat, ("0.up.weight", "Flat()")),
    (lambda parameter: "flat", ("0.up.weight", "'flat'")),
    (lambda parameter: 0, ("0.up.weight", "0", "Shard")),
    (lambda parameter: 1, ("0.up.weight", "1", "Blocks(rows)")),
    (lambda parameter: Owned() if parameter.dim() == 2 else True, ("0.up.bias", "True")),
]


@on_threads(2)
def test_a_wrong_argument_is_refused_before_anything_is_touched():
    model = chain()
    placed = [({"shard_placement_fn": function}, PlacementError, words) for function, words in WRONG_PLACEMENTS]
    for arguments, kind, words in WRONG_ARGUMENTS + placed:
        with untouched(model):
            assert_refuses(partial(fully_shard, model, **arguments), kind, *words)
    scalar = nn.Module()
    scalar.gain = nn.Parameter(torch.tensor(1.0))
    assert_refuses(
        lambda: fully_shard(scalar, shard_placement_fn=lambda param: Shard(0)), PlacementError, "gain", "None"
    )
    assert_trains(fully_shard(model, placement=Flat()), chain)


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


@on_threads(2)
def test_a_setter_refuses_what_it_cannot_mean():
    model = sharded(chain())
    for method, args, kind, word in WRONG_CALLS:
        assert_refuses(partial(getattr(model[0], method), *args), kind, word)
    assert_trains(model, chain)


def test_a_policy_takes_only_numbers_and_names_that_mean_something():
    for name in ("forward_depth", "backward_depth", "bytes_in_flight"):
        assert_refuses(partial(PrefetchPolicy, **{name: -1}), PolicyError, name, "0 or more")
        for wrong in (1.5, True):
            assert_refuses(partial(PrefetchPolicy, **{name: wrong}), PolicyTypeError, name, "int")
    for name in ("forward_depth", "backward_depth"):
        assert_refuses(partial(PrefetchPolicy, **{name: None}), PolicyTypeError, name)
    assert PrefetchPolicy(bytes_in_flight=None).bytes_in_flight is None
    for rows in (0, -1, "2", True, None, 1.0):
        assert_refuses(partial(Blocks, rows), PlacementError, repr(rows), "positive int")
    for transport in ("nccl", "", "GLOO", 3, None, ["gloo"], True):
        words = (repr(transport), "auto, torch, coalesced, gloo, shared_memory")
        assert_refuses(partial(CommPolicy, transport), PolicyError, *words)


# Own collectives, hooks and streams


@on_threads(2)
def test_an_own_collective_for_several_kinds_of_parameters_is_refused():
    model = sharded(build("mixed_double"))
    for call in (
        lambda: model.layers[0].set_custom_all_gather(GatherByList(waits=True)),
        lambda: model.layers[0].set_custom_reduce_scatter(ReduceByAllReduce()),
        lambda: model.layers[0].set_all_reduce_hook(lambda reduced: None),
    ):
        assert_refuses(call, PolicyError, "plain.weight", "other.weight", "separate units")
    assert_trains(model, partial(build, "mixed_double"))


@on_threads(2)
def test_the_groups_memory_and_an_own_collective_exclude_each_other():
    model = sharded(chain())
    model[0].set_custom_all_gather(GatherByList(waits=True))
    model[1].set_custom_reduce_scatter(ReduceByAllReduce())
    for block, name in ((model[0], "GatherByList"), (model[1], "ReduceByAllReduce")):
        assert_refuses(partial(block.set_allocate_memory_from_process_group_for_comm, True), PolicyError, name)
        assert_refuses(block.set_symm_mem_for_comm, PolicyError, name)
    assert_trains(model, chain)


def uneven():
    """Wide rows, and a short vector beside them."""
    return nn.Sequential(nn.Linear(8, 41), nn.Linear(41, 8))


def own_collectives_of(placement):
    model = sharded(made(uneven), placement=placement)
    for call in (
        lambda: model[0].set_custom_all_gather(GatherByList(waits=True)),
        lambda: model[0].set_custom_reduce_scatter(ReduceByAllReduce()),
        lambda: model[0].set_allocate_memory_from_process_group_for_comm(True),
    ):
        assert_refuses(call, PolicyError, "weight", "unequal", "Flat()")
    assert_trains(model, uneven)


def test_own_collectives_are_given_equal_parts_which_whole_tensors_and_large_blocks_have_not(threads):
    threads(2).run(own_collectives_of, Owned())
    threads(3).run(own_collectives_of, Blocks(40))


@on_threads(2)
def test_own_collectives_serve_equal_runs():
    model = sharded(chain(), "flat")
    model[0].set_custom_all_gather(GatherByList(waits=True))
    model[1].set_custom_reduce_scatter(ReduceByAllReduce())
    assert_trains(model, chain)


@on_threads(2)
def test_a_hooks_own_stream_beside_replicas_is_refused():
    model = sharded(chain(), mesh=named_mesh((1, 2), "copies", "shards"))
    model[0].set_all_reduce_hook(lambda reduced: None, stream=object())  # one replica is none
    model = sharded(chain(), mesh=named_mesh((2, 1), "copies", "shards"))
    assert_refuses(lambda: model[0].set_all_reduce_hook(lambda reduced: None, stream=object()), PolicyError, "stream")


@on_threads(1)
def test_streams_are_shared_among_sharded_modules_only():
    model = sharded(chain())
    assert_refuses(lambda: share_comm_ctx([model, nn.Linear(1, 1)]), PolicyError, "Linear")
    share_comm_ctx([model, model[0]])
    share_comm_ctx([])
