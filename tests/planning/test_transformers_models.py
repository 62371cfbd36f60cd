"""Models of transformers of any task: a config.json makes the class that it names, with a batch that it reads."""

import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sherd.cli.main import main
from sherd.cli.planned_model import model_from
from sherd.tools.plan.reading import read_work
from sherd.train.config import InputError
from tests.planning.played import LIKE, flops

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = {**SMALL, "vocab_size": 50, "max_position_embeddings": 24}
IMAGES = {**SMALL, "image_size": 16, "patch_size": 4}
SPEECH = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
SPEECH |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
SPEECH |= {"vocab_size": 50, "pad_token_id": 1, "decoder_start_token_id": 2}
WAVES = {**SMALL, "conv_dim": [16, 16], "conv_stride": [64, 64], "conv_kernel": [64, 64], "num_feat_extract_layers": 2}
WAVES |= {"num_conv_pos_embedding_groups": 2, "num_conv_pos_embeddings": 4, "vocab_size": 30}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 50}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50}
CLIP = {
    "text_config": {**WORDS, "projection_dim": 16},
    "vision_config": {**IMAGES, "projection_dim": 16},
    "projection_dim": 16,
}

MODELS = [
    ("bert", WORDS, "BertForMaskedLM", {"input_ids": (2, 8)}),
    ("bert", WORDS, "BertForSequenceClassification", {"input_ids": (2, 8)}),
    ("bert", WORDS, "BertModel", {"input_ids": (2, 8)}),
    ("gpt2", GPT2, "GPT2LMHeadModel", {"input_ids": (2, 8)}),
    ("opt", {**WORDS, "ffn_dim": 32, "word_embed_proj_dim": 16}, "OPTForCausalLM", {"input_ids": (2, 8)}),
    ("t5", T5, "T5ForConditionalGeneration", {"input_ids": (2, 8), "labels": (2, 8)}),
    (
        "bart",
        {**SPEECH, "decoder_layerdrop": 0.5},
        "BartForConditionalGeneration",
        {"input_ids": (2, 8), "labels": (2, 8)},
    ),
    ("vit", IMAGES, "ViTForImageClassification", {"pixel_values": (2, 3, 16, 16)}),
    ("clip", CLIP, "CLIPModel", {"input_ids": (2, 8), "pixel_values": (2, 3, 16, 16)}),
    (
        "whisper",
        {**SPEECH, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 6},
        "WhisperForConditionalGeneration",
        {"input_features": (2, 8, 40), "labels": (2, 6)},
    ),
    ("wav2vec2", WAVES, "Wav2Vec2ForCTC", {"input_values": (2, 160_000)}),
]


@pytest.fixture
def config(tmp_path):
    import transformers

    def write(kind, fields, *architectures):
        path = tmp_path / "config.json"
        made = transformers.AutoConfig.for_model(kind, **fields)
        tree = json.loads(made.to_json_string(use_diff=False)) | {"architectures": [*architectures] or None}
        path.write_text(json.dumps(tree))
        return str(path)

    return write


@pytest.mark.parametrize(("kind", "fields", "name", "shapes"), MODELS, ids=[each[2] for each in MODELS])
def test_a_config_makes_the_class_that_it_names_and_a_batch_for_it(config, kind, fields, name, shapes):
    planned = model_from(config(kind, fields, name))
    assert type(planned.model).__name__ == name
    batch = planned.batch(2, 8)
    assert {each: tuple(tensor.shape) for each, tensor in batch.items()} == shapes
    work = read_work(planned.model, batch, planned.layout.loss, device_type="cpu")
    assert work.samples == 2
    tokens = [shapes[each] for each in ("input_ids", "labels") if each in shapes]
    assert work.tokens == (math.prod(tokens[0]) if tokens else 0)

    model = type(planned.model)._from_config(planned.model.config, dtype=torch.float32, attn_implementation="sdpa")
    given = {each: torch.zeros(tensor.shape, dtype=tensor.dtype) for each, tensor in batch.items()}
    model.config.layerdrop = model.config.decoder_layerdrop = 0.0
    for module in model.modules():
        if hasattr(module, "layerdrop"):
            module.layerdrop = 0.0
    with FlopCounterMode(display=False, custom_mapping=LIKE) as counter:
        planned.layout.loss(model, given).backward()
    assert flops(work) == counter.get_total_flops()


def test_a_config_without_architectures_makes_a_causal_lm_and_a_padding_token_is_no_hindrance(config):
    planned = model_from(config("gpt2", GPT2 | {"n_positions": 32, "pad_token_id": 0}))
    assert type(planned.model).__name__ == "GPT2LMHeadModel"
    assert planned.context == 32
    assert read_work(planned.model, planned.batch(1, 8), planned.layout.loss).tokens == 8


def test_a_class_that_transformers_has_not_and_a_model_whose_batch_is_not_known_are_named(config):
    with pytest.raises(InputError, match="architectures names MyModel, which transformers"):
        model_from(config("bert", WORDS, "MyModel"))
    with pytest.raises(InputError, match="PatchTSTForPrediction reads past_values, of which no batch is known"):
        model_from(config("patchtst", {"d_model": 16, "num_hidden_layers": 1}, "PatchTSTForPrediction"))


def test_a_model_with_images_among_its_tokens_is_planned_with_tokens_alone(config):
    fields = {
        "text_config": {**WORDS, "model_type": "llama"},
        "vision_config": {**IMAGES, "model_type": "clip_vision_model"},
    }
    planned = model_from(config("llava", fields, "LlavaForConditionalGeneration"))
    assert [*planned.batch(1, 8)] == ["input_ids"]


def test_images_are_planned_by_the_command(config, capsys):
    path = config("vit", IMAGES, "ViTForImageClassification")
    assert main(["plan", path, "--ranks", "2", "--samples", "64", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["samples_per_second"] > 0
    assert planned["tokens_per_second"] == 0
