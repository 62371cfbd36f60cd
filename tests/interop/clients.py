"""What the tests of accelerate, transformers and TRL share: a package begun anew, and a program of accelerate."""

from __future__ import annotations

import io
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sherd.interop.accelerate import in_place_of_fsdp
from tests.support.comparing import plain_name, whole, whole_params

ROOT = Path(__file__).parent.parent.parent
BATCH = 12  # of all ranks: 1 to 4 of them share it
STEPS = 6


@contextmanager
def begun(uses_sherd: bool = True, **options: Any) -> Iterator[None]:
    """accelerate as in a new process, with sherd in place of FSDP2 or not. It prints nothing, and is forgotten."""
    from accelerate.state import AcceleratorState, GradientState
    from tqdm import tqdm

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    forget()
    tqdm.set_lock(threading.RLock())  # not a semaphore, which a rank that is killed leaves behind
    silence = io.StringIO()
    replaced = in_place_of_fsdp(**options) if uses_sherd else nullcontext()
    with replaced, mock.patch.dict(os.environ), redirect_stdout(silence), redirect_stderr(silence):
        yield
    forget()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def inputs() -> torch.Tensor:
    return torch.randn(BATCH * STEPS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@dataclass
class Program:
    """A program of accelerate with two micro-batches to a step. It is the same with a plugin (`plugin`) and without."""

    plugin: dict[str, Any] | None = None
    mixed_precision: str = "no"
    more: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the Accelerator."""

    def __post_init__(self) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils import DataLoaderConfiguration

        plugin = self.plugin and FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **self.plugin})
        self.accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=plugin,
            mixed_precision=self.mixed_precision,
            gradient_accumulation_steps=2,
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            **self.more,
        )
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        data = DataLoader(TensorDataset(inputs()), batch_size=BATCH)
        prepared = self.accelerator.prepare(model, optimizer, data, scheduler)
        self.model, self.optimizer, self.data, self.scheduler = prepared

    def train(self, skipped: int = 0, stopped: int = STEPS) -> list[float]:
        """Train on the micro-batches from `skipped` to `stopped`. Returns the losses, and the gradients' norms."""
        figures = []
        for (x,) in self.accelerator.skip_first_batches(self.data, skipped):
            with self.accelerator.accumulate(self.model):
                loss = self.model(x).square().mean()
                self.accelerator.backward(loss)
                figures.append(self.accelerator.gather(loss.detach()).mean().item())
                if self.accelerator.sync_gradients:
                    figures.append(whole(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)).item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            skipped += 1
            if skipped == stopped:
                self.accelerator.set_trigger()
            if self.accelerator.check_trigger():
                break
        return figures

    def evaluate(self) -> torch.Tensor:
        """The outputs for all inputs, in their order."""
        self.model.eval()
        with torch.no_grad():
            parts = [self.accelerator.gather_for_metrics(self.model(x)) for (x,) in self.data]
        self.model.train()
        return torch.cat(parts)

    def weights(self) -> dict[str, Any]:
        params = whole_params(getattr(self.model, "_orig_mod", self.model))
        return {plain_name(name).removeprefix("module."): value for name, value in params.items()}


def recipe(heading: str, language: str = "text", number: int = 1) -> str:
    """That block of a language, counted from one, in a section of docs/do/other_packages.md."""
    section = (ROOT / "docs/do/other_packages.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return section.split(f"```{language}\n")[number].partition("```")[0]


def run_recipe(heading: str, **names: Any) -> dict[str, Any]:
    """Run that block as a program to which `names` are known, on a CPU. Returns what is known at its end."""
    program = recipe(heading).replace("fsdp=True", "fsdp=True, use_cpu=True")
    exec(compile(program, heading, "exec"), names)
    return names


def random_numbers() -> tuple[float, float]:
    """The next ones of the generators that a checkpoint holds."""
    return torch.rand(()).item(), random.random()


def loss_after_six_steps() -> float:
    """What examples/ray_train.py and examples/elastic_restart.py come to, of a plain model on both ranks' batches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 7):
        seeds = (2 * step, 2 * step + 1)
        x = torch.cat([torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        loss = (model(x) - x[:, :4].sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
