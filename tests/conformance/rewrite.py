"""PyTorch's tests of FSDP, rewritten in memory for the CPU, gloo and sherd. Assertions are not touched.

"cuda", "cuda:N", x.cuda(), device indices    the CPU; "nccl" becomes "gloo"
torch.cuda                                    `cuda`: streams and events do nothing, memory statistics skip the test
names of torch.distributed.fsdp               sherd's (`ours.get`)
skip_if_lt_x_gpu(n)                           the number of ranks that the test gets
"offloaded, then moved to the device"         no error, as both are the CPU: the check goes on to the parameters
"""

import ast
import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import re
import sys
import time
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal import common_distributed, common_utils

from tests.conformance import ours

PUBLIC = frozenset(
    """fully_shard FSDPModule UnshardHandle MixedPrecisionPolicy OffloadPolicy CPUOffloadPolicy
    register_fsdp_forward_method share_comm_ctx DataParallelMeshDims FullyShardedDataParallel ShardingStrategy
    MixedPrecision CPUOffload BackwardPrefetch StateDictType StateDictConfig FullStateDictConfig LocalStateDictConfig
    ShardedStateDictConfig OptimStateDictConfig FullOptimStateDictConfig LocalOptimStateDictConfig
    ShardedOptimStateDictConfig StateDictSettings OptimStateKeyType ShardedGradScaler always_wrap_policy
    lambda_auto_wrap_policy CustomPolicy transformer_auto_wrap_policy size_based_auto_wrap_policy enable_wrap wrap
    ModuleWrapPolicy""".split()  # noqa: SIM905
)
FSDP = re.compile(r"^torch\.distributed\.(fsdp|_composable\.fsdp)(\.|$)")
KIT = ("torch.testing._internal.common_fsdp", "torch.testing._internal.distributed._shard.sharded_tensor")
"""Modules of the installed torch that are rewritten, too."""

num_ranks = 2
"""The number of devices that the running test sees."""


# The names that rewritten text uses


def _skipped(what: str) -> Callable[..., None]:
    def skip(*args: object, **kwargs: object) -> None:
        raise unittest.SkipTest(f"nothing on a CPU: {what}")

    return skip


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def _no_context(*args: object, **kwargs: object) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


class Event:
    """An event that was always reached."""

    record = wait = synchronize = _nothing
    elapsed_time = _skipped("times of events")

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def query(self) -> bool:
        return True


class Stream(Event):
    """A stream that is always done."""

    wait_stream = wait_event = record_event = _nothing


class Cuda(types.SimpleNamespace):
    """What a test sees as `torch.cuda`."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if "memory" in name:
            return _skipped(name)
        raise AttributeError(name)


def cuda() -> Cuda:
    """Returns `torch.cuda` for tests."""
    stream, cpu = Stream(), torch.device("cpu")
    return Cuda(
        **dict.fromkeys(("set_device", "set_device_index", "synchronize", "empty_cache"), _nothing),
        **dict.fromkeys(("stream", "device"), _no_context),
        **dict.fromkeys(("current_device", "current_accelerator"), lambda *args, **kwargs: cpu),
        **dict.fromkeys(("current_stream", "default_stream"), lambda *args: stream),
        is_available=lambda: True,
        device_count=lambda: num_ranks,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=lambda *args: torch.get_rng_state(),
        set_rng_state=lambda state, *args: torch.set_rng_state(state),
        Stream=Stream,
        Event=Event,
        _sleep=lambda cycles: time.sleep(min(int(cycles) / 1e6, 0.02)),
        get_device_capability=lambda *args: (9, 0),
        is_bf16_supported=lambda: True,
        amp=types.SimpleNamespace(
            autocast=functools.partial(torch.amp.autocast, "cpu"),
            GradScaler=functools.partial(torch.amp.GradScaler, "cpu"),
        ),
        nccl=types.SimpleNamespace(version=lambda: (99, 0)),
    )


def on_cpu(device: Any) -> Any:
    """Returns the CPU for a device that is given by its index, anything else as it is."""
    is_index = isinstance(device, int) and not isinstance(device, bool)
    return torch.device("cpu") if is_index or (isinstance(device, torch.device) and device.type == "cpu") else device


def index_of(device: torch.device) -> int | None:
    """Returns `device.index`: each rank stands for the device of its number."""
    return dist.get_rank() if device.type == "cpu" else device.index


def _divide_factors(
    reduce_group: dist.ProcessGroup, all_reduce_group: dist.ProcessGroup | None, dtype: torch.dtype
) -> tuple[float | None, float | None]:
    """Returns by what gradients are divided before and after the sum, as torch documents it."""
    if dtype in (torch.float32, torch.bfloat16):
        return None, None
    size = reduce_group.size() * (all_reduce_group.size() if all_reduce_group is not None else 1)
    before = 1
    while size % before == 0 and size / before > before:
        before *= 2
    return float(before), size / before


def _clean_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def _kept_after_forward() -> list[Any]:
    strategies = ours.get("ShardingStrategy")
    return [strategies[name] for name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2") if name in strategies.__members__]


HELPERS: dict[str, Callable[[], Any]] = {  # private names that tests use as helpers alone
    "clean_tensor_name": lambda: _clean_name,
    "_get_gradient_divide_factors": lambda: _divide_factors,
    "NO_RESHARD_AFTER_FORWARD_STRATEGIES": _kept_after_forward,
}
IN_TESTS = {"TEST_CUDA": True, "TEST_MULTIGPU": True, "amp_definitely_not_available": lambda: False}
RENAMED = {"test_compiled_fsdp": "compiled_fsdp_test"}


def imported(module: str, name: str, in_test: bool) -> Any:
    """Returns what `from module import name` gives a test."""
    if in_test and name in IN_TESTS:
        return IN_TESTS[name]
    if name in HELPERS:
        return HELPERS[name]()
    with contextlib.suppress(ImportError):
        found = importlib.import_module(module)
        here = RENAMED.get(name, name)
        return getattr(found, here) if hasattr(found, here) else importlib.import_module(f"{module}.{name}")
    return ours.Missing(f"{module}.{name}")


# The text


def _words(text: str) -> str:
    if text in ("nccl", "cpu:gloo,cuda:nccl"):
        return "gloo"
    return re.sub(r"(?<![\w.])cuda(:\d+)?(?![\w.])", "cpu", text.replace("cuda:nccl", "cpu:gloo"))


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _device(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Constant):
        return ast.Constant("cpu") if type(node.value) is int else node
    return _call("__on_cpu__", node)


class Rewriter(ast.NodeTransformer):
    """Rewrites a test (`in_test`), or a module of the kit."""

    def __init__(self, in_test: bool) -> None:
        self.in_test = in_test

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        module = node.module or ""
        if node.level or not re.match(r"torch(\.|$)", module):
            return node
        found = []
        for each in node.names:
            is_ours = FSDP.match(module) and each.name in PUBLIC
            value = (
                f"__ours__({each.name!r})" if is_ours else f"__imported__({module!r}, {each.name!r}, {self.in_test})"
            )
            found += ast.parse(f"{each.asname or each.name} = {value}").body
        return found

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        path = ast.unparse(node)
        if path == "torch.version.cuda":
            return ast.Constant("12.0")
        if path == "self.device" and self.in_test and isinstance(node.ctx, ast.Load):
            return _device(node)
        if path in ("torch.cuda", "torch.accelerator"):
            return ast.Name("__cuda__", ast.Load())
        if node.attr == "index" and isinstance(node.value, ast.Attribute) and node.value.attr == "device":
            return _call("__index_of__", self.visit(node.value))
        module = re.sub(r"^dist\.", "torch.distributed.", ast.unparse(node.value))
        if node.attr in PUBLIC and isinstance(node.ctx, ast.Load) and FSDP.match(module):
            return _call("__ours__", ast.Constant(node.attr))
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(_words(node.value)) if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        values: list[ast.expr] = []
        is_index = False
        for each in node.values:
            if not (is_index and isinstance(each, ast.FormattedValue)):
                if isinstance(each, ast.Constant):
                    is_index = bool(re.search(r"(?<![\w.])cuda:$", each.value))
                    each = ast.Constant(_words(each.value[:-1] if is_index else each.value))
                else:
                    each = self.visit(each)
                values.append(each)
        node.values = values
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        self.generic_visit(node)
        pairs = [(key, value, getattr(key, "value", None)) for key, value in zip(node.keys, node.values, strict=True)]
        pairs = [pair for pair in pairs if pair[2] not in ("device_ids", "output_device")]
        node.keys = [key for key, _, _ in pairs]
        node.values = [_device(value) if name in ("device", "device_id") else value for _, value, name in pairs]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if not self.in_test and ast.unparse(node.targets[0]) == "expects_device_error":
            node.value = ast.Constant(False)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if isinstance(node.func, ast.Attribute) and name == "cuda":
            return ast.Call(ast.Attribute(node.func.value, "cpu", ast.Load()), [], [])
        left_out = ("device_ids", "output_device", *(("device_id",) if name == "init_process_group" else ()))
        node.keywords = [each for each in node.keywords if each.arg not in left_out]
        if ast.unparse(node.func) == "torch.device" and node.args:
            return _call("__device__", *node.args)
        if name == "to" and node.args:
            node.args[0] = _device(node.args[0])
        for each in node.keywords:
            if each.arg in ("device", "device_id", "to_device"):
                each.value = _device(each.value)
        # Scalers turn themselves off on "cuda" where there is none.
        if name in ("GradScaler", "ShardedGradScaler") and not node.args and "device" not in map(_arg, node.keywords):
            node.keywords.insert(0, ast.keyword("device", ast.Constant("cpu")))
        return node


def _arg(keyword: ast.keyword) -> str | None:
    return keyword.arg


def execute(module: types.ModuleType, path: str, in_test: bool) -> None:
    """Run the file at `path`, rewritten, as `module`."""
    tree = ast.fix_missing_locations(Rewriter(in_test).visit(ast.parse(Path(path).read_text(), path)))
    module.__file__ = path
    vars(module).update(
        __ours__=ours.get,
        __imported__=imported,
        __cuda__=cuda(),
        __on_cpu__=on_cpu,
        __index_of__=index_of,
        __device__=lambda device, *index: torch.device(on_cpu(device)),
    )
    exec(compile(tree, path, "exec", dont_inherit=True), vars(module))


class Kit(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules of the kit rewritten."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in KIT:
            return None
        others = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        found = next(spec for spec in others if spec is not None)
        is_package = found.submodule_search_locations is not None
        spec = importlib.util.spec_from_loader(name, self, origin=found.origin, is_package=is_package)
        assert spec is not None, "it was found"
        spec.submodule_search_locations, spec.loader_state = found.submodule_search_locations, found.origin
        return spec

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None, "made by `find_spec`"
        execute(module, module.__spec__.loader_state, in_test=False)


# The process


def install() -> None:
    """Prepare this process: the test kit, the CPU as the device, and sherd."""

    def ranks_of(number: int, **kwargs: object) -> Callable[[Any], Any]:
        def with_number(test: Any) -> Any:
            test.num_ranks = number
            return test

        return with_number

    common_distributed.skip_if_lt_x_gpu = ranks_of
    common_distributed.skip_if_no_gpu = lambda test: test
    for name in ("requires_nccl", "requires_nccl_version", "requires_accelerator_dist_backend"):
        setattr(common_distributed, name, lambda *args, **kwargs: lambda test: test)
    common_utils.get_cycles_per_ms = lambda: 1000.0
    # Ranks are forked, which imports nothing anew.
    context = torch.multiprocessing.get_context("fork")
    common_distributed.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(context.Process)
    _make_cpu_the_device()
    _shard_cpu_attention()
    sys.meta_path.insert(0, Kit())
    ours.install()
    _one_name_per_collective()


def _make_cpu_the_device() -> None:
    stream = Stream()
    torch.cpu.device_count = lambda: num_ranks
    torch.accelerator.current_device_index = lambda: "cpu"
    torch.cpu.Stream, torch.cpu.Event = Stream, Event
    torch.cpu.current_stream = lambda *args: stream
    torch.cpu.stream = _no_context
    torch.cpu.reset_peak_memory_stats = _skipped("memory statistics")
    torch.cpu.memory_summary = lambda *args, **kwargs: ""
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = _nothing


def _shard_cpu_attention() -> None:
    """Give the CPU's attention the rules that DTensor has for CUDA's: cut by batch or by head."""
    from torch.distributed.tensor.experimental import register_sharding

    ways = Replicate(), Shard(0), Shard(1)

    def forward(query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, **more: Any) -> Any:
        return [([way] * 2, [way] * 3 + [None] * 2) for way in ways]

    def backward(*args: Any, **more: Any) -> Any:
        return [([way] * 3, [way] * 6 + [None] * 2) for way in ways]

    register_sharding(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)(forward)
    register_sharding(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(backward)


def _one_name_per_collective() -> None:
    """Route collectives with two names through the older one, which the tests replace to observe them."""
    from torch.testing._internal import common_fsdp

    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    ):
        if hasattr(dist, new):
            setattr(dist, new, lambda *args, old=old, **kwargs: getattr(dist, old)(*args, **kwargs))

    def patch_of(name: str) -> Any:
        @contextlib.contextmanager
        def patched(new: Any) -> Iterator[None]:
            before = getattr(dist, name)
            dist.barrier()
            setattr(dist, name, new)
            try:
                yield
            finally:
                dist.barrier()
                setattr(dist, name, before)

        return patched

    common_fsdp.patch_all_gather = patch_of("all_gather_into_tensor")
    common_fsdp.patch_reduce_scatter = patch_of("reduce_scatter_tensor")


def loaded(tree: Path, file: str) -> types.ModuleType:
    """Returns the tests of `file` below `tree/test`, rewritten and imported."""
    path = tree / "test" / file
    module = types.ModuleType(path.stem)
    sys.modules[path.stem] = module
    sys.path += [str(path.parent), str(tree / "test")]
    execute(module, str(path), in_test=True)
    return module
