"""A tensor-parallel model, how it is trained, and its comparison with one process.

Ranks of one data-parallel coordinate have the same batch. Parameters, gradients and losses are those of one process
that runs the batches of all data-parallel coordinates in turn.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support import comparing
from tests.support.comparing import whole, whole_grads
from tests.support.comparing import whole_params as wholes
from tests.support.sharding import sharded as sharded
from tests.support.training import make_optimizer

SEQUENCE = 12
BATCH = 2
STEPS = 2


@dataclass(frozen=True)
class Sizes:
    """Of the model. `EVEN` divides by every number of ranks here, `ODD` by none."""

    vocabulary: int
    width: int
    hidden: int


EVEN = Sizes(24, 12, 24)
ODD = Sizes(23, 11, 13)


class Block(nn.Module):
    """A norm, and two layers behind one another in a module of their own, for each has its place in a plan."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        up, down = nn.Linear(sizes.width, sizes.hidden), nn.Linear(sizes.hidden, sizes.width)
        self.norm, self.mlp = nn.LayerNorm(sizes.width), nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList([Block(sizes)])
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def built(sizes: Sizes = EVEN) -> Net:
    """The same values on every rank, and in one process."""
    net = Net(sizes)
    with torch.random.fork_rng():
        generator = torch.Generator().manual_seed(7)
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)
    return net


def tensor_parallel(net: Net, mesh: DeviceMesh) -> Net:
    """Embedding in rows, norms along the sequence, columns then rows, logits in columns, for `loss_parallel`."""
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    for index in range(len(net.blocks)):
        plan |= {
            f"blocks.{index}.norm": SequenceParallel(),
            f"blocks.{index}.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            # A DTensor between the two, as a plain tensor could not say that it is cut unevenly.
            f"blocks.{index}.mlp.up": ColwiseParallel(use_local_output=False),
            f"blocks.{index}.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    parallelize_module(net, mesh, plan)
    return net


WAYS = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}


class Springs(nn.Module):
    """Each element is drawn to where the sample says, once in forward and once in a product that backward reads. The
    parts of a tensor need no other. (What DTensor works out about products on three axes takes it seconds.)

    Args:
        shapes: by name, whose first word is one of `WAYS`, in which `on` cuts it over the axis "tp".
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.names = list(shapes)
        generator = torch.Generator().manual_seed(3)  # threads share the default one
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def on(self, mesh: DeviceMesh) -> Springs:
        for name, each in list(self.named_parameters()):
            placements = [WAYS[name.split("_")[0]] if axis == "tp" else Replicate() for axis in mesh.mesh_dim_names]
            setattr(self, name, nn.Parameter(distribute_tensor(each.detach(), mesh, placements)))
        return self

    def forward(self, sample: float) -> Tensor:
        return sum((part * part - sample * part).sum() for part in self.parts())

    def parts(self) -> list[Tensor]:
        own = [getattr(self, name) for name in self.names]  # a flat parameter hides them from `parameters()`
        return [_part_of(each) if isinstance(each, DTensor) else each for each in own]


def _part_of(parameter: DTensor) -> Tensor:
    axes = zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True)
    return parameter.to_local(grad_placements=[each if axis == "tp" else Partial() for axis, each in axes])


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Under `loss_parallel`, in processes only."""
    given, wanted = batch
    return F.cross_entropy(net(given).flatten(0, 1), wanted.flatten())


def whole_loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The same of whole logits: `loss_parallel` changes a table of the process, which threads share."""
    given, wanted = batch
    logits = net(given)
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def tokens(sizes: Sizes, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The inputs and the targets of one data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    both = torch.randint(sizes.vocabulary, (2, BATCH, SEQUENCE), generator=generator)
    return both[0], both[1]


optimizer_of = partial(make_optimizer, "adamw_fused")


def backward(net: nn.Module, sizes: Sizes, *batches: tuple[int, int]) -> None:
    """The mean of these batches, each (step, rank)."""
    for step, rank in batches:
        (whole_loss_of(net, tokens(sizes, step, rank)) / len(batches)).backward()


def step(net: nn.Module, optimizer: torch.optim.Optimizer, sizes: Sizes, *batches: tuple[int, int]) -> None:
    backward(net, sizes, *batches)
    optimizer.step()
    optimizer.zero_grad()


@dataclass
class Run:
    """What a training left: the losses, the gradients of the first step, the parameters after the last."""

    losses: list[float] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)


Loss = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


def train(net: nn.Module, sizes: Sizes, ranks: list[int], loss_of: Loss = whole_loss_of) -> Run:
    """Some steps on the batches of these data-parallel `ranks`: one in a sharded run, all of them in one process."""
    # Of one operation, because DTensor works each out for each way to cut; AdamW is in test_checkpoints.
    optimizer, run = torch.optim.SGD(net.parameters(), lr=0.5), Run()
    for step in range(STEPS):
        losses = []
        for rank in ranks:
            loss = loss_of(net, tokens(sizes, step, rank)) / len(ranks)
            loss.backward()
            losses.append(whole(loss).item())
        run.losses.append(sum(losses))
        if step == 0:
            run.grads = whole_grads(net)
        optimizer.step()
        optimizer.zero_grad()
    run.params = wholes(net)
    return run


def plain(sizes: Sizes, num_ranks: int) -> Run:
    """One process, the batches of all data-parallel ranks."""
    return train(built(sizes), sizes, list(range(num_ranks)))


def mesh_of(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    # DTensor remembers earlier, equal meshes, whose groups ended with the test that made them.
    _clear_sharding_prop_cache()
    # It says of every strided shard that is gathered that this takes two all-gathers.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def close(found: dict[str, Tensor], expected: dict[str, Tensor], what: str = "") -> None:
    """The same names, and values that are equal but for the order of sums."""
    comparing.assert_same(found, expected, what, rtol=1e-4, atol=1e-5)


def assert_same(runs: list[Run], expected: Run) -> None:
    """Every rank has the expected gradients and parameters; the losses of all ranks average to the expected one."""
    for run in runs:
        close(run.grads, expected.grads, ".grad")
        close(run.params, expected.params)
    for step, loss in enumerate(expected.losses):
        assert abs(sum(run.losses[step] for run in runs) / len(runs) - loss) < 1e-5


def assert_trains(run: Run, expected: Run) -> None:
    """On a rank: the same, of this rank's run."""
    losses = torch.tensor(run.losses)
    dist.all_reduce(losses)
    run = replace(run, losses=(losses / dist.get_world_size()).tolist())
    assert_same([run], expected)


def assert_bit_equal(run: Run, other: Run) -> None:
    comparing.assert_same(vars(run), vars(other))
