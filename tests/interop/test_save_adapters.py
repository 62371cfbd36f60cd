"""Plain peft loads the adapters that `sherd.save_pretrained` has written, and computes the same bits."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import sherd
from sherd.checkpoint.full_tensors import FullTensors
from sherd.errors import CheckpointError, UnsupportedError
from tests.api.checks import named_mesh
from tests.api.test_save_pretrained import WAYS, built, bytes_in, layers_of, logits_of
from tests.support.comparing import assert_same
from tests.support.ranks.bodies import on_processes
from tests.support.sharding import sharded as sharded_in

peft = pytest.importorskip("peft")

TARGETS = ["q_proj", "v_proj"]
KINDS = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, use_dora=True),
    "head": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["lm_head"]),
    "bias": lambda: peft.LoraConfig(r=2, target_modules=["c_attn"], bias="all", fan_in_fan_out=True),
    "embedding": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens"]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "lokr": lambda: peft.LoKrConfig(r=2, target_modules=TARGETS),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=TARGETS),
    "tokens": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, trainable_token_indices=[1, 3]),
}
APART = ("lora", "head")
"""What flat parameters can hold: peft trains modules of their own."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft asks transformers for it
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
]


def base_of(kind: str) -> Any:
    return built("gpt2" if kind == "bias" else "llama")


def adapted(kind: str, *others: str) -> Any:
    """A model with adapters that change its output, the same on all ranks."""
    model = peft.get_peft_model(base_of(kind), KINDS[kind]())
    for other in others:
        model.add_adapter(other, KINDS[kind]())
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or any(f".{other}." in name for other in others):
                parameter.add_(torch.randn_like(parameter) / 8)
    return model.eval()


def sharded(model: Any, way: str = "shard", **options: Any) -> Any:
    units = [*layers_of(model.base_model.model), model]
    if way == "flat wrapper":  # a flat parameter is trained or is not, so what peft trains is wrapped apart
        named = model.named_modules()
        apart = [each for path, each in named if isinstance(each, nn.Linear) and ("lora_" in path or "to_save" in path)]
        units = [*apart, *units]
    return sharded_in(model, way, units, **options)


def files_in(folder: str) -> dict[str, Any]:
    """The names and tensors of all files of weights, and the settings, without peft's page about the model."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(Path(folder).rglob("*.*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            found |= {f"{name}: {key}": each for key, each in load_file(path).items()}
        elif path.name != "README.md":
            settings = json.loads(path.read_text())
            # peft writes sets of names as lists, whose order is another one in each process and each set.
            found[name] = {key: sorted(each) if isinstance(each, list) else each for key, each in settings.items()}
    return found


def saved_and_loaded(kind: str, way: str, folder: str, others: tuple[str, ...] = ()) -> None:
    model, plain = sharded(adapted(kind, *others), way), adapted(kind, *others)
    assert sherd.save_pretrained(model, folder) == folder
    if dist.get_rank() == 0:
        plain.save_pretrained(f"{folder}-plain")
        expected, found = files_in(f"{folder}-plain"), files_in(folder)
        assert found.keys() == expected.keys()
        for name, each in expected.items():
            assert torch.equal(found[name], each) if isinstance(each, torch.Tensor) else found[name] == each, name
    dist.barrier()
    for name in ("default", *others):
        loaded = peft.PeftModel.from_pretrained(base_of(kind), folder if name == "default" else f"{folder}/{name}")
        plain.set_adapter(name)
        assert torch.equal(logits_of(loaded.eval()), logits_of(plain))
    assert not torch.equal(logits_of(loaded), logits_of(base_of(kind)))
    dist.barrier()


@pytest.mark.values
@pytest.mark.parametrize(("kind", "way"), [(k, w) for w in WAYS for k in KINDS if w != "flat wrapper" or k in APART])
def test_peft_loads_the_same_bits(kind, way, world, tmp_path):
    world(2).run(saved_and_loaded, kind, way, str(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["lora", "head"])
def test_one_rank(kind, way, world, tmp_path):
    world(1).run(saved_and_loaded, kind, way, str(tmp_path / "out"))


@pytest.mark.values
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["lora", "head"])
def test_other_adapters_are_in_folders_of_their_names(kind, way, world, tmp_path):
    world(2).run(saved_and_loaded, kind, way, str(tmp_path / "out"), ("second", "third"))


@on_processes(2)
def test_only_adapters_are_gathered_and_one_rank_writes(tmp_path):
    """Which tensors are gathered, and by which rank files are written."""
    model, folder, gathered = sharded(adapted("lora")), str(tmp_path / "out"), []
    read, write = FullTensors.read, sherd.storage.places.DiskPlace.write

    def watched(self: Any, names: Any, *args: Any) -> Any:
        gathered.extend(names)
        return read(self, names, *args)

    def refused(self: Any, name: str, chunks: Any) -> None:
        assert dist.get_rank() == 0, "the first rank alone writes"
        write(self, name, chunks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FullTensors, "read", watched)
        patch.setattr(sherd.storage.places.DiskPlace, "write", refused)
        sherd.save_pretrained(model, folder, dtype=torch.bfloat16)
    assert len(gathered) == 8
    assert all("lora_" in name for name in gathered)
    found = [each for each in files_in(folder).values() if isinstance(each, torch.Tensor)]
    assert {each.dtype for each in found} == {torch.bfloat16}
    assert sorted(os.listdir(folder)) == ["adapter_config.json", "adapter_model.safetensors"]


@on_processes(2)
def test_an_older_export_is_replaced_or_stays(tmp_path):
    """An older export gives way, and stays where the first rank cannot write."""
    if dist.get_rank() == 0:
        peft.get_peft_model(base_of("ia3"), KINDS["ia3"]()).save_pretrained(tmp_path)
        Path(tmp_path, "adapter_model.bin").touch()
    dist.barrier()
    model, before = sharded(adapted("lora", "second")), bytes_in(tmp_path)
    dist.barrier()  # the first rank makes a folder in there

    def failing(self: Any, name: str, chunks: Any) -> None:
        raise OSError(28, "No space left on device", name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sherd.storage.places.DiskPlace, "write", failing)
        with pytest.raises(CheckpointError, match=r"on rank 0.*No space left"):
            sherd.save_pretrained(model, tmp_path)
    dist.barrier()
    assert bytes_in(tmp_path) == before
    dist.barrier()
    sherd.save_pretrained(model, tmp_path)
    names = ["README.md", "adapter_config.json", "adapter_model.safetensors", "second"]
    assert sorted(os.listdir(tmp_path)) == names
    assert json.loads(Path(tmp_path, "adapter_config.json").read_text())["peft_type"] == "LORA"


@on_processes(2)
def test_prompts_are_refused_and_the_remedy_works(tmp_path):
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = sherd.fully_shard(peft.get_peft_model(base_of("lora"), config))
    with pytest.raises(UnsupportedError, match=r"is computed by the model.*sherd\.unsharded"):
        sherd.save_pretrained(model, tmp_path)
    with sherd.unsharded(model):
        model.save_pretrained(tmp_path, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    peft.PeftModel.from_pretrained(base_of("lora"), tmp_path)


@pytest.mark.values
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["lora", "head"])
@on_processes(2)
def test_a_merged_model_is_saved_whole(kind, way, tmp_path):
    folder = str(tmp_path / "out")
    model, plain = sharded(adapted(kind), way), adapted(kind)
    with sherd.unsharded(model):
        merged = model.merge_and_unload()
    sherd.save_pretrained(merged, folder)
    dist.barrier()
    loaded, info = type(base_of(kind)).from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits_of(loaded), logits_of(plain.merge_and_unload()))


@on_processes(2)
def test_what_was_trained_is_saved(tmp_path):
    """The bits of the shards, not those of the start, also through `torch.compile`."""
    folder, model = str(tmp_path / "out"), sharded(adapted("lora"), mesh=named_mesh((1, 2), "replicate", "shard"))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for _ in range(2):
        model(torch.tensor([[1, 2, 3, 4]])).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sherd.save_pretrained(torch.compile(model, backend="eager"), folder)
    expected = {name: each for name, each in sherd.iter_full_parameters(model) if "lora_" in name}
    found = files_in(folder)
    for name, each in expected.items():
        assert torch.equal(found[f"adapter_model.safetensors: {name.replace('.default', '')}"], each)
    assert len(expected) == 8
    loaded = peft.PeftModel.from_pretrained(base_of("lora"), folder).eval()
    torch.testing.assert_close(logits_of(loaded), logits_of(model))
    assert not torch.equal(logits_of(loaded), logits_of(adapted("lora")))


@on_processes(2, kind=["lora", "head", "bias", "tokens"])
def test_pefts_own_function_has_the_adapters_of_a_wrapped_model(kind):
    expected = peft.get_peft_model_state_dict(adapted(kind))
    model = sherd.FullyShardedDataParallel(adapted(kind), use_orig_params=True)
    assert_same(peft.get_peft_model_state_dict(model), expected)


@on_processes(1)
def test_on_one_rank_the_adapters_of_a_wrappers_own_module_load_into_a_plain_model():
    expected = adapted("lora")
    with pytest.warns(UserWarning, match="on one rank alone"):
        model = sherd.FullyShardedDataParallel(adapted("lora"), use_orig_params=True)
    loaded = peft.get_peft_model(base_of("lora"), KINDS["lora"]())
    peft.set_peft_model_state_dict(loaded, peft.get_peft_model_state_dict(model.module))
    assert_same(peft.get_peft_model_state_dict(loaded), peft.get_peft_model_state_dict(expected))


class Attending(nn.Module):
    """A model whose attention peft adapts by adding to its weights within forward, and subtracting again."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x)[0])


@on_processes(2, way=["wrapper", "shard", "flat"])
def test_an_adapted_attention_of_torch_trains_as_in_one_process(way):
    torch.manual_seed(0)
    plain = peft.get_peft_model(Attending(), peft.LoraConfig(target_modules=["attention"], init_lora_weights=False))
    copied = copy.deepcopy(plain)
    model = sharded_in(copied, way, [copied])
    x = torch.randn(4, 3, 16)
    losses = []
    for each in (plain, model):
        optimizer = torch.optim.SGD([each for each in each.parameters() if each.requires_grad], 0.1)
        for _ in range(3):
            losses.append(each(x).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(losses[3:], losses[:3])
