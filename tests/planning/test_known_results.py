"""The results that are made anew are those that torch's rules on meta would make."""

import pytest
import torch
from torch import nn

from sherd.tools.plan.operations import KnownResults
from sherd.tools.plan.reading import read_work
from tests.planning import models

ATEN = torch.ops.aten


def on_meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def form(result):
    if isinstance(result, (tuple, list)):
        return [form(each) for each in result]
    return result.shape, result.stride(), result.dtype, result.storage_offset(), result.untyped_storage().nbytes()


CALLS = {
    "a product": (ATEN.mm.default, lambda: (on_meta(4, 8), on_meta(8, 3)), {}),
    "a transposed argument": (ATEN.add.Tensor, lambda: (on_meta(4, 8).t(), on_meta(4, 8).t()), {}),
    "one expanded": (ATEN.mul.Tensor, lambda: (on_meta(4, 8), on_meta(1, 8).expand(4, 8)), {}),
    "several results": (ATEN.native_layer_norm.default, lambda: (on_meta(4, 8), [8], None, None, 1e-5), {}),
    "a list": (ATEN.cat.default, lambda: ([on_meta(4, 8), on_meta(2, 8)], 0), {}),
    "another dtype": (ATEN._to_copy.default, lambda: (on_meta(4, 8),), {"dtype": torch.bfloat16}),
    "a parameter": (ATEN.exp.default, lambda: (nn.Parameter(on_meta(4, 8)),), {}),
    "no dims": (ATEN.sum.default, lambda: (on_meta(4, 8),), {}),
}


def test_a_result_is_as_torch_makes_it(monkeypatch):
    known = KnownResults()
    expected = {}
    for name, (func, args, kwargs) in CALLS.items():
        expected[name] = form(func(*args(), **kwargs))
        assert form(known.of(func, args(), kwargs)) == expected[name], name
    monkeypatch.setattr(type(ATEN.mm.default), "__call__", forbidden)
    monkeypatch.setattr("sherd.tools.plan.operations._EMPTY", torch.empty_strided)
    for name, (func, args, kwargs) in CALLS.items():
        given = [known.of(func, args(), kwargs) for _ in range(2)]
        assert [form(each) for each in given] == [expected[name]] * 2, name
        first, second = (each[0] if isinstance(each, tuple) else each for each in given)
        assert first.untyped_storage() is not second.untyped_storage()


def forbidden(*_, **__):
    raise AssertionError("it was called once before")


NEVER = {
    "a view": (ATEN.view.default, lambda x: (x, [8, 4])),
    "a view whose schema hides it": (ATEN._unsafe_view.default, lambda x: (x, [8, 4])),
    "in place": (ATEN.add_.Tensor, lambda x: (x, x)),
}


def test_what_returns_memory_of_an_argument_is_called_each_time():
    for name, (func, args) in NEVER.items():
        known = KnownResults()
        for _ in range(3):
            x = on_meta(4, 8)
            assert known.of(func, args(x), {}).untyped_storage()._cdata == x.untyped_storage()._cdata, name


def test_shapes_strides_dtypes_and_types_of_numbers_tell_arguments_apart_and_values_are_computed_with():
    known = KnownResults()
    for x in (on_meta(4, 8), on_meta(8, 4), on_meta(8, 4).t(), on_meta(4, 8, dtype=torch.float16), on_meta(4, 8)):
        assert form(known.of(ATEN.exp.default, (x,), {})) == form(ATEN.exp.default(x))
    for values in ((1, 1.5), (1, 1.0), (True, 1), (1.0, 1)):
        known = KnownResults()
        for value in values:
            x = on_meta(4, dtype=torch.bool)
            assert known.of(ATEN.add.Scalar, (x, value), {}).dtype == ATEN.add.Scalar(x, value).dtype, values
    known = KnownResults()
    for value in (1.0, 2.0):
        assert known.of(ATEN.exp.default, (torch.tensor(value),), {}) == torch.tensor(value).exp()


@pytest.mark.parametrize("name", models.ALL)
def test_the_work_that_is_read_is_the_same(name, monkeypatch):
    build, loss = models.ALL[name]
    with torch.device("meta"):
        found = read_work(*build(), loss)
        monkeypatch.setattr(KnownResults, "of", lambda _, func, args, kwargs: func(*args, **kwargs))
        assert found == read_work(*build(), loss)


def test_no_more_than_so_many_are_known(monkeypatch):
    monkeypatch.setattr("sherd.tools.plan.operations.MOST_KNOWN", 2)
    known = KnownResults()
    for size in (1, 2, 3, 1, 3):
        assert known.of(ATEN.exp.default, (on_meta(size),), {}).shape == (size,)
        assert len(known._forms) <= 2
