"""How does a model start that no process could hold whole? On the meta device, without memory.

It is built there, sharded there, and only then each rank allocates and fills its own shards.

    torchrun --nproc-per-node 2 examples/meta_device_start.py
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from sherd import fully_shard


class Decoder(nn.Module):
    """A stack of transformer layers over tokens 0 to 255, int64 (batch, length)."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        layer = partial(nn.TransformerEncoderLayer, width, nhead=4, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def num_bytes(model: nn.Module) -> int:
    """Bytes of this rank's shards that have memory."""
    local = [param.to_local() for param in model.parameters()]
    return sum(tensor.nbytes for tensor in local if not tensor.is_meta)


@torch.no_grad()
def fill(model: nn.Module, rank: int) -> None:
    """Give every shard its values. The ranks draw from different seeds, so their rows differ."""
    generator = torch.Generator().manual_seed(rank)
    for name, param in model.named_parameters():
        shard = param.to_local()
        if param.ndim == 2:
            shard.normal_(std=0.02, generator=generator)
        else:
            shard.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with torch.device("meta"):
        model = Decoder(num_layers=4, width=64)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    print(f"rank {rank}: sharded on meta, {num_bytes(model)} bytes allocated")

    model.to_empty(device="cpu")  # memory for this rank's shards alone, with whatever was in it
    fill(model, rank)
    print(f"rank {rank}: after to_empty, {num_bytes(model)} bytes allocated")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(64).repeat(4, 1) + rank
    for step in range(10):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 3 == 0:
            print(f"step {step}  loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
