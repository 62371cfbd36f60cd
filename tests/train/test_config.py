"""A config takes what is right, and refuses the rest in one line that names the field."""

import json
import re
from dataclasses import replace
from functools import partial

from sherd.api.blocks import WRAPPINGS
from sherd.api.placements import PRESETS
from sherd.policy import TRANSPORTS, Level
from sherd.tools.simulate.settings import UNITS
from sherd.train import config as configs
from sherd.train.config import FREE, SECTIONS, BatchSplit, Config, InputError, assigned, read_tree
from sherd.train.fields import describe, page, write_config
from tests.support.refusals import one_line

refused = partial(one_line, InputError)


def test_later_trees_change_what_earlier_ones_and_the_defaults_said_and_leave_the_rest():
    assert Config.of() == Config()
    config = Config.of({"model": {"layers": 2, "width": 64}}, {"model": {"layers": 3}})
    assert (config.model.layers, config.model.width, config.model.hidden) == (3, 64, Config().model.hidden)
    config = Config.of({"optimizer": {"lr": 0.5}, "run": {"steps": 7, "prompt": "é\n"}})
    assert Config.of(json.loads(json.dumps(config.tree()))) == config


def test_toml_and_json_give_the_same_tree_and_a_config_that_is_kept_gives_itself_but_for_its_folder(tmp_path):
    (tmp_path / "a.toml").write_text('[model]\ntied = false\n[data]\npath = "x"\n[optimizer]\nlr = 1\n')
    (tmp_path / "a.json").write_text('{"model": {"tied": false}, "data": {"path": "x"}, "optimizer": {"lr": 1}}')
    assert read_tree(str(tmp_path / "a.toml")) == read_tree(str(tmp_path / "a.json"))
    config = Config.of(ODD, {"model": {"tied": False}})
    write_config(config, tmp_path)
    read = Config.of(read_tree(str(tmp_path / "config.toml")))
    assert replace(read, run=replace(read.run, out="runs/9")) == config
    assert read.run.out == ""
    assert "cannot write to" in refused(write_config, Config(), tmp_path / "absent")


WRONG = [
    ({"model": {"widht": 3}}, "unknown field model.widht; did you mean model.width?"),
    ({"modle": {}}, "unknown section modle; did you mean model?"),
    ({"run": {"zzzzzz": 1}}, "known are run.out, run.steps"),
    ({"model": 3}, "model = 3 stands outside a section"),
    ({"lr": 3}, "lr = 3 stands outside a section; put it under [optimizer]"),
    ({"other": 3}, "other = 3 stands outside a section; put it under one of [model], [data]"),
    (
        {"shard": {"strategy": "zero2", "reshard": "always"}},
        "shard.reshard = 'always', but by shard.strategy = 'zero2' every rank keeps unsharded parameters",
    ),
    ({"model": {"width": "wide"}}, "model.width = 'wide' has the wrong type; it must be a whole number"),
    ({"model": {"width": 64.0}}, "model.width = 64.0 has the wrong type"),
    ({"model": {"width": True}}, "model.width = True has the wrong type"),
    ({"model": {"tied": 1}}, "model.tied = 1 has the wrong type; it must be true or false"),
    ({"data": {"path": 1}}, "data.path = 1 has the wrong type; it must be a string"),
    ({"optimizer": {"lr": float("nan")}}, "optimizer.lr = nan has the wrong type; it must be a finite number"),
    ({"optimizer": {"lr": 0}}, "optimizer.lr = 0.0 is out of its limits; it must be above 0"),
    ({"optimizer": {"beta2": 1.0}}, "optimizer.beta2 = 1.0 is out of its limits; it must be in [0, 1)"),
    ({"data": {"held_out": 0.0}}, "data.held_out = 0.0 is out of its limits; it must be in (0, 1)"),
    ({"run": {"steps": -1}}, "run.steps = -1 is out of its limits; it must be at least 0"),
    ({"run": {"precision": "fp8"}}, "run.precision = 'fp8' is out of its limits; it must be one of fp32, bf16"),
    (
        {"run": {"device": "cuda:1"}},
        "run.device = 'cuda:1' is out of its limits; it must be a type, such as cuda or xpu",
    ),
    ({"model": {"width": 100, "heads": 3}}, "model.width = 100 does not split into model.heads = 3"),
    ({"model": {"width": 6, "heads": 2}}, "model.width = 6 does not split into model.heads = 2"),
    ({"model": {"heads": 2, "kv_heads": 4}}, "model.kv_heads = 4 does not divide model.heads = 2"),
]


def test_a_value_that_cannot_be_used_is_named():
    for tree, said in WRONG:
        assert said in refused(Config.of, tree), tree


def test_whole_numbers_are_good_for_floats_no_clip_is_one_and_a_hugging_face_config_makes_the_decoders_fields_moot():
    assert [Config.of({"optimizer": {"clip": clip}}).optimizer.clip for clip in (2, 0)] == [2.0, 0.0]
    assert Config.of({"model": {"hf": "config.json", "width": 100, "heads": 3}}).model.hf == "config.json"


def test_a_config_file_that_cannot_be_read_is_refused_in_one_line(tmp_path):
    for name, text, said in (
        ("absent.toml", None, "cannot read the config"),
        ("broken.toml", b"[[[", "does not parse"),
        ("broken.json", b"{", "does not parse"),
        ("list.json", b"[1]", "holds no sections"),
        ("binary.toml", b"\xff\xfe", "does not parse"),
        ("run.yml", b"model:\n  layers: 3\n", "is YAML; give TOML, or JSON"),
    ):
        path = tmp_path / name
        if text is not None:
            path.write_bytes(text)
        told = refused(read_tree, str(path))
        assert said in told, name
        assert str(path) in told, name


def test_words_are_read_as_their_fields_types_and_refused_as_a_field_would_be():
    words = ["run.steps=5", "optimizer.lr=1e-3", "model.tied=false", "data.path=7", "run.prompt=a=b"]
    of_run, optimizer = {"steps": 5, "prompt": "a=b"}, {"lr": 1e-3}
    assert assigned(words) == {"run": of_run, "optimizer": optimizer, "model": {"tied": False}, "data": {"path": "7"}}
    assert "run.steps = 'many' has the wrong type" in refused(Config.of, assigned(["run.steps=many"]))
    for word in ("steps", "steps=5", "run.steps"):
        assert "write section.field=value" in refused(assigned, [word]), word


def of_batch(batch, micro_batch=0):
    return Config.of({"optimizer": {"batch": batch, "micro_batch": micro_batch}})


def test_a_batch_is_split_over_ranks_and_micro_batches_the_most_that_fit_and_leave_one_for_each_stage():
    for ranks, micro_batch, times in ((1, 4, 3), (2, 2, 3), (3, 4, 1), (12, 1, 1)):
        assert of_batch(12, micro_batch).split(ranks) == BatchSplit(micro_batch, times)
    for batch, ranks, stages, split in (
        (16, 1, 1, BatchSplit(8, 2)),
        (16, 2, 1, BatchSplit(8, 1)),
        (16, 4, 1, BatchSplit(4, 1)),
        (16, 8, 1, BatchSplit(2, 1)),
        (18, 2, 1, BatchSplit(3, 3)),
        (22, 2, 1, BatchSplit(1, 11)),
        (16, 2, 2, BatchSplit(4, 2)),
        (16, 2, 8, BatchSplit(1, 8)),
        (12, 1, 4, BatchSplit(3, 4)),
    ):
        assert of_batch(batch).split(ranks, stages) == split, (batch, ranks, stages)


def test_a_batch_that_does_not_fit_the_ranks_says_what_would():
    for batch, micro_batch, ranks, stages, said in (
        (16, 8, 3, 1, "does not fit 3 ranks x optimizer.micro_batch = 8; the nearest that does is optimizer.batch=24"),
        (16, 0, 5, 1, "does not fit 5 ranks; the nearest that does is optimizer.batch=15"),
        (16, 0, 32, 1, "does not fit 32 ranks; the nearest that does is optimizer.batch=32"),
        (16, 8, 4, 1, "optimizer.batch=32; or set optimizer.micro_batch=0, which finds one that fits"),
        (16, 8, 2, 2, "and 2 stages, each with a micro-batch; the nearest that does is optimizer.batch=32; or set"),
        (2, 0, 1, 4, "does not fit 1 rank and 4 stages, each with a micro-batch; the nearest that does is"),
    ):
        told = refused(of_batch(batch, micro_batch).split, ranks, stages)
        assert said in told
        remedy = int(re.search(r"optimizer.batch=(\d+)", told)[1])
        of_batch(remedy, micro_batch).split(ranks, stages)


def test_a_warm_up_longer_than_the_run_is_noted():
    assert Config().notes() == []
    assert Config.of({"run": {"steps": 50}}).notes() == []
    (note,) = Config.of({"run": {"steps": 30}}).notes()
    assert "whose learning rate ends at 0.0012; optimizer.warmup=3 is a tenth of it" in note


def test_choices_are_those_of_the_engine():
    assert {*configs.ONE_AXIS, *configs.TWO_AXES} == set(PRESETS)
    assert set(configs.ONE_AXIS) == {name for name, levels in PRESETS.items() if len(levels) == 1}
    assert set(configs.KEEP_WHOLE) == {name for name, levels in PRESETS.items() if max(levels) < Level.PARAMETERS}
    assert configs.TRANSPORTS == TRANSPORTS
    assert configs.WRAPPINGS == WRAPPINGS == tuple(UNITS)
    known = {f"{section}.{name}" for section, values in Config().tree().items() for name in values}
    assert known >= set(FREE), "fields that decide no loss are fields"


ODD = {"run": {"prompt": 'a "b" \\ \n\t é \x7f \x01 😀', "out": "runs/9", "minutes": 1e-9}, "optimizer": {"lr": 1e16}}


def test_the_page_and_the_help_tell_of_every_field_and_the_example_config_is_one(request):
    page_there = (request.config.rootpath / "docs/look_up/config.md").read_text()
    assert page_there.partition("<!-- fields -->\n")[2].partition("<!-- /fields -->")[0] == page()
    text = describe()
    for name, section in SECTIONS.items():
        assert f"[{name}]" in text
        assert all(f"  {field} = " in text for field in section.__dataclass_fields__)
    config = Config.of(read_tree(str(request.config.rootpath / "configs" / "small.toml")))
    assert config.split(2) == BatchSplit(8, 1)
