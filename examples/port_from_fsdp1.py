"""How is an FSDP1 program ported? Two imports change; policies, strategies, flat parameters and state dicts stay.

torchrun --nproc-per-node 2 examples/port_from_fsdp1.py
"""

import torch
import torch.distributed as dist
from torch import nn

# Was: from torch.distributed.fsdp import ... and from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from sherd import FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType, explain_migration
from sherd import FullyShardedDataParallel as FSDP
from sherd.wrap import ModuleWrapPolicy


class Block(nn.Module):
    """A residual two-layer perceptron on vectors of `width` floats."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank, before they are cut
    arguments = {
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "auto_wrap_policy": ModuleWrapPolicy({Block}),
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    model = FSDP(nn.Sequential(*(Block(64) for _ in range(4)), nn.Linear(64, 1)), **arguments)

    # One flat parameter per unit, as use_orig_params is not given.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mine = sum(param.to_local().numel() for param in model.parameters())
    print(f"rank {rank} of {num_ranks} holds {mine} elements of {len(list(model.parameters()))} flat parameters")

    data = torch.Generator().manual_seed(1 + rank)  # each rank sees data of its own
    for step in range(31):
        x = torch.randn(32, 64, generator=data)
        target = x[:, :8].sum(dim=1, keepdim=True)
        loss = (model(x).float() - target).square().mean()
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        if rank == 0 and step % 10 == 0:
            print(f"step {step:2d}  loss {loss.item() / num_ranks:.3f}  gradient norm {norm.item():.3f}")

    whole = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
        state = model.state_dict()
    print(f"rank {rank} could save {sum(each.numel() for each in state.values())} elements in {len(state)} tensors")

    explain_migration(**arguments)  # the same with fully_shard, for the day on which the wrapper goes; by rank 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
