"""The blocks that a model repeats: its largest lists of modules of one class, for a model that does not name its units
itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from sherd.wrap import is_container

WORTH = 10
"""A list counts if the largest list has at most this many times its parameters."""

Blocks = dict[str, list[nn.Module]]
"""The modules of each list, by the list's name."""


def repeated_blocks(model: nn.Module) -> Blocks:
    """Returns the lists below `model` (`nn.ModuleList`, `nn.Sequential`) whose modules are of one class and have
    parameters and a forward: the largest list, and lists that are not much smaller. Lists in blocks do not count."""
    found = dict(_lists(model, ""))
    sizes = {name: numel_of(blocks) for name, blocks in found.items()}
    largest = max(sizes.values(), default=0)
    return {name: blocks for name, blocks in found.items() if sizes[name] * WORTH >= largest}


def in_words(blocks: Blocks) -> str:
    """Returns the blocks in words: "3 Layer of encoder.layers, 2 Block of head"."""
    return ", ".join(f"{len(each)} {type(each[0]).__name__} of {name or 'the model'}" for name, each in blocks.items())


def evenly_spread(blocks: Sequence[nn.Module], share: float) -> list[nn.Module]:
    """Returns a share of `blocks`, 0 to 1, which lie as far apart as can be."""
    number = round(share * len(blocks))
    return [each for at, each in enumerate(blocks) if (at + 1) * number // len(blocks) > at * number // len(blocks)]


def registrations(model: nn.Module) -> Counter[int]:
    """Returns how often each parameter is registered in `model`, by its id."""
    return Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))


def _lists(module: nn.Module, name: str) -> Iterator[tuple[str, list[nn.Module]]]:
    children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    if isinstance(module, nn.ModuleList | nn.Sequential) and _are_blocks([child for _, child in children]):
        yield name, [child for _, child in children]
        return
    for path, child in children:
        yield from _lists(child, path)


def _are_blocks(modules: list[nn.Module]) -> bool:
    is_one_class = len({type(each) for each in modules}) == 1
    return is_one_class and not is_container(modules[0]) and all(numel_of([each]) for each in modules)


def numel_of(modules: list[nn.Module]) -> int:
    """Returns the elements of all parameters of `modules`, each once."""
    return sum(each.numel() for each in {each for module in modules for each in module.parameters()})
