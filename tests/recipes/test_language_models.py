"""The recipes that train language models of Hugging Face: what they print and save, and that ranks change no value."""

import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.recipes.pages import assert_shows_memory_of_one_rank, losses, printed_as_shown
from tests.test_examples import EXAMPLES

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in v6:FutureWarning")

UNEVEN = ("--steps", "10", "--batch", "5")  # two ranks have two and three


@pytest.fixture
def small(monkeypatch):
    """The module of the model and the data."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "recipes"))
    import small

    yield small
    del sys.modules["small"]


def loss_of(model, small):
    """The mean over the targets of the first pairs of texts."""
    tokens, targets = small.padded(small.PAIRS[:50])
    with torch.no_grad():
        return cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten()).item()


def falling(name, folder, run):
    """Runs the recipe as its page does; its last loss, which is lower than the first."""
    found = losses(printed_as_shown(name, folder, run))
    assert found[-1] < found[0]
    return found[-1]


def test_a_fine_tuned_model_loads_into_transformers_with_its_loss_and_into_other_recipes(small, run, tmp_path):
    last = falling("finetune", tmp_path, run)
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert loss_of(tuned, small) == pytest.approx(last, abs=0.5)
    assert loss_of(small.made(), small) > last + 1
    words = "--model", "tuned", "--steps", "10"
    for name, most in (("finetune", last), ("dpo", 0.8)):
        assert losses(run(f"recipes/{name}.py", tmp_path, *words)[0])[-1] < most


def test_saved_adapters_make_the_base_model_the_tuned_one(small, run, tmp_path):
    last = falling("lora", tmp_path, run)
    base = small.made()
    before = loss_of(base, small)
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    assert loss_of(tuned, small) == pytest.approx(last, abs=0.5)
    assert before > last + 1


def test_adapters_train_over_a_base_model_in_4_bits_that_is_sharded_as_such(run, tmp_path):
    pytest.importorskip("torchao")
    falling("qlora", tmp_path, run)


def test_a_model_that_rests_on_the_host_or_a_disk_has_the_same_losses_on_one_rank(small, run, tmp_path):
    two = falling("one_gpu", tmp_path, run)
    assert two < 3
    words = "--disk", str(tmp_path / "disk"), "--out", "tuned"
    (one,) = run("recipes/one_gpu.py", tmp_path, *words, num_ranks=1)
    assert losses(one)[-1] == pytest.approx(two, abs=0.1)
    assert not list((tmp_path / "disk").iterdir())
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype=torch.float32)
    assert loss_of(tuned, small) == pytest.approx(two, abs=0.5)


def test_a_policy_learns_to_prefer_and_begins_as_its_reference(run, tmp_path):
    printed = printed_as_shown("dpo", tmp_path, run)
    first, *_, last = losses(printed)
    assert first == 0.693  # log(2)
    assert last < first
    assert "preferred 0.000" in printed.splitlines()[0]


@pytest.mark.parametrize("name", ["finetune", "lora", "dpo", "qlora"])
def test_one_rank_has_the_losses_of_two_with_other_numbers_of_answers_and_tokens(name, run, tmp_path):
    if name == "qlora":
        pytest.importorskip("torchao")
    two, _ = run(f"recipes/{name}.py", tmp_path, *UNEVEN)
    (one,) = run(f"recipes/{name}.py", tmp_path, *UNEVEN, num_ranks=1)
    assert losses(two) == pytest.approx(losses(one), abs=2e-3)
    assert_shows_memory_of_one_rank(name, one)


@pytest.mark.parametrize("words", [("finetune", "--checkpointing"), ("lora",), ("dpo",), ("qlora",)], ids=" ".join)
def test_it_trains_in_bfloat16_too(words, run, tmp_path):
    name, *others = words
    if name == "qlora":
        pytest.importorskip("torchao")
    found = losses(run(f"recipes/{name}.py", tmp_path, *others, "--bf16", "--steps", "20")[0])
    assert found[-1] < found[0]
