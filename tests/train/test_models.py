"""The decoder is what its formulas say, and its first weights are the same on any number of ranks."""

import json
import math
import re
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from sherd import FSDPModule
from sherd.cli.dry_run import planned
from sherd.train import parallel
from sherd.train.axes import axes_of
from sherd.train.config import Config, InputError
from sherd.train.mesh import RankGrid
from sherd.train.models import Attention, Decoder, HuggingFace, rotate, rotation
from sherd.train.parallel import build
from tests.support.comparing import assert_same, whole_params
from tests.support.models import noise
from tests.support.refusals import one_line
from tests.support.training import made

SMALL = Config(layers=2, width=16, heads=4, kv_heads=2, hidden=24)


def decoder(model=SMALL, seed=0):
    built = Decoder(model)
    built.reset_parameters(seed)
    return built


def test_rotation_turns_each_pair_by_position_times_frequency_so_products_depend_on_distance_alone():
    x = noise(0, 0, 5, 6)
    turned = rotate(x, *rotation(5, 6, x.device))
    for position in range(5):
        for pair in range(3):
            z = complex(x[position, pair], x[position, pair + 3])
            z *= complex(math.cos(a := position * 10000.0 ** (-2 * pair / 6)), math.sin(a))
            assert complex(turned[position, pair], turned[position, pair + 3]) == pytest.approx(z, abs=1e-5)
    q, k = noise(1, 0, 8), noise(2, 0, 8)
    cos, sin = rotation(20, 8, q.device)
    products = [rotate(q, cos[i], sin[i]) @ rotate(k, cos[i + 7], sin[i + 7]) for i in (0, 5, 12)]
    torch.testing.assert_close(products[0].expand(3), torch.stack(products))


def test_attention_equals_a_loop_over_query_heads_that_share_key_heads():
    attention, x = made(lambda: Attention(SMALL)), noise(0, 0, 2, 7, 16)
    cos, sin = rotation(7, 4, x.device)
    heads = []
    for head in range(4):
        own, shared = slice(head * 4, head * 4 + 4), slice(head // 2 * 4, head // 2 * 4 + 4)
        q = rotate(x @ attention.query.weight[own].T, cos, sin)
        k = rotate(x @ attention.key.weight[shared].T, cos, sin)
        v = x @ attention.value.weight[shared].T
        scores = (q @ k.mT / 2).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(attention(x, cos, sin), torch.cat(heads, -1) @ attention.out.weight.T)


def test_feed_forward_is_a_gated_product():
    block, x = decoder().blocks[0].feed_forward, noise(0, 0, 3, 16)
    gate = x @ block.gate.weight.T
    expected = (gate * gate.sigmoid() * (x @ block.up.weight.T)) @ block.down.weight.T
    torch.testing.assert_close(block(x), expected)


def test_no_logit_sees_a_later_token():
    model, tokens = decoder(), torch.arange(9).view(1, 9)
    other = tokens.clone()
    other[0, 5:] = (other[0, 5:] + 1) % 256
    torch.testing.assert_close(model(tokens)[:, :5], model(other)[:, :5])
    assert not torch.allclose(model(tokens)[:, 5:], model(other)[:, 5:])


def test_a_tied_head_reads_the_embedding_and_is_no_parameter():
    tied, untied = decoder(), decoder(replace(SMALL, tied=False))
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 256 * 16
    tied(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    assert tied.embedding.weight.grad[255].abs().sum() > 0  # a token never seen: only the head's use reaches it


def test_fresh_logits_are_near_to_an_even_guess():
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    loss = F.cross_entropy(decoder()(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_a_parameters_first_value_depends_on_its_name_and_the_seed_alone():
    two, three = decoder(), decoder(replace(SMALL, tied=False))
    for name, parameter in two.named_parameters():
        assert torch.equal(parameter, three.get_parameter(name))
    assert not torch.equal(decoder(seed=1).embedding.weight, two.embedding.weight)


def whole_first_weights(config):
    model = build(config, RankGrid(axes_of(config, dist.get_world_size()), "cpu"))
    assert isinstance(model, FSDPModule)
    assert all(isinstance(block, FSDPModule) for block in model.blocks)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return whole_params(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_any_number_of_ranks_starts_from_the_same_weights(threads, num_ranks):
    plain = whole_params(decoder(seed=4))
    config = replace(SMALL, seed=4)
    for weights in threads(num_ranks).run(whole_first_weights, config):
        assert_same(weights, plain)


def hf_config(folder, **fields):
    values = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, **fields}
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return str(path)


@pytest.fixture
def built_one_by_one(monkeypatch):
    """Ranks that are threads, which import transformers once, share the random generator that it draws from."""
    lock = threading.Lock()

    def build_alone(path, seed, context):
        with lock:
            return HuggingFace(path, seed, context)

    monkeypatch.setattr(parallel, "HuggingFace", build_alone)


@pytest.mark.usefixtures("built_one_by_one")
def test_a_hugging_face_model_is_sharded_layer_by_layer_and_starts_from_its_seed(threads, tmp_path):
    pytest.importorskip("transformers")
    path = hf_config(tmp_path, tie_word_embeddings=True)
    plain = HuggingFace(path, seed=4, context=8)
    assert [type(block).__name__ for block in plain.blocks] == ["LlamaDecoderLayer"] * 2
    assert plain(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 256)
    config = Config(hf=path, seed=4)
    for weights in threads(2).run(whole_first_weights, config):
        assert_same({name: weights[name] for name, _ in plain.named_parameters()}, whole_params(plain))


WRONG = [
    ({"vocab_size": 100}, "has vocab_size = 100; bytes need 256"),
    ({"model_type": "nothing"}, "is no config: "),
    ({"model_type": "vit"}, "makes no causal LM: "),
    ({"num_attention_heads": 0}, "is no config: integer division or modulo by zero$"),
    ({"num_attention_heads": 7}, r"is no config: .* is not a multiple of the number of attention heads \(7\)"),
    ({"hidden_act": "none"}, "makes no causal LM: 'none'$"),
    ({"max_position_embeddings": 7}, "has 7 positions, fewer than context = 8"),
    ({"model_type": "gpt2", "n_positions": 7}, "has 7 positions, fewer than context = 8"),
]


def test_a_hugging_face_config_that_makes_no_byte_model_or_is_not_there_is_refused_in_one_line(tmp_path):
    pytest.importorskip("transformers")
    for fields, said in WRONG:
        found = one_line(InputError, HuggingFace, hf_config(tmp_path, **fields), seed=0, context=8)
        assert re.search(said, found), fields
    assert "is no file" in one_line(InputError, HuggingFace, str(tmp_path / "absent.json"), seed=0, context=8)


def test_a_hugging_face_model_is_planned_on_the_meta_device(tmp_path):
    pytest.importorskip("transformers")
    config = Config(hf=hf_config(tmp_path))
    plan = planned(config, 8)
    model = HuggingFace(config.hf, seed=0, context=8)
    assert f"{sum(each.numel() for each in model.parameters()):,} parameters, dp=8" in str(plan)
