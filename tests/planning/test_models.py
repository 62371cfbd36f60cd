"""A word names a model, and a wrong one is told in a line."""

import itertools
import json

import pytest
import torch
from torch import nn

from sherd.cli.planned_model import model_from, own_or_usual_loss
from sherd.tools.plan.reading import read_work
from sherd.train.config import InputError
from tests.planning import models
from tests.planning.models import LLAMA
from tests.planning.played import names

FACTORIES = """
import torch
from torch import nn
from beside import WIDTH

def module():
    return nn.Sequential(nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50))

def pair():
    return nn.Linear(WIDTH, 3), torch.zeros(5, WIDTH)

def triple():
    return *pair(), lambda model, batch: model(batch).exp().sum()

def fails():
    raise KeyError("no such\\nfield")

def leaves():
    raise SystemExit(3)

def other():
    return [1]

def nothing():
    return ()
"""


@pytest.fixture
def written(tmp_path):
    def write(name, content):
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return str(tmp_path / name)

    write("beside.py", "WIDTH = 8")
    return write


def work_of(planned, samples=2, context=16):
    return read_work(planned.model, planned.batch(samples, context), planned.layout.loss)


def test_a_factory_makes_a_module_of_tokens_or_brings_a_batch_and_a_loss(written):
    file = written("factories.py", FACTORIES)
    planned = model_from(f"{file}:module")
    assert all(each.is_meta for each in planned.model.parameters())
    work, pair, triple = (work_of(model_from(f"{file}:{name}")) for name in ("module", "pair", "triple"))
    assert (work.samples, work.tokens) == (2, 32)
    assert "aten.nll_loss_forward" in names(work)
    assert (pair.samples, pair.tokens) == (5, 0)
    assert "aten.exp" not in names(pair)
    assert "aten.exp" in names(triple)
    assert work_of(model_from("tests.planning.models:perceptron")).samples == 32, "a factory in a package"


def test_a_hugging_face_config_makes_a_causal_lm_with_float32_parameters_and_downloads_nothing(written, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    planned = model_from(written("config.json", LLAMA | {"dtype": "bfloat16"}))
    assert type(planned.model).__name__ == "LlamaForCausalLM"
    assert planned.context == 128
    assert {each.dtype for each in planned.model.parameters()} == {torch.float32}
    assert work_of(planned).tokens == 32
    tied = model_from(written("config.json", {**LLAMA, "tie_word_embeddings": True})).model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_a_config_of_sherd_train_makes_its_model_with_the_parameters_that_are_stepped(written):
    tree = {"layers": 2, "width": 64, "hidden": 96, "context": 48, "precision": "bf16"}
    planned = model_from(written("train.json", tree))
    assert (planned.context, planned.config.layers) == (48, 2)
    assert {each.dtype for each in planned.model.parameters()} == {torch.float32}
    as_toml = "layers = 2\nwidth = 64\nhidden = 96\ncontext = 48\n"
    again = model_from(written("train.toml", f'{as_toml}precision = "bf16"\n'))
    assert work_of(again) == work_of(planned)


def test_hugging_face_configs_of_sherd_train(written):
    path = written("config.json", LLAMA)
    planned = model_from(written("train.json", {"hf": path, "context": 64}))
    assert work_of(planned).flops == work_of(model_from(path)).flops


def test_the_loss_is_the_models_own_the_cross_entropy_of_tokens_or_a_sum():
    torch.manual_seed(0)
    x, plain = torch.randn(3, 4), nn.Linear(4, 4)
    own = models.Calls(lambda x: {"loss": plain(x).exp().mean()})
    assert own_or_usual_loss(own, x) == own(x)["loss"]
    assert own_or_usual_loss(plain, (x,)) == plain(x).sum()
    model, tokens = models.decoder()
    model.reset_parameters(0)
    expected = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(own_or_usual_loss(model, tokens), expected)


WRONG_NAMES = {
    "nowhere": "is no file; name a factory as",
    "nowhere.json": "nowhere.json: not found",
    "nowhere.py:make": r"nowhere\.py: not found",
    "no.such.package:make": "raised ModuleNotFoundError: No module named 'no'",
    "tests.planning.models:missing": r"tests\.planning\.models has no function missing; it has tokens, next_token, ",
    "factories.py": r"factories\.py names no function in it; write .*factories\.py:FUNCTION$",
    "factories.py:missing": r"factories\.py has no function missing; it has module, pair, triple, fails, ",
    "factories.py:WIDTH": r"factories\.py: WIDTH is no function, but int",
    "factories.py:fails": "raised KeyError: 'no such",
    "factories.py:leaves": "raised SystemExit: 3",
    "factories.py:other": "returned list; return a module",
    "factories.py:nothing": "returned tuple; return a module",
    "broken.py:make": "raised SyntaxError: ",
}
NO_NUMBER = "expected a whole number from 1 on$"
NO_CONFIG = "is no config of transformers: "
WRONG_CONFIGS = [
    ({"hidden_size": 64}, "has neither a model_type, as Hugging Face configs have, nor fields of sherd train"),
    ({"model_type": "sherd-own"}, f"{NO_CONFIG}.*sherd-own"),
    ({"model_type": "t5"}, "makes no causal LM: .*T5Config"),
    ({**LLAMA, "num_hidden_layers": -1}, rf"wrong\.json: num_hidden_layers = -1; {NO_NUMBER}"),
    ({**LLAMA, "vocab_size": 0}, rf"wrong\.json: vocab_size = 0; {NO_NUMBER}"),
    ({"model_type": "gpt2", "n_layer": 0}, rf"wrong\.json: n_layer = 0; {NO_NUMBER}"),
    (
        {"model_type": "clip", "vision_config": {"num_hidden_layers": -2}},
        rf"wrong\.json: vision_config\.num_hidden_layers = -2; {NO_NUMBER}",
    ),
    ({**LLAMA, "num_attention_heads": "four"}, f"{NO_CONFIG}.*heads': TypeError: .* expected int, got str"),
    ({**LLAMA, "num_attention_heads": 5}, rf"{NO_CONFIG}.*: The hidden size \(64\) is not a multiple of .* \(5\)"),
    ({**LLAMA, "hidden_act": "none"}, "makes no causal LM: KeyError: 'none'$"),
    ("{", "does not parse"),
    ([1], "holds no fields"),
    ({"layer": 3, "width": 64}, "unknown field layer; did you mean layers"),
]


def test_what_names_no_model_is_told_in_a_line(written, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    written("factories.py", FACTORIES)
    written("broken.py", "def make(:")
    configs = ((written("wrong.json", content), said) for content, said in WRONG_CONFIGS)
    for name, said in itertools.chain(WRONG_NAMES.items(), configs):
        with pytest.raises(InputError, match=said) as error:
            model_from(name)
        assert "\n" not in str(error.value), name


def test_a_factory_that_leaves_the_meta_device_is_told(written):
    source = "import torch\ndef make():\n    return torch.nn.Linear(3, 3, device='cpu'), torch.zeros(2, 3)"
    planned = model_from(written("factory.py", source) + ":make")
    with pytest.raises(InputError, match="weight is on cpu, and not on meta"):
        work_of(planned)
