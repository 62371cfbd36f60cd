"""What a unit costs the host: Python calls of a settled step, which no change may raise.

The unit has nine parameters, as a layer of Llama. Time follows calls: two thirds of what the engine adds to a step is
the interpreter's. `python -m bench --only host` times the same model.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

import sherd
from bench.calls import forward_backward, per_unit
from bench.rounds import without_collector
from bench.systems import FLAT, SHERD, WRAPPER_FLAT
from sherd._torch import imagined_ranks
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_processes

PACKAGE = Path(sherd.__file__).parent

# A ceiling only ever falls: to what a change has made of it, in the same commit.
CEILINGS = {
    "default": 409,
    "Flat": 406,
    "wrapper": 407,
    "HSDP": 428,
    "two backwards in accumulate": 963,
    "engine over real groups": 350,
}


def check(name: str, calls: int) -> None:
    print(f"{name:30} {calls:6} calls a unit   ceiling {CEILINGS[name]}")
    assert calls <= CEILINGS[name], f"{name}: {calls} calls a unit, the ceiling is {CEILINGS[name]}: change the code"


@pytest.fixture(autouse=True)
def no_collector():
    """What it deletes calls whatever is to be told of it, at any time."""
    with without_collector():
        yield


@pytest.mark.parametrize(("name", "system"), [("default", SHERD), ("Flat", FLAT), ("wrapper", WRAPPER_FLAT)])
def test_a_unit_makes_no_more_calls_than_it_did(name, system):
    with imagined_ranks(16):
        check(name, per_unit(system, init_device_mesh("cpu", (16,))))


def test_a_unit_of_replicas_makes_no_more_calls_than_it_did():
    with imagined_ranks(16):
        check("HSDP", per_unit(SHERD, init_device_mesh("cpu", (2, 8), mesh_dim_names=("replicate", "shard"))))


def accumulated(trainee):
    is_sharded = isinstance(trainee.model, sherd.FSDPModule)
    with sherd.accumulate(trainee.model, 2) if is_sharded else nullcontext():
        forward_backward(trainee)
        forward_backward(trainee)


def test_a_unit_that_accumulates_makes_no_more_calls_than_it_did():
    with imagined_ranks(16):
        check("two backwards in accumulate", per_unit(SHERD, init_device_mesh("cpu", (16,)), accumulated))


@on_processes(2)
def test_a_unit_whose_ranks_are_compared_makes_no_more_calls_than_it_did():
    """Of the engine alone: the transport looks as often as the other rank lets it wait."""
    with without_collector():
        check("engine over real groups", per_unit(SHERD, mesh_of((2,)), made_in=f"{PACKAGE}/engine/"))
