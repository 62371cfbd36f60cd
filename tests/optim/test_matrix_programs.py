"""Whole programs around steps of whole matrices train as in one process, and what cannot be done is refused by name."""

import contextlib
import copy
import functools
import gc
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import sherd
from sherd import CommPolicy, MatrixOptimizer, Muon
from sherd.comm import groups
from sherd.errors import PolicyError
from sherd.optim.muon import left_to_adamw, not_hidden
from sherd.tensor.ragged import local_part
from tests.optim.test_muon import EXACT, assert_as_plain, batches, stack, trained
from tests.support.comparing import assert_same, whole_params
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import one_line
from tests.support.sharding import sharded


def matrices() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 9, bias=False), nn.Tanh(), nn.Linear(9, 4, bias=False))


# torch.optim.Muon: every step over shards is one of whole matrices


class _Inherits(torch.optim.Muon):
    pass


def _before_sharding(model, shard):
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    trained(shard(model), optimizer, batches(2))


def _by_a_subclass(model, shard):
    trained(shard(model), _Inherits(model.parameters(), lr=0.02), batches(2))


def _by_closures(model, shard):
    optimizer = torch.optim.Muon(shard(model).parameters(), lr=0.02)
    for batch in batches(2):

        def loss(batch=batch):
            optimizer.zero_grad()
            value = model(batch).square().mean()
            value.backward()
            return value

        assert torch.is_tensor(optimizer.step(loss))
        assert torch.is_tensor(optimizer.step(closure=loss))


def _after_steps_of_others(model, shard):
    other = matrices()
    optimizer = torch.optim.Muon(other.parameters(), lr=0.02)
    trained(other, optimizer, batches(1))
    optimizer.add_param_group({"params": list(shard(model).parameters())})
    trained(model, optimizer, batches(2))


def _in_backward(model, shard):
    optimizer = torch.optim.Muon(shard(model).parameters(), lr=0.02)
    if any(isinstance(each, DTensor) for each in model.parameters()):
        sherd.step_in_backward(model, optimizer)
    trained(model, optimizer, batches(2))


@pytest.mark.parametrize(
    "program", [_before_sharding, _by_a_subclass, _by_closures, _after_steps_of_others, _in_backward]
)
@on_threads(2, front=["shard", "flat"])
def test_torchs_muon_steps_whole_matrices_however_it_is_called(program, front):
    plain, model = matrices(), matrices()
    program(plain, lambda model: model)
    program(model, lambda model: sharded(model, front))
    assert_as_plain(model, plain)


# Hooks


def test_hooks_see_one_step_of_one_optimizer():
    model, seen = stack(), []
    MatrixOptimizer([model[2].weight], torch.sign)  # torch wraps the step of a class when the first object is made
    optimizer = Muon(model)
    optimizer.register_step_post_hook(lambda one, *_: seen.append(one))
    everywhere = register_optimizer_step_pre_hook(lambda one, *_: seen.append(one))
    trained(model, optimizer, batches(1))
    everywhere.remove()
    assert seen == [optimizer, optimizer]


@on_processes(2)
def test_a_rank_without_any_batch_steps_with_the_others():
    plain, model = stack(), sharded(stack(), comm_policy=CommPolicy(divergence="join"))
    theirs, optimizer = Muon(plain, lr=0.02, **EXACT), Muon(model, lr=0.02, **EXACT)
    for batch in batches(3):
        (plain(batch).square().mean() / 2).backward()  # the other rank's gradients count as zeros
        theirs.step()
        theirs.zero_grad()
    with sherd.join(model, optimizer):
        trained(model, optimizer, batches(3) if dist.get_rank() == 0 else [])
    assert_as_plain(model, plain)


@on_threads(2, front=["shard", "flat"])
def test_what_was_stepped_within_backward_does_not_travel_again(front):
    plain, model = stack(), sharded(stack(), front)
    trained(plain, Muon(plain, lr=0.02, **EXACT), batches(3))
    optimizer, computed = Muon(model, lr=0.02, **EXACT), []
    updates = optimizer.updates
    optimizer.updates = lambda group, given: computed.append(len(given)) or updates(group, given)
    steps = sherd.step_in_backward(model, optimizer)
    for batch in batches(2):
        model(batch).square().mean().backward()
        computed.clear()
        optimizer.step()
        assert not computed
        optimizer.zero_grad()
    steps.remove()
    trained(model, optimizer, batches(3)[2:])
    assert_as_plain(model, plain)


# Which parameters are hidden matrices


class _LanguageModel(nn.Module):
    def __init__(self, is_tied: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 5)
        self.hidden = nn.Linear(5, 5, bias=False)
        self.readout = nn.Linear(5, 8, bias=False)
        if is_tied:
            self.readout.weight = self.embed.weight

    def forward(self, x):
        return self.readout(self.hidden(self.embed(x)))


def test_what_one_of_its_modules_says_holds_for_a_shared_parameter():
    assert left_to_adamw(_LanguageModel()) == {"embed.weight": "it is an embedding", "hidden.weight": ""}
    first, lm_head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    lm_head.weight = first.weight
    shared = nn.ModuleDict({"first": first, "lm_head": lm_head, "bag": nn.EmbeddingBag(4, 4)})
    expected = {"first.weight": "lm_head is an output layer", "bag.weight": "it is an embedding"}
    assert left_to_adamw(shared) == expected


def test_an_output_layer_is_one_in_a_wrapper_and_as_the_copy_that_peft_trains():
    weight = nn.Linear(4, 4).weight
    for name in ("head.weight", "a.lm_head._orig_mod.weight", "a.score.modules_to_save.default.weight"):
        assert "is an output layer" in not_hidden(name, nn.Linear(4, 4), weight), name
    for name in ("head", "output.dense.weight", "dense.modules_to_save.head.weight"):
        assert not_hidden(name, nn.Linear(4, 4), weight) == "", name


@on_threads(2, front=["shard", "flat", "wrapper"])
def test_a_tied_embedding_is_stepped_by_adamw_on_shards_too(front):
    plain, model = _LanguageModel(), sharded(_LanguageModel(), front, [])
    for each in (plain, model):
        optimizer = Muon(each, lr=0.02, **EXACT)
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
        for step in range(2):
            each(torch.arange(step, step + 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_as_plain(model, plain)


def test_heads_of_what_adamw_steps_are_refused():
    said = one_line(PolicyError, Muon, _LanguageModel(), heads={"embed.weight": 2})
    assert "embed.weight is left to AdamW, since it is an embedding; leave 'embed.weight' out" in said


@on_threads(2)
def test_frozen_matrices_take_no_part_until_they_are_trained():
    plain, model = stack(), sharded(stack())
    both = [(each, Muon(each, lr=0.02, **EXACT)) for each in (plain, model)]
    computed = []
    updates = both[1][1].updates
    both[1][1].updates = lambda group, given: computed.append(tuple(given.shape[1:])) or updates(group, given)
    for frozen in (2, 0):
        computed.clear()
        shape = tuple(plain[frozen].weight.shape)
        for each, optimizer in both:
            for number in (0, 2):
                each[number].weight.requires_grad_(number != frozen)
            trained(each, optimizer, batches(2))
        assert shape not in computed
        assert f"{shape[0]} x {shape[1]}  frozen" in repr(both[1][1])
    assert_as_plain(model, plain)


def test_a_matrix_that_is_frozen_when_muon_is_built_is_muons():
    model = stack()
    model[2].weight.requires_grad_(False)
    assert any(each is model[2].weight for each in Muon(model).param_groups[0]["params"])


def grown(model, optimizer):
    """Adds an embedding and a matrix with a bias to a language model, gives them to its optimizer, takes two steps."""
    torch.manual_seed(3)
    model.more, model.deeper = nn.Embedding(8, 5), nn.Linear(5, 5)
    model.embed.register_forward_hook(lambda module, given, found: model.deeper(found + model.more(*given)))
    if isinstance(model, sherd.FSDPModule):
        sherd.refresh(model, optimizer)
    else:
        optimizer.add_param_group({"params": [*model.more.named_parameters(), *model.deeper.named_parameters()]})
    for step in range(2):
        model(torch.arange(step, step + 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_threads(2)
def test_what_refresh_finds_new_in_a_model_is_divided_by_the_rule():
    plain, model = _LanguageModel(), sherd.fully_shard(_LanguageModel())
    for each in (plain, model):
        optimizer = Muon(each, lr=0.02, adamw={"lr": 0.1}, **EXACT)
        grown(each, optimizer)
        assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"] * 2
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 1, 2]
        assert "AdamW, since it is an embedding" in repr(optimizer)
    assert_as_plain(model, plain)


# Plans of steps


@pytest.mark.parametrize("device", ["cpu", "meta"])
@on_threads(2, front=["shard", "flat"])
def test_a_plan_from_before_a_change_of_dtype_or_device_is_made_anew(device, front):
    plain = matrices().double()
    with torch.device(device):
        model = sharded(matrices(), front)
    optimizers = [Muon(each, lr=0.02, ns_dtype=torch.float64) for each in (plain, model)]
    assert "rank" in repr(optimizers[1])
    model.to_empty(device="cpu").to(torch.float64)
    set_model_state_dict(model, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        trained(each, optimizer, [batch.double() for batch in batches(3)])
    for expected, found in zip(plain.parameters(), whole_params(model).values(), strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-12)


@on_threads(2)
def test_a_step_at_rate_0_leaves_parameters_alone_as_torchs_checkpointing_asks():
    model = sharded(matrices())
    before = whole_params(model)
    optimizer = MatrixOptimizer(model.parameters(), lambda given: given / given.norm())  # nan for zeros
    get_state_dict(model, optimizer)
    assert_same(whole_params(model), before)


# What loops do


def _clipped(model, optimizer, given, clip):
    for batch in given:
        model(batch).square().mean().backward()
        clip(model.parameters(), 0.1)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def _with_gradients_changed(model, optimizer, given):
    is_sharded = any(isinstance(each, DTensor) for each in model.parameters())
    for batch in given:
        model(batch).square().mean().backward()
        with sherd.unsharded(model, with_grads=True) if is_sharded else contextlib.nullcontext():
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def _with_schedules(model, optimizer, given):
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    ]
    for batch in given:
        trained(model, optimizer, [batch])
        for schedule in schedules:
            schedule.step()


def _with_weights_assigned(model, optimizer, given):
    is_sharded = any(isinstance(each, DTensor) for each in model.parameters())
    for batch in given:
        trained(model, optimizer, [batch])
        model.load_state_dict(model.state_dict(), assign=is_sharded)


LOOPS = {
    "torch clips": functools.partial(_clipped, clip=torch.nn.utils.clip_grad_norm_),
    "sherd clips": functools.partial(_clipped, clip=sherd.clip_grad_norm_),
    "gradients are changed": _with_gradients_changed,
    "schedules": _with_schedules,
    "weights are assigned": _with_weights_assigned,
}


def _groups(model):
    """Groups that differ in all options."""
    weights, vectors = ([each for each in model.parameters() if each.ndim == ndim] for ndim in (2, 1))
    return [
        {"params": weights[:1], "lr": 0.5, "momentum": 0.5, "nesterov": False},
        {"params": weights[1:2], "weight_decay": 0.0, "ns_steps": 3, "ns_coefficients": "polar_express"},
        {"params": weights[2:], "adjust_lr_fn": "match_rms_adamw", "eps": 1e-3, "rows": 1},
        {"params": vectors[:3], "algorithm": "adamw", "lr": 0.1, "betas": (0.5, 0.6)},
        {"params": vectors[3:], "algorithm": "adamw", "weight_decay": 1.0, "maximize": True},
    ]


@pytest.mark.parametrize("loop", LOOPS)
@on_threads(2, front=["shard", "flat", "owned"])
def test_groups_that_differ_train_as_in_one_process_in_any_loop(loop, front):
    plain, model = stack(), sharded(stack(), front)
    for each in (plain, model):
        LOOPS[loop](each, Muon(_groups(each), lr=torch.tensor(0.02), **EXACT), batches(4))
    assert_as_plain(model, plain)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, sherd.ShardedGradScaler])
@on_threads(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(kind):
    plain, model = stack(), sharded(stack())
    trained(plain, Muon(plain, lr=0.02, **EXACT), batches(1))
    optimizer, scaler = Muon(model, lr=0.02, **EXACT), kind("cpu")
    for overflows in (True, False):
        scaler.scale(model(batches(1)[0]).square().mean()).backward()
        held = [local for each in model.parameters() if each.ndim == 2 and (local := local_part(each.grad)).numel()]
        if overflows and dist.get_rank() == 1:
            held[0].fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert bool(optimizer.state) is not overflows
    assert_as_plain(model, plain)


class _Routed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6, bias=False)
        self.experts = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x, chosen):
        x = self.first(x)
        return sum((self.experts[number](x) for number in chosen), x)


def assert_experts_are_stepped(in_backward):
    """Trains experts, of which some have no tokens on a rank, and compares each step with one process."""
    plain, model = _Routed(), _Routed()
    sharded(model, "shard", [*model.experts, model], comm_policy=CommPolicy(divergence="join"))
    optimizers = [Muon(each, lr=0.02, **EXACT) for each in (plain, model)]
    if in_backward:
        sherd.step_in_backward(model, optimizers[1])
    for step, routes in enumerate([([0, 1], [0]), ([0], [1]), ([2], [2]), ([], [0, 1, 2]), ([], [])]):
        losses = [plain(batches(2)[rank] + step, routes[rank]).square().mean() for rank in range(2)]
        (sum(losses) / 2).backward()
        model(batches(2)[dist.get_rank()] + step, routes[dist.get_rank()]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_as_plain(model, plain)


@on_processes(2)
def test_experts_without_tokens_on_a_rank_are_stepped_alike():
    assert_experts_are_stepped(in_backward=False)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@on_processes(2)
def test_compiled_blocks_are_stepped():
    plain, model = stack(), sharded(stack())
    for block in (model[0], model[2]):
        block.compile(backend="eager")
    for each in (plain, model):
        trained(each, Muon(each, lr=0.02, **EXACT), batches(2))
    assert_as_plain(model, plain)


@on_processes(2, front=["shard", "flat"])
def test_a_state_of_torchs_muon_goes_on_over_shards(front):
    plain, model = matrices(), sharded(matrices(), front)
    optimizers = [
        torch.optim.Muon(plain.named_parameters(), lr=0.02),
        Muon(model, lr=0.5, ns_dtype=torch.bfloat16),
    ]
    trained(plain, optimizers[0], batches(2))
    whole = StateDictOptions(full_state_dict=True)
    of_model, of_optimizer = copy.deepcopy(get_state_dict(plain, optimizers[0], options=whole))
    set_state_dict(model, optimizers[1], model_state_dict=of_model, optim_state_dict=of_optimizer, options=whole)
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        trained(each, optimizer, batches(4)[2:])
    assert optimizers[1].param_groups[0]["lr"] == 0.02
    assert_as_plain(model, plain)


# What a step leaves behind


@on_processes(2)
def test_steps_keep_nothing_but_state_however_many_models_they_step():
    models = [sharded(stack(), front) for front in ("shard", "flat", "owned", "shard")]
    optimizer = Muon([each for model in models for each in model.parameters() if each.ndim == 2])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    def kept(steps):
        for _ in range(steps):
            for model in models:
                model(batches(1)[0]).square().mean().backward()
            optimizer.step()
            for model in models:
                model.zero_grad()
            schedule.step()
        groups._wait_for_gloo()  # whose threads drop what was sent a moment later
        gc.collect()
        everything = gc.get_objects()
        tensors = {each.untyped_storage().data_ptr(): each for each in everything if type(each) is torch.Tensor}
        ours = Counter(type(each) for each in everything if type(each).__module__.startswith("sherd.optim"))
        return ours, sum(each.untyped_storage().nbytes() for each in tensors.values())

    kept(3)
    (few, few_bytes), (many, many_bytes) = kept(5), kept(20)
    assert many == few
    assert many_bytes <= few_bytes  # what other tests left in this process may go meanwhile
