"""Does bad use raise what FSDP1 raises, with a text that names what and what to do, on all ranks, and harm nothing?"""

import functools
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from sherd import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    Placements,
    ShardingStrategy,
    SherdError,
    fully_shard,
    unsharded,
)
from sherd.errors import PolicyError, UnsupportedError
from sherd.wrap import ModuleWrapPolicy
from tests.support.models import Block
from tests.support.on_ranks import on_processes, on_threads
from tests.wrapper.nets import assert_equal, made, own, sharded, values, wholes, words
from tests.wrapper.training import seeded

HYBRID = ShardingStrategy.HYBRID_SHARD


def raises(action, kind, *said):
    """It raises a `SherdError` that is `kind` too, and says all of `said`."""
    with pytest.raises(kind) as raised:
        action()
    assert isinstance(raised.value, SherdError)
    for each in said:
        assert each in str(raised.value), f"{each!r} is not in: {raised.value}"


def group():
    return dist.group.WORLD


CONSTRUCTIONS = {
    "group_and_mesh": (
        lambda: {"process_group": group(), "device_mesh": init_device_mesh("cpu", (2,))},
        ValueError,
        ("Cannot pass both process_group and device_mesh at the same time",),
    ),
    "hybrid_by_hand": (
        lambda: {"sharding_strategy": HYBRID},
        ValueError,
        ("Manual wrapping with ShardingStrategy.HYBRID_SHARD requires explicit specification of process group",),
    ),
    "hybrid_one_group": (
        lambda: {"sharding_strategy": HYBRID, "process_group": group()},
        ValueError,
        ("Expected process_group to be passed in as either None or Tuple", "(shard group, replicate group)"),
    ),
    "hybrid_list": (
        lambda: {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2, "process_group": [group(), group()]},
        ValueError,
        ("_HYBRID_SHARD_ZERO2", "but got <class 'list'>"),
    ),
    "hybrid_one_axis": (
        lambda: {"sharding_strategy": HYBRID, "device_mesh": init_device_mesh("cpu", (2,))},
        ValueError,
        ("Expected device_mesh to have ndim=2 but got 1", "(replicate, shard)"),
    ),
    "pair": (
        lambda: {"process_group": (group(), group())},
        ValueError,
        ("FULL_SHARD expects one process group", "HYBRID_SHARD"),
    ),
    "number_as_group": (lambda: {"process_group": 3}, ValueError, ("expects one process group, got 3",)),
    "strategy_by_name": (
        lambda: {"sharding_strategy": "FULL_SHARD"},
        TypeError,
        ("sharding_strategy='FULL_SHARD'", "expected sherd's ShardingStrategy or Placements, got a builtins.str"),
    ),
    "offload_true": (lambda: {"cpu_offload": True}, TypeError, ("cpu_offload=True", "CPUOffload")),
    "dtype": (
        lambda: {"mixed_precision": torch.bfloat16},
        TypeError,
        ("mixed_precision=torch.bfloat16", "MixedPrecision"),
    ),
    "torchs_own": (
        lambda: {"sharding_strategy": torch.distributed.fsdp.ShardingStrategy.FULL_SHARD},
        TypeError,
        ("expected sherd's ShardingStrategy or Placements, got a torch.distributed.fsdp.api.ShardingStrategy",),
    ),
    "no_policy": (lambda: {"auto_wrap_policy": 3}, TypeError, ("expected a policy, got 3",)),
    "classes_as_policy": (lambda: {"auto_wrap_policy": {Block}}, TypeError, ("ModuleWrapPolicy({Block})",)),
    "both_ignored": (
        lambda: {"ignored_modules": [], "ignored_states": []},
        ValueError,
        ("Cannot pass both ignored_modules and ignored_states at the same time",),
    ),
    "ignored_parameter_as_module": (
        lambda: {"ignored_modules": [nn.Parameter(torch.ones(1))]},
        ValueError,
        ("ignored_modules expects nn.Module list elements but got types", "Parameter"),
    ),
    "ignored_no_list": (lambda: {"ignored_modules": nn.Linear(2, 2)}, TypeError, ("ignored_modules=Linear",)),
    "ignored_mixture": (
        lambda: {"ignored_states": [nn.Parameter(torch.ones(1)), nn.Linear(2, 2)]},
        ValueError,
        ("expects all nn.Parameter or all nn.Module list elements but got types", "linear.Linear", "Parameter"),
    ),
    "ignored_unit": (
        lambda: {"ignored_modules": [FullyShardedDataParallel(nn.Linear(2, 2))]},
        ValueError,
        ("`ignored_modules` should not include FSDP modules", "FullyShardedDataParallel"),
    ),
    "init_that_is_none": (lambda: {"param_init_fn": 3}, ValueError, ("param_init_fn=3", "to be callable")),
    "prefetch": (lambda: {"backward_prefetch": True}, TypeError, ("backward_prefetch=True",)),
    "flag": (lambda: {"use_orig_params": None}, TypeError, ("use_orig_params=None", "expected sherd's bool")),
    "no_device": (lambda: {"device_id": torch.float32}, TypeError, ("device_id=torch.float32",)),
}
"""By name: wrong arguments, what they raise, and what is said."""


@on_processes(2)
def test_arguments_that_do_not_fit_are_named_and_leave_the_module_as_it_was():
    for name, (arguments, kind, said) in CONSTRUCTIONS.items():
        net = made()
        raises(functools.partial(FullyShardedDataParallel, net, **arguments()), kind, *said)
        assert all(type(each) is nn.Parameter for each in net.parameters()), name
        assert_equal(values(net), values(made()))
    model = sharded("flat_param", net)
    torch.testing.assert_close(model(words()), made()(words()))


class Whole(nn.Module):
    """A block that a policy wraps, and more beside it."""

    def __init__(self, **more):
        super().__init__()
        self.block = Block(4, 4)
        self.last = nn.Linear(4, 4)
        for name, each in more.items():
            setattr(self, name, each)

    def forward(self, x):
        return self.last(self.block(x))


def numbers():
    return {"counts": nn.Parameter(torch.arange(3), requires_grad=False)}


def frozen():
    return {"extra": nn.Linear(2, 2).requires_grad_(False)}


def wide():
    return {"extra": nn.Linear(2, 2, dtype=torch.float64)}


MODULES = {
    "integers_flat": (
        numbers,
        False,
        ("Cannot flatten integer dtype tensors: counts is torch.int64", "ignored_states"),
    ),
    "integers_named": (numbers, True, ("Cannot flatten integer dtype tensors: counts", "buffer")),
    "frozen_flat": (
        frozen,
        False,
        ("Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`", "extra.weight has False"),
    ),
    "dtypes_flat": (
        wide,
        False,
        (
            "Must flatten tensors with uniform dtype",
            "block.up.weight has torch.float32",
            "extra.weight has torch.float64",
        ),
    ),
}


@on_processes(2)
def test_parameters_that_cannot_be_one_vector_are_named():
    for name, (more, orig, said) in MODULES.items():
        net = Whole(**more())
        raises(functools.partial(FullyShardedDataParallel, net, use_orig_params=orig), ValueError, *said)
        assert all(type(each) is nn.Parameter for each in net.parameters()), name
        ignored = [each for key, each in net.named_parameters() if key.startswith(("extra", "counts"))]
        FullyShardedDataParallel(net, ignored_states=ignored)(torch.ones(2, 4)).sum().backward()


@on_processes(2)
def test_what_is_wrapped_already_is_named():
    net = Whole()
    net.block = FullyShardedDataParallel(net.block)
    raises(
        functools.partial(FullyShardedDataParallel, net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})),
        ValueError,
        "FSDP auto wrapping requires modules to not already have FSDP applied but found block in Whole",
    )
    model = FullyShardedDataParallel(net)  # by hand they nest
    model(torch.ones(2, 4)).sum().backward()
    holder = nn.Linear(2, 2)
    holder.flat = model._flat_param
    raises(functools.partial(FullyShardedDataParallel, holder), ValueError, "Cannot flatten a `FlatParameter`", "flat")
    assert type(holder.weight) is nn.Parameter
    model(torch.ones(2, 4)).sum().backward()
    counted = Whole(**numbers())
    raises(
        functools.partial(FullyShardedDataParallel, counted, auto_wrap_policy=ModuleWrapPolicy({Block})),
        ValueError,
        "Cannot flatten integer dtype tensors: counts",
    )
    assert type(counted.block) is Block, "nothing was wrapped"
    mixed = Whole(**frozen())
    mixed.block.up.requires_grad_(False)
    raises(
        functools.partial(FullyShardedDataParallel, mixed, auto_wrap_policy=ModuleWrapPolicy({Block})),
        ValueError,
        "block has both parameters with requires_grad=True and False",
    )
    assert type(mixed.block) is Block, "nothing was wrapped"


@on_processes(2, way=("flat_param", "orig_params"))
def test_methods_of_the_wrong_instance_or_at_the_wrong_moment_say_which(way):
    model, plain = sharded(way), made()
    assert model.check_is_root()
    for method in ("no_sync", "clip_grad_norm_", "register_comm_hook"):
        arguments = {"no_sync": (), "clip_grad_norm_": (1.0,), "register_comm_hook": (None, print)}[method]

        def call(instance, method=method, arguments=arguments):
            made = getattr(instance, method)(*arguments)
            if method == "no_sync":
                made.__enter__()

        for kind in (RuntimeError, AssertionError):
            raises(functools.partial(call, model.block), kind, f"{method}()", "root", "block")
        with unsharded(model):
            for kind in (ValueError, RuntimeError):
                raises(functools.partial(call, model), kind, f"{method}() inside an unshard context; leave it first")
    with unsharded(model, recurse=False):
        raises(lambda: model.apply(print), ValueError, "apply() inside an unshard context")
    with pytest.raises(ValueError, match="two"):
        model.clip_grad_norm_(1.0, "two")
    raises(functools.partial(pickle.dumps, model), ValueError, "cannot be pickled", "Net", "state_dict()")
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        _ = model.nothing
    with pytest.raises(AttributeError, match="'Net' object has no attribute '__getitem__'"):
        model[0]
    with pytest.raises(TypeError):
        model[0] = None
    torch.testing.assert_close(model(words()), plain(words()))
    model(words()).sum().backward()


SUMMONS = (
    (
        "flat_param",
        {"with_grads": True},
        ("with_grads=True, use_orig_params=False, offload_to_cpu=False", "use_orig_params"),
    ),
    ("orig_params", {"with_grads": True, "offload_to_cpu": True}, ("offload_to_cpu=True is not supported yet",)),
    ("orig_copied", {"offload_to_cpu": True}, ("offload_to_cpu=True and NO_SHARD is not supported yet",)),
    ("flat_copied", {"offload_to_cpu": True, "writeback": False}, ("NO_SHARD",)),
    ("orig_params", {"rank0_only": True}, ("writeback=True and rank0_only=True is not supported",)),
    ("flat_param", {"rank0_only": True, "recurse": False}, ("pass writeback=False",)),
)
"""The way a net is wrapped, arguments of a context, and what is said."""


@on_processes(2)
def test_contexts_refuse_what_fsdp1_refuses():
    for way, arguments, said in SUMMONS:
        model = sharded(way)
        context = FullyShardedDataParallel.summon_full_params(model, **arguments)
        raises(context.__enter__, NotImplementedError, *said)
        assert_equal(wholes(model), values(made()))
        model(words()).sum().backward()
    model = sharded("orig_params")
    for name in ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads"):
        for context in (unsharded, FullyShardedDataParallel.summon_full_params):
            raises(context(model, **{name: 1}).__enter__, TypeError, f"unsharded({name}=1): expected a bool")
    raises(unsharded(3).__enter__, TypeError, "unsharded expects a module, got a int")
    for arguments in ({"rank0_only": True}, {"with_grads": True, "offload_to_cpu": True}):
        raises(unsharded(fully_shard(nn.Linear(2, 2)), **arguments).__enter__, NotImplementedError, "not supported")
    torch.testing.assert_close(model(words()), made()(words()))


@on_processes(2)
def test_a_lent_unit_does_not_run():
    """A unit's forward while its parameters are lent; then all is as before."""
    for way in ("rows", "flat_param", "orig_params"):
        model, plain = sharded(way), made()
        for _ in range(2):
            with unsharded(model):
                raises(functools.partial(model, words()), RuntimeError, "inside an unshard context", "recurse=False")
                raises(functools.partial(own(model).block, torch.ones(2, 6)), RuntimeError, "leave the context first")
            torch.testing.assert_close(model(words()), plain(words()))
            model(words()).sum().backward()


@on_processes(2)
def test_optimizers_that_nothing_would_step_are_refused():
    """FSDP1 does, where it has the parameters' own names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, which torch still calls there
        from torch.distributed.optim import _apply_optimizer_in_backward
    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=use_orig_params)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}, register_hook=False)
        for _ in range(2):
            raises(
                functools.partial(model, torch.ones(1, 4)), RuntimeError, "to step in backward", "after the backward"
            )


@on_threads(2)
def test_offload_of_copies_and_empty_choices_are_taken_as_fsdp1_takes_them():
    """What may look wrong and is not."""
    for options in (
        {"cpu_offload": CPUOffload(offload_params=True), "sharding_strategy": ShardingStrategy.NO_SHARD},
        {"mixed_precision": MixedPrecision(), "use_orig_params": True},
        {"device_id": "cpu"},
        {"backward_prefetch": None},
    ):
        model = sharded("flat_param", **options)
        torch.testing.assert_close(model(words()), made()(words()))


class Nest(nn.Module):
    """A layer that is wrapped by itself, and one that is not."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.outer(self.inner(x))


@on_threads(4)
def test_a_flat_parameter_that_nothing_shards_over_two_axes_is_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    copies = Placements((Replicate(),) * 2, (Replicate(),) * 2, (Replicate(),) * 2)
    with pytest.raises(PolicyError, match="no axis for a flat parameter to lie on; pass use_orig_params=True"):
        FullyShardedDataParallel(nn.Linear(4, 4), device_mesh=mesh, sharding_strategy=copies)
    FullyShardedDataParallel(nn.Linear(4, 4), device_mesh=mesh, sharding_strategy=copies, use_orig_params=True)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_threads(2)
def test_values_for_one_call_of_nested_wrappers_are_refused_by_name(use_orig_params):
    """Refused by name, and the model is what it was; its own parameters pass."""
    plain, model, x = seeded(Nest), seeded(Nest), torch.ones(2, 4)
    model.inner = FullyShardedDataParallel(model.inner, use_orig_params=use_orig_params)
    model = FullyShardedDataParallel(model, use_orig_params=use_orig_params)
    values = {name: 2 * each.detach() for name, each in plain.named_parameters()}
    for given in (values, {"inner.weight": values["inner.weight"]}, {"inner.bias": nn.Parameter(values["inner.bias"])}):
        with pytest.raises(UnsupportedError, match="functional_call gave a value for"):
            torch.func.functional_call(model, given, (x,))
        assert "weight" not in vars(model.inner), "values are not left behind"
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))
            torch.testing.assert_close(torch.vmap(model)(x), plain(x))
    own = dict(model.named_parameters())
    torch.testing.assert_close(torch.func.functional_call(model, own, (x,)), plain(x))


@on_threads(2)
def test_a_parameter_set_on_a_wrapper_replaces_the_wrapped_modules():
    """On the wrapped module, as they are read from there."""
    model = FullyShardedDataParallel(seeded(Nest), use_orig_params=True)
    inner = FullyShardedDataParallel(seeded(lambda: nn.Linear(4, 4)), use_orig_params=True)
    inner.weight = nn.Parameter(torch.eye(4))
    torch.testing.assert_close(inner(torch.ones(2, 4)) - inner(torch.zeros(2, 4)), torch.ones(2, 4))
    model.other = nn.Parameter(torch.ones(1))
    assert "other" in model._parameters
