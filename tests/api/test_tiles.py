"""Losses and layers in parts are those of the full ones, hold one part at a time, and train sharded models."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sherd
from sherd.errors import PolicyError, PolicyTypeError, ShardedAccessError, UnsupportedError
from tests.api.checks import assert_refuses, assert_trains
from tests.api.own_collectives import GatherByList, ReduceByAllReduce
from tests.support.comparing import assert_same
from tests.support.models import VOCABULARY, WIDTH, Block, Net, Wired, tokens
from tests.support.ranks.bodies import on_processes
from tests.support.refusals import one_line
from tests.support.sharding import FRONTS, sharded
from tests.support.training import made

chunked = functools.partial(sherd.chunked_cross_entropy, chunk_tokens=4)


def case(dtype=torch.float64, num_classes=50, shape=(3, 7), width=16):
    """Hidden states, a weight, a bias, all with gradients, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((*shape, width), (num_classes, width), (num_classes,))
    inputs = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    target = torch.randint(num_classes, shape, generator=generator)
    target.view(-1)[1::5] = -100
    return [each.requires_grad_() for each in inputs], target


def full(hidden, weight, target, *, bias=None, reduction="mean", **options):
    """The loss of torch, of float32 logits at least."""
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    logits = logits.float() if logits.dtype != torch.float64 else logits
    losses = F.cross_entropy(logits, target.flatten(), reduction=reduction, **options)
    return losses.view(target.shape) if reduction == "none" else losses


def with_gradients(loss, inputs, factor=1.0):
    """The loss and the gradients of its sum, each token's part with a factor of its own."""
    factors = factor * torch.arange(1, loss.numel() + 1, dtype=loss.dtype).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad((loss * factors).sum(), inputs)]


# The loss


def test_loss_and_gradients_are_torchs_for_every_reduction_smoothing_and_ignored_class():
    (hidden, weight, bias), target = case()
    for reduction, smoothing, ignored, biased, chunk_tokens in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.1, 1.0), (-100, 3), (True, False), (1, 4, 7, 100)
    ):
        inputs = [hidden, weight, bias] if biased else [hidden, weight]
        counted = target if ignored == -100 else target.masked_fill(target == -100, 3)
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
        options["bias"] = bias if biased else None
        loss = sherd.chunked_cross_entropy(hidden, weight, counted, chunk_tokens=chunk_tokens, **options)
        expected = with_gradients(full(hidden, weight, counted, **options), inputs)
        assert_same(with_gradients(loss, inputs), expected, f"{options} {chunk_tokens}", rtol=1e-12, atol=1e-12)


def test_what_does_not_count_and_what_is_not_there_are_as_in_torch():
    (hidden, weight, bias), target = case()
    nothing = torch.full_like(target, -100)
    for reduction, smoothing in itertools.product(("mean", "sum", "none"), (0.0, 0.1)):
        options = {"bias": bias, "reduction": reduction, "label_smoothing": smoothing}
        for name, states, counted in (
            ("all are ignored", hidden, nothing),
            ("no token", hidden[:0], target[:0]),
            ("no batch", hidden[0, 0], target[0, 0]),
        ):
            found = with_gradients(chunked(states, weight, counted, **options), [hidden, weight, bias])
            if name == "no batch":
                expected = full(states[None], weight, counted[None], **options)
                expected = expected.view(()) if reduction == "none" else expected
            else:
                expected = full(states, weight, counted, **options)
            expected = with_gradients(expected, [hidden, weight, bias])
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True, msg=f"{name} {options}")
    with pytest.raises(IndexError, match="Target 50 is out of bounds"):
        chunked(hidden, weight, target.masked_fill(target == -100, 50))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_has_float32_logits_and_sums_gradients_over_chunks_without_rounding_them(dtype):
    (hidden, weight, bias), target = case(dtype, shape=(4, 64))
    inputs = [hidden, weight, bias]
    loss = chunked(hidden, weight, target, bias=bias)
    assert loss.dtype == torch.float32
    found = with_gradients(loss, inputs)
    expected = with_gradients(full(hidden, weight, target, bias=bias), inputs)
    exact_inputs = [each.detach().double().requires_grad_() for each in inputs]
    exact = with_gradients(full(exact_inputs[0], exact_inputs[1], target, bias=exact_inputs[2]), exact_inputs)
    assert_same(found[:2], expected[:2], rtol=1e-6, atol=1e-6)
    for mine, torchs, value in zip(found[2:], expected[2:], exact[2:], strict=True):
        assert mine.dtype == dtype
        assert (mine - value).norm() < 1.1 * (torchs - value).norm()


def test_a_loss_scale_comes_before_gradients_are_rounded():
    (hidden, weight, _), target = case(torch.float16)
    scale = 2.0**14
    (found,) = torch.autograd.grad(chunked(hidden, weight, target) * scale / 2**20, hidden)
    (expected,) = torch.autograd.grad(full(hidden, weight, target) * scale / 2**20, hidden)
    assert_same(found, expected, rtol=2e-3, atol=1e-7)
    assert found.count_nonzero() > 0.7 * found.numel()


def test_only_gradients_that_are_needed_are_computed_and_two_losses_add_up():
    (hidden, weight, bias), target = case()
    for inputs in ([hidden], [weight], [bias], [weight, bias]):
        given = [each if any(each is one for one in inputs) else each.detach() for each in (hidden, weight, bias)]
        found = with_gradients(chunked(given[0], given[1], target, bias=given[2]), inputs)
        expected = with_gradients(full(given[0], given[1], target, bias=given[2]), inputs)
        assert_same(found, expected, rtol=1e-12, atol=1e-12)
    assert not chunked(hidden.detach(), weight.detach(), target).requires_grad
    losses = [loss(hidden, weight, target) + loss(hidden.flip(0), weight, target) for loss in (chunked, full)]
    found, expected = (with_gradients(loss, [hidden, weight]) for loss in losses)
    assert_same(found, expected, rtol=1e-12, atol=1e-12)


def test_autocast_and_checkpoints_hold_as_for_a_linear_layer():
    (hidden, weight, bias), target = case(torch.float32)
    inputs = [hidden, weight, bias]
    found = []
    for loss in (chunked, full):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = checkpoint(loss, hidden, weight, target, bias=bias, use_reentrant=False)
        found.append(with_gradients(value, inputs))
        with torch.autocast("cpu", dtype=torch.bfloat16):  # a backward inside, too
            found.append(with_gradients(loss(hidden, weight, target, bias=bias), inputs))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2], rtol=1e-2, atol=1e-3)  # of bfloat16
    outside, again = (chunked(hidden, weight, target, bias=bias) for _ in range(2))
    expected = with_gradients(again, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # a backward inside, of a forward outside
        assert_same(with_gradients(outside, inputs), expected)


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return made


def test_no_more_than_a_chunk_of_logits_exists_at_a_time():
    (hidden, weight, bias), target = case(num_classes=500, shape=(8, 16), width=4)
    with Largest() as seen:
        chunked(hidden, weight, target, bias=bias, label_smoothing=0.1).backward()
    assert seen.numel == 4 * 500
    with Largest() as seen:
        full(hidden, weight, target, bias=bias).backward()
    assert seen.numel == 128 * 500


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # of the backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_loss_is_one_graph_with_the_same_values_and_saves_no_logits(dtype):
    (hidden, weight, bias), target = case(dtype)
    inputs = [hidden, weight, bias]

    def loss(hidden, weight, target, bias):
        return chunked(hidden.tanh(), weight, target, bias=bias)

    saved = []
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.numel()) or each, lambda each: each):
        value = compiled(hidden, weight, target, bias)
    found, expected = (with_gradients(each, inputs) for each in (value, loss(hidden, weight, target, bias)))
    assert_same(found, expected, rtol=None, atol=None)
    assert sum(saved) < 2 * hidden.numel() + weight.numel() + bias.numel() + 2 * target.numel() + 10


def test_operations_that_compilers_see_are_what_they_say():
    (hidden, weight, bias), target = case(torch.float32, shape=(9,))
    rule = (4, -100, 0.1)
    given = [hidden.detach(), weight.detach(), bias.detach(), target]
    torch.library.opcheck(torch.ops.sherd.token_losses.default, (*given, *rule))
    for is_needed in ([True, True, True], [False, True, False]):
        torch.library.opcheck(torch.ops.sherd.token_loss_gradients.default, (torch.rand(9), *given, *rule, is_needed))


def test_what_cannot_be_a_loss_is_refused_in_one_line():
    (hidden, weight, bias), target = case()
    shapes = "(..., width), (vocabulary, width), (...) and (vocabulary,)"
    for kind, words, arguments, options in (
        (
            UnsupportedError,
            "target is torch.float64, probabilities",
            (hidden, weight, torch.rand(3, 7, 50).double()),
            {},
        ),
        (PolicyError, shapes, (hidden, weight, target[:2]), {}),
        (PolicyError, shapes, (hidden, weight.T, target), {}),
        (PolicyError, shapes, (hidden, weight, target), {"bias": bias[:3]}),
        (
            PolicyError,
            "reduction='avg'): expected one of mean, sum, none",
            (hidden, weight, target),
            {"reduction": "avg"},
        ),
        (PolicyError, "chunk_tokens=0): expected 1 or more", (hidden, weight, target), {"chunk_tokens": 0}),
        (PolicyError, "from 0.0 to 1.0", (hidden, weight, target), {"label_smoothing": 1.5}),
        (PolicyError, "target is torch.uint8; expected classes, int64", (hidden, weight, target.byte()), {}),
        (PolicyTypeError, "weight=...): expected a tensor", (hidden, torch.nn.Linear(4, 4), target), {}),
        (PolicyTypeError, "target=...): expected a tensor", (hidden, weight, None), {}),
    ):
        assert words in one_line(kind, sherd.chunked_cross_entropy, *arguments, **options), words


# The loss of a sharded model


class Losing(nn.Module):
    """A head that returns the loss; plain or in chunks."""

    def __init__(self, loss):
        super().__init__()
        self.loss, self.weight = loss, nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.bias = nn.Parameter(torch.randn(VOCABULARY))

    def forward(self, hidden, target):
        return self.loss(hidden, self.weight, target, bias=self.bias)


def of_own_head(loss):
    """The head is a unit by itself, and is used twice."""
    parts = {"embed": nn.Embedding(VOCABULARY, WIDTH), "block": Block(), "head": Losing(loss)}

    def run(self, words):
        x = self.block(self.embed(words))
        return self.head(x, words.roll(-1, 1)) + 0.3 * self.head(x[:, :-2], words.roll(-2, 1)[:, :-2])

    return Wired(run, **parts)


def of_net(loss, tied):
    net = Net(tied=tied)

    def run(self, words):
        x = net.embed(words)
        for block in net.blocks:
            x = block(x)
        return loss(net.norm(x), net.head.weight, words.roll(-1, 1), bias=net.head.bias)

    return Wired(run, net=net, blocks=net.blocks)


MODELS = {
    "own head": of_own_head,
    "of the root": functools.partial(of_net, tied=False),
    "tied": functools.partial(of_net, tied=True),
}


def predict(model, rank, step):
    return model(tokens(step, rank))


@pytest.mark.values
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("front", FRONTS)
@on_processes(2)
def test_a_sharded_model_trains_with_a_loss_in_chunks_as_a_plain_one_with_a_full_loss(model, front):
    units = None if model == "own head" else lambda model: [*model.net.blocks, model]
    mine = made(functools.partial(MODELS[model], chunked))
    mine = sharded(mine, front, units and units(mine))
    assert_trains(mine, functools.partial(MODELS[model], full), predict)


@on_processes(2)
def test_with_low_precision_a_sharded_loss_in_chunks_is_the_full_one():
    policy = sherd.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for loss in (chunked, full):
        model = sharded(made(functools.partial(of_own_head, loss)), mp_policy=policy)
        value = model(tokens(0, torch.distributed.get_rank()))
        value.backward()
        found.append([value.detach(), *(each.grad.full_tensor() for each in model.parameters())])
    assert_same(found[0], found[1], rtol=2e-2, atol=2e-3)
    assert found[0][0].dtype == torch.float32


@on_processes(2)
def test_a_shard_is_refused_with_what_to_do():
    head = sherd.fully_shard(Losing(chunked))
    hidden, target = torch.randn(2, 3, WIDTH), torch.zeros(2, 3, dtype=torch.int64)
    action = functools.partial(chunked, hidden, head.weight, target)
    assert_refuses(action, ShardedAccessError, "weight is a DTensor, (", "inside of the forward of its unit")


# Layers


class Counting(nn.Module):
    """An MLP of tokens, and how often it ran."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.num_calls = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), 0

    def forward(self, x):
        self.num_calls += 1
        return self.down(F.gelu(self.up(x)))


TILED = functools.partial(sherd.tiled, tiles=4, dim=1)


class Layer(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call, self.norm, self.mlp = call, nn.LayerNorm(WIDTH), Counting()

    def forward(self, x):
        return x + self.call(self.mlp, self.norm(x))


def layers(call):
    return Wired(lambda self, x: self.blocks[1](self.blocks[0](x)), blocks=nn.ModuleList(Layer(call) for _ in range(2)))


def plainly(module, x):
    return module(x)


def sequences(model, rank, step):
    x = torch.randn(2, 10, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()


def test_a_layer_in_tiles_is_the_full_one_along_any_dim_and_for_any_number():
    mlp = made(Counting).double()
    x = torch.randn(3, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [x, *mlp.parameters()]
    expected = with_gradients(mlp(x), inputs)
    for tiles, dim, num_calls in ((1, 1, 1), (3, 1, 3), (7, -2, 7), (100, 1, 7), (2, 0, 2), (5, 1, 4)):
        mlp.num_calls = 0
        output = sherd.tiled(mlp, x, tiles=tiles, dim=dim)
        assert mlp.num_calls == num_calls
        assert_same(with_gradients(output, inputs), expected, f"{tiles} {dim}", rtol=1e-12, atol=1e-12)
        assert mlp.num_calls == 2 * num_calls
    with torch.no_grad():
        assert_same(sherd.tiled(mlp, x, tiles=3), expected[0], rtol=1e-12, atol=1e-12)
    for function in (F.relu, nn.LayerNorm(WIDTH).double()):
        assert_same(sherd.tiled(function, x, tiles=3), function(x))
    assert sherd.tiled(mlp, x[:, :0], tiles=3).shape == (3, 0, WIDTH)


def test_backward_holds_what_one_tile_computes_at_a_time():
    order = []

    def layer(tile):
        order.append("computed")
        hidden = tile.exp()
        hidden.register_hook(lambda grad: order.append("done"))
        return hidden.sin()

    x, saved = torch.randn(2, 8, 4, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        output = sherd.tiled(layer, x, tiles=4)
    assert order == ["computed"] * 4
    assert {each.untyped_storage().data_ptr() for each in saved} == {x.untyped_storage().data_ptr()}
    order.clear()
    output.sum().backward()
    assert order == ["computed", "done"] * 4


def test_dropout_has_one_mask_in_forward_and_backward():
    x = torch.ones(2, 8, 16, requires_grad=True)
    output = sherd.tiled(nn.Dropout(), x, tiles=4)
    output.sum().backward()
    assert_same(x.grad, output.detach())
    assert 0 < x.grad.count_nonzero() < x.numel()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_layer_in_tiles_is_one_graph():
    mlp = made(Block)
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    compiled = torch.compile(lambda x: TILED(mlp, x), fullgraph=True, backend="aot_eager")
    inputs = [x, *mlp.parameters()]
    assert_same(with_gradients(compiled(x), inputs), with_gradients(TILED(mlp, x), inputs), rtol=1e-6, atol=1e-6)


def test_what_is_no_layer_of_tokens_is_refused_in_one_line():
    x = torch.randn(2, 8, 4)
    for words, function, options in (
        ("tiles=0): expected 1 or more", F.gelu, {"tiles": 0}),
        ("tiled(dim=3): x has the shape (2, 8, 4)", F.gelu, {"tiles": 2, "dim": 3}),
        (
            "a part of the shape (2, 4, 4) gave (2, 4); expected the same size in dim 1",
            lambda x: x.sum(1),
            {"tiles": 2},
        ),
        ("gave (2, 1, 4); expected", lambda x: x.sum(1, keepdim=True), {"tiles": 2}),
        ("gave a tuple; expected", lambda x: (x, x), {"tiles": 2}),
        ("tiled(dim=1.0): x has the shape", F.gelu, {"tiles": 2, "dim": 1.0}),
    ):
        assert words in one_line(PolicyError, sherd.tiled, function, x, **options), words
    assert "x=...): expected a tensor" in one_line(PolicyTypeError, sherd.tiled, F.gelu, [1.0], tiles=2)


def layers_to_shard(model, units):
    blocks = [*model.blocks]
    mlps = [block.mlp for block in blocks]
    return {"mlp": [*mlps, model], "block": [*blocks, model], "both": [*mlps, *blocks, model], "root": [model]}[units]


@pytest.mark.values
@pytest.mark.parametrize("units", ["mlp", "block", "both", "root"])
@pytest.mark.parametrize("front", FRONTS)
@on_processes(2)
def test_a_sharded_model_trains_with_layers_in_tiles_as_a_plain_one_without(front, units):
    model = made(functools.partial(layers, TILED))
    assert_trains(sharded(model, front, layers_to_shard(model, units)), functools.partial(layers, plainly), sequences)


@on_processes(2, frozen=[False, True], reshard=[True, False])
def test_a_unit_in_tiles_is_gathered_once_in_a_pass_and_reduced_once(frozen, reshard):
    counts = []
    for call in (plainly, TILED):
        model = made(functools.partial(layers, call))
        gather, reduce = GatherByList(), ReduceByAllReduce()
        for block in model.blocks:
            block.mlp.requires_grad_(not frozen)
            sherd.fully_shard(block.mlp, reshard_after_forward=reshard)
            block.mlp.set_custom_all_gather(gather)
            block.mlp.set_custom_reduce_scatter(reduce)
            sherd.fully_shard(block)
        sherd.fully_shard(model)
        for step in range(3):
            gather.calls.clear()
            reduce.calls.clear()
            sequences(model, torch.distributed.get_rank(), step).backward()
        counts.append((gather.calls, reduce.calls))
    assert counts[0] == counts[1]
    assert [len(calls) for calls in counts[0]] == [4 if reshard else 2, 0 if frozen else 2]


@on_processes(2)
def test_hooks_of_a_user_run_for_each_tile_and_an_error_leaves_the_unit_sharded():
    model, seen = made(functools.partial(layers, TILED)), []
    for block in model.blocks:
        sherd.fully_shard(block.mlp)
    sherd.fully_shard(model)
    mlp = model.blocks[0].mlp
    handle = mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    sequences(model, 0, 0).backward()
    assert seen == [3, 3, 3, 1, 1, 3, 3, 3]  # and when backward computes them again
    handle.remove()
    handle = mlp.register_forward_hook(lambda module, args, output: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sequences(model, 0, 0)
    handle.remove()
    assert all(isinstance(each, DTensor) for each in model.parameters())
    model.zero_grad()
    assert_trains(model, functools.partial(layers, plainly), sequences)
