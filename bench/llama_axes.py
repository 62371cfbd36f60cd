"""Llama-like models over the axes of torchtitan and Megatron: tensor parallel, with activations between blocks cut by
tokens or whole, stages of a pipeline, and parts of sequences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from sherd.tools.plan.axes import ModelLayout, ParallelModel
from sherd.tools.simulate.settings import Mesh


class Stage(nn.Module):
    """A causal LM of transformers, or a stage of one: some of its blocks, in the first stage the embedding, in the last
    one the head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.rotary = model.config, model.model.rotary_emb
        self.embedding: nn.Module | None = model.model.embed_tokens
        self.blocks = model.model.layers
        self.norm: nn.Module | None = model.model.norm
        self.head: nn.Module | None = model.lm_head

    def forward(self, x: Tensor, length: int = 0) -> Tensor:
        """Returns the logits, or what the next stage gets.

        Args:
            x: tokens, or what the stage before has sent.
            length: of the part of a sequence that attention sees as its own; 0: that of `x`.
        """
        if self.embedding is not None:
            x = self.embedding(x)
        rotary = self.rotary(x, torch.arange(length or x.shape[1], device=x.device)[None])
        for block in self.blocks:
            x = block(x, position_embeddings=rotary)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


@dataclass(frozen=True)
class LlamaLayout(ModelLayout):
    """The layout of a `Stage` that is a whole model.

    Attributes:
        width: of the model.
        cuts_tokens: over tp, activations between products are cut by tokens (sequence parallelism), not whole.
    """

    width: int = 0
    cuts_tokens: bool = True

    @property
    def axes(self) -> tuple[str, ...]:
        return "tp", "cp", "pp"

    def stage(self, model: Any, number: int, num_stages: int) -> Stage:
        stage = copy.deepcopy(model)
        num = len(stage.blocks)
        stage.blocks = nn.ModuleList(each for at, each in enumerate(stage.blocks) if at * num_stages // num == number)
        if number > 0:
            stage.embedding = None
        if number < num_stages - 1:
            stage.norm = stage.head = None
        return stage

    def stream_numel(self, batch: Any, mesh: Mesh) -> int:
        parts = mesh.cp * (mesh.tp if self.cuts_tokens else 1)
        return int(batch[0].numel()) // parts * self.width

    def lay(self, model: Any, mesh: Mesh) -> ParallelModel:
        cuts = {"tp": partial(_cut_tensors, self.cuts_tokens), "cp": _cut_sequences}
        laid = ModelLayout(self.loss, self.shard, cuts).lay(model, mesh)
        running: Callable[[], AbstractContextManager[None]] = loss_parallel if mesh.tp > 1 else nullcontext
        return ParallelModel(laid.shard, partial(self._loss, mesh), running)

    def _loss(self, mesh: Mesh, model: Any, batch: tuple[Tensor]) -> Tensor:
        """Returns the mean cross-entropy, or the sum of what a stage sends on, which has a gradient as large."""
        tokens = batch[0].chunk(mesh.cp, dim=1)[0]
        samples, length = tokens.shape
        x = tokens
        if model.embedding is None:
            shape = samples, length // (mesh.tp if self.cuts_tokens else 1), self.width
            x = torch.empty(shape, dtype=next(model.parameters()).dtype, device="meta", requires_grad=True)
        out = model(x, length)
        if model.head is None:
            return (out.to_local() if isinstance(out, DTensor) else out).sum()
        return F.cross_entropy(out.flatten(0, 1).float(), tokens.flatten())


def _cut_tensors(cuts_tokens: bool, model: Any, tp: DeviceMesh) -> None:
    """Heads and hidden numbers over `tp`; logits by vocabulary, in which the loss is computed."""
    everywhere = Replicate()
    between = Shard(1) if cuts_tokens else everywhere
    products: dict[str, ParallelStyle] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    products |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    products |= {name: RowwiseParallel(output_layouts=between) for name in ("self_attn.o_proj", "mlp.down_proj")}
    products["self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": everywhere}
    )
    products["mlp"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(everywhere,))
    if cuts_tokens:
        norms = ("input_layernorm", "post_attention_layernorm")
        products |= {name: SequenceParallel(use_local_output=True) for name in norms}
    for block in model.blocks:
        parallelize_module(block, tp, products, src_data_rank=None)
    if model.embedding is not None:
        style = RowwiseParallel(input_layouts=everywhere, output_layouts=between)
        parallelize_module(model.embedding, tp, style, src_data_rank=None)
    if model.norm is not None and model.head is not None:
        if cuts_tokens:
            parallelize_module(model.norm, tp, SequenceParallel(use_local_output=True), src_data_rank=None)
        style = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model.head, tp, style, src_data_rank=None)


def _cut_sequences(model: Any, cp: DeviceMesh) -> None:
    """Keys and values of all are gathered for attention. Each rank has as much of it as the others: as each token sees
    those before it alone, a rank's see half of all in the mean, and half of the keys stand for them."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Any:
        seen = key.shape[2] * cp.size() // 2
        key, value = (_gathered(each, cp)[:, :, :seen] for each in (key, value))
        return sdpa_attention_forward(module, query, key, value, mask, **options | {"is_causal": False})

    AttentionInterface.register("gathered", attend)
    model.config._attn_implementation = "gathered"


def _gathered(part: Tensor, cp: DeviceMesh) -> Tensor:
    """Returns all tokens' keys or values; their gradients are summed and go back to where they came from."""
    whole = DTensor.from_local(part, cp, [Shard(2)], run_check=False).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])
