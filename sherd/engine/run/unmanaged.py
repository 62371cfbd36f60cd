"""Trainable parameters below a root that no unit has: they came after sharding, and each rank would train its own.

A look at all modules of a model would cost too much in each step. So torch counts for us what is registered on any
module, and a model is looked at when something was since its last look. Not noticed is what goes past `nn.Module`: a
write into `module._parameters`.
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
from sherd.comm.agreement import broadcast_from_rank0, groups_of, in_short, require_alike
from sherd.comm.failures import named
from sherd.comm.mesh import DataMesh
from sherd.engine.run.unit import Unit
from sherd.engine.state.parameter import record_of
from sherd.errors import UnmanagedParameterError
from sherd.tensor.ragged import local_part
from sherd.wrap.names import plain_name


class _Registrations:
    """The number of parameters and modules that were registered anywhere in this process since the first unit."""

    def __init__(self) -> None:
        self.count = 0
        self._next = itertools.count(1)
        self._installed = False

    def install(self) -> None:
        """Count from now on."""
        if not self._installed:
            self._installed = True
            register_module_parameter_registration_hook(self._note)
            register_module_module_registration_hook(self._note)

    def _note(self, module: nn.Module, name: str, registered: object) -> None:
        self.count = next(self._next)


registrations = _Registrations()


class Unmanaged:
    """The parameters below one root that no unit has and nobody has ignored.

    The runtime asks for a look when `seen`, the count of registrations at the last one, is not today's, or when one of
    `frozen` is trained; in a settled step it calls nothing here. `replicated` are those whose gradients are averaged,
    by name.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit]) -> None:
        self.seen = -1
        self.frozen: list[nn.Parameter] = []
        self.replicated: dict[str, nn.Parameter] = {}
        self._root = weakref.ref(root)
        self._units = tuple(units)

    def look(self, in_backward: bool) -> None:
        """Look for unmanaged parameters, if this is a forward in training or a backward, and do what the root's policy
        says about them.

        Raises:
            UnmanagedParameterError: there are trainable ones, and the policy is "error".
            RanksDifferError: ranks have different ones, and the policy is "replicate".
        """
        root, unit = self._root(), self._units[0]
        if root is None or not (in_backward or (root.training and torch.is_grad_enabled())):
            return
        count, policy = registrations.count, unit.policy.unmanaged
        self.frozen, trained = [], {}
        if policy != "ignore" and unit.mesh.num_pieces * unit.mesh.num_replicas > 1:
            found = list(unmanaged_below(root, self._units))
            self.frozen = [parameter for _, parameter, _ in found if not parameter.requires_grad]
            trained = {name: (parameter, within) for name, parameter, within in found if parameter.requires_grad}
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
    def _replicate(self, found: dict[str, nn.Parameter]) -> None:
        """Have rank 0's values of those of `found` that are new, and average their gradients from now on."""
        known = set(map(id, self.replicated.values()))
        new = {name: parameter for name, parameter in found.items() if id(parameter) not in known}
        self.replicated = found
        if new:
            mesh = self._units[0].mesh
            require_alike(mesh, [_described(name, each) for name, each in new.items()], "parameters to replicate")
            values = [local_part(each) for each in new.values()]
            broadcast_from_rank0(values, mesh, "rank 0's broadcast of unmanaged parameters")

    @property
    def has_gradients(self) -> bool:
        """Whether one of those that are replicated has a gradient here."""
        return any(each.grad is not None for each in self.replicated.values())

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Replace the gradients of what is replicated by their mean over all ranks.

        What earlier backwards have left is the same on all ranks, so that its mean is itself. A rank without a gradient
        counts as zero; where no rank has one there is none.
        """
        mesh = self._units[0].mesh
        by_dtype: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in self.replicated.values():
            by_dtype.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for members in by_dtype.values():
            _average(members, mesh)


def unmanaged_below(root: nn.Module, units: Sequence[Unit]) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Yields the parameters below `root` that no unit has and nobody has ignored: name, parameter, and the name of the
    nearest unit around it."""
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


def _described(name: str, parameter: torch.Tensor) -> str:
    return f"{name} {tuple(local_part(parameter).shape)} {parameter.dtype}"


def _average(members: Sequence[nn.Parameter], mesh: DataMesh) -> None:
    """Replace the gradients of `members`, of one dtype and device, by their mean over `mesh`, in one message."""
    grads = [None if each.grad is None else local_part(each.grad) for each in members]
    given = zip(members, grads, strict=True)
    targets = [torch.zeros_like(local_part(each)) if grad is None else grad for each, grad in given]
    real = [torch.view_as_real(each) if each.is_complex() else each for each in targets]
    flat = [each.reshape(-1) for each in real]
    wide = torch.promote_types(flat[0].dtype, torch.float32)
    flags = torch.tensor([float(grad is not None) for grad in grads], dtype=wide, device=flat[0].device)
    sent = torch.cat([*(each.to(wide) for each in flat), flags])
    for group in groups_of(mesh):
        with named("the mean of unmanaged parameters' gradients", group):
            dist.all_reduce(sent, group=group)
    sent[: -len(members)] /= mesh.num_shards * mesh.num_replicas
    means = sent[: -len(members)].split([each.numel() for each in flat])
    # The host waits for the flags only where a gradient is missing.
    missing = any(grad is None for grad in grads)
    present = sent[-len(members) :].tolist() if missing else [1.0] * len(members)
    for parameter, target, into, mean, is_there in zip(members, targets, real, means, present, strict=True):
        if is_there:
            into.copy_(mean.view(into.shape))
            if parameter.grad is None:
                parameter.grad = target
