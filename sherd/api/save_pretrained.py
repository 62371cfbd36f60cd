"""`save_pretrained`: a sharded Hugging Face model in the folder that `from_pretrained` of transformers or peft loads.

    FOLDER/config.json, model.safetensors                          a transformers model; large ones in several files
    FOLDER/adapter_config.json, adapter_model.safetensors          the adapter "default" of a PeftModel
    FOLDER/NAME/adapter_config.json, adapter_model.safetensors     an adapter of another name

Files wait in a folder inside FOLDER until all files are complete, and then move to their places.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sherd.api.module import FSDPModule, require_module
from sherd.checkpoint.catalog import without_wrappers
from sherd.checkpoint.encoding import in_buckets
from sherd.checkpoint.full_tensors import Full, FullTensors, TensorSource, file_names, write_files
from sherd.checkpoint.ranks import Ranks
from sherd.errors import CheckpointError, ModuleError, UnsupportedError
from sherd.requirements import require_floating_dtype, require_int, require_type
from sherd.storage.places import DiskPlace, flush

MAX_SHARD_BYTES = 5_000_000_000
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")

DEFAULT = "default"
"""The adapter that peft saves in the folder itself."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ADAPTER_WEIGHTS = re.compile(r"adapter_model\.(safetensors|bin)")

_PART = ".save_pretrained.part"


def save_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
) -> str:
    """Save a sharded Hugging Face model as transformers' own `save_pretrained` does. All ranks must call it.

        sherd.save_pretrained(model, "out", dtype=torch.bfloat16)
        plain = transformers.AutoModelForCausalLM.from_pretrained("out")

    Each rank writes some of the files, with tensors that are gathered one after the other: no rank holds the model. The
    files become an export once all of them have reached the disk. After an interruption, `path` has its old content, or
    has no `config.json` and does not load.

    Args:
        model: a transformers `PreTrainedModel`, sharded by either front end, compiled or not. Or a `PeftModel`: then
            its adapters alone are saved, as peft saves them; `PeftModel.from_pretrained(base, path)` loads them.
        path: a folder that all ranks share. An export in the folder is replaced.
        max_shard_bytes: the most bytes of a weights file; a larger tensor has its own file. An adapter is one file.
        dtype: the dtype of floating-point weights in the files, and in `config.json`. None: the dtype of each weight.
        tokenizer: a tokenizer or processor that is saved with the model, by its own `save_pretrained`.

    Returns:
        The path.

    Raises:
        ModuleError: `model` is no transformers model and no `PeftModel`.
        UnsupportedError: the model is quantized, or transformers turns several of its tensors into one for its files,
            or peft makes new tensors for an adapter's files.
        CheckpointError: a rank cannot write, or ranks do not share the folder: on all ranks.
        StateError: the model is on the meta device, inside `sherd.unsharded`, or in the middle of a forward or
            backward.
        CommError: a rank has died.
        PolicyError, PolicyTypeError: an argument is out of range, or of another type.
    """
    require_module("save_pretrained expects a module", model)
    require_type("save_pretrained(path=...): expected a path", path, str | os.PathLike)
    require_int("save_pretrained(max_shard_bytes={})", max_shard_bytes, 1)
    require_floating_dtype("save_pretrained(dtype={})", dtype)
    adapted = _beneath_wrappers(model, "peft", "PeftModel")
    if adapted is not None:
        return _save_adapters(model, adapted, Path(path), dtype, tokenizer)
    inner = _beneath_wrappers(model, "transformers", "PreTrainedModel")
    if inner is None:
        raise ModuleError(
            f"save_pretrained: {type(model).__name__} is no transformers PreTrainedModel and no PeftModel; sherd.save "
            "writes a checkpoint of any model, and sherd.iter_full_parameters yields its weights for files of your own"
        )
    if getattr(inner, "hf_quantizer", None) is not None or getattr(inner, "_hf_peft_config_loaded", False):
        raise UnsupportedError(
            f"save_pretrained: {type(inner).__name__} is quantized or has adapters without a PeftModel, which "
            "are saved in formats of their own; collect sherd.iter_full_parameters(model, rank0_only=True) in a dict, "
            "and give it to the model's save_pretrained(path, state_dict=...)"
        )
    tensors = FullTensors(model, dtype, "save_pretrained()")
    named = _Named(inner, tensors)
    parts = in_buckets(named.sources, lambda source: source.nbytes, max_shard_bytes)
    files = dict(zip(file_names(len(parts)), parts, strict=True))
    with _staging_folder(Path(path)) as (part, ranks, purpose):
        sizes = write_files(tensors, files, named.converted, ranks, DiskPlace(part), purpose)

        def finish() -> None:
            for name, size in zip(files, sizes, strict=True):
                if not (part / name).is_file() or (part / name).stat().st_size != size:
                    raise CheckpointError(f"{part / name} does not exist; give a folder that all ranks share")
            _write_index_config(inner, tensors, files, part)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)
            _publish(part, Path(path), CONFIG, _WEIGHTS)

        ranks.first(finish, purpose)
    return str(Path(path))


# A transformers model


class _Named:
    """The tensors of a transformers model, by their names in the model's files."""

    def __init__(self, inner: Any, tensors: FullTensors) -> None:
        self._inner = inner
        self._names = _kept_names(inner, tensors)
        # The conversion is tried on tensors without values: of all tensors together, and of each by itself, as
        # `save_pretrained` converts them.
        full = {name: tensors.described[own] for own, name in self._names.items()}
        meta = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in full.items()}
        reverted = _reverted(inner, dict(meta))
        by_id = {id(tensor): name for name, tensor in meta.items()}
        self._renamed = {by_id[id(each)]: name for name, each in reverted.items() if id(each) in by_id}
        self.sources = []
        for own, name in self._names.items():
            results: Mapping[str, Full]
            if name in self._renamed:
                results = {self._renamed[name]: full[name]}
            else:
                single = _reverted(inner, {name: meta[name]})
                results = {each: Full(tensor.shape, tensor.dtype) for each, tensor in single.items()}
            self.sources.append(TensorSource(own, results))
        one_by_one = {name: each for source in self.sources for name, each in source.results.items()}
        together = {name: Full(each.shape, each.dtype) for name, each in reverted.items()}
        if one_by_one != together:
            names = one_by_one.keys() | together.keys()
            wrong = sorted(name for name in names if one_by_one.get(name) != together.get(name))
            raise UnsupportedError(
                f"save_pretrained: transformers makes {', '.join(wrong[:4])} of several tensors of "
                f"{type(inner).__name__}, which are never unsharded together; collect "
                "sherd.iter_full_parameters(model, rank0_only=True) in a dict, and give it to the model's "
                "save_pretrained(path, state_dict=...)"
            )

    def converted(self, own: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the tensors in the files that the model's tensor `own` becomes, by their names in the files."""
        name = self._names[own]
        return {self._renamed[name]: tensor} if name in self._renamed else _reverted(self._inner, {name: tensor})


def _kept_names(inner: Any, tensors: FullTensors) -> dict[str, str]:
    """Returns the name under which each tensor is saved, by the first name in the model."""
    # A tied tensor is saved under the name that transformers does not fill from another tensor when it loads.
    filled = set(getattr(inner, "all_tied_weights_keys", None) or getattr(inner, "_tied_weights_keys", None) or ())
    ignored = set(inner._keys_to_ignore_on_save or ())
    others: dict[str, list[str]] = {}
    for alias, first in tensors.aliases.items():
        others.setdefault(first, []).append(alias)
    kept = {}
    for own in [*tensors.parameters, *tensors.saved_buffers]:
        names = [without_wrappers(each) for each in (own, *others.get(own, ()))]
        if not ignored.issuperset(names):
            kept[own] = next((name for name in names if name not in filled), names[0])
    return kept


def _reverted(inner: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a model's files that `tensors` of the model become; the same before transformers 5."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return tensors
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(inner, tensors)
    return reverted


def _write_index_config(
    inner: Any, tensors: FullTensors, files: Mapping[str, Sequence[TensorSource]], part: Path
) -> None:
    config = copy.deepcopy(inner.config)
    config.architectures = [_plain_class(inner).__name__]
    dtypes = [each.dtype for each in tensors.described.values() if each.dtype.is_floating_point]
    config.dtype = str(dtypes[0]).removeprefix("torch.") if dtypes else None
    texts = {CONFIG: config.to_json_string()}
    if inner.can_generate():
        texts["generation_config.json"] = inner.generation_config.to_json_string()
    if len(files) > 1:
        places = {name: file for file, sources in files.items() for each in sources for name in each.results}
        counts = {
            "total_parameters": sum(tensors.described[name].shape.numel() for name in tensors.parameters),
            "total_size": sum(source.nbytes for sources in files.values() for source in sources),
        }
        texts[INDEX] = json.dumps({"metadata": counts, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"
    for name, text in texts.items():
        encoded = text.encode()
        DiskPlace(part).write(name, lambda encoded=encoded: iter([memoryview(encoded)]))  # type: ignore[misc]


# The adapters of a PeftModel


def _save_adapters(model: nn.Module, adapted: Any, folder: Path, dtype: torch.dtype | None, tokenizer: Any) -> str:
    """Save all adapters of `adapted`, the `PeftModel` beneath the wrappers of `model`, and return the folder.

    peft says which tensors belong to an adapter, and their names in the adapter's file: peft is given tensors with
    shapes and no values. Then these tensors alone are gathered, and the first rank writes them.
    """
    tensors = FullTensors(model, dtype, "save_pretrained()")
    with _staging_folder(folder) as (part, ranks, purpose):
        for adapter, config in adapted.peft_config.items():
            # On all ranks: peft reads names from a wrapper's state_dict, which is a collective.
            named = ranks.each(partial(_names, adapted, tensors, adapter), purpose)[0]
            if isinstance(named, str):
                raise UnsupportedError(named)
            sources = [TensorSource(own, dict.fromkeys(of, tensors.described[own])) for own, of in named.items()]
            place = part / adapter
            write_files(tensors, {ADAPTER_WEIGHTS: sources}, partial(_renamed, named), ranks, DiskPlace(place), purpose)

            def finish(adapter: str = adapter, config: Any = config, place: Path = place) -> None:
                _write_adapter_config(adapted, config, place)
                if tokenizer is not None and adapter == DEFAULT:
                    tokenizer.save_pretrained(place)
                target = folder if adapter == DEFAULT else folder / adapter
                _publish(place, target, ADAPTER_CONFIG, _ADAPTER_WEIGHTS)

            ranks.first(finish, purpose)
    return str(folder)


def _renamed(names: Mapping[str, list[str]], own: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict.fromkeys(names[own], tensor)


class _Unwrapped:
    """A model whose modules have paths without the parts that wrappers add: peft looks modules up by path."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields all modules, a wrapped module in the place of its wrapper."""
        yield from {without_wrappers(path): module for path, module in self._model.named_modules()}.items()


def _names(adapted: Any, tensors: FullTensors, adapter: str) -> dict[str, list[str]] | str:
    """Returns the names in the adapter's file, by the model's own name of each tensor; or the text of an error."""
    from peft import get_peft_model_state_dict

    saved = [*tensors.parameters, *tensors.saved_buffers]
    names = {name: name for name in saved} | {alias: own for alias, own in tensors.aliases.items() if own in saved}
    own_of = {without_wrappers(name): own for name, own in names.items()}
    first: dict[int, str] = {}
    for path, buffer in adapted.named_buffers(remove_duplicate=False):
        name = without_wrappers(path)
        own_name = own_of.get(first.setdefault(id(buffer), name))
        if own_name is not None:
            own_of[name] = own_name
    given = {}
    for name, own in own_of.items():
        described = tensors.described[own]
        given[name] = torch.empty(described.shape, dtype=described.dtype, device="meta")
    name_of = {id(each): name for name, each in given.items()}
    method = adapted.peft_config[adapter].peft_type
    remedy = "inside `with sherd.unsharded(model):` its own save_pretrained can, on one rank"
    if adapted.peft_config[adapter].is_prompt_learning:
        return f"save_pretrained: {method} of {adapter} is computed by the model as it is saved; {remedy}"
    in_file: dict[str, torch.Tensor] = get_peft_model_state_dict(
        _Unwrapped(adapted), state_dict=dict(given), adapter_name=adapter
    )
    # peft copies a module to train it. A copy with a flat parameter shows peft no parameters.
    mark = f".modules_to_save.{adapter}."
    in_file = {name.replace(mark, "."): each for name, each in given.items() if mark in name} | in_file
    new = sorted(name for name, each in in_file.items() if id(each) not in name_of)
    if new:
        return f"save_pretrained: peft makes new tensors of {adapter}, a {method}, for its file: {new[0]}; {remedy}"
    named: dict[str, list[str]] = {}
    for name, each in in_file.items():
        named.setdefault(own_of[name_of[id(each)]], []).append(name)
    return named


def _write_adapter_config(adapted: Any, config: Any, place: Path) -> None:
    """Write the adapter's configuration as peft does: for inference, with the name of the base model."""
    config, base = copy.deepcopy(config), adapted.get_base_model()
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    mapping = None
    if config.task_type is None:
        cls = _plain_class(base)
        mapping = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    config.save_pretrained(place, auto_mapping_dict=mapping)


# The folder


@contextmanager
def _staging_folder(folder: Path) -> Iterator[tuple[Path, Ranks, str]]:
    """Yields a folder inside `folder` for incomplete files, the ranks, and words for errors. All ranks must enter.

    The first rank makes the folder and removes it at the end.

    Raises:
        CheckpointError: the folder cannot be made.
    """
    part, ranks, purpose = folder / _PART, Ranks(), f"save_pretrained to {folder}"

    def begin() -> None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)

    ranks.first(begin, purpose)
    try:
        yield part, ranks, purpose
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise
    ranks.first(lambda: shutil.rmtree(part, ignore_errors=True), purpose)  # before the other ranks go on


def _publish(part: Path, folder: Path, config: str, weights: re.Pattern[str]) -> None:
    """Move all files from `part` into `folder`, and remove files of an older export, whose names match `weights`."""
    # A folder without `config` does not load: so `config` is removed first and comes last.
    folder.mkdir(parents=True, exist_ok=True)
    (folder / config).unlink(missing_ok=True)
    new = sorted(os.listdir(part), key=lambda name: name == config)
    for name in os.listdir(folder):
        if weights.fullmatch(name) and name not in new:
            (folder / name).unlink()
    for name in new:
        if name == config:
            flush(folder)
        os.replace(part / name, folder / name)
    flush(folder)


def _beneath_wrappers(model: nn.Module, package: str, name: str) -> Any:
    """Returns the innermost module of the class `name` of `package` beneath the wrappers of `model`, or None."""
    cls = getattr(sys.modules.get(package), name, None)  # a package that is not imported has made no model
    inner = None
    for path, module in model.named_modules():
        if cls is not None and not without_wrappers(path) and isinstance(module, cls):
            inner = module
    return inner


def _plain_class(module: nn.Module) -> type:
    cls = type(module)
    return cls.__mro__[2] if isinstance(module, FSDPModule) else cls
