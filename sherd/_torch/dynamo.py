"""Private names of Dynamo, of the fake tensors it traces with, and of operators on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch

from sherd._torch.tensors import write_into

Function = TypeVar("Function", bound=Callable[..., object])

SHARES_ONE_HEAD: bool = torch.__version__ >= "2.14"  # compared as versions are, not as text
"""Whether the fused attention of a CPU takes one head of keys for all queries unasked, without `enable_gqa`."""


def dynamo_disabled(function: Function) -> Function:
    """Returns `function`, marked so that Dynamo traces neither it nor what it calls.

    The public decorator adds eight Python calls to each call, also outside of Dynamo. The marks have no public names
    (2.11 to 2.15).
    """
    dynamo, plain = torch._C._dynamo.eval_frame, getattr(function, "__func__", function)
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(plain.__code__, dynamo._FrameExecStrategy(skip, skip))
    write_into(plain, "_torchdynamo_disable", True)
    return function


def trace_nothing_in(*packages: str) -> None:
    """Have Dynamo run all functions of these packages as they are, but trace what they call.

    The decorator `torch.compiler.disable` takes a microsecond of every call; no public name marks a package (2.2 to
    2.15).
    """
    from torch._dynamo import trace_rules

    for package in packages:
        trace_rules.add(package)


def not_traced(reason: str) -> Exception:
    """Returns the error that a tensor raises when Dynamo wants a fake copy of it, so that the graph breaks there.

    Dynamo then runs the code around the tensor untraced; with `fullgraph=True` the user sees the error. Nothing public
    breaks a graph from outside of traced code (2.11 to 2.15).
    """
    from torch._dynamo.exc import Unsupported

    return Unsupported(reason)


def are_fake(kinds: Iterable[type]) -> bool:
    """Returns whether one of the tensor classes `kinds` is FakeTensor's, which has a device but no memory.

    DTensor computes the shapes of results with these, once for each form of operation (private from 2.0 to 2.15).
    """
    from torch._subclasses.fake_tensor import FakeTensor

    return any(issubclass(tensor_class, FakeTensor) for tensor_class in kinds)


@contextlib.contextmanager
def composed_on_meta(functions: Mapping[str, Callable[..., object]]) -> Iterator[None]:
    """A context in which `functions` replace composite operators, by name, on meta tensors.

    Each device composes an operator in its own way, and meta in another one. A mode for functions does not see the
    operators that torch's own functions call. `torch.library` is public, but nothing public takes a registration back
    (2.3 to 2.15).
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in functions.items():
            library.impl(name, function, "AutogradMeta")
        yield
