"""A strategy that means nothing, or does not fit the mesh, is refused by name before anything is moved."""

import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import sherd
from sherd import Flat, FullyShardedDataParallel, OnMesh, Placements, fully_shard
from sherd._torch import imagined_ranks
from sherd.api.placements import PRESETS
from sherd.errors import MeshError, ModuleError, PlacementError, PolicyError, PolicyTypeError
from sherd.policy import Level
from tests.strategies.cases import PAIRS, placements
from tests.support.models import build
from tests.support.refusals import refusal

COPY, ROWS = Replicate(), Shard(0)


REFUSED = [
    ((ROWS, COPY, COPY), PlacementError, "axis 0.*ZeRO-1"),
    ((COPY, ROWS, COPY), PlacementError, "axis 0"),
    ((ROWS, ROWS, COPY), PlacementError, "axis 0"),
    (([COPY, ROWS], [COPY, COPY], [COPY, ROWS]), PlacementError, "axis 1"),
    ((COPY, Shard(1), ROWS), PlacementError, "different ways.*Shard"),
    (([COPY, ROWS], [COPY, Flat()], [COPY, Flat()]), PlacementError, "different ways"),
    ((ROWS, [ROWS, ROWS], ROWS), PolicyError, "1 placements for parameters, 2 for gradients"),
    (([ROWS] * 3, [ROWS] * 3, [ROWS] * 3), PolicyError, "flatten further axes"),
    (((), (), ()), PolicyError, "0 placements"),
    (("rows", ROWS, ROWS), PolicyTypeError, "parameter=.*'rows'"),
    ((ROWS, Flat, ROWS), PolicyTypeError, "gradient="),
    ((ROWS, ROWS, Partial()), PolicyTypeError, "optimizer="),
    ((None, None, None), PolicyTypeError, "None"),
]


def test_placements_that_do_not_stand_together_are_refused():
    for given, error, said in REFUSED:
        assert re.search(said, refusal(error, Placements, *given)), given
    for mesh in (3, None):
        with pytest.raises(PolicyTypeError, match="mesh"):
            OnMesh(mesh=mesh)


def test_every_preset_is_spelt_out_and_reads_as_its_levels():
    for name, levels in PRESETS.items():
        assert Placements.preset(name, Flat()).levels == levels
        assert Placements.preset(name).cut == (None if max(levels) is Level.COPIES else ROWS)
    for levels in PAIRS:
        assert placements(levels, "flat").levels == levels
    assert Placements(COPY, ROWS, ROWS) == Placements([COPY], (ROWS,), ROWS)
    with pytest.raises(PolicyError, match=r"'zero4'.*zero3"):
        Placements.preset("zero4")


def meshes():
    return {
        "one": init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)),
        "two": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        "nameless": init_device_mesh("cpu", (2, 2)),
        "three": init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c")),
    }


def refusals(mesh):
    """What is asked for, what is raised, what is said."""
    one, two = mesh["one"], mesh["two"]
    experts = {"shard_placement_fn": lambda _: OnMesh(two["shard"])}
    return [
        ({"mesh": one, "placements": "hsdp"}, MeshError, "2 data-parallel axes, but there is only one"),
        ({"mesh": one, "placements": placements((Level.OPTIMIZER, Level.PARAMETERS), "flat")}, MeshError, "only one"),
        ({"mesh": two, "placements": "zero4"}, PolicyError, "zero4"),
        ({"mesh": two, "placements": ("zero1",)}, PolicyTypeError, "placements"),
        ({"mesh": mesh["nameless"], "placements": "hfsdp"}, MeshError, "names"),
        ({"mesh": mesh["three"], "placements": "hfsdp"}, MeshError, "3 axes"),
        ({"mesh": two, "placements": Placements(ROWS, ROWS, ROWS), "placement": Flat()}, PolicyError, "one of them"),
        ({"mesh": two, "placements": "zero2", "reshard_after_forward": True}, PolicyError, "keeps unsharded"),
        ({"mesh": two, "placements": "ddp", "reshard_after_forward": 1}, PolicyError, "keeps unsharded"),
        ({"mesh": two, "placements": "hsdp_zero2", "reshard_after_forward": 2}, PolicyError, "keeps unsharded"),
        ({"mesh": two, "placements": "hfsdp", "reshard_after_forward": 4}, PolicyError, "2 ranks"),
        ({"mesh": two["shard"], "shard_placement_fn": lambda _: OnMesh(one)}, MeshError, "does not have"),
        ({"mesh": one, "shard_placement_fn": lambda _: OnMesh(mesh["three"])}, MeshError, "3 axes"),
        ({"mesh": one, "shard_placement_fn": lambda _: OnMesh(mesh["nameless"])}, MeshError, "names"),
        ({"mesh": one, "reshard_after_forward": 4, **experts}, PolicyError, "2 ranks"),
        ({"mesh": one, "shard_placement_fn": lambda _: two}, PlacementError, "OnMesh"),
        ({"mesh": one, "shard_placement_fn": lambda _: OnMesh(two, Shard(3))}, PlacementError, "Shard"),
    ]


def test_what_does_not_fit_is_refused_and_the_model_left_as_it_was():
    with imagined_ranks(4):
        model = build("mlp")
        block = model.blocks[0]
        before = {name: (each, each.detach().clone()) for name, each in model.named_parameters()}
        for asked, error, said in refusals(meshes()):
            assert re.search(said, refusal(error, fully_shard, block, **asked)), asked
            for name, each in model.named_parameters():
                assert each is before[name][0], (asked, name)
                assert torch.equal(each, before[name][1]), (asked, name)
            assert not isinstance(block, sherd.FSDPModule), asked
        fully_shard(block)  # nothing is left that is in its way


def test_the_wrapper_and_setters_refuse_what_strategies_exclude():
    with imagined_ranks(4):
        mesh, block = meshes(), build("mlp").blocks[0]
        rows = placements((Level.OPTIMIZER, Level.PARAMETERS), "rows")
        with pytest.raises(PolicyError, match="use_orig_params"):
            FullyShardedDataParallel(block, device_mesh=mesh["two"], sharding_strategy=rows)
        with pytest.raises(PolicyTypeError, match="sharding_strategy"):
            FullyShardedDataParallel(block, device_mesh=mesh["two"], sharding_strategy="hfsdp")
        with pytest.raises(MeshError):
            FullyShardedDataParallel(block, device_mesh=mesh["one"], sharding_strategy=rows, use_orig_params=True)
        fully_shard(block, mesh=mesh["two"], placements="zero2")
        with pytest.raises(PolicyError, match="keeps unsharded"):
            block.set_reshard_after_forward(2)
        flat = placements((Level.OPTIMIZER, Level.PARAMETERS), "flat")
        alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
        wrapped = FullyShardedDataParallel(build("mlp").first, device_mesh=alone, sharding_strategy=flat)
        with pytest.raises(PolicyError, match="hybrid"):
            wrapped.register_comm_hook(None, lambda state, gradient: None)


def test_only_a_whole_number_of_backwards_of_a_sharded_model_is_accumulated():
    with pytest.raises(ModuleError, match="nothing below Mlp"), sherd.accumulate(build("mlp"), 2):
        pass
    with imagined_ranks(1):
        model = fully_shard(build("mlp"))
        for number, error in ((0, PolicyError), (True, PolicyTypeError), (2.0, PolicyTypeError)):
            with pytest.raises(error, match="num_backwards"), sherd.accumulate(model, number):
                pass
