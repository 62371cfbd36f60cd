"""Rules for known models: from the names of Hugging Face to those of `sherd train`, or of torchtitan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Entries = tuple[Mapping[str, Any], ...]


def _renamed(names: Mapping[str, str]) -> Entries:
    return tuple({"rename": of, "to": to} for of, to in names.items())


_HF, _OURS = "model.layers.{i}.", "blocks.{i}."
_AROUND = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    f"{_HF}input_layernorm.weight": f"{_OURS}attention_norm.weight",
    f"{_HF}post_attention_layernorm.weight": f"{_OURS}feed_forward_norm.weight",
}
_ATTENTION = {
    f"{_HF}self_attn.{theirs}_proj.{kind}": f"{_OURS}attention.{ours}.{kind}"
    for theirs, ours in {"q": "query", "k": "key", "v": "value", "o": "out"}.items()
    for kind in ("weight", "bias")
}
_NORMS = {
    f"{_HF}self_attn.{theirs}_norm.weight": f"{_OURS}attention.{ours}_norm.weight"
    for theirs, ours in {"q": "query", "k": "key"}.items()
}
_DENSE = {
    f"{_HF}mlp.{each}_proj.{kind}": f"{_OURS}feed_forward.{each}.{kind}"
    for each in ("gate", "up", "down")
    for kind in ("weight", "bias")
}
_EXPERTS = (
    {"rename": f"{_HF}block_sparse_moe.gate.weight", "to": f"{_OURS}feed_forward.router.weight"},
    *(
        {
            "stack": f"{_HF}block_sparse_moe.experts.{{expert}}.{theirs}.weight",
            "to": f"{_OURS}feed_forward.experts.{ours}",
        }
        for theirs, ours in {"w1": "gate", "w3": "up", "w2": "down"}.items()
    ),
)

_GPT2 = "transformer.h.{i}."
_LINEAR = {
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}

_TITAN = "layers.{i}."

PRESETS: Mapping[str, Entries] = {
    "llama": _renamed(_AROUND | _ATTENTION | _DENSE),
    "qwen": _renamed(_AROUND | _ATTENTION | _NORMS | _DENSE),
    "mixtral": (*_renamed(_AROUND | _ATTENTION), *_EXPERTS),
    "gpt2": (
        # Its linear layers hold their weights transposed, and the three projections of attention as one.
        *({"transpose": f"{_GPT2}{theirs}.weight"} for theirs in _LINEAR),
        *(
            {"rename": f"{_GPT2}{theirs}.{kind}", "to": f"{_OURS}{ours}.{kind}"}
            for theirs, ours in _LINEAR.items()
            for kind in ("weight", "bias")
        ),
        *(
            {
                "split": f"{_OURS}attention.qkv.{kind}",
                "to": [f"{_OURS}attention.{each}.{kind}" for each in ("query", "key", "value")],
            }
            for kind in ("weight", "bias")
        ),
        *_renamed(
            {
                "transformer.wte.weight": "embedding.weight",
                "transformer.wpe.weight": "positions.weight",
                "lm_head.weight": "head.weight",
            }
            | {f"transformer.ln_f.{kind}": f"norm.{kind}" for kind in ("weight", "bias")}
            | {f"{_GPT2}ln_1.{kind}": f"{_OURS}attention_norm.{kind}" for kind in ("weight", "bias")}
            | {f"{_GPT2}ln_2.{kind}": f"{_OURS}mlp_norm.{kind}" for kind in ("weight", "bias")}
        ),
    ),
    "llama-torchtitan": (
        # torchtitan turns neighbouring elements of a head, Hugging Face those half a head apart.
        {"permute": f"{_HF}self_attn.q_proj.weight", "heads": "$heads"},
        {"permute": f"{_HF}self_attn.k_proj.weight", "heads": "$kv_heads"},
        *_renamed(
            {
                "model.embed_tokens.weight": "tok_embeddings.weight",
                "model.norm.weight": "norm.weight",
                "lm_head.weight": "output.weight",
                f"{_HF}input_layernorm.weight": f"{_TITAN}attention_norm.weight",
                f"{_HF}post_attention_layernorm.weight": f"{_TITAN}ffn_norm.weight",
                f"{_HF}mlp.gate_proj.weight": f"{_TITAN}feed_forward.w1.weight",
                f"{_HF}mlp.down_proj.weight": f"{_TITAN}feed_forward.w2.weight",
                f"{_HF}mlp.up_proj.weight": f"{_TITAN}feed_forward.w3.weight",
            }
            | {f"{_HF}self_attn.{each}_proj.weight": f"{_TITAN}attention.w{each}.weight" for each in "qkvo"}
        ),
    ),
}
"""The rules by name."""
