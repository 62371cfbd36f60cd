"""Muon steps matrices that tensor parallelism cuts, too, as one process does; or the part of each rank by itself."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import sherd
from sherd import Muon
from sherd.errors import OptimizerError, PolicyError
from tests.support import checkpoints
from tests.support.comparing import assert_same
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import one_line
from tests.tensor_parallel.test_checkpoints import made
from tests.tensor_parallel.training import EVEN, ODD, Springs, built, mesh_of, sharded, step, tensor_parallel, wholes

EXACT = {"lr": 0.02, "ns_dtype": torch.float32}
SHAPES = {
    "rows": (7, 5),
    "rows_few": (1, 6),
    "rows_experts": (3, 4, 5),
    "columns": (5, 7),
    "columns_experts": (3, 5, 4),
    "columns_kernel": (4, 3, 2, 2),
    "all": (6, 4),
    "all_vector": (5,),
}
"""Rows and columns that no number of ranks divides, a row that only one has, experts that are cut and that are not."""


def on_dim_1(parameter):
    return Shard(1) if parameter.ndim > 1 else None


PLACED = {
    "shard": {},
    "columns": {"shard_placement_fn": on_dim_1},
    "flat": {"placement": sherd.Flat()},
    "blocks": {"placement": sherd.Blocks(2)},
    "owned": {"placement": sherd.Owned()},
}


def pulled(model: nn.Module, samples: list[int], optimizer: torch.optim.Optimizer, steps: int = 20) -> nn.Module:
    for number in range(steps):
        for sample in samples:
            (model(sample - number) / len(samples)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def close(model: nn.Module, plain: nn.Module) -> None:
    assert_same(wholes(model), wholes(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize(
    ("num_ranks", "shape", "names"),
    [(4, (2, 2), ("dp", "tp")), (6, (2, 3), ("dp", "tp")), (8, (2, 2, 2), ("replicate", "shard", "tp"))],
)
@on_threads()
def test_matrices_that_tensor_parallelism_cuts_are_stepped_as_in_one_process(shape, names, placed):
    mesh = mesh_of(shape, *names)
    data = mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]
    plain = Springs(SHAPES)
    pulled(plain, list(range(data.size())), Muon(plain, **EXACT))
    model = sharded(Springs(SHAPES).on(mesh["tp"]), units=None, mesh=data, **PLACED[placed])
    optimizer = Muon(model, **EXACT)
    assert repr(optimizer) == repr(optimizer)
    pulled(model, [dist.get_rank() // shape[-1]], optimizer)
    close(model, plain)
    for parameter in model.parameters():
        momentum = optimizer.state[parameter].get("momentum_buffer", parameter)
        assert isinstance(momentum, DTensor)
        assert momentum.placements == parameter.placements


def part_of(name: str, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Returns this rank's part, of two."""
    return tensor.chunk(2, 0 if name == "rows" else 1)[mesh.get_local_rank("tp")]


@on_processes(
    4, placements=["hfsdp", "hsdp_zero2", "zero1"]
)  # full tensors of uneven parts, of which threads know less
def test_replicas_that_own_pieces_of_parts_put_them_together(placements):
    mesh = mesh_of((2, 1, 2), "replicate", "shard", "tp")
    data = mesh["replicate", "shard"] if placements.startswith("h") else mesh["replicate"]
    plain = Springs(SHAPES)
    pulled(plain, [0, 1], Muon(plain, **EXACT), 3)
    model = sharded(Springs(SHAPES).on(mesh["tp"]), mesh=data, placements=placements)
    pulled(model, [dist.get_rank() // 2], Muon(model, **EXACT), 3)
    close(model, plain)


@on_threads(4)
def test_axes_by_name_and_the_wrapper_put_parts_together_too():
    mesh = mesh_of((2, 2), "dp", "tp")
    plain = Springs(SHAPES)
    pulled(plain, [0, 1], Muon(plain, **EXACT), 3)
    on_both = sharded(Springs(SHAPES).on(mesh), mesh=mesh, dp_mesh_dims=sherd.DataParallelMeshDims(shard="dp"))
    wrapped = sharded(Springs(SHAPES).on(mesh["tp"]), "wrapper", device_mesh=mesh["dp"])
    for model in (on_both, wrapped):
        pulled(model, [dist.get_rank() // 2], Muon(model, **EXACT), 3)
        close(model, plain)


@on_threads(4)
def test_a_gradient_that_is_not_finite_raises_on_all_ranks_of_both_axes():
    mesh = mesh_of((2, 2), "dp", "tp")
    model = sharded(Springs({"rows": (7, 5)}).on(mesh["tp"]), mesh=mesh["dp"])
    optimizer = Muon(model, **EXACT)
    model(dist.get_rank() // 2).backward()
    if dist.get_rank() == 3:
        model.rows.grad.to_local().fill_(float("inf"))
    before = wholes(model)
    assert one_line(OptimizerError, optimizer.step).startswith("the update of rows, computed on rank ")
    assert_same(wholes(model), before)


def continued(shape, folder, number):
    """Load what is in `folder`, take a step, save; the parameters after it."""
    net, ranks = made(shape)
    optimizer = Muon(net, **EXACT)
    if number == 0:
        net.load_state_dict(built(ODD).state_dict())
    else:
        checkpoints.load(net, optimizer, f"{folder}/{number}")
    step(net, optimizer, ODD, *((number, rank) for rank in ranks))
    checkpoints.save(net, optimizer, f"{folder}/{number + 1}")
    return wholes(net)


def test_training_goes_on_from_mesh_to_mesh_to_one_process_and_back(world, tmp_path):
    plain, shapes = built(ODD), [(2, 2), (1, 4), None, (2, 2)]
    optimizer = Muon(plain, **EXACT)
    for number, shape in enumerate(shapes):
        step(plain, optimizer, ODD, (number, 0), (number, 1))
        for after in world(4 if shape else 1).run(continued, shape, str(tmp_path), number):
            assert_same(after, wholes(plain), f" after a step on {shape}", rtol=1e-3, atol=1e-4)


@on_threads(4)
def test_blockwise_takes_each_part_for_a_matrix():
    mesh = mesh_of((2, 2), "dp", "tp")
    shapes = {name: SHAPES[name] for name in ("rows", "columns")}
    model = sharded(Springs(shapes).on(mesh["tp"]), mesh=mesh["dp"])
    parts = nn.ParameterList()
    for name, each in Springs(shapes).named_parameters():
        parts.append(nn.Parameter(part_of(name, each.detach(), mesh).clone()))
    expected = Muon(parts, **EXACT)
    for number in range(3):
        for part in parts:
            part.grad = 2 * part.detach() - (0.5 - number)
        expected.step()
    pulled(model, [dist.get_rank() // 2], Muon(model, tensor_parallel="blockwise", **EXACT), 3)
    for name, part in zip(shapes, parts, strict=True):
        mine = part_of(name, wholes(model)[name], mesh)
        torch.testing.assert_close(mine, part.detach(), rtol=1e-5, atol=1e-6)


@on_processes(4)  # the counter knows no threads
def test_heads_that_parts_hold_whole_do_not_travel_between_them():
    mesh = mesh_of((2, 2), "dp", "tp")
    plain = Springs({"rows": (8, 3)})
    pulled(plain, [0, 1], Muon(plain, heads={"rows": 4}, **EXACT), 3)
    model = sharded(Springs({"rows": (8, 3)}).on(mesh["tp"]), mesh=mesh["dp"], placement=sherd.Owned())
    optimizer = Muon(model, heads={"rows": 4}, **EXACT)
    pulled(model, [dist.get_rank() // 2], optimizer, 2)
    (model(dist.get_rank() // 2 - 2)).backward()
    with CommDebugMode() as counted:
        optimizer.step()
    assert counted.get_total_counts() == 0
    close(model, plain)


@on_threads(4)
def test_heads_that_parts_cut_are_put_together():
    mesh = mesh_of((2, 2), "dp", "tp")
    plain = Springs({"rows": (9, 4)})
    pulled(plain, [0, 1], Muon(plain, heads={"rows": 3}, **EXACT), 3)
    model = sharded(Springs({"rows": (9, 4)}).on(mesh["tp"]), mesh=mesh["dp"])
    pulled(model, [dist.get_rank() // 2], Muon(model, heads={"rows": 3}, **EXACT), 3)
    close(model, plain)


@pytest.mark.parametrize("sizes", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("kind", [Muon, torch.optim.Muon])
@on_threads(4)
def test_a_parallelized_model_trains_as_in_one_process(sizes, kind):
    mesh = mesh_of((2, 2), "dp", "tp")
    plain, model = built(sizes), tensor_parallel(built(sizes), mesh["tp"])
    sharded(model, mesh=mesh["dp"])
    given = []
    for net in (plain, model):
        if kind is Muon:
            given.append(Muon(net, **EXACT))
        else:
            given.append(kind([each for each in net.parameters() if each.ndim == 2], lr=0.02))
    for number in range(3):
        step(plain, given[0], sizes, (number, 0), (number, 1))
        step(model, given[1], sizes, (number, mesh.get_local_rank("dp")))
    tolerance = 1e-4 if kind is Muon else 2e-3  # torch's Muon multiplies in bfloat16
    assert_same(wholes(model), wholes(plain), rtol=tolerance, atol=tolerance)


@on_threads(4)
def test_what_cannot_be_put_together_is_named():
    mesh = mesh_of((2, 2), "dp", "tp")
    model = nn.Module()
    model.kernel = nn.Parameter(distribute_tensor(torch.ones(4, 2, 4), mesh["tp"], [Shard(2)]))
    model.wide = nn.Parameter(distribute_tensor(torch.ones(4, 2, 4, 2), mesh["tp"], [Shard(2)]))
    sherd.fully_shard(model, mesh=mesh["dp"])
    assert "wide is cut over tensor parallelism by" in one_line(OptimizerError, Muon, model)
    Muon([model.kernel])
    Muon(model, tensor_parallel="blockwise")
    assert "kernel: tensor_parallel='blockwise' takes parts of different ranks for matrices" in one_line(
        OptimizerError, Muon, [("kernel", model.kernel)], tensor_parallel="blockwise", beta2=0.9
    )
    assert "Muon(tensor_parallel='half'): expected 'whole' or 'blockwise'" in one_line(
        PolicyError, Muon, [model.kernel], tensor_parallel="half"
    )


def counted(matrices: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the root of the average of squares, and of how often it was called, in another tensor."""
    state["steps"] += 1
    state["left"].lerp_(matrices @ matrices.mT, 0.1)
    return matrices / (state["left"].diagonal(dim1=1, dim2=2).sum(1) + state["steps"]).sqrt()[:, None, None]


def kept(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {"left": (rows, rows), "steps": ()}


def keeping(model: nn.Module) -> sherd.MatrixOptimizer:
    named = {name: each for name, each in model.named_parameters() if each.ndim > 1}
    heads = [named.pop(name) for name in ("rows_heads", "rows_pairs")]
    return sherd.MatrixOptimizer(
        [{"params": heads, "rows": 3}, {"params": named.values()}], counted, state=kept, lr=0.3
    )


KEEPING = {
    "rows": (7, 3),
    "rows_few": (1, 4),
    "rows_experts": (3, 4, 2),
    "columns": (3, 7),
    "columns_experts": (3, 2, 4),
    "columns_kernel": (4, 3, 2, 1),
    "all": (5, 4),
    "rows_heads": (15, 2),
    "rows_pairs": (12, 2),
    "rows_expert": (1, 4, 3),
}
"""Heads that parts cut and heads that they do not cut, and an expert that one part has. No shape is in `SHAPES`: torch
caches how a DTensor is gathered by its spec and the thread's number, which was another rank's in another test."""


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize(
    ("num_ranks", "shape", "names"),
    [(4, (2, 2), ("dp", "tp")), (6, (2, 3), ("dp", "tp")), (8, (2, 2, 2), ("replicate", "shard", "tp"))],
)
@on_threads()
def test_what_a_function_keeps_of_matrices_is_divided_over_both_parallelisms(shape, names, placed, tmp_path):
    mesh = mesh_of(shape, *names)
    data = mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]
    plain = Springs(KEEPING)
    by_plain = keeping(plain)
    pulled(plain, list(range(data.size())), by_plain, 4)
    models = [sharded(Springs(KEEPING).on(mesh["tp"]), units=None, mesh=data, **PLACED[placed]) for _ in range(2)]
    first, second = map(keeping, models)
    pulled(models[0], [dist.get_rank() // shape[-1]], first, 4)
    close(models[0], plain)
    for (name, parameter), of_plain in zip(models[0].named_parameters(), plain.parameters(), strict=True):
        for key, value in by_plain.state[of_plain].items():
            found = first.state[parameter][key]
            assert isinstance(found, DTensor), name
            torch.testing.assert_close(found.full_tensor(), value, rtol=1e-5, atol=1e-6)
    sherd.save(tmp_path / "checkpoint", {"model": models[0], "optimizer": first}, step=4)
    sherd.load(tmp_path / "checkpoint", {"model": models[1], "optimizer": second})
    for model, optimizer in zip(models, (first, second), strict=True):
        pulled(model, [dist.get_rank() // shape[-1]], optimizer, 2)
    close(models[1], models[0])


@on_threads(4)
def test_matrices_in_flat_parameters_over_tensor_parallel_ranks_are_stepped_as_in_one_process():
    mesh, plain = mesh_of((2, 2), "dp", "tp"), Springs(SHAPES)
    pulled(plain, [0, 1], Muon(plain, **EXACT), 5)
    model = Springs(SHAPES).on(mesh["tp"])
    model = sharded(model, "flat wrapper", [model], device_mesh=mesh["dp"])
    pulled(model, [dist.get_rank() // 2], Muon(model, **EXACT), 5)
    with sherd.unsharded(model, writeback=False):
        close(model, plain)
