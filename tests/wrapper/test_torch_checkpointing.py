"""torch.distributed.checkpoint.state_dict has the plain model's names, also for the members of a flat parameter."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as Theirs
from torch.nn.parallel import DistributedDataParallel

from sherd import FlatParameter, flatten_optimizer
from sherd import FullyShardedDataParallel as FSDP
from sherd.errors import OptimStateError
from sherd.tensor.ragged import RaggedDTensor
from tests.support.comparing import assert_same, whole
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.training import made as seeded
from tests.wrapper.test_optim_state import (
    AFTER,
    BEFORE,
    Assorted,
    adam,
    assert_same_state,
    beside_torchs,
    made,
    momentum,
    optimizer_of,
    train,
    wrapped,
)

FLAT = ("flat nested", "flat as one")
OTHERS = ("plain", "ddp", "orig nested", "rows", "runs", "mixed")
FULL = StateDictOptions(full_state_dict=True)
ON_HOST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)
IN_COMMON = StateDictOptions(strict=False)
CHILD = "._fsdp_wrapped_module"


def any_made(form, kind=adam, seed=0, steps=range(0)):
    if form != "ddp":
        return made(form, kind, seed, steps)
    model = DistributedDataParallel(wrapped("plain", seed))
    optimizer = optimizer_of(model.module, kind)
    train(model, optimizer, steps)
    return model, optimizer


def full_state(model, optimizer):
    return get_optimizer_state_dict(model, optimizer, options=FULL)


def assert_alike(found, expected, exact=True):
    """As `assert_same_state`; torch gives tuples among the hyper-parameters back as lists."""
    assert_same_state(*({**each, "param_groups": listed(each["param_groups"])} for each in (found, expected)), exact)


def listed(value):
    if isinstance(value, dict):
        return {key: listed(each) for key, each in value.items()}
    return [listed(each) for each in value] if isinstance(value, list | tuple) else value


def is_flat(optimizer):
    return any(isinstance(each, FlatParameter) for group in optimizer.param_groups for each in group["params"])


# In memory


@pytest.mark.parametrize(("flat", "other"), [FLAT, *((FLAT[at % 2], other) for at, other in enumerate(OTHERS))])
@on_threads(2)
def test_full_states_are_by_name_and_go_into_every_other_wrapping(flat, other):
    sources = {form: any_made(form, steps=BEFORE) for form in ("plain", flat, other)}
    expected_values, expected = get_state_dict(*sources["plain"], options=FULL)
    losses = train(*any_made("plain", steps=BEFORE), AFTER)
    for form, (model, optimizer) in sources.items():
        values, state = get_state_dict(model, optimizer, options=FULL)
        assert set(values) == set(expected_values), form
        assert_alike(state, expected, exact=False)
        for each in state["state"].values():
            assert list(each) == list(next(iter(expected["state"].values()))), (form, list(each))
        assert is_flat(optimizer) == (form in (*FLAT, "mixed")), "it is as it was"
    for source, target in ((flat, other), (other, flat)):
        # What is not sharded is not copied: torch would let both sides train the same tensors.
        values, state = copy.deepcopy(get_state_dict(*sources[source], options=FULL))
        model, optimizer = any_made(target, seed=1)
        set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=state, options=FULL)
        assert_alike(full_state(model, optimizer), state)
        found = train(model, optimizer, AFTER)
        torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5, msg=f"{source} into {target}")


@on_processes(2, form=FLAT)
def test_every_option_is_taken(form):
    rank0 = dist.get_rank() == 0
    model, optimizer = made(form, adam, steps=BEFORE)
    expected, values = full_state(model, optimizer), get_model_state_dict(model, options=FULL)
    # Sharded: views of what the optimizer has.
    state = get_optimizer_state_dict(model, optimizer)
    assert_alike(whole(state), expected)
    assert isinstance(state["state"]["blocks.0.up.weight"]["exp_avg"], RaggedDTensor)
    assert not any("_flat_param" in name for name in state["state"])
    on_host = get_optimizer_state_dict(model, optimizer, options=ON_HOST)
    assert bool(on_host) == rank0
    if rank0:
        assert_alike(on_host, expected)
    flattened = get_optimizer_state_dict(model, optimizer, options=FLATTENED)
    assert "state.blocks.0.up.weight.exp_avg" in flattened
    assert flattened["param_groups.own.weight.lr"] == 0.05
    for given, options in (
        (state, StateDictOptions()),
        (expected, FULL),
        (expected if rank0 else {}, FROM_RANK_0),
        (flattened, FLATTENED),
    ):
        into, other = made(form, adam, seed=1)
        set_optimizer_state_dict(into, other, copy.deepcopy(given), options=options)
        assert_alike(full_state(into, other), expected)
        assert all("_flat_param" not in name for name in get_model_state_dict(into)), options
    kept = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert set(values) - set(kept) == {"fixed.weight", "fixed.bias"}
    outer = nn.ModuleDict({"net": model})
    assert set(full_state(outer, optimizer)["state"]) == {f"net.{name}" for name in expected["state"]}


@on_threads(2)
def test_any_optimizer_has_its_state_by_name():
    """A state that was not made yet, one without any, one in two optimizers, and one that steps whole buffers."""
    for kind in (adam, momentum, functools.partial(torch.optim.SGD, lr=0.1)):
        expected = full_state(*made("plain", kind))
        model, optimizer = made("flat nested", kind)
        before = get_model_state_dict(model, options=FULL)
        assert_alike(full_state(model, optimizer), expected)
        assert_same(get_model_state_dict(model, options=FULL), before)
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
        assert all(parameter.grad is None for parameter in model.parameters())
    (model, optimizers), (again, others) = (in_two_optimizers(seed) for seed in (0, 1))
    for step in BEFORE:
        train(model, optimizers[0], [step])
        optimizers[1].step()
    state = get_optimizer_state_dict(model, optimizers)
    assert set(state["state"]) == set(full_state(*made("plain", adam, steps=BEFORE))["state"])
    set_optimizer_state_dict(again, others, state)
    assert_alike(get_optimizer_state_dict(again, others, options=FULL), whole(state))


@on_threads(2)
def test_an_optimizer_whose_own_methods_torch_has_replaced_is_saved_and_loaded():
    (model, optimizer), (into, other) = made("flat nested", adam, steps=BEFORE), made("flat nested", adam, seed=1)
    expected = get_optimizer_state_dict(model, optimizer)
    for each in ((model, optimizer), (into, other)):
        state_dict._patch_optimizer_state_dict(each[0], optimizers=each[1])
    other.load_state_dict(optimizer.state_dict())
    assert_alike(whole(other.state_dict()), whole(expected))


def in_two_optimizers(seed):
    model = wrapped("flat nested", seed)
    own, rest = ([p for n, p in model.named_parameters() if n.startswith("own.") == own] for own in (True, False))
    return model, [adam(own), flatten_optimizer(adam(rest))]


# Through a checkpoint


@on_processes(2, form=("flat nested", "orig nested"))
def test_training_goes_on_to_the_bit_from_what_torchs_functions_saved(tmp_path, form):
    model, optimizer = made(form, adam, steps=BEFORE)
    values, state = get_state_dict(model, optimizer)
    dcp.save({"model": values, "optim": state}, checkpoint_id=tmp_path / form)
    after = train(model, optimizer, AFTER)
    into, other = made(form, adam, seed=1)
    values, state = get_state_dict(into, other)
    dcp.load({"model": values, "optim": state}, checkpoint_id=tmp_path / form)
    set_state_dict(into, other, model_state_dict=values, optim_state_dict=state)
    assert train(into, other, AFTER) == after


def save_checkpoints(folder):
    states = {}
    for form in (*FLAT, "orig nested", "rows"):
        model, optimizer = made(form, adam, steps=BEFORE)
        values, state = get_state_dict(model, optimizer)
        states[form] = {"model": values, "optim": state}
    dcp.save(states, checkpoint_id=folder)


def load_checkpoints(folder, turns):
    expected = full_state(*made("plain", adam, steps=BEFORE))
    losses = train(*made("plain", adam, steps=BEFORE), AFTER)
    for source, target in turns:
        model, optimizer = any_made(target, seed=1)
        values, state = get_state_dict(model, optimizer)
        dcp.load({source: {"model": values, "optim": state}}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=state)
        assert_alike(full_state(model, optimizer), expected, exact=False)
        torch.testing.assert_close(train(model, optimizer, AFTER), losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("saving", "loading", "turns"),
    [
        (2, 1, [FLAT, (FLAT[1], "plain"), (FLAT[0], "rows"), ("rows", FLAT[0])]),
        (2, 3, [FLAT[::-1], (FLAT[0], "ddp"), (FLAT[0], "orig nested"), (FLAT[1], "rows"), ("orig nested", FLAT[0])]),
        (1, 2, [FLAT, ("rows", FLAT[1])]),
        (3, 2, [FLAT[::-1], (FLAT[0], "orig nested")]),
    ],
)
def test_a_checkpoint_of_flat_parameters_loads_on_other_ranks_and_wrappings(world, tmp_path, saving, loading, turns):
    world(saving).run(save_checkpoints, str(tmp_path))
    world(loading).run(load_checkpoints, str(tmp_path), turns, timeout=120)


# Another model


class Tuned(Assorted):
    """With a head of its own, which is not tied."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 4)


def tuned(form):
    model = seeded(Tuned, 1)
    options = {"use_orig_params": form == "orig", "ignored_states": list(model.own.parameters())}
    if form != "orig":
        model.fixed = FSDP(model.fixed)
    if form == "head apart":
        model.head = FSDP(model.head)
    return FSDP(model, **options)


@on_threads(2)
def test_a_model_with_another_head_takes_what_it_has_in_common():
    model, optimizer = made("flat nested", adam, steps=BEFORE)
    values, state = get_state_dict(model, optimizer, options=FULL)
    options = StateDictOptions(full_state_dict=True, strict=False)
    for form in ("head apart", "orig"):
        into = tuned(form)
        values = {name: each for name, each in values.items() if not name.startswith("head.")}
        set_model_state_dict(into, dict(values), options=options)
        found = get_model_state_dict(into, options=FULL)
        assert_same({name: found[name] for name in values}, values, form)
        other = optimizer_of(into, adam)
        set_optimizer_state_dict(into, other, copy.deepcopy(state), options=IN_COMMON)
        taken = full_state(into, other)["state"]
        assert_same({name: taken[name] for name in state["state"]}, state["state"], form)
        assert not taken.get("head.weight", {}).get("step")
    into = tuned("together")
    with pytest.raises(OptimStateError, match=r"head.weight.*one flat parameter here.*use_orig_params=True"):
        set_optimizer_state_dict(into, optimizer_of(into, adam), copy.deepcopy(state), options=IN_COMMON)


# The oracle


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@on_processes(2)
def test_names_and_values_are_those_of_torchs_fsdp1():
    for options in (FULL, FLATTENED):
        found = []
        for kind in (Theirs, FSDP):
            model, optimizer = beside_torchs(kind, nested=True)
            train(model, optimizer, BEFORE)
            found.append(get_state_dict(model, optimizer, options=options))
        (their_values, theirs), (values, ours) = found
        assert set(values) == set(their_values)
        if options is FULL:
            assert list(ours["state"]) == list(theirs["state"])
            assert_alike(ours, theirs, exact=False)
        else:
            assert set(ours) == set(theirs)


def around(wraps, recomputes):
    """A plain model of wrappers, one of them around activation checkpointing, with an optimizer that has stepped."""
    torch.manual_seed(0)
    inner = nn.Sequential(recomputes(wraps(nn.Linear(4, 4))), nn.BatchNorm1d(4))
    model = nn.Sequential(wraps(inner), wraps(nn.Linear(4, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8.0).view(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@on_threads(2)
def test_a_model_around_wrappers_has_the_plain_models_names():
    expected = get_state_dict(*around(lambda module: module, lambda module: module), options=FULL)
    model, optimizer = around(functools.partial(FSDP, use_orig_params=True), checkpoint_wrapper)
    assert list(dict(model.named_modules()))[:4] == ["", *(f"0{path}" for path in ("", CHILD, f"{CHILD}.0"))]
    values, state = get_state_dict(model, optimizer, options=FULL)
    assert values.keys() == expected[0].keys()
    assert state["state"].keys() == expected[1]["state"].keys()
    given = copy.deepcopy(expected)
    set_state_dict(model, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=FULL)
    assert_same(get_model_state_dict(model, options=FULL), expected[0])
    assert_alike(full_state(model, optimizer), expected[1])


@on_threads(2)
def test_names_with_wrappers_of_either_kind_load():
    model = FSDP(nn.Sequential(FSDP(nn.Linear(4, 4)), nn.Linear(4, 2)))
    for value, child in enumerate((CHILD, "._checkpoint_wrapped_module")):  # sherd's own before 0.3
        child = f"{child.lstrip('.')}."
        given = {f"{child}0.{child}": (4, 4), f"{child}1.": (2, 4)}
        state = {f"{path}weight": torch.full(shape, float(value)) for path, shape in given.items()}
        state |= {f"{path}bias": torch.full(shape[:1], float(value)) for path, shape in given.items()}
        model.load_state_dict(state)
        assert all((each == value).all() for each in model.state_dict().values()), child
