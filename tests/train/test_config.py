"""A config takes what is right, and refuses the rest in one line that names the field."""

import json
import re
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch

from sherd import CommPolicy, Reduction
from sherd.api.blocks import WRAPPINGS
from sherd.api.placements import PRESETS
from sherd.tools.simulate.settings import COSTS, FORMATS, UNITS, comm_policy
from sherd.train import config as configs
from sherd.train.config import FIELDS, FREE, Config, InputError, assigned, describe, page, read_tree, toml
from tests.support.refusals import one_line

refused = partial(one_line, InputError)


def test_the_trainer_has_at_most_35_fields_and_fewer_than_2800_lines():
    assert len(fields(Config)) <= 35
    files = Path(configs.__file__).parent.glob("*.py")
    assert sum(len(file.read_text().splitlines()) for file in files) < 2800


def test_later_trees_change_what_earlier_ones_and_the_defaults_said_and_leave_the_rest():
    assert Config.of() == Config()
    config = Config.of({"layers": 2, "width": 64}, {"layers": 3})
    assert (config.layers, config.width, config.hidden) == (3, 64, Config().hidden)
    config = Config.of({"lr": 0.5, "steps": 7, "data": "é\n"})
    assert Config.of(json.loads(json.dumps(config.tree()))) == config


def test_toml_and_json_give_the_same_tree_and_a_config_in_toml_gives_itself(tmp_path):
    (tmp_path / "a.toml").write_text('tied = false\ndata = "x"\nlr = 1\n')
    (tmp_path / "a.json").write_text('{"tied": false, "data": "x", "lr": 1}')
    assert read_tree(str(tmp_path / "a.toml")) == read_tree(str(tmp_path / "a.json"))
    odd = Config.of({"data": 'a "b" \\ \n\t é \x7f \x01 😀', "minutes": 1e-9, "lr": 1e16, "tied": False})
    (tmp_path / "odd.toml").write_text(toml(odd))
    assert Config.of(read_tree(str(tmp_path / "odd.toml"))) == odd


WRONG = [
    ({"widht": 3}, "unknown field widht; did you mean width?"),
    ({"model.width": 3}, "unknown field model.width; did you mean width?"),
    ({"zzzzzz": 1}, "known are layers, width"),
    ({"model": {"width": 3}}, "unknown field model; a config has no sections"),
    ({"experts": 4}, "unknown field experts; a program of your own has it: examples/recipes/mixture_of_experts.py"),
    ({"width": "wide"}, "width = 'wide' has the wrong type; it must be a whole number"),
    ({"width": 64.0}, "width = 64.0 has the wrong type"),
    ({"width": True}, "width = True has the wrong type"),
    ({"tied": 1}, "tied = 1 has the wrong type; it must be true or false"),
    ({"data": 1}, "data = 1 has the wrong type; it must be a string"),
    ({"lr": float("nan")}, "lr = nan has the wrong type; it must be a finite number"),
    ({"lr": 0}, "lr = 0.0 is out of its limits; it must be above 0"),
    ({"checkpointing": 1.5}, "checkpointing = 1.5 is out of its limits; it must be the share of blocks, 0 to 1"),
    ({"steps": -1}, "steps = -1 is out of its limits; it must be at least 0"),
    ({"precision": "fp8"}, "precision = 'fp8' is out of its limits; it must be one of fp32, bf16"),
    ({"device": "cuda:1"}, "device = 'cuda:1' is out of its limits; it must be a type, such as cuda or xpu"),
    ({"width": 100, "heads": 3}, "width = 100 does not split into heads = 3"),
    ({"width": 6, "heads": 2}, "width = 6 does not split into heads = 2"),
    ({"heads": 2, "kv_heads": 4}, "kv_heads = 4 does not divide heads = 2"),
    ({"wrapping": "ends"}, "wrapping = 'ends' makes a unit of the embedding, which a tied head reads"),
    ({"cuda_graph": True, "offload": True}, "cuda_graph = true cannot hold offload, for which the host may wait"),
    (
        {"offload": "half"},
        "offload = 'half' is out of its limits; it must be one of nothing, state, masters, step, every",
    ),
    ({"offload": "state:1.5"}, "offload = 'state:1.5' is out of its limits"),
    ({"offload": 1}, "offload = 1 has the wrong type; it must be a string"),
    (
        {"offload": "masters:0.5"},
        "offload = masters needs weights that compute in bfloat16; set precision = bf16, or state",
    ),
    ({"gather": "bf16"}, "gather = 'bf16' is out of its limits; it must be one of own, int8, fp8_e4m3"),
    ({"gather": "int8", "strategy": "zero2"}, "gather = 'int8' would round what strategy = zero2 keeps"),
    ({"gather": "int8", "reproducible": True}, "gather = 'int8' encodes blocks that end where shards do"),
    ({"reduce": "fp8_e5m2", "reproducible": True}, "reduce = 'fp8_e5m2' encodes blocks that end where shards do"),
    ({"reduce_replicas": "bf16", "reproducible": True}, "leave out reduce_replicas = 'bf16'"),
]


def test_formats_are_those_of_codecs_and_become_a_policy():
    assert Config() == Config.of({"gather": "own", "reduce": "own", "reduce_replicas": "same"})
    assert comm_policy(Config(), torch.bfloat16) == CommPolicy()
    everything = Config.of({"gather": "int4", "reduce": "bf16", "reduce_replicas": "int8"})
    within, between = Reduction(wire=torch.bfloat16), Reduction(wire="int8")
    assert comm_policy(everything, torch.bfloat16) == CommPolicy(gather="int4", reduce=within, reduce_replicas=between)
    between = Config.of({"reduce": "int8", "reduce_replicas": "own"})
    assert comm_policy(between, torch.bfloat16) == CommPolicy(
        reduce=Reduction(wire="int8"), reduce_replicas=Reduction()
    )
    rounded = Config.of({"reproducible": True, "reduce": "bf16"})
    assert comm_policy(rounded, torch.bfloat16).reduce == Reduction(wire=torch.bfloat16, order="ranks")
    assert {word for words in FORMATS.values() for word in words} == {"own", "same", *COSTS}


def test_a_value_that_cannot_be_used_is_named():
    for tree, said in WRONG:
        assert said in refused(Config.of, tree), tree


def test_whole_numbers_are_good_for_floats_and_a_hugging_face_config_makes_the_decoders_fields_moot():
    assert Config.of({"minutes": 2}).minutes == 2.0
    assert Config.of({"hf": "config.json", "width": 100, "heads": 3}).hf == "config.json"


def test_a_config_file_that_cannot_be_read_is_refused_in_one_line(tmp_path):
    for name, text, said in (
        ("absent.toml", None, "cannot read the config"),
        ("broken.toml", b"[[[", "does not parse"),
        ("broken.json", b"{", "does not parse"),
        ("list.json", b"[1]", "holds no fields"),
        ("binary.toml", b"\xff\xfe", "does not parse"),
        ("run.yml", b"layers: 3\n", "is YAML; give TOML, or JSON"),
    ):
        path = tmp_path / name
        if text is not None:
            path.write_bytes(text)
        told = refused(read_tree, str(path))
        assert said in told, name
        assert str(path) in told, name


def test_words_are_read_as_their_fields_types_and_refused_as_a_field_would_be():
    words = ["steps=5e2", "lr=1e-3", "tied=false", "data=7", "hf=a=b"]
    assert assigned(words) == {"steps": 500, "lr": 1e-3, "tied": False, "data": "7", "hf": "a=b"}
    assert "steps = 'many' has the wrong type" in refused(Config.of, assigned(["steps=many"]))
    assert "unknown field run.steps; did you mean steps?" in refused(Config.of, assigned(["run.steps=5"]))
    assert "write field=value" in refused(assigned, ["steps"])


def of_batch(batch, micro_batch=0):
    return Config.of({"batch": batch, "micro_batch": micro_batch})


def test_a_batch_is_split_over_ranks_and_micro_batches_the_most_that_fit():
    for ranks, micro_batch, num in ((1, 4, 3), (2, 2, 3), (3, 4, 1), (12, 1, 1)):
        assert of_batch(12, micro_batch).split(ranks) == (micro_batch, num)
    for batch, ranks, split in ((16, 1, (8, 2)), (16, 4, (4, 1)), (16, 8, (2, 1)), (18, 2, (3, 3)), (22, 2, (1, 11))):
        assert of_batch(batch).split(ranks) == split, (batch, ranks)


def test_a_batch_that_does_not_fit_the_ranks_says_what_would():
    for batch, micro_batch, ranks, said in (
        (16, 8, 3, "does not fit 3 ranks x micro_batch = 8; the nearest that does is batch=24"),
        (16, 0, 5, "does not fit 5 ranks; the nearest that does is batch=15"),
        (16, 0, 32, "does not fit 32 ranks; the nearest that does is batch=32"),
        (16, 8, 4, "batch=32; or set micro_batch=0, which finds one that fits"),
    ):
        told = refused(of_batch(batch, micro_batch).split, ranks)
        assert said in told
        of_batch(int(re.search(r"batch=(\d+)", told)[1]), micro_batch).split(ranks)


def test_choices_are_those_of_the_engine_and_of_plans():
    assert {*configs.ONE_AXIS, *configs.TWO_AXES} == set(PRESETS)
    assert set(configs.ONE_AXIS) == {name for name, levels in PRESETS.items() if len(levels) == 1}
    assert tuple(UNITS) == WRAPPINGS
    assert {*FREE, *configs.MODEL, *configs.PATHS} <= set(FIELDS)


def test_the_page_and_the_help_tell_of_every_field_and_the_example_config_is_one(request):
    page_there = (request.config.rootpath / "docs/look_up/config.md").read_text()
    assert page_there.partition("<!-- fields -->\n")[2].partition("<!-- /fields -->")[0] == page()
    assert all(f"  {name} = " in describe() for name in FIELDS)
    config = Config.of(read_tree(str(request.config.rootpath / "configs" / "small.toml")))
    assert config.split(2) == (8, 1)
