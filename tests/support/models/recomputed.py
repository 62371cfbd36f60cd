"""Activation checkpointing of every kind, on either side of a unit's own hooks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tests.support.models.specimen import WIDTH, Block, Specimen, Unit, specimen


class ChecksInside(nn.Module):
    """A unit that recomputes what is inside it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.body = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Checkpointed(Specimen):
    """Blocks are recomputed in backward; subclasses say how."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.make_block() for _ in range(3))

    def make_block(self) -> nn.Module:
        return Block()

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x


@specimen
class CheckpointInside(Checkpointed):
    """Each unit recomputes its inside."""

    def make_block(self) -> nn.Module:
        return ChecksInside(self.reentrant)


@specimen
class CheckpointOutside(Checkpointed):
    """Each unit is recomputed from outside: its hooks run again."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=self.reentrant)


@specimen
class ReentrantInside(CheckpointInside):
    """As CheckpointInside, by the reentrant kind."""

    reentrant = True


@specimen
class ReentrantOutside(CheckpointOutside):
    """As CheckpointOutside, by the reentrant kind."""

    reentrant = True


@specimen
class WrapperInside(Checkpointed):
    """The sharded module is the checkpoint wrapper."""

    def make_block(self) -> nn.Module:
        return checkpoint_wrapper(Block())


@specimen
class WrapperOutside(WrapperInside):
    """The checkpoint wrapper holds the sharded module."""

    def units(self) -> list[Unit]:
        return [*(block._checkpoint_wrapped_module for block in self.blocks), self]


@specimen
class SharedAndReentrant(Checkpointed):
    """One unit in two reentrant regions: its gradients arrive twice in a backward."""

    def units(self) -> list[Unit]:
        return [self.blocks[0], self]

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[0], self.first(x), use_reentrant=True)
        return checkpoint(self.blocks[0], torch.tanh(x), use_reentrant=True)
