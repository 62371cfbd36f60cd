"""Lays a model over the ranks of a run: matrices are cut over tp first, then parameters are sharded over the rest."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint, noop_context_fn

from sherd import Flat, MixedPrecisionPolicy, Owned, SherdError, auto_shard
from sherd.api.auto_shard import described, shard_units
from sherd.api.blocks import Wrapping, evenly_spread, repeated_blocks, rewrapped
from sherd.api.recompute import selective_contexts
from sherd.train.config import Config, InputError, comm_policy, offload_policy
from sherd.train.mesh import RankGrid
from sherd.train.models import Decoder, Head, HuggingFace


def build(config: Config, grid: RankGrid) -> nn.Module:
    """The model of `config` with its first weights, laid over `grid`.

    Raises:
        InputError: `hf` does not lead to a model, or the settings of sharding do not go with the model.
    """
    if config.hf:
        lm = HuggingFace(config.hf, config.seed, config.context)
        return parallelized(lm.to(grid.device_type), grid, config)
    # A rank only ever holds its shards.
    on_host = offload_policy(config.offload).step_place == "host"
    model = parallelized(on_meta(config), grid, config).to_empty(device="cpu" if on_host else grid.device_type)
    assert isinstance(model, Decoder), "no path was given"
    model.reset_parameters(config.seed)
    return model


def on_meta(config: Config) -> Decoder | HuggingFace:
    """The model of `config`, unsharded and without values. Raises InputError as `build` does."""
    with torch.device("meta"):
        return HuggingFace(config.hf, config.seed, config.context) if config.hf else Decoder(config)


def parallelized(model: Decoder | HuggingFace, grid: RankGrid, config: Config) -> nn.Module:
    """Lay `model`, which every rank has unsharded, over all axes of `grid`: a unit per block, one for the rest."""
    for each in model.parameters() if config.offload.startswith("masters") else ():
        each.data = each.data.to(torch.bfloat16)  # buffers stay as they are
    if grid.tp is not None:
        cut_tensors(model, grid.tp)
    run_as_asked(model.blocks, config)
    options, blocks = {"mesh": grid.data, **_options(config)}, repeated_blocks(model).values()
    try:
        if config.wrapping == "auto":
            return auto_shard(model, **options)
        # Larger or smaller units than blocks, as plans have them.
        units = rewrapped(model, described(model, options), blocks, cast(Wrapping, config.wrapping))
        return shard_units(model, units, options)
    except SherdError as error:
        raise InputError(f"this model or mesh cannot be sharded so: {' '.join(str(error).split())}") from error


def _options(config: Config) -> dict[str, Any]:
    """The other arguments of `auto_shard`."""
    dtypes = (torch.bfloat16, torch.float32) if config.precision == "bf16" else ()
    return {
        "placements": None if config.strategy == "auto" else config.strategy,
        "placement": {"shard": None, "flat": Flat(), "whole": Owned()}[config.placement],
        "reshard_after_forward": None if config.reshard else False,
        "mp_policy": MixedPrecisionPolicy(*dtypes),
        "offload_policy": offload_policy(config.offload),
        # A replay runs no Python, so nothing is compared in it.
        "comm_policy": comm_policy(config, torch.bfloat16, divergence="trust" if config.cuda_graph else "error"),
    }


def run_as_asked(blocks: Iterable[nn.Module], config: Config) -> None:
    """Compute blocks again in backward, and compile them, where the config says so; their units' hooks stay around."""
    contexts = selective_contexts if config.recompute == "selective" else noop_context_fn
    blocks = list(blocks)
    for block in evenly_spread(blocks, config.checkpointing):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    for block in blocks if config.compile else ():
        block.compile()


def cut_tensors(model: nn.Module, tp: DeviceMesh) -> None:
    """Cut heads and hidden units over tp; the residual stream in between is cut by tokens.

    embedding    rows of the vocabulary         tokens' sums, scattered
    norm         replicated, each on its tokens (sequence parallel)
    attention    its heads, on all tokens       sums scattered to tokens
    head         rows of the vocabulary         logits stay cut, see `passes`
    """
    assert isinstance(model, Decoder), "axes_of refuses tp for others"
    tokens, everywhere = Shard(1), Replicate()
    in_block: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(tokens, None, None), desired_input_layouts=(everywhere, None, None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=tokens),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(everywhere,)),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=tokens),
    }
    # The weights get their values later, the same on all ranks: nothing is to be sent.
    ends = {"embedding": RowwiseParallel(input_layouts=everywhere, output_layouts=tokens), "norm": SequenceParallel()}
    parallelize_module(model, tp, ends, src_data_rank=None)
    for block in model.blocks:
        parallelize_module(block, tp, in_block, src_data_rank=None)
    _cut_head(model.head, tp)


def _cut_head(head: Head, tp: DeviceMesh) -> None:
    """The head's rows over `tp`, each with all tokens: its output is this rank's logits of all."""

    def gather(module: nn.Module, inputs: tuple[DTensor, Tensor]) -> tuple[DTensor, Tensor]:
        x, embedding = inputs
        return x.redistribute(placements=[Replicate()]), embedding

    if head.weight is not None:
        head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), tp, [Shard(0)], src_data_rank=None))
    head.register_forward_pre_hook(gather)
    head.register_forward_hook(lambda module, inputs, logits: logits.to_local())
