"""Unshard contexts show unsharded parameters, and the shards are right afterwards, whatever was done inside."""

import contextlib
import copy
import gc
from operator import attrgetter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from sherd import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    RaggedDTensor,
    fully_shard,
    unsharded,
)
from sherd.engine.run.unit import Unit
from sherd.errors import PlacementError, PolicyError, StateError, WrapperStateError
from sherd.wrap.names import plain_name
from tests.support.comparing import assert_same, whole, whole_grads
from tests.support.models import build
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import sharded as shard
from tests.support.training import made as seeded
from tests.tensor_parallel.conftest import meshes_know_their_thread  # noqa: F401  a fixture for threads
from tests.tensor_parallel.training import EVEN, built
from tests.wrapper.nets import (
    COMPOSED,
    NAMES,
    WAYS,
    assert_close,
    assert_computes,
    assert_holds,
    backward,
    backwards,
    made,
    own,
    sharded,
    steps,
    trained,
    values,
    wholes,
    words,
)
from tests.wrapper.two_axes import PLAN, axes_of

EACH = ("rows", "flat_param", "orig_params")
"""One way of each front end."""


def shown(model):
    """Every parameter that the modules register, by the net's own names."""
    return {plain_name(name): each for name, each in own(model).named_parameters(remove_duplicate=False)}


def assert_shown_whole(model, expected):
    found = shown(model)
    assert all(type(each) is nn.Parameter for each in found.values())
    assert_same({name: found[name].detach() for name in NAMES}, expected)


def edit(net):
    """In every way in which a user changes parameters."""
    with torch.no_grad():
        net.block.up.weight.mul_(2)
        net.block.up.bias.data = torch.arange(5.0)
        net.block.down.weight = nn.Parameter(torch.ones(6, 5) / 3)
        net.head.weight.add_(1)
        net.frozen.bias.data.fill_(3)
        net.scale = nn.Parameter(torch.tensor([0.25]))


# Whole inside, kept after


def edit_and_train(way, **more):
    plain, model = made(), sharded(way, **more)
    for moment in range(2):  # before the first forward, and after a step
        with unsharded(model):
            assert_shown_whole(model, values(plain))
            assert own(model).head.weight is own(model).embed.weight
            assert not own(model).frozen.weight.requires_grad
            edit(own(model))
        edit(plain)
        assert_holds(model, plain)
        assert_computes(model, plain, moment)
        steps(plain, model, [torch.optim.SGD(trained(each), lr=0.1) for each in (plain, model)], [moment])
        assert_close(model, plain)
        plain.load_state_dict(wholes(model))


UNEVEN = [("columns", 3), ("blocks", 3), ("flat_param", 3), ("orig_params", 4)]
"""Ways, and numbers of ranks of which some hold nothing."""


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        *((way, 4 if "hybrid" in way else 2) for way in WAYS),
        *UNEVEN,
        *((way, 1) for way in ("rows", "flat", "flat_param", "orig_params")),
    ],
)
def test_parameters_are_whole_inside_and_changes_are_trained_on_afterwards(threads, way, ranks):
    threads(ranks).run(edit_and_train, way)


@on_threads(2)
def test_shards_in_host_memory_and_narrow_compute_keep_full_precision():
    edit_and_train("rows", offload_policy=CPUOffloadPolicy())
    for way in ("flat_param", "orig_params"):
        edit_and_train(way, cpu_offload=CPUOffload(offload_params=True))
    narrow = {
        "flat": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        "flat_param": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
        "orig_kept": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    }
    for way, options in narrow.items():
        plain, model = made(), sharded(way, **options)
        model(words()).sum().backward()
        with unsharded(model):
            assert_shown_whole(model, values(plain))
            edit(own(model))
        edit(plain)
        assert_holds(model, plain)


LEFT = (({}, "raising"), ({"offload_to_cpu": True}, "quietly"), ({"writeback": False}, "quietly"))


@pytest.mark.front("Unsharded parameters when you need them")
@on_threads(2, way=(*EACH, "flat", "orig_copied"), left=LEFT)
def test_changes_are_kept_but_without_writeback_also_where_the_body_raises(way, left):
    options, how = left
    if "copied" in way and "offload_to_cpu" in options:
        return  # is refused
    plain, model = made(), sharded(way)
    model(words())
    raised = pytest.raises(KeyError, match="the body's own") if how == "raising" else contextlib.nullcontext()

    def edit_inside():
        with unsharded(model, **options):
            edit(own(model))
            if how == "raising":
                raise KeyError("the body's own")

    with raised:
        edit_inside()
    if options.get("writeback", True):
        edit(plain)
    assert_holds(model, plain)
    assert_computes(model, plain)


@on_threads(2, way=("rows", "flat", "orig_params"))
def test_a_loaded_state_is_what_is_lent(way):
    plain, model = made(), sharded(way)
    with torch.no_grad():
        for each in plain.parameters():
            each.add_(1)
    names = own(model).state_dict()
    own(model).load_state_dict(dict(zip(names, plain.state_dict().values(), strict=True)))
    with unsharded(model, writeback=False):
        assert_shown_whole(model, values(plain))


@on_threads(2, way=("rows", "flat", "flat_param", "orig_params"))
def test_parameters_frozen_and_thawed_inside_stay_so(way):
    model = sharded(way)
    model(words()).sum().backward()
    model.zero_grad()
    with unsharded(model):
        own(model).block.requires_grad_(False)
        own(model).frozen.requires_grad_(True)
    model(words()).sum().backward()
    named = dict(model.named_parameters())
    frozen = {name for name, each in named.items() if not each.requires_grad}
    assert frozen
    assert all(name.startswith("block") for name in frozen)
    assert {name for name, each in named.items() if each.grad is None} == frozen


# Parts and nesting


@on_threads(2, way=EACH)
def test_contexts_nest_in_any_order(way):
    plain, model = made(), sharded(way)
    block = own(model).block
    with unsharded(model, recurse=False):
        assert type(own(model).scale) is nn.Parameter
        assert isinstance(block.up.weight, DTensor)
        with unsharded(block):
            assert_same(block.up.weight.detach(), plain.block.up.weight.detach())
            block.up.weight.data.add_(1)
        assert isinstance(block.up.weight, DTensor)
        own(model).scale.data.add_(1)
    with unsharded(block), unsharded(model), unsharded(model):
        assert type(block.up.weight) is nn.Parameter
        with unsharded(block):
            block.up.weight.data.add_(1)
        assert type(block.up.weight) is nn.Parameter, "the outermost shows the shards again"
        own(model).scale.data.add_(1)
    plain.block.up.weight.data.add_(1).add_(1)
    plain.scale.data.add_(1).add_(1)
    assert_holds(model, plain)
    with unsharded(own(model).block.up), unsharded(nn.Linear(2, 2)):  # neither a unit nor above one
        assert isinstance(block.up.weight, DTensor)


@on_threads(2)
def test_an_inner_context_that_asks_for_more_is_refused_on_all_ranks():
    model = sharded("orig_params")
    with unsharded(model.block, writeback=False):
        with pytest.raises(WrapperStateError, match=r"already unsharding.*unit .*lack|without writeback=True"):
            unsharded(model).__enter__()
        assert isinstance(model.scale, DTensor), "nothing of it was lent"
        with pytest.raises(StateError, match="without with_grads=True"):
            unsharded(model, writeback=False, with_grads=True).__enter__()
    with unsharded(model, writeback=False, rank0_only=True):
        with pytest.raises(AssertionError, match="without rank0_only=False"):
            unsharded(model, writeback=False).__enter__()
        with unsharded(model, writeback=False, rank0_only=True):
            pass
    model(words())


@on_threads(2)
def test_a_weight_that_another_unit_owns_is_lent_too():
    model = shard(build("tied_across"))
    expected = build("tied_across").embed.weight.detach().clone()
    for step in range(2):
        with unsharded(model.head):
            assert model.head.weight is model.embed.weight
            torch.testing.assert_close(model.head.weight.detach(), expected)
            model.head.weight.data.add_(1)
        expected += 1
        torch.testing.assert_close(model.embed.weight.full_tensor(), expected)
        model(*model.make_inputs(step, dist.get_rank())).sum().backward()


def leaving_raises(model, change, kind, said):
    """What was changed inside is refused at the end of the context."""
    context = unsharded(model)
    context.__enter__()
    change(own(model))
    with pytest.raises(kind, match=said):
        context.__exit__(None, None, None)


@on_threads(2, way=("rows", "orig_params"))
def test_a_state_dict_is_loaded_inside_and_every_parameter_may_be_replaced(way):
    plain, model = made(), sharded(way)
    for each in plain.parameters():
        each.data.add_(1)
    model(words()).sum().backward()
    with unsharded(model):
        own(model).load_state_dict(dict(zip(own(model).state_dict(), plain.state_dict().values(), strict=True)))
    assert_holds(model, plain)
    with unsharded(model):  # each place gets a tensor of its own
        for name in NAMES:
            module, _, attribute = name.rpartition(".")
            holder = own(attrgetter(module)(own(model))) if module else own(model)
            setattr(holder, attribute, nn.Parameter(values(plain)[name] + 1))
    for each in plain.parameters():
        each.data.add_(1)
    assert_holds(model, plain)
    assert_computes(model, plain)


@on_threads(2, way=("rows", "flat_param", "orig_params", "orig_kept"))
def test_a_backward_inside_is_refused(way):
    """Of a forward before; after the error the model trains as it would have."""
    model, expected = sharded(way), sharded(way)
    backward(expected)
    for recurse, lender, with_grads in ((True, model, False), (True, model, True), (False, model.block, True)):
        if with_grads and way.startswith("flat_"):
            continue
        loss = model(words()).square().mean()
        refused = pytest.raises(
            StateError, match=r"backward of unit .* lends the parameters of unit .* before or after"
        )
        with unsharded(lender, recurse=recurse, with_grads=with_grads), refused:
            loss.backward()
        model.zero_grad()
        backward(model)
        assert_same(whole_grads(model), whole_grads(expected))
        model.zero_grad()


@on_threads(2, way=EACH)
def test_a_gradient_of_what_is_lent_is_kept_or_refused(way):
    """Kept with gradients, shown to who looks, else refused: they would be lost."""
    model = sharded(way)

    def penalty():
        return sum(each.square().sum() for each in set(shown(model).values()))  # a tied one once

    with unsharded(model, with_grads=True):
        penalty().backward()
        expected = {name: 2 * each.detach() for name, each in shown(model).items() if each.requires_grad}
    if not way.startswith("flat_"):
        for name, found in whole_grads(model).items():
            torch.testing.assert_close(found, expected.get(name))
    model.zero_grad()
    with unsharded(model, writeback=False):
        penalty().backward()
        for name, wanted in expected.items():
            torch.testing.assert_close(shown(model)[name].grad, wanted)
        late = penalty()
    with unsharded(model):
        with pytest.raises(StateError, match=r"of unit .*would be lost with the context; .*with_grads=True"):
            penalty().backward()
        torch.autograd.grad(penalty(), [each for each in shown(model).values() if each.requires_grad])
        later = penalty()
    for each in (late, later):
        with pytest.raises(StateError, match=r"of unit .*was lent by an unshard context .* is over.*with_grads=True"):
            each.backward()
    assert all(each.grad is None for each in model.parameters())
    backward(model)


@on_threads(2, way=EACH)
def test_it_works_in_inference_mode(way):
    plain, model = made(), sharded(way)
    with torch.inference_mode(), unsharded(model):
        assert_shown_whole(model, values(plain))
        own(model).scale.data.add_(1)
    plain.scale.data.add_(1)
    assert_holds(model, plain)
    model(words()).sum().backward()
    with unsharded(model):
        own(model).scale.data.add_(1)
    plain.scale.data.add_(1)
    assert_computes(model, plain)


@on_threads(2, way=EACH)
def test_a_tied_weight_replaced_on_one_place_is_replaced_on_both(way):
    model = sharded(way)
    with unsharded(model):
        own(model).head.weight = nn.Parameter(torch.full((11, 6), 2.0))
    for name in ("head.weight", "embed.weight"):
        torch.testing.assert_close(wholes(model)[name], torch.full((11, 6), 2.0))

    def give_two_weights(net):
        net.embed.weight = nn.Parameter(torch.zeros(11, 6))
        net.head.weight = nn.Parameter(torch.ones(11, 6))
        net.scale.data.fill_(9)

    leaving_raises(model, give_two_weights, PlacementError, r"weight is tied: it hangs on 2 places.* 2 different")
    assert wholes(model)["scale"].item() == 9, "the others were written"
    model(words()).sum().backward()


# Rank 0 only, host memory, gradients


@on_threads(4, way=(*EACH, "orig_hybrid"))
def test_only_rank_0_of_each_shard_group_is_shown_whole_parameters(way):
    plain, model = made(), sharded(way)
    with unsharded(model, rank0_only=True, writeback=False, offload_to_cpu=True):
        found = shown(model)
        if Unit.of(model).mesh.shard_rank == 0:
            assert_shown_whole(model, values(plain))
            assert {each.device.type for each in found.values()} == {"cpu"}
            edit(own(model))
        else:
            assert all(isinstance(each, DTensor) for each in found.values())
        with pytest.raises(StateError, match="lends its parameters"):
            model(words())
    assert_holds(model, plain)
    model(words()).sum().backward()


def grads_inside(way):
    plain, model = made(), sharded(way)
    with unsharded(model, with_grads=True):
        assert all(each.grad is None for each in shown(model).values())
    backwards(plain, model)
    before = whole_grads(model)
    with unsharded(model):
        assert all(each.grad is None for each in shown(model).values()), "not asked for"
    with unsharded(model, with_grads=True, writeback=False):
        found = shown(model)
        for name, each in plain.named_parameters():
            assert (found[name].grad is None) == (each.grad is None), name
            if each.grad is not None:
                torch.testing.assert_close(found[name].grad, each.grad)
                found[name].grad.zero_()
    assert_same(whole_grads(model), before)
    with unsharded(model, with_grads=True):
        found = shown(model)
        found["scale"].grad.fill_(3)
        found["block.up.weight"].grad = torch.ones(5, 6)
        found["block.up.bias"].grad = None
        found["frozen.bias"].grad = torch.ones(6)
    with unsharded(model, with_grads=True, writeback=False):
        found = shown(model)
        torch.testing.assert_close(found["scale"].grad, torch.tensor([3.0]))
        torch.testing.assert_close(found["block.up.weight"].grad, torch.ones(5, 6))
        torch.testing.assert_close(found["block.down.bias"].grad, plain.block.down.bias.grad)
        torch.testing.assert_close(found["frozen.bias"].grad, torch.ones(6))
        dropped = found["block.up.bias"].grad
        assert not dropped.any() if way.startswith("flat_") else dropped is None
    with unsharded(model, with_grads=True):
        own(model).zero_grad()
        for each in shown(model).values():
            each.grad = None
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize(
    "way", ["rows", "columns", "blocks", "flat_param", "orig_params", "flat_copied", "orig_hybrid"]
)
def test_gradients_are_whole_inside_and_edits_of_them_are_kept(threads, way):
    threads(4 if "hybrid" in way else 2).run(grads_inside, way)


@on_threads(2)
def test_a_gradient_that_one_rank_has_dropped_stays_dropped_there():
    model = sharded("orig_params")
    model(words()).sum().backward()
    bias = model.block.down.bias
    if dist.get_rank() == 1:
        bias.grad = None
    with unsharded(model, with_grads=True):
        assert (model.block.down.bias.grad is None) == (dist.get_rank() == 1)
    assert (bias.grad is None) == (dist.get_rank() == 1)


# Between forward and backward, and inside


BETWEEN = ["rows", "kept", "flat", "flat_param", "orig_params", "flat_kept", "orig_kept", "orig_copied"]


@on_threads(2, way=BETWEEN)
def test_a_look_between_forward_and_backward_changes_nothing(way):
    plain, model = made(), sharded(way)
    loss = model(words()).square().mean()
    with unsharded(model), torch.no_grad():
        assert_shown_whole(model, values(plain))
        assert own(model).scale.requires_grad
    loss.backward()
    expected = sharded(way)
    backward(expected)
    assert_same(whole_grads(model), whole_grads(expected))


@on_threads(2, way=BETWEEN)
def test_a_change_between_forward_and_backward_makes_the_backward_raise_on_all_ranks(way):
    """Of a part that one rank holds; and the backward raises on all, as autograd does for a plain parameter."""
    model = sharded(way)
    loss = model(words()).square().mean()
    with unsharded(model), torch.no_grad():
        own(model).block.up.weight[0, 0] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    plain = made()
    plain.block.up.weight.data[0, 0] += 1
    assert_computes(model, plain)
    backward(model)
    assert_holds(model, plain)


class Asking(nn.Module):
    """A linear layer that does something else in the middle of its forward, or of its backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.in_forward = self.in_backward = None

    def forward(self, x):
        if self.in_forward is not None:
            self.in_forward()
        x = self.linear(x)
        if self.in_backward is not None:
            x.register_hook(lambda _: self.in_backward())
        return 2 * x


def asking(front):
    inner = Asking()
    model = nn.Sequential(nn.Linear(4, 4), inner)
    return shard(model, front, [inner, model]), inner


@on_threads(2, front=("shard", "wrapper", "flat wrapper"))
def test_in_the_middle_of_a_forward_or_backward_it_is_refused_on_all_ranks(front):
    said = []

    def ask(entered):
        with pytest.raises(StateError) as raised:
            unsharded(entered).__enter__()
        assert isinstance(raised.value, AssertionError)
        said.append(str(raised.value))

    model, inner = asking(front)
    block = model[1]
    for entered in (model, block, block):
        inner.in_forward = lambda entered=entered: ask(entered)
        loss = model(torch.ones(2, 4)).sum()
        inner.in_forward = None
        loss.backward()
        inner.in_backward = lambda entered=entered: ask(entered)
        model(torch.ones(2, 4)).sum().backward()
        inner.in_backward = None
    assert len(said) == 6
    assert all("Cannot manually unshard parameters during forward/backward" in each for each in said)
    assert all("to which unit" in each and "before, or after" in each for each in said)
    with unsharded(model):
        assert type(model[0].weight) is nn.Parameter
        assert type(inner.linear.weight) is nn.Parameter
    model(torch.ones(2, 4))


@on_threads(2)
def test_where_one_unit_cannot_be_lent_none_is():
    """Of two models one is in forward: nothing of the other stays lent."""
    model, inner = asking("shard")
    both = nn.ModuleList([fully_shard(nn.Linear(4, 4)), model])

    def ask():
        with pytest.raises(StateError, match="during forward/backward"):
            unsharded(both).__enter__()
        assert isinstance(both[0].weight, DTensor)
        both[0](torch.ones(2, 4))

    inner.in_forward = ask
    model(torch.ones(2, 4))


@on_threads(1)
def test_a_failure_on_the_way_in_takes_back_what_was_lent(monkeypatch):
    model = sharded("rows")
    calls = []

    def fail_on_third(rows, source, sizes, async_op):
        calls.append(rows)
        if len(calls) == 3:
            raise ConnectionError
        rows.zero_()

    monkeypatch.setattr(type(Unit.of(model.frozen).mesh.shard_transport), "all_gather", staticmethod(fail_on_third))
    with pytest.raises(ConnectionError):
        unsharded(model).__enter__()
    monkeypatch.undo()
    assert isinstance(model.scale, DTensor)
    assert Unit.of(model).lent is None
    model(words())


@on_threads(2, way=("rows", "flat_param", "orig_params", "orig_kept"))
def test_other_units_run_inside_and_those_that_are_lent_have_no_gradients(way):
    """The root's parameters are lent, and the blocks run their own forwards."""
    plain, model = made(), sharded(way)
    net = own(model)
    expected = plain.block(plain.embed(words())) * plain.scale
    with unsharded(model, recurse=False, writeback=False):
        with torch.no_grad():
            for _ in range(2):
                hidden = net.block(net.embed(words()))
                torch.testing.assert_close(hidden * net.scale, expected)
            net.frozen(hidden)
            torch.testing.assert_close(model(words()), plain(words()))
        with pytest.raises(StateError, match=r"forward of unit .* inside an unshard context.*recurse=False"):
            model(words())
    with unsharded(net.block), pytest.raises(RuntimeError, match=r"forward of unit [bB]lock.*leave the context first"):
        net.block(expected)
    assert_computes(model, plain)
    model(words()).sum().backward()


@on_threads(2, way=("rows", "flat_param", "orig_params", "orig_kept"))
def test_a_forward_without_gradients_computes_with_the_copies_and_sends_nothing(way):
    plain = made()
    for runs_before in (False, True):
        model = sharded(way)
        if runs_before:
            model(words())
        for options in ({}, {"writeback": False}, {"writeback": False, "rank0_only": True}, {"offload_to_cpu": True}):
            with unsharded(model, **options), torch.no_grad():
                if options.get("rank0_only") and dist.get_rank():
                    with pytest.raises(StateError, match="on ranks that see it"):
                        model(words())
                else:
                    torch.testing.assert_close(model(words()), plain(words()), msg=str(options))
        with unsharded(model), torch.no_grad():
            for each in (model.scale, plain.scale):
                each.mul_(2)
            torch.testing.assert_close(model(words()), plain(words()))
        assert_computes(model, plain)
        plain.scale.data.div_(2)
        model(words()).sum().backward()


@on_threads(2, kind=("wrapper", "fully_shard"))
def test_a_forward_with_the_copies_is_in_full_precision(kind):
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.arange(8.0).view(2, 4)
    model = copy.deepcopy(plain)
    if kind == "wrapper":
        precision = MixedPrecision(torch.bfloat16)
        model[0] = FullyShardedDataParallel(model[0], mixed_precision=precision)
        model = FullyShardedDataParallel(model, mixed_precision=precision)
    else:
        fully_shard(model[0], mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64))
    with torch.no_grad(), unsharded(model):
        assert_same(model(x).float(), plain(x))
        assert model(x).dtype == (torch.float32 if kind == "wrapper" else torch.float64)


@on_threads(2)
def test_unshard_by_hand_is_not_in_the_way():
    plain, model = made(), sharded("orig_params")
    model(words())
    with unsharded(model):
        model.unshard()
        assert type(model.scale) is nn.Parameter
        model.scale.data.add_(1)
    plain.scale.data.add_(1)
    assert isinstance(model.scale, DTensor)
    assert_computes(model, plain)
    model.unshard()
    with unsharded(model):
        model.scale.data.add_(1)
    plain.scale.data.add_(1)
    assert_computes(model, plain)


@on_threads(2, way=("rows", "orig_params"))
def test_gradients_that_wait_for_a_reduction_are_not_shown_as_none(way):
    model = sharded(way)
    model.set_requires_gradient_sync(False)
    backward(model)
    with pytest.raises(StateError, match=r"unit .* has gradients that wait for a reduction"):
        unsharded(model, with_grads=True).__enter__()
    model.set_requires_gradient_sync(True)
    backward(model)
    with unsharded(model, with_grads=True):
        assert own(model).scale.grad.shape == (1,)


# Of all kinds


class Odd(nn.Module):
    """Two dtypes, a scalar, a transposed matrix, no elements."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.hollow = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x):
        return x * self.scalar + self.wide.sum() + self.narrow.sum() + self.turned.sum() + self.hollow.sum()


@on_threads(3, way=("rows", "flat", "blocks", "whole"))
def test_any_dtype_and_shape_is_lent(way):
    model = seeded(Odd)
    expected = whole(dict(model.named_parameters()))
    fully_shard(model, **COMPOSED[way]())
    for change in (1, 2):
        with unsharded(model):
            assert_same(whole(dict(model.named_parameters())), expected)
            for each in model.parameters():
                each.data.add_(change)
        for each in expected.values():
            each += change
        model(torch.ones(2)).sum().backward()
    assert_same(whole(dict(model.named_parameters())), expected)


@on_threads(4)
def test_a_tensor_parallel_parameter_is_lent_as_the_dtensor_that_it_was():
    """A parameter that is a DTensor before stays one, on its own mesh."""
    mesh, data = axes_of((2, 2))
    model = parallelize_module(built(EVEN).blocks[0].mlp, mesh["tp"], PLAN)
    expected = whole(model.up.weight)
    fully_shard(model, mesh=data)
    with unsharded(model):
        weight = model.up.weight
        assert weight.device_mesh == mesh["tp"]
        assert weight.placements == (Shard(0),)
        torch.testing.assert_close(weight.detach().full_tensor(), expected)
        with torch.no_grad():
            weight.mul_(2)
    torch.testing.assert_close(model.up.weight.detach().full_tensor(), 2 * expected)
    leaving_raises(
        model,
        lambda net: setattr(net.up, "weight", nn.Parameter(torch.ones(EVEN.hidden, EVEN.width))),
        PlacementError,
        r"up.weight was lent as a DTensor with .* a plain tensor",
    )
    torch.testing.assert_close(model.up.weight.detach().full_tensor(), 2 * expected)


@on_threads(2, way=EACH)
def test_another_shape_is_refused_by_name_and_the_rest_is_written(way):
    model = sharded(way)

    def replace_by_more(net):
        net.block.up.bias.data.fill_(5)
        net.scale = nn.Parameter(torch.ones(2))

    def set_other_data(net):
        net.scale.data.fill_(4)
        net.block.up.weight.data = torch.zeros(3, 3)

    def delete_one(net):
        net.block.down.bias = None

    leaving_raises(model, replace_by_more, PlacementError, r"scale was \(1,\) when it was lent, and is \(2,\)")
    leaving_raises(model, set_other_data, ValueError, r"up.weight was \(5, 6\) when it was lent, and is \(3, 3\)")
    leaving_raises(model, delete_one, ValueError, r"down.bias was \(6,\) when it was lent, and is None")
    found = wholes(model)
    assert found["scale"].item() == 4
    assert found["block.up.bias"].tolist() == [5.0] * 5
    model(words()).sum().backward()


@on_threads(2)
def test_part_of_a_flat_parameter_cannot_be_frozen():
    model = sharded("flat_param")
    leaving_raises(model, lambda net: net.block.up.weight.requires_grad_(False), PolicyError, "uniform `requires_grad`")
    model(words()).sum().backward()


@on_threads(2, way=("rows", "orig_params"), has_run=(True, False))
def test_a_parameter_replaced_before_is_lent_with_its_new_values(way, has_run):
    """What a user has put in a shard's place before is what is lent."""
    model = sharded(way)
    if has_run:
        model(words())
    model.block.up.weight = nn.Parameter(torch.ones(5, 6))
    with unsharded(model):
        torch.testing.assert_close(own(model).block.up.weight.detach(), torch.ones(5, 6))
    torch.testing.assert_close(wholes(model)["block.up.weight"], torch.ones(5, 6))


@on_processes(2)
def test_nothing_lent_outlives_the_context():
    model = sharded("orig_params")
    model(words())
    with unsharded(model):
        for each in model.parameters():
            assert each.untyped_storage().nbytes() == each.numel() * each.element_size(), "its own memory, and no more"
    del each
    gc.collect()
    alive = [each for each in gc.get_objects() if isinstance(each, nn.Parameter) and each.shape == (5, 6)]
    # The engine's own unsharded parameter is there still; its memory is freed.
    assert all(isinstance(each, RaggedDTensor) or not each.untyped_storage().nbytes() for each in alive)


@on_threads(2)
def test_summon_full_params_is_the_same():
    model = sharded("orig_params")
    with FullyShardedDataParallel.summon_full_params(model) as nothing:
        assert nothing is None
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in made().named_parameters()]
    with FullyShardedDataParallel.summon_full_params(nn.Linear(2, 2)):
        pass
