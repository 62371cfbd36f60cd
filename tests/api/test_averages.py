"""A teacher that is the average of a student is what it is in one process, whoever owns what of them."""

import pytest
import torch
from torch import nn

from sherd import Owned, fully_shard
from tests.support.models import Net, Wired
from tests.support.ranks.bodies import on_threads
from tests.support.training import made


def shard_blocks(*models):
    for model in models:
        for block in model.blocks:
            fully_shard(block, placement=Owned())


def shard_roots(*models):
    for model in models:
        fully_shard(model, placement=Owned())


def shard_one_by_one(*models):
    for model in models:
        shard_blocks(model)
        shard_roots(model)


def shard_by_turns(*models):
    for blocks in zip(*(model.blocks for model in models), strict=True):
        for block in blocks:
            fully_shard(block, placement=Owned())
    shard_roots(*models)


@torch.no_grad()
def average(student, teacher):
    """One by one and in lists, in place and not, and a distance of both."""
    for mine, other in zip(teacher, student, strict=True):
        mine.lerp_(other, 0.25)
        mine.mul_(0.5).add_(other, alpha=0.5)
        mine.copy_(torch.addcmul(mine, other, mine - other, value=0.1))
    torch._foreach_lerp_(teacher, student, 0.5)
    torch._foreach_mul_(teacher, 0.9)
    torch._foreach_add_(teacher, student, alpha=0.1)
    return sum((mine - other).square().sum() for mine, other in zip(teacher, student, strict=True))


@pytest.mark.parametrize("shard", [shard_one_by_one, shard_blocks, shard_roots, shard_by_turns])
@on_threads(2, 3)
def test_a_teacher_follows_its_student_under_whole(shard):
    models, plain = ([made(lambda: Net(3)) for _ in range(2)] for _ in range(2))
    for student in (models[0], plain[0]):
        with torch.no_grad():
            for number, parameter in enumerate(student.parameters()):
                parameter.add_(number / 10)
    shard(*models)
    students, teachers = ([each for each in model.parameters() if hasattr(each, "cut")] for model in models)
    names = {name for name, each in models[0].named_parameters() if hasattr(each, "cut")}
    expected = average(*([each for name, each in model.named_parameters() if name in names] for model in plain))
    torch.testing.assert_close(average(students, teachers).full_tensor(), expected)
    for name, each in models[1].named_parameters():
        if name in names:
            torch.testing.assert_close(each.full_tensor(), plain[1].get_parameter(name))
    with torch.no_grad():
        for mine, other in zip(teachers, students, strict=True):
            mine.copy_(other)
            torch.testing.assert_close(mine.full_tensor(), other.full_tensor())


def even():
    """Blocks that two ranks share evenly, and a head that they do not."""
    blocks = (nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))) for _ in range(2))
    return Wired(None, blocks=nn.ModuleList(blocks), head=nn.Linear(8, 5))


def start_anew():
    """A model that runs ends what earlier ones have left."""
    fully_shard(nn.Linear(2, 2), placement=Owned())(torch.ones(1, 2))


@on_threads(2)
def test_a_model_made_alike_has_the_same_owners():
    start_anew()
    models = [made(even) for _ in range(3)]
    shard_one_by_one(*models)
    first, *others = ([each.cut.first for each in model.parameters()] for model in models)
    assert all(each == first for each in others)
    loads = [sum(each.cut.local_numel(rank) for each in models[0].blocks.parameters()) for rank in range(2)]
    assert loads[0] == loads[1], "three matrices a block, on two ranks: blocks balance with each other"


@on_threads(2)
def test_nested_units_balance_over_the_blocks_of_a_model():
    """Blocks that are units around others go on balancing, for alone they do not."""
    start_anew()
    model = made(even)
    for block in model.blocks:
        for unit in (block[0], block[1], block[2], block):
            fully_shard(unit, placement=Owned())
    loads = [sum(each.cut.local_numel(rank) for each in model.blocks.parameters()) for rank in range(2)]
    assert loads[0] == loads[1]
