"""A training that goes on from a checkpoint under another layout, on other ranks, as one process would."""

from __future__ import annotations

import os
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import nn

import sherd
from tests.support.checkpoints import load, save
from tests.support.comparing import whole_params
from tests.support.meshes import mesh_of
from tests.support.sharding import sharded

Layout = tuple[str, tuple[int, ...]]
"""How a model is sharded: a front end or placement, and the mesh, of two axes with replicas."""

MOVES: list[tuple[Layout, Layout]] = [
    (("shard", (4,)), ("owned", (2,))),
    (("owned", (4,)), ("shard", (2,))),
    (("flat", (4,)), ("wrapper", (2,))),
    (("shard", (2, 2)), ("flat", (3,))),
    (("blocks", (2,)), ("shard", (2, 2))),
    (("flat wrapper", (4,)), ("shard", (3,))),
    (("owned", (2,)), ("flat wrapper", (3,))),
]

Train = Callable[[nn.Module, torch.optim.Optimizer, list[torch.Tensor]], None]


def assert_goes_on(
    threads: Any,
    folder: str | os.PathLike[str],
    form: str,
    move: tuple[Layout, Layout],
    make: Callable[[], nn.Module],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    given: list[torch.Tensor],
    by_hand: Callable[[nn.Module, list[torch.Tensor]], None],
    train: Train,
    steps_before: int = 0,
) -> None:
    """Trains half of `given`, and the other half after a load, and compares with steps by hand in one process.

    Args:
        form: of the checkpoint, "sherd" or "dcp".
        steps_before: how many steps the optimizer that loads has made already, of another training.
    """
    half, (saved, loaded) = len(given) // 2, move
    plain = make()
    by_hand(plain, given)

    def made(layout: Layout) -> tuple[nn.Module, torch.optim.Optimizer]:
        front, sizes = layout
        model = sharded(make(), front, **({"mesh": mesh_of(sizes)} if len(sizes) > 1 else {}))
        return model, optimizer_of(model)

    def begin() -> None:
        model, optimizer = made(saved)
        train(model, optimizer, given[:half])
        if form == "dcp":
            save(model, optimizer, folder)
        else:
            sherd.save(folder, {"model": model, "optimizer": optimizer}, step=half)

    def end() -> None:
        model, optimizer = made(loaded)
        train(model, optimizer, given[:steps_before])
        if form == "dcp":
            load(model, optimizer, folder)
        else:
            sherd.load(folder, {"model": model, "optimizer": optimizer})
        train(model, optimizer, given[half:])
        for (name, found), expected in zip(whole_params(model).items(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}")

    threads(prod(saved[1])).run(begin)
    threads(prod(loaded[1])).run(end)
