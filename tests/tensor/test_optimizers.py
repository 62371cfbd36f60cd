"""Do the optimizers of torch.optim step ragged parameters as they step plain ones?"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.tensor.cuts import KINDS, SHAPES, cuts, line, local_like, numbers, ragged

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "maximize": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1}),
    "RMSprop centered": (torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
}
FUSED = ("SGD", "SGD momentum", "SGD nesterov", "Adam", "AdamW", "AdamW amsgrad", "Adagrad")
FORMS = [(name, form) for name in OPTIMIZERS for form in ("foreach", "for-loop")] + [(name, "fused") for name in FUSED]


def arguments(form):
    return {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}[form]


def parameters(kind, mesh, shapes=SHAPES, with_stock=False, dtype=torch.float32):
    """Plain parameters, and the same ones ragged; the second of these stock, if asked for."""
    plain = [nn.Parameter(numbers(shape, dtype)) for shape in shapes]
    mine = [
        nn.Parameter(ragged(each.detach(), cut, mesh))
        for each, cut in zip(plain, cuts(kind, shapes, mesh.size()), strict=True)
    ]
    if with_stock:
        mine[1] = nn.Parameter(distribute_tensor(plain[1].detach(), mesh, [Shard(0)]))
    return plain, mine


def give_gradients(plain, mine, step):
    for each, like in zip(mine, plain, strict=True):
        like.grad = numbers(like.shape, like.dtype, seed=step)
        if isinstance(each, DTensor) and hasattr(each, "cut"):
            each.grad = ragged(like.grad, each.cut, each.device_mesh)
        else:
            each.grad = distribute_tensor(like.grad.clone(), each.device_mesh, [Shard(0)])


def compare(kind, make, given, with_stock=False, shapes=SHAPES, dtype=torch.float32):
    mesh = line(torch.distributed.get_world_size())
    plain, mine = parameters(kind, mesh, shapes, with_stock, dtype)
    expected, optimizer = make(plain, **given), make(mine, **given)
    for step in range(2):
        give_gradients(plain, mine, step)
        expected.step()
        optimizer.step()
    for each, like in zip(mine, plain, strict=True):
        torch.testing.assert_close(each.detach().to_local(), local_like(like.detach(), each))
        for name, value in expected.state[like].items():
            if torch.is_tensor(value) and value.ndim:
                mine_of_it = optimizer.state[each][name]
                torch.testing.assert_close(mine_of_it.to_local(), local_like(value, mine_of_it))


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_an_optimizer_steps_ragged_parameters_as_plain_ones(threads, name, form):
    make, given = OPTIMIZERS[name]
    for num_ranks, kinds in ((1, ("uneven",)), (2, KINDS), (4, ("uneven",))):
        for kind in kinds:
            threads(num_ranks).run(compare, kind, make, given | arguments(form))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_complex_parameters_as_plain_ones(threads, name):
    make, given = OPTIMIZERS[name]
    for form in ("foreach", "for-loop"):
        for kind in ("uneven", "blocks", "whole"):
            threads(2).run(compare, kind, make, given | arguments(form), dtype=torch.complex64)


@pytest.mark.parametrize("form", ["foreach", "for-loop", "fused"])
def test_stock_and_ragged_parameters_step_together(threads, form):
    make, given = OPTIMIZERS["AdamW"]
    threads(2).run(compare, "uneven", make, given | arguments(form), with_stock=True)


MATRICES = ((6, 4), (3, 5), (4, 4), (5, 2))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_muon_steps_whole_matrices(threads, num_ranks):
    for kind in ("whole", "last"):
        threads(num_ranks).run(compare, kind, torch.optim.Muon, {"lr": 0.1}, shapes=MATRICES)


@pytest.mark.parametrize("foreach", [True, False])
def test_adafactor_steps_whole_tensors(threads, foreach):
    shapes = (*MATRICES, (5,), (), (2, 3, 4))
    for num_ranks in (1, 2, 3):
        for kind in ("whole", "last"):
            threads(num_ranks).run(compare, kind, torch.optim.Adafactor, {"lr": 0.1, "foreach": foreach}, shapes=shapes)


def adafactor_on_pieces(kind):
    mesh = line(2)
    plain, mine = parameters(kind, mesh, ((6, 4),))
    optimizer = torch.optim.Adafactor(mine, foreach=False)
    give_gradients(plain, mine, 0)
    optimizer.step()


@pytest.mark.parametrize("kind", ["uneven", "rows"])
def test_adafactor_on_a_matrix_in_pieces_says_to_use_whole(threads, kind):
    with pytest.raises(Exception, match=r"PlacementError(.|\n)*with placement Owned\(\) each tensor has one owner"):
        threads(2).run(adafactor_on_pieces, kind)
