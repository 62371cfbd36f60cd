"""Bad use raises what FSDP1 raises, with a text that names what and what to do, on all ranks, and harms nothing."""

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
from sherd.errors import ModuleError, PolicyError, UnsupportedError, WrapperStateError
from sherd.wrap import ModuleWrapPolicy
from tests.support.comparing import assert_refused, assert_same
from tests.support.models import Block, Wired
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.training import made as seeded
from tests.wrapper.nets import assert_computes, assert_holds, made, sharded, values, words

HYBRID = ShardingStrategy.HYBRID_SHARD


def raises(action, kind, *said):
    """It raises a `SherdError` that is `kind` too, and says all of `said`."""
    assert_refused(action, SherdError, kind, *said)


def refuses_to_wrap(module, kind, *said, **arguments):
    raises(functools.partial(FullyShardedDataParallel, module, **arguments), kind, *said)


def wrong_arguments():
    """On a rank, by name: wrong arguments, what they raise, and what is said."""
    group, line = dist.group.WORLD, init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(torch.ones(1))
    zero2 = ShardingStrategy._HYBRID_SHARD_ZERO2
    both = "Cannot pass both process_group and device_mesh at the same time"
    explicit = "Manual wrapping with ShardingStrategy.HYBRID_SHARD requires explicit specification of process group"
    a_pair = ("Expected process_group to be passed in as either None or Tuple", "(shard group, replicate group)")
    a_strategy = "expected sherd's ShardingStrategy or Placements, got a "
    modules = ("ignored_modules expects nn.Module list elements but got types", "Parameter")
    either = "expects all nn.Parameter or all nn.Module list elements but got types"
    return {
        "group_and_mesh": ({"process_group": group, "device_mesh": line}, ValueError, both),
        "hybrid_by_hand": ({"sharding_strategy": HYBRID}, ValueError, explicit),
        "hybrid_one_group": ({"sharding_strategy": HYBRID, "process_group": group}, ValueError, *a_pair),
        "hybrid_list": (
            {"sharding_strategy": zero2, "process_group": [group, group]},
            ValueError,
            "_HYBRID_SHARD_ZERO2",
            "but got <class 'list'>",
        ),
        "hybrid_one_axis": (
            {"sharding_strategy": HYBRID, "device_mesh": line},
            ValueError,
            "Expected device_mesh to have ndim=2 but got 1",
            "(replicate, shard)",
        ),
        "pair": ({"process_group": (group, group)}, ValueError, "FULL_SHARD expects one process group", "HYBRID_SHARD"),
        "number_as_group": ({"process_group": 3}, ValueError, "expects one process group, got 3"),
        "strategy_by_name": (
            {"sharding_strategy": "FULL_SHARD"},
            TypeError,
            "sharding_strategy='FULL_SHARD'",
            a_strategy + "builtins.str",
        ),
        "offload_true": ({"cpu_offload": True}, TypeError, "cpu_offload=True", "CPUOffload"),
        "dtype": ({"mixed_precision": torch.bfloat16}, TypeError, "mixed_precision=torch.bfloat16", "MixedPrecision"),
        "no_policy": ({"auto_wrap_policy": 3}, TypeError, "expected a policy, got 3"),
        "classes_as_policy": ({"auto_wrap_policy": {Block}}, TypeError, "ModuleWrapPolicy({Block})"),
        "both_ignored": (
            {"ignored_modules": [], "ignored_states": []},
            ValueError,
            "Cannot pass both ignored_modules and ignored_states at the same time",
        ),
        "ignored_parameter_as_module": ({"ignored_modules": [parameter]}, ValueError, *modules),
        "ignored_no_list": ({"ignored_modules": nn.Linear(2, 2)}, TypeError, "ignored_modules=Linear"),
        "ignored_mixture": (
            {"ignored_states": [parameter, nn.Linear(2, 2)]},
            ValueError,
            either,
            "linear.Linear",
            "Parameter",
        ),
        "ignored_unit": (
            {"ignored_modules": [FullyShardedDataParallel(nn.Linear(2, 2))]},
            ValueError,
            "`ignored_modules` should not include FSDP modules",
            "FullyShardedDataParallel",
        ),
        "init_that_is_none": ({"param_init_fn": 3}, ValueError, "param_init_fn=3", "to be callable"),
        "prefetch": ({"backward_prefetch": True}, TypeError, "backward_prefetch=True"),
        "flag": ({"use_orig_params": None}, TypeError, "use_orig_params=None", "expected sherd's bool"),
        "no_device": ({"device_id": torch.float32}, TypeError, "device_id=torch.float32"),
    }


@on_threads(2)
def test_arguments_that_do_not_fit_are_named_and_leave_the_module_as_it_was():
    for name, (arguments, kind, *said) in wrong_arguments().items():
        net = made()
        refuses_to_wrap(net, kind, *said, **arguments)
        assert all(type(each) is nn.Parameter for each in net.parameters()), name
        assert_same(values(net), values(made()), name)
    assert_computes(sharded("flat_param", net), made())
    refuses_to_wrap(torch.ones(2), TypeError, "FullyShardedDataParallel expects a module, got a Tensor")


def whole(**more):
    """A block that a policy wraps, and more beside it."""
    return Wired(lambda self, x: self.last(self.block(x)), block=Block(4, 4), last=nn.Linear(4, 4), **more)


def numbers():
    return {"counts": nn.Parameter(torch.arange(3), requires_grad=False)}


def frozen():
    return {"extra": nn.Linear(2, 2).requires_grad_(False)}


def wide():
    return {"extra": nn.Linear(2, 2, dtype=torch.float64)}


INTEGERS, UNIFORM = "Cannot flatten integer dtype tensors: counts", "Must flatten tensors with uniform "
MODULES = {
    "integers_flat": (numbers, False, INTEGERS + " is torch.int64", "ignored_states"),
    "integers_named": (numbers, True, INTEGERS, "buffer"),
    "frozen": (frozen, False, UNIFORM + "`requires_grad` when `use_orig_params=False`", "extra.weight has False"),
    "dtypes": (wide, False, UNIFORM + "dtype", "block.up.weight has torch.float32", "extra.weight has torch.float64"),
}


@on_threads(2, case=MODULES)
def test_parameters_that_cannot_be_one_vector_are_named(case):
    more, orig, *said = MODULES[case]
    net = whole(**more())
    refuses_to_wrap(net, ValueError, *said, use_orig_params=orig)
    assert all(type(each) is nn.Parameter for each in net.parameters())
    ignored = [each for key, each in net.named_parameters() if key.startswith(("extra", "counts"))]
    FullyShardedDataParallel(net, ignored_states=ignored)(torch.ones(2, 4)).sum().backward()


@on_threads(2)
def test_what_is_wrapped_already_is_named():
    net = whole()
    net.block = FullyShardedDataParallel(net.block)
    applied = "FSDP auto wrapping requires modules to not already have FSDP applied but found block in Wired"
    refuses_to_wrap(net, ModuleError, applied, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model = FullyShardedDataParallel(net)  # by hand they nest
    model(torch.ones(2, 4)).sum().backward()
    holder = nn.Linear(2, 2)
    holder.flat = model._flat_param
    refuses_to_wrap(holder, ValueError, "Cannot flatten a `FlatParameter`", "flat")
    assert type(holder.weight) is nn.Parameter
    model(torch.ones(2, 4)).sum().backward()
    counted, mixed = whole(**numbers()), whole(**frozen())
    mixed.block.up.requires_grad_(False)
    both = "block has both parameters with requires_grad=True and False"
    for net, said in ((counted, INTEGERS), (mixed, both)):
        refuses_to_wrap(net, ValueError, said, auto_wrap_policy=ModuleWrapPolicy({Block}))
        assert type(net.block) is Block, "nothing was wrapped"


@on_threads(2, way=("flat_param", "orig_params"))
def test_methods_of_the_wrong_instance_or_at_the_wrong_moment_say_which(way):
    model, plain = sharded(way), made()
    assert model.check_is_root()
    for method in ("no_sync", "clip_grad_norm_", "register_comm_hook"):
        arguments = {"no_sync": (), "clip_grad_norm_": (1.0,), "register_comm_hook": (None, print)}[method]

        def call(instance, method=method, arguments=arguments):
            made = getattr(instance, method)(*arguments)
            if method == "no_sync":
                made.__enter__()

        for kind in (WrapperStateError, AssertionError):
            raises(functools.partial(call, model.block), kind, f"`{method}()` on inner FSDP", "root", "block")
        with unsharded(model):
            for kind in (ValueError, RuntimeError):
                raises(functools.partial(call, model), kind, f"{method}() inside an unshard context; leave it first")
    with unsharded(model, recurse=False):
        raises(lambda: model.apply(print), ValueError, "apply() inside an unshard context")
    with pytest.raises(ValueError, match="two"):
        model.clip_grad_norm_(1.0, "two")
    raises(functools.partial(pickle.dumps, model), ValueError, "cannot be pickled", "TiedAndFrozen", "state_dict()")
    with pytest.raises(AttributeError, match="'TiedAndFrozen' object has no attribute 'nothing'"):
        _ = model.nothing
    with pytest.raises(AttributeError, match="'TiedAndFrozen' object has no attribute '__getitem__'"):
        model[0]
    with pytest.raises(TypeError):
        model[0] = None
    assert_computes(model, plain)
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


@on_threads(2)
def test_contexts_refuse_what_fsdp1_refuses():
    for way, arguments, said in SUMMONS:
        model = sharded(way)
        context = FullyShardedDataParallel.summon_full_params(model, **arguments)
        raises(context.__enter__, NotImplementedError, *said)
        assert_holds(model, made())
        model(words()).sum().backward()
    model = sharded("orig_params")
    for name in ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads"):
        for context in (unsharded, FullyShardedDataParallel.summon_full_params):
            raises(context(model, **{name: 1}).__enter__, TypeError, f"unsharded({name}=1): expected a bool")
    raises(unsharded(3).__enter__, TypeError, "unsharded expects a module, got a int")
    for arguments in ({"rank0_only": True}, {"with_grads": True, "offload_to_cpu": True}):
        raises(unsharded(fully_shard(nn.Linear(2, 2)), **arguments).__enter__, NotImplementedError, "not supported")
    assert_computes(model, made())


@on_processes(2)
def test_optimizers_that_nothing_would_step_are_refused():
    """FSDP1 does, where it has the parameters' own names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.[a-z]+. is deprecated")  # which torch still calls there
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
        assert_computes(model, made())


def nest():
    """A layer that is wrapped by itself, and one that is not."""
    return Wired(lambda self, x: self.outer(self.inner(x)), inner=nn.Linear(4, 4), outer=nn.Linear(4, 4))


@on_threads(4)
def test_a_flat_parameter_that_nothing_shards_over_two_axes_is_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    copies = Placements((Replicate(),) * 2, (Replicate(),) * 2, (Replicate(),) * 2)
    with pytest.raises(PolicyError, match="no axis for a flat parameter to span; pass use_orig_params=True"):
        FullyShardedDataParallel(nn.Linear(4, 4), device_mesh=mesh, sharding_strategy=copies)
    FullyShardedDataParallel(nn.Linear(4, 4), device_mesh=mesh, sharding_strategy=copies, use_orig_params=True)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_threads(2)
def test_values_for_one_call_of_nested_wrappers_are_refused_by_name(use_orig_params):
    """Refused by name, and the model is what it was; its own parameters pass."""
    plain, model, x = seeded(nest), seeded(nest), torch.ones(2, 4)
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
    model = FullyShardedDataParallel(seeded(nest), use_orig_params=True)
    inner = FullyShardedDataParallel(seeded(lambda: nn.Linear(4, 4)), use_orig_params=True)
    inner.weight = nn.Parameter(torch.eye(4))
    torch.testing.assert_close(inner(torch.ones(2, 4)) - inner(torch.zeros(2, 4)), torch.ones(2, 4))
    model.other = nn.Parameter(torch.ones(1))
    assert "other" in model._parameters
