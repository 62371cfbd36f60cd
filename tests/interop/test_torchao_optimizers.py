"""torchao's optimizers with state in 8 or 4 bits step shards, and their state is saved by name and moves exactly."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import sherd
from sherd._torch import local_tensor, spec_of
from sherd.errors import OptimStateError
from sherd.tensor.relayout import around
from tests.support.comparing import assert_same, whole_params
from tests.support.suites import part

ao = pytest.importorskip("torchao.optim")

CLASSES = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
PLAIN = "plain"
CHUNKS, BLOCKS, OWNED = None, sherd.Blocks(4), sherd.Owned()
# 4 rows of 64 are a block of 8 bits, so chunks of 512 rows are complete blocks on 1 and 2 ranks, and not on 3.
LAYOUTS = [(1, PLAIN), (1, CHUNKS), (2, CHUNKS), (2, BLOCKS), (3, BLOCKS), (3, OWNED)]


def made(placement, name, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64), nn.Linear(64, 3))
    if placement != PLAIN:
        for layer in (model[0], model[2], model[3]):
            sherd.fully_shard(layer, placement=placement)
        sherd.fully_shard(model, placement=placement)
    return model, getattr(ao, name)(model.parameters(), lr=1e-2, **options)


def train(model, optimizer, steps, compiles=False):
    """Losses of steps on the same batch. torchao compiles its step, which takes longer than all the rest."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    losses = []
    with torch.compiler.set_stance("default" if compiles else "force_eager"):
        for _ in range(steps):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return torch.tensor(losses)


def values(model, optimizer):
    """What the state stands for, unsharded."""

    def plain(value):
        return value if type(value) is torch.Tensor else value.dequantize()

    found = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, DTensor):
                found[name, key] = around(plain(local_tensor(value)).float(), spec_of(value)).full_tensor().clone()
            else:
                found[name, key] = plain(value).clone()
    return found


def bytes_of(optimizer):
    """Bytes of the state that is in blocks."""
    locals_ = [
        local_tensor(value) if isinstance(value, DTensor) else value
        for state in optimizer.state.values()
        for value in state.values()
    ]
    return sum(each.codes.nbytes for each in locals_ if type(each) is not torch.Tensor)


def trained(placement, name, compiles=False):
    model, optimizer = made(placement, name)
    losses = train(model, optimizer, 4, compiles)
    return losses, whole_params(model), values(model, optimizer), bytes_of(optimizer)


@pytest.mark.values
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("num_ranks", "placement"), LAYOUTS[1:], ids=str)
def test_shards_of_complete_blocks_are_stepped_as_in_one_process(num_ranks, placement, name, world):
    losses, parameters, state, nbytes = trained(PLAIN, name)
    results = world(num_ranks).run(trained, placement, name)
    assert nbytes == sum(result[3] for result in results) > 0
    exact = {} if num_ranks != 3 else {"rtol": 1e-4, "atol": 1e-5}  # the mean of three equal gradients is rounded
    for found in results:
        assert_same(found[0], losses, **exact)
        if num_ranks != 3:  # what is rounded once may be another code later
            assert_same(found[1], parameters)
            assert_same(found[2], state)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_compiled_step_takes_runs_too(world):
    losses, _, _, nbytes = trained(PLAIN, "AdamW8bit", True)
    for found in (results := world(2).run(trained, BLOCKS, "AdamW8bit", True)):
        assert_same(found[0], losses, rtol=1e-4, atol=1e-5)
    assert sum(found[3] for found in results) == nbytes


# Checkpoints


def saved(placement, name, path):
    model, optimizer = made(placement, name)
    train(model, optimizer, 3)
    sherd.save(path, {"model": model, "optimizer": optimizer}, step=1)
    return values(model, optimizer), bytes_of(optimizer), train(model, optimizer, 2)


def loaded(placement, name, path):
    model, optimizer = made(placement, name)
    sherd.load(path, {"model": model, "optimizer": optimizer})
    return values(model, optimizer), bytes_of(optimizer), train(model, optimizer, 2)


def run(world, layout, function, *args):
    num_ranks, placement = layout
    results = world(num_ranks).run(function, placement, *args)
    return results[0][0], sum(each[1] for each in results), results[0][2]


@pytest.mark.values
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("source", [(2, CHUNKS), (2, BLOCKS), (3, OWNED), (1, PLAIN)], ids=str)
def test_what_is_saved_is_loaded_bit_by_bit_under_any_layout_of_complete_blocks(source, name, world, tmp_path):
    path = str(tmp_path / "saved")
    state, nbytes, losses = run(world, source, saved, name, path)
    for target in part(LAYOUTS, CLASSES.index(name), 2):
        found = run(world, target, loaded, name, path)
        assert found[0].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(found[0][key], value), (target, key)
        assert found[1] == nbytes, target
        assert_same(found[2], losses, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*a block of 256 elements is cut in two")
def test_state_in_8_bits_is_loaded_in_full_precision_where_all_ranks_cut_blocks(world, tmp_path):
    path = str(tmp_path / "saved")
    state, _, _ = run(world, (2, CHUNKS), saved, "AdamW8bit", path)
    for layout in ((3, CHUNKS), (2, sherd.Flat())):
        found, _, _ = run(world, layout, loaded, "AdamW8bit", path)
        for key, value in state.items():
            assert torch.equal(found[key], value), (layout, key)


def cut():
    """171 rows of 64 are no blocks of 256, and 170 rows are some of 128."""
    for name, placement in (("AdamW8bit", CHUNKS), ("AdamW4bit", CHUNKS)):
        model, optimizer = made(placement, name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, optimizer, 1)
        rows = optimizer.block_size // 64
        told = [str(each.message) for each in caught if "is cut in two" in str(each.message)]
        if local_tensor(model[0].weight).numel() % optimizer.block_size:
            (text,) = told
            assert text.startswith(f"{name}: a block of {optimizer.block_size} elements is cut in two"), text
            assert text.endswith(f"shard with placement=Blocks({rows})"), text
        else:
            assert not told
    with pytest.raises(OptimStateError, match=r"0\.weight: .* blocks of 128 .* placement=Blocks\(2\), or Owned\(\)$"):
        sherd.save("/nowhere", {"model": model, "optimizer": optimizer}, step=1)


def test_a_layout_that_cuts_blocks_is_told_with_the_placement_that_does_not(world):
    world(3).run(cut)


def another(path):
    model, _ = made(CHUNKS, "AdamW8bit")
    with pytest.raises(OptimStateError, match="Adam does not take; build the optimizer that was saved"):
        sherd.load(path, {"model": model, "optimizer": torch.optim.Adam(model.parameters())})
    model, optimizer = made(CHUNKS, "AdamW8bit", block_size=512)
    with pytest.raises(OptimStateError, match="AdamW8bit does not take the item 'optimizer'"):
        sherd.load(path, {"model": model, "optimizer": optimizer})


def test_state_in_blocks_is_refused_by_optimizers_without_or_with_other_blocks(world, tmp_path):
    path = str(tmp_path / "saved")
    run(world, (2, CHUNKS), saved, "AdamW8bit", path)
    world(2).run(another, path)


def through_torch(placement, path, saves):
    model, optimizer = made(placement, "AdamW8bit")
    train(model, optimizer, 3 if saves else 1)
    state = get_optimizer_state_dict(model, optimizer)
    (dcp.save if saves else dcp.load)({"optimizer": state}, checkpoint_id=path)
    if not saves:
        set_optimizer_state_dict(model, optimizer, state)
    return values(model, optimizer)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_torchs_checkpoints_keep_blocks_too(world, tmp_path):
    for placement in (CHUNKS, BLOCKS):
        path = str(tmp_path / str(placement))
        state = world(2).run(through_torch, placement, path, True)[0]
        for layout in ((1, CHUNKS), (2, CHUNKS), (3, BLOCKS)):
            found = world(layout[0]).run(through_torch, layout[1], path, False)[0]
            for key, value in state.items():
                assert torch.equal(found[key], value), (placement, layout, key)
