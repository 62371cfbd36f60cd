"""What is read of any model, put together at random, is what a real step on the CPU takes."""

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.utils.checkpoint import checkpoint

from sherd.tools.simulate.work import Allocate, Enter, checkpointed
from tests.planning.models import Calls, MultiHead, sum_of_all
from tests.planning.played import flops, heights, measured, peak, read
from tests.support.suites import examples

WIDTH = 16


class Attention(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.all, self.out, self.mask = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mask

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.all(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril() if self.mask else None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not self.mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Around(nn.Module):
    """What is done with the module inside: its input added, gated by it, checkpointed, called twice."""

    def __init__(self, way, inner):
        super().__init__()
        self.way, self.inner = way, inner

    def forward(self, x):
        match self.way:
            case "residual":
                return x + self.inner(x)
            case "gate":
                return x * torch.sigmoid(self.inner(x))
            case "checkpoint":
                return checkpoint(self.inner, x, use_reentrant=False)
            case "reentrant":
                return checkpoint(self.inner, x, use_reentrant=True)
            case "twice":
                return self.inner(self.inner(x))
            case "frozen":
                self.inner.requires_grad_(False)
                return self.inner(x)


LEAVES = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "batch norm": lambda: Transposed(nn.BatchNorm1d(WIDTH)),
    "convolution": lambda: Transposed(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "dropout": lambda: nn.Dropout(0.2),
    "relu": lambda: nn.ReLU(),
    "in place": lambda: Calls(lambda x: (x * 2).add_(1).clamp_(-1, 1)),
    "softmax": lambda: nn.Softmax(-1),
    "silu": lambda: nn.SiLU(),
    "identity": lambda: nn.Identity(),
    "attention": lambda: Attention(mask=False),
    "masked attention": lambda: Attention(mask=True),
    "multi-head": lambda: MultiHead(WIDTH),
}


class Transposed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        # Contiguous, for torch's meta kernels of some operations, as of batch norm, tell other strides than the CPU's.
        return self.inner(x.transpose(1, 2).contiguous()).transpose(1, 2).contiguous()


WAYS = ("residual", "gate", "checkpoint", "reentrant", "twice", "frozen")
programs = st.recursive(
    st.sampled_from(sorted(LEAVES)),
    lambda inner: st.lists(inner, min_size=1, max_size=4) | st.tuples(st.sampled_from(WAYS), inner),
    max_leaves=8,
)


def built(program):
    if isinstance(program, str):
        return LEAVES[program]()
    if isinstance(program, tuple):
        return Around(program[0], built(program[1]))
    return nn.Sequential(*(built(each) for each in program))


def builder(program):
    def build():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), built(program), nn.Linear(WIDTH, WIDTH))
        return model, torch.zeros(3, 10, WIDTH)

    return build


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@settings(max_examples=examples(15), suppress_health_check=list(HealthCheck))
@given(programs)
def test_memory_and_operations_of_any_model_are_those_of_a_real_step(program):
    work = read(builder(program), sum_of_all)
    nbytes, operations = measured(builder(program), sum_of_all)
    assert peak(work) == pytest.approx(nbytes, rel=0.03)
    assert flops(work) == operations


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@settings(max_examples=examples(15), suppress_health_check=list(HealthCheck))
@given(programs, st.data())
def test_any_module_can_be_checkpointed(program, data):
    work = read(builder(program), sum_of_all)
    calls = sorted({event.module for event in work.events if isinstance(event, Enter)})
    chosen = data.draw(st.sets(st.sampled_from(calls)))
    again = checkpointed(work, chosen)
    assert min(heights(again)) == 0
    assert flops(again) >= flops(work)
    numbers = [event.tensor for event in again.events if isinstance(event, Allocate)]
    assert len(numbers) == len(set(numbers))
