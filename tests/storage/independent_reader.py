"""Reads a checkpoint of format sherd/1 with Python's standard library, by docs/look_up/checkpoint_format.md alone.

read("checkpoints/step-00000100") -> {name: (dtype, shape, bytes)}
"""

import hashlib
import json
import sys
import zlib
from itertools import product
from math import prod
from pathlib import Path

BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "BF16": 2, "F16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
    "C128": 16,
}  # fmt: skip


def read_manifest(folder):
    raw = (folder / "manifest.json").read_bytes()
    body, tail = raw[:-81], raw[-81:]
    expected = b',\n"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'
    if tail != expected:
        raise ValueError("manifest.json is torn or damaged")
    manifest = json.loads(raw)
    if manifest["format"] != "sherd/1":
        raise ValueError(f"unknown format {manifest['format']}")
    return manifest


def read_file(folder, entry, block_bytes):
    """(header, data) of one safetensors file, verified."""
    name = entry["name"]
    if "/" in name or "\\" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no name of a file here")
    raw = (folder / name).read_bytes()
    if len(raw) != entry["bytes"]:
        raise ValueError(f"{name} has {len(raw)} bytes, not {entry['bytes']}")
    for number, expected in enumerate(entry["crc32"]):
        if zlib.crc32(raw[number * block_bytes : (number + 1) * block_bytes]) != int(expected, 16):
            raise ValueError(f"{name}: block {number} is damaged")
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def pieces_of(entry):
    """[(file, offsets, sizes)]: where the pieces of a tensor are."""
    shape = entry["shape"]
    if "pieces" in entry:
        return [tuple(piece) for piece in entry["pieces"]]
    found = [(entry["file"], [0] * len(shape), shape)]
    if 0 in shape:
        return found
    for dim, parts, stride in entry.get("cuts", []):
        cut = []
        for file, offsets, sizes in found:
            step = -(-sizes[dim] // parts)
            for number, start in enumerate(range(0, sizes[dim], step)):
                inner_offsets, inner_sizes = list(offsets), list(sizes)
                inner_offsets[dim] += start
                inner_sizes[dim] = min(step, sizes[dim] - start)
                cut.append((file + number * stride, inner_offsets, inner_sizes))
        found = cut
    return found


def read(folder):
    folder = Path(folder)
    manifest = read_manifest(folder)
    files = [read_file(folder, entry, manifest["block_bytes"]) for entry in manifest["files"]]
    found = {}
    for name, entry in manifest["tensors"].items():
        dtype, shape = entry["dtype"], entry["shape"]
        width, out, filled = BYTES[dtype], bytearray(BYTES[dtype] * prod(shape)), 0
        for file, offsets, sizes in pieces_of(entry):
            whole = list(sizes) == list(shape)
            header, data = files[file]
            stored = header[name if whole else f"{name}@{','.join(map(str, offsets))}"]
            if stored["dtype"] != dtype or stored["shape"] != list(sizes):
                raise ValueError(f"{name}: the file and the manifest differ")
            start, stop = stored["data_offsets"]
            if not 0 <= start <= stop <= len(data) or stop - start != width * prod(sizes):
                raise ValueError(f"{name}: its place in the file is wrong")
            for at, index in enumerate(product(*map(range, sizes))):
                to = 0
                for size, offset, inner in zip(shape, offsets, index, strict=True):
                    to = to * size + offset + inner
                out[to * width : (to + 1) * width] = data[start + at * width : start + (at + 1) * width]
            filled += prod(sizes)
        if filled != prod(shape):
            raise ValueError(f"{name}: pieces are missing")
        found[name] = (dtype, tuple(shape), bytes(out))
    return found | {alias: found[name] for alias, name in manifest["aliases"].items()}


if __name__ == "__main__":
    for name, (dtype, shape, raw) in read(sys.argv[1]).items():
        print(name, dtype, shape, hashlib.sha256(raw).hexdigest())
