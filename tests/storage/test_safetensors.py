"""Headers are those of the `safetensors` package, both ways, and a wrong one is told."""

import json
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import numpy as real

from sherd.errors import CheckpointError
from sherd.storage.manifest import BITS, Stored, header_length, header_of, nbytes_of, parsed_header
from tests.support.refusals import refusal

NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "u2", "I16": "i2", "U32": "u4", "I32": "i4", "U64": "u8", "I64": "i8",
    "F16": "f2", "F32": "f4", "F64": "f8", "C64": "c8",
}  # fmt: skip

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
listed = st.dictionaries(names, st.tuples(st.sampled_from(sorted(NUMPY)), shapes), max_size=5)
metadata = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.just("value"), max_size=3)


def read(raw):
    header = raw[8 : 8 + header_length(raw[:8], len(raw), "x")]
    return parsed_header(header, len(raw), "x")


def places_of(header, tensors):
    """Where the tensors are in a file that begins with `header`: one after the other."""
    ends = accumulate((nbytes_of(*tensor) for tensor in tensors.values()), initial=len(header))
    extents = zip(tensors.items(), pairwise(ends), strict=True)
    return {name: Stored(dtype, shape, start, stop) for (name, (dtype, shape)), (start, stop) in extents}


@given(listed, metadata)
def test_the_package_reads_what_is_written_here(tensors, metadata):
    header = header_of(tensors, metadata)
    data = {name: bytes(nbytes_of(*tensor)) for name, tensor in tensors.items()}
    found = real.load(header + b"".join(data.values()))
    assert len(header) % 8 == 0
    assert {name: (array.dtype, array.shape) for name, array in found.items()} == {
        name: (np.dtype(NUMPY[dtype]), shape) for name, (dtype, shape) in tensors.items()
    }
    assert read(header + b"".join(data.values())) == (places_of(header, tensors), metadata)


@given(listed, metadata)
def test_what_the_package_writes_is_read_here(tensors, metadata):
    arrays = {
        name: (np.arange(nbytes_of(dtype, shape)) % 2).astype("u1").view(NUMPY[dtype]).reshape(shape)
        for name, (dtype, shape) in tensors.items()
    }
    raw = real.save(arrays, metadata or None)  # without tensors, `{}` makes it write what is no JSON
    found, told = read(raw)
    assert told == metadata
    assert {name: (at.dtype, at.shape) for name, at in found.items()} == tensors
    assert {name: raw[at.start : at.stop] for name, at in found.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }


def test_every_dtype_has_its_bytes_and_the_name_that_the_format_keeps_is_refused():
    tensors = {dtype: (dtype, (3,)) for dtype in BITS}
    header = header_of(tensors)
    places = places_of(header, tensors)
    for dtype, at in places.items():
        assert at.stop - at.start == 3 * BITS[dtype] // 8
    assert parsed_header(header[8:], max(at.stop for at in places.values()), "x")[0] == places
    with pytest.raises(CheckpointError, match="__metadata__"):
        header_of({"__metadata__": ("F32", ())})


# A tensor's dtype, shape and place in a file of 64 bytes.
NO_ENTRY = "not a dtype, shape and place"
WRONG_ENTRIES = [
    (("F32", [2], [0, 80]), "is at bytes 0 to 80 of 64"),
    (("F32", [2], [8, 0]), "is at bytes 8 to 0"),
    (("F32", [3], [0, 8]), "are not 8 bytes"),
    (("F32", [-2, -1], [0, 8]), NO_ENTRY),
    (("F32", [2], [-8, 0]), NO_ENTRY),
    (("F32", [2.0], [0, 8]), NO_ENTRY),
    (("F32", [True, 2], [0, 8]), NO_ENTRY),
    (("F32", "12", [0, 8]), NO_ENTRY),
    (("F31", [2], [0, 8]), NO_ENTRY),
    ((["F32"], [2], [0, 8]), NO_ENTRY),
    (("F32", [2], [0, 8, 9]), NO_ENTRY),
    (("F32", [1 << 63], [0, 8]), NO_ENTRY),
    (("F32", [1 << 62] * 64, [0, 8]), "are not 8 bytes"),
    (("F32", [1] * 65, [0, 4]), NO_ENTRY),
    (("F32", [2]), NO_ENTRY),
    ("F32", NO_ENTRY),
    (None, NO_ENTRY),
]


def test_an_entry_that_cannot_be_is_told():
    for entry, why in WRONG_ENTRIES:
        fields = dict(zip(("dtype", "shape", "data_offsets"), entry, strict=False)) if type(entry) is tuple else entry
        header = json.dumps({"w": fields}).encode()
        assert why in refusal(CheckpointError, parsed_header, header, 8 + len(header) + 64, "x"), entry


WRONG_HEADERS = [
    (b"", "is no JSON"),
    (b"[]", "holds [] where an object"),
    (b'{"w": 1, "w": 2}', "'w' is in it twice"),
    (b'{"__metadata__": {"a": 1}}', "should hold texts"),
    (b'{"__metadata__": []}', "should hold texts"),
    (b'{"w": NaN}', "it has NaN"),
    (b'{"w": ' + b"9" * 5000 + b"}", "is no JSON"),
    (b'{"w": ' + b"[" * 200_000, "is no JSON"),
    (b'{"w": "\xff"}', "is no JSON"),
    (b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},'
     b' "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}', "inside another tensor"),
]  # fmt: skip


def test_a_header_that_cannot_be_or_is_longer_than_the_file_is_told():
    for header, why in WRONG_HEADERS:
        assert why in refusal(CheckpointError, parsed_header, header, 8 + len(header) + 64, "x"), header[:99]
    for length in (9, 100, 1 << 40, (1 << 64) - 1):
        said = refusal(CheckpointError, header_length, length.to_bytes(8, "little"), 16, "x")
        assert "no safetensors file" in said, length
    assert "no safetensors file" in refusal(CheckpointError, header_length, b"\0\0\0", 3, "x")
