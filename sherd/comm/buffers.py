"""A 1-D buffer whose memory is freed and allocated again in place, under its views.

Views are made once and stay the same objects. Reading one while the buffer is freed kills the process, so the engine
hides them from the user meanwhile (`engine/moves/weights.py`).
"""

from __future__ import annotations

import torch

from sherd.comm import pages


class Buffer:
    """`numel` elements of `dtype` on `device`, allocated or not.

    An accelerator's allocator keeps memory per stream, so allocate on the stream that writes first.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hold(torch.empty(numel, dtype=dtype, device=device), is_ours=True)

    @classmethod
    def around(cls, tensor: torch.Tensor) -> Buffer:
        """Returns a buffer around the caller's 1-D `tensor`, whose memory is never freed in place."""
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
        """The bytes of the buffer when allocated."""
        return self._nbytes

    @property
    def address(self) -> int:
        """The address of the storage, for `storage_uses`, which counts tensors that share the memory."""
        address: int = self._storage._cdata
        return address

    def allocate(self) -> None:
        """Allocate the memory, uninitialised, unless it is allocated."""
        if self._storage.nbytes() == self._nbytes:
            return
        is_large = self._nbytes >= pages.LARGE and self._storage.device.type == "cpu"
        if is_large:
            pages.prepare(self._nbytes)
        self._storage.resize_(self._nbytes)  # from 0 bytes: it would copy old contents
        if is_large:
            pages.advise(self._storage)

    def free(self) -> None:
        """Free the memory. The views stay, and must not be read until the next `allocate`."""
        assert self.is_ours, "somebody else's memory is dropped, not freed"
        self._storage.resize_(0)
