"""The config of a run: its fields and their limits."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from sherd.errors import InputError

__all__ = [
    "BatchSplit",
    "Config",
    "DataConfig",
    "InputError",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "ShardConfig",
    "assigned",
    "read_tree",
    "whole_number",
]

NO_HF_CONFIG = "model.hf = {!r} is no file; give the path of a Hugging Face config.json"
T = TypeVar("T")
LARGEST_MICRO_BATCH = 8  # samples; more of them take memory, and are hardly faster
# The engine's strategies, alike over all ranks that read samples, or over replicate otherwise than over dp; and its
# transports. Written down once more, as a config is checked without torch: test_choices_are_those_of_the_engine.
ONE_AXIS = ("ddp", "zero1", "zero2", "zero3")
TWO_AXES = ("hsdp", "hsdp_zero2", "hfsdp", "zero1_across_zero2_within")
KEEP_WHOLE = ("ddp", "zero1", "zero2", "hsdp_zero2", "zero1_across_zero2_within")
TRANSPORTS = ("auto", "torch", "coalesced", "gloo", "shared_memory")
WRAPPINGS = ("auto", "pairs", "parts", "ends")
FREE = (
    *("data.path", "optimizer.micro_batch", "optimizer.flatten", "run.out", "run.ranks", "run.mesh", "run.timeout"),
    *("run.eval_every", "run.save_every", "run.keep", "run.prompt", "run.sample", "run.temperature"),
    *("run.checkpointing", "run.checkpointing_share", "run.recompute", "run.compile", "run.keep_best"),
    *("run.tensorboard", "run.logger", "run.checkpoints", "run.async_save", "run.memory_limit"),
)
"""Fields that do not decide the losses, up to rounding; nor does any of `[shard]`."""
Tree = Mapping[str, Any]  # section -> field -> value, as TOML and JSON give it


TRACKERS = {
    "tensorboard": "sherd.train.trackers:TensorBoard",
    "wandb": "sherd.train.trackers:WeightsAndBiases",
    "mlflow": "sherd.train.trackers:MLflow",
}
"""The words for `run.logger`, which are the packages that they need, and what is started for each."""


def _field(default: T, about: str, rule: str = "", holds: Callable[[T], bool] = lambda _: True) -> T:
    metadata = {"about": about, "rule": rule, "holds": holds}
    value: T = field(default=default, metadata=metadata)
    return value


def _at_least(low: float, default: T, about: str) -> T:
    return _field(default, about, f"at least {low}", lambda value: value >= low)  # type: ignore[operator]


def _above(low: float, default: float, about: str) -> float:
    return _field(default, about, f"above {low}", lambda value: value > low)


def _share(default: float, about: str) -> float:
    return _field(default, about, "in [0, 1)", lambda value: 0 <= value < 1)


def _one_of(names: tuple[str, ...], about: str) -> str:
    return _field(names[0], about, "one of " + ", ".join(names), lambda value: value in names)


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-style decoder, or a Hugging Face one."""

    layers: int = _at_least(1, 4, "decoder blocks")
    width: int = _at_least(1, 128, "numbers per token in the residual stream")
    heads: int = _at_least(1, 4, "query heads; they divide the width")
    kv_heads: int = _at_least(1, 2, "key and value heads; they divide the query heads")
    hidden: int = _at_least(1, 384, "numbers per token inside the feed-forward layer, or inside one expert")
    experts: int = _at_least(0, 0, "experts of a feed-forward layer, a mixture of them; 0: no mixture")
    top_k: int = _at_least(1, 2, "experts that a token goes to")
    balance: float = _at_least(0, 0.01, "weight of the loss that grows when experts get unequal shares of the tokens")
    tied: bool = _field(True, "the output layer reads the embedding's weight")
    rope_base: float = _above(0, 10000.0, "longest wavelength of the rotary embedding, in positions / 2 pi")
    hf: str = _field("", "a Hugging Face config.json; it replaces every other field of this section")


Model = ModelConfig
"""The name that `ModelConfig` had before. It stays for one version."""


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from, and how it is cut."""

    path: str = _field("", "a file or a folder; empty: the Python standard library's own sources")
    context: int = _at_least(2, 128, "tokens (bytes) a sample predicts, and can look back on")
    held_out: float = _field(0.01, "share of the text kept for evaluation", "in (0, 1)", lambda x: 0 < x < 1)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon, on batches of a fixed number of samples, whatever the number of ranks."""

    name: str = _one_of(
        ("adamw", "muon"), "muon steps hidden matrices by sherd.Muon at AdamW's rate, the rest by AdamW"
    )
    batch: int = _at_least(1, 16, "samples per step, over all ranks")
    micro_batch: int = _at_least(
        0,
        0,
        "samples in one forward of one rank, the rest is accumulated; 0: the most that divide a rank's share of the "
        f"batch, up to {LARGEST_MICRO_BATCH}",
    )
    lr: float = _above(0, 2e-3, "peak learning rate")
    warmup: int = _at_least(0, 50, "steps from zero to the peak; a run that is shorter never gets there")
    final_lr: float = _share(0.02, "learning rate of the last step, as a share of the peak")
    weight_decay: float = _at_least(0, 0.1, "decay of matrices; vectors have none")
    beta1: float = _share(0.9, "decay of the running mean of gradients")
    beta2: float = _share(0.99, "decay of the running mean of their squares")
    momentum: float = _share(0.95, "decay of Muon's running mean of gradients")
    clip: float = _at_least(0, 1.0, "largest norm of the whole gradient; 0: it is not clipped")
    flatten: bool = _field(False, "step each rank's shards as few long vectors (flatten_optimizer)")


@dataclass(frozen=True)
class ShardConfig:
    """How parameters, gradients and optimizer state are sharded. None of it changes what is trained."""

    strategy: str = _one_of(
        ("auto", *ONE_AXIS, *TWO_AXES), "what is sharded over which axis; auto is zero3, with replicate hsdp"
    )
    placement: str = _one_of(
        ("shard", "flat", "blocks", "whole"),
        "where a parameter may be cut: between rows, between any elements, between blocks of rows, or nowhere",
    )
    rows: int = _at_least(1, 16, "rows of a block, for shard.placement = blocks")
    replicate_below: int = _at_least(
        0, 0, "bytes: each rank keeps the whole of smaller parameters, ungathered; 0: none"
    )
    reshard: str = _one_of(
        ("auto", "always", "never"), "free whole parameters after forward; auto is always, but for the root"
    )
    wrapping: str = _one_of(
        WRAPPINGS,
        "what is a unit; auto: a block; pairs: two blocks; parts: also attention and feed-forward; ends: also embedding"
        " and head",
    )
    prefetch: int = _at_least(0, 1, "units that are gathered ahead, in forward and in backward")
    offload: bool = _field(False, "parameters, gradients and optimizer state rest in host memory (for accelerators)")
    transport: str = _one_of(
        TRANSPORTS, "how bytes travel; auto is shared memory on one host of CPU ranks, else gloo, or the device's own"
    )


@dataclass(frozen=True)
class RunConfig:
    """How long, where, and what is written."""

    out: str = _field("", "folder of the run; empty: the first free of runs/1, runs/2, ...")
    steps: int = _at_least(0, 0, "optimizer steps; 0: as many as fit into run.minutes")
    minutes: float = _above(0, 3.0, "of training; start, evaluation and saving take time beside")
    ranks: int = _at_least(0, 0, "ranks the run must have; 0: as many as there are")
    mesh: str = _field("", "axes of ranks, as in dp=2,tp=2; of replicate, dp, ep, cp, tp, pp; empty: all are dp")
    seed: int = _at_least(0, 0, "decides first weights, order of samples and the text sample")
    timeout: float = _above(0, 600.0, "seconds after which a rank that does not answer is taken for dead")
    device: str = _field("auto", "auto is the accelerator, else cpu", "a type, such as cuda or xpu", str.isidentifier)
    precision: str = _one_of(("fp32", "bf16"), "of forward and backward; weights stay fp32")
    checkpointing: bool = _field(False, "keep only each block's input for backward, and compute the rest again")
    checkpointing_share: float = _field(
        1.0, "share of the blocks that checkpointing is for, evenly spread", "in (0, 1]", lambda value: 0 < value <= 1
    )
    recompute: str = _one_of(
        ("full", "selective"), "of checkpointed blocks: all, or not attention and every second matrix product"
    )
    memory_limit: float = _at_least(0, 0.0, "GiB that a rank's tensors may take, which are then followed; 0: no limit")
    compile: bool = _field(False, "compile each block (torch.compile); the first steps take longer")
    eval_every: int = _at_least(0, 250, "steps between evaluations; 0: at the end only")
    save_every: int = _at_least(0, 250, "steps between checkpoints; 0: at the end only")
    keep: int = _at_least(1, 2, "checkpoints kept")
    checkpoints: str = _field(
        "", "folder or URL of the checkpoints, as s3://bucket/run; empty: in the run's own folder"
    )
    async_save: bool = _field(True, "checkpoints are copied to host memory, and written while the run goes on")
    prompt: str = _field("", "how the text sample begins; empty: a new document")
    sample: int = _at_least(0, 200, "bytes of the text sample")
    temperature: float = _at_least(0, 0.6, "of the text sample; 0 takes the likeliest byte")
    keep_best: bool = _field(True, "an evaluation that is the best so far is saved, and kept beside the last ones")
    tensorboard: bool = _field(False, "figures also go to OUT/tensorboard")
    logger: str = _field(
        "",
        "where figures also go: docs/do/train.md",
        f"{', '.join(TRACKERS)}, or module:function",
        lambda name: not name or name in TRACKERS or all(name.partition(":")),
    )


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "shard": ShardConfig,
    "run": RunConfig,
}


@dataclass(frozen=True)
class BatchSplit:
    """A rank's share of a batch: so many micro-batches of so many samples."""

    micro_batch: int
    times: int


@dataclass(frozen=True)
class Config:
    """One run, complete and checked: a `Config` that exists can be trained, given data and ranks.

    Raises:
        InputError: two fields do not fit each other.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        self._check_model()
        if self.shard.strategy in KEEP_WHOLE and self.shard.reshard == "always":
            raise InputError(
                f"shard.reshard = 'always', but by shard.strategy = {self.shard.strategy!r} every rank keeps "
                "unsharded parameters; leave it out, or choose zero3, hsdp or hfsdp"
            )

    def _check_model(self) -> None:
        m = self.model
        if m.hf:
            return
        if m.tied and self.shard.wrapping == "ends":
            raise InputError(
                "shard.wrapping = 'ends' makes a unit of the embedding, which a head reads too that is tied; set "
                "model.tied = false, or choose another wrapping"
            )
        if m.width % m.heads or m.width // m.heads % 2:
            raise InputError(
                f"model.width = {m.width} does not split into model.heads = {m.heads} heads of even width; "
                "choose a width that is a multiple of twice the heads"
            )
        if m.heads % m.kv_heads:
            raise InputError(
                f"model.kv_heads = {m.kv_heads} does not divide model.heads = {m.heads}; "
                "each key head serves the same number of query heads"
            )
        if m.experts and m.top_k > m.experts:
            raise InputError(
                f"model.top_k = {m.top_k} is more than model.experts = {m.experts}; a token goes to an expert once"
            )

    def split(self, num_ranks: int, num_stages: int = 1) -> BatchSplit:
        """Returns each rank's share of the batch.

        `num_ranks` ranks read different samples; each of the `num_stages` of a pipeline needs a micro-batch of its own.

        Raises:
            InputError: the batch does not divide.
        """
        share, rest = divmod(self.optimizer.batch, num_ranks)
        asked = self.optimizer.micro_batch
        for size in [asked] if asked else range(LARGEST_MICRO_BATCH, 0, -1):
            if not rest and share % size == 0 and share // size >= num_stages:
                return BatchSplit(size, share // size)
        raise InputError(self._no_split(num_ranks, num_stages))

    def _no_split(self, num_ranks: int, num_stages: int) -> str:
        batch, asked = self.optimizer.batch, self.optimizer.micro_batch
        unit = num_ranks * max(1, asked)
        nearest = unit * max(num_stages, (batch + unit // 2) // unit)
        ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
        what = f"{ranks} x optimizer.micro_batch = {asked}" if asked else ranks
        what += f" and {num_stages} stages, each with a micro-batch" if num_stages > 1 else ""
        remedy = f"the nearest that does is optimizer.batch={nearest}"
        if asked and batch % num_ranks == 0 and batch // num_ranks >= num_stages:
            remedy += "; or set optimizer.micro_batch=0, which finds one that fits"
        return f"optimizer.batch = {batch} does not fit {what}; {remedy}"

    def notes(self) -> list[str]:
        """Settings that can be used and are hardly meant, one line for each."""
        warmup, steps = self.optimizer.warmup, self.run.steps
        if 0 < steps < warmup:
            return [
                f"optimizer.warmup = {warmup} lasts longer than the run of {steps} steps, whose learning rate ends "
                f"at {self.optimizer.lr * steps / warmup:.2g}; optimizer.warmup={-(-steps // 10)} is a tenth of it"
            ]
        return []

    def from_anywhere(self) -> Config:
        """Returns the config with paths that mean the same in any folder: for one who resumes the run in another."""
        absolute = {
            section: {name: os.path.abspath(path)}
            for section, name in (("model", "hf"), ("data", "path"), ("run", "checkpoints"))
            if (path := getattr(getattr(self, section), name)) and "://" not in path
        }
        return Config.of(self.tree(), absolute)

    def tree(self) -> dict[str, dict[str, Any]]:
        """Returns the config as plain values, for JSON; `Config.of` reads it back."""
        return dataclasses.asdict(self)

    @staticmethod
    def of(*trees: Tree) -> Config:
        """The defaults, changed by each tree in turn.

        Raises:
            InputError: an unknown section or field, a value of the wrong type, or one out of its limits.
        """
        sections: dict[str, Any] = {name: section() for name, section in SECTIONS.items()}
        for tree in trees:
            for name, values in tree.items():
                if not isinstance(values, Mapping):
                    raise InputError(f"{name} = {values!r} stands outside a section; {_place_of(name)}")
                _known("section", name, sections)
                sections[name] = _changed(name, sections[name], values)
        return Config(**sections)


def _place_of(name: str) -> str:
    """Returns where a value belongs that was given to `name` alone."""
    if name in SECTIONS:
        return f"{name} is itself a section"
    homes = [section for section, fields in SECTIONS.items() if name in get_type_hints(fields)]
    return f"put it under [{homes[0]}]" if homes else "put it under one of " + ", ".join(f"[{s}]" for s in SECTIONS)


def _changed(section: str, old: Any, values: Mapping[str, Any]) -> Any:
    """`old`, one section, with `values` in place of its own."""
    fields = {f.name: f for f in dataclasses.fields(old)}
    types = get_type_hints(type(old))
    new = {}
    for name, value in values.items():
        where = f"{section}.{name}"
        _known("field", where, [f"{section}.{known}" for known in fields])
        new[name] = value = _typed(where, value, types[name])
        if not fields[name].metadata["holds"](value):
            raise InputError(f"{where} = {value!r} is out of its limits; it must be {fields[name].metadata['rule']}")
    return dataclasses.replace(old, **new)


def _known(kind: str, name: str, names: Iterable[str]) -> None:
    names = list(names)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "known are " + ", ".join(names)
        raise InputError(f"unknown {kind} {name}; {hint}")


def _typed(where: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        wanted = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string"}[kind]
        raise InputError(f"{where} = {value!r} has the wrong type; it must be {wanted}")
    return value


# Where the values come from


def read_tree(path: str) -> Tree:
    """The tree in a TOML file, or in a JSON one when its name ends so.

    Raises:
        InputError: the file cannot be read, or does not parse.
    """
    if path.endswith((".yaml", ".yml")):
        raise InputError(f"the config {path} is YAML; give TOML, or JSON in a file that ends in .json")
    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = json.loads(text) if path.endswith(".json") else _toml(text)
    except OSError as error:
        raise InputError(f"cannot read the config {path}: {error.strerror}") from error
    except ValueError as error:  # the decoding errors of utf-8, JSON and TOML are all ValueErrors
        raise InputError(f"the config {path} does not parse: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        sections = ", ".join(f"[{section}]" for section in SECTIONS)
        raise InputError(f"the config {path} holds no sections; write them as {sections}")
    return tree


def _toml(text: str) -> Any:
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError as error:
        raise InputError("Python 3.10 reads TOML with tomli: pip install tomli, or write JSON") from error
    return toml.loads(text)


def assigned(assignments: Iterable[str]) -> Tree:
    """The tree of `section.field=value` words; a value is read as the field's type wants it.

    Raises:
        InputError: a word of another form, or a value that does not read as the field's type.
    """
    tree: dict[str, dict[str, Any]] = {}
    for word in assignments:
        where, equals, text = word.partition("=")
        section, dot, name = where.partition(".")
        if not (equals and dot):
            homes = [each for each, fields in SECTIONS.items() if equals and where in get_type_hints(fields)]
            example = f"did you mean {homes[0]}.{word}?" if homes else "as in optimizer.lr=0.001"
            raise InputError(f"{word!r} is not an assignment; write section.field=value, {example}")
        kinds = get_type_hints(SECTIONS[section]) if section in SECTIONS else {}
        tree.setdefault(section, {})[name] = _literal(text, kinds.get(name, str))  # what is no field `Config.of` says
    return tree


def _literal(text: str, kind: type) -> Any:
    """`text` as `kind`; left a string where it is none, which `Config.of` then says."""
    try:
        if kind is bool:
            return {"true": True, "false": False}[text]
        return whole_number(text) if kind is int else kind(text)
    except (KeyError, ValueError):
        return text


def whole_number(text: str) -> int:
    """`text`, a whole number, maybe in the form 1e6. Raises ValueError for any other."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError(f"{text} is no whole number") from None
        return int(number)
