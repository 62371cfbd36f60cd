"""Does a config take what is right and refuse the rest in one line that names the field?"""

import json

import pytest

from sherd.train.config import SECTIONS, Config, InputError, assigned, describe, read_tree


def refusal(*trees):
    with pytest.raises(InputError) as caught:
        Config.of(*trees)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_any_input_the_defaults_stand():
    assert Config.of() == Config()


def test_later_trees_change_what_earlier_ones_said_and_leave_the_rest():
    config = Config.of({"model": {"layers": 2, "width": 64}}, {"model": {"layers": 3}})
    assert (config.model.layers, config.model.width, config.model.hidden) == (3, 64, Config().model.hidden)


def test_a_config_written_as_a_tree_reads_back_as_itself():
    config = Config.of({"optimizer": {"lr": 0.5}, "run": {"steps": 7, "prompt": "é\n"}})
    assert Config.of(json.loads(json.dumps(config.tree()))) == config


def test_toml_and_json_give_the_same_tree(tmp_path):
    (tmp_path / "a.toml").write_text('[model]\ntied = false\n[data]\npath = "x"\n[optimizer]\nlr = 1\n')
    (tmp_path / "a.json").write_text('{"model": {"tied": false}, "data": {"path": "x"}, "optimizer": {"lr": 1}}')
    assert read_tree(str(tmp_path / "a.toml")) == read_tree(str(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"model": {"widht": 3}}, "unknown field model.widht; did you mean model.width?"),
        ({"modle": {}}, "unknown section modle; did you mean model?"),
        ({"run": {"zzzzzz": 1}}, "known are run.out, run.steps"),
        ({"model": 3}, "model = 3 stands outside a section"),
        ({"model": {"width": "wide"}}, "model.width = 'wide' has the wrong type; it must be a whole number"),
        ({"model": {"width": 64.0}}, "model.width = 64.0 has the wrong type"),
        ({"model": {"width": True}}, "model.width = True has the wrong type"),
        ({"model": {"tied": 1}}, "model.tied = 1 has the wrong type; it must be true or false"),
        ({"data": {"path": 1}}, "data.path = 1 has the wrong type; it must be a string"),
        (
            {"optimizer": {"lr": float("nan")}},
            "optimizer.lr = nan has the wrong type; it must be a finite number",
        ),
        ({"optimizer": {"lr": 0}}, "optimizer.lr = 0.0 is out of its limits; it must be above 0"),
        ({"optimizer": {"beta2": 1.0}}, "optimizer.beta2 = 1.0 is out of its limits; it must be in [0, 1)"),
        ({"data": {"held_out": 0.0}}, "data.held_out = 0.0 is out of its limits; it must be in (0, 1)"),
        ({"run": {"steps": -1}}, "run.steps = -1 is out of its limits; it must be at least 0"),
        (
            {"run": {"precision": "fp8"}},
            "run.precision = 'fp8' is out of its limits; it must be one of fp32, bf16",
        ),
        ({"model": {"width": 100, "heads": 3}}, "model.width = 100 does not split into model.heads = 3"),
        ({"model": {"width": 6, "heads": 2}}, "model.width = 6 does not split into model.heads = 2"),
        ({"model": {"heads": 2, "kv_heads": 4}}, "model.kv_heads = 4 does not divide model.heads = 2"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(tree, said):
    assert said in refusal(tree)


def test_a_whole_number_is_good_for_a_field_of_floats():
    assert Config.of({"optimizer": {"clip": 2}}).optimizer.clip == 2.0


def test_a_hugging_face_config_makes_the_decoders_own_fields_moot():
    assert Config.of({"model": {"hf": "config.json", "width": 100, "heads": 3}}).model.hf == "config.json"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("absent.toml", None, "cannot read the config"),
        ("broken.toml", "[[[", "does not parse"),
        ("broken.json", "{", "does not parse"),
        ("list.json", "[1]", "holds no sections"),
        ("binary.toml", b"\xff\xfe", "does not parse"),
    ],
)
def test_a_config_file_that_cannot_be_read_is_refused_in_one_line(tmp_path, name, text, said):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=said) as caught:
        read_tree(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_words_are_read_as_their_fields_types():
    words = ["run.steps=5", "optimizer.lr=1e-3", "model.tied=false", "data.path=7", "run.prompt=a=b"]
    assert assigned(words) == {
        "run": {"steps": 5, "prompt": "a=b"},
        "optimizer": {"lr": 1e-3},
        "model": {"tied": False},
        "data": {"path": "7"},
    }


def test_a_word_that_does_not_read_as_its_type_is_refused_as_a_field_would_be():
    assert "run.steps = 'many' has the wrong type" in refusal(assigned(["run.steps=many"]))


@pytest.mark.parametrize("word", ["steps", "steps=5", "run.steps"])
def test_a_word_that_assigns_nothing_says_how_to(word):
    with pytest.raises(InputError, match=r"write section\.field=value"):
        assigned([word])


@pytest.mark.parametrize(("ranks", "micro_batch", "times"), [(1, 4, 3), (2, 2, 3), (3, 4, 1), (12, 1, 1)])
def test_a_batch_is_split_over_ranks_and_micro_batches(ranks, micro_batch, times):
    config = Config.of({"optimizer": {"batch": 12, "micro_batch": micro_batch}})
    assert config.accumulation(ranks) == times


def test_a_batch_that_does_not_fit_the_ranks_says_what_would():
    config = Config.of({"optimizer": {"batch": 16, "micro_batch": 8}})
    with pytest.raises(InputError, match=r"optimizer.batch = 16 does not fit 3 ranks .* a multiple of 24"):
        config.accumulation(3)


def test_help_tells_of_every_field():
    text = describe()
    for name, section in SECTIONS.items():
        assert f"[{name}]" in text
        assert all(f"  {field} = " in text for field in section.__dataclass_fields__)


def test_the_example_config_is_one(request):
    config = Config.of(read_tree(str(request.config.rootpath / "configs" / "small.toml")))
    assert config.accumulation(2) == 2
