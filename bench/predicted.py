"""`python -m bench.predicted`: are the steps of random models on two CPU ranks predicted as they then run?

A seed decides a model and its settings. `sherd doctor --bandwidth` and `bench.calibration` measure this machine once;
the operations of each model are timed, and it is predicted from that, and run. Steps and operations are measured in
turns, and of each the turn counts in which others use the machine least: a plan has it to itself.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import sherd
from sherd.cli.report import compared
from sherd.policy import CommPolicy
from sherd.tools.doctor.bandwidth import measured
from sherd.tools.plan.axes import ModelLayout
from sherd.tools.plan.planner import Planner, Training, compute_in, fully_shard_args
from sherd.tools.plan.reading import Loss
from sherd.tools.plan.tracing import traced
from sherd.tools.simulate.cluster import Cluster, cluster_toml, read_cluster
from sherd.tools.simulate.settings import Mesh, Settings
from sherd.tools.simulate.sharded import OPTIMIZERS
from sherd.tools.simulate.timeline import Timeline
from sherd.train.config import Config
from sherd.train.models import Decoder as SherdDecoder

from .calibration import calibrated
from .operations import EXACTLY, Operations, timed_operations, until, with_operations
from .pages import DOCS, as_csv, written
from .ranks import Conditions, on_ranks
from .rounds import timed, without_collector

ROOT = Path(__file__).parent.parent
PAGE, DATA = DOCS / "understand/predictions.md", DOCS / "data/predictions_here.csv"
WARMUPS, LEAST_STEPS, TURN_S = 1, 3, 1.0  # steps are warmed up and then measured in turns at least that long
LEAST_TURNS, TURNS_S = 6, 60.0  # and turns are taken so often, and for so many seconds
NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


class Block(nn.Module):
    """What is done to the stream, added to it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


class Attention(nn.Module):
    """Causal attention with as many heads of keys as of queries."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.all, self.out = heads, nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.all(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Stack(nn.Module):
    """A first layer, equal blocks, and a head."""

    def __init__(self, first: nn.Module, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.head = first, nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Case:
    """A model and its settings, as a seed decides them. `shape`: what builds the model and a batch."""

    seed: int
    kind: str
    shape: dict[str, Any]
    dtype: str
    optimizer: str
    transport: str
    settings: Settings

    def __str__(self) -> str:
        shape = " ".join(f"{name}={value}" for name, value in self.shape.items())
        rest = self.settings
        return (
            f"{self.kind} {shape} {self.dtype} {self.optimizer} {self.transport} {rest.placement} "
            f"reshard={rest.reshard:d} again={rest.checkpointing:g} {rest.micro_batches} x {rest.micro_batch}"
        )

    def build(self) -> nn.Module:
        """Returns the model, on the default device."""
        s = self.shape
        if self.kind == "llama":
            shape = Config(s["layers"], s["width"], s["heads"], s["kv_heads"], s["hidden"])
            return SherdDecoder(shape)
        width = s["width"]
        if self.kind == "convolution":
            norm = partial(nn.GroupNorm, 4) if s["norm"] == "group" else nn.BatchNorm2d

            def layers() -> list[nn.Module]:
                return [nn.Conv2d(width, width, s["kernel"], padding=s["kernel"] // 2), norm(width), nn.ReLU()]

            blocks: list[nn.Module] = [Block(*layers(), *layers()) for _ in range(s["layers"])]
            head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100))
            return Stack(nn.Conv2d(3, width, 3, padding=1), blocks, head)
        norm, activation, hidden = NORMS[s["norm"]], ACTIVATIONS[s["activation"]], s["hidden"]

        def feed_forward() -> Block:
            return Block(norm(width), nn.Linear(width, hidden), activation(), nn.Linear(hidden, width))

        if self.kind == "perceptron":
            blocks = [feed_forward() for _ in range(s["layers"])]
            return Stack(nn.Linear(s["inputs"], width), blocks, nn.Linear(width, s["inputs"]))
        attention = [Block(norm(width), Attention(width, s["heads"], s["bias"])) for _ in range(s["layers"])]
        blocks = [nn.Sequential(each, feed_forward()) for each in attention]
        head = nn.Sequential(norm(width), nn.Linear(width, s["vocabulary"], bias=False))
        return Stack(nn.Embedding(s["vocabulary"], width), blocks, head)

    def build_with_values(self) -> nn.Module:
        """Returns the model with its first values, the same on all ranks."""
        torch.manual_seed(0)
        model = self.build()
        if isinstance(model, SherdDecoder):  # as `sherd train`: an embedding of large numbers makes denormal gradients
            model.reset_parameters(0)
        return model

    def batch(self, samples: int) -> Tensor:
        """Returns a batch, on the default device."""
        s = self.shape
        if self.kind == "perceptron":
            return torch.randn(samples, s["inputs"])
        if self.kind == "convolution":
            return torch.randn(samples, 3, s["side"], s["side"])
        return torch.randint(256, (samples, s["context"]))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Returns a scalar: cross-entropy for tokens and pictures, else the mean square."""
        out = model(batch).float()
        if batch.is_floating_point() and self.kind == "perceptron":
            return F.mse_loss(out, batch)
        targets = batch.flatten() if batch.dtype == torch.int64 else torch.zeros_like(out[:, 0], dtype=torch.int64)
        return F.cross_entropy(out.flatten(0, -2), targets)

    def shard(self, model: nn.Module, **arguments: Any) -> nn.Module:
        """Make each block a unit, and the model their root."""
        arguments["comm_policy"] = CommPolicy(self.transport)
        for block in model.blocks:
            sherd.fully_shard(block, **arguments)
        sherd.fully_shard(model, **arguments)
        return model

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What forward computes in, if it is not the parameters' dtype."""
        return torch.bfloat16 if self.dtype == "bfloat16" else None


def case(seed: int) -> Case:
    """Returns the model and settings of `seed`; a step has about 8 to 120 GFLOP per rank in float32."""
    draw = random.Random(f"sherd {seed}")
    while True:
        found = _drawn(seed, draw)
        if found is not None:
            return found


def _drawn(seed: int, draw: random.Random) -> Case | None:
    """Returns a case, None if one sample is too large."""
    kind = draw.choice(["llama", "gpt", "gpt", "perceptron", "convolution"])
    dtype = draw.choice(["float32", "float32", "bfloat16"])
    layers, width = draw.choice([2, 3, 4, 6, 8, 12, 16]), draw.choice([64, 96, 128, 192, 256, 384, 512, 768])
    norm, activation = draw.choice([*NORMS]), draw.choice([*ACTIVATIONS])
    hidden = draw.choice([1, 2, 3, 4]) * width
    shape: dict[str, Any] = {"layers": layers, "width": width}
    if kind == "convolution":
        shape["width"] = width = max(16, width // 4)
        shape |= {"kernel": draw.choice([1, 3, 3, 5]), "side": draw.choice([8, 16, 24, 32]), "norm": norm}
        # On a CPU torch has no batch norm of bfloat16 with statistics in float32.
        shape["norm"] = "group" if norm == "layer" or dtype == "bfloat16" else "batch"
        per_sample = layers * 4 * (width * shape["kernel"] * shape["side"]) ** 2
    elif kind == "perceptron":
        shape |= {"inputs": draw.choice([32, 256, 1024]), "hidden": hidden, "norm": norm, "activation": activation}
        per_sample = 4 * layers * width * hidden + 4 * width * shape["inputs"]
    else:
        heads = width // draw.choice([16, 32, 64])
        context = draw.choice([32, 64, 128, 256, 512, 1024])
        shape |= {"heads": heads, "hidden": hidden, "context": context}
        per_token = layers * (8 * width**2 + 4 * width * hidden + 4 * width * context)
        if kind == "llama":
            shape["kv_heads"] = draw.choice([each for each in (heads, heads // 2, 1) if each and heads % each == 0])
        else:
            shape |= {"vocabulary": draw.choice([256, 2000, 8000]), "norm": norm, "activation": activation}
            shape["bias"] = draw.random() < 0.5
            per_token += 2 * width * shape["vocabulary"]
        per_sample = per_token * context
    micro_batches = draw.choice([1, 1, 2, 3])
    target = math.exp(draw.uniform(math.log(8e9), math.log(120e9)))
    if per_sample * 3 * micro_batches > target:
        return None
    micro_batch = max(1, min(4096, round(target / micro_batches / 3 / per_sample)))
    settings = Settings(
        Mesh(2),
        placement=draw.choice(["shard", "flat"]),
        reshard=draw.random() < 0.6,
        checkpointing=float(draw.random() < 0.3),
        micro_batch=micro_batch,
        micro_batches=micro_batches,
    )
    optimizer, transport = draw.choice(["sgd", "adamw", "adamw-fused"]), draw.choice(["auto", "auto", "gloo"])
    return Case(seed, kind, shape, dtype, optimizer, transport, settings)


@dataclass(frozen=True)
class Seen:
    """What a rank saw: the milliseconds of steps in each turn, the operations of the unsharded model as they were timed
    after each turn, and a step that was recorded."""

    turns: list[list[float]]
    operations: list[Operations]
    timeline: Timeline


def plain_step(model: nn.Module, batch: Any, loss: Loss) -> None:
    """Run forward and backward of the loss of (model, batch)."""
    model.zero_grad()
    loss(model, batch).backward()


def run(mesh: DeviceMesh, seed: int) -> Seen:
    """On a rank: train the model of `seed`, and the same model without shards with its operations timed, in turns: the
    speed of a machine that others use too drifts by the minute. Record a step of the first one at last."""
    this = case(seed)
    model = this.build_with_values()
    for block in model.blocks if this.settings.checkpointing else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    arguments = fully_shard_args(this.settings, this.compute_dtype)
    this.shard(model, mesh=mesh, **arguments)
    if this.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-3, foreach=True)
    else:
        fused = this.optimizer == "adamw-fused"
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused, foreach=not fused)
    batch = this.batch(this.settings.micro_batch)

    def step() -> None:
        for _ in range(this.settings.micro_batches):
            this.loss(model, batch).backward()
        optimizer.step()

    def turn() -> list[float]:
        laps: list[float] = []
        for _ in until(WARMUPS + LEAST_STEPS, TURN_S):
            dist.barrier()
            laps.append(timed(step, torch.device("cpu"))[0].wall_ms)
            optimizer.zero_grad()
        return laps[WARMUPS:]

    plain = this.build_with_values()
    if this.compute_dtype is not None:
        compute_in(this.compute_dtype, plain)
    turns: list[list[float]] = []
    operations: list[Operations] = []
    with without_collector():
        turn()  # the first steps are slower: malloc takes memory from the system
        for _ in until(LEAST_TURNS, TURNS_S):
            turns.append(turn())
            operations.append(timed_operations([partial(plain_step, plain, batch, this.loss)], EXACTLY))
        gc.collect()
        dist.barrier()
        with traced(model, optimizer, str(this)) as trace:
            step()
    return Seen(turns, operations, trace.timeline)


def predicted(this: Case, cluster: Cluster) -> Timeline:
    """Returns the step of `this` as the planner sees it."""
    with torch.device("meta"):
        model = this.build()

    def batch(samples: int) -> Tensor:
        with torch.device("meta"):
            return this.batch(samples)

    training = Training(
        model,
        batch,
        ModelLayout(this.loss, this.shard),
        OPTIMIZERS[this.optimizer],
        this.compute_dtype,
        samples=this.settings.micro_batch,
    )
    return Planner(training, cluster).predict(this.settings, str(this)).timeline


def seconds_of(operations: Operations) -> float:
    """Returns the seconds of one of each."""
    return sum(each.seconds for timed in operations.values() for each in timed)


def calibrate(mesh: DeviceMesh) -> list[str]:
    """On a rank: the cluster files of these ranks, with either transport."""
    return [cluster_toml(each) for each in calibrated(measured("here"), ("gloo", "auto"))]


KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""In the environment of ranks: freed memory stays with malloc, as with an accelerator's allocator."""


@dataclass(frozen=True)
class Row:
    """A case, its milliseconds predicted and measured, and its peak predicted over recorded. `from_own`: as predicted
    when the model's own operations were timed too."""

    this: Case
    planned: float
    from_own: float
    took: float
    peak: float

    @property
    def ratio(self) -> float:
        """Predicted over measured time."""
        return self.planned / self.took

    @property
    def ratio_from_own(self) -> float:
        """The same, as predicted with the model's own operations."""
        return self.from_own / self.took


def summary(rows: list[Row]) -> str:
    """Returns how far the predictions are off, in lines."""
    own = [abs(row.ratio_from_own - 1) for row in rows]
    usual = [abs(row.ratio - 1) for row in rows]
    peaks = [abs(row.peak - 1) for row in rows]
    return (
        f"{len(rows)} models. With each one's own operations timed, step time is off by {_off(own)}; with the usual "
        f"ones alone, by {_off(usual)}. Peak bytes are off by {max(peaks):.1%} at most."
    )


def _off(by: Sequence[float]) -> str:
    return f"{median(by):.1%} in the median and {max(by):.1%} at most, {sum(each <= 0.1 for each in by)} within 10 %"


def lines_of_data(rows: list[Row]) -> list[list[str]]:
    """Returns the lines of docs/data/predictions_here.csv."""
    predictions = ("from its own operations (ms)", "ratio", "from the usual ones (ms)", "ratio of these")
    lines = [["seed", "model and settings", "measured (ms)", *predictions, "peak bytes, ratio"]]
    for row in rows:
        own, usual = f"{row.from_own:.0f}", f"{row.planned:.0f}"
        figures = [f"{row.took:.0f}", own, f"{row.ratio_from_own:.2f}", usual, f"{row.ratio:.2f}", f"{row.peak:.3f}"]
        lines.append([str(row.this.seed), str(row.this), *figures])
    return lines


def section(rows: list[Row]) -> str:
    """Returns the summary on the page, with the machine but not its name."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    cpu = names[0].partition(": ")[2] if names else platform.machine()
    seeds = f"{rows[0].this.seed}:{rows[-1].this.seed + 1}"
    machine = f"{cpu}, {os.cpu_count()} cores, torch {torch.__version__}"
    return f"{summary(rows)}\n\nWritten by `python -m bench.predicted --seeds {seeds} --write` on {machine}."


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.predicted", description=__doc__)
    parser.add_argument("--seeds", default="0:20", help="FROM:TO")
    parser.add_argument("--clusters", type=Path, metavar="FOLDER", help="of cluster files measured before, or for them")
    parser.add_argument("--write", action="store_true", help=f"write {DATA.name}, and the summary into {PAGE.name}")
    parser.add_argument("--lanes", action="store_true", help="print the seconds of each lane, too")
    chosen = parser.parse_args(arguments)
    os.environ |= KEEPING
    folder = chosen.clusters or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}.toml" for name in ("gloo", "auto")}
    if not all(file.exists() for file in files.values()):
        begin = time.perf_counter()
        for file, text in zip(files.values(), on_ranks(Conditions(), calibrate)[0], strict=True):
            file.write_text(text)
        print(f"calibrated in {time.perf_counter() - begin:.0f} s", flush=True)
    clusters, rows = {name: read_cluster(file) for name, file in files.items()}, []
    for seed in range(*map(int, chosen.seeds.split(":"))):
        this = case(seed)
        cluster = clusters[this.transport]
        ranks = on_ranks(Conditions(), run, seed)
        timed = with_operations(cluster.device.timed, min(ranks[0].operations, key=seconds_of))
        plan = predicted(this, replace(cluster, device=replace(cluster.device, timed=timed)))
        usual, trace = predicted(this, cluster).seconds * 1e3, ranks[0].timeline
        turns = [median(map(max, *each)) for each in zip(*(rank.turns for rank in ranks), strict=True)]
        took = min(turns)
        row = Row(this, usual, plan.seconds * 1e3, took, plan.peak.nbytes / trace.peak.nbytes)
        rows.append(row)
        print(
            f"{seed:5} {row.from_own:8.1f} / {took:8.1f} ms = {row.ratio_from_own:.3f} ({row.ratio:.3f})  "
            f"turns {' '.join(f'{each:.1f}' for each in turns)}  bytes {row.peak:.4f}  {this}",
            flush=True,
        )
        if chosen.lanes:
            seconds = compared(plan, trace)["seconds"]
            print("      ", "; ".join(f"{name} {a * 1e3:.1f}/{b * 1e3:.1f}" for name, (a, b) in seconds.items()))
    print(summary(rows))
    if chosen.write:
        DATA.write_text(as_csv(lines_of_data(rows)))
        PAGE.write_text(written(PAGE.read_text(), {"here": section(rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
