"""A trained model as a folder that transformers reads: weights, config, generation config, and a tokenizer of bytes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sherd.train.config import Config, InputError, ModelConfig
from sherd.train.parallel import on_meta
from sherd.train.text import SEPARATOR, VOCABULARY

__all__ = ["as_llama", "write_folder"]

LARGEST_FILE = "5GB"
_AS_IN_LLAMA = {
    "embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
"""The parts of names in `sherd.train.models.Decoder`, and what transformers calls them."""


def write_folder(weights: dict[str, Tensor], config: Config, target: Path) -> None:
    """Write `weights`, by their names in the model of `config`, into the new folder `target`.

    Raises:
        InputError: transformers cannot make this model, or it is one with other parameters.
        OSError: the folder cannot be written.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call] # what is said is one line
    model: Any = on_meta(config).lm if config.model.hf else as_llama(config.model, config.data.context)
    named = weights if config.model.hf else {_in_llama(name): tensor for name, tensor in weights.items()}
    if config.model.tied and not config.model.hf:
        named["lm_head.weight"] = named["model.embed_tokens.weight"]
    try:
        model.load_state_dict(named, assign=True)  # its parameters were on the meta device: nothing is there twice
    except RuntimeError as error:
        raise InputError(f"the checkpoint is of another model than {config.model.hf} makes") from error
    model.tie_weights()
    (document,) = SEPARATOR
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, document)  # the mark between documents begins a text, and ends it
    model.save_pretrained(target, max_shard_size=LARGEST_FILE)
    os.umask(mask := os.umask(0))
    for file in target.glob("*.safetensors"):
        file.chmod(0o666 & ~mask)  # or nobody else could read it
    _write_tokenizer(target, config.data.context)


def as_llama(model: ModelConfig, context: int) -> Any:
    """Returns the decoder that `model` describes as transformers' Llama, which computes the same, without values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    assert not model.experts, "require_target refuses a mixture of experts"
    theta: Any = {"rope_theta": model.rope_base}  # some versions keep it under another name, and all take this one
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=model.width,
        intermediate_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-6,
        **theta,
        tie_word_embeddings=model.tied,
        bos_token_id=SEPARATOR[0],
        eos_token_id=SEPARATOR[0],
        pad_token_id=SEPARATOR[0],
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _in_llama(name: str) -> str:
    return re.sub(r"[a-z_]+", lambda part: _AS_IN_LLAMA.get(part.group(), part.group()), name)


def _write_tokenizer(target: Path, context: int) -> None:
    """Write a tokenizer whose tokens are bytes, as ids 0 to 255. It begins a text with the mark of a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    shown = _characters()
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(shown)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    begin, number = shown[SEPARATOR[0]], SEPARATOR[0]
    tokenizer.post_processor = processors.TemplateProcessing(single=[begin, "$A"], special_tokens=[(begin, number)])
    tokenizer.save(str(target / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    (target / "tokenizer_config.json").write_text(json.dumps({**about, "clean_up_tokenization_spaces": False}))


def _characters() -> list[str]:
    """Returns the character for each byte in a byte-level tokenizer: itself if printable, else one from U+0100 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
