"""Settings: a small model and all that a user chooses for it, as one frozen record of plain values.

Named cases and random ones are both `Setting`s; tests/gpu/setting_runs.py trains them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

FRONTS = ("fully_shard", "wrapper", "flat wrapper")
"""A setting may also have "FSDP2" for one: torch's own, the control of the simulated device."""
PLACEMENTS = ("Shard(0)", "Shard(1)", "Flat", "Blocks", "Owned", "mixed", "replicated")
STRATEGIES = {
    1: ("zero3", "zero2", "zero1", "ddp"),
    2: ("hsdp", "hfsdp", "hsdp_zero2", "zero1_across_zero2_within", "zero3"),
}
"""By the number of axes of the mesh, as `fully_shard(placements=...)` names them; the default first."""
ALL_STRATEGIES = tuple(dict.fromkeys(each for names in STRATEGIES.values() for each in names))
WRAPPER_STRATEGIES = {
    "zero3": "FULL_SHARD",
    "zero2": "SHARD_GRAD_OP",
    "ddp": "NO_SHARD",
    "hsdp": "HYBRID_SHARD",
    "hsdp_zero2": "_HYBRID_SHARD_ZERO2",
}
MESHES = ((2,), (4,), (2, 2))


@dataclass(frozen=True)
class Setting:
    """A model, and how it is sharded and trained. The defaults are sherd's own on two ranks."""

    # The model. Odd widths cut unevenly.
    width: int = 16
    num_blocks: int = 2
    tied: bool = False
    frozen: str = ""
    """"block": the first block; "norms": the blocks' norms."""
    ignored: bool = False
    """The last norm is left alone, and frozen, as its gradient would be each rank's own."""
    scalar: bool = False
    """Each block has a parameter without dimensions."""
    recompute: str = ""
    """"kept graph" or "reentrant"."""

    # How it is sharded.
    front: str = "fully_shard"
    built: str = "device"
    """Where it is before it is sharded: "device", "cpu" or "meta"."""
    placement: str = "Shard(0)"
    mesh: tuple[int, ...] = (2,)
    strategy: str = "zero3"
    reshard: bool | int | None = None
    param_dtype: str = ""
    reduce_dtype: str = ""
    offload: str = ""
    """"pinned" or "pageable"."""
    forward_depth: int = 1
    backward_depth: int = 1
    after_backward: bool = False
    transport: str = "auto"
    part_bytes: int | None = None
    """Units are cut into parts of so many bytes, as large ones are by default; 1: each parameter is one."""
    reduction: str = ""
    """The order of sums and the dtype that travels, each if it is said: "ranks", "any bfloat16", "any int8"."""
    encoded: bool = False
    """Parameters travel in 8 bits."""
    own_collectives: bool = False
    group_memory: bool = False
    """What collectives read and write is memory of the process group."""
    reduce_buffers: int | None = None
    """So many reductions at a time."""
    hook: bool = False
    """An all-reduce hook on a stream of its own."""

    # How it is trained.
    optimizer: str = "sgd"
    micro_batches: int = 1
    accumulation: str = ""
    """How micro-batches are added up: every one reduced (""), "no_sync", inside `sherd.accumulate`, or "replicas once":
    all reduced over the shard axis, and only the last one over the replicas."""
    max_norm: float | None = None
    scaled: bool = False
    between: str = ""
    """Between two steps: "unsharded", "written", "eval" or "state dict"."""
    follows_event: bool = False
    """Gathers wait for the optimizer's event, not for all of compute."""
    interrupted: bool = False
    """A backward raises half-way, before the first step."""
    pauses: int = 1
    """Seeds the pauses of streams; 0: they are left as they are."""

    @property
    def num_ranks(self) -> int:
        """Returns the size of the mesh."""
        return math.prod(self.mesh)

    @property
    def is_wrapped(self) -> bool:
        """Returns whether `FullyShardedDataParallel` shards it."""
        return self.front in ("wrapper", "flat wrapper")

    @property
    def keeps_parameters(self) -> bool:
        """Returns whether parameters are never freed."""
        return self.strategy in ("ddp", "zero1", "zero2", "hsdp_zero2", "zero1_across_zero2_within")


def shown(setting: Setting) -> str:
    """Returns what differs from the defaults, to be pasted into a test."""
    default = Setting()
    given = {name: value for name, value in asdict(setting).items() if value != getattr(default, name)}
    return f"Setting({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def legal(setting: Setting) -> Setting:
    """Returns the nearest setting that sherd documents as possible."""
    changes: dict[str, object] = {"strategy": _strategy(setting)}
    if setting.is_wrapped:
        changes |= _of_the_wrapper(setting)
    elif (
        setting.placement not in ("Shard(0)", "Flat")
        or changes["strategy"] not in ("zero3", "hsdp")
        or setting.frozen == "norms"
    ):
        # They want parts of equal length on all ranks, one axis, and one kind of parameters in a unit.
        changes["own_collectives"] = False
    setting = replace(setting, **changes)  # type: ignore[arg-type]
    return replace(setting, **_of_arithmetic(setting))  # type: ignore[arg-type]


def _strategy(setting: Setting) -> str:
    """Returns the strategy, or the one in its place among those that the mesh and the front end have."""
    names = [each for each in STRATEGIES[len(setting.mesh)] if not setting.is_wrapped or each in WRAPPER_STRATEGIES]
    if setting.is_wrapped and len(setting.mesh) == 2:
        names.remove("zero3")
    return setting.strategy if setting.strategy in names else names[ALL_STRATEGIES.index(setting.strategy) % len(names)]


def _of_the_wrapper(setting: Setting) -> dict[str, object]:
    """The wrapper has one placement, and says the rest by its strategy."""
    changes: dict[str, object] = {"placement": "Flat", "own_collectives": False, "reshard": None, "transport": "auto"}
    changes["part_bytes"] = None
    changes |= {"forward_depth": min(setting.forward_depth, 1), "backward_depth": min(setting.backward_depth, 1)}
    if setting.front == "flat wrapper" and setting.frozen == "norms":
        changes["frozen"] = "block"  # a flat parameter is frozen as a whole
    if setting.built == "meta":
        changes["built"] = "cpu"
    if setting.optimizer == "flattened":
        changes["optimizer"] = "sgd"
    return changes


def _of_arithmetic(setting: Setting) -> dict[str, object]:
    changes: dict[str, object] = {}
    if setting.keeps_parameters:
        changes["reshard"] = None
    elif type(setting.reshard) is int and setting.mesh[-1] % setting.reshard:
        changes["reshard"] = True
    if setting.param_dtype == "float16":
        changes["scaled"] = True
    if setting.own_collectives or setting.is_wrapped:
        changes["scalar"] = False
    if setting.own_collectives:
        changes["transport"] = "auto"
    if setting.keeps_parameters or setting.own_collectives:
        changes["encoded"] = False
    if setting.reduction.endswith("int8"):
        changes["own_collectives"] = False
    if setting.reduction.startswith("ranks"):
        changes["encoded"] = False
        changes |= {"own_collectives": False, "hook": False}
        changes["accumulation"] = "accumulate" if setting.accumulation == "no_sync" else setting.accumulation
    if setting.micro_batches == 1:
        changes["accumulation"] = ""
    if not setting.param_dtype and setting.reduce_dtype == "float32":
        changes["reduce_dtype"] = ""
    return changes
