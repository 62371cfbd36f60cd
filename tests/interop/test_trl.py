"""TRL's trainers train with sherd in place of FSDP2 as they do without FSDP."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import sherd
from tests.interop.clients import begun, run_recipe
from tests.interop.test_accelerate import begun_with
from tests.interop.test_transformers import (
    BRIEF,
    KINDS,
    arguments,
    causal,
    close,
    figures,
    llama,
    lora,
    saved,
    saves_the_same,
    sharding,
    trained,
    trains_as_under_ddp,
)
from tests.support.comparing import assert_same

trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

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


def data(**columns: list[Any]) -> Any:
    return datasets.Dataset.from_dict(columns)


def beside(rows: Any, adapted: bool) -> dict[str, Any]:
    """What every trainer gets beside a model and its arguments."""
    given = {"train_dataset": rows, "eval_dataset": rows, "processing_class": tokenizer()}
    return {**given, "peft_config": lora()} if adapted else given


def sft(folder: str, adapted: bool, **more: Any) -> Any:
    args = arguments(trl.SFTConfig, folder, **{"max_length": 16, "bf16": False, **more})
    return trl.SFTTrainer(llama(), args, **beside(data(text=texts(0)), adapted))


def talking(folder: str, adapted: bool, **more: Any) -> Any:
    """SFT on conversations, of which only the answers count."""
    args = arguments(trl.SFTConfig, folder, **{"max_length": 16, "bf16": False, "assistant_only_loss": True, **more})
    says = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        for asked, answer in zip(texts(0), texts(100), strict=True)
    ]
    given = beside(data(messages=says), adapted)
    given["processing_class"].chat_template = (
        "{% for each in messages %}{% if each.role == 'user' %}<s> {{ each.content }} {% else %}"
        "{% generation %}{{ each.content }} </s>{% endgeneration %}{% endif %}{% endfor %}"
    )
    return trl.SFTTrainer(llama(), args, **given)


def pairs() -> Any:
    return data(prompt=texts(0), chosen=texts(100, " "), rejected=texts(200, " "))


def dpo(folder: str, adapted: bool, **more: Any) -> Any:
    """Under adapters the reference is the model without them, else a model of its own."""
    args = arguments(trl.DPOConfig, folder, **{"max_length": 16, "bf16": False, **more})
    trainer = trl.DPOTrainer(llama(), None if adapted else llama(), args, **beside(rows_of(args, pairs()), adapted))
    if not adapted:
        is_fsdp1 = "version" in more.get("fsdp_config", {})
        kind = sherd.FullyShardedDataParallel if is_fsdp1 else torch.distributed.fsdp.FSDPModule  # TRL's own doing
        assert isinstance(trainer.ref_model, kind) is ("fsdp" in more)
    return trainer


def rows_of(args: Any, rows: Any) -> Any:
    """`rows`, from a folder that all ranks read where TRL computes what the reference says before the training."""
    if not args.precompute_ref_log_probs:
        return rows
    folder = f"{args.output_dir}/rows"
    if args.process_index == 0:
        rows.save_to_disk(folder)
    torch.distributed.barrier()
    return datasets.load_from_disk(folder)


def dpo_of_adapters(folder: str, adapted: bool, **more: Any) -> Any:
    """The policy has adapters before the trainer gets it, and the reference is a copy of these."""
    import peft

    args = arguments(trl.DPOConfig, folder, **{"max_length": 16, "bf16": False, **more})
    return trl.DPOTrainer(peft.get_peft_model(llama(), lora()), None, args, **beside(pairs(), False))


def length(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(each)) for each in completions]


def grpo(folder: str, adapted: bool, **more: Any) -> Any:
    generates = {"num_generations": 2, "max_completion_length": 6}
    args = arguments(trl.GRPOConfig, folder, **{**generates, "bf16": False, **more})
    return trl.GRPOTrainer(llama(), length, args, **beside(data(prompt=texts(0)), adapted))


ADAPTED = pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])


@pytest.mark.values
@ADAPTED
@pytest.mark.parametrize("build", [sft, dpo])
def test_it_trains_stops_early_evaluates_and_saves_as_under_ddp(build, adapted, world, tmp_path):
    expected = world(2).run(trained, build, str(tmp_path / "plain"), adapted)
    close(world(2).run(trained, build, str(tmp_path / "sharded"), adapted, {}), expected)
    saves_the_same(tmp_path / "sharded", tmp_path / "plain", llama)


@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 2)])
@ADAPTED
@pytest.mark.parametrize("build", [sft, dpo])
def test_it_resumes_on_as_many_ranks_and_on_others(build, adapted, before, after, kind, world, tmp_path):
    config = {"state_dict_type": kind}
    (expected, *_) = world(before).run(trained, build, str(tmp_path / "out"), adapted, config)
    resumed = str(tmp_path / "out/checkpoint-2")
    for found in world(after).run(trained, build, str(tmp_path / "again"), adapted, config, resumed):
        close(found, expected)
    close(saved(f"{tmp_path}/again/final", llama), saved(f"{tmp_path}/out/final", llama))


REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
SETTINGS: dict[str, tuple[Any, bool, dict[str, Any]]] = {
    "sft without checkpoints": (sft, True, {"gradient_checkpointing": False}),
    "packing": (sft, True, {"packing": True}),
    "answers": (talking, True, {}),
    "noise": (sft, False, {"neftune_noise_alpha": 5.0}),
    "dpo without checkpoints": (dpo, True, {"gradient_checkpointing": False}),
    "reentrant": (
        dpo,
        True,
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    "reference before": (dpo, False, {"precompute_ref_log_probs": True}),
    "reference before, adapters": (dpo, True, {"precompute_ref_log_probs": True}),
    "reference of adapters": (dpo_of_adapters, True, {}),
    "units of sherd": (dpo, True, {"options": {"policy": "auto", "placement": sherd.Flat()}}),
    "whole tensors": (sft, True, {"options": {"placement": sherd.Owned()}}),
    "sft with fsdp1": (sft, True, {"fsdp_config": {"version": 1, "use_orig_params": True}}),
    "dpo with fsdp1": (dpo, False, {"fsdp_config": {"version": 1, "use_orig_params": False}}),
    "grpo": (grpo, False, {"eval_strategy": "steps"}),
    "grpo, adapters": (grpo, True, {"eval_strategy": "steps"}),
}


@pytest.mark.values
@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_trains_as_under_ddp(setting, world, tmp_path):
    trains_as_under_ddp(world, tmp_path, *SETTINGS[setting])


def in_half_precision(library: str, build: Any, folder: str, adapted: bool, precision: str) -> Any:
    with begun_with(library):
        given = {**BRIEF, **sharding({}), "bf16": precision == "bf16", "fp16": precision == "fp16"}
        trainer = build(f"{folder}/{library}", adapted, **given)
        trainer.train()
        assert isinstance(trainer.model, sherd.FSDPModule) is (library == "sherd")
        return figures(trainer)


@pytest.mark.pairs
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@ADAPTED
@pytest.mark.parametrize("build", [causal, sft, dpo])
def test_half_precision_trains_as_under_fsdp2(build, adapted, precision, world, tmp_path):
    found, expected = (
        world(2).run(in_half_precision, library, build, str(tmp_path), adapted, precision)
        for library in ("sherd", "torch")
    )
    assert_same(found, expected, rtol=5e-3, atol=1e-3)


def recipe_of_trl(folder: str) -> None:
    os.chdir(folder)
    with begun():
        names = run_recipe("TRL", model=llama().float(), data=data(text=texts(0)), tokenizer=tokenizer())
        assert isinstance(names["trainer"].model, sherd.FSDPModule)
        assert names["trainer"].state.global_step == 2


def test_the_program_of_the_docs_runs(world, tmp_path):
    world(2).run(recipe_of_trl, str(tmp_path))
    assert all("lora" in name for name in saved(f"{tmp_path}/out/final", llama))
