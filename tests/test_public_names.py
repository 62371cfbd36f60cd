"""`sherd` offers what `torch.distributed.fsdp` offers, under the same names and signatures."""

import dataclasses
import enum
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_api

import sherd
from tests import public_names
from tests.support.versions import needs_torch, torch_is_older

pytestmark = needs_torch(2, 13, "its names and signatures are those that sherd has")
MIRRORED = {
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "FlatParameter",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
}
# What torch has since 2.15 only; sherd has it with every torch.
SINCE_2_15 = {
    "fully_shard": {"GradientReductionHandle"},
    "MixedPrecisionPolicy": {"param_dtype_override_fn"},
    "FSDPModule": {"finalize_backward", "set_keep_unsharded_storage", "set_manual_backward_finalization"},
}
NEWER = {key: names if torch_is_older(2, 15) else set() for key, names in SINCE_2_15.items()}
# In torch these bases of custom collectives are to be found in a private module.
FROM_A_PRIVATE_MODULE = {"AllGather", "Comm", "ReduceScatter"}
OURS = {
    "Blocks",
    "CaptureReport",
    "Codec",
    "CommPolicy",
    "CommReport",
    "DTensorExtensions",
    "Disk",
    "Ema",
    "EquivalenceReport",
    "FSDPExtensions",
    "Flat",
    "MatrixOptimizer",
    "Muon",
    "OnMesh",
    "Owned",
    "Placements",
    "Plan",
    "PrefetchPolicy",
    "RaggedDTensor",
    "Reduction",
    "ShardedForm",
    "ShardedGradScaler",
    "Refreshed",
    "Restored",
    "Saving",
    "SherdError",
    "WeightDelta",
    "WeightMark",
    "WeightReceiver",
    "__version__",
    "accumulate",
    "async_save",
    "auto_shard",
    "capturable",
    "chunked_cross_entropy",
    "clip_grad_norm_",
    "codec",
    "comm_report",
    "explain_memory",
    "explain_migration",
    "flatten_optimizer",
    "StepsInBackward",
    "StepsOnThread",
    "step",
    "step_in_backward",
    "step_on_thread",
    "iter_full_parameters",
    "join",
    "load",
    "memory_report",
    "offload_activations",
    "plan",
    "refresh",
    "replicate",
    "save",
    "save_pretrained",
    "selective_contexts",
    "tiled",
    "track_memory",
    "unsharded",
    "verify_equivalence",
}
# The older, wrapping front end and its choices.
OF_THE_WRAPPER = {
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
}

# Parameters that sherd adds, all optional.
AXES_OF_OFFLOAD = {"parameters", "gradients", "optimizer", "masters", "activations", "share"}
EXTRA = {
    "FullyShardedDataParallel": {"comm_policy", "extensions", "on_touch", "unmanaged"},
    "fully_shard": {
        "comm_policy",
        "on_touch",
        "placement",
        "placements",
        "prefetch_policy",
        "replicate_below",
        "unmanaged",
    },
    "MixedPrecisionPolicy": {
        "cast_root_forward_inputs",
        "full_precision_in_eval",
        "keep_low_precision_grads",
        *NEWER["MixedPrecisionPolicy"],
    },
    "ShardedStateDictConfig": {"form"},
    "CPUOffloadPolicy": AXES_OF_OFFLOAD,
    "OffloadPolicy": {*AXES_OF_OFFLOAD, "pin_memory"},
}
# Not made by users: one comes with a class for its methods, the other from `unshard`.
MADE_BY_US = {"FSDPModule", "FlatParameter", "GradientReductionHandle", "UnshardHandle"}
ENUMS = {"BackwardPrefetch", "OptimStateKeyType", "ShardingStrategy", "StateDictType"}
# Methods of torch's FSDPModule that a user may call; `_apply` is nn.Module's.
METHODS = sorted(
    name for name, value in vars(torch_fsdp.FSDPModule).items() if inspect.isfunction(value) and name[0] != "_"
)
METHODS_OF_THE_WRAPPER = sorted(
    name
    for name, value in vars(torch_fsdp.FullyShardedDataParallel).items()
    if (inspect.isfunction(value) or isinstance(value, staticmethod)) and name[0] != "_"
)


def parameters(callable_: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(callable_).parameters)


def comparable(value: Any) -> Any:
    """A default as something that is equal when it means the same: torch's policies are not our classes."""
    if isinstance(value, enum.Enum):
        return type(value).__name__, value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value).__name__
        return kind, {name: each for name, each in vars(value).items() if name not in EXTRA.get(kind, set())}
    return value


def assert_takes_all_that(theirs: Any, ours: Any, method: str, extra: Collection[str] = ()) -> None:
    """Each parameter of torch's is there with its name, kind, place and default; the others are `extra`, optional."""
    expected, found = parameters(getattr(theirs, method)), parameters(getattr(ours, method))
    # Those by keyword have no order.
    in_order = [name for name, each in expected.items() if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert list(found)[: len(in_order)] == in_order, method
    assert set(expected) <= set(found), method
    for name, parameter in expected.items():
        assert found[name].kind == parameter.kind, (method, name)
        assert comparable(found[name].default) == comparable(parameter.default), (method, name)
    assert set(found) - set(expected) == set(extra), method
    assert all(found[name].default is not inspect.Parameter.empty for name in extra), method


def test_these_are_the_public_names():
    assert set(sherd.__all__) == MIRRORED | FROM_A_PRIVATE_MODULE | OURS | OF_THE_WRAPPER
    assert sherd.__all__ == sorted(sherd.__all__)
    assert all(hasattr(sherd, name) for name in sherd.__all__)


def test_dir_lists_the_public_names_and_modules_and_no_others():
    shown = {name for name in dir(sherd) if not name.startswith("__")}
    assert shown == set(sherd.__all__) - {"__version__"} | {"errors", "wrap"}
    assert all(hasattr(sherd, name) for name in dir(sherd))


def test_ruff_wants_docstrings_in_every_module_of_public_names():
    names = re.findall(r'"!sherd/{(.*)}.py" = ', (Path(__file__).parents[1] / "pyproject.toml").read_text())[0].split(
        ","
    )
    modules = {inspect.getfile(importlib.import_module(module)) for module in sherd._HOMES.values()}
    package = Path(sherd.__file__).parent
    assert {str(Path(module).relative_to(package).with_suffix("")) for module in modules} <= set(names)
    assert {"__init__", "errors", "policy", "comm_hooks", "train/plain", "interop/*", "wrap/*"} <= set(names)


def test_every_name_of_torchs_composable_front_end_is_here_under_the_same_name():
    assert set(torch_fsdp.__all__) - OF_THE_WRAPPER == MIRRORED - {"FlatParameter"} - NEWER["fully_shard"]
    assert hasattr(torch_fsdp, "FlatParameter")


def test_a_function_or_policy_takes_what_torchs_takes():
    for name in (MIRRORED | OF_THE_WRAPPER) - MADE_BY_US - ENUMS:
        assert_takes_all_that(torch_fsdp, sherd, name, EXTRA.get(name, ()))


def test_an_enum_has_torchs_members():
    for name in ENUMS:
        assert [each.name for each in getattr(sherd, name)] == [each.name for each in getattr(torch_fsdp, name)], name


def test_a_method_of_the_wrapper_takes_what_torchs_takes():
    theirs, ours = torch_fsdp.FullyShardedDataParallel, sherd.FullyShardedDataParallel
    for name in METHODS_OF_THE_WRAPPER:
        is_static = isinstance(vars(theirs)[name], staticmethod)
        assert isinstance(inspect.getattr_static(ours, name), staticmethod) or not is_static, name
        assert_takes_all_that(theirs, ours, name)


def test_torch_has_all_the_methods_that_are_compared_below():
    assert len(METHODS) == 26 - len(NEWER["FSDPModule"])
    assert {"unshard", "reshard", "set_symm_mem_for_comm", "set_post_optim_event"} <= set(METHODS)


def test_a_method_of_a_sharded_module_takes_what_torchs_takes():
    for name in METHODS:
        assert_takes_all_that(torch_fsdp.FSDPModule, sherd.FSDPModule, name)
    for name in {"GradientReductionHandle", "UnshardHandle"} - NEWER["fully_shard"]:
        assert_takes_all_that(getattr(torch_fsdp, name), getattr(sherd, name), "wait")


def test_a_sharded_module_has_no_public_method_of_its_own_beside_torchs_and_nn_modules():
    public = {name for name, value in vars(sherd.FSDPModule).items() if callable(value) and not name.startswith("_")}
    assert public - set(METHODS) == {"zero_grad"} | NEWER["FSDPModule"]


def test_a_collective_written_for_torch_has_the_signature_that_sherd_calls():
    for kind, method in (("AllGather", "__call__"), ("ReduceScatter", "__call__"), ("Comm", "allocate")):
        assert_takes_all_that(getattr(_fsdp_api, kind), getattr(sherd, kind), method)
        assert inspect.isabstract(getattr(sherd, kind)), kind


def test_the_fields_of_policies_are_torchs_in_name_order_and_default():
    for name in ("CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"):
        theirs, ours = (dataclasses.fields(getattr(module, name)) for module in (torch_fsdp, sherd))
        ours = [each for each in ours if each.name not in EXTRA.get(name, set())]
        assert [(each.name, each.default) for each in ours] == [(each.name, each.default) for each in theirs]
        assert getattr(sherd, name).__dataclass_params__.frozen


def test_one_offload_policy_is_a_kind_of_the_other_as_in_torch():
    assert issubclass(sherd.CPUOffloadPolicy, sherd.OffloadPolicy)


@needs_torch(*map(int, public_names.version_read().split(".")[:2]), "somebody has looked at the names of a newer one")
def test_somebody_has_looked_at_each_new_name_and_signature_of_torch():
    # By itself: tests of ranks that are threads have given torch another backend.
    found = subprocess.run([sys.executable, "-m", public_names.__name__], capture_output=True, text=True)
    assert not found.returncode, f"{found.stdout}serve or leave each; then python -m tests.public_names --write"


def test_the_state_of_a_module_is_asked_for_as_in_torch():
    assert callable(torch_fsdp.fully_shard.state)
    assert list(parameters(sherd.fully_shard.state)) == list(parameters(torch_fsdp.fully_shard.state))


def test_every_public_name_says_what_it_is():
    for name in set(sherd.__all__) - {"__version__"}:
        assert inspect.getdoc(getattr(sherd, name)), name
    for name in METHODS:
        assert inspect.getdoc(getattr(sherd.FSDPModule, name)), name
