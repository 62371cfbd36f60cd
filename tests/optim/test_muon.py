"""Muon trains as `torch.optim.Muon` does in one process, however its matrices are sharded."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode

import sherd
from sherd import Flat, MatrixOptimizer, Muon, Owned
from sherd._torch import imagined_ranks
from sherd.errors import OptimizerError, PolicyError, PolicyTypeError
from sherd.optim import newton_schulz
from sherd.optim.newton_schulz import QUINTIC, coefficients_of, orthogonalized
from tests.optim.moves import MOVES, assert_goes_on
from tests.support.comparing import whole_params
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_threads
from tests.support.refusals import refusal
from tests.support.sharding import sharded
from tests.support.versions import needs_torch, torch_is_older

EXACT = {"ns_dtype": torch.float32}
FRONTS = ["shard", "cut", "flat", "blocks", "owned", "wrapper", "flat wrapper", "columns"]


def sharded_by(front: str, model: nn.Module) -> nn.Module:
    """Shards a model by one of `FRONTS`."""
    given = {"cut": {"placement": Shard(0)}, "columns": {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}}
    return sharded(model, **given[front]) if front in given else sharded(model, front)


def stack() -> nn.Sequential:
    """Wide, tall, square and odd matrices, with biases and norms."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 7, bias=False), nn.Tanh(), nn.Linear(7, 4), nn.Linear(4, 3)
    )


def torchs_steps(model: nn.Module, batches: list[torch.Tensor], **options) -> None:
    """Steps as `torch.optim.Muon` does, with products in float32, and torch's AdamW for the rest."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = torch.optim.AdamW(
        [p for p in model.parameters() if p.ndim < 2], lr=0.02, betas=(0.9, 0.95), weight_decay=0.1
    )
    momenta = [torch.zeros_like(p) for p in matrices]
    for batch in batches:
        model(batch).square().mean().backward()
        with torch.no_grad():
            for p, momentum in zip(matrices, momenta, strict=True):
                momentum.lerp_(p.grad, 0.05)
                update = p.grad.lerp(momentum, 0.95)
                update = orthogonalized(update[None], coefficients_of(QUINTIC, 5), 1e-7, torch.float32)[0]
                p.mul_(1 - 0.02 * 0.1).add_(update, alpha=-0.02 * max(1, p.shape[0] / p.shape[1]) ** 0.5)
        others.step()
        model.zero_grad()


def batches(steps: int = 4) -> list[torch.Tensor]:
    return [torch.randn(6, 5, generator=torch.Generator().manual_seed(step)) for step in range(steps)]


@pytest.mark.front("Muon, sharded")
@on_threads(1, 2, 3, 4, front=FRONTS)
def test_muon_trains_as_in_one_process(front):
    plain, model = stack(), sharded_by(front, stack())
    torchs_steps(plain, batches())
    trained(model, Muon(model, lr=0.02, **EXACT), batches())
    assert_as_plain(model, plain)


def test_shards_travel_in_a_smaller_dtype_of_products_if_all_ranks_have_the_same():
    half, single, cpu = torch.bfloat16, torch.float32, torch.device("cpu")
    for options, dtype, device, expected in (
        ({"ns_dtype": half}, single, cpu, half),
        ({"ns_dtype": single}, half, cpu, half),
        ({}, single, cpu, single),  # another rank's CPU may have no units for bfloat16
        ({}, single, torch.device("cuda"), half),
        ({"ns_dtype": half, "wire_dtype": single}, single, cpu, single),
    ):
        assert Muon([nn.Parameter(torch.ones(2, 2))], **options).travels_in(dtype, device) == expected, options


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, given: list[torch.Tensor]) -> None:
    for batch in given:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_at_second_try(model: nn.Module, optimizer: torch.optim.Optimizer, given: list[torch.Tensor]) -> None:
    """Takes each step twice: the first one fails, and is undone."""
    for batch in given:
        for fails in (True, False):
            with sherd.step(model, optimizer, undo_optimizer=True) as attempt:
                model(batch).square().mean().backward()
                optimizer.step()
                if fails:
                    raise ValueError("too late")
            assert attempt.skipped is fails
            optimizer.zero_grad()


def assert_as_plain(model: nn.Module, plain: nn.Module) -> None:
    for (name, found), expected in zip(whole_params(model).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@on_threads(4, front=["shard", "flat", "owned", "blocks"], sizes=[(2, 2), (4, 1), (1, 4)])
def test_replicas_divide_the_matrices(front, sizes):
    plain = stack()
    torchs_steps(plain, batches(6))
    model = sharded(stack(), front, mesh=mesh_of(sizes))
    optimizer = Muon(model, lr=0.02, **EXACT)
    trained(model, optimizer, batches(6))
    assert_as_plain(model, plain)


UNCLAMPED = pytest.param("spectral_unclamped", 512 << 10, marks=needs_torch(2, 14, "it has no such rate"))


@pytest.mark.parametrize(
    ("adjust", "cached"), [(None, 512 << 10), (None, 0), ("match_rms_adamw", 512 << 10), UNCLAMPED]
)
def test_products_in_bfloat16_are_those_of_torch_to_the_bit(adjust, cached, monkeypatch):
    """In a batch, and one by one as those that are too large for a core's cache.

    Of matrices from 8 x 8 on: for batches of smaller ones torch has other code on a CPU, which rounds otherwise.
    """
    monkeypatch.setattr(newton_schulz, "CACHED_BYTES", cached)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(12, 16, bias=False), nn.Linear(16, 8, bias=False)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    options = {"lr": 0.02, "adjust_lr_fn": adjust, "nesterov": adjust is None}
    optimizers = [
        torch.optim.Muon(models[0].parameters(), **options),
        Muon(models[1], ns_dtype=torch.bfloat16, **options),
    ]
    for step in range(5):
        batch = torch.randn(3, 12, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip(models, optimizers, strict=True):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for expected, found in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@on_threads(3, front=["shard", "flat", "owned", "blocks"])
def test_heads_experts_and_kernels_are_matrices_of_their_own(front):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.qkv = nn.Linear(4, 12, bias=False)
            self.experts = nn.Parameter(torch.randn(5, 4, 3))
            self.conv = nn.Conv1d(2, 6, 3, bias=False)

        def forward(self, x):
            mixed = torch.einsum("bd,edh->beh", self.qkv(x)[:, :4], self.experts).sum((1, 2))
            return mixed + self.qkv(x).sum(1) ** 2 + self.conv(x.view(-1, 2, 2).repeat(1, 1, 2)).square().sum((1, 2))

    given = [torch.randn(6, 4, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    plain, model = Parts(), Parts()
    trained(plain, Muon(plain, lr=0.02, heads={"qkv.weight": 4}, **EXACT), given)
    before, after = Parts(), Parts()
    before(given[0]).square().mean().backward()
    heads = before.qkv.weight.grad.view(4, 3, 4)
    trained(after, Muon(after, lr=0.02, heads={"qkv.weight": 4}, weight_decay=0, momentum=0, **EXACT), given[:1])
    expected = orthogonalized(heads, coefficients_of(QUINTIC, 5), 1e-7, torch.float32).reshape(12, 4)
    torch.testing.assert_close((before.qkv.weight - after.qkv.weight) / 0.02, expected, rtol=1e-4, atol=1e-5)
    model = sharded(model, front, [model])
    trained(model, Muon(model, lr=0.02, heads={"qkv.weight": 4}, **EXACT), given)
    assert_as_plain(model, plain)


@on_threads(1, 2, 3, 4, front=FRONTS)
def test_any_function_of_a_matrix_steps_so(front):
    """Signs of singular vectors, by a decomposition that has no use for a part of a matrix."""

    def unit_scale(matrices):
        return matrices / torch.linalg.matrix_norm(matrices, 2)[:, None, None].clamp(min=1e-6)

    def by_hand(model):
        for p in model.parameters():
            p.data.mul_(1 - 0.01).add_(unit_scale(p.grad[None])[0], alpha=-0.1)
            p.grad = None

    plain, model = (nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    model = sharded_by(front, model)
    optimizer = MatrixOptimizer(model.parameters(), unit_scale, lr=0.1, weight_decay=0.1)
    for batch in batches(3):
        for each in (plain, model):
            each(batch).square().mean().backward()
        by_hand(plain)
        optimizer.step()
        optimizer.zero_grad()
    assert_as_plain(model, plain)


def test_what_cannot_be_stepped_is_named():
    vector, whole, tall = (
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(2, 2, dtype=torch.complex64)),
        nn.Linear(4, 6),
    )
    for error, words, action in (
        (OptimizerError, "has shape (3,), and is no matrix", lambda: Muon([vector])),
        (OptimizerError, "a function of full matrices takes real numbers", lambda: Muon([whole])),
        (PolicyError, "weight has 6 rows, which 4 heads do not divide", lambda: Muon(tall, heads={"weight": 4})),
        (OptimizerError, "not divisible into matrices of 5", lambda: Muon([{"params": [tall.weight], "rows": 5}])),
        (PolicyError, "ns_steps=0", lambda: Muon(tall, ns_steps=0)),
        (PolicyError, "ns_coefficients=(1, 2)", lambda: Muon(tall, ns_coefficients=(1, 2))),
        (PolicyError, "adjust_lr_fn='other'", lambda: Muon(tall, adjust_lr_fn="other")),
        (PolicyError, "Muon(momentum=-1)", lambda: Muon(tall, momentum=-1)),
        (PolicyTypeError, "expected a function of matrices", lambda: MatrixOptimizer([tall.weight], None)),
    ):
        assert words in refusal(error, action), words
    tall.weight.grad = torch.ones(6, 4)
    optimizer = MatrixOptimizer([tall.weight], lambda matrices: matrices.mT)
    assert "returned a tensor of shape (1, 4, 6) for matrices of shape (1, 6, 4)" in refusal(
        OptimizerError, optimizer.step
    )


@pytest.mark.parametrize("form", ["sherd", "dcp"])
@pytest.mark.parametrize("move", MOVES)
def test_its_state_goes_on_under_another_layout_on_other_ranks(threads, tmp_path, form, move):
    folder = tmp_path / "checkpoint"
    made = stack, lambda model: Muon(model, lr=0.02, **EXACT)
    assert_goes_on(threads, folder, form, move, *made, batches(4), torchs_steps, trained, steps_before=1)


def test_it_says_what_steps_each_parameter():
    with imagined_ranks(2):
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        for block in model[1:]:
            sherd.fully_shard(block)
        sherd.fully_shard(model)
        told = repr(Muon(model)).splitlines()
        assert told[1:] == [
            "  *.weight  4 x 4  ranks [0, 1]; backward reduces gradients there, shards of updates come back"
            "  (2 of them)",
            "  *.weight  AdamW, since it is an embedding",
            "  *.bias    AdamW, since it has 1 dim  (2 of them)",
        ]
        owned = sherd.fully_shard(nn.Linear(4, 4, bias=False), placement=sherd.Owned())
        assert repr(Muon(owned)).endswith("weight  4 x 4  rank 0; nothing travels")


def _train_accumulated(model, optimizer, given):
    for batch in given:
        parts = batch.chunk(2)
        with sherd.accumulate(model, len(parts)):
            for part in parts:
                (model(part).square().mean() / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _train_with_a_scaler(model, optimizer, given):
    scaler = torch.amp.GradScaler("cpu")
    for batch in given:
        scaler.scale(model(batch).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _train_with_a_closure_and_a_schedule(model, optimizer, given):
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def loss(batch):
        optimizer.zero_grad()
        value = model(batch).square().mean()
        value.backward()
        return value

    for batch in given:
        assert torch.is_tensor(optimizer.step(functools.partial(loss, batch)))
        schedule.step()


@pytest.mark.parametrize("train", [_train_accumulated, _train_with_a_scaler, _train_with_a_closure_and_a_schedule])
@on_threads(2)
def test_it_trains_alike_with_what_loops_do_around_a_step(train):
    plain = stack()
    torchs_steps(plain, batches(4))
    for model in (sharded(stack()), sharded(stack(), "owned")):
        train(model, Muon(model, lr=0.02, **EXACT), batches(4))
        assert_as_plain(model, plain)


@on_threads(2)
def test_tied_frozen_and_unused_matrices_and_those_in_host_memory():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.first, self.second, self.unused = (nn.Linear(5, 5, bias=False) for _ in range(3))
            self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.frozen(self.first(x))))

    plain = Tied()
    models = [sherd.fully_shard(Tied()), sherd.fully_shard(Tied(), offload_policy=sherd.CPUOffloadPolicy())]
    trained(plain, Muon(plain, lr=0.02, **EXACT), batches(3))
    for model in models:
        trained(model, Muon(model, lr=0.02, **EXACT), batches(3))
        assert_as_plain(model, plain)


@on_threads(1, 3, front=["shard", "flat", "owned"])
def test_torchs_own_muon_over_shards_is_stepped_so_to_the_bit(front):
    plain, model = (nn.Sequential(nn.Linear(6, 9, bias=False), nn.Linear(9, 4, bias=False)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    model = sharded(model, front)
    for each in (plain, model):
        rate = {} if torch_is_older(2, 14) else {"adjust_lr_fn": "spectral_unclamped"}
        optimizer = torch.optim.Muon(each.parameters(), lr=0.02, **rate)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(3):
            each(torch.ones(2, 6) + step).square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert all(list(optimizer.state[p]) == ["momentum_buffer"] for p in each.parameters())
    for expected, found in zip(plain.parameters(), whole_params(model).values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("placement", [None, Shard(0), Flat(), Owned()])
@pytest.mark.parametrize("kind", [torch.optim.Muon, Muon])
def test_a_step_makes_two_collectives_for_all_matrices_one_of_whole_gradients_none_of_matrices(placement, kind):
    most = 0 if placement == Owned() else 1 if placement is None and kind is Muon else 2
    with imagined_ranks(4):
        options = {} if placement is None else {"placement": placement}
        model = nn.Sequential(*(sherd.fully_shard(nn.Linear(8, 8, bias=False), **options) for _ in range(6)))
        sherd.fully_shard(model)
        optimizer = kind(model.parameters())
        for _ in range(2):
            if placement == Owned():  # whose gathers of unequal shards imagined ranks cannot make
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
            else:
                model(torch.ones(2, 8)).sum().backward()
            with CommDebugMode() as counted:
                optimizer.step()
            assert counted.get_total_counts() == most
