"""An average of a sharded model's parameters is what it is in one process, and stands in for them."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

import sherd
from sherd.errors import ModuleError, PolicyError, PolicyTypeError, StateError
from tests.adoption.adapters import LAYOUTS, adapt, assert_alike, net, sgd, shards, steps
from tests.support.comparing import assert_named_close, assert_same, whole, whole_params
from tests.support.models import WIDTH, noise
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded

DECAY = 0.8


def averages_of(ema):
    """The averages by name, whole."""
    return whole(ema.state_dict()["averages"])


def plain_averages(decay=DECAY):
    """The averages after three steps in one process, by name, and the parameters then."""
    model = net()
    optimizer, averages = sgd(model), whole_params(model)
    for step in range(3):
        steps(model, optimizer, first=step, num=1, of_all=True)
        now = decay(step) if callable(decay) else decay
        averages = {name: now * averages[name] + (1 - now) * each for name, each in whole_params(model).items()}
    return averages, whole_params(model)


def averaged(model, decay=DECAY):
    """The averages of three steps of training."""
    ema, optimizer = sherd.Ema(model, decay), sgd(model)
    for step in range(3):
        steps(model, optimizer, first=step, num=1)
        ema.update()
    return ema


def stand_in(decay=DECAY, **options):
    """The averages stand in for the parameters, which come back."""
    model = shards(net(), **options)
    ema = averaged(model, decay)
    expected, parameters = plain_averages(decay)
    own = whole_params(model)
    assert_named_close(own, parameters, "parameter", 1e-5, 1e-6)
    assert_named_close(averages_of(ema), expected, "average", 1e-5, 1e-6)
    with ema.applied():
        assert_named_close(whole_params(model), expected, "average", 1e-5, 1e-6)
    assert_same(whole_params(model), own)
    assert ema.num_updates == 3


@pytest.mark.parametrize(
    ("num_ranks", "options"), [*LAYOUTS, (2, {"front": "flat wrapper"}), (4, {"front": "flat wrapper"})], ids=str
)
def test_averages_are_those_of_one_process(threads, num_ranks, options):
    threads(num_ranks).run(stand_in, **options)


@on_threads(2)
def test_decay_may_follow_the_number_of_updates():
    for decay in (lambda n: min(DECAY, (1 + n) / (10 + n)), lambda n: n / (n + 1), lambda n: 0.0 if n < 2 else 1):
        stand_in(decay)


@on_threads(2)
def test_averages_are_those_of_torchs_averaged_model():
    """torch's class copies the model, and begins with the parameters at the first update."""
    model = shards(net())
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    ours, optimizer = sherd.Ema(model, lambda n: DECAY if n else 0.0), sgd(model)
    for step in range(3):
        steps(model, optimizer, first=step, num=1)
        theirs.update_parameters(model)
        ours.update()
    assert_named_close(whole_params(theirs.module), averages_of(ours), "average", 1e-6, 1e-7)


# Dtypes, devices


@on_threads(2)
def test_averages_of_bfloat16_are_float32_unless_said_otherwise():
    for dtype in (None, torch.float64, torch.bfloat16):
        model = shards(net().bfloat16())
        values = [whole_params(model)]
        ema = sherd.Ema(model, 0.999, dtype=dtype)
        for step in range(4):
            move(model, 0.25 * (step + 1))
            values.append(whole_params(model))
            ema.update()
        with ema.applied():
            inside = whole_params(model)
        assert_same(whole_params(model), values[-1])
        for name, average in averages_of(ema).items():
            assert average.dtype == (dtype or torch.float32)
            expected = values[0][name].to(average.dtype)
            for each in values[1:]:
                expected = torch.lerp(expected, each[name].to(average.dtype), 1 - 0.999)
            torch.testing.assert_close(average, expected)
            assert torch.equal(inside[name], average.bfloat16())


@on_threads(2)
def test_a_model_in_mixed_precision_computes_with_the_averages():
    policy = sherd.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shards(net(), "flat", mp_policy=policy)
    ema = sherd.Ema(model, 0.5, device="cpu")
    expected, optimizer = whole_params(model), sgd(model)
    for step in range(2):
        steps(model, optimizer, first=step, num=1)
        ema.update()
        expected = {name: 0.5 * expected[name] + 0.5 * each for name, each in whole_params(model).items()}
    assert_named_close(averages_of(ema), expected, "average", 1e-5, 1e-6)
    with ema.applied():
        found = model(noise(7, 0))
    assert not torch.equal(found, model(noise(7, 0)))
    teacher = net().bfloat16()
    teacher.load_state_dict(expected)
    torch.testing.assert_close(found, teacher(noise(7, 0).bfloat16()).to(found.dtype), rtol=0.05, atol=0.02)


# What it costs


class Recorded(TorchDispatchMode):
    """The names of the operations that run, of this rank's plain tensors."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def update_alone(front):
    model = shards(net(), front)
    ema = sherd.Ema(model, DECAY)
    steps(model, sgd(model), num=1)
    with Recorded() as gathers:
        averages_of(ema)
    assert any("c10d" in name for name in gathers.names)
    with Recorded() as update:
        ema.update()
    assert [name for name in update.names if "detach" not in name] == ["aten::_foreach_lerp_.Scalar"]
    if dist.get_rank() == 0:  # alone, it would wait for ever for a collective
        twin = copy.deepcopy(model) if front != "flat wrapper" else None
        with Recorded() as others:
            ema.update()
            with ema.applied():
                ema.state_dict()
            ema.load_state_dict(ema.state_dict())
            if twin is not None:
                ema.copy_to(twin)
        assert not any("c10d" in name for name in others.names)


@pytest.mark.parametrize("front", ["shard", "flat", "owned", "flat wrapper"])
def test_an_update_is_one_operation_and_nothing_is_sent(world, front):
    world(2).run(update_alone, front)


# Standing in


@on_threads(2)
def test_the_parameters_come_back_after_an_exception_too():
    plain, _ = plain_averages()
    teacher, model = net(), shards(net())
    teacher.load_state_dict(plain)
    for each in (model[0], model):
        each.set_reshard_after_forward(False)
    ema = averaged(model)
    model.eval()
    with torch.no_grad():
        own = model(noise(5, 0))  # which keeps unsharded parameters
        with ema.applied():
            torch.testing.assert_close(model(noise(5, 0)), teacher(noise(5, 0)), rtol=1e-5, atol=1e-6)
            assert_named_close(whole(get_model_state_dict(model)), plain, "average", 1e-5, 1e-6)
        assert_same(model(noise(5, 0)), own)
    for failing in (lambda: 1 / 0, lambda: model(torch.ones(1, WIDTH + 1))):
        with pytest.raises((ZeroDivisionError, RuntimeError)), ema.applied():
            failing()
        with torch.no_grad():
            assert_same(model(noise(5, 0)), own)


@on_threads(2)
def test_calls_at_wrong_moments_are_refused():
    model = shards(net())
    ema, asked = sherd.Ema(model), []

    def refused(said, call=ema.update):
        with pytest.raises(StateError, match=said):
            call()
        asked.append(said)

    with ema.applied():
        for name, call in {
            "update": ema.update,
            "copy_to": lambda: ema.copy_to(model),
            "load_state_dict": lambda: ema.load_state_dict(ema.state_dict()),
            "applied": lambda: ema.applied().__enter__(),
        }.items():
            refused(rf"Ema\.{name}\(\) inside Ema\.applied\(\)", call)
    with sherd.unsharded(model):
        refused(r"Ema\.update\(\) inside an unshard context")
    hook = model[1].register_forward_hook(lambda *_: refused("forward"))
    output = model(noise(0, 0))
    hook.remove()
    assert asked[-1] == "forward"
    ema.update()  # between a forward and its backward is at rest
    output.sum().backward()


@on_threads(2)
def test_a_model_may_change_while_averages_stand_in():
    """The head is swapped, and the model loaded by assignment."""
    model = shards(net())
    ema = averaged(model)
    own = whole_params(model)
    with ema.applied():
        model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
        model[2] = nn.Linear(WIDTH, 3)
        sherd.refresh(model)
    found = whole_params(model)
    for name in own:
        if not name.startswith("2."):
            assert torch.equal(found[name], own[name])
    assert found["2.weight"].shape == (3, WIDTH)
    ema.update()
    assert ema.state_dict()["averages"]["2.weight"].shape == (3, WIDTH)


# Other models


@pytest.mark.parametrize("front", ["owned", "shard", "wrapper"])
@on_threads(2)
def test_a_teacher_gets_the_averages_of_its_student(front):
    """A teacher that follows its student, as in self-distillation."""
    student, plain, plain_teacher = shards(net(), front), net(), net()
    teacher = copy.deepcopy(student).requires_grad_(False)
    ema, optimizer, plain_optimizer = sherd.Ema(student, DECAY), sgd(student), sgd(plain)
    for step in range(3):
        x = noise(step, dist.get_rank())
        (student(x) - teacher(x).detach() + 1).square().mean().backward()
        for x in (noise(step, rank) for rank in range(2)):
            ((plain(x) - plain_teacher(x).detach() + 1).square().mean() / 2).backward()
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
        ema.update()
        ema.copy_to(teacher)
        with torch.no_grad():
            torch._foreach_lerp_(list(plain_teacher.parameters()), list(plain.parameters()), 1 - DECAY)
    for other in (net(), sherd.fully_shard(net(), placement=sherd.Blocks(3))):
        ema.copy_to(other)
        assert_same(whole_params(other), averages_of(ema))
    assert_same(whole_params(teacher), averages_of(ema))
    assert_alike(teacher, plain_teacher)


@on_threads(2)
def test_a_flat_model_gets_the_averages_too_and_one_with_other_names_is_refused():
    ema = sherd.Ema(shards(net()))
    ema.copy_to(flat := shards(net(), "flat wrapper"))
    assert_same(whole_params(flat), averages_of(ema))
    other = sherd.fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)))
    with pytest.raises(ModuleError, match=r"Ema\.copy_to\(\): 0\.weight, 0\.bias, 1\.weight.*only one side has it"):
        ema.copy_to(other)


# Saved and loaded

PLACES = ("shard", "flat", "owned", "flat wrapper")


def save(folder, front):
    ema = averaged(shards(net(), front))
    dcp.save({"ema": ema}, checkpoint_id=f"{folder}/{front}")
    return averages_of(ema)


def load(folder, front):
    """Each that was saved."""
    found = []
    for saved in PLACES:
        model = shards(net(), front)
        ema = sherd.Ema(model, DECAY)
        dcp.load({"ema": ema}, checkpoint_id=f"{folder}/{saved}")
        assert ema.num_updates == 3
        ema.copy_to(model)
        found.append(whole_params(model))
    return found


def test_averages_load_at_another_placement_and_number_of_ranks(threads, tmp_path):
    for front in PLACES:
        expected, *_ = threads(2).run(save, str(tmp_path), front)
    for num_ranks, front in ((3, "shard"), (1, "flat"), (3, "owned"), (1, "flat wrapper")):
        for loaded in threads(num_ranks).run(load, str(tmp_path), front):
            for found in loaded:
                assert_named_close(found, expected, "average", 1e-6, 1e-7)


@on_threads(2)
def test_averages_of_another_layout_and_whole_ones_load_by_hand():
    ema, other = sherd.Ema(shards(net())), sherd.Ema(shards(net(), "flat"))
    with torch.no_grad():
        for each in ema.state_dict()["averages"].values():
            each.mul_(2)
    other.load_state_dict(ema.state_dict())
    assert_same(averages_of(other), averages_of(ema))
    file = io.BytesIO()
    torch.save({"num_updates": 4, "averages": averages_of(ema)}, file)
    file.seek(0)
    third = sherd.Ema(shards(net(), "flat wrapper"))
    third.load_state_dict(torch.load(file))
    assert third.num_updates == 4
    assert_same(averages_of(third), averages_of(ema))
    with pytest.raises(ModuleError, match=r"0\.0\.weight"):
        ema.load_state_dict(shards(net()).state_dict())
    less = ema.state_dict()
    del less["averages"]["1.0.bias"]
    with pytest.raises(ModuleError, match=r"Ema\.load_state_dict\(\): 1\.0\.bias"):
        ema.load_state_dict(less)


# Odd parameters, buffers, changes


class Odd(nn.Module):
    """A tied weight, one that is frozen, a complex one, an integer one, one that no unit has, and buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.embed.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.outside = nn.ParameterList([nn.Parameter(torch.randn(3)), nn.Parameter(torch.ones(2, dtype=torch.cfloat))])
        self.counts = nn.Parameter(torch.arange(4), requires_grad=False)


@torch.no_grad()
def move(model, by):
    for each in [*model.parameters(), *model.buffers()]:
        each.add_(by)


def values_of(model):
    return whole_params(model) | whole(dict(model.named_buffers()))


@pytest.mark.parametrize("placement", [None, sherd.Flat()])
@pytest.mark.parametrize("buffers", [False, True])
@on_threads(2)
def test_tied_frozen_complex_and_plain_parameters_and_buffers(buffers, placement):
    """Trainable ones only, or with buffers too."""
    plain, model = Odd(), Odd()
    outside = {*model.outside.parameters(), model.counts}
    sherd.fully_shard(model.embed, placement=placement)
    sherd.fully_shard(model, placement=placement, ignored_params=outside)
    ema = sherd.Ema(model, DECAY, buffers=buffers, trainable_only=not buffers)
    names = {name for name, each in plain.named_parameters() if each.dtype != torch.int64}
    names = names | {"norm.running_mean", "norm.running_var"} if buffers else names - {"embed.bias"}
    assert set(ema.state_dict()["averages"]) == names
    expected = {name: each for name, each in values_of(plain).items() if name in names}
    for by in (1, 2):
        move(plain, by)
        move(model, by)
        ema.update()
        expected = {name: DECAY * each + (1 - DECAY) * values_of(plain)[name] for name, each in expected.items()}
    assert_named_close(averages_of(ema), expected, "average", 1e-5, 1e-6)
    with ema.applied():
        assert_named_close(values_of(model), values_of(plain) | expected, "value", 1e-5, 1e-6)
        assert model.head.weight is model.embed.weight
    twin = Odd()
    ema.copy_to(twin)
    assert_named_close(values_of(twin), values_of(plain) | expected, "value", 1e-5, 1e-6)


@on_threads(2)
def test_averages_follow_a_refresh():
    """A model gets adapters, then another head of the same shape, while it is averaged."""
    model = shards(net())
    ema = sherd.Ema(model, 0.5)
    steps(model, sgd(model), num=1)
    ema.update()
    before = averages_of(ema)
    adapt(model, freeze=False)
    sherd.refresh(model)
    began = whole_params(model)
    move(model, 1)
    ema.update()
    found = averages_of(ema)
    for name, value in whole_params(model).items():
        known = before.get(name.replace("base_layer.", ""))
        is_kept = name in before
        torch.testing.assert_close(found[name], (known + value) / 2 if is_kept else value, msg=name)
        assert torch.equal(value, began[name] + 1)
    model[2] = nn.Linear(WIDTH, WIDTH)
    sherd.refresh(model)
    with ema.applied():
        head = {name: each for name, each in whole_params(model).items() if name.startswith("2.")}
    assert_same(head, {name: each for name, each in whole_params(model).items() if name in head})
    assert sorted(averages_of(ema)) == sorted(whole_params(model))


@on_threads(2)
def test_a_plain_model_is_averaged_too_and_may_be_sharded_later():
    for placement in (None, sherd.Flat()):
        plain, model = net(), net()
        emas = [sherd.Ema(each, DECAY) for each in (plain, model)]
        for number in range(3):
            if number == 1:
                sharded(model, units=[model[0], model], placement=placement)
            for each, ema in zip((plain, model), emas, strict=True):
                move(each, 1)
                ema.update()
        assert_same(averages_of(emas[1]), averages_of(emas[0]))
        with emas[0].applied():
            assert_same(whole_params(plain), averages_of(emas[0]))


@on_threads(2)
def test_a_part_of_a_unit_may_be_averaged():
    model = shards(net())
    block = sherd.Ema(model[2], DECAY)
    assert set(block.state_dict()["averages"]) == {"weight", "bias"}
    own = whole_params(model)
    move(model, 1)
    block.update()
    with block.applied():
        found = whole_params(model)
    torch.testing.assert_close(found["2.weight"], own["2.weight"] + 1 - DECAY)
    assert torch.equal(found["0.0.weight"], own["0.0.weight"] + 1)


# Wrong arguments


def test_wrong_arguments_are_refused():
    model = nn.Linear(2, 2)
    for kind, given in (
        (PolicyError, {"decay": 1.5}),
        (PolicyError, {"decay": -0.1}),
        (PolicyError, {"decay": float("nan")}),
        (PolicyTypeError, {"decay": "0.9"}),
        (PolicyTypeError, {"decay": True}),
        (PolicyError, {"dtype": torch.int64}),
        (PolicyTypeError, {"dtype": "float32"}),
        (PolicyTypeError, {"device": 0}),
        (PolicyTypeError, {"buffers": 1}),
        (PolicyTypeError, {"trainable_only": None}),
    ):
        (name,) = given
        with pytest.raises(kind, match=rf"Ema\({name}"):
            sherd.Ema(model, **given)
    for kind, said, call in (
        (PolicyError, "returned 2 for 0", sherd.Ema(model, lambda n: 2).update),
        (PolicyTypeError, "Ema expects a module", lambda: sherd.Ema([model])),
        (ModuleError, "nothing to average", lambda: sherd.Ema(nn.ReLU())),
        (StateError, "weight, bias on the meta device", lambda: sherd.Ema(model.to("meta"))),
    ):
        with pytest.raises(kind, match=said):
            call()
