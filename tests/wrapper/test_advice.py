"""Does the wrapper warn where torch's FSDP1 does, in the same category, and nowhere else?"""

import warnings
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

import sherd
from sherd.api import advice
from sherd.wrap import ModuleWrapPolicy
from tests.support.models import Block

APIS = {"torch": fsdp, "sherd": sherd}


def wrap(api, module, **options):
    options.setdefault("device_id", torch.device("cpu"))  # which torch's asks for without an accelerator
    return api.FullyShardedDataParallel(module, **options)


def trained(api, **options):
    model = wrap(api, Block(), **options)
    model(torch.ones(2, 8)).sum().backward()
    return model


def clips(api):
    trained(api).clip_grad_norm_(1.0)


def clips_nothing(api):
    model = trained(api)
    model.zero_grad()
    model.clip_grad_norm_(1.0)


def wraps_a_list(api):
    wrap(api, nn.ModuleList([Block()]))


def wraps_a_dict(api):
    wrap(api, nn.ModuleDict({"block": Block()}))


def wraps_a_sequence(api):
    wrap(api, nn.Sequential(Block()))


def wraps_norms(api, policy=True, precision=True, norms=True):
    inner = nn.BatchNorm1d(8) if norms else nn.LayerNorm(8)
    mixed = api.MixedPrecision(param_dtype=torch.bfloat16) if precision else None
    policy_class = fsdp.wrap.ModuleWrapPolicy if api is fsdp else ModuleWrapPolicy
    wrap(
        api,
        nn.Sequential(Block(), inner),
        mixed_precision=mixed,
        auto_wrap_policy=policy_class({Block}) if policy else None,
    )


def sets_the_type(api):
    api.FullyShardedDataParallel.set_state_dict_type(trained(api), api.StateDictType.SHARDED_STATE_DICT)


def sets_the_type_for_a_while(api):
    with api.FullyShardedDataParallel.state_dict_type(trained(api), api.StateDictType.SHARDED_STATE_DICT):
        pass


def copies_everywhere(api, rank0_only=False):
    model = wrap(api, Block())
    full = api.FullyShardedDataParallel
    after_it_has_warned = suppress(RuntimeError) if api is fsdp else nullcontext()  # torch's, on a CPU
    with after_it_has_warned, full.summon_full_params(model, True, False, rank0_only, offload_to_cpu=True):
        pass


def saves_in_the_old_way(api, name="full_optim_state_dict", optim_input=False):
    model = trained(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    full = api.FullyShardedDataParallel
    state = getattr(full, name)(model, optimizer, **({"optim_input": list(model.parameters())} if optim_input else {}))
    return full, model, optimizer, state


def loads_in_the_old_way(api):
    full, model, optimizer, state = saves_in_the_old_way(api)
    full.scatter_full_optim_state_dict(state, model, optim=optimizer)


CASES = {
    "gradients are clipped": (clips, 2, []),
    "no gradients are clipped": (clips_nothing, 2, [UserWarning]),
    "a list is wrapped": (wraps_a_list, 2, [UserWarning]),
    "a dict is wrapped": (wraps_a_dict, 2, [UserWarning]),
    "a sequence is wrapped": (wraps_a_sequence, 2, []),
    "norms, mixed precision, a policy": (wraps_norms, 2, [UserWarning]),
    "norms, mixed precision": (partial(wraps_norms, policy=False), 2, []),
    "norms, a policy": (partial(wraps_norms, precision=False), 2, []),
    "other norms, mixed precision, a policy": (partial(wraps_norms, norms=False), 2, []),
    "the kind of state dict is set": (sets_the_type, 2, [FutureWarning]),
    "the kind of state dict is set for a while": (sets_the_type_for_a_while, 2, [FutureWarning]),
    "one rank": (trained, 1, [UserWarning]),
    "copies on every rank": (copies_everywhere, 2, [UserWarning]),
    "a copy on rank 0": (partial(copies_everywhere, rank0_only=True), 2, []),
    "an old name saves": (saves_in_the_old_way, 2, [FutureWarning]),
    "another old name saves": (partial(saves_in_the_old_way, name="sharded_optim_state_dict"), 2, [FutureWarning]),
    "an old name loads": (loads_in_the_old_way, 2, [FutureWarning, FutureWarning]),
    "optim_input": (partial(saves_in_the_old_way, optim_input=True), 2, [FutureWarning, FutureWarning]),
}


def warned(api, case):
    action, _, _ = CASES[case]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        action(APIS[api])
    return [(each.category, str(each.message), each.filename) for each in found]


@pytest.mark.parametrize("case", CASES)
def test_the_wrapper_warns_where_fsdp1_does_in_the_same_category(world, case):
    _, num_ranks, expected = CASES[case]
    for theirs, ours in zip(
        world(num_ranks).run(warned, "torch", case), world(num_ranks).run(warned, "sherd", case), strict=True
    ):
        kinds = {kind for kind, _, _ in theirs}  # it may say more, of what it calls itself
        assert kinds >= set(expected) if expected else not kinds, theirs
        assert [kind for kind, _, _ in ours] == expected, ours
        assert all(name == __file__ for _, _, name in ours), "where the program calls, not where sherd does"


def test_a_module_left_on_the_cpu_beside_an_accelerator_is_named(recwarn):
    here, there = torch.device("cpu"), torch.device("cuda", 0)
    tensors = list(nn.Linear(2, 2).parameters())
    advice.of_the_host(tensors, here)
    advice.of_the_host([], there)
    advice.of_the_host([each.to("meta") for each in tensors], there)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="on the CPU and computes on cuda:0.*pass device_id"):
        advice.of_the_host(tensors, there)


def wrapped_for(device_id):
    seen = []
    original = advice.of_the_host
    advice.of_the_host = lambda tensors, computes_on: seen.append((len(tensors), computes_on.type))
    try:
        sherd.FullyShardedDataParallel(Block(), device_id=device_id)
    finally:
        advice.of_the_host = original
    return seen


def test_it_is_asked_of_what_is_wrapped_without_a_device_id(world):
    assert world(1).run(wrapped_for, None) == [[(len(list(Block().parameters())), "cpu")]]
    assert world(1).run(wrapped_for, torch.device("cpu")) == [[]]
