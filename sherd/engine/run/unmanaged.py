"""Trainable parameters below a root that belong to no unit, because they came later: each rank would train its own.

A walk over all modules in each step would cost too much. So torch counts what is registered on any module, and a model
is walked when the count has changed. A write into `module._parameters`, past `nn.Module`, is not noticed.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from sherd._torch import is_replicated
from sherd.comm.agreement import broadcast_from_rank0, groups_of, require_alike
from sherd.comm.failures import named
from sherd.comm.mesh import DataMesh
from sherd.engine.run.unit import Unit
from sherd.engine.state.parameter import record_of
from sherd.errors import UnmanagedParameterError, in_short
from sherd.tensor.ragged import local_part
from sherd.wrap.names import plain_name


class _Registrations:
    """The number of parameters and modules that were registered in this process since the first unit."""

    def __init__(self) -> None:
        self.count = 0
        self._next = itertools.count(1)
        self._installed = False

    def install(self) -> None:
        """Start to count, unless it has started."""
        if not self._installed:
            self._installed = True
            register_module_parameter_registration_hook(self._note)
            register_module_module_registration_hook(self._note)

    def _note(self, module: nn.Module, name: str, registered: object) -> None:
        # `next` is one step in C, where `+= 1` could lose the count of another thread; ranks may be threads.
        self.count = next(self._next)


registrations = _Registrations()


class Unmanaged:
    """The parameters below one root that belong to no unit and are not ignored.

    The runtime calls `look` when `seen` is out of date, or a `frozen` parameter is trained; a steady-state step
    calls nothing here.

    Attributes:
        seen: the count of registrations at the last look.
        frozen: the unmanaged parameters that were frozen then.
        replicated: by name, the parameters whose gradients are averaged.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit]) -> None:
        self.seen = -1
        self.frozen: list[nn.Parameter] = []
        self.replicated: dict[str, nn.Parameter] = {}
        self._root = weakref.ref(root)
        self._units = tuple(units)

    def look(self, in_backward: bool) -> None:
        """Look for unmanaged parameters in a backward or a forward in training, and treat them by the root's policy.

        Raises:
            UnmanagedParameterError: some are trainable, and the policy is "error".
            RanksDifferError: the policy is "replicate", and ranks have different ones.
        """
        root, unit = self._root(), self._units[0]
        if root is None or not (in_backward or (root.training and torch.is_grad_enabled())):
            return
        count, policy = registrations.count, unit.policy.unmanaged
        self.frozen, trained = [], {}
        if policy != "ignore" and unit.mesh.num_pieces * unit.mesh.num_replicas > 1:
            unmanaged = list(_unmanaged_below(root, self._units))
            self.frozen = [parameter for _, parameter, _ in unmanaged if not parameter.requires_grad]
            trained = {name: (parameter, within) for name, parameter, within in unmanaged if parameter.requires_grad}
        if trained and policy == "error":
            shown = in_short([f"{name} (in unit {within})" for name, (_, within) in trained.items()])
            raise UnmanagedParameterError(
                f"trainable parameters were added to {type(root).__name__} after it was sharded, and belong to no "
                f"unit: {shown}. Every rank would train its own. Call sherd.refresh(model) after adding them, on all "
                'ranks; or shard with unmanaged="replicate", which averages their gradients, or with '
                'unmanaged="ignore" and in ignored_params, if the program looks after them'
            )
        self._replicate({name: parameter for name, (parameter, _) in trained.items()})
        self.seen = count

    @torch.no_grad()
    def _replicate(self, parameters: dict[str, nn.Parameter]) -> None:
        """Average the gradients of `parameters` from now on. Those that are new take rank 0's values."""
        known = set(map(id, self.replicated.values()))
        new = {name: local_part(each) for name, each in parameters.items() if id(each) not in known}
        self.replicated = parameters
        if new:
            mesh, values = self._units[0].mesh, list(new.values())
            described = [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in new.items()]
            require_alike(mesh, described, "parameters to replicate")
            broadcast_from_rank0(values, mesh, "rank 0's broadcast of unmanaged parameters")

    @property
    def has_gradients(self) -> bool:
        return any(each.grad is not None for each in self.replicated.values())

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Replace the gradients of replicated parameters by their mean over all ranks.

        The gradients of earlier backwards are the same on all ranks, so the mean leaves them as they are. A rank
        without a gradient counts as zero; where no rank has one there is none.
        """
        mesh = self._units[0].mesh
        by_dtype: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in self.replicated.values():
            by_dtype.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for members in by_dtype.values():
            _average(members, mesh)


def _unmanaged_below(root: nn.Module, units: Sequence[Unit]) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Yields name, parameter, and name of the nearest unit around it, for each unmanaged parameter below `root`."""
    by_module = {id(module): unit.name for unit in units for module in unit.modules}
    others = {id(each) for module in root.modules() if is_replicated(module) for each in module.modules()}
    records = (record for unit in units for record in unit.parameters)
    places = [place for record in records for place in record.places]
    known = {(place.module_id, place.attribute) for place in places + [each for unit in units for each in unit.ignored]}
    within: dict[str, str] = {}
    for path, module in root.named_modules():
        within[path] = by_module.get(id(module)) or within.get(path.rpartition(".")[0], units[0].name)
        for attribute, parameter in module._parameters.items():
            is_known = id(module) in others or (id(module), attribute) in known
            if parameter is not None and not is_known and record_of(parameter) is None:
                yield plain_name(f"{path}.{attribute}" if path else attribute), parameter, within[path]


def _average(members: Sequence[nn.Parameter], mesh: DataMesh) -> None:
    """Replace the gradients of `members`, of one dtype and device, by their mean over `mesh`, in one message."""
    grads = [None if each.grad is None else local_part(each.grad) for each in members]
    given = zip(members, grads, strict=True)
    # Zeros stand for a missing gradient, because all ranks must send equally much.
    targets = [torch.zeros_like(local_part(each)) if grad is None else grad for each, grad in given]
    real = [torch.view_as_real(each) if each.is_complex() else each for each in targets]
    flat = [each.reshape(-1) for each in real]
    # At least float32: a sum over many ranks in half precision would lose bits.
    wide = torch.promote_types(flat[0].dtype, torch.float32)
    flags = torch.tensor([float(grad is not None) for grad in grads], dtype=wide, device=flat[0].device)
    sent = torch.cat([*(each.to(wide) for each in flat), flags])
    for group in groups_of(mesh):
        with named("the mean of unmanaged parameters' gradients", group):
            dist.all_reduce(sent, group=group)
    sent[: -len(members)] /= mesh.num_shards * mesh.num_replicas
    means = sent[: -len(members)].split([each.numel() for each in flat])
    # The host waits for the flags only if a gradient is missing on this rank.
    missing = any(grad is None for grad in grads)
    present = sent[-len(members) :].tolist() if missing else [1.0] * len(members)
    for parameter, target, into, mean, is_there in zip(members, targets, real, means, present, strict=True):
        if is_there:
            into.copy_(mean.view(into.shape))
            if parameter.grad is None:
                parameter.grad = target
