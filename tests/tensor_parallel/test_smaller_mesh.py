"""`reshard_after_forward=k` keeps a part of every kind of parameter: tensor parallel, cut on any dim, gathering
itself. torch's FSDP refuses all of these."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

import sherd
from sherd._torch import dtensor, local_tensor, spec_of
from sherd.engine.run.seal import unit_of
from sherd.schedule.moments import MemoryKind
from tests.tensor_parallel.training import mesh_of, wholes

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


class Springs(nn.Module):
    """Each element is drawn to where the sample says, once in forward and once in a product that backward reads."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def on(self, mesh):
        for name in SHAPES:
            placements = [WAYS[name.split("_")[0]]]
            whole = distribute_tensor(getattr(self, name).detach(), mesh, placements)
            kind = KINDS.get(name.split("_")[-1])
            if kind is not None:
                whole = dtensor(kind(whole.to_local()), spec_of(whole))
            setattr(self, name, nn.Parameter(whole))
        if mesh.size() == 1:
            self.plain_exact = nn.Parameter(Exact(torch.ones(6, 2)))
        return self

    def forward(self, sample):
        parts = [each.to_local() if isinstance(each, DTensor) else each for each in self.parameters()]
        assert not any(isinstance(part, Exact) for part in parts), "unsharded parameters are what the subclass made"
        return sum((part * part - sample * part).sum() for part in parts)


SHAPES = {
    "rows": (8, 6),
    "columns": (6, 16),
    "all": (9,),
    "rows_odd": (14, 3),
    "rows_exact": (16, 3),
    "rows_odd_exact": (14, 3),
    "columns_inplace": (6, 8),
}
WAYS = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}
PLAIN = ("rows", "columns", "all", "rows_odd")
KINDS = {"exact": Exact, "inplace": InPlace}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.springs = Springs(1)

    def forward(self, sample):
        return self.springs(2 * sample)


def on_last_dim(parameter):
    gathers_itself = isinstance(local_tensor(parameter), Exact)
    return Shard(0 if gathers_itself else parameter.ndim - 1)


def built(mesh, keep, placement_fn=None):
    model = Net()
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
                parts.append(kept(unit_of(model.springs)))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, parts


def keeps_a_part(placement_fn):
    mesh, runs = mesh_of((4, 2), "dp", "tp"), []
    for keep in (True, 2):
        model = built(mesh, keep, placement_fn)
        losses, parts = train(model, [mesh.get_local_rank("dp")])
        runs.append((losses, {name: values_of(each) for name, each in model.named_parameters()}, parts))
    (losses, params, none), (same_losses, same_params, parts) = runs
    assert same_losses == losses
    for name, tensor in params.items():
        assert torch.equal(same_params[name], tensor), name
    assert not any(part for step in none for part, _ in step)
    return parts, {name: each.full_tensor() for name, each in model.named_parameters() if name.split(".")[1] in PLAIN}


@pytest.mark.parametrize("placement_fn", [None, on_last_dim], ids=["rows", "last_dim"])
def test_a_part_is_kept_of_every_kind_of_tensor_parallel_parameter_with_values_bit_for_bit_the_same(
    threads, placement_fn
):
    plain = Net()
    train(plain, range(4))
    expected = wholes(plain)
    for parts, params in threads(8).run(keeps_a_part, placement_fn):
        for step in parts:
            *shared, exact, odd_exact, in_place = step
            assert [part for part, _ in shared] == [whole // 2 for _, whole in shared]
            # Of what was gathered, 6 bytes an element; what the subclass has written to is gathered anew.
            assert (exact[0], odd_exact[0], in_place[0]) == (8 * 3 * 6 // 2, 8 * 3 * 6 // 2, 0)
        for name, param in params.items():
            torch.testing.assert_close(param, expected[name], rtol=1e-5, atol=1e-5)


def changed_in_between():
    """A part is kept for a backward that does not come; then an optimizer doubles every element."""
    mesh = mesh_of((4, 1), "dp", "tp")
    model = built(mesh, 2)
    assert model.springs.plain_exact.device_mesh == mesh["dp"]
    before = model(1.0).item()
    assert all(part for part, _ in kept(unit_of(model.springs))[:-2])
    for each in model.parameters():
        each.grad = dtensor(-values_of(each), spec_of(each))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return before, model(2.0).item()


def test_a_part_that_is_older_than_the_shards_is_not_gathered(threads):
    for before, after in threads(4).run(changed_in_between):
        assert after == pytest.approx(4 * before, rel=1e-5)  # 2p 2p - 2 2p is 4 (p p - p)
