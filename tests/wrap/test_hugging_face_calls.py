"""What transformers itself calls on a sharded model, beside its forward, works or is refused by name."""

import pytest
import torch
import torch.distributed as dist

import sherd
from sherd.errors import PlacementError, ShardedAccessError, WriteBackError
from tests.support.comparing import assert_named_close, whole_grads
from tests.support.models import VOCABULARY
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded
from tests.wrap.against_torch import needs_transformers, tiny_llama

pytestmark = needs_transformers


def llama(tied):
    return tiny_llama(tie_word_embeddings=tied, pad_token_id=0)


def made(front, tied, **options):
    model = llama(tied)
    return sharded(model, front, [*model.model.layers, model], **options)


def ids():
    return torch.tensor([[1, 2, 3 + dist.get_rank()]])


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("front", ["shard", "flat", "wrapper", "flat wrapper"])
@on_threads(2)
def test_generate_writes_what_the_plain_model_does(front, tied):
    model, plain = made(front, tied, on_touch="unshard" if "wrapper" in front else "error"), llama(tied)
    for more in ({}, {"num_beams": 2}):
        for given in (ids(), ids()[:, -1:]):
            texts = [each.generate(given, max_new_tokens=4, do_sample=False, **more) for each in (model, plain)]
            assert torch.equal(*texts)


@on_threads(2)
def test_a_wrapper_refuses_generate_which_the_module_inside_calls_itself_until_it_is_registered():
    model = made("wrapper", False)
    with pytest.raises(ShardedAccessError, match=r"LlamaForCausalLM\.generate\(\),.*\(module, 'generate'\)"):
        model.generate(ids(), max_new_tokens=2)
    sherd.register_fsdp_forward_method(model, "generate")
    assert torch.equal(model.generate(ids(), max_new_tokens=2), llama(False).generate(ids(), max_new_tokens=2))


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("front", ["shard", "flat", "wrapper"])
def test_its_parts_may_be_called_and_trained(threads, front, tied):
    def parts_called():
        model, plain = made(front, tied, on_touch="unshard"), llama(tied)
        for each in (model, plain):
            hidden = each.base_model(inputs_embeds=each.get_input_embeddings()(ids())).last_hidden_state
            loss = each.get_output_embeddings()(hidden).square().mean() + each(ids()).logits.square().mean()
            loss.backward()
        return whole_grads(model), whole_grads(plain)

    (found, one), (also_found, other) = threads(2).run(parts_called)
    mean = {name: (one[name] + other[name]) / 2 for name in one}
    for each in (found, also_found):
        assert_named_close(each, mean, "gradient", 1e-4, 1e-6)


@pytest.mark.parametrize("front", ["shard", "flat", "wrapper"])
@on_threads(2)
def test_weights_may_be_tied_again_and_are_not_resized_and_the_model_stays_usable(front):
    model, plain = made(front, tied=True), llama(True)
    model.tie_weights()
    model.resize_token_embeddings(VOCABULARY)
    for mean_resizing in (False, True):
        with pytest.raises(PlacementError if front == "wrapper" else ShardedAccessError):
            model.resize_token_embeddings(60, mean_resizing=mean_resizing)
    with pytest.raises(ShardedAccessError, match=r"model\.embed_tokens\.weight"):
        model.get_input_embeddings()(ids())
    torch.testing.assert_close(model(ids()).logits, plain(ids()).logits)
    with pytest.raises(WriteBackError, match=r"model\.embed_tokens\.weight"), sherd.unsharded(model):
        model.resize_token_embeddings(60, mean_resizing=False)
