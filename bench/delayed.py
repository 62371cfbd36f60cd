"""What steps that are one step late do to the loss: `sherd.step_on_thread(optimizer, delay=1)`, simulated.

    python -m bench.delayed          # a few minutes on one core; writes the table of docs/do/offload.md

A GPT of 0.13 M over the bytes of Python's own sources, in one process and always with the same values, since all is
seeded. `Delayed` moves the weights by hand; sherd's values are the same to the bit: tests/device/test_delayed_steps.py.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn, optim

from .models import GPTBlock, LanguageModel
from .pages import written
from .table import markdown

PAGE = Path(__file__).parents[1] / "docs/do/offload.md"
STEPS, PART = 500, 100
RATES = (1e-3, 3e-3, 1e-2)


class Delayed:
    """Makes the steps of `optimizer` such that forward reads the values of `parameters` before the last step.

    The first step is not delayed, as sherd's caller makes it.
    """

    def __init__(self, optimizer: optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        self._step, self._parameters, self._newest = optimizer.step, parameters, list[Tensor]()

    @torch.no_grad()
    def step(self) -> None:
        before = self._newest
        self._write(before)
        self._step()
        self._newest = [each.detach().clone() for each in self._parameters]
        self._write(before)

    @torch.no_grad()
    def finish(self) -> None:
        """Let forward have the newest values."""
        self._write(self._newest)

    def _write(self, values: list[Tensor]) -> None:
        for each, value in zip(self._parameters, values, strict=False):  # there are none before the first step
            each.copy_(value)


def text() -> Tensor:
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(each.read_bytes() for each in sources)), dtype=torch.uint8).long()


def losses(data: Tensor, lr: float, is_delayed: bool) -> list[float]:
    torch.manual_seed(0)
    model = LanguageModel(256, 64, [GPTBlock(64, 4) for _ in range(2)], nn.LayerNorm)
    optimizer = optim.AdamW(model.parameters(), lr=lr)
    steps = Delayed(optimizer, list(model.parameters())) if is_delayed else optimizer
    generator, found = torch.Generator().manual_seed(1), list[float]()
    for _ in range(STEPS):
        starts = torch.randint(data.numel() - 65, (16,), generator=generator)
        rows = torch.stack([data[start : start + 65] for start in starts.tolist()])
        loss = model(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        found.append(loss.item())
    return found


def table() -> str:
    data, rows = text(), []
    for lr in RATES:
        both = [losses(data, lr, is_delayed) for is_delayed in (False, True)]
        parts = (slice(PART, 2 * PART), slice(STEPS - PART, STEPS))
        means = [f"{sum(found[part]) / PART:.3f}" for part in parts for found in both]
        rows.append([f"{lr:g}", *means])
    head = [f"steps {PART} to {2 * PART}", "with `delay=1`", f"the last {PART} of {STEPS:,}", "with `delay=1`"]
    return markdown(["learning rate", *head], rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(written(PAGE.read_text(), {"delayed": f"\n{table()}\n"}))
