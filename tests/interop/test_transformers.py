"""transformers' Trainer trains with sherd in place of FSDP2 as it does without FSDP."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import sherd
from tests.interop.clients import begun, run_recipe
from tests.support.comparing import assert_same

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in v6:FutureWarning")

BATCH = 4  # of all ranks
SMALL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FIGURES = ("loss", "grad_norm", "eval_loss", "eval_sum", "reward", "eval_reward")


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **TOKENS)).double()


def t5(adapted: bool) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, dropout_rate=0.0)
    model = transformers.T5ForConditionalGeneration(config).double()
    if not adapted:
        return model
    import peft

    lora = peft.LoraConfig(target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM", init_lora_weights=False)
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=False)


def arguments(kind: Any, folder: str, **more: Any) -> Any:
    """Arguments of a training that uses what a Trainer offers beside it."""
    return kind(
        folder,
        use_cpu=True,
        per_device_train_batch_size=BATCH // torch.distributed.get_world_size(),
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        **more,
    )


def figures(trainer: Any) -> list[dict[str, float]]:
    return [{name: each[name] for name in FIGURES if name in each} for each in trainer.state.log_history]


def trained(folder: str, fsdp: dict[str, str] | None, resumed: str | None = None, again: bool = False) -> Any:
    """Figures of a training of a Llama, and of evaluations before it, with its best weights, and after another one."""
    sharding = {} if fsdp is None else {"fsdp": True, "fsdp_config": dict(fsdp)}
    best = "SHARDED_STATE_DICT" not in (fsdp or {}).values()
    with begun(fsdp is not None):
        args = arguments(transformers.TrainingArguments, folder, load_best_model_at_end=best, **sharding)
        patience = [transformers.EarlyStoppingCallback(3)] if best else []
        trainer = transformers.Trainer(llama(), args, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=patience)
        after = [trainer.evaluate()["eval_loss"]] if again else []
        trainer.train(resume_from_checkpoint=resumed)
        assert isinstance(trainer.model, sherd.FSDPModule) is (fsdp is not None)
        first = figures(trainer)
        after.append(trainer.evaluate()["eval_loss"])
        trainer.save_model(f"{folder}/final")
        if not best:  # transformers writes no model then
            sherd.save_pretrained(trainer.model, f"{folder}/final")
        if again:
            trainer.args.save_strategy = "no"
            trainer.train()
            after.append(trainer.evaluate()["eval_loss"])
        return first, after


def weights(folder: str) -> dict[str, torch.Tensor]:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.architectures == ["LlamaForCausalLM"]
    return model.state_dict()


def close(found: Any, expected: Any) -> None:
    assert_same(found, expected, rtol=1e-6, atol=1e-7)


def test_it_trains_evaluates_and_saves_as_in_one_process_and_a_second_time(world, tmp_path):
    (expected,) = world(1).run(trained, str(tmp_path / "plain"), None, again=True)
    for found in world(2).run(trained, str(tmp_path / "sharded"), {}, again=True):
        close(found, expected)
    close(weights(str(tmp_path / "sharded/final")), weights(str(tmp_path / "plain/final")))
    close(weights(str(tmp_path / "sharded/checkpoint-2")), weights(str(tmp_path / "plain/checkpoint-2")))


@pytest.mark.values
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 2)])
def test_it_resumes_on_as_many_ranks_and_on_others(kind, before, after, world, tmp_path):
    config = {"state_dict_type": kind}
    (expected, *_) = world(before).run(trained, str(tmp_path / "out"), config)
    resumed = str(tmp_path / "out/checkpoint-2")
    for found in world(after).run(trained, str(tmp_path / "again"), config, resumed):
        close(found, expected)
    close(weights(str(tmp_path / "again/final")), weights(str(tmp_path / "out/final")))


def generating(folder: str, adapted: bool, uses_sherd: bool) -> Any:
    """Figures of a training whose evaluations generate text."""
    fsdp = {"fsdp": True, "fsdp_config": {}} if uses_sherd else {}
    with begun(uses_sherd):
        args = arguments(
            transformers.Seq2SeqTrainingArguments,
            folder,
            predict_with_generate=True,
            generation_max_length=6,
            ddp_find_unused_parameters=None if uses_sherd else False,
            **fsdp,
        )
        trainer = transformers.Seq2SeqTrainer(
            t5(adapted),
            args,
            train_dataset=Tokens(),
            eval_dataset=Tokens(),
            compute_metrics=lambda shown: {"sum": int(shown.predictions.clip(0).sum())},
        )
        trainer.train()
        trainer.save_model(f"{folder}/final")
        return figures(trainer)


def adapters(folder: str) -> dict[str, torch.Tensor]:
    import peft

    model = peft.PeftModel.from_pretrained(t5(False), folder)
    return {name: each for name, each in model.state_dict().items() if "lora" in name}


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
def test_evaluations_generate_and_adapters_are_saved_as_under_ddp(adapted, world, tmp_path):
    expected = world(2).run(generating, str(tmp_path / "plain"), adapted, False)
    close(world(2).run(generating, str(tmp_path / "sharded"), adapted, True), expected)
    if adapted:
        close(adapters(str(tmp_path / "sharded/final")), adapters(str(tmp_path / "plain/final")))


def adapted(folder: str, resumed: str | None) -> Any:
    """Figures of a training of a Llama's adapters."""
    import peft

    with begun():
        lora = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        model = peft.get_peft_model(llama(), lora, autocast_adapter_dtype=False)
        args = arguments(transformers.TrainingArguments, folder, fsdp=True, fsdp_config={})
        trainer = transformers.Trainer(model, args, train_dataset=Tokens(), eval_dataset=Tokens())
        trainer.train(resume_from_checkpoint=resumed)
        return figures(trainer)


def test_adapters_resume_with_the_state_of_their_optimizer(world, tmp_path):
    expected = world(2).run(adapted, str(tmp_path / "out"), None)
    close(world(2).run(adapted, str(tmp_path / "again"), str(tmp_path / "out/checkpoint-2")), expected)


def loaded(folder: str, is_efficient: bool) -> Any:
    """Figures of a training of a model that is loaded, on rank 0 alone or on all ranks."""
    with begun():
        fsdp = {"fsdp": True, "fsdp_config": {"cpu_ram_efficient_loading": is_efficient}}
        args = arguments(transformers.TrainingArguments, folder, save_strategy="no", bf16=True, **fsdp)
        model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/model")
        if is_efficient and torch.distributed.get_rank():
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, float("nan"))  # such memory may hold anything
        trainer = transformers.Trainer(model, args, train_dataset=Tokens(), eval_dataset=Tokens())
        trainer.train()
        return figures(trainer)


def test_weights_may_be_loaded_on_rank_0_alone_and_compute_in_bf16(world, tmp_path):
    llama().float().save_pretrained(tmp_path / "model")
    expected, *_ = world(2).run(loaded, str(tmp_path), False)
    assert world(2).run(loaded, str(tmp_path), True) == [expected] * 2


def recipe_of_the_trainer(folder: str) -> None:
    os.chdir(folder)
    with begun():
        names = run_recipe("HF Trainer", model=llama(), data=Tokens())
        assert isinstance(names["trainer"].model, sherd.FSDPModule)
        assert names["trainer"].state.global_step == 4


def test_the_program_of_the_docs_runs(world, tmp_path):
    world(2).run(recipe_of_the_trainer, str(tmp_path))
    assert weights(str(tmp_path / "out/final"))
