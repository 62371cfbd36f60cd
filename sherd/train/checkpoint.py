"""Saving a run so that it can go on, and loading what was saved, by `sherd.async_save` and `sherd.load`.

All ranks make the same calls. What a checkpoint says of its run is the manifest's `user`: `sherd.train.saved`.
"""

from __future__ import annotations

import contextlib
import errno
import warnings
from dataclasses import replace
from pathlib import Path

from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from sherd import Saving, async_save
from sherd import load as load_items
from sherd.errors import CheckpointError, CommError, SherdError
from sherd.train.config import Config, InputError
from sherd.train.report import Report
from sherd.train.saved import Checkpoint, folder_in, going_on

KEPT = 2  # checkpoints: the last one, and one before it, should that be damaged
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NotSaved(SherdError):
    """A checkpoint or record could not be written. The message is one line; all ranks of a save raise it."""

    _names_rank = False


class Saver:
    """Saves a model and its optimizer into `out`, and tells `report`.

    Another thread writes while the run goes on. The next save waits for that thread, and so does the end of the `with`
    block, also after an exception. Each method raises NotSaved, on all ranks, if a rank could not write: older
    checkpoints are still complete then.

    `text` is the digest of the text that is trained on, and `saved` the step that the run goes on from, 0 for none.
    """

    def __init__(
        self, out: Path, model: nn.Module, optimizer: Optimizer, text: str, report: Report, saved: int = 0
    ) -> None:
        self.saved, self._out = saved, out
        self._items = {"model": model, "optimizer": optimizer}
        self._text, self._report = text, report
        self._saving: Saving | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.settle()
            return
        with contextlib.suppress(NotSaved, CommError, OSError):  # the first error is the one to tell
            self.settle()

    @property
    def is_written(self) -> bool:
        """Whether a save is under way of which this rank has written its part."""
        return self._saving is not None and self._saving.is_done

    def save(self, step: int, config: Config) -> None:
        self.settle()
        self.saved = step
        try:
            user = {"program": "sherd train", "config": config.tree(), "text": self._text}
            self._saving = async_save(str(folder_in(self._out).place), self._items, step=step, user=user)
        except CheckpointError as error:
            raise self._not_saved(error) from error

    def settle(self) -> None:
        """Wait until the save under way, if there is one, is complete, and drop all but the last checkpoints."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            path = saving.wait()
        except CheckpointError as error:
            raise self._not_saved(error) from error
        self._report.write("checkpoint", step=self.saved, path=path)
        self._report.say(f"step {self.saved:>6}  saved to {path}")
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError, CheckpointError):  # what fails is left to the next time
                folder_in(self._out).prune(KEPT, upto=self.saved)

    def _not_saved(self, error: CheckpointError) -> NotSaved:
        return NotSaved(f"{Exception.__str__(error)}{going_on(self._out)}")


def load(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer) -> Checkpoint:
    """Put the newest state of the run of `checkpoint` into `model` and `optimizer`.

    Returns:
        What was loaded: `checkpoint`, or an older one if that turns out to be damaged.

    Raises:
        InputError: there is no undamaged one; or the parameters have other names or shapes.
    """
    assert checkpoint.folder is not None, "a run's checkpoints are in a folder"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* is loaded instead$")  # a note of the run says so
            restored = load_items(str(checkpoint.folder.place), {"model": model, "optimizer": optimizer})
    except CheckpointError as error:
        raise InputError(f"{Exception.__str__(error)}; name another --out") from error
    if restored.step == checkpoint.step:
        return checkpoint
    found = checkpoint.folder.found(restored.step)
    assert found.manifest is not None, "it was loaded"
    return replace(checkpoint, place=found.place, manifest=found.manifest, notes=restored.passed_over)
