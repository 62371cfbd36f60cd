"""`save`, `async_save` and `load`: checkpoints that survive any kill, and move between layouts and numbers of ranks."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from sherd.checkpoint.encoding import CHUNK_BYTES, chunks_of
from sherd.checkpoint.items import items_of, random_state
from sherd.checkpoint.ranks import Ranks
from sherd.checkpoint.restoring import Restored, Search, restore
from sherd.checkpoint.writing import GIVEN, RANDOM, Staging, contents_of, plan, write
from sherd.errors import CheckpointError, CommError, PolicyTypeError
from sherd.requirements import require_bool, require_int, require_type
from sherd.storage.files import Content
from sherd.storage.folder import Folder, locked_to_read
from sherd.storage.places import place_of

Where = str | os.PathLike[str]
Items = Mapping[str, object]


@dataclass
class _Save:
    """One save: `plan` says what each of the `ranks` writes. Its fields are arguments of `call`, and are checked."""

    call: str
    folder: Where
    given: Items
    step: int
    user: object
    per_rank: Mapping[str, object] | None
    random: bool
    keep_last: int | None
    keep_every: int | None

    def __post_init__(self) -> None:
        call = self.call
        require_type(f"{call}(folder=...): expected a path or URL", self.folder, str | os.PathLike)
        require_type(f"{call}(items=...): expected a dict of what is saved, by name", self.given, Mapping)
        require_int(f"{call}(step={{}})", self.step, 0)
        require_bool(f"{call}(random={{}})", self.random)
        for name, number in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if number is not None:
                require_int(f"{call}({name}={{}})", number, 1)
        try:
            json.dumps(self.user, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise PolicyTypeError(f"{call}(user=...): expected what JSON takes: {error}") from None
        self.own = {GIVEN: dict(self.per_rank or {}), **({RANDOM: random_state()} if self.random else {})}
        self.items = items_of(self.given)

    def begin(self, group: dist.ProcessGroup | None) -> None:
        """Wait for an earlier `async_save`, and agree with the other ranks on who writes what."""
        self.ranks = Ranks(group, f"saves {', '.join(repr(item.name) for item in self.items)} as step {self.step}")
        _last.wait()
        for model in (each for item in self.items for each in item.models):
            if group is None:  # else some ranks may not save
                model.compare_replicas(f"saves step {self.step}")
        self.plan = plan(self.items, self.ranks, self.step, self.user, self.own)

    def finish(self, contents: Mapping[str, Content]) -> str:
        """Write this rank's file, and make all files a checkpoint. Returns the path."""
        folder = Folder(place_of(self.folder))
        place = folder.folder_of(self.step)
        purpose = f"the save of step {self.step} to {place}"
        with contextlib.ExitStack() as lock:
            self.ranks.each(lambda: lock.enter_context(folder.locked(make=True)), purpose)
            write(self.plan, contents, self.ranks, folder)
        self.ranks.gather(None, purpose)  # so that no rank holds the lock when the first rank removes checkpoints
        self.ranks.first(lambda: self._clear(folder), purpose)
        return str(place)

    def _clear(self, folder: Folder) -> None:
        """Remove old checkpoints, and files of killed saves."""
        # The save itself is done, so that an error here must not fail it; the next save removes the rest.
        with contextlib.suppress(OSError, CheckpointError):
            if self.keep_last is not None:
                folder.prune(self.keep_last, self.keep_every, upto=self.step)
            folder.sweep()


def save(
    folder: Where,
    items: Items,
    *,
    step: int,
    user: object = None,
    per_rank: Mapping[str, object] | None = None,
    random: bool = True,
    keep_last: int | None = None,
    keep_every: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> str:
    """Save a checkpoint to `folder/step-00000100`. All ranks must call `save`.

        sherd.save("checkpoints", {"model": model, "optimizer": optimizer, "scheduler": scheduler}, step=100)

    Each rank writes its parts of the tensors, and each element is written once. When the call returns, the checkpoint
    has reached the disk; until then the folder has no checkpoint of that step, or an earlier one.

    Args:
        folder: a folder that all ranks share, or a URL such as "s3://bucket/checkpoints", through fsspec.
        items: the objects to save, by name: modules (sharded by either front end, by torch, or not at all; a list of
            modules is one model, such as the stages of a pipeline), optimizers of these modules, anything with
            `state_dict` and `load_state_dict`, and numbers, texts, lists, dicts and tensors. Values other than tensors
            are the first rank's.
        step: the number of the step, 0 or more.
        user: JSON for people and tools to read.
        per_rank: values that differ between ranks, such as the position in the data; of the types of `items`.
        random: save the state of the random generators of torch (CPU and accelerator), Python, and numpy if loaded.
        keep_last: after the save, keep this many of the newest checkpoints up to this step, and remove the others.
            None: keep all.
        keep_every: with `keep_last`, also keep checkpoints whose step is a multiple of this number.
        group: the ranks that save. None: all; without a process group, this process.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: a rank cannot write, the ranks do not share the folder, or an item has values that a checkpoint
            cannot hold: on all ranks. Written files are removed, and older checkpoints stay as they are.
        CommError: a rank has died. The checkpoint is complete or absent; the next save removes the rest.
        StateError: a model is on the meta device, in use, or inside `sherd.unsharded`.
        PolicyError, PolicyTypeError: an argument is out of range, or of another type.
    """
    this = _Save("save", folder, items, step, user, per_rank, random, keep_last, keep_every)
    this.begin(group)
    return this.finish(contents_of(this.plan.parts, lambda _, part: lambda: chunks_of(part.read())))


class Saving:
    """A save that another thread finishes. `step` is the step of the checkpoint."""

    def __init__(self, step: int, finish: Callable[[], str]) -> None:
        self.step = step
        self._finish = finish
        self._path = ""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"sherd save of step {step}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._path = self._finish()
        except BaseException as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        """Returns whether the save has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self) -> str:
        """Wait for the end of the save, and return the path of the checkpoint. Raises what `save` raises."""
        self._thread.join()
        _last.forget(self)
        if self._error is not None:
            raise self._error
        return self._path


class _Last(threading.local):
    """The save of this thread that was not waited for. Thread-local, since ranks may be threads."""

    saving: Saving | None = None

    def remember(self, saving: Saving) -> None:
        self.saving = saving

    def forget(self, saving: Saving) -> None:
        if self.saving is saving:
            self.saving = None

    def wait(self) -> None:
        """Wait for the save, if any. Raises the error of the save."""
        if self.saving is not None:
            self.saving.wait()


_last = _Last()


def async_save(
    folder: Where,
    items: Items,
    *,
    step: int,
    user: object = None,
    per_rank: Mapping[str, object] | None = None,
    random: bool = True,
    keep_last: int | None = None,
    keep_every: int | None = None,
    group: dist.ProcessGroup | None = None,
    staging_bytes: int | None = None,
) -> Saving:
    """As `save`, but return when all tensors are copied to host memory; another thread writes the files.

        saving = sherd.async_save("checkpoints", {"model": model, "optimizer": optimizer}, step=step)
        ...                                # train on
        saving.wait()                      # before the process group is destroyed

    One save is under way at a time: the next `save` or `async_save` waits for the last one, and raises its error if
    no call has waited. Ranks talk over a process group of their own. All ranks must call `async_save`.

    Args:
        folder: as for `save`.
        items: as for `save`.
        step: as for `save`.
        user: as for `save`.
        per_rank: as for `save`.
        random: as for `save`.
        keep_last: as for `save`.
        keep_every: as for `save`.
        group: as for `save`.
        staging_bytes: the host memory for copies. The call returns when the bytes that remain to be written fit. None:
            as many bytes as this rank writes.

    Returns:
        The save under way.

    Raises:
        what `save` raises: at once if the error precedes all writing, else from `wait`.
    """
    this = _Save("async_save", folder, items, step, user, per_rank, random, keep_last, keep_every)
    if staging_bytes is not None:
        require_int("async_save(staging_bytes={})", staging_bytes, 1)
    this.begin(group)
    staging = Staging(staging_bytes)
    contents = contents_of(this.plan.parts, staging.chunks)

    def finish() -> str:
        try:
            return this.finish(contents)
        finally:
            staging.give_up("the save has ended")  # after an error the copying thread would wait for room forever

    saving = Saving(step, finish)
    _last.remember(saving)
    try:
        staging.copy(this.plan.parts.tensors)
    except BaseException as error:
        staging.give_up(f"the copy to host memory failed: {error}")
        with contextlib.suppress(CheckpointError, CommError):
            saving.wait()
        raise
    return saving


def load(
    folder: Where,
    items: Items,
    *,
    step: int | None = None,
    strict: bool = True,
    random: bool = True,
    staging_bytes: int = CHUNK_BYTES,
    group: dist.ProcessGroup | None = None,
) -> Restored:
    """Load the newest complete checkpoint of `folder` into `items`. All ranks must call `load`.

        restored = sherd.load("checkpoints", {"model": model, "optimizer": optimizer})
        first_step = restored.step + 1

    The checkpoint may come from another number of ranks, mesh, layout, strategy, wrapping or dtype. Each rank reads the
    slices that it holds, into their memory. All bytes are compared with their checksums: a damaged checkpoint is passed
    over, and an older one is loaded.

    Args:
        folder: the folder or URL that `save` was given, or one checkpoint in it.
        items: the objects to load, as for `save`; other items of the checkpoint are not read. Modules, optimizers and
            other objects with a state are changed. Plain values are returned, and the values in `items` are not read.
        step: the step to load. None: the newest.
        strict: require that a module has the parameters and buffers of the checkpoint. Otherwise, load common names.
        random: restore the random generators, if as many ranks load as saved.
        staging_bytes: the additional memory for slices that cannot be read in place.
        group: the ranks that load, as for `save`.

    Returns:
        The step, the path, and the values that are not loaded into objects.

    Raises:
        NoCheckpointError: no save (of this step) has ended; the message says what was passed over, and why.
        CheckpointError: the checkpoint lacks an item, has other names or shapes, numbers that a dtype here cannot stand
            for (complex, not complete), or is another library's; or those that may be loaded are all damaged: on all
            ranks. Nothing is changed, unless a file is damaged.
        CommError, StateError, PolicyError, PolicyTypeError: as `save`.
        OptimStateError: the state does not fit the optimizer.
    """
    require_bool("load(strict={})", strict)
    require_bool("load(random={})", random)
    require_int("load(staging_bytes={})", staging_bytes, 1)
    if step is not None:
        require_int("load(step={})", step, 0)
    own = items_of(items, strict)
    of_step = "the newest step" if step is None else f"step {step}"
    how = "" if strict else " with strict=False"
    ranks, place = Ranks(group, f"loads {', '.join(map(repr, items))} of {of_step}{how}"), place_of(folder)
    _last.wait()
    with contextlib.ExitStack() as lock:
        ranks.each(lambda: lock.enter_context(locked_to_read(folder)), f"the look for a checkpoint in {place}")
        return restore(Search(place, step), own, ranks, staging_bytes, random)
