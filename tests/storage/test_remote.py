"""Checkpoints lie in any file system of fsspec's; tests/interop/test_s3.py has an object store."""

import sys

import pytest

from sherd.errors import CheckpointError
from sherd.storage.folder import Folder
from sherd.storage.places import DiskPlace, Lock, place_of
from tests.storage.writing import SMALL, read_all, save, save_into, tensors_of


def keep_two_of_four(folder):
    """Checkpoints are saved, found, pruned and swept by hand."""
    for step in (1, 2, 3):
        tensors = save_into(folder, step, seed=step)
    found, passed_over = folder.newest()
    assert (found.step, passed_over) == (3, [])
    assert read_all(found.place) == tensors
    save_into(folder, 3, seed=4)
    assert len(folder.folder_of(3).names()) == 3
    with folder.locked(make=True) as lock:
        assert lock is Lock.NONE
    assert folder.prune(2) == [1]
    assert folder.steps() == [3, 2]
    save(folder.folder_of(4), SMALL, tensors_of(SMALL), 4, num_files=2)
    assert folder.sweep() == []
    assert folder.newest()[1][0].why.endswith("manifest.json is missing")
    assert len(folder.sweep(by_hand=True)) == 2
    assert folder.steps() == [3, 2]
    assert read_all(folder.newest()[0].place) == tensors_of(SMALL, 4)


def test_checkpoints_are_saved_found_pruned_and_swept_by_hand():
    place = place_of("memory://run/checkpoints")
    keep_two_of_four(Folder(place))
    place._fs.rm("/run", recursive=True)
    assert Folder(place_of("memory://nothing")).newest()[0] is None


def test_a_file_system_that_can_rename_shows_no_half_of_a_file():
    place = place_of("memory://half")
    seen = []

    def chunks():
        seen.append(place.names())
        yield memoryview(b"abc")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place.write("x", chunks)
    assert "x" not in seen[0]
    assert place.names() == []


def test_a_url_of_a_disk_is_that_disk_and_takes_no_options(tmp_path):
    assert place_of(f"file://{tmp_path}").path == place_of(tmp_path).path == tmp_path
    assert isinstance(place_of("local:///x"), DiskPlace)
    with pytest.raises(CheckpointError, match="takes no options: endpoint_url"):
        place_of(tmp_path, endpoint_url="http://x")


def test_a_missing_package_is_named_with_what_installs_it_and_so_is_an_unknown_kind_of_url(monkeypatch):
    for missing, url, told in (
        ("fsspec", "s3://b/x", "pip install fsspec s3fs"),
        ("s3fs", "s3://b/x", "pip install fsspec s3fs"),
        ("gcsfs", "gs://b/x", "pip install fsspec gcsfs"),
    ):
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules["fsspec.registry"]._registry, url.partition("://")[0], raising=False)
            patch.setitem(sys.modules, missing, None)
            with pytest.raises(CheckpointError, match=told):
                place_of(url)
    with pytest.raises(CheckpointError, match=r"nosuch://b/x cannot be opened.*nosuch"):
        place_of("nosuch://b/x")
