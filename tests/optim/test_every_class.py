"""Every element-wise optimizer steps spans of the buffers as it steps the tensors in them."""

import functools

import pytest
import torch
from torch import optim

from tests.optim.twins import WORLDS, Pair, same_training

CLASSES = {
    "SGD": (optim.SGD, {}),
    "SGD momentum": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2}),
    "SGD nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "Adam amsgrad": (optim.Adam, {"amsgrad": True, "maximize": True}),
    "AdamW": (optim.AdamW, {}),
    "AdamW amsgrad": (optim.AdamW, {"amsgrad": True, "weight_decay": 0.2}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.1}),
    "RMSprop": (optim.RMSprop, {"weight_decay": 0.1}),
    "RMSprop centered": (optim.RMSprop, {"centered": True, "momentum": 0.5, "maximize": True}),
    "Adadelta": (optim.Adadelta, {"weight_decay": 0.1}),
    "Adamax": (optim.Adamax, {"weight_decay": 0.1}),
    "NAdam": (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {"weight_decay": 0.1}),
    "ASGD": (optim.ASGD, {"weight_decay": 0.1, "t0": 2}),
    "Rprop": (optim.Rprop, {}),
}
FUSED = [name for name in CLASSES if name.split()[0] in ("SGD", "Adam", "AdamW", "Adagrad")]
FORMS = {"foreach": list(CLASSES), "for-loop": list(CLASSES), "fused": FUSED}
# Each class in each of its forms, and each form in each of the layouts.
CASES = [
    (name, form, *WORLDS[(index + 3 * turn) % len(WORLDS)])
    for turn, (form, names) in enumerate(FORMS.items())
    for index, name in enumerate(names)
]
ARGUMENTS = {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}


def step(name, form, placement, **given):
    make, options = CLASSES[name]
    make = functools.partial(make, lr=0.1, **options)
    plain = None
    if placement == "shard" and (name == "Rprop" or (form == "fused" and not name.startswith("Adam"))):
        # torch has no such form for stock DTensors.
        plain = name != "Rprop" and functools.partial(make, foreach=True)
    same_training(functools.partial(make, **ARGUMENTS[form]), placement, make_plain=plain, **given)


@pytest.mark.parametrize(("name", "form", "placement", "num_ranks"), CASES)
def test_a_flat_step_is_the_step_of_each_tensor_in_every_layout(threads, name, form, placement, num_ranks):
    threads(num_ranks).run(step, name, form, placement)


@pytest.mark.parametrize(("placement", "num_ranks"), [("shard", 2), ("flat", 3), ("owned", 2)])
def test_dtypes_of_two_groups_are_stepped_side_by_side(threads, placement, num_ranks):
    build = functools.partial(Pair, (torch.bfloat16, torch.float32))
    for form in ARGUMENTS:
        threads(num_ranks).run(step, "AdamW", form, placement, build=build)


def test_a_learning_rate_may_be_a_tensor(threads):
    make = functools.partial(torch.optim.AdamW, lr=torch.tensor(0.1), foreach=False, weight_decay=0.0)
    for placement in ("shard", "flat"):
        threads(2).run(same_training, make, placement)
