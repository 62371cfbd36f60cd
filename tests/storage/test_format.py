"""Someone who has read docs/look_up/checkpoint_format.md alone can read what sherd writes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sherd.layout.boxes import Box, Grid, GridCut, boxes_of_run
from sherd.layout.extent import Extent
from sherd.storage.folder import Folder
from sherd.storage.manifest import BITS, Entry, parsed
from sherd.storage.places import DiskPlace
from tests.storage import independent_reader
from tests.storage.writing import read_all, save, tensors_of
from tests.support.suites import examples

PAGE = Path(__file__).parent.parent.parent / "docs/look_up/checkpoint_format.md"
NUM_FILES = 8
RUNS = ((6, Extent(0, 3)), (1, Extent(3, 15)), (2, Extent(18, 2)))

ENTRIES = {
    "scalar": Entry("F64", (), Grid(7)),
    "empty": Entry("F32", (0, 3), Grid(2)),
    "empty, cut": Entry("F32", (4, 0), Grid(0, (GridCut(0, 4, 2),))),
    "whole": Entry("BF16", (5, 2), Grid(3)),
    "rows": Entry("F32", (7, 3), Grid(0, (GridCut(0, 4, 1),))),
    "fewer rows than parts": Entry("I8", (3, 2), Grid(1, (GridCut(0, 4, 2),))),
    "columns": Entry("C64", (2, 7), Grid(0, (GridCut(1, 2, 4),))),
    "both": Entry("F16", (5, 3), Grid(0, (GridCut(0, 2, 4), GridCut(1, 3, 1)))),
    "one dim twice": Entry("U8", (11,), Grid(0, (GridCut(0, 3, 2), GridCut(0, 2, 1)))),
    "runs": Entry("I64", (4, 5), tuple((file, box) for file, run in RUNS for box in boxes_of_run((4, 5), run))),
    "two pieces in a file": Entry("BOOL", (4,), ((5, Box((0,), (1,))), (5, Box((1,), (3,))))),
    "names/with @0,0 \u00e9 \u2028 \"": Entry("F8_E4M3", (3,), Grid(4)),
}  # fmt: skip
ALIASES = {"tied": "rows", "tied too": "runs"}


def written(path, entries, **fields):
    folder, tensors = Folder(DiskPlace(path)), tensors_of(entries)
    manifest = save(folder.folder_of(3), entries, tensors, 3, num_files=NUM_FILES, **fields)
    folder.finish(3, manifest)
    return folder.folder_of(3), tensors


def test_the_reader_that_knows_only_the_page_reads_what_sherd_reads(tmp_path):
    expected = {name: (entry.dtype, entry.shape) for name, entry in ENTRIES.items()}
    for block_bytes in (1, 64, 4 << 20):
        options = {"aliases": ALIASES, "user": {"a": 1}, "block_bytes": block_bytes}
        place, tensors = written(tmp_path / str(block_bytes), ENTRIES, **options)
        tensors |= {alias: tensors[name] for alias, name in ALIASES.items()}
        assert read_all(place) == tensors
        assert independent_reader.read(place.path) == {
            name: (*expected[ALIASES.get(name, name)], raw) for name, raw in tensors.items()
        }


@st.composite
def grids(draw):
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple))
    dims = draw(st.lists(st.integers(0, len(shape) - 1), max_size=3))
    cuts = tuple(GridCut(dim, draw(st.integers(1, 2)), 2**n) for n, dim in enumerate(dims))
    return Entry(draw(st.sampled_from(sorted(BITS))), shape, Grid(0, cuts))


@settings(max_examples=examples(50))  # each writes eight files
@given(grids())
def test_any_grid_is_read_alike(tmp_path_factory, entry):
    place, tensors = written(tmp_path_factory.mktemp("grid"), {"w": entry})
    assert independent_reader.read(place.path)["w"] == (entry.dtype, entry.shape, tensors["w"])
    assert read_all(place) == tensors


def test_it_finds_a_bit_that_flipped(tmp_path):
    for name in ("manifest.json", "ab-00001.safetensors"):
        place, _ = written(tmp_path / name, ENTRIES, save_id="ab")
        raw = bytearray((place.path / name).read_bytes())
        raw[len(raw) // 2] ^= 4
        (place.path / name).write_bytes(raw)
        with pytest.raises(ValueError, match="damaged"):
            independent_reader.read(place.path)


def test_the_reader_is_short_and_needs_the_standard_library_alone_and_the_pages_example_is_a_manifest():
    path = Path(independent_reader.__file__)
    assert len(path.read_text().splitlines()) <= 100
    subprocess.run([sys.executable, "-S", "-I", "-c", path.read_text().split("if __name__")[0]], check=True)
    (text,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    manifest = parsed(text.encode(), "the page")
    assert manifest.to_bytes() == text.encode()
    assert [box.sizes for _, box in manifest.tensors["model/out.weight"].pieces()] == [(2, 2), (1, 2)]
