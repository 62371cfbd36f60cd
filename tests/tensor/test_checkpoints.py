"""What is saved under one layout and number of ranks loads under every other."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard, distribute_tensor

from sherd.tensor.ragged import RaggedDTensor
from tests.support import checkpoints
from tests.support.comparing import assert_same, whole, whole_params
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.suites import part
from tests.tensor.cuts import SHAPES, cuts, line, numbers, ragged
from tests.tensor.grids import EIGHT, FOUR, Grid, ragged_on

KINDS = ("uneven", "rows", "last")
OTHERS = ("plain", "stock rows", "stock columns")
EVERY = KINDS + OTHERS
COPIES = {f"copies of {kind}": kind for kind in KINDS}
GRIDS = FOUR | dict.fromkeys(COPIES, Grid((2, 2), (None, None), (1,)))
"""Layouts on four ranks on two axes."""
CLOSE = {"rtol": 1.3e-6, "atol": 1e-5}


def mesh_of(kind):
    """What the tensors of a layout are on."""
    return GRIDS[kind].mesh() if kind in GRIDS else line(dist.get_world_size())


def tensor_of(whole, kind, mesh):
    """`whole` in one of the layouts, in memory of its own."""
    if kind in GRIDS:
        return ragged_on(GRIDS[kind], mesh, COPIES.get(kind, "uneven"), whole)
    if kind in KINDS:
        return ragged(whole, *cuts(kind, [tuple(whole.shape)], mesh.size()), mesh)
    dim = {"plain": -1, "stock rows": 0, "stock columns": 1}[kind]
    if not 0 <= dim < whole.ndim:
        return whole.clone()
    return distribute_tensor(whole, mesh, [Shard(dim)])


def state(kind, factor=1.0):
    mesh = mesh_of(kind)
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    return {
        f"{index}": tensor_of((numbers(shape) * factor).to(dtypes[index % 3]), kind, mesh)
        for index, shape in enumerate((*SHAPES, (0, 3)))
    }


def save_each(kinds, folder):
    for kind in kinds:
        dcp.save(state(kind), checkpoint_id=f"{folder}/{kind}")


def load_each(pairs, folder):
    """The names in each pair (layout saved, layout loaded) of what is not as it was."""
    wrong, plain = [], state("plain")
    for saved, kind in pairs:
        found = state(kind, factor=0.0)
        dcp.load(found, checkpoint_id=f"{folder}/{saved}")
        for name, value in whole(found).items():
            if not torch.equal(value, plain[name]):
                wrong.append((saved, kind, name))
    return wrong


@pytest.fixture(scope="module")
def folder(world, tmp_path_factory):
    """Where each layout is saved: on three ranks, and those over several axes on four."""
    path = str(tmp_path_factory.mktemp("layouts"))
    world(3).run(save_each, EVERY, path)
    world(4).run(save_each, OVER_AXES, path)
    return path


OVER_AXES = ("tp columns", "tp rows", "tp copies", "two axes", *COPIES)
# By number of ranks, what loads from what besides: what lies over several axes loads everywhere and back.
ALSO = {
    1: product(OVER_AXES, ("plain",)),
    2: product(OVER_AXES, ("rows", "stock rows")),
    4: product(
        ("tp columns", "two axes", "uneven", "stock columns"), ("tp rows, the other way round", "tp copies", "two axes")
    ),
}


@pytest.mark.parametrize("loading", [1, 2, 3, 4])
def test_every_layout_loads_from_every_layout_some_of_the_pairs_on_each_number_of_ranks(world, folder, loading):
    pairs = [(saved, kind) for turn, saved in enumerate(EVERY) for kind in part(EVERY, turn + loading, 4)]
    assert world(loading).run(load_each, [*pairs, *ALSO.get(loading, ())], folder) == [[]] * loading


def trained(kind, factor=1.0, steps=1):
    """Parameters in one layout, in two layers, which began as their values times `factor`."""
    mesh = mesh_of(kind)
    layers = ([tensor_of(numbers(shape) * factor, kind, mesh) for shape in SHAPES[at::2]] for at in (0, 1))
    model = nn.ModuleList(map(nn.ParameterList, layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    for step in range(steps):
        for each in model.parameters():
            each.grad = tensor_of(numbers(each.shape, seed=step), kind, mesh)
        optimizer.step()
    return model, optimizer


def assert_trained(model, optimizer, steps):
    """Model and optimizer are as plain ones after `steps`, and go on as those do."""
    expected, reference = trained("plain", steps=steps)
    for tries in range(2):
        assert_same(whole_params(model), whole_params(expected), **CLOSE)
        for each, like in zip(model.parameters(), expected.parameters(), strict=True):
            state = optimizer.state[each]
            assert_same(whole(state), reference.state[like], **CLOSE)
            assert type(state["exp_avg"]) is type(state["exp_avg_sq"]) is type(each.data)
            like.grad = numbers(like.shape, seed=9 + tries)
            each.grad = torch.zeros_like(each).copy_(like.grad)
        reference.step()
        optimizer.step()


def save_training(kind, folder):
    checkpoints.save(*trained(kind, steps=2), folder)


def load_training(kind, folder):
    model, optimizer = trained(kind, factor=0.5)
    checkpoints.load(model, optimizer, folder)
    assert_trained(model, optimizer, steps=2)


ELSEWHERE = [("uneven", 3), ("rows", 2), ("last", 2), ("uneven", 1), ("plain", 1)]
GOING_ON = {
    ("uneven", 2): ELSEWHERE,
    ("rows", 3): ELSEWHERE,
    ("last", 4): ELSEWHERE,
    ("plain", 1): [*ELSEWHERE, ("tp columns", 4), ("two axes", 4)],
    ("tp columns", 4): [("two axes", 4), ("uneven", 2), ("plain", 1)],
    ("two axes", 4): [("tp rows", 4), ("rows", 3), ("plain", 1)],
    ("copies of uneven", 4): [("last", 2), ("copies of rows", 4)],
}
"""By layout and number of ranks, those on which a training goes on."""


@pytest.mark.parametrize(("kind", "num_ranks"), GOING_ON)
def test_training_goes_on_in_another_layout_on_another_number_of_ranks(threads, tmp_path, kind, num_ranks):
    threads(num_ranks).run(save_training, kind, str(tmp_path))
    for other, loading in GOING_ON[kind, num_ranks]:
        threads(loading).run(load_training, other, str(tmp_path))


def full_states(kind, offload):
    model, optimizer = trained(kind, steps=2)
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    values = get_model_state_dict(model, options=options)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    if offload and dist.get_rank():
        assert values == {}
        return
    expected, reference = trained("plain", steps=2)
    assert_same(values, get_model_state_dict(expected), **CLOSE)
    assert_same(states["state"], get_optimizer_state_dict(expected, reference)["state"], **CLOSE)


ON_TWO_AXES = ("tp columns", "tp rows", "tp rows, the other way round", "two axes")


@pytest.mark.parametrize(("num_ranks", "kinds"), [(2, KINDS), (4, ON_TWO_AXES)])
def test_full_state_dicts_are_those_of_the_plain_model(threads, num_ranks, kinds):
    for kind in kinds:
        for offload in (True, False) if kind in KINDS else (kind == "tp rows",):
            threads(num_ranks).run(full_states, kind, offload)


@on_threads(2)
def test_sharded_state_dicts_stay_ragged():
    for kind in KINDS:
        model, optimizer = trained(kind, steps=2)
        values, states = get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
        for each, value in zip(model.parameters(), values.values(), strict=True):
            assert type(value) is RaggedDTensor
            assert value.cut in [like.cut for like in model.parameters()]
            assert each.device.type == "cpu"
        assert type(states["state"]["0.0"]["exp_avg"]) is RaggedDTensor


def full_states_set(kind, broadcast):
    expected, reference = trained("plain", steps=2)
    whole = StateDictOptions(full_state_dict=True)
    values = get_model_state_dict(expected, options=whole)
    states = get_optimizer_state_dict(expected, reference, options=whole)
    if broadcast and dist.get_rank():
        values, states = {}, {}
    model, optimizer = trained(kind, factor=0.5)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(model, values, options=options)
    set_optimizer_state_dict(model, optimizer, states, options=options)
    assert_trained(model, optimizer, steps=2)


@pytest.mark.parametrize("broadcast", [True, False])
def test_full_state_dicts_load_from_rank_0_and_from_all(world, broadcast):
    for turn, kind in enumerate(KINDS):
        for num_ranks in part((1, 2, 3), turn + broadcast, 3):
            world(num_ranks).run(full_states_set, kind, broadcast)
    for kind in part(ON_TWO_AXES, broadcast, 2):
        world(4).run(full_states_set, kind, broadcast)


@on_threads(2)
def test_an_optimizer_takes_whole_state():
    for kind in KINDS:
        _, reference = trained("plain", steps=2)
        model, used = trained(kind, steps=2)
        fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
        for optimizer in (fresh, used):
            optimizer.load_state_dict(reference.state_dict())
        # One that has stepped takes the state at once, a new one at its first step.
        assert all(type(used.state[each]["exp_avg"]) is RaggedDTensor for each in model.parameters())
        for each in model.parameters():
            each.grad = None
        fresh.step()
        assert_trained(model, fresh, steps=2)


@on_processes(2, kind=KINDS)
def test_a_checkpoint_is_saved_in_the_background(tmp_path, kind):
    dcp.async_save(state(kind), checkpoint_id=tmp_path / kind).result()
    found = state(kind, factor=0.0)
    dcp.load(found, checkpoint_id=tmp_path / kind)
    assert_same(whole(found), state("plain"))


def written(grid):
    mesh = grid.mesh()
    found = {}
    for shape in ((7, 6), (3, 4, 5), (5,), (), (0, 3), (1, 0)):
        for kind in ("uneven", "rows", "whole"):
            tensor = ragged_on(grid, mesh, kind, numbers(shape))
            items = tensor.__create_write_items__("name", tensor)
            assert [each.tensor_data.chunk for each in items] == tensor.__create_chunk_list__()
            assert all(each.tensor_data.size == shape for each in items)
            found[shape, kind] = [
                (tuple(each.index.offset), tensor.__get_tensor_shard__(each.index).clone()) for each in items
            ]
    return found


@pytest.mark.parametrize("name", EIGHT)
def test_every_element_is_written_once_or_by_copies(threads, name):
    ranks = threads(8).run(written, EIGHT[name])
    for (shape, kind), _ in ranks[0].items():
        whole, count = numbers(shape), torch.zeros(shape)
        parts = {}
        for each in ranks:
            for offset, piece in each[shape, kind]:
                assert torch.equal(parts.setdefault((offset, piece.shape), piece), piece)
        assert parts  # also of a tensor without elements, or it would be missing in the file
        for (offset, sizes), piece in parts.items():
            place = tuple(slice(start, start + size) for start, size in zip(offset, sizes, strict=True))
            assert torch.equal(whole[place], piece)
            count[place] += 1
        assert torch.equal(count, torch.ones(shape))
