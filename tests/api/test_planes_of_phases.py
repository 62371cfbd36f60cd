"""A tensor with planes that one phase alone reads, as rows and columns of MXFP8, gathers those of the phase."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import sherd
from sherd import Blocks, Owned, fully_shard
from sherd._torch import local_tensor
from sherd.engine.run.unit import Unit
from sherd.errors import GradientError
from tests.support.ranks.bodies import on_threads

WIDTH = 6  # over 4 ranks: 2, 2, 2 and 0 rows
aten = torch.ops.aten
VIEWS = (aten.view.default, aten.slice.Tensor, aten.split.Tensor, aten.clone.default, aten.detach.default)


class Planes(torch.Tensor):
    """Rows in bfloat16, which forward reads, and columns in float32, which backward reads. It sends both."""

    @staticmethod
    def __new__(cls, rows, columns, sent=None):
        like = columns if rows is None else rows
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, like.stride(), dtype=torch.float32)

    def __init__(self, rows, columns, sent=None):
        self.rows, self.columns, self.sent = rows, columns, sent

    def __repr__(self):
        return f"{type(self).__name__}({self.rows}, {self.columns})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in VIEWS:
            own = args[0]
            pairs = [None if each is None else function(each, *args[1:], **(kwargs or {})) for each in own.planes]
            if isinstance(pairs[0], list):
                return [cls(*pair, own.sent) for pair in zip(*pairs, strict=True)]
            return cls(*pairs, own.sent)
        if function is aten.new_zeros.default:
            return cls(*(each.new_zeros(args[1]) for each in args[0].planes), args[0].sent)
        if function is aten.copy_.default:
            for own, given in zip(args[0].planes, args[1].planes, strict=True):
                own.copy_(given)
            return args[0]
        raise NotImplementedError(function)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return Product.apply(*args[:2])
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @property
    def planes(self):
        return self.rows, self.columns

    def fsdp_pre_all_gather(self, mesh):
        return self.send("both")

    def send(self, phase):
        sent = {"forward": (self.rows, torch.ones(1)), "backward": (self.columns,), "both": self.planes}[phase]
        self.sent.append((phase, self.numel(), sum(each.nbytes for each in sent if each.ndim > 1)))
        return sent, phase

    def fsdp_post_all_gather(self, gathered, phase, dtype, *, out=None):
        columns = None if phase == "forward" else gathered[-1]
        rows = None if phase == "backward" else gathered[0]
        if out is None:
            return type(self)(rows, columns), gathered
        out.rows, out.columns = rows, columns
        return None


class Product(torch.autograd.Function):
    """It saves the weight, whose planes are those of backward when backward reads them."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.rows.float().t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.columns, grad.t() @ x


class Phased(Planes):
    def fsdp_pre_all_gather(self, mesh, *, phase):
        return self.send(phase)


class LongPhased(Planes):
    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy, *, phase):
        assert outer_size == (WIDTH, WIDTH)
        return self.send(phase)


class AsFSDP2(Planes):
    """It asks what Transformer Engine's tensors ask of their module."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        group = module._get_fsdp_state()._fsdp_param_group
        if not group._reshard_after_forward:
            return self.send("both")
        is_backward = group._training_state == _fsdp_common.TrainingState.PRE_BACKWARD
        return self.send("backward" if is_backward else "forward")


class Layer(nn.Module):
    def __init__(self, kind, sent):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        values = self.inner.weight.detach()
        self.inner.weight = nn.Parameter(kind(values.bfloat16(), values * 2, sent))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.within = False

    def forward(self, x):
        def run(x):
            return self.inner(x).relu()

        return x + self.scale * (checkpoint(run, x, use_reentrant=False) if self.within else run(x))


class Stack(nn.Sequential):
    reentrant: bool | None = None  # the kind of checkpoint around each layer

    def forward(self, x):
        if self.reentrant is None:
            return super().forward(x)
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def made(kind, reentrant=None, within=False):
    torch.manual_seed(0)
    sent = []
    model = Stack(*(Layer(kind, sent) for _ in range(3)))
    model.reentrant = reentrant
    for layer in model:
        layer.within = within
    return model, sent


def halved(model):
    """As an optimizer's step: all planes have other values."""
    for layer in model:
        shard = local_tensor(layer.inner.weight)
        for plane in shard.planes:
            plane.mul_(0.5)
        torch.autograd.graph.increment_version(layer.inner.weight)


def results(model):
    """Outputs and gradients of three steps."""
    found = []
    for _ in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()), requires_grad=True)
        y = model(x)
        y.square().sum().backward()
        found += [y.detach().clone(), x.grad]
        for layer in model:
            found += [layer.inner.weight.grad.full_tensor(), layer.scale.grad.full_tensor()]
        model.zero_grad()
        halved(model)
    return found


WAYS = {
    # the model; how it is sharded; what each gather of the last step brings
    "freed after forward": ({}, {}, ["forward"] * 3 + ["backward"] * 3),
    "kept for backward": ({}, {"reshard_after_forward": False}, ["both"] * 3),
    "checkpoints around units": ({"reentrant": False}, {}, ["forward"] * 3 + ["both"] * 3),
    "reentrant ones": ({"reentrant": True}, {}, ["forward"] * 3 + ["both"] * 3),
    "checkpoints inside of units": ({"within": True}, {}, ["forward"] * 3 + ["both"] * 3),
}


OF_PHASE = {"forward": 2, "backward": 4, "both": 6}
"""Bytes of an element."""


@pytest.mark.values
@pytest.mark.parametrize("kind", [Phased, LongPhased, AsFSDP2])
@pytest.mark.parametrize("placement", [Shard(0), Blocks(2), Owned()], ids=str)
@on_threads(1, 2, 4)
def test_each_phase_gathers_its_own_planes_and_has_the_bits_of_both(placement, kind):
    for way, (choices, options, phases) in WAYS.items():
        expected = None
        for each in (Planes, kind):
            model, sent = made(each, **choices)
            for layer in model:
                fully_shard(layer, shard_placement_fn=lambda _: placement, **options)
            fully_shard(model)
            found = results(model)
            expected = found if expected is None else expected
        assert all(map(torch.equal, found, expected)), way
        assert [phase for phase, _, _ in sent[-len(phases) :]] == phases, way
        assert all(nbytes == OF_PHASE[phase] * numel for phase, numel, nbytes in sent), way


@on_threads(2)
def test_the_wrapper_gathers_by_phases_too():
    found = []
    for kind in (Planes, Phased):
        model, sent = made(kind)
        terms = {"use_orig_params": True, "sharding_strategy": sherd.Placements(*[Shard(0)] * 3)}
        for at, layer in enumerate(model):
            model[at] = sherd.FullyShardedDataParallel(layer, **terms)
        model = sherd.FullyShardedDataParallel(model, **terms)
        x = torch.ones(4, WIDTH, requires_grad=True)
        for _ in range(2):
            model(x).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
    assert [phase for phase, _, _ in sent[-6:]] == ["forward"] * 3 + ["backward"] * 3


class Careless(Phased):
    """Its product saves a plane, which is another phase's memory by the time that backward reads it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return SavesPlane.apply(*args[:2])
        return super().__torch_function__(function, types, args, kwargs)


class SavesPlane(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight.rows)
        return x @ weight.rows.float().t()

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        return grad @ rows.float(), None


@on_threads(1, 2)
def test_a_plane_that_is_saved_for_the_other_phase_raises():
    model, _ = made(Careless)
    for layer in (*model, model):
        fully_shard(layer)
    for _ in range(2):
        with pytest.raises(GradientError, match="gathered for forward alone; save the weight"):
            model(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()


class Asks(Layer):
    """Its forward asks for a gradient of its own, as a penalty does."""

    def forward(self, x):
        y = super().forward(x)
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return self.inner(y + slope)


@on_threads(2)
def test_a_backward_inside_of_a_forward_has_the_planes_of_both():
    found = []
    for kind in (Planes, Phased):
        torch.manual_seed(0)
        model = nn.Sequential(*(Asks(kind, []) for _ in range(2)))
        for layer in (*model, model):
            fully_shard(layer)
        for _ in range(2):
            x = torch.ones(4, WIDTH, requires_grad=True)
            model(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


@on_threads(2)
def test_planes_are_freed_after_each_phase_and_gathered_at_once_where_a_user_unshards():
    model, sent = made(Phased)
    for layer in (*model, model):
        fully_shard(layer)
    x = torch.ones(4, WIDTH, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
        gathered = [buffer.tensor for each in Unit.of(model[0]).self_gathered for buffer in each.made.buffers]
        assert len(gathered) == 3, "rows and their scale, columns"
        assert not any(each.untyped_storage().nbytes() for each in gathered)
    model[0].unshard()
    model(x).sum().backward()
    assert [phase for phase, _, _ in sent[-6:]] == ["both", "forward", "forward", "backward", "backward", "backward"]
    own = local_tensor(model[0].inner.weight).numel()
    row = next(row for row in sherd.comm_report(model).rows if row.unit == "0" and row.format == "Phased")
    assert row.nbytes == own * 6 + 4, "a step sends each plane once, and the scale"
    with torch.no_grad():
        model(x)
    assert [phase for phase, _, _ in sent[-3:]] == ["forward"] * 3


@on_threads(2)
def test_a_copy_asks_of_its_own_modules():
    model, _ = made(AsFSDP2)
    for layer in (*model, model):
        fully_shard(layer)
    model(torch.ones(4, WIDTH)).sum().backward()
    twin = copy.deepcopy(model)
    assert twin[0].inner._get_fsdp_state() is not model[0].inner._get_fsdp_state()
    twin(torch.ones(4, WIDTH)).sum().backward()
