"""Published trainings with FSDP2, eager, played on the clock of the simulated device by torch's own FSDP2.

    python -m bench.device.played                     # all rows; writes docs/data/played.csv and the page
    python -m bench.device.played titan-8b-x8         # plays rows by id alone, and keeps the others as they were
    python -m bench.device.played --render            # writes the page from the data

No time of it was measured here: kernels, copies, collectives and the host last what the machine's record says. The
model is transformers', its layers are units, nothing is computed and the other ranks are imagined.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from sherd.train.config import read_tree

from ..pages import DOCS, as_csv, read_csv, written
from ..published import DATA, KERNELS, Row, read_rows
from ..table import markdown
from .simulated import PYTHON, in_a_process

TABLE, PAGE = DOCS / "data/played.csv", DOCS / "understand/predictions.md"
NOT_YET = "not played yet"
STEPS = 2
"""The second one counts: the first one makes the optimizer's state."""


def reason_not_to_play(row: Row) -> str:
    """Returns why this cannot be played, in a few words; empty if it can."""
    if row.mesh.num_ranks > row.mesh.num_data:
        return "tensor, context or pipeline parallel"
    return "compiled" if row.compile else ""


@dataclass(frozen=True)
class Played:
    """What the clock and the allocator say of a step: tokens per second and GPU, GiB, and milliseconds."""

    tokens: float
    reserved: float
    active: float
    step_ms: float
    exposed_ms: float
    host_ms: float


def play(tree: Mapping[str, Any], row: Row) -> Played:
    """In this process, which becomes rank 0."""
    import simdevice

    torch.set_num_threads(1)
    simdevice.load()
    simdevice.configure(machine=record_of(tree["clusters"][row.cluster], row.attention), compute=False, races="off")
    simdevice.imagine_ranks(row.shard)
    model = sharded(tree["models"][row.model], row)
    is_fused = tree["sources"][row.source]["optimizer"] == "adamw-fused"
    optimizer = torch.optim.AdamW(model.parameters(), fused=is_fused, foreach=not is_fused)
    tokens = torch.zeros(row.micro_batch, row.sequence, dtype=torch.int64, device="sim")
    for _ in range(STEPS):
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        simdevice.reset_times()
        for _ in range(row.micro_batches):
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            del logits
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    times = simdevice.times()
    return Played(
        tokens=row.micro_batches * row.micro_batch * row.sequence / times.end * 1e6,
        reserved=torch.accelerator.max_memory_reserved() / 2**30,
        active=torch.accelerator.max_memory_allocated() / 2**30,
        step_ms=times.end / 1e3,
        exposed_ms=times.exposed / 1e3,
        host_ms=times.host / 1e3,
    )


def record_of(cluster: Mapping[str, Any], kernel: str) -> dict[str, Any]:
    """Returns the machine's record, with what a published cluster has that is other, and with a kernel of attention."""
    from simdevice import machines

    found = {**machines.read(cluster["like"]), "python": PYTHON}
    found["shares"] = {**found["shares"], "attention": found["shares"]["attention"] * KERNELS[kernel]}
    if "memory_gb_s" in cluster:
        found["bandwidth"] = cluster["memory_gb_s"] * 1e9
    if "across_gb_s" in cluster:
        found["across"] = {**found["across"], "bandwidth": cluster["across_gb_s"] * 1e9}
    return found


def sharded(config: Mapping[str, Any], row: Row) -> nn.Module:
    """Returns transformers' model under FSDP2, with the row's checkpointing."""
    from transformers import AutoConfig, AutoModelForCausalLM, masking_utils
    from transformers.integrations import sdpa_attention

    # torchtitan repeats keys and values for all heads, as transformers does where the kernel shares none.
    sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    # It reads positions to see whether sequences are packed. Here are no values to read, and none are packed.
    masking_utils.find_packed_sequence_indices = lambda *_: None
    made = AutoConfig.for_model(**config, use_cache=False, max_position_embeddings=row.sequence)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made, dtype=getattr(torch, row.parameters)).train()
    layers = model.model.layers
    for place in range(0, len(layers), 2 if row.checkpointing == "every second block" else 1):
        if row.checkpointing != "none":
            layers[place] = checkpoint_wrapper(layers[place], context_fn=CONTEXTS[row.checkpointing])
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    arguments = {
        "mesh": init_device_mesh("sim", (row.shard,)),
        "reshard_after_forward": row.reshard,
        **({"mp_policy": precision} if row.parameters == "float32" else {}),
    }
    for layer in layers:
        fully_shard(layer, **arguments)
    fully_shard(model, **arguments)
    return model.to_empty(device="sim")


class _EverySecondProduct:
    """torchtitan's selective checkpointing: attention is kept, and every second matrix product."""

    def __init__(self) -> None:
        self.num_products = {False: 0, True: 0}

    def __call__(self, context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        keeps = "scaled_dot_product" in str(operator) and "backward" not in str(operator)
        if operator == torch.ops.aten.mm.default:
            self.num_products[context.is_recompute] += 1
            keeps = self.num_products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS = {
    "full": noop_context_fn,
    "every second block": noop_context_fn,
    "by operation": lambda: create_selective_checkpoint_contexts(_EverySecondProduct()),
}


# The table


HEAD = ["id", "not played", "speed", "played", "speed error", "memory", "memory is", "played", "memory error"]
HEAD += ["step (ms)", "exposed (ms)", "host (ms)"]


def line_of(row: Row, played: Played | None, why: str = "") -> list[str]:
    """Returns a line of docs/data/played.csv; errors are the played over the published figure, less one."""
    speed, memory = "" if row.tokens is None else f"{row.tokens:g}", "" if row.memory is None else f"{row.memory:g}"
    if played is None:
        return [row.id, why, speed, "", "", memory, row.memory_is if memory else "", "", "", "", "", ""]
    found = getattr(played, row.memory_is)
    of_speed = [f"{played.tokens:.4g}", f"{played.tokens / row.tokens - 1:.3f}"] if row.tokens else ["", ""]
    of_memory = [row.memory_is, f"{found:.3g}", f"{found / row.memory - 1:.3f}"] if row.memory else ["", "", ""]
    times = [f"{each:.4g}" for each in (played.step_ms, played.exposed_ms, played.host_ms)]
    return [row.id, "", speed, *of_speed, memory, *of_memory, *times]


KINDS = {
    "all": lambda row: True,
    "A100": lambda row: row.cluster.startswith("a100"),
    "H100": lambda row: row.cluster.startswith("h100"),
    "one node": lambda row: row.shard <= 8,
    "several nodes": lambda row: row.shard > 8,
    "no checkpointing": lambda row: row.checkpointing == "none",
    "full checkpointing": lambda row: row.checkpointing == "full",
    "selective checkpointing": lambda row: row.checkpointing in ("by operation", "every second block"),
    "held out": lambda row: row.held_out,
}


def section(rows: Mapping[str, Row], lines: Sequence[Sequence[str]]) -> str:
    """Returns what the page shows of the lines of docs/data/played.csv: how far off, by kinds, and each row."""
    played, others = [line for line in lines if not line[1]], [line for line in lines if line[1]]
    kinds = []
    for name, is_meant in KINDS.items():
        meant = [line for line in played if is_meant(rows[line[0]])]
        kinds.append([name, *_off(meant, 4), *_off(meant, 8)])
    head = ["rows", "speeds", "median", "median of size", "worst", "memories", "median", "median of size", "worst"]
    each = []
    for id, _, *of_speed, speed_off, memory, memory_is, active, memory_off in (line[:9] for line in played):
        gpus = f"{rows[id].shard} x {rows[id].cluster}"
        each.append([f"`{id}`", gpus, *of_speed, _percent(speed_off), memory, memory_is, active, _percent(memory_off)])
    head_of_each = ["training", "GPUs", "tokens/s/GPU", "played", "error", "GiB", "GiB are", "played", "error"]
    why = []
    for reason in dict.fromkeys(line[1] for line in others):
        why.append(f"- {reason}: {', '.join(f'`{line[0]}`' for line in others if line[1] == reason)}.")
    return "\n\n".join([markdown(head, kinds), markdown(head_of_each, each), "Not played:", "\n".join(why)])


def _off(lines: Iterable[Sequence[str]], column: int) -> list[str]:
    errors = [float(line[column]) for line in lines if line[column]]
    if not errors:
        return ["0", "", "", ""]
    sizes = median(abs(error) for error in errors)
    return [str(len(errors)), _percent(median(errors)), f"{sizes:.0%}", _percent(max(errors, key=abs))]


def _percent(error: str | float) -> str:
    return "" if error == "" else f"{float(error):+.0%}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.device.played", description=__doc__)
    parser.add_argument("ids", nargs="*", help="rows to play")
    parser.add_argument("--render", action="store_true", help="play nothing, write the page")
    chosen = parser.parse_args(arguments)
    tree = read_tree(str(DATA))
    rows = {row.id: row for row in read_rows(tree) if row.sharding == "FSDP2"}
    known = {line[0]: line for line in read_csv(TABLE)[1:]} if TABLE.exists() else {}
    for id in () if chosen.render else chosen.ids or rows:
        known[id] = in_a_process(played_line, tree, rows[id])
        print(",".join(known[id]), file=sys.stderr, flush=True)
    lines = []
    for id, row in rows.items():
        lines.append(known.get(id) or line_of(row, None, reason_not_to_play(row) or NOT_YET))
    TABLE.write_text(as_csv([HEAD, *lines]))
    PAGE.write_text(written(PAGE.read_text(), {"played": section(rows, lines)}))
    return 0


def played_line(tree: Mapping[str, Any], row: Row) -> list[str]:
    why = reason_not_to_play(row)
    return line_of(row, None if why else play(tree, row), why)


if __name__ == "__main__":
    sys.exit(main())
