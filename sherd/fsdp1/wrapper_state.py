"""`WrapperState`: what a `FullyShardedDataParallel` keeps, except for its unit, in one record under one attribute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sherd._torch import is_tensor_parallel, steps_in_backward
from sherd.engine import ShardedParameter, Unit
from sherd.errors import ModuleError, UnsupportedError
from sherd.fsdp1 import materialize
from sherd.fsdp1.arguments import ShardingStrategy, WrapperArguments
from sherd.fsdp1.extensions import FSDPExtensions
from sherd.fsdp1.state_dict_type import StateDictSettings, default_settings
from sherd.wrap.names import WRAPPED


@dataclass(eq=False)
class WrapperState:
    """The record that a wrapper keeps in addition to its unit.

    Args:
        unit: the unit that the wrapper made.
        choices: the arguments that describe the unit, as the user gave them.
        extensions: the treatment of parameters that are DTensors.
        extended: what `pre_flatten_transform` returned for each tensor-parallel parameter; restores the parameter.
        buffer_dtypes: the dtype that a buffer had before the cast, by the buffer's module and its name in it.
        undistributed: the modules that have parameters and were not tensor parallel when they were wrapped.
        settings: the kind of state dict that the wrapper gives.
    """

    unit: Unit
    choices: WrapperArguments
    extensions: FSDPExtensions
    extended: Mapping[ShardedParameter, object]
    buffer_dtypes: Mapping[tuple[nn.Module, str], torch.dtype]
    undistributed: list[nn.Module]
    settings: StateDictSettings = field(default_factory=default_settings)
    _has_run: bool = False
    _show_names: list[Unit] = field(default_factory=list)
    """The units whose parameters are registered under their own names, for the length of a state dict."""
    _load_errors: list[str] = field(default_factory=list)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Returns the ranks that shard, or under `NO_SHARD` the ranks that hold copies."""
        mesh = self.unit.mesh
        copies = self.choices.strategy is ShardingStrategy.NO_SHARD or mesh.shard_group is None
        group = mesh.replicate_group if copies else mesh.shard_group
        assert group is not None, "NO_SHARD has a replicate axis, the others a shard axis"
        return group

    def of_copy(self, unit: Unit, copies: Mapping[int, Any]) -> WrapperState:
        """Returns the record of a copy of the wrapper, made into `unit`. `copies` are keyed by the original's id."""
        records = dict(zip(self.unit.parameters, unit.parameters, strict=True))
        return WrapperState(
            unit,
            self.choices,
            self.extensions,
            {records[record]: extension for record, extension in self.extended.items()},
            {(copies[id(module)], name): dtype for (module, name), dtype in self.buffer_dtypes.items()},
            [copies[id(module)] for module in self.undistributed],
            self.settings,
            self._has_run,
        )

    def use(self, settings: StateDictSettings) -> None:
        self.settings = settings

    # Around a forward

    def before_forward(self) -> None:
        """Do what the wrapper has to do before the wrapped module's forward.

        Raises:
            ModuleError: `parallelize_module` was applied to a module after the module was wrapped.
            UnsupportedError: a parameter has an optimizer that is to step in backward.
        """
        self.hide_names()
        if not self._has_run:
            # A flat parameter hides its parameters from `parallelize_module`, which would itself raise at shards.
            for module in self.undistributed:
                if is_tensor_parallel(module):
                    raise ModuleError(
                        f"parallelize_module was applied to a {type(module).__name__} after it was wrapped in "
                        f"{self.unit.name}, whose shards it cannot distribute; build the model again, apply "
                        "parallelize_module, and wrap it then"
                    )
            for parameter in self.unit.parameters:
                if steps_in_backward(parameter.optimizer_param):
                    raise UnsupportedError(
                        f"{parameter.name} has optimizers that are to step in backward, from "
                        "_apply_optimizer_in_backward; nothing would call them: step an optimizer of "
                        "model.parameters() after the backward"
                    )
            self._has_run, self.undistributed = True, []
        if self.buffer_dtypes and self.unit.precision.full_precision_in_eval:
            wanted = None if self.unit.in_full_precision else self.choices.buffer_dtype
            materialize.recast_buffers(self.buffer_dtypes, wanted)

    # Around a state dict

    def show_names(self) -> None:
        """Register the parameters of the unit and its tied_owners under their own names, not as flat parameters.

        Raises:
            StateError: in the middle of a forward or backward.
        """
        self.unit.show_shards()
        self.hide_names()
        for unit in (self.unit, *self.unit.tied_owners):
            if not all(place.registered for parameter in unit.parameters for place in parameter.places):
                unit.shards.register(True)
                self._show_names.append(unit)

    def hide_names(self) -> None:
        """Register flat parameters again where a state dict, finished or interrupted, shows the parameters' names."""
        while self._show_names:
            unit = self._show_names.pop()
            unit.shards.register(unit.lent is not None)

    def begin_load(self, errors: list[str]) -> None:
        """Show the parameters' names, and remember the list to which nn.Module adds the `errors` of this load."""
        self.show_names()
        self._load_errors = errors

    def end_load(self) -> None:
        """Take the wrapped module's name out of the errors of the load, and hide the parameters' names."""
        self._load_errors[:] = [text.replace(f"{WRAPPED}.", "") for text in self._load_errors]
        self._load_errors = []
        self.hide_names()


def find_state(module: nn.Module) -> WrapperState | None:
    """Returns the record of `module`; None if `module` is no wrapper."""
    return module.__dict__.get(Unit.FRONT_END)


def state_of(wrapper: nn.Module) -> WrapperState:
    state = find_state(wrapper)
    assert state is not None, "a wrapper has its record from the end of its making on"
    return state


def before_forward(wrapper: nn.Module) -> None:
    state_of(wrapper).before_forward()
