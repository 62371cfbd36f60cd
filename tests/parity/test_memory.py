"""Memory is given back: unsharded parameters after use, everything with the model, and nothing is kept per step."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sherd import Blocks, CPUOffloadPolicy, Flat, FSDPModule, Owned
from tests.support.meshes import mesh_of
from tests.support.models import build
from tests.support.ranks.bodies import on_processes
from tests.support.sharding import sharded
from tests.support.suites import part
from tests.support.training import make_optimizer


def what_outlives_the_model(name, num_steps, fails=False, **options):
    """Names of parameters, shards and gradients that live on after `del model`; and units."""
    model = sharded(build(name), **options)
    optimizer = make_optimizer("adamw", model)
    seen = {}
    for module in model.modules():
        module.register_forward_pre_hook(lambda m, _: seen.update({id(p): p for p in m.parameters(False)}))
    for step in range(num_steps):
        model.loss(model(*model.make_inputs(step, dist.get_rank()))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    shards = {name: param.to_local() for name, param in model.named_parameters()}
    grads = {f"gradient of {n}": p.grad.to_local() for n, p in model.named_parameters() if p.grad is not None}
    if fails:
        with contextlib.suppress(ZeroDivisionError):
            output = model(*model.make_inputs(0, dist.get_rank()))
            output.register_hook(lambda _: 1 / 0)
            output.sum().backward()
        del output
    whole = {f"whole {i}": p for i, p in enumerate(seen.values()) if not isinstance(p, DTensor)}
    watched = {what: weakref.ref(t.untyped_storage()) for what, t in (shards | grads | whole).items()}
    watched |= {f"unit {n}": weakref.ref(m) for n, m in model.named_modules() if isinstance(m, FSDPModule)}
    assert len(watched) > (12 if num_steps else 3)
    del shards, grads, whole, model, optimizer, module
    seen.clear()
    gc.collect()
    return [what for what, ref in watched.items() if ref() is not None]


PLACEMENTS = {"chunks": None, "flat": Flat(), "rows": Blocks(1), "blocks": Blocks(3), "whole": Owned()}


@pytest.mark.parametrize("placement", PLACEMENTS)
@on_processes(1, 2)
def test_nothing_outlives_the_model_under_any_placement(placement):
    for num_steps, options in ((0, {}), (1, {"reshard_after_forward": False}), (3, {})):
        found = what_outlives_the_model("uneven", num_steps, placement=PLACEMENTS[placement], **options)
        assert found == [], num_steps


def test_nothing_outlives_the_model(world):
    for turn, name in enumerate(("mlp", "tied_across", "nested", "transformer", "checkpoint_outside")):
        for num_steps in part((0, 1, 3), turn, 3):
            assert world(2).run(what_outlives_the_model, name, num_steps) == [[], []], (name, num_steps)
    assert world(2).run(what_outlives_the_model, "mlp", 0, fails=True) == [[], []]
    offload = CPUOffloadPolicy(pin_memory=False)
    for reshard in (True, False):
        found = world(2).run(what_outlives_the_model, "mlp", 2, offload_policy=offload, reshard_after_forward=reshard)
        assert found == [[], []], f"offloaded, {reshard}"


def live_tensors():
    """How many tensors live, and how many bytes their storages hold."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    held = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        held[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return len(tensors), sum(held.values())


def growth(name, mesh_shape=None, sync=True, **options):
    """Live tensors, their bytes, and Python objects after 10 steps and after 60."""
    model = sharded(build(name), mesh=mesh_of(mesh_shape), **options)
    optimizer, counts = make_optimizer("adamw_foreach", model), []
    inputs = model.make_inputs(0, dist.get_rank())
    for step in range(60):
        model.set_requires_gradient_sync(sync or step % 2 == 1)
        model.loss(model(*inputs)).backward()
        if sync or step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
        if step in (9, 59):
            counts.append((*live_tensors(), len(gc.get_objects())))
    return counts


@pytest.mark.parametrize("name", ["mlp", "tied_inside", "branching", "reentrant_outside"])
def test_sixty_steps_keep_no_more_than_ten(world, name):
    for early, late in world(2).run(growth, name):
        assert late[:2] == early[:2], "tensors, bytes"
        # Others come and go too, but not one in every second step.
        assert late[2] < early[2] + 25, "Python objects"


def test_accumulating_steps_keep_no_more_either(world):
    for early, late in world(2).run(growth, "mlp", sync=False, reshard_after_forward=False):
        assert late[:2] == early[:2]


def test_replicated_steps_keep_no_more_either(threads):
    # Threads share one heap, so only what all ranks hold together can be compared, while none of them runs.
    found = threads(1).run(growth, "mlp", mesh_shape=(1, 1))
    for early, late in found:
        # What an earlier test of this process has left may go in between.
        assert late[0] <= early[0]
        assert late[1] <= early[1]


@on_processes(2, reshard=(True, False))
def test_whole_parameters_are_freed_after_forward_and_after_backward(reshard):
    """Bytes of unsharded parameters: most seen at once in a block's forward, and after forward and backward."""
    model = sharded(build("mlp"), reshard_after_forward=reshard)
    whole, most = {}, []

    def look(module, _):
        for param in module.parameters():
            if not isinstance(param, DTensor):
                whole[param.untyped_storage()._cdata] = param.untyped_storage()
        most.append(held())

    def held():
        return sum(storage.nbytes() for storage in whole.values())

    hooks = [block.up.register_forward_pre_hook(look) for block in model.blocks]
    loss = model.loss(model(*model.make_inputs(0, dist.get_rank())))
    after_forward = held()
    for hook in hooks:
        hook.remove()
    loss.backward()
    assert max(most) > 0
    assert after_forward == (0 if reshard else max(most))
    assert held() == 0
