"""sherd's modules are instances of torch's `FSDPModule` when that was asked for, and only then."""

import builtins
import importlib
import inspect
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

import sherd
from sherd import FullyShardedDataParallel, fully_shard
from sherd._torch import imagined_ranks
from sherd.errors import PolicyTypeError
from sherd.interop import torch_fsdp_identity
from tests.support.ranks.forked import answer_of


class Own(nn.Module):
    """Of a class that no other test shards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Noting(nn.Linear):
    """It wants to know of its subclasses."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        Noting.below = [*getattr(Noting, "below", ()), cls.__name__]


def know(*modules: nn.Module) -> list[bool]:
    return [isinstance(each, fsdp.FSDPModule) for each in modules]


def on_and_off() -> None:
    before, wrapped = fully_shard(Own()), FullyShardedDataParallel(nn.Linear(4, 4))
    kind, state = type(before), fsdp.fully_shard.state
    assert know(before, wrapped, Own()) == [False, False, False]
    with torch_fsdp_identity():
        after = fully_shard(nn.Bilinear(2, 2, 2))
        late = FullyShardedDataParallel(nn.Linear(4, 4))
        assert know(before, wrapped, after, late, Own()) == [True, True, True, True, False]
        with torch_fsdp_identity(False):
            assert know(before, after) == [False, False]
        assert know(before, after) == [True, True]
        assert type(before) is kind
        assert isinstance(before, sherd.FSDPModule)
        assert fsdp.fully_shard.state(Own()) is None
    assert know(before, wrapped, after, late) == [False] * 4
    assert fsdp.fully_shard.state is state
    assert know(fully_shard(Own()), FullyShardedDataParallel(nn.Linear(4, 4))) == [False, False]
    torch_fsdp_identity()
    assert know(before, after) == [True, True]
    torch_fsdp_identity(False)
    assert know(before, after) == [False, False]


def test_all_modules_are_torchs_from_the_call_to_its_end(world):
    world(1).run(on_and_off)


def everything_else_stays() -> None:
    with torch_fsdp_identity():
        model = Own()
        fully_shard(model.inner)
        fully_shard(model)
        assert type(model.inner[:1]) is nn.Sequential
        model(torch.ones(1, 4)).sum().backward()
        assert model.inner[0].weight.grad is not None
        model.double()
        assert model.inner[0].weight.dtype == torch.float64
        assert set(model.state_dict()) == set(Own().state_dict())
        fully_shard(Noting(4, 4))
    assert Noting.below == ["FSDPNoting"]


def test_such_a_module_does_all_that_it_does_otherwise(world):
    world(1).run(everything_else_stays)


def test_every_method_of_torchs_class_is_sherds_own():
    theirs = {name for name, value in vars(fsdp.FSDPModule).items() if callable(value) and name[0] != "_"}
    assert theirs <= set(vars(sherd.FSDPModule))


def test_the_wrappers_class_says_what_it_takes_during_and_after_that():
    takes = inspect.signature(sherd.FullyShardedDataParallel.__init__).parameters.keys() - {"self"}
    with torch_fsdp_identity():
        assert inspect.signature(sherd.FullyShardedDataParallel).parameters.keys() == takes
    assert inspect.signature(sherd.FullyShardedDataParallel).parameters.keys() == takes


def test_what_is_no_bool_is_refused():
    with pytest.raises(PolicyTypeError, match=r"torch_fsdp_identity\('on'\)"):
        torch_fsdp_identity("on")


def who_imports() -> tuple[set[str], set[str]]:
    """The modules of sherd, imported anew, that import from torch's FSDP: before they are asked to, and then."""
    for name in [name for name in sys.modules if name.split(".")[0] == "sherd"]:
        del sys.modules[name]
    asked: set[str] = set()
    original = builtins.__import__

    def note(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        who = (globals or {}).get("__name__", "")
        names = {name, *(f"{name}.{each}" for each in fromlist or ())}
        if who.split(".")[0] == "sherd" and any("fsdp" in each.split(".") for each in names if each[:5] == "torch"):
            asked.add(who)
        return original(name, globals, locals, fromlist, level)

    with mock.patch.object(builtins, "__import__", note):
        importlib.import_module("sherd")
        assert not any(each.startswith("sherd.interop") for each in sys.modules)
        interop = importlib.import_module("sherd.interop")
        before = set(asked)
        interop.torch_fsdp_identity()
    return before, asked


def test_nothing_of_torchs_fsdp_is_imported_before_that():
    assert answer_of(who_imports) == (set(), {"sherd.interop.identity"})


def test_two_that_end_in_the_order_in_which_they_began_leave_what_was_before():
    with imagined_ranks(2):
        model = fully_shard(Own())
        first, second = torch_fsdp_identity(), torch_fsdp_identity()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert isinstance(model, fsdp.FSDPModule), "the second one is in force"
        second.__exit__(None, None, None)
        assert not isinstance(model, fsdp.FSDPModule)
