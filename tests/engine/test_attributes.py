"""What a user has written on a parameter (`weight.no_decay = True`) is on it whole, sharded and moved."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Theirs
from torch.distributed.tensor import DTensor, Shard

import sherd
from sherd import Blocks, Flat, FullyShardedDataParallel, MixedPrecisionPolicy, Owned, fully_shard, unsharded
from sherd.errors import UnsupportedError
from tests.support.comparing import assert_named_close, whole_params
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import sharded


class Layer(nn.Module):
    """Parameters that say of themselves whether they decay, and what the forward is to multiply by."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.scale.no_decay = self.linear.bias.no_decay = True
        self.scale.factor = 2.0
        self.seen = []

    def reset_parameters(self):
        nn.init.ones_(self.scale)

    def forward(self, x):
        self.seen.append((getattr(self.linear.weight, "no_decay", None), self.scale.factor))
        return torch.tanh(self.linear(x)) * self.scale * self.scale.factor


def built():
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


WAYS = {
    "rows": {},
    "columns": {"shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)},
    "flat": {"placement": Flat()},
    "blocks": {"placement": Blocks(1)},
    "whole": {"placement": Owned()},
    "copies": {"placements": "ddp"},
    "zero1": {"placements": "zero1"},
    "low precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
}


def made(way):
    model = built()
    if way == "wrapper":
        return FullyShardedDataParallel(model, use_orig_params=True)
    return sharded(model, units=[model[0], model], **WAYS[way])


DECAYS = {"linear.weight": True, "linear.bias": False, "scale": False}


def decays(model):
    found = {name: not getattr(each, "no_decay", False) for name, each in model.named_parameters()}
    return {name.split(".", 1)[1]: value for name, value in found.items()}


def in_groups(model):
    """The optimizer that a training script makes: what says so does not decay."""
    groups = [[], []]
    for each in model.parameters():
        groups[getattr(each, "no_decay", False)].append(each)
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.5}, {"params": groups[1], "weight_decay": 0.0}], lr=0.1, eps=1e-2
    )


def train(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_threads(2)
def test_attributes_are_on_shards_and_on_whole_parameters_in_every_layout():
    plain = built()
    train(plain, in_groups(plain))
    for way in (*WAYS, "wrapper"):
        model = made(way)
        assert decays(model) == DECAYS, way
        assert not any(hasattr(each, "no_decay") for each in model.parameters() if each.dim() > 1), way
        train(model, in_groups(model))
        inner = getattr(model, "module", model)
        assert inner[1].seen == [(None, 2.0)] * 2, way
        if way != "low precision":
            assert_named_close(whole_params(model), whole_params(plain), way, 1e-5, 1e-6)
        # What is written later is seen in forward, and what a forward writes is seen after it.
        inner[0].scale.factor = 3.0
        with unsharded(model):
            assert inner[0].scale.factor == 3.0
            assert decays(model) == DECAYS
            inner[0].scale.written = "while lent"
        model(torch.ones(2, 4))
        assert inner[0].seen[-1] == (None, 3.0)
        for unit in (each for each in model.modules() if isinstance(each, sherd.FSDPModule)):
            unit.reshard()
        assert inner[0].scale.written == "while lent"
        assert isinstance(inner[0].scale, DTensor)


@on_threads(2)
def test_attributes_stay_where_shards_move_and_where_a_model_gets_memory():
    for way in ("rows", "flat", "wrapper"):
        model = made(way)
        for move in (
            lambda model: model.to(torch.float64),
            lambda model: model.float(),
            lambda model: model.load_state_dict(model.state_dict(), assign=True),
            lambda model: model.requires_grad_(True),
            lambda model: model(torch.ones(2, 4)),
        ):
            move(model)
            getattr(model, "module", model)[0].linear.weight.seen = True
            getattr(model, "reshard", lambda: None)()
            assert decays(model) == DECAYS, way
        inner = getattr(model, "module", model)
        assert inner[0].linear.weight.seen
        inner[0].linear.double()
        inner[0].linear.float()
        model(torch.ones(2, 4))
        assert inner[1].seen[-1] == (None, 2.0)
        value = nn.Parameter(torch.ones(4))
        value.factor = 5.0
        inner[1].scale = value
        model(torch.ones(2, 4))
        assert inner[1].seen[-1] == (None, 5.0)
    with torch.device("meta"):
        for way in ("rows", "flat"):
            model = made(way)
            model.to_empty(device="cpu")
            assert decays(model) == DECAYS
        wrapped = FullyShardedDataParallel(nn.Sequential(), use_orig_params=True)
        model = built()
    for layer in model:
        layer.linear = nn.utils.skip_init(nn.Linear, 4, 4, device="meta")
        layer.linear.bias.no_decay = True
    wrapped = FullyShardedDataParallel(model, use_orig_params=True)
    assert decays(wrapped) == DECAYS


@pytest.mark.filterwarnings("ignore:a sharded tensor is pickled")
@on_threads(2)
def test_copies_of_shards_have_attributes_of_their_own():
    for way in ("rows", "flat"):
        model = made(way)
        scale = model[0].scale
        file = io.BytesIO()
        torch.save(scale, file)
        file.seek(0)
        for other in (copy.deepcopy(scale), torch.load(file, weights_only=True)):
            assert other.no_decay
            assert other.factor == 2.0
            other.factor = 7.0
            assert scale.factor == 2.0
            assert isinstance(other, nn.Parameter)
        assert not any(vars(value) for value in model.state_dict().values())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@on_processes(2, orig=(True, False))
def test_the_wrapper_has_what_torchs_has(orig):
    """torch's FSDP1 keeps them with the original parameters, and loses them in a flat one."""
    models = [
        Theirs(built(), use_orig_params=orig, device_id=torch.device("cpu")),
        FullyShardedDataParallel(built(), use_orig_params=orig),
    ]
    theirs, ours = ([getattr(each, "no_decay", None) for each in model.parameters()] for model in models)
    assert ours == theirs


@on_threads(1)
def test_a_flat_parameter_has_what_all_its_parameters_have_and_a_warning_names_the_rest():
    with pytest.warns(
        UserWarning, match=r"no_decay of .*linear.bias, no_decay of .*scale.*use_orig_params=True"
    ) as said:
        model = FullyShardedDataParallel(built())
    assert sum("no_decay" in str(each.message) for each in said) == 1
    assert not hasattr(model._flat_param, "no_decay")
    model(torch.ones(2, 4))
    assert model.module[0].seen == [(None, 2.0)]
    assert model.module[0].scale.no_decay
    alike = nn.Linear(4, 4)
    alike.weight.group = alike.bias.group = "slow"
    assert FullyShardedDataParallel(alike)._flat_param.group == "slow"


@on_threads(4)
def test_a_tensor_parallel_parameter_keeps_them():
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tp"], {"0": ColwiseParallel()})
    model[0].bias.no_decay = True
    fully_shard(model, mesh=mesh["dp"])
    seen = []
    model[0].register_forward_hook(lambda layer, args, output: seen.append(vars(layer.bias)))
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].bias.no_decay
    assert seen[0]["no_decay"]


class Held:
    pass


@on_threads(1)
def test_they_keep_nothing_alive():
    gc.disable()
    try:
        model = made("rows")
        held = Held()
        model[0].scale.held = held
        train(model, in_groups(model))
        gone = [weakref.ref(held), weakref.ref(model[0].linear)]
        del held, model
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@on_threads(1)
def test_optimizers_that_were_to_step_in_backward_are_noticed_if_they_were_there_before():
    from torch.distributed.optim import _apply_optimizer_in_backward

    net = nn.Linear(4, 4)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = FullyShardedDataParallel(net, use_orig_params=True)
    with pytest.raises(UnsupportedError, match="nothing would call them"):
        model(torch.ones(2, 4))
