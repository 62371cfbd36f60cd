"""The policies choose what torch's choose, and the walk wraps what torch's wraps."""

import functools
import inspect

import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn

from sherd import wrap as sherd_wrap
from sherd.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    apply_wraps,
    choose,
    or_policy,
    post_order,
    size_based_auto_wrap_policy,
)
from tests.support.models import WIDTH, Block, build
from tests.wrap.against_torch import (
    MODELS,
    Attending,
    Wrapped,
    names_of,
    needs_transformers,
    policies,
    tiny_gpt2,
    tiny_llama,
    wrapped_by_torch,
    wrapped_by_us,
)

OURS, TORCHS = policies(sherd_wrap), policies(torch_wrap)
KWARGS = {"reshard": True, "mixed_precision": "half"}
FUNCTIONS = (
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "_or_policy",
    "_wrap_module_cls_individually",
    "enable_wrap",
    "wrap",
)


def assert_wrapped_as_by_torch(plain):
    for name, policy in OURS.items():
        expected = repr(wrapped_by_torch(plain, TORCHS[name], KWARGS))
        assert repr(wrapped_by_us(plain, policy, KWARGS)) == expected, name
        assert repr(wrapped_by_us(plain, TORCHS[name], KWARGS)) == expected, f"torch's own {name}, given to us"


def test_a_policy_wraps_what_torchs_policy_of_that_name_wraps():
    for make in MODELS.values():
        assert_wrapped_as_by_torch(make())


@needs_transformers
def test_a_policy_wraps_what_torchs_wraps_of_a_hugging_face_model():
    for make in (tiny_llama, tiny_gpt2):
        assert_wrapped_as_by_torch(make())


def test_the_policies_above_are_not_all_empty_and_not_all_the_same():
    plain = build("transformer")
    outcomes = {repr(wrapped_by_us(plain, policy, KWARGS)) for policy in OURS.values()}
    assert len(outcomes) > len(OURS) / 2


def test_our_functions_serve_torchs_walk():
    plain = build("transformer")
    for name in OURS.keys() - {"classes", "custom"}:
        found, expected = (repr(wrapped_by_torch(plain, each[name], KWARGS)) for each in (OURS, TORCHS))
        assert found == expected, name


def test_names_and_arguments_are_torchs():
    assert set(torch_wrap.__all__) <= set(sherd_wrap.__all__)
    assert all(inspect.getdoc(getattr(sherd_wrap, name)) for name in sherd_wrap.__all__)

    def arguments(function):
        return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]

    for name in FUNCTIONS:
        assert arguments(getattr(sherd_wrap, name)) == arguments(getattr(torch_wrap, name)), name
    for name in ("ModuleWrapPolicy", "CustomPolicy"):
        ours, theirs = (getattr(source, name) for source in (sherd_wrap, torch_wrap))
        for mine, other in ((ours, theirs), (ours._run_policy, theirs._run_policy)):
            assert list(inspect.signature(mine).parameters) == list(inspect.signature(other).parameters), name


def test_the_size_policys_default_classes_are_torchs_and_can_be_changed(monkeypatch):
    for name in ("EXCLUDE_WRAP_MODULES", "FORCE_LEAF_MODULES"):
        ours = getattr(size_based_auto_wrap_policy, name)
        assert ours == getattr(torch_wrap.size_based_auto_wrap_policy, name)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=WIDTH)
    model = Attending()
    assert "attention.out_proj" not in names_of(model, choose(model, policy))
    monkeypatch.setattr(size_based_auto_wrap_policy, "FORCE_LEAF_MODULES", set())
    assert "attention.out_proj" in names_of(model, choose(model, policy))


def test_chosen_modules_come_children_first_and_the_root_never():
    model = build("nested")
    chosen = names_of(model, choose(model, always_wrap_policy))
    assert "" not in chosen
    assert chosen == [name for name, _ in post_order(model) if name]
    for place, name in enumerate(chosen):
        assert not any(later.startswith(f"{name}.") for later in chosen[place:])
    assert names_of(model, choose(model, ModuleWrapPolicy({nn.Module}))) == chosen
    assert names_of(model, choose(model, CustomPolicy(lambda module: True))) == chosen


def test_each_unit_gets_arguments_of_its_own():
    model, root_kwargs = build("mlp"), {"mesh": None}
    for policy in (ModuleWrapPolicy({Block}), or_policy_of(Block), CustomPolicy(lambda m: isinstance(m, Block))):
        chosen = choose(model, policy, root_kwargs=root_kwargs)
        assert list(chosen.values()) == [root_kwargs] * 3
        assert len({id(kwargs) for kwargs in [root_kwargs, *chosen.values()]}) == 4


def or_policy_of(*classes):
    return functools.partial(or_policy, policies=[ModuleWrapPolicy({each}) for each in classes])


def test_a_custom_policys_dict_goes_over_the_roots_arguments():
    model = build("mlp")
    policy = CustomPolicy(lambda m: {"reshard_after_forward": False} if m is model.blocks[1] else isinstance(m, Block))
    chosen = choose(model, policy, root_kwargs={"mesh": None, "reshard_after_forward": True})
    assert [kwargs["reshard_after_forward"] for kwargs in chosen.values()] == [True, False, True]
    assert all(kwargs["mesh"] is None for kwargs in chosen.values())


def both_kinds(kind):
    """A policy that is an object and one that is a function, for modules of this class."""
    return ModuleWrapPolicy({kind}), or_policy_of(kind)


def test_ignored_modules_are_not_chosen_and_neither_is_what_is_below_them():
    model = build("mlp")
    for policy in both_kinds(nn.Linear):
        chosen = choose(model, policy, ignored_modules=[model.blocks[0], model.last])
        assert names_of(model, chosen) == ["first", "blocks.1.up", "blocks.1.down", "blocks.2.up", "blocks.2.down"]


def test_ignored_parameters_do_not_count():
    model = build("mlp")
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=model.first.weight.numel())
    assert "first" in names_of(model, choose(model, policy))
    assert "first" not in names_of(model, choose(model, policy, ignored_params={model.first.weight}))


# Shared modules


class Diamond(nn.Module):
    """One block under two parents, and twice under one."""

    def __init__(self):
        super().__init__()
        shared = Block()
        self.left = nn.Sequential(shared, nn.Linear(WIDTH, WIDTH), shared)
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), shared)


def test_a_shared_module_is_wrapped_once_and_everywhere():
    for policy in both_kinds(Block):
        model, made = Diamond(), []
        chosen = choose(model, policy)
        assert names_of(model, chosen) == ["left.0"]
        apply_wraps(model, chosen, lambda module, kwargs, made=made: made.append(Wrapped(module)) or made[-1])
        assert [model.left[0], model.left[2], model.right[1]] == made * 3


def test_a_module_that_comes_back_as_itself_stays_where_it_is():
    model = Diamond()
    before, seen = repr(model), []
    apply_wraps(model, choose(model, always_wrap_policy), lambda module, kwargs: seen.append(module) or module)
    assert repr(model) == before
    assert seen == [module for _, module in post_order(model) if module is not model]


# Classes that are units of their own whatever the policy says


def test_classes_that_stand_apart_are_units_with_their_own_arguments():
    model, norms = Attending(), (nn.LayerNorm, nn.BatchNorm1d)
    root_kwargs, own = {"mixed_precision": "half", "mesh": None}, {"mixed_precision": None}
    for policy in both_kinds(Block):
        chosen = choose(model, policy, root_kwargs=root_kwargs, apart=norms, apart_kwargs=own, ignored_params=())
        assert {name for name in names_of(model, chosen) if "norms" in name} == {"norms.0", "norms.1"}
        for module, kwargs in chosen.items():
            assert kwargs == {"mesh": None, "mixed_precision": None if isinstance(module, norms) else "half"}
        assert root_kwargs["mixed_precision"] == "half"


def test_a_class_that_stands_apart_may_be_one_that_the_policy_chose():
    model = Attending()
    chosen = choose(model, ModuleWrapPolicy({nn.LayerNorm}), apart=[nn.LayerNorm], apart_kwargs={"half": None})
    assert list(chosen.values()) == [{"half": None}]
    assert choose(model, ModuleWrapPolicy({Block}), [model.norms], apart=[nn.LayerNorm]).keys() == {
        each for each in model.modules() if isinstance(each, Block)
    }
