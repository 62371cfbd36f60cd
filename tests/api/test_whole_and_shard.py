"""Which form of its parameters does a module show, and when?"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sherd import UnshardHandle, fully_shard, register_fsdp_forward_method
from sherd.comm.streams import RecordingStreams, use_streams
from sherd.errors import StateError
from tests.support.comparing import assert_named_close, assert_refused, form, whole_grads
from tests.support.models import VOCABULARY, WIDTH, Block, build, noise, shard, tokens
from tests.support.sharding import shard_children
from tests.support.training import Recipe, assert_all_same, assert_trained, made, mean_square, steps_sharded, train_job


def stack():
    return nn.Sequential(Block(), Block(), Block())


# unshard, reshard, the handle


def forms_by_hand():
    model = shard_children(made(stack))
    block, other = model[0], model[1]
    shard_before = block.up.weight
    block.reshard()  # nothing to free yet
    block.unshard()
    block.unshard()  # whole already
    whole = block.up.weight
    assert isinstance(whole, nn.Parameter)
    assert not isinstance(whole, DTensor)
    assert whole.shape == shard_before.shape == (2 * WIDTH, WIDTH)
    assert form(other.up) == "shard"
    block.reshard()
    block.reshard()
    assert block.up.weight is shard_before
    block.unshard()
    assert block.up.weight is whole
    block.reshard()


def test_unshard_and_reshard_swap_the_same_two_objects_of_one_unit_only(world):
    world(2).run(forms_by_hand)


def forms_below_a_root():
    model = shard(build("mlp"))
    model.unshard()
    assert form(model.first) == "whole"
    assert form(model.blocks[0].up) == "shard"
    model.reshard()
    assert form(model.first) == "shard"


def test_unshard_of_the_root_leaves_the_units_below_alone(world):
    world(2).run(forms_below_a_root)


def forward_with_an_unwaited_handle():
    model = shard_children(made(stack))
    handles = [block.unshard(async_op=True) for block in model]
    assert form(model[0].up) == "shard"
    handles[0].wait()
    handles[0].wait()
    assert form(model[0].up) == "whole"
    output = model(noise(0, dist.get_rank()))
    handles[2].wait()  # waited for by forward already
    return output


def test_forward_waits_for_a_handle_that_nobody_waited_for(world):
    for rank, output in enumerate(world(2).run(forward_with_an_unwaited_handle)):
        torch.testing.assert_close(output, made(stack)(noise(0, rank)).detach())


def handle_after_the_forward():
    model = shard_children(made(stack))
    handle = model[1].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    with torch.no_grad():
        model(noise(0, dist.get_rank()))
    assert form(model[1].up) == "shard"
    model[1].reshard()
    return train_job(model, mean_square)


def test_a_handle_that_is_never_waited_for_disturbs_no_training(world):
    assert_trained(world(2).run(handle_after_the_forward), stack)


def handle_freed_before_the_wait():
    model = shard_children(made(stack))
    handle = model[0].unshard(async_op=True)
    model[0].reshard()
    handle.wait()
    assert form(model[0].up) == "shard"
    return train_job(model, mean_square)


def test_a_handle_waited_for_after_reshard_shows_nothing_freed(world):
    assert_trained(world(2).run(handle_freed_before_the_wait), stack)


# After forward and after backward


def forms_through_a_step(setting, value, recurse):
    """Forms of (root's own layer, block 1) inside its forward, after forward, after backward."""
    model, rank = shard(build("mlp")), dist.get_rank()
    if setting is not None:
        getattr(model, setting)(value, recurse=recurse)
    inside = []
    model.blocks[1].up.register_forward_hook(lambda *_: inside.append(form(model.blocks[1].up)))
    loss = model.loss(model(*model.make_inputs(0, rank)))
    after_forward = (form(model.first), form(model.blocks[1].up))
    loss.backward()
    after_backward = (form(model.first), form(model.blocks[1].up))
    assert inside == ["whole"]
    return after_forward, after_backward


SHARDS, WHOLES = ("shard", "shard"), ("whole", "whole")
AFTER = [
    (None, None, True, ("whole", "shard"), SHARDS),
    ("set_reshard_after_forward", True, True, SHARDS, SHARDS),
    ("set_reshard_after_forward", True, False, SHARDS, SHARDS),
    ("set_reshard_after_forward", False, True, WHOLES, SHARDS),
    ("set_reshard_after_forward", False, False, ("whole", "shard"), SHARDS),
    ("set_reshard_after_forward", 2, True, SHARDS, SHARDS),
    ("set_reshard_after_forward", 1, True, WHOLES, SHARDS),
    ("set_reshard_after_backward", False, True, ("whole", "shard"), WHOLES),
    ("set_reshard_after_backward", False, False, ("whole", "shard"), ("whole", "shard")),
]


@pytest.mark.parametrize(("setting", "value", "recurse", "after_forward", "after_backward"), AFTER)
def test_a_setting_says_which_form_is_shown_after_forward_and_after_backward(
    world, setting, value, recurse, after_forward, after_backward
):
    for found in world(2).run(forms_through_a_step, setting, value, recurse):
        assert found == (after_forward, after_backward)


def forms_of_pairs():
    model, rank = shard(build("mlp"), reshard_after_forward=2), dist.get_rank()
    loss = model.loss(model(*model.make_inputs(0, rank)))
    after_forward = (form(model.first), form(model.blocks[1].up))
    loss.backward()
    return after_forward, (form(model.first), form(model.blocks[1].up))


def test_a_kept_part_shows_shards_between_forward_and_backward(world):
    assert world(4).run(forms_of_pairs) == [(SHARDS, SHARDS)] * 4


def form_after_evaluation(reshard, mode):
    model, rank = shard(build("mlp"), reshard_after_forward=reshard), dist.get_rank()
    with mode():
        model(*model.make_inputs(0, rank))
    return form(model.blocks[0].up)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("reshard", "shown"), [(None, "shard"), (True, "shard"), (False, "whole")])
def test_evaluation_leaves_the_form_that_the_user_asked_for(world, reshard, shown, mode):
    assert set(world(2).run(form_after_evaluation, reshard, mode)) == {shown}


# reset_iter_state


def steps_after_a_reset(recipe, where):
    model, rank = shard(build(recipe.model)), dist.get_rank()
    model.reset_iter_state()  # nothing to give up
    inside = model.blocks[1].down

    def explode(*_):
        raise ZeroDivisionError("the user's own mistake")

    def explode_later(_, __, output):
        output.register_hook(explode)

    hook = (
        inside.register_forward_pre_hook(explode) if where == "forward" else inside.register_forward_hook(explode_later)
    )
    with pytest.raises(ZeroDivisionError):
        model.loss(model(*model.make_inputs(9, rank))).backward()
    hook.remove()
    assert_refused(model.blocks[0].reset_iter_state, StateError, RuntimeError, "blocks.0", "root", "Mlp")
    model.reset_iter_state()
    assert {form(model.first), *(form(block.up) for block in model.blocks)} == {"shard"}
    model.zero_grad()
    # A unit alone may run again: the failed backward is forgotten.
    with torch.no_grad():
        model.blocks[2](noise(0, rank))
    return steps_sharded(model, recipe, rank)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_root_alone_gives_up_what_failed_and_training_goes_on(world, where):
    recipe = Recipe("mlp")
    assert_all_same(world(2).run(steps_after_a_reset, recipe, where), recipe)


# set_is_last_backward


def backwards_in_a_row():
    """Two micro-batches; reductions of the first may stay in flight. What was left in flight, and the sum."""
    streams, rank = RecordingStreams(), dist.get_rank()
    with use_streams(streams):
        model = shard(build("mlp"))
    in_flight = []
    for micro, last in ((0, False), (100, True)):
        model.set_is_last_backward(last)
        (model.loss(model(*model.make_inputs(micro, rank))) / 2).backward()
        log = streams.log
        in_flight.append(log.count(("reduce", "run")) - log.count(("compute", "follow reduce")))
    return in_flight, whole_grads(model)


def test_reductions_stay_in_flight_until_the_last_backward(world):
    plain = build("mlp")
    for rank in range(2):
        for micro in (0, 100):
            (plain.loss(plain(*plain.make_inputs(micro, rank))) / 4).backward()
    for in_flight, grads in world(2).run(backwards_in_a_row):
        assert in_flight[0] > 0
        assert in_flight[1] == 0
        assert_named_close(grads, whole_grads(plain), "gradient", 1e-5, 1e-6)


# set_unshard_in_backward


class Words(nn.Module):
    """An embedding, whose backward needs no weight, and a layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(self.embed(x))


def read_tokens(model, rank, step):
    return model(tokens(step, rank)).square().mean()


def train_words(unshard):
    """Parameters, and the all-gathers of a step after the first."""
    streams = RecordingStreams()
    with use_streams(streams):
        model = shard_children(made(Words), reshard_after_forward=True)
    model.embed.set_unshard_in_backward(unshard)
    params = train_job(model, read_tokens)
    before = streams.log.count(("gather", "run"))
    read_tokens(model, dist.get_rank(), 3).backward()
    return params, streams.log.count(("gather", "run")) - before


@pytest.mark.parametrize(("unshard", "gathers"), [(True, 4), (False, 3)])
def test_an_embedding_need_not_be_gathered_in_backward(world, unshard, gathers):
    runs = world(2).run(train_words, unshard)
    assert_trained([params for params, _ in runs], Words, read_tokens)
    assert [count for _, count in runs] == [gathers] * 2


# register_fsdp_forward_method


class Spoken(nn.Module):
    """A method that calls forward inside, one that calls another, one that raises, and two that are not bound."""

    def __init__(self):
        super().__init__()
        self.squared = torch.square
        self.block = Block()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x):
        return self.block(x) * self.weight

    def twice(self, x):
        return self(x) + self(self.weight * x)

    def thrice(self, x):
        return self.twice(x) + self.weight

    def scaled(self, x, *, by):
        """Scale."""
        if by == 0:
            raise ValueError("by nothing")
        return x * self.weight * by

    @staticmethod
    def doubled(x):
        return x * 2


METHODS = ("twice", "thrice", "scaled", "doubled", "squared")


def speak(model, rank, step):
    return model.squared(model.thrice(noise(step, rank)) + model.doubled(model.scaled(noise(step, rank), by=1))).mean()


def train_through_methods(reshard):
    model = shard_children(made(Spoken), reshard_after_forward=reshard)
    for name in METHODS:
        register_fsdp_forward_method(model, name)
    assert (model.scaled.__name__, model.scaled.__doc__) == ("scaled", "Scale.")
    with pytest.raises(ValueError, match="by nothing"):
        model.scaled(noise(0, 0), by=0)
    assert form(model) == ("whole" if reshard is False else "shard")
    return train_job(model, speak)


@pytest.mark.parametrize("reshard", [True, False, None])
def test_registered_methods_may_call_forward_and_each_other(world, reshard):
    assert_trained(world(2).run(train_through_methods, reshard), Spoken, speak)


def train_with_a_method_registered_twice():
    model = shard_children(made(Spoken))
    for name in METHODS:
        register_fsdp_forward_method(model, name)
        register_fsdp_forward_method(model, name)
    return train_job(model, speak)


def test_registering_a_method_again_changes_nothing(world):
    assert_trained(world(2).run(train_with_a_method_registered_twice), Spoken, speak)


def test_registering_a_method_of_a_plain_module_does_nothing():
    model = Spoken()
    register_fsdp_forward_method(model, "twice")
    register_fsdp_forward_method(model, "no_such_method")
    assert "twice" not in vars(model)
    assert "no_such_method" not in vars(model)


def child_method_through_the_parent():
    """A registered method of a child unit, called outside its parent's forward."""
    model = made(lambda: nn.Sequential(Spoken(), Block()))
    fully_shard(model[0])
    fully_shard(model)
    register_fsdp_forward_method(model[0], "scaled")
    with torch.no_grad():
        return model[0].scaled(noise(0, dist.get_rank()), by=3)


def test_a_unit_below_a_root_may_run_its_registered_method_first(world):
    for rank, output in enumerate(world(2).run(child_method_through_the_parent)):
        torch.testing.assert_close(output, noise(0, rank) * torch.linspace(-1, 1, WIDTH) * 3)
