"""Does `auto_shard` make the right modules units, with the right arguments, and does what it makes train?"""

import functools
import re

import pytest
import torch
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn

from sherd import FSDPModule, fully_shard
from sherd.api.auto_shard import auto_shard
from sherd.api.blocks import in_words, repeated_blocks
from sherd.errors import ModuleError, PolicyError, PolicyTypeError
from sherd.layout.runs import Flat
from sherd.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy, size_based_auto_wrap_policy
from tests.support.models import WIDTH, Block, build, tokens
from tests.support.training import Recipe, assert_all_same, assert_trained, made, steps_sharded, train_job
from tests.wrap.against_torch import tiny_gpt2, tiny_llama


def units(model):
    """Each unit's module names, and whether it was asked to reshard; the list in no particular order."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            unit = fully_shard.state(module)
            found.setdefault(unit.id, ([], unit.policy.reshard_after_forward))[0].append(name)
    return sorted((tuple(names), reshards) for names, reshards in found.values())


def sharded(make, policy=None, **arguments):
    """On a rank: the units that `auto_shard` makes."""
    model = make()
    assert auto_shard(model, policy, **arguments) is model
    return units(model)


def alone(*names, reshards=None):
    return [((name,), reshards) for name in names]


# With a policy


def test_the_policys_choice_and_the_model_become_units(world):
    policy = ModuleWrapPolicy({Block})
    for found in world(2).run(sharded, functools.partial(build, "mlp"), policy):
        assert found == alone("", "blocks.0", "blocks.1", "blocks.2")


def size_policy(source):
    return functools.partial(source.size_based_auto_wrap_policy, min_num_params=200)


def two_front_ends():
    from sherd import wrap as sherd_wrap

    return [sharded(functools.partial(build, "nested"), size_policy(source)) for source in (sherd_wrap, torch_wrap)]


def test_torchs_own_policies_are_taken_too(world):
    for ours, theirs in world(2).run(two_front_ends):
        assert ours == theirs == alone("", "outer.inside", "outer.inside.inside.inside")


def kept_in_the_middle(model):
    return CustomPolicy(lambda m: {"reshard_after_forward": False} if m is model.blocks[1] else isinstance(m, Block))


def sharded_with_exceptions():
    model = build("mlp")
    auto_shard(model, kept_in_the_middle(model), reshard_after_forward=True, placement=Flat())
    return units(model), [type(p).__name__ for p in (model.first.weight, model.blocks[1].up.weight)]


def test_a_custom_policys_arguments_go_over_those_of_the_call(world):
    for found, types in world(2).run(sharded_with_exceptions):
        assert found == sorted([*alone("", "blocks.0", "blocks.2", reshards=True), *alone("blocks.1", reshards=False)])
        assert types == ["RaggedDTensor"] * 2


def test_containers_are_passed_over(world):
    for found in world(2).run(sharded, functools.partial(build, "mlp"), always_wrap_policy):
        names = [names for (names,), _ in found]
        assert "blocks" not in names
        assert {"first", "blocks.0", "blocks.0.up", "last", ""} <= set(names)


def counted():
    model = build("mlp")
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=model.last.weight.numel())
    auto_shard(model, policy, ignored_params={model.last.weight})
    return units(model)


def test_ignored_parameters_are_not_counted(world):
    names = [names for (names,), _ in world(2).run(counted)[0]]
    assert "first" in names
    assert "last" not in names


def train_by_policy(name, policy):
    recipe = Recipe(name, steps=2)
    return steps_sharded(auto_shard(build(name), policy), recipe, torch.distributed.get_rank())


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
def test_a_model_sharded_by_a_policy_trains_as_the_plain_one(world, name, policy):
    assert_all_same(world(2).run(train_by_policy, name, policy), Recipe(name, steps=2))


# Without one: what a Hugging Face model says of itself


def next_token_loss(model, rank, step):
    ids = tokens(step, rank)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def train_described(make, **arguments):
    model = make()
    auto_shard(model, **arguments)
    return train_job(model, next_token_loss)


TIED_LLAMA = functools.partial(tiny_llama, tie_word_embeddings=True)


@pytest.mark.parametrize("make", [tiny_llama, TIED_LLAMA, tiny_gpt2], ids=["llama", "tied_llama", "gpt2"])
def test_a_hugging_face_model_trains_as_the_plain_one(world, make):
    pytest.importorskip("transformers")
    assert_trained(world(2).run(train_described, make), make, next_token_loss)


def test_a_plans_layers_embedding_and_tail_become_units(world):
    pytest.importorskip("transformers")
    freed = alone("model.embed_tokens", "model.layers.0", "model.layers.1", reshards=True)
    expected = sorted([*alone(""), *freed, (("model.norm", "lm_head"), False)])
    assert world(2).run(sharded, tiny_llama) == [expected] * 2


def test_tied_embeddings_and_what_runs_with_them_are_the_roots(world):
    pytest.importorskip("transformers")
    layers = alone("model.layers.0", "model.layers.1", reshards=True)
    assert world(2).run(sharded, TIED_LLAMA) == [[*alone(""), *layers]] * 2
    assert world(2).run(sharded, tiny_gpt2) == [alone("", "transformer.h.0", "transformer.h.1")] * 2


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


def test_a_unit_around_a_tied_embedding_is_left_to_the_root(world):
    for tied, expected in ((True, ["", "block"]), (False, ["", "block", "embeddings"])):
        assert world(1).run(sharded, functools.partial(TiedBelow, tied)) == [alone(*expected)]


def test_arguments_of_the_call_go_over_the_plan(world):
    pytest.importorskip("transformers")
    found = world(2).run(sharded, tiny_llama, reshard_after_forward=False)[0]
    assert {reshards for _, reshards in found} == {False}
    assert len(found) == 5


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


KEEP, FREE = "keep_full_weight", "free_full_weight"


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ({"classes": ["Block"]}, {"layers.0.0": None, "layers.1.0": None}),
        ({"classes": {"Block", "Embedding"}}, {"embed": None, "layers.0.0": None, "layers.1.0": None}),
        ({"plan": {"layers.*": FREE}}, {"layers.0": True, "layers.1": True}),
        ({"plan": {"layers.1": KEEP, "layers.*": FREE}}, {"layers.0": True, "layers.1": False}),
        ({"plan": {"layers.*.1.0": FREE}}, {"layers.0.1.0": True, "layers.1.1.0": True}),
        ({"plan": {"layers.*.*.*": FREE}}, {"layers.0.1.0": True, "layers.1.1.0": True}),
        ({"plan": {("embed", "norm"): FREE, "gone": KEEP}}, {"embed, norm": True}),
        ({"plan": {"lm_head": KEEP, "norm": KEEP}}, {"norm, lm_head": False}),
        ({"plan": {"lm_head": KEEP, "norm": FREE}}, {"lm_head": False, "norm": True}),
        ({"plan": {"norm": KEEP}, "classes": ["Block"]}, {"norm": False, "layers.0.0": None, "layers.1.0": None}),
    ],
)
def test_a_description_is_read_rule_by_rule(world, described, expected):
    (found,) = world(1).run(sharded, functools.partial(Described, **described))
    assert {", ".join(names): reshards for names, reshards in found} == {"": None, **expected}


class Holder(nn.Module):
    """A model without a description around one that has it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)
        self.base = Described({"layers.*": FREE, "norm": KEEP}, ["Block"])


def test_a_description_of_a_model_inside_counts(world):
    reshards = {"base.layers.0": True, "base.layers.1": True, "base.norm": False}
    expected = {"": None, "base.layers.0.0": None, "base.layers.1.0": None, **reshards}
    assert {name: raf for (name,), raf in world(1).run(sharded, Holder)[0]} == expected


# What it repeats, if it says nothing


class Silent(nn.Module):
    """Two towers of blocks, within one of which there are lists too, beside what is no list of blocks of one class."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Sequential(nn.Linear(WIDTH, 40), nn.ReLU(), nn.Linear(40, WIDTH))
        self.small = nn.ModuleList([nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)])
        self.towers = nn.ModuleList([nn.ModuleList(Block() for _ in range(3)), nn.Sequential(*map(inner, range(2)))])
        self.none = nn.ModuleList([nn.ReLU(), nn.ReLU()])


def inner(_):
    return nn.Sequential(Block(), Block())


def test_the_largest_lists_of_one_class_are_the_blocks():
    found = repeated_blocks(Silent())
    assert {name: len(blocks) for name, blocks in found.items()} == {"towers.0": 3, "towers.1": 2}
    assert in_words(found) == "3 Block of towers.0, 2 Sequential of towers.1"


def test_a_plan_that_names_nothing_of_the_model_leaves_it_to_the_blocks(world):
    for make in (functools.partial(Described, {"gone.*": FREE}), Described):
        assert world(1).run(sharded, make)[0] == alone("", "layers.0", "layers.1")


def test_what_was_chosen_is_said_in_the_log(caplog, threads):
    with caplog.at_level("INFO", logger="sherd"):
        threads(1).run(auto_shard, build("mlp"))
    (said,) = caplog.messages
    assert re.fullmatch(r"auto_shard: \w+ does not say what its units are: they are \d Block of blocks", said)


def tiny(kind, **sizes):
    """A Hugging Face model for masked or next tokens, whose class has no `_no_split_modules`."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=50, **sizes)
    head = "LMHeadModel" if kind == "XLNet" else "ForMaskedLM"
    return getattr(transformers, f"{kind}{head}")(config).eval()  # no dropout, which would differ by the rank


LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SILENT = {
    "Albert": (LAYERS | {"embedding_size": 8}, ["albert.encoder.albert_layer_groups.0"]),
    "Deberta": (LAYERS, ["deberta.encoder.layer.0", "deberta.encoder.layer.1"]),
    "DistilBert": (
        {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
        ["distilbert.transformer.layer.0", "distilbert.transformer.layer.1"],
    ),
    "Electra": (LAYERS | {"embedding_size": 8}, ["electra.encoder.layer.0", "electra.encoder.layer.1"]),
    "XLNet": (
        {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
        ["transformer.layer.0", "transformer.layer.1"],
    ),
}


def masked_loss(model, rank, step):
    ids = tokens(step, rank) % 50
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("kind", SILENT)
def test_a_hugging_face_model_that_says_nothing_is_sharded_by_its_layers_and_trains_plainly(world, kind):
    pytest.importorskip("transformers")
    sizes, units = SILENT[kind]
    make = functools.partial(tiny, kind, **sizes)
    assert {name for (name,), _ in world(2).run(sharded, make)[0]} == {"", *units}
    assert_trained(world(2).run(train_silent, make), make, masked_loss)


def train_silent(make):
    model = make()
    auto_shard(model)
    return train_job(model, masked_loss)


def speech():
    import transformers

    torch.manual_seed(0)
    convolutions = {"conv_dim": (8, 8), "conv_kernel": (3, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(vocab_size=11, **LAYERS, **convolutions, **positions)
    return transformers.Wav2Vec2ForCTC(config).eval()


def heard_loss(model, rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(2, 200, generator=generator)).logits.square().mean()


def train_speech():
    model = speech()
    auto_shard(model)
    return train_job(model, heard_loss)


def test_so_is_a_model_of_speech(world):
    pytest.importorskip("transformers")
    layers = ["wav2vec2.encoder.layers.0", "wav2vec2.encoder.layers.1"]
    assert {name for (name,), _ in world(2).run(sharded, speech)[0]} == {"", *layers}
    assert_trained(world(2).run(train_speech), speech, heard_loss)


# Mistakes


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (Block, PolicyError, r"Block has no _no_split_modules, no _fsdp_plan .*ModuleWrapPolicy\(\{Block\}\)"),
        (lambda: Described(None, ["Gone"]), PolicyError, r"no module of the classes in its _no_split_modules \(Gone\)"),
        (lambda: Described({"norm": "split"}), PolicyError, "asks for 'split' for norm; sherd knows free_full_weight"),
        (lambda: Described({"layers": FREE}), PolicyError, r"names layers, a ModuleList.*name what is in it, as lay"),
        (lambda: Described("auto"), PolicyTypeError, "_fsdp_plan is 'auto'; expected a dict"),
        (lambda: Described(None, "Block"), PolicyTypeError, "_no_split_modules is 'Block'; expected a list"),
        (lambda: 3, PolicyTypeError, "expects a module, got a int"),
    ],
)
def test_a_model_that_does_not_describe_itself_or_wrongly_is_refused(make, kind, said):
    with pytest.raises(kind, match=said):
        auto_shard(make())


def test_arguments_that_fully_shard_does_not_take_are_named_before_anything_is_sharded():
    model = build("mlp")
    with pytest.raises(PolicyTypeError, match=r"auto_shard gives fully_shard sharding_strategy.* it takes mesh, "):
        auto_shard(model, always_wrap_policy, sharding_strategy="FULL_SHARD")
    policy = CustomPolicy(lambda m: {"use_orig_params": True} if m is model.blocks[2] else isinstance(m, Block))
    with pytest.raises(TypeError, match=r"the policy, for blocks\.2, gives fully_shard use_orig_params"):
        auto_shard(model, policy)
    assert not any(isinstance(each, FSDPModule) for each in model.modules())


def shard_again():
    model = build("mlp")
    fully_shard(model.blocks[1])
    with pytest.raises(ModuleError, match=r"would shard blocks\.1 of Mlp again"):
        auto_shard(model, ModuleWrapPolicy({Block}))
    assert not isinstance(model.blocks[0], FSDPModule)
    auto_shard(model, CustomPolicy(lambda m: isinstance(m, Block) and not isinstance(m, FSDPModule)))
    with pytest.raises(ModuleError, match=r"would shard the model, blocks.0, "):
        auto_shard(model, ModuleWrapPolicy({Block}))
    return units(model)


def test_what_is_sharded_already_is_named_and_may_be_left_out(world):
    assert world(2).run(shard_again) == [alone("", "blocks.0", "blocks.1", "blocks.2")] * 2


def test_the_tiny_models_are_the_same_wherever_they_are_made():
    pytest.importorskip("transformers")
    first, second = made(tiny_gpt2).state_dict(), made(tiny_gpt2).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
