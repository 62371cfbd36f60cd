"""The words of --mesh are read as meant, refused by name where they do not fit, and each rank is put in its place."""

from functools import partial

from torch import distributed as dist

from sherd.train.axes import Axes, axes_of, usual_ranks
from sherd.train.config import Config, InputError
from sherd.train.mesh import RankGrid
from tests.support.refusals import one_line

TREE = {
    "model": {"layers": 2, "width": 24, "heads": 4, "kv_heads": 2, "hidden": 24, "experts": 6},
    "data": {"context": 16},
}


def config(mesh, **model):
    return Config.of(TREE, {"model": model, "run": {"mesh": mesh}})


def test_words_give_the_axes_and_a_dp_not_named_gets_the_ranks_that_are_left_of_those_started():
    for mesh, num_ranks, axes in (
        ("", 3, Axes(dp=3)),
        ("dp=2,tp=2", 4, Axes(dp=2, tp=2)),
        (" tp = 2 , dp = 2 ", 4, Axes(dp=2, tp=2)),
        ("tp=2", 8, Axes(dp=4, tp=2)),
        ("replicate=2", 2, Axes(replicate=2)),
        ("dp=4,ep=2,cp=2", 8, Axes(dp=4, ep=2, cp=2)),
        ("pp=2,replicate=2,dp=2,cp=2,tp=2", 32, Axes(pp=2, replicate=2, dp=2, cp=2, tp=2)),
    ):
        assert axes_of(config(mesh, tied=False), num_ranks) == axes, mesh
        assert axes.num_ranks == num_ranks, mesh
    assert [usual_ranks(config(mesh), 2) for mesh in ("", "dp=1", "dp=2,tp=2", "tp=2", "tp=4")] == [2, 1, 4, 2, 4]
    assert [usual_ranks(config(mesh), 8) for mesh in ("tp=2", "tp=3", "dp=2")] == [8, 9, 2]


refused = partial(one_line, InputError, axes_of)


WRONG = [
    ("dp=2,xp=2", {}, "names 'xp=2', which is no axis; write axis=ranks, of pp, replicate, dp, ep, cp, tp"),
    ("dp", {}, "gives dp '' ranks; it must be a whole number of at least 1"),
    ("dp=2,", {}, "names '', which is no axis"),
    ("dp=2,dp=2", {}, "names dp twice"),
    ("dp=two", {}, "gives dp 'two' ranks"),
    ("dp=0,tp=2", {}, "gives dp '0' ranks"),
    ("dp=-2", {}, "gives dp '-2' ranks"),
    ("dp=2,tp=4", {}, "the mesh dp=2,tp=4 is for 8 ranks, but there are 4; start 8 processes"),
    ("tp=3", {}, "the mesh tp=3 is for 3 ranks, but there are 4"),
    ("tp=4", {}, "tp=4, which does not divide model.kv_heads = 2"),
    ("tp=4", {"heads": 2}, "tp=4, which does not divide model.heads = 2"),
    ("tp=4", {"kv_heads": 4, "hidden": 6, "experts": 0}, "tp=4, which does not divide model.hidden = 6"),
    ("dp=4,ep=4", {}, "ep=4, which does not divide model.experts = 6"),
    ("ep=2", {"experts": 0}, "ep=2, but the model has no experts"),
    ("dp=1,ep=2,tp=4", {"kv_heads": 4}, "ep=2, which does not divide its dp=1; ep is a part of dp"),
    ("pp=4", {"tied": False}, "pp=4, but model.layers = 2"),
    ("pp=2,dp=2", {}, "pp=2, but model.tied = true keeps the first and the last layer on one rank"),
    ("tp=2", {"hf": "config.json"}, "tp=2, which a Hugging Face model cannot be cut by here"),
]


def test_a_mesh_that_does_not_fit_the_model_the_context_the_strategy_or_the_ranks_is_refused_in_one_line():
    for mesh, model, said in WRONG:
        assert said in refused(config(mesh, **model), 4), (mesh, model)
    odd = Config.of(TREE, {"data": {"context": 18}, "run": {"mesh": "cp=2,tp=2"}})
    assert "cut a sample into 4 parts, but data.context = 18" in refused(odd, 4)
    for mesh, strategy, said in (
        ("dp=4", "hfsdp", "shard.strategy = 'hfsdp' is for two axes, but the mesh dp=4 has no replicate"),
        ("dp=4,ep=2", "zero1", "shard.strategy = 'zero1' does not go with the mesh's ep=2"),
    ):
        assert said in refused(Config.of(TREE, {"run": {"mesh": mesh}, "shard": {"strategy": strategy}}), 4), mesh
    assert "run.ranks = 4, but there are 2 ranks" in refused(Config.of({"run": {"ranks": 4}}), 2)


def places(mesh):
    grid = RankGrid(axes_of(config(mesh), dist.get_world_size()), "cpu")
    groups = [None if axis is None else dist.get_process_group_ranks(axis.get_group()) for axis in (grid.tp, grid.ep)]
    return grid.data_rank, grid.context_rank, grid.data.mesh.flatten().tolist(), grid.experts.mesh.tolist(), *groups


def test_neighbours_share_tp_and_experts_lie_on_all_ranks_but_those_of_ep(threads):
    found = threads(8).run(places, "dp=4,ep=2,tp=2")
    assert [each[0] for each in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found[0] == (0, 0, [0, 2, 4, 6], [0, 4], [0, 1], [0, 2])
    assert found[7] == (3, 0, [1, 3, 5, 7], [3, 7], [6, 7], [5, 7])
    found = threads(8).run(places, "replicate=2,dp=2,cp=2")
    assert [each[:2] for each in found] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert found[5][2:4] == (list(range(8)), [[0, 1, 2, 3], [4, 5, 6, 7]])
