"""What transformers itself calls on a sharded model, beside its forward: does it work, or is it refused by name?"""

import pytest
import torch
import torch.distributed as dist

import sherd
from sherd import FullyShardedDataParallel, fully_shard
from sherd.errors import PlacementError, ShardedAccessError, WriteBackError
from tests.support.comparing import assert_named_close, whole_grads

transformers = pytest.importorskip("transformers")

WAYS = {
    "Shard(0)": (fully_shard, {}),
    "Flat": (fully_shard, {"placement": sherd.Flat()}),
    "wrapper": (FullyShardedDataParallel, {"use_orig_params": True}),
    "flat wrapper": (FullyShardedDataParallel, {}),
}


def llama(tied):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=50, **sizes, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=None, pad_token_id=0
    )
    return transformers.LlamaForCausalLM(config).eval()


def sharded(way, tied, **options):
    shard, chosen = WAYS[way]
    model = llama(tied)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = shard(layer, **chosen, **options)
    return shard(model, **chosen, **options)


def ids():
    return torch.tensor([[1, 2, 3 + dist.get_rank()]])


def generated(way, tied, on_touch):
    model, plain = sharded(way, tied, on_touch=on_touch), llama(tied)
    for more in ({}, {"num_beams": 2}):
        for given in (ids(), ids()[:, -1:]):
            texts = [each.generate(given, max_new_tokens=4, do_sample=False, **more) for each in (model, plain)]
            assert torch.equal(*texts)


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize(
    ("way", "on_touch"), [("Shard(0)", "error"), ("Flat", "error"), ("wrapper", "unshard"), ("flat wrapper", "unshard")]
)
def test_generate_writes_what_the_plain_model_does(threads, way, on_touch, tied):
    threads(2).run(generated, way, tied, on_touch)


def refused_generate():
    """Beneath a wrapper, the module inside calls itself."""
    model = sharded("wrapper", False)
    with pytest.raises(ShardedAccessError, match=r"LlamaForCausalLM\.generate\(\),.*\(module, 'generate'\)"):
        model.generate(ids(), max_new_tokens=2)
    sherd.register_fsdp_forward_method(model, "generate")
    assert torch.equal(model.generate(ids(), max_new_tokens=2), llama(False).generate(ids(), max_new_tokens=2))


def test_a_wrapper_refuses_generate_until_it_is_registered(threads):
    threads(2).run(refused_generate)


def parts_called(way, tied):
    model, plain = sharded(way, tied, on_touch="unshard"), llama(tied)
    for each in (model, plain):
        hidden = each.base_model(inputs_embeds=each.get_input_embeddings()(ids())).last_hidden_state
        loss = each.get_output_embeddings()(hidden).square().mean() + each(ids()).logits.square().mean()
        loss.backward()
    return whole_grads(model), {name: each.grad for name, each in plain.named_parameters()}


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("way", ["Shard(0)", "Flat", "wrapper"])
def test_its_parts_may_be_called_and_trained(threads, way, tied):
    runs = threads(2).run(parts_called, way, tied)
    mean = {name: (runs[0][1][name] + runs[1][1][name]) / 2 for name in runs[0][1]}
    for found, _ in runs:
        assert_named_close(found, mean, "gradient", 1e-4, 1e-6)


def changed(way):
    """Ties are as they were; other sizes are refused, and the model stays usable."""
    model, plain = sharded(way, tied=True), llama(True)
    model.tie_weights()
    model.resize_token_embeddings(50)
    refusal = ShardedAccessError if WAYS[way][0] is fully_shard else PlacementError
    for mean_resizing in (False, True):
        with pytest.raises(refusal):
            model.resize_token_embeddings(60, mean_resizing=mean_resizing)
    with pytest.raises(ShardedAccessError, match=r"model\.embed_tokens\.weight"):
        model.get_input_embeddings()(ids())
    torch.testing.assert_close(model(ids()).logits, plain(ids()).logits)
    with pytest.raises(WriteBackError, match=r"model\.embed_tokens\.weight"), sherd.unsharded(model):
        model.resize_token_embeddings(60, mean_resizing=False)


@pytest.mark.parametrize("way", ["Shard(0)", "Flat", "wrapper"])
def test_weights_may_be_tied_again_and_are_not_resized(threads, way):
    threads(2).run(changed, way)
