"""A manifest is read as it was written, and one that contradicts itself is refused, whoever has signed it."""

import contextlib
import copy
import json
import os
import subprocess
import sys
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, Grid, GridCut, whole
from sherd.storage.files import Opened, read_manifest
from sherd.storage.folder import Folder
from sherd.storage.manifest import BITS, Entry, File, Manifest, name_in_file, parsed, signed
from sherd.storage.places import DiskPlace
from tests.storage.writing import read_all, save, save_into, tensors_of
from tests.support.refusals import refusal
from tests.support.suites import examples

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
trees = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def entries(draw):
    dtype = draw(st.sampled_from(sorted(BITS)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
    if not shape or draw(st.booleans()):
        return Entry(dtype, shape, Grid(draw(st.integers(0, 3))))
    dim = draw(st.integers(0, len(shape) - 1))
    if draw(st.booleans()):
        return Entry(dtype, shape, Grid(0, (GridCut(dim, 2, 2), GridCut(draw(st.integers(0, len(shape) - 1)), 2, 1))))
    at = draw(st.integers(0, shape[dim]))
    one, other = list(shape), list(shape)
    one[dim], other[dim] = at, shape[dim] - at
    offsets = [0] * len(shape)
    offsets[dim] = at
    return Entry(dtype, shape, ((0, Box((0,) * len(shape), tuple(one))), (3, Box(tuple(offsets), tuple(other)))))


@st.composite
def manifests(draw):
    tensors = draw(st.dictionaries(texts, entries(), max_size=4))
    free = texts.filter(lambda name: name not in tensors)
    block_bytes = draw(st.integers(512, 1 << 20))
    sizes = draw(st.lists(st.integers(2048, 4096), min_size=4, max_size=4))
    files = tuple(
        File(f"ab-{n:05d}.safetensors", size, tuple(range(n, n + -(-size // block_bytes))))
        for n, size in enumerate(sizes)
    )
    return Manifest(
        step=draw(st.integers(0, 1 << 62)),
        save_id=draw(st.text("0123456789abcdef", min_size=1, max_size=32)),
        saved="2026-01-02T03:04:05Z",
        world_size=draw(st.integers(1, 1 << 20)),
        files=files,
        tensors=tensors,
        aliases=draw(st.dictionaries(free, st.sampled_from(sorted(tensors)), max_size=2)) if tensors else {},
        values=draw(st.dictionaries(texts, trees, max_size=3)),
        user=draw(trees),
        block_bytes=block_bytes,
    )


@given(manifests())
def test_a_manifest_is_read_as_it_was_written(manifest):
    raw = manifest.to_bytes()
    assert parsed(raw, "x") == manifest
    assert json.loads(raw)["format"] == "sherd/1"
    assert parsed(raw, "x").to_bytes() == raw


@given(manifests(), st.data())
def test_any_byte_that_changed_any_cut_and_anything_added_is_found(manifest, data):
    raw = bytearray(manifest.to_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(CheckpointError):
        parsed(bytes(raw[:at]), "x")
    with pytest.raises(CheckpointError):
        parsed(bytes(raw) + data.draw(st.binary(min_size=1, max_size=9)), "x")
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CheckpointError):
        parsed(bytes(raw), "x")


def test_a_piece_is_named_by_its_first_element_and_the_whole_by_the_tensor():
    assert name_in_file("model/w", (4, 3), whole((4, 3))) == "model/w"
    assert name_in_file("model/w", (4, 3), Box((2, 0), (2, 3))) == "model/w@2,0"
    assert name_in_file("s", (), whole(())) == "s"


SEED = Manifest(
    step=3,
    save_id="ab",
    saved="2026-01-02T03:04:05Z",
    world_size=2,
    files=(File("ab-00000.safetensors", 100, (1, 2)), File("ab-00001.safetensors", 64, (3,))),
    tensors={
        "w": Entry("F32", (4, 3), Grid(0, (GridCut(0, 2, 1),))),
        "p": Entry("U8", (4,), ((0, Box((0,), (1,))), (1, Box((1,), (3,))))),
    },
    aliases={"tied": "w"},
    values={"lr": [1, {"a": 2.5}]},
    block_bytes=64,
)


def resigned(fields):
    fields.pop("sha256", None)
    return signed(json.dumps(fields).encode()[:-1])


def changed(path, value):
    """The seed with `value` at `path` ("files/0/name"), signed anew; `...` removes what is there."""
    fields = json.loads(SEED.to_bytes())
    *inner, last = path.split("/")
    at = fields
    for key in inner:
        at = at[int(key) if isinstance(at, list) else key]
    last = int(last) if isinstance(at, list) else last
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return resigned(fields)


HUGE = 10**4000
WRONG = [
    *[("files/0/name", name) for name in
      ("", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", ".hidden", "a\0b", "x" * 300, "ab-00001.safetensors",
       3, None)],
    *[("files/0/bytes", size) for size in (-1, 1.0, True, None, "100", 0, 1 << 62, HUGE)],
    *[("files/0/crc32", sums) for sums in
      ([], ["00000001"], ["1", "2"], ["0x000001"] * 2, ["-0000001"] * 2, ["0000_001"] * 2, [1, 2], "ab", None)],
    *[("block_bytes", size) for size in (0, -1, 1 << 40, HUGE, True, 64.0, None)],
    *[("format", name) for name in ("sherd/2", None, ["sherd/1"], 1)],
    *[("step", step) for step in (-1, 1.5, HUGE, "3", None)],
    *[("world_size", size) for size in (0, HUGE)],
    *[("save_id", name) for name in ("", "xyz", "../..", "a" * 40, 3)],
    *[("saved", name) for name in ("", "now", 3, "1" * 50)],
    *[("tensors/w/shape", shape) for shape in
      (None, 3, "43", [-4, 3], [4.0, 3], [True, 3], [1 << 61, 3], [HUGE], [1 << 62] * 64, [1] * 65, [1] * 100_000,
       {"a": 1})],
    *[("tensors/w/dtype", name) for name in (None, "F31", ["F32"], {}, 3)],
    *[("tensors/w/file", number) for number in (-1, 1, 2, HUGE, None, "0", 0.0, True)],
    *[("tensors/w/cuts", cuts) for cuts in
      ([[2, 2, 1]], [[-1, 2, 1]], [[0, 0, 1]], [[0, 3, 1]], [[0, 2]], [[0, 2, 1, 1]], [[0, 2, 2]], [[0, 3, 0]], 3, [3],
       [[0, 1 << 62, 0]], [[0, HUGE, 0]], [[0, 2, 1], [1, 2, 0]], [[0, 1, 0]] * 65, [[0, 1, 0]] * 100_000, [None])],
    *[("tensors/p/pieces", pieces) for pieces in
      ([], {}, None, 3, "abc", [[0, [0], [4], 1]], [[0, [0]]], [[2, [0], [4]]], [[-1, [0], [4]]], [[True, [0], [4]]],
       [[0, [0], [3]]], [[0, [1], [4]]], [[0, [0], [2]], [1, [1], [2]]], [[0, [0, 0], [4, 1]]], [[0, [], []]],
       [[0, [0], [HUGE]]], [[0, [-1], [5]]], [[0, [0.0], [4]]], [[0, [0], [2]], [1, [0], [2]]])],
    *[("aliases/tied", other) for other in ("none", "tied", None, ["w"], 3)],
    ("aliases/w", "w"),
    *[(key, value) for key in ("files", "tensors", "aliases", "values") for value in (None, 3, "x", ...)],
    ("files", {}), ("tensors", []), ("files", []), ("files/0", []), ("tensors/w", []), ("tensors/w", "x"),
    *[(f"files/0/{key}", ...) for key in ("name", "bytes", "crc32")],
    *[(f"tensors/w/{key}", ...) for key in ("dtype", "shape", "file")],
]  # fmt: skip


def test_the_seed_of_these_is_right_and_fields_of_later_versions_are_passed_over():
    assert parsed(SEED.to_bytes(), "x") == SEED
    assert parsed(changed("later", {"a": 1}), "x") == SEED
    assert parsed(changed("tensors/w/later", 1), "x") == SEED


def test_what_contradicts_itself_or_is_no_json_is_refused_however_well_signed():
    for path, value in WRONG:
        said = refusal(CheckpointError, parsed, changed(path, value), "x")
        assert said.startswith("x"), f"{path} = {str(value)[:99]}"
        assert len(said) < 1000, path
    values = '{"a": 1, "a": 2}', "[" * 200_000, '{"a": NaN}', '{"a": 1e'
    for text in (*(f'"values": {each}' for each in values), "", "\xff"):
        raw = signed(b'{"format": "sherd/1",' + text.encode("latin-1"))
        assert refusal(CheckpointError, parsed, raw, "x").startswith("x"), text[:99]


@pytest.mark.parametrize("depth", [100, 900, 960, 980, 1000, 5000])
def test_a_deep_value_is_refused_or_read_however_deep_the_stack_is(depth):
    nested = "[" * depth + "]" * depth

    def below(frames):
        if frames:
            below(frames - 1)
            return
        with contextlib.suppress(CheckpointError):
            parsed(raw, "x")

    for key in ("values", "later", "files"):
        body = SEED.to_bytes()[:-81].decode().replace(f'"{key}": ', f'"{key}": {nested}, "was": ')
        raw = signed((body if nested in body else f'{body}, "{key}": {nested}').encode())
        for frames in range(0, 60, 3):
            below(frames)


def nodes(tree):
    yield tree
    for inner in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from nodes(inner)


strange = st.one_of(
    trees, st.sampled_from([-1, 0, 1 << 40, 1 << 62, 1 << 64, HUGE, "..", "", [], {}, [[]], "w", "tied", [0] * 1000])
)


@settings(max_examples=examples(400))
@given(st.data())
def test_a_mutated_manifest_is_refused_or_means_something_small(data):
    fields = json.loads(SEED.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        holders = [node for node in nodes(fields) if isinstance(node, dict | list) and node]
        holder = data.draw(st.sampled_from(holders))
        key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        match data.draw(st.sampled_from(["set", "drop", "copy", "twice"])):
            case "set":
                holder[key] = copy.deepcopy(data.draw(strange))
            case "drop":
                del holder[key]
            case "copy":
                holder[key] = copy.deepcopy(data.draw(st.sampled_from(list(nodes(fields)))))
            case "twice" if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
    try:
        manifest = parsed(resigned(fields), "x")
    except CheckpointError:
        return
    available = sum(file.nbytes for file in manifest.files)
    for entry in manifest.tensors.values():
        pieces = list(entry.pieces())
        assert len(pieces) <= 10
        assert sum(box.numel for _, box in pieces) * BITS[entry.dtype] // 8 == entry.nbytes <= available
        assert all(number < len(manifest.files) for number, _ in pieces)
    assert all(manifest.entry(name) for name in manifest.aliases)


@settings(max_examples=examples(200))
@given(st.data())
def test_mutated_bytes_of_a_signed_manifest_are_refused_or_read(data):
    body = bytearray(SEED.to_bytes()[:-81])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    with contextlib.suppress(CheckpointError):
        parsed(signed(bytes(body)), "x")


@settings(max_examples=examples(200))
@given(st.data())
def test_mutated_files_under_matching_checksums_are_refused_or_read(tmp_path_factory, data):
    """Whoever can sign a manifest can sum a file, too: what is read then lies within it."""
    base = DiskPlace(tmp_path_factory.mktemp("mutated"))
    entries = {"w": Entry("F32", (4, 3), Grid(0)), "b": Entry("U8", (), Grid(0))}
    manifest = save(base, entries, tensors_of(entries), 1, block_bytes=1 << 20)
    path = base.path / manifest.files[0].name
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    path.write_bytes(raw)
    files = (File(manifest.files[0].name, len(raw), (zlib.crc32(raw),)),)
    text = Manifest(1, "ab", "2026", 1, files, entries, block_bytes=1 << 20).to_bytes()
    (base.path / "manifest.json").write_bytes(text)
    try:
        found = read_all(base)
    except CheckpointError:
        return
    assert {name: len(value) for name, value in found.items()} == {"w": 48, "b": 1}


def peak_of(action):
    """The most memory that `action` holds until it is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_refusing_takes_memory_in_proportion_to_the_text_and_no_long_computation():
    bits = range(1 << 9)  # side by side in each of 9 dims with half of the others: no dim tells them apart
    many = [[0, [n >> dim & 1 for dim in range(9)], [1] * 9] for n in bits]
    for path, value in [
        ("tensors/w", {"dtype": "U8", "shape": [2] * 9, "pieces": many}),
        ("tensors/w/shape", [1 << 62] * 64),
        ("tensors/w/shape", [1 << 62] * 20_000),
        ("tensors/w/cuts", [[0, 1 << 62, 0]] * 64),
        ("files", [{"name": "a", "bytes": 0, "crc32": []}] * 9_000),
        ("aliases", {f"a{n}": f"a{n + 1}" for n in range(9_000)}),
    ]:
        raw = changed(path, value)
        assert peak_of(lambda raw=raw: parsed(raw, "x")) < 100 * len(raw) + (1 << 20)


def test_sizes_that_are_only_claimed_are_not_allocated(tmp_path):
    folder = Folder(DiskPlace(tmp_path))
    save_into(folder, 1)
    place = folder.folder_of(1)
    with open(place.path / "manifest.json", "r+b") as file:
        file.truncate(1 << 40)
    assert peak_of(lambda: read_manifest(place)) < 1 << 20
    save_into(folder, 2)
    found, passed_over = folder.newest()
    assert (found.step, passed_over) == (2, [])
    place = folder.folder_of(2)
    with open(place.path / found.manifest.files[0].name, "r+b") as file:
        file.truncate(1 << 40)
    with Opened(place) as checkpoint:
        assert peak_of(lambda: checkpoint.file(0)) < 1 << 20


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(CheckpointError, match="it is no file"):
        read_manifest(DiskPlace(tmp_path))
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        read_manifest(DiskPlace(tmp_path))


UNDER_O = """
from sherd.storage.manifest import parsed_header
from sherd.errors import CheckpointError
for entry in ('[]', '{}', '{"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}'):
    header = ('{"w": ' + entry + '}').encode()
    try:
        parsed_header(header, 100 + len(header), 'x')
    except CheckpointError:
        print('refused')
"""


def test_nothing_is_checked_by_assert_which_minus_o_leaves_out():
    done = subprocess.run([sys.executable, "-O", "-c", UNDER_O], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 3
