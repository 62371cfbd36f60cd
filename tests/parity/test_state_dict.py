"""A sharded model's state goes out and comes back, whole and sharded, on other numbers of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.parity.cases import assert_each_trains
from tests.support import checkpoints
from tests.support.comparing import assert_named_close, whole_params, whole_values
from tests.support.models import build
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import sharded
from tests.support.training import Recipe, make_optimizer, steps_sharded, train_plain


def train_from_a_state(recipe, source, assign, after_a_step):
    """State goes from a sharded model, or from a plain one, to another sharded one, which then trains."""
    state = build(recipe.model).state_dict() if source == "plain" else sharded(build(recipe.model)).state_dict()
    model = sharded(build(recipe.model, seed=1))
    if after_a_step:
        model.loss(model(*model.make_inputs(0, dist.get_rank()))).backward()
        model.zero_grad()
    result = model.load_state_dict(state, strict=True, assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert all(isinstance(param, DTensor) for param in model.parameters())
    return steps_sharded(model, recipe, dist.get_rank())


@pytest.mark.parametrize("after_a_step", [False, True], ids=["fresh", "after_a_step"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("source", ["sharded", "plain"])
def test_a_state_dict_of_a_sharded_model_or_a_plain_one_loads(threads, source, assign, after_a_step):
    options = {"source": source, "assign": assign, "after_a_step": after_a_step}
    models = ("mlp", "uneven", "tied_inside", "tied_across", "buffers", "scalar_parameter")
    assert_each_trains(threads(2), {model: (Recipe(model), options) for model in models}, train_from_a_state)


@on_threads(2)
def test_a_load_names_what_is_missing_or_of_another_shape_and_a_lenient_one_returns_it():
    model = sharded(build("mlp"))
    state = model.state_dict()
    state["stranger"] = state.pop("last.weight")
    with pytest.raises(RuntimeError, match=r"last\.weight"):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["last.weight"], ["stranger"])
    state = build("mlp").state_dict() | {"last.weight": torch.zeros(8, 7)}
    with pytest.raises((RuntimeError, ValueError), match=r"last\.weight"):
        model.load_state_dict(state)


def train_from_rank_zero(recipe):
    """Only rank 0 has the whole state; the others receive their part."""
    model = sharded(build(recipe.model, seed=1))
    state = build(recipe.model).state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return steps_sharded(model, recipe, dist.get_rank())


def test_rank_zero_alone_may_hold_the_whole_state(world):
    assert_each_trains(world(2), {model: (Recipe(model), {}) for model in ("mlp", "uneven")}, train_from_rank_zero)


@on_processes(2, name=("mlp", "uneven", "tied_across"))
def test_the_whole_state_may_be_gathered_to_rank_zero(name):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(sharded(build(name)), options=options)
    assert_named_close(found, build(name).state_dict() if dist.get_rank() == 0 else {}, "state", 0, 0)


def train_and_save(recipe, folder):
    """The first two steps, then a checkpoint."""
    model = sharded(build(recipe.model))
    optimizer = make_optimizer(recipe.optimizer, model)
    for step in range(2):
        one_step(model, optimizer, step)
    checkpoints.save(model, optimizer, folder)
    return whole_params(model), whole_moments(model, optimizer, 2)


def one_step(model, optimizer, step):
    model.loss(model(*model.make_inputs(step, dist.get_rank()))).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_moments(model, optimizer, num_steps):
    """Adam's first moments by name, whole; its states have seen `num_steps`."""
    states = get_optimizer_state_dict(model, optimizer)["state"]
    assert {entry["step"].item() for entry in states.values()} == {num_steps}
    return whole_values({name: entry["exp_avg"] for name, entry in states.items()})


def what_is_loaded(recipe, folder):
    """Parameters and moments of a model that was initialised otherwise, and the parameters after the third step."""
    model = sharded(build(recipe.model, seed=1))
    optimizer = make_optimizer(recipe.optimizer, model)
    checkpoints.load(model, optimizer, folder)
    loaded = whole_params(model), whole_moments(model, optimizer, 2)
    one_step(model, optimizer, 2)
    whole_moments(model, optimizer, 3)
    return *loaded, whole_params(model)


@pytest.mark.parametrize("model", ["mlp", "uneven", "tied_inside", "tied_across", "scalar_parameter", "transformer"])
def test_a_checkpoint_of_two_ranks_loads_on_another_number_and_training_goes_on(world, tmp_path, model):
    recipe = Recipe(model, "adamw", steps=3)
    (params, moments), *_ = world(2).run(train_and_save, recipe, tmp_path)
    for num_ranks in (1, 2, 3):
        for loaded_params, loaded_moments, after in world(num_ranks).run(what_is_loaded, recipe, tmp_path):
            assert_named_close(loaded_params, params, f"{num_ranks} ranks: parameter", 0, 0)
            assert_named_close(loaded_moments, moments, f"{num_ranks} ranks: moment", 0, 0)
            if num_ranks == 2:
                assert_named_close(after, train_plain(recipe, 2)[0].params, "parameter, a step later", 1e-5, 1e-6)


def train_from_meta(recipe, by_state_dict):
    """Built without memory, sharded, given memory, filled."""
    plain, model = build(recipe.model), sharded(build(recipe.model, device="meta"))
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    if by_state_dict:
        model.load_state_dict(plain.state_dict())
    else:
        sources = dict(plain.named_parameters())
        with torch.no_grad():
            for name, param in model.named_parameters():
                source = sources[name].detach()
                param.copy_(distribute_tensor(source, param.device_mesh, param.placements))
    return steps_sharded(model, recipe, dist.get_rank())


@pytest.mark.parametrize("by_state_dict", [True, False], ids=["by_state_dict", "in_place"])
def test_a_model_built_on_meta_trains_after_to_empty(threads, by_state_dict):
    options = {"by_state_dict": by_state_dict}
    models = ("mlp", "uneven", "tied_inside")
    assert_each_trains(threads(2), {model: (Recipe(model), options) for model in models}, train_from_meta)


def reset_from_meta():
    """`reset_parameters` of stock layers on shards, the same seed on all ranks."""
    model = sharded(build("mlp", device="meta"))
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model.loss(model(*model.make_inputs(0, dist.get_rank()))).backward()
    return whole_params(model)


# Stock torch: DTensor draws from each rank's own generator on a CPU mesh, and says so.
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support:UserWarning")
def test_stock_layers_reset_their_shards_in_place(world):
    first, second = world(2).run(reset_from_meta)
    assert_named_close(first, second, "parameter", 0, 0)
    weight = first["blocks.0.up.weight"]
    assert 0.05 < weight.std() < 0.5
    assert weight.abs().max() <= 8**-0.5 + 1e-6
