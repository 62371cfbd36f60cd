"""The optimizers of torch.optim step ragged parameters as they step plain ones."""

import functools
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from tests.optim.classes import CLASSES, FORMS, maker
from tests.support.comparing import whole
from tests.tensor.cuts import KINDS, SHAPES, numbers, whole_of
from tests.tensor.grids import FOUR, GRIDS, LINES, Grid, placements_of, ragged_on


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


MATRICES = ((6, 4), (3, 5), (4, 4), (5, 2))
# On an axis of one rank a tensor is sharded by name only.
OWNERS = [*list(LINES.values())[:3], FOUR["tp copies"], FOUR["two axes"], Grid((2, 1), (None, 0), (0,))]


@pytest.mark.parametrize("grid", OWNERS, ids=str)
def test_an_owner_steps_whole_matrices_wherever_it_has_them(threads, grid):
    # Adafactor makes statistics of rows, which are at the owner too.
    others = (*MATRICES, (5,), (), (2, 3, 4))
    steps = [(functools.partial(torch.optim.Muon, lr=0.1), MATRICES)]
    steps += [(functools.partial(torch.optim.Adafactor, lr=0.1, foreach=each), others) for each in (True, False)]
    ways = list(product(("whole", "last"), steps))
    for kind, (make, shapes) in ways if grid in LINES.values() else ways[::4]:
        threads(grid.num_ranks).run(compare, grid, kind, make, shapes=shapes)


def test_a_matrix_that_no_rank_owns_is_refused(threads):
    adafactor = functools.partial(torch.optim.Adafactor, foreach=False)
    for kind in ("uneven", "rows"):
        with pytest.raises(Exception, match=r"PlacementError(.|\n)*with placement Owned\(\) each tensor has one owner"):
            threads(2).run(compare, LINES["2 in a row"], kind, adafactor, shapes=MATRICES)
    for name in ("tp columns", "tp rows"):
        with pytest.raises(Exception, match=r"PlacementError(.|\n)*any operation, if no other axis of .* shards it"):
            threads(4).run(compare, FOUR[name], "whole", torch.optim.Muon, shapes=MATRICES)
