"""What users do with a sharded model between steps is ordered, too: each program writes the shards on compute, does not
wait, and has them read or gathered by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import sherd
import simdevice
from tests.gpu.setting_model import batch
from tests.gpu.setting_runs import mesh_of, sharded
from tests.gpu.settings import Setting
from tests.support.models import next_token_loss


def forward(model: Any) -> None:
    with torch.no_grad():
        next_token_loss(model, batch(0, 0, 0).to("sim"))


def double(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)


def unsharded(model: Any) -> None:
    with sherd.unsharded(model):
        double(model)


def state_loaded(model: Any) -> None:
    state = {name: each.clone() for name, each in model.state_dict().items()}
    model.load_state_dict(state)
    forward(model)


def norm_of_gradients(model: Any) -> None:
    next_token_loss(model, batch(0, 0, 0).to("sim")).backward()
    sherd.clip_grad_norm_(model.parameters(), 1.0)


def weights_out(model: Any) -> None:
    for _, weight in sherd.iter_full_parameters(model, 4096):
        weight.mul_(2)


def weights_out_in_low_precision(model: Any) -> None:
    kept = [weight for _, weight in sherd.iter_full_parameters(model, 1 << 20, torch.bfloat16)]
    kept[0].mul_(2)


def weights_out_to_the_host(model: Any) -> None:
    assert all(weight.device.type == "cpu" for _, weight in sherd.iter_full_parameters(model, 4096, to="cpu"))


def changes_out(model: Any) -> None:
    for own_part in (False, True):
        mark = sherd.WeightMark()
        for every in (9, 1):
            read_changes(model, mark, own_part)
            for parameter in model.parameters():
                parameter.data.to_local().view(-1)[::every].mul_(2)
        read_changes(model, mark, own_part)


def read_changes(model: Any, mark: sherd.WeightMark, own_part: bool) -> None:
    for delta in sherd.iter_full_parameters(model, 4096, torch.bfloat16, changed_since=mark, own_part=own_part):
        delta.values.mul_(2)


def summon(model: Any) -> None:
    with sherd.FullyShardedDataParallel.summon_full_params(model):
        double(model)


WHOLE = StateDictOptions(full_state_dict=True)
MOVES: dict[str, Callable[[Any], Any]] = {
    "unshard": lambda model: (model.blocks[0].unshard(), model.blocks[0].reshard()),
    "unshard and wait later": lambda model: (model.blocks[0].unshard(async_op=True).wait(), model.blocks[0].reshard()),
    "forward": forward,
    "forward behind unshard": lambda model: (model.unshard(async_op=True), forward(model), model.reshard()),
    "unsharded": unsharded,
    "state of one rank": lambda model: get_model_state_dict(model, options=WHOLE),
    "state loaded": state_loaded,
    "norm of gradients": norm_of_gradients,
    "weights out": weights_out,
    "weights out in low precision": weights_out_in_low_precision,
    "weights out to the host": weights_out_to_the_host,
    "changes out": changes_out,
}


def written_and_then(move: str, setting: Setting) -> None:
    model, act = sharded(setting, mesh_of(setting.mesh)), summon if setting.is_wrapped else MOVES[move]
    act(model)
    for _ in range(2):
        simdevice.sleep(2000)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        act(model)


@pytest.mark.parametrize("placement", ["Shard(0)", "Flat", "Owned"])
def test_shards_are_read_after_they_were_written(placement, sim_world):
    for move in MOVES:
        found = sim_world(2, seed=1).observe(written_and_then, move, Setting(placement=placement))
        assert not found.all_races, move


@pytest.mark.parametrize("front", ["wrapper", "flat wrapper"])
def test_summoned_parameters_are_read_after_they_were_written(front, sim_world):
    sim_world(2, seed=1).run(written_and_then, "", Setting(front=front))
