"""lm-eval reads what a sharded model has saved for Hugging Face, by the command of the docs."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

import sherd

transformers = pytest.importorskip("transformers")

from tests.interop.test_transformers import llama  # noqa: E402
from tests.interop.test_trl import WORDS, texts, tokenizer  # noqa: E402

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is in the extra lm-eval"
)

TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: TEXTS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: [w1, w2]
doc_to_target: 0
metric_list: [{metric: acc}]
"""


def saved(folder):
    sherd.save_pretrained(sherd.auto_shard(llama()), folder, tokenizer=tokenizer())


def expected_share():
    """How often a plain model holds w1 for likelier than w2."""
    model, words = llama(), tokenizer()
    logits = [model(**words(text, return_tensors="pt")).logits[0, -1] for text in texts(0)]
    return sum(each[WORDS["w1"]].item() > each[WORDS["w2"]].item() for each in logits) / len(logits)


@needs_lm_eval
@pytest.mark.slow
def test_lm_eval_scores_the_exported_folder_as_the_model(world, tmp_path):
    world(2).run(saved, str(tmp_path / "out"))
    rows = tmp_path / "texts.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(0)))
    (tmp_path / "words.yaml").write_text(TASK.replace("TEXTS", str(rows)))
    command = "--model hf --model_args pretrained=out --tasks words --include_path . --device cpu --output_path scores"
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *command.split()],
        cwd=tmp_path,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (scores,) = (tmp_path / "scores").rglob("*.json")
    assert json.loads(scores.read_text())["results"]["words"]["acc,none"] == expected_share()
