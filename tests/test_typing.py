"""mypy --strict checks a program that uses sherd, and finds its mistakes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROGRAM = """\
import torch
from torch import nn

import sherd
from sherd import FSDPModule, FullyShardedDataParallel, auto_shard, fully_shard, replicate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def use(model: FSDPModule) -> torch.optim.Optimizer:
    model(torch.ones(1, 4)).sum().backward()
    model.train().zero_grad()
    model.set_requires_gradient_sync(False, recurse=True)
    return torch.optim.AdamW(model.parameters())


net = Net()
for layer in net.layers:
    fully_shard(layer, reshard_after_forward=True).set_reshard_after_backward(False)
for model in (fully_shard(net), auto_shard(net), replicate(net), FullyShardedDataParallel(net)):
    use(model)
    sherd.clip_grad_norm_(model.parameters(), 1.0)
    with sherd.unsharded(model):
        print({name: each.shape for name, each in model.named_parameters()})
auto_shard(net)(torch.ones(1, 4))
for each in fully_shard([net.layers[0], net.layers[1]]):
    each.unshard()
names: list[str] = list(model.state_dict())
if isinstance(net, FSDPModule):
    net.reshard()
fully_shard(net, reshard_after_forward="yes")  # wrong
fully_shard(net, meshes=None)  # wrong
auto_shard(net).unshard(1, 2)  # wrong
"""


@pytest.mark.slow
def test_a_program_is_checked_and_its_mistakes_are_found(tmp_path):
    pytest.importorskip("mypy", reason="an extra, dev, that only `make lint` asks for")
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    # The cache of `make lint`, from the same settings: without it torch alone takes ten times as long.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {int(line) for line in re.findall(r"program\.py:(\d+): error", done.stdout)}
    wrong = {number for number, line in enumerate(PROGRAM.splitlines(), start=1) if line.endswith("# wrong")}
    assert found == wrong, done.stdout + done.stderr
