"""A parameter that brings its own all-gather trains as a plain one, whatever its unsharded form and gradient are."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map_only

import sherd
from sherd import Blocks, Flat, Owned, fully_shard
from sherd._torch import local_tensor
from sherd.engine.moves.selfgather import RELEASES
from sherd.engine.run.sizes import sizes_of
from sherd.engine.run.unit import Unit
from sherd.errors import CheckpointError, GradientError, PlacementError
from sherd.schedule.moments import MemoryKind
from tests.api.checks import assert_refuses, untouched
from tests.support.models.specimen import WIDTH
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import refusal
from tests.support.sharding import sharded


class Halves(torch.Tensor):
    """Two tensors, whose sum it is. It has no memory of its own, and what is computed from it is of its kind: the
    unsharded parameter, outputs, gradients."""

    @staticmethod
    def __new__(cls, first, second):
        return torch.Tensor._make_wrapper_subclass(
            cls, first.shape, first.stride(), dtype=first.dtype, device=first.device
        )

    def __init__(self, first, second):
        self.halves = first, second

    def __repr__(self):
        return f"Halves{self.halves}"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default and all(isinstance(each, Halves) for each in args[:2]):
            for own, given in zip(args[0].halves, args[1].halves, strict=True):
                own.copy_(given)
            return args[0]
        # Every operation here is done on the sums; a half of its result is half of it.
        args, kwargs = tree_map_only(Halves, lambda each: sum(each.halves), (args, kwargs or {}))
        result = function(*args, **kwargs)
        if function is torch.ops.aten.copy_.default:
            return result
        return tree_map_only(torch.Tensor, lambda each: cls(each / 2, each / 2), result)

    def fsdp_pre_all_gather(self, mesh):
        return self.halves, None

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        return None if out is not None else (type(self)(*gathered), gathered)


class Choosy(Halves):
    """As torchao's NF4 it knows no slice, and nothing good comes of its clone: it is cut and copied as FSDP2 does."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.slice.Tensor, torch.ops.aten.clone.default):
            raise NotImplementedError(function)
        return super().__torch_dispatch__(function, types, args, kwargs)


class Noted(Halves):
    """A later gather notes something on the unsharded tensor, as torchao's float8 notes the present scale."""

    turns = itertools.count(1)

    def fsdp_pre_all_gather(self, mesh):
        return self.halves, next(Noted.turns)

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        if out is not None:
            out.note = metadata
        return super().fsdp_post_all_gather(gathered, metadata, dtype, out=out)


def in_halves(values, kind=Halves):
    return kind(values / 4, values * 3 / 4)


def made(kind=lambda values: values):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, 3, bias=False))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


def inputs(rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def assert_same_gradients(model, plain):
    """Those of one backward: the mean over ranks, a plain DTensor on the shards."""
    num_ranks = dist.get_world_size()
    for rank in range(num_ranks):
        (plain(inputs(rank)).square().sum() / num_ranks).backward()
    model(inputs(dist.get_rank())).square().sum().backward()
    for layer, twin in ((model[0], plain[0]), (model[2], plain[2])):
        gradient = layer.weight.grad
        assert type(gradient.to_local()) is torch.Tensor
        torch.testing.assert_close(gradient.full_tensor(), twin.weight.grad)
    plain.zero_grad()
    model.zero_grad()


@on_threads(2)
def test_what_a_later_gather_notes_is_on_the_parameter_that_modules_see():
    model, seen = sharded(made(partial(in_halves, kind=Noted))), []
    model[0].register_forward_pre_hook(lambda layer, _: seen.append(getattr(layer.weight, "note", 0)))
    for _ in range(3):
        model(inputs(dist.get_rank())).sum().backward()
    first, second, third = seen
    assert first == 0 < second < third


class Product(torch.autograd.Function):
    """As torchao's product in MXFP8, it saves what is inside of a weight, a tensor that was gathered."""

    @staticmethod
    def forward(ctx, x, weight):
        first, second = weight.halves
        ctx.save_for_backward(x, first, second)
        return x @ (first + second).t()

    @staticmethod
    def backward(ctx, grad):
        x, first, second = ctx.saved_tensors
        return grad @ (first + second), grad.t() @ x


class Sliced(Halves):
    """Views of it have the halves' memory."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is aten.detach.default:
            return cls(*args[0].halves)
        if function in VIEWS:
            results = [function(half, *args[1:], **(kwargs or {})) for half in args[0].halves]
            return cls(*results) if isinstance(results[0], torch.Tensor) else list(map(cls, *results))
        return super().__torch_dispatch__(function, types, args, kwargs)


aten = torch.ops.aten
VIEWS = (aten.view.default, aten.slice.Tensor, aten.split.Tensor, aten.clone.default)


class Multiplied(Sliced):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return Product.apply(*args[:2])
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


@on_threads(1, 2)
def test_what_is_inside_of_a_weight_may_be_saved_for_backward_but_not_over_a_step():
    plain, model = made(), made(partial(in_halves, kind=Multiplied))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    for _ in range(2):
        assert_same_gradients(model, plain)
    loss = model(inputs(0)).square().sum()
    torch.autograd.graph.increment_version(model[2].weight)  # as an optimizer's step does
    model(inputs(0))
    with pytest.raises(GradientError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", [Halves, Choosy])
@pytest.mark.parametrize("reshard", [True, False])
@on_threads(2)
def test_gradients_of_a_kind_without_memory_are_reduced_by_their_values(reshard, kind):
    plain, model = made(), made(partial(in_halves, kind=kind))
    sharded(model, reshard_after_forward=reshard)
    for _ in range(2):
        assert_same_gradients(model, plain)
    assert type(model[0].weight.to_local()) is kind


def give_all_gather(shard, asked):
    """Hooks as attributes of one tensor: it is sent doubled, and halved again."""

    def before(mesh):
        asked.append(mesh.size())
        return (shard * 2,), None

    def after(gathered, metadata, dtype, *, out=None):
        if out is None:
            whole = gathered[0] / 2
            return whole, (whole,)
        out.copy_(gathered[0] / 2)
        return None

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after


@on_threads(2)
def test_a_shard_may_be_given_its_all_gather_before_the_first_forward():
    plain, model, asked = made(), sharded(made()), []
    give_all_gather(local_tensor(model[2].weight), asked)
    for _ in range(2):
        assert_same_gradients(model, plain)
    assert len(asked) >= 2, "asked for each gather"
    assert set(asked) == {2}, "over so many ranks"
    for placement in (Shard(1), Flat()):
        model = fully_shard(made(), placement=placement)
        give_all_gather(local_tensor(model[2].weight), [])
        with pytest.raises(PlacementError, match=r"2\.weight.*Shard\(0\)"):
            model(inputs(0))


@on_threads(2)
def test_a_tensor_that_gathers_itself_is_freed_and_forecast_so_where_others_are_kept():
    model = fully_shard(made(in_halves), placements="zero2")
    model(inputs(dist.get_rank())).square().sum().backward()
    held = [each for weights in Unit.of(model).weights for each in weights.held()]
    gathered = [tensor for kind, tensor in held if kind is MemoryKind.UNSHARDED]
    assert gathered
    assert not any(tensor.untyped_storage().nbytes() for tensor in gathered)
    assert [(sizes.kept, sizes.unsharded > 0) for sizes in sizes_of(Unit.of(model))] == [(0, True)] * 2


@on_threads(2)
def test_a_tensor_that_gathers_itself_is_not_cut_within_a_row():
    model = made(in_halves)
    for placement in (Flat(), Shard(1)):
        with untouched(model):
            words = ("0.weight", "Halves", "Shard(0)")
            cut = partial(fully_shard, model, shard_placement_fn=lambda _, placement=placement: placement)
            assert_refuses(cut, PlacementError, *words)


class InParts(Sliced):
    """What is sent has the rows of the shard, which may be none, and a scale, which looks like one row."""

    def fsdp_pre_all_gather(self, mesh):
        return (*self.halves, torch.ones(1)), None

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        first, second, scales = gathered
        assert scales.tolist() == [1.0] * dist.get_world_size()
        return super().fsdp_post_all_gather((first, second), metadata, dtype, out=out)


@pytest.mark.values
@pytest.mark.parametrize("placement", [Shard(0), Blocks(1), Blocks(2), Owned()], ids=str)
@on_threads(1, 2, 3, 4)
def test_ranks_with_other_numbers_of_rows_send_each_what_they_have(placement):
    for reshard in (True, False, *([2] if dist.get_world_size() == 4 else [])):
        plain, model = made(), made(partial(in_halves, kind=InParts))
        for layer in (model[0], model[2], model):
            fully_shard(layer, reshard_after_forward=reshard, shard_placement_fn=lambda _: placement)
        for _ in range(2):
            assert_same_gradients(model, plain)


@on_processes(2)  # without the refusal a rank dies of a signal
def test_a_tensor_without_memory_of_its_own_is_neither_saved_nor_loaded(tmp_path):
    model, plain, one = sharded(made(in_halves)), made(), in_halves(torch.ones(3))
    optimizer = torch.optim.SGD(plain.parameters())
    optimizer.state[plain[0].weight] = {"momentum_buffer": in_halves(torch.ones(3, WIDTH))}
    for name, kind, items, per_rank in (
        ("model/0.weight", "Halves", {"model": model}, {}),
        ("optimizer/0.weight/momentum_buffer", "Halves", {"model": plain, "optimizer": optimizer}, {}),
        ("x/0", "Halves", {"x": [one]}, {}),
        ("x/at", "Halves", {"x": {"at": in_halves(torch.tensor(1.0))}}, {}),
        ("given/x", "Halves", {"y": 1}, {"x": one}),
        ("x/0", "meta", {"x": [torch.ones(3, device="meta")]}, {}),
    ):
        for save in (sherd.save, sherd.async_save):
            said = refusal(CheckpointError, save, tmp_path, items, step=0, per_rank=per_rank)
            assert f"{name} is" in said, name
            assert kind in said, name
    assert not list(tmp_path.iterdir()), "before a byte is written"
    sherd.save(tmp_path, {"model": plain}, step=0)
    assert "model/0.weight is" in refusal(CheckpointError, sherd.load, tmp_path, {"model": model})


class Released(torch.Tensor):
    """A plain tensor that is sent doubled. Its unsharded form has memory of its own, so what was gathered may go."""

    fsdp_should_release_all_gather_outputs_after_post_all_gather = staticmethod(lambda: True)

    def fsdp_pre_all_gather(self, mesh):
        return (self.as_subclass(torch.Tensor) * 2,), None

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        if out is not None:
            out.copy_(gathered[0] / 2)
            return None
        whole = gathered[0] / 2
        return whole, (whole,)


def as_released(values):
    return values.as_subclass(Released)


@on_threads(2)
def test_what_was_gathered_is_freed_once_the_other_form_is_made():
    for reshard in (True, False, 1):
        for keep in (False, True):
            plain, model, seen = made(), made(as_released), []
            for layer in (model[0], model[2]):
                fully_shard(layer, reshard_after_forward=reshard)
            fully_shard(model)
            model.set_keep_unsharded_storage(keep)
            model[0].register_forward_pre_hook(lambda layer, _, seen=seen: seen.append(memory_of(layer)))
            for _ in range(2):
                assert_same_gradients(model, plain)
            assert seen == [([0], [WIDTH * WIDTH * 4])] * 2, (reshard, keep)
            assert memory_of(model[0]) == ([0], [WIDTH * WIDTH * 4 if keep else 0]), (reshard, keep)
            (sizes,) = sizes_of(Unit.of(model[0]))
            assert sizes.rows == sizes.kept + sizes.unsharded == WIDTH * WIDTH * 4


def memory_of(layer):
    """The bytes of what was gathered for a layer, and of its unsharded form."""
    (weights,) = Unit.of(layer).weights
    gathered = weights.made.gathered
    groups = gathered, weights.made.buffers[len(gathered) :]
    return tuple([buffer.tensor.untyped_storage().nbytes() for buffer in group] for group in groups)


@on_threads(2)
def test_half_of_an_all_gather_and_an_answer_that_is_no_bool_are_refused():
    release = RELEASES
    for hooks, words in (
        ({"fsdp_pre_all_gather": None}, ("needs both fsdp_pre_all_gather and fsdp_post_all_gather",)),
        ({"fsdp_post_all_gather": None}, ("needs both fsdp_pre_all_gather and fsdp_post_all_gather",)),
        ({release: None}, ("needs both fsdp_pre_all_gather and fsdp_post_all_gather", release)),
        ({**vars(Released), release: lambda _: 1}, (release, "returned 1", "expected a bool")),
    ):
        kind = type("Half", (torch.Tensor,), {name: hooks[name] for name in hooks if name.startswith("fsdp")})
        model = made(lambda values, kind=kind: values.as_subclass(kind))
        with untouched(model):
            assert_refuses(partial(fully_shard, model), PlacementError, "0.weight", "Half", *words)
