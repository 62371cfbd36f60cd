"""A checkpoint in one process, without shards: as a module, or exported for use without sherd."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from sherd import save
from sherd.checkpoint.tensor_bytes import chunks_of, read_tensor
from sherd.errors import CheckpointError
from sherd.storage.files import Content, Opened, write_file
from sherd.storage.places import Disk
from sherd.train.checkpoint import fill
from sherd.train.config import Config, InputError
from sherd.train.folder import pick
from sherd.train.models import Decoder, HuggingFace
from sherd.train.saved import Checkpoint

__all__ = ["export", "load_model", "weights"]

MODEL = "model/"  # in front of the names of parameters and buffers in a checkpoint


def load_model(run: str | Path | None = None, best: bool = False) -> nn.Module:
    """The trained model, whole on the CPU, in eval mode: int64 [samples, length] to logits [samples, length, 256].

    Args:
        run: a run's folder or the folder of its checkpoints, whose newest one is taken, or one checkpoint; None: the
            last run under runs/.
        best: take the run's best checkpoint.

    Raises:
        InputError: there is no such checkpoint, or it is damaged.
    """
    checkpoint = pick(None if run is None else str(run), best)
    return _filled(checkpoint, Config.of(checkpoint.config)).eval()


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns the model's parameters and saved buffers by name: whole, on the CPU, in the dtype they were saved in.

    Names of a tied parameter have the same tensor.

    Raises:
        CheckpointError: it is damaged.
    """
    with checkpoint.opened() as source:
        read = {name: read_tensor(source, name) for name in source.manifest.tensors if name.startswith(MODEL)}
    return {plain: read[name] for plain, name in _names(source)}


def _names(source: Opened) -> Iterator[tuple[str, str]]:
    """Yields the name of each parameter and buffer in the module, and the name of its tensor in the checkpoint.

    For a Hugging Face model the module is the one that transformers makes.
    """
    manifest = source.manifest
    for name, of in (*((name, name) for name in manifest.tensors), *manifest.aliases.items()):
        if name.startswith(MODEL):
            yield name.removeprefix(MODEL).removeprefix("lm."), of


def _filled(checkpoint: Checkpoint, config: Config) -> nn.Module:
    """Returns the module with the saved values, which are read to where they belong. Raises InputError as `fill`."""
    if config.model.hf:
        module: nn.Module = HuggingFace(config.model.hf, config.run.seed, config.data.context)
    else:
        with torch.device("meta"):
            module = Decoder(config.model)
        module.to_empty(device="cpu")
    fill(checkpoint, module)
    return module


def export(checkpoint: Checkpoint, config: Config, target: Path, form: str) -> None:
    """Write the model to `target`, in a form of `sherd.cli.uses.require_target`.

    Raises:
        InputError: it cannot be written, or the checkpoint is damaged.
    """
    try:
        if form == "safetensors":
            _write_safetensors(checkpoint, target)
        elif form == "torch":
            _whole_or_none(lambda part: torch.save(weights(checkpoint), part), target)
        elif form == "sherd":
            module, user = _filled(checkpoint, config), checkpoint.manifest.user
            _whole_or_none(
                lambda part: save(str(part), {"model": module}, step=checkpoint.step, user=user, random=False), target
            )
        else:
            from sherd.train.hugging_face import write_folder

            _whole_or_none(lambda part: write_folder(weights(checkpoint), config, part), target)
    except (CheckpointError, OSError) as error:
        raise InputError(f"cannot write {target}: {Exception.__str__(error)}") from error


def _write_safetensors(checkpoint: Checkpoint, target: Path) -> None:
    """Write a file tensor by tensor: it takes the memory of one."""
    with checkpoint.opened() as source:

        def content(name: str) -> Content:
            entry = source.entry(name)
            return Content(entry.dtype, entry.shape, lambda: chunks_of(read_tensor(source, name)))

        contents = {plain: content(name) for plain, name in _names(source)}
        write_file(Disk(target.parent), target.name, contents, {"format": "pt"})


def _whole_or_none(write: Callable[[Path], object], target: Path) -> None:
    """Let `write` fill a file or folder beside `target`, which becomes `target` when it is complete."""
    part = target.with_name(target.name + ".part")
    try:
        write(part)
        part.rename(target)
    except (OSError, RuntimeError) as error:  # torch.save has no OSError for a full disk
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
        raise InputError(f"cannot write {target}: {str(error).partition(chr(10))[0]}") from error
