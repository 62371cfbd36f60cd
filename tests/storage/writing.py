"""Small checkpoints written with the storage layer alone, for tests of it."""

import random
from itertools import count

from sherd.layout.boxes import Grid, GridCut
from sherd.storage.files import Checksums, Opened
from sherd.storage.folder import Folder, file_name
from sherd.storage.manifest import BITS, Entry, File, Manifest, header_of, name_in_file, nbytes_of
from tests.layout.strategies import elements

SMALL = {"w": Entry("F32", (7, 3), Grid(0, (GridCut(0, 2, 1),))), "b": Entry("BF16", (5,), Grid(1))}
SAVE_IDS = (f"{number:08x}" for number in count(0xABC0))


def tensors_of(entries, seed=0):
    """{name: bytes} of random values, for `entries`."""
    return {name: random.Random(f"{seed} {name}").randbytes(entry.nbytes) for name, entry in entries.items()}


def part_of(raw, dtype, shape, box):
    """The bytes of `box` in a tensor that is `raw`, element by element."""
    width = BITS[dtype] // 8
    return b"".join(raw[place * width : (place + 1) * width] for place in elements(shape, box))


def save(place, entries, tensors, step, *, num_files=1, save_id=None, block_bytes=64, **fields):
    """Write the files of a checkpoint into the folder `place`; returns its manifest, which `finish` has to write."""
    save_id = save_id or next(SAVE_IDS)
    held = [{} for _ in range(num_files)]
    for name, entry in entries.items():
        for number, box in entry.pieces():
            raw = part_of(tensors[name], entry.dtype, entry.shape, box)
            held[number][name_in_file(name, entry.shape, box)] = (entry.dtype, box.sizes, raw)
    files = []
    for number, pieces in enumerate(held):
        header = header_of({name: piece[:2] for name, piece in pieces.items()})
        sums = Checksums(block_bytes)
        chunks = [header, *(raw for _, _, raw in pieces.values())]
        place.write(file_name(save_id, number), lambda s=sums, c=chunks: s.passing(map(memoryview, c)))
        files.append(File(file_name(save_id, number), sums.nbytes, tuple(sums.crc32)))
    saved = "2026-01-02T03:04:05Z"
    return Manifest(step, save_id, saved, num_files, tuple(files), entries, block_bytes=block_bytes, **fields)


def save_into(folder: Folder, step, seed=0, **options):
    """Save a small checkpoint into `folder`, and finish it; returns its tensors."""
    tensors = tensors_of(SMALL, seed)
    folder.finish(step, save(folder.folder_of(step), SMALL, tensors, step, num_files=2, **options))
    return tensors


def read_all(place):
    """{name: bytes} of the checkpoint in the folder `place`, by sherd's own reader, aliases too."""
    with Opened(place) as checkpoint:
        found = {}
        for name in (*checkpoint.manifest.tensors, *checkpoint.manifest.aliases):
            entry = checkpoint.entry(name)
            width, raw = BITS[entry.dtype] // 8, bytearray(entry.nbytes)
            for file, stored, box in checkpoint.pieces(name):
                piece = bytearray(stored.stop - stored.start)
                file.bytes.read_into(stored.start, memoryview(piece))
                assert len(piece) == nbytes_of(entry.dtype, box.sizes)
                for at, element in enumerate(elements(entry.shape, box)):
                    raw[element * width : (element + 1) * width] = piece[at * width : (at + 1) * width]
            found[name] = bytes(raw)
        return found
