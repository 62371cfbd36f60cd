"""What users do with a sharded model between steps is ordered, too: each program writes the shards on compute, does not
wait, and has them read or gathered by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import sherd
from tests.device import sim
from tests.device.training import GPT, Setting, batch, loss_of, sharded


def unshard(model: Any) -> None:
    model.blocks[0].unshard()
    model.blocks[0].reshard()


def unshard_later(model: Any) -> None:
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    model.blocks[0].reshard()


def forward(model: Any) -> None:
    with torch.no_grad():
        loss_of(model, batch(0, 0, 0).to("sim"))


def forward_behind_unshard(model: Any) -> None:
    model.unshard(async_op=True)
    forward(model)
    model.reshard()


def unsharded(model: Any) -> None:
    with sherd.unsharded(model):
        for parameter in model.parameters():
            parameter.data.mul_(2)


def state_of_one_rank(model: Any) -> None:
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def state_loaded(model: Any) -> None:
    state = {name: each.clone() for name, each in model.state_dict().items()}
    model.load_state_dict(state)
    forward(model)


def norm_of_gradients(model: Any) -> None:
    loss_of(model, batch(0, 0, 0).to("sim")).backward()
    sherd.clip_grad_norm_(model.parameters(), 1.0)


def weights_out(model: Any) -> None:
    for _, weight in sherd.iter_full_parameters(model, 4096):
        weight.mul_(2)


def weights_out_in_low_precision(model: Any) -> None:
    kept = [weight for _, weight in sherd.iter_full_parameters(model, 1 << 20, torch.bfloat16)]
    kept[0].mul_(2)


def weights_out_to_the_host(model: Any) -> None:
    assert all(weight.device.type == "cpu" for _, weight in sherd.iter_full_parameters(model, 4096, to="cpu"))


def summon(model: Any) -> None:
    with sherd.FullyShardedDataParallel.summon_full_params(model):
        for parameter in model.parameters():
            parameter.data.mul_(2)


MOVES: dict[str, Callable[[Any], None]] = {
    each.__name__: each
    for each in (
        unshard,
        unshard_later,
        forward,
        forward_behind_unshard,
        unsharded,
        state_of_one_rank,
        state_loaded,
        norm_of_gradients,
        weights_out,
        weights_out_in_low_precision,
        weights_out_to_the_host,
    )
}


def written_and_then(move: str, setting: Setting) -> None:
    torch.manual_seed(0)
    model = sharded(GPT(False, False).to("sim"), setting, init_device_mesh("sim", (2,), mesh_dim_names=("shard",)))
    act = summon if setting.system == "wrapper" else MOVES[move]
    act(model)
    for _ in range(2):
        sim.sleep(2000)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        act(model)


@pytest.mark.parametrize("placement", ["Shard(0)", "Flat", "Owned"])
@pytest.mark.parametrize("move", MOVES)
def test_shards_are_read_after_they_were_written(move, placement, sim_world):
    sim_world(2, seed=1).run(written_and_then, move, Setting(placement=placement))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_summoned_parameters_are_read_after_they_were_written(use_orig_params, sim_world):
    sim_world(2, seed=1).run(written_and_then, "", Setting(system="wrapper", use_orig_params=use_orig_params))
