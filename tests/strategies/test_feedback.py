"""`Reduction(feedback=True)`: what gradients lose on the wire comes with the next ones. A plain process does the same."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sherd
from sherd import CommPolicy, Reduction
from sherd.engine.run.unit import Unit
from sherd.errors import PolicyError, PolicyTypeError
from tests.support.ranks.bodies import on_processes, on_threads


class Grid(sherd.Codec):
    """Multiples of 1 / `steps`, element by element, so that a plain process need not know any layout."""

    def __init__(self, steps: int = 64) -> None:
        self.steps, self.name = steps, f"1/{steps}"

    def num_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, out: Tensor) -> None:
        numbers = (values.float() * self.steps).round().clamp(-32000, 32000).nan_to_num(nan=-32768.0)
        out.copy_(numbers.to(torch.int16).view(torch.uint8))

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        numbers = encoded.clone().view(torch.int16).float()
        out.copy_(torch.where(numbers == -32768, torch.nan, numbers / self.steps))

    def bound(self, values: Tensor) -> Tensor:
        return torch.full_like(values.float(), 0.51 / self.steps)


WIRES: dict[str, Any] = {"grid": Grid(), "bfloat16": torch.bfloat16}
SHAPES = {2: (1, 2), 4: (2, 2)}
"""Of meshes, for each number of ranks: replicas, and shards of each."""
WAYS: dict[str, dict[str, Any]] = {
    "chunks": {},
    "flat": {"placement": sherd.Flat()},
    "blocks": {"placement": sherd.Blocks(2)},
    "owned": {"placement": sherd.Owned()},
    "ddp": {"placements": "ddp"},
    "zero1": {"placements": "zero1"},
    "offloaded": {"offload_policy": sherd.CPUOffloadPolicy()},
    "gloo": {"transport": "gloo"},
    "torch": {"transport": "torch"},
    "wrapped": {"is_wrapped": True},
    "hsdp": {"num_ranks": 4},
    "hfsdp": {"num_ranks": 4, "placements": "hfsdp", "placement": sherd.Flat()},
    "wrapped, hybrid": {"num_ranks": 4, "is_wrapped": True},
}


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(2)))


def sharded_model(reduction: Reduction, **options: Any) -> Any:
    options.pop("num_ranks", None)
    model, ranks = plain_model(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options["comm_policy"] = CommPolicy(options.pop("transport", "auto"), reduce=reduction)
    if options.pop("is_wrapped", False):
        options |= {"device_mesh": mesh, "use_orig_params": True}
        if mesh.ndim == 2:
            options["sharding_strategy"] = sherd.ShardingStrategy.HYBRID_SHARD
        wrap = sherd.FullyShardedDataParallel
        return wrap(nn.Sequential(*(wrap(layer, **options) for layer in model)), **options)
    for layer in (*model, model):
        sherd.fully_shard(layer, mesh=mesh, **options)
    return model


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x) - x.roll(1, 1)).square().mean()


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class Simulated:
    """The same training in one process: ranks one after the other, and sums in the order of ranks."""

    def __init__(self, wire: Any, feedback: bool = True, shape: tuple[int, int] = (1, 2), adds_first: bool = False):
        self.model, self.wire, self.feedback, self.shape = plain_model(), wire, feedback, shape
        self.adds_first = adds_first
        self.lost: dict[Any, Tensor] = defaultdict(lambda: torch.zeros(()))

    def sent(self, key: Any, values: Tensor) -> Tensor:
        exact = values + self.lost[key] if self.feedback else values
        decoded = torch.empty_like(exact)
        if isinstance(self.wire, torch.dtype):
            decoded.copy_(exact.to(self.wire))
        else:
            self.wire.encode(exact.flatten(), encoded := torch.empty(2 * exact.numel(), dtype=torch.uint8))
            self.wire.decode(encoded, decoded.view(-1))
        self.lost[key] = (exact - decoded).nan_to_num(0.0, 0.0, 0.0)
        return decoded

    def reduced(self, name: str, of_ranks: Sequence[Tensor]) -> Tensor:
        replicas, shards = self.shape
        sums = []
        for replica in range(replicas):
            own = range(replica * shards, (replica + 1) * shards)
            parts = [of_ranks[rank] * (1 / len(of_ranks)) for rank in own]
            parts = parts if shards == 1 else [self.sent((name, "s", at), x) for at, x in zip(own, parts, strict=True)]
            sums.append(torch.stack(parts).sum(0) if len(parts) < 3 else sum(parts))
        if replicas == 1:
            return sums[0]
        total = sum(self.sent((name, "r", replica), each) for replica, each in enumerate(sums))
        return total if self.divides_replicas else self.sent((name, "back"), total)

    divides_replicas = False

    def backward(self, step: int, micro: int) -> None:
        """Adds the gradients of one backward, or of all micro-batches of a step, to `.grad`."""
        num_ranks = self.shape[0] * self.shape[1]
        of_ranks = []
        for rank in range(num_ranks):
            first: dict[str, Tensor] = {}
            for turn in range(micro):
                grads = torch.autograd.grad(loss_of(self.model, micro * step + turn, rank), self.model.parameters())
                for (name, _), grad in zip(self.model.named_parameters(), grads, strict=True):
                    first[name] = grad if name not in first else first[name] + grad
            of_ranks.append(first)
        for name, each in self.model.named_parameters():
            reduced = self.reduced(name, [of_rank[name] for of_rank in of_ranks])
            each.grad = reduced if each.grad is None else each.grad + reduced


def steps_of(model: Any, backward: Callable[[int], None], numbers: range, lr: float = 0.5) -> list[list[Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, foreach=True)
    found = []
    for step in numbers:
        backward(step)
        found.append([full(each.grad) for each in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return found


def sharded_backward(model: Any) -> Callable[[int], None]:
    return lambda step: loss_of(model, step, dist.get_rank()).backward()


def gradients(options: dict[str, Any], wire: Any, num_micro: int = 1) -> list[list[Tensor]]:
    model = sharded_model(Reduction(wire=wire, feedback=True), **options)

    def backward(step: int) -> None:
        with sherd.accumulate(model, num_micro):
            for turn in range(num_micro):
                loss_of(model, num_micro * step + turn, dist.get_rank()).backward()

    return steps_of(model, backward, range(4))


@pytest.mark.values
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_have_the_bits_of_one_process_that_does_the_same(way, wire, world):
    num_ranks = WAYS[way].get("num_ranks", 2)
    plain = Simulated(WIRES[wire], shape=(2, 1) if way == "ddp" else SHAPES[num_ranks])
    plain.divides_replicas = way == "hfsdp"
    expected = steps_of(plain.model, lambda step: plain.backward(step, 1), range(4))
    for of_rank in world(num_ranks).run(gradients, WAYS[way], WIRES[wire]):
        for found, wanted in zip(of_rank, expected, strict=True):
            assert all(map(torch.equal, found, wanted))
    assert all(each.abs().max() > 0 for each in plain.lost.values())
