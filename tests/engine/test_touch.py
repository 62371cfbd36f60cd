"""A module inside of a unit, called by itself outside of the unit's forward, raises by name, or gives the values and
gradients of the plain model."""

import copy
import gc
import sys
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import sherd
from sherd import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from sherd.errors import CommError, PolicyError, ShardedAccessError
from tests.support import models
from tests.support.comparing import assert_named_close, whole_grads, whole_params
from tests.support.meshes import mesh_of
from tests.support.models import VOCABULARY, WIDTH, Block, Wired, tokens
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import FRONTS, sharded


class Contained(models.Net):
    """Its first block has a container inside, which has no parameters of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        inside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.blocks[0] = nn.Sequential(inside, nn.LayerNorm(WIDTH))

    def embedded(self, tokens):
        return self.norm(self.embed(tokens))


def net(**options):
    torch.manual_seed(3)
    return Contained(**options)


WAYS = {
    **{front: (front, {}) for front in FRONTS},
    "ddp": ("shard", {"placements": "ddp"}),
    "kept": ("shard", {"reshard_after_forward": False}),
    "freed": ("shard", {"reshard_after_forward": True}),
    "NO_SHARD": ("wrapper", {"sharding_strategy": ShardingStrategy.NO_SHARD}),
    "SHARD_GRAD_OP": ("wrapper", {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
}
FREEING = [way for way in WAYS if way not in ("kept", "SHARD_GRAD_OP", "NO_SHARD")]


def made(way="shard", on_touch="unshard", plain=None, **more):
    front, options = WAYS[way]
    return sharded(plain or net(), front, on_touch=on_touch, **options, **more)


# on_touch="error"

CALLS = {
    "embed.weight": lambda model: model.embed(tokens(0, 0)),
    "head.weight, head.bias": lambda model: model.head(torch.ones(2, WIDTH)),
    "norm.weight, norm.bias": lambda model: model.norm(torch.ones(WIDTH)),
    "0.0.weight": lambda model: model.blocks[0][0](torch.ones(2, WIDTH)),
}
"""By the parameters that the error names."""
ONE_TOKEN = [torch.tensor(3), torch.tensor([3]), torch.tensor([[3]])]
"""DTensor takes each for the same on all ranks, and looks it up in this rank's rows."""


@pytest.mark.parametrize("way", FREEING)
@on_threads(2)
def test_a_call_that_meets_shards_names_unit_parameters_line_and_remedy(way):
    model = made(way, on_touch="error")

    def step():
        model(tokens(0, 0)).sum().backward()

    for before in (lambda: None, torch.no_grad()(lambda: model(tokens(0, 0))), step):
        before()
        for names, call in CALLS.items():
            with pytest.raises(ShardedAccessError) as caught:
                call(model)
            said = str(caught.value)
            for word in (names, "test_touch.py:", 'on_touch="unshard"', "unshard()", "sherd.unsharded"):
                assert word in said
        for token in ONE_TOKEN:
            with pytest.raises(ShardedAccessError, match=r"embed\.weight"):
                model.embed(token)
        with pytest.raises(ShardedAccessError, match=r"Contained\.embedded\(\).*fsdp_forward_method\(.*'embedded'"):
            model.embedded(tokens(0, 0))
    assert said.startswith("Linear, a module inside of unit blocks.0, was called at ")
    step()


@pytest.mark.parametrize("way", ["shard", "flat", "wrapper", "flat wrapper"])
@on_threads(2)
def test_what_works_on_shards_goes_on_working(way):
    model, plain = made(way, on_touch="error"), net()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    average = [each.detach().clone() for each in model.parameters()]
    for _ in range(2):
        model(tokens(0, 0)).sum().backward()
        sherd.clip_grad_norm_(model.parameters(), 1.0)
        for each in model.parameters():
            assert each.norm() >= 0
            if each.grad is not None:
                assert each.grad.norm() >= 0
            each.to_local() if isinstance(each, DTensor) else None
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(average, [each.detach() for each in model.parameters()], 0.1)
    model.state_dict()
    with torch.no_grad():
        nn.init.constant_(model.embed.weight, 0.5)
        for each in model.parameters():
            each.mul_(1 - 0.1)
    with sherd.unsharded(model):
        model.embed(tokens(0, 0))
    units = [each for each in model.modules() if isinstance(each, sherd.FSDPModule)]
    for each in units:
        each.unshard()
    model.embedded(tokens(0, 0))
    for each in units:
        each.reshard()
    if way == "shard":
        values = {name: value.clone() for name, value in plain.head.named_parameters()}
        hidden = torch.ones(2, WIDTH)
        torch.testing.assert_close(torch.func.functional_call(model.head, values, (hidden,)), plain.head(hidden))


@on_threads(2)
def test_a_program_may_leave_it_to_torch_and_a_module_without_inputs_compute_with_shards():
    with pytest.raises(RuntimeError, match="mixed torch"):
        made(on_touch="ignore").head(torch.ones(2, WIDTH))
    model = fully_shard(nn.Sequential(Wired(lambda self: self.weight.norm(), weight=nn.Parameter(torch.ones(4, 4)))))
    assert model[0]().full_tensor().item() == pytest.approx(4.0)


@on_threads(1)
def test_an_unknown_policy_is_refused():
    for shard in (fully_shard, FullyShardedDataParallel, sherd.replicate):
        with pytest.raises(PolicyError, match="on_touch='gather': expected one of error, unshard, ignore"):
            shard(nn.Linear(2, 2), on_touch="gather")


# on_touch="unshard"


def loss_of(model, step, rank):
    """Calls of modules by themselves, and one of the model, in one step; some twice."""
    given = tokens(step, rank)
    hidden = model.embed(given)
    hidden = hidden + model.embed(given.flip(0))
    hidden = model.blocks[1](model.blocks[0][0](hidden))
    loss = model.head(model.norm(hidden)).square().mean() + model(given).square().mean()
    return loss + model.head(model.embedded(given)).mean()


def trained(model, ranks=None):
    """The losses of two steps, the gradients of the first, and the parameters; of several ranks in turn it is the plain
    training."""
    ranks = [dist.get_rank()] if ranks is None else ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, grads = [], None
    for step in range(2):
        for rank in ranks:
            loss = loss_of(model, step, rank)
            (loss / len(ranks)).backward()
            losses.append(loss.item())
        grads = grads or whole_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [model.embed(tokens(step, rank)).square().sum().item() for rank in ranks]
    return losses, grads, whole_params(model)


def assert_as_plain(found, **options):
    losses, grads, params = trained(net(**options), range(len(found)))
    for rank, (found_losses, found_grads, found_params) in enumerate(found):
        assert found_losses == pytest.approx(losses[rank :: len(found)], rel=1e-5)
        assert_named_close(found_params, params, "parameter", 1e-5, 1e-6)
        if "embed.weight" in found_grads:  # a flat parameter has another name
            assert_named_close(found_grads, grads, "gradient", 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        *((way, {}) for way in WAYS),
        *((way, {which: True}) for way in ("shard", "flat", "wrapper") for which in ("tied", "frozen")),
    ],
    ids=str,
)
def test_calls_that_gather_train_as_the_plain_model_does(threads, way, options):
    assert_as_plain(threads(2).run(lambda: trained(made(way, plain=net(**options)))), **options)


def test_replicas_may_call_for_shards(threads):
    assert_as_plain(threads(4).run(lambda: trained(made(mesh=mesh_of((2, 2))))))


@pytest.mark.parametrize("way", FREEING)
@on_threads(2)
def test_without_gradients_a_call_leaves_shards_behind(way):
    model, plain, given = made(way), net(), tokens(0, dist.get_rank())
    with torch.no_grad():
        for call in (lambda m: m.embed(given), lambda m: m.head(m.embedded(given)), lambda m: m.embed(given[0, :1])):
            torch.testing.assert_close(call(model), call(plain), rtol=1e-5, atol=1e-6)
            assert all(isinstance(each, DTensor) for each in model.parameters())


@pytest.mark.parametrize("way", ["shard", "flat", "wrapper"])
@on_threads(2)
def test_a_call_computes_in_the_units_dtype(way):
    plain = net().to(torch.bfloat16)
    if way == "wrapper":
        model = made(way, mixed_precision=sherd.MixedPrecision(param_dtype=torch.bfloat16))
    else:
        model = made(way, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    given = tokens(0, dist.get_rank())
    found, expected = model.embed(given), plain.embed(given)
    assert torch.equal(found, expected)
    expected = plain.head(expected)
    found = model.head(found.float() if way != "wrapper" else found)  # inputs are cast as those of the unit's forward
    assert torch.equal(found, expected)
    found.sum().backward()
    expected.sum().backward()
    grads, other = whole_grads(model), plain.embed.weight.grad.clone().float()
    dist.all_reduce(other)
    torch.testing.assert_close(grads["embed.weight"], other / 2, rtol=2e-2, atol=1e-2)
    assert grads["embed.weight"].dtype == torch.float32


@pytest.mark.parametrize("way", ["shard", "flat", "kept", "wrapper"])
def test_a_call_may_wait_for_its_backward(threads, way):
    def kept_over_a_look():
        """A call whose backward comes after a forward that frees everything."""
        model, rank = made(way), dist.get_rank()
        model(tokens(0, rank)).sum()
        loss = model.head(model.embed(tokens(0, rank))).square().mean()
        with torch.no_grad():
            model(tokens(1, rank))
        loss.backward(retain_graph=True)
        loss.backward()
        return whole_grads(model)

    plain = net()
    for rank in range(2):
        (plain.head(plain.embed(tokens(0, rank))).square().mean() * 2 / 2).backward()
    for grads in threads(2).run(kept_over_a_look):
        for name in ("embed.weight", "head.bias"):
            torch.testing.assert_close(grads[name], plain.get_parameter(name).grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["kept", "ddp", "NO_SHARD", "SHARD_GRAD_OP"])
@on_threads(2)
def test_a_kept_unit_is_called_with_the_optimizers_values(way):
    model = made(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(tokens(0, 0)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(tokens(0, 0))
        optimizer.step()
    ones = torch.ones(1, WIDTH)
    with torch.no_grad():
        found, params = model.head(ones), whole_params(model)
        expected = nn.functional.linear(ones, params["head.weight"], params["head.bias"])
    assert (found - expected).abs().max() < 1e-6


def test_a_call_that_raises_changes_nothing(threads):
    def interrupted():
        model = made()
        for _ in range(2):
            with pytest.raises(IndexError):
                model.embed(torch.tensor([VOCABULARY]))
            assert all(isinstance(each, DTensor) for each in model.parameters())
        return trained(model)

    assert_as_plain(threads(2).run(interrupted))


@on_threads(2)
def test_copies_and_modules_that_come_later_are_looked_after():
    original = made()
    with torch.no_grad():
        original.embed(tokens(0, 0))
    alone = copy.deepcopy(original.head)
    model = copy.deepcopy(original)
    del original
    plain, strict = net(), fully_shard(net())
    for each in (model, strict, plain):
        each.norm = nn.Sequential(nn.LayerNorm(WIDTH))
    sherd.refresh(model)
    sherd.refresh(strict)
    given = tokens(0, dist.get_rank())
    torch.testing.assert_close(model.embedded(given), plain.embedded(given))
    with pytest.raises(RuntimeError, match="mixed"):
        alone(torch.ones(1, WIDTH))  # a copy of a part is no unit's
    with pytest.raises(ShardedAccessError, match=r"norm\.0\.weight"):
        strict.norm(torch.ones(1, WIDTH))


@pytest.mark.parametrize("on_touch", ["error", "unshard"])
@on_threads(2)
def test_a_settled_step_calls_no_hook(on_touch):
    model = made(on_touch=on_touch)
    given, called = tokens(0, 0), set()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.endswith("engine/run/touch.py"):
            called.add(frame.f_code.co_name)

    for _ in range(3):
        called.clear()
        sys.setprofile(note)
        try:
            model(given).sum().backward()
        finally:
            sys.setprofile(None)
    assert not called


class Recomputed(Contained):
    def forward(self, tokens):
        hidden = checkpoint(self.norm, self.embed(tokens), use_reentrant=False)
        return checkpoint(self.head, self.blocks[1](self.blocks[0](hidden)), use_reentrant=True)


@pytest.mark.parametrize("on_touch", ["error", "unshard"])
def test_modules_inside_of_units_may_be_recomputed(threads, on_touch):
    def recomputed():
        """In backward, as is one that is called by itself."""
        torch.manual_seed(3)
        plain = Recomputed()
        model = made("shard", on_touch, copy.deepcopy(plain))
        given = tokens(0, dist.get_rank())
        for each in (model, plain):
            loss = each(given).square().mean()
            if on_touch == "unshard":
                loss = loss + checkpoint(each.head, torch.ones(1, WIDTH), use_reentrant=False).square().mean()
            loss.backward()
        return whole_grads(model), whole_grads(plain)

    (found, one), (also_found, other) = threads(2).run(recomputed)
    mean = {name: (one[name] + other[name]) / 2 for name in one}
    for each in (found, also_found):
        assert_named_close(each, mean, "gradient", 1e-5, 1e-6)


def test_a_part_of_a_unit_of_several_modules_may_be_called(threads):
    def several_in_one_unit():
        model = net()
        return trained(sharded(model, units=[list(model.blocks), model], on_touch="unshard"))

    assert_as_plain(threads(2).run(several_in_one_unit))


@on_threads(1)
def test_a_module_around_nested_units_may_be_called_before_the_model_ever_was():
    torch.manual_seed(1)
    outer = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), Block()), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(outer)
    sharded(outer, units=[outer[0][1], outer], on_touch="unshard")
    for each in (outer, plain):
        x = torch.ones(2, WIDTH)
        (each[0](x).sum() + each(x).square().sum()).backward()
    assert_named_close(whole_grads(outer), whole_grads(plain), "gradient", 1e-5, 1e-6)


def weight_normed():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 1))


@on_threads(1)
def test_a_users_hook_that_computes_the_weight_before_the_call_finds_unsharded_parameters():
    model, plain = weight_normed(), weight_normed()
    fully_shard(model, on_touch="unshard")
    for _ in range(2):
        outputs = []
        for each in (model, plain):
            each.zero_grad()
            outputs.append(each[0](torch.ones(2, WIDTH)))
            (outputs[-1].sum() + each(torch.ones(1, WIDTH)).sum()).backward()
        torch.testing.assert_close(*outputs)
        assert_named_close(whole_grads(model), whole_grads(plain), "gradient", 1e-5, 1e-6)


@pytest.mark.parametrize("on_touch", ["error", "unshard"])
@on_threads(1)
def test_a_model_that_is_dropped_goes_at_once_without_the_collector_of_garbage(on_touch):
    gc.disable()
    try:
        model = made("shard", on_touch)
        model(tokens(0, 0)).sum().backward()
        if on_touch == "unshard":
            model.embed(tokens(0, 0)).sum().backward()
        alive = weakref.ref(model)
        del model
        assert alive() is None
    finally:
        gc.enable()


# Ranks that differ, in processes


@pytest.mark.parametrize("way", ["shard", "wrapper"])
@on_processes(2)
def test_ranks_that_call_for_different_units_are_told(way):
    model = made(way)
    with pytest.raises(CommError, match=r"rank 0 gathers unit (Contained|FullyShardedDataParallel)") as raised:
        (model.head if dist.get_rank() == 0 else model.blocks[0][0])(torch.ones(1, WIDTH))
    assert "test_touch.py:" in str(raised.value)
