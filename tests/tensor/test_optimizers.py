"""The optimizers of torch.optim step ragged parameters as they step plain ones."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from tests.optim.classes import CLASSES, FORMS, maker
from tests.support.comparing import whole
from tests.tensor.cuts import KINDS, SHAPES, numbers, whole_of
from tests.tensor.grids import GRIDS, LINES, placements_of, ragged_on


def compare(grid, kind, make, with_stock=False, shapes=SHAPES, dtype=torch.float32):
    """Two steps beside those of plain parameters; on several axes each gradient is clipped before. The second parameter
    is stock, if asked for."""
    mesh = grid.mesh()

    def laid(value, index):
        if with_stock and index == 1:
            placements = [Shard(0)] if mesh.ndim == 1 else placements_of(grid, value.shape)
            return distribute_tensor(value, mesh, placements, src_data_rank=None)
        return ragged_on(grid, mesh, kind, value)

    plain = [nn.Parameter(numbers(shape, dtype)) for shape in shapes]
    mine = [nn.Parameter(laid(each.detach().clone(), index)) for index, each in enumerate(plain)]
    expected, optimizer = make(plain), make(mine)
    for step in range(2):
        for index, (each, like) in enumerate(zip(mine, plain, strict=True)):
            like.grad = numbers(like.shape, dtype, seed=step)
            each.grad = laid(like.grad.clone(), index)
            if mesh.ndim > 1:
                norms = [nn.utils.clip_grad_norm_(one, 1.0, norm_type=2.0 + step) for one in (each, like)]
                torch.testing.assert_close(whole_of(norms[0]), norms[1])
        expected.step()
        optimizer.step()
    for index, (each, like) in enumerate(zip(mine, plain, strict=True)):
        torch.testing.assert_close(each.detach().to_local(), laid(like.detach(), index).to_local())
        for name, value in expected.state[like].items():
            if torch.is_tensor(value) and value.ndim:
                found = optimizer.state[each][name]
                if value.shape == like.shape:  # without a collective
                    found, value = found.to_local(), laid(value, index).to_local()
                torch.testing.assert_close(whole(found), value)


@pytest.mark.parametrize(("name", "form"), [(name, form) for form, names in FORMS.items() for name in names])
def test_an_optimizer_steps_ragged_parameters_as_plain_ones(threads, name, form):
    for line, kinds in (("1 in a row", KINDS[:1]), ("2 in a row", KINDS), ("4 in a row", KINDS[:1])):
        for kind in kinds:
            threads(LINES[line].num_ranks).run(compare, LINES[line], kind, maker(name, form))


@pytest.mark.parametrize("name", CLASSES)
def test_an_optimizer_steps_complex_parameters_as_plain_ones(threads, name):
    for form, kind in product(("foreach", "for-loop"), ("uneven", "blocks", "whole")):
        threads(2).run(compare, LINES["2 in a row"], kind, maker(name, form), dtype=torch.complex64)


STEPS = [("AdamW", "foreach"), ("AdamW", "fused"), ("NAdam", "for-loop"), ("SGD momentum", "fused")]
ON_GRIDS = [
    *(("2 in a row", "AdamW", form) for form in FORMS),
    *(("tp columns", *step) for step in STEPS),
    *(("tp rows", *step) for step in STEPS[::2]),
    *(("two axes", *step) for step in STEPS[:2]),
    *(("two axes and columns", *step) for step in STEPS[2:]),
]


@pytest.mark.parametrize(("on", "name", "form"), ON_GRIDS)
def test_stock_and_ragged_parameters_step_together_on_any_axes(threads, on, name, form):
    kind = "blocks" if on == "tp rows" else "uneven"
    with_stock = (name, form) != ("SGD momentum", "fused")  # which takes no DTensors of torch
    threads(GRIDS[on].num_ranks).run(compare, GRIDS[on], kind, maker(name, form), with_stock)
