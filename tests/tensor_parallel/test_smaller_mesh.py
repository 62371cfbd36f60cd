"""`reshard_after_forward=k` keeps a part of every kind of parameter: tensor parallel, cut on any dim, gathering
itself. torch's FSDP refuses all of these."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map_only

import sherd
from sherd._torch import dtensor, local_tensor, spec_of
from sherd.engine.run.unit import Unit
from sherd.schedule.moments import MemoryKind
from tests.support.ranks.bodies import on_threads
from tests.tensor_parallel.training import Springs, mesh_of, wholes

STEPS = 2


class Exact(torch.Tensor):
    """Sends its values as two tensors of different types, whose sum they are."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values):
        self.values = values

    def __repr__(self):
        return f"{type(self).__name__}({self.values})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Exact, lambda each: each.values, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return cls(result) if func in SAME_VALUES else result

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        rough = self.values.to(torch.bfloat16)
        return (rough, self.values - rough.float()), "exact"

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        assert metadata == "exact"
        rough, rest = gathered
        if out is not None:
            torch.add(rough.float(), rest, out=out)
            return None
        whole = rough.float() + rest
        return whole, (whole,)


aten = torch.ops.aten
SAME_VALUES = {aten.detach.default, aten.clone.default, aten.slice.Tensor, aten._to_copy.default, aten.view.default}


class InPlace(Exact):
    """Makes its whole tensor in what was gathered."""

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        rough, rest = gathered
        rest.add_(rough.float())
        return None if out is not None else (rest, (rest,))


class Kinds(Springs):
    """Some of them gather themselves."""

    def on(self, mesh):
        super().on(mesh)
        for name, each in list(self.named_parameters()):
            kind = KINDS.get(name.split("_")[-1])
            if kind is not None:
                setattr(self, name, nn.Parameter(dtensor(kind(each.detach().to_local()), spec_of(each.detach()))))
        if mesh.size() == 1:
            self.plain_exact = nn.Parameter(Exact(torch.ones(6, 2)))
        return self

    def parts(self):
        found = super().parts()
        assert not any(isinstance(part, Exact) for part in found), "unsharded parameters are what the subclass made"
        return found


SHAPES = {
    "rows": (8, 6),
    "columns": (6, 16),
    "all": (9,),
    "rows_odd": (14, 3),
    "rows_exact": (16, 3),
    "rows_odd_exact": (14, 3),
    "columns_inplace": (6, 8),
}
PLAIN = ("rows", "columns", "all", "rows_odd")
KINDS = {"exact": Exact, "inplace": InPlace}


class Doubling(nn.Module):
    """A root without parameters around a unit."""

    def __init__(self):
        super().__init__()
        self.springs = Kinds(SHAPES)

    def forward(self, sample):
        return self.springs(2 * sample)


def on_last_dim(parameter):
    gathers_itself = isinstance(local_tensor(parameter), Exact)
    return Shard(0 if gathers_itself else parameter.ndim - 1)


def built(mesh, keep, placement_fn=None):
    model = Doubling()
    sherd.fully_shard(
        model.springs.on(mesh["tp"]), mesh=mesh["dp"], reshard_after_forward=keep, shard_placement_fn=placement_fn
    )
    return sherd.fully_shard(model, mesh=mesh["dp"])


def kept(unit):
    """Of each group: the bytes of the part that is kept, and of the whole."""
    held = [(list(weights.held()), weights.group.packing.unsharded_numel) for weights in unit.weights]
    return [(sum(tensor.nbytes for kind, tensor in each if kind is MemoryKind.PART), 4 * numel) for each, numel in held]


def values_of(parameter):
    local = local_tensor(parameter)
    return (local.values if isinstance(local, Exact) else local).clone()


def train(model, ranks):
    """The losses, and what was kept in each step."""
    optimizer, losses, parts = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    for step in range(STEPS):
        for rank in ranks:
            loss = model(float(rank - step)) / len(ranks)
            if isinstance(model, sherd.FSDPModule):
                parts.append(kept(Unit.of(model.springs)))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, parts


@on_threads(8, placement_fn=[None, on_last_dim])
def test_a_part_is_kept_of_every_kind_of_tensor_parallel_parameter_with_values_bit_for_bit_the_same(placement_fn):
    mesh, plain = mesh_of((4, 2), "dp", "tp"), Doubling()
    train(plain, range(4))
    models = [built(mesh, keep, placement_fn) for keep in (True, 2)]
    (losses, none), (same_losses, parts) = (train(model, [mesh.get_local_rank("dp")]) for model in models)
    assert same_losses == losses
    assert not any(part for step in none for part, _ in step)
    for step in parts:
        *shared, exact, odd_exact, in_place = step
        assert [part for part, _ in shared] == [whole // 2 for _, whole in shared]
        # Of what was gathered, 6 bytes an element, 7 rows of 3 in parts of 10 and 11 elements; what the subclass has
        # written to is gathered anew.
        half = (10, 11)[mesh.get_local_rank("dp") % 2]
        assert (exact[0], odd_exact[0], in_place[0]) == (8 * 3 * 6 // 2, half * 6, 0)
    expected, same = wholes(plain), dict(models[1].named_parameters())
    for name, each in models[0].named_parameters():
        assert torch.equal(values_of(same[name]), values_of(each)), name
        if name.split(".")[1] in PLAIN:
            torch.testing.assert_close(same[name].full_tensor(), expected[name], rtol=1e-5, atol=1e-5)


@on_threads(4)
def test_a_part_that_is_older_than_the_shards_is_not_gathered():
    """A part is kept for a backward that does not come; then an optimizer doubles every element."""
    mesh = mesh_of((4, 1), "dp", "tp")
    model = built(mesh, 2)
    assert model.springs.plain_exact.device_mesh == mesh["dp"]
    before = model(1.0).item()
    assert all(part for part, _ in kept(Unit.of(model.springs))[:-2])
    for each in model.parameters():
        each.grad = dtensor(-values_of(each), spec_of(each))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert model(2.0).item() == pytest.approx(4 * before, rel=1e-5)  # 2p 2p - 2 2p is 4 (p p - p)
