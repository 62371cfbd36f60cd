"""The mistakes of a first hour are told by name: no process group, a wrong dtype, half a model on meta, one rank."""

import logging
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sherd
from sherd._torch import imagined_ranks
from sherd.comm.mesh import data_mesh
from sherd.engine.moves import weights
from sherd.errors import CommError, MeshError, ModuleError, PolicyError, PolicyTypeError
from tests.support.models import Block, chain
from tests.support.ranks.bodies import on_processes, on_threads

# No process group

NOTHING = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
CALLS = {
    "fully_shard": sherd.fully_shard,
    "ddp": lambda model: sherd.fully_shard(model, placements="ddp"),
    "replicate": sherd.replicate,
    "auto_shard": lambda model: sherd.auto_shard(model, lambda module, recurse, **_: True),
    "wrapper": sherd.FullyShardedDataParallel,
    "NO_SHARD": lambda model: sherd.FullyShardedDataParallel(model, sharding_strategy=sherd.ShardingStrategy.NO_SHARD),
    "mesh": lambda model: data_mesh(None, None),
}


def test_without_a_process_group_the_error_says_torchrun(monkeypatch):
    assert not dist.is_initialized()
    for name in NOTHING:
        monkeypatch.delenv(name, raising=False)
    said = r"no process group: start with torchrun --nproc-per-node N, or call torch\.dist"
    for name, call in CALLS.items():
        model = chain()
        with pytest.raises(MeshError, match=said):
            call(model)
        assert not any(isinstance(each, sherd.FSDPModule) for each in model.modules()), name


@pytest.mark.usefixtures("torchrun_of_one_rank")
def test_what_torchrun_sets_is_enough():
    sherd.fully_shard(Block())(torch.ones(1, 8))


@on_processes(2)
def test_an_optimizer_that_steps_while_gradients_wait_is_told_once():
    def unsynced(model):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)  # too late
        yield
        yield

    def synced(model):
        for _ in range(3):
            model.set_requires_gradient_sync(False)
            model(torch.ones(1, 4)).sum().backward()
            model.set_requires_gradient_sync(True)
            yield

    for loop, num_told in ((unsynced, 1), (synced, 0)):
        model = sherd.fully_shard(nn.Sequential(sherd.fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number, _ in enumerate(loop(model)):
                if loop is synced or number < 1:
                    model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
        texts = [str(each.message) for each in caught]
        assert len(texts) == num_told, (loop, texts)
        assert all("SGD steps while gradients of unit " in text and "sherd.accumulate" in text for text in texts)


@on_processes(2)
def test_a_group_that_was_destroyed_is_told():
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    # Of a shape that no other test has: DTensor remembers the mesh of the first equal spec, whose group may be alive.
    early, ready = (sherd.fully_shard(nn.Linear(4, 19), mesh=mesh) for _ in range(2))
    dist.destroy_process_group(group)
    for call in (
        lambda: early(torch.ones(1, 4)),
        lambda: sherd.clip_grad_norm_(ready.parameters(), 1.0),
        lambda: sherd.fully_shard(nn.Linear(4, 4), mesh=mesh),
        lambda: sherd.FullyShardedDataParallel(nn.Linear(4, 4), process_group=group),
    ):
        with pytest.raises(MeshError, match=r"no process group: .*was destroyed"):
            call()


# Dtypes


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (sherd.MixedPrecisionPolicy, ["param_dtype", "reduce_dtype", "output_dtype"]),
        (sherd.MixedPrecision, ["param_dtype", "reduce_dtype", "buffer_dtype"]),
    ],
)
def test_a_dtype_that_is_none_or_rounds_to_integers_is_refused(policy, names):
    for name in names:
        for given, meant in {
            "bf16": "torch.bfloat16",
            "torch.float16": "torch.float16",
            "fp32": "torch.float32",
        }.items():
            with pytest.raises(PolicyTypeError, match=rf"{policy.__name__}\({name}='{given}'\): .* write {meant}"):
                policy(**{name: given})
        for given in ("nonsense", 16, torch.float32.itemsize, float):
            with pytest.raises(PolicyTypeError, match=r"expected a torch\.dtype"):
                policy(**{name: given})
        for given in (torch.int8, torch.uint8, torch.int64, torch.bool):
            with pytest.raises(PolicyError, match=rf"{name}={given}\): expected a floating-point dtype"):
                policy(**{name: given})
        for given in (None, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex64):
            assert getattr(policy(**{name: given}), name) is given


def test_a_switch_of_a_policy_is_a_bool():
    casts = ("cast_forward_inputs", "cast_root_forward_inputs", "keep_low_precision_grads")
    for policy, names in (
        (sherd.MixedPrecisionPolicy, (*casts, "full_precision_in_eval")),
        (sherd.MixedPrecision, casts),
        (sherd.CPUOffloadPolicy, ("pin_memory",)),
        (sherd.CPUOffload, ("offload_params",)),
    ):
        for name in names:
            with pytest.raises(PolicyTypeError, match=rf"{policy.__name__}\({name}='yes'\): expected a bool"):
                policy(**{name: "yes"})


# The meta device


@on_threads(2)
def test_a_unit_that_is_partly_on_meta_is_refused_with_the_names_of_both_parts():
    for options in ({}, {"placement": sherd.Flat()}, {"placements": "ddp"}):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
        with pytest.raises(ModuleError) as raised:
            sherd.fully_shard(model, **options)
        said = str(raised.value)
        assert "partly on the meta device: 1.weight, 1.bias are, 0.weight, 0.bias are not" in said
        assert "reset_parameters()" in said
        assert not isinstance(model, sherd.FSDPModule)
        sherd.fully_shard(model[1])  # whole on meta: a unit
        sherd.fully_shard(model, **options)
        model[1].to_empty(device="cpu")
        for parameter in model[1].parameters():
            nn.init.ones_(parameter)
        assert model(torch.ones(1, 4)).isfinite().all()


# One rank alone


def alone(transport, call):
    """What rank 0 is told that makes a first call alone, and what was warned of."""
    group = dist.new_group()
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=0.5))  # its start may take longer
    if dist.get_rank() == 1:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    if call == "full state dict":
        model = sherd.FullyShardedDataParallel(nn.Linear(5, 5), process_group=group)
    else:
        model = sherd.fully_shard(nn.Linear(5, 5), mesh=mesh, comm_policy=sherd.CommPolicy(transport=transport))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(CommError) as raised:
            ONE_RANK[call](model)
    return str(raised.value), [str(each.message) for each in warned if "silenced" in str(each.message)]


def full_state_dict(model):
    with model.state_dict_type(model, sherd.StateDictType.FULL_STATE_DICT):
        model.state_dict()


ONE_RANK = {
    "forward": lambda model: model(torch.ones(1, 5)),
    "clip": lambda model: sherd.clip_grad_norm_(model.parameters(), 1.0),
    "lend": lambda model: sherd.unsharded(model).__enter__(),
    "full state dict": full_state_dict,
    "sync": lambda model: sherd.FullyShardedDataParallel(
        nn.Linear(2, 2), process_group=model._sherd_own_unit.mesh.shard_group, sync_module_states=True
    ),
}
FIRST = [(transport, "forward") for transport in ("auto", "gloo", "torch", "coalesced", "shared_memory")]
FIRST += [("auto", call) for call in ONE_RANK if call != "forward"]


@pytest.mark.parametrize(("transport", "call"), FIRST)
def test_a_first_call_that_one_rank_makes_alone_names_the_ranks_and_warns_of_nothing(world, transport, call):
    (told, warned), _ = world(2).run(alone, transport, call)
    assert "among ranks [0, 1] failed on rank 0 with rank 1: " in told
    assert "does not make this call" in told
    assert warned == []


class Failing(nn.Linear):
    """A forward with a mistake, and a hook with one."""

    def forward(self, x):
        raise ValueError("the user's mistake")


@on_processes(1)
def test_what_torch_says_of_a_users_hook_is_still_said():
    model = sherd.fully_shard(Failing(4, 4))

    def hook(*_):
        raise RuntimeError("the hook's mistake")

    model.register_forward_hook(hook, always_call=True)
    with pytest.raises(ValueError, match="the user's"), pytest.warns(UserWarning, match="silenced"):
        model(torch.ones(1, 4))


# Different seeds


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def wrapped(model, **options):
    return sherd.FullyShardedDataParallel(model, use_orig_params=True, **options)


def loaded_alike(model):
    torch.manual_seed(9)
    model.load_state_dict(net().state_dict())


def filled_alike(model):
    torch.manual_seed(9)
    for parameter in model.parameters():
        nn.init.normal_(parameter)


SEEDED = {  # how the model is sharded, what happens then, and what rank 0 says of ranks whose seeds differ
    "shard": (sherd.fully_shard, lambda model: None, "0.weight, 2.weight: ranks have built"),
    "flat": (lambda model: sherd.fully_shard(model, placement=sherd.Flat()), lambda model: None, "ranks have built"),
    "wrapper": (wrapped, lambda model: None, "ranks have built"),
    "synced": (lambda model: wrapped(model, sync_module_states=True), lambda model: None, ""),
    "loaded": (sherd.fully_shard, loaded_alike, ""),
    "filled": (sherd.fully_shard, filled_alike, ""),
}


@on_processes(2)
def test_models_that_ranks_build_with_different_seeds_are_told_of_in_the_log():
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("sherd").addHandler(handler)
    for name, (shard, change, expected) in SEEDED.items():
        for seed in (7, 8 + dist.get_rank()):
            said.clear()
            weights._told.clear()  # it is said once
            torch.manual_seed(seed)
            model = shard(net())
            change(model)
            for _ in range(2):
                model(torch.ones(2, 6)).sum().backward()
            assert len(said) == bool(expected and seed != 7 and dist.get_rank() == 0), (name, said)
            assert not said or expected in said[0], (name, said)


def test_imagined_ranks_whose_gathers_bring_nothing_are_not_told_of_seeds(caplog):
    with imagined_ranks(2):
        model = sherd.fully_shard(net())
        model(torch.ones(2, 6)).sum().backward()
    assert "ranks have built" not in caplog.text


def test_fake_tensors_are_sharded():
    with imagined_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        with FakeTensorMode():
            model = sherd.fully_shard(net(), mesh=mesh)
        assert [tuple(each.to_local().shape) for each in model.parameters()] == [(4, 6), (4,), (2, 8), (2,)]
