"""The axes that `--mesh` names, and how many ranks each has. Loads no torch.

    replicate   samples; parameters are replicated
    dp          samples; parameters are sharded
    tp          heads and hidden numbers of the same tokens

Ranks of one tp group are neighbours; those of one dp group come next.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sherd.train.config import RECIPES, TWO_AXES, Config, InputError
from sherd.train.text import VOCABULARY


@dataclass(frozen=True)
class Axes:
    """The number of ranks along each axis."""

    replicate: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return self.num_data * self.tp

    @property
    def num_data(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.dp

    @property
    def in_words(self) -> str:
        """The number of ranks."""
        return f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in vars(self).items() if size > 1) or "dp=1"


def axes_of(config: Config, num_ranks: int) -> Axes:
    """The axes that `mesh` gives to `num_ranks` ranks. A dp that it does not name gets the ranks that are left.

    Raises:
        InputError: words that are no axes, or axes that do not fit the ranks, the model or the context.
    """
    sizes = _sizes(config.mesh)
    if "dp" not in sizes:
        sizes["dp"] = max(1, num_ranks // Axes(**sizes).num_ranks)
    axes = Axes(**sizes)
    if axes.num_ranks != num_ranks:
        raise InputError(
            f"the mesh {config.mesh} is for {axes.num_ranks} ranks, but there are {num_ranks}; start "
            f"{axes.num_ranks} processes, or give a --mesh of {num_ranks}"
        )
    _require_tp(axes.tp, config)
    if config.strategy in TWO_AXES and axes.replicate == 1:
        raise InputError(
            f"strategy = {config.strategy!r} is for two axes, but the mesh {axes} has no replicate; give one, as in "
            "--mesh replicate=2, or take zero3, zero2, zero1 or ddp"
        )
    return axes


def usual_ranks(config: Config, usual: int) -> int:
    """Returns how many ranks to start for `mesh`; without a mesh that is `usual`.

    A mesh that leaves the size of dp open takes the next multiple of the other axes' ranks, from `usual` on.
    """
    sizes = _sizes(config.mesh)
    others = Axes(**sizes).num_ranks
    return others if "dp" in sizes else -(-usual // others) * others


def sizes_in(text: str, known: Collection[str], command: str, elsewhere: Mapping[str, str] = {}) -> dict[str, int]:
    """Returns the number of ranks by axis, from words such as `dp=4,tp=2`.

    Raises InputError, for a name that is not `known` with what the user can do `elsewhere`.
    """
    sizes: dict[str, int] = {}
    for word in text.split(","):
        name, _, number = (part.strip() for part in word.partition("="))
        if name not in known:
            hint = elsewhere.get(name, f"write axis=ranks, of {', '.join(known)}")
            raise InputError(f"the mesh {text} names {word.strip()!r}, which is no axis of {command}; {hint}")
        if name in sizes:
            raise InputError(f"the mesh {text} names {name} twice; give its ranks once")
        if not (number.isascii() and number.isdigit() and int(number)):
            raise InputError(f"the mesh {text} gives {name} {number!r} ranks; it must be a whole number of at least 1")
        sizes[name] = int(number)
    return sizes


def _sizes(text: str) -> dict[str, int]:
    elsewhere = {name: f"a program of your own has it: examples/recipes/{file}.py" for name, file in RECIPES.items()}
    return sizes_in(text, vars(Axes()), "sherd train", elsewhere) if text else {}


def _require_tp(tp: int, config: Config) -> None:
    if tp > 1 and config.hf:
        raise InputError(f"the mesh has tp={tp}, which cuts no Hugging Face model here; use replicate and dp")
    divided = {name: getattr(config, name) for name in ("heads", "kv_heads", "hidden", "context")}
    for name, size in {**divided, "the vocabulary": VOCABULARY}.items():
        if size % tp:
            raise InputError(f"the mesh has tp={tp}, which does not divide {name} = {size}; choose a smaller tp")
