"""TRL's trainers train with sherd in place of FSDP2 as they do without FSDP."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import sherd
from tests.interop.clients import begun, run_recipe
from tests.interop.test_transformers import arguments, close, figures, llama, weights

pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in v6:FutureWarning")

WORDS = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(46))])}


def tokenizer() -> Any:
    """One that splits at blanks, made here and not loaded."""
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def texts(first_seed: int, prefix: str = "") -> list[str]:
    generators = (torch.Generator().manual_seed(first_seed + number) for number in range(32))
    drawn = (torch.randint(46, (5,), generator=generator).tolist() for generator in generators)
    return [prefix + " ".join(f"w{number}" for number in numbers) for numbers in drawn]


def data(**columns: list[str]) -> Any:
    import datasets

    return datasets.Dataset.from_dict(columns)


def beside(rows: Any) -> dict[str, Any]:
    """What every trainer gets beside a model and its arguments."""
    return {"train_dataset": rows, "eval_dataset": rows, "processing_class": tokenizer()}


def sft(folder: str, **more: Any) -> Any:
    import trl

    args = arguments(trl.SFTConfig, folder, max_length=16, **more)
    return trl.SFTTrainer(llama(), args, **beside(data(text=texts(0))))


def dpo(folder: str, **more: Any) -> Any:
    import trl

    args = arguments(trl.DPOConfig, folder, max_length=16, **more)
    rows = data(prompt=texts(0), chosen=texts(100, " "), rejected=texts(200, " "))
    trainer = trl.DPOTrainer(llama(), llama(), args, **beside(rows))
    assert isinstance(trainer.ref_model, torch.distributed.fsdp.FSDPModule) is ("fsdp" in more)  # TRL's own doing
    return trainer


def length(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(each)) for each in completions]


def grpo(folder: str, **more: Any) -> Any:
    import trl

    args = arguments(trl.GRPOConfig, folder, num_generations=2, max_completion_length=6, **more)
    return trl.GRPOTrainer(llama(), length, args, **beside(data(prompt=texts(0))))


def trained(build: Any, folder: str, uses_sherd: bool) -> Any:
    with begun(uses_sherd):
        trainer = build(folder, bf16=False, **({"fsdp": True} if uses_sherd else {}))
        trainer.train()
        assert isinstance(trainer.model, sherd.FSDPModule) is uses_sherd
        trainer.save_model(f"{folder}/final")
        return figures(trainer)


@pytest.mark.parametrize("build", [sft, dpo, grpo])
def test_it_trains_evaluates_and_saves_as_under_ddp(build, world, tmp_path):
    expected = world(2).run(trained, build, str(tmp_path / "plain"), False)
    close(world(2).run(trained, build, str(tmp_path / "sharded"), True), expected)
    close(weights(str(tmp_path / "sharded/final")), weights(str(tmp_path / "plain/final")))


def recipe_of_trl(folder: str) -> None:
    os.chdir(folder)
    with begun():
        names = run_recipe("TRL", model=llama().float(), data=data(text=texts(0)), tokenizer=tokenizer())
        assert isinstance(names["trainer"].model, sherd.FSDPModule)
        assert names["trainer"].state.global_step == 2


def test_the_program_of_the_docs_runs(world, tmp_path):
    world(2).run(recipe_of_trl, str(tmp_path))
