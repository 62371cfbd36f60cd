"""Copies in host memory of what is saved, so that training goes on while another thread writes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

import torch

from sherd.checkpoint.tensor_bytes import CHUNK_BYTES, chunks_of, memory_of


class Staging:
    """Chunks of tensors that one thread copies and another writes, in the same order.

    Args:
        most_bytes: the bytes that are copied and not yet written, at most; who copies waits for who writes. None: all.
            With a bound, chunks are gone once they are written, so that a failed write cannot be repeated.
    """

    def __init__(self, most_bytes: int | None) -> None:
        self._most_bytes = most_bytes
        self._chunks: dict[str, list[memoryview | None]] = {}
        self._whole: set[str] = set()
        self._held, self._failure = 0, ""
        self._changed = threading.Condition()

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy all of `tensors`. Returns once the copies are made, or given up on."""
        for name, tensor in tensors.items():
            for chunk in _copied(tensor):
                with self._changed:
                    self._changed.wait_for(lambda: self._failure or self._has_room())
                    if self._failure:
                        return
                    self._chunks.setdefault(name, []).append(chunk)
                    self._held += len(chunk)
                    self._changed.notify_all()
            with self._changed:
                self._whole.add(name)
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._most_bytes is None or self._held < self._most_bytes

    def give_up(self, why: str) -> None:
        """Have nobody wait for the other thread any more."""
        with self._changed:
            self._failure = why
            self._changed.notify_all()

    def chunks(self, name: str, tensor: torch.Tensor) -> Callable[[], Iterator[memoryview]]:
        """Returns the bytes of a tensor, for the thread that writes; it waits until they are copied."""

        def read() -> Iterator[memoryview]:
            at = 0
            while (chunk := self._chunk(name, at)) is not None:
                yield chunk
                at += 1
                if self._most_bytes is not None:
                    with self._changed:
                        self._chunks[name][at - 1] = None
                        self._held -= len(chunk)
                        self._changed.notify_all()

        return read

    def _chunk(self, name: str, at: int) -> memoryview | None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure or name in self._whole or len(self._chunks.get(name, ())) > at)
            if self._failure:
                raise OSError(self._failure)
            held = self._chunks.get(name, [])
            if at < len(held) and held[at] is None:
                raise OSError("a failed write cannot be repeated, as its bytes are not kept; leave out staging_bytes")
            return held[at] if at < len(held) else None


def _copied(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a tensor in memory of their own."""
    if tensor.device.type == "cpu":
        for chunk in chunks_of(tensor):
            for start in range(0, len(chunk), CHUNK_BYTES):
                yield memoryview(bytearray(chunk[start : start + CHUNK_BYTES]))
    elif tensor.numel():
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor)
        yield memory_of(host)
