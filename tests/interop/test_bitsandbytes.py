"""bitsandbytes' optimizers with state in 8 bits step shards, and their state is saved by name and moves exactly."""

import pytest
import torch
from torch import nn

import sherd
from sherd.errors import OptimStateError
from sherd.tensor.ragged import local_part
from tests.support.comparing import assert_same

bnb = pytest.importorskip("bitsandbytes")

CLASSES = ("AdamW8bit", "Lion8bit", "SGD8bit")
PLAIN = "plain"
# 4 rows of 64 are a block, so chunks of 512 rows are complete blocks on 1 and 2 ranks, and not on 3.
LAYOUTS = [(1, PLAIN), (1, None), (2, None), (3, sherd.Blocks(4)), (3, sherd.Owned())]


def made(placement, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64), nn.Linear(64, 3))
    if placement != PLAIN:
        for layer in (model[0], model[2], model[3], model):
            sherd.fully_shard(layer, placement=placement)
    options = {"momentum": 0.9} if name == "SGD8bit" else {}
    return model, getattr(bnb.optim, name)(model.parameters(), lr=1e-2, **options)


def train(model, optimizer, steps):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


def trained(placement, name):
    model, optimizer = made(placement, name)
    losses = train(model, optimizer, 4)
    codes = [local_part(optimizer.state[model[at].weight]["state1"]) for at in (0, 2)]
    assert all(each.dtype is torch.uint8 for each in codes if each.numel())
    return losses


def moved(folder, placement, name, before, resumes):
    """Two steps, saved; or the two that follow."""
    model, optimizer = made(placement, name)
    if not resumes:
        train(model, optimizer, 2)
        sherd.save(folder / before, {"model": model, "optimizer": optimizer}, step=2)
        return None
    sherd.load(folder / before, {"model": model, "optimizer": optimizer})
    return train(model, optimizer, 2)


@pytest.mark.parametrize("name", CLASSES)
def test_losses_are_those_of_one_process_where_blocks_are_complete(name, world):
    expected = trained(PLAIN, name)
    for num_ranks, placement in LAYOUTS[1:]:
        for losses in world(num_ranks).run(trained, placement, name):
            assert_same(losses, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", CLASSES)
def test_state_is_saved_by_name_and_moves_to_other_ranks_and_placements(name, world, tmp_path):
    expected = trained(PLAIN, name)[2:]
    for at, (num_ranks, placement) in enumerate(LAYOUTS):
        world(num_ranks).run(moved, tmp_path, placement, name, str(at), False)
        num_ranks, placement = LAYOUTS[(at + 2) % len(LAYOUTS)]
        for losses in world(num_ranks).run(moved, tmp_path, placement, name, str(at), True):
            assert_same(losses, expected, rtol=1e-4, atol=0)


def cut_blocks(folder):
    model, optimizer = made(None, "AdamW8bit")
    with pytest.warns(UserWarning, match=r"AdamW8bit: a block of 256 elements is cut .*placement=Blocks\(4\)"):
        train(model, optimizer, 1)
    with pytest.raises(OptimStateError, match=r"0\.weight: its state of AdamW8bit .*placement=Blocks\(4\)"):
        sherd.save(folder, {"optimizer": optimizer, "model": model}, step=1)


def test_blocks_that_ranks_share_are_warned_of_and_not_saved(world, tmp_path):
    world(3).run(cut_blocks, tmp_path)
    assert not list(tmp_path.iterdir())
