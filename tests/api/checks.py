"""What the tests of the API share: refusals, and the training that is still plain after."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils.hooks import RemovableHandle

from sherd import FSDPModule, SherdError, errors
from tests.support.comparing import assert_named_close, assert_refused
from tests.support.training import Job, made, mean_square, train_job, train_job_plain

ALSO: dict[type[SherdError], type[Exception]] = {
    errors.MeshError: ValueError,
    errors.ModuleError: ValueError,
    errors.OptimizerError: RuntimeError,
    errors.OwnershipError: ValueError,
    errors.PlacementError: ValueError,
    errors.PolicyError: ValueError,
    errors.PolicyTypeError: TypeError,
    errors.ShardedAccessError: RuntimeError,
    errors.StateError: RuntimeError,
    errors.UnsupportedError: NotImplementedError,
}
"""The built-in error that each error is too, for those who catch that."""


def assert_trains(model: nn.Module, make: Callable[..., nn.Module], job: Job = mean_square, steps: int = 3) -> None:
    """On a rank: `model`, sharded with the weights that `make` gives it, trains as that one does in one process."""
    found = train_job(model, job, steps)
    expected = train_job_plain(made(make), job, dist.get_world_size(), steps)
    assert_named_close(found, expected, "parameter", 1e-5, 1e-6)


def assert_refuses(action: Callable[[], Any], kind: type[SherdError], *words: str) -> None:
    """`action` raises `kind`, which is the built-in error that goes with it too, with every one of `words`."""
    assert_refused(action, kind, ALSO[kind], *words)


@contextlib.contextmanager
def untouched(*modules: nn.Module) -> Iterator[None]:
    """What is done inside makes no module a unit, and leaves the same Parameters with the same values."""
    before = [(module, [(each, local(each).clone()) for each in module.parameters()]) for module in modules]
    yield
    for module, params in before:
        assert not any(isinstance(each, FSDPModule) for each in module.modules())
        for param, (same, value) in zip(module.parameters(), params, strict=True):
            assert param is same
            assert torch.equal(local(param), value)


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, any other tensor as it is, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def named_mesh(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    """Returns a new mesh with axes of these names, or of none."""
    # DTensor remembers earlier, equal meshes, whose groups ended with the test that made them.
    _clear_sharding_prop_cache()
    return init_device_mesh("cpu", shape, mesh_dim_names=names or None)


def explode_in(module: nn.Module, where: str, rank: int | None = None) -> RemovableHandle:
    """Has `module` raise a ZeroDivisionError in its "forward", or in the "backward" through its output, on one rank or
    on all, until the hook is removed."""

    def explode(*_: Any) -> None:
        if rank in (None, dist.get_rank()):
            raise ZeroDivisionError("the user's own mistake")

    if where == "forward":
        return module.register_forward_pre_hook(explode)
    return module.register_forward_hook(lambda _, __, output: output.register_hook(explode) and None)
