"""What the adapters to other packages share: which versions were tried, and the values of rank 0."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

import torch

from sherd.api.fully_shard import Options
from sherd.comm.agreement import broadcast_from_rank0
from sherd.comm.mesh import data_mesh
from sherd.errors import UnsupportedError


def require_tried(package: str, tried: str, who: str) -> None:
    """Raise `UnsupportedError` if `package` is missing or of another minor version than `tried`, as "2.6"."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = "missing"
    if not found.startswith(f"{tried}."):
        raise UnsupportedError(
            f"{who}: {package} is {found}, and {tried} was tried; pip install '{package}=={tried}.*'"
        )


@torch.no_grad()
def take_rank0s_values(tensors: Iterable[torch.Tensor], options: Options, why: str) -> None:
    """Give all ranks the values of rank 0. `why` ends the error of a broadcast that fails."""
    mesh = data_mesh(options.get("mesh"), options.get("dp_mesh_dims"))
    for tensor in tensors:
        sent = tensor.to(mesh.device)
        broadcast_from_rank0([sent], mesh, f"rank 0's broadcast of weights ({why})")
        if sent is not tensor:
            tensor.copy_(sent)
