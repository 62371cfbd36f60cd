"""The config of a run: a record of fields with limits, where its values come from, and the fields in writing."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sherd.errors import InputError, did_you_mean
from sherd.policy import CODECS
from sherd.tools.simulate.settings import FORMATS, comm_policy, offload_policy, setting
from sherd.tools.simulate.values import Kind, above, at_least, limited, one_of, parsed_toml

__all__ = ["Config", "InputError", "assigned", "comm_policy", "describe", "offload_policy", "page", "read_tree", "toml"]

NO_HF_CONFIG = "hf = {!r} is no file; give the path of a Hugging Face config.json"
MOST = 8  # samples; more of them take memory, and are hardly faster
# The engine's own words, written down again, since a config is checked without torch:
# test_choices_are_those_of_the_engine_and_of_plans.
ONE_AXIS = ("ddp", "zero1", "zero2", "zero3")
TWO_AXES = ("hsdp", "hsdp_zero2", "hfsdp", "zero1_across_zero2_within")
KEEPING = ("ddp", "zero1", "zero2", "hsdp_zero2", "zero1_across_zero2_within")
MODEL = ("layers", "width", "heads", "kv_heads", "hidden", "tied", "hf")
PATHS = ("data", "hf")
FREE = (
    *("data", "micro_batch", "mesh", "strategy", "placement", "wrapping", "reshard", "offload", "checkpointing"),
    *("recompute", "compile", "cuda_graph", "reproducible", "every", "logger"),
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

Tree = Mapping[str, Any]  # field -> value, as TOML and JSON give it


@dataclass(frozen=True)
class Config:
    """One run, complete and checked: a `Config` that exists can be trained, given data and ranks.

    Raises:
        InputError: two fields do not fit each other.
    """

    # The model: a Llama-style decoder, or a Hugging Face one
    layers: int = limited(4, "decoder blocks", at_least(1))
    width: int = limited(128, "numbers per token in the residual stream", at_least(1))
    heads: int = limited(4, "query heads; they divide the width", at_least(1))
    kv_heads: int = limited(2, "key and value heads; they divide the query heads", at_least(1))
    hidden: int = limited(384, "numbers per token inside the feed-forward layer", at_least(1))
    tied: bool = limited(True, "the output layer reads the embedding's weight")
    hf: str = limited("", "a Hugging Face config.json; its model replaces the six fields above")
    # The data
    data: str = limited("", "a file or a folder of text; empty: the Python standard library's own sources")
    context: int = limited(128, "tokens (bytes) a sample predicts, and can look back on", at_least(2))
    # The optimizer, on batches of a fixed number of samples, whatever the number of ranks
    optimizer: str = limited("adamw", "muon: hidden matrices by sherd.Muon, the rest by AdamW", one_of("adamw", "muon"))
    lr: float = limited(2e-3, "peak learning rate", above(0))
    warmup: int = limited(50, "steps from zero to the peak; a run that is shorter never gets there", at_least(0))
    batch: int = limited(16, "samples per step, over all ranks", at_least(1))
    micro_batch: int = limited(
        0, f"samples in one forward of one rank; 0: the most, up to {MOST}, that divide its share", at_least(0)
    )
    # How ranks share the work
    mesh: str = limited("", "axes of ranks, as in dp=2,tp=2; of replicate, dp, tp; empty: all are dp")
    strategy: str = limited(
        "auto", "what is sharded over which axis; auto: zero3 or hsdp", one_of("auto", *ONE_AXIS, *TWO_AXES)
    )
    placement: str = setting("placement")
    wrapping: str = setting("wrapping")
    reshard: bool = setting("reshard")
    offload: str = setting("offload")
    checkpointing: float = setting("checkpointing")
    recompute: str = setting("recompute")
    gather: str = setting("gather")
    reduce: str = setting("reduce")
    reduce_replicas: str = setting("reduce_replicas")
    precision: str = limited("fp32", "of forward and backward; weights stay fp32", one_of("fp32", "bf16"))
    compile: bool = limited(False, "compile each block (torch.compile); the first steps take longer")
    cuda_graph: bool = limited(False, "replay forward, backward and clipping as one CUDA graph: docs/do/train.md")
    reproducible: bool = setting("reproducible")
    # The run
    steps: int = limited(0, "optimizer steps; 0: as many as fit into minutes", at_least(0))
    minutes: float = limited(3.0, "of training; start, evaluation and saving take more time", above(0))
    every: int = limited(250, "steps between checkpoints, and between evaluations; 0: at the end only", at_least(0))
    seed: int = limited(0, "decides first weights, order of samples and the text sample", at_least(0))
    device: str = limited(
        "auto", "auto is the accelerator, else cpu", Kind(str, "a type, such as cuda or xpu", str.isidentifier)
    )
    logger: str = limited(
        "",
        "where figures also go: docs/do/train.md",
        Kind(
            str,
            f"{', '.join(TRACKERS)}, or module:function",
            lambda name: not name or name in TRACKERS or all(name.partition(":")),
        ),
    )

    def __post_init__(self) -> None:
        if self.cuda_graph and self.offload != "nothing":
            raise InputError("cuda_graph = true cannot hold offload, for which the host may wait; leave out one")
        for name in FORMATS if self.reproducible else ():
            if (word := getattr(self, name)) in CODECS:
                raise InputError(f"{name} = {word!r} encodes blocks that end where shards do; leave out reproducible")
        if self.reproducible and (word := self.reduce_replicas) not in ("same", self.reduce):
            raise InputError(f"reproducible = true has one order for all ranks; leave out reduce_replicas = {word!r}")
        if self.gather != "own" and self.strategy in KEEPING:
            raise InputError(f"gather = {self.gather!r} would round what strategy = {self.strategy} keeps; or zero3")
        if self.offload.startswith("masters") and self.precision != "bf16":
            raise InputError("offload = masters needs weights that compute in bfloat16; set precision = bf16, or state")
        if self.hf:
            return
        if self.tied and self.wrapping == "ends":
            raise InputError("wrapping = 'ends' makes a unit of the embedding, which a tied head reads; set tied=false")
        if self.width % self.heads or self.width // self.heads % 2:
            raise InputError(f"width = {self.width} does not split into heads = {self.heads} of even width; change one")
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}; change one")

    def split(self, num_ranks: int) -> tuple[int, int]:
        """Returns the samples of a micro-batch, and a rank's number of micro-batches. Raises InputError."""
        share, rest = divmod(self.batch, num_ranks)
        for size in [self.micro_batch or 1] if self.micro_batch or self.reproducible else range(MOST, 0, -1):
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
KINDS: dict[str, Kind] = {name: each.metadata["kind"] for name, each in FIELDS.items()}


def _checked(name: str, value: Any) -> Any:
    """Returns the value of a field. Raises InputError if there is no such field, or the value cannot be used."""
    if name not in FIELDS:
        section = isinstance(value, Mapping)
        raise InputError(f"unknown field {name}; {'a config has no sections' if section else _hint(name)}")
    value = KINDS[name].usual(value)
    if reason := KINDS[name].reason(value):
        raise InputError(f"{name} = {value!r} {reason}")
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
        tree = json.loads(text) if path.endswith(".json") else parsed_toml(text)
    except OSError as error:
        raise InputError(f"cannot read the config {path}: {error.strerror}") from error
    except ValueError as error:  # the decoding errors of utf-8, JSON and TOML are all ValueErrors
        raise InputError(f"the config {path} does not parse: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise InputError(f"the config {path} holds no fields; write them as layers = 4")
    return tree


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
        tree[name] = KINDS[name].of_word(text) if name in KINDS else text  # `Config.of` refuses unknown fields
    return tree


# The fields in writing


def describe() -> str:
    """Every field with its default and what it is, for `--help`."""
    return "\n".join(
        f"  {f'{name} = {_value(each.default)}':24} {each.metadata['about']}"
        + (f" ({KINDS[name].limits})" if KINDS[name].limits else "")
        for name, each in FIELDS.items()
    )


def page() -> str:
    """The table of docs/look_up/config.md, with a row per field."""
    rows = ["| field | default | meaning | limits |", "|---|---|---|---|"]
    for name, each in FIELDS.items():
        mark = "" if name in FREE else " \\*"
        rows.append(f"| `{name}`{mark} | `{_value(each.default)}` | {each.metadata['about']} | {KINDS[name].limits} |")
    return "\n".join(rows) + "\n"


def toml(config: Config) -> str:
    """`config` as TOML that `--config` takes."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in config.tree().items())


def _value(value: object) -> str:
    # JSON's strings, numbers and bools are TOML's too, but for one character, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


if __name__ == "__main__":  # for whoever has changed a field: what stands between the marks of docs/look_up/config.md
    print(page(), end="")
