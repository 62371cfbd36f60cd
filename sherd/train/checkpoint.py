"""Saving a run so that it can go on: a checkpoint is whole, or it is none.

    OUT/checkpoints/step-00000250      written as step-00000250.part, renamed when complete
        __0_0.distcp, .metadata, ...   model and optimizer, by torch.distributed.checkpoint
        manifest.json                  what it is of, size and checksum of every other file; written last

Any number of ranks can read it. On several machines OUT is a folder that all of them share.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from sherd.comm.objects import all_gather_objects
from sherd.errors import SherdError
from sherd.train.best import read_best
from sherd.train.config import Config, InputError
from sherd.train.manifest import MANIFEST, Checkpoint, Manifest, folder_of, going_on

__all__ = ["NO_SPACE", "NotSaved", "damage", "load", "load_model", "save", "shapes"]

T = TypeVar("T")


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NotSaved(SherdError):
    """A checkpoint or record could not be written. The message is one line; all ranks of a save raise it."""

    names_rank = False


def save(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, config: Config, text: str) -> Path:
    """Write the state after `step` steps, and drop all but the last `config.run.keep` checkpoints, and the best.

    Every rank calls it and writes its own shards.

    Raises:
        NotSaved: a rank could not write; whatever was there before is still whole, and what was written is removed.
    """
    part = folder_of(out, step).with_suffix(".part")
    try:
        _told(lambda: _make_room(part) if dist.get_rank() == 0 else None)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        _name_those_of_all_stages(optimizer_state)
        _write({"model": model_state, "optimizer": optimizer_state}, part)
        sums = {name: each for found in _told(lambda: _sums_of_own(part)) for name, each in found.items()}
        manifest = Manifest(step, dist.get_world_size(), config.tree(), text, _digest(shapes(model)), {}, sums)
        _told(lambda: _finish(part, manifest) if dist.get_rank() == 0 else None)
    except OSError as error:
        if dist.get_rank() == 0:
            shutil.rmtree(part, ignore_errors=True)  # its space is needed
        raise NotSaved(f"cannot save step {step} to {out}: {error.strerror or error}{going_on(out)}") from error
    return part.with_suffix("")


def _told(action: Callable[[], T]) -> list[T]:
    """Returns the results of `action` on all ranks. An OSError on one is raised on all, so that none waits for it."""
    value, refusal = None, None
    try:
        value = action()
    except OSError as error:
        refusal = (error.errno, error.strerror or str(error))
    told = all_gather_objects((value, refusal), "the exchange of what was written")
    for _, refusal in told:
        if refusal is not None:
            raise OSError(*refusal)
    return [value for value, _ in told]


def _write(state: dict[str, Any], part: Path) -> None:
    """Each rank its own shards. Raises OSError on all ranks when one could not."""
    try:
        write_shards(state, storage_writer=_Writer(part))
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                raise failure from None
        raise


class _Writer(FileSystemWriter):
    """torch's, which on a full disk raises the complaint of a half-written zip file about that."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


def _sums_of_own(part: Path) -> dict[str, int]:
    """Checksums of the files that this rank has written: read from memory, as they were written just now."""
    own = [*part.glob(f"__{dist.get_rank()}_*"), *(part.glob(".metadata") if dist.get_rank() == 0 else ())]
    return {path.name: _sum(path) for path in own}


def _sum(path: Path) -> int:
    """CRC-32, of 1 to 3 GB a second: it shall find what a disk or a copy has damaged, not who forges."""
    found = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            found = zlib.crc32(chunk, found)
    return found


def damage(checkpoint: Checkpoint) -> str:
    """Why the checkpoint's files are not what was written; empty where they are, or where nothing says so.

    Each rank reads its share of the files, and all return the same.
    """
    sums = checkpoint.manifest.sums
    share = sorted(sums)[dist.get_rank() :: dist.get_world_size()]
    found = [_damage_of(checkpoint.path / name, sums[name]) for name in share]
    return next((each for of_rank in _told(lambda: found) for each in of_rank if each), "")


def _damage_of(path: Path, expected: int) -> str:
    try:
        return "" if _sum(path) == expected else f"{path.name} is not what was written"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"


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
    of_all = all_gather_objects([group["params"] for group in groups], "the exchange of parameter names")
    for group, *names in zip(groups, *of_all, strict=True):
        group["params"] = list(dict.fromkeys(name for each in names for name in each))


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Each parameter's whole shape, sharded or not, those of all pipeline stages together. Every rank calls it."""
    own = {name: tuple(each.shape) for name, each in model.named_parameters()}
    of_all = all_gather_objects(own, "the exchange of parameter shapes")
    return {name: shape for each in of_all for name, shape in each.items()}


def _digest(shapes: dict[str, tuple[int, ...]]) -> str:
    return hashlib.sha256(repr(list(shapes.items())).encode()).hexdigest()[:16]
