"""Memory that comes and goes in place: a 1-D buffer whose storage is freed and filled again under its views.

Views are cut once and stay valid as objects; while the buffer is freed they must not be read, which kills the process.
The engine keeps them out of the user's sight then (`engine/weights.py`).
"""

from __future__ import annotations

import torch

from sherd._torch import storage_uses
from sherd.comm import pages


class Buffer:
    """`numel` elements of `dtype` on `device`, allocated or not.

    An accelerator's allocator hands out memory per stream: allocate on the stream that will write first.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hold(torch.empty(numel, dtype=dtype, device=device), is_ours=True)

    @classmethod
    def around(cls, tensor: torch.Tensor) -> Buffer:
        """A buffer that is somebody's 1-D tensor: it lives as long as it is held, and is not freed in place."""
        buffer = cls.__new__(cls)
        buffer._hold(tensor, is_ours=False)
        return buffer

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Buffer:
        """A buffer that takes over the memory of `tensor`, of any shape, to free and refill it in place."""
        buffer = cls.__new__(cls)
        buffer._hold(tensor, is_ours=True)
        return buffer

    def _hold(self, tensor: torch.Tensor, is_ours: bool) -> None:
        self.tensor = tensor
        self.is_ours = is_ours
        self._storage = tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()

    @property
    def nbytes(self) -> int:
        """Bytes it occupies when allocated."""
        return self._nbytes

    @property
    def uses(self) -> int:
        """How many tensors and handles share its memory, views that autograd keeps for backward included."""
        return storage_uses(self._storage)

    def allocate(self) -> None:
        """Have memory, its contents undefined. `resize_` copies what survives, so it must start from nothing."""
        if self._storage.nbytes() == self._nbytes:
            return
        is_large = self._nbytes >= pages.LARGE and self._storage.device.type == "cpu"
        if is_large:
            pages.prepare(self._nbytes)
        self._storage.resize_(self._nbytes)
        if is_large:
            pages.advise(self._storage)

    def free(self) -> None:
        """Give the memory back; the views stay as they are and must not be read until the next `allocate`."""
        assert self.is_ours, "somebody else's memory is dropped, not freed"
        self._storage.resize_(0)
