"""A piece is read from where the manifest says, and a file that holds something else is told."""

import pytest

from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, Grid
from sherd.storage.files import Opened
from sherd.storage.manifest import Entry
from sherd.storage.places import DiskPlace
from tests.storage.writing import SMALL, save, tensors_of
from tests.support.refusals import refusal


@pytest.fixture
def opened(tmp_path):
    """`opened(entries, **fields)`: a checkpoint whose files hold SMALL and whose manifest says `entries`."""
    place, checkpoints = DiskPlace(tmp_path), []

    def open_one(entries=SMALL, **fields):
        held = save(place, SMALL, tensors_of(SMALL), 1, num_files=2, save_id="ab")
        raw = type(held)(**{**vars(held), "tensors": entries, **fields}).to_bytes()
        place.write("manifest.json", lambda: [memoryview(raw)])
        checkpoints.append(Opened(place))
        return checkpoints[-1]

    yield open_one
    for checkpoint in checkpoints:
        checkpoint.close()


def test_an_alias_is_its_tensor_and_only_the_pieces_that_a_part_needs_are_opened(opened, tmp_path):
    checkpoint = opened(aliases={"tied": "w"})
    assert list(checkpoint.pieces("tied")) == list(checkpoint.pieces("w"))
    with pytest.raises(CheckpointError, match="has no tensor none"):
        checkpoint.entry("none")
    checkpoint = opened()
    (tmp_path / "ab-00001.safetensors").unlink()
    ((_, stored, box),) = checkpoint.pieces("w", Box((1, 0), (2, 3)))
    assert (stored.shape, box) == ((4, 3), Box((0, 0), (4, 3)))
    with pytest.raises(CheckpointError, match=r"ab-00001\.safetensors cannot be read: No such file"):
        list(checkpoint.pieces("w"))


def test_a_file_that_holds_something_else_is_told(opened):
    for entry, why in (
        (Entry("BF16", (5,), Grid(0)), "ab-00000.safetensors lacks b"),
        (Entry("F16", (5,), Grid(1)), "has BF16 (5,) as b, F16 (5,)"),
        (Entry("BF16", (4,), Grid(1)), "has BF16 (5,) as b, BF16 (4,)"),
    ):
        checkpoint = opened({"b": entry})
        assert why in refusal(CheckpointError, lambda c=checkpoint: list(c.pieces("b"))), entry
