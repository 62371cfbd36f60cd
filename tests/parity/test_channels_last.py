"""Convolutions train plainly in `channels_last`, whether the model was given that memory format before or after."""

import functools
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp

import sherd
from sherd import fully_shard
from sherd.engine.make import sharding
from tests.support.models import Wired
from tests.support.sharding import PLACEMENTS, sharded
from tests.support.training import LR, made

STEPS = 3
FORMAT = {"memory_format": torch.channels_last}


def convnet():
    """Two blocks, whose weights have other strides in the other format, and a head."""
    blocks = (nn.Sequential(nn.Conv2d(*widths, 3, padding=1), nn.ReLU()) for widths in ((3, 8), (8, 5)))
    parts = {"blocks": nn.Sequential(*blocks), "head": nn.Linear(5, 4)}
    return Wired(lambda self, images: self.head(F.adaptive_avg_pool2d(self.blocks(images), 1).flatten(1)), **parts)


def loss(model, rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    images = torch.randn(4, 3, 6, 6, generator=generator, dtype=torch.double)
    return model(images.to(**FORMAT)).square().mean()


def wrapped(model, api=sherd, **options):
    """With either library's wrapper, as for an accelerator: the device is said."""
    wrap = partial(api.FullyShardedDataParallel, device_id=torch.device("cpu"), **options)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block)
    return wrap(model)


WAYS = {
    "torch's FSDP1": partial(wrapped, api=fsdp, use_orig_params=True),
    **{placement: partial(sharded, front=placement) for placement in PLACEMENTS},
    "zero1": partial(sharded, placements="zero1"),
    "ddp": partial(sharded, placements="ddp"),
    "wrapper": partial(wrapped, use_orig_params=True),
    "flat parameter": partial(wrapped, use_orig_params=False),
}
BEFORE, LATE = -1, 1


def train(way, when):
    """The losses of `STEPS` steps; the format is set before sharding, or before step number `when`."""
    model = made(convnet).double()
    if when == BEFORE:
        model = model.to(**FORMAT)
    model = WAYS[way](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses = []
    for step in range(STEPS):
        if when == step:
            model = model.to(**FORMAT)
        found = loss(model, dist.get_rank(), step)
        losses.append(found.item())
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_at_each_time(way):
    warnings.filterwarnings("ignore", message=".*not in channels_last")
    # Torch's goes other ways after a `.to()` between two steps.
    return {when: train(way, when) for when in (BEFORE, 0, LATE) if (way, when) != ("torch's FSDP1", LATE)}


@functools.cache
def plain_losses():
    """By rank and step, those of the model in one process."""
    model = made(convnet).double().to(**FORMAT)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses = []
    for step in range(STEPS):
        found = [loss(model, rank, step) for rank in range(2)]
        losses.append([each.item() for each in found])
        (sum(found) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(zip(*losses, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_a_convnet_in_channels_last_trains_as_in_one_process(world, way):
    for found, expected in zip(world(2).run(train_at_each_time, way), plain_losses(), strict=True):
        for when, losses in found.items():
            assert losses == pytest.approx(expected, rel=1e-9), when


def warned_of(formats):
    sharding._warned.clear()
    found = []
    for dims, memory_format in formats:
        conv = (nn.Conv2d, nn.Conv3d)[dims - 2](3, 4, 3).to(memory_format=memory_format)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fully_shard(conv)
        found.append([str(each.message) for each in seen])
    return found


def test_a_format_that_sharding_does_not_keep_is_told_once(world):
    plain, flat, solid = (2, torch.contiguous_format), (2, torch.channels_last), (3, torch.channels_last_3d)
    for formats in ([plain, flat, solid], [plain, solid, flat]):
        for none, first, second in world(2).run(warned_of, formats):
            assert none == second == []
            assert first[0].startswith("weight: sharded parameters have the order of their dims")
            assert "inputs in channels_last" in first[0]
