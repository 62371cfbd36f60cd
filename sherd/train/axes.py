"""The part of each rank in a run: the axes that `--mesh` names, and how many ranks each has.

    pp          layers: each rank has some of them
    replicate   samples; parameters are replicated
    dp          samples; parameters are sharded
      ep        a part of dp: each rank has some of the experts, and gets their tokens from the others
    cp          tokens of the same samples; parameters are sharded over cp as over dp
    tp          heads and hidden numbers of the same tokens

From the top to the bottom ranks are ever nearer to each other: those of one tp group are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from sherd.train.config import TWO_AXES, Config, InputError, ModelConfig
from sherd.train.text import VOCABULARY

__all__ = ["Axes", "axes_of", "usual_ranks"]


@dataclass(frozen=True)
class Axes:
    """The number of ranks along each axis; `ep` of those along dp."""

    pp: int = 1
    replicate: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return self.pp * self.replicate * self.dp * self.cp * self.tp

    @property
    def num_data(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.dp

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in vars(self).items() if size > 1) or "dp=1"


NAMES = tuple(field.name for field in fields(Axes))


def axes_of(config: Config, num_ranks: int) -> Axes:
    """The axes that `run.mesh` gives to `num_ranks` ranks. A dp that it does not name gets the ranks that are left.

    Raises:
        InputError: words that are no axes, or axes that do not fit the ranks, the model or the context.
    """
    run = config.run
    if run.ranks and run.ranks != num_ranks:
        raise InputError(
            f"run.ranks = {run.ranks}, but there are {num_ranks} ranks; "
            f"start {run.ranks} processes, or set run.ranks = {num_ranks}"
        )
    sizes = _sizes(run.mesh)
    if "dp" not in sizes:
        sizes["dp"] = max(1, num_ranks // Axes(**sizes).num_ranks)
    axes = Axes(**sizes)
    if axes.num_ranks != num_ranks:
        raise InputError(
            f"the mesh {run.mesh} is for {axes.num_ranks} ranks, but there are {num_ranks}; start "
            f"{axes.num_ranks} processes, or give a --mesh of {num_ranks}"
        )
    for rule in (_fits_experts, _fits_heads, _fits_context, _fits_layers, _fits_strategy):
        rule(axes, config)
    return axes


def usual_ranks(config: Config, usual: int) -> int:
    """Returns how many ranks to start for `run.mesh`; without a mesh that is `usual`.

    A mesh that leaves the size of dp open takes the next multiple of the other axes' ranks, from `usual` on.

    Raises:
        InputError: words that are no axes.
    """
    sizes = _sizes(config.run.mesh)
    others = Axes(**sizes).num_ranks
    return others if "dp" in sizes else -(-usual // others) * others


def _sizes(text: str) -> dict[str, int]:
    """Returns what a mesh says in words, as axis -> number of ranks."""
    sizes: dict[str, int] = {}
    for word in text.split(",") if text else ():
        name, _, number = (part.strip() for part in word.partition("="))
        if name not in NAMES:
            raise InputError(
                f"the mesh {text} names {word!r}, which is no axis; write axis=ranks, of {', '.join(NAMES)}"
            )
        if name in sizes:
            raise InputError(f"the mesh {text} names {name} twice; give its ranks once")
        if not (number.isascii() and number.isdigit() and int(number)):
            raise InputError(f"the mesh {text} gives {name} {number!r} ranks; it must be a whole number of at least 1")
        sizes[name] = int(number)
    return sizes


def _fits_experts(axes: Axes, config: Config) -> None:
    num_experts = _decoder(axes, config).experts
    if axes.ep == 1:
        return
    if not num_experts:
        raise InputError(f"the mesh has ep={axes.ep}, but the model has no experts; set model.experts, or leave out ep")
    if num_experts % axes.ep:
        raise InputError(
            f"the mesh has ep={axes.ep}, which does not divide model.experts = {num_experts}; each rank gets the same "
            "number of experts"
        )
    if axes.dp % axes.ep:
        raise InputError(
            f"the mesh has ep={axes.ep}, which does not divide its dp={axes.dp}; ep is a part of dp: choose a dp that "
            f"is a multiple of {axes.ep}"
        )


def _fits_heads(axes: Axes, config: Config) -> None:
    model = _decoder(axes, config)
    divided = {"model.heads": model.heads, "model.kv_heads": model.kv_heads, "the vocabulary": VOCABULARY}
    if not model.experts:
        divided["model.hidden"] = model.hidden
    for name, size in divided.items():
        if size % axes.tp:
            raise InputError(f"the mesh has tp={axes.tp}, which does not divide {name} = {size}; choose a smaller tp")


def _fits_context(axes: Axes, config: Config) -> None:
    parts = axes.cp * axes.tp
    if config.data.context % parts:
        raise InputError(
            f"the mesh has cp={axes.cp} and tp={axes.tp}, which cut a sample into {parts} parts, but data.context = "
            f"{config.data.context} is no multiple of that"
        )


def _fits_layers(axes: Axes, config: Config) -> None:
    model = _decoder(axes, config)
    if axes.pp > model.layers:
        raise InputError(
            f"the mesh has pp={axes.pp}, but model.layers = {model.layers}; every rank needs a layer of its own"
        )
    if axes.pp > 1 and model.tied:
        raise InputError(
            f"the mesh has pp={axes.pp}, but model.tied = true keeps the first and the last layer on one rank; "
            "set model.tied = false"
        )


def _fits_strategy(axes: Axes, config: Config) -> None:
    strategy = config.shard.strategy
    if strategy in TWO_AXES and axes.replicate == 1:
        raise InputError(
            f"shard.strategy = {strategy!r} is for two axes, but the mesh {axes} has no replicate; give one, as in "
            "--mesh replicate=2, or take zero3, zero2, zero1 or ddp"
        )
    if axes.ep > 1 and strategy not in ("auto", "zero3", "hsdp"):
        raise InputError(
            f"shard.strategy = {strategy!r} does not go with the mesh's ep={axes.ep}: experts are sharded over other "
            "ranks than the rest; leave out ep, or take zero3 or hsdp"
        )


def _decoder(axes: Axes, config: Config) -> ModelConfig:
    """The model's fields, which mean nothing for a Hugging Face one: that knows no axes but those of data."""
    others = [name for name in ("pp", "ep", "cp", "tp") if getattr(axes, name) > 1]
    if config.model.hf and others:
        raise InputError(
            f"the mesh has {others[0]}={getattr(axes, others[0])}, which a Hugging Face model cannot be cut by here; "
            "use replicate and dp"
        )
    return ModelConfig(heads=axes.tp, kv_heads=axes.tp, hidden=axes.tp) if config.model.hf else config.model
