"""`save`, `async_save` and `load`: checkpoints that survive any kill, and move between layouts and numbers of ranks."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from sherd.checkpoint.items import Item, items_of, random_state
from sherd.checkpoint.ranks import Ranks
from sherd.checkpoint.restoring import Restored, Search, restore
from sherd.checkpoint.tensor_bytes import CHUNK_BYTES, chunks_of
from sherd.checkpoint.writing import GIVEN, RANDOM, Plan, Staging, contents_of, plan, write
from sherd.errors import CheckpointError, CommError, PolicyTypeError
from sherd.requirements import require_bool, require_int, require_type
from sherd.storage.files import Content
from sherd.storage.folder import Folder, locked_to_read
from sherd.storage.places import place_of

Where = str | os.PathLike[str]
Items = Mapping[str, object]


@dataclass(frozen=True)
class _Save:
    """The arguments of a save."""

    folder: Where
    items: list[Item]
    step: int
    user: object
    own: dict[str, object]
    keep_last: int | None
    keep_every: int | None

    @staticmethod
    def of(
        call: str,
        folder: Where,
        items: Items,
        step: int,
        user: object,
        per_rank: Mapping[str, object] | None,
        random: bool,
        keep_last: int | None,
        keep_every: int | None,
    ) -> _Save:
        """Returns the arguments, checked."""
        require_type(f"{call}(folder=...): expected a path or URL", folder, str | os.PathLike)
        require_type(f"{call}(items=...): expected a dict of what is saved, by name", items, Mapping)
        require_int(f"{call}(step={{}})", step, 0)
        require_bool(f"{call}(random={{}})", random)
        for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
            if number is not None:
                require_int(f"{call}({name}={{}})", number, 1)
        try:
            json.dumps(user, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise PolicyTypeError(f"{call}(user=...): expected what JSON takes: {error}") from None
        own: dict[str, object] = {GIVEN: dict(per_rank or {}), **({RANDOM: random_state()} if random else {})}
        return _Save(folder, items_of(items), step, user, own, keep_last, keep_every)

    def ranks(self, group: dist.ProcessGroup | None) -> Ranks:
        """Returns the ranks that save together."""
        return Ranks(group, f"saves {_listed(item.name for item in self.items)} as step {self.step}")

    def planned(self, ranks: Ranks) -> Plan:
        """Find out, with the other ranks, who writes what."""
        return plan(self.items, ranks, self.step, self.user, self.own)

    def finish(self, plan: Plan, ranks: Ranks, contents: Mapping[str, Content]) -> str:
        """Write this rank's file, and have the first rank make it a checkpoint."""
        folder = Folder(place_of(self.folder))
        place = folder.folder_of(self.step)
        what = f"the save of step {self.step} to {place}"
        with contextlib.ExitStack() as lock:
            ranks.each(lambda: lock.enter_context(folder.locked(make=True)), what)
            write(plan, contents, ranks, folder)
        ranks.gather(None, what)  # nobody of us holds the lock any more
        ranks.first(lambda: self._clear(folder), what)
        return str(place)

    def _clear(self, folder: Folder) -> None:
        """Remove old checkpoints, and what killed saves have left. The save is done: if it fails, the next one may."""
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
    """Save a checkpoint to `folder/step-00000100`, and return that path. All ranks must call it.

        sherd.save("checkpoints", {"model": model, "optimizer": optimizer, "scheduler": scheduler}, step=100)

    Each rank writes what it holds of the tensors, and each element is written once. When the call returns, all of it
    has reached the disk; until then the folder holds no checkpoint of that step, or the one it had before.

    Args:
        folder: a folder that all ranks share, or a URL such as "s3://bucket/checkpoints", through fsspec.
        items: what is saved, by name: modules (sharded by either front end, by torch, or not at all; a list of them is
            one model, as the stages of a pipeline are), optimizers of these modules, anything with `state_dict` and
            `load_state_dict`, and numbers, texts, lists, dicts and tensors. What is no tensor is the first rank's.
        step: the number of the step, 0 or more.
        user: JSON for people and tools to read.
        per_rank: what differs between ranks, such as the position in the data: values as in `items`.
        random: save the state of the random generators of torch (CPU and accelerator), Python, and numpy if it is
            loaded.
        keep_last: afterwards remove all but the newest so many checkpoints up to this step. None: keep all.
        keep_every: with `keep_last`, keep those whose step is a multiple of this, too.
        group: the ranks that save. None: all; without a process group, this process.

    Raises:
        CheckpointError: a rank cannot write, the ranks do not share the folder, or an item holds what a checkpoint
            cannot: on all ranks. What was written is removed, and older checkpoints are as they were.
        CommError: a rank has died. The checkpoint is whole or there is none; the next save removes the rest.
        StateError: a model is on the meta device, in use, or inside `sherd.unsharded`.
        PolicyError, PolicyTypeError: an argument is out of range, or of another type.
    """
    wanted = _Save.of("save", folder, items, step, user, per_rank, random, keep_last, keep_every)
    ranks = wanted.ranks(group)
    _last.wait()
    planned = wanted.planned(ranks)
    return wanted.finish(planned, ranks, contents_of(planned.parts, lambda _, tensor: lambda: chunks_of(tensor)))


class Saving:
    """A save that another thread finishes. `step` is its step."""

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
        """Whether it has ended, in whatever way."""
        return not self._thread.is_alive()

    def wait(self) -> str:
        """Wait for its end, and return the path of the checkpoint. Raises what `save` raises."""
        self._thread.join()
        if _last.saving is self:
            _last.saving = None
        if self._error is not None:
            raise self._error
        return self._path


class _Last(threading.local):
    """The save of this thread that nobody has waited for; ranks may be threads."""

    saving: Saving | None = None

    def wait(self) -> None:
        """Wait for it, if there is one. Raises what it has raised."""
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
    """As `save`, but return once all is copied to host memory; another thread writes it. All ranks must call it.

        saving = sherd.async_save("checkpoints", {"model": model, "optimizer": optimizer}, step=step)
        ...                                # train on
        saving.wait()                      # before the process group is destroyed

    One save is under way at a time: the next `save` or `async_save` waits for it, and raises what it has raised if
    nobody has waited for it. Ranks talk over a process group of their own.

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
        staging_bytes: the host memory for copies. The call then takes until all but so much is written. None: as much
            as this rank writes.

    Raises:
        what `save` raises: here if it is found before anything is written, else from `wait`.
    """
    wanted = _Save.of("async_save", folder, items, step, user, per_rank, random, keep_last, keep_every)
    if staging_bytes is not None:
        require_int("async_save(staging_bytes={})", staging_bytes, 1)
    ranks = wanted.ranks(group)
    _last.wait()
    planned = wanted.planned(ranks)
    staging = Staging(staging_bytes)
    contents = contents_of(planned.parts, staging.chunks)

    def finish() -> str:
        try:
            return wanted.finish(planned, ranks, contents)
        finally:
            staging.give_up("the save has ended")  # after an error the copying thread would wait for room forever

    _last.saving = saving = Saving(step, finish)
    try:
        staging.copy(planned.parts.tensors)
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
    """Load the newest whole checkpoint of `folder` into `items`. All ranks must call it.

        restored = sherd.load("checkpoints", {"model": model, "optimizer": optimizer})
        first_step = restored.step + 1

    It may have been saved under another number of ranks, mesh, layout, strategy, wrapping or dtype. Each rank reads the
    slices that it holds, into the memory where they belong. All that is read is compared with its checksum: if it turns
    out to be damaged, the checkpoint is passed over, and an older one is loaded.

    Args:
        folder: the folder or URL that `save` was given, or one checkpoint in it.
        items: what is loaded, as for `save`; items of the checkpoint that are not asked for are left alone. Modules and
            optimizers, and what has a state, are changed. The others are returned, whatever stands here for them.
        step: the step to load. None: the newest.
        strict: whether a module has to have the same parameters and buffers. Otherwise those that both have are loaded.
        random: restore the random generators, where as many ranks load as saved.
        staging_bytes: the memory, beside what is loaded, through which slices go that cannot be read in place.
        group: the ranks that load, as for `save`.

    Raises:
        NoCheckpointError: there is no whole checkpoint (of this step); the message says what was passed over and why.
        CheckpointError: an item is not in it, or has other names or shapes; or the checkpoint of the given `step` is
            damaged. On all ranks. Unless the file was at fault, nothing was changed.
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
    ranks, place = Ranks(group, f"loads {_listed(items)} of {of_step}"), place_of(folder)
    _last.wait()
    what = f"the look for a checkpoint in {place}"
    with contextlib.ExitStack() as lock:
        ranks.each(lambda: lock.enter_context(locked_to_read(folder)), what)
        return restore(Search(place, step), own, ranks, staging_bytes, random)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
