"""transformers' Trainer and Seq2SeqTrainer train with sherd in place of FSDP2 as they do without FSDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sherd
from tests.interop.clients import begun, recipe, run_recipe
from tests.support.comparing import assert_same
from tests.support.ranks.bodies import on_processes

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in v6:FutureWarning")

BATCH = 4  # of all ranks
SMALL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FIGURES = ("loss", "grad_norm", "eval_loss", "eval_sum", "reward", "eval_reward", "rewards/margins")
KINDS = ["FULL_STATE_DICT", "SHARDED_STATE_DICT"]
BRIEF = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no"}


def tokens(num_lengths: int = 1) -> list[dict[str, torch.Tensor]]:
    """Rows of 8 tokens, or of as many different lengths."""
    drawn = [torch.randint(3, 50, (8,), generator=torch.Generator().manual_seed(row)) for row in range(32)]
    cut = [ids[: 8 - row % num_lengths] for row, ids in enumerate(drawn)]
    return [{"input_ids": ids, "labels": ids} for ids in cut]


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **TOKENS)).double()


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, dropout_rate=0.0)
    return transformers.T5ForConditionalGeneration(config).double()


def lora(task: str = "CAUSAL_LM") -> Any:
    """Adapters that change what the model computes from the first step on."""
    return peft.LoraConfig(target_modules=r".*\.(q|v|q_proj|v_proj|up_proj)", task_type=task, init_lora_weights=False)


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of rows that are not equally long."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([row["input_ids"] for row in rows], batch_first=True)
    labels = pad([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": labels}


def arguments(kind: Any, folder: str, **more: Any) -> Any:
    """Arguments of a training that uses what a Trainer offers beside it."""
    usual = {
        "use_cpu": True,
        "per_device_train_batch_size": BATCH // torch.distributed.get_world_size(),
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
    }
    return kind(folder, **{**usual, **more})


def causal(folder: str, adapted: bool, num_lengths: int = 1, **more: Any) -> Any:
    """A Trainer of a Llama, or of its adapters."""
    args = arguments(transformers.TrainingArguments, folder, **more)
    model = peft.get_peft_model(llama(), lora()) if adapted else llama()
    rows = tokens(num_lengths)
    return transformers.Trainer(model, args, padded, train_dataset=rows, eval_dataset=rows)


def seq2seq(folder: str, adapted: bool, **more: Any) -> Any:
    """A trainer of a T5 whose evaluations generate text. It would multiply the loss of a PeftModel by the ranks."""
    usual = {"predict_with_generate": True, "generation_max_length": 6, "average_tokens_across_devices": False}
    args = arguments(transformers.Seq2SeqTrainingArguments, folder, **usual, **more)
    model = peft.get_peft_model(t5(), lora("SEQ_2_SEQ_LM")) if adapted else t5()
    return transformers.Seq2SeqTrainer(
        model,
        args,
        padded,
        train_dataset=tokens(),
        eval_dataset=tokens(),
        compute_metrics=lambda shown: {"sum": int(shown.predictions.clip(0).sum())},
    )


Build = Callable[..., Any]


def figures(trainer: Any) -> list[dict[str, float]]:
    return [{name: each[name] for name in FIGURES if name in each} for each in trainer.state.log_history]


def predicted(trainer: Any) -> Any:
    """What a prediction says of each token, or the text that it generates."""
    return torch.from_numpy(trainer.predict(tokens()).predictions)


def sharding(fsdp: dict[str, Any] | None) -> dict[str, Any]:
    return {"ddp_find_unused_parameters": False} if fsdp is None else {"fsdp": True, "fsdp_config": dict(fsdp)}


def trained(
    build: Build,
    folder: str,
    adapted: bool = False,
    fsdp: dict[str, str] | None = None,
    resumed: str | None = None,
    again: bool = False,
) -> Any:
    """Figures of a training that stops early, of what it takes for its best weights, and `again`: before and after.

    A higher loss counts as better, so the first checkpoint is the best, and the second evaluation stops the training.
    """
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    with begun(fsdp is not None):
        trainer = build(folder, adapted, **best, **sharding(fsdp))
        trainer.add_callback(transformers.EarlyStoppingCallback(1))
        trainer.add_callback(folder_first())
        found = [predicted(trainer), trainer.evaluate()["eval_loss"]] if again else []
        trainer.train(resume_from_checkpoint=resumed)
        front_end = sherd.FullyShardedDataParallel if "version" in (fsdp or {}) else sherd.FSDPModule
        assert isinstance(trainer.model, front_end) is (fsdp is not None)
        assert trainer.state.global_step == 4
        found += [figures(trainer), trainer.evaluate()["eval_loss"]]
        trainer.save_model(f"{folder}/final")
        if KINDS[1] in (fsdp or {}).values():  # transformers writes no model then
            sherd.save_pretrained(trainer.model, f"{folder}/final")
        if again:
            trainer.args.save_strategy = "no"
            trainer.args.load_best_model_at_end = False
            trainer.train()
            found += [figures(trainer), trainer.evaluate()["eval_loss"], predicted(trainer)]
        return found


def folder_first() -> Any:
    """The callback of the docs."""
    names: dict[str, Any] = {}
    exec(recipe("HF Trainer", number=2), names)
    return names["FolderFirst"]()


def saved(folder: str, base: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """The weights that `from_pretrained` of transformers, or of peft, loads from `folder`."""
    if os.path.exists(f"{folder}/adapter_config.json"):
        assert not list(Path(folder).glob("model*.safetensors"))
        model = peft.PeftModel.from_pretrained(base(), folder)
        return peft.get_peft_model_state_dict(model)
    model, info = type(base()).from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.architectures == [type(model).__name__]
    return model.state_dict()


def close(found: Any, expected: Any) -> None:
    assert_same(found, expected, rtol=1e-6, atol=1e-7)


def saves_the_same(found: Path, expected: Path, base: Callable[[], Any]) -> None:
    for name in ("final", "checkpoint-2"):
        close(saved(f"{found}/{name}", base), saved(f"{expected}/{name}", base))


@pytest.mark.values
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize(("build", "base"), [(causal, llama), (seq2seq, t5)])
def test_it_trains_stops_early_predicts_and_saves_as_in_one_process(build, base, adapted, world, tmp_path):
    (expected,) = world(1).run(trained, build, str(tmp_path / "plain"), adapted, again=True)
    for found in world(2).run(trained, build, str(tmp_path / "sharded"), adapted, {}, again=True):
        close(found, expected)
    saves_the_same(tmp_path / "sharded", tmp_path / "plain", base)
    if adapted and build is causal:  # of tied weights that are frozen, as T5's, torch keeps the second names
        assert all("lora" in name for name in torch.load(tmp_path / "sharded/checkpoint-2/pytorch_model_fsdp.bin"))


@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize(("build", "base"), [(causal, llama), (seq2seq, t5)])
def test_it_resumes_on_as_many_ranks_and_on_others(build, base, adapted, before, after, kind, world, tmp_path):
    config = {"state_dict_type": kind}
    (expected, *_) = world(before).run(trained, build, str(tmp_path / "out"), adapted, config)
    resumed = str(tmp_path / "out/checkpoint-2")
    for found in world(after).run(trained, build, str(tmp_path / "again"), adapted, config, resumed):
        close(found, expected)
    close(saved(f"{tmp_path}/again/final", base), saved(f"{tmp_path}/out/final", base))


@pytest.mark.values
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_it_trains_and_resumes_with_fsdp1(use_orig_params, kind, world, tmp_path):
    config = {"version": 1, "use_orig_params": use_orig_params, "state_dict_type": kind}
    config |= {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    (expected,) = world(1).run(trained, causal, str(tmp_path / "plain"))
    for found in world(2).run(trained, causal, str(tmp_path / "out"), False, config):
        close(found, expected)
    resumed = str(tmp_path / "out/checkpoint-2")
    for found in world(2).run(trained, causal, str(tmp_path / "again"), False, config, resumed):
        close(found, expected)
    if kind == KINDS[0]:
        saves_the_same(tmp_path / "out", tmp_path / "plain", llama)


def briefly(
    build: Build, folder: str, adapted: bool, uses_sherd: bool, options: dict[str, Any] | None = None, **more: Any
) -> Any:
    """Figures of two steps; `options` of sherd."""
    with begun(uses_sherd, **options or {}):
        trainer = build(folder, adapted, **{**BRIEF, **sharding({} if uses_sherd else None), **more})
        trainer.train()
        return figures(trainer)


def trains_as_under_ddp(world: Any, folder: Path, build: Build, adapted: bool, more: dict[str, Any]) -> None:
    expected = world(2).run(briefly, build, str(folder / "plain"), adapted, False, **more)
    close(world(2).run(briefly, build, str(folder / "sharded"), adapted, True, **more), expected)


SETTINGS: dict[str, tuple[bool, dict[str, Any]]] = {
    "checkpoints": (False, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
    "reentrant": (True, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    "smoothing": (True, {"label_smoothing_factor": 0.1}),
    "lengths": (False, {"train_sampling_strategy": "group_by_length"}),
    "own tokens": (False, {"average_tokens_across_devices": False}),
    "noise": (False, {"neftune_noise_alpha": 5.0}),
    "rmsprop": (False, {"optim": "rmsprop"}),
    "fused": (True, {"optim": "adamw_torch_fused"}),
    "sgd": (False, {"optim": "sgd"}),
    "no clipping": (True, {"max_grad_norm": 0.0}),
    "evaluation first": (True, {"eval_strategy": "steps", "eval_on_start": True}),
    "compiled": (False, {"torch_compile": True, "torch_compile_backend": "eager"}),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo asks
@pytest.mark.values
@pytest.mark.parametrize("setting", SETTINGS)
def test_rows_of_any_length_train_under_each_setting_as_under_ddp(setting, world, tmp_path):
    adapted, more = SETTINGS[setting]
    trains_as_under_ddp(world, tmp_path, causal, adapted, {**more, "num_lengths": 5})


def loaded(folder: str, is_efficient: bool) -> Any:
    """Figures of a training of a model that is loaded, on rank 0 alone or on all ranks."""
    with begun():
        fsdp = {"fsdp": True, "fsdp_config": {"cpu_ram_efficient_loading": is_efficient}}
        args = arguments(transformers.TrainingArguments, folder, save_strategy="no", bf16=True, **fsdp)
        model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/model")
        if is_efficient and torch.distributed.get_rank():
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, float("nan"))  # such memory may hold anything
        trainer = transformers.Trainer(model, args, train_dataset=tokens(), eval_dataset=tokens())
        trainer.train()
        return figures(trainer)


def test_weights_may_be_loaded_on_rank_0_alone_and_compute_in_bf16(world, tmp_path):
    llama().float().save_pretrained(tmp_path / "model")
    expected, *_ = world(2).run(loaded, str(tmp_path), False)
    assert world(2).run(loaded, str(tmp_path), True) == [expected] * 2


def with_a_head(folder: str, is_efficient: bool) -> Any:
    """Figures of a training of a classifier whose checkpoint lacks the head."""
    with begun():
        fsdp = {"fsdp": True, "fsdp_config": {"cpu_ram_efficient_loading": is_efficient}}
        args = arguments(transformers.TrainingArguments, folder, save_strategy="no", **fsdp)
        if is_efficient:  # as `accelerate launch` says it to transformers
            os.environ.update({"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"})
        torch.manual_seed(1)
        kind = transformers.AutoModelForSequenceClassification
        model = kind.from_pretrained(f"{folder}/model", num_labels=3, dtype=torch.float64)
        on_meta = [name for name, each in model.named_parameters() if each.is_meta]
        assert on_meta == ["score.weight"] * (is_efficient and torch.distributed.get_rank() > 0)
        rows = [{"input_ids": row["input_ids"], "labels": at % 3} for at, row in enumerate(tokens())]
        trainer = transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        return figures(trainer)


def test_a_head_that_the_checkpoint_lacks_is_rank_0s(world, tmp_path):
    llama().save_pretrained(tmp_path / "model")
    expected, *_ = world(2).run(with_a_head, str(tmp_path), False)
    assert world(2).run(with_a_head, str(tmp_path), True) == [expected] * 2


def recipe_of_the_trainer(folder: str) -> None:
    os.chdir(folder)
    with begun():
        names = run_recipe("HF Trainer", model=llama(), data=tokens())
        assert isinstance(names["trainer"].model, sherd.FSDPModule)
        assert names["trainer"].state.global_step == 4


def test_the_program_of_the_docs_runs(world, tmp_path):
    world(2).run(recipe_of_the_trainer, str(tmp_path))
    assert saved(f"{tmp_path}/out/final", llama)


@on_processes(2, use_orig_params=[False, True])
def test_a_wrapped_model_generates_inside_summon_full_params(use_orig_params):
    plain = llama()
    given = {"input_ids": tokens()[0]["input_ids"][None], "max_new_tokens": 4, "do_sample": False}
    policy = sherd.wrap.ModuleWrapPolicy({type(plain.model.layers[0])})
    model = sherd.FullyShardedDataParallel(llama(), auto_wrap_policy=policy, use_orig_params=use_orig_params)
    with sherd.FullyShardedDataParallel.summon_full_params(model):
        assert torch.equal(model.module.generate(**given), plain.generate(**given))
