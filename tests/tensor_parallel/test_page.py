"""The table of docs/do/parallelism.md is what `fully_shard` does."""

import re
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import sherd
from tests.support.ranks.bodies import on_threads
from tests.tensor_parallel.training import mesh_of

PAGE = Path(__file__).parent.parent.parent / "docs/do/parallelism.md"
ON_TP = [Shard(0), Shard(1), Replicate(), None]
DATA = [Shard(0), Shard(1), sherd.Flat()]


@on_threads(4)
def test_the_table_of_the_page_is_what_fully_shard_does():
    """One line for each way to cut a tensor of 8 x 12 on (dp, tp), 2 x 2 ranks: what the first rank sees."""
    mesh, found = mesh_of((2, 2), "dp", "tp"), []
    for on_tp in ON_TP:
        for data in DATA:
            layer = nn.Linear(12, 8, bias=False)
            if on_tp is not None:
                layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [on_tp]))
            shard = sherd.fully_shard(layer, mesh=mesh["dp"], placement=data).weight
            cells = [
                "none: a plain tensor" if on_tp is None else repr(on_tp).replace("dim=", ""),
                repr(data).replace("dim=", ""),
                f"({', '.join(shard.device_mesh.mesh_dim_names)})",
                ", ".join(map(repr, shard.placements)).replace("dim=", ""),
                str(tuple(shard.to_local().shape)),
            ]
            found.append("| " + " | ".join(f"`{cell}`" if "none" not in cell else cell for cell in cells) + " |")
    if dist.get_rank() == 0:
        (table,) = re.findall(r"<!-- placements -->\n(.*?)<!-- /placements -->", PAGE.read_text(), re.DOTALL)
        assert table.splitlines()[2:] == found
