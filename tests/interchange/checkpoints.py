"""Checkpoints for the tests of sherd/tools/convert/, and what they hold."""

import contextlib
import json
import math
import random
from collections import OrderedDict

import torch
from hypothesis import strategies as st

from sherd.checkpoint.encoding import DTYPES, chunks_of, dtype_name
from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, Grid, GridCut, whole
from sherd.layout.extent import chunks
from sherd.storage.files import Content, write_file
from sherd.storage.manifest import MANIFEST, Entry, Manifest, name_in_file
from sherd.storage.places import DiskPlace
from sherd.tools.convert.contents import chunks_of as read_chunks
from sherd.tools.convert.formats import open_source
from sherd.tools.convert.mapping import rules_of
from sherd.tools.convert.state_trees import in_memory
from tests.support.comparing import assert_same
from tests.support.suites import examples

CLASSES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint16, torch.complex64]


def bytes_of(source, most_bytes=64):
    """{name: (dtype, shape, bytes)} of all tensors."""
    return {
        name: (spec.dtype, spec.shape, b"".join(map(bytes, read_chunks(source.tensor(name), most_bytes))))
        for name, spec in source.contents.tensors.items()
    }


def random_tensor(shape, dtype, seed=0):
    raw = torch.randint(0, 2 if dtype == torch.bool else 120, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if math.prod(shape) or not shape else torch.empty(shape, dtype=dtype)


@st.composite
def tensors(draw):
    """A tensor, and the layout of its pieces over 4 files: a grid, or runs of rows."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    tensor = random_tensor(shape, draw(st.sampled_from(CLASSES)))
    rows = shape[0] if shape else 0
    kind = draw(st.sampled_from(["whole", "grid", "two cuts", "pieces"]))
    if kind == "grid" and shape and tensor.numel():
        return tensor, Grid(0, (GridCut(draw(st.integers(0, len(shape) - 1)), 4, 1),))
    if kind == "two cuts" and len(shape) > 1 and tensor.numel():
        return tensor, Grid(0, (GridCut(0, 2, 2), GridCut(1, 2, 1)))
    if kind == "pieces" and tensor.numel() and rows > 1:
        extents = [each for each in chunks(rows, draw(st.integers(1, 4))) if each.numel]
        return tensor, tuple((at, whole(shape).narrowed(0, extent)) for at, extent in enumerate(extents))
    return tensor, Grid(draw(st.integers(0, 3)))


@st.composite
def boxes_in(draw, shape):
    """A part of a tensor, at times without elements."""
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offsets, tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)))


def put(folder, named, aliases=None, values=None, step=7, user=None):
    """A checkpoint of sherd in `folder`: {name: (tensor, layout)}, over 4 files."""
    entries = {name: Entry(dtype_name(t.dtype, name), tuple(t.shape), layout) for name, (t, layout) in named.items()}
    inside = [{} for _ in range(4)]
    for name, (tensor, _) in named.items():
        for number, box in entries[name].pieces():
            part = tensor[box.within(whole(tuple(tensor.shape)))].contiguous()
            content = Content(entries[name].dtype, tuple(part.shape), lambda part=part: chunks_of(part))
            inside[number][name_in_file(name, tuple(tensor.shape), box)] = content
    place = DiskPlace(folder).below(f"step-{step:08d}")
    files = tuple(write_file(place, f"abc-{at:05d}.safetensors", each, None, 64) for at, each in enumerate(inside))
    items = {name.split("/")[0] for name in named}
    values = values or {item: {"kind": "module"} for item in sorted(items)}
    manifest = Manifest(step, "abc", "2026-01-01T00:00:00Z", 4, files, entries, aliases or {}, values, user, 64)
    place.write(MANIFEST, lambda: [memoryview(manifest.to_bytes())])
    return place.path


def trained(seed=0):
    """A model with a buffer and a tied weight, and its optimizer after two steps."""
    torch.manual_seed(seed)
    inner, out = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6, bias=False)
    model = torch.nn.Sequential(OrderedDict(inner=inner, norm=torch.nn.BatchNorm1d(6), out=out))
    out.weight = inner.weight
    decayed, others = [model.inner.weight], [p for name, p in model.named_parameters() if name != "inner.weight"]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(2):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def assert_same_training(again, other, model, optimizer):
    """The model `again` and its optimizer `other` hold what `model` and `optimizer` do."""
    assert_same(again.state_dict(), dict(model.state_dict()))
    assert_same(other.state_dict()["state"], optimizer.state_dict()["state"])
    for found, group in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert (found["lr"], found["weight_decay"]) == (group["lr"], group["weight_decay"])


def rules_in(folder, *rules, **options):
    """The rules of a file in `folder` that holds these."""
    path = folder / "rules.json"
    path.write_text(json.dumps({"rules": rules}))
    return rules_of(str(path), {}, **options)


def model_tensor(source, name):
    """A tensor of the item "model" of `source`."""
    return in_memory(source.tensor(f"model/{name}"))


def require_read_or_refused(path, files, turns):
    """With any byte of `files` changed, or one of them cut off, `path` is read or is an error of ours."""
    dice = random.Random(3)
    for file in files:
        whole = file.read_bytes()
        for turn in range(examples(turns)):
            broken, at = bytearray(whole), dice.randrange(len(whole))
            if turn % 5 == 0:
                del broken[at:]
            else:
                broken[at] = dice.randrange(256)
            file.write_bytes(broken)
            with contextlib.suppress(CheckpointError), contextlib.closing(open_source(path)) as source:
                bytes_of(source, 1 << 20)
        file.write_bytes(whole)


assert set(CLASSES) <= set(DTYPES.values())
