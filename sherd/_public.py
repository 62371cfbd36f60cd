"""The public names, and where each is defined. `import sherd` offers them all, and loads this file at the first one."""

from sherd.api.accumulate import accumulate
from sherd.api.auto_shard import auto_shard
from sherd.api.checkpoints import Saving, async_save, load, save
from sherd.api.ema import Ema
from sherd.api.extensions import DTensorExtensions, FSDPExtensions
from sherd.api.fsdp1 import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from sherd.api.fully_shard import fully_shard
from sherd.api.guarded_step import step
from sherd.api.joining import join
from sherd.api.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from sherd.api.placements import OnMesh, Placements
from sherd.api.recompute import selective_contexts
from sherd.api.refreshing import Refreshed, refresh
from sherd.api.replicate import replicate
from sherd.api.save_pretrained import save_pretrained
from sherd.api.state_dict_type import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedForm,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from sherd.api.unsharded import unsharded
from sherd.api.weights_out import iter_full_parameters
from sherd.api.wrapper import FullyShardedDataParallel
from sherd.backward_steps import StepsInBackward, step_in_backward
from sherd.checkpoint.rekeying import OptimStateKeyType
from sherd.checkpoint.restoring import Restored
from sherd.clip import clip_grad_norm_
from sherd.engine.state.flat import FlatParameter
from sherd.errors import SherdError
from sherd.grad_scaler import ShardedGradScaler
from sherd.layout.runs import Blocks, Flat, Owned
from sherd.memory.report import memory_report, track_memory
from sherd.optim import flatten_optimizer
from sherd.planning.explaining import explain_memory
from sherd.planning.plan import Plan, plan
from sherd.policy import (
    AllGather,
    Comm,
    CommPolicy,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    PrefetchPolicy,
    ReduceScatter,
)
from sherd.port.explain import explain_migration
from sherd.tensor.ragged import RaggedDTensor
from sherd.verify.equivalence import verify_equivalence
from sherd.verify.report import EquivalenceReport

__all__ = [
    "AllGather",
    "BackwardPrefetch",
    "Blocks",
    "CPUOffload",
    "CPUOffloadPolicy",
    "Comm",
    "CommPolicy",
    "DTensorExtensions",
    "DataParallelMeshDims",
    "Ema",
    "EquivalenceReport",
    "FSDPExtensions",
    "FSDPModule",
    "Flat",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OnMesh",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "Owned",
    "Placements",
    "Plan",
    "PrefetchPolicy",
    "RaggedDTensor",
    "ReduceScatter",
    "Refreshed",
    "Restored",
    "Saving",
    "ShardedForm",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "SherdError",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StepsInBackward",
    "UnshardHandle",
    "accumulate",
    "async_save",
    "auto_shard",
    "clip_grad_norm_",
    "explain_memory",
    "explain_migration",
    "flatten_optimizer",
    "fully_shard",
    "iter_full_parameters",
    "join",
    "load",
    "memory_report",
    "plan",
    "refresh",
    "register_fsdp_forward_method",
    "replicate",
    "save",
    "save_pretrained",
    "selective_contexts",
    "share_comm_ctx",
    "step",
    "step_in_backward",
    "track_memory",
    "unsharded",
    "verify_equivalence",
]
