"""The words of --mesh are read as meant, refused by name where they do not fit, and each rank is put in its place."""

from functools import partial

from torch import distributed as dist

from sherd.train.axes import Axes, axes_of, usual_ranks
from sherd.train.config import Config, InputError
from sherd.train.mesh import RankGrid
from tests.support.refusals import one_line

TREE = {"layers": 2, "width": 24, "heads": 4, "kv_heads": 2, "hidden": 24, "context": 16}


def config(mesh, **fields):
    return Config.of(TREE, {"mesh": mesh}, fields)


def test_words_give_the_axes_and_a_dp_not_named_gets_the_ranks_that_are_left_of_those_started():
    for mesh, num_ranks, axes in (
        ("", 3, Axes(dp=3)),
        ("dp=2,tp=2", 4, Axes(dp=2, tp=2)),
        (" tp = 2 , dp = 2 ", 4, Axes(dp=2, tp=2)),
        ("tp=2", 8, Axes(dp=4, tp=2)),
        ("replicate=2", 2, Axes(replicate=2)),
        ("replicate=2,dp=2,tp=2", 8, Axes(replicate=2, dp=2, tp=2)),
    ):
        assert axes_of(config(mesh), num_ranks) == axes, mesh
        assert axes.num_ranks == num_ranks, mesh
    assert [usual_ranks(config(mesh), 2) for mesh in ("", "dp=1", "dp=2,tp=2", "tp=2", "tp=4")] == [2, 1, 4, 2, 4]
    assert [usual_ranks(config(mesh), 8) for mesh in ("tp=2", "tp=3", "dp=2")] == [8, 9, 2]


refused = partial(one_line, InputError, axes_of)


WRONG = [
    ("dp=2,xp=2", {}, "names 'xp=2', which is no axis of sherd train; write axis=ranks, of replicate, dp, tp"),
    ("dp", {}, "gives dp '' ranks; it must be a whole number of at least 1"),
    ("dp=2,", {}, "names '', which is no axis"),
    ("dp=2,dp=2", {}, "names dp twice"),
    ("dp=two", {}, "gives dp 'two' ranks"),
    ("dp=0,tp=2", {}, "gives dp '0' ranks"),
    ("dp=-2", {}, "gives dp '-2' ranks"),
    ("dp=2,tp=4", {}, "the mesh dp=2,tp=4 is for 8 ranks, but there are 4; start 8 processes"),
    ("tp=3", {}, "the mesh tp=3 is for 3 ranks, but there are 4"),
    ("tp=4", {}, "tp=4, which does not divide kv_heads = 2"),
    ("tp=4", {"heads": 2}, "tp=4, which does not divide heads = 2"),
    ("tp=4", {"kv_heads": 4, "hidden": 6}, "tp=4, which does not divide hidden = 6"),
    ("tp=4", {"kv_heads": 4, "context": 18}, "tp=4, which does not divide context = 18"),
    (
        "dp=2,ep=2",
        {},
        "is no axis of sherd train; a program of your own has it: examples/recipes/mixture_of_experts.py",
    ),
    ("cp=2", {}, "examples/recipes/long_context.py"),
    ("pp=2", {}, "examples/recipes/pipeline.py"),
    ("tp=2", {"hf": "config.json"}, "tp=2, which cuts no Hugging Face model here"),
    ("dp=4", {"strategy": "hfsdp"}, "strategy = 'hfsdp' is for two axes, but the mesh dp=4 has no replicate"),
]


def test_a_mesh_that_does_not_fit_the_model_the_context_the_strategy_or_the_ranks_is_refused_in_one_line():
    for mesh, fields, said in WRONG:
        assert said in refused(config(mesh, **fields), 4), (mesh, fields)


def places(mesh):
    grid = RankGrid(axes_of(config(mesh), dist.get_world_size()), "cpu")
    return grid.data_rank, grid.data.mesh.tolist(), grid.tp and grid.tp.mesh.tolist()


def test_neighbours_share_tp_then_dp(threads):
    found = threads(8).run(places, "dp=4,tp=2")
    assert [each[0] for each in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found[0] == (0, [0, 2, 4, 6], [0, 1])
    assert found[7] == (3, [1, 3, 5, 7], [6, 7])
    found = threads(8).run(places, "replicate=2,dp=2,tp=2")
    assert [each[0] for each in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found[5] == (2, [[1, 3], [5, 7]], [4, 5])
