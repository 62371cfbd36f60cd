"""Names inside of the files of `torch.save` and of `torch.distributed.checkpoint`, which are written without them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def rebuild_tensor() -> Callable[..., object]:
    """Returns the function that files of `torch.save` name for a tensor of a typed storage, since torch 0.4."""
    found: Callable[..., object] = torch._utils._rebuild_tensor_v2
    return found


def rebuild_tensor_of_bytes() -> Callable[..., object]:
    """Returns the one for a tensor whose dtype has no typed storage (float8, unsigned integers), since torch 2.1."""
    found: Callable[..., object] = torch._utils._rebuild_tensor_v3
    return found


def storage_info(path: str, offset: int, length: int) -> object:
    """Returns where a file of `torch.distributed.checkpoint` has an item, for its `.metadata`, since torch 2.0."""
    from torch.distributed.checkpoint import filesystem  # it takes long to load

    return filesystem._StorageInfo(path, offset, length)
