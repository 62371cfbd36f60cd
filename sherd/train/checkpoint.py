"""Saving a run so that it can go on, and loading what was saved, by `sherd.save` and `sherd.load`.

All ranks make the same calls. What a checkpoint says of its run is the manifest's `user`: `sherd.train.saved`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import warnings
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from sherd import Saving, __version__, async_save, save
from sherd import load as load_items
from sherd.comm.objects import all_gather_objects
from sherd.errors import CheckpointError, CommError, SherdError
from sherd.storage.folder import Folder
from sherd.storage.places import Place
from sherd.train.config import Config, InputError
from sherd.train.ranks import on_rank_0
from sherd.train.report import Silent
from sherd.train.saved import Best, Checkpoint, going_on, read_best, whole, write_best

__all__ = ["NO_SPACE", "NotSaved", "Saver", "clear", "facts", "fill", "load", "load_model", "shapes"]

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NotSaved(SherdError):
    """A checkpoint or record could not be written. The message is one line; all ranks of a save raise it."""

    _names_rank = False


class Saver:
    """Saves a model and its optimizer into `place`, and tells `report`.

    With `run.async_save` another thread writes while the run goes on. The next save waits for that thread, and so does
    the end of the `with` block, also after an exception.

    Each method raises NotSaved, on all ranks, if a rank could not write: older checkpoints are still whole then.

    `text` is the digest of the text that is trained on, and `saved` the step that the run goes on from, 0 for none.
    """

    def __init__(
        self, place: Place, model: nn.Module, optimizer: Optimizer, text: str, report: Silent, saved: int = 0
    ) -> None:
        self.place, self.saved = place, saved
        self._items = {"model": model, "optimizer": optimizer}
        self._text, self._report, self._parameters = text, report, _digest(shapes(model))
        self._keep = 1
        self._saving: Saving | None = None
        self._best: Best | None = None  # to be named when the save under way is whole

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
        """Save the state after `step` steps, and drop all but the last `run.keep` checkpoints, and the best."""
        self.settle()
        self.saved, self._keep = step, config.run.keep
        user = facts(config, self._text, self._parameters, samples=step * config.optimizer.batch)
        try:
            if config.run.async_save:
                self._saving = async_save(str(self.place), self._items, step=step, user=user)
            else:
                self._tell(save(str(self.place), self._items, step=step, user=user))
        except CheckpointError as error:
            raise self._not_saved(error) from error

    def settle(self) -> None:
        """Wait until the save that is under way, if there is one, is whole."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            path = saving.wait()
        except CheckpointError as error:
            raise self._not_saved(error) from error
        self._tell(path)

    def keep_best(self, best: Best, config: Config) -> None:
        """Save the state if none was better, and name it the best when that is whole."""
        if self._best is not None:
            self.settle()
        # Rank 0 decides for all: it alone is sure to read what it has written.
        if not on_rank_0(lambda: self._is_best(best)):
            return
        if self.saved < best.step:
            self.save(best.step, config)
        self._best = best
        if self._saving is None:
            self._name_best()

    def best(self) -> Best | None:
        """Returns the best checkpoint, as far as it is known."""
        with contextlib.suppress(OSError):
            return read_best(self.place)
        return None

    def _is_best(self, best: Best) -> bool:
        try:
            return best.beats(read_best(self.place), self.place)
        except (OSError, CheckpointError) as error:  # a worse one must not take the place of one that cannot be read
            self._report.say(f"note   step {best.step} is not compared with the best so far: {error}")
            return False

    def _tell(self, path: str) -> None:
        self._report.write("checkpoint", step=self.saved, path=path)
        self._report.say(f"step {self.saved:>6}  saved to {path}")
        self._name_best()
        if dist.get_rank() == 0:
            clear(self.place, self._keep, self.saved)

    def _name_best(self) -> None:
        best, self._best = self._best, None
        failure = write_best(self.place, best) if best and dist.get_rank() == 0 else None
        if best and failure:
            self._report.say(f"note   step {best.step} is the best so far, which could not be noted: {failure}")

    def _not_saved(self, error: CheckpointError) -> NotSaved:
        return NotSaved(f"{Exception.__str__(error)}{going_on(self.place)}")


def facts(config: Config, text: str, parameters: str, samples: int) -> dict[str, Any]:
    """Returns the facts about a run that a checkpoint keeps.

    These are the config, the digests of text and parameters, and the number of samples read, its place in the data.
    """
    return {
        "program": "sherd train",
        "sherd": __version__,
        "torch": version("torch"),
        "config": config.tree(),
        "text": text,
        "parameters": parameters,
        "samples": samples,
    }


def clear(place: Place, keep: int, step: int) -> None:
    """Drop all checkpoints up to `step` but the last `keep`, and the best. What fails is left to the next time."""
    with contextlib.suppress(OSError, CheckpointError):
        best = read_best(place)
        Folder(place).prune(keep, keep=() if best is None else (best.step,), upto=step)


def load(place: Place, checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer) -> Checkpoint:
    """Put the newest state in `place` into `model` and `optimizer`.

    Returns:
        What was loaded: `checkpoint`, or an older one if that turns out to be damaged.

    Raises:
        InputError: there is no undamaged one; or the parameters have other names or shapes, as when a Hugging Face
            config has changed.
    """
    _require_same_parameters(checkpoint, model)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* is loaded instead$")  # a note of the run says so
            restored = load_items(str(place), {"model": model, "optimizer": optimizer})
    except CheckpointError as error:
        raise InputError(f"{Exception.__str__(error)}; name another --out") from error
    if restored.step == checkpoint.step:
        return checkpoint
    older = whole(Folder(place).folder_of(restored.step))
    return replace(older, folder=place, notes=restored.passed_over)


def load_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Put the saved values into `model` alone, for use without an optimizer. Raises InputError as `load` and `fill`."""
    _require_same_parameters(checkpoint, model)
    fill(checkpoint, model)


def fill(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Put the saved values into `model`, also where there is no process group.

    Raises:
        InputError: `checkpoint` is damaged, or has other parameters.
    """
    # With the folder of all, where there is one: it is locked then, and the run cannot remove what is read.
    where, step = (checkpoint.folder, checkpoint.step) if checkpoint.folder else (checkpoint.place, None)
    try:
        load_items(str(where), {"model": model}, step=step, random=False)
    except CheckpointError as error:
        raise InputError(f"{checkpoint} cannot be used: {Exception.__str__(error)}; name an older one") from error


def _require_same_parameters(checkpoint: Checkpoint, model: nn.Module) -> None:
    if _digest(shapes(model)) != checkpoint.parameters:
        raise InputError(
            f"{checkpoint} is a checkpoint of another model: its parameters have other names or shapes; "
            "use another --out"
        )


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Each parameter's whole shape, sharded or not, those of all pipeline stages together. Every rank calls it."""
    own = {name: tuple(each.shape) for name, each in model.named_parameters()}
    of_all = all_gather_objects(own, "the exchange of parameter shapes")
    return {name: shape for each in of_all for name, shape in each.items()}


def _digest(shapes: dict[str, tuple[int, ...]]) -> str:
    return hashlib.sha256(repr(list(shapes.items())).encode()).hexdigest()[:16]
