"""The config of a run: a record of fields with limits, where its values come from, and the fields in writing."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from sherd.errors import InputError, did_you_mean

__all__ = ["Config", "InputError", "assigned", "describe", "page", "read_tree", "toml", "whole_number"]

NO_HF_CONFIG = "hf = {!r} is no file; give the path of a Hugging Face config.json"
MOST = 8  # samples; more of them take memory, and are hardly faster
# The engine's own words, written down once more, as a config is checked without torch:
# test_choices_are_those_of_the_engine_and_of_plans.
ONE_AXIS = ("ddp", "zero1", "zero2", "zero3")
TWO_AXES = ("hsdp", "hsdp_zero2", "hfsdp", "zero1_across_zero2_within")
WRAPPINGS = ("auto", "pairs", "parts", "ends")
MODEL = ("layers", "width", "heads", "kv_heads", "hidden", "tied", "hf")
PATHS = ("data", "hf")
FREE = (
    *("data", "micro_batch", "mesh", "strategy", "placement", "wrapping", "reshard", "offload", "checkpointing"),
    *("recompute", "compile", "every", "logger"),
)
"""Fields that do not decide the losses, up to rounding."""
RECIPES = {
    **dict.fromkeys(("ep", "experts", "top_k", "balance"), "mixture_of_experts"),
    "cp": "long_context",
    "pp": "pipeline",
}
"""Axes and fields that a program of one's own has, and the recipe that shows it: examples/recipes/NAME.py."""
TRACKERS = {
    "tensorboard": "sherd.train.trackers:TensorBoard",
    "wandb": "sherd.train.trackers:WeightsAndBiases",
    "mlflow": "sherd.train.trackers:MLflow",
}
"""The words for `logger`, which are the packages that they need, and what is started for each."""

T = TypeVar("T")
Tree = Mapping[str, Any]  # field -> value, as TOML and JSON give it


def _field(default: T, about: str, rule: str = "", holds: Callable[[T], bool] = lambda _: True) -> T:
    value: T = field(default=default, metadata={"about": about, "rule": rule, "holds": holds})
    return value


def _at_least(low: float, default: T, about: str) -> T:
    return _field(default, about, f"at least {low}", lambda value: value >= low)  # type: ignore[operator]


def _above(low: float, default: float, about: str) -> float:
    return _field(default, about, f"above {low}", lambda value: value > low)


def _one_of(names: tuple[str, ...], about: str) -> str:
    return _field(names[0], about, "one of " + ", ".join(names), lambda value: value in names)


@dataclass(frozen=True)
class Config:
    """One run, complete and checked: a `Config` that exists can be trained, given data and ranks.

    Raises:
        InputError: two fields do not fit each other.
    """

    # The model: a Llama-style decoder, or a Hugging Face one
    layers: int = _at_least(1, 4, "decoder blocks")
    width: int = _at_least(1, 128, "numbers per token in the residual stream")
    heads: int = _at_least(1, 4, "query heads; they divide the width")
    kv_heads: int = _at_least(1, 2, "key and value heads; they divide the query heads")
    hidden: int = _at_least(1, 384, "numbers per token inside the feed-forward layer")
    tied: bool = _field(True, "the output layer reads the embedding's weight")
    hf: str = _field("", "a Hugging Face config.json; its model replaces the six fields above")
    # The data
    data: str = _field("", "a file or a folder of text; empty: the Python standard library's own sources")
    context: int = _at_least(2, 128, "tokens (bytes) a sample predicts, and can look back on")
    # The optimizer, on batches of a fixed number of samples, whatever the number of ranks
    optimizer: str = _one_of(("adamw", "muon"), "muon: hidden matrices by sherd.Muon, the rest by AdamW")
    lr: float = _above(0, 2e-3, "peak learning rate")
    warmup: int = _at_least(0, 50, "steps from zero to the peak; a run that is shorter never gets there")
    batch: int = _at_least(1, 16, "samples per step, over all ranks")
    micro_batch: int = _at_least(
        0, 0, f"samples in one forward of one rank; 0: the most, up to {MOST}, that divide its share"
    )
    # How ranks share the work
    mesh: str = _field("", "axes of ranks, as in dp=2,tp=2; of replicate, dp, tp; empty: all are dp")
    strategy: str = _one_of(("auto", *ONE_AXIS, *TWO_AXES), "what is sharded over which axis; auto: zero3 or hsdp")
    placement: str = _one_of(("shard", "flat", "whole"), "a parameter is cut between rows, anywhere, or not at all")
    wrapping: str = _one_of(WRAPPINGS, "what is a unit: a block, two, also parts of it, or also embedding and head")
    reshard: bool = _field(True, "free unsharded parameters after forward, but for the root's")
    offload: bool = _field(False, "parameters, gradients and optimizer state rest in host memory (for accelerators)")
    checkpointing: float = _field(
        0.0,
        "share of the blocks that keep only their input for backward, and compute the rest again",
        "in [0, 1]",
        lambda value: 0 <= value <= 1,
    )
    recompute: str = _one_of(("full", "selective"), "of these: all, or not attention and every second matrix product")
    precision: str = _one_of(("fp32", "bf16"), "of forward and backward; weights stay fp32")
    compile: bool = _field(False, "compile each block (torch.compile); the first steps take longer")
    # The run
    steps: int = _at_least(0, 0, "optimizer steps; 0: as many as fit into minutes")
    minutes: float = _above(0, 3.0, "of training; start, evaluation and saving take more time")
    every: int = _at_least(0, 250, "steps between checkpoints, and between evaluations; 0: at the end only")
    seed: int = _at_least(0, 0, "decides first weights, order of samples and the text sample")
    device: str = _field("auto", "auto is the accelerator, else cpu", "a type, such as cuda or xpu", str.isidentifier)
    logger: str = _field(
        "",
        "where figures also go: docs/do/train.md",
        f"{', '.join(TRACKERS)}, or module:function",
        lambda name: not name or name in TRACKERS or all(name.partition(":")),
    )

    def __post_init__(self) -> None:
        if self.hf:
            return
        if self.tied and self.wrapping == "ends":
            raise InputError(
                "wrapping = 'ends' makes a unit of the embedding, which a head reads too that is tied; set tied = "
                "false, or choose another wrapping"
            )
        if self.width % self.heads or self.width // self.heads % 2:
            raise InputError(
                f"width = {self.width} does not split into heads = {self.heads} heads of even width; choose a width "
                "that is a multiple of twice the heads"
            )
        if self.heads % self.kv_heads:
            raise InputError(
                f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}; each key head serves the same "
                "number of query heads"
            )

    def split(self, num_ranks: int) -> tuple[int, int]:
        """Returns the samples of a micro-batch, and a rank's number of them, if so many ranks read different samples.

        Raises InputError if the batch does not divide.
        """
        share, rest = divmod(self.batch, num_ranks)
        for size in [self.micro_batch] if self.micro_batch else range(MOST, 0, -1):
            if not rest and share and share % size == 0:
                return size, share // size
        unit = num_ranks * max(1, self.micro_batch)
        what = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
        what += f" x micro_batch = {self.micro_batch}" if self.micro_batch else ""
        remedy = f"the nearest that does is batch={unit * max(1, (self.batch + unit // 2) // unit)}"
        if self.micro_batch and share and not rest:
            remedy += "; or set micro_batch=0, which finds one that fits"
        raise InputError(f"batch = {self.batch} does not fit {what}; {remedy}")

    def from_anywhere(self) -> Config:
        """Returns the config with paths that mean the same in any folder: for one who resumes the run in another."""
        return Config.of(self.tree(), {name: os.path.abspath(path) for name in PATHS if (path := vars(self)[name])})

    def tree(self) -> dict[str, Any]:
        """Returns the config as plain values, for JSON; `Config.of` reads it back."""
        return dataclasses.asdict(self)

    @staticmethod
    def of(*trees: Tree) -> Config:
        """The defaults, changed by each tree in turn.

        Raises:
            InputError: an unknown field, a value of the wrong type, or one out of its limits.
        """
        return Config(**{name: _checked(name, value) for tree in trees for name, value in tree.items()})


FIELDS = {each.name: each for each in dataclasses.fields(Config)}
TYPES: dict[str, type] = get_type_hints(Config)
WANTED = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string"}


def _checked(name: str, value: Any) -> Any:
    """Returns the value of a field. Raises InputError if there is no such field, or the value cannot be used."""
    if name not in FIELDS:
        section = isinstance(value, Mapping)
        raise InputError(f"unknown field {name}; {'a config has no sections' if section else _hint(name)}")
    kind = TYPES[name]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise InputError(f"{name} = {value!r} has the wrong type; it must be {WANTED[kind]}")
    if not FIELDS[name].metadata["holds"](value):
        raise InputError(f"{name} = {value!r} is out of its limits; it must be {FIELDS[name].metadata['rule']}")
    return value


def _hint(name: str) -> str:
    """Returns what may be meant by the name of no field."""
    last = name.rpartition(".")[2].replace("-", "_")
    if last in RECIPES:
        return f"a program of your own has it: examples/recipes/{RECIPES[last]}.py"
    return did_you_mean(last, FIELDS, "known are " + ", ".join(FIELDS))


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
        tree = json.loads(text) if path.endswith(".json") else _toml_of(text)
    except OSError as error:
        raise InputError(f"cannot read the config {path}: {error.strerror}") from error
    except ValueError as error:  # the decoding errors of utf-8, JSON and TOML are all ValueErrors
        raise InputError(f"the config {path} does not parse: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise InputError(f"the config {path} holds no fields; write them as layers = 4")
    return tree


def _toml_of(text: str) -> Any:
    try:
        reader = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError as error:
        raise InputError("Python 3.10 reads TOML with tomli: pip install tomli, or write JSON") from error
    return reader.loads(text)


def assigned(assignments: Iterable[str]) -> Tree:
    """The tree of `field=value` words; a value is read as the field's type wants it.

    Raises:
        InputError: a word of another form, or an unknown field.
    """
    tree = {}
    for word in assignments:
        name, equals, text = word.partition("=")
        if not equals:
            raise InputError(f"{word!r} is not an assignment; write field=value, as in lr=0.001")
        tree[name] = _literal(text, TYPES.get(name, str))  # what is no field `Config.of` says
    return tree


def _literal(text: str, kind: type) -> Any:
    """`text` as `kind`; left a string where it is none, which `Config.of` then says."""
    try:
        if kind is bool:
            return {"true": True, "false": False}[text]
        return whole_number(text) if kind is int else kind(text)
    except (KeyError, ValueError, OverflowError):
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


# The fields in writing


def describe() -> str:
    """Every field with its default and what it is, for `--help`."""
    return "\n".join(
        f"  {f'{name} = {_value(each.default)}':24} {each.metadata['about']}"
        + (f" ({rule})" if (rule := each.metadata["rule"]) else "")
        for name, each in FIELDS.items()
    )


def page() -> str:
    """The table of docs/look_up/config.md, with a row per field."""
    rows = ["| field | default | meaning | limits |", "|---|---|---|---|"]
    for name, each in FIELDS.items():
        mark = "" if name in FREE else " \\*"
        about, rule = each.metadata["about"], each.metadata["rule"]
        rows.append(f"| `{name}`{mark} | `{_value(each.default)}` | {about} | {rule} |")
    return "\n".join(rows) + "\n"


def toml(config: Config) -> str:
    """`config` as TOML that `--config` takes."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in config.tree().items())


def _value(value: object) -> str:
    # JSON's strings, numbers and bools are TOML's too, but for one character, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


if __name__ == "__main__":  # for whoever has changed a field: what stands between the marks of docs/look_up/config.md
    print(page(), end="")
