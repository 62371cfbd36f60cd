"""Every element-wise optimizer steps spans of the buffers as it steps the tensors in them."""

import functools

import pytest
import torch

from tests.optim.classes import FORMS, maker
from tests.optim.twins import WORLDS, Pair, same_training

# Each class in each of its forms, and each form in each of the layouts.
CASES = [
    (name, form, *WORLDS[(index + 3 * turn) % len(WORLDS)])
    for turn, (form, names) in enumerate(FORMS.items())
    for index, name in enumerate(names)
]


def step(name, form, placement, **given):
    plain = maker(name, form)
    if placement == "shard" and (name == "Rprop" or (form == "fused" and not name.startswith("Adam"))):
        # torch has no such form for stock DTensors.
        plain = name != "Rprop" and maker(name, "foreach")
    same_training(maker(name, form), placement, make_plain=plain, **given)


@pytest.mark.parametrize(("name", "form", "placement", "num_ranks"), CASES)
def test_a_flat_step_is_the_step_of_each_tensor_in_every_layout(threads, name, form, placement, num_ranks):
    threads(num_ranks).run(step, name, form, placement)


@pytest.mark.parametrize(("placement", "num_ranks"), [("shard", 2), ("flat", 3), ("owned", 2)])
def test_dtypes_of_two_groups_are_stepped_side_by_side(threads, placement, num_ranks):
    build = functools.partial(Pair, (torch.bfloat16, torch.float32))
    for form in FORMS:
        threads(num_ranks).run(step, "AdamW", form, placement, build=build)


def test_a_learning_rate_may_be_a_tensor(threads):
    make = functools.partial(torch.optim.AdamW, lr=torch.tensor(0.1), foreach=False, weight_decay=0.0)
    for placement in ("shard", "flat"):
        threads(2).run(same_training, make, placement)
