"""Which form of its parameters a module shows, and when."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sherd import UnshardHandle, fully_shard, register_fsdp_forward_method
from sherd.comm.streams import RecordingStreams, use_streams
from sherd.errors import StateError
from tests.api.checks import assert_refuses, assert_trains, explode_in
from tests.support.comparing import assert_named_close, form, whole_grads
from tests.support.models import VOCABULARY, WIDTH, Block, build, chain, noise, tokens
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import sharded
from tests.support.training import made, mean_square

# unshard, reshard, the handle


@on_threads(2)
def test_unshard_and_reshard_swap_the_same_two_objects_of_one_unit_only():
    model = sharded(chain())
    block, other = model
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


@on_threads(2)
def test_unshard_of_the_root_leaves_the_units_below_alone():
    model = sharded(build("mlp"))
    model.unshard()
    assert form(model.first) == "whole"
    assert form(model.blocks[0].up) == "shard"
    model.reshard()
    assert form(model.first) == "shard"


@on_threads(2)
def test_forward_waits_for_a_handle_that_nobody_waited_for():
    model, x = sharded(chain(3)), noise(0, dist.get_rank())
    handles = [block.unshard(async_op=True) for block in model]
    assert form(model[0].up) == "shard"
    handles[0].wait()
    handles[0].wait()
    assert form(model[0].up) == "whole"
    output = model(x)
    handles[2].wait()  # waited for by forward already
    torch.testing.assert_close(output, chain(3)(x))


@on_threads(2)
def test_a_handle_that_is_never_waited_for_disturbs_no_training():
    model = sharded(chain(3))
    handle = model[1].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    with torch.no_grad():
        model(noise(0, dist.get_rank()))
    assert form(model[1].up) == "shard"
    model[1].reshard()
    assert_trains(model, lambda: chain(3))


@on_threads(2)
def test_a_handle_waited_for_after_reshard_shows_nothing_freed():
    model = sharded(chain(3))
    handle = model[0].unshard(async_op=True)
    model[0].reshard()
    handle.wait()
    assert form(model[0].up) == "shard"
    assert_trains(model, lambda: chain(3))


# After forward and after backward


def forms_through_a_step(model):
    """Forms of (root's own layer, block 1) after forward and after backward."""
    inside, forms = [], []
    model.blocks[1].up.register_forward_hook(lambda *_: inside.append(form(model.blocks[1].up)))
    loss = mean_square(model, dist.get_rank(), 0)
    forms.append((form(model.first), form(model.blocks[1].up)))
    loss.backward()
    forms.append((form(model.first), form(model.blocks[1].up)))
    assert inside == ["whole"]
    return tuple(forms)


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


@on_threads(2)
def test_a_setting_says_which_form_is_shown_after_forward_and_after_backward():
    for setting, value, recurse, after_forward, after_backward in AFTER:
        model = sharded(build("mlp"))
        if setting is not None:
            getattr(model, setting)(value, recurse=recurse)
        assert forms_through_a_step(model) == (after_forward, after_backward), (setting, value, recurse)


@on_threads(4)
def test_a_kept_part_shows_shards_between_forward_and_backward():
    assert forms_through_a_step(sharded(build("mlp"), reshard_after_forward=2)) == (SHARDS, SHARDS)


@on_threads(2)
def test_evaluation_leaves_the_form_that_the_user_asked_for():
    for mode in (torch.no_grad, torch.inference_mode):
        for reshard, shown in ((None, "shard"), (True, "shard"), (False, "whole")):
            model = sharded(build("mlp"), reshard_after_forward=reshard)
            with mode():
                model(noise(0, dist.get_rank()))
            assert form(model.blocks[0].up) == shown, (mode, reshard)


# reset_iter_state


@pytest.mark.parametrize("where", ["forward", "backward"])
@on_threads(2)
def test_the_root_alone_gives_up_what_failed_and_training_goes_on(where):
    model, rank = sharded(build("mlp")), dist.get_rank()
    model.reset_iter_state()  # nothing to give up
    hook = explode_in(model.blocks[1].down, where)
    with pytest.raises(ZeroDivisionError):
        mean_square(model, rank, 9).backward()
    hook.remove()
    assert_refuses(model.blocks[0].reset_iter_state, StateError, "blocks.0", "root", "Mlp")
    model.reset_iter_state()
    assert {form(model.first), *(form(block.up) for block in model.blocks)} == {"shard"}
    model.zero_grad()
    # A unit alone may run again: the failed backward is forgotten.
    with torch.no_grad():
        model.blocks[2](noise(0, rank))
    assert_trains(model, partial(build, "mlp"))


# set_is_last_backward


@on_threads(2)
def test_reductions_stay_in_flight_until_the_last_backward():
    """Two micro-batches; reductions of the first may stay in flight."""
    streams, plain, in_flight = RecordingStreams(), build("mlp"), []
    with use_streams(streams):
        model = sharded(build("mlp"))
    for micro, last in ((0, False), (100, True)):
        model.set_is_last_backward(last)
        (mean_square(model, dist.get_rank(), micro) / 2).backward()
        in_flight.append(streams.log.count(("reduce", "run")) - streams.log.count(("compute", "follow reduce")))
        for rank in range(2):
            (mean_square(plain, rank, micro) / 4).backward()
    assert in_flight[0] > 0
    assert in_flight[1] == 0
    assert_named_close(whole_grads(model), whole_grads(plain), "gradient", 1e-5, 1e-6)


# set_unshard_in_backward


def words():
    """An embedding, whose backward needs no weight, and a layer."""
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH))


def read_tokens(model, rank, step):
    return model(tokens(step, rank)).square().mean()


@pytest.mark.parametrize(("unshard", "gathers"), [(True, 4), (False, 3)])
@on_threads(2)
def test_an_embedding_need_not_be_gathered_in_backward(unshard, gathers):
    streams = RecordingStreams()
    with use_streams(streams):
        model = sharded(made(words), reshard_after_forward=True)
    model[0].set_unshard_in_backward(unshard)
    assert_trains(model, words, read_tokens)
    before = streams.log.count(("gather", "run"))
    read_tokens(model, dist.get_rank(), 3).backward()
    assert streams.log.count(("gather", "run")) - before == gathers


# register_fsdp_forward_method


class Spoken(nn.Module):
    """Methods that forward calls, that call forward or another, that raise; and two that are not bound."""

    def __init__(self):
        super().__init__()
        self.squared = torch.square
        self.block = Block()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x):
        return self.scaled(self.block(x), by=1)

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


@pytest.mark.parametrize("reshard", [True, False, None])
@on_processes(2)
def test_registered_methods_may_call_forward_and_each_other(reshard):
    model = sharded(made(Spoken), reshard_after_forward=reshard)
    for name in METHODS:
        register_fsdp_forward_method(model, name)
        register_fsdp_forward_method(model, name)  # again: that changes nothing
    assert (model.scaled.__name__, model.scaled.__doc__) == ("scaled", "Scale.")
    with pytest.raises(ValueError, match="by nothing"):
        model.scaled(noise(0, 0), by=0)
    assert form(model) == ("whole" if reshard is False else "shard")
    assert_trains(model, Spoken, speak)


def test_registering_a_method_of_a_plain_module_does_nothing():
    model = Spoken()
    register_fsdp_forward_method(model, "twice")
    register_fsdp_forward_method(model, "no_such_method")
    assert "twice" not in vars(model)
    assert "no_such_method" not in vars(model)


@on_threads(2)
def test_a_unit_below_a_root_may_run_its_registered_method_first():
    """A registered method of a child unit, called outside its parent's forward."""
    model, x = made(lambda: nn.Sequential(Spoken(), Block())), noise(0, dist.get_rank())
    fully_shard(model[0])
    fully_shard(model)
    register_fsdp_forward_method(model[0], "scaled")
    with torch.no_grad():
        torch.testing.assert_close(model[0].scaled(x, by=3), x * torch.linspace(-1, 1, WIDTH) * 3)
