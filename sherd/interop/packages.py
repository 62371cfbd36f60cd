"""Common parts of the adapters to other packages: changes that end, versions that were tried, values of rank 0."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar

import torch

from sherd.api.fully_shard import Options
from sherd.comm.agreement import broadcast_from_rank0
from sherd.comm.mesh import data_mesh
from sherd.errors import UnsupportedError


class TemporaryChange:
    """A change of other packages that takes effect when the object is made; the end of a `with` statement undoes it.

    Changes of one class are undone in reverse order. A plain call inside of a `with` statement ends with it. A change
    whose statement ends before that of a later one stays until then. `undoes` are called from the last to the first.
    """

    _made: ClassVar[list[TemporaryChange]]

    def __init_subclass__(cls) -> None:
        cls._made = []

    def __init__(self, undoes: list[Callable[[], None]]) -> None:
        self._undoes = undoes
        self._is_entered = self._has_ended = False
        self._made.append(self)

    def __enter__(self) -> None:
        self._is_entered = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._has_ended = True
        later = self._made[self._made.index(self) + 1 :] if self in self._made else []
        if any(each._is_entered and not each._has_ended for each in later):
            return
        while self in self._made or (self._made and self._made[-1]._has_ended):
            for undo in reversed(self._made.pop()._undoes):
                undo()


def replaced(owner: object, name: str, value: object) -> Callable[[], None]:
    """Give `owner` another value of `name`. Returns a function that undoes it."""
    undo = functools.partial(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
    return undo


def wrapped(owner: object, name: str, around: Callable[..., object]) -> Callable[[], None]:
    """Call `around` for the function `name` of `owner`, which it gets first. Returns a function that undoes it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> object:
        return around(original, *args, **kwargs)

    return replaced(owner, name, call)


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
