"""Experts that are sharded over another mesh than their block train, clip and are saved as in one process."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import sherd
from sherd import Blocks, Flat, OnMesh, Owned
from sherd.errors import PlacementError, PolicyError
from tests.strategies.routed import built, divide_experts, loss_of
from tests.support.comparing import assert_named_close, assert_refused, assert_same, whole
from tests.support.ranks.bodies import on_processes

STEPS, MAX_NORM = 3, 0.05


def expert_mesh():
    """(ep, edp) of 4 ranks."""
    _clear_sharding_prop_cache()
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))


def sharded(as_dtensor, cut=None, placements=None, ignores_gain=False, **options):
    """Experts divided over `ep` and sharded over `edp`, the rest over all 4 ranks."""
    model, mesh = built(), expert_mesh()
    divide_experts(model, mesh["ep"], as_dtensor)
    experts = model.experts.weight
    ignored = {model.gain} if ignores_gain else None
    sherd.fully_shard(
        model,
        shard_placement_fn=lambda each: OnMesh(mesh["edp"], cut) if each is experts else None,
        placements=placements,
        ignored_params=ignored,
        **options,
    )
    return model, mesh


def trained(model, ranks, clip, wholes, before_a_step=lambda: None):
    """Norms, the first step's clipped gradients, the last parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms, grads = [], {}
    for step in range(STEPS):
        for rank in ranks:
            (loss_of(model, step, rank) / len(ranks)).backward()
        before_a_step()
        if clip is not None:
            norms.append(clip(model.parameters(), MAX_NORM).item())
        if step == 0:
            grads = wholes({name: each.grad for name, each in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return norms, grads, wholes(dict(model.named_parameters()))


def trained_plainly(clips):
    return trained(built(), range(4), torch.nn.utils.clip_grad_norm_ if clips else None, whole)


@on_processes(4)
def test_torchs_answer_with_a_mesh_says_the_same_as_on_mesh():
    pytest.importorskip("torch", "2.12")
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    mesh = expert_mesh()
    infos = {"shards": FSDPMeshInfo(mesh["edp"], 0), "transposed": HSDPMeshInfo(mesh, 0, 1)}
    for name, info in infos.items():
        for cut in (None, Shard(1)):
            layer = torch.nn.Linear(4, 8)
            chosen, answer = layer.weight, ShardPlacementResult(cut, info)
            sherd.fully_shard(layer, shard_placement_fn=lambda each: answer if each is chosen else None)  # noqa: B023
            local = (8, 2) if cut else (4, 4)
            assert (layer.weight.to_local().shape, layer.bias.to_local().shape) == (local, (2,)), (name, cut)
    record = SimpleNamespace(placement=None, mesh_info=SimpleNamespace(shard_mesh_dim=None, replicate_mesh_dim=0))
    assert_refused(
        lambda: sherd.fully_shard(torch.nn.Linear(4, 8), shard_placement_fn=lambda each: record),
        PlacementError,
        ValueError,
        "shards over no axis",
    )


CASES = [
    (True, None, None, True, {}),
    (True, Flat(), None, True, {"reshard_after_forward": 2}),
    (True, Owned(), "zero3", True, {"ignores_gain": True}),
    (True, Shard(1), None, True, {"reshard_after_forward": True}),
    (False, None, None, False, {}),
    (False, Blocks(3), None, False, {"placement": Flat(), "reshard_after_forward": False}),
]


@pytest.mark.parametrize(("as_dtensor", "cut", "placements", "clips", "options"), CASES)
@on_processes(4)
def test_experts_over_another_mesh_train_and_clip_as_in_one_process(as_dtensor, cut, placements, clips, options):
    model, mesh = sharded(as_dtensor, cut, placements, **options)

    def wholes(values):
        """With all experts, whatever the form of one rank's part."""
        found = whole(values)
        if len(found["experts.weight"]) == 2:
            parts = [torch.empty_like(found["experts.weight"]) for _ in range(2)]
            dist.all_gather(parts, found["experts.weight"], group=mesh["ep"].get_group())
            found["experts.weight"] = torch.cat(parts)
        return found

    def reduce_gain():
        if "ignores_gain" in options:
            dist.all_reduce(model.gain.grad)
            model.gain.grad /= 4

    assert_same(
        trained(model, [dist.get_rank()], sherd.clip_grad_norm_ if clips else None, wholes, reduce_gain),
        trained_plainly(clips),
        rtol=1e-5,
        atol=1e-5,
    )


@on_processes(4)
def test_an_int_reshards_over_neighbours_of_each_mesh_and_must_divide_all():
    model, _ = sharded(True, Flat())
    model.set_reshard_after_forward(2)
    loss_of(model, 0, dist.get_rank()).backward()
    grad = model.experts.weight.grad.full_tensor()
    with pytest.raises(PolicyError, match="sharded over 2 ranks"):
        model.set_reshard_after_forward(4)
    torch.testing.assert_close(grad, trained_plainly(False)[1]["experts.weight"])


@on_processes(4)
def test_experts_are_lent_and_move_between_cuts():
    """Whole values by `unsharded`; a full state dict loads into other cuts."""
    model, _ = sharded(True, Flat())
    with sherd.unsharded(model):
        lent = whole(dict(model.named_parameters()))
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(2)
    full = whole(model.state_dict())
    other, _ = sharded(True, Shard(1), placement=Owned())
    other.load_state_dict(full)
    plain = built().state_dict()
    doubled = {name: 2 * value for name, value in plain.items()}
    torch.testing.assert_close(lent["dense.weight"], plain["dense.weight"])
    assert_named_close(full, doubled, "saved", 1.3e-6, 1e-5)
    assert_named_close(whole(other.state_dict()), doubled, "loaded", 1.3e-6, 1e-5)
