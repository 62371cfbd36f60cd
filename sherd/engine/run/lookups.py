"""The embeddings of a unit that is kept from forward to backward: backward does not read their weights.

    forward     the root's ends, and nobody holds the weight        its group is freed
    between     the embedding is called: recomputation, a hook      a forward pre-hook has it gathered again
    backward    brings the weight's gradient                        as that of any other

Only groups of embeddings alone, those that are large: what else reads a parameter in backward, autograd has saved, and
an `nn.Embedding` reads its weight again only where it is called. The hook is there only while the group is gone, so no
call in a forward runs it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from sherd._torch import dynamo_disabled
from sherd.engine.moves.weights import Weights
from sherd.engine.run.backward import Backward

TouchHook = tuple[OrderedDict[int, Callable[..., Any]], int, Callable[..., Any]]
"""A dict of forward pre-hooks, and the key and value of one in it that comes and goes."""


class Lookups:
    """The `groups`, by number in `weights`, of which all parameters are embeddings' weights and trainable.

    `unshard()` is called when one is about to be read that was freed. `hooks` notice that.
    """

    def __init__(self, weights: Sequence[Weights], unshard: Callable[[], None]) -> None:
        found = {number: modules for number, each in enumerate(weights) if (modules := _embeddings_of(each))}
        self.hooks: list[TouchHook] = []
        self.groups: tuple[int, ...] = ()
        if len(found) == len(weights):
            return  # a unit is unsharded as long as one of its groups is
        self.groups = tuple(found)

        @dynamo_disabled
        def about_to_read(module: nn.Module, args: Any) -> None:
            unshard()

        for module in {id(each): each for modules in found.values() for each in modules}.values():
            hooks: Any = module._forward_pre_hooks  # declared as a dict; it is ordered
            handle = module.register_forward_pre_hook(about_to_read)
            self.hooks.append((hooks, handle.id, hooks.pop(handle.id)))

    def unread(self, backward: Backward) -> tuple[int, ...]:
        """Returns the groups that `backward`, the unit's, will not read after the forward that has just ended. They may
        be freed: calls of their embeddings are noticed from now on."""
        unread = backward.unread(self.groups)
        for hooks, key, hook in self.hooks if unread else ():
            hooks[key] = hook
        return unread


def _embeddings_of(weights: Weights) -> list[nn.Module]:
    """Returns the modules that show the group's parameters, if they are all embeddings as torch has them; else none."""
    group = weights.group
    if group.gathers_itself or not weights.plan.frees_unsharded:
        return []
    if not all(parameter.requires_grad for parameter in group.parameters):
        return []
    modules = [place.module for parameter in group.parameters for place in parameter.places]
    found = [module for module in modules if module is not None and _is_embedding(module)]
    return found if len(found) == len(modules) else []


def _is_embedding(module: nn.Module) -> bool:
    forward = getattr(module.forward, "__func__", None)
    return forward is nn.Embedding.forward
