"""`python -m bench.published` predicts the trainings of bench/published.toml.

It writes docs/data/predictions.csv, and the summary in docs/understand/predictions.md. `--looked-at` prints the rows
that are not held out, and writes nothing; ids of rows print these alone. `--render` writes both files from the
predictions in bench/published.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sherd.tools.plan.axes import ModelLayout
from sherd.tools.plan.planner import Planner, Training
from sherd.tools.plan.reading import own_or_usual_loss
from sherd.tools.simulate.cluster import Cluster, Link, read_cluster
from sherd.tools.simulate.settings import Mesh, Settings
from sherd.tools.simulate.sharded import OPTIMIZERS
from sherd.train.config import read_tree

from .llama_axes import LlamaLayout, Stage
from .pages import DOCS, as_csv, written
from .table import markdown

ROOT = Path(__file__).parent.parent
DATA, PREDICTIONS = ROOT / "bench/published.toml", ROOT / "bench/published.json"
PAGE, TABLE = DOCS / "understand/predictions.md", DOCS / "data/predictions.csv"


@dataclass(frozen=True)
class Row:
    """A published training: the fields of bench/published.toml.

    Attributes:
        place: where in the source.
        sharding: "FSDP1" (flat parameters), "FSDP2", "HSDP", "ZeRO-1" or "ZeRO-2"; "none" of one data-parallel rank.
        tp, cp, pp: ranks on the axes of tensor, context and pipeline parallelism.
        cuts_tokens: over `tp`, activations between products are cut by tokens (sequence parallelism).
        checkpointing: "none", "full", "every second block", "by operation" (attention and every second matrix product
            are kept), or "selective" where nobody says how.
        reshard: unsharded parameters are freed after forward.
        attention: the kernel, one of `KERNELS`.
        parameters: the dtype that the optimizer steps. Forward and backward compute in bfloat16.
        tokens: per second and GPU.
        mfu: in percent.
        memory: the peak in GiB, of what `memory_is` says: "reserved" or "active".
    """

    id: str
    source: str
    place: str
    model: str
    cluster: str
    sharding: str
    shard: int
    sequence: int
    micro_batch: int
    checkpointing: str
    held_out: bool
    replicate: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    cuts_tokens: bool = True
    micro_batches: int = 1
    compile: bool = False
    offload: bool = False
    reshard: bool = True
    attention: str = "flash2"
    parameters: str = "float32"
    tokens: float | None = None
    mfu: float | None = None
    memory: float | None = None
    memory_is: str = "reserved"

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.shard, self.replicate, pp=self.pp, cp=self.cp, tp=self.tp)

    @property
    def cut(self) -> str:
        """What is cut besides samples: "", "tensors", or "tensors and tokens"."""
        if self.mesh.num_ranks == self.mesh.num_data:
            return ""
        return "tensors and tokens" if self.cuts_tokens else "tensors"


@dataclass(frozen=True)
class Predicted:
    """A prediction of a row, with three digits: tokens per second and GPU, percent of the peak, GiB."""

    tokens: float
    mfu: float
    active: float
    reserved: float
    fits: bool


Found = Mapping[str, Sequence[Predicted]]
"""By the id of a row: one prediction; where it is not said which checkpointing is selective two, with none and all."""

CHECKPOINTING: dict[str, list[tuple[float, str]]] = {
    "none": [(0.0, "full")],
    "full": [(1.0, "full")],
    "every second block": [(0.5, "full")],
    "by operation": [(1.0, "selective")],
    "selective": [(0.0, "full"), (1.0, "full")],
}
"""By the words of a row: the share of blocks, and what they compute again."""


KERNELS = {"flash2": 1.0, "triton": 1 / 1.9, "cudnn": 1.6}
"""How fast kernels of attention are beside FlashAttention-2, which PyTorch has: that in Triton (Dao, FlashAttention-2,
2023, section 4.1: between 1.3 and 2.5 times slower; the middle), and cuDNN's on an H100 (Shah et al., FlashAttention-3,
2024, figures 5 and 6: heads of 128, sequences of 4,096 and more, forward and backward)."""


def read_rows(tree: Mapping[str, Any]) -> list[Row]:
    return [Row(**each) for each in tree["rows"]]


# Predicting


def predict_rows(tree: Mapping[str, Any], rows: Iterable[Row]) -> dict[str, list[Predicted]]:
    """Returns the predictions of `rows`. Each model is read once for each of its batches."""

    @lru_cache(maxsize=1)
    def planner(cluster: str, kernel: str, model: str, *others: Any) -> Planner:
        return Planner(_training(tree["models"][model], *others), cluster_of(tree["clusters"][cluster], kernel))

    def key(row: Row) -> tuple[str, str, str, int, str, str, str]:
        optimizer = tree["sources"][row.source]["optimizer"]
        return row.cluster, row.attention, row.model, row.sequence, row.parameters, optimizer, row.cut

    return {row.id: _predict(planner(*key(row)), row) for row in sorted(rows, key=key)}


def _training(config: Mapping[str, Any], sequence: int, parameters: str, optimizer: str, cut: str = "") -> Training:
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**config, use_cache=False)
    name = "n_positions" if made.model_type == "gpt2" else "max_position_embeddings"
    setattr(made, name, sequence)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made, dtype=getattr(torch, parameters)).train()
    layout = ModelLayout(own_or_usual_loss)
    if cut:
        model = Stage(model)
        layout = LlamaLayout(own_or_usual_loss, width=made.hidden_size, cuts_tokens=cut.endswith("tokens"))
    return Training(
        model,
        lambda samples: (torch.zeros(samples, sequence, dtype=torch.int64, device="meta"),),
        layout,
        OPTIMIZERS[optimizer],
        torch.bfloat16 if parameters == "float32" else None,
        stages_keep_buffers=True,  # whatever torch this runs with, the trainings were published before 2.15
        copies_out=True,
    )


def cluster_of(words: Mapping[str, Any], kernel: str = "flash2") -> Cluster:
    """Returns the shipped cluster that `words` name, with what they say is other, and with a kernel of attention."""
    cluster = read_cluster(words["like"])
    device = replace(cluster.device, attention_share=cluster.device.attention_share * KERNELS[kernel])
    if "gib" in words:
        device = replace(device, memory=round(words["gib"] * 2**30), bandwidth=words["memory_gb_s"] * 1e9)
    across = cluster.across
    if "across_gb_s" in words:
        across = Link(across.latency, words["across_gb_s"] * 1e9)
    return replace(cluster, device=device, across=across)


def _predict(planner: Planner, row: Row) -> list[Predicted]:
    found = []
    for checkpointing, recompute in CHECKPOINTING[row.checkpointing]:
        settings = Settings(
            row.mesh,
            placement="flat" if row.sharding == "FSDP1" else "shard",
            checkpointing=checkpointing,
            recompute=recompute,
            reshard=row.reshard,
            offload="everything" if row.offload else "nothing",
            micro_batch=row.micro_batch,
            micro_batches=row.micro_batches,
        )
        each = planner.predict(settings)
        found.append(
            Predicted(
                _rounded(each.tokens_per_second / settings.mesh.num_ranks),
                _rounded(100 * each.mfu),
                _rounded(each.timeline.peak.nbytes / 2**30),
                _rounded(each.reserved_bytes / 2**30),
                each.driver_bytes <= planner.cluster.device.memory,
            )
        )
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


# Holding predictions against what was published


@dataclass(frozen=True)
class Compared:
    """A published figure, and the prediction from `low` to `high`."""

    row: Row
    published: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """The predicted over the published, less 1; 0 if the published is between `low` and `high`."""
        nearest = min(max(self.published, self.low), self.high)
        return nearest / self.published - 1


def throughputs(rows: Iterable[Row], found: Found) -> list[Compared]:
    compared = []
    for row in rows:
        published = row.tokens if row.mfu is None else row.mfu
        values = [each.tokens if row.mfu is None else each.mfu for each in found[row.id]]
        if published is not None:
            compared.append(Compared(row, published, min(values), max(values)))
    return compared


def memories(rows: Iterable[Row], found: Found) -> list[Compared]:
    compared = []
    for row in rows:
        values = [getattr(each, row.memory_is) for each in found[row.id]]
        if row.memory is not None:
            compared.append(Compared(row, row.memory, min(values), max(values)))
    return compared


Kind = Callable[[Row], bool]
KINDS: dict[str, Kind] = {
    "all": lambda row: True,
    "looked at": lambda row: not row.held_out,
    "held out": lambda row: row.held_out,
    "A100": lambda row: row.cluster.startswith("a100"),
    "H100": lambda row: row.cluster.startswith("h100"),
    "one node": lambda row: row.mesh.num_ranks <= 8,
    "several nodes": lambda row: row.mesh.num_ranks > 8,
    "no checkpointing": lambda row: row.checkpointing == "none",
    "full checkpointing": lambda row: row.checkpointing == "full",
    "selective checkpointing": lambda row: row.checkpointing in ("by operation", "every second block"),
    "eager": lambda row: not row.compile,
    "compile": lambda row: row.compile,
    "FSDP1": lambda row: row.sharding == "FSDP1",
    "FSDP2": lambda row: row.sharding == "FSDP2",
    "HSDP": lambda row: row.sharding == "HSDP",
    "offload": lambda row: row.offload,
    "sequences up to 4,096": lambda row: row.sequence <= 4096,
    "sequences from 8,192": lambda row: row.sequence >= 8192,
    "up to 4,096 tokens in a micro-batch": lambda row: row.micro_batch * row.sequence <= 4096,
    "tensor parallel": lambda row: row.tp > 1,
    "context parallel": lambda row: row.cp > 1,
    "pipeline": lambda row: row.pp > 1,
    "below 1 B parameters": lambda row: row.model.endswith("m"),
}
KINDS_OF_MEMORY: dict[str, Kind] = {
    **KINDS,
    "reserved": lambda row: row.memory_is == "reserved",
    "active": lambda row: row.memory_is == "active",
}


def distribution(compared: Sequence[Compared], kinds: Mapping[str, Kind] = KINDS) -> str:
    """Returns a table of the errors: for each kind of row how many there are, median, quartiles and worst."""
    lines = []
    for name, is_meant in kinds.items():
        meant = [each for each in compared if is_meant(each.row)]
        if not meant or (len(meant) == len(compared) and name != "all"):
            continue
        errors = [each.error for each in meant]
        low, _, high = statistics.quantiles(errors, n=4, method="inclusive") if len(errors) > 1 else errors * 3
        worst = max(meant, key=lambda each: abs(each.error))
        sizes = statistics.median(abs(error) for error in errors)
        middle = statistics.median(errors)
        lines.append(
            [name, str(len(meant)), f"{sizes:.0%}", *map(_percent, (middle, low, high, worst.error)), worst.row.id]
        )
    head = ["rows", "number", "median of size", "median", "first quartile", "third quartile", "worst", "which"]
    return markdown(head, lines)


def _percent(error: float) -> str:
    return f"{error:+.0%}".replace("+0%", "0%").replace("-0%", "0%")


def table(rows: Sequence[Row], found: Found) -> str:
    """Returns a table of rows of one source."""
    speed = {each.row.id: each for each in throughputs(rows, found)}
    space = {each.row.id: each for each in memories(rows, found)}
    lines = []
    for row in rows:
        batch = f"{row.micro_batch} x {row.sequence:,}" + (f", {row.micro_batches} times" * (row.micro_batches > 1))
        axes = [f"{name} {getattr(row, name)}" for name in ("tp", "cp", "pp") if getattr(row, name) > 1]
        words = [row.sharding, *["not resharded"] * (not row.reshard), *axes]
        words += [*["compile"] * row.compile, *["offload"] * row.offload]
        words += [row.attention] * (row.attention != "flash2")
        lines.append(
            [
                row.place,
                row.model,
                f"{row.mesh.num_ranks} {row.cluster}",
                ", ".join(words),
                batch,
                row.checkpointing,
                *_cells(speed.get(row.id), "% MFU" if row.mfu is not None else ""),
                *_cells(space.get(row.id), " active" if row.memory_is == "active" else ""),
                "held out" if row.held_out else "",
            ]
        )
    head = ["place", "model", "GPUs", "sharding", "micro-batch", "checkpointing", "tokens/s/GPU", "predicted", "error"]
    return markdown([*head, "GiB", "predicted", "error", ""], lines)


def _cells(compared: Compared | None, unit: str) -> list[str]:
    if compared is None:
        return ["", "", ""]
    low, high = f"{compared.low:,g}", f"{compared.high:,g}"
    selective = compared.row.checkpointing == "selective"
    error = "between" if selective and compared.error == 0 else _percent(compared.error)
    return [f"{compared.published:,g}{unit}", f"{low} to {high}" if selective else low, error]


ON_THE_PAGE = (
    "all",
    "held out",
    "A100",
    "H100",
    "one node",
    "several nodes",
    "eager",
    "compile",
    "up to 4,096 tokens in a micro-batch",
    "tensor parallel",
    "pipeline",
    "reserved",
    "active",
)
"""The kinds of rows that the page shows the errors of."""


def summary(tree: Mapping[str, Any], found: Found, kinds: Iterable[str]) -> str:
    """Returns how far the predictions are off, for `kinds` of rows."""
    rows = [row for row in read_rows(tree) if row.id in found]
    exact = [row for row in rows if row.checkpointing != "selective"]
    alone, others = ([row for row in exact if bool(row.cut) == is_cut] for is_cut in (False, True))
    chosen = {name: KINDS_OF_MEMORY[name] for name in kinds}
    of_time = {name: kind for name, kind in chosen.items() if name in KINDS}
    too_large = sum(not found[row.id][0].fits for row in exact)
    parts = [
        "\n### Throughput, data parallel alone\n",
        distribution(throughputs(alone, found), of_time),
        "\n### Throughput, tensor, context and pipeline parallel\n",
        distribution(throughputs(others, found), of_time),
        "\n### Memory\n",
        distribution(memories(exact, found), chosen),
        f"\nAll of these trainings ran; {too_large} of {len(exact)} would not fit, the simulator says.\n",
    ]
    return "\n".join(parts)


def tables(tree: Mapping[str, Any], found: Found) -> str:
    """Returns each row that is in `found`, by source."""
    parts = []
    for name, source in tree["sources"].items():
        if own := [row for row in read_rows(tree) if row.source == name and row.id in found]:
            told = f"{source['found']}. Assumed: {source['assumed']}."
            parts.append(f"### {source['title']}\n\n{told}\n\n{table(own, found)}")
    return "\n\n".join(parts)


def lines_of_data(tree: Mapping[str, Any], found: Found) -> list[list[str]]:
    """Returns the lines of docs/data/predictions.csv: a training each, with what was published and predicted."""
    rows = read_rows(tree)
    speed = {each.row.id: each for each in throughputs(rows, found)}
    space = {each.row.id: each for each in memories(rows, found)}
    told = ["id", "source", "place", "model", "cluster", "GPUs", "sharding", "replicate", "tp", "cp", "pp"]
    told += ["sequence", "micro-batch", "micro-batches", "checkpointing", "compile", "offload", "held out"]
    compared = [f"{name}{part}" for name in ("speed", "memory") for part in ("", " is", " from", " to", " error")]
    lines = [[*told, *compared, "fits"]]
    for row in rows:
        values = [row.id, row.source, row.place, row.model, row.cluster, row.mesh.num_ranks, row.sharding]
        values += [row.replicate, row.tp, row.cp, row.pp, row.sequence, row.micro_batch, row.micro_batches]
        values += [row.checkpointing]
        values += ["yes" if each else "no" for each in (row.compile, row.offload, row.held_out)]
        values += _figures(speed.get(row.id), "tokens/s/GPU" if row.mfu is None else "% MFU")
        values += _figures(space.get(row.id), f"GiB {row.memory_is}")
        lines.append([*map(str, values), "yes" if any(each.fits for each in found[row.id]) else "no"])
    return lines


def _figures(compared: Compared | None, unit: str) -> list[str]:
    if compared is None:
        return [""] * 5
    low, high = f"{compared.low:g}", f"{compared.high:g}"
    return [f"{compared.published:g}", unit, low, high, f"{compared.error:.3f}"]


def read_found() -> dict[str, list[Predicted]]:
    return {id: [Predicted(**each) for each in values] for id, values in json.loads(PREDICTIONS.read_text()).items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=__doc__)
    parser.add_argument("ids", nargs="*", help="rows to print")
    parser.add_argument("--looked-at", action="store_true", help="print rows that are not held out, write nothing")
    parser.add_argument("--render", action="store_true", help="predict nothing, write the table and the page")
    chosen = parser.parse_args(arguments)
    tree = read_tree(str(DATA))
    rows = [
        row
        for row in read_rows(tree)
        if (row.id in chosen.ids or not chosen.ids) and not (chosen.looked_at and row.held_out)
    ]
    since = time.perf_counter()
    found = read_found() if chosen.render else predict_rows(tree, rows)
    print(f"{len(found)} rows, {time.perf_counter() - since:.0f} s", file=sys.stderr)
    if chosen.ids or chosen.looked_at:
        print(summary(tree, found, KINDS_OF_MEMORY), tables(tree, found), sep="\n\n")
        return 0
    ordered = {row.id: [asdict(each) for each in found[row.id]] for row in rows}
    lines = ",\n".join(f'"{id}": {json.dumps(each)}' for id, each in ordered.items())
    PREDICTIONS.write_text(f"{{\n{lines}\n}}\n")
    TABLE.write_text(as_csv(lines_of_data(tree, found)))
    PAGE.write_text(written(PAGE.read_text(), {"published": summary(tree, found, ON_THE_PAGE)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
