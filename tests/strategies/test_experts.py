"""Are experts that are sharded over another mesh than their block trained, clipped and saved as in one process?"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import sherd
from sherd import Blocks, Flat, OnMesh, Owned
from sherd.errors import PolicyError
from tests.strategies.routed import built, divide_experts, loss_of

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


def whole_experts(model, value, mesh):
    """Of all experts, whatever the form of one rank's part."""
    whole = value.detach().full_tensor()
    if len(whole) == 2:
        parts = [torch.empty_like(whole) for _ in range(2)]
        dist.all_gather(parts, whole, group=mesh["ep"].get_group())
        whole = torch.cat(parts)
    return whole


def trained(as_dtensor, cut, placements, clips, ignores_gain=False, **options):
    """Norms, the first step's clipped gradients, the last parameters."""
    model, mesh = sharded(as_dtensor, cut, placements, ignores_gain, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def wholes(values):
        found = {name: each if not isinstance(each, DTensor) else each.full_tensor() for name, each in values.items()}
        found["experts.weight"] = whole_experts(model, values["experts.weight"], mesh)
        return {name: each.detach().clone() for name, each in found.items()}

    norms, grads = [], {}
    for step in range(STEPS):
        loss_of(model, step, dist.get_rank()).backward()
        if ignores_gain:
            dist.all_reduce(model.gain.grad)
            model.gain.grad /= 4
        if clips:
            norms.append(sherd.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        if step == 0:
            grads = wholes({name: each.grad for name, each in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return norms, grads, wholes(dict(model.named_parameters()))


def trained_plainly(clips):
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms, grads = [], {}
    for step in range(STEPS):
        for rank in range(4):
            (loss_of(model, step, rank) / 4).backward()
        if clips:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        if step == 0:
            grads = {name: each.grad.clone() for name, each in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return norms, grads, {name: each.detach() for name, each in model.named_parameters()}


def assert_equal(found, expected):
    norms, *values = expected
    assert found[0] == pytest.approx(norms, rel=1e-5)
    for these, those in zip(found[1:], values, strict=True):
        assert these.keys() == those.keys()
        for name, value in those.items():
            torch.testing.assert_close(these[name], value, msg=lambda said, name=name: f"{name}: {said}")


CASES = [
    (True, None, None, True, {}),
    (True, Flat(), None, True, {"reshard_after_forward": 2}),
    (True, Owned(), "zero3", True, {"ignores_gain": True}),
    (True, Shard(1), None, True, {"reshard_after_forward": True}),
    (False, None, None, False, {}),
    (False, Blocks(3), None, False, {"placement": Flat(), "reshard_after_forward": False}),
]


def all_trained():
    return [trained(*case, **options) for *case, options in CASES]


def test_experts_over_another_mesh_train_and_clip_as_in_one_process(world):
    for found in world(4).run(all_trained):
        for each, (*_, clips, _) in zip(found, CASES, strict=True):
            assert_equal(each, trained_plainly(clips))


def resharded_by_hand():
    model, _ = sharded(True, Flat())
    model.set_reshard_after_forward(2)
    loss_of(model, 0, dist.get_rank()).backward()
    grad = model.experts.weight.grad.full_tensor()
    with pytest.raises(PolicyError, match="sharded over 2 ranks"):
        model.set_reshard_after_forward(4)
    return grad


def test_an_int_reshards_over_neighbours_of_each_mesh_and_must_divide_all(world):
    expected = trained_plainly(False)[1]["experts.weight"]
    for grad in world(4).run(resharded_by_hand):
        torch.testing.assert_close(grad, expected)


def lent_saved_and_loaded():
    """Whole values by `unsharded`; a full state dict loads into other cuts."""
    model, _ = sharded(True, Flat())
    with sherd.unsharded(model):
        lent = {name: each.detach().clone() for name, each in model.named_parameters()}
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(2)
    full = {name: each.full_tensor() for name, each in model.state_dict().items()}
    other, _ = sharded(True, Shard(1), placement=Owned())
    other.load_state_dict(full)
    found = {name: each.full_tensor() for name, each in other.state_dict().items()}
    return lent["dense.weight"], full, found


def test_experts_are_lent_and_move_between_cuts(world):
    plain = built().state_dict()
    for dense, full, found in world(4).run(lent_saved_and_loaded):
        torch.testing.assert_close(dense, plain["dense.weight"])
        for name, value in plain.items():
            torch.testing.assert_close(full[name], 2 * value)
            torch.testing.assert_close(found[name], 2 * value)
