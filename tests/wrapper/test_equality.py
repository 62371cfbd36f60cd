"""A model under `FullyShardedDataParallel` trains as in one process, whatever its arguments are."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.utils.parametrizations import weight_norm

from sherd.fsdp1.arguments import BackwardPrefetch
from sherd.fsdp1.wrapper import FullyShardedDataParallel
from sherd.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from tests.parity.test_precision import train_plain_bfloat16
from tests.support.comparing import assert_same, whole_params
from tests.support.meshes import mesh_of
from tests.support.models import MODELS, WIDTH, Block, Wired, build, noise
from tests.support.models.stacks import LowRank
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import replace
from tests.support.training import (
    Recipe,
    Run,
    assert_trained,
    made,
    make_optimizer,
    mean_square,
    tolerance,
    train_job,
    train_plain,
)
from tests.wrapper.training import (
    BFLOAT16,
    BFLOAT16_REDUCED_IN_FLOAT32,
    BOTH_KINDS,
    HYBRID_SHARD,
    HYBRID_SHARD_ZERO2,
    NO_SHARD,
    OFFLOAD,
    SHARD_GRAD_OP,
    assert_all_trained_plainly,
    assert_trained_as,
    train_wrapped,
    wrap_blocks,
    wrap_units,
)

# One flat parameter has one dtype, and is trained or frozen as one.
MIXED_UNITS = {"adapted", "frozen", "mixed_double", "mixed_bfloat"}
# A flat parameter's gradient is zero where plain training has none; weight decay and momentum can tell these apart.
WITHOUT_GRADIENTS = {"branching", "unused", "shared_and_reentrant"}


def recipe_of(model, **more):
    if model in WITHOUT_GRADIENTS:
        return Recipe(model, optimizer="sgd", steps=2, max_norm=0.5, **more)
    if model == "mixed_bfloat":
        # SGD's update in bfloat16 rounds differently in a vector's tail, and where tails are depends on the pieces.
        # torch rounds each tensor's norm to bfloat16, and ours are of other pieces.
        return Recipe(model, optimizer="adamw", steps=2, **more)
    return Recipe(model, optimizer="momentum", steps=2, max_norm=0.5, **more)


def train_each(recipe, setups):
    return {name: train_wrapped(recipe, **setup) for name, setup in setups.items()}


def check_each(ranks, recipe, setups, **how_close):
    """Train under every one of `setups`, one after the other on the same ranks; each equals plain training."""
    runs = ranks.run(train_each, recipe, setups)
    for name in setups:
        assert_all_trained_plainly([run[name] for run in runs], recipe, **how_close)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_as_in_one_process(threads, model):
    setups = {"full_shard": {"use_orig_params": model in MIXED_UNITS}}
    check_each(threads(2), recipe_of(model), setups, **tolerance(model, 2))


DIFFICULT = [
    "tied_across",
    "tied_to_root",
    "several_forwards",
    "frozen",
    "mixed_double",
    "unused",
    "buffers",
    "shared_module",
    "reentrant_outside",
]


@pytest.mark.parametrize("model", DIFFICULT)
def test_difficult_models_train_under_every_strategy(threads, model):
    setups = {
        "shard_grad_op": {"sharding_strategy": SHARD_GRAD_OP, "use_orig_params": True},
        "no_shard": {"sharding_strategy": NO_SHARD, "use_orig_params": model in MIXED_UNITS},
        "no_shard_orig": {"sharding_strategy": NO_SHARD, "use_orig_params": True},
    }
    check_each(threads(2), recipe_of(model), setups)


PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST

SETUPS = {
    "full_flat": {"backward_prefetch": POST, "forward_prefetch": True},
    "full_orig": {"backward_prefetch": None, "use_orig_params": True, "limit_all_gathers": False},
    "grad_op_flat": {"sharding_strategy": SHARD_GRAD_OP, "backward_prefetch": PRE, "forward_prefetch": True},
    "grad_op_orig_offloaded": {"sharding_strategy": SHARD_GRAD_OP, "use_orig_params": True, "cpu_offload": OFFLOAD},
    "none_orig": {"sharding_strategy": NO_SHARD, "use_orig_params": True, "backward_prefetch": POST},
    "none_flat_offloaded": {"sharding_strategy": NO_SHARD, "cpu_offload": OFFLOAD},
    "full_flat_offloaded": {"cpu_offload": OFFLOAD, "backward_prefetch": POST},
}


def test_prefetch_and_offload_change_no_number(threads):
    check_each(threads(3), recipe_of("nested"), SETUPS)


FEW = ["full_flat", "full_orig", "grad_op_orig_offloaded", "none_flat_offloaded"]


@pytest.mark.parametrize("no_sync", [True, False], ids=["no_sync", "synced_each_time"])
def test_gradients_accumulate_with_and_without_reductions(threads, no_sync):
    setups = {name: {**SETUPS[name], "no_sync": no_sync} for name in FEW}
    check_each(threads(2), recipe_of("tied_inside", micro_batches=3), setups)


@pytest.mark.parametrize("norm_type", [1.0, float("inf"), 3])
def test_every_norm_is_that_of_the_whole_model(threads, norm_type):
    setups = {name: SETUPS[name] for name in ("full_flat", "full_orig", "none_orig")}
    check_each(threads(3), Recipe("uneven", steps=1, max_norm=0.1, norm_type=norm_type), setups)


def train_as(job, make, wrap, orig):
    return train_job(wrap(made(make), use_orig_params=orig), job)


class ReadsParametersOddly(nn.Module):
    """Modules that keep lists of their parameters, read a child's, or compute one from others."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(WIDTH)) for _ in range(2))
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.rand(WIDTH)), "b": nn.Parameter(torch.rand(1))})
        self.normed = weight_norm(nn.Linear(WIDTH, 3))

    def forward(self, x):
        x, _ = self.recurrent(x)
        x, _ = self.attention(x, x, x)
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return self.normed(x + self.shifts["a"] * self.shifts["b"])


def loss_of_sequences(model, rank, step):
    return model(noise(step, rank, 3, 5, WIDTH)).square().mean()


def wrap_odd(model, **options):
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({nn.LSTM, nn.MultiheadAttention}), **options
    )


@BOTH_KINDS
def test_modules_that_read_their_parameters_oddly_train_as_in_one_process(threads, orig):
    found = threads(2).run(train_as, loss_of_sequences, ReadsParametersOddly, wrap_odd, orig)
    assert_trained(found, ReadsParametersOddly, loss_of_sequences)


def one_module_in_two_units():
    """A head that is a part of one unit, and is called beside it too."""
    head = nn.Linear(WIDTH, WIDTH)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), head)
    return Wired(lambda self, x: self.head(torch.tanh(self.block(x))), block=block, head=head)


def wrap_first_child(model, **options):
    model.block = FullyShardedDataParallel(model.block, **options)
    return FullyShardedDataParallel(model, **options)


@BOTH_KINDS
def test_a_module_may_be_used_in_a_unit_and_beside_it(threads, orig):
    found = threads(2).run(train_as, mean_square, one_module_in_two_units, wrap_first_child, orig)
    assert_trained(found, one_module_in_two_units)


def mean_square_after_evaluation_and_an_error(model, rank, step):
    model.eval()
    with torch.no_grad():
        model(noise(9, rank))
    with torch.inference_mode():
        model(noise(9, rank))
    with pytest.raises(TypeError):
        model("not a tensor")
    return mean_square(model.train(), rank, step)


@BOTH_KINDS
def test_evaluation_and_errors_between_steps_change_no_number(threads, orig):
    make = functools.partial(build, "mlp")
    wrap = functools.partial(wrap_units, sharding_strategy=SHARD_GRAD_OP)
    assert_trained(threads(2).run(train_as, mean_square_after_evaluation_and_an_error, make, wrap, orig), make)


# Low precision


@pytest.mark.parametrize(
    ("precision", "near"),
    [(BFLOAT16_REDUCED_IN_FLOAT32, {}), (BFLOAT16, {"rtol": 2e-2, "atol": 1e-3})],
    ids=["reduced_in_float32", "throughout"],
)
def test_bfloat16_is_a_cast_model_with_float32_masters(threads, precision, near):
    recipe = Recipe("mlp", steps=2)
    setups = {name: {**SETUPS[name], "mixed_precision": precision} for name in FEW}
    runs = threads(2).run(train_each, recipe, setups)
    for rank, plain in enumerate(train_plain_bfloat16(recipe, 2)):
        for name in setups:
            assert_trained_as(runs[rank][name], plain, **near)


# Hybrid


def hybrid_setups():
    """Two copies of two shards: a mesh, and a pair of groups."""
    pair = pair_of_groups()
    mesh = mesh_of((2, 2))
    return {
        "mesh_flat": {"sharding_strategy": HYBRID_SHARD, "device_mesh": mesh},
        "mesh_zero2_orig": {"sharding_strategy": HYBRID_SHARD_ZERO2, "device_mesh": mesh, "use_orig_params": True},
        "pair_orig": {"sharding_strategy": HYBRID_SHARD, "process_group": pair, "use_orig_params": True},
        "pair_zero2_flat": {"sharding_strategy": HYBRID_SHARD_ZERO2, "process_group": pair, "cpu_offload": OFFLOAD},
    }


def pair_of_groups():
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return shards[rank // 2], copies[rank % 2]


def train_hybrid(recipe, no_sync):
    return {
        name: train_wrapped(recipe, no_sync=no_sync, wrap=wrap_blocks, **setup)
        for name, setup in hybrid_setups().items()
    }


@pytest.mark.parametrize(("model", "micro_batches"), [("mlp", 2), ("uneven", 1)])
def test_copies_of_shards_train_as_in_one_process(threads, model, micro_batches):
    recipe = recipe_of(model, micro_batches=micro_batches)
    runs = threads(4).run(train_hybrid, recipe, micro_batches > 1)
    for name in runs[0]:
        assert_all_trained_plainly([run[name] for run in runs], recipe)


# Which modules are units


def wrap_by(policy, model, **options):
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)


POLICIES = {
    "classes": ModuleWrapPolicy({Block, LowRank, nn.Embedding}),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=100),
    "custom": CustomPolicy(lambda module: isinstance(module, Block) and {"sharding_strategy": SHARD_GRAD_OP}),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", ["nested", "transformer", "adapted", "tied_inside"])
def test_units_that_a_policy_chooses_train_as_in_one_process(threads, model, policy):
    wrap = functools.partial(wrap_by, POLICIES[policy])
    setups = {name: {**SETUPS[name], "wrap": wrap} for name in ("full_flat", "full_orig")}
    if model in MIXED_UNITS:
        del setups["full_flat"]
    check_each(threads(2), recipe_of(model), setups)


def wrap_frozen_apart(model, **options):
    """What is frozen is wrapped by itself, so that each flat parameter is trained or is not."""
    replace(model, model.first, FullyShardedDataParallel(model.first, **options))
    return wrap_units(model, **options)


def test_frozen_units_may_be_flat(threads):
    check_each(threads(2), recipe_of("frozen"), {"flat": {"wrap": wrap_frozen_apart}})


# Recomputation


def recomputed_blocks(model, outside, kind, **options):
    """Every block wrapped and recomputed: the unit around the recomputation, or inside it."""
    recomputed = functools.partial(checkpoint_wrapper, checkpoint_impl=kind)
    for block in list(model.blocks):
        unit = recomputed(block) if outside else block
        wrapped = FullyShardedDataParallel(unit, **options)
        replace(model, block, wrapped if outside else recomputed(wrapped))
    return FullyShardedDataParallel(model, **options)


def recomputed_after_wrapping(model, **options):
    wrapped = wrap_by(POLICIES["classes"], model, **options)
    apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, Block))
    return wrapped


@pytest.mark.parametrize("kind", CheckpointImpl, ids=lambda kind: kind.name.lower())
def test_recomputed_units_train_as_in_one_process(threads, kind):
    setups = {"after": {"wrap": recomputed_after_wrapping, "use_orig_params": True}}
    for outside in (True, False):
        wrap = functools.partial(recomputed_blocks, outside=outside, kind=kind)
        for name in ("full_flat", "full_orig"):
            setups[name, outside] = {**SETUPS[name], "wrap": wrap}
    check_each(threads(2), recipe_of("mlp"), setups)


# What is left out


@pytest.mark.parametrize(("how", "orig"), [("modules", False), ("states", True), ("modules_as_states", False)])
@on_threads(2)
def test_ignored_parameters_stay_plain_beside_the_sharded(how, orig):
    """`first` is ignored and its gradient averaged by hand; what the rest has is the wrapper's."""
    model, recipe = build("mlp"), recipe_of("mlp")
    ignored = {
        "modules": {"ignored_modules": [model.first]},
        "states": {"ignored_states": list(model.first.parameters())},
        "modules_as_states": {"ignored_states": (each for each in [model.first])},
    }[how]
    wrapped = wrap_blocks(model, use_orig_params=orig, **ignored)
    assert type(model.first.weight) is nn.Parameter
    for each in (wrapped, *([copy.deepcopy(wrapped)] if orig else [])):  # torch's names
        assert each._ignored_params == set(each.module.first.parameters())
        assert each._ignored_modules == (set() if how == "states" else set(each.module.first.modules()))
    optimizer, rank, run = make_optimizer(recipe.optimizer, wrapped), dist.get_rank(), Run()
    for step in range(recipe.steps):
        loss = wrapped.loss(wrapped(*wrapped.make_inputs(step, rank)))
        loss.backward()
        for each in model.first.parameters():
            dist.all_reduce(each.grad)
            each.grad /= dist.get_world_size()
        run.losses.append(loss.item())
        run.norms.append(wrapped.clip_grad_norm_(recipe.max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    run.params = whole_params(wrapped)
    assert_trained_as(run, train_plain(recipe, 2)[rank])


@pytest.mark.parametrize("orig", [False, True])
@on_threads(2)
def test_units_below_ignored_modules_are_units_still(orig):
    """A unit below an ignored module stays one; what is around it is left alone."""
    for name in ("ignored_modules", "ignored_states"):
        plain = made(lambda: nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))))
        model = copy.deepcopy(plain)
        around = model[1]
        around[1] = FullyShardedDataParallel(around[1], use_orig_params=orig)
        ignored = [around] if name == "ignored_modules" else list(around.parameters())
        wrapped = FullyShardedDataParallel(model, use_orig_params=orig, **{name: ignored})
        assert type(around[0].weight) is nn.Parameter
        assert len(list(wrapped.parameters())) == (6 if orig else 4)
        for each in (wrapped, plain):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for step in range(2):
                each(noise(step, 0, 3, 4)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(dict(wrapped.state_dict()), dict(plain.state_dict()))


# Other moments


@BOTH_KINDS
@on_threads(2)
def test_backwards_may_reduce_or_not_in_any_order_and_take_two_forwards(orig):
    """Synced, then not, then synced: the gradients of three backwards; and of two forwards with one backward."""
    plain, model = build("mlp"), wrap_blocks(build("mlp"), use_orig_params=orig)

    def loss(seed):
        return model.loss(model(*model.make_inputs(seed, dist.get_rank())))

    def assert_steps_as_plain_after(*seeds):
        for rank in range(dist.get_world_size()):
            for seed in seeds:
                (plain.loss(plain(*plain.make_inputs(seed, rank))) / dist.get_world_size()).backward()
        norms = [model.clip_grad_norm_(1e9).item(), nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()]
        for each in (model, plain):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
        assert_same(norms[0], norms[1], rtol=1e-5, atol=1e-6)
        assert_same(whole_params(model), whole_params(plain), rtol=1e-5, atol=1e-6)

    loss(0).backward()
    with model.no_sync():
        loss(1).backward()
    loss(2).backward()
    assert_steps_as_plain_after(0, 1, 2)
    (loss(0) + loss(1)).backward()
    assert_steps_as_plain_after(0, 1)
