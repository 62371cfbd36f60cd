"""Does a flat parameter do over tensor parallelism what it does over data-parallel ranks alone?"""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp as torchs
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from sherd import (
    CPUOffload,
    FlatParameter,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedGradScaler,
    ShardingStrategy,
    StateDictType,
    clip_grad_norm_,
    unsharded,
)
from sherd.wrap import ModuleWrapPolicy
from tests.tensor_parallel.conftest import meshes_know_their_thread  # noqa: F401  a fixture for threads
from tests.tensor_parallel.training import (
    ODD,
    built,
    close,
    mesh_of,
    optimizer_of,
    tokens,
    whole,
    whole_loss_of,
    wholes,
)
from tests.wrapper.test_two_axes import (
    BFLOAT16,
    FULL,
    LOCAL,
    PLAN,
    ROWS,
    SHARDED,
    axes_of,
    moments,
    net_on,
    one_process_in_two_batches,
    size_of,
    step,
    zeroed,
)

FSDP = FullyShardedDataParallel
STEPS = 3


def flat_on(shape, sizes=ODD, change=None, **options):
    return net_on(shape, sizes, change, **{"use_orig_params": False, **options})


def one_process(sizes, num_ranks, norm=None):
    """Losses, norms and parameters of one process with the batches of all data-parallel ranks; clipped if `norm`."""
    net = built(sizes)
    optimizer, losses, norms = optimizer_of(net), [], []
    for number in range(STEPS):
        found = [whole_loss_of(net, tokens(sizes, number, rank)) / num_ranks for rank in range(num_ranks)]
        sum(found).backward()
        losses.append(sum(found).item())
        if norm is not None:
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, wholes(net)


def trained(shape, clip, options):
    model, rank, optimizer = flat_on(shape, **options)
    losses, norms = [], []
    for number in range(STEPS):
        loss = whole_loss_of(model, tokens(ODD, number, rank))
        loss.backward()
        losses.append(loss.item())
        if clip == "wrapper":
            norms.append(model.clip_grad_norm_(0.1).item())
        elif clip is not None:
            clips = clip_grad_norm_ if clip == "sherd" else nn.utils.clip_grad_norm_
            norms.append(whole(clips(model.parameters(), 0.1)).item())
        optimizer.step()
        optimizer.zero_grad()
    leaves = [type(each) for each in model.parameters()]
    return leaves, losses, norms, model.state_dict()


def assert_trains(runs, num_ranks, clip):
    losses, norms, params = one_process(ODD, num_ranks, None if clip is None else 0.1)
    for leaves, _, its_norms, its_params in runs:
        assert leaves == [FlatParameter] * 2, "one for each unit"
        assert its_norms == pytest.approx(norms, rel=1e-4)
        close(its_params, params)
    for number, loss in enumerate(losses):
        assert sum(each[1][number] for each in runs) / len(runs) == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(("shape", "clip"), [((2, 2), "torch"), ((2, 2, 2), "wrapper")], ids=["dp_tp", "copies_dp_tp"])
def test_flat_parameters_over_tensor_parallelism_train_as_in_one_process(threads, shape, clip):
    assert_trains(threads(size_of(shape)).run(trained, shape, clip, {}), size_of(shape[:-1]), clip)


def test_without_shards_both_forms_of_parameters_train_and_are_clipped_as_in_one_process(threads):
    no_shard = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    assert_trains(threads(4).run(trained, (2, 2), "sherd", no_shard), 2, "sherd")
    _, norms, params = one_process(ODD, 2, 0.1)
    for leaves, _, its_norms, its_params in threads(4).run(
        trained, (2, 2), "torch", {**no_shard, "use_orig_params": True}
    ):
        assert FlatParameter not in leaves
        assert its_norms == pytest.approx(norms, rel=1e-4)
        close(its_params, params)


def trained_with_empty_vectors():
    """Of the first layer the second rank of tp has nothing."""
    mesh, data = axes_of((2, 2))
    net, ways = narrow(), {"0": ColwiseParallel(output_layouts=Replicate())}
    model = FSDP(
        parallelize_module(net, mesh["tp"], ways), device_mesh=data, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.full((2, 3), 1.0 + data.get_local_rank())).square().mean().backward()
    norm = model.clip_grad_norm_(0.1).item()
    optimizer.step()
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    return norm, model.state_dict(), moments(state)


def narrow():
    net = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.fill_(0.1 + number)
    return net


def test_a_rank_without_any_element_of_a_flat_parameter_takes_part(world):
    net = narrow()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    (sum(net(torch.full((2, 3), 1.0 + rank)).square().mean() for rank in range(2)) / 2).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1).item()
    optimizer.step()
    names = [name for name, _ in net.named_parameters()]
    state = moments({names[number]: its for number, its in optimizer.state_dict()["state"].items()})
    for its_norm, params, its_state in world(4).run(trained_with_empty_vectors):
        assert its_norm == pytest.approx(norm, rel=1e-5)
        close(params, wholes(net))
        close(its_state, state)


# As torch's FSDP1


class Mixed(nn.Module):
    """Rows, columns, a norm that ranks have copies of, and a layer that no plan names."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down, self.free = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.free(self.down(torch.relu(self.up(self.norm(x)))))


def made(mesh):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return parallelize_module(Mixed(), mesh["tp"], PLAN)


def as_torch_trains(strategy, low):
    """torch's FSDP1 and ours, of one flat parameter; what both give as state dicts, whole."""
    mesh, data = axes_of((2, 2))
    models = [
        torchs.FullyShardedDataParallel(
            made(mesh),
            device_mesh=data,
            sharding_strategy=torchs.ShardingStrategy[strategy],
            device_id=torch.device("cpu"),
            mixed_precision=torchs.MixedPrecision(**low),
        ),
        FSDP(
            made(mesh),
            device_mesh=data,
            sharding_strategy=ShardingStrategy[strategy],
            mixed_precision=MixedPrecision(**low),
        ),
    ]
    found = []
    for model, types in zip(models, (torchs.StateDictType, StateDictType), strict=True):
        assert len(list(model.parameters())) == 1
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), []
        for number in range(STEPS):
            generator = torch.Generator().manual_seed(10 * number + mesh.get_local_rank("dp"))
            loss = model(torch.randn(2, 8, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        states = []
        for kind in (types.FULL_STATE_DICT, types.SHARDED_STATE_DICT):
            with type(model).state_dict_type(model, kind):
                params = model.state_dict()
                state = type(model).optim_state_dict(model, optimizer)["state"]
            states.append(({name: whole(each) for name, each in params.items()}, moments(state)))
        with type(model).summon_full_params(model):
            shown = {name.split("wrapped_module.")[-1]: each for name, each in model.named_parameters()}
            summoned = {name: (whole(each), isinstance(each, DTensor)) for name, each in shown.items()}
        found.append((losses, states, summoned))
    return found


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("strategy", "low"),
    [("FULL_SHARD", {}), ("SHARD_GRAD_OP", BFLOAT16), ("NO_SHARD", {})],
    ids=["float32", "bfloat16", "no shards"],
)
def test_numbers_states_and_summoned_parameters_are_those_of_torchs_fsdp1(world, strategy, low):
    for theirs, ours in world(4).run(as_torch_trains, strategy, low):
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
        for its, expected in zip(ours[1], theirs[1], strict=True):
            close(its[0], expected[0])
            close(its[1], expected[1])
        assert {name: each[1] for name, each in ours[2].items()} == {name: each[1] for name, each in theirs[2].items()}
        close({name: each[0] for name, each in ours[2].items()}, {name: each[0] for name, each in theirs[2].items()})


# What else a wrapper does


def trained_with_choices():
    """Offloaded, from values that only rank 0 of the data-parallel axis has; two batches, of which the first is not
    reduced; scaled."""
    _, data = axes_of((2, 2))

    def change(net):
        if data.get_local_rank() != 0:
            zeroed(net)

    model, rank, optimizer = flat_on((2, 2), ODD, change, cpu_offload=CPUOffload(True), sync_module_states=True)
    scaler, norms = ShardedGradScaler("cpu", init_scale=8.0), []
    for number in range(2):
        with model.no_sync():
            scaler.scale(whole_loss_of(model, tokens(ODD, number, rank)) / 2).backward()
        scaler.scale(whole_loss_of(model, tokens(ODD, number + 2, rank)) / 2).backward()
        scaler.unscale_(optimizer)
        norms.append(model.clip_grad_norm_(0.1).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    before = model.state_dict()
    # An overflow on one rank alone is one for all.
    scaler.scale(whole_loss_of(model, tokens(ODD, 5, rank))).backward()
    if dist.get_rank() == 3:
        next(model.parameters()).grad.to_local().fill_(torch.inf)
    scaler.step(optimizer)
    close(model.state_dict(), before, " after a step that was skipped")
    return norms, before


def test_offload_synchronized_values_no_sync_and_scaling_hold_for_flat_parameters_over_both_axes(world):
    norms, params = one_process_in_two_batches()
    for its_norms, its_params in world(4).run(trained_with_choices):
        assert its_norms == pytest.approx(norms, rel=1e-4)
        close(its_params, params)


def saved_in_every_kind():
    """Each kind of a model, loaded into another one of zeros, flat or not; the optimizer's state likewise."""
    model, rank, optimizer = flat_on((2, 2))
    step(model, rank, optimizer)
    expected = model.state_dict()
    kinds = {"full": (FULL, None), "runs": (SHARDED, None), "rows": (SHARDED, ROWS), "local": (LOCAL, None)}
    for is_flat in (True, False):
        other, _, its = net_on((2, 2), use_orig_params=not is_flat)
        for kind, (state_dict_type, config) in kinds.items():
            if kind == "local" and not is_flat:
                continue
            with FSDP.summon_full_params(other):
                zeroed(other)
            with FSDP.state_dict_type(model, state_dict_type, config), FSDP.state_dict_type(other, state_dict_type):
                other.load_state_dict(model.state_dict())
            close(other.state_dict(), expected, f" as {kind}")
        for kind in (FULL, SHARDED):
            with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
                state = FSDP.optim_state_dict(model, optimizer)
                its.load_state_dict(FSDP.optim_state_dict_to_load(other, its, state))
                loaded = FSDP.optim_state_dict(other, its)
            close(moments(loaded["state"]), moments(state["state"]), f" as {kind.name}")
    with unsharded(model):
        shown = {name: isinstance(each, DTensor) for name, each in model.named_parameters()}
        zeroed(model)
    assert not any(each.any() for each in model.state_dict().values()), "what was changed is written back"
    return expected, moments(state["state"]), shown


def of_one_process():
    net = built(ODD)
    optimizer = optimizer_of(net)
    for rank in range(2):
        (whole_loss_of(net, tokens(ODD, 0, rank)) / 2).backward()
    optimizer.step()
    names = [name for name, _ in net.named_parameters()]
    return wholes(net), moments({names[number]: its for number, its in optimizer.state_dict()["state"].items()})


def test_flat_parameters_over_both_axes_are_saved_and_loaded_in_every_kind(world):
    params, state = of_one_process()
    for its_params, its_state, shown in world(4).run(saved_in_every_kind):
        close(its_params, params)
        close(its_state, state)
        assert all(shown.values()), "tensor parallel still"


def through_files(folder):
    """The parameters by name, and as the vectors they are, with the optimizer's state; into other vectors."""
    model, rank, optimizer = flat_on((2, 2))
    step(model, rank, optimizer)
    other, _, its = flat_on((2, 2))
    step(other, rank, its)
    expected = model.state_dict(), moments(FSDP.optim_state_dict(model, optimizer)["state"])
    for kind in (SHARDED, LOCAL):
        FSDP.set_state_dict_type(model, kind)
        FSDP.set_state_dict_type(other, kind)
        dcp.save(
            {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)},
            checkpoint_id=folder / kind.name,
        )
        with FSDP.summon_full_params(other):
            zeroed(other)
        state = {"model": other.state_dict(), "optimizer": FSDP.optim_state_dict(other, its)}
        dcp.load(state, checkpoint_id=folder / kind.name)
        other.load_state_dict(state["model"])
        its.load_state_dict(FSDP.optim_state_dict_to_load(other, its, state["optimizer"]))
        FSDP.set_state_dict_type(other, FULL)
        close(other.state_dict(), expected[0], f" as {kind.name}")
        close(moments(FSDP.optim_state_dict(other, its)["state"]), expected[1], f" as {kind.name}")
    flat = next(model.parameters())
    vector = flat.detach().full_tensor()
    assert vector.shape == flat.shape, "the vectors of all ranks"
    assert torch.equal(flat.detach().redistribute(placements=[Replicate()] * 2).to_local(), vector)
    file = io.BytesIO()
    torch.save(flat, file)
    file.seek(0)
    for again in (copy.deepcopy(flat), torch.load(file)):
        assert type(again) is FlatParameter
        assert torch.equal(again.detach().full_tensor(), vector)
    from_torchs_functions(model, optimizer, other, its)
    close(other.state_dict(), expected[0], " from rank 0")
    close(moments(FSDP.optim_state_dict(other, its)["state"]), expected[1], " from rank 0")
    return expected, vector


def from_torchs_functions(model, optimizer, other, its):
    """Of torch's checkpointing: everything whole, of which the others have nothing until it is sent."""
    FSDP.set_state_dict_type(model, FULL)
    states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    with FSDP.summon_full_params(other):
        zeroed(other)
    params, state = states if dist.get_rank() == 0 else ({}, {})
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, params, options=options)
    set_optimizer_state_dict(other, its, state, options=options)


def test_files_take_flat_parameters_over_both_axes_by_name_and_as_vectors(world, tmp_path):
    params, state = of_one_process()
    runs = world(4).run(through_files, tmp_path)
    for (its_params, its_state), vector in runs:
        close(its_params, params)
        close(its_state, state)
        assert torch.equal(vector, runs[0][1])


# Several axes beside


class Experts(nn.Module):
    """A matrix of which each rank of `ep` has some rows, one that is cut over `tp`, and one that no axis cuts."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, rows in (("experts", 5), ("parallel", 3), ("free", 2), ("both", 7)):
            setattr(self, name, nn.Parameter(torch.randn(rows, 3, generator=generator)))

    def forward(self, x):
        """This rank's part of a sum over all elements."""
        parts = (each.to_local() if isinstance(each, DTensor) else each for each in self.parameters_used())
        return sum((part * x).square().sum() for part in parts)

    def parameters_used(self):
        return self.experts, self.parallel, self.free, self.both


def over_three_axes():
    mesh = mesh_of((2, 2, 2), "dp", "ep", "tp")
    net = Experts()
    for name, axes, placements in (
        ("experts", "ep", [Shard(0)]),
        ("parallel", "tp", [Shard(0)]),
        ("both", ("ep", "tp"), [Shard(0), Shard(1)]),
    ):
        laid = distribute_tensor(getattr(net, name).detach(), mesh[axes], placements, src_data_rank=None)
        setattr(net, name, nn.Parameter(laid))
    model = FSDP(net, device_mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.tensor(1.0 + mesh.get_local_rank("dp"))).backward()
    norms = [whole(nn.utils.get_total_norm([each.grad for each in model.parameters()])).item()]
    norms.append(model.clip_grad_norm_(1.0).item())
    optimizer.step()
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    return norms, model.state_dict(), moments(state)


def test_a_flat_parameter_of_members_on_different_axes_is_stepped_and_saved_as_in_one_process(threads):
    net = Experts()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    (sum(net(torch.tensor(1.0 + rank)) for rank in range(2)) / 2).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0).item()
    optimizer.step()
    names = [name for name, _ in net.named_parameters()]
    state = moments({names[number]: its for number, its in optimizer.state_dict()["state"].items()})
    for norms, params, its_state in threads(8).run(over_three_axes):
        assert norms == pytest.approx([norm, norm], rel=1e-5)
        close(params, wholes(net))
        close(its_state, state)
