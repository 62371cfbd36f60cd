"""`CommPolicy.reproducible()`: a training has the same bits on any number of ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sherd
from sherd.errors import CommError, PolicyError
from tests.support.models.stacks import Layer
from tests.support.ranks.bodies import on_processes

Named = dict[str, Tensor]

BATCHES, VOCABULARY, WIDTH = 12, 37, 8
"""Of a step, on all ranks together."""


class Mixture(nn.Module):
    """Of three experts, the one that a gate takes for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gates = self.gate(tokens).softmax(-1)
        chosen = gates.argmax(-1)
        out = torch.zeros_like(tokens)
        for expert in range(3):
            (own,) = (chosen == expert).nonzero(as_tuple=True)
            found = (tokens[own] @ self.up[expert]).relu() @ self.down[expert]
            out = out.index_add(0, own, found * gates[own, expert, None])
        return x + out.view_as(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(), Mixture(), Layer()])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), tokens.roll(1).flatten())


def made(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model, ranks = Model(), dist.get_world_size()
    is_two = options.pop("is_two", False)
    replicas = 2 if is_two and ranks > 1 else 1
    shape, names = ((replicas, ranks // replicas), ("replicate", "shard")) if is_two else ((ranks,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    options.setdefault("comm_policy", sherd.CommPolicy.reproducible())
    if is_wrapped := options.pop("is_wrapped", False):
        strategy = options.pop("strategy", "FULL_SHARD")
        wanted = {"sharding_strategy": sherd.ShardingStrategy[strategy], "device_mesh": mesh, "use_orig_params": True}
        wrap = sherd.FullyShardedDataParallel
        model.layers = nn.ModuleList(wrap(layer, **wanted, **options) for layer in model.layers)
        return wrap(model, **wanted, **options)
    for layer in model.layers:
        sherd.fully_shard(layer, mesh=mesh, **options)
    assert not is_wrapped
    return sherd.fully_shard(model, mesh=mesh, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return sherd.Muon(model, lr=1e-2)


def batch(step: int, number: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1000 * step + number))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range, clip: Callable[..., Any]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in numbers:
        with sherd.accumulate(model, BATCHES // ranks, average=True):
            for turn in range(BATCHES // ranks):
                model(batch(step, turn * ranks + rank)).backward()
        clip(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def trained(options: dict[str, Any], optimizer_of: Any, num_steps: int, clip: Any = sherd.clip_grad_norm_) -> Named:
    """Returns parameters and optimizer state after some steps, in full, by name."""
    model = made(**options)
    optimizer = optimizer_of(model)
    steps(model, optimizer, range(num_steps), clip)
    return found_in(model, optimizer)


def found_in(model: nn.Module, optimizer: torch.optim.Optimizer) -> Named:
    found = {}
    for name, each in model.named_parameters():
        for key, value in optimizer.state.get(each, {}).items():
            found[f"{key} of {name}"] = whole(value)
    with sherd.unsharded(model):
        found |= {name: whole(each) for name, each in model.named_parameters()}
    return {name.replace("_fsdp_wrapped_module.", ""): each for name, each in found.items()}


def assert_same(found: Named, expected: Named) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


REDUCED = sherd.Reduction(wire=torch.bfloat16, order="ranks")
WAYS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2": {"placements": "zero2"},
    "zero1": {"placements": "zero1"},
    "ddp": {"placements": "ddp"},
    "flat": {"placement": sherd.Flat()},
    "blocks": {"placement": sherd.Blocks(4)},
    "owned": {"placement": sherd.Owned()},
    "hsdp": {"is_two": True},
    "hfsdp": {"is_two": True, "placements": "hfsdp"},
    "zero1 of two axes": {"is_two": True, "placements": "zero1"},
    "torch": {"comm_policy": sherd.CommPolicy.reproducible(transport="torch")},
    "gloo": {"comm_policy": sherd.CommPolicy.reproducible(transport="gloo")},
    "bfloat16": {"comm_policy": sherd.CommPolicy(reduce=REDUCED)},
    "in bfloat16": {"mp_policy": sherd.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offloaded": {"offload_policy": sherd.CPUOffloadPolicy()},
    "wrapped": {"is_wrapped": True},
    "wrapped, gradients": {"is_wrapped": True, "strategy": "SHARD_GRAD_OP"},
    "wrapped, hybrid": {"is_wrapped": True, "strategy": "HYBRID_SHARD", "is_two": True},
}
OPTIMIZERS = {"adamw": adamw, "muon": muon}
CLIPS = {"sherd": sherd.clip_grad_norm_, "torch": nn.utils.clip_grad_norm_}
_expected: dict[Any, Named] = {}


def expected_of(world: Any, way: str, optimizer: str, num_steps: int, clip: str = "sherd") -> Named:
    """Returns what one rank finds. Ways that differ in where values are, and not in how they are rounded, agree."""
    key = way if "bfloat16" in way else "zero3", optimizer, num_steps, clip
    if key not in _expected:
        (_expected[key],) = world(1).run(trained, WAYS[key[0]], OPTIMIZERS[optimizer], num_steps, CLIPS[clip])
    return _expected[key]


@pytest.mark.values
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_and_state_have_the_same_bits_on_any_number_of_ranks(way, num_ranks, optimizer, world):
    if num_ranks == 3 and WAYS[way].get("is_two"):
        pytest.skip("three ranks are no two replicas")
    expected = expected_of(world, way, optimizer, 3)
    for found in world(num_ranks).run(trained, WAYS[way], OPTIMIZERS[optimizer], 3):
        assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_fifty_steps_have_the_same_bits(num_ranks, optimizer, world):
    expected = expected_of(world, "zero3", optimizer, 50)
    for found in world(num_ranks).run(trained, WAYS["zero3"], OPTIMIZERS[optimizer], 50):
        assert_same(found, expected)


@pytest.mark.front("The same bits on any number of ranks")
def test_six_ranks_have_the_bits_of_one(world, threads):
    expected = expected_of(world, "zero3", "adamw", 3)
    for found in threads(6).run(trained, WAYS["zero3"], adamw, 3):
        assert_same(found, expected)


@pytest.mark.parametrize("way", ["zero3", "flat", "hsdp"])
def test_so_they_have_when_torch_clips(way, world):
    expected = expected_of(world, "zero3", "adamw", 3, "torch")
    for found in world(2).run(trained, WAYS[way], adamw, 3, nn.utils.clip_grad_norm_):
        assert_same(found, expected)


def resumed(way: str, folder: str, num_steps: int, saves: bool) -> Named:
    """Trains the first steps and saves, or loads and trains the others."""
    model = made(**WAYS[way])
    optimizer = adamw(model)
    items = {"model": model, "optimizer": optimizer}
    if saves:
        steps(model, optimizer, range(num_steps), sherd.clip_grad_norm_)
        sherd.save(folder, items, step=num_steps)
    else:
        sherd.load(folder, items)
        steps(model, optimizer, range(num_steps, 2 * num_steps), sherd.clip_grad_norm_)
    return found_in(model, optimizer)


@pytest.mark.values
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (4, 1), (3, 4)])
@pytest.mark.parametrize("ways", [("zero3", "zero3"), ("hsdp", "flat"), ("zero1", "offloaded")])
def test_a_training_goes_on_with_the_same_bits_on_another_number_of_ranks(before, after, ways, tmp_path, world):
    if before == 3:
        ways = ("zero3", ways[1])
    expected = expected_of(world, "zero3", "adamw", 4)
    world(before).run(resumed, ways[0], str(tmp_path / "saved"), 2, True)
    for found in world(after).run(resumed, ways[1], str(tmp_path / "saved"), 2, False):
        assert_same(found, expected)


class Partly(nn.Module):
    """Uses one of two layers for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.layers[number % 2](x)


def partly_used(is_one_unit: bool) -> list[Tensor]:
    torch.manual_seed(1)
    model, rank, ranks = Partly(), dist.get_rank(), dist.get_world_size()
    options = {"comm_policy": sherd.CommPolicy.reproducible(), "mesh": init_device_mesh("cpu", (ranks,))}
    for layer in () if is_one_unit else model.layers:
        sherd.fully_shard(layer, **options)
    sherd.fully_shard(model, **options)
    with sherd.accumulate(model, BATCHES // ranks, average=True):
        for turn in range(BATCHES // ranks):
            number = turn * ranks + rank
            model(torch.randn(3, 5, generator=torch.Generator().manual_seed(number)), number).square().sum().backward()
    return [whole(each.grad) for each in model.parameters()]


@pytest.mark.parametrize("is_one_unit", [True, False])
def test_parameters_that_some_batches_leave_out_have_them_too(is_one_unit, world):
    (expected,) = world(1).run(partly_used, is_one_unit)
    for num_ranks in (2, 3) if is_one_unit else (1,):
        for found in world(num_ranks).run(partly_used, is_one_unit):
            assert all(map(torch.equal, found, expected))


KEPT = sherd.MixedPrecisionPolicy(torch.bfloat16, torch.float32, keep_low_precision_grads=True)


def used(is_twice: bool, precision: sherd.MixedPrecisionPolicy) -> list[Tensor]:
    """A unit that is called once, with a penalty on a gradient of the inputs, or twice."""
    torch.manual_seed(1)
    first, rank, ranks = nn.Linear(5, 5), dist.get_rank(), dist.get_world_size()
    layers = nn.Sequential(first, nn.Tanh(), first if is_twice else nn.Linear(5, 5))
    options = {"comm_policy": sherd.CommPolicy.reproducible(), "mesh": init_device_mesh("cpu", (ranks,))}
    for each in (first, layers):
        sherd.fully_shard(each, mp_policy=precision, **options)
    with sherd.accumulate(layers, BATCHES // ranks, average=True):
        for turn in range(BATCHES // ranks):
            x = torch.randn(3, 5, generator=torch.Generator().manual_seed(turn * ranks + rank)).requires_grad_()
            y = layers(x).square().sum()
            (y if is_twice else y + torch.autograd.grad(y, x, create_graph=True)[0].square().sum()).backward()
    return [whole(each.grad) for each in layers.parameters()]


@pytest.mark.parametrize("precision", [sherd.MixedPrecisionPolicy(), KEPT])
def test_a_gradient_for_inputs_within_a_forward_leaves_the_order_as_it_is(precision, world):
    (expected,) = world(1).run(used, False, precision)
    for num_ranks in (2, 3):
        for found in world(num_ranks).run(used, False, precision):
            assert all(map(torch.equal, found, expected))
            assert {each.dtype for each in found} == {precision.param_dtype or torch.float32}


# Numbers


@on_processes(2)
def test_the_mean_over_backwards_is_that_of_a_divided_loss():
    """Also in no order, for both front ends."""
    for options in ({"comm_policy": sherd.CommPolicy()}, {"is_wrapped": True, "comm_policy": sherd.CommPolicy()}):
        gradients = []
        for average in (True, False):
            model = made(**options)
            with sherd.accumulate(model, 4, average=average):
                for turn in range(4):
                    loss = model(batch(0, turn * 2 + dist.get_rank()))
                    (loss if average else loss / 4).backward()
            gradients.append([whole(each.grad) for each in model.parameters() if each.grad is not None])
        for mean, divided in zip(*gradients, strict=True):
            torch.testing.assert_close(mean, divided)


@on_processes(2)
def test_gradients_in_bfloat16_are_added_up_in_float32():
    """Each rank's are rounded once: the mean is that of rounded gradients."""
    rank = dist.get_rank()
    model = nn.Linear(64, 64, bias=False)
    plain = [torch.randn(64, 64, generator=torch.Generator().manual_seed(number)) for number in range(2)]
    for transport in ("shared_memory", "gloo", "torch"):
        for order in ("any", "ranks"):
            reduction = sherd.Reduction(wire=torch.bfloat16, order=order)
            sharded = sherd.fully_shard(
                nn.Linear(64, 64, bias=False), comm_policy=sherd.CommPolicy(transport, reduce=reduction)
            )
            (sharded(torch.eye(64)) * plain[rank]).sum().backward()
            rounded = [each.T.to(torch.bfloat16).float() for each in plain]
            assert torch.equal(whole(sharded.weight.grad), (rounded[0] + rounded[1]) / 2)
    del model


# What cannot be


def refuses(call: Callable[[], object], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        call()


def test_what_is_no_reduction_is_refused():
    refuses(lambda: sherd.Reduction(order="rank"), "Reduction.order='rank'.: expected one of any, ranks")
    refuses(lambda: sherd.Reduction(wire="bf16"), "expected a dtype, a Codec, or one of int8, fp8_e4m3")
    refuses(lambda: sherd.Reduction(wire="int8", order="ranks"), "each number of ranks rounds otherwise")
    refuses(lambda: sherd.Reduction(wire=8), "wire=8.: expected a torch.dtype or None")
    refuses(lambda: sherd.Reduction(wire=torch.int8), "wire=torch.int8.: expected a floating-point dtype")
    refuses(lambda: sherd.Reduction(sum=torch.float8_e4m3fn), "sum=torch.float8_e4m3fn.: expected a real dtype of 16")
    refuses(lambda: sherd.Reduction(wire=torch.complex64), "wire=torch.complex64.: expected a real dtype of 16")
    refuses(lambda: sherd.CommPolicy(reduce="ranks"), "reduce='ranks'.: expected a Reduction or None")
    refuses(lambda: sherd.CommPolicy.reproducible(divergence="join"), "no common order of them")
    refuses(
        lambda: sherd.CommPolicy.reproducible(reduce_replicas=sherd.Reduction()), "the order of ranks is one for all"
    )


@on_processes(2)
def test_what_has_no_order_is_refused():
    model = made()
    refuses(lambda: model.set_requires_gradient_sync(False), "without a reduction .no_sync, a pipeline.")
    refuses(lambda: model.set_all_reduce_hook(lambda _: None), "all_reduce_hook of the user's own")
    model(batch(0, dist.get_rank())).backward()
    refuses(lambda: sherd.clip_grad_norm_(model.parameters(), 1.0, 3.0), "only the norms of order 0, 1, 2 and inf")
    refuses(lambda: used(True, KEPT), "a second reduction in one backward")


@pytest.mark.values
@pytest.mark.parametrize("one", [sherd.Reduction(wire="int8"), sherd.Reduction(order="ranks"), None])
@pytest.mark.parametrize("other", [sherd.Reduction(wire="fp8_e4m3"), sherd.Reduction(wire=torch.bfloat16)])
@on_processes(2)
def test_ranks_with_different_reductions_say_so_before_they_send(one, other):
    policy = sherd.CommPolicy("torch", reduce=other if dist.get_rank() else one)
    model = made(comm_policy=policy)
    with pytest.raises(CommError, match="gradients summed by Reduction"):
        model(batch(0, 0)).backward()
