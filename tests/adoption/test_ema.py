"""Is an average of a sharded model's parameters what it is in one process, and does it stand in for them?"""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

import sherd
from sherd.errors import ModuleError, PolicyError, PolicyTypeError, StateError
from tests.adoption.adapters import adapt, net, plain_steps, sgd, shards, steps, text_of
from tests.support.comparing import assert_named_close
from tests.support.models import WIDTH, noise

DECAY = 0.8


def whole(model):
    """Every parameter by name, unsharded."""
    with sherd.unsharded(model, writeback=False):
        return {name: each.detach().clone() for name, each in model.named_parameters()}


def whole_averages(ema):
    averages = ema.state_dict()["averages"]
    return {name: each.full_tensor() if isinstance(each, DTensor) else each.clone() for name, each in averages.items()}


def plain_averages(num_ranks, decay=DECAY, num=3):
    """The averages after each of `num` steps in one process, by name, and the parameters then."""
    model = net()
    optimizer = sgd(model)
    averages = {name: each.detach().clone() for name, each in model.named_parameters()}
    for step in range(num):
        plain_steps(model, optimizer, num_ranks, first=step, num=1)
        now = decay(step) if callable(decay) else decay
        for name, each in model.named_parameters():
            averages[name] = now * averages[name] + (1 - now) * each.detach()
    return averages, dict(model.named_parameters())


def made(front_end="fully_shard", **options):
    model = net()
    if front_end == "flat":
        for at in range(2):
            model[at] = sherd.FullyShardedDataParallel(model[at], use_orig_params=False, **options)
        return sherd.FullyShardedDataParallel(model, use_orig_params=False, **options)
    return shards(model, front_end, **options)


def stepped(model, ema, num=3):
    optimizer = sgd(model)
    for step in range(num):
        steps(model, optimizer, first=step, num=1)
        ema.update()


def averaged(decay=DECAY, given=None, **options):
    """The parameters, then what stands in for them, then what came back; and the averages themselves."""
    model = made(**options)
    ema = sherd.Ema(model, decay, **(given or {}))
    stepped(model, ema)
    own = whole(model)
    with ema.applied():
        inside = whole(model)
    assert ema.num_updates == 3
    return own, inside, whole(model), whole_averages(ema)


LAYOUTS = [
    (2, {}),
    (2, {"placement": sherd.Flat()}),
    (2, {"placement": sherd.Blocks(2)}),
    (2, {"placement": sherd.Owned()}),
    (4, {"mesh_shape": (2, 2)}),
    (4, {"mesh_shape": (2, 2), "placement": sherd.Flat(), "placements": "hfsdp"}),
    (4, {"placements": "zero1"}),
    (2, {"placements": "ddp"}),
    (2, {"offload_policy": sherd.CPUOffloadPolicy()}),
    (3, {"front_end": "wrapper"}),
    (2, {"front_end": "flat"}),
    (4, {"front_end": "flat"}),
]


@pytest.mark.parametrize(("num_ranks", "options"), LAYOUTS, ids=str)
def test_averages_are_those_of_one_process(threads, num_ranks, options):
    expected, parameters = plain_averages(num_ranks)
    for own, inside, after, averages in threads(num_ranks).run(averaged, **options):
        assert_named_close(own, parameters, "parameter", 1e-5, 1e-6)
        assert_named_close(inside, expected, "average", 1e-5, 1e-6)
        assert_named_close(averages, expected, "average", 1e-5, 1e-6)
        assert_named_close(after, own, "parameter", 0, 0)


def test_decay_may_follow_the_number_of_updates(threads):
    for decay in (lambda n: min(DECAY, (1 + n) / (10 + n)), lambda n: n / (n + 1), lambda n: 0.0 if n < 2 else 1):
        expected, _ = plain_averages(2, decay)
        for _, inside, _, _ in threads(2).run(averaged, decay):
            assert_named_close(inside, expected, "average", 1e-5, 1e-6)


def beside_an_averaged_model():
    """torch's class, which copies the model, and begins with the parameters at the first update."""
    model = made()
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    ours, optimizer = sherd.Ema(model, lambda n: DECAY if n else 0.0), sgd(model)
    for step in range(3):
        steps(model, optimizer, first=step, num=1)
        theirs.update_parameters(model)
        ours.update()
    assert_named_close(whole(theirs.module), whole_averages(ours), "average", 1e-6, 1e-7)


def test_averages_are_those_of_torchs_averaged_model(threads):
    threads(2).run(beside_an_averaged_model)


# Dtypes, devices


def in_low_precision(dtype):
    model = net().bfloat16()
    for each in (model[0], model[1], model):
        sherd.fully_shard(each)
    values = [whole(model)]
    ema = sherd.Ema(model, 0.999, dtype=dtype)
    for step in range(4):
        with torch.no_grad():
            for each in model.parameters():
                each.add_(0.25 * (step + 1))
        values.append(whole(model))
        ema.update()
    with ema.applied():
        inside = whole(model)
    assert all(torch.equal(each, values[-1][name]) for name, each in whole(model).items())
    return values, whole_averages(ema), inside


def test_averages_of_bfloat16_are_float32_unless_said_otherwise(threads):
    for dtype in (None, torch.float64, torch.bfloat16):
        for (first, *values), averages, inside in threads(2).run(in_low_precision, dtype):
            for name, average in averages.items():
                assert average.dtype == (dtype or torch.float32)
                expected = first[name].to(average.dtype)
                for each in values:
                    expected = torch.lerp(expected, each[name].to(average.dtype), 1 - 0.999)
                torch.testing.assert_close(average, expected)
                assert torch.equal(inside[name], average.bfloat16())


def in_mixed_precision():
    policy = sherd.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = made(mp_policy=policy, placement=sherd.Flat())
    ema = sherd.Ema(model, 0.5, device="cpu")
    expected = whole(model)
    optimizer = sgd(model)
    for step in range(2):
        steps(model, optimizer, first=step, num=1)
        ema.update()
        expected = {name: 0.5 * expected[name] + 0.5 * each for name, each in whole(model).items()}
    assert_named_close(whole_averages(ema), expected, "average", 1e-5, 1e-6)
    with ema.applied():
        found = model(noise(7, 0))
    assert not torch.equal(found, model(noise(7, 0)))
    teacher = net().bfloat16()
    teacher.load_state_dict(expected)
    return found, teacher(noise(7, 0).bfloat16())


def test_a_model_in_mixed_precision_computes_with_the_averages(threads):
    for found, expected in threads(2).run(in_mixed_precision):
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=0.05, atol=0.02)


# What it costs


class Recorded(TorchDispatchMode):
    """The names of the operations that run, of this rank's plain tensors."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def operations(front_end, placement):
    """Of an update; and what rank 0 does alone, which would wait for ever for a collective."""
    options = {} if placement is None else {"placement": placement}
    model = made(front_end, **options)
    ema = sherd.Ema(model, DECAY)
    steps(model, sgd(model), num=1)
    with Recorded() as gathers:
        whole_averages(ema)
    assert any("c10d" in name for name in gathers.names)
    with Recorded() as update:
        ema.update()
    if dist.get_rank() == 0:
        twin = copy.deepcopy(model) if front_end != "flat" else None
        with Recorded() as others:
            ema.update()
            with ema.applied():
                ema.state_dict()
            ema.load_state_dict(ema.state_dict())
            if twin is not None:
                ema.copy_to(twin)
        assert not any("c10d" in name for name in others.names)
    return update.names


@pytest.mark.parametrize(
    ("front_end", "placement"),
    [("fully_shard", None), ("fully_shard", sherd.Flat()), ("fully_shard", sherd.Owned()), ("flat", None)],
    ids=str,
)
def test_an_update_is_one_operation_and_nothing_is_sent(world, front_end, placement):
    for names in world(2).run(operations, front_end, placement):
        assert [name for name in names if "detach" not in name] == ["aten::_foreach_lerp_.Scalar"]


# Standing in


def raises_inside():
    model = made()
    for each in (model[0], model):
        each.set_reshard_after_forward(False)
    ema = sherd.Ema(model, DECAY)
    stepped(model, ema)
    model.eval()
    with torch.no_grad():
        own = model(noise(5, 0))  # which keeps unsharded parameters
        with ema.applied():
            averaged = model(noise(5, 0))
            saved = {name: each.full_tensor() for name, each in get_model_state_dict(model).items()}
        torch.testing.assert_close(model(noise(5, 0)), own, rtol=0, atol=0)
    for failing in (lambda: 1 / 0, lambda: model(torch.ones(1, WIDTH + 1))):
        with pytest.raises((ZeroDivisionError, RuntimeError)), ema.applied():
            failing()
        with torch.no_grad():
            torch.testing.assert_close(model(noise(5, 0)), own, rtol=0, atol=0)
    return averaged, saved


def test_the_parameters_come_back_after_an_exception_too(threads):
    plain, _ = plain_averages(2)
    teacher = net()
    teacher.load_state_dict(plain)
    for averaged, saved in threads(2).run(raises_inside):
        torch.testing.assert_close(averaged, teacher(noise(5, 0)).detach(), rtol=1e-5, atol=1e-6)
        assert_named_close(saved, plain, "average", 1e-5, 1e-6)


def at_wrong_moments():
    model = made()
    ema = sherd.Ema(model)
    said = {}
    with ema.applied():
        for name, call in {
            "update": ema.update,
            "copy_to": lambda: ema.copy_to(model),
            "load_state_dict": lambda: ema.load_state_dict(ema.state_dict()),
            "applied": lambda: ema.applied().__enter__(),
        }.items():
            said[name] = text_of(call, StateError)
    with sherd.unsharded(model):
        said["unsharded"] = text_of(ema.update, StateError)
    hook = model[1].register_forward_hook(lambda *_: said.update(forward=text_of(ema.update, StateError)))
    output = model(noise(0, 0))
    hook.remove()
    ema.update()  # between a forward and its backward is at rest
    output.sum().backward()
    return said


def test_calls_at_wrong_moments_are_refused(threads):
    for said in threads(2).run(at_wrong_moments):
        for name in ("update", "copy_to", "load_state_dict", "applied"):
            assert f"Ema.{name}() inside Ema.applied()" in said[name]
        assert "Ema.update() inside an unshard context" in said["unsharded"]
        assert "forward" in said["forward"]


def changed_inside():
    """The head is swapped, and the model loaded by assignment, while averages stand in."""
    model = made()
    ema = sherd.Ema(model, DECAY)
    stepped(model, ema)
    own = whole(model)
    with ema.applied():
        model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
        model[2] = nn.Linear(WIDTH, 3)
        sherd.refresh(model)
    found = whole(model)
    for name in own:
        if not name.startswith("2."):
            assert torch.equal(found[name], own[name])
    assert found["2.weight"].shape == (3, WIDTH)
    ema.update()
    assert ema.state_dict()["averages"]["2.weight"].shape == (3, WIDTH)


def test_a_model_may_change_while_averages_stand_in(threads):
    threads(2).run(changed_inside)


# Other models


def distil(front_end, placement):
    """A teacher that follows its student, as in self-distillation."""
    student = made(front_end, **({} if placement is None else {"placement": placement}))
    teacher = copy.deepcopy(student).requires_grad_(False)
    ema, optimizer = sherd.Ema(student, DECAY), sgd(student)
    for step in range(3):
        x = noise(step, dist.get_rank())
        with torch.no_grad():
            wanted = teacher(x)
        (student(x) - wanted + 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        ema.copy_to(teacher)
    plain = net()
    ema.copy_to(plain)
    elsewhere = sherd.fully_shard(net(), placement=sherd.Blocks(3))
    ema.copy_to(elsewhere)
    assert_named_close(whole(teacher), whole_averages(ema), "average", 0, 0)
    assert_named_close(whole(elsewhere), whole_averages(ema), "average", 0, 0)
    assert_named_close({name: each.detach() for name, each in plain.named_parameters()}, whole(teacher), "a", 0, 0)
    return whole(teacher)


@pytest.mark.parametrize(
    ("front_end", "placement"), [("fully_shard", sherd.Owned()), ("fully_shard", None), ("wrapper", None)]
)
def test_a_teacher_gets_the_averages_of_its_student(threads, front_end, placement):
    student, teacher = net(), net()
    optimizer = sgd(student)
    for step in range(3):
        for rank in range(2):
            x = noise(step, rank)
            ((student(x) - teacher(x).detach() + 1).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.lerp_(other, 1 - DECAY)
    for found in threads(2).run(distil, front_end, placement):
        assert_named_close(found, dict(teacher.named_parameters()), "average", 1e-5, 1e-6)


def copied_elsewhere():
    ema = sherd.Ema(made())
    ema.copy_to(flat := made("flat"))
    assert_named_close(whole(flat), whole_averages(ema), "average", 0, 0)
    other = sherd.fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)))
    return text_of(lambda: ema.copy_to(other), ModuleError)


def test_a_model_with_other_names_is_refused(threads):
    for said in threads(2).run(copied_elsewhere):
        assert "Ema.copy_to(): 0.weight, 0.bias, 1.weight" in said
        assert "only one side has it" in said


# Saved and loaded

PLACES = [None, sherd.Flat(), sherd.Owned()]


def save(folder, at, front_end):
    model = made(front_end, **({} if PLACES[at] is None else {"placement": PLACES[at]}))
    ema = sherd.Ema(model, DECAY)
    stepped(model, ema)
    dcp.save({"ema": ema}, checkpoint_id=f"{folder}/{at}{front_end}")
    return whole_averages(ema)


def load(folder, at, front_end):
    """Into this placement, of each that was saved."""
    found = []
    for saved in [(each, "fully_shard") for each in range(len(PLACES))] + [(0, "flat")]:
        model = made(front_end, **({} if PLACES[at] is None else {"placement": PLACES[at]}))
        ema = sherd.Ema(model, DECAY)
        dcp.load({"ema": ema}, checkpoint_id=f"{folder}/{saved[0]}{saved[1]}")
        assert ema.num_updates == 3
        ema.copy_to(model)
        found.append(whole(model))
    return found


def test_averages_load_at_another_placement_and_number_of_ranks(world, tmp_path):
    expected = {}
    for at, front_end in [(0, "fully_shard"), (1, "fully_shard"), (2, "fully_shard"), (0, "flat")]:
        expected, *_ = world(2).run(save, str(tmp_path), at, front_end)
    for num_ranks, at, front_end in [
        (3, 0, "fully_shard"),
        (1, 1, "fully_shard"),
        (3, 2, "fully_shard"),
        (1, 0, "flat"),
    ]:
        for loaded in world(num_ranks).run(load, str(tmp_path), at, front_end):
            for found in loaded:
                assert_named_close(found, expected, "average", 1e-6, 1e-7)


def given_by_hand():
    ema, other = sherd.Ema(made()), sherd.Ema(made(placement=sherd.Flat()))
    with torch.no_grad():
        for each in ema.state_dict()["averages"].values():
            each.mul_(2)
    other.load_state_dict(ema.state_dict())
    assert_named_close(whole_averages(other), whole_averages(ema), "average", 0, 0)
    file = io.BytesIO()
    torch.save({"num_updates": 4, "averages": whole_averages(ema)}, file)
    file.seek(0)
    third = sherd.Ema(made("flat"))
    third.load_state_dict(torch.load(file))
    assert third.num_updates == 4
    assert_named_close(whole_averages(third), whole_averages(ema), "average", 0, 0)
    assert "0.0.weight" in text_of(lambda: ema.load_state_dict(made().state_dict()), ModuleError)
    less = ema.state_dict()
    del less["averages"]["1.0.bias"]
    return text_of(lambda: ema.load_state_dict(less), ModuleError)


def test_averages_of_another_layout_and_whole_ones_load_by_hand(threads):
    for said in threads(2).run(given_by_hand):
        assert "Ema.load_state_dict(): 1.0.bias" in said


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


def move(model, by):
    with torch.no_grad():
        for each in [*model.parameters(), *model.buffers()]:
            each.add_(by)


def of_odd_parameters(buffers, trainable_only, placement):
    plain, model = Odd(), Odd()
    outside = {*model.outside.parameters(), model.counts}
    sherd.fully_shard(model.embed, placement=placement)
    sherd.fully_shard(model, placement=placement, ignored_params=outside)
    ema = sherd.Ema(model, DECAY, buffers=buffers, trainable_only=trainable_only)
    names = {name for name, each in plain.named_parameters() if each.dtype != torch.int64}
    names -= {"embed.bias"} if trainable_only else set()
    names |= {"norm.running_mean", "norm.running_var"} if buffers else set()
    assert set(ema.state_dict()["averages"]) == names
    values = dict(plain.named_parameters()) | dict(plain.named_buffers())
    expected = {name: each.detach().clone() for name, each in values.items() if name in names}
    for by in (1, 2):
        move(plain, by)
        move(model, by)
        ema.update()
        for name in names:
            expected[name] = DECAY * expected[name] + (1 - DECAY) * values[name].detach()
    assert set(whole_averages(ema)) == set(expected), set(whole_averages(ema)) ^ set(expected)
    assert_named_close(whole_averages(ema), expected, "average", 1e-5, 1e-6)
    own = {name: each.detach() for name, each in values.items()}
    with ema.applied():
        assert_named_close(whole(model) | dict(model.named_buffers()), own | expected, "value", 1e-5, 1e-6)
        assert model.head.weight is model.embed.weight
    twin = Odd()
    ema.copy_to(twin)
    found = dict(twin.named_parameters()) | dict(twin.named_buffers())
    assert_named_close({name: each.detach() for name, each in found.items()}, own | expected, "value", 1e-5, 1e-6)


def test_tied_frozen_complex_and_plain_parameters_and_buffers(threads):
    for buffers, trainable_only in ((False, True), (True, False)):
        for placement in (None, sherd.Flat()):
            threads(2).run(of_odd_parameters, buffers, trainable_only, placement)


def refreshed():
    """A model that gets adapters, then another head of the same shape, while it is averaged."""
    model = made()
    ema = sherd.Ema(model, 0.5)
    steps(model, sgd(model), num=1)
    ema.update()
    before = whole_averages(ema)
    adapt(model, freeze=False)
    sherd.refresh(model)
    began = whole(model)
    move(model, 1)
    ema.update()
    found = whole_averages(ema)
    for name, value in whole(model).items():
        known = before.get(name.replace("base_layer.", ""))
        is_kept = name in before
        torch.testing.assert_close(found[name], (known + value) / 2 if is_kept else value, msg=name)
        assert torch.equal(value, began[name] + 1)
    model[2] = nn.Linear(WIDTH, WIDTH)
    sherd.refresh(model)
    with ema.applied():
        head = {name: each for name, each in whole(model).items() if name.startswith("2.")}
    assert_named_close(head, {name: each for name, each in whole(model).items() if name in head}, "head", 0, 0)
    assert sorted(whole_averages(ema)) == sorted(whole(model))


def test_averages_follow_a_refresh(threads):
    threads(2).run(refreshed)


def sharded_since(placement):
    """Averaged before it is sharded, and after that."""
    plain, model = net(), net()
    emas = [sherd.Ema(each, DECAY) for each in (plain, model)]
    for number in range(3):
        if number == 1:
            sherd.fully_shard(model[0], placement=placement)
            sherd.fully_shard(model, placement=placement)
        for each, ema in zip((plain, model), emas, strict=True):
            move(each, 1)
            ema.update()
    assert_named_close(*(whole_averages(ema) for ema in reversed(emas)), "average", 0, 0)
    with emas[0].applied():
        assert_named_close(dict(plain.named_parameters()), whole_averages(emas[0]), "average", 0, 0)


def test_a_plain_model_is_averaged_too_and_may_be_sharded_later(threads):
    for placement in (None, sherd.Flat()):
        threads(2).run(sharded_since, placement)


def a_part_of_a_model():
    model = made()
    block = sherd.Ema(model[2], DECAY)
    assert set(block.state_dict()["averages"]) == {"weight", "bias"}
    own = whole(model)
    move(model, 1)
    block.update()
    with block.applied():
        found = whole(model)
    torch.testing.assert_close(found["2.weight"], own["2.weight"] + 1 - DECAY)
    assert torch.equal(found["0.0.weight"], own["0.0.weight"] + 1)


def test_a_part_of_a_unit_may_be_averaged(threads):
    threads(2).run(a_part_of_a_model)


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
        assert f"Ema({name}" in text_of(lambda given=given: sherd.Ema(model, **given), kind)
    assert "returned 2 for 0" in text_of(sherd.Ema(model, lambda n: 2).update, PolicyError)
    assert "Ema expects a module" in text_of(lambda: sherd.Ema([model]), PolicyTypeError)
    assert "nothing to average" in text_of(lambda: sherd.Ema(nn.ReLU()), ModuleError)
    assert "weight, bias on the meta device" in text_of(lambda: sherd.Ema(model.to("meta")), StateError)
