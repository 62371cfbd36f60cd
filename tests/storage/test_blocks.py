"""Blocks are cut and summed as the bytes lie, and any byte that changed is found."""

import zlib
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sherd.errors import CheckpointError
from sherd.storage.files import Checked, Checksums, in_blocks
from sherd.storage.places import Readable

sizes = st.lists(st.one_of(st.integers(0, 50), st.integers(60_000, 140_000)), max_size=8)
block_sizes = st.one_of(st.integers(1, 64), st.integers(50_000, 200_000))


class Bytes(Readable):
    def __init__(self, raw):
        self.name, self.nbytes, self.raw, self.reads = "x", len(raw), raw, []

    def read_into(self, start, into):
        self.reads.append((start, len(into)))
        if start + len(into) > len(self.raw):
            raise EOFError
        into[:] = self.raw[start : start + len(into)]

    def close(self):
        self.raw = None


def cut(raw, block_bytes):
    return [raw[start : start + block_bytes] for start in range(0, len(raw), block_bytes)]


@st.composite
def chunked(draw):
    """Bytes, the same bytes in chunks, and a size of blocks; small blocks are for few bytes."""
    numels, block_bytes = draw(sizes), draw(block_sizes)
    if block_bytes < 100:
        numels = [min(size, 300) for size in numels]
    raw = bytes(n * 7 % 251 for n in range(sum(numels)))
    ends = accumulate(numels)
    return raw, [memoryview(raw)[end - size : end] for size, end in zip(numels, ends, strict=True)], block_bytes


@given(chunked())
def test_chunks_end_where_blocks_do_are_the_same_bytes_and_few_and_sums_are_those_of_the_blocks(case):
    raw, chunks, block_bytes = case
    start, found = 0, []
    for chunk in in_blocks(chunks, block_bytes):
        assert start // block_bytes == (start + len(chunk) - 1) // block_bytes
        start += len(chunk)
        found.append(bytes(chunk))
    assert b"".join(found) == raw
    assert len(found) <= len(chunks) * 2 + 2 * (len(raw) // block_bytes) + 1
    sums = Checksums(block_bytes)
    for _ in range(2):  # a write that is repeated sums anew
        assert b"".join(map(bytes, sums.passing(chunks))) == raw
        assert (sums.nbytes, sums.crc32) == (len(raw), [zlib.crc32(block) for block in cut(raw, block_bytes)])


def checked(raw, was, block_bytes):
    return Checked(Bytes(raw), len(was), [zlib.crc32(block) for block in cut(was, block_bytes)], block_bytes)


@given(st.data())
def test_any_part_is_read_as_it_was_written(data):
    raw = data.draw(st.binary(min_size=1, max_size=100))
    file = checked(raw, raw, data.draw(st.integers(1, 40)))
    for _ in range(3):
        start = data.draw(st.integers(0, len(raw)))
        into = bytearray(data.draw(st.integers(0, len(raw) - start)))
        file.read_into(start, memoryview(into))
        assert into == raw[start : start + len(into)]


@given(st.data())
def test_a_bit_that_flipped_in_any_byte_is_found_and_other_blocks_are_read(data):
    raw = data.draw(st.binary(min_size=1, max_size=100))
    block_bytes = data.draw(st.integers(1, 40))
    at, bit = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 7))
    bad = bytearray(raw)
    bad[at] ^= 1 << bit
    file = checked(bytes(bad), raw, block_bytes)
    for start in range(len(raw)):
        into = memoryview(bytearray(1))
        if start // block_bytes == at // block_bytes:
            with pytest.raises(CheckpointError, match="x is not what was written: the checksum of bytes"):
                file.read_into(start, into)
        else:
            file.read_into(start, into)
            assert bytes(into) == raw[start : start + 1]


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_a_file_of_another_length_is_refused(raw, was):
    if len(raw) != len(was):
        with pytest.raises(CheckpointError, match=f"x has {len(raw)} of {len(was)} bytes"):
            checked(raw, was, 16)


def test_what_is_cut_off_while_it_is_read_is_told():
    file = checked(b"a" * 50, b"a" * 50, 16)
    file._file.raw = b"a" * 20
    with pytest.raises(CheckpointError, match="x cannot be read at byte 16: it ends"):
        file.read_into(0, memoryview(bytearray(50)))
    file = checked(b"a" * 50, b"a" * 50, 16)
    with pytest.raises(CheckpointError, match="ends at byte 50, before what was asked for"):
        file.read_into(48, memoryview(bytearray(3)))


def test_neighbours_in_a_block_are_one_read_and_whole_blocks_are_read_in_place():
    raw = bytes(range(64))
    file = checked(raw, raw, 16)
    for start in range(0, 16, 4):
        file.read_into(start, memoryview(bytearray(4)))
    assert file._file.reads == [(0, 16)]
    into = bytearray(64)
    file.read_into(0, memoryview(into))
    assert into == raw
    assert file._file.reads[1:] == [(0, 16), (16, 16), (32, 16), (48, 16)]
