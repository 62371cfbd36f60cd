"""The checkpoint that a user means, by the name of a folder or URL. Loads no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sherd.errors import InputError
from sherd.storage.folder import Folder
from sherd.storage.manifest import MANIFEST
from sherd.train.best import read_best
from sherd.train.folder import last_run
from sherd.train.saved import Checkpoint, newest_in, place_in, whole

__all__ = ["pick"]


def pick(run: str | None, best: bool) -> Checkpoint:
    """The checkpoint meant by `run`: a run's folder, the folder or URL of its checkpoints, one of them, or None, the
    last run of all.

    Raises:
        InputError: there is none.
    """
    named = str(_last()) if run is None else run
    is_url = "://" in named
    if not is_url and not Path(named).is_dir():
        raise InputError(f"{named} is no folder; name a run's, as in runs/1, or a checkpoint's")
    place = place_in(Path(), named)
    try:
        names = place.names()
    except OSError as error:
        raise InputError(f"{named} cannot be read: {error}") from error
    if MANIFEST in names or Path(named).name.startswith("step-"):
        if best:
            raise InputError(f"--best chooses among a run's checkpoints, but {named} is one; name the run's folder")
        return whole(place)
    if not is_url and not any(name.startswith("step-") for name in names):
        place = place_in(Path(named))
    found, notes = newest_in(place)
    if found is None and not notes:
        raise InputError(f"{named} holds no checkpoint; name a run's folder, or a checkpoint's")
    if found is None:
        raise InputError(f"{named} holds no whole checkpoint: {'; '.join(notes)}")
    if not best:
        return found
    named_best = read_best(place)
    if named_best is None:
        raise InputError(
            f"{named} has kept no best checkpoint: run.keep_best or run.save_every was off, or nothing was judged "
            "yet; leave out --best"
        )
    return replace(whole(Folder(place).folder_of(named_best.step)), folder=place)


def _last() -> Path:
    try:
        return last_run()
    except InputError as error:
        raise InputError(f"there is no run under {Path('runs').absolute()}; name a run's folder") from error
