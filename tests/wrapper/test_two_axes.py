"""The wrapper does for tensor-parallel parameters what it does for others, over one and two axes of its own."""

import copy
import functools
import io
from collections import OrderedDict

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
from torch.distributed.tensor.parallel import parallelize_module

import sherd
from sherd import (
    CPUOffload,
    FlatParameter,
    FullStateDictConfig,
    ShardedGradScaler,
    ShardingStrategy,
    clip_grad_norm_,
    unsharded,
)
from sherd import FullyShardedDataParallel as FSDP
from sherd.wrap import ModuleWrapPolicy
from tests.support.comparing import plain_name, whole
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.training import made
from tests.tensor_parallel.conftest import meshes_know_their_thread  # noqa: F401  a fixture for threads
from tests.tensor_parallel.training import (
    EVEN,
    ODD,
    assert_same,
    built,
    close,
    mesh_of,
    optimizer_of,
    plain,
    tensor_parallel,
    tokens,
    train,
    whole_loss_of,
)
from tests.wrapper.two_axes import (
    FULL,
    LOCAL,
    PLAN,
    ROWS,
    SHARDED,
    WHOLE_AFTER,
    axes_of,
    both_of,
    clip_and_step,
    load,
    moments,
    net_on,
    one_process,
    size_of,
    state_of,
    step,
    wholes,
    zeroed,
)

# Training


def trained(shape):
    model, rank, _ = net_on(shape)
    return train(model, ODD, [rank])


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 2)], ids=["dp_tp", "copies_dp_tp"])
def test_a_tensor_parallel_model_trains_as_in_one_process(threads, shape):
    assert_same(threads(size_of(shape)).run(trained, shape), plain(ODD, size_of(shape[:-1])))


def trained_with_choices(orig):
    """Offloaded, from values that only rank 0 of the data-parallel axis has; two batches, of which the first is not
    reduced; scaled."""
    _, data = axes_of((2, 2))

    def change(net):
        if data.get_local_rank() != 0:
            zeroed(net)

    options = {"use_orig_params": orig, "cpu_offload": CPUOffload(True), "sync_module_states": True}
    model, rank, optimizer = net_on((2, 2), ODD, change, **options)
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
        for each in model.parameters():
            each.grad.to_local().fill_(torch.inf)
    scaler.step(optimizer)
    close(model.state_dict(), before, " after a step that was skipped")
    return norms, before


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_offload_synchronized_values_no_sync_scaling_and_clipping_hold_over_both_axes(world, threads, orig):
    net, norms = built(ODD), []
    optimizer = optimizer_of(net)
    for number in range(2):
        for rank in (0, 1):
            for at in (number, number + 2):
                (whole_loss_of(net, tokens(ODD, at, rank)) / 4).backward()
        norms.append(clip_and_step(net.parameters(), optimizer, 0.1))
    ranks = threads if orig else world  # see saved_in_every_kind
    for its_norms, its_params in ranks(4).run(trained_with_choices, orig):
        assert its_norms == pytest.approx(norms, rel=1e-4)
        close(its_params, wholes(net))


@on_threads(4)
def test_what_is_ignored_stays_tensor_parallel_and_nobodys_shard():
    mesh, data = axes_of((2, 2))
    plainly, net = built(EVEN), built(EVEN)
    tensor_parallel(net, mesh["tp"])
    head = net.head.weight
    model = FSDP(net, device_mesh=data, use_orig_params=True, ignored_modules=[net.head])
    for each in (plainly, model):
        whole_loss_of(each, tokens(EVEN, 0, 0)).backward()
    assert net.head.weight is head, "the same Parameter"
    assert tuple(map(str, head.placements)) == ("S(0)",)
    torch.testing.assert_close(whole(head.grad), plainly.head.weight.grad)


def mixed():
    """Rows, columns, a norm that ranks have copies of, and a layer that no plan names."""
    ends = {"norm": nn.LayerNorm(8), "up": nn.Linear(8, 16)}
    return nn.Sequential(OrderedDict(**ends, relu=nn.ReLU(), down=nn.Linear(16, 8), free=nn.Linear(8, 8)))


def as_torch_trains(orig, strategy, low):
    """torch's FSDP1 and ours; the losses, the summoned parameters, and both kinds of state dicts, whole.

    Not the latter with original parameters: torch's own on CPU gathers each key over the one before it.
    """
    mesh, data = axes_of((2, 2))
    found = []
    for api, more in ((torchs, {"device_id": torch.device("cpu")}), (sherd, {})):
        model = api.FullyShardedDataParallel(
            parallelize_module(made(mixed), mesh["tp"], PLAN),
            device_mesh=data,
            sharding_strategy=api.ShardingStrategy[strategy],
            mixed_precision=api.MixedPrecision(**low),
            use_orig_params=orig,
            **more,
        )
        assert orig or len(list(model.parameters())) == 1
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), []
        for number in range(3):
            generator = torch.Generator().manual_seed(10 * number + mesh.get_local_rank("dp"))
            loss = model(torch.randn(2, 8, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        states = []
        for kind in () if orig else (api.StateDictType.FULL_STATE_DICT, api.StateDictType.SHARDED_STATE_DICT):
            with type(model).state_dict_type(model, kind):
                states.append(whole(model.state_dict()))
                states.append(moments(type(model).optim_state_dict(model, optimizer)["state"]))
        with type(model).summon_full_params(model):
            shown = {plain_name(name): each for name, each in model.named_parameters()}
            placements = {name: getattr(each, "placements", None) for name, each in shown.items()}
            found.append((losses, placements, [whole(shown), *states]))
    return found


BFLOAT16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("orig", "strategy", "low"),
    [
        (True, "FULL_SHARD", {}),
        (True, "FULL_SHARD", BFLOAT16),
        (False, "FULL_SHARD", {}),
        (False, "SHARD_GRAD_OP", BFLOAT16),
        (False, "NO_SHARD", {}),
    ],
    ids=["orig", "orig bfloat16", "flat", "flat bfloat16", "flat no shards"],
)
def test_numbers_states_and_summoned_parameters_are_those_of_torchs_fsdp1(world, orig, strategy, low):
    for theirs, ours in world(4).run(as_torch_trains, orig, strategy, low):
        rtol, atol = (1e-6, 1e-7) if orig else (1e-5, 1e-6)
        torch.testing.assert_close(ours[0], theirs[0], rtol=rtol, atol=atol)
        assert ours[1] == theirs[1]
        for its, expected in zip(ours[2], theirs[2], strict=True):
            close(its, expected)


# State dicts


def saved_in_every_kind(shape, orig, into_orig):
    """Each kind of a model, loaded into another one of zeros, flat or not; the optimizer's state likewise.

    With flat parameters on processes: what DTensor remembers of one thread's mesh would be taken for another's.
    """
    model, rank, optimizer = net_on(shape, use_orig_params=orig)
    step(model, rank, optimizer)
    expected, found, states = model.state_dict(), {}, []
    kinds = {"full": (FULL, None), "runs": (SHARDED, None), "rows": (SHARDED, ROWS), "local": (LOCAL, None)}
    other, _, its = net_on(shape, use_orig_params=into_orig)
    for kind, (state_dict_type, config) in kinds.items():
        if kind == "local" and into_orig != orig:
            continue
        with FSDP.summon_full_params(other):
            zeroed(other)
        with FSDP.state_dict_type(model, state_dict_type, config), FSDP.state_dict_type(other, state_dict_type):
            found[kind] = model.state_dict()
            other.load_state_dict(found[kind])
        close(other.state_dict(), expected, f" as {kind}")
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
            state = FSDP.optim_state_dict(model, optimizer)
            its.load_state_dict(FSDP.optim_state_dict_to_load(other, its, state))
            loaded = FSDP.optim_state_dict(other, its)
        close(moments(loaded["state"]), moments(state["state"]), f" as {kind.name}")
        states.append(moments(state["state"]))
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        of_first = model.state_dict()
    close(*states)
    with unsharded(model):
        assert all(isinstance(each, DTensor) for each in model.parameters()), "tensor parallel still"
        shown = {name: each.placements for name, each in model.named_parameters()}
        zeroed(model)
    assert not any(each.any() for each in model.state_dict().values()), "what was changed is written back"
    assert {type(each) for each in found["rows"].values()} == {DTensor}, "torch's own"
    layouts = {
        kind: {name: tuple(map(str, getattr(each, "placements", ()))) for name, each in its.items()}
        for kind, its in found.items()
    }
    return expected, of_first, layouts, states[0], shown


@pytest.mark.parametrize(
    ("shape", "orig", "into_orig"),
    [
        ((2, 2), True, True),
        ((2, 2, 2), True, True),
        ((2, 2), True, False),
        ((2, 2), False, True),
        ((2, 2), False, False),
    ],
    ids=["orig", "orig with copies", "orig into flat", "flat into orig", "flat"],
)
def test_every_kind_of_state_dict_is_saved_and_loaded(world, threads, shape, orig, into_orig):
    params, state = one_process(size_of(shape[:-1]))
    ranks = threads if orig and into_orig else world
    runs = ranks(size_of(shape)).run(saved_in_every_kind, shape, orig, into_orig)
    for number, (its_params, of_first, layouts, its_state, shown) in enumerate(runs):
        close(its_params, params)
        close(its_state, state)
        close(of_first, params if number // shape[-1] % shape[-2] == 0 else {})
        copies = ("R",) * (len(shape) - 2)
        assert not any(layouts["full"].values()), "plain tensors"
        # The head has 23 rows: 12 and 11 on tp, which read from the left only if tp is there.
        assert layouts["rows"]["norm.weight"] == (*copies, "S(0)", "R")
        assert layouts["rows"]["blocks.0.mlp.down.weight"] == (*copies, "S(0)", "S(1)")
        ragged = [*layouts["runs"].values(), *layouts.get("local", {}).values()]
        assert all("RaggedShard" in str(each) for each in ragged)
        assert shown["blocks.0.mlp.down.weight"] == (Shard(1),)
        assert shown["norm.weight"] == (Replicate(),)


TARGETS = {
    "dp4": (True, (4,), True, SHARDED),
    "one flat": (True, (4,), False, SHARDED),
    "dp2_tp2": (True, (2, 2), True, SHARDED),
    "flat to flat": (False, (2, 2), False, SHARDED),
    "vectors": (False, (2, 2), False, LOCAL),
}
"""Whether it comes from original parameters, the shape it goes to, whether to original ones, and in which kind."""


def moved_to_other_shapes(folder, target):
    """From (dp, tp), as files and full; or full into a plain model."""
    from_orig, shape, orig, kind = TARGETS.get(target, (True, None, None, None))
    model, rank, optimizer = net_on((2, 2), use_orig_params=from_orig)
    step(model, rank, optimizer)
    full = both_of(model, optimizer)
    if target == "plain":
        net = built(ODD)
        its = optimizer_of(net)
        load(net, its, full["model"], full["optimizer"])
        return [(wholes(net), moments(FSDP.optim_state_dict(net, its)["state"]))]
    other, _, its = net_on(shape, use_orig_params=orig)
    zeroed(other)
    for each in (model, other):
        FSDP.set_state_dict_type(each, kind)
    dcp.save(both_of(model, optimizer), checkpoint_id=folder)
    step(other, 0, its)  # so that there is state to be loaded into
    state = both_of(other, its)
    dcp.load(state, checkpoint_id=folder)
    found = []
    for given, given_kind in ((state, kind), (full, FULL)):
        if given is full:  # what came from the file is in the model's own memory
            zeroed(other)
        FSDP.set_state_dict_type(other, given_kind)
        load(other, its, given["model"], given["optimizer"])
        FSDP.set_state_dict_type(other, FULL)
        found.append((other.state_dict(), moments(FSDP.optim_state_dict(other, its)["state"])))
    return found


@pytest.mark.parametrize("target", [*TARGETS, "plain"])
def test_a_checkpoint_goes_to_another_mesh_to_flat_parameters_and_to_a_plain_model(world, tmp_path, target):
    params, state = one_process(2)
    for ways in world(4).run(moved_to_other_shapes, tmp_path, target):
        for its_params, its_state in ways:
            close(its_params, params)
            close(its_state, state)


# Flat parameters

STEPS = 3
flat_on = functools.partial(net_on, use_orig_params=False)


def stepped_plainly(num_ranks):
    """Losses, norms and parameters of one process with the batches of all data-parallel ranks, clipped."""
    net = built(ODD)
    optimizer, losses, norms = optimizer_of(net), [], []
    for number in range(STEPS):
        loss = sum(whole_loss_of(net, tokens(ODD, number, rank)) for rank in range(num_ranks)) / num_ranks
        loss.backward()
        losses.append(loss.item())
        norms.append(clip_and_step(net.parameters(), optimizer, 0.1))
    return losses, norms, wholes(net)


def clipped(shape, clip, options):
    model, rank, optimizer = net_on(shape, **options)
    losses, norms = [], []
    for number in range(STEPS):
        loss = whole_loss_of(model, tokens(ODD, number, rank))
        loss.backward()
        losses.append(loss.item())
        norms.append(whole(clip(model)).item())
        optimizer.step()
        optimizer.zero_grad()
    return [type(each) for each in model.parameters()], losses, norms, model.state_dict()


CLIPS = {
    "torch": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "wrapper": lambda model: model.clip_grad_norm_(0.1),
    "sherd": lambda model: clip_grad_norm_(model.parameters(), 0.1),
}
NO_SHARD = {"sharding_strategy": ShardingStrategy.NO_SHARD}


@pytest.mark.parametrize(
    ("shape", "clip", "options"),
    [
        ((2, 2), "torch", {"use_orig_params": False}),
        ((2, 2, 2), "wrapper", {"use_orig_params": False}),
        ((2, 2), "sherd", {"use_orig_params": False, **NO_SHARD}),
        ((2, 2), "torch", {"use_orig_params": True, **NO_SHARD}),
    ],
    ids=["dp_tp", "copies_dp_tp", "no shards", "no shards, orig"],
)
def test_parameters_over_tensor_parallelism_train_and_are_clipped_as_in_one_process(threads, shape, clip, options):
    losses, norms, params = stepped_plainly(size_of(shape[:-1]))
    runs = threads(size_of(shape)).run(clipped, shape, CLIPS[clip], options)
    for leaves, _, its_norms, its_params in runs:
        # One vector for each unit.
        assert FlatParameter not in leaves if options["use_orig_params"] else leaves == [FlatParameter] * 2
        assert its_norms == pytest.approx(norms, rel=1e-4)
        close(its_params, params)
    for number, loss in enumerate(losses):
        assert sum(each[1][number] for each in runs) / len(runs) == pytest.approx(loss, abs=1e-5)


@on_processes(4)
def test_a_rank_without_any_element_of_a_flat_parameter_takes_part():
    """Of the first layer the second rank of tp has nothing."""
    mesh, data = axes_of((2, 2))
    net = parallelize_module(narrow(), mesh["tp"], {"0": WHOLE_AFTER})
    model = FSDP(net, device_mesh=data, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.full((2, 3), 1.0 + data.get_local_rank())).square().mean().backward()
    norm = model.clip_grad_norm_(0.1).item()
    optimizer.step()
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    net = narrow()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    (sum(net(torch.full((2, 3), 1.0 + rank)).square().mean() for rank in range(2)) / 2).backward()
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(net.parameters(), 0.1).item(), rel=1e-5)
    optimizer.step()
    params, expected = state_of(net, optimizer)
    close(model.state_dict(), params)
    close(moments(state), expected)


def narrow():
    net = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.fill_(0.1 + number)
    return net


def copied_in_memory():
    """As the vectors they are, and whole by torch's functions."""
    model, rank, optimizer = flat_on((2, 2))
    step(model, rank, optimizer)
    other, _, its = flat_on((2, 2))
    step(other, rank, its)
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
    return other.state_dict(), moments(FSDP.optim_state_dict(other, its)["state"]), vector


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


@pytest.mark.filterwarnings("ignore:a sharded tensor is pickled")
def test_flat_parameters_over_both_axes_are_copied_as_vectors_and_by_name(world):
    params, state = one_process(2)
    runs = world(4).run(copied_in_memory)
    for its_params, its_state, vector in runs:
        close(its_params, params)
        close(its_state, state)
        assert torch.equal(vector, runs[0][2])


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


@on_threads(8)
def test_a_flat_parameter_of_members_on_different_axes_is_stepped_and_saved_as_in_one_process():
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
    net = Experts()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    (sum(net(torch.tensor(1.0 + rank)) for rank in range(2)) / 2).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0).item()
    optimizer.step()
    assert norms == pytest.approx([norm, norm], rel=1e-5)
    params, expected = state_of(net, optimizer)
    close(model.state_dict(), params)
    close(moments(state), expected)
