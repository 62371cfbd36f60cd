"""`iter_full_parameters(changed_since=mark)` yields what has changed, of which a receiver makes the bits of the full
export, whatever the layout."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sherd
from bench.peak import live_bytes
from sherd._torch import local_tensor
from sherd.checkpoint.full_tensors import Full
from sherd.deltas.delta import bits_of
from sherd.deltas.marks import _is_later_slice, _position_dtype, _positions, _Way
from sherd.errors import ModuleError, PlacementError, PolicyError, PolicyTypeError, StateError, UnsupportedError
from sherd.layout.boxes import Box
from tests.api.checks import named_mesh
from tests.api.test_weights_out import Uniform
from tests.checkpoint.layouts import LAYOUTS, loss_of, model_in, optimizer_of, train
from tests.support.ranks import RanksFailed
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import FRONTS, sharded
from tests.wrapper.test_extensions import Seen, mlp_of
from tests.wrapper.two_axes import WHOLE_AFTER, axes_of

MODES = ({}, {"own_part": True})


def exported(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in sherd.iter_full_parameters(model, **options)}


def deltas_of(model: nn.Module, mark: sherd.WeightMark, **options: Any) -> list[sherd.WeightDelta]:
    """The deltas that reach a receiver: with `own_part` those of all ranks."""
    deltas = list(sherd.iter_full_parameters(model, changed_since=mark, **options))
    if "own_part" in options and dist.is_initialized():
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, deltas)
        deltas = [delta for each in of_ranks for delta in each]
    return [pickle.loads(pickle.dumps(delta)) for delta in deltas]


def empty_like(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, 77) for name, value in exported(model, **options).items()}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(bits_of(found[name].contiguous()), bits_of(value)), name


@torch.no_grad()
def change(model: nn.Module, every: int) -> None:
    """Change each `every`th element of this rank's shards. Replicas change alike; ranks that hold others need not."""
    for parameter in model.parameters():
        local = local_tensor(parameter) if isinstance(parameter, DTensor) else parameter.detach()
        flat = local.reshape(-1)
        flat[::every] = flat[::every] * 3 + 1
        local.copy_(flat.view(local.shape))


def follow(model: nn.Module, **options: Any) -> None:
    """A receiver follows the model over some changes, in both modes."""
    for mode in MODES:
        mark, engine = sherd.WeightMark(), empty_like(model, **options)
        receiver = sherd.WeightReceiver(engine)
        for every in (1, 5, 1, 10**6):
            for delta in deltas_of(model, mark, **options, **mode):
                receiver.apply(delta)
            assert_same_bits(engine, exported(model, **options))
            change(model, every)
        options["bucket_bytes"] = 300


def follow_in(layout: str, **options: Any) -> None:
    follow(model_in(layout, **options))
    follow(model_in(layout, **options), dtype=torch.bfloat16)


@pytest.mark.values
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_a_receiver_has_the_bits_of_the_full_export(num_ranks, layout, world):
    world(num_ranks).run(follow_in, layout)


@pytest.mark.parametrize("front", ["wrapper", "flat wrapper"])
@on_processes(2)
def test_the_wrapper_and_its_flat_parameters(front):
    follow(sharded(Uniform(), front), buffers=True)


@pytest.mark.pairs
@pytest.mark.parametrize("transport", ["auto", "gloo", "torch", "coalesced"])
@pytest.mark.parametrize("placements", ["hsdp", "hfsdp"])
@pytest.mark.parametrize("layout", ["rows", "flat"])
@on_processes(4)
def test_replicas_and_every_transport(layout, placements, transport):
    mesh, policy = named_mesh((2, 2), "replicate", "shard"), sherd.CommPolicy(transport=transport)
    follow_in(layout, mesh=mesh, placements=placements, comm_policy=policy)


@on_processes(2, strategy=("zero1", "zero2", "zero3"))
def test_strategies(strategy):
    follow_in("rows", placements=strategy)


@on_processes(2)
def test_shards_on_the_host():
    follow_in("rows", offload_policy=sherd.CPUOffloadPolicy())


@pytest.mark.parametrize("placement", [None, sherd.Flat()])
@on_processes(4)
def test_tensor_parallel_parameters(placement):
    mesh, model = named_mesh((2, 2), "dp", "tp"), Uniform()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    follow(sharded(model, mesh=mesh["dp"], placement=placement), dtype=torch.bfloat16)


@on_processes(4)
def test_units_on_meshes_of_their_own_and_parameters_of_none():
    model, mesh = Uniform(), named_mesh((2, 2), "replicate", "expert")
    sherd.fully_shard(model.blocks[0], mesh=mesh["expert"])
    model.blocks[1][0].weight = nn.Parameter(
        distribute_tensor(model.blocks[1][0].weight.detach(), named_mesh((4,)), [Replicate()])
    )
    follow(model, buffers=True)  # the root is not sharded


# What is sent


@on_processes(2, front=FRONTS)
def test_only_changed_elements_are_sent_and_nothing_if_nothing_has_changed(front):
    for mode in MODES:
        model, mark = sharded(nn.Sequential(nn.Linear(64, 63)), front), sherd.WeightMark()
        everything = list(sherd.iter_full_parameters(model, changed_since=mark, **mode))
        assert all(delta.positions is None for delta in everything)
        assert list(sherd.iter_full_parameters(model, changed_since=mark, **mode)) == []
        with sherd.unsharded(model), torch.no_grad():
            next(model.parameters())[7, 3:5] += 1
        found = list(sherd.iter_full_parameters(model, changed_since=mark, **mode))
        places = [int(at) for delta in found for at in delta.positions]
        wanted = [7 * 64 + 3, 7 * 64 + 4] if not mode or found else []  # rank 0 has row 7
        assert sorted(places) == wanted
        assert [delta.name for delta in found] == ["0.weight"] * bool(wanted)
        assert sum(delta.nbytes for delta in found) == len(wanted) * (4 + 4)


@on_processes(2)
def test_a_pickled_delta_has_no_more_bytes_than_its_values():
    model = sharded(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))  # in one bucket
    for delta in sherd.iter_full_parameters(model, changed_since=sherd.WeightMark()):
        assert len(pickle.dumps(delta)) < delta.nbytes + 2048


@on_processes(2)
def test_zeros_of_another_sign_and_other_nans_are_changes():
    model = sherd.fully_shard(nn.Linear(3, 4, bias=False))
    shard, mark = local_tensor(model.weight), sherd.WeightMark()
    engine = empty_like(model)
    receiver = sherd.WeightReceiver(engine)
    for bits, num_changes in ((0, None), (0, 0), (-(2**31), 2), (0x7FC00001, 2), (0x7FC00001, 0), (0x7FC00002, 2)):
        shard.view(torch.int32)[0, 1] = bits
        deltas = deltas_of(model, mark)
        assert num_changes is None or sum(delta.positions.numel() for delta in deltas) == num_changes
        for delta in deltas:
            receiver.apply(delta)
        assert_same_bits(engine, exported(model))


def test_models_of_one_process_are_followed_without_a_process_group():
    for dtype in (torch.float8_e4m3fn, torch.float64, None):
        follow(nn.Linear(40, 30), dtype=dtype)


@on_processes(2, dtype=(torch.float8_e4m3fn, torch.float16, torch.complex64, torch.complex128))
def test_every_dtype(dtype):
    if dtype.is_complex:
        follow(sherd.fully_shard(Complex(dtype)))
    else:
        follow(sherd.fully_shard(nn.Linear(40, 31)), dtype=dtype)


class Complex(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 31, dtype=dtype, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@on_processes(2)
def test_no_rank_holds_a_whole_tensor_of_which_little_has_changed():
    model, mark = sherd.fully_shard(nn.Linear(2048, 4096, bias=False)), sherd.WeightMark()
    with live_bytes(torch.device("cpu")) as live:
        for _ in range(3):
            change(model, 100)
            live.forget_peak()
            before = live.peak
            list(sherd.iter_full_parameters(model, changed_since=mark))
    assert 0 < live.peak - before < model.weight.numel() * 4 // 2


@on_processes(2)
def test_what_takes_less_as_a_whole_is_sent_so():
    model, mark = sherd.fully_shard(nn.Linear(64, 64, bias=False)), sherd.WeightMark()
    shard = local_tensor(model.weight)
    for num_rows, is_whole in ((32, True), (10, False), (11, True)):  # a third of 32 rows, in bfloat16
        shard[:num_rows] += 1
        (delta,) = deltas_of(model, mark, dtype=torch.bfloat16)
        assert (delta.positions is None) == is_whole, num_rows
        assert delta.nbytes <= 64 * 64 * 2


def test_positions_have_64_bits_from_2_to_the_31_elements_on():
    small, large = (Full(torch.Size((1 << 20, columns)), torch.bfloat16) for columns in ((1 << 11) - 1, 1 << 12))
    assert (_position_dtype(small), _position_dtype(large)) == (torch.int32, torch.int64)
    for box in (Box((1 << 19, 0), (1 << 19, 1 << 12)), Box((1 << 19, 7), (1 << 19, 5))):
        columns, first = box.sizes[1], box.offsets[1]
        at = torch.tensor([0, columns + 3])
        start = (1 << 31) + first
        assert _positions(at, box, large).tolist() == [start, start + (1 << 12) + 3]


@on_threads(8)
def test_lines_of_three_axes_are_joined_in_order():
    mesh, rank = named_mesh((2, 2, 2), "replicate", "shard", "tp"), dist.get_rank()
    way = _Way(mesh, (2, 1, 0), sherd.CommPolicy(), torch.device("cpu"), torch.float32, torch.int32)
    sizes = torch.tensor([1, 2, 3, 0, 5, 6, 7, 8])
    rows = way._gathered(torch.full((int(sizes[rank]),), rank), sizes.view(2, 2, 2))
    assert rows.tolist() == torch.arange(8).repeat_interleave(sizes).tolist()


@on_processes(4)
def test_each_element_comes_from_one_rank_where_each_sends_its_own_part():
    mesh = named_mesh((2, 2), "replicate", "shard")
    for placement in (None, sherd.Flat(), sherd.Owned()):
        model = sharded(Uniform(), mesh=mesh, placement=placement)
        deltas = deltas_of(model, sherd.WeightMark(), own_part=True, buffers=True)
        numels: dict[str, int] = {}
        for delta in deltas:
            numels[delta.name] = numels.get(delta.name, 0) + delta.values.numel()
        assert numels == {name: value.numel() for name, value in exported(model, buffers=True).items()}


@pytest.mark.parametrize("placement", [None, sherd.Flat()])
@on_processes(4)
def test_norms_and_buffers_beside_tensor_parallel_weights_come_from_one_rank(placement):
    mesh, model = named_mesh((2, 2), "dp", "tp"), Uniform()
    model.norm = nn.BatchNorm1d(6)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    sharded(model, mesh=mesh["dp"], placement=placement)
    numels: dict[str, int] = {}
    for delta in deltas_of(model, sherd.WeightMark(), own_part=True, buffers=True):
        numels[delta.name] = numels.get(delta.name, 0) + delta.values.numel()
    assert numels == {name: value.numel() for name, value in exported(model, buffers=True).items()}


def test_only_slices_of_a_mesh_of_more_axes_are_copies():
    widest = torch.arange(8).view(2, 2, 2)
    for ranks, is_later in (
        ([0, 2, 4, 6], False),  # the first slice
        ([1, 3, 5, 7], True),
        ([[1, 3], [5, 7]], True),
        ([1, 7], False),  # no slice: other ranks need not hold the same
        ([1, 3, 5], False),
        ([8, 9], False),
    ):
        assert _is_later_slice(torch.tensor(ranks), widest) == is_later, ranks
    assert not _is_later_slice(torch.tensor([2, 3]), torch.arange(4))
    assert not _is_later_slice(torch.tensor([3]), torch.arange(4))  # an expert of one rank
    assert not _is_later_slice(widest, widest)
    assert _is_later_slice(torch.tensor([3]), torch.arange(4).view(1, 4))


@on_processes(3)
def test_rank_0_alone_and_in_host_memory():
    model, mark = model_in("flat"), sherd.WeightMark()
    for _ in range(2):
        deltas = deltas_of(model, mark, rank0_only=True, to="cpu")
        assert bool(deltas) == (dist.get_rank() == 0)
        change(model, 7)


# The chain


class Sender:
    """A model whose weights change, and a receiver that has received them once."""

    def __init__(self) -> None:
        self.model, self.mark = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), sherd.WeightMark()
        self.engine = empty_like(self.model)
        self.receiver = sherd.WeightReceiver(self.engine)
        for delta in self.deltas():
            self.receiver.apply(delta)

    def deltas(self) -> list[sherd.WeightDelta]:
        return deltas_of(self.model, self.mark)

    def changed(self) -> list[sherd.WeightDelta]:
        change(self.model, 8)
        return self.deltas()


def test_a_lost_doubled_or_reordered_delta_is_noticed_and_a_reset_mark_mends_it():
    for order in ([1], [0, 0], [0, 2], [0, 1, 3]):
        sender = Sender()
        deltas = sender.changed()
        *received, unfit = (deltas[at] for at in order)
        for delta in received:
            sender.receiver.apply(delta)
        before = {name: value.clone() for name, value in sender.engine.items()}
        with pytest.raises(StateError, match=r"call reset\(\) of the sender's WeightMark") as caught:
            sender.receiver.apply(unfit)
        assert all(mark in str(caught.value) for mark in (unfit.since, sender.receiver.at))
        assert_same_bits(sender.engine, before)
        sender.mark.reset()
        for delta in sender.deltas():
            sender.receiver.apply(delta)
        assert_same_bits(sender.engine, exported(sender.model))
        assert sender.receiver.at == sender.mark.at


def test_deltas_of_an_older_chain_are_refused():
    sender = Sender()
    late = sender.changed()
    sender.mark.reset()
    first, *others = sender.deltas()
    sender.receiver.apply(first)
    for old in (late[-1], first):
        with pytest.raises(StateError, match="lost, doubled or reordered"):
            sender.receiver.apply(old)
    for delta in others:
        sender.receiver.apply(delta)
    fresh = sherd.WeightReceiver(sender.engine)
    with pytest.raises(StateError, match="this receiver is at none"):
        fresh.apply(others[0])


@on_processes(2)
def test_parts_have_chains_of_their_own_and_follow_a_whole():
    model = model_in("flat")
    engine = empty_like(model)
    receiver, mark = sherd.WeightReceiver(engine), sherd.WeightMark()
    for options in ({}, {"own_part": True}, {}):
        for _ in range(2):
            for delta in reversed_by_part(deltas_of(model, mark, **options)):
                receiver.apply(delta)
            assert_same_bits(engine, exported(model))
            assert mark.at in receiver.at.split()
            assert len(receiver.at.split()) == (2 if options else 1)
            change(model, 3)


def reversed_by_part(deltas: list[sherd.WeightDelta]) -> list[sherd.WeightDelta]:
    """The deltas of rank 1 before those of rank 0, each in their order."""
    return sorted(deltas, key=lambda delta: -(delta.part or 0))


@on_processes(2)
def test_after_a_loop_that_was_left_or_a_mark_that_one_rank_has_reset_everything_is_sent():
    model, mark = model_in("rows"), sherd.WeightMark()
    engine = empty_like(model)
    receiver = sherd.WeightReceiver(engine)
    for disturb in ("nothing", "leave", "reset on one rank", "nothing"):
        for delta in deltas_of(model, mark):
            receiver.apply(delta)
        assert_same_bits(engine, exported(model))
        change(model, 9)
        if disturb == "leave":
            next(iter(sherd.iter_full_parameters(model, changed_since=mark)))
        elif disturb == "reset on one rank" and dist.get_rank() == 1:
            mark.reset()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.5))


@on_processes(2)
def test_a_scalar_is_sent_anew_with_all_else_if_one_rank_has_left_a_loop_or_reset_its_mark():
    model, mark = Scaled(), sherd.WeightMark()
    sherd.fully_shard(model)
    engine = {name: torch.zeros(each.shape) for name, each in model.named_parameters()}
    receiver = sherd.WeightReceiver(engine)
    for disturb in ("leave", "reset", "nothing", "own part", "nothing"):
        for number, delta in enumerate(sherd.iter_full_parameters(model, changed_since=mark)):
            receiver.apply(delta)
            if disturb == "leave" and dist.get_rank() and number == 2:  # behind the last tensor
                break
        assert_same_bits(engine, dict(sherd.iter_full_parameters(model)))
        with torch.no_grad():
            model.up.weight.mul_(2)
        if dist.get_rank() and disturb == "reset":
            mark.reset()
        elif dist.get_rank() and disturb == "own part":  # another consumer's, on this rank alone
            list(sherd.iter_full_parameters(model, changed_since=mark, own_part=True))


@on_processes(2)
def test_ranks_that_give_marks_of_different_consumers_are_told_on_both():
    model = model_in("rows")
    one, other = sherd.WeightMark(), sherd.WeightMark()
    for mark in (one, other, one):
        deltas_of(model, mark)
    with pytest.raises(StateError, match="marks that were not used together: rank 0 one of 2 loops, rank 1 one of 1"):
        deltas_of(model, other if dist.get_rank() else one)


def leave_alone() -> None:
    for number, _ in enumerate(sherd.iter_full_parameters(model_in("rows"), 64, changed_since=sherd.WeightMark())):
        if number == 2 and dist.get_rank() == 1:
            raise KeyError("the reader of rank 1")


def test_an_error_on_one_rank_ends_the_others(world, monkeypatch):
    monkeypatch.setattr("tests.support.ranks.GRACE_S", 0.3)  # the other one waits for what does not come
    with pytest.raises(RanksFailed) as caught:
        world(2).run(leave_alone)
    assert caught.value.errors[1][0] == "KeyError"


def test_a_copy_of_a_mark_is_a_fresh_one():
    for copied in (copy.copy, copy.deepcopy, lambda mark: pickle.loads(pickle.dumps(mark))):
        sender = Sender()
        other = copied(sender.mark)
        sender.changed()  # what was sent by the mark is not sent by its copy
        for delta in deltas_of(sender.model, other):
            sender.receiver.apply(delta)
        assert_same_bits(sender.engine, exported(sender.model))
        assert sender.receiver.at == other.at != sender.mark.at


def test_a_mark_is_used_by_one_loop_at_a_time():
    for disturb in (lambda sender, mark: mark.reset(), lambda sender, mark: sender.deltas()):
        sender = Sender()
        change(sender.model, 8)
        loop = sherd.iter_full_parameters(sender.model, changed_since=sender.mark)
        next(loop)
        disturb(sender, sender.mark)
        with pytest.raises(StateError, match="reset or used by another loop"):
            next(loop)


# What happens to the model


@on_processes(2, front=("shard", "flat"))
def test_a_model_that_is_trained_loaded_cast_frozen_and_changed_is_followed(front):
    model, mark = sharded(Uniform(), front), sherd.WeightMark()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    engine = empty_like(model, dtype=torch.bfloat16)
    receiver = sherd.WeightReceiver(engine)

    def train_step() -> None:
        model(torch.arange(7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def add() -> None:
        torch.manual_seed(1)
        model.blocks[1].added = nn.Linear(5, 5)
        sherd.refresh(model, optimizer)
        engine.update({"blocks.1.added.weight": torch.zeros(5, 5), "blocks.1.added.bias": torch.zeros(5)})

    steps = (train_step, lambda: model.load_state_dict(state), lambda: model.requires_grad_(False), add, train_step)
    for act in steps:
        act()
        for delta in deltas_of(model, mark, dtype=torch.bfloat16):
            receiver.apply(delta)
        for name, value in exported(model, dtype=torch.bfloat16).items():
            assert torch.equal(engine[name], value.to(engine[name].dtype)), (name, act)
    other = empty_like(model)
    again = sherd.WeightReceiver(other)
    mark.reset()
    for dtype in (torch.bfloat16, None):  # another dtype: everything is sent in it
        for delta in deltas_of(model, mark, dtype=dtype):
            again.apply(delta)
    assert_same_bits(other, exported(model))


@on_processes(2)
def test_a_model_that_is_sharded_otherwise_is_sent_as_a_whole():
    mark = sherd.WeightMark()
    engine = empty_like(model_in("rows"))
    receiver = sherd.WeightReceiver(engine)
    for layout in ("rows", "columns", "flat", "whole", "plain"):
        model = model_in(layout, seed=len(layout))
        for delta in deltas_of(model, mark):
            receiver.apply(delta)
        assert_same_bits(engine, exported(model))


@on_processes(2)
def test_a_tensor_that_is_gone_or_tied_is_named():
    def tie(model: nn.Sequential) -> None:
        model[1].weight = model[0].weight

    def remove(model: nn.Sequential) -> None:
        del model[1]

    for front, modes in ((lambda model: model, MODES[:1]), (sherd.fully_shard, MODES)):
        for act in (tie, remove):
            for mode in modes:
                made, mark = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)), sherd.WeightMark()
                deltas_of(front(next(made)), mark, **mode)
                changed = next(made)
                act(changed)
                front(changed)
                with pytest.raises(StateError, match=r"no longer has .*1\.weight.*reset\(\) of the mark"):
                    list(sherd.iter_full_parameters(changed, changed_since=mark, **mode))
                mark.reset()
                assert list(sherd.iter_full_parameters(changed, changed_since=mark, **mode)) or mode


class Wrapped(torch.Tensor):
    """A tensor of a wrapper class: `values`, times `scale` if there is one."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor | None = None) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"] if self.scale is None else ["values", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(args[0].values, args[0].scale)
        raise NotImplementedError(func)


def test_a_wrapper_class_is_sent_by_its_elements_or_refused_by_name():
    model = nn.Linear(4, 4, bias=False)
    values = model.weight.detach().clone()
    model.weight = nn.Parameter(Wrapped(values))
    for mode in MODES:
        mark, engine = sherd.WeightMark(), {"weight": torch.zeros(4, 4)}
        receiver = sherd.WeightReceiver(engine)
        for _ in range(2):
            for delta in sherd.iter_full_parameters(model, changed_since=mark, **mode):
                assert type(delta.values) is torch.Tensor
                receiver.apply(delta)
            assert torch.equal(engine["weight"], values)
            values[0, 1] += 1
    for quantized in (Wrapped(values, torch.ones(1)), Wrapped(values.to(torch.int8))):
        model.weight = nn.Parameter(quantized, requires_grad=False)
        for mode in MODES:
            with pytest.raises(UnsupportedError, match="weight is a Wrapped, which has no elements to compare"):
                list(sherd.iter_full_parameters(model, changed_since=sherd.WeightMark(), **mode))


@on_processes(2)
def test_a_model_in_use_or_written_in_the_loop_is_refused():
    model, mark = model_in("rows"), sherd.WeightMark()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(1))
    for mode in MODES:
        loop = sherd.iter_full_parameters(model, 1, changed_since=mark, **mode)
        next(loop)
        loss_of(model, 0).backward()
        optimizer.step()
        with pytest.raises(StateError, match="written while they were read"):
            list(loop)


@on_processes(4)
def test_parameters_that_functions_of_their_own_put_together_come_whole():
    mesh, data = axes_of((2, 2))
    model = sherd.FullyShardedDataParallel(
        mlp_of(mesh, {"up": WHOLE_AFTER}), device_mesh=data, use_orig_params=True, extensions=Seen()
    )
    engine, mark = empty_like(model), sherd.WeightMark()
    receiver = sherd.WeightReceiver(engine)
    for expected in (4, 2, 2):  # the others have not changed
        deltas = deltas_of(model, mark)
        assert len(deltas) == expected
        for delta in deltas:
            receiver.apply(delta)
        assert_same_bits(engine, exported(model))
    with pytest.raises(UnsupportedError, match=r"up.weight is put together.*leave own_part out"):
        list(sherd.iter_full_parameters(model, changed_since=mark, own_part=True))


# The receiver


def test_a_receiver_writes_modules_views_and_other_dtypes():
    model, mark = nn.Linear(6, 4), sherd.WeightMark()
    module, fused = nn.Linear(6, 4), torch.zeros(12, 8, dtype=torch.float64)
    views = {"weight": fused[2:6, 1:7], "bias": fused[11, ::2]}
    receivers = [sherd.WeightReceiver(module), sherd.WeightReceiver(views)]
    for _ in range(3):
        for delta in deltas_of(model, mark):
            for receiver in receivers:
                receiver.apply(delta)
        assert_same_bits(dict(module.named_parameters()), exported(model))
        assert torch.equal(fused[2:6, 1:7].float(), model.weight)
        assert torch.equal(fused[11, ::2].float(), model.bias)
        change(model, 5)
    assert int(fused.count_nonzero()) <= 6 * 4 + 4


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.bfloat16, torch.complex128])
def test_a_receiver_writes_elements_that_are_not_side_by_side(dtype):
    memory, mark = torch.zeros(4, 6).to(dtype), "a:0"
    delta = sherd.WeightDelta("w", (4, 3), mark, "a:1", torch.tensor([3, 1]).to(dtype), torch.tensor([7, 2]))
    sherd.WeightReceiver({"w": memory[:, ::2]}).apply(delta)
    expected = torch.zeros(4, 6)
    expected[2, 2], expected[0, 4] = 3, 1
    assert torch.equal(memory.to(torch.complex64), expected.to(torch.complex64))


@on_threads(1)
def test_a_receiver_refuses_what_does_not_fit():
    (delta, *_) = deltas_of(nn.Linear(6, 4), sherd.WeightMark())
    for tensors, error, text in (
        ({"bias": torch.ones(4)}, ModuleError, "no tensor is called weight"),
        (nn.Sequential(nn.Linear(6, 4)), ModuleError, "no tensor is called weight"),
        ({"weight": torch.ones(6, 4)}, PlacementError, r"weight is of shape \(6, 4\).*shape \(4, 6\)"),
        (sherd.fully_shard(nn.Linear(6, 4)), PlacementError, "weight is sharded"),
    ):
        receiver = sherd.WeightReceiver(tensors)
        with pytest.raises(error, match=text):
            receiver.apply(delta)
        assert receiver.at == ""
    with pytest.raises(PolicyTypeError, match=r"WeightReceiver\(tensors=...\): expected"):
        sherd.WeightReceiver([torch.ones(1)])
    with pytest.raises(PolicyTypeError, match=r"WeightReceiver.apply\(delta=...\): expected"):
        sherd.WeightReceiver({}).apply(("weight", torch.ones(4, 6)))


def test_wrong_arguments_are_refused():
    mark = sherd.WeightMark()
    for wrong, error in (
        ({"changed_since": "mark"}, PolicyTypeError),
        ({"changed_since": mark, "own_part": 1}, PolicyTypeError),
        ({"own_part": True}, PolicyError),
        ({"changed_since": mark, "own_part": True, "rank0_only": True}, PolicyError),
    ):
        with pytest.raises(error, match="iter_full_parameters"):
            sherd.iter_full_parameters(nn.Linear(2, 2), **wrong)
