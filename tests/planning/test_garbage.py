"""Garbage is left alone inside of the context only, and what others have frozen is left frozen."""

import gc

import pytest

from sherd.tools.simulate.search import garbage_left


@pytest.fixture
def nothing_frozen():
    """Whatever this session has frozen is so again afterwards."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


def made():
    return [[number] for number in range(10_000)]


def test_nobody_looks_for_garbage_inside_and_then_all_is_old(nothing_frozen):
    with garbage_left():
        assert not gc.isenabled()
        with garbage_left():
            pass
        assert not gc.isenabled(), "the outer context still lasts"
        kept = made()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert any(each is kept for each in gc.get_objects(generation=2))


def test_what_is_frozen_stays_so_and_an_error_ends_it(nothing_frozen):
    frozen = made()
    gc.freeze()
    with garbage_left():
        made()
    assert not any(each is frozen for each in gc.get_objects()), "of all generations"
    with pytest.raises(ZeroDivisionError), garbage_left():
        1 / 0  # noqa: B018
    assert gc.isenabled()
