"""Plain transformers loads what `sherd.save_pretrained` has written, and computes the same bits."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import sherd
from sherd.errors import CheckpointError, ModuleError, PolicyError
from tests.support.ranks.bodies import on_processes
from tests.support.sharding import sharded as sharded_in

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="it is in the extra hf")

SMALL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WAYS = ("shard", "flat", "wrapper", "flat wrapper")


def built(kind: str) -> Any:
    """A tiny model in evaluation, with its layers."""
    import transformers

    torch.manual_seed(0)
    name, _, tied = kind.partition(" ")
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, **TOKENS)
        return transformers.GPT2LMHeadModel(config).eval()
    if name == "mixtral":
        config = transformers.MixtralConfig(**SMALL, num_local_experts=4, num_key_value_heads=1, **TOKENS)
        return transformers.MixtralForCausalLM(config).eval()
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=bool(tied), **TOKENS)
    return transformers.LlamaForCausalLM(config).eval()


def layers_of(model: Any) -> list[nn.Module]:
    return list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)


def sharded(kind: str, way: str = "shard") -> Any:
    model = built(kind)
    return sharded_in(model, way, [*layers_of(model), model])


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3, 4]])).logits


def saved_and_loaded(kind: str, way: str, folder: str, most_bytes: int) -> None:
    model, plain = sharded(kind, way), built(kind)
    assert sherd.save_pretrained(model, folder, max_shard_bytes=most_bytes) == folder
    dist.barrier()
    loaded, info = type(plain).from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits_of(loaded), logits_of(plain))
    assert loaded.config.architectures == [type(plain).__name__]
    if dist.get_rank() == 0:  # the same names and bits as transformers writes
        plain.save_pretrained(f"{folder}-plain")
        from safetensors.torch import load_file

        expected = load_file(f"{folder}-plain/model.safetensors")
        found = {}
        for name in sorted(os.listdir(folder)):
            if name.endswith(".safetensors"):
                assert (
                    os.path.getsize(f"{folder}/{name}") < most_bytes + 4096 or len(load_file(f"{folder}/{name}")) == 1
                )
                found |= load_file(f"{folder}/{name}")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert {"config.json", "generation_config.json"} <= set(os.listdir(folder))
        assert json.loads(Path(folder, "config.json").read_text()) == json.loads(
            Path(f"{folder}-plain", "config.json").read_text()
        )
    dist.barrier()


@pytest.mark.values
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "llama tied", "gpt2"])
def test_transformers_loads_the_same_bits(kind, way, world, tmp_path):
    world(2).run(saved_and_loaded, kind, way, str(tmp_path / "out"), 4000)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_other_numbers_of_ranks(num_ranks, world, tmp_path):
    world(num_ranks).run(saved_and_loaded, "llama", "shard", str(tmp_path / "out"), 4000)
    world(num_ranks).run(saved_and_loaded, "llama", "shard", str(tmp_path / "one"), 1 << 20)


@pytest.mark.parametrize("way", ["shard", "flat"])
def test_experts_have_the_names_of_the_hub(way, world, tmp_path):
    world(2).run(saved_and_loaded, "mixtral", way, str(tmp_path / "out"), 20_000)


@on_processes(2)
def test_an_older_export_is_replaced_in_another_dtype(tmp_path):
    model, folder = sharded("llama"), str(tmp_path / "out")
    sherd.save_pretrained(model, folder, max_shard_bytes=4000)
    sherd.save_pretrained(model, folder, dtype=torch.bfloat16)
    loaded = type(built("llama")).from_pretrained(folder, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits_of(loaded), logits_of(built("llama").to(torch.bfloat16)))
    assert sorted(os.listdir(folder)) == ["config.json", "generation_config.json", "model.safetensors"]


@on_processes(2)
def test_bad_input_is_refused_on_all_ranks(tmp_path):
    model = sharded("llama")
    Path(tmp_path, "file").touch()
    with pytest.raises(CheckpointError, match="save_pretrained to"):
        sherd.save_pretrained(model, tmp_path / "file")
    with pytest.raises(ModuleError, match=r"sherd\.save writes"):
        sherd.save_pretrained(sherd.fully_shard(nn.Linear(2, 2)), tmp_path)
    with pytest.raises(PolicyError, match="max_shard_bytes"):
        sherd.save_pretrained(model, tmp_path, max_shard_bytes=0)


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@on_processes(2)
def test_a_rank_that_cannot_write_stops_all_and_leaves_the_older_export(tmp_path):
    model = sharded("llama")
    sherd.save_pretrained(model, tmp_path)
    before = bytes_in(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dist.barrier()
    write = sherd.storage.places.DiskPlace.write

    def failing(self: Any, name: str, chunks: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device", name)
        write(self, name, chunks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sherd.storage.places.DiskPlace, "write", failing)
        with pytest.raises(CheckpointError, match=r"on rank 1.*No space left"):
            sherd.save_pretrained(model, tmp_path, max_shard_bytes=4000)
    dist.barrier()
    assert bytes_in(tmp_path) == before
