"""Tensors are found, and changed, in whatever a module takes or returns, and all else is left as it is."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sherd.errors import UnsupportedError
from sherd.tensor.structures import map_tensors, tensors_held_by, tensors_in
from tests.support.refusals import refusal

Pair = namedtuple("Pair", ["left", "right"])
ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


@dataclass(frozen=True)
class Frozen:
    tensor: Tensor
    name: str


@dataclass(frozen=True, slots=True)
class Slotted:
    tensor: Tensor
    name: str


@dataclass
class MadeOtherwise:
    """Its __init__ takes other arguments than it has fields."""

    tensor: Tensor = field(init=False)
    made_by: str = field(init=False, default="")

    def __init__(self, how_many: int) -> None:
        self.tensor = torch.ones(how_many)
        self.made_by = "hand"


class Output(OrderedDict):
    """Like the outputs of Hugging Face's models: a dict, a dataclass in looks, keys that are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def twice(tensor: Tensor) -> Tensor:
    return tensor * 2


def same(tensor: Tensor) -> Tensor:
    return tensor


NESTED = {"a": [ONE, (TWO, "text")], "b": Pair(Frozen(ONE, "f"), None), "c": 3, "d": OrderedDict(e=TWO)}


def test_tensors_are_found_in_order_however_deep_they_lie():
    assert [tensor.item() for tensor in tensors_in(NESTED)] == [1, 2, 1, 2]


class Held:
    __slots__ = ("seen",)

    def __init__(self, seen):
        self.seen = seen


class Plain:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def array_of(value):
    array = np.empty((1, 1), dtype=object)
    array[0, 0] = value
    return array


HOLDERS = {
    "deque": deque,
    "iterator": iter,
    "generator": lambda held: (each for each in held),
    "closure": lambda held: lambda: held,
    "default": lambda held: lambda held=held: held,
    "partial": lambda held: partial(print, held),
    "values": lambda held: dict(enumerate(held)).values(),
    "slots": Held,
    "cycle": lambda held: (lambda made: setattr(made, "itself", made) or made)(Plain(held=held)),
    "seven deep": lambda held: reduce(lambda inside, _: Plain(inside=inside), range(7), held),
    "array": array_of,
    "distribution": lambda held: torch.distributions.Normal(held[0], held[1]),
}


def test_tensors_are_found_in_objects_of_any_class_but_not_in_modules_classes_and_globals():
    for name, holder in HOLDERS.items():
        held = holder([torch.ones(()), torch.full((), 2.0)])
        for found in (tensors_held_by(held), tensors_in({"a": (held, "text")}, in_any_object=True)):
            assert sorted({tensor.item() for tensor in found}) == [1, 2], name
    value = [nn.Linear(1, 1), Plain, test_a_lone_tensor_is_found_and_changed, "text"]
    assert list(tensors_in(value, in_any_object=True)) == []


def test_a_lone_tensor_is_found_and_changed():
    assert list(tensors_in(ONE)) == [ONE]
    assert map_tensors(twice, ONE) == 2


def test_tensors_in_sets_are_changed_too():
    changed = map_tensors(twice, ({ONE, "text"}, frozenset([TWO])))
    assert list(map(type, changed)) == [set, frozenset]
    assert "text" in changed[0]
    assert [tensor.item() for tensor in tensors_in(changed)] == [2, 4]


def test_what_holds_no_tensor_is_neither_walked_nor_copied():
    for value in (None, 3, "text", Pair, Frozen, {1, 2}, range(3)):
        assert list(tensors_in(value)) == []
        assert map_tensors(twice, value) is value


MANY = list(range(100_000))
MANY_THINGS = {
    "list": MANY,
    "tuple": tuple(MANY),
    "set": set(MANY),
    "dict": dict.fromkeys(MANY, "text"),
    "pairs": [[number, (number, "text")] for number in MANY],
    "dicts": [{"number": number} for number in MANY],
    "dataclass": Frozen(MANY, "f"),
    "object": Plain(numbers=MANY),
    "object with pairs": Plain(pairs=[[number, number] for number in MANY]),
    "array": np.arange(100_000),
    "array of objects": np.array(MANY, dtype=object),
    "scalars of numpy": list(np.arange(100_000)),
    "text": "text" * 100_000,
}


@pytest.mark.parametrize("in_any_object", [False, True])
def test_what_cannot_hold_a_tensor_is_not_walked_element_by_element(in_any_object):
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += 1

    for name, value in MANY_THINGS.items():
        assert map_tensors(twice, value) is value, name
        calls = 0
        sys.setprofile(count)
        try:
            found = tensors_in((value, ONE), in_any_object)
        finally:
            sys.setprofile(None)
        assert found == [ONE], name
        assert calls < 1000, name


def test_a_tensor_behind_many_numbers_is_found_and_changed():
    for value in ([*MANY, ONE], {**dict.fromkeys(MANY, 0), "last": ONE}, [[number] for number in MANY] + [[ONE]]):
        assert tensors_in(value) == [ONE]
        assert tensors_in(map_tensors(twice, value)) == [2]
    arrays = [np.arange(2)] * 100 + [array_of(ONE)]
    assert tensors_in(arrays, in_any_object=True) == tensors_in(Plain(arrays=arrays), in_any_object=True) == [ONE]


def circles():
    """Yields values that contain themselves, each with ONE in it, and how to reach the value and ONE from it."""
    listed = [ONE]
    listed.append(listed)
    yield listed, lambda value: (value[1], value[0])
    mapped = OrderedDict(tensor=ONE)
    mapped["child"] = {"parent": mapped}
    yield mapped, lambda value: (value["child"]["parent"], value["tensor"])
    child = MadeOtherwise(2)
    child.tensor, child.made_by = ONE, (child, "text")
    yield child, lambda value: (value.made_by[0], value.tensor)


def test_what_contains_itself_is_changed_as_a_whole():
    for value, parts in circles():
        assert tensors_in(value) == tensors_in([value]) == [ONE]
        assert tensors_in(value, in_any_object=True) == [ONE]
        assert map_tensors(same, value) is value
        changed = map_tensors(twice, value)
        assert parts(changed)[0] is changed
        assert parts(changed)[1] == 2
        assert parts(value)[1] is ONE
    plain = Plain(tensor=ONE)
    plain.itself = [plain]
    plain.itself.append(plain.itself)
    changed = map_tensors(twice, [ONE, plain])
    assert changed[0] == 2
    assert changed[1] is plain  # an object that is no container is handed on


def test_a_long_linked_list_is_handed_on_and_refused_by_name_where_it_would_have_to_change():
    linked = reduce(lambda inside, _: [inside], range(10_000), ONE)
    assert tensors_in(linked) == [ONE]
    assert map_tensors(same, linked) is linked
    assert "a list that a module takes or returns has too many" in refusal(UnsupportedError, map_tensors, twice, linked)


def test_a_container_none_of_whose_tensors_changed_is_returned_as_the_same_object():
    read_only = MappingProxyType({"a": ONE})
    assert list(tensors_in(read_only)) == [ONE]
    for value in (
        [ONE, [TWO]],
        (ONE, (TWO,)),
        Pair(ONE, [TWO]),
        {"a": ONE, "b": {"c": TWO}},
        OrderedDict(a=ONE),
        Frozen(ONE, "f"),
        MadeOtherwise(2),
        NESTED,
        read_only,
    ):
        assert map_tensors(same, value) is value, value


def test_a_changed_container_keeps_its_parts_that_did_not_change():
    kept = [ONE]
    value = {"kept": kept, "changed": (TWO,)}
    result = map_tensors(lambda tensor: tensor * 2 if tensor is TWO else tensor, value)
    assert result["kept"] is kept
    assert result["changed"] == (4,)
    assert value["changed"][0] is TWO


def test_lists_and_tuples_of_any_kind_come_back_as_their_own_types():
    assert map_tensors(twice, [ONE, "x"]) == [2, "x"]
    assert map_tensors(twice, (ONE, "x")) == (2, "x")
    pair = map_tensors(twice, Pair(ONE, None))
    assert (type(pair), pair.left, pair.right) == (Pair, 2, None)
    torchs = map_tensors(twice, torch.tensor([[1.0, 3.0]]).max(dim=1))
    assert (torchs[0].tolist(), torchs[1].tolist()) == ([6], [2])


def test_a_dataclass_frozen_or_with_slots_is_copied_without_a_call_of_its_init():
    value = Frozen(ONE, "f")
    result = map_tensors(twice, value)
    assert (result.tensor, result.name) == (2, "f")
    assert value.tensor is ONE
    assert map_tensors(twice, Slotted(ONE, "s")) == Slotted(torch.tensor(2.0), "s")
    result = map_tensors(twice, MadeOtherwise(2))
    assert (result.tensor.tolist(), result.made_by) == ([2, 2], "hand")


def test_a_field_that_was_never_set_is_passed_over():
    value = MadeOtherwise(1)
    del value.tensor
    assert list(tensors_in(value)) == []
    assert map_tensors(twice, value) is value


def test_a_dict_keeps_its_type_order_and_default():
    result = map_tensors(twice, OrderedDict(b=ONE, a=TWO))
    assert type(result) is OrderedDict
    assert list(result.items()) == [("b", 2), ("a", 4)]
    result = map_tensors(twice, defaultdict(list, a=ONE))
    assert (result["a"], result["missing"]) == (2, [])


def test_a_models_output_class_is_changed_as_item_and_as_attribute_and_the_old_one_is_not():
    value = Output()
    value["logits"] = ONE
    value["note"] = "n"
    result = map_tensors(twice, value)
    assert type(result) is Output
    assert (result["logits"], result.logits, result.note) == (2, 2, "n")
    assert value.logits is ONE
