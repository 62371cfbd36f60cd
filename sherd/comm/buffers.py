"""A 1-D buffer whose memory is freed and allocated again in place, under its views.

Views are made once and stay the same objects. Reading one while the buffer is freed kills the process, so the engine
hides them from the user meanwhile (`engine/moves/weights.py`).
"""

from __future__ import annotations

import torch

from sherd.comm import pages


class Buffer:
    """`numel` elements of `dtype` on `device`, allocated or not.

    An accelerator's allocator hands out memory per stream: allocate on the stream that will write first.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hold(torch.empty(numel, dtype=dtype, device=device), is_ours=True)

    @classmethod
    def around(cls, tensor: torch.Tensor) -> Buffer:
        """Returns a buffer around the caller's 1-D tensor, whose memory is never freed in place."""
        buffer = cls.__new__(cls)
        buffer._hold(tensor, is_ours=False)
        return buffer

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Buffer:
        """Returns a buffer that takes over the memory of `tensor`, of any shape, to free and refill it in place."""
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
        """The bytes it takes when allocated."""
        return self._nbytes

    @property
    def address(self) -> int:
        """The address of its storage, by which `storage_uses` counts the tensors and handles that share its memory,
        those that autograd keeps for backward included."""
        address: int = self._storage._cdata
        return address

    def allocate(self) -> None:
        """Allocate the memory, uninitialised. `resize_` would copy old contents, so it starts from nothing."""
        if self._storage.nbytes() == self._nbytes:
            return
        is_large = self._nbytes >= pages.LARGE and self._storage.device.type == "cpu"
        if is_large:
            pages.prepare(self._nbytes)
        self._storage.resize_(self._nbytes)
        if is_large:
            pages.advise(self._storage)

    def free(self) -> None:
        """Give the memory back. The views stay, and must not be read until the next `allocate`."""
        assert self.is_ours, "somebody else's memory is dropped, not freed"
        self._storage.resize_(0)
