"""A module inside of a unit is called by itself, outside of the unit's forward. Does that raise by name, or give the
values and gradients of the plain model?"""

import copy
import gc
import sys
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import sherd
from sherd import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from sherd.errors import CommError, PolicyError, ShardedAccessError
from tests.support.comparing import assert_named_close, whole_grads, whole_params
from tests.support.meshes import mesh_of

WIDTH, VOCABULARY = 6, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.linspace(1, 2, WIDTH))

    def forward(self, x):
        return x + self.mlp(x) * self.scale


class Net(nn.Module):
    def __init__(self, tied=False, frozen=False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.norm.requires_grad_(not frozen)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def embedded(self, tokens):
        return self.norm(self.embed(tokens))


def net(**options):
    torch.manual_seed(3)
    return Net(**options)


def tokens(step, rank):
    return torch.randint(VOCABULARY, (2, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def wrapped(model, **options):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


WAYS = {
    "Shard(0)": (sharded, {}),
    "Flat": (sharded, {"placement": sherd.Flat()}),
    "Blocks": (sharded, {"placement": sherd.Blocks(2)}),
    "Owned": (sharded, {"placement": sherd.Owned()}),
    "ddp": (sharded, {"placements": "ddp"}),
    "kept": (sharded, {"reshard_after_forward": False}),
    "freed": (sharded, {"reshard_after_forward": True}),
    "wrapper": (wrapped, {"use_orig_params": True}),
    "flat wrapper": (wrapped, {"use_orig_params": False}),
    "NO_SHARD": (wrapped, {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD}),
    "SHARD_GRAD_OP": (wrapped, {"use_orig_params": True, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
}


def made(way, on_touch="unshard", plain=None, **more):
    shard, options = WAYS[way]
    return shard(plain or net(), on_touch=on_touch, **options, **more)


# on_touch="error"

CALLS = {
    "embed.weight": lambda model: model.embed(tokens(0, 0)),
    "head.weight, head.bias": lambda model: model.head(torch.ones(2, WIDTH)),
    "norm.weight, norm.bias": lambda model: model.norm(torch.ones(WIDTH)),
    "mlp.0.weight": lambda model: model.blocks[0].mlp(torch.ones(2, WIDTH)),
}
"""By the parameters that the error names."""
ONE_TOKEN = [torch.tensor(3), torch.tensor([3]), torch.tensor([[3]])]
"""DTensor takes each for the same on all ranks, and looks it up in this rank's rows."""


def refusals(way):
    """What is said before the first forward, after a forward without gradients, and after a step."""
    said = []
    model = made(way, on_touch="error")

    def step():
        model(tokens(0, 0)).sum().backward()

    @torch.no_grad()
    def look():
        model(tokens(0, 0))

    for before in (lambda: None, look, step):
        before()
        for names, call in CALLS.items():
            with pytest.raises(ShardedAccessError) as caught:
                call(model)
            assert names in str(caught.value)
            assert "test_touch.py:" in str(caught.value)
            for remedy in ('on_touch="unshard"', "unshard()", "sherd.unsharded"):
                assert remedy in str(caught.value)
            said.append(str(caught.value))
        for token in ONE_TOKEN:
            with pytest.raises(ShardedAccessError, match=r"embed\.weight"):
                model.embed(token)
        with pytest.raises(ShardedAccessError, match=r"Net\.embedded\(\).*register_fsdp_forward_method\(.*'embedded'"):
            model.embedded(tokens(0, 0))
    step()
    return said


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("kept", "SHARD_GRAD_OP", "NO_SHARD")])
def test_a_call_that_meets_shards_names_unit_parameters_line_and_remedy(threads, way):
    for said in threads(2).run(refusals, way):
        assert said[-1].startswith("Linear, a module inside of unit blocks.0, was called at ")


def legitimate(way):
    """What works on shards, and calls that need no unsharded parameter."""
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
    values = {name: value.clone() for name, value in plain.head.named_parameters()}
    hidden = torch.ones(2, WIDTH)
    given = torch.func.functional_call(model.head, values, (hidden,)) if way == "Shard(0)" else None
    if given is not None:
        torch.testing.assert_close(given, plain.head(hidden))


@pytest.mark.parametrize("way", ["Shard(0)", "Flat", "wrapper", "flat wrapper"])
def test_what_works_on_shards_goes_on_working(threads, way):
    threads(2).run(legitimate, way)


def left_alone():
    with pytest.raises(RuntimeError, match="mixed torch"):
        made("Shard(0)", on_touch="ignore").head(torch.ones(2, WIDTH))


def test_a_program_may_leave_it_to_torch(threads):
    threads(2).run(left_alone)


class Penalty(nn.Module):
    """It computes with shards only."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self):
        return self.weight.norm()


def called_without_tensors():
    model = fully_shard(nn.Sequential(Penalty()))
    return model[0]().full_tensor().item()


def test_a_module_that_is_given_no_tensor_may_compute_with_shards(threads):
    assert threads(2).run(called_without_tensors) == pytest.approx([4.0, 4.0])


def test_an_unknown_policy_is_refused(threads):
    def refused():
        for shard in (fully_shard, FullyShardedDataParallel, sherd.replicate):
            with pytest.raises(PolicyError, match="on_touch='gather': expected one of error, unshard, ignore"):
                shard(nn.Linear(2, 2), on_touch="gather")

    threads(1).run(refused)


# on_touch="unshard"


def loss_of(model, step, rank):
    """Calls of modules by themselves, and one of the model, in one step; some twice."""
    given = tokens(step, rank)
    hidden = model.embed(given)
    hidden = hidden + model.embed(given.flip(0))
    hidden = model.blocks[1](model.blocks[0].mlp(hidden))
    loss = model.head(model.norm(hidden)).square().mean() + model(given).square().mean()
    return loss + model.head(model.embedded(given)).mean()


def trained(model, make_loss=loss_of):
    """The losses of two steps, the gradients of the first, and the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, rank = [], dist.get_rank()
    grads = None
    for step in range(2):
        loss = make_loss(model, step, rank)
        loss.backward()
        losses.append(loss.item())
        grads = grads or whole_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model.embed(tokens(step, rank)).square().sum().item())
    return losses, grads, whole_params(model)


def trained_plainly(model, num_ranks, make_loss=loss_of):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, grads = [[] for _ in range(num_ranks)], None
    for step in range(2):
        for rank in range(num_ranks):
            loss = make_loss(model, step, rank)
            (loss / num_ranks).backward()
            losses[rank].append(loss.item())
        grads = grads or {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for rank in range(num_ranks):
                losses[rank].append(model.embed(tokens(step, rank)).square().sum().item())
    return losses, grads, {name: each.detach() for name, each in model.named_parameters()}


def assert_as_plain(found, num_ranks, make_loss=loss_of, **options):
    losses, grads, params = trained_plainly(net(**options), num_ranks, make_loss)
    for rank, (found_losses, found_grads, found_params) in enumerate(found):
        assert found_losses == pytest.approx(losses[rank], rel=1e-5)
        if "embed.weight" in found_grads:  # a flat parameter has another name
            assert_named_close(found_grads, grads, "gradient", 1e-5, 1e-6)
            assert_named_close(found_params, params, "parameter", 1e-5, 1e-6)


def train(way, mesh_shape=None, **options):
    more = {} if mesh_shape is None else {"mesh": mesh_of(mesh_shape)}
    return trained(made(way, plain=net(**options), **more))


@pytest.mark.parametrize("way", WAYS)
def test_calls_that_gather_train_as_the_plain_model_does(threads, way):
    assert_as_plain(threads(2).run(train, way), 2)


@pytest.mark.parametrize("options", [{"tied": True}, {"frozen": True}], ids=["tied", "frozen"])
@pytest.mark.parametrize("way", ["Shard(0)", "Flat", "wrapper"])
def test_tied_and_frozen_parameters_may_be_called_for(threads, way, options):
    assert_as_plain(threads(2).run(train, way, **options), 2, **options)


def test_replicas_may_call_for_shards(threads):
    assert_as_plain(threads(4).run(train, "Shard(0)", mesh_shape=(2, 2)), 4)


def looked_at(way):
    """Without gradients: the values, and what the modules show behind each call."""
    model, plain, given = made(way), net(), tokens(0, dist.get_rank())
    with torch.no_grad():
        for call in (lambda m: m.embed(given), lambda m: m.head(m.embedded(given)), lambda m: m.embed(given[0, :1])):
            torch.testing.assert_close(call(model), call(plain), rtol=1e-5, atol=1e-6)
            assert all(isinstance(each, DTensor) for each in model.parameters())
    return True


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("kept", "SHARD_GRAD_OP", "NO_SHARD")])
def test_without_gradients_a_call_leaves_shards_behind(threads, way):
    assert threads(2).run(looked_at, way) == [True, True]


def in_low_precision(way):
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


@pytest.mark.parametrize("way", ["Shard(0)", "Flat", "wrapper"])
def test_a_call_computes_in_the_units_dtype(threads, way):
    threads(2).run(in_low_precision, way)


def kept_over_a_look(way):
    """A call whose backward comes after a forward that frees everything."""
    model, rank = made(way), dist.get_rank()
    model(tokens(0, rank)).sum()
    loss = model.head(model.embed(tokens(0, rank))).square().mean()
    with torch.no_grad():
        model(tokens(1, rank))
    loss.backward(retain_graph=True)
    loss.backward()
    return whole_grads(model)


@pytest.mark.parametrize("way", ["Shard(0)", "Flat", "kept", "wrapper"])
def test_a_call_may_wait_for_its_backward(threads, way):
    model = net()
    for rank in range(2):
        (model.head(model.embed(tokens(0, rank))).square().mean() * 2 / 2).backward()
    for grads in threads(2).run(kept_over_a_look, way):
        torch.testing.assert_close(grads["embed.weight"], model.embed.weight.grad, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads["head.bias"], model.head.bias.grad, rtol=1e-5, atol=1e-6)


def renewed(way):
    """A unit that is kept unsharded, which an optimizer has stepped, is called with the new values."""
    model = made(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(tokens(0, 0)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(tokens(0, 0))
        optimizer.step()
    with torch.no_grad():
        return model.head(torch.ones(1, WIDTH)) - F.linear(
            torch.ones(1, WIDTH), whole_params(model)["head.weight"], whole_params(model)["head.bias"]
        )


@pytest.mark.parametrize("way", ["kept", "ddp", "NO_SHARD", "SHARD_GRAD_OP"])
def test_a_kept_unit_is_called_with_the_optimizers_values(threads, way):
    for difference in threads(2).run(renewed, way):
        assert difference.abs().max() < 1e-6


def interrupted():
    """A call that raises leaves the model as it was."""
    model = made("Shard(0)")
    for _ in range(2):
        with pytest.raises(IndexError):
            model.embed(torch.tensor([VOCABULARY]))
        assert all(isinstance(each, DTensor) for each in model.parameters())
    return trained(model)


def test_a_call_that_raises_changes_nothing(threads):
    assert_as_plain(threads(2).run(interrupted), 2)


def copied_and_refreshed():
    original = made("Shard(0)")
    with torch.no_grad():
        original.embed(tokens(0, 0))
    alone = copy.deepcopy(original.head)
    model = copy.deepcopy(original)
    model.norm = nn.Sequential(nn.LayerNorm(WIDTH))
    sherd.refresh(model)
    del original
    plain = net()
    plain.norm = nn.Sequential(nn.LayerNorm(WIDTH))
    given = tokens(0, dist.get_rank())
    torch.testing.assert_close(model.embedded(given), plain.embedded(given))
    with pytest.raises(RuntimeError, match="mixed"):
        alone(torch.ones(1, WIDTH))  # a copy of a part is no unit's
    strict = fully_shard(net())
    strict.norm = nn.Sequential(nn.LayerNorm(WIDTH))
    sherd.refresh(strict)
    with pytest.raises(ShardedAccessError, match=r"norm\.0\.weight"):
        strict.norm(torch.ones(1, WIDTH))


def test_copies_and_modules_that_come_later_are_looked_after(threads):
    threads(2).run(copied_and_refreshed)


def hooks_run(on_touch):
    """The functions of the hooks that a settled step calls."""
    model = made("Shard(0)", on_touch=on_touch)
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
    return called


@pytest.mark.parametrize("on_touch", ["error", "unshard"])
def test_a_settled_step_calls_no_hook(threads, on_touch):
    assert threads(2).run(hooks_run, on_touch) == [set(), set()]


def recomputed(on_touch):
    """Modules inside of a unit that are checkpointed run again in backward; so is one that is called by itself."""
    from torch.utils.checkpoint import checkpoint

    class Recomputed(Net):
        def forward(self, tokens):
            hidden = checkpoint(self.norm, self.embed(tokens), use_reentrant=False)
            return checkpoint(self.head, self.blocks[1](self.blocks[0](hidden)), use_reentrant=True)

    torch.manual_seed(3)
    plain = Recomputed()
    model = made("Shard(0)", on_touch, copy.deepcopy(plain))
    given = tokens(0, dist.get_rank())
    grads = []
    for each in (model, plain):
        loss = each(given).square().mean()
        if on_touch == "unshard":
            loss = loss + checkpoint(each.head, torch.ones(1, WIDTH), use_reentrant=False).square().mean()
        loss.backward()
        grads.append(whole_grads(each))
    return grads


@pytest.mark.parametrize("on_touch", ["error", "unshard"])
def test_modules_inside_of_units_may_be_recomputed(threads, on_touch):
    runs = threads(2).run(recomputed, on_touch)
    plain = {name: (runs[0][1][name] + runs[1][1][name]) / 2 for name in runs[0][1]}
    for found, _ in runs:
        assert_named_close(found, plain, "gradient", 1e-5, 1e-6)


def several_in_one_unit():
    """The modules of a list unit, of which a part is called by itself."""
    plain = net()
    model = copy.deepcopy(plain)
    fully_shard([model.blocks[0], model.blocks[1]], on_touch="unshard")
    fully_shard(model, on_touch="unshard")
    return trained(model)


def test_a_part_of_a_unit_of_several_modules_may_be_called(threads):
    assert_as_plain(threads(2).run(several_in_one_unit), 2)


def around_units():
    """A module around nested units is called by itself before the model ever was."""
    outer = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), Block()), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(outer)
    fully_shard(outer[0][1], on_touch="unshard")
    fully_shard(outer, on_touch="unshard")
    grads = []
    for each in (outer, plain):
        x = torch.full((2, WIDTH), 1.0 + dist.get_rank())
        (each[0](x).sum() + each(x).square().sum()).backward()
        grads.append(whole_grads(each))
    return grads


def test_a_module_around_nested_units_may_be_called(threads):
    torch.manual_seed(1)
    runs = threads(1).run(around_units)
    assert_named_close(runs[0][0], runs[0][1], "gradient", 1e-5, 1e-6)


def weight_normed():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 1))


def with_users_hook():
    """A hook of the user's that computes the weight from other parameters, before the call."""
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


def test_a_users_hook_finds_unsharded_parameters(threads):
    threads(1).run(with_users_hook)


def outlived(on_touch):
    """Whether a model that is dropped is gone at once, without the collector of garbage."""
    gc.disable()
    try:
        model = made("Shard(0)", on_touch)
        model(tokens(0, 0)).sum().backward()
        if on_touch == "unshard":
            model.embed(tokens(0, 0)).sum().backward()
        alive = weakref.ref(model)
        del model
        return alive() is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("on_touch", ["error", "unshard"])
def test_a_model_that_is_dropped_goes_at_once(threads, on_touch):
    assert threads(1).run(outlived, on_touch) == [False]


# Ranks that differ, in processes


def differing(way):
    try:
        model = made(way)
        model.head(torch.ones(1, WIDTH)) if dist.get_rank() == 0 else model.blocks[0].mlp(torch.ones(1, WIDTH))
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", ["Shard(0)", "wrapper"])
def test_ranks_that_call_for_different_units_are_told(world, way):
    for said in world(2).run(differing, way):
        assert "rank 0 gathers unit Net" in said or "rank 0 gathers unit FullyShardedDataParallel" in said
        assert "test_touch.py:" in said
