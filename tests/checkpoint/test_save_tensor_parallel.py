"""Does what a model on several mesh axes has saved load on any other mesh, and in one process?"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import sherd
from sherd import Blocks, Flat, Owned, fully_shard
from tests.support.suites import part
from tests.tensor_parallel.training import (
    ODD,
    built,
    close,
    mesh_of,
    optimizer_of,
    sharded,
    tensor_parallel,
    tokens,
    whole_loss_of,
    wholes,
)

WAYS = {
    "rows": {},
    "flat": {"placement": Flat()},
    "blocks": {"placement": Blocks(2)},
    "owned": {"placement": Owned()},
    "columns": {"shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)},
}
SHAPES = [(2, 2), (4, 1), (1, 4)]
CASES = [*((shape, way) for shape in SHAPES for way in WAYS), (SHAPES[0], "wrapper")]


def made(names, shape, way):
    mesh = mesh_of(shape, *names)
    net = tensor_parallel(built(ODD), mesh["tp"]) if mesh["tp"].size() > 1 else built(ODD)
    if way == "wrapper":
        net = sherd.FullyShardedDataParallel(net, device_mesh=mesh["dp"], use_orig_params=False)
    else:
        sharded(net, mesh=mesh["dp"], **WAYS[way])
    return net, optimizer_of(net), mesh.get_local_rank("dp")


def stepped(net, optimizer):
    whole_loss_of(net, tokens(ODD, 0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def spoilt(net, optimizer):
    with torch.no_grad():
        for parameter in net.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.fill_(-77)
    return {"model": net, "optimizer": optimizer}


def of_one_process(steps=2):
    net = built(ODD)
    optimizer = optimizer_of(net)
    for _ in range(steps):
        stepped(net, optimizer)
    return net, optimizer


def saved_and_loaded(names, folder, loading):
    """Saves after a step in each way, loads in those of `loading`, takes another step; nothing may differ from one
    process that takes two."""
    expected = [wholes(of_one_process(steps)[0]) for steps in (1, 2)]
    trained = [each for each in CASES if each[0] == (2, 2)]
    kept = {case: made(names, *case) for case in CASES if case in {*trained, *loading}}
    for _, way in trained:
        net, optimizer, _ = kept[(2, 2), way]
        stepped(net, optimizer)
        sherd.save(f"{folder}/{way}", {"model": net, "optimizer": optimizer}, step=1)
    for turn, (shape, way) in enumerate(loading):
        net, optimizer, _ = kept[shape, way]
        sherd.load(f"{folder}/{trained[turn % len(trained)][1]}", spoilt(net, optimizer))
        if way == "wrapper":
            with sherd.unsharded(net):
                loaded = {name.replace("_fsdp_wrapped_module.", ""): whole for name, whole in wholes(net).items()}
            close(loaded, expected[0], way)
            continue
        close(wholes(net), expected[0], f" {shape} {way}")
        stepped(net, optimizer)
        close(wholes(net), expected[1], f" {shape} {way} after a step")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")], ids="_".join)
def test_a_tensor_parallel_model_loads_on_any_mesh_and_its_optimizer_goes_on(world, tmp_path, names):
    loading = part(CASES, names.index("tp"), 2)  # each case on a mesh whose axes stand in one order or in the other
    world(4).run(saved_and_loaded, names, str(tmp_path), loading, timeout=200)
    for folder in sorted(tmp_path.iterdir()):
        net = built(ODD)
        optimizer = optimizer_of(net)
        sherd.load(str(folder), spoilt(net, optimizer))
        close(wholes(net), wholes(of_one_process(1)[0]), f" {folder.name} in one process")
        stepped(net, optimizer)
        close(wholes(net), wholes(of_one_process(2)[0]), f" {folder.name} in one process, after a step")


class Experts(nn.Module):
    """A router, and experts that lie on a mesh of their own."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.w = nn.Parameter(torch.randn(4, 6, 5))


def experts_on(shape):
    torch.manual_seed(3)
    module = Experts()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    whole = module.w.detach().clone()
    module.w = nn.Parameter(distribute_tensor(whole, mesh["ep"], [Shard(0)], src_data_rank=None))
    everyone = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
    fully_shard(module.router, mesh=everyone)
    fully_shard(module, mesh=mesh["dp"])
    return module, whole


def experts(folder):
    for number, (here, there) in enumerate([((2, 2), (4, 1)), ((1, 4), (2, 2)), ((4, 1), (1, 4))]):
        module, whole = experts_on(here)
        router = module.router.weight.full_tensor()
        sherd.save(folder, {"model": module}, step=number)
        other, _ = experts_on(there)
        for parameter in other.parameters():
            parameter.to_local().detach().zero_()
        sherd.load(folder, {"model": other}, step=number)
        assert torch.equal(other.w.full_tensor(), whole)
        assert torch.equal(other.router.weight.full_tensor(), router)


def test_experts_on_a_mesh_of_their_own(world, tmp_path):
    world(4).run(experts, str(tmp_path))
    plain = Experts()
    sherd.load(str(tmp_path), {"model": plain})
    torch.manual_seed(3)
    assert torch.equal(plain.w, Experts().w)


def stages(folder):
    """Each of two ranks has a stage of its own, sharded over two ranks."""
    torch.manual_seed(5)
    layers = nn.ModuleDict({str(at): nn.Linear(4, 4) for at in range(4)})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    own = [nn.ModuleDict({str(at): layers[str(at)]}) for at in (stage, stage + 2)]
    for piece in own:
        for layer in piece.values():
            fully_shard(layer, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW([p for piece in own for p in piece.parameters()], lr=0.1)
    for piece in own:
        for layer in piece.values():
            layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    sherd.save(folder, {"model": own, "optimizer": optimizer}, step=1)
    before = {name: p.full_tensor() for piece in own for name, p in piece.named_parameters()}
    for piece in own:
        for parameter in piece.parameters():
            parameter.to_local().detach().zero_()
    optimizer.state.clear()
    sherd.load(folder, {"model": own, "optimizer": optimizer})
    for piece in own:
        for name, parameter in piece.named_parameters():
            assert torch.equal(parameter.full_tensor(), before[name])
            assert optimizer.state[parameter]["exp_avg"].full_tensor().abs().sum() > 0
    return {name: each.tolist() for name, each in before.items()}


def test_stages_of_a_pipeline_save_one_model(world, tmp_path):
    found = world(4).run(stages, str(tmp_path))
    whole = nn.ModuleDict({str(at): nn.Linear(4, 4) for at in range(4)})
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.3)
    sherd.load(str(tmp_path), {"model": whole, "optimizer": optimizer})
    expected = {name: each for of_rank in found for name, each in of_rank.items()}
    assert {name: each.tolist() for name, each in whole.named_parameters()} == expected
    assert len(optimizer.state) == 8
    assert optimizer.param_groups[0]["lr"] == 0.1
