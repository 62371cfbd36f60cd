"""The embeddings of a unit that is kept from forward to backward: backward does not read their weights.

    forward     the root's ends                                    its group is freed
    between     a program reads the weight: `embed.weight`         the unit is gathered again, and kept from then on
    backward    brings the weight's gradient                       as that of any other

Only groups of embeddings alone, those that are large: what else reads a parameter in backward, autograd has saved, or
it reads an attribute of a module. From the end of forward on, the embedding's `_parameters` is therefore a dict that
notices who takes something out. It is there in the first step too, in which nothing is freed: a program that always
reads the weight keeps it. In a forward the module has its own dict, so no call pays for this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from sherd.engine.moves.saved import is_running
from sherd.engine.moves.weights import Weights
from sherd.engine.run.backward import Backward


class Lookups:
    """The `groups`, by number in `weights`, of which all parameters are embeddings' weights and trainable.

    `unshard()` is called when one is about to be read that may have been freed. `stayed`: groups that the schedule has
    freed and that are there all the same, since this rank needs them.
    """

    def __init__(self, weights: Sequence[Weights], backward: Backward, unshard: Callable[[], None]) -> None:
        found = {number: modules for number, each in enumerate(weights) if (modules := _embeddings_of(each))}
        if len(found) == len(weights):
            found = {}  # a unit is unsharded as long as one of its groups is
        self.groups = tuple(found)
        self.stayed: set[int] = set()
        self._modules = [weakref.ref(module) for modules in found.values() for module in modules]
        self._weights, self._backward, self._unshard = weights, backward, unshard
        self._was_read = False

    def after_forward(self) -> tuple[int, ...]:
        """Notice, from now on, who takes one of the weights from its module. Returns the groups that backward will not
        read."""
        self._show_own()
        self._watch()
        return self._backward.unread(self.groups)

    def free(self, group: int) -> None:
        """Free the group, which backward will not read, unless this rank reads it all the same.

        Other ranks may do otherwise. So the group counts as freed for whoever gathers it again.
        """
        self._show_own()  # for what stands for them refers to the weights too
        if self._was_read or self._weights[group].is_held:
            self.stayed.add(group)
        else:
            self._weights[group].free()
        self._watch()

    def unwatch(self) -> None:
        """Notice nothing, from now on: all of the unit is there, or is freed."""
        self.stayed.clear()
        self._show_own()

    def _show_own(self) -> None:
        for ref in self._modules:
            if (module := ref()) is not None and isinstance(module._parameters, Watched):
                module._parameters = module._parameters.watched

    def _watch(self) -> None:
        for ref in self._modules if not self._was_read else ():
            if (module := ref()) is not None:
                module._parameters = Watched(module._parameters, self._touched)

    def _touched(self) -> None:
        if not is_running(self._backward):  # else it is a forward that finds all there, as after one without backward
            self._was_read = True
            self._unshard()
        self.unwatch()


def _touching(method: Callable[..., Any]) -> Callable[..., Any]:
    def touch(self: Watched, *args: object, **kwargs: object) -> object:
        self.touched()
        return method(self.watched, *args, **kwargs)

    return touch


class Watched(dict[str, nn.Parameter | None]):
    """Stands for `watched`, a module's `_parameters`. `touched()` is called before one is read or written by name.

    Who goes through all of them (`parameters()`) is not noticed: he meets the shards of other units too.
    """

    def __init__(self, watched: dict[str, nn.Parameter | None], touched: Callable[[], None]) -> None:
        super().__init__(watched)
        self.watched, self.touched = watched, touched

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self),)  # as a copy of the module has it

    __getitem__, get = _touching(dict.__getitem__), _touching(dict.get)
    __setitem__, setdefault, update = _touching(dict.__setitem__), _touching(dict.setdefault), _touching(dict.update)
    __delitem__, pop, popitem = _touching(dict.__delitem__), _touching(dict.pop), _touching(dict.popitem)
    clear = _touching(dict.clear)


def _embeddings_of(weights: Weights) -> list[nn.Module]:
    """Returns the modules that show the group's parameters, if they are all embeddings as torch has them; else none."""
    group = weights.group
    if group.gathers_itself or not weights.plan.frees_unsharded:
        return []
    if not all(parameter.requires_grad for parameter in group.parameters):
        return []
    places = [place for parameter in group.parameters for place in parameter.places]
    modules = [place.module() for place in places if place.registered]
    found = [module for module in modules if module is not None and _is_embedding(module)]
    return found if len(found) == len(places) else []


def _is_embedding(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is nn.Embedding.forward
