"""Work with activation checkpointing is what is read from a model that checkpoints, and scaled work that of a larger
batch."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from sherd.api.recompute import KeptResults, selective_contexts
from sherd.tools.simulate.work import (
    Allocate,
    BackwardBegins,
    Enter,
    Gradient,
    Leave,
    Op,
    TensorKind,
    checkpointed,
    scaled,
)
from tests.planning import models
from tests.planning.played import assert_calls_see_what_is_alive, flops, heights, of_kind, peak, read


def numbered(work, kind):
    return [at for at, module in enumerate(work.modules) if module.kind == kind]


def by_torch(build, loss, kind, contexts=noop_context_fn):
    def built():
        model, batch = build()
        return models.Checkpointed(model, kind, context_fn=contexts), batch

    return read(built, loss)


class Residual(nn.Module):
    """Ends with what saves nothing, and begins with what does not save its input."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.sigmoid(self.up(self.norm(x.double().float()))))


def residuals():
    return nn.Sequential(*(Residual() for _ in range(4))), torch.zeros(8, 16)


CASES = {
    "decoder": (models.decoder, models.next_token, "Block"),
    "tied decoder": (models.tied_decoder, models.next_token, "Block"),
    "bfloat16 decoder": (models.bfloat16_decoder, models.next_token, "Block"),
    "feed-forward alone": (models.decoder, models.next_token, "FeedForward"),
    "llama": (models.llama, models.next_token, "LlamaDecoderLayer"),
    "gpt2": (models.gpt2, models.next_token, "GPT2Block"),
    "perceptron": (models.perceptron, models.sum_of_all, "Perceptron"),
    "residuals": (residuals, models.sum_of_all, "Residual"),
}


WITH_BIASES = ("perceptron", "residuals", "gpt2")


def assert_same_work(found, expected, name):
    # A node of autograd's graph holds what it has saved until it has run, but what was made again only until it has
    # read it: one with several operations, as the backward of a layer with a bias, takes a few bytes less.
    few = 0.01 * peak(expected) if name in WITH_BIASES else 0
    assert peak(expected) <= peak(found) <= peak(expected) + few
    assert flops(found) == flops(expected)
    assert done(found) == done(expected)
    assert kept(found) == kept(expected)


@pytest.mark.parametrize("name", CASES)
def test_checkpointed_work_is_that_of_a_model_that_checkpoints_fully_or_selectively(name):
    build, loss, kind = CASES[name]
    plain = read(build, loss)
    modules = numbered(plain, kind)
    full, selective = checkpointed(plain, modules), checkpointed(plain, modules, lambda: KeptResults().keeps)
    assert_same_work(full, by_torch(build, loss, kind), name)
    assert_same_work(selective, by_torch(build, loss, kind, selective_contexts), name)
    assert peak(full) <= peak(plain)
    assert flops(plain) <= flops(selective) < flops(full)


def done(work):
    """What is computed, and which gradients come, in order."""
    return [
        event.name if isinstance(event, Op) else event.parameter
        for event in work.events
        if isinstance(event, (Op, Gradient))
    ]


def kept(work):
    """Bytes when backward begins."""
    return heights(work)[work.events.index(BackwardBegins())]


def test_a_forward_that_runs_again_is_told_as_such():
    plain = read(models.decoder, models.next_token)
    blocks = numbered(plain, "Block")
    work = checkpointed(plain, blocks)
    end = work.events.index(BackwardBegins())
    again = [event.module for event in work.events[end:] if isinstance(event, Enter)]
    assert [module for module in again if module in blocks] == blocks[::-1]
    assert not any(event.again for event in work.events[:end] if isinstance(event, (Enter, Leave)))
    assert all(event.again for event in work.events[end:] if isinstance(event, (Enter, Leave)))
    numbers = [event.tensor for event in work.events if isinstance(event, Allocate)]
    assert len(numbers) == len({*numbers})
    assert_calls_see_what_is_alive(work)


def test_what_is_inside_of_another_or_not_reached_by_backward_is_not_checkpointed():
    work = read(models.decoder, models.next_token)
    blocks, inner = numbered(work, "Block"), numbered(work, "FeedForward")
    assert checkpointed(work, []) == work
    assert checkpointed(work, [*blocks, *inner]) == checkpointed(work, blocks)
    work = read(models.frozen, models.next_token)
    assert checkpointed(work, blocks) == checkpointed(work, blocks[2:])


class Twice(nn.Module):
    """Calls its layer twice, or checkpoints both calls."""

    def __init__(self, checkpoints):
        super().__init__()
        self.layer, self.checkpoints = Residual(), checkpoints

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=False) if self.checkpoints else self.layer(x)
        return x


def test_a_module_that_is_called_twice_is_run_again_twice():
    def build(checkpoints=False):
        return Twice(checkpoints), torch.zeros(8, 16)

    plain, expected = read(build, models.sum_of_all), read(partial(build, True), models.sum_of_all)
    assert done(checkpointed(plain, numbered(plain, "Residual"))) == done(expected)


def test_scaled_work_is_that_of_a_larger_batch_but_for_weights():
    def of(samples):
        return read(lambda: (models.decoder()[0], models.tokens(samples)), models.next_token)

    found, expected = scaled(of(2), 3), of(6)
    assert (found.samples, found.tokens) == (expected.samples, expected.tokens)
    assert found.flops == expected.flops
    assert peak(found) == pytest.approx(peak(expected), rel=0.03)
    logits = TensorKind.LOGITS
    assert sum(of_kind(found, logits)) == sum(of_kind(expected, logits))
