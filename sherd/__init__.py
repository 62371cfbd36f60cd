"""Fully sharded data parallel training for PyTorch.

The names mirror `torch.distributed.fsdp`, so that a program is ported by a changed import.

Public are the names in `__all__`, and the modules `sherd.errors`, `sherd.wrap`, `sherd.comm_hooks` and `sherd.interop`;
the others may change without notice.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sherd.api.accumulate import accumulate as accumulate
    from sherd.api.auto_shard import auto_shard as auto_shard
    from sherd.api.checkpoints import Saving as Saving
    from sherd.api.checkpoints import async_save as async_save
    from sherd.api.checkpoints import load as load
    from sherd.api.checkpoints import save as save
    from sherd.api.ema import Ema as Ema
    from sherd.api.fully_shard import fully_shard as fully_shard
    from sherd.api.fully_shard import replicate as replicate
    from sherd.api.module import FSDPModule as FSDPModule
    from sherd.api.module import GradientReductionHandle as GradientReductionHandle
    from sherd.api.module import UnshardHandle as UnshardHandle
    from sherd.api.module import register_fsdp_forward_method as register_fsdp_forward_method
    from sherd.api.module import share_comm_ctx as share_comm_ctx
    from sherd.api.offload_activations import offload_activations as offload_activations
    from sherd.api.placements import OnMesh as OnMesh
    from sherd.api.placements import Placements as Placements
    from sherd.api.recompute import selective_contexts as selective_contexts
    from sherd.api.refreshing import Refreshed as Refreshed
    from sherd.api.refreshing import refresh as refresh
    from sherd.api.save_pretrained import save_pretrained as save_pretrained
    from sherd.api.tiles import chunked_cross_entropy as chunked_cross_entropy
    from sherd.api.tiles import tiled as tiled
    from sherd.api.unsharded import unsharded as unsharded
    from sherd.api.weights_out import iter_full_parameters as iter_full_parameters
    from sherd.backward_steps import StepsInBackward as StepsInBackward
    from sherd.backward_steps import step_in_backward as step_in_backward
    from sherd.checkpoint.restoring import Restored as Restored
    from sherd.clip import clip_grad_norm_ as clip_grad_norm_
    from sherd.codecs import codec as codec
    from sherd.deltas.delta import WeightDelta as WeightDelta
    from sherd.deltas.delta import WeightReceiver as WeightReceiver
    from sherd.deltas.marks import WeightMark as WeightMark
    from sherd.engine import FlatParameter as FlatParameter
    from sherd.errors import SherdError as SherdError
    from sherd.fsdp1.arguments import BackwardPrefetch as BackwardPrefetch
    from sherd.fsdp1.arguments import CPUOffload as CPUOffload
    from sherd.fsdp1.arguments import MixedPrecision as MixedPrecision
    from sherd.fsdp1.arguments import ShardingStrategy as ShardingStrategy
    from sherd.fsdp1.extensions import DTensorExtensions as DTensorExtensions
    from sherd.fsdp1.extensions import FSDPExtensions as FSDPExtensions
    from sherd.fsdp1.state_dict_type import FullOptimStateDictConfig as FullOptimStateDictConfig
    from sherd.fsdp1.state_dict_type import FullStateDictConfig as FullStateDictConfig
    from sherd.fsdp1.state_dict_type import LocalOptimStateDictConfig as LocalOptimStateDictConfig
    from sherd.fsdp1.state_dict_type import LocalStateDictConfig as LocalStateDictConfig
    from sherd.fsdp1.state_dict_type import OptimStateDictConfig as OptimStateDictConfig
    from sherd.fsdp1.state_dict_type import OptimStateKeyType as OptimStateKeyType
    from sherd.fsdp1.state_dict_type import ShardedForm as ShardedForm
    from sherd.fsdp1.state_dict_type import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
    from sherd.fsdp1.state_dict_type import ShardedStateDictConfig as ShardedStateDictConfig
    from sherd.fsdp1.state_dict_type import StateDictConfig as StateDictConfig
    from sherd.fsdp1.state_dict_type import StateDictSettings as StateDictSettings
    from sherd.fsdp1.state_dict_type import StateDictType as StateDictType
    from sherd.fsdp1.wrapper import FullyShardedDataParallel as FullyShardedDataParallel
    from sherd.grad_scaler import ShardedGradScaler as ShardedGradScaler
    from sherd.layout.runs import Blocks as Blocks
    from sherd.layout.runs import Flat as Flat
    from sherd.layout.runs import Owned as Owned
    from sherd.memory.report import memory_report as memory_report
    from sherd.memory.report import track_memory as track_memory
    from sherd.optim import flatten_optimizer as flatten_optimizer
    from sherd.optim.matrix import MatrixOptimizer as MatrixOptimizer
    from sherd.optim.muon import Muon as Muon
    from sherd.policy import AllGather as AllGather
    from sherd.policy import Codec as Codec
    from sherd.policy import Comm as Comm
    from sherd.policy import CommPolicy as CommPolicy
    from sherd.policy import CPUOffloadPolicy as CPUOffloadPolicy
    from sherd.policy import DataParallelMeshDims as DataParallelMeshDims
    from sherd.policy import Disk as Disk
    from sherd.policy import MixedPrecisionPolicy as MixedPrecisionPolicy
    from sherd.policy import OffloadPolicy as OffloadPolicy
    from sherd.policy import PrefetchPolicy as PrefetchPolicy
    from sherd.policy import ReduceScatter as ReduceScatter
    from sherd.policy import Reduction as Reduction
    from sherd.steps_on_thread import StepsOnThread as StepsOnThread
    from sherd.steps_on_thread import step_on_thread as step_on_thread
    from sherd.tensor.ragged import RaggedDTensor as RaggedDTensor
    from sherd.tools.migrate import explain_migration as explain_migration
    from sherd.tools.plan.explaining import explain_memory as explain_memory
    from sherd.tools.plan.plan import Plan as Plan
    from sherd.tools.plan.plan import plan as plan
    from sherd.tools.verify.capture import CaptureReport as CaptureReport
    from sherd.tools.verify.capture import capturable as capturable
    from sherd.tools.verify.equivalence import verify_equivalence as verify_equivalence
    from sherd.tools.verify.report import EquivalenceReport as EquivalenceReport
    from sherd.tools.wire_report import CommReport as CommReport
    from sherd.tools.wire_report import comm_report as comm_report
    from sherd.uneven.guarded_step import step as step
    from sherd.uneven.joining import join as join

__version__ = "0.2.0"

_HOMES = {
    "AllGather": "sherd.policy",
    "BackwardPrefetch": "sherd.fsdp1.arguments",
    "Blocks": "sherd.layout.runs",
    "CPUOffload": "sherd.fsdp1.arguments",
    "CPUOffloadPolicy": "sherd.policy",
    "CaptureReport": "sherd.tools.verify.capture",
    "Codec": "sherd.policy",
    "CommReport": "sherd.tools.wire_report",
    "Comm": "sherd.policy",
    "CommPolicy": "sherd.policy",
    "DTensorExtensions": "sherd.fsdp1.extensions",
    "DataParallelMeshDims": "sherd.policy",
    "Disk": "sherd.policy",
    "Ema": "sherd.api.ema",
    "EquivalenceReport": "sherd.tools.verify.report",
    "FSDPExtensions": "sherd.fsdp1.extensions",
    "FSDPModule": "sherd.api.module",
    "Flat": "sherd.layout.runs",
    "FlatParameter": "sherd.engine",
    "FullOptimStateDictConfig": "sherd.fsdp1.state_dict_type",
    "FullStateDictConfig": "sherd.fsdp1.state_dict_type",
    "FullyShardedDataParallel": "sherd.fsdp1.wrapper",
    "GradientReductionHandle": "sherd.api.module",
    "LocalOptimStateDictConfig": "sherd.fsdp1.state_dict_type",
    "LocalStateDictConfig": "sherd.fsdp1.state_dict_type",
    "MatrixOptimizer": "sherd.optim.matrix",
    "MixedPrecision": "sherd.fsdp1.arguments",
    "MixedPrecisionPolicy": "sherd.policy",
    "Muon": "sherd.optim.muon",
    "OffloadPolicy": "sherd.policy",
    "OnMesh": "sherd.api.placements",
    "OptimStateDictConfig": "sherd.fsdp1.state_dict_type",
    "OptimStateKeyType": "sherd.fsdp1.state_dict_type",
    "Owned": "sherd.layout.runs",
    "Placements": "sherd.api.placements",
    "Plan": "sherd.tools.plan.plan",
    "PrefetchPolicy": "sherd.policy",
    "RaggedDTensor": "sherd.tensor.ragged",
    "ReduceScatter": "sherd.policy",
    "Reduction": "sherd.policy",
    "Refreshed": "sherd.api.refreshing",
    "Restored": "sherd.checkpoint.restoring",
    "Saving": "sherd.api.checkpoints",
    "ShardedForm": "sherd.fsdp1.state_dict_type",
    "ShardedGradScaler": "sherd.grad_scaler",
    "ShardedOptimStateDictConfig": "sherd.fsdp1.state_dict_type",
    "ShardedStateDictConfig": "sherd.fsdp1.state_dict_type",
    "ShardingStrategy": "sherd.fsdp1.arguments",
    "SherdError": "sherd.errors",
    "StateDictConfig": "sherd.fsdp1.state_dict_type",
    "StateDictSettings": "sherd.fsdp1.state_dict_type",
    "StateDictType": "sherd.fsdp1.state_dict_type",
    "StepsInBackward": "sherd.backward_steps",
    "StepsOnThread": "sherd.steps_on_thread",
    "UnshardHandle": "sherd.api.module",
    "WeightDelta": "sherd.deltas.delta",
    "WeightMark": "sherd.deltas.marks",
    "WeightReceiver": "sherd.deltas.delta",
    "accumulate": "sherd.api.accumulate",
    "async_save": "sherd.api.checkpoints",
    "auto_shard": "sherd.api.auto_shard",
    "capturable": "sherd.tools.verify.capture",
    "chunked_cross_entropy": "sherd.api.tiles",
    "clip_grad_norm_": "sherd.clip",
    "codec": "sherd.codecs",
    "comm_report": "sherd.tools.wire_report",
    "explain_memory": "sherd.tools.plan.explaining",
    "explain_migration": "sherd.tools.migrate",
    "flatten_optimizer": "sherd.optim",
    "fully_shard": "sherd.api.fully_shard",
    "iter_full_parameters": "sherd.api.weights_out",
    "join": "sherd.uneven.joining",
    "load": "sherd.api.checkpoints",
    "memory_report": "sherd.memory.report",
    "offload_activations": "sherd.api.offload_activations",
    "plan": "sherd.tools.plan.plan",
    "refresh": "sherd.api.refreshing",
    "register_fsdp_forward_method": "sherd.api.module",
    "replicate": "sherd.api.fully_shard",
    "save": "sherd.api.checkpoints",
    "save_pretrained": "sherd.api.save_pretrained",
    "selective_contexts": "sherd.api.recompute",
    "share_comm_ctx": "sherd.api.module",
    "step": "sherd.uneven.guarded_step",
    "step_in_backward": "sherd.backward_steps",
    "step_on_thread": "sherd.steps_on_thread",
    "tiled": "sherd.api.tiles",
    "track_memory": "sherd.memory.report",
    "unsharded": "sherd.api.unsharded",
    "verify_equivalence": "sherd.tools.verify.equivalence",
}
"""The public names, and the module that defines each: the imports above once more, as type checkers read those."""

_MODULES = ("errors", "wrap", "comm_hooks", "interop")
"""Public modules, which are attributes too."""

__all__ = sorted([*_HOMES, "__version__"])


# A module is loaded when the first of its names is asked for. A program loads what it uses, and the command `sherd`
# refuses bad words before torch is loaded, which takes seconds (test_a_refusal_loads_no_torch).
def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
    if name in _MODULES:
        return import_module(f"sherd.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names, without the modules that define them."""
    own = [name for name in globals() if name.startswith("__")]
    return sorted({*_HOMES, *own, "errors", "wrap"})
