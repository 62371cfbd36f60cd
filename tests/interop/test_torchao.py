"""torchao's NF4 weights are sharded as they are: in 4 bits, with the values that they have in one process."""

import pytest
import torch
from torch import nn

import sherd
from sherd.errors import PlacementError
from tests.support.comparing import assert_same

nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
quantization = pytest.importorskip("torchao.quantization")

WIDTH, RANK, BLOCK, SCALES = 64, 4, 64, 16


class Adapted(nn.Module):
    """A frozen matrix in NF4, and a trained adapter beside it."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.base = nn.Linear(width, WIDTH, bias=False)
        weight = nf4.to_nf4(self.base.weight.detach(), BLOCK, SCALES)
        self.base.weight = nn.Parameter(weight, requires_grad=False)
        self.down, self.up = nn.Linear(width, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def made():
    torch.manual_seed(0)
    return nn.Sequential(Adapted(), nn.GELU(), Adapted(), nn.Linear(WIDTH, 3))


def trained(model):
    """Outputs before training, and losses."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before, losses = model(x), []
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return before, torch.tensor(losses)


def refused():
    """Rows that do not divide, and blocks of scales that do not."""
    for rows, columns, scales in ((33, 64, 33), (64, 16, 64)):
        layer = nn.Linear(columns, rows, bias=False)
        layer.weight = nn.Parameter(nf4.to_nf4(torch.randn(rows, columns), 16, scales), requires_grad=False)
        with pytest.raises(PlacementError, match=rf"weight: a NF4Tensor of shape \({rows}, .* over 2 ranks"):
            sherd.fully_shard(layer)
    for config in (
        quantization.Int8WeightOnlyConfig(),
        quantization.Float8WeightOnlyConfig(),
    ):  # no function gathers them
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16))
        quantization.quantize_(model, config)
        with pytest.raises(PlacementError, match=r"0\.weight is sparse, nested or quantized"):
            sherd.fully_shard(model)


def test_a_weight_whose_blocks_do_not_divide_or_that_nothing_gathers_is_refused_on_all_ranks(world):
    world(2).run(refused)


def on_a_rank(**options):
    model = made()
    for layer in (model[0], model[2]):
        sherd.fully_shard(layer, **options)
    sherd.fully_shard(model, **options)
    found = trained(model)
    report = sherd.memory_report(model)
    shards = {row.unit: (row.now, row.at_peak) for row in report.rows if row.kind == "shards"}
    local = model[0].base.weight.to_local()
    assert isinstance(local, nf4.NF4Tensor)
    return found, shards["0"], local.quantized_data.nbytes


@pytest.mark.values
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_model_with_nf4_weights_trains_as_in_one_process_and_shows_their_bytes(num_ranks, options, world):
    expected = trained(made())
    for found, (now, at_peak), nbytes in world(num_ranks).run(on_a_rank, **options):
        assert_same(found[0], expected[0])
        assert_same(found[1], expected[1], rtol=1e-5, atol=1e-6)
        assert nbytes == WIDTH * WIDTH // 2 // num_ranks
        assert nbytes < now == at_peak < 3 * nbytes  # with scales, and the adapter's shards
