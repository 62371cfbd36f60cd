"""What an optimizer keeps is the same by name in every wrapping, and goes from any into any other."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Theirs
from torch.distributed.tensor import DTensor

import sherd
from sherd import Flat, RaggedDTensor, flatten_optimizer, fully_shard
from sherd import FullyShardedDataParallel as FSDP
from sherd.errors import OptimStateError, SherdError
from sherd.fsdp1.state_dict_type import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from tests.support.comparing import assert_refused, assert_same, whole
from tests.support.meshes import mesh_of
from tests.support.models import noise
from tests.support.models.shapes import Gained
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.suites import share
from tests.support.training import made as seeded

WIDTH = 5


class Assorted(nn.Module):
    """A tied weight, two blocks, a frozen layer and one to ignore."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Gained(WIDTH, 7) for _ in range(2))
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.own = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.own(x) + self.fixed(x))


def wrapped(form, seed=0):
    """The model in one of the forms: how it is wrapped, and by which front end."""
    torch.manual_seed(seed)
    model = Assorted()
    own = list(model.own.parameters())
    if form in ("rows", "runs"):
        for unit in (model.blocks[0], model.blocks[1], model):
            fully_shard(unit, placement=Flat() if form == "runs" else None, ignored_params=set(own))
    elif form == "mixed":
        fully_shard(model.blocks[0])
        model.blocks[1] = FSDP(model.blocks[1], use_orig_params=False)
        model = FSDP(model, use_orig_params=True, ignored_modules=[model.own])
    elif form.endswith("nested"):
        orig = form.startswith("orig")
        model.blocks = nn.ModuleList([FSDP(each, use_orig_params=orig) for each in model.blocks])
        model.fixed = FSDP(model.fixed, use_orig_params=orig)
        model = FSDP(model, use_orig_params=orig, ignored_modules=[model.own])
    elif form != "plain":
        left = [*own, *model.fixed.parameters()]
        model = FSDP(model, use_orig_params=form.startswith("orig"), ignored_states=left)
    return model


FORMS = ("rows", "runs", "mixed", "orig nested", "orig as one", "flat nested", "flat as one")


def adam(groups):
    return torch.optim.Adam(groups, lr=0.02, eps=1e-2)


def momentum(groups):
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def optimizer_of(model, kind):
    """In two groups: what is ignored by all, and the rest, the frozen layer too."""
    named = dict(model.named_parameters())
    apart = [each for name, each in named.items() if name.startswith("own.")]
    rest = [each for name, each in named.items() if not name.startswith("own.")]
    return kind([{"params": rest}, {"params": apart, "lr": 0.05}])


def loss_of(model, step):
    tokens = (noise(step, 0, 3, 4).abs() * 1000).long() % 11
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def train(model, optimizer, steps):
    """The losses of these steps; every rank has the same batch, so they are those of one process."""
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made(form, kind, seed=0, steps=range(0)):
    model = wrapped(form, seed)
    optimizer = optimizer_of(model, kind)
    train(model, optimizer, steps)
    return model, optimizer


def plain_state(kind, steps):
    """What an optimizer of one process keeps, by name, and its groups."""
    model, optimizer = made("plain", kind, steps=steps)
    names = {id(each): name for name, each in model.named_parameters()}
    state = {names[id(each)]: state for each, state in optimizer.state.items()}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[id(each)] for each in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def assert_same_state(found, expected, exact=True):
    """By names, in any order; exactly, or as near as sums in another order are."""
    how_close = {} if exact else {"rtol": 1e-4, "atol": 1e-6}
    assert_same(found["state"], expected["state"], **how_close)
    assert grouped(found) == grouped(expected)


def grouped(state):
    return [{**group, "params": sorted(group["params"])} for group in state["param_groups"]]


# The matrix

BEFORE, AFTER = range(2), range(2, 4)


def save_all(kind, forms, folder):
    """Full states in a file; sharded ones, with the models, in a distributed checkpoint; and the losses that follow."""
    full, sharded, losses = {}, {}, {}
    expected = plain_state(kind, BEFORE)
    for form in forms:
        model, optimizer = made(form, kind, steps=BEFORE)
        full[form] = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        assert_same_state(full[form], expected, exact=False)
        states = FSDP.sharded_optim_state_dict(model, optimizer)
        assert_same_state(whole(states), full[form])
        for parameter, state in states["state"].items():
            for key, value in state.items():
                assert isinstance(value, DTensor) == (key != "step" and not parameter.startswith("own."))
        sharded[form] = copy.deepcopy({"model": model.state_dict(), "optim": states})
        losses[form] = train(model, optimizer, AFTER)
    dcp.save(sharded, checkpoint_id=f"{folder}/dcp")
    if dist.get_rank() == 0:
        torch.save((full, losses), f"{folder}/full.pt")


def load_all(kind, forms, folder, full_turns, turns):
    """In each turn every form takes another form's state: a full one in `full_turns`, sharded, with the model, in
    `turns`."""
    full, losses = torch.load(f"{folder}/full.pt", weights_only=False)
    targets = {form: made(form, kind, seed=1, steps=range(1)) for form in forms}
    for turn in full_turns:
        pairs = {forms[(at + turn) % len(forms)]: form for at, form in enumerate(forms)}
        for saved, form in pairs.items():
            FSDP.optim_state_dict_to_load(*targets[form], full[saved], load_directly=True)
            assert_same_state(FSDP.optim_state_dict(*targets[form]), full[saved])
        if turn not in turns:
            continue
        states = {saved: sharded_state(*targets[form]) for saved, form in pairs.items()}
        for state in states.values():
            spoil(state["optim"]["state"])
        dcp.load(states, checkpoint_id=f"{folder}/dcp")
        for saved, form in pairs.items():
            model, optimizer = targets[form]
            model.load_state_dict(states[saved]["model"])
            loaded = FSDP.flatten_sharded_optim_state_dict(states[saved]["optim"], model, optimizer)
            optimizer.load_state_dict(loaded)
            assert_same_state(FSDP.optim_state_dict(model, optimizer), full[saved])
            torch.testing.assert_close(train(model, optimizer, AFTER), losses[saved], rtol=1e-4, atol=1e-5)


def sharded_state(model, optimizer):
    return {"model": model.state_dict(), "optim": FSDP.sharded_optim_state_dict(model, optimizer)}


def spoil(states):
    with torch.no_grad():
        for state in states.values():
            for value in state.values():
                value.fill_(-77)


def exchange(world, folder, kind, saving, loading, forms, full_turns, turns):
    """On `saving` ranks and on `loading` ones."""
    world(saving).run(save_all, kind, forms, str(folder), timeout=120)
    world(loading).run(load_all, kind, forms, str(folder), full_turns, turns, timeout=120)


def test_a_wrapping_loads_what_another_has_saved(world, tmp_path):
    exchange(world, tmp_path, adam, 2, 3, ("rows", "flat nested"), (1,), (1,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "saving", "loading", "full_turns", "turns"),
    # Each turn with one of the optimizers.
    [
        (adam, 2, 3, share((0, 2, 3, 4, 6), tuple(range(len(FORMS)))), (3,)),
        (momentum, 3, 2, share((1, 5), tuple(range(len(FORMS)))), ()),
    ],
    ids=["adam", "momentum"],
)
def test_every_wrapping_loads_what_every_other_has_saved(world, tmp_path, kind, saving, loading, full_turns, turns):
    exchange(world, tmp_path, kind, saving, loading, FORMS, full_turns, turns)


# Any optimizer


class Odd(torch.optim.Optimizer):
    """State of every sort: elements as a plain tensor of this rank's part, another shape, a number, none, a flag."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1})

    def step(self, closure=None):
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            grad = parameter.grad.to_local() if isinstance(parameter, DTensor) else parameter.grad
            if not local.numel():
                continue  # as one may who writes for shards
            state = self.state[parameter]
            if not state:
                state.update(seen=torch.zeros_like(local), table=torch.arange(3.0), count=0, none=None, flag=True)
            state["seen"] += grad
            state["count"] += 1
            with torch.no_grad():
                local -= 0.1 * grad


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, amsgrad=True, eps=1e-2),
    "foreach": lambda groups: torch.optim.AdamW(groups, eps=1e-2, foreach=True),
    "fused": lambda groups: torch.optim.AdamW(groups, eps=1e-2, fused=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, eps=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.9, centered=True, eps=1e-2),
    "rprop": torch.optim.Rprop,
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "odd": Odd,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_threads(2)
def test_any_optimizer_keeps_what_it_keeps_in_one_process(name):
    kind = OPTIMIZERS[name]
    for form in ("flat nested", "mixed" if name in ("adamw", "odd") else "orig nested"):
        model, optimizer = made(form, kind, steps=BEFORE)
        state = FSDP.optim_state_dict(model, optimizer)
        assert_same_state(state, plain_state(kind, BEFORE), exact=False)
        again, other = made(form, kind, seed=1, steps=range(1))
        other.load_state_dict(FSDP.optim_state_dict_to_load(again, other, state))
        assert_same_state(FSDP.optim_state_dict(again, other), state)
        again.load_state_dict(model.state_dict())
        assert_same(train(again, other, AFTER), train(model, optimizer, AFTER), form, rtol=1e-6, atol=1e-6)


@on_threads(2, form=("runs", "orig nested", "flat nested"))
def test_a_flattened_optimizer_has_the_same_state(form):
    model, optimizer = made(form, adam)
    flatten_optimizer(optimizer)
    train(model, optimizer, BEFORE)
    state = FSDP.optim_state_dict(model, optimizer)
    assert_same_state(state, plain_state(adam, BEFORE), exact=False)
    again, other = made(form, adam, seed=1)
    flatten_optimizer(other)
    FSDP.optim_state_dict_to_load(again, other, state, load_directly=True)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(train(again, other, AFTER), train(model, optimizer, AFTER))


@pytest.mark.filterwarnings("ignore:the optimizer state to load has no:UserWarning")
@pytest.mark.parametrize("form", FORMS)
@on_threads(2)
def test_subsets_outer_models_and_optimizers_without_state(form):
    model, optimizer = made(form, adam)
    assert FSDP.optim_state_dict(model, optimizer)["state"] == {}
    empty = FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer))
    optimizer.load_state_dict(empty)
    train(model, optimizer, BEFORE)
    all_of_it = FSDP.optim_state_dict(model, optimizer)
    within = FSDP.optim_state_dict(nn.ModuleDict({"net": model}), optimizer)
    assert set(within["state"]) == {f"net.{name}" for name in all_of_it["state"]}
    apart = [each for name, each in model.named_parameters() if name.startswith("own.")]
    subset = adam([apart[0]])
    loaded = FSDP.optim_state_dict_to_load(model, subset, all_of_it, load_directly=True)
    assert loaded["param_groups"][0]["lr"] == 0.05
    found = FSDP.optim_state_dict(model, subset)
    assert list(found["state"]) == ["own.weight"] == found["param_groups"][0]["params"]
    torch.testing.assert_close(found["state"]["own.weight"], all_of_it["state"]["own.weight"])
    with sherd.unsharded(model):
        assert_same_state(FSDP.optim_state_dict(model, optimizer), all_of_it)
    states = FSDP.optim_state_dict(model, optimizer, {"state": optimizer.state_dict()["state"]})
    assert_same_state({**states, "param_groups": all_of_it["param_groups"]}, all_of_it)
    assert list(states) == ["state"]
    assert_loads_alike(
        {**FSDP.optim_state_dict_to_load(model, optimizer, states), "param_groups": []},
        {**FSDP.optim_state_dict_to_load(model, optimizer, all_of_it), "param_groups": []},
    )


@on_threads(2)
def test_ranks_may_list_parameters_in_any_order():
    """The two blocks have the same shapes: their states would be mixed up without a word."""
    for saved, form in (("orig nested", "rows"), ("rows", "flat nested"), ("flat nested", "orig nested")):
        source = wrapped(saved)
        in_order = adam(source.parameters())
        train(source, in_order, BEFORE)
        expected = FSDP.optim_state_dict(source, in_order)
        model = wrapped(form)
        listed = list(model.parameters())
        optimizer = adam(listed[::-1] if dist.get_rank() == 1 else listed)
        train(model, optimizer, BEFORE)
        assert_same_state(FSDP.optim_state_dict(model, optimizer), expected, exact=False)
        for state in (FSDP.sharded_optim_state_dict(source, in_order), expected):
            spoil(optimizer.state)
            FSDP.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
            assert_same_state(FSDP.optim_state_dict(model, optimizer), expected)
        of_rank_0 = expected if dist.get_rank() == 0 else None
        optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(of_rank_0, model, optim=optimizer))
        assert_same_state(FSDP.optim_state_dict(model, optimizer), expected)


# Which ranks have it, and in which form


def assert_loads_alike(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert_same_state(whole(found), whole(expected))


@on_threads(2)
def test_rank_0_alone_may_have_the_state():
    rank = dist.get_rank()
    for form in ("flat nested", "orig as one", "rows"):
        model, optimizer = made(form, adam, steps=BEFORE)
        expected = FSDP.optim_state_dict(model, optimizer)
        full = FSDP.full_optim_state_dict(model, optimizer)
        assert (full == {}) == (rank > 0)
        wanted = FSDP.optim_state_dict_to_load(model, optimizer, expected)
        given = (full if rank == 0 else None, model)
        assert_loads_alike(FSDP.scatter_full_optim_state_dict(*given, optim=optimizer), wanted)
        if form != "rows":
            config = FullOptimStateDictConfig(rank0_only=True)
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), config):
                assert (FSDP.optim_state_dict(model, optimizer) == {}) == (rank > 0)
                assert_loads_alike(FSDP.optim_state_dict_to_load(model, optimizer, full), wanted)
        for wrong, text in (({}, 'must have the keys "state"'), ({"state": {0: {}}}, "keyed by numbers")):
            with pytest.raises(OptimStateError, match=text):
                FSDP.scatter_full_optim_state_dict(wrong if rank == 0 else None, model, optim=optimizer)
        parts = FSDP.sharded_optim_state_dict(model, optimizer)
        with pytest.raises(OptimStateError, match="rank 0 has DTensors"):
            FSDP.scatter_full_optim_state_dict(parts if rank == 0 else None, model, optim=optimizer)


@on_threads(2)
def test_a_tensor_inside_a_dict_of_the_state_reaches_the_other_ranks_too():
    """As an optimizer of a user's may keep it."""
    model, optimizer = made("orig as one", adam, steps=BEFORE)
    full = FSDP.full_optim_state_dict(model, optimizer)
    for state in full.get("state", {}).values():
        state["kept"] = {"scale": torch.tensor([2.0, 3.0]), "rule": "max"}
    found = FSDP.scatter_full_optim_state_dict(full if dist.get_rank() == 0 else None, model, optim=optimizer)
    assert found["state"]
    for state in found["state"].values():
        assert_same(state["kept"], {"scale": torch.tensor([2.0, 3.0]), "rule": "max"})


@on_threads(2)
def test_a_state_has_the_form_that_the_model_is_set_to():
    model, optimizer = made("flat nested", adam, steps=BEFORE)
    full = FSDP.optim_state_dict(model, optimizer)
    runs = FSDP.sharded_optim_state_dict(model, optimizer)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        assert_loads_alike(FSDP.optim_state_dict(model, optimizer), runs)
    config = ShardedOptimStateDictConfig(_use_dtensor=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), config):
        rows = FSDP.optim_state_dict(model, optimizer)
    for found, kind in ((runs, RaggedDTensor), (rows, DTensor)):
        value = found["state"]["blocks.0.up.weight"]["exp_avg"]
        assert type(value) is kind
        assert value.shape == (7, WIDTH)
        assert_same_state(whole(found), full)
        assert_loads_alike(
            FSDP.optim_state_dict_to_load(model, optimizer, found),
            FSDP.optim_state_dict_to_load(model, optimizer, full),
        )
    # The sharded form shares the optimizer's memory, the full one does not.
    for state in optimizer.state.values():
        state["exp_avg"].fill_(3.0)
        state["step"].fill_(7.0)
    assert all((state["exp_avg"] == 3).all() for state in whole(runs)["state"].values())
    assert full["state"]["own.weight"]["step"] == 2
    assert not any((state["exp_avg"] == 3).all() for state in full["state"].values())
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, full, load_directly=True)
    for state in loaded["state"].values():
        state["exp_avg"].fill_(5.0)
    assert not any((state["exp_avg"] == 5).all() for state in full["state"].values())


@on_threads(2)
def test_rows_are_dtensors_of_torchs_own_in_the_models_state_and_in_the_optimizers():
    for form in FORMS[2:]:
        model, optimizer = made(form, adam, steps=BEFORE)
        for on_host in (False, True):
            kinds = ShardedStateDictConfig(on_host, True), ShardedOptimStateDictConfig(on_host, True)
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *kinds):
                states = FSDP.optim_state_dict(model, optimizer)["state"]
                found = {"model": model.state_dict(), **states}
            classes = {(of, name): type(value) for of, state in found.items() for name, value in state.items()}
            assert set(classes.values()) == {DTensor, torch.Tensor}, f"{form}: {classes}"


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "NO_SHARD"])
@on_threads(4, orig=(True, False))
def test_every_strategy_exchanges_states_with_a_fully_sharded_model(strategy, orig):
    mesh = mesh_of((2, 2)) if strategy == "HYBRID_SHARD" else None
    chosen = {"sharding_strategy": sherd.ShardingStrategy[strategy], "device_mesh": mesh, "use_orig_params": orig}
    model = seeded(Assorted)
    model.fixed = FSDP(model.fixed, **chosen)
    model = FSDP(model, ignored_modules=[model.own], **chosen)
    optimizer = optimizer_of(model, adam)
    train(model, optimizer, BEFORE)
    state = FSDP.optim_state_dict(model, optimizer)
    assert_same_state(state, plain_state(adam, BEFORE), exact=False)
    again, other = made("flat nested", adam, seed=1)
    for form in (state, FSDP.sharded_optim_state_dict(model, optimizer)):
        FSDP.optim_state_dict_to_load(again, other, form, load_directly=True)
        assert_same_state(FSDP.optim_state_dict(again, other), state)
    theirs = FSDP.sharded_optim_state_dict(again, other)
    FSDP.optim_state_dict_to_load(model, optimizer, theirs, load_directly=True)
    assert_same_state(FSDP.optim_state_dict(model, optimizer), state)


# Keys, and what an optimizer was built from


@pytest.mark.parametrize("form", FORMS)
@on_threads(2)
def test_keys_are_in_the_order_in_which_the_optimizer_has_them(form):
    order = ["step", "exp_avg", "exp_avg_sq"]
    model, optimizer = made(form, adam, steps=BEFORE)
    full, parts = FSDP.optim_state_dict(model, optimizer), FSDP.sharded_optim_state_dict(model, optimizer)
    turned = {name: dict(reversed(state.items())) for name, state in full["state"].items()}
    for given in (full, parts):
        loaded = FSDP.optim_state_dict_to_load(*made(form, adam), given)
        assert {name: list(state) for name, state in given["state"].items()} == dict.fromkeys(full["state"], order)
        assert all(list(state) == order for state in loaded["state"].values())
    # Whatever comes, one that has state keeps its own order.
    FSDP.optim_state_dict_to_load(model, optimizer, {**full, "state": turned}, load_directly=True)
    assert all(list(state) == order for state in optimizer.state.values())
    assert_same_state(FSDP.optim_state_dict(model, optimizer), full)


@on_threads(2, form=("flat nested", "orig nested", "rows"))
def test_an_optimizer_may_be_given_as_what_it_was_built_from(form):
    model = wrapped(form)
    optimizer = adam(model.parameters())
    train(model, optimizer, BEFORE)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    expected = FSDP.optim_state_dict_to_load(model, optimizer, full)
    parameters = list(model.parameters())
    for given in (None, parameters, (each for each in parameters), [{"params": parameters}]):
        assert_loads_alike(FSDP.shard_full_optim_state_dict(full, model, given), expected)
    groups = [{"params": parameters[:1], "lr": 0.5}, {"params": iter(parameters[1:])}]
    full = {"state": full["state"]}
    loaded = FSDP.shard_full_optim_state_dict(full, model, groups)
    assert_same_state(whole({**loaded, "param_groups": []}), whole({**expected, "param_groups": []}))
    rest = list(range(1, len(parameters)))
    assert loaded["param_groups"] == [{"lr": 0.5, "params": [0]}, {"params": rest}]
    kept = FSDP.optim_state_dict_to_load(model, optimizer, full)["param_groups"]
    assert kept == optimizer.state_dict()["param_groups"]
    for wrong, kind, *texts in (
        ([], ValueError, "should not be empty"),
        (3, TypeError, "but got 3"),
        ([3], TypeError, "not of"),
        ([{"lr": 1}], AssertionError, 'map "params"'),
        ([torch.zeros(2)], ValueError, "parameter 0 in group 0 of optim_input", "(2,)"),
    ):
        assert_refused(
            functools.partial(FSDP.shard_full_optim_state_dict, full, model, wrong), SherdError, kind, *texts
        )


@on_processes(2, form=("flat nested", "orig as one", "rows"))
def test_optimizers_that_know_names_are_keyed_by_them(form):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what else torch imports
        from torch.distributed.optim import _NamedOptimizer

    model, _ = made(form, adam)
    names = dict(model.named_parameters())
    trained = {name: each for name, each in names.items() if each.requires_grad}
    keyed = _NamedOptimizer(trained.items(), torch.optim.Adam, lr=0.02, eps=1e-2)
    keyed.zero_grad = model.zero_grad  # its own fails
    train(model, keyed, BEFORE)
    state = FSDP.optim_state_dict(model, keyed)
    # From what it has returned, as from itself.
    assert_same_state(FSDP.optim_state_dict(model, keyed, keyed.state_dict()), state)
    loaded = FSDP.optim_state_dict_to_load(model, keyed, state, is_named_optimizer=True)
    assert set(loaded["state"]) == set(trained)
    assert "blocks.0._flat_param" in trained or form != "flat nested"
    keyed.load_state_dict(loaded)
    assert_same_state(FSDP.optim_state_dict(model, keyed), state)
    # Names that torch's optimizers keep themselves.
    plain = torch.optim.Adam(trained.items(), lr=0.02)
    FSDP.optim_state_dict_to_load(model, plain, state, load_directly=True)
    assert plain.param_groups[0]["param_names"] == list(trained)
    assert "param_names" not in FSDP.optim_state_dict(model, plain)["param_groups"][0]
    assert_same_state(FSDP.optim_state_dict(model, plain), state)


@on_threads(2)
def test_names_and_numbers_are_exchanged_on_the_plain_model():
    model, optimizer = made("flat nested", adam, steps=BEFORE)
    full = FSDP.optim_state_dict(model, optimizer)
    plain = wrapped("plain")
    single = optimizer_of(plain, adam)
    ids = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain, optim=single)
    single.load_state_dict(ids)
    names = FSDP.rekey_optim_state_dict(single.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=single)
    assert_same_state(names, full)
    assert names["param_groups"][0]["params"] == sorted(names["param_groups"][0]["params"])
    assert FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_NAME, plain) is full
    empty = {"state": {}, "param_groups": []}
    assert FSDP.rekey_optim_state_dict(empty, OptimStateKeyType.PARAM_ID, plain) is empty
    given = [{"params": group["params"]} for group in single.param_groups]
    assert_same_state(FSDP.rekey_optim_state_dict(ids, OptimStateKeyType.PARAM_NAME, plain, given), full)
    orig = wrapped("orig nested")
    assert_same_state(
        FSDP.rekey_optim_state_dict(ids, OptimStateKeyType.PARAM_NAME, orig, optim=optimizer_of(orig, adam)), full
    )
    mixed = {"state": {0: {}, "own.weight": {}}, "param_groups": []}
    gone = {"state": {"away": {}}, "param_groups": []}
    for state, kind, of, error, text in (
        (mixed, OptimStateKeyType.PARAM_ID, plain, ValueError, "Invalid parameter keys"),
        (gone, OptimStateKeyType.PARAM_ID, plain, ValueError, "'away'"),
        (full, 3, plain, AssertionError, "PARAM_NAME or PARAM_ID, got 3"),
        (full, OptimStateKeyType.PARAM_ID, model, RuntimeError, "only map to one parameter name but got"),
    ):
        with pytest.raises(error, match=text):
            FSDP.rekey_optim_state_dict(state, kind, of)


# What does not fit


@on_threads(2)
def test_what_does_not_fit_is_named():
    flat, orig = made("flat nested", adam, steps=BEFORE), made("orig nested", adam)
    full = FSDP.optim_state_dict(*flat)

    def spoilt(name, **changes):
        state = {key: each for key, each in {**full["state"][name], **changes}.items() if each is not None}
        return {**full, "state": {**full["state"], name: state}}

    def without(*names):
        return {**full, "state": {key: each for key, each in full["state"].items() if key not in names}}

    up = "blocks.0.up.bias"
    of_nine = spoilt(up, exp_avg=torch.zeros(9))
    fewer = copy.deepcopy(full["param_groups"])
    fewer[1]["params"].append(fewer[0]["params"].pop())
    strange = copy.deepcopy(fewer)
    strange[1]["params"].append("away")
    away = {"state": {**full["state"], "away": full["state"][up]}, "param_groups": strange}
    for into, state, text in (
        (flat, {"param_groups": []}, 'must have the keys "state"'),
        (flat, without(up), r"scalar state with the same value.*none for \['blocks.0.up.bias'\]"),
        (flat, spoilt(up, step=torch.tensor(9.0)), r"same value and dtype but got .*9.0.*for state step"),
        (flat, spoilt(up, exp_avg=torch.zeros(7).double()), r"same value and dtype but got .*float64.*exp_avg"),
        (flat, of_nine, r"same shape as its parameter: \(9,\) \(7,\).*blocks.0.up.bias"),
        (flat, spoilt(up, exp_avg=None), r"Differing optimizer state names.*blocks.0.up.bias"),
        (orig, of_nine, "same shape as its parameter"),
        (orig, {**full, "param_groups": fewer}, "in 2 groups when they were saved"),
        (orig, away, r"'away'.*does not have"),
    ):
        with pytest.raises(ValueError, match=text):
            FSDP.optim_state_dict_to_load(*into, state)
    with pytest.raises(ValueError, match="no parameter of the model"):
        FSDP.optim_state_dict(nn.Linear(2, 2), flat[1])
    # With parameters of their own a missing one has no entry; else a whole unit may be missing.
    assert len(FSDP.optim_state_dict_to_load(*orig, without(up))["state"]) == len(full["state"]) - 1
    unit = [name for name in full["state"] if name.startswith("blocks.0.")]
    assert len(FSDP.optim_state_dict_to_load(*flat, without(*unit))["state"]) == 4
    # Ranks that have stepped differently.
    model, optimizer = made("orig nested", adam, steps=BEFORE)
    if dist.get_rank() == 1:
        optimizer.state[model.head.weight]["step"] += 1
    with pytest.raises(AssertionError, match=r"embed.weight: Rank 1 has different values for step: 3.0"):
        FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 1:
        del optimizer.state[model.head.weight]
    with pytest.raises(ValueError, match=r"embed.weight: rank 1 keeps no 'step' for it"):
        FSDP.optim_state_dict(model, optimizer)
    # Or that have been given others.
    model = wrapped("rows")
    optimizer = adam(list(model.parameters())[dist.get_rank() :])
    train(model, optimizer, BEFORE)
    with pytest.raises(RuntimeError, match=r"embed.weight: rank 1 keeps no .*the same parameters on all ranks"):
        FSDP.optim_state_dict(model, optimizer)


@on_processes(2)
def test_what_a_user_keeps_among_the_states_goes_along():
    model, optimizer = made("flat nested", adam, steps=BEFORE)
    optimizer.state["mine"] = {"table": torch.ones(2)}
    with pytest.warns(UserWarning, match="Found a optim state, mine"):
        state = FSDP.optim_state_dict(model, optimizer)
    assert state["state"]["mine"]["table"].tolist() == [1, 1]
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, state)
    assert loaded["state"]["mine"]["table"].tolist() == [1, 1]


# The oracle


class Partly(nn.Module):
    """A wrapped layer, a plain one, and, if asked for, another one that somebody else looks after."""

    def __init__(self, kind, managed, **chosen):
        super().__init__()
        self.inner = kind(nn.Linear(WIDTH, WIDTH), **chosen)
        self.plain = nn.Linear(WIDTH, WIDTH)
        if not managed:
            self.others = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.plain(self.inner(x))
        return self.others(x) if hasattr(self, "others") else x


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@on_processes(2)
def test_what_others_look_after_is_left_to_them():
    """As torch's FSDP1: what the state knows nothing of is left out, and an entry for it can be added."""
    for orig, name in ((False, "shard_full_optim_state_dict"), (True, "flatten_sharded_optim_state_dict")):
        numbers = []
        for kind, more in ((Theirs, {"device_id": torch.device("cpu")}), (FSDP, {})):
            saved, model = (Partly(kind, managed, use_orig_params=orig, **more) for managed in (True, False))
            optimizers = [adam(each.parameters()) for each in (saved, model)]
            for each, optimizer in zip((saved, model), optimizers, strict=True):
                each(torch.ones(2, WIDTH)).sum().backward()
                optimizer.step()
            if orig:
                state = kind.sharded_optim_state_dict(saved, optimizers[0])
                loaded = kind.flatten_sharded_optim_state_dict(state, model, optimizers[1])
            else:
                state = kind.full_optim_state_dict(saved, optimizers[0], rank0_only=False)
                loaded = kind.shard_full_optim_state_dict(state, model, optim=optimizers[1])
            (group,) = loaded["param_groups"]
            numbers.append(list(group["params"]))
            before = {id(parameter): state["step"] for parameter, state in optimizers[1].state.items()}
            optimizer = adam(model.parameters())
            for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
                if number not in group["params"]:
                    group["params"].insert(number, number)
                    own = {"exp_avg": torch.ones_like(parameter), "exp_avg_sq": torch.ones_like(parameter)}
                    loaded["state"][number] = {"step": torch.tensor(7.0), **own}
            optimizer.load_state_dict(loaded)
            assert optimizer.state[model.others.weight]["step"] == 7
            assert optimizer.state[model.plain.weight]["step"] == 1
            assert len(optimizer.state) == len(before), name
            if kind is FSDP:
                FSDP.optim_state_dict_to_load(model, optimizers[1], state, load_directly=True)
                assert model.others.weight not in optimizers[1].state
        assert numbers[0] == numbers[1] == list(range(4 if orig else 3))


def beside_torchs(kind, nested=False, **chosen):
    """A model and its optimizer under torch's FSDP1 or ours; without scalars, which torch's refuses."""
    net = seeded(Assorted)
    for block in net.blocks:
        block.gain = nn.Parameter(torch.tensor([1.5]))
    if kind is Theirs:
        chosen["device_id"] = torch.device("cpu")
    if nested:
        net.blocks = nn.ModuleList([kind(each, **chosen) for each in net.blocks])
    model = kind(net, ignored_states=[*net.own.parameters(), *net.fixed.parameters()], **chosen)
    return model, adam([each for each in model.parameters() if each.requires_grad])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@on_processes(2)
def test_states_go_to_torchs_fsdp1_and_come_back():
    """With flat parameters: without, torch's own on CPU gathers each key over the one before it."""
    theirs, mine = beside_torchs(Theirs), beside_torchs(FSDP)
    for each in (theirs, mine):
        train(*each, BEFORE)
    expected, state = Theirs.optim_state_dict(*theirs), FSDP.optim_state_dict(*mine)
    assert_same_state(state, expected, exact=False)
    theirs[1].load_state_dict(Theirs.optim_state_dict_to_load(*theirs, state))
    assert_same_state(Theirs.optim_state_dict(*theirs), state)
    for given in (expected, Theirs.sharded_optim_state_dict(*theirs)):
        model, optimizer = beside_torchs(FSDP, use_orig_params=True)
        FSDP.optim_state_dict_to_load(model, optimizer, given, load_directly=True)
        assert_same_state(FSDP.optim_state_dict(model, optimizer), expected, exact=False)


@on_processes(2)
def test_an_empty_state_to_load_is_warned_of_unless_the_optimizer_keeps_none():
    model = FSDP(nn.Linear(4, 4), device_id=torch.device("cpu"))
    for kind, options, is_told in (
        (torch.optim.AdamW, {}, True),
        (torch.optim.SGD, {"momentum": 0.9}, True),
        (torch.optim.SGD, {}, False),
    ):
        optimizer = kind(model.parameters(), lr=0.1, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer))
        assert any(f"{kind.__name__} starts over" in str(each.message) for each in caught) == is_told, (kind, options)
