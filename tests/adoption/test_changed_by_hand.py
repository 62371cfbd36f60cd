"""A model that was tied, or lost a parameter, after sharding is not trained as if nothing had happened."""

import torch
from torch import nn

import sherd
from sherd.errors import OwnershipError, SherdError
from tests.adoption.adapters import Tied, assert_alike, inner, sgd, steps
from tests.support.models import noise
from tests.support.ranks.bodies import on_threads
from tests.support.refusals import refusal
from tests.support.sharding import FRONTS, sharded


def tie(model: nn.Module) -> None:
    inner(inner(model).head).weight = inner(inner(model).embed).weight


def delete(model: nn.Module) -> None:
    del inner(inner(model).head).bias


def set_to_none(model: nn.Module) -> None:
    inner(inner(model).head).bias = None


CHANGES = {
    tie: "head.weight was tied to embed.weight",
    delete: "head.bias was deleted",
    set_to_none: "head.bias was deleted",
}


@on_threads(2)
def test_weights_tied_and_parameters_deleted_after_sharding_are_refused_until_refreshed() -> None:
    for front in FRONTS:
        for change, said in CHANGES.items():
            if front == "flat wrapper" and change is not tie:
                continue  # the module's own attribute hides the change, in torch's FSDP1 too
            for in_units in (True, False):
                row, plain, model = (front, change.__name__, in_units), Tied(), Tied()
                model = sharded(model, front, None if in_units else [model])
                change(model)
                found = refusal(OwnershipError, model, noise(0, 0))
                assert said in found, row
                assert "sherd.refresh(model)" in found, row
                if front == "flat wrapper":
                    continue
                sherd.refresh(model)
                change(plain)
                if change is delete:  # as a layer without a bias has it
                    plain.head.bias = inner(inner(model).head).bias = None
                steps(model, sgd(model))
                steps(plain, sgd(plain), of_all=True)
                assert_alike(model, plain)


@on_threads(2)
def test_a_parameter_changed_while_the_unit_rests_unsharded_is_named() -> None:
    for change in CHANGES:
        model = sharded(Tied(), reshard_after_forward=False)
        with torch.no_grad():
            model(noise(0, 0))
        change(model)
        assert "head." in refusal(SherdError, model.head.reshard), change
