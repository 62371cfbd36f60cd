"""How a run is saved so that it can go on: a checkpoint is whole, or it is none.

    OUT/checkpoints/step-00000250      written as step-00000250.part, renamed when complete
        __0_0.distcp, .metadata, ...   model and optimizer, by torch.distributed.checkpoint
        manifest.json                  what it is of, and the size of every other file; written last

Any number of ranks can read it. On several machines OUT is a folder that all of them share.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards

from sherd.train.best import read_best
from sherd.train.config import Config, InputError
from sherd.train.manifest import MANIFEST, Checkpoint, Manifest, folder_of

__all__ = ["load", "load_model", "save", "shapes"]


def save(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, config: Config, text: str) -> Path:
    """Write the state after `step` steps, and drop all but the last `config.run.keep` checkpoints, and the best.

    Every rank calls it and writes its own shards.

    Raises:
        OSError: the folder cannot be written; whatever was there before is still whole.
    """
    part = folder_of(out, step).with_suffix(".part")
    _on_rank_0(lambda: _make_room(part))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    _name_those_of_all_stages(optimizer_state)
    write_shards({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=part)
    manifest = Manifest(step, dist.get_world_size(), config.tree(), text, _digest(shapes(model)), files={})
    _on_rank_0(lambda: _finish(part, manifest))
    return part.with_suffix("")


def _on_rank_0(action: Callable[[], None]) -> None:
    """Do `action` on rank 0; the others go on when it is done."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def _make_room(part: Path) -> None:
    shutil.rmtree(part, ignore_errors=True)  # what an interrupted save of this step left
    part.mkdir(parents=True)


def _finish(part: Path, manifest: Manifest) -> None:
    """Make the folder `part`, which has every shard, a checkpoint; drop those it makes superfluous."""
    files = {file.name: file.stat().st_size for file in sorted(part.iterdir())}
    with open(part / MANIFEST, "w") as file:
        json.dump(asdict(replace(manifest, files=files)), file, indent=1)
        file.flush()
        os.fsync(file.fileno())  # the rename must not reach the disk before this does
    final = part.with_suffix("")
    if final.exists():  # half-written, or this run would have resumed from it
        final.rename(final.with_suffix(f".half-{time.time_ns()}"))
    part.rename(final)
    # A later one is half-written: were it counted, the only whole one might be dropped in its favour.
    done = [path for path in sorted(final.parent.glob("step-*")) if not path.suffix and path <= final]
    best = read_best(final.parent.parent) if manifest.config["run"]["keep_best"] else None
    for old in done[: -manifest.config["run"]["keep"]]:
        if not best or old != best.path(final.parent.parent):
            shutil.rmtree(old.rename(old.with_suffix(".part")))  # half-deleted must not pass for whole


def load(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the saved values into `model` and `optimizer`, each rank its own shards.

    Raises:
        InputError: the parameters have other names or shapes, as when a Hugging Face config has changed.
    """
    _require_same_parameters(checkpoint, model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    own = set(model_state)
    state = {"model": model_state, "optimizer": optimizer_state}
    read_shards(state, checkpoint_id=checkpoint.path)
    groups: Any = optimizer_state["param_groups"]
    for group in groups:
        group["params"] = [name for name in group["params"] if name in own]
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def load_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Put the saved values into `model` alone, for use without an optimizer.

    Raises:
        InputError: as in `load`.
    """
    _require_same_parameters(checkpoint, model)
    state = get_model_state_dict(model)
    read_shards({"model": state}, checkpoint_id=checkpoint.path)
    set_model_state_dict(model, state)


def _require_same_parameters(checkpoint: Checkpoint, model: nn.Module) -> None:
    if _digest(shapes(model)) != checkpoint.manifest.parameters:
        raise InputError(
            f"{checkpoint.path} is a checkpoint of another model: its parameters have other names or shapes; "
            "use another --out"
        )


def _name_those_of_all_stages(optimizer_state: dict[str, Any]) -> None:
    """Let each group of parameters name those of all ranks: pipeline stages have different ones, and what is no tensor
    is written by one rank only."""
    groups: list[dict[str, Any]] = optimizer_state["param_groups"]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, [group["params"] for group in groups])
    for group, *names in zip(groups, *of_all, strict=True):
        group["params"] = list(dict.fromkeys(name for each in names for name in each))


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Each parameter's whole shape, sharded or not, those of all pipeline stages together. Every rank calls it."""
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, {name: tuple(each.shape) for name, each in model.named_parameters()})
    return {name: shape for each in of_all for name, shape in each.items()}


def _digest(shapes: dict[str, tuple[int, ...]]) -> str:
    return hashlib.sha256(repr(list(shapes.items())).encode()).hexdigest()[:16]
