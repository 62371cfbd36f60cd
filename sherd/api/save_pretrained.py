"""`save_pretrained`: a sharded Hugging Face model as the folder that transformers' `from_pretrained` loads."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sherd.api.module import require_module
from sherd.api.save_adapters import adapted_model, save_adapters
from sherd.api.saved_folder import beneath_wrappers, plain_class, publish, written_beside
from sherd.checkpoint.catalog import without_wrappers
from sherd.checkpoint.full_tensors import Full, FullTensors, Source, file_names, split, write_files
from sherd.errors import CheckpointError, ModuleError, UnsupportedError
from sherd.requirements import require_floating_dtype, require_int, require_type
from sherd.storage.places import Disk

MAX_SHARD_BYTES = 5_000_000_000
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


def save_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
) -> str:
    """Save a sharded Hugging Face model as transformers' own `save_pretrained` does, and return the path. All ranks
    must call it.

        sherd.save_pretrained(model, "out", dtype=torch.bfloat16)
        plain = transformers.AutoModelForCausalLM.from_pretrained("out")

    Each rank writes some of the files, with tensors that are gathered one after the other: no rank holds the model. The
    files become an export once all of them have reached the disk. If it is interrupted, `path` is what it was, or has
    no `config.json` and does not load.

    Args:
        model: a transformers `PreTrainedModel`, sharded by either front end, or compiled besides. Or a `PeftModel`:
            then its adapters alone are saved, as peft saves them; `PeftModel.from_pretrained(base, path)` loads them.
        path: a folder that all ranks share. An export that is there is replaced.
        max_shard_bytes: the most bytes of a weights file; a larger tensor has one for itself. An adapter is one file.
        dtype: the dtype of floating-point weights in the files, and in `config.json`. None: their own.
        tokenizer: a tokenizer or processor that is saved with the model, by its own `save_pretrained`.

    Raises:
        ModuleError: it is no transformers model and no `PeftModel`.
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
    adapted = adapted_model(model)
    if adapted is not None:
        return save_adapters(model, adapted, Path(path), dtype, tokenizer)
    inner = _hugging_face(model)
    tensors = FullTensors(model, dtype, "save_pretrained()")
    named = _Named(inner, tensors)
    parts = split(named.sources, max_shard_bytes)
    files = dict(zip(file_names(len(parts)), parts, strict=True))
    with written_beside(Path(path)) as (part, ranks, what):
        sizes = write_files(tensors, files, named.converted, ranks, Disk(part), what)

        def finish() -> None:
            for name, size in zip(files, sizes, strict=True):
                if not (part / name).is_file() or (part / name).stat().st_size != size:
                    raise CheckpointError(f"{part / name} is not there; give a folder that all ranks share")
            _write_texts(inner, tensors, files, part)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)
            publish(part, Path(path), CONFIG, _WEIGHTS)

        ranks.first(finish, what)
    return str(Path(path))


def _hugging_face(model: nn.Module) -> Any:
    """Returns the transformers model that `model` is beneath its wrappers. Raises ModuleError, UnsupportedError."""
    found = beneath_wrappers(model, "transformers", "PreTrainedModel")
    if found is None:
        raise ModuleError(
            f"save_pretrained: {type(model).__name__} is no transformers PreTrainedModel and no PeftModel; sherd.save "
            "writes a checkpoint of any model, and sherd.iter_full_parameters yields its weights for files of your own"
        )
    if getattr(found, "hf_quantizer", None) is not None or getattr(found, "_hf_peft_config_loaded", False):
        raise UnsupportedError(
            f"save_pretrained: {type(found).__name__} is quantized or has adapters without a PeftModel, which "
            "are saved in formats of their own; collect sherd.iter_full_parameters(model, rank0_only=True) in a dict, "
            "and give it to the model's save_pretrained(path, state_dict=...)"
        )
    return found


class _Named:
    """The tensors of a transformers model by the names that they have in its files."""

    def __init__(self, inner: Any, tensors: FullTensors) -> None:
        self._inner = inner
        self._names = _kept_names(inner, tensors)
        full = {name: tensors.described[own] for own, name in self._names.items()}
        self._renamed, whole = {name: name for name in full}, full
        revert = _revert_of_transformers()
        if revert is not None:
            meta = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in full.items()}
            reverted = revert(inner, dict(meta))
            by_id = {id(tensor): name for name, tensor in meta.items()}
            self._renamed = {by_id[id(each)]: name for name, each in reverted.items() if id(each) in by_id}
            whole = {name: Full(each.shape, each.dtype) for name, each in reverted.items()}
        self.sources = []
        for own, name in self._names.items():
            results: Mapping[str, Full] = {self._renamed[name]: full[name]} if name in self._renamed else {}
            if not results:
                assert revert is not None, "else all names stay"
                single = revert(inner, {name: meta[name]})
                results = {each: Full(tensor.shape, tensor.dtype) for each, tensor in single.items()}
            self.sources.append(Source(own, results))
        found = {name: each for source in self.sources for name, each in source.results.items()}
        if found != whole:
            wrong = sorted(name for name in found.keys() | whole.keys() if found.get(name) != whole.get(name))
            raise UnsupportedError(
                f"save_pretrained: transformers makes {', '.join(wrong[:4])} of several tensors of "
                f"{type(inner).__name__}, which are never together here; collect sherd.iter_full_parameters(model, "
                "rank0_only=True) in a dict, and give it to the model's save_pretrained(path, state_dict=...)"
            )

    def converted(self, own: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns what a tensor, by the model's own name, is in files."""
        name = self._names[own]
        if name in self._renamed:
            return {self._renamed[name]: tensor}
        revert = _revert_of_transformers()
        assert revert is not None, "else all names stay"
        found: dict[str, torch.Tensor] = revert(self._inner, {name: tensor})
        return found


def _kept_names(inner: Any, tensors: FullTensors) -> dict[str, str]:
    """Returns the name under which each tensor is saved, by its first name in the model: a tied one has the name that
    transformers does not fill from another."""
    filled = set(getattr(inner, "all_tied_weights_keys", None) or getattr(inner, "_tied_weights_keys", None) or ())
    ignored = set(inner._keys_to_ignore_on_save or ())
    others: dict[str, list[str]] = {}
    for alias, first in tensors.aliases.items():
        others.setdefault(first, []).append(alias)
    kept = {}
    for own in [*tensors.parameters, *(name for name in tensors.buffers if name in tensors.saved_buffers)]:
        names = [without_wrappers(each) for each in (own, *others.get(own, ()))]
        if not ignored.issuperset(names):
            kept[own] = next((name for name in names if name not in filled), names[0])
    return kept


def _revert_of_transformers() -> Any:
    """Returns transformers' function from a model's own tensors to those of its files; None before transformers 5."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None
    return revert_weight_conversion


def _write_texts(inner: Any, tensors: FullTensors, files: Mapping[str, Sequence[Source]], part: Path) -> None:
    """Write the index, if there are several files, and the configuration."""
    config = copy.deepcopy(inner.config)
    config.architectures = [plain_class(inner).__name__]
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
        Disk(part).write(name, lambda encoded=encoded: iter([memoryview(encoded)]))  # type: ignore[misc]
