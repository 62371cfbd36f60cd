"""Private names of Dynamo and of the fake tensors it traces with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


def dynamo_disabled(function: Function) -> Function:
    """Returns `function` such that Dynamo traces neither it nor what it calls."""
    disabled: Function = torch.compiler.disable(function, recursive=True)
    return disabled


def trace_nothing_in(*packages: str) -> None:
    """Have Dynamo run all functions of these packages as they are, but trace what they call.

    The decorator `torch.compiler.disable` takes a microsecond of every call, and nothing public names a package (2.2 to
    2.13).
    """
    from torch._dynamo import trace_rules

    for package in packages:
        trace_rules.add(package)


def not_traced(reason: str) -> Exception:
    """Returns the error that a tensor raises when Dynamo wants a fake copy of it, so that the graph breaks there.

    Dynamo then runs what works on the tensor as it is; with `fullgraph=True` the user sees the error. Nothing public
    does this outside of what Dynamo traces (2.11 to 2.13).
    """
    from torch._dynamo.exc import Unsupported

    return Unsupported(reason)


def fake_tensors() -> contextlib.AbstractContextManager[object]:
    """A context in which new tensors have a device but no memory.

    Operations are those of the device, unlike on meta. torch.compile stands on it; nothing public names it (2.0 to
    2.13).
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()
