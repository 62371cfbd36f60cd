"""Tensors are found, and changed, in whatever a module takes or returns, and all else is left as it is."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

import numpy as np
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


def test_a_million_numbers_are_not_walked_and_what_contains_itself_is_refused_by_name():
    numbers, seen = list(range(1_000_000)), []
    holder = type("Holder", (), {})()
    holder.numbers, holder.tensor = numbers, ONE
    assert map_tensors(partial(torch.add, ONE), numbers, seen.append) is numbers
    assert seen == []
    assert tensors_in([holder, numbers], in_any_object=True) == [ONE]
    child = MadeOtherwise(2)
    child.tensor, child.made_by = ONE, child
    for whole in (child, [child], {"root": child}):
        assert "a MadeOtherwise that a module takes or returns contains" in refusal(UnsupportedError, tensors_in, whole)


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
