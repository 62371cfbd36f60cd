"""A mixture of experts is what its formulas say, and the same when its experts are on several ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sherd.train.config import ModelConfig
from sherd.train.experts import Experts, MixtureOfExperts, ToExperts, imbalance
from sherd.train.sequence import CutSequence, WholeSequence
from tests.support.models import noise
from tests.support.ranks.bodies import on_processes
from tests.support.training import made

MODEL = ModelConfig(width=8, hidden=12, experts=4, top_k=2)


def mixture():
    layer = made(lambda: MixtureOfExperts(MODEL))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def test_each_token_gets_the_weighted_sum_of_its_likeliest_experts():
    layer, x = mixture().eval(), noise(0, 0, 3, 5, 8)
    expected = torch.zeros_like(x)
    for sample in range(3):
        for place in range(5):
            token = x[sample, place]
            probabilities = (layer.router.weight @ token).softmax(0).tolist()
            for expert in sorted(range(4), key=lambda e: -probabilities[e])[:2]:
                gate, up, down = (getattr(layer.experts, name)[expert] for name in ("gate", "up", "down"))
                expected[sample, place] += probabilities[expert] * (down @ (F.silu(gate @ token) * (up @ token)))
    torch.testing.assert_close(layer(x), expected)


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    experts = mixture().experts
    experts(noise(0, 0, 5, 8), torch.tensor([2, 0, 3, 0])).sum().backward()
    for parameter in experts.parameters():
        assert [bool(each.any()) for each in parameter.grad] == [True, False, True, False]


def test_imbalance_is_one_for_even_shares_and_their_number_when_one_expert_gets_all():
    even = torch.full((2, 4, 4), 0.25)
    in_turn = torch.arange(4).view(1, 4, 1).repeat(2, 1, 1)
    assert imbalance(even, in_turn, WholeSequence()).item() == pytest.approx(1)
    sure = F.one_hot(torch.zeros(2, 4, dtype=torch.int64), 4).float()
    assert imbalance(sure, torch.zeros(2, 4, 1, dtype=torch.int64), WholeSequence()).item() == pytest.approx(4)


def test_the_loss_of_uneven_experts_is_added_to_any_loss_and_only_while_training():
    x, given = noise(0, 0, 3, 5, 8), noise(1, 0, 3, 5, 8)
    for training in (True, False):
        layer, plain = mixture().train(training), mixture().eval()
        (layer(x) * given).sum().backward()
        probabilities = plain.router(x)
        chosen = probabilities.topk(2, dim=-1).indices
        # Written out: of each sample by itself.
        loss = 0.0
        for sample in range(3):
            shares = torch.bincount(chosen[sample].flatten(), minlength=4) / 10
            loss = loss + 4 * (shares * probabilities[sample].mean(0)).sum() / 3
        ((plain(x) * given).sum() + training * MODEL.balance * loss).backward()
        for one, other in zip(layer.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("num_ranks", [2, 4])
@on_processes()
def test_experts_on_several_ranks_get_the_rows_of_all_and_send_back_outputs_and_gradients():
    """As through all experts on this rank."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (num_ranks,))
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(4, *shape, generator=generator) / 3 for shape in ((12, 8), (12, 8), (8, 12))]
    # Rank 0 has no rows for expert 1, the last rank has none at all.
    counts = torch.randint(5, (num_ranks, 4), generator=generator)
    counts[0, 1], counts[-1] = 0, 0
    rows = [torch.randn(int(each.sum()), 8, generator=generator) for each in counts]
    share = slice(rank * 4 // num_ranks, (rank + 1) * 4 // num_ranks)
    found = []
    for local in (True, False):
        experts = Experts(MODEL)
        if local:
            experts.exchange = ToExperts(mesh)
        for name, weight in zip(("gate", "up", "down"), weights, strict=True):
            setattr(experts, name, torch.nn.Parameter(weight[share] if local else weight.clone()))
        mine = [rank] if local else range(num_ranks)
        inputs = {each: rows[each].clone().requires_grad_() for each in mine}
        outputs = {each: experts(inputs[each], counts[each]) for each in mine}
        sum((outputs[each] ** 2).sum() for each in mine).backward()
        grads = [parameter.grad if local else parameter.grad[share] for parameter in experts.parameters()]
        found.append([outputs[rank], inputs[rank].grad, *grads])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("num_ranks", [2, 4])
@on_processes()
def test_attention_over_parts_of_a_sequence_is_that_over_the_whole_with_its_gradients():
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (num_ranks,))
    q, k, v = (noise(3, number, 2, heads, 8, 4).requires_grad_() for number, heads in enumerate((4, 2, 2)))
    whole = WholeSequence().attend(q, k, v)
    whole.square().sum().backward()
    length = 8 // num_ranks
    here = slice(rank * length, (rank + 1) * length)
    parts = [each.detach()[:, :, here].requires_grad_() for each in (q, k, v)]
    sequence = CutSequence(mesh, None)
    part = sequence.attend(*parts)
    part.square().sum().backward()
    assert sequence.span(length) == range(here.start, here.stop)
    assert sequence.mean(torch.tensor([float(rank)])).item() == (num_ranks - 1) / 2
    expected = [each[:, :, here] for each in (whole, q.grad, k.grad, v.grad)]
    torch.testing.assert_close([part, *(each.grad for each in parts)], expected)
