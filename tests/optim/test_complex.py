"""Complex parameters train under every placement as in one process."""

import pytest
import torch
from torch import nn

from sherd import flatten_optimizer
from tests.support.models import Wired
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import FRONTS, sharded
from tests.support.training import made


def wave():
    """A complex matrix and a complex vector, neither of which divides evenly, and real ones."""
    matrix, vector = (nn.Parameter(torch.randn(*shape, dtype=torch.complex128)) for shape in ((5, 3), (3,)))
    parts = {"matrix": matrix, "vector": vector, "real": nn.Linear(3, 3, dtype=torch.float64)}
    return Wired(lambda self, x: self.real((x @ self.matrix + self.vector).abs()), **parts)


OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "AdamW for-loop": (torch.optim.AdamW, {"lr": 0.1, "foreach": False}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def losses_of(model, optimizer):
    found = []
    for step in range(3):
        x = torch.linspace(-1, 1, 20, dtype=torch.complex128).view(4, 5) * (step + 1)
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


# A flat parameter has one dtype.
@pytest.mark.parametrize(("front", "flatten"), [*((front, False) for front in FRONTS[:-1]), ("wrapper", True)])
@on_threads(2)
def test_complex_parameters_train_under_every_placement(front, flatten):
    for make, given in OPTIMIZERS.values():
        plain, model = made(wave), made(wave)
        model = sharded(model, front, units=[model])
        optimizer = make(model.parameters(), **given)
        optimizer = flatten_optimizer(optimizer) if flatten else optimizer
        assert losses_of(model, optimizer) == pytest.approx(losses_of(plain, make(plain.parameters(), **given)))
