"""What a user does between and inside steps keeps its order on the device, and its values. On two ranks.

Checkpoints, unsharded parameters, gathers by hand, streams of the user's own, tensors that gather themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sherd
from tests.api.test_gathers_itself import Halves
from tests.gpu.devices import here
from tests.gpu.setting_model import Block, made, shrink
from tests.gpu.setting_runs import mesh_of, whole_on_host
from tests.gpu.settings import Setting
from tests.gpu.steps import Training, assert_parameters
from tests.support.gathered import gathered
from tests.tensor_parallel import training as tensor_parallel

SHARDED = {
    "Shard(0)": Setting(),
    "Flat": Setting(placement="Flat"),
    "offloaded": Setting(placement="Flat", offload="pinned"),
}
WRAPPED = {
    "wrapper": Setting(front="wrapper", placement="Flat"),
    "wrapper, flat parameters": Setting(front="flat wrapper", placement="Flat"),
}
CALLS = ("single_gather", "single_scatter", "list_gather", "all_reduce")


def in_order(do: Any, *args: Any) -> dict[str, int]:
    """On a rank: `do(*args)` with streams that pause. Returns the accesses that nothing orders."""
    accelerator = here()
    accelerator.races()
    accelerator.pause(1)
    do(*args)
    races = accelerator.races()
    accelerator.pause(0)
    return races


@pytest.fixture
def run(ranks_with):
    """`run(do, ...)` does it on two ranks, or on as many as `num_ranks` says, which make `calls`, too."""

    def on_ranks(do, *args, num_ranks=2, calls=()):
        for rank, races in enumerate(ranks_with(num_ranks, *CALLS, *calls).run(in_order, do, *args)):
            assert not races, f"rank {rank}"

    return on_ranks


# Checkpoints


def state_of(training: Training) -> dict[str, Any]:
    model, optimizer, wrapper = training.model, training.optimizer, sherd.FullyShardedDataParallel
    if not training.setting.is_wrapped:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    with wrapper.state_dict_type(model, sherd.StateDictType.SHARDED_STATE_DICT):
        return {"model": model.state_dict(), "optimizer": wrapper.optim_state_dict(model, optimizer)}


def set_state(training: Training, state: dict[str, Any]) -> None:
    model, optimizer, wrapper = training.model, training.optimizer, sherd.FullyShardedDataParallel
    if not training.setting.is_wrapped:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return
    with wrapper.state_dict_type(model, sherd.StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(wrapper.optim_state_dict_to_load(model, optimizer, state["optimizer"]))


def save_and_load(setting: Setting, folder: str) -> None:
    first, second = Training(setting), Training(setting)
    first.steps(2)
    second.steps(1)  # so that it has something to overwrite, momentum too
    shrink(second.model)
    dcp.save(state_of(first), checkpoint_id=folder)
    state = state_of(second)
    dcp.load(state, checkpoint_id=folder)
    set_state(second, state)
    second.taken = first.taken
    second.assert_trained_plainly()


@pytest.mark.parametrize("name", [*SHARDED, *WRAPPED])
def test_training_goes_on_from_a_checkpoint(name, run, tmp_path):
    run(save_and_load, (SHARDED | WRAPPED)[name], str(tmp_path))


def copy_by_whole_state(setting: Setting) -> None:
    first, second = Training(setting), Training(setting)
    first.steps(2)
    shrink(second.model)
    whole = get_model_state_dict(first.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(second.model, whole if dist.get_rank() == 0 else {}, options=options)
    assert_parameters(second.model, whole_on_host(first.model))


@pytest.mark.parametrize("name", SHARDED)
def test_a_whole_state_is_saved_by_rank_0_and_given_to_all(name, run):
    run(copy_by_whole_state, SHARDED[name], calls=["functional_gather"] if name == "Shard(0)" else [])


# Unsharded parameters


def write_gradients_and_values(setting: Setting) -> None:
    training = Training(setting)
    training.backward()
    with sherd.unsharded(training.model, with_grads=True):
        for each in training.model.parameters():
            each.grad.mul_(2)
            each.detach().add_(1)
    with sherd.unsharded(training.model, with_grads=True), torch.no_grad():
        for each in training.model.parameters():
            each.grad.div_(2)
            each.sub_(1)
    training.finish()
    training.assert_trained_plainly()


@pytest.mark.parametrize("name", ["Shard(0)", "Flat", *WRAPPED])
def test_gradients_and_values_may_be_written_unsharded(name, run):
    run(write_gradients_and_values, (SHARDED | WRAPPED)[name])


def read_on_the_host(setting: Setting) -> None:
    training = Training(setting)
    training.steps(1)
    with sherd.unsharded(training.model, writeback=False, offload_to_cpu=True):
        for each in training.model.parameters():
            assert each.device.type == "cpu"
            assert each.isfinite().all()
    training.assert_trained_plainly()


@pytest.mark.parametrize("name", ["Shard(0)", "Flat", *WRAPPED])
def test_unsharded_parameters_may_be_read_on_the_host(name, run):
    run(read_on_the_host, (SHARDED | WRAPPED)[name])


# Streams of the user's own


def gather_by_hand(setting: Setting) -> None:
    training = Training(setting)
    for _ in range(2):
        handles = [block.unshard(async_op=True) for block in training.model.blocks]
        for handle in handles:
            handle.wait()
        training.backward()
        for block in training.model.blocks:
            block.reshard()
        training.finish()
    training.assert_trained_plainly()


def compute_beside(setting: Setting) -> None:
    training, stream = Training(setting), torch.Stream(device=here().device)
    for _ in range(2):
        compute = torch.accelerator.current_stream()
        stream.wait_stream(compute)
        with stream:
            training.backward()
        compute.wait_stream(stream)
        training.finish()
    training.assert_trained_plainly()


def step_beside(setting: Setting) -> None:
    training, stream = Training(setting), torch.Stream(device=here().device)
    for _ in range(2):
        training.backward()
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            training.optimizer.step()
        training.model.set_post_optim_event(stream.record_event())
        torch.accelerator.current_stream().wait_stream(stream)
        training.optimizer.zero_grad()
        training.taken += 1
    training.assert_trained_plainly()


def hook_beside(setting: Setting) -> None:
    training, stream = Training(setting), torch.Stream(device=here().device)
    for unit in (*training.model.blocks, training.model):
        unit.set_all_reduce_hook(lambda gradients: gradients.mul_(2).div_(2), stream=stream)
    training.assert_trained_plainly()


def method_as_forward(setting: Setting) -> None:
    training = Training(setting)
    training.model.logits = lambda tokens: type(training.model).forward(training.model, tokens)
    sherd.register_fsdp_forward_method(training.model, "logits")
    training.backward(training.model.logits)
    training.finish()
    training.assert_trained_plainly()


BY_HAND = [gather_by_hand, compute_beside, step_beside, hook_beside, method_as_forward]


@pytest.mark.parametrize("placement", ["Shard(0)", "Flat"])
@pytest.mark.parametrize("do", BY_HAND, ids=lambda do: do.__name__)
def test_what_is_done_by_hand_keeps_its_order(do, placement, run):
    run(do, Setting(placement=placement))


# Other kinds of parameters


def train_what_gathers_itself() -> None:
    def net(kind: Any, device: Any) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False)).to(device)
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter(kind(layer.weight.detach()))
        return model

    def loss(model: nn.Module, rank: int, device: Any) -> torch.Tensor:
        return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)).to(device)).square().sum()

    device, plain = here().device, net(lambda values: values, "cpu")
    sum(loss(plain, rank, "cpu") for rank in range(2)).div(2).backward()
    model = net(lambda values: Halves(values / 4, 3 * values / 4), device)
    mesh = mesh_of((2,))
    for layer in (model[0], model[2]):
        sherd.fully_shard(layer, mesh=mesh)
    sherd.fully_shard(model, mesh=mesh)
    loss(model, dist.get_rank(), device).backward()
    for layer, wanted in ((model[0], plain[0]), (model[2], plain[2])):
        (found,) = gathered([layer.weight.grad])
        torch.testing.assert_close(found.cpu(), wanted.weight.grad, rtol=1e-4, atol=1e-5)


def test_tensors_that_gather_themselves_have_the_plain_gradients(run):
    run(train_what_gathers_itself)


def train_beside_tensor_parallelism() -> None:
    # All placements on one mesh: autograd's threads remember it, and would take its groups when they are gone.
    mesh = init_device_mesh(here().kind, (2, 2), mesh_dim_names=("dp", "tp"))
    for placement in (None, sherd.Flat()):
        _train_beside_tensor_parallelism(mesh, placement)


def _train_beside_tensor_parallelism(mesh: DeviceMesh, placement: sherd.Flat | None) -> None:
    device, sizes = here().device, tensor_parallel.EVEN
    net = tensor_parallel.tensor_parallel(tensor_parallel.built(sizes).to(device), mesh["tp"])
    tensor_parallel.sharded(net, mesh=mesh["dp"], placement=placement)

    def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        given, wanted = (each.to(device) for each in batch)
        return tensor_parallel.whole_loss_of(model, (given, wanted))

    run = tensor_parallel.train(net, sizes, [mesh.get_local_rank("dp")], loss_of)
    expected = tensor_parallel.plain(sizes, num_ranks=2)
    tensor_parallel.close({name: each.cpu() for name, each in run.grads.items()}, expected.grads, ".grad")
    tensor_parallel.close({name: each.cpu() for name, each in run.params.items()}, expected.params)


def test_tensor_parallel_blocks_train_as_the_plain_model(run, accelerator):
    if accelerator.kind == "cuda":
        pytest.skip("four ranks with two axes need an accelerator each: gloo has no functional collectives on CUDA")
    run(train_beside_tensor_parallelism, num_ranks=4)


def wrap_from_the_meta_device() -> None:
    with torch.device("meta"):
        model = Block(Setting())

    def fill(module: nn.Module) -> None:
        module.to_empty(device=here().device, recurse=False)
        with torch.no_grad():
            for each in module.parameters(recurse=False):
                each.fill_(0.01)

    wrapped: Any = sherd.FullyShardedDataParallel(model, device_mesh=mesh_of((2,)), param_init_fn=fill)
    wrapped(torch.ones(2, Setting().width, device=here().device)).sum().backward()
    with sherd.unsharded(wrapped, writeback=False):
        assert all((each == 0.01).all() for each in wrapped.parameters())
    state = wrapped.state_dict()
    assert state.keys() == made(Setting()).blocks[0].state_dict().keys()


def test_a_wrapper_fills_a_model_from_the_meta_device(run):
    run(wrap_from_the_meta_device)
