"""A manifest whose values are not what sherd writes, though it is signed: a named error, and no memory for it."""

import json
import random
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sherd
from sherd.checkpoint.encoding import decoded, encoded
from sherd.errors import CheckpointError, OptimStateError
from sherd.storage.manifest import MANIFEST, signed

MOST_GROWTH = 128 << 20


class Kept:
    """Something with a state that takes whatever it is given."""

    def __init__(self):
        self.state = {"count": 1, "queue": torch.arange(4.0)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Extra(nn.Linear):
    """A module with state that is no tensor of its own."""

    extra = 3

    def get_extra_state(self):
        return {"extra": self.extra}

    def set_extra_state(self, state):
        self.extra = state


def items():
    model = nn.Sequential(Extra(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "kept": Kept(),
        "value": {"a": [1, (2.0, None)], "b": torch.ones(3)},
    }


@dataclass(frozen=True, repr=False)
class Saved:
    """Items, the folder of a checkpoint of them, and the text of its manifest: before its values, these, and behind."""

    items: dict[str, Any]
    folder: Path
    before: str
    values: dict[str, Any]
    behind: str

    def __repr__(self) -> str:
        return "Saved"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The items, and the folder of a checkpoint of them, with the parts of its manifest."""
    folder, own = tmp_path_factory.mktemp("saved"), items()
    path = sherd.save(folder, own, step=1, per_rank={"at": 5})
    text = (folder / path / MANIFEST).read_text()
    body = text[: text.rindex(',\n"sha256"')]
    fields = json.loads(body + "}")
    start, end = body.index('"values": ') + len('"values": '), body.index(',\n"user"')
    assert set(TENSORS) <= set(fields["tensors"])
    return Saved(own, folder, body[:start], fields["values"], body[end:])


KINDS = ("float", "tuple", "dict", "scalar", "tensor", "bytes", "complex", "dtype", "other")
NUMBERS = st.one_of(
    st.integers(-3, 3), st.sampled_from([2**31, 2**63, 2**64, -(2**70), 10**40]), st.floats(allow_nan=False, width=64)
).filter(lambda each: each not in (float("inf"), float("-inf")))
NAMES = st.sampled_from(
    ["F32", "I64", "U8", "BOOL", "F8_E4M3", "nan", "inf", "AA==", "", "kind", "state", "params", "0.weight", "exp_avg",
     "step", "module", "optimizer", "value", "extra_state", "torch", "python", "numpy", "given", "random"]
)  # fmt: skip


TENSORS = ["model/0.weight", "model/1.bias", "optimizer/0.weight/exp_avg", "kept/queue", "value/b"]


def trees(tensors):
    """Values as JSON, with good and bad encodings in them."""
    leaves = st.one_of(st.none(), st.booleans(), NUMBERS, NAMES, st.text(max_size=3), st.sampled_from(tensors))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(NAMES, inner, max_size=3),
            st.builds(lambda kind, held: {f"${kind}": held}, st.sampled_from(KINDS), inner),
            st.builds(lambda dtype, held: {"$scalar": [dtype, held]}, NAMES, inner),
            st.builds(lambda name: {"$tensor": name}, st.sampled_from(tensors)),
            st.builds(lambda pairs: {"$dict": pairs}, st.lists(st.tuples(inner, inner), max_size=3)),
        ),
        max_leaves=8,
    )


def places_of(value, path=()):
    """The paths of all values in a tree of JSON."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        if len(path) < 6:
            yield from places_of(each, (*path, key))


def put(value, path, new):
    """A copy of `value` with `new` at `path`; None: without what is there."""
    if not path:
        return new
    key, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = put(value[key], rest, new)
    return copy


CHANGES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 10_000), trees(TENSORS)), min_size=1, max_size=2)


@given(changes=CHANGES)
def test_whatever_the_values_are_a_load_ends_with_a_named_error(saved, changes):
    values = saved.values
    for depth, at, new in changes:
        places = [path for path in places_of(values) if 0 < len(path) <= depth]
        values = put(values, places[at % len(places)], new)
    body = (saved.before + json.dumps(values) + saved.behind).encode()
    (saved.folder / "step-00000001" / MANIFEST).write_bytes(signed(body))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = torch.get_rng_state(), random.getstate()
    try:
        restored = sherd.load(saved.folder, saved.items)
    except (CheckpointError, OptimStateError) as error:
        assert len(str(error)) < 3000  # noqa: PT017
    else:
        assert restored.step == 1
    finally:
        torch.set_rng_state(state[0])
        random.setstate(state[1])
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) << 10 < MOST_GROWTH


@given(tree=trees(["a", "b"]))
def test_a_value_is_decoded_or_refused(tree):
    asked = []
    try:
        decoded(tree, lambda name: asked.append(name) or torch.zeros(1))
    except CheckpointError as error:
        assert len(str(error)) < 500  # noqa: PT017
    assert len(set(map(str, asked))) == len(asked)


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())


@given(
    value=st.recursive(
        st.one_of(LEAVES, st.complex_numbers(allow_nan=False), st.sampled_from([torch.float16, torch.int8])),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.one_of(LEAVES, st.tuples(LEAVES)), inner, max_size=3),
        ),
        max_leaves=12,
    )
)
def test_every_value_comes_back_as_it_was(value):
    text = json.dumps(encoded(value, "x", lambda name, tensor: None), allow_nan=False)
    assert decoded(json.loads(text), lambda name: None) == value
