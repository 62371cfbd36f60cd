"""A student learns from a frozen, sharded teacher as in one process."""

import math
import re

import pytest

from tests.recipes.pages import losses, printed_as_shown, section_of
from tests.test_examples import run

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


@pytest.mark.slow
def test_the_student_comes_near_the_teacher_which_keeps_no_optimizer(tmp_path):
    printed = printed_as_shown("distill", tmp_path)
    for name in ("loss", "text loss"):
        found = losses(printed, name)
        assert found[-1] < found[0] / 1.5, name
    trained, frozen = re.findall(r"^teacher.*: (\d+\.\d+) MiB", printed, re.MULTILINE)
    assert float(frozen) < float(trained)


def test_ranks_change_no_loss(tmp_path):
    words = "--steps", "10", "--teacher-steps", "10", "--batch", "6"
    several, alone = (run("recipes/distill.py", tmp_path / f"of {n}", *words, num_ranks=n)[0] for n in (2, 1))
    assert losses(several) == pytest.approx(losses(alone), abs=2e-3)
    assert losses(several, "text loss") == pytest.approx(losses(alone, "text loss"), abs=2e-3)
    assert f"`{alone.splitlines()[-1]}`" in section_of("distill")


def test_a_teacher_brings_its_tokenizer_and_the_student_has_its_vocabulary(tmp_path):
    words = {chr(code): code - 32 for code in range(32, 127)} | {"?word": 95}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?word"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(tmp_path / "teacher")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=len(words), **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "teacher")
    printed, _ = run("recipes/distill.py", tmp_path, "--teacher", "teacher", "--steps", "10")
    first, last = losses(printed)
    assert last < first
    assert losses(printed, "text loss")[0] == pytest.approx(math.log(len(words)), abs=0.2)
