"""A flat optimizer takes everything that users do with an optimizer, on the same terms."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sherd import CPUOffloadPolicy, Flat, fully_shard
from sherd.optim import flatten_optimizer
from tests.optim.twins import (
    CLOSE,
    NAMES,
    Pair,
    adamw,
    assert_alike,
    backward,
    groups,
    run,
    same_training,
    spans_of,
    state_of,
    three,
)
from tests.support.comparing import assert_same, whole_params
from tests.support.meshes import mesh_of
from tests.support.models import Wired
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded

LAYOUTS = [("shard", 2), ("flat", 1), ("flat", 3), ("owned", 2)]


def train_with_a_schedule(trained):
    for model, optimizer in trained:
        schedule = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=6)
        for step in range(4):
            run(model, optimizer, [step])
            schedule.step()
    assert [group["lr"] for group in trained[0][1].param_groups] == [
        group["lr"] for group in trained[2][1].param_groups
    ]


def train_with_micro_batches(trained):
    for model, optimizer in trained:
        for step in range(3):
            for micro in range(3):
                backward(model, step + micro, NAMES if micro else NAMES[2:])
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)


def train_with_a_closure(trained):
    for model, optimizer in trained:
        for step in range(3):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = model(step, NAMES)
                loss.backward()
                return loss

            with torch.no_grad():
                assert optimizer.step(closure).requires_grad


def train_with_clipping(trained):
    for model, optimizer in trained:
        for step in range(3):
            backward(model, step)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
            assert norm > 0.5
            optimizer.step()
            optimizer.zero_grad()


def first_matrices(model):
    return [each for each in model.first.parameters() if each.ndim > 1]


def train_with_groups_added_later(trained):
    for model, optimizer in trained:
        run(model, optimizer, range(2))
        optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.05})
        optimizer.add_param_group({"params": [each for each in model.first.parameters() if each.ndim < 2]})
        model.zero_grad()
        run(model, optimizer, range(2, 4))
        optimizer.param_groups[0]["params"].pop()
        run(model, optimizer, range(4, 6))


def clear_the_state(trained):
    for model, optimizer in trained:
        run(model, optimizer, range(2))
        optimizer.state.clear()
        run(model, optimizer, range(2, 4))


def write_into_the_state(trained):
    for model, optimizer in trained:
        run(model, optimizer, range(2))
        for parameter in model.parameters():
            optimizer.state[parameter]["exp_avg"].mul_(0.5)
        run(model, optimizer, range(2, 4))


def train(trained):
    for model, optimizer in trained:
        run(model, optimizer, range(2, 5))


def partly_frozen():
    model = Pair()
    model.first.v.requires_grad_(False)
    model.second.scalar.requires_grad_(False)
    return model


def built_before_sharding(placement):
    """Built, and flattened, before sharding: adopted at the first step."""
    models = [Pair() for _ in range(3)]
    trained = [(model, adamw(groups(model))) for model in models]
    flatten_optimizer(trained[0][1])
    for model in models[:2]:
        sharded(model, placement)
    return trained


def flattened_between_steps(placement):
    model = sharded(Pair(), placement)
    trained = [(model, adamw(groups(model))), *three(placement)[1:]]
    for each in trained:
        run(*each, range(2))
    flatten_optimizer(trained[0][1])
    return trained


def offloaded(placement):
    offload = CPUOffloadPolicy(pin_memory=False)
    return [three(placement, offload_policy=offload)[0], *three(placement)[1:]]


USES = {
    "schedule": (three, train_with_a_schedule),
    "micro-batches": (three, train_with_micro_batches),
    "closure": (three, train_with_a_closure),
    "clipping": (three, train_with_clipping),
    "groups added later": (functools.partial(three, groups=first_matrices), train_with_groups_added_later),
    "cleared state": (three, clear_the_state),
    "written state": (three, write_into_the_state),
    "frozen parts": (functools.partial(three, build=partly_frozen), train),
    "an earlier optimizer": (built_before_sharding, train),
    "flattened between steps": (flattened_between_steps, train),
    "offload": (offloaded, train),
}


def use_three(make, use, placement):
    trained = make(placement)
    use(trained)
    assert len(spans_of(trained[0][1])) > 0
    assert_alike(trained)


# All with stock DTensors, and with runs in turn on one rank, cut anywhere, and between tensors.
@pytest.mark.parametrize("runs", [False, True], ids=["shards", "runs"])
@pytest.mark.parametrize("use", USES)
def test_it_does_as_the_plain_optimizer(threads, use, runs):
    placement, num_ranks = LAYOUTS[1 + list(USES).index(use) % (len(LAYOUTS) - 1) if runs else 0]
    threads(num_ranks).run(use_three, *USES[use], placement)


def tied():
    """A large matrix alone in its group, a tied one, and one that is left unsharded."""

    def run(self, step):
        x = torch.cos(torch.arange(2048.0) * (step + 1)).view(2, 1024)
        x = torch.tanh(self.large(x))
        return ((self.small(x) + self.again(x)) * self.plain).square().mean() + self.odd.sum().square()

    small, again = nn.Linear(1024, 3), nn.Linear(1024, 3)
    again.weight = small.weight
    vectors = {"plain": nn.Parameter(torch.ones(3)), "odd": nn.Parameter(torch.ones(2))}
    model = Wired(run, large=nn.Linear(1024, 1024), small=small, again=again, **vectors)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.sin(torch.arange(parameter.numel()) * 0.7).view(parameter.shape) * 0.05)
    return model


@pytest.mark.parametrize("placement", ["shard", "flat"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@on_threads()
def test_large_tied_and_ignored_parameters(placement):
    trained = []
    for kind in ("flat", "plain", "lone"):
        model = tied()
        if kind != "lone":
            sharded(model, placement, units=[model], ignored_params={model.plain})
        sharded_ones = [each for each in model.parameters() if each is not model.plain]
        optimizer = optim.AdamW([{"params": sharded_ones}, {"params": [model.plain]}], lr=0.01, fused=True)
        trained.append((model, flatten_optimizer(optimizer) if kind == "flat" else optimizer))
    for model, optimizer in trained:
        for step in range(3):
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert any(span.flat.numel() * 4 >= 1 << 20 for span in spans_of(trained[0][1]))
    assert_alike(trained, rtol=1e-3, atol=1e-4)


@on_threads(1, 2, 3, 4)
def test_a_hyper_parameter_class_is_one_run_of_each_flat_buffer():
    model = sharded(Pair(), "flat")
    optimizer = flatten_optimizer(adamw(list(reversed(groups(model)))))
    run(model, optimizer, range(2))
    spans = [each for each in spans_of(optimizer) if each.flat.numel()]
    buffers = [(id(each.buffer), each.group_index) for each in spans]
    assert 1 <= len(set(buffers)) == len(buffers) <= 4


@on_threads(2)
def test_nothing_is_copied():
    for placement in ("shard", "flat", "owned"):
        model = sharded(Pair(), placement)
        optimizer = flatten_optimizer(adamw(groups(model)))
        run(model, optimizer, range(2))
        backward(model, 2)
        gradients = {parameter.grad.to_local().untyped_storage().data_ptr() for parameter in model.parameters()}
        for each in spans_of(optimizer):
            assert each.flat.untyped_storage().data_ptr() == each.buffer.untyped_storage().data_ptr()
            assert each.take_gradient()
            if each.flat.numel():
                assert each.flat.grad.untyped_storage().data_ptr() in gradients
            inside = range(each.state["exp_avg"].data_ptr(), each.state["exp_avg"].data_ptr() + each.flat.nbytes + 1)
            for shard in each.shards:
                local = optimizer.state[shard]["exp_avg"].to_local()
                assert not local.numel() or local.data_ptr() in inside
                assert local.storage_offset() == 0
        optimizer.step()
        assert not [key for key in optimizer.state if key not in set(model.parameters())], "runs are not in the state"


@on_threads(1)
def test_hooks_run_once_a_step():
    model = sharded(Pair(), "flat")
    optimizer = flatten_optimizer(adamw(groups(model)))
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: calls.append("global before") if o is optimizer else None),
        register_optimizer_step_post_hook(lambda o, *_: calls.append("global after") if o is optimizer else None),
        optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
        optimizer.register_step_post_hook(lambda *_: calls.append("after")),
    ]
    for step in range(2):
        run(model, optimizer, [step])
    for handle in handles:
        handle.remove()
    assert calls == ["global before", "before", "after", "global after"] * 2
    backward(model, 3)
    with torch.profiler.profile(acc_events=True) as profile:
        optimizer.step()
    assert [event.name for event in profile.events()].count("Optimizer.step#FlatAdamW.step") == 1


class Counting(optim.SGD):
    """Keeps numbers of its own: on itself, in its parameter groups and in the states."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["sum"] = state["sum"] + parameter.grad if "sum" in state else parameter.grad.clone()
                    parameter.sub_(state["sum"], alpha=group["lr"] / (self.num_steps + state["count"]))


@on_threads(2)
def test_an_own_class_keeps_its_own_numbers():
    for placement in ("shard", "flat", "blocks"):
        trained = three(placement, functools.partial(Counting, lr=0.1), elementwise=True)
        for model, optimizer in trained:
            run(model, optimizer, range(4), lambda step: NAMES if step != 1 else NAMES[::2])
            assert optimizer.num_steps == 4
            assert [group["seen"] for group in optimizer.param_groups] == [4, 4]
        assert_alike(trained)


@on_threads(2)
def test_a_step_that_fails_leaves_the_optimizer_as_it_was():
    class Failing(optim.SGD):
        def step(self, closure=None):
            raise ZeroDivisionError

    model = sharded(Pair(), "flat")
    optimizer = flatten_optimizer(Failing(groups(model), lr=0.1), elementwise=True)
    before = [list(group["params"]) for group in optimizer.param_groups]
    backward(model, 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    for group, parameters in zip(optimizer.param_groups, before, strict=True):
        assert all(one is other for one, other in zip(group["params"], parameters, strict=True))
    assert not optimizer.state


def train_a_copy(copied):
    model = sharded(Pair(), "flat")
    optimizer = flatten_optimizer(adamw(groups(model)))
    run(model, optimizer, range(2))
    twin = copied(optimizer)
    assert type(twin) is optim.AdamW
    theirs = [each for group in twin.param_groups for each in group["params"]]
    ours = [each for group in optimizer.param_groups for each in group["params"]]
    backward(model, 2)
    for one, other in zip(theirs, ours, strict=True):
        assert one is not other
        one.grad = other.grad.clone()
    twin.step()
    optimizer.step()
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one.to_local(), other.to_local(), **CLOSE)
        assert twin.state[one]["step"] == optimizer.state[other]["step"] == 3


def pickled(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.filterwarnings("ignore:a sharded tensor is pickled")
def test_a_copy_steps_tensor_by_tensor_and_so_does_what_a_pickle_brings_back(world, threads):
    threads(2).run(train_a_copy, copy.deepcopy)
    world(2).run(train_a_copy, pickled)


@on_threads(2)
def test_plain_and_sharded_parameters_share_a_group_of_a_fused_optimizer():
    models = [Pair().first, Pair().first]
    fully_shard(models[0], placement=Flat(), ignored_params={models[0].w})
    optimizers = [optim.AdamW(model.parameters(), lr=0.1, fused=True) for model in models]
    flatten_optimizer(optimizers[0])
    names = {name.partition(".")[2] for name in NAMES}
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(3):
            model(step, names, 1.0).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(whole_params(models[0]), whole_params(models[1]), rtol=1e-4, atol=1e-5)


def test_without_shards_it_is_the_plain_optimizer():
    models = [Pair(), Pair()]
    optimizers = [adamw(groups(model)) for model in models]
    flatten_optimizer(optimizers[0])
    for each in zip(models, optimizers, strict=True):
        run(*each, range(3))
    assert_same(whole_params(models[0]), whole_params(models[1]))
    assert_same(state_of(models[0], optimizers[0]), state_of(models[1], optimizers[1]))


@pytest.mark.parametrize(("placement", "num_ranks"), [("flat", 2), ("shard", 3), ("flat", 4)])
def test_processes_train_as_threads_do(world, placement, num_ranks):
    world(num_ranks).run(same_training, adamw, placement)


@on_threads(2)
def test_a_dtensor_of_no_unit_is_stepped_beside_the_spans():
    model, outside = (
        sharded(Pair(), "shard"),
        nn.Parameter(DTensor.from_local(torch.ones(2), mesh_of((2,)), [Shard(0)])),
    )
    optimizer = flatten_optimizer(optim.SGD([*model.parameters(), outside], lr=0.1))
    backward(model, 0)
    outside.grad = torch.ones_like(outside)
    optimizer.step()
    assert spans_of(optimizer)
    assert outside.to_local().tolist() == pytest.approx([0.9, 0.9])
