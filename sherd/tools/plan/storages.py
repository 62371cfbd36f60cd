"""The storages of tensors while a step runs: their bytes from first use to death, and their purpose."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import TorchDispatchMode, in_backward
from sherd.memory.watch import Held
from sherd.schedule.moments import MemoryKind, Moment
from sherd.tools.plan.operations import is_communication, tensors_among
from sherd.tools.plan.reading import is_as_logits
from sherd.tools.simulate.work import TensorKind

__all__ = ["Note", "Storages"]

_GATHERING = (MemoryKind.ROWS.value, MemoryKind.SENT.value)

Call = Callable[[Any, tuple[Any, ...], Callable[[], Any]], Any]


@dataclass(eq=False, slots=True)
class Followed:
    """A storage.

    `kind` and `unit` are its purpose before the engine holds it, `holder` is its last purpose in the engine. `first` is
    the number of the note with which its present bytes came.
    """

    kind: str
    unit: int
    nbytes: int = 0
    address: int = 0
    holder: tuple[str, int] | None = None
    first: int = 0
    is_seen: bool = False
    """An operation touched the storage, so its death will be noticed."""


@dataclass(slots=True)
class Note:
    """Bytes that come, or go if below 0, at a time of the host's clock.

    `purpose` is None for the storage's own purpose, which may change later: a tensor of forward is an activation if it
    is alive when backward begins.
    """

    time: float
    moment: Moment | str | None
    storage: Followed
    purpose: tuple[str, int] | None
    nbytes: int

    @property
    def kind_and_unit(self) -> tuple[str, int]:
        """The purpose of the bytes, as it is known by now."""
        return self.purpose or (self.storage.kind, self.storage.unit)


class Storages(TorchDispatchMode):
    """Follows every storage that an operation reads or makes, as long as the mode is on.

    Args:
        device: the type of device whose memory counts.
        at_pass: is called with "backward" before the first operation of a backward, with "recompute" when forward runs
            again within it, and with "backward" when that ends.
        at_call: runs each collective. It gets the operation, its arguments, and a function that calls it with them.
        after_each: is called after each operation, with the bytes that are alive then. If it raises, the operation
            raises.
    """

    def __init__(
        self,
        device: str,
        at_pass: Callable[[str], None],
        at_call: Call,
        after_each: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes: list[Note] = []
        self.before: list[Note] = []
        """Notes of the storages that were there when the mode began."""
        self._now = 0
        self._device, self._at_pass, self._at_call, self._after_each = device, at_pass, at_call, after_each
        self._thread = threading.get_ident()
        self._of: dict[int, Followed] = {}
        self._at: dict[int, Followed] = {}
        self._recomputed: list[Followed] = []
        self._held_at: dict[int, Set[int]] = {}
        self._in_backward = self._again = False
        self._logits: tuple[int, int] | None = None
        """The width and the bytes of the logits."""
        self.expect(TensorKind.TEMPORARY.value, -1, None)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow storages inside the context."""
        try:
            with _resizes_told(self._resized), self:
                yield
        finally:
            self._of.clear()  # later deaths do not count
            self._at.clear()

    def forget(self) -> None:
        """Forget all changes. The present storages were there before."""
        alive = {id(each): each for each in (*self._of.values(), *self._at.values()) if each.nbytes}
        self.notes, self.before, self._now, self._since = [], [], 0, 0
        self._recomputed.clear()
        for each in alive.values():
            self._was_there(each)

    def held_now(self) -> Counter[tuple[str, int]]:
        """Returns the bytes that are alive, by kind and unit."""
        held: Counter[tuple[str, int]] = Counter()
        for note in (*self.before, *self.notes):
            held[note.kind_and_unit] += note.nbytes
        return +held

    def expect(self, kind: str, unit: int, moment: Moment | str | None) -> None:
        """Take bytes that come from now on as of this kind and unit, unless they turn out to be of another."""
        self._kind, self._unit, self._moment = kind, unit, moment
        self._since = len(self.notes)

    @property
    def expected(self) -> tuple[str, int, Moment | str | None]:
        """The last arguments of `expect`."""
        return self._kind, self._unit, self._moment

    def hold(self, unit: int, held: Held) -> None:
        """Note the storages that the engine or an optimizer holds for `unit`.

        Bytes since the last `expect` came for this purpose. Rows that are alive and no longer held are the transport's:
        its thread drops them a moment later.
        """
        for address in self._held_at.get(unit, ()) - held.keys():
            dropped = self._at.get(address)
            if dropped is not None and dropped.nbytes and dropped.holder and dropped.holder[0] in _GATHERING:
                self._hand_over(dropped, (MemoryKind.TRANSPORT.value, unit))
        self._held_at[unit] = held.keys()
        for address, (kind, nbytes) in held.items():
            storage, purpose = self._at.get(address), (kind.value, unit)
            if storage is None:
                storage = Followed(*purpose, nbytes, address, purpose)
                self._at[address] = storage
                self._was_there(storage)
            elif storage.holder != purpose:
                if storage.first >= self._since:
                    for note in self.notes[storage.first :]:
                        if note.storage is storage:
                            note.purpose = purpose
                    storage.holder = purpose
                else:
                    self._hand_over(storage, purpose)

    def _hand_over(self, storage: Followed, purpose: tuple[str, int]) -> None:
        if storage.nbytes:
            self._note(storage, -storage.nbytes)
        storage.holder = purpose
        if storage.nbytes:
            self._note(storage, storage.nbytes)

    def expect_logits(self, logits: torch.Tensor | None) -> None:
        """Take `logits`, and later tensors like them, as logits. None: no more."""
        self._logits = None
        if logits is not None:
            self._logits = logits.shape[-1], logits.nbytes
            storage = self._of.get(logits.untyped_storage()._cdata)
            if storage is not None:
                storage.kind = TensorKind.LOGITS.value

    def become(self, kind: TensorKind) -> None:
        """Let all temporaries that are alive be of `kind`, from the start."""
        for storage in list(self._of.values()):
            if storage.kind == TensorKind.TEMPORARY.value:
                storage.kind = kind.value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own dispatch runs on local tensors, which come back here
        kwargs = kwargs or {}
        again = self._follow_passes()
        given = (args, kwargs.values())
        # `torch.tensor` makes a storage before its operation is seen, and so does a collective, deep in C++.
        is_new = (
            self._in_backward or self._kind == MemoryKind.TRANSPORT.value or func is torch.ops.aten.lift_fresh.default
        )
        for each in _dense_among(given):
            self._see(each.untyped_storage(), is_new, again)
        call = partial(func, *args, **kwargs)
        result = self._at_call(func, args, call) if is_communication(func) else call()
        for each in _dense_among((*given, result)):  # `resize_` changes a storage and makes none
            self._see(each.untyped_storage(), True, again, each.shape[-1] if each.dim() else 0)
        if self._after_each is not None:
            self._after_each(self._now)
        return result

    def _follow_passes(self) -> bool:
        """Notice that backward begins. Returns True if forward runs again within it."""
        within = in_backward()
        begins = within and not self._in_backward
        if begins:
            self.become(TensorKind.ACTIVATION)
        self._in_backward = within
        again = within and torch.is_grad_enabled()
        # All-gathers, which run without gradients, belong to either pass.
        if begins or (within and again != self._again and self._kind != MemoryKind.TRANSPORT.value):
            self._at_pass("recompute" if again else "backward")
            self._again = again
        self._again = self._again and within
        if not again and self._recomputed:
            alive = set(map(id, self._of.values()))
            for each in self._recomputed:
                if id(each) in alive and each.kind == TensorKind.TEMPORARY.value:
                    each.kind = TensorKind.ACTIVATION.value
            self._recomputed.clear()
        return again

    def _see(self, storage: torch.UntypedStorage, is_new: bool, again: bool = False, width: int = 0) -> None:
        """Note the bytes of `storage` if they changed. An unknown storage that is not `is_new` was there before."""
        if storage.device.type != self._device or not storage.resizable():
            return  # the memory belongs to another storage, which is counted
        key, nbytes = storage._cdata, storage.nbytes()
        found = self._of.get(key)
        if found is None:
            found = self._at.get(storage.data_ptr()) if nbytes else None
            if found is None or found.is_seen:
                found = Followed(self._kind, self._unit)
                if not is_new:
                    found = Followed(TensorKind.INPUT.value, -1, nbytes)
                    self._was_there(found)
                elif self._logits is not None and is_as_logits(width, nbytes, *self._logits):
                    found.kind = TensorKind.LOGITS.value
                elif again:
                    self._recomputed.append(found)
            found.is_seen = True
            self._of[key] = found
            weakref.finalize(storage, self._died, key).atexit = False
        if nbytes != found.nbytes:
            if not found.nbytes:
                found.first = len(self.notes)
            self._note(found, nbytes - found.nbytes)
            found.nbytes = nbytes
        address = storage.data_ptr()
        if address != found.address:
            self._at.pop(found.address, None)
        if address:
            self._at[address] = found
        found.address = address

    def _resized(self, storage: torch.UntypedStorage) -> None:
        # Ranks may be threads; backward on an accelerator has threads of its own.
        if self._device != "cpu" or threading.get_ident() == self._thread:
            self._see(storage, True)
            if self._after_each is not None:
                self._after_each(self._now)

    def _died(self, key: int) -> None:
        storage = self._of.pop(key, None)
        if storage is not None:
            if self._at.get(storage.address) is storage:
                del self._at[storage.address]
            if storage.nbytes:
                self._note(storage, -storage.nbytes)

    def _was_there(self, storage: Followed) -> None:
        storage.first = -1
        self._now += storage.nbytes
        self.before.append(Note(0.0, None, storage, storage.holder, storage.nbytes))

    def _note(self, storage: Followed, nbytes: int) -> None:
        self._now += nbytes
        self.notes.append(Note(perf_counter(), self._moment, storage, storage.holder, nbytes))


def _dense_among(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in tensors_among(values):
        if each.layout is torch.strided and not hasattr(each, "__tensor_flatten__"):  # others consist of tensors
            yield each


_listeners: list[Callable[[torch.UntypedStorage], None]] = []
_lock = threading.Lock()


@contextmanager
def _resizes_told(listener: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Tell `listener` of each storage that is resized, which is no operation of the dispatcher."""
    with _lock:
        _listeners.append(listener)
        if len(_listeners) == 1:
            _tell_of_resizes()
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
            if not _listeners:
                torch.UntypedStorage.resize_ = torch.UntypedStorage.resize_.plain  # type: ignore


def _tell_of_resizes() -> None:
    plain: Any = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        result = plain(storage, size)
        for listener in list(_listeners):
            listener(storage)
        return result

    resize_and_tell.plain = plain  # type: ignore[attr-defined]
    torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore
