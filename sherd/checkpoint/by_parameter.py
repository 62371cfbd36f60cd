"""Flat parameters in `torch.distributed.checkpoint.state_dict`: its functions see the members instead.

    the user's optimizer      flat | head.weight                     states of two parameters
    `ByParameter`             a.weight | a.bias | head.weight        states of three, views of the same memory

These functions look for each parameter of an optimizer in the model, and write its state under the name it has in the
model. While they run, modules show the members under their names, and a `ByParameter` stands for an optimizer that owns
a flat parameter. State that is loaded into it goes to the optimizer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from torch import nn
from torch.optim import Optimizer

from sherd._torch import answer_checkpointing
from sherd.checkpoint.catalog import Catalog, StateDict
from sherd.checkpoint.loading import to_load
from sherd.checkpoint.saving import Form, state_by_name
from sherd.engine import FlatParameter, Unit, watcher
from sherd.errors import OptimStateError


class ByParameter(Optimizer):
    """An optimizer that stands for `optimizer`, which owns flat parameters of `model`.

    It owns their members, with views of their state. It can be saved and loaded, but it cannot step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._model = model
        self._members = [
            [member for entry in group for member in entry.members] for group in Catalog(model).groups_of(optimizer)
        ]
        groups = []
        for group, members in zip(optimizer.param_groups, self._members, strict=True):
            names = {"param_names": [member.name for member in members]} if "param_names" in group else {}
            groups.append({**group, **names, "params": [member.parameter for member in members]})
        super().__init__(groups, dict(optimizer.defaults))

    def read(self) -> None:
        """Take views of the optimizer's state. All ranks must call it."""
        if self.state or not self.optimizer.state:
            return
        named = state_by_name(Catalog(self._model), self.optimizer, None, Form())["state"]
        for member in chain.from_iterable(self._members):
            if member.name in named:
                self.state[member.parameter] = named[member.name]

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state into the optimizer. Its keys may be anything; its parameters are in the order of `param_groups`.

        Raises:
            OptimStateError: it has other numbers of parameters, or members of one flat parameter differ in their state.
        """
        groups = state_dict["param_groups"]
        numbers = [[len(group["params"]) for group in groups], [len(members) for members in self._members]]
        if numbers[0] != numbers[1]:
            raise OptimStateError(
                f"the groups of the state have {numbers[0]} parameters, those of the optimizer {numbers[1]}; build the "
                "optimizer with the groups that it had when it was saved"
            )
        keys = chain.from_iterable(group["params"] for group in groups)
        name_of = dict(zip(keys, (member.name for member in chain.from_iterable(self._members)), strict=True))
        named = {
            "state": {name_of.get(key, key): state for key, state in state_dict["state"].items()},
            "param_groups": [{**group, "params": [name_of[key] for key in group["params"]]} for group in groups],
        }
        to_load(Catalog(self._model), self.optimizer, named, load_directly=True)


def show_parameters_to_checkpointing() -> None:
    """Let the functions of torch's checkpointing, one of which is running, see the members of flat parameters."""
    answer_checkpointing(
        {
            "_init_optim_state": _init_state,
            "_get_model_state_dict": _with_names,
            "_get_optim_state_dict": _with_members,
            "_load_optim_state_dict": _with_members,
        }
    )


def _init_state(theirs: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
    """Make the state that torch makes with a step, which only the user's optimizer can do."""
    if isinstance(optimizer, ByParameter):
        theirs(optimizer.optimizer)
        optimizer.read()
    else:
        theirs(optimizer)


def _with_names(theirs: Callable[..., object], model: nn.Module, *more: object) -> object:
    with Unit.members_shown(Unit.below(model)):
        return theirs(model, *more)


def _with_members(
    theirs: Callable[..., object], model: nn.Module, optimizers: Sequence[Optimizer], *more: object
) -> object:
    with Unit.members_shown(Unit.below(model)):
        return theirs(model, tuple(_by_parameter(model, optimizer) for optimizer in optimizers), *more)


def _by_parameter(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    if not optimizer.state:
        watcher.adopt(optimizer)  # it may have been built before the model was wrapped
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    is_flat = any(isinstance(parameter, FlatParameter) for parameter in parameters)
    return ByParameter(model, optimizer) if is_flat else optimizer
