"""How tests see sharded values whole, and compare them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import sherd
from sherd import FullyShardedDataParallel, SherdError
from tests.support.gathered import gathered

Named = dict[str, Tensor | None]
# What wrappers put into the names of parameters.
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """Returns a parameter's name in the model before it was wrapped."""
    for word in WRAPPERS:
        name = name.replace(word, "")
    return name


def whole(value: Any) -> Any:
    """Returns a plain copy of a tensor, gathered where it is sharded (then a collective); in dicts and lists, of each
    one; any other value as it is.

    A replicated mesh axis is left alone: two replicas that drifted apart both show themselves.
    """
    match value:
        case dict():
            return {key: whole(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(whole(each) for each in value)
        case DTensor():
            return value.detach().full_tensor().clone()
        case Tensor():
            return value.detach().clone()
    return value


def whole_values(tensors: Named) -> Named:
    """Returns plain copies by the same names, gathered where they are sharded (then collectives)."""
    return dict(zip(tensors, gathered(tensors.values()), strict=True))


def whole_params(model: nn.Module) -> Named:
    """Returns every parameter of `model`, sharded by either front end or by none, whole, by its name before it was
    wrapped."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        with sherd.unsharded(model, writeback=False):
            return {plain_name(name): whole(param) for name, param in model.named_parameters()}
    return whole_values(dict(model.named_parameters()))


def whole_grads(model: nn.Module) -> Named:
    """Returns every gradient of `model` by its parameter's name, whole; None where there is none."""
    return whole_values({name: param.grad for name, param in model.named_parameters()})


def assert_same(
    found: Any, expected: Any, where: str = "", *, rtol: float | None = 0.0, atol: float | None = 0.0
) -> None:
    """The same values, by default to the bit, with None as close as torch takes for the dtype: of tensors, of what else
    can be compared, and in dicts and lists of each one, in any order of keys. `where` begins what is said of a
    difference."""
    match expected:
        case dict():
            assert set(found) == set(expected), f"{where}: other keys"
            for key, value in expected.items():
                assert_same(found[key], value, f"{where}.{key}".lstrip("."), rtol=rtol, atol=atol)
        case list() | tuple():
            assert len(found) == len(expected), f"{where}: another length"
            for index, (mine, value) in enumerate(zip(found, expected, strict=True)):
                assert_same(mine, value, f"{where}[{index}]", rtol=rtol, atol=atol)
        case Tensor():
            torch.testing.assert_close(
                found, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{where}: {text}"
            )
        case float() if rtol != 0 or atol != 0:
            assert found == pytest.approx(expected, rel=rtol, abs=atol), where
        case _:
            assert found == expected, where


def assert_named_close(found: Named, expected: Named, what: str, rtol: float, atol: float) -> None:
    """The same names, None in the same places, and close values."""
    assert list(found) == list(expected), f"{what}: other names"
    for name, tensor in expected.items():
        assert (found[name] is None) == (tensor is None), f"{what} of {name}: {found[name]} is not {tensor}"
        if tensor is not None and not is_close(found[name], tensor, rtol, atol):
            torch.testing.assert_close(
                found[name], tensor, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{what} of {n}: {text}"
            )


def is_close(found: Tensor, expected: Tensor, rtol: float, atol: float) -> bool:
    """`assert_close` in a tenth of its time, which the thousands of tensors here take; it has the last word."""
    if (found.shape, found.dtype, found.layout) != (expected.shape, expected.dtype, expected.layout):
        return False
    return torch.allclose(found, expected, rtol=rtol, atol=atol)


def form(module: nn.Module) -> str:
    """Returns what `module` shows as its own parameters: "shard" or "whole"."""
    kinds = {isinstance(param, DTensor) for param in module.parameters(recurse=False)}
    assert len(kinds) == 1, "all parameters of a module have one form"
    return "shard" if kinds == {True} else "whole"


def assert_refused(action: Callable[[], Any], kind: type[SherdError], also: type[Exception], *words: str) -> None:
    """`action` raises `kind`, which is the built-in `also` too, and whose message has every one of `words`."""
    with pytest.raises(kind) as raised:
        action()
    assert isinstance(raised.value, SherdError)
    assert isinstance(raised.value, also)
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"
