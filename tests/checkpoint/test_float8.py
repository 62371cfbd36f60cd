"""Weights in float8 are saved, converted to safetensors, and loaded by other ranks, bit for bit."""

import pytest
import torch
from torch import nn

import sherd
from sherd._torch import local_tensor
from sherd.cli.main import main

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def made(scale=1.0):
    """Frozen weights, as for inference or adapters, next to trained biases. Rows divide by no number of ranks here."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 7))
    for layer, dtype in zip(model, DTYPES, strict=True):
        weight = layer.weight.detach().abs() * scale
        layer.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    return model


def sharded(scale=1.0, **options):
    model = made(scale)
    for layer in (*model, model):
        sherd.fully_shard(layer, **options)
    return model


def save(folder, **options):
    sherd.save(folder, {"model": sharded(**options)}, step=1)


def load(folder, **options):
    model = sharded(0.0, **options)
    sherd.load(folder, {"model": model})
    for found, expected in zip(model.parameters(), sharded(**options).parameters(), strict=True):
        pair = [local_tensor(each).view(torch.uint8) for each in (found, expected)]
        assert torch.equal(*pair), found.dtype


@pytest.mark.parametrize("placement", [None, sherd.Flat(), sherd.Blocks(2), sherd.Owned()], ids=str)
def test_weights_in_float8_move_between_ranks_and_to_safetensors(placement, world, tmp_path):
    options = {} if placement is None else {"placement": placement}
    world(2).run(save, tmp_path / "saved", **options)
    world(3).run(load, tmp_path / "saved", **options)
    alone = made(0.0)
    sherd.load(tmp_path / "saved", {"model": alone})
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "one.safetensors"), "--model-only"]) == 0
    converted = pytest.importorskip("safetensors.torch").load_file(tmp_path / "one.safetensors")
    for name, expected in made().state_dict().items():
        for found in (alone.state_dict()[name], converted[name]):
            assert found.dtype is expected.dtype
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name
