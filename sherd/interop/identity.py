"""sherd's modules as instances of torch's `FSDPModule`, for packages that test with `isinstance`.

The classes that `fully_shard` makes, and the wrapper's class, get one more base, after all others:

    FSDPLinear ─▶ sherd's FSDPModule ─▶ Linear ─▶ Module ─▶ TorchFace ─▶ torch's FSDPModule

so every method stays sherd's, and `TorchFace` has torch's further methods. A class stays the same object: modules that
are sharded already are instances too, and code that was compiled for them is not compiled again.

Nothing of torch's FSDP is imported before the first call.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn

from sherd.api.module import FSDPModule
from sherd.engine import StageUnits, Unit
from sherd.interop.packages import TemporaryChange, wrapped
from sherd.requirements import require_bool


class torch_fsdp_identity(TemporaryChange):
    """Make sherd's modules instances of `torch.distributed.fsdp.FSDPModule`, or no longer.

    The call takes effect at once, on all modules, sharded before or after. The end of a `with` statement restores the
    earlier setting. torch's `fully_shard.state(module)` then returns the attributes that torch's pipeline stages read.

    Args:
        enabled: False takes the base away again.

    Raises:
        PolicyTypeError: `enabled` is no bool.
    """

    def __init__(self, enabled: bool = True) -> None:
        require_bool("torch_fsdp_identity({})", enabled)
        super().__init__([partial(_identity.give_to_all, _identity.for_all)])
        _identity.give_to_all(enabled)


def lend_identity(borrower: object, classes: Iterable[type]) -> None:
    """Make `classes`, of sharded modules, subclasses of torch's `FSDPModule` for as long as `borrower` exists."""
    for cls in classes:
        _identity.give(cls)
        weakref.finalize(borrower, _identity.take_back, cls)


class _Identity:
    """The classes that have torch's base: all classes, or the classes of borrowers."""

    def __init__(self) -> None:
        self.for_all = False
        self._num_borrowers: Counter[type] = Counter()
        self._undo: list[Callable[[], None]] = []

    def give_to_all(self, enabled: bool) -> None:
        if enabled == self.for_all:
            return
        self.for_all = enabled
        if enabled:
            FSDPModule.__init_subclass__ = classmethod(_init_subclass)  # type: ignore[assignment, method-assign]
            # Imported here: pipelining.py imports this file, and loads torch's pipelining, which few programs need.
            from sherd.interop.pipelining import split_backwards_in_torchs_stages

            self._undo = [_answer_state(), split_backwards_in_torchs_stages()]
        else:
            del FSDPModule.__init_subclass__
            for undo in self._undo:
                undo()
            self._undo = []
        for cls in FSDPModule.__subclasses__():
            self.update(cls)

    def give(self, cls: type) -> None:
        self._num_borrowers[cls] += 1
        self.update(cls)

    def take_back(self, cls: type) -> None:
        self._num_borrowers[cls] -= 1
        if not self._num_borrowers[cls]:
            del self._num_borrowers[cls]
        self.update(cls)

    def update(self, cls: type) -> None:
        due = self.for_all or cls in self._num_borrowers
        is_made = _torch_face.cache_info().currsize > 0
        if not due and not (is_made and issubclass(cls, _torch_face())):
            return
        others = tuple(base for base in cls.__bases__ if base is not _torch_face())
        if "__new__" not in vars(cls):
            # The wrapper's class. Python goes on to look for a `__new__` after the base with a `__new__` is taken away.
            cls.__new__ = staticmethod(_new_like(cls.__init__))  # type: ignore[misc, method-assign]
        cls.__bases__ = (*others, _torch_face()) if due else others


_identity = _Identity()


def _init_subclass(cls: Any, /, **options: Any) -> None:
    super(FSDPModule, cls).__init_subclass__(**options)  # the user's own class may define the method
    _identity.update(cls)


def _new_like(init: Callable[..., None]) -> Callable[..., Any]:
    """Returns a `__new__` with the signature of `init`, from which tools read the arguments of a class."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls)

    new.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]
    return new


@functools.cache
def _torch_face() -> type:
    from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

    class TorchFace(TorchFSDPModule):
        """The base that makes an instance of torch's `FSDPModule`, with the methods that sherd's class lacks."""

        def _set_unshard_async_op(self, async_op: bool) -> None:
            """Do nothing: sherd's gathers are asynchronous wherever useful."""

        def _get_fsdp_state(self) -> Any:
            return _State(self)

    return TorchFace


# The attributes that torch's pipeline stages read


class _State:
    """The part of torch's FSDPState that a pipeline stage uses, made for a module at each request."""

    def __init__(self, module: Any) -> None:
        self._units = StageUnits(module, type(module).__name__)
        # The part of torch's FSDPParamGroup that a stage uses; torch 2.11 reads one group, 2.12 a list.
        self._fsdp_param_group = SimpleNamespace(post_backward=self._units.start_reductions)
        self._fsdp_param_groups = [self._fsdp_param_group]
        self._state_ctx = self
        self._comm_ctx = Unit.of(module)  # since 2.15: equal for modules that share a stream

    @property
    def all_states(self) -> list[_State]:
        """Returns this object alone, which stands for all units below the module."""
        return [self]

    def _root_post_backward_final_callback(self) -> None:
        self._units.finish_reductions()


def _answer_state() -> Callable[[], None]:
    """Let torch's `fully_shard.state(module)` answer for sherd's modules. Returns a function that undoes it."""
    from torch.distributed.fsdp import fully_shard

    def state(before: Callable[..., object], module: nn.Module) -> object:
        return before(module) if Unit.of(module) is None else _State(module)

    return wrapped(fully_shard, "state", state)
