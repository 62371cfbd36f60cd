"""Rules rename and reshape models and optimizers' states, and following them backwards undoes that."""

import pytest
import torch

from sherd.cli import convert_words as words
from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, Grid, whole
from sherd.tools.convert.formats import convert, open_source
from sherd.tools.convert.mapped import Mapped
from sherd.tools.convert.mapping import PRESETS, numbers_of, rules_of
from sherd.tools.convert.state_trees import in_memory
from sherd.train.config import Config
from sherd.train.models import Decoder
from tests.interchange.checkpoints import bytes_of, model_tensor, put, rules_in
from tests.support.comparing import assert_same
from tests.support.refusals import refusal

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
SIZES_OF_GPT2 = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 16, "bos_token_id": 0, "eos_token_id": 0}
MODELS = {
    "llama": lambda hf: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "llama-torchtitan": lambda hf: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "qwen": lambda hf: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=4)),
    "qwen2": lambda hf: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES)),
    "mixtral": lambda hf: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=12)),
    "gpt2": lambda hf: hf.GPT2LMHeadModel(hf.GPT2Config(**SIZES_OF_GPT2)),
}


def model_of(name):
    import transformers

    torch.manual_seed(0)
    return MODELS[name](transformers)


@pytest.mark.parametrize("name", MODELS)
def test_a_preset_and_its_reverse_give_back_the_model(tmp_path, name):
    model_of(name).save_pretrained(tmp_path / "hf")
    source, preset = open_source(tmp_path / "hf"), name.replace("qwen2", "qwen")
    numbers = numbers_of(tmp_path / "hf")
    convert(source, tmp_path / "ours", "sherd", rules_of(preset, numbers), most_bytes=50)
    ours = open_source(tmp_path / "ours")
    assert not any(each.startswith(("model/model.", "model/transformer.")) for each in ours.contents.tensors)
    convert(ours, tmp_path / "back", "hf", rules_of(preset, numbers, reverse=True), most_bytes=50)
    assert bytes_of(open_source(tmp_path / "back")) == bytes_of(source)


def test_a_model_of_sherd_train_gets_the_weights_of_hugging_faces(tmp_path):
    theirs = model_of("llama").eval()
    theirs.save_pretrained(tmp_path / "hf")
    source = Mapped(open_source(tmp_path / "hf"), rules_of("llama", {}))
    model = Decoder(Config(layers=2, width=8, heads=4, kv_heads=2, hidden=12, tied=False))
    assert {f"model/{each}": tuple(p.shape) for each, p in model.named_parameters()} == {
        each: spec.shape for each, spec in source.contents.tensors.items()
    }
    model.load_state_dict({each: model_tensor(source, each) for each, _ in model.named_parameters()})
    tokens = torch.arange(7).view(1, 7)
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def test_torchtitans_rotary_order_turns_neighbours(tmp_path):
    """Element 2i and 2i + 1 of a head there are i and i + half of a head here."""
    w = torch.arange(16.0).view(8, 2)
    put(tmp_path / "in", {"model/q": (w, Grid(0))})
    found = model_tensor(Mapped(open_source(tmp_path / "in"), rules_in(tmp_path, {"permute": "q", "heads": 2})), "q")
    assert [int(row[0]) // 2 for row in found] == [0, 2, 1, 3, 4, 6, 5, 7]


RULES = [
    {"rename": "h.{i}.ln", "to": "blocks.{i}.norm"},
    {"regex": True, "rename": r"^h\.(\d+)\.", "to": r"blocks.\1.", "back": [r"^blocks\.(\d+)\.(?!norm)", r"h.\1."]},
    {"transpose": "blocks.{i}.w"},
    {"merge": ["blocks.{i}.q", "blocks.{i}.k", "blocks.{i}.v"], "to": "blocks.{i}.qkv", "ratio": [2, 1, 1]},
    {"split": "blocks.{i}.gate_up", "to": ["blocks.{i}.gate", "blocks.{i}.up"], "dim": 1},
    {"stack": "blocks.{i}.experts.{expert}.w", "to": "blocks.{i}.experts"},
    {"unstack": "all", "to": "one.{expert}"},
    {"tie": "head", "to": "embed"},
]


def layers():
    torch.manual_seed(0)
    shapes = {"ln": (4,), "w": (3, 5), "q": (4, 2), "k": (2, 2), "v": (2, 2), "gate_up": (3, 6)}
    found = {f"h.{i}.{name}": torch.randn(shape) for i in (0, 11) for name, shape in shapes.items()}
    found |= {f"h.{i}.experts.{e}.w": torch.randn(2, 3) for i in (0, 11) for e in range(12)}
    return found | {"all": torch.randn(3, 2), "embed": torch.randn(2, 2)}


def mapped(tmp_path, optimizer=False):
    tensors = layers()
    named = {f"model/{name}": (tensor, Grid(at % 4)) for at, (name, tensor) in enumerate(tensors.items())}
    values = {"model": {"kind": "module"}}
    if optimizer:
        named |= {f"optimizer/{name}/exp_avg": (tensor * 2, Grid(0)) for name, tensor in tensors.items()}
        state = {name: {"step": 4.0, "exp_avg": {"$tensor": f"optimizer/{name}/exp_avg"}} for name in tensors}
        groups = [{"lr": 1, "params": list(tensors)}]
        values["optimizer"] = {"kind": "optimizer", "param_groups": groups, "state": state}
    put(tmp_path / "in", named, values=values)
    source = open_source(tmp_path / "in")
    after = Mapped(source, rules_in(tmp_path, *RULES))
    return tensors, source, after, rules_in(tmp_path, *RULES, reverse=True)


def test_each_rule_does_what_torch_does(tmp_path):
    tensors, _, after, _ = mapped(tmp_path)
    for i in (0, 11):
        one = {name.removeprefix(f"h.{i}."): tensor for name, tensor in tensors.items() if name.startswith(f"h.{i}.")}
        expected = {
            "norm": one["ln"],
            "w": one["w"].t(),
            "qkv": torch.cat([one["q"], one["k"], one["v"]]),
            "gate": one["gate_up"][:, :3],
            "up": one["gate_up"][:, 3:],
            "experts": torch.stack([one[f"experts.{e}.w"] for e in range(12)]),
        }
        assert_same({name: model_tensor(after, f"blocks.{i}.{name}") for name in expected}, expected)
    assert_same([model_tensor(after, f"one.{row}") for row in range(3)], list(tensors["all"]))
    assert after.contents.aliases == {"model/head": "model/embed"}
    assert_same(model_tensor(after, "head"), tensors["embed"])
    assert not any("/h." in name for name in after.contents.tensors)


def test_any_part_is_read_with_any_memory(tmp_path):
    _, _, after, _ = mapped(tmp_path)
    for name, spec in after.contents.tensors.items():
        box = Box(tuple(size // 3 for size in spec.shape), tuple(size - size // 3 for size in spec.shape))
        for most in (1, 16, 1 << 20):
            read = torch.empty(box.sizes)
            after.tensor(name).read_into(box, read, most)
            assert torch.equal(read, in_memory(after.tensor(name))[box.within(whole(spec.shape))]), (name, most)


def test_all_rules_are_undone(tmp_path):
    _, source, after, back = mapped(tmp_path, optimizer=True)
    undone = Mapped(after, back)
    assert bytes_of(undone) == bytes_of(source)
    assert undone.contents.aliases == {}
    (group,) = undone.contents.values["optimizer"]["param_groups"]
    (before,) = source.contents.values["optimizer"]["param_groups"]
    assert sorted(group["params"]) == sorted(before["params"])
    assert undone.contents.values["optimizer"]["state"] == source.contents.values["optimizer"]["state"]


def test_optimizers_states_follow_their_parameters(tmp_path):
    tensors, _, after, _ = mapped(tmp_path, optimizer=True)
    qkv = in_memory(after.tensor("optimizer/blocks.0.qkv/exp_avg"))
    assert torch.equal(qkv, 2 * torch.cat([tensors["h.0.q"], tensors["h.0.k"], tensors["h.0.v"]]))
    optimizer = after.contents.values["optimizer"]
    for name in ("blocks.11.qkv", "one.2"):
        assert optimizer["state"][name] == {"step": 4.0, "exp_avg": {"$tensor": f"optimizer/{name}/exp_avg"}}
    (group,) = optimizer["param_groups"]
    assert {"blocks.0.qkv", "blocks.11.gate", "one.0", "one.1", "one.2", "embed"} <= set(group["params"])
    assert not any(name.startswith("h.") or name == "all" for name in group["params"])


def test_parameters_of_two_groups_are_not_joined(tmp_path):
    two = {f"model/{name}": (torch.ones(2), Grid(0)) for name in "ab"}
    groups = [{"lr": 1, "params": ["a"]}, {"lr": 2, "params": ["b"]}]
    optimizer = {"kind": "optimizer", "param_groups": groups, "state": {}}
    put(tmp_path / "in", two, values={"model": {"kind": "module"}, "optimizer": optimizer})
    rules = rules_in(tmp_path, {"merge": ["a", "b"], "to": "c"})
    with pytest.raises(CheckpointError, match="c would be one of several parameters whose settings or steps differ"):
        Mapped(open_source(tmp_path / "in"), rules)


NO_RULES = [
    ({"rename": "a.{i}", "to": "b"}, "different holes"),
    ({"rename": "a", "to": "b", "extra": 1}, "other entries"),
    ({"rename": "a", "drop": "b"}, "should have one of"),
    ({"rename": ["a", "b"], "to": "c"}, "has 2 names for rename"),
    ({"merge": ["w", "v"], "to": "c"}, "needs ratio"),
    ({"merge": ["w", "u"], "to": "c"}, "is to be joined with u, which is not there"),
    ({"merge": ["w", "x"], "to": "c"}, "cannot be joined along dim 0"),
    ({"split": "w", "to": ["a", "b", "c"]}, "does not divide"),
    ({"split": "w", "to": ["a", "b"], "dim": 2}, "has no dim 2"),
    ({"split": "w", "to": ["a", "b"], "dim": 4}, "has no dim 4"),
    ({"split": "w", "to": ["a", "b"], "ratio": [1, 2, 3]}, "ratio has 3 numbers for 2 parts"),
    ({"transpose": "x"}, "is no matrix"),
    ({"permute": "w", "heads": 3}, "no even number of rows"),
    ({"permute": "w", "heads": "$heads"}, "--set heads=N"),
    ({"permute": "w"}, "needs heads"),
    ({"stack": "w", "to": "y"}, "should have the hole"),
    ({"rename": "w", "to": "x"}, "would be the name of two tensors"),
    ({"tie": "w", "to": "x"}, "is a tensor of its own"),
    ({"rename": "(", "to": "x", "regex": True}, "no regular expression"),
    (3, "other entries"),
]


def test_a_rule_that_means_nothing_says_so_and_so_does_a_file_without_rules(tmp_path):
    named = {"w": torch.ones(4, 4), "v": torch.ones(2, 4), "x": torch.ones(3)}
    put(tmp_path / "in", {f"model/{name}": (tensor, Grid(0)) for name, tensor in named.items()})
    source = open_source(tmp_path / "in")
    for rule, said in NO_RULES:
        assert said in refusal(CheckpointError, lambda rule=rule: Mapped(source, rules_in(tmp_path, rule))), rule
    one_way = {"rename": "^a", "to": "b", "regex": True}
    assert 'needs "back"' in refusal(CheckpointError, rules_in, tmp_path, one_way, reverse=True)
    assert "is none of the presets" in refusal(CheckpointError, rules_of, str(tmp_path / "no"), {})
    (tmp_path / "x.json").write_text("{}")
    assert 'no list called "rules"' in refusal(CheckpointError, rules_of, str(tmp_path / "x.json"), {})
    assert set(words.PRESETS) == set(PRESETS)
