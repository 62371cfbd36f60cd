"""The random numbers of a rank that is a thread.

torch has one default generator for a process. Ranks that are threads would draw from it in turns, and what one draws
would depend on how far the others are. So each of them gets a generator of its own, as a process has.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Every rank begins every task with it, as the ranks that are processes do.
SEED = 0

_FUNCTIONS = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial")
_FILLS = ("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_", "geometric_", "cauchy_")
_METHODS = {
    "manual_seed": lambda generator, seed: generator.manual_seed(int(seed)),
    "get_rng_state": lambda generator: generator.get_state(),
    "set_rng_state": lambda generator, new_state: generator.set_state(new_state),
}
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

_rank = threading.local()


@contextlib.contextmanager
def own_generator() -> Iterator[None]:
    """What this thread draws inside comes from a fresh generator."""
    _rank.generator = torch.Generator().manual_seed(SEED)
    try:
        yield
    finally:
        del _rank.generator


@contextlib.contextmanager
def generators_by_thread() -> Iterator[None]:
    """Inside, torch's functions draw from the generator of a thread that has its own."""
    before = _replaced()
    try:
        yield
    finally:
        for owner, name, function in reversed(before):
            setattr(owner, name, function) if owner is not Tensor else delattr(owner, name)


def _replaced() -> list[tuple[Any, str, Callable[..., Any]]]:
    """The functions that stood where now those of this module stand, each by its owner and name."""
    ours = [
        *((torch, name, _own(getattr(torch, name))) for name in _FUNCTIONS),
        *((Tensor, name, _own(getattr(Tensor, name))) for name in _FILLS),
        *(
            (owner, name, _asking(getattr(owner, name), method))
            for owner in (torch, torch.random)
            for name, method in _METHODS.items()
        ),
        (nn.functional, "dropout", _dropout(nn.functional.dropout)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in ours]
    for owner, name, function in ours:
        setattr(owner, name, function)
    return before


def _generator() -> torch.Generator | None:
    """This thread's own, unless tensors are not computed just now."""
    return None if torch._C._len_torch_dispatch_stack() else getattr(_rank, "generator", None)


def _own(draw: Callable[..., Any]) -> Callable[..., Any]:
    """`draw`, given the generator of a thread that has its own and draws on the CPU."""

    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        generator = _generator()
        if generator is not None and kwargs.get("generator") is None and _is_on_cpu(args, kwargs):
            kwargs["generator"] = generator
        return draw(*args, **kwargs)

    return drawn


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether only plain tensors of the CPU take part."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    device = kwargs.get("device") or (tensors[0].device if tensors else torch.get_default_device())
    return torch.device(device).type == "cpu" and all(_is_plain(each) for each in tensors)


def _is_plain(value: Tensor) -> bool:
    return type(value) in _PLAIN and value.device.type == "cpu"


def _asking(default: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """`default`, or in a thread that has its own generator that one's `method`."""

    @functools.wraps(default)
    def asked(*args: Any, **kwargs: Any) -> Any:
        generator = _generator()
        return default(*args, **kwargs) if generator is None else method(generator, *args, **kwargs)

    return asked


def _dropout(default: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """With the values that torch's own gives on the CPU for the same generator."""

    @functools.wraps(default)
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if _generator() is None or not _is_plain(input) or inplace or not training or not 0 < p < 1:
            return default(input, p, training, inplace)
        return input * torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)

    return dropout
