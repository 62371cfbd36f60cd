"""What wrong policies and models that cannot be wrapped as asked raise, with a text that helps."""

import functools
import random

import pytest
from torch import nn
from torch.distributed.fsdp._wrap_utils import _validate_frozen_params

from sherd.errors import ModuleError, PolicyError, PolicyTypeError
from sherd.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    check_frozen,
    check_none_wrapped,
    choose,
    is_container,
    lambda_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from tests.support.models import Block, build
from tests.support.models.stacks import Layer, Storey
from tests.wrap.against_torch import Wrapped


class Answers:
    """A policy object with a prepared answer."""

    def __init__(self, answer):
        self._answer = answer

    def _run_policy(self, root_module, ignored_modules, root_kwargs):
        return self._answer


def test_what_is_no_policy_or_answers_wrongly_is_refused():
    named = "Answers._run_policy returned a list; expected a dict from modules to dicts of arguments"
    asked = "should return False/True or a kwarg dict, but it returned 'yes' for the r"
    for policy, said in (
        (3, "expected a policy, got 3"),
        ({Block}, r"ModuleWrapPolicy\(\{Block\}\)"),
        (Block, "expected a policy, got <class"),
        (lambda module: True, r"cannot be called as policy\(module=.*CustomPolicy\(function\)"),
        (transformer_auto_wrap_policy, "'transformer_layer_cls'.*functools.partial"),
        (
            lambda module, recurse, nonwrapped_numel: {"a": 1},
            r"returned \{'a': 1\} for a Mlp.*CustomPolicy",
        ),
        (Answers([Block()]), named),
        (Answers({Block(): True}), "returned True for a Block; expected a dict"),
        (CustomPolicy(lambda module: "yes"), asked),
        (CustomPolicy(lambda m: None if isinstance(m, Block) else True), "returned None for blocks.0, a Block"),
    ):
        for apart in ((), (nn.LayerNorm,)):
            with pytest.raises(PolicyTypeError, match=said) as raised:
                choose(build("mlp"), policy, apart=apart)
            assert isinstance(raised.value, ValueError)
            assert isinstance(raised.value, TypeError)


def test_classes_that_are_none_are_refused():
    for classes in (Block, "Block", [Block()], {"Block"}, 3):
        with pytest.raises(PolicyTypeError, match=r"expects a set of module classes, as \{TransformerBlock\}, got"):
            ModuleWrapPolicy(classes)


def test_a_functions_answer_may_be_anything_that_is_true_or_false():
    model = build("mlp")
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: 1 if isinstance(m, Block) else None)
    assert list(choose(model, policy)) == list(model.blocks)


def test_a_builtin_that_does_not_tell_its_signature_is_called():
    with pytest.raises(TypeError):
        choose(build("mlp"), max)


def test_a_policy_says_what_it_is():
    assert repr(ModuleWrapPolicy([nn.Linear, Block])) == "ModuleWrapPolicy({Block, Linear})"


def test_modules_that_are_wrapped_already_are_named():
    model = build("mlp")
    check_none_wrapped(model, lambda module: isinstance(module, Wrapped))
    model.blocks[1] = Wrapped(model.blocks[1])
    with pytest.raises(ModuleError, match=r"modules to not already have FSDP applied but found blocks\.1 in Mlp"):
        check_none_wrapped(model, lambda module: isinstance(module, Wrapped))
    with pytest.raises(ModuleError, match=r"found the root, first, blocks, .* and 10 more in Mlp"):
        check_none_wrapped(model, lambda module: True)


def test_a_unit_of_frozen_and_trained_parameters_is_named_with_both():
    model = build("adapted")
    units = list(model.layers)
    with pytest.raises(PolicyError, match=r"layers\.0 has both parameters with requires_grad=True and False") as error:
        check_frozen(model, units)
    text = str(error.value)
    assert "FSDP does not support wrapping such modules when use_orig_params=False" in text
    assert "requires_grad=True: layers.0.down.weight, layers.0.up.weight." in text
    assert text.endswith("requires_grad=False: layers.0.base.weight, layers.0.base.bias")


def test_a_unit_is_uniform_without_its_nested_units_and_its_ignored_parameters():
    model = build("adapted")
    frozen = [layer.base for layer in model.layers]
    check_frozen(model, {*frozen, *model.layers, model})
    check_frozen(model, set(model.layers), [p for each in frozen for p in each.parameters()])
    check_frozen(model, [])
    model.layers[1].requires_grad_(True)
    with pytest.raises(PolicyError, match=r"the root has both .*True: layers.0.down.weight, layers.1.base.weight"):
        check_frozen(model, [*(layer.up for layer in model.layers), model])


def refuses(check, *args):
    try:
        check(*args)
    except ValueError:
        return True
    return False


def test_torch_refuses_the_same_mixtures_of_frozen_and_trained():
    for name in ("mlp", "nested", "tied_across", "shared_module", "transformer"):
        verdicts = []
        for seed in range(40):
            model, draw = build(name), random.Random(seed)
            for parameter in model.parameters():
                parameter.requires_grad_(draw.random() < 0.9)
            policy = ModuleWrapPolicy(draw.sample([Block, nn.Linear, Storey, Layer, nn.Embedding], 2))
            units = set(choose(model, policy))
            ignored = {each for each in model.parameters() if draw.random() < 0.1}
            verdicts.append(refuses(check_frozen, model, units, ignored))
            assert verdicts[-1] == refuses(_validate_frozen_params, model, units, ignored, False), (name, seed)
        assert len(set(verdicts)) == 2, f"some of {name} are refused and some are not"


def test_a_shared_module_counts_for_the_unit_that_comes_first():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2)), "b": nn.Sequential(nn.Linear(2, 2))})
    model["b"].append(model["a"][0].requires_grad_(False))
    check_frozen(model, [model["a"], model["b"]])
    with pytest.raises(PolicyError, match=r"^b has both"):
        check_frozen(model, [model["b"]])


def test_containers_are_those_that_fully_shard_refuses():
    class Running(nn.ModuleList):
        def forward(self, x):
            return x

    assert is_container(nn.ModuleList())
    assert is_container(nn.ParameterDict())
    assert not is_container(Running())
    assert not is_container(nn.Sequential())
