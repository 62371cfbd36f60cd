"""Replicas on slow links: within a node gradients travel as they are, from node to node in 8 bits.

Half of the ranks stand for each node. Shards, sums and the optimizer's state stay in float32.

    torchrun --nproc-per-node 2 examples/fewer_bits.py
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sherd

NODES = 2


def train(plain: nn.Sequential, mesh: DeviceMesh, policy: sherd.CommPolicy) -> float:
    """Thirty steps of a copy of `plain`; returns the last loss, the mean of all ranks."""
    model = copy.deepcopy(plain)
    for unit in (*model, model):
        sherd.fully_shard(unit, mesh=mesh, comm_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(30):
        x = torch.randn(32, 64, generator=data)
        loss = (model(x) - x[:, :8].sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (NODES, dist.get_world_size() // NODES), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 1))
    numel = sum(parameter.numel() for parameter in plain.parameters())
    policies = {"float32": sherd.CommPolicy(), "int8": sherd.CommPolicy(reduce_replicas=sherd.Reduction(wire="int8"))}
    nbytes = {"float32": 4 * numel, "int8": sherd.codec("int8").num_bytes(numel)}
    for name, policy in policies.items():
        loss = train(plain, mesh, policy)
        if dist.get_rank() == 0:
            print(f"{name:7}  loss {loss:.4f}  {nbytes[name]:,} bytes of gradients between nodes, there and back")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
