"""The adapters of a sharded `PeftModel`, in the folder that `PeftModel.from_pretrained` loads.

    FOLDER/adapter_config.json, adapter_model.safetensors          the adapter "default"
    FOLDER/NAME/adapter_config.json, adapter_model.safetensors     an adapter of another name

peft says which tensors are an adapter's, and what they are called in its file: it is asked with tensors that have
shapes and no values. Then these tensors are gathered, and no others.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sherd.api.saved_folder import beneath_wrappers, plain_class, publish, written_beside
from sherd.checkpoint.catalog import without_wrappers
from sherd.checkpoint.full_tensors import FullTensors, Source, write_files
from sherd.errors import UnsupportedError
from sherd.storage.places import Disk

DEFAULT = "default"
"""The adapter that peft saves in the folder itself."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WEIGHTS = re.compile(r"adapter_model\.(safetensors|bin)")


def adapted_model(model: nn.Module) -> Any:
    """Returns the `PeftModel` that `model` is beneath its wrappers, or None."""
    return beneath_wrappers(model, "peft", "PeftModel")


def save_adapters(model: nn.Module, adapted: Any, folder: Path, dtype: torch.dtype | None, tokenizer: Any) -> str:
    """Save all adapters of `adapted`, and return the folder. All ranks must call it. They gather the tensors of the
    adapters alone, and the first rank writes them.

    Args:
        model: what was sharded.
        adapted: the `PeftModel` that it is beneath its wrappers.
        folder: a folder that all ranks share.
        dtype: the dtype of floating-point weights in the files; None: their own.
        tokenizer: is saved beside the adapters, if it is not None.

    Raises:
        UnsupportedError: peft makes new tensors for an adapter's file.
        CheckpointError: the first rank cannot write: on all ranks.
        StateError: the model is in use, or on the meta device.
        CommError: a rank has died.
    """
    tensors = FullTensors(model, dtype, "save_pretrained()")
    with written_beside(folder) as (part, ranks, what):
        for adapter, config in adapted.peft_config.items():
            # On all ranks: a wrapper's state_dict, which peft asks for names, is a collective.
            named = ranks.each(lambda adapter=adapter: _names(adapted, tensors, adapter), what)[0]  # type: ignore[misc]
            if isinstance(named, str):
                raise UnsupportedError(named)
            sources = [Source(own, dict.fromkeys(of, tensors.described[own])) for own, of in named.items()]
            place = part / adapter
            convert = _Renaming(named)
            write_files(tensors, {WEIGHTS: sources}, convert, ranks, Disk(place), what)

            def finish(adapter: str = adapter, config: Any = config, place: Path = place) -> None:
                _write_config(adapted, config, place)
                if tokenizer is not None and adapter == DEFAULT:
                    tokenizer.save_pretrained(place)
                publish(place, folder if adapter == DEFAULT else folder / adapter, CONFIG, _WEIGHTS)

            ranks.first(finish, what)
    return str(folder)


@dataclass(frozen=True)
class _Renaming:
    """Gives a tensor its names in an adapter's file."""

    names: Mapping[str, list[str]]

    def __call__(self, own: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict.fromkeys(self.names[own], tensor)


class _Unwrapped:
    """A model as peft knows it: the paths of its modules have no parts of wrappers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields all modules; of a wrapper and what it wraps, the latter."""
        yield from {without_wrappers(path): module for path, module in self._model.named_modules()}.items()


def _names(adapted: Any, tensors: FullTensors, adapter: str) -> dict[str, list[str]] | str:
    """Returns the names in the adapter's file, by the model's own name of each tensor; or why there are none."""
    from peft import get_peft_model_state_dict

    own_of = _own_names(adapted, tensors)
    given = {name: _empty(tensors, own) for name, own in own_of.items()}
    name_of = {id(each): name for name, each in given.items()}
    kind = adapted.peft_config[adapter].peft_type
    remedy = "inside `with sherd.unsharded(model):` its own save_pretrained can, on one rank"
    if adapted.peft_config[adapter].is_prompt_learning:
        return f"save_pretrained: {kind} of {adapter} is computed by the model as it is saved; {remedy}"
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(
        _Unwrapped(adapted), state_dict=dict(given), adapter_name=adapter
    )
    # A module that peft has copied to train it: where its parameters are flat, it shows none to peft.
    mark = f".modules_to_save.{adapter}."
    found = {name.replace(mark, "."): each for name, each in given.items() if mark in name} | found
    made = sorted(name for name, each in found.items() if id(each) not in name_of)
    if made:
        return f"save_pretrained: peft makes new tensors of {adapter}, a {kind}, for its file: {made[0]}; {remedy}"
    named: dict[str, list[str]] = {}
    for name, each in found.items():
        named.setdefault(own_of[name_of[id(each)]], []).append(name)
    return named


def _own_names(adapted: Any, tensors: FullTensors) -> dict[str, str]:
    """Returns, by each name that a state dict has without wrappers, the first name of the tensor in the model."""
    saved = [*tensors.parameters, *(name for name in tensors.buffers if name in tensors.saved_buffers)]
    names = {name: name for name in saved} | {alias: own for alias, own in tensors.aliases.items() if own in saved}
    found = {without_wrappers(name): own for name, own in names.items()}
    first: dict[int, str] = {}
    for path, buffer in adapted.named_buffers(remove_duplicate=False):
        name = without_wrappers(path)
        own = found.get(first.setdefault(id(buffer), name))
        if own is not None:
            found[name] = own
    return found


def _empty(tensors: FullTensors, own: str) -> torch.Tensor:
    described = tensors.described[own]
    return torch.empty(described.shape, dtype=described.dtype, device="meta")


def _write_config(adapted: Any, config: Any, place: Path) -> None:
    """Write the adapter's configuration as peft writes it: for inference, and with the name of the base model."""
    config, base = copy.deepcopy(config), adapted.get_base_model()
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    mapping = None
    if config.task_type is None:
        cls = plain_class(base)
        mapping = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    config.save_pretrained(place, auto_mapping_dict=mapping)
