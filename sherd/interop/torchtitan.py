"""sherd in place of torch's FSDP2 in torchtitan's trainings of Llama.

`parallelize` is a `parallelize_fn` for torchtitan's `ModelSpec`. It calls torchtitan's own functions for context and
tensor parallelism, activation checkpointing and compilation. Checkpoints, metrics and the loop are torchtitan's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sherd.api.auto_shard import check_arguments
from sherd.api.fully_shard import Options, fully_shard
from sherd.api.module import FSDPModule
from sherd.errors import PolicyError, UnsupportedError
from sherd.interop.identity import lend_identity
from sherd.interop.packages import require_tried
from sherd.layout.runs import RunPlacement
from sherd.policy import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

if TYPE_CHECKING:
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
    from torchtitan.models.common.decoder import Decoder
    from typing_extensions import Unpack

__all__ = ["parallelize"]

TRIED = "0.3"
"""The version of torchtitan that was tried."""


def parallelize(
    model: Decoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig | None,
    dump_folder: str,
    **options: Unpack[Options],
) -> Decoder:
    """Make a decoder of torchtitan parallel, sharded by sherd, with the units that torchtitan itself has.

        config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=parallelize)

    Args:
        model: a dense decoder, such as torchtitan's Llama 3, best on the meta device.
        parallel_dims: torchtitan's meshes.
        training: its dtypes, and whether parameters rest on the CPU.
        parallelism: its `fsdp_reshard_after_forward`, and its `spmd_backend`.
        compile_config: whether each block is compiled.
        ac_config: what is computed again in backward. None: nothing.
        dump_folder: where activation checkpointing may write.
        options: arguments of `fully_shard` over torchtitan's, as in `functools.partial(parallelize, mp_policy=...)`.

    Returns:
        `model`, sharded in place.

    Raises:
        UnsupportedError: torchtitan, or what a config asks for, was not tried: pipelines, experts, symmetric memory.
        PolicyError: `parallelism.spmd_backend` is `full_dtensor`, or `placement` cuts tensors into runs.
        PolicyTypeError: an argument that `fully_shard` does not take.
    """
    require_tried("torchtitan", TRIED, "sherd.interop.torchtitan.parallelize")
    check_arguments(options, "parallelize")
    _require_served(parallel_dims, parallelism, options)
    is_typed = parallelism.spmd_backend == "spmd_types"
    if is_typed:
        from torchtitan.distributed.full_dtensor import validate_config

        validate_config(parallel_dims, model)
    elif parallel_dims.cp_enabled:
        from torchtitan.distributed.context_parallel import apply_cp_to_forward

        attentions = [block.attention.inner_attention for block in model.layers.values()]
        apply_cp_to_forward(attentions, parallel_dims.get_mesh("cp"))
    if is_typed or parallel_dims.tp_enabled:
        model.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        from torchtitan.distributed.compile import apply_compile

        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    _shard(model, parallelism.fsdp_reshard_after_forward, {**_of_configs(parallel_dims, training), **options})
    return model


def _require_served(parallel_dims: ParallelDims, parallelism: ParallelismConfig, options: Options) -> None:
    if parallelism.spmd_backend not in ("partial_dtensor", "spmd_types"):
        raise PolicyError(
            f"parallelism.spmd_backend={parallelism.spmd_backend!r}: sherd shards plain parameters, typed ones and "
            "DTensors over tp; write --parallelism.spmd_backend spmd_types"
        )
    for name, is_asked in (
        ("pipeline_parallel_degree", parallel_dims.pp_enabled),
        ("expert_parallel_degree", parallel_dims.ep_enabled),
        ("enable_fsdp_symm_mem", parallelism.enable_fsdp_symm_mem),
    ):
        if is_asked:
            raise UnsupportedError(f"parallelism.{name}: sherd was not tried with it in torchtitan; leave it out")
    if isinstance(options.get("placement"), RunPlacement):
        raise PolicyError(
            f"placement={options['placement']}: torchtitan draws weights by operations that runs do not have; "
            "leave placement out, or write Shard(dim)"
        )


def _of_configs(parallel_dims: ParallelDims, training: TrainingConfig) -> Options:
    from torchtitan.config import TORCH_DTYPE_MAP

    if parallel_dims.spmd_backend == "spmd_types":
        from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh

        mesh, dims = resolve_fsdp_mesh(parallel_dims)
        where: Options = {"mesh": mesh, "dp_mesh_dims": dims and DataParallelMeshDims(dims.shard, dims.replicate)}
    else:
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        where = {"mesh": parallel_dims.get_mesh(names)}
    return {
        **where,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy() if training.enable_cpu_offload else OffloadPolicy(),
    }


def _shard(model: Decoder, reshards: str, options: Options) -> None:
    """Shard the embedding, the blocks, and the last norm with the head, each as a unit.

    torchtitan divides the loss by the tokens of all ranks, so gradients are added up and not averaged.
    """
    frees: Options = {"reshard_after_forward": reshards != "never", **options}
    keeps: Options = {"reshard_after_forward": reshards == "always", **options}
    tail = [model.norm, model.lm_head]
    if model.enable_weight_tying:
        tail = [model.tok_embeddings, *tail]
    else:
        fully_shard(model.tok_embeddings, **frees)
    fully_shard(tail, **keeps)
    for block in model.layers.values():
        fully_shard(block, **frees)
    fully_shard(model, **options)
    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
        unit.set_gradient_divide_factor(1.0)
    lend_identity(model, {type(model.lm_head)})  # torchtitan's loss in chunks asks whether it is torch's FSDPModule
