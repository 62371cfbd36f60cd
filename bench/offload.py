"""Plans a published training with offload, next to its figures: Qwen3-30B-A3B on 8 H200, 8K to 64K tokens a device.

    python -m bench.offload          # a minute on one core; writes the table of docs/understand/predictions.md

The figures are those of PrimeIntellect-ai/prime-rl, pull request 3234 (August 2026): full offload, with a step on the
host within backward. Assumed: a sample for each device, all blocks computed again, and a loss in chunks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sherd
from sherd.tools.plan.axes import ModelLayout
from sherd.tools.plan.planner import Planner, Training
from sherd.tools.simulate.cluster import read_cluster
from sherd.tools.simulate.predict import Prediction, predict
from sherd.tools.simulate.settings import Mesh, Settings
from sherd.tools.simulate.sharded import OPTIMIZERS

from .pages import written
from .table import markdown

PAGE = Path(__file__).parents[1] / "docs/understand/predictions.md"
QWEN = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
QWEN |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
QWEN |= {"num_experts": 128, "num_experts_per_tok": 8}
PUBLISHED = {
    8192: ("1.75 s", "3.96 s", "44%", "63.1", "17.5"),
    16384: ("5.17 s", "5.73 s", "90%", "67.0", "21.5"),
    32768: ("", "", "about 100%", "73.7", "29.0"),
    65536: ("38.7 s", "34.1 s", "113%", "90.3", "44.9"),
}
"""By tokens: a step without and with offload, the throughput that is kept, and GiB without and with offload."""
WITHIN = "everything, within backward"
ROWS = ("state", "masters", "step", "everything")


class WithLoss(nn.Module):
    """A causal language model, with its loss in chunks of tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.model.model(tokens).last_hidden_state
        return sherd.chunked_cross_entropy(hidden, self.model.lm_head.weight, tokens)


def training(tokens: int) -> Training:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3_moe", **QWEN, use_cache=False, max_position_embeddings=tokens)
    with torch.device("meta"):
        model = WithLoss(AutoModelForCausalLM.from_config(config, dtype=torch.float32).train())
    return Training(
        model,
        lambda samples: torch.zeros(samples, tokens, dtype=torch.int64, device="meta"),
        ModelLayout(lambda model, batch: model(batch)),
        OPTIMIZERS["adamw-fused"],
        torch.bfloat16,
    )


def planned(tokens: int) -> dict[str, Prediction]:
    """The predictions for samples of so many `tokens`, by the value of `offload`."""
    planner, found = Planner(training(tokens), read_cluster("h200")), {}
    for offload in ("nothing", *ROWS):
        settings = Settings(Mesh(8), checkpointing=1.0, offload=offload)
        found[offload] = planner.predict(settings)
    found[WITHIN] = predict(planner._rank_work(settings), planner.cluster, settings.mesh, steps_in_backward=True)
    return found


def tables() -> str:
    """The planned figures next to the published ones, and what each value of `offload` costs and saves."""
    against, choices = [], []
    for tokens, (before, after, kept, without, with_it) in PUBLISHED.items():
        found = planned(tokens)
        usual, offloaded = found["nothing"], found[WITHIN]
        against.append(
            [
                f"{tokens:,}",
                *(before, f"{usual.timeline.seconds:.2f} s", after, f"{offloaded.timeline.seconds:.2f} s"),
                *(kept, _kept(offloaded, usual), without, _alive(usual), with_it, _alive(offloaded)),
            ]
        )
        for name in (*ROWS, WITHIN):
            each = found[name]
            cells = [_kept(each, usual), _alive(each), f"{each.host_bytes / 2**30:.1f}"]
            choices.append([f"{tokens:,}", name, f"{each.timeline.seconds:.2f} s", *cells])
    head = ["tokens", "step", "planned", "with offload", "planned", "kept", "planned", "GiB", "planned"]
    first = markdown([*head, "with offload", "planned"], against)
    return f"{first}\n\n{markdown(['tokens', 'offload', 'step', 'kept', 'GiB', 'GiB of the host'], choices)}"


def _kept(offloaded: Prediction, usual: Prediction) -> str:
    return f"{usual.timeline.seconds / offloaded.timeline.seconds:.0%}"


def _alive(prediction: Prediction) -> str:
    return f"{prediction.timeline.peak.nbytes / 2**30:.1f}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), {"offload": f"\n{tables()}\n"}))
