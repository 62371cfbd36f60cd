"""`wrap` wraps in the body of `enable_wrap`, and nowhere else."""

import threading

import pytest
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn

from sherd import FSDPModule, fully_shard
from sherd import wrap as sherd_wrap
from sherd.wrap import enable_wrap, wrap
from tests.support.ranks.bodies import on_threads
from tests.wrap.against_torch import Wrapped


class Marked(nn.Module):
    """A model that says itself what is to be wrapped."""

    def __init__(self, wrap=wrap):
        super().__init__()
        self.first = wrap(nn.Linear(4, 4))
        self.plain = nn.Linear(4, 4)
        self.last = wrap(nn.Sequential(wrap(nn.Linear(4, 4), depth=2), nn.Linear(4, 4)), depth=1, name="last")


def test_without_enable_wrap_modules_stay_as_they_are():
    layer = nn.Linear(4, 4)
    assert wrap(layer, depth=1) is layer
    assert not any(isinstance(each, Wrapped) for each in Marked().modules())


def test_a_marked_model_is_wrapped_as_torch_wraps_it():
    built = []
    for source in (sherd_wrap, torch_wrap):
        with source.enable_wrap(wrapper_cls=Wrapped, depth=0, kind="unit"):
            built.append(Marked(source.wrap))
    assert repr(built[0]) == repr(built[1])
    assert built[0].first.kwargs == {"depth": 0, "kind": "unit"}
    assert built[0].last.kwargs == {"depth": 1, "kind": "unit", "name": "last"}


def test_an_inner_enable_wrap_holds_in_its_body_only():
    with enable_wrap(wrapper_cls=Wrapped, depth=0):
        with enable_wrap(wrapper_cls=lambda module, **kwargs: module):
            assert isinstance(wrap(nn.Linear(4, 4)), nn.Linear)
        assert wrap(nn.Linear(4, 4)).kwargs == {"depth": 0}


def test_an_error_in_the_body_ends_the_wrapping():
    with pytest.raises(KeyError), enable_wrap(wrapper_cls=Wrapped):
        raise KeyError
    assert isinstance(wrap(nn.Linear(4, 4)), nn.Linear)


def test_wrapping_in_one_thread_leaves_another_alone():
    found = []
    with enable_wrap(wrapper_cls=Wrapped):
        other = threading.Thread(target=lambda: found.append(wrap(nn.Linear(4, 4))))
        other.start()
        other.join()
    assert isinstance(found[0], nn.Linear)


@on_threads(2)
def test_fully_shard_may_be_the_wrapper():
    with enable_wrap(wrapper_cls=fully_shard, reshard_after_forward=False):
        model = nn.Sequential(wrap(nn.Linear(4, 4)), nn.Linear(4, 4))
    assert [isinstance(each, FSDPModule) for each in model] == [True, False]
