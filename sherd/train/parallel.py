"""Lays a model over the axes of a grid: sequences, tensors and experts first, then parameters are sharded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

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
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import checkpoint, noop_context_fn

from sherd import (
    Blocks,
    CommPolicy,
    CPUOffloadPolicy,
    Flat,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OnMesh,
    Owned,
    PrefetchPolicy,
    SherdError,
    fully_shard,
)
from sherd.api.blocks import UnitCall, Wrapping, evenly_spread, rewrapped
from sherd.api.recompute import selective_contexts
from sherd.train.config import Config, InputError
from sherd.train.experts import MixtureOfExperts, ToExperts
from sherd.train.mesh import RankGrid
from sherd.train.models import Block, Decoder, Elsewhere, Head, HuggingFace
from sherd.train.sequence import CutSequence

__all__ = ["blocks_of", "build", "cut", "on_meta", "parallelize", "shard"]

T = TypeVar("T", bound=Decoder | HuggingFace)
AnyCut = Shard | Flat | Blocks | Owned | None


def build(config: Config, grid: RankGrid) -> Decoder | HuggingFace:
    """The model of `config` with its first weights, laid over `grid`.

    Raises:
        InputError: `model.hf` does not lead to a model, or `[shard]` does not go with the model.
    """
    if config.model.hf:
        lm = HuggingFace(config.model.hf, config.run.seed, config.data.context)
        lm.require_causal()
        return parallelize(lm.to(grid.device_type), grid, config)
    model = parallelize(on_meta(config), grid, config)
    assert isinstance(model, Decoder), "no path was given"
    model.to_empty(device="cpu" if config.shard.offload else grid.device_type)  # a rank only ever holds its shards
    model.reset_parameters(config.run.seed)
    return model


def on_meta(config: Config) -> Decoder | HuggingFace:
    """The model of `config`, whole and without values. Raises InputError as `build` does."""
    with torch.device("meta"):
        if config.model.hf:
            return HuggingFace(config.model.hf, config.run.seed, config.data.context)
        return Decoder(config.model)


def parallelize(model: T, grid: RankGrid, config: Config) -> T:
    """Lay `model`, whole on every rank, over all axes of `grid`: a unit per block, one for the rest."""
    if isinstance(model, Decoder):
        own_layers(model, grid.stage, grid.axes.pp)
        cut(model, grid, config)
    run_as_asked(blocks_of(model), config)
    return shard(model, grid, **_options(config))


def cut(model: Decoder, grid: RankGrid, config: Config) -> None:
    """Cut the layers that `model` has over `cp`, `tp` and `ep`."""
    _cut_sequences(model, grid)
    _cut_tensors(model, grid)
    _spread_experts(model, grid, config)


def run_as_asked(blocks: Sequence[nn.Module], config: Config) -> None:
    """Compute blocks again in backward, and compile them, where the config says so; their units' hooks stay around."""
    contexts = selective_contexts if config.run.recompute == "selective" else noop_context_fn
    for block in evenly_spread(blocks, config.run.checkpointing_share) if config.run.checkpointing else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    for block in blocks if config.run.compile else ():
        block.compile()


# pp


def own_layers(model: Decoder, stage: int, num_stages: int) -> None:
    """Keep the layers of one stage, and delete the others.

    A stage has an equal share of the blocks; the first one has the embedding, too, and the last one the head. Blocks
    keep their names, so that a checkpoint does not depend on the number of stages.
    """
    num_blocks = len(model.blocks)
    for number in range(num_blocks):
        if number * num_stages // num_blocks != stage:
            model.blocks[number] = Elsewhere()
    if stage > 0:
        model.embedding = Elsewhere()
    if stage < num_stages - 1:
        model.norm, model.head = Elsewhere(), Elsewhere()


# cp, and the part of tp between attention layers


def _cut_sequences(model: Decoder, grid: RankGrid) -> None:
    """Let each layer know which of a sample's tokens it sees."""
    if grid.cp is None and grid.tp is None:
        return
    around_attention, between = CutSequence(grid.cp, None), CutSequence(grid.cp, grid.tp)
    model.sequence = around_attention if grid.stage == 0 else between
    for block in _blocks(model):
        block.attention.sequence = around_attention
        if isinstance(block.feed_forward, MixtureOfExperts):
            block.feed_forward.sequence = between


# tp


def _cut_tensors(model: Decoder, grid: RankGrid) -> None:
    """Cut heads and hidden units over tp; the residual stream in between is cut by tokens.

    embedding    rows of the vocabulary         tokens' sums, scattered
    norm         whole, each on its tokens      (sequence parallel)
    attention    its heads, on all tokens       sums scattered to tokens
    experts      whole, each on its tokens
    head         rows of the vocabulary         logits stay cut, see `passes`
    """
    if grid.tp is None:
        return
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
    }
    dense: dict[str, ParallelStyle] = {
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(everywhere,)),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=tokens),
    }
    mixture: dict[str, ParallelStyle] = {"feed_forward_norm": SequenceParallel(use_local_output=True)}
    # The weights get their values later, the same on all ranks: nothing is to be sent.
    if isinstance(model.embedding, nn.Embedding):
        cut = RowwiseParallel(input_layouts=everywhere, output_layouts=tokens)
        parallelize_module(model.embedding, grid.tp, cut, src_data_rank=None)
    if isinstance(model.head, Head):
        parallelize_module(model.norm, grid.tp, SequenceParallel(), src_data_rank=None)
        _cut_head(model.head, grid.tp)
    for block in _blocks(model):
        feed_forward = mixture if isinstance(block.feed_forward, MixtureOfExperts) else dense
        parallelize_module(block, grid.tp, in_block | feed_forward, src_data_rank=None)


def _cut_head(head: Head, tp: DeviceMesh) -> None:
    """The head's rows over `tp`, each with all tokens: its output is this rank's logits of all."""

    def gather(module: nn.Module, inputs: tuple[DTensor, Tensor]) -> tuple[DTensor, Tensor]:
        x, embedding = inputs
        return x.redistribute(placements=[Replicate()]), embedding

    _distribute(head, tp, [Shard(0)])
    head.register_forward_pre_hook(gather)
    head.register_forward_hook(lambda module, inputs, logits: logits.to_local())


def _distribute(module: nn.Module, mesh: DeviceMesh, placements: list[Placement]) -> None:
    """Make DTensors of the parameters of `module` itself."""
    for name, parameter in module.named_parameters(recurse=False):
        cut = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(cut))


# ep


def _spread_experts(model: Decoder, grid: RankGrid, config: Config) -> None:
    """Experts over ep; and the loss that keeps them even in parts that add up to the whole one's gradient."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.balance /= config.split(grid.axes.num_data, grid.axes.pp).times * grid.axes.tp
            if grid.tp is not None:
                _distribute(module.router, grid.tp, [Replicate()])
            if grid.expert_cut is not None:
                cuts = {"ep": Shard(0), "tp": Replicate()}
                names = grid.expert_cut.mesh_dim_names
                assert names is not None, "a grid's axes have names"
                _distribute(module.experts, grid.expert_cut, [cuts[name] for name in names])
            if grid.ep is not None:
                module.experts.exchange = ToExperts(grid.ep)


# replicate, dp, and cp once more


def shard(model: T, grid: RankGrid, policy: Wrapping = "auto", **options: Any) -> T:
    """Shard `model` with these options of `fully_shard`.

    Each block is a unit, or what `policy`, a word of `auto_shard`, says; the rest is one unit.
    """
    blocks, cut_of = blocks_of(model), functools.partial(_cut_of, grid, options.get("placement"))
    units = [UnitCall([block], {"shard_placement_fn": cut_of}) for block in blocks]
    try:
        for unit in rewrapped(model, units, [blocks], policy):
            fully_shard(unit.modules, mesh=grid.data, **unit.arguments, **options)
        fully_shard(model, mesh=grid.data, **options)
    except SherdError as error:
        raise InputError(f"[shard] does not go with this model or mesh: {' '.join(str(error).split())}") from error
    return model


def _options(config: Config) -> dict[str, Any]:
    """The arguments of `shard`."""
    run, shard = config.run, config.shard
    precision = MixedPrecisionPolicy()
    if run.precision == "bf16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {
        "mp_policy": precision,
        "placement": {"shard": None, "flat": Flat(), "blocks": Blocks(shard.rows), "whole": Owned()}[shard.placement],
        "replicate_below": shard.replicate_below,
        "placements": None if shard.strategy == "auto" else shard.strategy,
        "reshard_after_forward": {"auto": None, "always": True, "never": False}[shard.reshard],
        "prefetch_policy": PrefetchPolicy(shard.prefetch, shard.prefetch),
        "offload_policy": CPUOffloadPolicy() if shard.offload else OffloadPolicy(),
        "comm_policy": CommPolicy(shard.transport),
        "policy": shard.wrapping,
    }


def _cut_of(grid: RankGrid, placement: AnyCut, parameter: nn.Parameter) -> AnyCut | OnMesh:
    """Returns how a parameter of a block is sharded: experts, of which each rank of ep has others, over fewer ranks."""
    if parameter.dim() != 3:  # only experts' weights are stacked
        return None
    if placement is not None:
        return placement if grid.ep is None else OnMesh(grid.experts, placement)
    num_experts, mesh = parameter.shape[0] // grid.axes.ep, grid.experts
    # Within experts where there are too few of them: a rank without one would pad its shard up to the others'.
    cut = Shard(0 if num_experts % mesh.size(mesh.ndim - 1) == 0 else 1)
    return cut if grid.ep is None else OnMesh(mesh, cut)


def blocks_of(model: Decoder | HuggingFace) -> Sequence[nn.Module]:
    """Returns the blocks, those of this stage."""
    return _blocks(model) if isinstance(model, Decoder) else model.blocks


def _blocks(model: Decoder) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]
