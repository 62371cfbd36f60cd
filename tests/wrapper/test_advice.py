"""The wrapper warns where torch's FSDP1 does, in the same category, and nowhere else."""

import warnings
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

import sherd
from sherd.fsdp1 import advice
from sherd.wrap import ModuleWrapPolicy
from tests.support.models import Block
from tests.support.ranks.bodies import on_threads

APIS = {"torch": fsdp, "sherd": sherd}


def wrap(api, module, **options):
    options.setdefault("device_id", torch.device("cpu"))  # which torch's asks for without an accelerator
    return api.FullyShardedDataParallel(module, **options)


def trained(api, **options):
    model = wrap(api, Block(), **options)
    model(torch.ones(2, 8)).sum().backward()
    return model


def clips_nothing(api):
    model = trained(api)
    model.zero_grad()
    model.clip_grad_norm_(1.0)


def wraps_norms(api, policy=True, precision=True, norms=True):
    inner = nn.BatchNorm1d(8) if norms else nn.LayerNorm(8)
    mixed = api.MixedPrecision(param_dtype=torch.bfloat16) if precision else None
    policy_class = fsdp.wrap.ModuleWrapPolicy if api is fsdp else ModuleWrapPolicy
    policy = policy_class({Block}) if policy else None
    wrap(api, nn.Sequential(Block(), inner), mixed_precision=mixed, auto_wrap_policy=policy)


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


FUTURE = [FutureWarning]
USER = [UserWarning]
CASES = {
    "gradients are clipped": (lambda api: trained(api).clip_grad_norm_(1.0), []),
    "no gradients are clipped": (clips_nothing, USER),
    "a list is wrapped": (lambda api: wrap(api, nn.ModuleList([Block()])), USER),
    "a dict is wrapped": (lambda api: wrap(api, nn.ModuleDict({"block": Block()})), USER),
    "a sequence is wrapped": (lambda api: wrap(api, nn.Sequential(Block())), []),
    "norms, mixed precision, a policy": (wraps_norms, USER),
    "norms, mixed precision": (partial(wraps_norms, policy=False), []),
    "norms, a policy": (partial(wraps_norms, precision=False), []),
    "other norms, mixed precision, a policy": (partial(wraps_norms, norms=False), []),
    "the kind of state dict is set": (
        lambda api: api.FullyShardedDataParallel.set_state_dict_type(
            trained(api), api.StateDictType.SHARDED_STATE_DICT
        ),
        FUTURE,
    ),
    "the kind of state dict is set for a while": (sets_the_type_for_a_while, FUTURE),
    "copies on every rank": (copies_everywhere, USER),
    "a copy on rank 0": (partial(copies_everywhere, rank0_only=True), []),
    "an old name saves": (saves_in_the_old_way, FUTURE),
    "another old name saves": (partial(saves_in_the_old_way, name="sharded_optim_state_dict"), FUTURE),
    "an old name loads": (loads_in_the_old_way, FUTURE * 2),
    "optim_input": (partial(saves_in_the_old_way, optim_input=True), FUTURE * 2),
}
OF_ONE_RANK = {"one rank": (trained, USER)}


def warned(api, cases):
    """By the case: each warning's category and text, and the file that it names."""
    said = {}
    for case in cases:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            {**CASES, **OF_ONE_RANK}[case][0](APIS[api])
        said[case] = [(each.category, str(each.message), each.filename) for each in found]
    return said


@pytest.mark.parametrize(("num_ranks", "cases"), [(2, CASES), (1, OF_ONE_RANK)], ids=["two ranks", "one"])
def test_the_wrapper_warns_where_fsdp1_does_in_the_same_category(world, num_ranks, cases):
    runs = (world(num_ranks).run(warned, api, list(cases)) for api in APIS)
    for rank, (theirs, ours) in enumerate(zip(*runs, strict=True)):
        for case, (_, expected) in cases.items():
            kinds = {kind for kind, _, _ in theirs[case]}  # it may say more, of what it calls itself
            assert kinds >= set(expected) if expected else not kinds, (case, theirs[case])
            expected = [] if rank and case.startswith("the kind of state dict") else expected  # once is enough
            assert [kind for kind, _, _ in ours[case]] == expected, (case, ours[case])
            where = {name for _, _, name in ours[case]}
            assert where <= {__file__}, (case, where, "where the program calls, not where sherd does")


def test_a_module_left_on_the_cpu_beside_an_accelerator_is_named(recwarn):
    here, there = torch.device("cpu"), torch.device("cuda", 0)
    tensors = list(nn.Linear(2, 2).parameters())
    advice.of_the_host(tensors, here)
    advice.of_the_host([], there)
    advice.of_the_host([each.to("meta") for each in tensors], there)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="on the CPU and computes on cuda:0.*pass device_id"):
        advice.of_the_host(tensors, there)


@on_threads(1)
def test_it_is_asked_of_what_is_wrapped_without_a_device_id(monkeypatch):
    seen = []
    monkeypatch.setattr(advice, "of_the_host", lambda tensors, device: seen.append((len(tensors), device.type)))
    for device_id in (torch.device("cpu"), None):
        sherd.FullyShardedDataParallel(Block(), device_id=device_id)
    assert seen == [(len(list(Block().parameters())), "cpu")]
