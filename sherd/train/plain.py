"""A checkpoint as plain tensors, in one process and without sherd's sharding: to export them, or as a module."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_shards

from sherd.train.config import Config, InputError
from sherd.train.manifest import Checkpoint
from sherd.train.models import Decoder, HuggingFace
from sherd.train.uses import TORCH_FILES, pick

__all__ = ["export", "load_model", "weights"]

MODEL = "model."  # in front of the names of parameters and buffers in a checkpoint


def load_model(run: str | Path | None = None, best: bool = False) -> nn.Module:
    """The trained model, whole on the CPU, in eval mode: int64 [samples, length] to logits [samples, length, 256].

    Args:
        run: a run's folder, whose newest checkpoint is taken, or a checkpoint's; None: the last run under runs/.
        best: take the run's best checkpoint.

    Raises:
        InputError: there is no such checkpoint.
    """
    checkpoint = pick(None if run is None else str(run), best)
    return _module(checkpoint, Config.of(checkpoint.manifest.config)).eval()


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The model's parameters and saved buffers by name, whole and on the CPU, in the dtype they were saved in."""
    about = FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    state = {
        name.removeprefix(MODEL): torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in about.items()
        if name.startswith(MODEL) and isinstance(each, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is how it is meant
        read_shards({"model": state}, checkpoint_id=checkpoint.path, no_dist=True)
    return state


def _module(checkpoint: Checkpoint, config: Config) -> Decoder | HuggingFace:
    state = weights(checkpoint)
    if config.model.hf:
        module = HuggingFace(config.model.hf, config.run.seed, config.data.context)
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            raise InputError(f"{checkpoint.path} is a checkpoint of another model than {config.model.hf}") from error
        return module
    with torch.device("meta"):
        decoder = Decoder(config.model)
    decoder.load_state_dict(state, assign=True)
    return decoder


def export(checkpoint: Checkpoint, config: Config, target: Path) -> None:
    """Write the model to `target`, in the form that its name says; see `sherd.train.uses.require_target`.

    Raises:
        InputError: it cannot be written.
    """
    if target.suffix in TORCH_FILES:
        write: Callable[[Path], object] = lambda part: torch.save(_named_plainly(checkpoint, config), part)  # noqa: E731
    elif target.suffix == ".safetensors":
        write = lambda part: _save_safetensors(_named_plainly(checkpoint, config), part)  # noqa: E731
    else:
        module = _module(checkpoint, config)
        assert isinstance(module, HuggingFace), "require_target lets no other model go to a folder"
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # type: ignore[no-untyped-call] # what is said is one line
        write = module.lm.save_pretrained
    _whole_or_none(write, target)


def _save_safetensors(state: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(state, path)
    os.umask(mask := os.umask(0))
    path.chmod(0o666 & ~mask)  # safetensors lets nobody else read it


def _named_plainly(checkpoint: Checkpoint, config: Config) -> dict[str, Tensor]:
    """The weights by the names of the module itself: of a Hugging Face model that is the one transformers makes."""
    around = "lm." if config.model.hf else ""
    return {name.removeprefix(around): tensor for name, tensor in weights(checkpoint).items()}


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
