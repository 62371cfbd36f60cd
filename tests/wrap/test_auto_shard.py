"""`auto_shard` makes the right modules units, with the right arguments, and what it makes trains."""

import functools
import re

import pytest
import torch
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn

from sherd import FSDPModule, fully_shard
from sherd import wrap as sherd_wrap
from sherd.api.auto_shard import auto_shard
from sherd.api.blocks import in_words, repeated_blocks
from sherd.errors import ModuleError, PolicyError, PolicyTypeError
from sherd.layout.runs import Flat
from sherd.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy, size_based_auto_wrap_policy
from tests.support.models import WIDTH, Block, build, tokens
from tests.support.ranks.bodies import on_threads
from tests.support.training import Recipe, assert_all_same, assert_trained, steps_sharded, train_job
from tests.wrap.against_torch import LAYERS, needs_transformers, tiny, tiny_gpt2, tiny_llama


def units(model):
    """Each unit's module names, and whether it was asked to reshard; the list in no particular order."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            unit = fully_shard.state(module)
            found.setdefault(unit.id, ([], unit.policy.reshard_after_forward))[0].append(name)
    return sorted((tuple(names), reshards) for names, reshards in found.values())


def units_made(model, policy=None, **arguments):
    """On a rank: the units that `auto_shard` makes of `model`, or of the specimen of that name."""
    model = build(model) if isinstance(model, str) else model
    assert auto_shard(model, policy, **arguments) is model
    return units(model)


def alone(*names, reshards=None):
    return [((name,), reshards) for name in names]


# With a policy


@on_threads(2)
def test_the_policys_choice_and_the_model_become_units_and_containers_are_passed_over():
    assert units_made("mlp", ModuleWrapPolicy({Block})) == alone("", "blocks.0", "blocks.1", "blocks.2")
    names = [names for (names,), _ in units_made("mlp", always_wrap_policy)]
    assert "blocks" not in names
    assert {"first", "blocks.0", "blocks.0.up", "last", ""} <= set(names)


@on_threads(2)
def test_torchs_own_policies_are_taken_too():
    for source in (sherd_wrap, torch_wrap):
        policy = functools.partial(source.size_based_auto_wrap_policy, min_num_params=200)
        assert units_made("nested", policy) == alone("", "outer.inside", "outer.inside.inside.inside"), source


def but_for(module, arguments):
    """All blocks; this module with other arguments."""
    return CustomPolicy(lambda each: arguments if each is module else isinstance(each, Block))


@on_threads(2)
def test_a_custom_policys_arguments_go_over_those_of_the_call():
    model = build("mlp")
    policy = but_for(model.blocks[1], {"reshard_after_forward": False})
    found = units_made(model, policy, reshard_after_forward=True, placement=Flat())
    assert found == sorted([*alone("", "blocks.0", "blocks.2", reshards=True), *alone("blocks.1", reshards=False)])
    for each in (model.first.weight, model.blocks[1].up.weight):
        assert type(each).__name__ == "RaggedDTensor"


@on_threads(2)
def test_ignored_parameters_are_not_counted():
    model = build("mlp")
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=model.last.weight.numel())
    names = [names for (names,), _ in units_made(model, policy, ignored_params={model.last.weight})]
    assert "first" in names
    assert "last" not in names


@pytest.mark.parametrize("name", ["mlp", "nested", "tied_across", "shared_module", "transformer"])
@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({Block, nn.Embedding}),
        functools.partial(size_based_auto_wrap_policy, min_num_params=100),
        always_wrap_policy,
    ],
    ids=["classes", "size", "always"],
)
def test_a_model_sharded_by_a_policy_trains_as_the_plain_one(threads, name, policy):
    def trained():
        return steps_sharded(auto_shard(build(name), policy), Recipe(name), torch.distributed.get_rank())

    assert_all_same(threads(2).run(trained), Recipe(name))


# Without one: what a Hugging Face model says of itself


def next_token_loss(model, rank, step):
    ids = tokens(step, rank)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


TIED_LLAMA = functools.partial(tiny_llama, tie_word_embeddings=True)


@needs_transformers
@on_threads(2)
def test_a_plans_layers_embedding_and_tail_become_units_and_tied_embeddings_and_their_norm_are_the_roots():
    layers = alone("model.layers.0", "model.layers.1", reshards=True)
    ends = [*alone("model.embed_tokens", reshards=True), (("model.norm", "lm_head"), False)]
    assert units_made(tiny_llama()) == sorted([*alone(""), *layers, *ends])
    assert units_made(TIED_LLAMA()) == [*alone(""), *layers]
    assert units_made(tiny_gpt2()) == alone("", "transformer.h.0", "transformer.h.1")


@needs_transformers
@on_threads(2)
def test_arguments_of_the_call_go_over_the_plan():
    found = units_made(tiny_llama(), reshard_after_forward=False)
    assert {reshards for _, reshards in found} == {False}
    assert len(found) == 5


class TiedBelow(nn.Module):
    """The embedding is in a module of its own, which the description makes a unit, and shares the head's weight."""

    def __init__(self, tied=True):
        super().__init__()
        self.embeddings = nn.Sequential(nn.Embedding(11, WIDTH), nn.LayerNorm(WIDTH))
        self.block = Block()
        self.head = nn.Linear(WIDTH, 11)
        if tied:
            self.head.weight = self.embeddings[0].weight
        self._no_split_modules = ["Sequential", "Block"]


@on_threads(1)
def test_a_unit_around_a_tied_embedding_is_left_to_the_root():
    assert units_made(TiedBelow(tied=True)) == alone("", "block")
    assert units_made(TiedBelow(tied=False)) == alone("", "block", "embeddings")


KEEP, FREE = "keep_full_weight", "free_full_weight"


class Described(nn.Module):
    """A model that describes itself as Hugging Face's do."""

    def __init__(self, plan=None, classes=None):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(Block(), nn.ModuleList([nn.Linear(WIDTH, WIDTH)])) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11, bias=False)
        if plan is not None:
            self._fsdp_plan = plan
        if classes is not None:
            self._no_split_modules = classes


class Holder(nn.Module):
    """A model without a description around one that has it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)
        self.base = Described({"layers.*": FREE, "norm": KEEP}, ["Block"])


@on_threads(1)
def test_a_description_is_read_rule_by_rule_and_that_of_a_model_inside_counts():
    inside = {"base.layers.0": True, "base.layers.1": True, "base.norm": False}
    for model, expected in (
        (Described(None, ["Block"]), {"layers.0.0": None, "layers.1.0": None}),
        (Described(None, {"Block", "Embedding"}), {"embed": None, "layers.0.0": None, "layers.1.0": None}),
        (Described({"layers.*": FREE}), {"layers.0": True, "layers.1": True}),
        (Described({"layers.1": KEEP, "layers.*": FREE}), {"layers.0": True, "layers.1": False}),
        (Described({"layers.*.1.0": FREE}), {"layers.0.1.0": True, "layers.1.1.0": True}),
        (Described({"layers.*.*.*": FREE}), {"layers.0.1.0": True, "layers.1.1.0": True}),
        (Described({("embed", "norm"): FREE, "gone": KEEP}), {"embed, norm": True}),
        (Described({"lm_head": KEEP, "norm": KEEP}), {"norm, lm_head": False}),
        (Described({"lm_head": KEEP, "norm": FREE}), {"lm_head": False, "norm": True}),
        (Described({"norm": KEEP}, ["Block"]), {"norm": False, "layers.0.0": None, "layers.1.0": None}),
        (Holder(), {"base.layers.0.0": None, "base.layers.1.0": None, **inside}),
    ):
        found = {", ".join(names): reshards for names, reshards in units_made(model)}
        assert found == {"": None, **expected}, expected


# What it repeats, if it says nothing


class Silent(nn.Module):
    """Two towers of blocks, within one of which there are lists too, beside what is no list of blocks of one class."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Sequential(nn.Linear(WIDTH, 40), nn.ReLU(), nn.Linear(40, WIDTH))
        self.small = nn.ModuleList([nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)])
        lists = (nn.Sequential(Block(), Block()) for _ in range(2))
        self.towers = nn.ModuleList([nn.ModuleList(Block() for _ in range(3)), nn.Sequential(*lists)])
        self.none = nn.ModuleList([nn.ReLU(), nn.ReLU()])


def test_the_largest_lists_of_one_class_are_the_blocks():
    found = repeated_blocks(Silent())
    assert {name: len(blocks) for name, blocks in found.items()} == {"towers.0": 3, "towers.1": 2}
    assert in_words(found) == "3 Block of towers.0, 2 Sequential of towers.1"


@on_threads(1)
def test_a_plan_that_names_nothing_of_the_model_leaves_it_to_the_blocks():
    for model in (Described({"gone.*": FREE}), Described()):
        assert units_made(model) == alone("", "layers.0", "layers.1")


def test_what_was_chosen_is_said_in_the_log(caplog, threads):
    with caplog.at_level("INFO", logger="sherd"):
        threads(1).run(auto_shard, build("mlp"))
    (said,) = caplog.messages
    assert re.fullmatch(r"auto_shard: \w+ does not say what its units are: they are \d Block of blocks", said)


def two(layers):
    return [f"{layers}.0", f"{layers}.1"]


def masked_loss(model, rank, step):
    ids = tokens(step, rank)
    return model(input_ids=ids, labels=ids).loss


def heard_loss(model, rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(2, 200, generator=generator)).logits.square().mean()


ENCODER = {"hidden_size": 16, "intermediate_size": 32, **LAYERS}
CONVOLUTIONS = {"conv_dim": (8, 8), "conv_kernel": (3, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2}
POSITIONS = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
DISTILLED = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
PERMUTED = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}
HUGGING_FACE = {
    "llama": (tiny_llama, next_token_loss, None),
    "tied llama": (TIED_LLAMA, next_token_loss, None),
    "gpt2": (tiny_gpt2, next_token_loss, None),
    "albert": (
        tiny("Albert", "ForMaskedLM", embedding_size=8, **ENCODER),
        masked_loss,
        ["albert.encoder.albert_layer_groups.0"],
    ),
    "deberta": (tiny("Deberta", "ForMaskedLM", **ENCODER), masked_loss, two("deberta.encoder.layer")),
    "distilbert": (tiny("DistilBert", "ForMaskedLM", **DISTILLED), masked_loss, two("distilbert.transformer.layer")),
    "electra": (tiny("Electra", "ForMaskedLM", embedding_size=8, **ENCODER), masked_loss, two("electra.encoder.layer")),
    "xlnet": (tiny("XLNet", "LMHeadModel", **PERMUTED), masked_loss, two("transformer.layer")),
    "speech": (
        tiny("Wav2Vec2", "ForCTC", **ENCODER, **CONVOLUTIONS, **POSITIONS),
        heard_loss,
        two("wav2vec2.encoder.layers"),
    ),
}
"""How each is made, what is trained, and the units of those that say nothing of them."""


@needs_transformers
@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_a_hugging_face_model_is_sharded_by_its_layers_and_trains_as_the_plain_one(threads, kind):
    make, job, names = HUGGING_FACE[kind]

    def trained():
        model = make()
        found = units_made(model)
        assert names is None or {name for (name,), _ in found} == {"", *names}
        return train_job(model, job)

    assert_trained(threads(2).run(trained), make, job)


# Mistakes


def test_a_model_that_does_not_describe_itself_or_wrongly_is_refused():
    for model, kind, said in (
        (Block(), PolicyError, r"Block has no _no_split_modules, no _fsdp_plan .*ModuleWrapPolicy\(\{Block\}\)"),
        (Described(None, ["Gone"]), PolicyError, r"no module of the classes in its _no_split_modules \(Gone\)"),
        (Described({"norm": "split"}), PolicyError, "asks for 'split' for norm; sherd knows free_full_weight"),
        (Described({"layers": FREE}), PolicyError, r"names layers, a ModuleList.*name what is in it, as lay"),
        (Described("auto"), PolicyTypeError, "_fsdp_plan is 'auto'; expected a dict"),
        (Described(None, "Block"), PolicyTypeError, "_no_split_modules is 'Block'; expected a list"),
        (3, PolicyTypeError, "expects a module, got a int"),
    ):
        with pytest.raises(kind, match=said):
            auto_shard(model)


def test_arguments_that_fully_shard_does_not_take_are_named_before_anything_is_sharded():
    model = build("mlp")
    with pytest.raises(PolicyTypeError, match=r"auto_shard gives fully_shard sharding_strategy.* it takes mesh, "):
        auto_shard(model, always_wrap_policy, sharding_strategy="FULL_SHARD")
    with pytest.raises(TypeError, match=r"the policy, for blocks\.2, gives fully_shard use_orig_params"):
        auto_shard(model, but_for(model.blocks[2], {"use_orig_params": True}))
    assert not any(isinstance(each, FSDPModule) for each in model.modules())


@on_threads(2)
def test_what_is_sharded_already_is_named_and_may_be_left_out():
    model = build("mlp")
    fully_shard(model.blocks[1])
    with pytest.raises(ModuleError, match=r"would shard blocks\.1 of Mlp again"):
        auto_shard(model, ModuleWrapPolicy({Block}))
    assert not isinstance(model.blocks[0], FSDPModule)
    auto_shard(model, CustomPolicy(lambda m: isinstance(m, Block) and not isinstance(m, FSDPModule)))
    with pytest.raises(ModuleError, match=r"would shard the model, blocks.0, "):
        auto_shard(model, ModuleWrapPolicy({Block}))
    assert units(model) == alone("", "blocks.0", "blocks.1", "blocks.2")
