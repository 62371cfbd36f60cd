"""Errors of one rank in a step of full matrices, and their report to the other ranks.

A rank that cannot go on still takes part in the exchanges of the step. A header precedes all that it sends, to owners
and from them, with its status: what is wrong. All ranks then raise together, before a parameter changes.

On an accelerator the host does not wait for headers. There the device leaves out updates that are not finite, and the
headers are read when the next step begins, on all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial

import torch

from sherd.comm.failures import own_rank
from sherd.comm.streams import Handoff, streams_for
from sherd.tensor.ragged import local_part

HEADER = 4
"""The number of elements of a header: what is wrong, the number of a parameter in two parts, and a check."""

GRADIENT, FUNCTION, NOT_FINITE, OTHERS = 1, 2, 3, 4
"""The problems by number: the gradient cannot be stepped, the function failed, its update is not finite, or the
gradient of a parameter that is no matrix is not."""


def header_of(missing: Sequence[int], wrong: int = 0) -> list[int]:
    """Returns a header, of numbers up to 255, which every dtype holds exactly.

    Args:
        missing: the parameters without a gradient, or the one that something is wrong with.
        wrong: what is wrong, 0 for nothing.
    """
    first = missing[0] + 1 if missing else 0  # 0 stands for no parameter
    return [wrong, first // 256 % 256, first % 256, zlib.crc32(repr(list(missing)).encode()) % 256 if missing else 0]


class StepFaults:
    """The first thing that has gone wrong on this rank in the step that runs, and headers that were not read yet."""

    def __init__(self) -> None:
        self.wrong, self._index = 0, 0
        self.missing_others: list[int] = []
        """The numbers of parameters that are stepped next to matrices and lack a gradient on this rank."""
        self._error: Exception | None = None
        self._on_device: dict[torch.device, torch.Tensor] = {}
        self._tables: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}
        self._reported: list[tuple[list[int], Reported]] = []
        self._has_stepped = False

    def note(self, wrong: int, index: int, error: Exception | None = None) -> None:
        """Keep what is wrong with parameter `index`, and the error to raise on this rank, if it is the first one."""
        if not self.wrong:
            self.wrong, self._index, self._error = wrong, index, error

    def look_at_others(self, first: int, parameters: Sequence[torch.Tensor]) -> None:
        """Note gradients that are missing or not finite, of parameters that are numbered from `first` on."""
        numbered = list(enumerate(parameters, first))
        self.missing_others = [number for number, each in numbered if each.grad is None and each.requires_grad]
        sums: dict[torch.device, dict[int, torch.Tensor]] = {}
        for number, gradient in ((number, local_part(each.grad)) for number, each in numbered if each.grad is not None):
            if gradient.layout is torch.strided and gradient.is_floating_point():
                # Only the sums are looked at below, and a narrow sum may overflow where no element is inf.
                wide = torch.float64 if gradient.device.type == "cpu" else torch.float32
                sums.setdefault(gradient.device, {})[number] = gradient.sum(dtype=wide)
        for of_device in sums.values():
            self.finite(torch.stack(list(of_device.values()))[:, None, None], list(of_device), None, OTHERS)

    def take(self) -> tuple[int, int, Exception | None]:
        """Returns what the host knows to be wrong, the parameter's number and the error, and forgets all."""
        taken = self.wrong, self._index, self._error
        self.wrong, self._index, self._error = 0, 0, None
        self._on_device.clear()  # the next step would report them again
        return taken

    def finite(
        self, update: torch.Tensor, numbers: Sequence[int], is_void: torch.Tensor | None, wrong: int = NOT_FINITE
    ) -> torch.Tensor:
        """Returns updates of full matrices, on an accelerator with zeros for those that are not finite.

        Args:
            update: [number, rows, columns].
            numbers: the number of each matrix' parameter.
            is_void: on an accelerator, whether all updates are to be zeros, as some rank has no gradient.
            wrong: what to note.
        """
        if not update.numel():
            return update
        # A sum is finite only if all elements are, and takes a hundredth of the time of looking at each. On an
        # accelerator a sum that is too large counts as not finite, too.
        sums = update.sum((1, 2), dtype=torch.promote_types(update.dtype, torch.float32))
        bad = sums.isfinite().logical_not()
        if update.device.type == "cpu":
            if bad.any() and (bad := torch.isfinite(update).flatten(1).all(1).logical_not()).any():
                self.note(wrong, numbers[int(bad.int().argmax())])
            return update
        key = tuple(numbers), update.device
        if key not in self._tables:
            lines = [header_of([number], wrong) for number in numbers]
            self._tables[key] = torch.tensor(lines, dtype=torch.float32, device=update.device)
        # Not by [], which would wait for the number.
        line = self._tables[key].index_select(0, bad.int().argmax(0, keepdim=True))[0] * bad.any()
        before = self._on_device.get(update.device)
        self._on_device[update.device] = line if before is None else torch.where(before[0] > 0, before, line)
        return torch.where((bad if is_void is None else bad | is_void)[:, None, None], 0, update)

    def header(self, missing: torch.Tensor) -> torch.Tensor:
        """Returns the header of what has gone wrong so far; `missing`, a header, if nothing has."""
        if self.wrong:
            return torch.tensor(header_of([self._index], self.wrong), dtype=missing.dtype, device=missing.device)
        line = self._on_device.get(missing.device)
        return missing if line is None else torch.where(line[0] > 0, line.to(missing.dtype), missing)

    def keep_reported(
        self, status: Sequence[tuple[list[int], torch.Tensor]]
    ) -> list[tuple[list[int], Reported]] | None:
        """Keep headers, [2, ranks, HEADER], and their ranks. Returns those to be read now; None for nothing.

        On an accelerator the host reads those of the first step alone now: only then all ranks wait for one another.
        The next step takes all others.
        """
        headers = list(status)
        if not headers:
            headers = [([own_rank()], each.expand(2, 1, HEADER).contiguous()) for each in self._on_device.values()]
        now: list[tuple[list[int], Reported]] = []
        later: list[tuple[list[int], Reported]] = []
        for ranks, each in headers:
            (later if self._has_stepped and each.device.type != "cpu" else now).append((ranks, Reported(each)))
        self._reported, self._has_stepped = later, True
        return None if later and not now else now

    def take_reported(self) -> list[tuple[list[int], Reported]]:
        """Returns the headers that the step before has kept, and forgets them."""
        reported, self._reported = self._reported, []
        return reported


class Reported:
    """Headers on their way to the host: `read` waits for them."""

    def __init__(self, headers: torch.Tensor) -> None:
        self._headers = headers
        self._handoff: Handoff | None = None
        if headers.device.type != "cpu":
            self._headers = torch.empty(headers.shape, dtype=headers.dtype, pin_memory=True)
            lane = streams_for(headers.device).all_reduce
            lane.follow_compute()
            self._handoff = lane.run(partial(self._take, headers))
            self._handoff.wait()  # before compute's memory returns to its pool

    def _take(self, headers: torch.Tensor, _: bool) -> None:
        self._headers.copy_(headers, non_blocking=True)

    def read(self) -> list[list[list[int]]]:
        """Returns the numbers of all headers: to owners and from them, of each rank."""
        if self._handoff is not None:
            self._handoff.wait_on_host()
        return [[[int(number) for number in header] for header in way] for way in self._headers.tolist()]
