"""What a model on several mesh axes has saved loads on any other mesh, and in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import sherd
from sherd import fully_shard
from sherd.errors import CheckpointError
from tests.support.comparing import assert_same, plain_name, whole
from tests.support.ranks.bodies import on_threads
from tests.support.refusals import refusal
from tests.support.sharding import FRONTS, sharded
from tests.support.suites import part
from tests.tensor_parallel.training import ODD, built, mesh_of, optimizer_of, tensor_parallel, tokens, whole_loss_of

WAYS = [front for front in FRONTS if front != "wrapper"] + ["columns"]
SHAPES = [(2, 2), (4, 1), (1, 4)]
CASES = [(shape, way) for shape in SHAPES for way in WAYS if way != "flat wrapper" or shape == (2, 2)]


def made(names, shape, way):
    mesh = mesh_of(shape, *names)
    net, options = built(ODD), {}
    if mesh["tp"].size() > 1:
        tensor_parallel(net, mesh["tp"])
    if way == "flat wrapper":
        net = sherd.FullyShardedDataParallel(net, device_mesh=mesh["dp"], use_orig_params=False)
        return net, optimizer_of(net)
    if way == "columns":
        way, options = "shard", {"shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)}
    sharded(net, way, mesh=mesh["dp"], **options)
    return net, optimizer_of(net)


def stepped(net, optimizer):
    whole_loss_of(net, tokens(ODD, 0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return net


def spoil(*modules):
    """Numbers that no load may leave."""
    with torch.no_grad():
        for parameter in (each for module in modules for each in module.parameters()):
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).fill_(-77)


def values(net):
    with sherd.unsharded(net, writeback=False):
        return {plain_name(name): whole(each) for name, each in net.named_parameters()}


def load_and_step(folder, net, optimizer, case):
    """What is loaded are the values after one step in one process; another step leads to those after two."""
    plain = built(ODD)
    its = optimizer_of(plain)
    spoil(net)
    sherd.load(folder, {"model": net, "optimizer": optimizer})
    for step in range(2):
        assert_same(values(net), values(stepped(plain, its)), f"{case} after {step} steps", rtol=1e-4, atol=1e-5)
        stepped(net, optimizer)


def saved_and_loaded(names, folder, loading):
    """Saves after a step in each way, and loads in those of `loading`."""
    trained = [each for each in CASES if each[0] == (2, 2)]
    kept = {case: made(names, *case) for case in CASES if case in {*trained, *loading}}
    for case in trained:
        net, optimizer = kept[case]
        stepped(net, optimizer)
        sherd.save(f"{folder}/{case[1]}", {"model": net, "optimizer": optimizer}, step=1)
    for turn, case in enumerate(loading):
        load_and_step(f"{folder}/{trained[turn % len(trained)][1]}", *kept[case], case)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")], ids="_".join)
def test_a_tensor_parallel_model_loads_on_any_mesh_and_its_optimizer_goes_on(world, tmp_path, names):
    loading = part(CASES, names.index("tp"), 2)  # each case on a mesh whose axes stand in one order or in the other
    world(4).run(saved_and_loaded, names, str(tmp_path), loading, timeout=200)
    for folder in sorted(tmp_path.iterdir()):
        net = built(ODD)
        load_and_step(str(folder), net, optimizer_of(net), f"{folder.name} in one process")


class Experts(nn.Module):
    """A router, and experts that lie on a mesh of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.router = nn.Linear(6, 4)
        self.w = nn.Parameter(torch.randn(4, 6, 5))


def experts_on(shape):
    module = Experts()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    module.w = nn.Parameter(distribute_tensor(module.w.detach(), mesh["ep"], [Shard(0)], src_data_rank=None))
    everyone = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
    fully_shard(module.router, mesh=everyone)
    return fully_shard(module, mesh=mesh["dp"])


def experts(folder):
    expected = whole(dict(Experts().named_parameters()))
    for number, (here, there) in enumerate([((2, 2), (4, 1)), ((1, 4), (2, 2)), ((4, 1), (1, 4))]):
        sherd.save(folder, {"model": experts_on(here)}, step=number)
        other = experts_on(there)
        spoil(other)
        sherd.load(folder, {"model": other}, step=number)
        assert_same({name: each.full_tensor() for name, each in other.named_parameters()}, expected)


def test_experts_on_a_mesh_of_their_own(world, tmp_path):
    world(4).run(experts, str(tmp_path))
    plain = Experts()
    spoil(plain)
    sherd.load(str(tmp_path), {"model": plain})
    assert_same(whole(plain.state_dict()), whole(Experts().state_dict()))


@on_threads(4)
def test_experts_of_one_name_that_differ_between_ranks_are_refused_by_name_and_copies_are_not(tmp_path):
    for shape in ((2, 2), (1, 4)):
        module, mesh = Experts(), init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
        module.scale = nn.Parameter(torch.tensor(float(1 + mesh.get_local_rank("ep"))))
        fully_shard(module, mesh=mesh["dp"])
        said = refusal(CheckpointError, sherd.save, str(tmp_path), {"model": module}, step=1)
        assert f"model/scale is not one tensor: ranks {[0, 1, 2, 3][: shape[1]]} hold other values" in said, said
        del module.scale
        sherd.refresh(module)
        sherd.save(str(tmp_path), {"model": module}, step=1)
        with torch.no_grad():
            module.w.to_local().add_(mesh.get_local_rank("ep"))
        said = refusal(CheckpointError, sherd.save, str(tmp_path), {"model": module}, step=2)
        assert "model/w is not one tensor" in said, said


def stages(folder):
    """Each of two ranks has a stage of its own, sharded over two ranks."""
    torch.manual_seed(5)
    layers = nn.ModuleDict({str(at): nn.Linear(4, 4) for at in range(4)})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    own = [nn.ModuleDict({str(at): fully_shard(layers[str(at)], mesh=mesh["dp"])}) for at in (stage, stage + 2)]
    optimizer = torch.optim.AdamW([p for piece in own for p in piece.parameters()], lr=0.1)
    for piece in own:
        for layer in piece.values():
            layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    sherd.save(folder, {"model": own, "optimizer": optimizer}, step=1)
    before = {name: p.full_tensor() for piece in own for name, p in piece.named_parameters()}
    spoil(*own)
    optimizer.state.clear()
    sherd.load(folder, {"model": own, "optimizer": optimizer})
    for piece in own:
        for name, parameter in piece.named_parameters():
            assert torch.equal(parameter.full_tensor(), before[name])
            assert optimizer.state[parameter]["exp_avg"].full_tensor().abs().sum() > 0
    return {name: each.tolist() for name, each in before.items()}


def test_stages_of_a_pipeline_save_one_model(world, tmp_path):
    found = world(4).run(stages, str(tmp_path))
    model = nn.ModuleDict({str(at): nn.Linear(4, 4) for at in range(4)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    sherd.load(str(tmp_path), {"model": model, "optimizer": optimizer})
    expected = {name: each for of_rank in found for name, each in of_rank.items()}
    assert {name: each.tolist() for name, each in model.named_parameters()} == expected
    assert len(optimizer.state) == 8
    assert optimizer.param_groups[0]["lr"] == 0.1
