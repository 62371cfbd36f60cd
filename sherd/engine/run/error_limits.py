"""Limits to the errors of encoding: ranks compare them after a backward, and all raise, or all stop encoding."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from sherd.comm.agreement import groups_of
from sherd.comm.failures import announced, named
from sherd.comm.streams import is_capturing
from sherd.comm.wire_errors import LIMIT, relative_error
from sherd.engine.run.unit import Unit
from sherd.errors import CommError, PolicyError, UnsupportedError, in_short

WHAT = "the errors of encoding"

_log = logging.getLogger("sherd")


class ErrorLimits:
    """The limits of the units of one model, the root first. One message has the errors of all.

    Raises:
        UnsupportedError: a unit with a limit is tensor parallel, or has ranks that the root lacks: they could not
            decide with the others.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._mesh, ranks = units[0].mesh, {*units[0].mesh.mesh.mesh.flatten().tolist()}
        ways = [
            (unit, way, errors)
            for unit in units
            for mesh in unit.meshes
            for way, errors in mesh.wire_errors.items()
            if mesh.comm.error_limit is not None
        ]
        for unit in dict.fromkeys(unit for unit, _, _ in ways):
            is_parallel = any(parameter.unsharded_spec is not None for parameter in unit.parameters)
            if is_parallel or not {rank for mesh in unit.meshes for rank in mesh.mesh.mesh.flatten().tolist()} <= ranks:
                raise UnsupportedError(
                    f"unit {unit.name}: CommPolicy(error_limit=) of a unit "
                    f"{'that is tensor parallel' if is_parallel else 'with ranks that its root lacks'}; its ranks "
                    "could not decide together. Leave error_limit out, and look at sherd.comm_report"
                )
        self._ways = ways

    @torch.no_grad()
    def compare(self) -> None:
        """Compare the errors since the last comparison. All ranks must call this, after their reductions.

        Raises:
            CommError: an error is above a limit, on all ranks.
        """
        device = self._mesh.device
        if is_capturing(device):
            raise PolicyError("CommPolicy(error_limit=): the host reads errors, so no step is captured; leave it out")
        totals = torch.zeros(len(self._ways), 3, dtype=torch.float64, device=device)
        for total, (_, _, errors) in zip(totals, self._ways, strict=True):
            if (own := errors.take(LIMIT)) is not None:
                total.copy_(torch.cat((own, own.new_ones(1))))
        with announced(groups_of(self._mesh), "compares errors of encoding", WHAT):
            for group in groups_of(self._mesh):
                with named(WHAT, group):
                    dist.all_reduce(totals, group=group)
        raised = []
        for (unit, (phase, axis), errors), (*sums, is_new) in zip(self._ways, totals.tolist(), strict=True):
            comm = unit.mesh.comm
            assert comm.error_limit is not None, "it has a limit"
            if is_new:
                errors.compared(relative_error(*sums))
            error = errors.last if is_new or phase == "gather" else None  # what was gathered is encoded as before
            if errors.is_unencoded or error is None or error <= comm.error_limit:
                continue
            what = f"unit {unit.name}, {phase} over {axis}: relative error {error:.3g}"
            if comm.above_limit == "raise":
                raised.append(f"{what}, above {comm.error_limit:g}")
                continue
            errors.fall_back()
            unit.compared.changed()
            if dist.get_rank() == 0:
                _log.warning("%s, above CommPolicy(error_limit=%g); it is not encoded any more", what, comm.error_limit)
        if raised:
            raise CommError(
                f"codecs change values by more than CommPolicy(error_limit=) allows: {in_short(raised)}. All ranks "
                "raise this, before the optimizer's step; take a format of more bits or of smaller blocks, "
                "above_limit='unencoded', or a higher limit"
            )
