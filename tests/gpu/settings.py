"""Settings: a small model and all that a user chooses for it, as one frozen record of plain values.

Named cases and random ones are both `Setting`s; tests/gpu/setting_runs.py trains them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace

FRONTS = ("fully_shard", "wrapper", "flat wrapper")
PLACEMENTS = ("Shard(0)", "Shard(1)", "Flat", "Blocks", "Owned", "mixed")
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
    parts: bool = False
    """Every unit is cut into parts, as a large one is by default."""
    own_collectives: bool = False

    # How it is trained.
    optimizer: str = "sgd"
    micro_batches: int = 1
    accumulation: str = ""
    """How micro-batches are added up: every one reduced (""), "no_sync", or inside `sherd.accumulate`."""
    max_norm: float | None = None
    scaled: bool = False
    between: str = ""
    """Between two steps: "unsharded", "written", "eval" or "state dict"."""
    pauses: int = 1
    """Seeds the pauses of streams."""

    @property
    def num_ranks(self) -> int:
        """Returns the size of the mesh."""
        product = 1
        for size in self.mesh:
            product *= size
        return product

    @property
    def is_wrapped(self) -> bool:
        """Returns whether `FullyShardedDataParallel` shards it."""
        return self.front != "fully_shard"

    @property
    def keeps_parameters(self) -> bool:
        """Returns whether parameters are never freed."""
        return self.strategy in ("ddp", "zero1", "zero2", "hsdp_zero2", "zero1_across_zero2_within")

    @property
    def lets_host_wait(self) -> str:
        """Returns why the host waits for the device in a settled step, or "" if it must not."""
        if self.offload:
            return "the optimizer runs on the host, and reads gradients that come from the device"
        if self.scaled:
            return "the scaler's step is left out or not by what the host reads"
        return ""


def shown(setting: Setting) -> str:
    """Returns what differs from the defaults, to be pasted into a test."""
    default = Setting()
    given = {name: value for name, value in asdict(setting).items() if value != getattr(default, name)}
    return f"Setting({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def simpler(setting: Setting) -> Iterator[Setting]:
    """Yields what `setting` is with one choice fewer."""
    default = Setting()
    for each in fields(Setting):
        candidate = legal(replace(setting, **{each.name: getattr(default, each.name)}))
        if candidate != setting:
            yield candidate


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
    changes["parts"] = False
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
    if setting.micro_batches == 1:
        changes["accumulation"] = ""
    if not setting.param_dtype and setting.reduce_dtype == "float32":
        changes["reduce_dtype"] = ""
    return changes
