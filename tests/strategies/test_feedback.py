"""What gradients lose on the wire comes with the next ones, or is rounded at random. One process does the same."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sherd
from sherd import CommPolicy, Reduction
from sherd.engine.run.unit import Unit
from sherd.errors import PolicyError, PolicyTypeError
from sherd.tools.plan.tracing import traced
from tests.strategies import test_reproducible as reproducible
from tests.support.ranks.bodies import on_processes, on_threads


class Grid(sherd.Codec):
    """Multiples of 1 / `steps`, element by element, so that a plain process need not know any layout."""

    def __init__(self, steps: int = 64) -> None:
        self.steps, self.name = steps, f"1/{steps}"

    def num_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, out: Tensor) -> None:
        numbers = (values.float() * self.steps).round().clamp(-32000, 32000).nan_to_num(nan=-32768.0)
        out.copy_(numbers.to(torch.int16).view(torch.uint8))

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        numbers = encoded.clone().view(torch.int16).float()
        out.copy_(torch.where(numbers == -32768, torch.nan, numbers / self.steps))

    def bound(self, values: Tensor) -> Tensor:
        return torch.full_like(values.float(), 0.51 / self.steps)


WIRES: dict[str, Any] = {"grid": Grid(), "bfloat16": torch.bfloat16}
SHAPES = {2: (1, 2), 4: (2, 2)}
"""Of meshes, for each number of ranks: replicas, and shards of each."""
WAYS: dict[str, dict[str, Any]] = {
    "chunks": {},
    "flat": {"placement": sherd.Flat()},
    "blocks": {"placement": sherd.Blocks(2)},
    "owned": {"placement": sherd.Owned()},
    "ddp": {"placements": "ddp"},
    "zero1": {"placements": "zero1"},
    "offloaded": {"offload_policy": sherd.CPUOffloadPolicy()},
    "gloo": {"transport": "gloo"},
    "torch": {"transport": "torch"},
    "wrapped": {"is_wrapped": True},
    "hsdp": {"num_ranks": 4},
    "hfsdp": {"num_ranks": 4, "placements": "hfsdp", "placement": sherd.Flat()},
    "wrapped, hybrid": {"num_ranks": 4, "is_wrapped": True},
}


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(2)))


def sharded_model(reduction: Reduction, **options: Any) -> Any:
    options.pop("num_ranks", None)
    model, ranks = plain_model(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options["comm_policy"] = CommPolicy(options.pop("transport", "auto"), reduce=reduction)
    if options.pop("is_wrapped", False):
        options |= {"device_mesh": mesh, "use_orig_params": True}
        if mesh.ndim == 2:
            options["sharding_strategy"] = sherd.ShardingStrategy.HYBRID_SHARD
        wrap = sherd.FullyShardedDataParallel
        return wrap(nn.Sequential(*(wrap(layer, **options) for layer in model)), **options)
    for layer in (*model, model):
        sherd.fully_shard(layer, mesh=mesh, **options)
    return model


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x) - x.roll(1, 1)).square().mean()


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class Simulated:
    """The same training in one process: ranks one after the other, and sums in the order of ranks."""

    def __init__(self, wire: Any, shape: tuple[int, int] = (1, 2), way: str = "chunks") -> None:
        self.model, self.wire, self.shape = plain_model(), wire, shape
        self.adds_first, self.sums_go_back = way in ("zero1", "ddp"), way != "hfsdp"
        self.lost: dict[Any, Tensor] = defaultdict(lambda: torch.zeros(()))

    def sent(self, key: Any, values: Tensor) -> Tensor:
        exact = values + self.lost[key]
        decoded = torch.empty_like(exact)
        if isinstance(self.wire, torch.dtype):
            decoded.copy_(exact.to(self.wire))
        else:
            self.wire.encode(exact.flatten(), encoded := torch.empty(2 * exact.numel(), dtype=torch.uint8))
            self.wire.decode(encoded, decoded.view(-1))
        self.lost[key] = (exact - decoded).nan_to_num(0.0, 0.0, 0.0)
        return decoded

    def reduced(self, name: str, of_turns: Sequence[Sequence[Tensor]]) -> Tensor:
        """Returns the mean of the gradients of one parameter, of each micro-batch and rank."""
        replicas, shards = self.shape
        sums: list[Any] = [0] * replicas
        for of_ranks in of_turns:
            for replica in range(replicas):
                ranks = range(replica * shards, (replica + 1) * shards)
                parts = {rank: of_ranks[rank] * (1 / len(of_ranks)) for rank in ranks}
                parts = parts if shards == 1 else {rank: self.sent((name, rank), parts[rank]) for rank in ranks}
                sums[replica] = sums[replica] + sum(parts.values())
        if replicas == 1:
            return sums[0]
        total = sum(self.sent((name, "of replica", replica), each) for replica, each in enumerate(sums))
        return self.sent((name, "back"), total) if self.sums_go_back else total

    def backward(self, step: int, num_micro: int = 1, loss_of: Callable[..., Tensor] = loss_of) -> None:
        ranks = range(self.shape[0] * self.shape[1])
        named, of_turns = dict(self.model.named_parameters()), []
        for turn in range(num_micro):
            losses = [loss_of(self.model, num_micro * step + turn, rank) for rank in ranks]
            found = [torch.autograd.grad(loss, [*named.values()], materialize_grads=True) for loss in losses]
            of_turns.append([dict(zip(named, of_rank, strict=True)) for of_rank in found])
        for name, each in named.items():
            of_name = [[of_rank[name] for of_rank in of_turn] for of_turn in of_turns]
            if self.adds_first:
                of_name = [[sum(of_rank) for of_rank in zip(*of_name, strict=True)]]
            each.grad = self.reduced(name, of_name)


def steps_of(model: Any, backward: Callable[[int], None], numbers: range, lr: float = 0.5) -> list[list[Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, foreach=True)
    found = []
    for step in numbers:
        backward(step)
        found.append([full(each.grad) for each in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return found


def gradients(options: dict[str, Any], wire: Any, num_micro: int = 1) -> list[list[Tensor]]:
    model = sharded_model(Reduction(wire=wire, feedback=True), **options)

    def backward(step: int) -> None:
        with sherd.accumulate(model, num_micro):
            for turn in range(num_micro):
                loss_of(model, num_micro * step + turn, dist.get_rank()).backward()

    return steps_of(model, backward, range(4))


@pytest.mark.values
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_micro", [1, 2])
def test_gradients_have_the_bits_of_one_process_that_does_the_same(way, wire, num_micro, world):
    num_ranks = WAYS[way].get("num_ranks", 2)
    plain = Simulated(WIRES[wire], (2, 1) if way == "ddp" else SHAPES[num_ranks], way)
    expected = steps_of(plain.model, lambda step: plain.backward(step, num_micro), range(4))
    for of_rank in world(num_ranks).run(gradients, WAYS[way], WIRES[wire], num_micro):
        for found, wanted in zip(of_rank, expected, strict=True):
            assert all(map(torch.equal, found, wanted))
    # A sum of numbers of a grid is one of them, too, and loses nothing.
    assert (all if wire == "bfloat16" else any)(each.any() for each in plain.lost.values())


# Gradients that are missing, or not finite, and steps that do not count


def lost_in(model: Any) -> list[Tensor]:
    units = Unit.below(model)
    return [each for unit in units for of_group in unit.gradients for each in of_group.narrowing.lost.values()]


def poisoned(model: Any, step: int, rank: int) -> Tensor:
    """In two steps gradients of one rank are not finite; of the last layer those are one row alone."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    y = model(x)
    loss = (y - x.roll(1, 1)).square().mean()
    factor = {(1, 0): torch.inf, (2, 1): torch.nan}.get((step, rank))
    return loss if factor is None else loss + y[0, 0] * factor


@on_processes(2)
def test_what_is_not_finite_leaves_nothing_behind():
    plain, model = Simulated(Grid()), sharded_model(Reduction(wire=Grid(), feedback=True))
    for step in range(5):
        plain.backward(step, 1, poisoned)
        poisoned(model, step, dist.get_rank()).backward()
        for ours, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(full(ours.grad).nan_to_num(nan=9.0), theirs.grad.nan_to_num(nan=9.0))
        assert full(next(model.parameters()).grad).isfinite().all() == (step not in (1, 2))
        assert all(each.isfinite().all() for each in lost_in(model))
        model.zero_grad()


@on_processes(2)
def test_a_block_with_a_nan_leaves_finite_numbers_behind():
    model = sharded_model(Reduction(wire="int8", feedback=True))
    for step in range(3):
        poisoned(model, step, dist.get_rank()).backward()
        model.zero_grad()
        assert all(each.isfinite().all() for each in lost_in(model))
    loss_of(model, 3, dist.get_rank()).backward()
    assert all(full(each.grad).isfinite().all() for each in model.parameters())


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = plain_model()

    def forward(self, x: Tensor, only: int | None) -> Tensor:
        return self.blocks(x) if only is None else self.blocks[only](x)


def partly(model: Any, step: int, rank: int) -> Tensor:
    """In odd steps each rank uses one block of its own."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x, rank if step % 2 else None).square().mean()


@on_processes(2)
def test_a_rank_without_a_gradient_sends_what_it_still_owes():
    reduction = Reduction(wire=torch.bfloat16, feedback=True)
    plain, model = Simulated(torch.bfloat16), Branches()
    plain.model = Branches()
    sherd.fully_shard(model, comm_policy=CommPolicy(reduce=reduction))
    for step in range(5):
        plain.backward(step, 1, partly)
        partly(model, step, dist.get_rank()).backward()
        for ours, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(full(ours.grad), theirs.grad)
        model.zero_grad()


@on_processes(2)
def test_a_step_that_a_scaler_skips_hands_on_what_it_lost_and_nothing_that_is_not_finite():
    plain, model = Simulated(Grid()), sharded_model(Reduction(wire=Grid(), feedback=True))
    scaler = sherd.ShardedGradScaler("cpu", init_scale=16.0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, foreach=True) for each in (model, plain.model)]
    for step in range(4):
        scale = scaler.get_scale()
        scaler.scale(poisoned(model, step, dist.get_rank())).backward()
        scaler.step(optimizers[0])
        scaler.update()
        plain.backward(step, 1, lambda *given, scale=scale: poisoned(*given) * scale)
        if step not in (1, 2):
            for each in plain.model.parameters():
                each.grad /= scale
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(full(ours), theirs)
    assert scaler.get_scale() == 4.0


def guarded(fails: bool, rounding: str) -> tuple[list[list[Tensor]], list[Tensor], int]:
    """Trains three steps, and before the last one maybe steps that rank 1 cannot finish."""
    wire = Grid() if rounding == "nearest" else torch.bfloat16
    reduction = Reduction(wire=wire, feedback=True, rounding=rounding)
    model = plain_model()
    for layer in (*model, model):
        sherd.fully_shard(layer, comm_policy=CommPolicy(divergence="join", reduce=reduction))
    optimizer, rank, found = torch.optim.SGD(model.parameters(), lr=0.5), dist.get_rank(), []
    for step in (0, 1, 7, 8, 9, 2) if fails else (0, 1, 2):
        with sherd.step(model, optimizer, undo_optimizer=True) as attempt:
            loss = loss_of(model, step, rank)
            if step == 7 and rank == 1:
                raise ValueError("no batch")
            (loss * torch.nan if step == 8 and rank == 1 else loss).backward()
            found += [] if step > 2 else [[full(each.grad) for each in model.parameters()]]
            optimizer.step()
            if step == 9 and rank == 1:
                raise ValueError("no disk")
        assert attempt.skipped == (step > 2)
        optimizer.zero_grad()
    return found, [each.clone() for each in lost_in(model)], Unit.of(model[0]).backward.number


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_step_that_is_undone_leaves_no_trace(rounding, world):
    for found, wanted in zip(*(world(2).run(guarded, fails, rounding) for fails in (True, False)), strict=True):
        for ours, theirs in zip(found[0], wanted[0], strict=True):
            assert all(map(torch.equal, ours, theirs))
        assert len(found[1]) == 4 // 2
        assert all(map(torch.equal, found[1], wanted[1]))
        assert found[2] == wanted[2] == 3


# Training


def final_loss(wire: Any, feedback: bool) -> float:
    reduction = None if wire is None else Reduction(wire=wire, feedback=feedback)
    model = sharded_model(reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(150):
        loss_of(model, step % 4, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses = torch.stack([loss_of(model, step, dist.get_rank()) for step in range(4)]).mean()
    dist.all_reduce(losses)
    return losses.item()


@on_processes(2)
def test_a_coarse_codec_trains_as_float32_with_feedback_alone():
    """A sixteenth is the least gradient that this codec sends."""
    exact, fed_back, coarse = final_loss(None, False), final_loss(Grid(8), True), final_loss(Grid(8), False)
    assert fed_back < 1.1 * exact
    assert coarse > 4 * exact


# Checkpoints


def saved_then_resumed(options: dict[str, Any], reduction: Reduction, folder: str) -> None:
    """What is resumed after three steps of six has the bits of what was not interrupted."""

    def backward_of(model: Any) -> Callable[[int], None]:
        return lambda step: loss_of(model, step, dist.get_rank()).backward()

    model = sharded_model(reduction, **options)
    steps_of(model, backward_of(model), range(3))
    sherd.save(folder, {"model": model}, step=3)
    expected = steps_of(model, backward_of(model), range(3, 6))
    other = sharded_model(reduction, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sherd.load(folder, {"model": other})
    assert bool(lost_in(other)) == reduction.feedback
    assert all(each.any() for each in lost_in(other))
    for found, wanted in zip(steps_of(other, backward_of(other), range(3, 6)), expected, strict=True):
        assert all(map(torch.equal, found, wanted))


REDUCTIONS = {
    "bfloat16": Reduction(wire=torch.bfloat16, feedback=True),
    "int8": Reduction(wire="int8", feedback=True),
    "stochastic": Reduction(wire=torch.bfloat16, rounding="stochastic"),
    "both": Reduction(wire=torch.bfloat16, feedback=True, rounding="stochastic", seed=3),
}


@pytest.mark.values
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("way", ["chunks", "flat", "zero1", "wrapped", "hsdp"])
def test_a_resumed_training_has_the_same_bits(way, reduction, tmp_path, world):
    num_ranks = WAYS[way].get("num_ranks", 2)
    world(num_ranks).run(saved_then_resumed, WAYS[way], REDUCTIONS[reduction], str(tmp_path / "saved"))


def saved(folder: str, reduction: Reduction) -> None:
    model = sharded_model(reduction)
    loss_of(model, 0, dist.get_rank()).backward()
    sherd.save(folder, {"model": model}, step=0)


def loaded(folder: str, reduction: Reduction, options: dict[str, Any]) -> tuple[list[str], int, list[Tensor]]:
    model = sharded_model(reduction, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        sherd.load(folder, {"model": model})
    return [str(each.message) for each in found], Unit.of(model[0]).backward.number, lost_in(model)


def test_what_was_lost_is_dropped_with_one_warning_on_other_ranks_or_in_another_layout(tmp_path, world):
    folder, reduction = str(tmp_path / "saved"), REDUCTIONS["int8"]
    world(2).run(saved, folder, reduction)
    for num_ranks, options in ((1, {}), (4, {}), (2, {"placement": sherd.Flat()}), (2, {})):
        same = (num_ranks, options) == (2, {})
        of_ranks = world(num_ranks).run(loaded, folder, reduction, options)
        assert [len(warned) for warned, *_ in of_ranks] == [int(not same), *[0] * (num_ranks - 1)]
        for warned, number, lost in of_ranks:
            assert number == 2 // num_ranks
            assert bool(lost) == same
            assert all("dropped here, on another number of ranks or in another layout" in each for each in warned)


@on_processes(2)
def test_a_checkpoint_without_it_and_a_model_without_it_load_each_other(tmp_path):
    for number, reductions in enumerate([(None, REDUCTIONS["int8"]), (REDUCTIONS["int8"], None)]):
        models = [sharded_model(each) for each in reductions]
        loss_of(models[0], 0, dist.get_rank()).backward()
        sherd.save(tmp_path / str(number), {"model": models[0]}, step=0)
        sherd.load(tmp_path / str(number), {"model": models[1]})
        loss_of(models[1], 0, dist.get_rank()).backward()


# Memory


def kinds_of(model: Any) -> tuple[int, int]:
    rows = [row for row in sherd.memory_report(model).rows if row.kind == "lost on the wire"]
    return sum(row.now for row in rows), sum(row.at_peak for row in rows)


def reported(options: dict[str, Any], wire: Any) -> None:
    model = sharded_model(Reduction(wire=wire, feedback=True), **options)
    before, predicted = kinds_of(model)
    for _ in range(2):
        model.zero_grad()
        with sherd.track_memory(model) as peak:
            loss_of(model, 0, dist.get_rank()).backward()
    held = sum(each.nbytes for each in lost_in(model))
    assert before == 0
    assert predicted == held > 0
    assert kinds_of(model) == (held, held)
    assert sum(nbytes for (_, kind), nbytes in peak.rows.items() if kind == "lost on the wire") == held
    model.zero_grad()
    report = sherd.memory_report(model)
    assert report.predicted_peak == report.measured_peak
    assert held >= 4 * sum(each.numel() for each in plain_model().parameters())  # unsharded
    with traced(model, torch.optim.SGD(model.parameters(), lr=0.1)) as trace:
        loss_of(model, 0, dist.get_rank()).backward()
    changes = [each for each in trace.timeline.changes if each.kind == "lost on the wire"]
    assert sum(each.nbytes for each in changes if each.time == 0) == sum(each.nbytes for each in changes) == held


@pytest.mark.values
@pytest.mark.parametrize("wire", ["int8", "bfloat16"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "offloaded"])
def test_it_is_reported_and_predicted_to_the_byte(way, wire, world):
    world(WAYS[way].get("num_ranks", 2)).run(reported, WAYS[way], torch.bfloat16 if wire == "bfloat16" else wire)


@on_processes(2)
def test_a_plan_of_a_model_without_memory_has_it():
    with torch.device("meta"):
        planned = plain_model()
    reduction = REDUCTIONS["int8"]
    for layer in (*planned, planned):
        sherd.fully_shard(layer, comm_policy=CommPolicy(reduce=reduction))
    model = sharded_model(reduction)
    loss_of(model, 0, dist.get_rank()).backward()
    assert kinds_of(planned)[1] == kinds_of(model)[0] > 0


def in_units(model: nn.Module, **options: Any) -> nn.Module:
    for layer in (*model.children(), model):
        sherd.fully_shard(layer, **options | {"comm_policy": CommPolicy(reduce=REDUCTIONS["int8"])})
    return model


def held_by_ranks() -> int:
    model = sharded_model(REDUCTIONS["int8"])
    loss_of(model, 0, dist.get_rank()).backward()
    return sum(each.nbytes for each in lost_in(model))


def test_a_plan_whose_units_keep_it_has_it_at_its_peak(world):
    settings = {"strategy": "auto", "placement": "shard", "reshard": True, "checkpointing": False, "micro_batch": 4}
    found = sherd.plan(
        plain_model(), (1, 2), torch.zeros(4, 6), cluster="laptop", compute_dtype=None, shard=in_units, **settings
    )
    assert [found.timeline.peak.by_kind["lost on the wire"]] * 2 == world(2).run(held_by_ranks)


# Rounding at random


def repeated(reduction: Reduction, number: int) -> list[Tensor]:
    """The gradients of `number` backwards, of which each is 1 + 2^-10, on both ranks."""
    model = nn.Linear(16, 8, bias=False)
    sherd.fully_shard(model, comm_policy=CommPolicy(reduce=reduction))
    found = []
    for _ in range(number):
        (model(torch.eye(16)) * (1 + 2**-10)).sum().backward()
        found.append(full(model.weight.grad))
        model.zero_grad()
    return found


@on_processes(2)
def test_the_mean_of_many_roundings_is_the_value_and_a_repeated_run_has_the_same_bits():
    reduction = REDUCTIONS["stochastic"]
    found = repeated(reduction, 100)
    drawn = torch.stack(found)
    # Each is the mean of two numbers that are 1 or 1 + 2^-7, the upper one in an eighth of all cases.
    assert set(drawn.unique().tolist()) == {1.0, 1 + 2**-8, 1 + 2**-7}
    sigma = 2**-7 * (7 / 64 / (2 * drawn.numel())) ** 0.5
    assert abs(drawn.double().mean() - 1 - 2**-10) < 4 * sigma
    assert all(map(torch.equal, found, repeated(reduction, 100)))
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], repeated(REDUCTIONS["both"], 1)[0])
    assert torch.equal(torch.stack(repeated(Reduction(wire=torch.bfloat16), 2)), torch.ones(2, 8, 16))


IN_ORDER = CommPolicy(reduce=Reduction(wire=torch.bfloat16, order="ranks", rounding="stochastic", seed=1))


@pytest.mark.values
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("way", ["zero3", "zero1", "ddp", "flat", "owned", "hsdp", "hfsdp", "wrapped", "offloaded"])
def test_in_the_order_of_ranks_it_has_the_same_bits_on_any_number_of_ranks(way, num_ranks, world):
    if num_ranks == 3 and reproducible.WAYS[way].get("is_two"):
        pytest.skip("three ranks are no two replicas")
    if not _expected:
        _expected.extend(world(1).run(reproducible.trained, {"comm_policy": IN_ORDER}, reproducible.adamw, 3))
    options = {**reproducible.WAYS[way], "comm_policy": IN_ORDER}
    for found in world(num_ranks).run(reproducible.trained, options, reproducible.adamw, 3):
        reproducible.assert_same(found, _expected[0])


_expected: list[reproducible.Named] = []


def in_order_resumed(folder: str, numbers: range, saves: bool) -> reproducible.Named:
    model = reproducible.made(comm_policy=IN_ORDER)
    optimizer = reproducible.adamw(model)
    items = {"model": model, "optimizer": optimizer}
    if not saves:
        sherd.load(folder, items)
    reproducible.steps(model, optimizer, numbers, sherd.clip_grad_norm_)
    if saves:
        sherd.save(folder, items, step=1)
    return reproducible.found_in(model, optimizer)


def test_in_that_order_a_training_goes_on_with_the_same_bits_on_another_number_of_ranks(tmp_path, world):
    (expected,) = world(1).run(in_order_resumed, str(tmp_path / "all"), range(4), True)
    folder = str(tmp_path / "saved")
    world(4).run(in_order_resumed, folder, range(2), True)
    for found in world(2).run(in_order_resumed, folder, range(2, 4), False):
        reproducible.assert_same(found, expected)


# What cannot be


def test_what_would_lose_nothing_or_is_unknown_is_refused():
    bf16, f32 = torch.bfloat16, torch.float32
    for call, words in (
        (lambda: Reduction(feedback=True), "feedback=True.: without a wire nothing is lost"),
        (lambda: Reduction(wire=bf16, order="ranks", feedback=True), "has lost depends on the number of ranks"),
        (lambda: Reduction(rounding="up"), "rounding='up'.: expected one of nearest, stochastic"),
        (lambda: Reduction(wire="int8", rounding="stochastic"), "only wire=torch.bfloat16 is rounded at random"),
        (lambda: Reduction(rounding="stochastic"), "only wire=torch.bfloat16 is rounded at random"),
        (lambda: Reduction(seed=-1), "seed=-1.: expected 0 or more"),
    ):
        with pytest.raises(PolicyError, match=words):
            call()
    with pytest.raises(PolicyTypeError, match=r"feedback=1.: expected a bool"):
        Reduction(wire="int8", feedback=1)
    for reduction in (Reduction(wire=f32, feedback=True), REDUCTIONS["bfloat16"], REDUCTIONS["stochastic"]):
        assert reduction.row_dtype(torch.float64) is torch.float64


@on_threads(2)
def test_a_wire_as_wide_as_the_gradients_is_refused():
    narrow = sherd.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for options in ({"reduce": REDUCTIONS["stochastic"]}, {"reduce": REDUCTIONS["bfloat16"]}):
        with pytest.raises(PolicyError, match="lose nothing on this wire"):
            sherd.fully_shard(nn.Linear(4, 4), comm_policy=CommPolicy(**options), mp_policy=narrow)
    wide = CommPolicy(reduce_replicas=Reduction(wire=torch.float32, feedback=True))
    with pytest.raises(PolicyError, match="lose nothing on this wire"):
        sherd.fully_shard(nn.Linear(4, 4), comm_policy=wide)
    model = sherd.fully_shard(nn.Linear(4, 4), comm_policy=CommPolicy(reduce=REDUCTIONS["bfloat16"]))
    with pytest.raises(PolicyError, match=r"leave set_reduce_scatter_unused_params.False. out"):
        model.set_reduce_scatter_unused_params(False)
    with pytest.raises(PolicyError, match="a reduction of the user's own would not; leave one of the two out"):
        Unit.of(model).change(all_reduce=lambda _: None)
